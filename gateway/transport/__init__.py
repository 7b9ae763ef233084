"""Sockets without protocols: streams over TCP, TLS and WebSocket, and the poller that feeds them.

Listeners and links share it; it knows bytes and readiness, never what they mean.
"""
