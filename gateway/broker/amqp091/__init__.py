"""AMQP 0-9-1's namespace in the broker: virtual hosts with exchanges, bindings and queues.

`virtual_host.py` declares, binds and deletes them with RabbitMQ's rules. Exchanges, queues, dead-lettering,
policies and the configuration's declarations have modules of their own; the connections of clients are in
`gateway.ingress.amqp091`.
"""
