"""What is wrong, or only unwise, in a set of mapping files, found before anything runs.

An *error* keeps the routes from being loaded. A *warning* is a route that does what its author hardly meant.
A *note* is a limit that the route has, and that the gateway answers for at run time. Two routes are
compared by a witness: an address that both take. Routes never apply to what a route delivered, so routes
between listeners cannot loop; a loop or an echo needs a link, whose broker may bring back what it was sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Mapping as Map
from enum import Enum
from typing import Final, NamedTuple

from gateway.errors import MappingError
from gateway.mapping.loading import Mapping
from gateway.mapping.patterns import Kind, Pattern, Token, covers, witness
from gateway.mapping.router import HOPS_MAX, compile_routes
from gateway.mapping.routes import Route
from gateway.mapping.templates import Name, vocabulary
from gateway.model.address import Address
from gateway.model.dialect import Levels, NameRefused
from gateway.model.message import NOBODY
from gateway.protocols import show

ROOM_SMALL: Final = 55  # octets of a name that the template itself leaves for what is captured


class Severity(Enum):
    """ERROR: the mapping is refused. WARNING: look at it. NOTE: know it."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Finding(NamedTuple):
    """One remark. `code` is stable, for filters; `line` and `column` count from 1, 0: unknown."""

    severity: Severity
    code: str
    text: str
    file: str
    line: int
    column: int = 0


def lint(
    mappings: Iterable[Mapping],
    endpoints: Map[str, str],
    links: Collection[str] = (),
    worlds: Map[str, str] | None = None,
) -> list[Finding]:
    """All findings, by severity and place. `endpoints` maps names to protocols; `links` names those that are
    connections of ours to remote brokers; for `worlds` see Router."""
    listeners = {name: name for name in endpoints if name not in links} if worlds is None else worlds
    compiled = compile_routes(mappings, endpoints, listeners)
    findings = [_problem(error) for error in compiled.problems]
    routes = compiled.routes
    for route in routes:
        findings.extend(_alone(route, links))
    for at, later in enumerate(routes):
        for earlier in routes[:at]:
            findings.extend(_twice(earlier, later))
    findings.extend(_circles(routes, links))
    findings.extend(_unnamed(routes, endpoints, worlds or {}))
    order = list(Severity)
    return sorted(findings, key=lambda one: (order.index(one.severity), one.file, one.line, one.code))


def _problem(error: MappingError) -> Finding:
    return Finding(Severity.ERROR, "invalid", error.reason, error.file, error.line, error.column)


def _found(severity: Severity, code: str, route: Route, text: str) -> Finding:
    return Finding(severity, code, f"route {route.name!r}: {text}", route.file, route.line, route.column)


def _unnamed(routes: tuple[Route, ...], endpoints: Map[str, str], worlds: Map[str, str]) -> Iterator[Finding]:
    """Listeners that no route takes from or leads to, or only under another name. One that has its protocol's
    name may be there because nothing else was configured: that is a note."""
    sources = {route.source for route in routes}
    taken = {worlds[source] for source in sources if source in worlds}
    reached = {worlds.get(route.target_endpoint, "") for route in routes}
    for name, world in worlds.items():
        if name in sources or (world in reached and world not in taken):
            continue
        severity = Severity.NOTE if name == endpoints[name] else Severity.WARNING
        why = "nothing crosses from it or to it"
        if world in taken:
            why = "what its clients publish does not cross, as that of other listeners does"
        yield Finding(severity, "unnamed", f"listeners.{name}: no route names it, so {why}", "", 0)


# One route by itself


def _alone(route: Route, links: Collection[str]) -> Iterator[Finding]:
    yield from _weakened(route)
    yield from _unreachable(route, links)
    yield from _long_key(route)
    yield from _unidentified(route)
    separators = {route.pattern.dialect.separator, route.target.dialect.separator}
    if route.escape == "keep" and len(separators) == 2 and route.target.names:
        text = (
            "escape: keep lets a separator inside a level split it, and two names may become one; see percent"
        )
        yield _found(Severity.WARNING, "irreversible", route, text)


