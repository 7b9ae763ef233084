"""Of which type the queues of clients are.

A quorum queue that has no delivery limit puts what it is given back behind everything else, and from RabbitMQ
4.0 on it has one of twenty and drops what has come back more often. With a limit of its own what is given
back stands where it was; so each has one that is never reached.
"""

from __future__ import annotations

from typing import Final

from gateway.model.properties import Headers, Value, ValueType, string
from gateway.settings.engine import RabbitEngine

NEVER: Final = 0x7FFF_FFFF


def type_arguments(settings: RabbitEngine) -> Headers:
    """The arguments that say so."""
    kind = ("x-queue-type", string(settings.queue_type))
    if settings.queue_type == "classic":
        return (kind,)
    return kind, ("x-delivery-limit", Value(ValueType.INT64, NEVER))
