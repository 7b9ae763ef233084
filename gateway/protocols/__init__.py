"""What peers say, as pure functions of octets: one folder per protocol, with the same file names in each.

No input or output, no clock, no Trio; and no protocol knows another. This file has the only list of them:
those of the gateway itself, and those that other distributions offer under the entry point group
`gateway.dialects`.
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
"""Those that the gateway listens for when nothing is configured, each on its own port."""

GROUP: Final = "gateway.dialects"


def joined(offered: Iterable[EntryPoint]) -> dict[str, Dialect]:
    """Our own dialects and those that are offered, by name. Raises ConfigurationError for one that cannot be
    loaded, or that has the name, a word of addresses, a URL scheme or a form in journals of another."""
    found: dict[str, Dialect] = {one.name: one for one in OWN}
    for entry in offered:
        place = f"entry point {entry.name} of {GROUP} ({entry.value})"
        try:
            dialect: Dialect = entry.load()
        except Exception as error:  # whatever the code of another distribution raises
            raise ConfigurationError(f"{place}: it cannot be loaded: {error!r}") from error
        mine = _claims(dialect)
        for other in found.values():
            if taken := sorted(mine & _claims(other)):
                raise ConfigurationError(
                    f"{place}: {', '.join(taken)}: protocol {other.name} has that already"
                )
        found[dialect.name] = dialect
    return found


def _claims(dialect: Dialect) -> set[str]:
    """What no two dialects may have."""
    schemes = (f"{scheme.name}://" for scheme in dialect.schemes)
    forms = [f"form {dialect.wire_form}"] if dialect.wire_form else []
    return {f"name {dialect.name}", *(f"word {word}" for word in dialect.words), *schemes, *forms}


DIALECTS: Final = joined(entry_points(group=GROUP))
"""All protocols by name."""

DIALECT_OF_WORD: Final = {word: one for one in DIALECTS.values() for word in one.words}
"""The protocol to which a word of an address belongs."""


def dialect_of(address: Address) -> Dialect:
    """The dialect that made the address."""
    return DIALECTS[address.protocol]


def show(address: Address) -> str:
    """An address as text, in its dialect's form."""
    return DIALECTS[address.protocol].show(address)
