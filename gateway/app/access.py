"""Users and roles of the configuration, and of what RabbitMQ has exported, as the rooms below want them."""

from __future__ import annotations

from gateway.access.asking import Asker
from gateway.access.authentication import Access, is_hash
from gateway.access.authorization import Roles
from gateway.access.definitions import Imported, read_users
from gateway.access.questions import HttpQuestions
from gateway.access.scram import Keys, parse_keys
from gateway.errors import ConfigurationError
from gateway.protocols.amqp091.dialect import AMQP091
from gateway.settings import Settings, User
from gateway.settings.amqpfast import FastVirtualHost


def access_of(settings: Settings) -> Access:
    """Who may connect. Raises ConfigurationError for secrets that cannot be read, or are none."""
    hashes = {name: text for one in imported(settings) for name, text in one.hashes.items()}
    hashes |= {name: _hash_of(name, user) for name, user in settings.users.items()}
    keys = {name: _keys_of(name, user) for name, user in settings.users.items()}
    scram = {name: found for name, found in keys.items() if found is not None}
    return Access(hashes, guest=settings.guest, scram=scram, logins=settings.logins)


def roles_of(settings: Settings) -> Roles:
    """The roles, and who has which. Raises ConfigurationError for exports that cannot be read."""
    several = imported(settings)
    roles = {name: role for one in several for name, role in one.roles.items()}
    users = {name: has for one in several for name, has in one.users.items()}
    users |= {name: user.roles for name, user in settings.users.items()}
    return Roles(roles | settings.roles, users, settings.default_roles)


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
    return [read_users(file) for file in given.definitions] if given.users else []


def with_imported_hosts(settings: Settings) -> Settings:
    """AMQP 0-9-1 listeners that name no virtual hosts have those of the exports beside their own."""
    hosts = [host for one in imported(settings) for host in one.hosts]
    if not hosts:
        return settings
    listeners = {
        name: one.model_copy(
            update={"virtual_hosts": one.virtual_hosts | dict.fromkeys(hosts, FastVirtualHost())}
        )
        if one.protocol == AMQP091.name and "virtual_hosts" not in one.model_fields_set
        else one
        for name, one in settings.listeners.items()
    }
    return settings.model_copy(update={"listeners": listeners})


def _hash_of(name: str, user: User) -> str:
    # A password put where its hash belongs would be found out by a client only, and as a wrong password.
    text = user.hash()
    if (text or not user.scram_keys()) and not is_hash(text):
        key = "password_hash" if user.password_hash_file is None else "password_hash_file"
        raise ConfigurationError(f"users.{name}.{key}: this is no argon2 hash; `gateway passwd` makes one")
    return text


def _keys_of(name: str, user: User) -> Keys | None:
    text = user.scram_keys()
    try:
        return parse_keys(text) if text else None
    except ValueError as error:
        raise ConfigurationError(f"users.{name}.scram: {error}; `gateway passwd --scram` makes it") from error
