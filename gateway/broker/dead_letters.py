"""Messages that no route, limit or target would take, kept with the reason.

They are held in memory, the newest `messages_max` and `octets_max` of them; every one is counted by its
reason.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from gateway.model.message import Message
from gateway.model.outcome import Outcome


class DeadLetter(NamedTuple):
    """A message, the route that it took ("" when none), what was said of it, and when (UTC seconds)."""

    message: Message
    route: str
    outcome: Outcome
    utc: float


class DeadLetters:
    """The newest dead letters, oldest first."""

    def __init__(self, *, messages_max: int = 10_000, octets_max: int = 64 * 1024 * 1024) -> None:
        self.messages_max = messages_max
        self.octets_max = octets_max
        self.counted: Counter[tuple[str, str]] = Counter()  # (route, reason)
        self._letters: deque[DeadLetter] = deque()
        self._octets = 0

    def __len__(self) -> int:
        return len(self._letters)

    def add(
        self,
        messages: list[Message],
        route: str,
        outcome: Outcome,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Keep `messages`; the oldest letters make room. `then` is called when they are safe."""
        utc = time.time()
        self.counted[route, outcome.reason.value] += len(messages)
        for message in messages:
            self._letters.append(DeadLetter(message, route, outcome, utc))
            self._octets += len(message.body)
        while len(self._letters) > self.messages_max or self._octets > self.octets_max:
            self._octets -= len(self._letters.popleft().message.body)
        if then is not None:
            then()

    def newest(self, count: int) -> list[DeadLetter]:
        """At most `count` letters, newest first."""
        return [letter for letter, _ in zip(reversed(self._letters), range(count), strict=False)]
