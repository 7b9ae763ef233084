"""Authentication and roles as the configuration sets them up.

`Identities` builds the back ends from `authentication` and holds the users in force: those of the
configuration, of the users file, and of RabbitMQ exports. `roles_of` builds the roles, `authorizer_of` the
HTTP authorizer. The module reads files and secrets; the checks of clients themselves are in `gateway/access`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import trio

from gateway.access.authentication import Access
from gateway.access.authorization import Roles
from gateway.access.backends import Backend
from gateway.access.certificates import Certificates
from gateway.access.definitions import Imported
from gateway.access.definitions import read_users as read_imported
from gateway.access.http_authorization import HttpAuthorizerClient
from gateway.access.http_backend import HttpUsers
from gateway.access.http_client import BackendHttpClient
from gateway.access.keys import KeysFile, KeysUrl
from gateway.access.scram import Keys, parse_keys
from gateway.access.tokens import Tokens
from gateway.access.users import is_hash
from gateway.errors import ConfigurationError
from gateway.settings import AmqpListener, Settings, User
from gateway.settings.identity import SYMMETRIC, CertificatesBackend, HttpBackend, JwtBackend, UsersBackend
from gateway.settings.users_file import read_users

CLOSE_SECS: Final = 1.0


class DefinedUsers(NamedTuple):
    """Users that the configuration, the users file and RabbitMQ exports define at present.

    `users` are the users of the configuration and of the users file, by name. `hashes` are the password
    hashes of all users by name, including users of exports; `scram` are the SCRAM keys by user name. `text`
    is the content of the users file, "" if there is none.
    """

    users: dict[str, User]
    hashes: dict[str, str]
    scram: dict[str, Keys]
    text: str


class UsersReplacement(NamedTuple):
    """Result of replacing the users in force: the number of users now, and the names of the removed users."""

    total: int
    removed: frozenset[str]


class Identities:
    """Authentication back ends of one gateway, and the users in force.

    `users` are the users of the configuration and of the users file that are in force, by name. A reload
    changes the content of this dictionary, never the object. `access` checks the logins of clients by the
    back ends.
    """

    def __init__(self, settings: Settings) -> None:
        """Build the back ends that `authentication` configures, and read the users.

        Raises ConfigurationError for unusable files and secrets.
        """
        self._settings = settings
        self._path = settings.users_file()
        self._text = ""  # Content of the users file whose users are in force.
        self._in_force = found = self.candidate(settings)
        self._text = found.text
        self.users: dict[str, User] = dict(found.users)
        self.access = Access(found.hashes, guest=settings.guest, scram=found.scram, logins=settings.logins)
        self.fetched_keys: list[KeysUrl] = []
        self._key_files: list[KeysFile] = []
        self.http_backends: list[HttpUsers] = []
        self._http_clients: list[BackendHttpClient] = []
        self._tasks: list[Callable[[], Awaitable[None]]] = []
        self.access.backends = [self._backend(one) for one in settings.authentication]

    def _backend(self, options: UsersBackend | CertificatesBackend | JwtBackend | HttpBackend) -> Backend:
        """Build the authentication back end that these options configure."""
        if isinstance(options, UsersBackend):
            return self.access.users
        if isinstance(options, CertificatesBackend):
            return Certificates(options.name, self.access.users if options.known_only else None)
        if isinstance(options, HttpBackend):
            client = BackendHttpClient(
                options.timeout_secs,
                ca_file=options.ca_file,
                connections_max=options.connections_max,
                keepalive_max=options.connections_max,
            )
            self._http_clients.append(client)
            self.http_backends.append(HttpUsers(options, client))
            return self.http_backends[-1]
        return Tokens(options, self._keys(options))

    def _keys(self, options: JwtBackend) -> KeysFile | KeysUrl:
        """Build the source of a JWT back end's keys: a file, or a URL that is read periodically."""
        keys: KeysFile | KeysUrl
        if options.keys_file is not None:
            keys = KeysFile(options.keys_file, symmetric=bool(SYMMETRIC & set(options.algorithms)))
            self._key_files.append(keys)
        else:
            assert options.keys_url is not None, "the settings have one of the two"
            keys = KeysUrl(
                options.keys_url,
                BackendHttpClient(options.timeout_secs, ca_file=options.keys_ca_file),
                refresh_secs=options.keys_refresh_secs,
                kept_secs=options.keys_kept_secs,
            )
            self.fetched_keys.append(keys)
        self._tasks.append(keys.run)
        return keys

    @property
    def hashes(self) -> dict[str, str]:
        """Password hashes in force by user name, including users of RabbitMQ exports."""
        return self._in_force.hashes

    def candidate(self, settings: Settings) -> DefinedUsers:
        """Read users and their secrets from `settings`, the users file and RabbitMQ exports.

        The users in force are not changed. Raises ConfigurationError if a file is unusable, if the users file
        is truncated or has lost all its users, or if a user is both in the users file and in `settings`.
        """
        several = read_imports(self._settings)
        users, text = dict(settings.users), ""
        if self._path is not None:
            file = read_users(self._path, self._text)
            if both := sorted(users.keys() & file.users.keys()):
                raise ConfigurationError(
                    f"{self._path}: {both[0]!r} is also in the configuration; remove one"
                )
            if self._text and not file.users:
                reason = "the file has no users; if that is intended, restart the gateway"
                raise ConfigurationError(reason, file=str(self._path))
            users, text = {**users, **file.users}, file.text
        hashes, scram = secrets_of(users)
        exported = {name: secret for one in several for name, secret in one.hashes.items()}
        return DefinedUsers(users, {**exported, **hashes}, scram, text)

    def use(self, found: DefinedUsers) -> UsersReplacement | None:
        """Put the users in `found` in force.

        Return the number of users and the names of removed users, or None if the same users were in force
        already.
        """
        before, self._in_force = self._in_force, found
        self._text = found.text
        if found[:3] == before[:3]:  # Only comments may have changed.
            return None
        removed = frozenset(before.hashes.keys() - found.hashes.keys())
        self.users.clear()
        self.users.update(found.users)
        self.access.users.replace(found.hashes, found.scram)
        return UsersReplacement(len(found.hashes), removed)

    def files(self) -> list[Path]:
        """Return the files that define users: the users file, RabbitMQ exports, and files of user secrets."""
        secret = [file for user in self.users.values() for file in (user.password_hash_file, user.scram_file)]
        declared = self._settings.declare
        files = [self._path, *(declared.definitions if declared.users else ()), *secret]
        return [file for file in files if file is not None]

    def reload_keys(self) -> None:
        """Read the files with the keys of JSON Web Tokens again, even if they have not changed."""
        for keys in self._key_files:
            keys.reload()

    def failures(self) -> dict[str, int]:
        """Return how many requests to authentication servers have had no response, by kind of back end."""
        jwt = sum(keys.failures for keys in self.fetched_keys)
        http = sum(backend.failures for backend in self.http_backends)
        return {kind: count for kind, count in ((Tokens.kind, jwt), (HttpUsers.kind, http)) if count}

    async def run(self) -> None:
        """Keep the keys of JSON Web Tokens up to date until cancelled."""
        async with trio.open_nursery() as nursery:
            for task in self._tasks:
                nursery.start_soon(task)

    async def close(self) -> None:
        """Close the connections to authentication servers. Returns after CLOSE_SECS at most."""
        with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_SECS):
            for client in self._http_clients:
                await client.close()


