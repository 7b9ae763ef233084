"""Users with passwords, from the configuration and from a file, and the default user `guest`.

Hashing a password takes tens of milliseconds by design, so it runs in a thread, after a fair queue
(login_queue.py). Right passwords are cached for a while as keyed digests, so that a reconnecting fleet does
not wait for hashes; wrong passwords are cached, too. SCRAM-SHA-256 proves a password without sending it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from functools import cache
from typing import Final

import argon2
import trio

from gateway import clock
from gateway.access.backends import Denial, LoginResultCache
from gateway.access.credentials import Credentials
from gateway.access.failures import Failures
from gateway.access.login_queue import LoginQueue, LoginQueueFull
from gateway.access.places import is_loopback, place_of
from gateway.access.principal import Principal
from gateway.access.rabbit_passwords import is_rabbit_hash
from gateway.access.rabbit_passwords import matches as rabbit_matches
from gateway.access.scram import ITERATIONS, SALT_BYTES, Keys, ScramExchange
from gateway.settings.tree import ANONYMOUS, GUEST

REMEMBERED_SECS: Final = 300.0
REMEMBERED_MAX: Final = 10_000  # right passwords, and as many wrong ones
# One argon2 hash takes 64 MiB and four cores: more at a time would only take them from the poller.
VERIFIERS_MAX: Final = max(1, min(2, (os.cpu_count() or 1) // 4))


class Users:
    """Back end of users with passwords.

    `hashes` has argon2 hashes by user name, or "" for a user whose password is not known to this gateway;
    `scram` has SCRAM keys by user name. `guest` is `loopback`, `always` or `never`, and defines from where
    the default user `guest` may log in. `failures` records failed logins. At most `waiting_max` logins wait
    for password hashing.
    """

    kind: Final = "users"

    def __init__(
        self,
        hashes: Mapping[str, str],
        failures: Failures,
        *,
        guest: str = "loopback",
        scram: Mapping[str, Keys] | None = None,
        waiting_max: int = 128,
    ) -> None:
        self.guest = guest
        self.names: frozenset[str] = frozenset()
        self._hashes: dict[str, str] = {}
        self._scram: dict[str, Keys] = {}
        self._failures = failures
        self._key = os.urandom(32)
        self._salt_key = b""
        self._right = LoginResultCache(REMEMBERED_MAX)
        self._wrong = LoginResultCache(REMEMBERED_MAX)
        self._in_flight: dict[bytes, trio.Event] = {}  # names and passwords being verified
        self._turns = LoginQueue(VERIFIERS_MAX, waiting_max)
        self._principals: dict[str, Principal] = {}
        self.times_replaced = 0
        self.replace(hashes, scram or {})

    def replace(self, hashes: Mapping[str, str], scram: Mapping[str, Keys]) -> None:
        """Replace all users, and clear the cache of login results."""
        self.times_replaced += 1
        if scram and not self._scram:  # later users do not change the salts of unknown names
            self._salt_key = _salt_key(scram)
        self._hashes = {name: given for name, given in hashes.items() if given}
        self._scram = dict(scram)
        self.names = frozenset(hashes)
        self._right.clear()
        self._wrong.clear()
        self._principals = {}

    @property
    def empty(self) -> bool:
        """True if there are no users except the default user `guest` and anonymous clients."""
        return self.names <= {GUEST, ANONYMOUS} and not self._hashes and not self._scram

    def find_principal(self, name: str) -> Principal | None:
        """Return the principal of a user who has already been authenticated.

        Return None if the user does not exist.
        """
        return self._principal(name) if name in self.names and name != ANONYMOUS else None

    def exists(self, name: str) -> bool:
        """Return True if a user of this name exists.

        The default user `guest` exists unless the setting `guest` is `never`.
        """
        return (name in self.names and name != ANONYMOUS) or (self._is_guest(name) and self.guest != "never")

    def stamp(self, name: str) -> str:
        """Return a digest that changes whenever the user's password changes."""
        secret = f"{self._hashes.get(name)!r} {self._scram.get(name)!r}"
        return hashlib.sha256(secret.encode(errors="replace")).hexdigest()

    def supports_method(self, method: str) -> bool:
        """Return True if `method` is empty, because only passwords are supported."""
        return not method

    def recognizes_login(self, credentials: Credentials) -> bool:
        """Return False, because a login without a user name is never accepted."""
        return False

    def has(self, credentials: Credentials) -> bool:
        """Return True if a login names a user with a password hash in this list, or the default `guest`."""
        return credentials.user in self._hashes or self._is_guest(credentials.user)

    def _is_guest(self, name: str) -> bool:
        """Return True if `name` is the default user `guest`, whose password is `guest`.

        The default user does not exist if a password or SCRAM keys are configured for the name `guest`.
        """
        return name == GUEST and GUEST not in self._hashes and GUEST not in self._scram

    def authenticate_nowait(self, credentials: Credentials) -> Principal | Denial | None:
        """Return the principal of the default user `guest`, or the cached result of a login.

        Return None in all other cases; the caller must then call `authenticate`.
        """
        if self._is_guest(credentials.user):
            allowed = self.guest == "always" or (self.guest == "loopback" and is_loopback(credentials.remote))
            return self._principal(GUEST) if allowed and credentials.password == GUEST.encode() else None
        key, now = self._digest(credentials), clock.monotonic()
        return self._right.find(key, now) or self._wrong.find(key, now)

    async def authenticate(self, credentials: Credentials) -> Principal | Denial:
        """Verify the password of a login. Return the principal or a denial.

        Concurrent logins with the same name and password share one hash computation. Cancelling the call
        removes the login from the queue.
        """
        key = self._digest(credentials)
        while (found := self._cached_result(key)) is None and key in self._in_flight:
            await self._in_flight[key].wait()
        if self._failures.is_refused(credentials.remote, credentials.user):
            return Denial.REFUSED
        if found is not None:
            return found
        done = self._in_flight[key] = trio.Event()
        try:
            return await self._hash(key, credentials)
        except LoginQueueFull:
            return Denial.BUSY
        finally:
            del self._in_flight[key]
            done.set()

    def _cached_result(self, key: bytes) -> Principal | Denial | None:
        now = clock.monotonic()
        return self._right.find(key, now) or self._wrong.find(key, now)

    async def _hash(self, key: bytes, credentials: Credentials) -> Principal | Denial:
        """Wait in the queue, verify the password of a login, cache the result under `key`, and return it.

        Raises LoginQueueFull.
        """
        remote, user = credentials.remote, credentials.user
        trusted = self._failures.is_trusted(remote, user)
        await self._turns.acquire(place_of(remote), user, trusted=trusted)
        try:
            if self._failures.is_refused(remote, user):
                return Denial.REFUSED
            times = self.times_replaced
            stored = self._hashes.get(user)
            # An unknown user costs the same time as a wrong password, so that names cannot be found out.
            right = await trio.to_thread.run_sync(_matches, stored, credentials.password)
        finally:
            self._turns.release()
        if times != self.times_replaced and self._hashes.get(user) != stored:
            return Denial.WRONG  # the stored hash has changed meanwhile, so the result is outdated
        found: Principal | Denial = self._principal(user) if right and stored else Denial.WRONG
        remembered = self._wrong if found is Denial.WRONG else self._right
        remembered.add(key, found, clock.monotonic() + REMEMBERED_SECS)
        return found

    # SCRAM

    @property
    def supports_scram(self) -> bool:
        """True if at least one user may authenticate by SCRAM."""
        return bool(self._scram)

    def begin_scram(self) -> ScramExchange:
        """Return the server's side of a new SCRAM authentication."""
        return ScramExchange(self._keys_of, secrets.token_urlsafe(18))

    def _keys_of(self, user: str) -> Keys:
        """Return the SCRAM data of a user. Return invented data for an unknown user.

        Invented data for a name always has the same salt.
        """
        found = self._scram.get(user)
        if found is None:
            salt = hmac.digest(self._salt_key, user.encode(), hashlib.sha256)[:SALT_BYTES]
            return Keys(salt, self._usual_iterations(), os.urandom(32), os.urandom(32))
        return found

    def _usual_iterations(self) -> int:
        """Return the most frequent number of SCRAM iterations, which is used for unknown users.

        Unknown users thus look like known ones.
        """
        counts = [keys.iterations for keys in self._scram.values()]
        return max(set(counts), key=counts.count) if counts else ITERATIONS

    def _principal(self, name: str) -> Principal:
        return self._principals.setdefault(name, Principal(name, backend=self.kind))

    def _digest(self, credentials: Credentials) -> bytes:
        name = credentials.user.encode(errors="surrogatepass")
        return hmac.digest(
            self._key, len(name).to_bytes(4, "big") + name + credentials.password, hashlib.sha256
        )


