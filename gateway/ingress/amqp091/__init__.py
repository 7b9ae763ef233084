"""AMQP 0-9-1 listeners: executing client methods on the embedded broker, and sending confirms and returns."""
