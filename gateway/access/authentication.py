"""Who may connect, and what for.

Back ends say who a client is, in the order of the settings (backends.py). Names and passwords are MQTT's,
AMQP's SASL PLAIN and AMQP/Fast's; both anonymous access and the user `guest` may be limited to clients on
this machine, as RabbitMQ does for guest. Whoever fails is delayed and refused (failures.py).
"""

from __future__ import annotations

import hmac
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import trio

from gateway.access.backends import Backend, Denial
from gateway.access.certificates import Certificates, principal_of
from gateway.access.credentials import Credentials
from gateway.access.failures import Failures
from gateway.access.places import is_loopback
from gateway.access.principal import Principal
from gateway.access.scram import Exchange, Keys
from gateway.access.tokens import Tokens
from gateway.access.users import Users
from gateway.settings.logins import Logins
from gateway.settings.tree import ANONYMOUS, GUEST

# Of several that refuse, the first of these says most about why.
TELLING: Final = (Denial.BUSY, Denial.UNAVAILABLE, Denial.EXPIRED)


class Access:
    """Decides. Without `backends` there are the users alone: `users` maps names to argon2 hashes, "" for who
    has no password here; `scram` to the keys of SCRAM; `guest` is `loopback`, `always` or `never`.
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
        self.failures = Failures(logins)
        self.users = Users(users, self.failures, guest=guest, scram=scram, waiting_max=logins.waiting_max)
        self.backends: Sequence[Backend] = (self.users,)
        self.counts: Counter[tuple[str, str]] = Counter()  # what back ends have said, by kind and outcome
        self._anonymous = Principal("")
        self._key = os.urandom(32)

    def ask(self, backends: Sequence[Backend]) -> None:
        """Ask these from now on, in their order; `users` is one of them, or has no part."""
        self.backends = tuple(backends)

    @property
    def _with_users(self) -> bool:
        return any(backend is self.users for backend in self.backends)

    @property
    def _alone(self) -> bool:
        return self._with_users and len(self.backends) == 1

    @property
    def reads_certificates(self) -> bool:
        """Whether it matters which certificate a client has shown."""
        return any(isinstance(backend, Certificates) for backend in self.backends)

    def anonymous(self, remote: str, policy: str) -> Principal | None:
        """The anonymous principal, if `policy` lets it connect from `remote`."""
        if policy == "always" or (policy == "loopback" and is_loopback(remote)):
            return self._anonymous
        return None

    @property
    def has_several_users(self) -> bool:
        """Return True if more than one user may come: there are two, or a back end that knows others."""
        return not self._alone or len(self.users.names - {ANONYMOUS}) > 1

    def ignores(self, user: str) -> bool:
        """A name means nothing: nobody can have one, for there are no users and no other back ends, but for
        the usual guest.
        """
        return self._alone and self.users.empty and user != GUEST

    def recognizes(self, credentials: Credentials) -> bool:
        """Whether a login without a name may be somebody's all the same: by a certificate or a token."""
        return any(backend.claims(credentials) for backend in self.backends)

    def known(self, credentials: Credentials) -> Principal | None:
        """The principal, when that can be said without work; None: ask `verify`."""
        if self.failures.refuses(credentials.remote, credentials.user):
            return None  # or guesses at a remembered password would be free
        for backend in self._order(credentials):
            found = backend.known(credentials)
            if found is None:
                return None
            if isinstance(found, Principal):
                self.failures.succeeded(credentials.remote, credentials.user)
                self.counts[backend.kind, "accepted"] += 1
                return found
        return None

    def _order(self, credentials: Credentials) -> list[Backend]:
        """The back ends. A name that is no user's is hashed in vain only when all others have refused it:
        that is for those who guess names, and not for every token.
        """
        if credentials.backend:
            return [
                one
                for one in self.backends
                if one.kind == credentials.backend and one.speaks(credentials.method)
            ]
        if len(self.backends) == 1 or not self._with_users or self.users.has(credentials):
            return list(self.backends)
        return [*(one for one in self.backends if one is not self.users), self.users]

    def external(self, credentials: Credentials) -> Principal | None:
        """The principal of a client that names itself by its certificate (AMQP's EXTERNAL); None: nobody."""
        if credentials.certificate is None:
            return None
        asked = [backend for backend in self.backends if isinstance(backend, Certificates)]
        for backend in asked:
            found = backend.known(credentials)
            if isinstance(found, Principal):
                self.counts[backend.kind, "accepted"] += 1
                return found
        name = credentials.certificate.names.get("common_name", "")
        if asked or not self._with_users or self.users.named(name) is None:
            return None
        return principal_of(name, credentials.certificate)

    def loggable(self, user: str) -> str:
        """Return what the log may have of a name that was not proved: the name of a user that there is, or a
        digest by which it is known again while this process lives. People type passwords where names belong.
        """
        if not user or self.users.exists(user):
            return user
        return f"unknown {hmac.digest(self._key, user.encode(errors='replace'), 'sha256')[:6].hex()}"

    # SCRAM

    @property
    def proves(self) -> bool:
        """Some user may authenticate by SCRAM."""
        return self._with_users and self.users.proves

    def exchange(self) -> Exchange:
        """Begin an authentication by SCRAM."""
        return self.users.exchange()

    def proved(self, name: str) -> Principal | None:
        """The principal of a user who has proved its password; None: there is no such user any more."""
        return self.users.named(name) if self._with_users else None

    def stamp(self, principal: Principal) -> str:
        """Return what tells whether a user is the same later, with the same password; "" for a principal of
        another back end, which cannot be asked."""
        return self.users.stamp(principal.name) if principal.backend == self.users.kind else ""

    def stands(self, principal: Principal, stamp: str) -> bool:
        """Return True if a user that had this stamp is still there, with the same password. Of a principal of
        another back end only its end is known."""
        if principal.expires is not None and principal.expires <= time.time():
            return False
        if principal.backend != self.users.kind:
            return True
        name = principal.name
        return self._with_users and self.users.exists(name) and self.users.stamp(name) == stamp

    # Tokens

    def takes_tokens(self, method: str) -> bool:
        """Whether a token may be shown in AUTH packets of this method."""
        return method in self.methods

    @property
    def methods(self) -> list[str]:
        """The methods of tokens in AUTH packets."""
        return list(dict.fromkeys(one.method for one in self.backends if isinstance(one, Tokens)))

    # Work

    async def verify(self, credentials: Credentials) -> Principal | Denial:
        """The principal, if a back end accepts the login; a password takes tens of milliseconds in a thread.

        Cancelled, it leaves the queue.
        """
        failures, remote, user = self.failures, credentials.remote, credentials.user
        if failures.refuses(remote, user):
            return Denial.REFUSED
        if delay := failures.delay_secs(remote, user):
            await trio.sleep(delay)
        found = await self._look(credentials)
        if found is Denial.WRONG:
            failures.failed(remote, user)
        elif isinstance(found, Principal):
            failures.succeeded(remote, user)
        return found

    async def _look(self, credentials: Credentials) -> Principal | Denial:
        denials = []
        for backend in self._order(credentials):
            found = backend.known(credentials) if backend is not self.users else None
            if found is None:
                found = await backend.look(credentials)
            if found is Denial.REFUSED:
                return found
            if isinstance(found, Principal):
                self.counts[backend.kind, "accepted"] += 1
                return found
            self.counts[backend.kind, found.value] += 1
            denials.append(found)
        return next((one for one in TELLING if one in denials), Denial.WRONG)
