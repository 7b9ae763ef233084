"""MQTT listeners: connections of clients on the embedded broker.

`admission.py` processes CONNECT and AUTH, `connection.py` all other packets and the deliveries of a session.
`ingress.py` is the source of a listener's batches, and publishes wills. Subscriptions, sessions and retained
messages are in `gateway.broker.mqtt`.
"""