def _weakened(route: Route) -> Iterator[Finding]:
    delivery, qos = route.rule.delivery, route.rule.to.qos
    for word, mode in (("qos1", delivery.qos1), ("qos2", delivery.qos2)):
        if mode == "transient":
            text = f"delivery.{word}: transient loses acknowledged messages when the target restarts"
            yield _found(Severity.WARNING, "weakened", route, text)
    if delivery.persistent == 0:
        text = "delivery.persistent: 0 delivers persistent messages at most once"
        yield _found(Severity.WARNING, "weakened", route, text)
    if qos == 0:
        text = "to.qos: 0 delivers at most once, whatever the sender asked for"
        yield _found(Severity.WARNING, "weakened", route, text)
    elif qos == 1 and route.pattern.dialect.assurance_max > 1:
        text = "to.qos: 1 lets a QoS 2 message arrive twice"
        yield _found(Severity.WARNING, "weakened", route, text)


def _unreachable(route: Route, links: Collection[str]) -> Iterator[Finding]:
    pattern = route.pattern
    reason = ""
    if route.condition is not None and route.condition.constant() is False:
        reason = f"when is never true: {route.condition.text}"
    elif pattern.first is not None and (never := pattern.dialect.never(pattern.first)):
        reason = never
    elif (
        pattern.dialect.queue_word is not None
        and pattern.queue is None
        and not pattern.scope
        and route.source in links
    ):
        reason = "nothing can be bound to a remote broker's default exchange; name the queue"
    else:
        try:
            example(pattern, _shortest(pattern))
        except NameRefused as error:
            reason = str(error)
    if reason:
        yield _found(Severity.WARNING, "unreachable", route, f"takes nothing: {reason}")


def _long_key(route: Route) -> Iterator[Finding]:
    if not route.target.names:
        return
    source, target = route.pattern.dialect, route.target.dialect
    most = target.name_octets_max
    literal = route.target.name.literal_octets()
    if literal > most - ROOM_SMALL:
        text = f"the key's own text takes {literal} of {most} octets; longer keys are refused"
        yield _found(Severity.WARNING, "long_key", route, text)
    elif source.name_octets_max > most:
        text = (
            f"a {source.name_word} can make a key of more than {most} octets; it is refused as name_invalid"
        )
        yield _found(Severity.NOTE, "long_key", route, text)


def _unidentified(route: Route) -> Iterator[Finding]:
    if route.rule.deduplicate is None:
        return
    where = route.pattern.dialect.message_id_field
    text = f"deduplicate compares message ids ({where}); a message without one always crosses"
    yield _found(Severity.NOTE, "unidentified", route, text)


# Two routes for one message


def _twice(earlier: Route, later: Route) -> Iterator[Finding]:
    """Routes that bring one message to one address twice."""
    if (earlier.source, earlier.target_endpoint) != (later.source, later.target_endpoint):
        return
    meeting = witness(earlier.pattern, later.pattern)
    if meeting is None or _exclusive(earlier, later):
        return
    for wide, narrow in ((earlier, later), (later, earlier)):
        if _shadows(wide, narrow):
            text = (
                f"every message also crosses by {wide.name!r} ({wide.file}:{wide.line}), to the same address"
            )
            yield _found(Severity.WARNING, "shadowed", narrow, text)
            return
    if _same_target(earlier, later, meeting):
        where = show(example(earlier.pattern, meeting))
        place = f"{earlier.file}:{earlier.line}"
        text = f"overlaps {earlier.name!r} ({place}): {where!r} arrives twice at one address"
        yield _found(Severity.WARNING, "overlap", later, text)


def _shadows(wide: Route, narrow: Route) -> bool:
    """Whether `wide` brings all that `narrow` takes to the address to which `narrow` brings it."""
    if wide.condition is not None or not covers(wide.pattern, narrow.pattern):
        return False
    return all(_same_target(wide, narrow, levels) for levels in _samples(narrow.pattern))


def _exclusive(one: Route, other: Route) -> bool:
    """Whether both have conditions, and different ones: only their author knows whether both can be true."""
    if one.condition is None or other.condition is None:
        return False
    return one.condition.text != other.condition.text


