"""Warnings about routes to exchanges that lead to no queue when the gateway has started.

Only declared bindings are known before clients connect, and a client may bind at any time. Messages that a
link receives before that are rejected. Routes between listeners never take messages that a route has
delivered, so they do not count as bindings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from gateway.broker.amqp091.hosts import AmqpHosts
from gateway.broker.amqp091.queue import AmqpQueue
from gateway.broker.amqp091.virtual_host import VirtualHost
from gateway.mapping.linter import Finding, Severity
from gateway.mapping.routes import Route
from gateway.mapping.templates import Template
from gateway.settings import AmqpListener, Settings


def unbound(
    routes: Iterable[Route], settings: Settings, hosts: AmqpHosts, declaring: Collection[str]
) -> list[Finding]:
    """Return a finding for each mandatory route to an AMQP listener that leads to no declared queue.

    `hosts` has the virtual hosts with all declared objects, and `declaring` the names of those that have any.
    If its virtual host is in `declaring`, a route from a link gets a warning, and one from a listener a note.
    Otherwise a route from a link gets a note, and one from a listener gets none: each publisher is informed
    that its message was not routed.
    """
    return [finding for route in routes for finding in _unbound(route, settings, hosts, declaring)]


def _unbound(
    route: Route, settings: Settings, hosts: AmqpHosts, declaring: Collection[str]
) -> Iterator[Finding]:
    listener = settings.listeners.get(route.target_endpoint)
    if not isinstance(listener, AmqpListener) or not route.mandatory:
        return
    host = hosts[listener.virtual_hosts[0]]
    why = _unroutable_reason(route, host)
    declares, brought = host.name in declaring, route.source in settings.links
    if not why or not (declares or brought):
        return
    severity = Severity.WARNING if declares and brought else Severity.NOTE
    consequence = f"messages from {route.source!r} are rejected until a client declares it"
    text = f"route {route.name!r}: {why} in virtual host {host.name!r}: {consequence}"
    yield Finding(severity, "unbound", text, route.file, route.line, route.column)


def _unroutable_reason(route: Route, host: VirtualHost) -> str:
    """Return why a route leads to no declared queue; "" if it may lead to one.

    The result is "" also if the exchange, or a queue name at the default exchange, depends on the message.
    """
    scope, name = _fixed(route.target.scope), _fixed(route.target.name)
    if scope is None or (not scope and name is None):
        return ""
    if not scope:
        return "" if name in host.queues else f"no queue {name!r} is declared"
    if scope not in host.exchanges:
        return f"no exchange {scope!r} is declared"
    return "" if _leads_on(host, scope) else f"nothing is declared that is bound to exchange {scope!r}"


def _fixed(template: Template | None) -> str | None:
    """Return the constant text of a template; None if it depends on the message."""
    if template is None:
        return ""
    return None if template.names else template.render(lambda name: ())


def _leads_on(host: VirtualHost, name: str) -> bool:
    """Return True if the exchange leads to a queue, directly or through other exchanges."""
    to_visit, visited = [host.exchanges[name]], {name}
    while to_visit:
        exchange = to_visit.pop()
        further = [host.exchanges[exchange.alternate]] if exchange.alternate in host.exchanges else []
        for one in (*exchange.destinations, *further):
            if isinstance(one, AmqpQueue):
                return True
            if one.name not in visited:
                visited.add(one.name)
                to_visit.append(host.exchanges[one.name])
    return False
