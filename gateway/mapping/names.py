"""The levels of a name, and how a level is written in another protocol so that it can be read back.

A name is a list of levels: `plant/v1.2/t` in MQTT has the levels `plant`, `v1.2`, `t`. Each protocol has
characters that a level cannot hold (FORBIDDEN: they would split the name, or the protocol refuses them) and
characters that it had better not hold (GUARDED: consumers take them for wildcards). For the policy `percent`
the translation of levels from protocol A to B is a bijection, so that each name, also one that holds `%2E`
literally, comes back as it went. Per character, with `%XX` its code and `%25XX`, `%2525XX` that code nested:

- forbidden in B only: one nesting more (`.` -> `%2E` -> `%252E`);
- forbidden in A only: one nesting less, the inverse (`%2E` -> `.`);
- guarded in exactly one of the two, forbidden in neither: the bare character and `%XX` change places;
- everything else, every other `%` included, stays as it is.

A source that breaks its own rule (an old AMQP/Fast destination with a `/`) loses the bijection, never the
levels: what is forbidden in B is encoded wherever it comes from.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, Literal

from gateway.errors import GatewayError
from gateway.model.address import ADDRESS_OCTETS_MAX, Address, AmqpAddress, FastAddress, MqttAddress

Escape = Literal["percent", "swap", "keep", "reject"]
Levels = tuple[str, ...]
LevelTranslation = Callable[[str], str]

PROTOCOLS: Final = ("mqtt", "amqp091", "amqpfast")
SEPARATORS: Final = {"mqtt": "/", "amqp091": ".", "amqpfast": "."}
TOPIC_OCTETS_MAX: Final = 65_535  # MQTT 1.5.4: a two-octet length

_CONTROLS: Final = "".join(map(chr, range(0x20))) + "\x7f"
FORBIDDEN: Final = {"mqtt": "/+#\0", "amqp091": ".", "amqpfast": "./#& " + _CONTROLS}
# `#` is not in amqp091: topics and destinations cannot hold it, so that it only comes from plain text: WILD.
GUARDED: Final = {"mqtt": "", "amqp091": "*", "amqpfast": "*"}
WILD: Final = {"mqtt": "/+#\0", "amqp091": ".*#", "amqpfast": "*" + FORBIDDEN["amqpfast"]}


class NameRefused(GatewayError):
    """A name that the target's protocol, or the route's policy, does not allow."""


def levels_of(address: Address) -> Levels:
    """The levels of a topic, routing key or destination. An empty AMQP key has none (as RabbitMQ counts)."""
    if isinstance(address, MqttAddress):
        return tuple(address.topic.split("/"))
    text = address.routing_key if isinstance(address, AmqpAddress) else address.destination
    return tuple(text.split(".")) if text else ()


def split_levels(text: str, separator: str) -> list[str]:
    """Split a pattern or template at `separator`, but not inside braces: `{a...}.b` has two levels."""
    if not text:
        return []
    return re.split(re.escape(separator) + r"(?![^{}]*\})", text)


def make_address(protocol: str, scope: str, name: str) -> Address:
    """The address `name` within `scope` (the exchange, or the AMQP/Fast service; "" for MQTT).

    Raises NameRefused for what the protocol cannot carry: wildcards or NUL in a topic, an empty topic, more
    than 65535 octets (MQTT 1.5.4, 4.7); more than 255 octets of exchange, routing key or destination.
    """
    if protocol == "mqtt":
        if not name or any(character in name for character in "+#\0"):
            raise NameRefused(f"{_short(name)} is not a topic name: empty, or a wildcard or NUL in it")
        topic = MqttAddress(name)
        if len(topic.wire) > TOPIC_OCTETS_MAX:
            raise NameRefused(f"a topic of {len(topic.wire)} octets; at most {TOPIC_OCTETS_MAX} are allowed")
        return topic
    for text in (scope, name):
        if len(text.encode()) > ADDRESS_OCTETS_MAX:
            raise NameRefused(
                f"{_short(text)} has {len(text.encode())} octets, at most {ADDRESS_OCTETS_MAX} are allowed"
            )
    if protocol == "amqp091":
        return AmqpAddress(scope, name)
    if not name or "\0" in name:
        raise NameRefused(f"{_short(name)} is not a destination: empty, or a NUL in it")
    return FastAddress(scope, name)


def parse_address(protocol: str, text: str) -> Address:
    """The address that people write: a topic; `exchange/routing_key` or a queue; `service:destination` or a
    destination of the topic service. Raises NameRefused."""
    if protocol == "amqp091":
        exchange, slash, key = text.partition("/")
        return make_address(protocol, exchange, key) if slash else make_address(protocol, "", text)
    if protocol == "amqpfast":
        service, colon, name = text.partition(":")
        if colon and service in ("queue", "topic", "peer"):
            return make_address(protocol, service, name)
        return make_address(protocol, "topic", text)
    return make_address(protocol, "", text)


def show_address(address: Address) -> str:
    """An address as people write it, the inverse of `parse_address`."""
    if isinstance(address, MqttAddress):
        return address.topic
    if isinstance(address, AmqpAddress):
        return f"{address.exchange}/{address.routing_key}" if address.exchange else address.routing_key
    return f"{address.service}:{address.destination}"


def translation(source: str, target: str, escape: Escape) -> LevelTranslation:
    """How one level of a name in `source` is written in `target`. The result may raise NameRefused.

    `keep` copies; `swap` exchanges the two separators; `reject` refuses what `percent` would have to encode;
    `percent` is the bijection described at the head of this file.
    """
    if escape == "keep":
        return _keep
    if escape == "swap":
        one, other = SEPARATORS[source], SEPARATORS[target]
        table = {ord(one): other, ord(other): one}
        return _keep if one == other else lambda level: level.translate(table)
    more, fewer, swapped = _classes(source, target)
    if escape == "reject":
        return _refusal("".join(sorted(more | swapped)))
    return _percent(set(FORBIDDEN[target]), more, fewer, swapped) if more | fewer | swapped else _keep


def plain_translation(target: str, escape: Escape) -> LevelTranslation:
    """How text that is no name (a client id, an exchange) is written as one level of a name in `target`."""
    if escape in ("keep", "swap"):
        return _keep
    if escape == "reject":
        return _refusal(WILD[target])
    return _percent(set(), set(WILD[target]), set(), set())


def _keep(level: str) -> str:
    return level


def _classes(source: str, target: str) -> tuple[set[str], set[str], set[str]]:
    """The characters that gain a nesting, that lose one, and whose first two forms change places.

    Empty when source and target agree: then every name is already as it must be.
    """
    forbidden_here, forbidden_there = set(FORBIDDEN[source]), set(FORBIDDEN[target])
    swapped = (set(GUARDED[source]) ^ set(GUARDED[target])) - forbidden_here - forbidden_there
    return forbidden_there - forbidden_here, forbidden_here - forbidden_there, swapped


def _refusal(characters: str) -> LevelTranslation:
    def refuse(level: str) -> str:
        for character in characters:
            if character in level:
                raise NameRefused(f"{_short(level)} holds {character!r}, and the route says escape: reject")
        return level

    return refuse


def _percent(forbidden: set[str], more: set[str], fewer: set[str], swapped: set[str]) -> LevelTranslation:
    bare = "".join(map(re.escape, sorted(forbidden | more | swapped)))
    codes = "|".join(f"{ord(character):02X}" for character in sorted(more | fewer | swapped))
    search = re.compile(f"[{bare}]|%(?:25)*(?:{codes})")

    def rewrite(found: re.Match[str]) -> str:
        token = found[0]
        if len(token) == 1:
            return f"%{ord(token):02X}"
        character = chr(int(token[-2:], 16))
        nested = len(token) > 3
        if character in more:
            return "%25" + token[1:]
        if character in fewer:
            return "%" + token[3:] if nested else character
        return token if nested else character

    return lambda level: search.sub(rewrite, level)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
