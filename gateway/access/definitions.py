"""Import of users, permissions and virtual hosts from a RabbitMQ export (`definitions.json`).

Each user gets a role of its own, `rabbitmq:NAME`, a name that no other role can have. The role holds the
user's permissions by virtual host, its topic permissions, and the rights in MQTT that RabbitMQ's MQTT plug-in
derives from the permissions in virtual host `/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import orjson
from pydantic import ValidationError

from gateway.access.rabbit_passwords import imported_hash, is_rabbit_hash, matches
from gateway.errors import ConfigurationError
from gateway.settings.access import AmqpPermissions, MqttRules, Role, TopicPermission
from gateway.settings.tree import ANONYMOUS, GUEST

DEFINITIONS_BYTES_MAX: Final = 64 * 1024 * 1024
MQTT_HOST: Final = "/"
FAULT_MAX: Final = 300  # characters of an error text
CONSOLE: Final = {"administrator": "write", "monitoring": "read", "management": "read", "policymaker": "read"}
EVERYWHERE: Final = frozenset({"administrator", "monitoring"})  # tags that see all virtual hosts


class Imported(NamedTuple):
    """Users, roles and virtual hosts in a definitions file of RabbitMQ.

    `hashes` has password hashes by user name, `users` role names by user name, `roles` the roles by name.
    `hosts` are the names of the virtual hosts.
    """

    hashes: dict[str, str]
    roles: dict[str, Role]
    users: dict[str, tuple[str, ...]]
    hosts: tuple[str, ...]


def role_name(user: str) -> str:
    """Return the name of the role that holds the permissions of a user imported from RabbitMQ."""
    return f"rabbitmq:{user}"


def read_users(file: Path) -> Imported:
    """Read the users, permissions and virtual hosts in a definitions file of RabbitMQ.

    Raises ConfigurationError if the file cannot be read, is not JSON, or does not have the form of RabbitMQ's
    exports.
    """
    try:
        with file.open("rb") as stream:
            content = orjson.loads(stream.read(DEFINITIONS_BYTES_MAX))
    except OSError as error:
        raise ConfigurationError(f"cannot be read: {error.strerror}", file=str(file)) from error
    except orjson.JSONDecodeError as error:
        raise ConfigurationError(f"not JSON: {error.msg}", file=str(file)) from error
    try:
        return _imported(content)
    except (KeyError, TypeError, AttributeError, ValidationError, ValueError) as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:FAULT_MAX]}"
        reason = f"its users or permissions do not have the form of a RabbitMQ export: {text}"
        raise ConfigurationError(reason, file=str(file)) from error


def _imported(content: dict[str, Any]) -> Imported:
    """Return the users, roles and virtual hosts that the parsed definitions of RabbitMQ describe."""
    users: list[dict[str, Any]] = content.get("users", [])
    permissions = {(one["user"], one["vhost"]): one for one in content.get("permissions", [])}
    topics: dict[tuple[str, str], dict[str, TopicPermission]] = {}
    for one in content.get("topic_permissions", []):
        permission = TopicPermission(write=one.get("write", ""), read=one.get("read", ""))
        topics.setdefault((one["user"], one["vhost"]), {})[one["exchange"]] = permission
    roles = {}
    for user in users:
        name = user["name"]
        hosts = {
            host: AmqpPermissions(
                configure=one["configure"],
                write=one["write"],
                read=one["read"],
                topics=topics.get((name, host), {}),
            )
            for (whose, host), one in permissions.items()
            if whose == name
        }
        rules = MqttRules(as_virtual_host=MQTT_HOST) if MQTT_HOST in hosts else MqttRules()
        tags = frozenset(_tags(user.get("tags", "")))
        roles[role_name(name)] = Role(
            amqp091=hosts,
            mqtt=rules,
            console=_console(tags),
            console_bodies="administrator" in tags,
            console_virtual_hosts=None if tags & EVERYWHERE else tuple(hosts),
        )
    hashes = {
        user["name"]: imported_hash(
            user.get("password_hash") or "", user.get("hashing_algorithm") or "rabbit_password_hashing_sha256"
        )
        for user in users
    }
    if is_rabbit_hash(hashes.get(GUEST, "")) and matches(hashes[GUEST], GUEST.encode()):
        del hashes[GUEST]  # a public password: the setting `guest` decides where it is accepted
    names: dict[str, tuple[str, ...]] = {user["name"]: (role_name(user["name"]),) for user in users}
    names.pop(ANONYMOUS, None)  # this name stands for anonymous clients here
    return Imported(hashes, roles, names, tuple(one["name"] for one in content.get("vhosts", [])))


def _tags(tags: str | list[str]) -> Iterator[str]:
    """Yield the tags of a user in a definitions file of RabbitMQ.

    Newer versions of RabbitMQ export a list of tags, older ones a text with commas.
    """
    yield from (one.strip() for one in (tags.split(",") if isinstance(tags, str) else tags))


def _console(tags: Iterable[str]) -> Literal["none", "read", "write"]:
    """Return the console right that corresponds to RabbitMQ's user tags."""
    found = {CONSOLE.get(tag, "none") for tag in tags}
    return "write" if "write" in found else "read" if "read" in found else "none"
