"""AMQP 0-9-1 with RabbitMQ's extensions: codec, the state machines of both ends, and translation.

The package consists of pure functions of bytes. It does no I/O, reads no clock and knows no other protocol.
"""
