"""Sockets in: listeners, the connections that they accept, and what each protocol's commands do on the
broker.
"""
