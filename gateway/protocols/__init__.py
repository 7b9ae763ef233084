"""Protocol codecs and state machines as pure functions of bytes, one folder for each protocol.

The folders have the same file names, and no protocol imports another. None of them does input or output,
reads a clock or uses Trio: `gateway.ingress` and `gateway.egress` own the sockets. This file has the only
list of protocols: the three of the gateway, and those that other distributions register under the entry point
group `gateway.dialects`.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from gateway.errors import ConfigurationError
from gateway.model.address import Address
from gateway.model.dialect import Dialect
from gateway.protocols.amqp091.dialect import AMQP091
from gateway.protocols.amqpfast.dialect import AMQPFAST
from gateway.protocols.mqtt.dialect import MQTT

OWN: Final[tuple[Dialect, ...]] = (MQTT, AMQP091, AMQPFAST)
"""Built-in dialects, for which the gateway listens on their default ports when nothing is configured."""

GROUP: Final = "gateway.dialects"


def join_dialects(offered: Iterable[EntryPoint]) -> dict[str, Dialect]:
    """Return all dialects by protocol name: the built-in ones, and those of the entry points `offered`.

    Raises ConfigurationError if an entry point cannot be loaded, or if its dialect has a name, an address key
    (such as `topic`), a URL scheme or a `wire_form` that another dialect already has.
    """
    found: dict[str, Dialect] = {one.name: one for one in OWN}
    for entry in offered:
        place = f"entry point {entry.name} of {GROUP} ({entry.value})"
        try:
            dialect: Dialect = entry.load()
        except Exception as error:  # whatever the code of another distribution raises
            raise ConfigurationError(f"{place}: cannot be loaded: {error!r}") from error
        mine = _claims(dialect)
        for other in found.values():
            if shared := sorted(mine & _claims(other)):
                raise ConfigurationError(
                    f"{place}: {', '.join(shared)}: already used by protocol {other.name}"
                )
        found[dialect.name] = dialect
    return found


def _claims(dialect: Dialect) -> set[str]:
    """Return the names and numbers that no other dialect may have, as texts such as `word topic`.

    These are the protocol name, the keys of addresses, the URL schemes and the `wire_form`.
    """
    schemes = (f"{scheme.name}://" for scheme in dialect.schemes)
    forms = [f"form {dialect.wire_form}"] if dialect.wire_form else []
    return {f"name {dialect.name}", *(f"word {word}" for word in dialect.words), *schemes, *forms}


DIALECTS: Final = join_dialects(entry_points(group=GROUP))
"""Every dialect, by protocol name."""

DIALECT_OF_WORD: Final = {word: one for one in DIALECTS.values() for word in one.words}
"""Dialect by each key that its addresses have in mapping files, such as `topic`."""


def dialect_of(address: Address) -> Dialect:
    """Return the dialect for the protocol of `address`."""
    return DIALECTS[address.protocol]


def show(address: Address) -> str:
    """Return the address as text, in the notation of its protocol."""
    return DIALECTS[address.protocol].show(address)
