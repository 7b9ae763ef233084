"""Message ids for messages that have none, of routes with `message_id: add`.

Whoever publishes sends a message again when it does not know whether it arrived; a receiver tells such a
repeat from another message by its id. The id is given where a route makes the target's message. From there on
that message is one object, or one row of an outbox, however often it is sent, so the id stays with it: over
reconnections, and with `settle: stored` over restarts. It makes the properties of each message different, so
that they are encoded for each anew; routes that do not ask for it pay nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gateway.mapping.routes import AmendingRoute, ResolvedRoute
from gateway.model.properties import Properties


class IdentifyingRoute(AmendingRoute):
    """A resolved route, and the next of `ids` for each message that has crossed and has none."""

    __slots__ = ("_ids",)

    def __init__(self, inner: ResolvedRoute, ids: Iterator[str]) -> None:
        super().__init__(inner)
        self._ids = ids

    def amended(self, stated: Properties) -> Properties:
        return stated if stated.message_id else replace(stated, message_id=next(self._ids))
