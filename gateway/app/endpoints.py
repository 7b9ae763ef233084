"""Factories of listeners and links: the one place where a protocol's classes are chosen by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import Final

from gateway.broker.core import BrokerCore
from gateway.egress.link import Link, LinkSession, LinkStatus
from gateway.ingress.clients import IngressClients
from gateway.ingress.front.layers import front_of
from gateway.ingress.listener import Listener
from gateway.ingress.services import Services
from gateway.ingress.source import ListenerSource
from gateway.protocols import DIALECTS
from gateway.settings import Settings
from gateway.telemetry.metrics import Metrics
from gateway.transport.stream import WriteSet

# Suffix of a link's name for its consuming connection, if it has one for each direction.
CONSUMING: Final = " (in)"
PUBLISHING: Final = "-out"  # Suffix of the client_id of the publishing connection.


def listener_of(
    name: str,
    services: Services,
    writes: WriteSet,
    metrics: Metrics,
    descriptors_max: int,
) -> Listener:
    """Build the listener `name`, and register its namespace with the dispatcher. Open no port yet.

    Clients whose file descriptor is `descriptors_max` or higher are refused.
    """
    settings, dispatcher = services.settings, services.dispatcher
    options = settings.listeners[name]
    dialect = DIALECTS[options.protocol]
    stats = metrics.listener(name, options.protocol, dialect.frame_names)
    ingress_clients = IngressClients(settings.limits_of(name), stats, writes, services.users)
    ingress: ListenerSource = resolve_name(dialect.listener)(name, services, ingress_clients)
    dispatcher.add_endpoint(name, ingress.namespace, ingress.requester)
    return Listener(
        name,
        options.host,
        options.port,
        ingress,
        ingress_clients,
        writes,
        front=front_of(name, options),
        descriptors_max=descriptors_max,
    )


def links_of(
    name: str, settings: Settings, core: BrokerCore, writes: WriteSet, metrics: Metrics
) -> list[Link]:
    """Build the connections of the configured link `name`, and register the link. Connect nothing yet.

    Return one Link that consumes and publishes. If the link has two connections, or if only one replica may
    consume over it (`elected`), return two Links: the first one consumes, the second one publishes.
    """
    options = settings.links[name]
    client_id = settings.client_id_of(name)
    when_up = partial(core.link_up, name)
    parts = (settings, core, writes, metrics)
    if options.connections == 1 and not options.elected:
        links = [_link(name, name, client_id, *parts, when_up)]
    else:
        # The broker stores sessions and queues under the client_id of the settings, so the consuming side
        # uses it.
        links = [
            _link(name + CONSUMING, name, settings.consumer_id_of(name), *parts, publishes=False),
            _link(name, name, client_id + PUBLISHING, *parts, when_up, consumes=False),
        ]
    publishing = links[-1]
    core.add_link(name, options, publishing.session, lambda: publishing.is_up)
    core.dispatcher.add_endpoint(name, publishing.session)
    return links


def _link(
    name: str,
    endpoint: str,
    client_id: str,
    settings: Settings,
    core: BrokerCore,
    writes: WriteSet,
    metrics: Metrics,
    when_up: Callable[[], None] | None = None,
    *,
    consumes: bool = True,
    publishes: bool = True,
) -> Link:
    """Build one connection of the configured link `endpoint`, which consumes, publishes or does both.

    `name` is the name of the connection in logs and metrics. `when_up` is called whenever the connection is
    established.
    """
    options = settings.links[endpoint]
    dialect = DIALECTS[options.protocol]
    stats = metrics.link(name, options.protocol, dialect.frame_names, options.addresses)
    status = LinkStatus(name, stats, when_up)
    session: LinkSession = resolve_name(dialect.link)(
        endpoint, options, core.dispatcher, settings.limits, status, client_id=client_id
    )
    return Link(status, options, session, writes, endpoint=endpoint, consumes=consumes, publishes=publishes)
