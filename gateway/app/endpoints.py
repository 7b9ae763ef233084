"""Listeners and links, put together from the configuration: one place for each protocol."""

from __future__ import annotations

from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Final

from gateway.egress.link import Link, LinkSession
from gateway.ingress.front.layers import front_of
from gateway.ingress.listener import Listener
from gateway.ingress.services import Services
from gateway.ingress.source import ListenerSource
from gateway.protocols import DIALECTS
from gateway.transport.tasks import Tasks

if TYPE_CHECKING:
    from gateway.app.gateway import Gateway

CONSUMING: Final = " (in)"  # behind a link's name, where it has a connection for each direction
PUBLISHING: Final = "-out"  # and behind its client_id


def add_listener(gateway: Gateway, name: str, tasks: Tasks) -> None:
    """Make the listener `name`; it is not open yet."""
    given = gateway.settings.listeners[name]
    limits = gateway.settings.limits_of(name)
    dialect = DIALECTS[given.protocol]
    stats = gateway.metrics.listener(name, given.protocol, dialect.frame_names)
    services = Services(
        settings=gateway.settings,
        dispatcher=gateway.dispatcher,
        access=gateway.access,
        authorization=gateway.authorization,
        dead_letters=gateway.dead_letters,
        tasks=tasks,
        store=gateway.store,
        mqtt=gateway.mqtt,
        hosts=gateway.hosts,
        fast_hosts=gateway.fast_hosts,
        bodies=gateway.bodies,
    )
    ingress: ListenerSource = resolve_name(dialect.listener)(name, services, stats)
    listener = Listener(
        name,
        given.host,
        given.port,
        ingress,
        gateway.writes,
        stats,
        connections_max=limits.connections_max,
        front=front_of(name, given),
        users=gateway.identities.users,
    )
    gateway.dispatcher.namespaces[name] = ingress.namespace
    gateway.dispatcher.requesters[name] = ingress.requester
    gateway.listeners[name] = listener
    gateway.readiness.require(f"listener {name}")


def add_link(gateway: Gateway, name: str) -> None:
    """Make the link `name`; it is not connected yet. With a connection for each direction it is two."""
    given = gateway.settings.links[name]
    client_id = gateway.settings.client_id_of(name)
    if given.connections == 1:
        link = _link(gateway, name, name, client_id)
    else:
        # What the broker keeps for us, a session or queues, it keeps under the name that is in the settings.
        _link(gateway, name + CONSUMING, name, client_id, publishes=False)
        link = _link(gateway, name, name, client_id + PUBLISHING, consumes=False)
    link.when_up = partial(gateway.core.link_up, name)
    gateway.core.add_link(name, given, link.session, lambda: link.up)
    gateway.dispatcher.namespaces[name] = link.session


def _link(
    gateway: Gateway,
    name: str,
    endpoint: str,
    client_id: str,
    *,
    consumes: bool = True,
    publishes: bool = True,
) -> Link:
    given = gateway.settings.links[endpoint]
    dialect = DIALECTS[given.protocol]
    stats = gateway.metrics.link(name, given.protocol, dialect.frame_names)
    session: LinkSession = resolve_name(dialect.link)(
        endpoint, given, gateway.dispatcher, gateway.settings.limits, stats, client_id=client_id
    )
    link = gateway.links[name] = Link(
        name,
        given,
        session,
        gateway.writes,
        stats,
        endpoint=endpoint,
        consumes=consumes,
        publishes=publishes,
    )
    session.link = link
    if given.required:
        gateway.readiness.require(f"link {name}")
    return link
