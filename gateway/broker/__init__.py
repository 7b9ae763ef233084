"""Embedded broker: one queue implementation, a namespace for each protocol over it, and the dispatcher.

The broker needs no remote broker. Only mapping routes join its namespaces: the dispatcher (dispatcher.py)
takes each published message to its own namespace and through the routes that match. Each protocol has a
folder with its namespace; the sockets are in `gateway.ingress`, and what is stored on disk is in
`gateway.store`.
"""
