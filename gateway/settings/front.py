"""What stands before a listener's protocol: WebSocket, the PROXY protocol, a port that listeners share."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Strict

from gateway.documents import suggestion
from gateway.settings.limits import Part

if TYPE_CHECKING:
    from gateway.settings.endpoints import Listener

# Loopback, private and link-local: where a balancer usually stands.
NEIGHBOURS: Final = (
    *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"),
    *("::1/128", "fc00::/7", "fe80::/10"),
)


def _network(given: str) -> str:
    try:
        return str(ipaddress.ip_network(given))
    except ValueError as error:
        raise ValueError(f"{error}; write a network as 10.0.0.0/8, one address as 10.1.2.3") from error


def _origin(given: str) -> str:
    scheme, found, place = given.partition("://")
    if given != "null" and (not (scheme and found and place) or "/" in place):
        raise ValueError("an origin is a scheme and a host, as https://app.example.com, without a path")
    return given


Network = Annotated[str, AfterValidator(_network)]
Origin = Annotated[str, AfterValidator(_origin)]
# YAML reads a bare `off` as a boolean.
ProxyProtocol = Annotated[
    Literal["off", "required"], BeforeValidator(lambda given: "off" if given is False else given)
]


class FrontOptions(Part):
    """The part of a listener that is about the way to its protocol."""

    websocket_path: str | None = Field(None, pattern=r"^/[!-~]*$")
    """MQTT over WebSocket at this path, instead of MQTT over TCP."""
    websocket_origins: Annotated[tuple[Origin, ...] | None, Strict(False)] = None
    """Web pages that may connect, by origin (`https://app.example.com`); absent: any. Clients that are no
    browsers send no origin and are not asked for one."""
    proxy_protocol: ProxyProtocol = "off"
    """`required`: every connection begins with a header of the PROXY protocol, version 1 or 2, in which a
    balancer says for whom it connects. Access, logs and senders then see that address."""
    proxy_protocol_from: Annotated[tuple[Network, ...], Strict(False)] = NEIGHBOURS
    """The balancers' networks, with `required`: nobody else may connect. By default loopback, private and
    link-local addresses."""
    shares: Annotated[tuple[str, ...], Strict(False)] = ()
    """With protocol `shared`: the listeners whose clients may come to this port, too. The first octets tell
    them apart, so of each protocol there is one, and of WebSocket one for each path. With `tls`, clients may
    come with and without it."""


def check_shares(listeners: Mapping[str, Listener]) -> None:
    """Raises ValueError with the key when what a shared port names cannot be told apart or guarded."""
    for name, port in listeners.items():
        taken: dict[str, str] = {}
        for other in port.shares:
            at = f"listeners.{name}.shares"
            one = listeners.get(other)
            if one is None or one.protocol == "shared":
                raise ValueError(f"{at}: {_not_shareable(other, listeners)}")
            spoken = f"WebSocket at {one.websocket_path}" if one.websocket_path else one.protocol
            if (first := taken.setdefault(spoken, other)) != other:
                raise ValueError(f"{at}: {first} and {other} both speak {spoken}; name one of them")
            if one.tls is not None and (
                port.tls is None or port.tls.client_ca_file != one.tls.client_ca_file
            ):
                raise ValueError(
                    f"{at}: {other} is for TLS only; give listeners.{name} a tls with the same client_ca_file"
                )


def _not_shareable(name: str, listeners: Mapping[str, Listener]) -> str:
    """Why `name` cannot be shared, with a suggestion."""
    known = [one for one, given in listeners.items() if given.protocol != "shared"]
    fault = "itself a shared port" if name in listeners else "no listener"
    return f"{name!r} is {fault}{suggestion(name, known)}"
