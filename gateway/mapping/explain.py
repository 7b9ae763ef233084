"""Explanations of routing: what each route does with a message or an address, or why it does not match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.mapping.cases import words_of
from gateway.mapping.conditions import plain_headers
from gateway.mapping.router import Router
from gateway.mapping.routes import RefusedRoute, ResolvedRoute, Route
from gateway.model.address import Address
from gateway.model.message import NOBODY, Message, Sender
from gateway.model.outcome import Outcome
from gateway.protocols import dialect_of, show


@dataclass(frozen=True, slots=True)
class Match:
    """Explanation of a route that matches an address: what it does with messages to this address.

    `endpoint` and `address` are those of the target. If the target refuses the address, `address` is "", and
    `refused` is the reason. `when` is the expression that a message must also satisfy, or None. The last
    three fields describe one message, if the caller has given one: `crosses` is True if the route delivers
    it, `made` has the properties and headers of the delivered message, and `why` is the reason why it is not
    delivered.
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
    crosses: bool | None = None
    made: dict[str, Any] | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Miss:
    """Explanation of a route that does not match an address: the reason."""

    route: str
    file: str
    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of what all routes do with messages to one address.

    `matches` has the routes that match it, `misses` all others, both in the order of the mapping files.
    `dataclasses.asdict` converts the explanation for JSON.
    """

    endpoint: str
    address: str
    matches: tuple[Match, ...]
    misses: tuple[Miss, ...]


def explain(
    router: Router,
    endpoint: str,
    address: Address,
    queue: str = "",
    sender: Sender = NOBODY,
    message: Message | None = None,
) -> Explanation:
    """Explain what each route does with messages that are published to `address` at `endpoint`.

    If `message` is given, also explain what happens to this message. `queue` is the queue from which a link
    consumed it, or "". `sender` has the values for templates that refer to the client or user.
    """
    matches: list[Match] = []
    misses: list[Miss] = []
    for route in router.routes:
        found = _explain_route(router, route, endpoint, address, queue, sender, message)
        if isinstance(found, Match):
            matches.append(found)
        else:
            misses.append(Miss(route.name, route.file, route.line, found))
    for skipped in router.skipped:
        reason = f"optional, and endpoint {skipped.endpoint!r} is not configured"
        misses.append(Miss(skipped.route, skipped.file, skipped.line, reason))
    return Explanation(endpoint, show(address), tuple(matches), tuple(misses))


def _explain_route(
    router: Router,
    route: Route,
    endpoint: str,
    address: Address,
    queue: str,
    sender: Sender,
    message: Message | None,
) -> Match | str:
    """Return what `route` does with messages to the address, and with `message` if it is given.

    Return a text with the reason if the route does not match. Parameters are as in `explain`.
    """
    if route.source != endpoint:
        return f"its source is {route.source!r}"
    captures = route.pattern.match(address, queue)
    if captures is None:
        return route.pattern.mismatch(address, queue)
    way = route.resolve(address, captures, queue, router.hops_max)
    if way is None:
        return f"when is false for this address: {route.rule.when}"
    resolved: ResolvedRoute = route.resolve_for(address, captures, queue, router.hops_max, sender)
    separator = dialect_of(address).separator
    condition = route.condition
    crosses, made, why = (None, None, "") if message is None else _try_route(way, message)
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
        crosses=crosses,
        made=made,
        why=why,
    )


def _try_route(way: ResolvedRoute, message: Message) -> tuple[bool, dict[str, Any] | None, str]:
    """Apply the resolved route `way` to a message. Return three values.

    They are: True if the route delivers the message; the properties of the delivered message, or None; and
    the reason why the message is not delivered, or "".
    """
    route = way.route
    unparsable, undecided = route.unparsable, route.undecided
    crossed = way.cross(message)
    if isinstance(crossed, Message):
        words = words_of(route.target_endpoint, crossed)
        words["headers"] = plain_headers(crossed.properties.headers)
        return True, words, ""
    if isinstance(crossed, Outcome):
        return False, None, f"refused: {crossed.text or crossed.reason.value}"
    if route.unparsable > unparsable:
        return False, None, "cannot be decided: the body is not JSON"
    if route.undecided > undecided:
        return (
            False,
            None,
            "cannot be decided: a field or header that it names is missing or has another type",
        )
    return False, None, "the condition is false for this message"
