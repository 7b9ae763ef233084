"""Layers in front of a listener's protocol: TLS, WebSocket, PROXY protocol headers, and shared ports."""
