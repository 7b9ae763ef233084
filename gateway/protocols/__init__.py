"""What peers say, as pure functions of octets: one folder per protocol, with the same file names in each.

No input or output, no clock, no Trio; and no protocol knows another. This file has the only list of them:
those of the gateway itself, and those that other distributions offer under the entry point group
`gateway.dialects`.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Final

from gateway.model.address import Address
from gateway.model.dialect import Dialect
from gateway.protocols.amqp091.dialect import AMQP091
from gateway.protocols.amqpfast.dialect import AMQPFAST
from gateway.protocols.mqtt.dialect import MQTT

OWN: Final[tuple[Dialect, ...]] = (MQTT, AMQP091, AMQPFAST)
"""Those that the gateway listens for when nothing is configured, each on its own port."""

DIALECTS: Final[dict[str, Dialect]] = {
    dialect.name: dialect
    for dialect in (*OWN, *(found.load() for found in entry_points(group="gateway.dialects")))
}
"""All protocols by name."""

DIALECT_OF_WORD: Final = {word: one for one in DIALECTS.values() for word in one.words}
"""The protocol to which a word of an address belongs."""


def dialect_of(address: Address) -> Dialect:
    """The dialect that made the address."""
    return DIALECTS[address.protocol]


def show(address: Address) -> str:
    """An address as text, in its dialect's form."""
    return DIALECTS[address.protocol].show(address)
