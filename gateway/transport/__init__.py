"""Sockets without protocols: streams over TCP, TLS and WebSocket, and the poller that reads them.

Listeners and links share this package. It handles bytes and readiness, and interprets no application
protocol.
"""
