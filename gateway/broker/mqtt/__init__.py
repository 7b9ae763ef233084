"""MQTT's namespace in the broker: subscriptions, sessions that outlive their connections, retained messages.

`namespace.py` is the topic tree with its sessions. Sessions, retained messages, wills and shared
subscriptions have modules of their own; the connections of clients are in `gateway.ingress.mqtt`.
"""
