"""Composition root of the gateway: the only package that imports every other one.

It builds listeners, links, broker and HTTP interface from the settings, runs them, drains and stops them, and
reloads mappings, users and roles. `Gateway` is one process; `gateway/app/workers.py` runs several of them on
one machine. Protocols, routing and storage are in other packages.
"""

from gateway.app.gateway import Gateway
from gateway.app.process import run, tune_collector

__all__ = ["Gateway", "run", "tune_collector"]
