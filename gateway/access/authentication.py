"""Who may connect, and what for.

Names and passwords are MQTT's and AMQP's SASL PLAIN; both anonymous access and the user `guest` may be
limited to clients on this machine, as RabbitMQ does for guest. SCRAM-SHA-256 proves a password without
saying it, and TLS a name by a certificate. Hashing a password takes tens of
milliseconds by design, so it runs in a thread, after a queue in which everybody gets a turn (turns.py); a
password that was right is remembered for a while as a keyed digest, so that a fleet that reconnects does not
wait for it, and so is one that was wrong. Whoever fails is delayed and refused (failures.py).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Final

import argon2
import trio

from gateway.access.failures import Failures
from gateway.access.places import is_loopback, place_of
from gateway.access.principal import Principal
from gateway.access.rabbit_passwords import is_rabbit_hash
from gateway.access.rabbit_passwords import matches as rabbit_matches
from gateway.access.scram import ITERATIONS, SALT_OCTETS, Exchange, Keys
from gateway.access.turns import Crowded, Turns
from gateway.settings.logins import Logins

REMEMBERED_SECS: Final = 300.0
REMEMBERED_MAX: Final = 10_000  # right ones, and as many wrong ones: one digest and one time each
# argon2 takes 64 MiB and runs on four cores at once: more would only starve the poller of them.
VERIFIERS_MAX: Final = max(1, min(2, (os.cpu_count() or 1) // 4))

GUEST: Final = "guest"


class Denial(Enum):
    """Why a login is refused, as it is counted."""

    WRONG = "wrong"
    REFUSED = "refused"  # there were too many failures; it was not looked at
    BUSY = "busy"  # too many wait for their hash


class Access:
    """Decides. `users` maps names to argon2 hashes, "" for who has no password here; `scram` to the keys of
    SCRAM; `guest` and `anonymous` are `loopback`, `always` or `never`.
    """

    def __init__(
        self,
        users: Mapping[str, str],
        *,
        guest: str = "loopback",
        scram: Mapping[str, Keys] | None = None,
        logins: Logins | None = None,
    ) -> None:
        logins = logins or Logins()
        self._users = dict(users)
        self._scram = dict(scram or {})
        self._guest = guest
        self._key = os.urandom(32)
        self.failures = Failures(logins)
        self._remembered: dict[bytes, float] = {}
        self._wrong: dict[bytes, float] = {}
        self._asked: dict[bytes, trio.Event] = {}  # names and passwords that are being looked at
        self._turns = Turns(VERIFIERS_MAX, logins.waiting_max)
        self._principals: dict[str, Principal] = {}

    def anonymous(self, remote: str, policy: str) -> Principal | None:
        """The anonymous principal, if `policy` lets it connect from `remote`."""
        if policy == "always" or (policy == "loopback" and is_loopback(remote)):
            return self._principal("")
        return None

    def ignores(self, user: str) -> bool:
        """A name means nothing: no users are configured, so nobody can have it, but for the usual guest."""
        return not self._users and user != GUEST

    def known(self, user: str, password: bytes, remote: str) -> Principal | None:
        """The principal, when that can be said without work; None: ask `verify`."""
        if self.failures.refuses(remote, user):
            return None  # or guesses at a remembered password would be free
        if user == GUEST and user not in self._users:
            allowed = self._guest == "always" or (self._guest == "loopback" and is_loopback(remote))
            return self._principal(GUEST) if allowed and password == GUEST.encode() else None
        if self._remembered.get(self._digest(user, password), 0.0) <= time.monotonic():
            return None
        self.failures.succeeded(remote, user)
        return self._principal(user)

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

    async def verify(self, user: str, password: bytes, remote: str) -> Principal | Denial:
        """The principal, if the password is right; takes tens of milliseconds in a thread.

        Cancelled, it leaves the queue.
        """
        failures = self.failures
        if failures.refuses(remote, user):
            return Denial.REFUSED
        if delay := failures.delay_secs(remote, user):
            await trio.sleep(delay)
        found = await self._look(user, password, remote)
        if found is Denial.WRONG:
            failures.failed(remote, user)
        elif found is None:
            failures.succeeded(remote, user)
        return found or self._principal(user)

    async def _look(self, user: str, password: bytes, remote: str) -> Denial | None:
        """What is wrong with a login. Of many that come at once with the same name and password, one is
        hashed, and only that one waits in the queue.
        """
        key = self._digest(user, password)
        while (right := self._recalled(key)) is None and key in self._asked:
            await self._asked[key].wait()
        if self.failures.refuses(remote, user):
            return Denial.REFUSED
        if right is None:
            asked = self._asked[key] = trio.Event()
            try:
                return await self._hash(key, user, password, remote)
            except Crowded:
                return Denial.BUSY
            finally:
                del self._asked[key]
                asked.set()
        return None if right else Denial.WRONG

    def _recalled(self, key: bytes) -> bool | None:
        """Whether that name and password are right; None: they have not been seen lately."""
        now = time.monotonic()
        if self._remembered.get(key, 0.0) > now:
            return True
        return False if self._wrong.get(key, 0.0) > now else None

    async def _hash(self, key: bytes, user: str, password: bytes, remote: str) -> Denial | None:
        trusted = self.failures.trusts(remote, user)
        await self._turns.take(place_of(remote), user, trusted=trusted)
        try:
            if self.failures.refuses(remote, user):
                return Denial.REFUSED
            stored = self._users.get(user)
            # An unknown user costs the same time as a wrong password, so that names cannot be found out.
            right = await trio.to_thread.run_sync(_matches, stored, password)
        finally:
            self._turns.give_back()
        right = bool(right and stored)
        _remember(self._remembered if right else self._wrong, key)
        return None if right else Denial.WRONG

    def _principal(self, name: str) -> Principal:
        return self._principals.setdefault(name, Principal(name))

    def _digest(self, user: str, password: bytes) -> bytes:
        name = user.encode(errors="surrogatepass")
        return hmac.digest(self._key, len(name).to_bytes(4, "big") + name + password, hashlib.sha256)


_HASHER = argon2.PasswordHasher()


@cache
def _decoy() -> str:
    """A hash that no password has. It is not made at start, which is a fifth shorter without."""
    return _HASHER.hash(os.urandom(16))


def hash_password(password: str) -> str:
    """The argon2id hash of `password`, as `users` wants it."""
    return _HASHER.hash(password)


def is_hash(text: str) -> bool:
    """Is this a hash that a password can be compared with?"""
    if is_rabbit_hash(text):
        return True
    try:
        argon2.extract_parameters(text)
    except argon2.exceptions.InvalidHashError:
        return False
    return True


def _remember(table: dict[bytes, float], key: bytes) -> None:
    table.pop(key, None)
    table[key] = time.monotonic() + REMEMBERED_SECS
    if len(table) > REMEMBERED_MAX:
        del table[next(iter(table))]


def _matches(stored: str | None, password: bytes) -> bool:
    decoy = _decoy()  # also for a known user: the first login of all tells nothing either
    if stored is not None and is_rabbit_hash(stored):
        _verify(decoy, password)  # it costs what others do, or names could be found out
        return rabbit_matches(stored, password)
    return _verify(stored or decoy, password)


def _verify(stored: str, password: bytes) -> bool:
    try:
        return _HASHER.verify(stored, password)
    except argon2.exceptions.VerifyMismatchError:
        return False
    except argon2.exceptions.InvalidHashError:
        return False
