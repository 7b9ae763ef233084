"""What is AMQP/Fast's own in a listener and in a link: virtual hosts with their destinations, and how clients
are treated."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, Strict, StringConstraints, model_validator

from gateway.settings.endpoints import AnonymousListener, Link
from gateway.settings.limits import Section

NAME: Final = r"^[^/#&\x00-\x20\x7f]+$"  # 3.5.2.3
Destination = Annotated[str, StringConstraints(max_length=255, pattern=NAME)]
Destinations = Annotated[tuple[Destination, ...], Strict(False)]
Compatibility = Literal["rfc", "openamq-2005"]


class PeerService(Section):
    """A service of the gateway itself, which answers what is sent to it."""

    kind: Literal["echo", "tcp"] = "tcp"
    """`echo` sends everything back. `tcp` connects to an address and passes octets both ways."""
    host: str = ""
    """Of `tcp`: where to connect for each handle that a client streams on."""
    port: int = Field(0, ge=0, le=65_535)
    """Of `tcp`, likewise."""

    @model_validator(mode="after")
    def _address(self) -> Self:
        stated = bool(self.host), bool(self.port)
        if stated != ((True, True) if self.kind == "tcp" else (False, False)):
            raise ValueError("a peer of kind tcp has a host and a port, and no other has")
        return self


class OutOfBand(Section):
    """Bodies as files in a folder that this gateway shares with its clients, as a sidecar may."""

    folder: Annotated[Path, Strict(False)]
    """Clients name it as `file:` and its path in CHANNEL OPEN, each a folder of its own in it."""


class DestinationNames(Section):
    """Destinations that are there from the start, and after every restart."""

    queues: Destinations = ()
    """Names of queues."""
    topics: Destinations = ()
    """Names of topics."""


class FastVirtualHost(Section):
    """A virtual host of AMQP/Fast. Listeners that name the same one share it, and must agree on it."""

    destinations: DestinationNames = DestinationNames()
    """There from the start, and after every restart."""
    auto_create: bool | None = None
    """Whether clients make queues and topics by naming them; absent: unless destinations are declared."""
    peers: dict[Destination, PeerService] = Field({"echo": PeerService(kind="echo")})
    """Services of the gateway itself, by name."""

    @property
    def creates(self) -> bool:
        """`auto_create`, decided."""
        if self.auto_create is not None:
            return self.auto_create
        return not (self.destinations.queues or self.destinations.topics)


def _by_name(given: Any) -> Any:
    """A list of names stands for virtual hosts about which nothing more is said."""
    return {name: {} for name in given} if isinstance(given, list | tuple) else given


class FastListener(AnonymousListener):
    """A listener for AMQP/Fast clients."""

    virtual_hosts: Annotated[
        dict[str, FastVirtualHost],
        BeforeValidator(_by_name, json_schema_input_type=dict[str, FastVirtualHost] | list[str]),
    ] = Field({"/": FastVirtualHost()}, min_length=1)
    """By name; a list of names will do. Routes of the mapping files join the first one; the others keep to
    themselves."""
    out_of_band: OutOfBand | None = None
    """A folder in which bodies may pass as files; absent: everything comes through the connection."""
    compatibility: Compatibility = "rfc"
    """`openamq-2005`: what the clients of the first implementation expect where it differs from the text."""
    commit_confirms: Literal["all", "acked"] = "all"
    """What CHANNEL COMMIT confirms: all messages that were written before, as the text has it, or those that
    the client has acknowledged."""
    negotiation_pause_secs: float = Field(3.0, ge=0, le=60)
    """A failed negotiation is ended after this time, so that passwords cannot be tried quickly."""

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self.virtual_hosts)


class FastLink(Link):
    """A link to an AMQP/Fast server."""

    durable_subscriptions: bool = True
    """The server keeps what topics that routes name receive while we are away."""
    compatibility: Compatibility = "rfc"
    """`openamq-2005`: the server is the first implementation, which reads nothing more behind a PING. It is
    sent none, and if it dies without a word, that is not noticed."""
