"""Message ids for messages that have none, on routes with `message_id: add`.

A publisher that does not know if a message arrived sends it again; a receiver distinguishes such a repeat
from another message by its id. The id is added where a route creates the target's message. From there on
that message is one object, or one row of an outbox, however often it is sent, so the id stays with it: over
reconnections, and with `settle: stored` over restarts. The id makes the properties of each message different,
so that they are encoded for each message separately; routes without `message_id: add` pay nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gateway.mapping.routes import AmendingRoute, ResolvedRoute
from gateway.model.properties import Properties


class IdentifyingRoute(AmendingRoute):
    """Resolved route that adds a message id to each delivered message that has none.

    The iterator `ids` yields the message ids.
    """

    __slots__ = ("_ids",)

    def __init__(self, inner: ResolvedRoute, ids: Iterator[str]) -> None:
        super().__init__(inner)
        self._ids = ids

    def amended(self, stated: Properties) -> Properties:
        """Return the properties with the next message id, or `stated` if they already have a message id."""
        return stated if stated.message_id else replace(stated, message_id=next(self._ids))
