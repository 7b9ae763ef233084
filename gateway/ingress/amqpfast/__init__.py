"""AMQP/Fast listeners: connections, channels and handles of clients on the embedded broker.

`connection.py` processes the events of the protocol machine, `commands.py` has one action per command, and
`channel.py` the state of channels, handles and consumers. `publisher.py` turns SENDs into messages, and
`incoming_transfers.py` and `large_deliveries.py` transfer large messages. The virtual hosts with their queues
and topics are in `gateway.broker.amqpfast`.
"""
