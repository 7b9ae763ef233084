"""Authentication of clients: decides which user a login belongs to.

Back ends identify the client, in the order of the settings (backends.py). Names and passwords come from MQTT,
AMQP's SASL PLAIN and AMQP/Fast. Anonymous access and the user `guest` may both be limited to clients on this
machine, as RabbitMQ limits guest. Clients whose logins fail are delayed, then refused (failures.py).
"""

from __future__ import annotations

import hmac
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import trio

from gateway import clock
from gateway.access.backends import Backend, Denial
from gateway.access.certificates import Certificates, principal_of
from gateway.access.credentials import Credentials
from gateway.access.failures import Failures
from gateway.access.places import is_loopback
from gateway.access.principal import Principal
from gateway.access.scram import Keys, ScramExchange
from gateway.access.tokens import Tokens
from gateway.access.users import Users
from gateway.settings.logins import LoginSettings
from gateway.settings.tree import ANONYMOUS, GUEST

# When several back ends deny a login, the first of these among their denials is reported.
TELLING: Final = (Denial.BUSY, Denial.UNAVAILABLE, Denial.EXPIRED)


class Access:
    """Authentication of a gateway's clients.

    `users` has argon2 hashes by user name, or "" for a user whose password is not known to this gateway;
    `scram` has SCRAM keys by user name. `guest` is `loopback`, `always` or `never`, and defines from where
    the user `guest` may log in. Logins are checked by the back ends in the order of
    `backends`, at first only by that of users with passwords.
    """

    def __init__(
        self,
        users: Mapping[str, str],
        *,
        guest: str = "loopback",
        scram: Mapping[str, Keys] | None = None,
        logins: LoginSettings | None = None,
    ) -> None:
        logins = logins or LoginSettings()
        self.failures = Failures(logins)
        self.users = Users(users, self.failures, guest=guest, scram=scram, waiting_max=logins.waiting_max)
        self.backends: Sequence[Backend] = (self.users,)
        self.counts: Counter[tuple[str, str]] = Counter()  # results of back ends, by kind and outcome
        self._anonymous = Principal("")
        self._key = os.urandom(32)

    @property
    def _checks_passwords(self) -> bool:
        return any(backend is self.users for backend in self.backends)

    @property
    def _checks_only_passwords(self) -> bool:
        return self._checks_passwords and len(self.backends) == 1

    @property
    def reads_certificates(self) -> bool:
        """True if a back end authenticates clients by their certificates."""
        return bool(self._certificates)

    @property
    def _certificates(self) -> list[Certificates]:
        return [backend for backend in self.backends if isinstance(backend, Certificates)]

    def anonymous_principal(self, remote: str, policy: str) -> Principal | None:
        """Return the principal of anonymous clients, or None if they may not connect from `remote`.

        `remote` is host:port. `policy` is `always`, `loopback` (only from this machine) or `never`.
        """
        if policy == "always" or (policy == "loopback" and is_loopback(remote)):
            return self._anonymous
        return None

    @property
    def has_several_users(self) -> bool:
        """True if more than one user may log in, because two are configured or there is another back end."""
        return not self._checks_only_passwords or len(self.users.names - {ANONYMOUS}) > 1

    def ignores_user(self, user: str) -> bool:
        """Return True if a client with this user name counts as anonymous.

        This is the case if neither users nor other back ends are configured, because no login could then
        succeed. The user name `guest` never counts as anonymous.
        """
        return self._checks_only_passwords and self.users.empty and user != GUEST

    def recognizes(self, credentials: Credentials) -> bool:
        """Return True if a back end may accept this login although it has no user name.

        Back ends for certificates and tokens can accept such logins.
        """
        return any(backend.recognizes_login(credentials) for backend in self.backends)

    def verify_nowait(self, credentials: Credentials) -> Principal | None:
        """Return the principal of a login if a back end accepts it without waiting.

        Otherwise return None; the caller must then call `verify`. This is the case if a back end has to wait,
        if no back end accepts the login, or if the login is refused because of earlier failures.
        """
        if self.failures.is_refused(credentials.remote, credentials.user):
            return None  # otherwise guesses at a remembered password would cost nothing
        for backend in self._order(credentials):
            found = backend.authenticate_nowait(credentials)
            if found is None:
                return None
            if isinstance(found, Principal):
                self.failures.succeeded(credentials.remote, credentials.user)
                self.counts[backend.kind, "accepted"] += 1
                return found
        return None

    def _order(self, credentials: Credentials) -> list[Backend]:
        """Return the back ends to query for a login, in order.

        If the login does not name a user with a password, `users` is queried last. That back end hashes a
        password even for an unknown name, so that attackers cannot find out names; a token that another back
        end accepts needs no hash.
        """
        if credentials.backend:
            return [
                one
                for one in self.backends
                if one.kind == credentials.backend and one.supports_method(credentials.method)
            ]
        if len(self.backends) == 1 or not self._checks_passwords or self.users.has(credentials):
            return list(self.backends)
        return [*(one for one in self.backends if one is not self.users), self.users]

    def certificate_principal(self, credentials: Credentials) -> Principal | None:
        """Return the principal of a client that authenticates by its certificate (SASL EXTERNAL of AMQP).

        Without a back end for certificates, the common name must be the name of a user. Return None if the
        login is denied.
        """
        if credentials.certificate is None:
            return None
        certificates = self._certificates
        for backend in certificates:
            found = backend.authenticate_nowait(credentials)
            if isinstance(found, Principal):
                self.counts[backend.kind, "accepted"] += 1
                return found
        name = credentials.certificate.names.get("common_name", "")
        if certificates or not self._checks_passwords or self.users.find_principal(name) is None:
            return None
        return principal_of(name, credentials.certificate)

    def loggable(self, user: str) -> str:
        """Return the form of an unauthenticated user name that may be written to the log.

        An empty name and the name of an existing user are returned unchanged. Any other name is replaced by
        `unknown DIGEST`, because people sometimes type their password as the user name. The digest of a name
        is the same as long as this process runs.
        """
        if not user or self.users.exists(user):
            return user
        return f"unknown {hmac.digest(self._key, user.encode(errors='replace'), 'sha256')[:6].hex()}"

    # SCRAM

    @property
    def supports_scram(self) -> bool:
        """True if at least one user may authenticate by SCRAM."""
        return self._checks_passwords and self.users.supports_scram

    def begin_scram(self) -> ScramExchange:
        """Return the server's side of a new SCRAM authentication."""
        return self.users.begin_scram()

    def principal_named(self, name: str) -> Principal | None:
        """Return the principal of a user who has authenticated by SCRAM.

        Return None if the user no longer exists.
        """
        return self.users.find_principal(name) if self._checks_passwords else None

    def stamp(self, principal: Principal) -> str:
        """Return a digest that changes whenever the user's password changes; pass it to `is_valid` later.

        Return "" for a principal of another back end, whose password is not known to this gateway.
        """
        return self.users.stamp(principal.name) if principal.backend == self.users.kind else ""

    def is_valid(self, principal: Principal, stamp: str) -> bool:
        """Return True if a principal has not expired, and its user exists and has not changed the password.

        `stamp` is an earlier result of the method `stamp`. Only the expiry of a principal of another back end
        is checked.
        """
        if principal.expires is not None and principal.expires <= clock.unix_time():
            return False
        if principal.backend != self.users.kind:
            return True
        name = principal.name
        return self._checks_passwords and self.users.exists(name) and self.users.stamp(name) == stamp

    def is_removed(self, principal: Principal) -> bool:
        """Return True if the principal has to be a configured user, and this user no longer exists.

        A principal that logged in with a password has to be a configured user. So has one that logged in with
        a certificate, if no back end accepts names of other users.
        """
        if principal.backend == Certificates.kind and self.reads_certificates:
            return not any(backend.accepts_name(principal.name) for backend in self._certificates)
        if principal.backend not in (self.users.kind, Certificates.kind):
            return False
        return not (self._checks_passwords and self.users.exists(principal.name))

    # Tokens

    @property
    def methods(self) -> list[str]:
        """Authentication methods of MQTT 5 AUTH packets with which clients may send a token."""
        return list(dict.fromkeys(one.method for one in self.backends if isinstance(one, Tokens)))

    # Work

    async def verify(self, credentials: Credentials) -> Principal | Denial:
        """Query the back ends. Return the principal of a login, or the reason why the login is denied.

        A login is delayed or refused if earlier ones have failed. A password is verified in a thread, which
        takes tens of milliseconds. Cancelling the call removes the login from the queue for this thread.
        """
        failures, remote, user = self.failures, credentials.remote, credentials.user
        if failures.is_refused(remote, user):
            return Denial.REFUSED
        if delay := failures.delay_secs(remote, user):
            await trio.sleep(delay)
        found = await self._authenticate(credentials)
        if found is Denial.WRONG:
            failures.count_failure(remote, user)
        elif isinstance(found, Principal):
            failures.succeeded(remote, user)
        return found

    async def _authenticate(self, credentials: Credentials) -> Principal | Denial:
        """Query the back ends for a login in order, until one accepts it. Return the principal.

        If no back end accepts the login, return the denial to report.
        """
        denials = []
        for backend in self._order(credentials):
            found = backend.authenticate_nowait(credentials) if backend is not self.users else None
            if found is None:
                found = await backend.authenticate(credentials)
            if found is Denial.REFUSED:
                return found
            if isinstance(found, Principal):
                self.counts[backend.kind, "accepted"] += 1
                return found
            self.counts[backend.kind, found.value] += 1
            denials.append(found)
        return next((one for one in TELLING if one in denials), Denial.WRONG)
