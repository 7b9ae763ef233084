"""AMQP/Fast 0.7c0 (AMQ RFC 006): codec, the state machines of both sides, and translation.

Pure functions of octets: nothing here does I/O, reads a clock or knows another protocol.
"""
