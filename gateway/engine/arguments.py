"""Queue type arguments of the queues that the engine declares for clients and outboxes.

Without a delivery limit a quorum queue puts requeued messages behind all others, and from RabbitMQ 4.0 on it
has a default limit of 20 and drops messages that are redelivered more often. With an explicit limit it keeps
requeued messages at their old positions. So each quorum queue gets a limit that is never reached.
"""

from __future__ import annotations

from typing import Final

from gateway.model.properties import Headers, Value, ValueType, string
from gateway.settings.engine import RabbitEngine

NEVER: Final = 0x7FFF_FFFF


def type_arguments(settings: RabbitEngine) -> Headers:
    """Return the declaration arguments for a queue of the configured type (quorum or classic).

    A quorum queue gets a delivery limit that is never reached.
    """
    kind = ("x-queue-type", string(settings.queue_type))
    if settings.queue_type == "classic":
        return (kind,)
    return kind, ("x-delivery-limit", Value(ValueType.INT64, NEVER))
