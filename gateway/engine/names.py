"""Names of the engine's exchanges and queues, and the translation of topics to routing keys.

A topic becomes a routing key as in `mappings/identity.yaml`: levels stay levels, and characters that a level
of a key cannot contain are percent-encoded, so that each key can be decoded to its topic. A topic filter
becomes a binding key in the same way, with `*` for `+` and `#` for `#`. A trailing `#` also matches zero
levels in RabbitMQ, as in MQTT. But RabbitMQ does not know the special meaning of `$`, so replicas match
received messages again.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.mapping.names import LevelTranslation, translation
from gateway.model.address import Address
from gateway.model.dialect import NameRefused
from gateway.protocols.amqp091.dialect import AMQP091
from gateway.protocols.amqp091.spec import SHORT_STRING_MAX
from gateway.protocols.mqtt.dialect import MQTT

TO_KEY: Final[LevelTranslation] = translation(MQTT, AMQP091, "percent")
TO_TOPIC: Final[LevelTranslation] = translation(AMQP091, MQTT, "percent")
READABLE_BYTES_MAX: Final = 96
SHORTENED_MIN: Final = SHORT_STRING_MAX // 3  # characters of a filter whose key may be shortened: %2E is one
WILD: Final = {"+": "*", "#": "#"}


class Names(NamedTuple):
    """Names, or prefixes of names, of the RabbitMQ exchanges and queues of one namespace.

    The broker's default exchange is not used: a user who may publish to it reaches every queue of the virtual
    host.
    """

    topics: str
    queues: str  # prefix of the names of replicas' queues
    sessions: str  # prefix of the names of sessions' queues
    shares: str  # prefix of the names of shared subscriptions' queues
    dropped: str  # exchange for dropped messages, and the queue in which they are counted
    clock: str  # prefix of the queues by which a replica queries the time
    direct: str  # exchange that routes to queues by their names


def names_of(namespace: str, topic_exchange: str) -> Names:
    """Return the names of exchanges and queues in RabbitMQ for replicas with this `namespace`.

    `topic_exchange` is the configured name of the exchange for topics.
    """
    return Names(
        topic_exchange,
        f"{namespace}.replica",
        f"{namespace}.session",
        f"{namespace}.share",
        f"{namespace}.dropped",
        f"{namespace}.clock",
        f"{namespace}.direct",
    )


def readable(name: str) -> str:
    """Return the beginning of a client's or group's name, for the readable part of a queue's name."""
    return name.encode()[:READABLE_BYTES_MAX].decode(errors="ignore")


def key_of(topic: str) -> bytes | None:
    """Return the routing key of a topic, in UTF-8, or None if it is longer than AMQP permits."""
    key = ".".join([TO_KEY(level) for level in topic.split("/")]).encode()
    return key if len(key) <= SHORT_STRING_MAX else None


def binding_of(levels: list[str]) -> str | None:
    """Return the binding key of a topic filter, or None if no topic that it matches fits into a key.

    A binding key has at most 255 bytes. If that of the filter is longer, the result is the key of the only
    topic that fits, if there is just one, otherwise the filter's first levels with `#` behind them, which
    matches more topics than the filter.
    """
    parts = [WILD.get(level) or TO_KEY(level) for level in levels]
    if _fits(parts):
        return ".".join(parts)
    least = ["" if level == "+" else TO_KEY(level) for level in levels if level != "#"]
    if not _fits(least):
        return None
    if not _fits([*least, ""]):  # nothing else fits
        return ".".join(least)
    while not _fits([*parts, "#"]):
        parts.pop()
    return ".".join([*parts, "#"])


def _fits(parts: list[str]) -> bool:
    """Return True if these words, joined with dots to a binding key, are not longer than AMQP permits."""
    return len(".".join(parts).encode()) <= SHORT_STRING_MAX


def topic_of(key: str) -> Address:
    """Return the address of the topic that a routing key encodes.

    Raises NameRefused if the key encodes no topic.
    """
    if not key:
        raise NameRefused("an empty routing key is not a topic")
    return MQTT.address("", "/".join([TO_TOPIC(level) for level in key.split(".")]))
