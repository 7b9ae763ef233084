"""AMQP/Fast 0.7c0 (AMQ RFC 006): codec, the state machines of both ends, and translation.

The package consists of pure functions of bytes. It does no I/O, reads no clock and knows no other protocol.
"""
