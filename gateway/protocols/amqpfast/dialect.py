"""AMQP/Fast dialect for the other packages: services, destinations, ports, and readers of properties.

It holds no state and no codec: `FastDialect` maps the general interface of `Dialect` to constants and to
functions of this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.model.address import Address
from gateway.model.dialect import CONTROLS, Dialect, FrameCount, NameRefused, Scheme, Word, quote_short
from gateway.model.message import Message
from gateway.model.properties import PropertySet
from gateway.protocols.amqpfast.commands import FRAME_NAMES
from gateway.protocols.amqpfast.spec import SHORT_STRING_MAX, Service
from gateway.protocols.amqpfast.translate import head_properties, losses

SERVICES: Final = {"queue": Service.QUEUE, "topic": Service.TOPIC, "peer": Service.PEER}
_SERVICE: Final = (
    "AMQP/Fast service type; default: topic. `peer` is refused, because routes cannot use peers."
)
PEERS_STAY: Final = (
    "routes cannot use a peer service, because it replies on the handle of its caller, which has no address"
)


class FastDialect(Dialect):
    """Dialect of AMQP/Fast (AMQ RFC 006)."""

    name = "amqpfast"
    title = "AMQP/Fast"
    name_word = "destination"
    pattern_word = "destination"
    scope_word = "service"
    scopes = tuple(SERVICES)
    scope_default = "topic"
    words = {  # noqa: RUF012 - a ClassVar of the base
        "service": Word(_SERVICE, _SERVICE, tuple(SERVICES)),
        "destination": Word("AMQP/Fast destination with captures.", "Template of an AMQP/Fast destination."),
    }
    name_bytes_max = SHORT_STRING_MAX
    wire_form = 3
    separator = "."
    one = "*"
    forbidden = "./#& " + CONTROLS
    guarded = "*"
    wild = "*" + forbidden
    # Prefix of names that the server generates: clients cannot create such queues and topics.
    return_prefix = "tmp-reply-"
    listener = "gateway.ingress.amqpfast.connection:FastListenerSource"
    on_engine = True
    link = "gateway.egress.amqpfast.session:FastLinkSession"
    listener_settings = "gateway.settings.amqpfast:FastListener"
    link_settings = "gateway.settings.amqpfast:FastLink"
    client = "gateway.clients.amqpfast:FastClient"
    commands = "gateway.cli.amqpfast.commands:FastCommands"
    has_virtual_hosts = True
    meeting = "virtual_host"
    schemes = (Scheme("amqpfast", "plain", 3018), Scheme("amqpfasts", "tls", 3019))
    first_bytes = (b"\x80",)  # 3.2.2
    frame_names = FRAME_NAMES
    frame_count = FrameCount(0, 1, (0, 1, 1))

    def address(self, scope: str, name: str) -> Address:
        """Return the address of a destination of a service type.

        Raises NameRefused for an unknown service type, and for a name that is empty, contains NUL or has more
        than 255 bytes.
        """
        if scope not in SERVICES:
            raise NameRefused(f"service must be one of {', '.join(SERVICES)}, not {quote_short(scope)}")
        if len(name.encode()) > SHORT_STRING_MAX:
            raise NameRefused(
                f"{quote_short(name)} has {len(name.encode())} bytes, at most {SHORT_STRING_MAX} are allowed"
            )
        if not name or "\0" in name:
            raise NameRefused(f"{quote_short(name)} is not a destination: it is empty or contains NUL")
        return fast_address(scope, name)

    def read_address(self, wire: bytes) -> Address:
        """Return the address of an encoded service type and destination."""
        service, _, name = wire.decode().partition(":")
        return Address("amqpfast", service, name, wire)

    def property_set(self, data: bytes) -> PropertySet:
        """Return the property set of an encoded content header, decoded on demand."""
        return head_properties(data)

    def losses(self, message: Message) -> tuple[str, ...]:
        """Return the names of the parts of `message` that AMQP/Fast cannot express."""
        return losses(message)

    def return_part(self, address: Address) -> str | None:
        """Return the part of a return address behind its prefix, or None if `address` is no return address.

        A return address is a queue or a topic, because REPLY_TO does not state which, and never a peer
        service.
        """
        return None if address.scope == "peer" else super().return_part(address)

    def fault_of(self, address_words: Mapping[str, str]) -> str:
        """Return the reason why an address in a mapping file is invalid, or "" if it is valid.

        `address_words` has the address by its keys, such as `service` and `destination`.
        """
        if address_words.get("service") == "peer":
            return PEERS_STAY
        return "" if "destination" in address_words else "service needs destination"


def fast_address(service: str, destination: str) -> Address:
    """Return the address of a destination. `service` is the service type: `queue`, `topic` or `peer`."""
    return Address("amqpfast", service, destination, f"{service}:{destination}".encode())


AMQPFAST: Final = FastDialect()
