"""Routing of exchanges of type `x-consistent-hash`: one destination for each hash, chosen by weight.

The key of a binding is its destination's weight, a positive integer. Each destination gets a score from the
hash of a message and its own name; the highest score, scaled by the weight, wins (rendezvous hashing).
Therefore a new destination takes over some messages of all others, and no message moves between these; the
messages of an unbound destination are spread over the remaining ones. The choice depends on names and weights
alone: it is the same after a restart and whatever the order of the bindings.
"""

from __future__ import annotations

from hashlib import blake2b
from math import inf, log
from typing import Any, Final, Generic, TypeVar

from gateway.broker.amqp091.arguments import HASH_HEADER, HASH_PROPERTY
from gateway.broker.amqp091.refusals import precondition_failed
from gateway.model.message import Message
from gateway.model.properties import Headers

WEIGHT_DIGITS_MAX: Final = 9
DESTINATION_STEPS: Final = 20  # of matching, for each destination: its score, some 600 ns
MASK: Final = (1 << 64) - 1
T = TypeVar("T")


def weight_of(key: str) -> int:
    """Return the weight that a binding key states, a positive integer.

    Raises AmqpRefused (406) with RabbitMQ's text.
    """
    digits = key.removeprefix("-").removeprefix("+")
    if not (digits.isascii() and digits.isdigit()):
        raise precondition_failed(f'The binding key must be an integer: <<"{key}">>')
    if key.startswith("-") or not int(digits[:18]):
        raise precondition_failed("The binding key must be greater than 0")
    if len(digits.lstrip("0")) > WEIGHT_DIGITS_MAX:
        raise precondition_failed(f"The binding key must have no more than {WEIGHT_DIGITS_MAX} digits")
    return int(digits)


class HashRing(Generic[T]):
    """Weighted destinations of an `x-consistent-hash` exchange.

    For each hashed value the same destination is chosen; destinations with a larger weight get more values.
    """

    def __init__(self) -> None:
        self._weights: dict[T, dict[str, int]] = {}  # by key; the largest one counts
        self._rows: dict[T, tuple[int, float]] = {}  # seed, 1 / weight

    def add(self, destination: T, name: str, key: str) -> bool:
        """Add a binding of `destination`, whose unique name is `name`, with the weight in `key`.

        Return True if the destination has no binding with another key. Of several bindings the largest weight
        applies.
        """
        weights = self._weights.setdefault(destination, {})
        weights[key] = weight_of(key)
        self._rows[destination] = (_seed(name), 1.0 / max(weights.values()))
        return len(weights) == 1

    def remove(self, destination: T, key: str) -> None:
        """Remove one of several bindings of a destination.

        The largest weight of the remaining ones applies.
        """
        weights = self._weights.get(destination, {})
        if weights.pop(key, None) is not None and weights:
            seed, _ = self._rows[destination]
            self._rows[destination] = (seed, 1.0 / max(weights.values()))

    def drop(self, destination: T) -> None:
        """Remove a destination with all of its bindings."""
        if self._weights.pop(destination, None) is not None:
            del self._rows[destination]

    def choose(self, value: bytes) -> tuple[T, ...]:
        """Return the destination for a hashed value, as a tuple; () if there are no destinations."""
        rows = self._rows
        if len(rows) < 2:
            return tuple(rows)
        hashed = int.from_bytes(blake2b(value, digest_size=8).digest(), "big")
        best, chosen = -inf, next(iter(rows))
        for destination, (seed, per_weight) in rows.items():
            score = log(_mixed(hashed ^ seed)) * per_weight
            if score > best:
                best, chosen = score, destination
        return (chosen,)


def _seed(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")


def _mixed(number: int) -> float:
    """Return a number above 0 and up to 1 that depends on all bits of a 64-bit number (splitmix64)."""
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & MASK
    return ((number ^ number >> 31) + 1) / (MASK + 1)


class HashedPart:
    """Part of a message that is hashed: its routing key, a header or a property."""

    def __init__(self, arguments: Headers) -> None:
        by_name = dict(arguments)
        self.header: str | None = by_name[HASH_HEADER].value if HASH_HEADER in by_name else None
        self.property: str | None = by_name[HASH_PROPERTY].value if HASH_PROPERTY in by_name else None

    @property
    def is_key(self) -> bool:
        """True if the routing key is hashed, so that a message's address determines its destination."""
        return self.header is None and self.property is None

    def of(self, key: str, message: Message | None) -> bytes:
        """Return the bytes to hash for a message; `key` is its routing key.

        They are equal for all messages without the header or property that is hashed.
        """
        if self.is_key:
            return key.encode()
        return b"" if message is None else _canonical(self._value(message))

    def _value(self, message: Message) -> Any:
        properties = message.properties
        if self.header is not None:
            return next((value.value for name, value in properties.headers if name == self.header), None)
        if self.property == "message_id":
            return properties.message_id
        return properties.correlation if self.property == "correlation_id" else properties.timestamp


def _canonical(value: Any) -> bytes:
    if value is None:
        return b""
    if isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else repr(value).encode()
