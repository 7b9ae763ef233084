"""Login sessions of the console, found by a random identifier in a cookie, and links that log in once.

Only digests of identifiers are stored. A request that changes something also needs the session's second
secret (`csrf`), which is not in the cookie: a page of another site can make a browser send the cookie, but
does not know that secret.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from hashlib import sha256
from typing import Final

from gateway import clock as clocks
from gateway.access.principal import Principal
from gateway.model.shares import UserEntries, UserShares

BYTES: Final = 32
LINK_SECS: Final = 3_600.0
LINKS_MAX: Final = 100


class ConsoleSession:
    """Session of a user who has logged in at the console.

    The session has all rights if `is_unrestricted` is True, otherwise the rights of the principal's roles or
    of a token. `token` is the digest of the token with which the user logged in, "" without one. `stamp` is a
    digest of the user's password at the login (`Access.stamp`). `last_used` and `expires_at` are in seconds
    of the clock of `ConsoleSessions`.
    """

    __slots__ = ("csrf", "expires_at", "is_unrestricted", "last_used", "principal", "stamp", "token")

    def __init__(
        self,
        principal: Principal,
        *,
        is_unrestricted: bool,
        token: str,
        stamp: str,
        now: float,
        expires_at: float,
    ) -> None:
        self.principal = principal
        self.is_unrestricted = is_unrestricted
        self.token = token
        self.stamp = stamp
        self.csrf = secrets.token_urlsafe(BYTES)
        self.last_used = now
        self.expires_at = expires_at

    @property
    def owner(self) -> str:
        """Name of the user whose limit of sessions this session counts against."""
        return self.principal.name

    def is_csrf_secret(self, secret: str) -> bool:
        """Return True if `secret` is the session's CSRF secret, which only pages of the console know."""
        return hmac.compare_digest(self.csrf.encode(), secret.encode(errors="surrogatepass"))


class ConsoleSessions:
    """Console sessions and login links of a gateway.

    `shares` limits the number of sessions. Beyond this limit, the least recently used session of a user with
    more than an equal part of the limit is removed. A session ends after `idle_secs` seconds without use, and
    at the latest after `longest_secs` seconds. `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        shares: UserShares,
        *,
        idle_secs: float,
        longest_secs: float,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._idle_secs = idle_secs
        self._longest_secs = longest_secs
        self._clock = clock or clocks.monotonic
        self._sessions: dict[bytes, ConsoleSession] = {}
        self._entries: UserEntries[bytes] = UserEntries(shares)  # in order of use, the last used one last
        self._links: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(
        self, principal: Principal, *, is_unrestricted: bool = False, token: str = "", stamp: str = ""
    ) -> tuple[str, ConsoleSession]:
        """Begin a session for a principal that has logged in.

        Return the session's identifier, which goes into the cookie, and the session.
        """
        now = self._clock()
        expires_at = now + self._longest_secs
        text = secrets.token_urlsafe(BYTES)
        session = ConsoleSession(
            principal,
            is_unrestricted=is_unrestricted,
            token=token,
            stamp=stamp,
            now=now,
            expires_at=expires_at,
        )
        self._sessions[_digest(text)] = session
        self._entries.add(_digest(text), session.owner, 0)
        while (key := self._entries.entry_to_evict(session.owner)) is not None:
            self._forget(key)
        return text, session

    def _forget(self, key: bytes) -> None:
        self._sessions.pop(key, None)
        self._entries.discard(key)

    def find(self, text: str) -> ConsoleSession | None:
        """Return the session with this identifier, and record that it was used.

        Return None if there is no such session, or if it has ended.
        """
        key, now = _digest(text), self._clock()
        session = self._sessions.get(key)
        if session is None:
            return None
        expires = session.principal.expires
        expired = expires is not None and expires <= clocks.unix_time()
        if expired or session.expires_at <= now or session.last_used + self._idle_secs <= now:
            self._forget(key)
            return None
        session.last_used = now
        self._entries.discard(key)
        self._entries.add(key, session.owner, 0)
        return session

    def end(self, text: str) -> None:
        """End the session with this identifier, if it exists, because its user has logged out."""
        self._forget(_digest(text))

    def make_link(self) -> str:
        """Return a new code for a link that logs in once as the administrator, within LINK_SECS seconds.

        Only the newest LINKS_MAX codes are valid.
        """
        text = secrets.token_urlsafe(BYTES)
        self._links[_digest(text)] = self._clock() + LINK_SECS
        if len(self._links) > LINKS_MAX:
            del self._links[next(iter(self._links))]
        return text

    def use_link(self, text: str) -> bool:
        """Return True if `text` is a valid code of a login link, and make the code invalid."""
        return self._links.pop(_digest(text), 0.0) > self._clock()


def _digest(text: str) -> bytes:
    return sha256(text.encode(errors="surrogatepass")).digest()
