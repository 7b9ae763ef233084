"""Back ends: each can say of some logins who it is that comes. They are asked in the order of the settings;
the first that accepts decides, and who is accepted by none is refused.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from gateway.access.credentials import Credentials
from gateway.access.principal import Principal


class Denial(Enum):
    """Why a login is refused, as it is counted."""

    WRONG = "wrong"
    EXPIRED = "expired"  # a token was right once
    UNAVAILABLE = "unavailable"  # nobody could say whether it is right
    REFUSED = "refused"  # there were too many failures; it was not looked at
    BUSY = "busy"  # too many wait for their turn


class Backend(Protocol):
    """One of them."""

    @property
    def kind(self) -> str:
        """Its word in the settings, and in metrics."""

    def speaks(self, method: str) -> bool:
        """Whether a login by this method, "" for a password, is for it."""

    def claims(self, credentials: Credentials) -> bool:
        """Whether a login that says no name may be meant for it."""

    def known(self, credentials: Credentials) -> Principal | Denial | None:
        """What can be said without work; None: ask `look`."""

    async def look(self, credentials: Credentials) -> Principal | Denial:
        """The same with work; cancelled, it leaves the queue."""


class Remembered:
    """Answers for a while, the oldest go first. `entries_max` of them."""

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._answers: dict[bytes, tuple[float, Principal | Denial]] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def find(self, key: bytes, now: float) -> Principal | Denial | None:
        """What was said about it, if that still holds."""
        until, answer = self._answers.get(key, (0.0, None))
        return answer if until > now else None

    def add(self, key: bytes, answer: Principal | Denial, until: float) -> None:
        """It was said, and holds until then."""
        self._answers.pop(key, None)
        self._answers[key] = (until, answer)
        if len(self._answers) > self._entries_max:
            del self._answers[next(iter(self._answers))]

    def clear(self) -> None:
        """None of it holds any more."""
        self._answers.clear()
