"""Rights that the methods of AMQP 0-9-1 need, the same for the embedded broker and for clients of a cluster.

Names are normalised here, once, so that the name that is checked is the one that is used. A binding, an
alternate exchange and a dead-letter exchange let messages into an exchange with keys of their own; for a
topic exchange the client needs the right to publish with each of these keys.
"""

from __future__ import annotations

from typing import Final, Protocol

from gateway.model.properties import Headers
from gateway.protocols.amqp091 import methods as m

DEAD_LETTER_KEY: Final = "x-dead-letter-routing-key"


class Checker(Protocol):
    """Interface of a client for checks of its rights. The methods raise AmqpRefused, or Pending."""

    def check(self, permission: str, kind: str, name: str) -> None:
        """Check the permission `configure`, `write` or `read` for an exchange or queue (`kind`)."""

    def check_key(self, permission: str, exchange: str, key: str | None) -> None:
        """Check a permission for a routing key of an exchange, if that is a topic exchange.

        A key of None means every key.
        """


def without_line_ends(name: str) -> str:
    """Return a name without line ends, for declare, bind and delete.

    A program may have read the name, with its line end, from a file. Names in publish and consume are used
    unchanged, as in RabbitMQ.
    """
    return name.replace("\r", "").replace("\n", "")


def binding_key(method: m.QueueBind | m.QueueUnbind, queue: str) -> str:
    """Return the routing key of a binding.

    If the method has neither a queue name nor a key, it is `queue`, the name of the queue declared last.
    """
    return method.routing_key if without_line_ends(method.queue) or method.routing_key else queue


def check_binding(checker: Checker, kind: str, destination: str, source: str, key: str) -> None:
    """Check that the client may bind: it needs `write` for the destination and `read` for the source.

    `kind` is the type of the destination, and the names are normalised. Raises the error of the checker if a
    right is missing.
    """
    if destination:
        checker.check("write", kind, destination)
    if source:  # the default exchange is refused elsewhere
        checker.check("read", "exchange", source)
        checker.check_key("read", source, key)
    if kind == "exchange" and destination:  # the source's messages have keys of their own
        checker.check_key("write", destination, None)


def check_exchange_argument(
    checker: Checker, kind: str, name: str, arguments: Headers, argument: str
) -> None:
    """Check the right to use an argument that names another exchange (alternate or dead-letter exchange).

    `argument` is the argument's name. The client needs `read` for the queue or exchange `name`, and `write`
    for the named exchange, with the routing key in the arguments, or else with every key.
    """
    keys: list[str | None] = []
    if kind == "queue":
        keys += [value.value for word, value in arguments if word == DEAD_LETTER_KEY]
    for word, value in arguments:
        exchange = value.value
        if word == argument and isinstance(exchange, str):
            checker.check("read", kind, name)
            checker.check("write", "exchange", exchange)
            for key in keys or (None,):
                checker.check_key("write", exchange, key if isinstance(key, str) else None)
