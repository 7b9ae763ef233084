"""Where a message goes, in each protocol's own words.

An address is made once and shared by all its messages. `wire` holds the octets by which its own protocol
writes it; caches along the way of a message are keyed by them, for bytes remember their hash.
"""

from __future__ import annotations

from typing import Final

ADDRESS_OCTETS_MAX: Final = 255  # one AMQP short string


class MqttAddress:
    """An MQTT topic name. `wire` is its UTF-8, without the length."""

    __slots__ = ("topic", "wire")
    protocol: Final = "mqtt"

    def __init__(self, topic: str, wire: bytes | None = None) -> None:
        self.topic = topic
        self.wire = topic.encode() if wire is None else wire

    def __repr__(self) -> str:
        return f"MqttAddress({self.topic!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MqttAddress) and other.wire == self.wire

    def __hash__(self) -> int:
        return hash(self.wire)


class AmqpAddress:
    """An exchange and a routing key; a queue is exchange "" with its name as the key.

    `wire` is the two short strings (length octet + UTF-8 each) as `basic.deliver` carries them.
    Raises ValueError when either exceeds 255 octets.
    """

    __slots__ = ("exchange", "routing_key", "wire")
    protocol: Final = "amqp091"

    def __init__(self, exchange: str, routing_key: str) -> None:
        first, second = exchange.encode(), routing_key.encode()
        if len(first) > ADDRESS_OCTETS_MAX or len(second) > ADDRESS_OCTETS_MAX:
            raise ValueError("an exchange name or routing key has at most 255 octets")
        self.exchange = exchange
        self.routing_key = routing_key
        self.wire = bytes((len(first),)) + first + bytes((len(second),)) + second

    def __repr__(self) -> str:
        return f"AmqpAddress({self.exchange!r}, {self.routing_key!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AmqpAddress) and other.wire == self.wire

    def __hash__(self) -> int:
        return hash(self.wire)


class FastAddress:
    """An AMQP/Fast destination: service type (`queue`, `topic`, `peer`) and full name."""

    __slots__ = ("destination", "service", "wire")
    protocol: Final = "amqpfast"

    def __init__(self, service: str, destination: str) -> None:
        self.service = service
        self.destination = destination
        self.wire = f"{service}:{destination}".encode()

    def __repr__(self) -> str:
        return f"FastAddress({self.service!r}, {self.destination!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FastAddress) and other.wire == self.wire

    def __hash__(self) -> int:
        return hash(self.wire)


Address = MqttAddress | AmqpAddress | FastAddress
