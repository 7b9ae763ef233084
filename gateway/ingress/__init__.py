"""Listeners: accepting connections, admitting clients, and executing their commands on the broker.

The modules here are common to all protocols: sockets, connection limits, logins, and the base classes of
connections and batch sources. Each protocol has a sub-package; `front` has the layers in front of a protocol
(TLS, WebSocket, PROXY protocol, shared ports). Decoding and encoding is in gateway.protocols, queues and
sessions are in gateway.broker.
"""
