"""Who may connect and what for, as the configuration has it: users, their file, the back ends that are asked,
roles, and what RabbitMQ has exported of all that.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import structlog
import trio

from gateway.access.asking import Asker
from gateway.access.authentication import Access
from gateway.access.authorization import Roles
from gateway.access.backends import Backend
from gateway.access.certificates import Certificates
from gateway.access.definitions import Imported
from gateway.access.definitions import read_users as read_imported
from gateway.access.files import LOOK_SECS, Stamp, Watched, stamp_if_there
from gateway.access.http_backend import HttpUsers
from gateway.access.keys import KeysFile, KeysUrl
from gateway.access.questions import HttpQuestions
from gateway.access.scram import Keys, parse_keys
from gateway.access.tokens import Tokens
from gateway.access.users import is_hash
from gateway.errors import ConfigurationError
from gateway.settings import AmqpListener, Settings, User
from gateway.settings.identity import SYMMETRIC, CertificatesBackend, HttpBackend, JwtBackend, UsersBackend
from gateway.settings.users_file import read_users
from gateway.telemetry.audit import audit

CLOSE_SECS: Final = 1.0

log = structlog.get_logger()

Changed = Callable[[frozenset[str]], None]


def access_of(settings: Settings) -> Access:
    """Who may connect. Raises ConfigurationError for secrets that cannot be read, or are none."""
    return Identities(settings).access


class Identities:
    """All that says who a client is. `users` are those of the configuration and of the file, as they are now:
    the same dictionary for ever.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigurationError for files and secrets that cannot be used."""
        self._settings = settings
        self._path = settings.users_file()
        self._watched: Watched[Stamp | None] | None = None
        if (path := self._path) is not None:
            self._watched = Watched(lambda: stamp_if_there(path))
        self.users: dict[str, User] = self._read()
        self._imported = {name: text for one in imported(settings) for name, text in one.hashes.items()}
        hashes, scram = self._secrets(self.users)
        self.access = Access(hashes, guest=settings.guest, scram=scram, logins=settings.logins)
        self.fetched: list[KeysUrl] = []
        self.asked: list[HttpUsers] = []
        self._askers: list[Asker] = []
        self._tasks: list[Callable[[], Awaitable[None]]] = []
        self.access.ask([self._backend(one) for one in settings.authentication])

    def _backend(self, given: UsersBackend | CertificatesBackend | JwtBackend | HttpBackend) -> Backend:
        if isinstance(given, UsersBackend):
            return self.access.users
        if isinstance(given, CertificatesBackend):
            return Certificates(given.name, self.access.users if given.known_only else None)
        if isinstance(given, HttpBackend):
            asker = Asker(
                given.timeout_secs,
                ca_file=given.ca_file,
                connections_max=given.connections_max,
                kept=given.connections_max,
            )
            self._askers.append(asker)
            self.asked.append(HttpUsers(given, asker))
            return self.asked[-1]
        return Tokens(given, self._keys(given))

    def _keys(self, given: JwtBackend) -> KeysFile | KeysUrl:
        keys: KeysFile | KeysUrl
        if given.keys_file is not None:
            keys = KeysFile(given.keys_file, symmetric=bool(SYMMETRIC & set(given.algorithms)))
        else:
            assert given.keys_url is not None, "the settings have one of the two"
            keys = KeysUrl(
                given.keys_url,
                Asker(given.timeout_secs, ca_file=given.keys_ca_file),
                refresh_secs=given.keys_refresh_secs,
                kept_secs=given.keys_kept_secs,
            )
            self.fetched.append(keys)
        self._tasks.append(keys.run)
        return keys

    def _read(self) -> dict[str, User]:
        """The users of both. Raises ConfigurationError."""
        own = self._settings.users
        if self._path is None:
            return dict(own)
        more = read_users(self._path)
        if both := sorted(own.keys() & more.keys()):
            raise ConfigurationError(f"{self._path}: {both[0]!r} stands in the configuration, too")
        return {**own, **more}

    def _secrets(self, users: Mapping[str, User]) -> tuple[dict[str, str], dict[str, Keys]]:
        """Those of users, and of exports for whoever is not among them. Raises ConfigurationError."""
        hashes, scram = secrets_of(users)
        return {**self._imported, **hashes}, scram

    def look(self) -> frozenset[str]:
        """Read the file again, if it has changed; a bad one leaves the old users. Returns who is gone."""
        if self._watched is None or not self._watched.changed():
            return frozenset()
        try:
            users = self._read()
            hashes, scram = self._secrets(users)
        except ConfigurationError as error:
            log.error(
                "the users cannot be read again, the old ones stay", path=str(self._path), error=str(error)
            )
            return frozenset()
        gone = frozenset(self.users.keys() - users.keys())
        self.users.clear()
        self.users.update(users)
        self.access.users.replace(hashes, scram)
        log.info("the users were read again", path=str(self._path), users=len(users), gone=len(gone))
        audit("users_changed", path=str(self._path), users=len(users))
        return gone

    def failures(self) -> dict[str, int]:
        """Questions that got no answer, by the kind of back end that had them."""
        jwt = sum(keys.failures for keys in self.fetched)
        http = sum(backend.failures for backend in self.asked)
        return {kind: count for kind, count in ((Tokens.kind, jwt), (HttpUsers.kind, http)) if count}

    async def run(self, gone: Changed) -> None:
        """Fetch keys, and look whether the file has changed; call `gone` with the users that are no more."""
        async with trio.open_nursery() as nursery:
            for task in self._tasks:
                nursery.start_soon(task)
            while True:
                await trio.sleep(LOOK_SECS)
                if names := self.look():
                    gone(names)

    async def close(self) -> None:
        """The process ends: so do the connections to others."""
        with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_SECS):
            for asker in self._askers:
                await asker.close()


def secrets_of(users: Mapping[str, User]) -> tuple[dict[str, str], dict[str, Keys]]:
    """Hashes and keys of SCRAM, by name. Raises ConfigurationError."""
    hashes = {name: _hash_of(name, user) for name, user in users.items()}
    keys = {name: _keys_of(name, user) for name, user in users.items()}
    return hashes, {name: found for name, found in keys.items() if found is not None}


def roles_of(settings: Settings, users: Mapping[str, User] | None = None) -> Roles:
    """The roles, and who has which. `users`: also those of the file; None: the configuration's alone.

    Raises ConfigurationError for exports that cannot be read.
    """
    several = imported(settings)
    roles = {name: role for one in several for name, role in one.roles.items()}
    known = {name: has for one in several for name, has in one.users.items()}
    known |= {name: user.roles for name, user in (settings.users if users is None else users).items()}
    return Roles(roles | settings.roles, known, settings.default_roles)


def authorizer_of(settings: Settings) -> HttpQuestions | None:
    """Who is asked what no role says. Raises ConfigurationError."""
    given = settings.authorizer
    if given is None:
        return None
    most = given.connections_max
    asker = Asker(given.timeout_secs, ca_file=given.ca_file, connections_max=most, kept=most)
    return HttpQuestions(given, asker)


def imported(settings: Settings) -> list[Imported]:
    """What exports of RabbitMQ say of users. Raises ConfigurationError."""
    given = settings.declare
    return [read_imported(file) for file in given.definitions] if given.users else []


def with_imported_hosts(settings: Settings) -> Settings:
    """AMQP 0-9-1 listeners that name no virtual hosts have those of the exports beside their own."""
    hosts = [host for one in imported(settings) for host in one.hosts]
    if not hosts:
        return settings
    listeners = {
        name: one.model_copy(update={"virtual_hosts": tuple(dict.fromkeys((*one.virtual_hosts, *hosts)))})
        if isinstance(one, AmqpListener) and "virtual_hosts" not in one.model_fields_set
        else one
        for name, one in settings.listeners.items()
    }
    return settings.model_copy(update={"listeners": listeners})


def _hash_of(name: str, user: User) -> str:
    # A password put where its hash belongs would be found out by a client only, and as a wrong password.
    text = user.hash()
    given = user.password_hash is not None or user.password_hash_file is not None
    if given and not is_hash(text):
        key = "password_hash" if user.password_hash_file is None else "password_hash_file"
        raise ConfigurationError(f"users.{name}.{key}: this is no argon2 hash; `gateway passwd` makes one")
    return text


def _keys_of(name: str, user: User) -> Keys | None:
    text = user.scram_keys()
    try:
        return parse_keys(text) if text else None
    except ValueError as error:
        raise ConfigurationError(f"users.{name}.scram: {error}; `gateway passwd --scram` makes it") from error
