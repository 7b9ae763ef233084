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

from gateway.errors import RemoteProtocolError
from gateway.mapping.routes import ResolvedRoute
from gateway.model.message import Message
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.properties import property_set


class IdentifyingRoute(ResolvedRoute):
    """Another crossing, and the next of `ids` for each message that has crossed and has none."""

    __slots__ = ("_ids", "_inner")

    def __init__(self, inner: ResolvedRoute, ids: Iterator[str]) -> None:
        super().__init__(inner.route, inner.target)
        self._inner = inner
        self._ids = ids

    def cross(self, message: Message) -> Message | Outcome | None:
        crossed = self._inner.cross(message)
        if type(crossed) is not Message:
            return crossed
        try:
            stated = crossed.property_set.properties
        except RemoteProtocolError as error:
            self.route.failed += 1
            return Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error))
        if not stated.message_id:  # the message has just been made: nobody else has it yet
            made = property_set(replace(stated, message_id=next(self._ids)))
            crossed.octets += made.octets - crossed.property_set.octets
            crossed.property_set = made
        return crossed
