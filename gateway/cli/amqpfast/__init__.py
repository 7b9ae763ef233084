"""AMQP/Fast's part of `gateway publish` and `gateway subscribe`: files, transactions and peer services.

The blocking clients of `gateway.clients` support none of these.
"""
