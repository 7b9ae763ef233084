"""What a message is, in no protocol's form: message, properties, addresses, batch and settlement.

Everything above speaks in these words; nothing here does I/O or knows a protocol. What several protocols do
alike, though none may import another, is here too (`beats`).
"""
