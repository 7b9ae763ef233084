"""What stands before a listener's protocol: WebSocket and the PROXY protocol."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Strict

from gateway.settings.limits import Section


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
    Literal["off", "required"],
    BeforeValidator(
        lambda given: "off" if given is False else given,
        json_schema_input_type=Literal["off", "required"],
    ),
]


class FrontOptions(Section):
    """The part of a listener that is about the way to its protocol."""

    proxy_protocol: ProxyProtocol = "off"
    """`required`: every connection begins with a header of the PROXY protocol, version 1 or 2, in which a
    balancer says for whom it connects. Access, logs and senders then see that address."""
    proxy_protocol_from: Annotated[tuple[Network, ...], Strict(False)] = ()
    """The balancers' networks, with `required`: nobody else may connect. What they announce is believed, so
    there is no default."""
