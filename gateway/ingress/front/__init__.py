"""What stands before a protocol on a listening port: TLS and WebSocket, headers of the PROXY protocol, and
one port that several listeners share.
"""
