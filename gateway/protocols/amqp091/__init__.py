"""AMQP 0-9-1 with RabbitMQ's extensions: codec, the state machines of both sides, and translation.

Pure functions of octets: nothing here does I/O, reads a clock or knows another protocol.
"""
