"""A fourth protocol, STOMP 1.2 as far as it is useful here: what it takes to add one to the gateway.

`protocol/` is what would be its folder under `gateway/protocols`, `ingress.py` and `namespace.py` are its two
files; `plugin/` is the entry point by which it is found. Nothing else knows of it.
"""
