"""Interface of authentication back ends, each of which can authenticate some clients.

Back ends are queried in the order of the settings. The first that accepts a login decides; a login that none
accepts is denied.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, Protocol

from gateway.access.credentials import Credentials
from gateway.access.principal import Principal


class Denial(Enum):
    """Reason for denying a login. The value is the outcome in the counters of logins."""

    WRONG = "wrong"
    EXPIRED = "expired"
    UNAVAILABLE = "unavailable"
    REFUSED = "refused"
    BUSY = "busy"

    @property
    def text(self) -> str:
        """Reason as a sentence, for the log."""
        return DENIAL_TEXTS[self]


DENIAL_TEXTS: Final = {
    Denial.WRONG: "user name, password, token or certificate is wrong",
    Denial.EXPIRED: "the token is valid but has expired",
    Denial.UNAVAILABLE: "the authentication back end is unavailable",
    Denial.REFUSED: "not checked: too many failed logins; wait and retry",
    Denial.BUSY: "not checked: too many logins are waiting; retry later",
}


class Backend(Protocol):
    """Authentication back end: users of the configuration, certificates, tokens or an HTTP server."""

    @property
    def kind(self) -> str:
        """Kind of the back end, which is its name in the settings and in metrics."""

    def supports_method(self, method: str) -> bool:
        """Return True if the back end can verify logins by this authentication method; "" is a password."""

    def recognizes_login(self, credentials: Credentials) -> bool:
        """Return True if the back end may accept this login although it has no user name."""

    def authenticate_nowait(self, credentials: Credentials) -> Principal | Denial | None:
        """Return the principal or denial of a login, or None if the back end has to wait for the result."""

    async def authenticate(self, credentials: Credentials) -> Principal | Denial:
        """Verify a login, waiting if needed. Return its principal or denial.

        Cancelling the call removes the login from the queue.
        """


class LoginResultCache:
    """Cache of login results with expiry times. The oldest results beyond `entries_max` are deleted."""

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._answers: dict[bytes, tuple[float, Principal | Denial]] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def find(self, key: bytes, now: float) -> Principal | Denial | None:
        """Return the result stored for `key`, or None if it is missing or has expired.

        `now` is in seconds of any clock, which must be the same for `add`.
        """
        expires_at, answer = self._answers.get(key, (0.0, None))
        return answer if expires_at > now else None

    def add(self, key: bytes, answer: Principal | Denial, expires_at: float) -> None:
        """Store the result of a login for `key` until `expires_at`.

        The time is in seconds of the same clock as `now` in `find`.
        """
        self._answers.pop(key, None)
        self._answers[key] = (expires_at, answer)
        if len(self._answers) > self._entries_max:
            del self._answers[next(iter(self._answers))]

    def clear(self) -> None:
        """Delete all stored results."""
        self._answers.clear()
