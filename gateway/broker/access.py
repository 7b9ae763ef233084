"""Who may connect, publish and subscribe: the one place that every protocol asks.

Passwords are argon2 hashes. Verifying one takes tens of milliseconds by design, so it runs in a thread, and a
password that was right is remembered for a while as a keyed digest: a fleet that reconnects does not wait
for it.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
import time
from collections.abc import Mapping
from typing import Final

import argon2
import trio

from gateway.broker.scram import ITERATIONS, SALT_OCTETS, Exchange, Keys
from gateway.model.address import Address

REMEMBERED_SECS: Final = 300.0
REMEMBERED_MAX: Final = 10_000  # one digest and one time each
VERIFIERS_MAX: Final = 2  # argon2 takes 64 MiB each; more would starve the poller of memory and cores

GUEST: Final = "guest"


class Principal:
    """Who a connection acts for; "" is the anonymous user."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


def is_loopback(remote: str) -> bool:
    """Is the address (host, or host:port as streams write it) on this machine?"""
    host = remote.rsplit(":", 1)[0].strip("[]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


class Access:
    """Decides. `users` maps names to argon2 hashes, "" for who has no password here; `scram` to the keys of
    SCRAM; `guest` and `anonymous` are `loopback`, `always` or `never`.
    """

    def __init__(
        self, users: Mapping[str, str], *, guest: str = "loopback", scram: Mapping[str, Keys] | None = None
    ) -> None:
        self._users = dict(users)
        self._scram = dict(scram or {})
        self._guest = guest
        self._key = os.urandom(32)
        self._remembered: dict[tuple[str, bytes], float] = {}
        self._limiter: trio.CapacityLimiter | None = None
        self._principals: dict[str, Principal] = {}

    def anonymous(self, remote: str, policy: str) -> Principal | None:
        """The anonymous principal, if `policy` lets it connect from `remote`."""
        if policy == "always" or (policy == "loopback" and is_loopback(remote)):
            return self._principal("")
        return None

    def known(self, user: str, password: bytes, remote: str) -> Principal | None:
        """The principal, when that can be said without work; None: ask `verify`."""
        if user == GUEST and user not in self._users:
            allowed = self._guest == "always" or (self._guest == "loopback" and is_loopback(remote))
            return self._principal(GUEST) if allowed and password == GUEST.encode() else None
        return self._recalled(user, password) if user in self._users else None

    def _recalled(self, user: str, password: bytes) -> Principal | None:
        until = self._remembered.get((user, self._digest(password)), 0.0)
        return self._principal(user) if until > time.monotonic() else None

    def certified(self, name: str) -> Principal | None:
        """The principal of a client whose name is proved already; None: there is no such user."""
        return self._principal(name) if name in self._users else None

    @property
    def proves(self) -> bool:
        """Some user may authenticate by SCRAM."""
        return bool(self._scram)

    def exchange(self) -> Exchange:
        """Begin an authentication by SCRAM."""
        return Exchange(self._keys_of, secrets.token_urlsafe(18))

    def _keys_of(self, user: str) -> Keys:
        found = self._scram.get(user)
        if found is None:
            salt = hmac.digest(self._key, user.encode(), hashlib.sha256)[:SALT_OCTETS]
            return Keys(salt, self._usual_iterations(), os.urandom(32), os.urandom(32))
        return found

    def _usual_iterations(self) -> int:
        """An unknown user's must not stand out."""
        counts = [keys.iterations for keys in self._scram.values()]
        return max(set(counts), key=counts.count) if counts else ITERATIONS

    async def verify(self, user: str, password: bytes) -> Principal | None:
        """The principal, if the password is right; takes tens of milliseconds in a thread.

        Of many that come at once with the same name and password, those that waited need no thread any more.
        """
        stored = self._users.get(user)
        if self._limiter is None:
            self._limiter = trio.CapacityLimiter(VERIFIERS_MAX)
        async with self._limiter:
            if (recalled := self._recalled(user, password)) is not None:
                return recalled
            # An unknown user costs the same time as a wrong password, so that names cannot be found out.
            right = await trio.to_thread.run_sync(_matches, stored or _DECOY, password)
        if not right or not stored:
            return None
        if len(self._remembered) >= REMEMBERED_MAX:
            self._remembered.clear()
        self._remembered[user, self._digest(password)] = time.monotonic() + REMEMBERED_SECS
        return self._principal(user)

    def may_publish(self, principal: Principal, endpoint: str, address: Address) -> bool:
        """May the principal publish to this address? Asked once per address and cached by its asker."""
        return True

    def may_subscribe(self, principal: Principal, endpoint: str, pattern: str) -> bool:
        """May the principal read what matches `pattern` (a topic filter, or a queue)?"""
        return True

    def _principal(self, name: str) -> Principal:
        return self._principals.setdefault(name, Principal(name))

    def _digest(self, password: bytes) -> bytes:
        return hmac.digest(self._key, password, hashlib.sha256)


_HASHER = argon2.PasswordHasher()
_DECOY = _HASHER.hash(os.urandom(16))


def hash_password(password: str) -> str:
    """The argon2id hash of `password`, as `users` wants it."""
    return _HASHER.hash(password)


def is_hash(text: str) -> bool:
    """Is this a hash that a password can be compared with?"""
    try:
        argon2.extract_parameters(text)
    except argon2.exceptions.InvalidHashError:
        return False
    return True


def _matches(stored: str, password: bytes) -> bool:
    try:
        return _HASHER.verify(stored, password)
    except argon2.exceptions.VerifyMismatchError:
        return False
    except argon2.exceptions.InvalidHashError:
        return False
