"""What destinations are called on the cluster, and what a queue there says of itself.

| name | kind | for |
|---|---|---|
| `NS.fast` | topic exchange | topics of all virtual hosts: a key is a digest of the host, and the name |
| `NS.fast.queue.NAME.HASH` | queue | a destination of the queue service, durable or temporary |
| `NS.fast.subscription.HASH` | queue | a durable subscription, by client-name and identifier |
| `NS.fast.listener.HASH` | queue | any other subscription |
| `NS.fast.client.HASH` | exclusive queue | a client-name that is in use |

Nobody writes down what there is. A queue is declared with a dead-letter key that says whose it is (`mark`),
which RabbitMQ compares and, where it differs, tells: so a replica that has never heard of a temporary queue,
or of a subscription, learns of its owner by trying to declare it.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Final

from gateway.engine.names import readable
from gateway.protocols.amqp091.spec import SHORT_STRING_MAX

HASH_OCTETS: Final = 8
HOST_OCTETS: Final = 4
QUEUE_MARK: Final = "queue"
MARK: Final = "x-dead-letter-routing-key"
TOPIC_OCTETS_MAX: Final = SHORT_STRING_MAX - 2 * HOST_OCTETS - 1
CURRENT: Final = re.compile(r"but current is '([^']*)'")


def digest(*parts: str, size: int = HASH_OCTETS) -> str:
    """Of texts that may contain anything: the same at every replica."""
    return blake2b(repr(parts).encode(errors="surrogatepass"), digest_size=size).hexdigest()


class FastNames:
    """The names of one namespace."""

    def __init__(self, namespace: str, dropped: str) -> None:
        """`dropped`: the exchange for what a queue has no room for."""
        self.exchange = f"{namespace}.fast"
        self.dropped = dropped

    def queue(self, host: str, name: str) -> str:
        """Of a destination of the queue service."""
        return f"{self.exchange}.queue.{readable(name)}.{digest(host, name)}"

    def subscription(self, host: str, client: str, identifier: str) -> str:
        """Of a durable subscription."""
        return f"{self.exchange}.subscription.{digest(host, client, identifier)}"

    def listener(self, token: str) -> str:
        """Of a subscription that ends with its handle."""
        return f"{self.exchange}.listener.{token}"

    def client(self, name: str) -> str:
        """Which stands for a client-name in use."""
        return f"{self.exchange}.client.{digest(name)}"


def topic_key(host: str, name: str) -> str:
    """The routing key of a topic. It has room for names of TOPIC_OCTETS_MAX."""
    return f"{digest(host, size=HOST_OCTETS)}.{name}"


def binding_key(host: str, name: str, *, prefix: bool) -> str:
    """What brings the messages of a topic, or of all whose names begin with `name`, and maybe others: a
    binding knows whole levels, and `*` within a name means more to it than it does here."""
    return topic_key(host, f"{name[: name.rfind('.') + 1]}#" if prefix else name)


def temporary_mark(owner: str) -> str:
    """Of a temporary queue."""
    return f"temporary.{digest(owner)}"


def subscription_mark(user: str, interest: tuple[object, ...]) -> str:
    """Of a durable subscription: whose it is, and what it is for."""
    return f"{digest(user)}.{digest(*map(repr, interest))}"


def current_mark(text: str) -> str:
    """What a queue is declared with, as RabbitMQ tells it where something else was said; "": it does not."""
    found = CURRENT.search(text) if f"'{MARK}'" in text else None
    return "" if found is None else found[1]
