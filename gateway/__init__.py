"""Protocol gateway and bridge between MQTT, AMQP 0-9-1 and AMQP/Fast."""

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec

__version__ = "0.1.0"


def is_compiled() -> bool:
    """Return True if the code on the message path is compiled (deploy/compile.py).

    Return False if it is interpreted.
    """
    found = find_spec("gateway.broker.dispatcher")
    return found is not None and (found.origin or "").endswith(tuple(EXTENSION_SUFFIXES))
