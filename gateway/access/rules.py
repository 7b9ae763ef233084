"""Rules of roles, compiled for checks: placeholders filled in, expressions and filters compiled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from gateway.access.filters import FilterSet
from gateway.access.scopes import PermissionScope
from gateway.access.templates import Variables, beginning, denied_filter, expression, fill, topic_filter
from gateway.regexes import Regex
from gateway.settings.access import (
    EVERY_HOST,
    AmqpPermissions,
    Destinations,
    FastPermissions,
    MqttRules,
    Role,
)

NamedRoles = Sequence[tuple[str, Role]]
SERVICES: Final = ("queue", "topic")
EVERY_KEY: Final = frozenset({".*", "^.*", ".*$", "^.*$", "^"})
"""Regular expressions that are known to match every routing key; others that match all are not recognized."""


def _filters(roles: Iterable[tuple[str, MqttRules]], word: str) -> Iterable[tuple[str, str]]:
    for name, rules in roles:
        for text in getattr(rules, word):
            yield text, f"roles.{name}.mqtt.{word}: {text}"


class MqttGrant:
    """Compiled MQTT rules of all clients that have the same roles.

    Roles without any setting in `mqtt` are ignored.
    """

    __slots__ = (
        "_filters",
        "hosts",
        "qos_max",
        "retain",
        "rule",
        "session_expiry_secs_max",
        "shared",
        "will",
    )

    def __init__(self, roles: NamedRoles) -> None:
        permissions = [(name, role.mqtt) for name, role in roles if role.mqtt.model_fields_set]
        words = ("publish", "subscribe", "deny_publish", "deny_subscribe")
        self._filters = {word: FilterSet(_filters(permissions, word)) for word in words}
        rules = [one for _, one in permissions]
        speaking = [name for name, one in permissions if one.publish or one.subscribe]
        self.rule = f"roles.{speaking[0]}.mqtt" if speaking else None
        self.qos_max = max((one.qos_max for one in rules), default=2)
        self.retain = any(one.retain for one in rules) or not rules
        self.will = any(one.will for one in rules) or not rules
        self.shared = any(one.shared for one in rules) or not rules
        expiries = [one.session_expiry_secs_max for one in rules]
        stated = [one for one in expiries if one is not None]
        self.session_expiry_secs_max = max(stated) if stated and len(stated) == len(expiries) else None
        self.hosts = [
            (name, one.as_virtual_host) for name, one in permissions if one.as_virtual_host is not None
        ]

    def allowed(self, action: str, name: str, variables: Variables) -> str | None:
        """Return the rule that allows an action on the topic or topic filter `name`, or None.

        `action` is `publish` or `subscribe`. `variables` are the client's values for placeholders.
        """
        return self._filters[action].covering_rule(name, lambda text: topic_filter(text, variables))

    def denying_rule(self, action: str, name: str, variables: Variables) -> str | None:
        """Return the rule that denies an action on the topic or topic filter `name`, or None.

        `action` is `publish` or `subscribe`. `variables` are the client's values for placeholders.
        """
        return self._filters[f"deny_{action}"].overlapping_rule(
            name, lambda text: denied_filter(text, variables)
        )


class AmqpGrant(NamedTuple):
    """AMQP 0-9-1 permissions that one role or one scope gives in one virtual host, as in RabbitMQ.

    `names` has the regular expression for names of queues and exchanges, by permission. `topics` has the
    regular expression for routing keys, by exchange and permission. `key` is the regular expression for
    routing keys that a scope has. `rule` names the role or scope.
    """

    rule: str
    names: Mapping[str, Regex]
    topics: Mapping[tuple[str, str], Regex | None]
    key: Regex | None = None

    def allows(self, permission: str, name: str) -> bool:
        """Return True if the permission is given for the exchange or queue `name`."""
        found = self.names.get(permission)
        return found is not None and found.search(name)

    def allows_key(self, permission: str, exchange: str, key: str | None) -> bool:
        """Return True if the permission is given for a routing key of a topic exchange.

        The key None stands for every key.
        """
        if not self.allows(permission, exchange):
            return False
        found = self.key
        if found is None:
            if (exchange, permission) not in self.topics:
                return True
            found = self.topics[exchange, permission]
        if found is None:
            return False
        return found.pattern in EVERY_KEY if key is None else found.search(key)


def _matching_host_keys(host: str, several: Mapping[str, object], variables: Variables) -> Iterable[str]:
    """Yield the keys of the mapping `several` that apply to the virtual host `host`.

    A key is the name of a virtual host, which may contain placeholders, or EVERY_HOST.
    """
    for key in several:
        if key == EVERY_HOST or fill(key, variables, lambda value: value) == host:
            yield key


def amqp_grants(
    roles: NamedRoles, scopes: Sequence[PermissionScope], host: str, variables: Variables
) -> list[AmqpGrant]:
    """Return the AMQP 0-9-1 permissions that roles and scopes give a client in a virtual host.

    An empty list means that the client may not use the virtual host by any rule. `variables` are the client's
    values for placeholders.
    """
    variables = {**variables, "vhost": host}
    found = []
    for name, role in roles:
        for key in _matching_host_keys(host, role.amqp091, variables):
            found.append(_amqp_grant(f"roles.{name}.amqp091.{key}", role.amqp091[key], variables))
    for scope in scopes:
        if scope.host.search(host):
            names = {scope.permission: scope.name}
            found.append(AmqpGrant(f"scope {scope.text}", names, {}, scope.key))
    return found


def _amqp_grant(rule: str, permissions: AmqpPermissions, variables: Variables) -> AmqpGrant:
    """Compile the AMQP 0-9-1 permissions of a role in one virtual host, with placeholders replaced.

    `rule` names the role and the virtual host.
    """
    words = ("configure", "write", "read")
    compiled = {word: expression(getattr(permissions, word), variables) for word in words}
    names = {word: one for word, one in compiled.items() if one is not None}
    topics = {
        (exchange, word): expression(getattr(one, word), variables)
        for exchange, one in permissions.topics.items()
        for word in ("write", "read")
    }
    return AmqpGrant(rule, names, topics)


class FastGrant(NamedTuple):
    """AMQP/Fast rights that one role or one scope gives in one virtual host.

    `rule` names the role or scope. A role has `names`: the permitted names of destinations by service and
    right, each a name, or the beginning of names followed by `*`; and `folders`: permitted names of shared
    folders, in the same notation. A scope has `pattern`, which matches names of queues and topics, and its
    `rights`.
    """

    rule: str
    names: Mapping[tuple[str, str], tuple[str, ...]]
    folders: tuple[str, ...] = ()
    pattern: Regex | None = None
    rights: tuple[str, ...] = ()

    def concerns(self, service: str, name: str) -> bool:
        """Return True if any right may be given to a destination whose name is, or begins with, `name`.

        For a scope, return True for all queues and topics.
        """
        if self.pattern is not None:
            return service in SERVICES
        return any(
            _may_mean(text, name)
            for (one, _), texts in self.names.items()
            if one == service
            for text in texts
        )

    def allows(self, right: str, service: str, name: str, *, whole: bool) -> bool:
        """Return True if a right to the destination `name` is given.

        With `whole`, return True only if the right is given to all destinations whose names begin with
        `name`.
        """
        if self.pattern is not None:
            return right in self.rights and service in SERVICES and not whole and self.pattern.search(name)
        return _covers(self.names.get((service, right), ()), name, whole=whole)

    def allows_folder(self, name: str) -> bool:
        """Return True if channels may use the folder `name` directly below the shared folder."""
        return _covers(self.folders, name, whole=False)


def _covers(texts: Iterable[str], name: str, *, whole: bool) -> bool:
    """Return True if one of `texts` matches `name`; with `whole`, all names that begin with `name`.

    A text is a name, or the beginning of names followed by `*`.
    """
    for text in texts:
        if text[-1:] == "*" and name.startswith(text[:-1]):
            return True
        if text == name and not whole:
            return True
    return False


def _may_mean(text: str, name: str) -> bool:
    """Return True if `text` matches `name`, or any name that begins with `name`.

    The text is a name, or the beginning of names followed by `*`.
    """
    return text.rstrip("*").startswith(name) or (text[-1:] == "*" and name.startswith(text[:-1]))


def fast_grants(
    roles: NamedRoles, scopes: Sequence[PermissionScope], host: str, variables: Variables
) -> list[FastGrant]:
    """Return the AMQP/Fast rights that roles and scopes give a client in a virtual host.

    An empty list means that the client may not use the virtual host by any rule. `variables` are the client's
    values for placeholders.
    """
    variables = {**variables, "vhost": host}
    found = []
    for name, role in roles:
        for key in _matching_host_keys(host, role.amqpfast, variables):
            found.append(_fast_grant(f"roles.{name}.amqpfast.{key}", role.amqpfast[key], variables))
    for scope in scopes:
        if scope.host.search(host):
            rights = {"configure": ("create",), "write": ("write",), "read": ("read", "browse")}
            found.append(
                FastGrant(f"scope {scope.text}", {}, pattern=scope.name, rights=rights[scope.permission])
            )
    return found


def _fast_grant(rule: str, permissions: FastPermissions, variables: Variables) -> FastGrant:
    """Compile the AMQP/Fast rights of a role in one virtual host, with placeholders replaced.

    `rule` names the role and the virtual host.
    """
    names: dict[tuple[str, str], tuple[str, ...]] = {("peer", "talk"): _filled(permissions.peers, variables)}
    services: tuple[tuple[str, Destinations], ...] = (
        ("queue", permissions.queues),
        ("topic", permissions.topics),
    )
    for service, one in services:
        for right in ("read", "write", "create"):
            names[service, right] = _filled(getattr(one, right), variables)
        names[service, "browse"] = _filled((*one.browse, *one.read), variables)
    return FastGrant(rule, names, _folders(permissions.out_of_band, variables))


def _folders(folders: bool | tuple[str, ...], variables: Variables) -> tuple[str, ...]:
    """Return the names of the shared folders that a role permits, with placeholders replaced.

    Each is a name, or the beginning of names followed by `*`. If `folders` is True, the folder with the
    user's name is permitted.
    """
    if isinstance(folders, tuple):
        return _filled(folders, variables)
    user = variables.get("user", "")
    return (user,) if folders and user and "*" not in user else ()


def _filled(texts: Iterable[str], variables: Variables) -> tuple[str, ...]:
    return tuple(one for text in texts if (one := beginning(text, variables)) is not None)
