"""What is what on the cluster: names, and topics as routing keys.

A topic becomes a key as `mappings/identity.yaml` has it: levels stay levels, and what a level cannot hold
there is percent-encoded, so that each key is read back as the topic that it was. A topic filter becomes a
binding key in the same way, for `+` is `*` and `#` is `#`. RabbitMQ lets a trailing `#` match no level at
all, as MQTT does, but knows nothing of `$`: whoever gets a message matches it again.
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
READABLE_OCTETS_MAX: Final = 96
WILD: Final = {"+": "*", "#": "#"}


class Names(NamedTuple):
    """The exchanges and queues of one namespace.

    The broker's default exchange is not used: whoever may publish to it reaches every queue of the virtual
    host.
    """

    topics: str
    queues: str  # with what the names of replicas' queues begin
    sessions: str  # and those of sessions, and
    shares: str  # of shared subscriptions
    dropped: str  # where messages go for which a queue has no room; and the queue in which they are counted
    clock: str  # with what the names of queues begin by which a replica learns the time
    direct: str  # the exchange that leads to queues by their names


def names_of(namespace: str, topic_exchange: str) -> Names:
    """The names of a namespace."""
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
    """A name of a client's within the name of a queue, for people's eyes."""
    return name.encode()[:READABLE_OCTETS_MAX].decode(errors="ignore")


def key_of(topic: str) -> bytes | None:
    """The routing key of a topic, in UTF-8; None: it would be longer than a key may be."""
    key = ".".join([TO_KEY(level) for level in topic.split("/")]).encode()
    return key if len(key) <= SHORT_STRING_MAX else None


def binding_of(levels: list[str]) -> str | None:
    """The binding key of a topic filter; None: no topic that fits into a key can match it."""
    key = ".".join([WILD.get(level) or TO_KEY(level) for level in levels])
    return key if len(key.encode()) <= SHORT_STRING_MAX else None


def topic_of(key: str) -> Address:
    """The address of the topic that a key stands for. Raises NameRefused for one that stands for none."""
    if not key:
        raise NameRefused("the empty key is no topic")
    return MQTT.address("", "/".join([TO_TOPIC(level) for level in key.split(".")]))
