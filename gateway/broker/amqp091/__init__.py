"""AMQP 0-9-1's namespace in the broker: virtual hosts with exchanges, bindings and queues."""
