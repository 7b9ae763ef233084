"""Checks of a client's rights by protocol and action, for `gateway access explain`.

Actions and addresses are named as users know them from the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from gateway.access.rights import DEFAULT_EXCHANGE, Decision, Rights
from gateway.model.dialect import Dialect
from gateway.protocols.amqp091.dialect import AMQP091
from gateway.protocols.amqpfast.dialect import AMQPFAST
from gateway.protocols.mqtt.dialect import MQTT

PermissionQuery = Callable[[Rights, str, str], Decision]  # of rights, virtual host, and address or name


def _publish(dialect: Dialect) -> PermissionQuery:
    return lambda rights, host, text: rights.publish(dialect.parse(text), host)


def _permission(permission: str) -> PermissionQuery:
    def ask(rights: Rights, host: str, text: str) -> Decision:
        exchange, key = AMQP091.split(text)
        if exchange is None:  # a name alone; it is escaped like a name in front of a key
            name, _ = AMQP091.split(f"{text}:")
            return rights.amqp(host, permission, name or DEFAULT_EXCHANGE)
        found = rights.amqp(host, permission, exchange or DEFAULT_EXCHANGE)
        return rights.amqp_key(host, permission, exchange, key) if found.allowed else found

    return ask


def _destination(right: str) -> PermissionQuery:
    def ask(rights: Rights, host: str, text: str) -> Decision:
        address = AMQPFAST.parse(text)
        whole = address.name.endswith("*")
        return rights.fast(host, right, address.scope, address.name.rstrip("*"), whole=whole)

    return ask


QUESTIONS: Final[Mapping[str, Mapping[str, PermissionQuery]]] = {
    MQTT.name: {
        "connect": lambda rights, host, text: rights.has_client_id(text),
        "publish": _publish(MQTT),
        "subscribe": lambda rights, host, text: rights.mqtt_subscribe(text),
    },
    AMQP091.name: {
        "connect": lambda rights, host, text: rights.enters_amqp(text),
        "publish": _publish(AMQP091),
        **{word: _permission(word) for word in ("configure", "write", "read")},
    },
    AMQPFAST.name: {
        "connect": lambda rights, host, text: rights.enters_fast(text),
        "publish": _publish(AMQPFAST),
        **{word: _destination(word) for word in ("read", "browse", "write", "create")},
        "talk": lambda rights, host, text: rights.fast(host, "talk", "peer", text),
    },
}
"""Checks by protocol and action. Addresses have their usual form. AMQP 0-9-1 permissions are checked for the
name of a queue or exchange, which may be followed by a colon and a routing key; a colon within the name is
written `%3A`, as in every address."""
