"""What `publish` and `subscribe` do at an AMQP/Fast server. Of files, transactions and peer services the
blocking clients of `gateway.clients` know nothing.
"""
