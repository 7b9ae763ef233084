"""Why a message goes where it goes: what each route makes of an address, or why it does not match."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.mapping.router import Router
from gateway.mapping.routes import RefusedRoute, ResolvedRoute, Route
from gateway.model.address import Address
from gateway.model.message import NOBODY, Sender
from gateway.protocols import dialect_of, show


@dataclass(frozen=True, slots=True)
class Match:
    """A route that takes the address.

    `address` is what it produces, in its protocol's words; "" when it is refused, and `refused` says why.
    `when` is the expression that each message still has to satisfy, or None.
    """

    route: str
    file: str
    line: int
    endpoint: str
    protocol: str
    address: str
    captures: dict[str, str]
    when: str | None
    refused: str
    settle: str


@dataclass(frozen=True, slots=True)
class Miss:
    """A route that does not take the address, and why."""

    route: str
    file: str
    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """All routes, in the order of the files. `dataclasses.asdict` makes it JSON."""

    endpoint: str
    address: str
    matches: tuple[Match, ...]
    misses: tuple[Miss, ...]


def explain(
    router: Router, endpoint: str, address: Address, queue: str = "", sender: Sender = NOBODY
) -> Explanation:
    """What every route says about messages that `endpoint` brings in for `address`.

    `queue` as in Router.resolve; `sender` fills templates that name the client or the user.
    """
    matches: list[Match] = []
    misses: list[Miss] = []
    for route in router.routes:
        found = _explain_route(router, route, endpoint, address, queue, sender)
        if isinstance(found, Match):
            matches.append(found)
        else:
            misses.append(Miss(route.name, route.file, route.line, found))
    for skipped in router.skipped:
        reason = f"optional, and endpoint {skipped.endpoint!r} is not configured"
        misses.append(Miss(skipped.route, skipped.file, skipped.line, reason))
    return Explanation(endpoint, show(address), tuple(matches), tuple(misses))


def _explain_route(
    router: Router, route: Route, endpoint: str, address: Address, queue: str, sender: Sender
) -> Match | str:
    if route.source != endpoint:
        return f"takes from {route.source!r}"
    captures = route.pattern.match(address, queue)
    if captures is None:
        return route.pattern.mismatch(address, queue)
    if route.resolve(address, captures, queue, router.hops_max) is None:
        return f"when is false for this address: {route.rule.when}"
    resolved: ResolvedRoute = route.resolve_for(address, captures, queue, router.hops_max, sender)
    separator = dialect_of(address).separator
    condition = route.condition
    return Match(
        route=route.name,
        file=route.file,
        line=route.line,
        endpoint=route.target_endpoint,
        protocol=route.target.dialect.name,
        address=show(resolved.target) if resolved.target is not None else "",
        captures={name: separator.join(levels) for name, levels in captures.items()},
        when=condition.text if condition is not None and condition.per_message else None,
        refused=resolved.outcome.text if isinstance(resolved, RefusedRoute) else "",
        settle=route.settle,
    )
