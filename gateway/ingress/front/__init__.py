"""Layers in front of a listener's protocol: TLS, WebSocket, PROXY protocol headers, and shared ports.

`layers.py` reads the configuration of the layers. `pending.py` owns a connection until its protocol begins,
`proxy_header.py` waits for a balancer's header, and `shared_port.py` detects the protocol on a port that
several listeners share. The filters for TLS and WebSocket are in `gateway.transport`.
"""