def _same_target(one: Route, other: Route, levels: Levels) -> bool:
    try:
        address = example(one.pattern, levels)
    except NameRefused:
        return False
    targets = [_target(route, address) for route in (one, other)]
    return targets[0] is not None and targets[0] == targets[1]


def _target(route: Route, address: Address) -> Address | None:
    queue = route.pattern.queue or ""
    captures = route.pattern.match(address, queue)
    return None if captures is None else route.resolve_for(address, captures, queue, HOPS_MAX, NOBODY).target


def example(pattern: Pattern, levels: Levels) -> Address:
    """The address with these levels that the pattern is about. Raises NameRefused."""
    name = pattern.queue if pattern.queue is not None else pattern.dialect.separator.join(levels)
    return pattern.dialect.address(pattern.scope, name)


def _shortest(pattern: Pattern) -> Levels:
    """A short match of the pattern; one level for a pattern that would also take none."""
    tokens = [token for token in pattern.tokens if token.kind is not Kind.REST]
    return tuple(token.text if token.kind is Kind.LITERAL else "x" for token in tokens) or ("x",)


def _samples(pattern: Pattern) -> list[Levels]:
    """Matches in which every wildcard has its own text, with none, one and two levels for a rest."""
    made: list[Levels] = []
    for rest in range(3):
        levels: list[str] = []
        for at, token in enumerate(pattern.tokens):
            if token.kind is Kind.LITERAL:
                levels.append(token.text)
            elif token.kind is Kind.ONE:
                levels.append(f"x{at}")
            else:
                levels.extend(f"y{at}{step}" for step in range(rest))
        if levels:
            made.append(tuple(levels))
    return made


# Routes that lead back


def _circles(routes: tuple[Route, ...], links: Collection[str]) -> Iterator[Finding]:
    """Chains of routes through links that come back to their beginning, and opposite routes of one link."""
    leads = {
        route: [other for other in routes if route.target_endpoint in links and _leads(route, other)]
        for route in routes
    }
    told: set[frozenset[str]] = set()
    for route in routes:
        circle = _shortest_circle(route, leads)
        if circle:
            names = frozenset(one.name for one in circle)
            if names not in told:
                told.add(names)
                path = " -> ".join(repr(one.name) for one in (*circle, circle[0]))
                text = f"messages can go round: {path}; only the hop count stops them"
                yield _found(Severity.WARNING, "loop", circle[-1], text)
        for back in leads[route]:
            if back.target_endpoint == route.source and route.source not in links:
                sent = f"{route.name!r} ({route.file}:{route.line}) sent to {route.target_endpoint!r}"
                text = f"brings back to {route.source!r} what {sent}"
                yield _found(Severity.WARNING, "echo", back, text)


def _shortest_circle(start: Route, leads: dict[Route, list[Route]]) -> list[Route]:
    """The shortest way from a route back to itself; empty when there is none."""
    before: dict[Route, Route] = {}
    queue = deque([start])
    while queue:
        route = queue.popleft()
        for following in leads[route]:
            if following is start:
                way = [route]
                while way[-1] is not start:
                    way.append(before[way[-1]])
                return way[::-1]
            if following not in before:
                before[following] = route
                queue.append(following)
    return []


def _leads(route: Route, other: Route) -> bool:
    """Whether a message that `route` delivers can be one that `other` takes."""
    if other.source != route.target_endpoint:
        return False
    made, taken = _made(route, other.pattern.scope), other.pattern
    if taken.queue is not None:
        levels = taken.dialect.levels(taken.queue)
        taken = Pattern(taken.dialect, tuple(Token(Kind.LITERAL, level) for level in levels))
    return witness(made, taken) is not None


def _made(route: Route, unknown: str) -> Pattern:
    """The addresses that a route produces; an exchange that depends on the message is `unknown`."""
    target, several = route.target, vocabulary(route.pattern).several
    scope = target.service
    if target.scope is not None:
        scope = unknown if target.scope.names else target.scope.text
    tokens = tuple(token for level in target.name.levels for token in _level(level, route, several))
    return Pattern(target.dialect, tokens, scope)


