"""A connection that no protocol has yet: octets gather until it is clear whose it is, or time is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import structlog

from gateway.ingress.guest import Farewell, Guest, InFlight
from gateway.ingress.guests import Guests
from gateway.model.message import Sender
from gateway.transport.stream import Stream

log = structlog.get_logger(limited=True)


class PendingConnection(Guest):
    """The first owner of a stream; whatever it waits for, `look` finds in `octets`.

    The octets of its connection count as its listener's only if they never come to be another's.
    """

    def __init__(self, guests: Guests, stream: Stream, since: float) -> None:
        """`since` is when the connection was accepted, in seconds of Trio's clock."""
        self.stream = stream
        self.sender = Sender(guests.name)
        self.since = since
        self.octets = b""
        self.received: Any = ()
        self.sent: Any = ()
        self._guests = guests
        self._answer = b""

    def look(self, now: float) -> None:
        """There are more `octets`."""
        raise NotImplementedError

    def leave(self) -> bytes:
        """Another owner takes the stream; returns the octets that it begins with."""
        self._guests.forget(self)
        octets, self.octets = self.octets, b""
        return octets

    def refuse(self, word: str, text: str, answer: bytes = b"") -> None:
        """Turn the client away, count it by `word`, and say `text` in the log."""
        self._guests.stats.refused.add(word)
        self._turn_away(text, answer)

    def break_off(self, word: str, text: str) -> None:
        """The client broke a rule: count it by `word`, and say `text` in the log."""
        self._guests.stats.protocol_errors.add(word)
        self._turn_away(text, b"")

    def answer(self, octets: bytes) -> None:
        """Say that and close."""
        self._answer = octets
        self.stream.end("answered")

    def _turn_away(self, text: str, answer: bytes) -> None:
        log.warning(
            "connection refused", listener=self.sender.endpoint, remote=self.stream.remote, error=text
        )
        self._answer = answer
        self.stream.end(text)

    # What the stream asks.

    def receive(self, data: bytes, now: float) -> None:
        """Octets arrived."""
        self.octets += data
        self.look(now)

    def data_to_send(self) -> bytes:
        """The answer, if there is one."""
        answer, self._answer = self._answer, b""
        return answer

    def drained(self) -> None:
        """Nothing is waiting."""

    def lost(self, reason: str) -> None:
        """The connection is gone."""
        self.stream.count_with(self._guests.stats)
        self._guests.forget(self)

    # What the listener asks.

    @property
    def frames(self) -> Self:
        """It counts its frames itself: none."""
        return self

    @property
    def idle(self) -> bool:
        """It has published nothing."""
        return True

    def in_flight(self) -> InFlight:
        """It has published nothing, and has been sent nothing."""
        return InFlight()

    def hold(self) -> Callable[[], None] | None:
        """It has published nothing that could fill a queue."""
        return None

    def tick(self, now: float) -> None:
        """Whoever says too little for too long is cut off."""
        if now >= self.since + self._guests.limits.connect_timeout_secs:
            self._guests.stats.protocol_errors.add("connect_timeout")
            self.stream.abort("it did not say in time what it is")

    def rules_changed(self) -> None:
        """It holds nothing."""

    def shut_down(self, farewell: Farewell) -> None:
        """No protocol has begun whose words could be used."""
        self.stream.end(farewell.value)