_HASHER = argon2.PasswordHasher()


def _salt_key(scram: Mapping[str, Keys]) -> bytes:
    """Return the key from which the SCRAM salts of unknown users are derived.

    The key is derived from the SCRAM data of all users. Every replica thus derives the same salt for a name,
    also after a restart; a different salt would disclose that the user does not exist.
    """
    found = hashlib.sha256(b"salts of unknown users")
    for name in sorted(scram):
        for part in (name.encode(), scram[name].salt, scram[name].stored, scram[name].server):
            found.update(len(part).to_bytes(4, "big") + part)
    return found.digest()


@cache
def _decoy() -> str:
    """Return the hash of a random password, which is verified for users without a hash.

    The hash is computed at the first call, because this makes the start 20 % shorter.
    """
    return _HASHER.hash(os.urandom(16))


def hash_password(password: str) -> str:
    """Return the argon2id hash of `password`, in the form of the setting `users.NAME.password_hash`."""
    return _HASHER.hash(password)


def is_hash(text: str) -> bool:
    """Return True if the text is a password hash of argon2, or of RabbitMQ in the gateway's notation."""
    if is_rabbit_hash(text):
        return True
    try:
        argon2.extract_parameters(text)
    except argon2.exceptions.InvalidHashError:
        return False
    return True


def _matches(stored: str | None, password: bytes) -> bool:
    """Return True if `stored` is the hash of the password.

    The computation takes the same time for known and unknown users.
    """
    decoy = _decoy()  # also for a known user, so that the time of the first login discloses nothing
    if stored is not None and is_rabbit_hash(stored):
        _verify(decoy, password)  # takes the time of other hashes, so that names cannot be found out
        return rabbit_matches(stored, password)
    return _verify(stored or decoy, password)


def _verify(stored: str, password: bytes) -> bool:
    try:
        return _HASHER.verify(stored, password)
    except argon2.exceptions.VerifyMismatchError:
        return False
    except argon2.exceptions.InvalidHashError:
        return False