def _level(level: list[str | Name], route: Route, several: frozenset[str]) -> list[Token]:
    """What a level of the target's template can become."""
    if all(isinstance(piece, str) for piece in level):
        return [Token(Kind.LITERAL, "".join(map(str, level)))]
    first = level[0]
    if not isinstance(first, Name) or first.name not in several:
        return [Token(Kind.ONE, "")]
    if first.name != route.pattern.dialect.name_word or route.pattern.queue is not None:
        return [Token(Kind.REST, "")]
    return [
        Token(kind, route.translate(text) if kind is Kind.LITERAL and route.escape != "reject" else text)
        for kind, text in route.pattern.tokens
    ]


def undivided_routes(
    routes: Iterable[Route], divides: Callable[[str, str | None], bool], workers: int
) -> list[MappingError]:
    """Routes over which each of several workers would bring every message. `divides`: whether those that
    consume at an endpoint, from a queue, get each once among them."""
    return [
        MappingError(
            f"route {route.name!r}: each of {workers} workers would bring every message of link"
            f" {route.source!r}: say elected there, or what has the broker divide them (share, or a queue)",
            file=route.file,
            line=route.line,
            column=route.column,
        )
        for route in routes
        if workers > 1 and not divides(route.source, route.pattern.queue)
    ]


def returning_routes(routes: Iterable[Route], links: Collection[str]) -> list[MappingError]:
    """Routes that workers of the embedded broker cannot have, of which each is a world of its own: those that
    end at a listener, and those that have to know what came in elsewhere."""
    found: list[MappingError] = []
    for route in routes:
        if route.target_endpoint not in links:
            why = f"ends at {route.target_endpoint!r}, where clients of one worker alone would get it"
        elif route.rule.deduplicate is not None:
            why = "deduplicates, and does not know what came in at other workers"
        else:
            continue
        told = f"route {route.name!r} {why}: there is no place for it with workers of the embedded broker"
        found.append(MappingError(told, file=route.file, line=route.line, column=route.column))
    return found


def unstorable_routes(
    routes: Iterable[Route], links: Collection[str], *, store: bool, shared: Collection[str] = ()
) -> list[MappingError]:
    """Routes whose `settle: stored` cannot be: without a link, or without a store. `shared`: links whose
    outboxes are on the cluster, all with the same limits."""
    found: list[MappingError] = []
    for route in routes:
        if route.settle != "stored":
            continue
        told = f"route {route.name!r}: settle: stored"
        if route.target_endpoint not in links:
            told += (
                f" is for links; {route.target_endpoint!r} is served here, where durable queues and"
                " persistent sessions accept a message when it is on disk anyway: leave it out"
            )
        elif route.target_endpoint in shared:
            if route.rule.outbox is None:
                continue
            told += f" has an outbox on the cluster; its limits are those of link {route.target_endpoint!r}"
        elif not store:
            told += " needs the store, and store.enabled is false; use settle: confirmed"
        else:
            continue
        found.append(MappingError(told, file=route.file, line=route.line, column=route.column))
    return found


def forgetful_routes(routes: Iterable[Route], ids_secs: float) -> list[MappingError]:
    """Routes that deduplicate for longer than replicas of a cluster keep ids."""
    return [
        MappingError(
            f"route {route.name!r}: deduplicate: window: {route.rule.deduplicate.window} is longer than"
            f" broker.ids_secs, {ids_secs:g} s, for which the cluster keeps ids",
            file=route.file,
            line=route.line,
            column=route.column,
        )
        for route in routes
        if route.rule.deduplicate is not None and route.rule.deduplicate.window_secs > ids_secs
    ]


def unkeyed_routes(routes: Iterable[Route]) -> list[MappingError]:
    """Routes whose `private` hashes: they need a key."""
    return [
        MappingError(
            f"route {route.name!r}: private: hash needs journal.hash_key, which is not set",
            file=route.file,
            line=route.line,
            column=route.column,
        )
        for route in routes
        if "hash" in route.rule.private.values()
    ]
