"""AMQP 0-9-1 dialect for the other packages: exchanges, keys, queues, ports, and readers of properties.

It holds no state and no codec: `AmqpDialect` maps the general interface of `Dialect` to constants and to
functions of this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Final

from gateway.errors import RemoteProtocolError
from gateway.model.address import Address
from gateway.model.dialect import Dialect, FrameCount, NameRefused, Scheme, Word, quote_short
from gateway.model.message import Message
from gateway.model.properties import PropertySet
from gateway.protocols.amqp091.spec import SHORT_STRING_MAX
from gateway.protocols.amqp091.translate import content_properties, essentials, losses, message_id_in

LENGTHS: Final = [bytes((byte_count,)) for byte_count in range(SHORT_STRING_MAX + 1)]
EXCHANGES_KNOWN: Final = 1_024


class AmqpDialect(Dialect):
    """Dialect of AMQP 0-9-1.

    The address of a queue is in the default exchange, "", with the queue's name as the routing key.
    """

    name = "amqp091"
    title = "AMQP 0-9-1"
    name_word = "routing_key"
    pattern_word = "binding_key"
    scope_word = "exchange"
    queue_word = "queue"
    words = {  # noqa: RUF012 - a ClassVar of the base
        "exchange": Word(
            'AMQP 0-9-1 exchange; "" is the default exchange.',
            "Template of an AMQP 0-9-1 exchange.",
            empty=True,
        ),
        "routing_key": Word(None, 'Template of a routing key; default: "".', empty=True),
        "binding_key": Word("AMQP 0-9-1 binding key with captures; default: every key.", None, empty=True),
        "queue": Word("AMQP 0-9-1 queue, by its exact name.", "Template of an AMQP 0-9-1 queue."),
    }
    target_options = frozenset(("mandatory",))
    name_bytes_max = SHORT_STRING_MAX
    wire_form = 2
    separator = "."
    one = "*"
    forbidden = "."
    # `#` is not here but in `wild`: topics and destinations cannot contain it, so it only comes from plain
    # text.
    guarded = "*"
    wild = ".*#"
    return_prefix = "amq.reply-to."  # clients may not declare a queue whose name begins with `amq.`
    correlation_is_text = True
    listener = "gateway.ingress.amqp091.connection:AmqpListenerSource"
    link = "gateway.egress.amqp091.session:AmqpLinkSession"
    listener_settings = "gateway.settings.amqp091:AmqpListener"
    link_settings = "gateway.settings.amqp091:AmqpLink"
    client = "gateway.clients.amqp:AmqpClient"
    trials = "gateway.cli.amqp091.trials:trials"
    has_virtual_hosts = True
    meeting = "virtual_host"
    schemes = (Scheme("amqp", "plain", 5672), Scheme("amqps", "tls", 5671))
    first_bytes = (b"AMQP",)
    frame_count = FrameCount(2, 0, (0, 1, 1))

    def address(self, scope: str, name: str) -> Address:
        """Return the address of an exchange (`scope`) and a routing key (`name`).

        Raises NameRefused if one of them has more than 255 bytes.
        """
        try:
            return amqp_address(scope, name)
        except ValueError:
            text = scope if len(scope.encode()) > SHORT_STRING_MAX else name
            byte_count = len(text.encode())
            raise NameRefused(
                f"{quote_short(text)} has {byte_count} bytes, at most {SHORT_STRING_MAX} are allowed"
            ) from None

    def read_address(self, wire: bytes) -> Address:
        """Return the address whose exchange and routing key are encoded in `wire` as short strings."""
        end = 1 + wire[0]
        return Address("amqp091", wire[1:end].decode(), wire[end + 1 :].decode(), wire)

    def property_set(self, data: bytes) -> PropertySet:
        """Return a property set for encoded property flags and property list, decoded on demand."""
        found = content_properties(data)
        with suppress(RemoteProtocolError):  # the error is raised again when the properties are read
            essentials(found)  # also finds out what can be read without decoding
        return found

    def message_id(self, data: bytes) -> str | None:
        """Return the message id in encoded properties, or None; the other properties are not decoded."""
        return message_id_in(data)

    def losses(self, message: Message) -> tuple[str, ...]:
        """Return the names of the parts of `message` that AMQP 0-9-1 cannot express."""
        return losses(message)

    def return_part(self, address: Address) -> str | None:
        """Return the part of a return address behind its prefix, or None if `address` is no return address.

        A return address is a routing key of the default exchange, because reply-to names such keys.
        """
        return None if address.scope else super().return_part(address)

    def fault_of(self, address_words: Mapping[str, str]) -> str:
        """Return the reason why an address in a mapping file is invalid, or "" if it is valid.

        `address_words` has the address by its keys. A valid address has an exchange or a queue; with a queue,
        no other key is allowed.
        """
        if "queue" in address_words and len(address_words) > 1:
            return "queue cannot be combined with exchange or routing key"
        return "" if "queue" in address_words or "exchange" in address_words else "give exchange or queue"


def amqp_address(exchange: str, routing_key: str) -> Address:
    """Return the address of an exchange and a routing key.

    `wire` of the address has both as short strings (length byte and UTF-8), as in `basic.deliver`. Raises
    ValueError if either of them has more than 255 bytes.
    """
    second = routing_key.encode()
    byte_count = len(second)
    if byte_count > SHORT_STRING_MAX:
        raise ValueError("a routing key has at most 255 bytes")
    return Address("amqp091", exchange, routing_key, _begun(exchange) + LENGTHS[byte_count] + second)


@lru_cache(EXCHANGES_KNOWN)
def _begun(exchange: str) -> bytes:
    """Return the name of an exchange as a short string, with which the `wire` of its addresses begins.

    Raises ValueError if the name has more than 255 bytes.
    """
    data = exchange.encode()
    if len(data) > SHORT_STRING_MAX:
        raise ValueError("an exchange name has at most 255 bytes")
    return bytes((len(data),)) + data


AMQP091: Final = AmqpDialect()
