"""Mappings written as short as the tests need them."""

from __future__ import annotations

from gateway.mapping import Mapping, parse
from gateway.mapping.router import Router
from gateway.mapping.routes import ResolvedRoute
from gateway.model.message import Message
from gateway.model.outcome import Outcome
from gateway.protocols import DIALECTS

ENDPOINTS = {
    "mqtt": "mqtt",
    "amqp": "amqp091",
    "fast": "amqpfast",
    "plant": "mqtt",
    "erp": "amqp091",
    "hall": "mqtt",
}


def mapping(*routes: str, file: str = "test.yaml") -> Mapping:
    """A mapping file of routes, each in YAML's flow style without its braces; the first is on line 3."""
    return parse("version: 1\nroutes:\n" + "".join(f"  - {{{route}}}\n" for route in routes), file)


def router(*routes: str, hops_max: int = 8) -> Router:
    """A router over one such file."""
    return Router([mapping(*routes)], ENDPOINTS, hops_max=hops_max)


def up(more: str = "", topic: str = "'{all...}'", to: str = "exchange: e, routing_key: '{topic...}'") -> str:
    """A route from MQTT to AMQP 0-9-1."""
    return f"name: up, from: {{endpoint: mqtt, topic: {topic}}}, to: {{endpoint: amqp, {to}}}{more}"


def down(
    more: str = "", source: str = "exchange: e, binding_key: '{all...}'", to: str = "topic: '{all...}'"
) -> str:
    """A route from AMQP 0-9-1 to MQTT."""
    return f"name: down, from: {{endpoint: amqp, {source}}}, to: {{endpoint: mqtt, {to}}}{more}"


def resolved(made: Router, endpoint: str, address: str, queue: str = "") -> ResolvedRoute:
    """The only crossing of an address."""
    (found,) = made.resolve(endpoint, DIALECTS[made.endpoints[endpoint]].parse(address), queue)
    return found


def crossed(made: Router, endpoint: str, message: Message) -> Message:
    """What the only crossing makes of a message."""
    (found,) = made.resolve(endpoint, message.address)
    result = found.cross(message)
    assert isinstance(result, Message), result
    return result


def refused(made: Router, endpoint: str, message: Message) -> Outcome:
    """Why the only crossing refuses a message."""
    (found,) = made.resolve(endpoint, message.address)
    result = found.cross(message)
    assert isinstance(result, Outcome), result
    return result
