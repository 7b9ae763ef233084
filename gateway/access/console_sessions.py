"""Who is logged in at the console: sessions by a random identifier in a cookie, and links that log in once.

Only digests of identifiers are kept. What changes something needs the session's second secret as well, which
the cookie does not carry: a page from elsewhere can make a browser send the cookie, and cannot know that.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable
from hashlib import sha256
from typing import Final

from gateway.access.principal import Principal
from gateway.model.shares import UserEntries, UserShares

OCTETS: Final = 32
LINK_SECS: Final = 3_600.0
LINKS_MAX: Final = 100


class Session:
    """Somebody who has logged in: an administrator, who may do everything, or with the rights of the
    principal's roles. `token` is the digest of the token that was shown, "" for none; `stamp` is the user's
    at that time (`Access.stamp`).
    """

    __slots__ = ("csrf", "ends", "everything", "principal", "seen", "stamp", "token")

    def __init__(
        self, principal: Principal, *, everything: bool, token: str, stamp: str, now: float, ends: float
    ) -> None:
        self.principal = principal
        self.everything = everything
        self.token = token
        self.stamp = stamp
        self.csrf = secrets.token_urlsafe(OCTETS)
        self.seen = now
        self.ends = ends

    @property
    def owner(self) -> str:
        """User whose share it counts in."""
        return self.principal.name

    def proves(self, shown: str) -> bool:
        """Whether a request was made by a page of ours."""
        return hmac.compare_digest(self.csrf.encode(), shown.encode(errors="surrogatepass"))


class Sessions:
    """All of them. Times are in seconds; `clock` gives those since 1970. Of more sessions than `shares` has
    room for, the one that was seen longest ago goes, among those of a user who has more than an equal part.
    """

    def __init__(
        self,
        shares: UserShares,
        *,
        idle_secs: float,
        longest_secs: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._idle_secs = idle_secs
        self._longest_secs = longest_secs
        self._clock = clock
        self._sessions: dict[bytes, Session] = {}
        self._entries: UserEntries[bytes] = UserEntries(shares)  # who was seen last stands last
        self._links: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(
        self, principal: Principal, *, everything: bool = False, token: str = "", stamp: str = ""
    ) -> tuple[str, Session]:
        """Begin a session of whoever has logged in. Return its identifier, and the session."""
        now = self._clock()
        ends = now + self._longest_secs
        if principal.expires is not None:
            ends = min(ends, principal.expires)
        text = secrets.token_urlsafe(OCTETS)
        session = Session(principal, everything=everything, token=token, stamp=stamp, now=now, ends=ends)
        self._sessions[_digest(text)] = session
        self._entries.add(_digest(text), session.owner, 0)
        while (key := self._entries.crowded_out(session.owner)) is not None:
            self._forget(key)
        return text, session

    def _forget(self, key: bytes) -> None:
        self._sessions.pop(key, None)
        self._entries.discard(key)

    def find(self, text: str) -> Session | None:
        """The session of an identifier, if it has not ended."""
        key, now = _digest(text), self._clock()
        session = self._sessions.get(key)
        if session is None:
            return None
        if session.ends <= now or session.seen + self._idle_secs <= now:
            self._forget(key)
            return None
        session.seen = now
        self._entries.discard(key)
        self._entries.add(key, session.owner, 0)
        return session

    def end(self, text: str) -> None:
        """Its owner has logged out."""
        self._forget(_digest(text))

    def make_link(self) -> str:
        """A code that logs in once, as the administrator."""
        text = secrets.token_urlsafe(OCTETS)
        self._links[_digest(text)] = self._clock() + LINK_SECS
        if len(self._links) > LINKS_MAX:
            del self._links[next(iter(self._links))]
        return text

    def use_link(self, text: str) -> bool:
        """Whether the code logs in; it never does again."""
        return self._links.pop(_digest(text), 0.0) > self._clock()


def _digest(text: str) -> bytes:
    return sha256(text.encode(errors="surrogatepass")).digest()
