"""Which message goes where, in which shape and with which guarantee, as mapping files say it.

`load` reads the files, a `Router` answers from them per address; no clock, socket or log is touched.
"""

from gateway.mapping.loading import Mapping, load, parse

__all__ = ["Mapping", "load", "parse"]
