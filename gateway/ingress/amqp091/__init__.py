"""AMQP 0-9-1 listeners: connections and channels of clients on the embedded broker.

`admission.py` authenticates clients, `connection.py` processes the events of the protocol machine,
`methods.py` has one action per method, and `channel.py` the state of channels, consumers and transactions.
`ingress.py` is the source of a listener's batches. Exchanges and queues are in `gateway.broker.amqp091`.
"""
