"""Listener options for the layers below its protocol: the PROXY protocol, and types of WebSocket origins.

`FrontOptions` is the base class of `ListenerSettings`. The module checks the notation of networks and
origins; it handles no connections.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Strict

from gateway.settings.limits import Section


def _network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        raise ValueError(
            f"{error}; write a network as 10.0.0.0/8 and a single address as 10.1.2.3"
        ) from error


def _origin(origin: str) -> str:
    scheme, found, place = origin.partition("://")
    if origin != "null" and (not (scheme and found and place) or "/" in place):
        raise ValueError(
            "write an origin as scheme and host, such as https://app.example.com, without a path"
        )
    return origin


Network = Annotated[str, AfterValidator(_network)]
Origin = Annotated[str, AfterValidator(_origin)]
# YAML reads a bare `off` as a boolean.
ProxyProtocol = Annotated[
    Literal["off", "required"],
    BeforeValidator(
        lambda value: "off" if value is False else value,
        json_schema_input_type=Literal["off", "required"],
    ),
]


class FrontOptions(Section):
    """Listener options for load balancers in front of the listener."""

    proxy_protocol: ProxyProtocol = "off"
    """PROXY protocol. With `required`, every connection begins with a PROXY header, version 1 or 2, in which
    a load balancer sends the client's address. Access rules, logs and message properties then use that
    address."""
    proxy_protocol_from: Annotated[tuple[Network, ...], Strict(False)] = ()
    """Networks of the load balancers, with `required`; connections from elsewhere are refused. Their headers
    are trusted, so there is no default."""
