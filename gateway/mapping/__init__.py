"""Mapping files: rules for where each message goes, in which shape and with which guarantee.

`load` reads the files, a `Router` resolves the routes of each address. The package uses no clock, socket or
log.
"""

from gateway.mapping.loader import Mapping, load, parse

__all__ = ["Mapping", "load", "parse"]
