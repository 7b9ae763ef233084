"""AMQP/Fast options of listeners and links, with virtual hosts and their destinations.

`FastListener` and `FastLink` extend the common `ListenerSettings` and `LinkSettings` of
`gateway/settings/endpoints.py`. A virtual host lists queues and topics that exist from the start, and peer
services that the gateway itself provides. The module holds and checks the values only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, Strict, StringConstraints, model_validator

from gateway.settings.endpoints import AnonymousListener, LinkSettings
from gateway.settings.limits import Section

NAME: Final = r"^[^/#&\x00-\x20\x7f]+$"  # 3.5.2.3
Destination = Annotated[str, StringConstraints(max_length=255, pattern=NAME)]
Destinations = Annotated[tuple[Destination, ...], Strict(False)]
Compatibility = Literal["rfc", "openamq-2005"]


class PeerService(Section):
    """Peer service of AMQP/Fast that the gateway offers: an echo, or a TCP connection to a program."""

    kind: Literal["echo", "tcp"] = "tcp"
    """Kind of service: `echo` returns every message. `tcp` connects to an address and forwards bytes in both
    directions."""
    host: str = ""
    """Host of `tcp`, to which a connection is opened for each handle that a client streams on."""
    port: int = Field(0, ge=0, le=65_535)
    """Port of `tcp`."""

    @model_validator(mode="after")
    def _address(self) -> Self:
        stated = bool(self.host), bool(self.port)
        if stated != ((True, True) if self.kind == "tcp" else (False, False)):
            raise ValueError("a peer of kind tcp needs host and port; peers of other kinds must not set them")
        return self


class OutOfBand(Section):
    """Transfer of message bodies as files in a folder that the gateway and its clients share.

    They share a folder, for example, if the gateway runs as a sidecar of the clients.
    """

    folder: Annotated[Path, Strict(False)]
    """Shared folder. A client names a folder of its own below it in CHANNEL OPEN, as `file:` and the path."""


class DestinationNames(Section):
    """Queues and topics that exist from the start of the gateway."""

    queues: Destinations = ()
    """Names of queues."""
    topics: Destinations = ()
    """Names of topics."""


class FastVirtualHost(Section):
    """Virtual host of AMQP/Fast.

    Listeners with virtual hosts of the same name share one virtual host, and must configure it alike.
    """

    destinations: DestinationNames = DestinationNames()
    """Destinations that exist from the start, and after every restart."""
    auto_create: bool | None = None
    """True if clients create queues and topics by naming them. Absent: true if no destinations are declared.
    """
    peers: dict[Destination, PeerService] = Field({"echo": PeerService(kind="echo")})
    """Peer services that the gateway provides, by name."""

    @property
    def creates_destinations(self) -> bool:
        """True if a queue or topic is created when a client names it.

        This is the value of `auto_create`. If `auto_create` is absent, it is True only if no destinations are
        declared.
        """
        if self.auto_create is not None:
            return self.auto_create
        return not (self.destinations.queues or self.destinations.topics)


def _by_name(value: Any) -> Any:
    """Convert a list of virtual host names to a table with empty options; return other values unchanged."""
    return {name: {} for name in value} if isinstance(value, list | tuple) else value


class FastListener(AnonymousListener):
    """Listener for AMQP/Fast clients, with the options for this protocol."""

    virtual_hosts: Annotated[
        dict[str, FastVirtualHost],
        BeforeValidator(_by_name, json_schema_input_type=dict[str, FastVirtualHost] | list[str]),
    ] = Field({"/": FastVirtualHost()}, min_length=1)
    """Virtual hosts by name, or a list of names. Routes of the mapping files belong to the first one; the
    others are isolated from routes."""
    out_of_band: OutOfBand | None = None
    """Folder for transfer of bodies as files. Absent: all bodies pass through the connection."""
    compatibility: Compatibility = "rfc"
    """Behaviour towards clients. `openamq-2005` follows the first implementation where it differs from the
    specification."""
    commit_confirms: Literal["all", "acked"] = "all"
    """Messages that CHANNEL COMMIT confirms: `all` that were sent before it, as the specification says, or
    those that the client has acknowledged."""
    negotiation_pause_secs: float = Field(3.0, ge=0, le=60)
    """Pause in seconds before a failed negotiation is closed, so that passwords cannot be tried quickly."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the listener's virtual hosts. Routes of mapping files apply only to the first one."""
        return tuple(self.virtual_hosts)


class FastLink(LinkSettings):
    """Link to an AMQP/Fast server, with the options for this protocol."""

    durable_subscriptions: bool = True
    """True if the link subscribes durably, so that the server stores messages of topics while the link is
    disconnected."""
    compatibility: Compatibility = "rfc"
    """Behaviour towards the server. `openamq-2005` is for the first implementation, which reads nothing after
    a PING: the link sends none, and does not notice when the server dies without closing the connection."""
