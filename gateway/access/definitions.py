"""Users, permissions and virtual hosts of what RabbitMQ exports of itself (`definitions.json`).

Each user gets a role of its own, `rabbitmq:NAME`, that nothing else can be called: its permissions by virtual
host, its topic permissions, and what RabbitMQ's MQTT plug-in makes of them in virtual host `/`.
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

DEFINITIONS_OCTETS_MAX: Final = 64 * 1024 * 1024
MQTT_HOST: Final = "/"
FAULT_MAX: Final = 300  # characters of what is wrong
CONSOLE: Final = {"administrator": "write", "monitoring": "read", "management": "read", "policymaker": "read"}
EVERYWHERE: Final = frozenset({"administrator", "monitoring"})  # tags that see all virtual hosts


class Imported(NamedTuple):
    """What a file says of who may do what."""

    hashes: dict[str, str]
    roles: dict[str, Role]
    users: dict[str, tuple[str, ...]]
    hosts: tuple[str, ...]


def role_name(user: str) -> str:
    """The name of the role that a user of RabbitMQ gets."""
    return f"rabbitmq:{user}"


def read_users(file: Path) -> Imported:
    """Read a file. Raises ConfigurationError."""
    try:
        with file.open("rb") as stream:
            content = orjson.loads(stream.read(DEFINITIONS_OCTETS_MAX))
    except OSError as error:
        raise ConfigurationError(f"cannot be read: {error.strerror}", file=str(file)) from error
    except orjson.JSONDecodeError as error:
        raise ConfigurationError(f"not JSON: {error.msg}", file=str(file)) from error
    try:
        return _imported(content)
    except (KeyError, TypeError, AttributeError, ValidationError, ValueError) as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:FAULT_MAX]}"
        reason = f"its users or permissions are not as RabbitMQ exports them: {text}"
        raise ConfigurationError(reason, file=str(file)) from error


def _imported(content: dict[str, Any]) -> Imported:
    users: list[dict[str, Any]] = content.get("users", [])
    permissions = {(one["user"], one["vhost"]): one for one in content.get("permissions", [])}
    topics: dict[tuple[str, str], dict[str, TopicPermission]] = {}
    for one in content.get("topic_permissions", []):
        given = TopicPermission(write=one.get("write", ""), read=one.get("read", ""))
        topics.setdefault((one["user"], one["vhost"]), {})[one["exchange"]] = given
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
        del hashes[GUEST]  # everybody knows it: where it is good is for `guest` of the configuration to say
    names: dict[str, tuple[str, ...]] = {user["name"]: (role_name(user["name"]),) for user in users}
    names.pop(ANONYMOUS, None)  # here that is the name of whoever has none
    return Imported(hashes, roles, names, tuple(one["name"] for one in content.get("vhosts", [])))


def _tags(given: str | list[str]) -> Iterator[str]:
    """Newer versions have a list, older ones a text."""
    yield from (one.strip() for one in (given.split(",") if isinstance(given, str) else given))


def _console(tags: Iterable[str]) -> Literal["none", "read", "write"]:
    found = {CONSOLE.get(tag, "none") for tag in tags}
    return "write" if "write" in found else "read" if "read" in found else "none"