def secrets_of(users: Mapping[str, User]) -> tuple[dict[str, str], dict[str, Keys]]:
    """Return the password hashes and the SCRAM keys of users, both by user name.

    Raises ConfigurationError for a secret that is unreadable or has the wrong format.
    """
    hashes = {name: _hash_of(name, user) for name, user in users.items()}
    keys = {name: _keys_of(name, user) for name, user in users.items()}
    return hashes, {name: found for name, found in keys.items() if found is not None}


def roles_of(settings: Settings, users: Mapping[str, User] | None = None) -> Roles:
    """Return the roles of the configuration and of RabbitMQ exports, and the roles that each user has.

    `users` are the users in force; None stands for the users of the configuration. Raises ConfigurationError
    for exports that cannot be read.
    """
    several = read_imports(settings)
    roles = {name: role for one in several for name, role in one.roles.items()}
    imported_users = {name: has for one in several for name, has in one.users.items()}
    imported_users |= {
        name: user.roles for name, user in (settings.users if users is None else users).items()
    }
    return Roles(roles | settings.roles, imported_users, settings.default_roles)


def authorizer_of(settings: Settings) -> HttpAuthorizerClient | None:
    """Return the HTTP authorizer, or None if none is configured.

    Raises ConfigurationError if its TLS files cannot be used.
    """
    options = settings.authorizer
    if options is None:
        return None
    most = options.connections_max
    client = BackendHttpClient(
        options.timeout_secs, ca_file=options.ca_file, connections_max=most, keepalive_max=most
    )
    return HttpAuthorizerClient(options, client)


def read_imports(settings: Settings) -> list[Imported]:
    """Read the users, permissions and virtual hosts of the configured RabbitMQ exports.

    Return an empty list unless `declare.users` is true. Raises ConfigurationError for an export that cannot
    be used.
    """
    declared = settings.declare
    return [read_imported(file) for file in declared.definitions] if declared.users else []


def with_imported_hosts(settings: Settings) -> Settings:
    """Return `settings` with the virtual hosts of RabbitMQ exports added to AMQP 0-9-1 listeners.

    A listener whose `virtual_hosts` are configured is unchanged.
    """
    hosts = [host for one in read_imports(settings) for host in one.hosts]
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
    # Without this check, a password in place of its hash would appear to clients as a wrong password.
    text = user.hash()
    has_hash = user.password_hash is not None or user.password_hash_file is not None
    if has_hash and not is_hash(text):
        key = "password_hash" if user.password_hash_file is None else "password_hash_file"
        raise ConfigurationError(
            f"users.{name}.{key}: not an Argon2 hash; set it to what `gateway passwd` prints"
        )
    return text


def _keys_of(name: str, user: User) -> Keys | None:
    text = user.scram_keys()
    try:
        return parse_keys(text) if text else None
    except ValueError as error:
        raise ConfigurationError(
            f"users.{name}.scram: {error}; set it to what `gateway passwd --scram` prints"
        ) from error
