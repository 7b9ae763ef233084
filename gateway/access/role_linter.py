"""Checks of roles: rules that never apply, routes to which no client may publish, users without a role.

Roles from tokens and certificates are not known to this gateway: a role that no user has may be a token's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from gateway.access.authorization import Roles
from gateway.access.filters import covers, overlaps
from gateway.access.rights import DEFAULT_EXCHANGE
from gateway.mapping.linter import Finding, Severity
from gateway.mapping.routes import Route
from gateway.protocols.amqp091.dialect import AMQP091
from gateway.protocols.amqpfast.dialect import AMQPFAST
from gateway.protocols.mqtt.dialect import MQTT
from gateway.regexes import Regex
from gateway.settings import AnonymousListener, Settings
from gateway.settings.access import EVERY_HOST, PLACEHOLDER, Role

CODE: Final = "rights"
CAPTURE: Final = re.compile(r"\{[^{}]*?(\.\.\.)?\}")


def lint_roles(settings: Settings, roles: Roles, routes: Iterable[Route]) -> list[Finding]:
    """Return all findings about the roles, about their rules, and about routes that depend on roles."""
    routes = list(routes)
    findings = list(_lint_route_roles(roles, routes))
    if not roles.roles:
        return [*findings, *_lint_missing_roles(settings)]
    found = [*findings, *_lint_holders(settings, roles)]
    for name, role in roles.roles.items():
        found += _lint_rules(settings, name, role)
    return [*found, *_lint_unfed_routes(settings, roles, routes)]


def _warning(text: str, file: str = "", line: int = 0, column: int = 0) -> Finding:
    return Finding(Severity.WARNING, CODE, text, file, line, column)


def _lint_missing_roles(settings: Settings) -> Iterator[Finding]:
    """Yield a warning if there are users but neither roles nor an authorizer.

    Every client may then do everything.
    """
    if settings.users and settings.authorizer is None:
        yield _warning(
            "roles: users are configured but no roles, so EVERY CONNECTED CLIENT MAY DO"
            " EVERYTHING, in every virtual host. Configure `roles`"
        )


def _lint_route_roles(roles: Roles, routes: Iterable[Route]) -> Iterator[Finding]:
    """Yield a finding for each route that requires a role which does not exist."""
    for route in routes:
        if route.rule.role is not None and route.rule.role not in roles.roles:
            text = (
                f"route {route.name!r}: unknown role {route.rule.role!r}, so no client may publish to"
                " the route. Add the role, or change the route's `role`"
            )
            yield _warning(text, route.file, route.line, route.column)


def _lint_holders(settings: Settings, roles: Roles) -> Iterator[Finding]:
    """Yield a finding for each user without a role, and for each role without a user.

    Also yield a finding if anonymous clients may connect but have no role.
    """
    default = roles.default
    for name, has in roles.users.items():
        if not has and not default.authenticated:
            yield _warning(f"users.{name}: the user has no role, so every request is denied. Add a role")
    everybody = {role for has in roles.users.values() for role in has}
    everybody |= {role for word in type(default).model_fields for role in getattr(default, word)}
    for name in roles.roles:
        if name not in everybody:
            text = f"roles.{name}: no configured user has this role; only a token or certificate can grant it"
            yield Finding(Severity.NOTE, CODE, text, "", 0)
    may = [one.anonymous for one in settings.listeners.values() if isinstance(one, AnonymousListener)]
    admits = any(policy != "never" for policy in may)
    if admits and not default.anonymous:
        text = "default_roles.anonymous: no role, so every request of an anonymous client is denied"
        yield Finding(Severity.NOTE, CODE, text, "", 0)


def _lint_rules(settings: Settings, name: str, role: Role) -> Iterator[Finding]:
    """Yield a finding for each rule of the role `name` that never applies, or that another rule includes."""
    protocols = {*settings.endpoints().values(), *(one.protocol for one in settings.listeners.values())}
    speaks = {word: word in protocols for word in (MQTT.name, AMQP091.name, AMQPFAST.name)}
    for word, there in speaks.items():
        if not there and word in role.model_fields_set:
            yield _warning(f"roles.{name}.{word}: no listener uses this protocol, so the rules never apply")
    permissions = role.mqtt
    yield from _lint_filters(f"roles.{name}.mqtt", "publish", permissions.publish, permissions.deny_publish)
    yield from _lint_filters(
        f"roles.{name}.mqtt", "subscribe", permissions.subscribe, permissions.deny_subscribe
    )
    hosts = {AMQP091.name: settings.amqp_hosts(), AMQPFAST.name: list(settings.virtual_hosts())}
    for protocol, served in hosts.items():
        for host in getattr(role, protocol) if speaks[protocol] else ():
            if host != EVERY_HOST and host not in served and not PLACEHOLDER.search(host):
                yield _warning(f"roles.{name}.{protocol}.{host}: no listener serves this virtual host")
    for host, rules in role.amqp091.items():
        texts = [rules.configure, rules.write, rules.read]
        texts += [text for one in rules.topics.values() for text in (one.write, one.read)]
        if any("{client_id}" in text for text in texts) and role.mqtt.as_virtual_host != host:
            at = f"roles.{name}.{AMQP091.name}.{host}"
            yield _warning(
                f"{at}: AMQP clients have no client identifier, so the rules with {{client_id}} never apply"
            )


def _lint_filters(
    at: str, word: str, patterns: tuple[str, ...], denied: tuple[str, ...]
) -> Iterator[Finding]:
    """Yield a finding for each MQTT filter of a role that never has an effect.

    Another filter of the role, or one of the `denied` filters, covers it. `at` is the configuration key of
    the rules, `word` is `publish` or `subscribe`.
    """
    for text in dict.fromkeys(patterns):
        levels = text.split("/")
        if any(covers(one.split("/"), levels) for one in denied):
            yield _warning(f"{at}.{word}: {text!r} never applies, because deny_{word} covers it")
            continue
        wider = next((one for one in patterns if one != text and covers(one.split("/"), levels)), None)
        if wider is not None:
            finding_text = f"{at}.{word}: {text!r} is redundant, because {wider!r} includes it"
            yield Finding(Severity.NOTE, CODE, finding_text, "", 0)


def _lint_unfed_routes(settings: Settings, roles: Roles, routes: Iterable[Route]) -> Iterator[Finding]:
    """Yield a finding for each route from a listener to whose source address no role may publish."""
    for route in routes:
        if route.source not in settings.listeners:
            continue
        among = [role for name, role in roles.roles.items() if route.rule.role in (None, name)] or list(
            roles.roles.values()
        )
        source = route.rule.source.given_words()
        if any(_may_feed(role, source, route.rule.source.dialect.name) for role in among):
            continue
        text = f"route {route.name!r}: no role permits clients to publish to the route's source address"
        yield _warning(text, route.file, route.line, route.column)


def _may_feed(role: Role, source: dict[str, str], protocol: str) -> bool:
    """Return True if a role may permit publishing to the source address of a route of this protocol.

    Placeholders in the rules of the role count as matching every value.
    """
    feeds = FEEDS.get(protocol)
    return feeds is None or feeds(role, source)


def _feeds_topic(role: Role, source: dict[str, str]) -> bool:
    if role.mqtt.as_virtual_host is not None:
        return True
    name = source.get("topic", next(iter(source.values())))
    levels = CAPTURE.sub(lambda one: "#" if one[1] else "+", name).split("/")
    return any(overlaps(PLACEHOLDER.sub("+", one).split("/"), levels) for one in role.mqtt.publish)


def _feeds_exchange(role: Role, source: dict[str, str]) -> bool:
    exchange = source.get("exchange")
    if exchange is None or CAPTURE.search(exchange):
        return True
    return any(
        Regex(PLACEHOLDER.sub(".*", one.write)).search(exchange or DEFAULT_EXCHANGE)
        for one in role.amqp091.values()
        if one.write
    )


def _feeds_destination(role: Role, source: dict[str, str]) -> bool:
    destination = CAPTURE.split(source.get("destination", ""))[0].rstrip("*")
    services = [source["service"]] if "service" in source else ["queue", "topic"]
    return any(
        _begins_alike(PLACEHOLDER.split(text)[0].rstrip("*"), destination)
        for one in role.amqpfast.values()
        for service in services
        for text in getattr(one, f"{service}s", one.topics).write
    )


FEEDS: Final[dict[str, Callable[[Role, dict[str, str]], bool]]] = {
    MQTT.name: _feeds_topic,
    AMQP091.name: _feeds_exchange,
    AMQPFAST.name: _feeds_destination,
}
"""Functions that `_may_feed` calls, by the protocol of the route's source."""


def _begins_alike(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)
