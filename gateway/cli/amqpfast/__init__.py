"""AMQP/Fast's part of `publish` and `subscribe`: files, transactions and peer services.

The blocking clients of `gateway.clients` have none of these.
"""
