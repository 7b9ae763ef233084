"""Message ids for messages that have none, on routes with `message_id: add`.

A publisher that does not know if a message arrived sends it again; a receiver distinguishes such a repeat
from another message by its id. The id is added where a route creates the target's message. This message is
then one object, or one row of an outbox, however often it is sent. It thus has the same id after
reconnections, and with `settle: stored` also after restarts. Because of the id, the properties of each
message are different, and are encoded for each message separately; this costs nothing on routes without
`message_id: add`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gateway.mapping.routes import AmendingRoute, ResolvedRoute
from gateway.model.properties import Properties


class IdentifyingRoute(AmendingRoute):
    """Resolved route that gives a message id to each delivered message that has none.

    `ids` yields the ids.
    """

    __slots__ = ("_ids",)

    def __init__(self, inner: ResolvedRoute, ids: Iterator[str]) -> None:
        super().__init__(inner)
        self._ids = ids

    def amended(self, stated: Properties) -> Properties:
        """Return the properties with the next message id, or `stated` if they already have a message id."""
        return stated if stated.message_id else replace(stated, message_id=next(self._ids))
