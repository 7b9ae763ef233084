"""Protocol-independent model of a message: message, properties, addresses, batch and settlement.

All higher layers use these classes; nothing here does I/O or knows a protocol. Code that several protocols
share, though none may import another, is here too (`beats`).
"""
