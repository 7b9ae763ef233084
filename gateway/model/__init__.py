"""What a message is, in no protocol's form: message, properties, addresses, batch and settlement.

Everything above speaks in these words; nothing here does I/O or knows a protocol.
"""
