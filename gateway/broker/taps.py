"""Taps, with which operators watch messages pass without affecting them.

A tap gets a message, as it was delivered, when a recipient has settled it. Recipients are created with a
recorder that informs the tap, and recreated without it after the last tap is closed, so that unwatched
messages cost nothing. A tap accepts a number of messages a second and stores a number until they are fetched;
it counts the others. A message that goes to several subscribers of its own namespace is reported once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import trio

from gateway import clock
from gateway.containment import contained
from gateway.mapping.routes import Route
from gateway.model.batch import Recorder, SubBatch
from gateway.model.message import Message
from gateway.model.outcome import Outcome

KEPT_MAX: Final = 200  # messages of a tap that wait to be fetched
SEEN_MAX: Final = 100
KEPT_BYTES_MAX: Final = 8 * 1024 * 1024


class TappedMessage(NamedTuple):
    """Settled message that a tap has recorded, with its endpoint and outcome.

    `route` is the name of the route that the message took; "" if it stayed in its own namespace.
    """

    route: str
    endpoint: str
    message: Message
    outcome: Outcome


class Tap:
    """Record of passing messages for an operator, selected by route, endpoint and name (topic, key).

    "" as `route` or `endpoint`, and None as `name_matches`, select all. At most `per_second` messages a
    second are stored.
    """

    def __init__(
        self,
        *,
        route: str = "",
        endpoint: str = "",
        name_matches: Callable[[str], bool] | None = None,
        per_second: float = 10.0,
    ) -> None:
        self.route = route
        self.endpoint = endpoint
        self.skipped = 0  # since the last fetch
        self._name_matches = name_matches
        self._per_second = per_second
        self._allowed = max(per_second, 1.0)
        self._refilled_at = clock.now()
        self._buffer: deque[TappedMessage] = deque()
        self._byte_count = 0
        self._recent: dict[int, Message] = {}  # by identity: the latest of those that stay in their namespace
        self._recent_bytes = 0
        self._wakeup = trio.Event()

    def may_match(self, route: str, endpoint: str) -> bool:
        """Return True if messages of a recipient with this route and endpoint may match."""
        return self.route in ("", route) and self.endpoint in ("", endpoint)

    def offer(self, route: str, endpoint: str, messages: list[Message], outcome: Outcome) -> None:
        """Store settled messages that match, until `fetch` removes them; count those beyond the limits."""
        now = clock.now()
        most = max(self._per_second, 1.0)
        self._allowed = min(most, self._allowed + (now - self._refilled_at) * self._per_second)
        self._refilled_at = now
        for message in messages:
            if self._name_matches is not None and not self._name_matches(message.address.name):
                continue
            if not route and self._is_repeated(message):
                continue
            full = len(self._buffer) >= KEPT_MAX or self._byte_count + message.byte_count > KEPT_BYTES_MAX
            if self._allowed < 1.0 or full:
                self.skipped += 1
                continue
            self._allowed -= 1.0
            self._buffer.append(TappedMessage(route, endpoint, message, outcome))
            self._byte_count += message.byte_count
            self._wakeup.set()

    def _is_repeated(self, message: Message) -> bool:
        """Return True if the tap has recorded this message before, for another recipient."""
        if id(message) in self._recent:
            return True
        self._recent[id(message)] = message
        self._recent_bytes += message.byte_count
        while len(self._recent) > SEEN_MAX or self._recent_bytes > KEPT_BYTES_MAX:
            self._recent_bytes -= self._recent.pop(next(iter(self._recent))).byte_count
        return False

    async def fetch(self, secs: float) -> tuple[list[TappedMessage], int]:
        """Remove and return the stored messages, and the number of those beyond the limits.

        Waits up to `secs` seconds for a message.
        """
        with trio.move_on_after(secs):
            await self._wakeup.wait()
        self._wakeup = trio.Event()
        found, self._buffer, self._byte_count = list(self._buffer), deque(), 0
        skipped, self.skipped = self.skipped, 0
        return found, skipped


class TappedRecorder:
    """Recorder that reports settled messages to taps, and to the journal's recorder if there is one."""

    def __init__(self, inner: Recorder | None, taps: list[Tap], route: str, endpoint: str) -> None:
        self._inner = inner
        self._taps = taps
        self._route = route
        self._endpoint = endpoint

    def record(
        self, sub_batch: SubBatch, messages: list[Message], slots: list[int], outcome: Outcome
    ) -> None:
        """Report settled messages to the taps. Never raises.

        `slots` are the positions of `messages` in the batch of `sub_batch`.
        """
        if self._inner is not None:
            self._inner.record(sub_batch, messages, slots, outcome)
        for tap in self._taps:
            try:
                tap.offer(self._route, self._endpoint, messages, outcome)
            except Exception as error:
                contained("message", error, route=self._route)


class Taps:
    """Open taps. `changed` is called when recipients must be recreated with other recorders."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.open: list[Tap] = []
        self._changed = changed

    def add(self, tap: Tap) -> None:
        """Open a tap."""
        self.open.append(tap)
        self._changed()

    def remove(self, tap: Tap) -> None:
        """Close a tap."""
        self.open.remove(tap)
        self._changed()

    def recorder(self, inner: Recorder | None, route: Route | None, endpoint: str) -> Recorder | None:
        """Return a recorder that also reports to the taps that may match; `inner` if none may.

        `inner` is the journal's recorder, or None.
        """
        name, source = ("", endpoint) if route is None else (route.name, route.source)
        taps = [tap for tap in self.open if tap.may_match(name, source)]
        return TappedRecorder(inner, taps, name, source) if taps else inner
