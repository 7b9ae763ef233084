"""Linter of mapping files: finds faults and unwise rules in a set of files before anything runs.

An *error* prevents the routes from being loaded. A *warning* is a route that does what its author hardly
meant. A *note* is a limit of the route, which the gateway handles at run time. Two routes are compared by
a witness: an address that both match. Routes never apply to messages that a route delivered, so routes
between listeners cannot loop; a loop or an echo needs a link, whose broker may send back what it received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Mapping as Map
from enum import Enum
from itertools import pairwise
from typing import Final, NamedTuple

from gateway.errors import MappingError
from gateway.mapping.loader import Mapping
from gateway.mapping.patterns import Pattern, PatternToken, TokenKind, covers, witness
from gateway.mapping.router import HOPS_MAX, compile_routes
from gateway.mapping.routes import Route
from gateway.mapping.templates import Name, vocabulary
from gateway.model.address import Address
from gateway.model.dialect import Levels, NameRefused
from gateway.model.message import NOBODY
from gateway.protocols import show

ROOM_SMALL: Final = 55  # bytes; a template that leaves fewer for the captured levels gets a warning


class Severity(Enum):
    """Severity of a finding of the linter.

    ERROR: the mapping is refused. WARNING: the route probably does not do what its author meant. NOTE: the
    route has a limit.
    """

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Finding(NamedTuple):
    """Finding of the linter about a mapping file, with its position in the file.

    `code` is the kind of the finding, by which users filter; it does not change between versions. `line` and
    `column` start at 1; 0 means that the position is unknown.
    """

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
    domains: Map[str, str] | None = None,
) -> list[Finding]:
    """Return all findings about the routes in `mappings`, sorted by severity and position.

    `endpoints` has the protocol of each endpoint, by name. `links` are the names of the endpoints that are
    links. `domains` has the domain of each listener: clients of listeners in one domain reach each other
    without a route. None means that each listener has a domain of its own.
    """
    listeners = {name: name for name in endpoints if name not in links} if domains is None else domains
    compiled = compile_routes(mappings, endpoints, listeners)
    findings = [_problem(error) for error in compiled.problems]
    routes = compiled.routes
    for route in routes:
        findings.extend(_lint_single(route, links))
    for at, later in enumerate(routes):
        for earlier in routes[:at]:
            findings.extend(_lint_duplicates(earlier, later))
    findings.extend(_find_cycles(routes, links))
    findings.extend(_returned(routes, listeners))
    findings.extend(_unnamed(routes, endpoints, domains or {}))
    order = list(Severity)
    return sorted(findings, key=lambda one: (order.index(one.severity), one.file, one.line, one.code))


def _problem(error: MappingError) -> Finding:
    return Finding(Severity.ERROR, "invalid", error.reason, error.file, error.line, error.column)


def _finding(severity: Severity, code: str, route: Route, text: str) -> Finding:
    return Finding(severity, code, f"route {route.name!r}: {text}", route.file, route.line, route.column)


def _unnamed(
    routes: tuple[Route, ...], endpoints: Map[str, str], domains: Map[str, str]
) -> Iterator[Finding]:
    """Yield a finding for each listener at which no route starts although its clients probably expect one.

    A domain consists of the listeners whose clients reach each other without a route. There is a finding if
    no route starts or ends in the listener's domain, or if routes start only at other listeners of the
    domain. It is only a note if the listener has the name of its protocol: the user may not have configured
    it, because it is a default listener.
    """
    sources = {route.source for route in routes}
    source_domains = {domains[source] for source in sources if source in domains}
    reached = {domains.get(route.target_endpoint, "") for route in routes}
    for name, world in domains.items():
        if name in sources or (world in reached and world not in source_domains):
            continue
        severity = Severity.NOTE if name == endpoints[name] else Severity.WARNING
        why = "no message is routed from it or to it"
        if world in source_domains:
            why = "its clients' messages are not routed, unlike those of other listeners"
        yield Finding(severity, "unnamed", f"listeners.{name}: no route names it, so {why}", "", 0)


# One route by itself


def _lint_single(route: Route, links: Collection[str]) -> Iterator[Finding]:
    """Yield the findings about one route that do not depend on other routes."""
    yield from _weakened(route)
    yield from _unreachable(route, links)
    yield from _long_key(route)
    yield from _unidentified(route)
    yield from _literal(route)
    if route.condition is not None and (why := route.condition.type_error()):
        yield _finding(Severity.WARNING, "mistyped", route, f"when: {why}")
    separators = {route.pattern.dialect.separator, route.target.dialect.separator}
    if route.escape == "keep" and len(separators) == 2 and route.target.names:
        text = (
            "escape: keep lets a separator inside a level split the level, so that different"
            " names can become equal; use escape: percent"
        )
        yield _finding(Severity.WARNING, "irreversible", route, text)


def _weakened(route: Route) -> Iterator[Finding]:
    """Yield a finding for each option of a route that gives messages a weaker delivery guarantee."""
    delivery, qos = route.rule.delivery, route.rule.to.qos
    for word, mode in (("qos1", delivery.qos1), ("qos2", delivery.qos2)):
        if mode == "transient":
            text = f"delivery.{word}: transient loses acknowledged messages when the target restarts"
            yield _finding(Severity.WARNING, "weakened", route, text)
    if delivery.persistent == 0:
        text = "delivery.persistent: 0 delivers persistent messages at most once, so they can be lost"
        yield _finding(Severity.WARNING, "weakened", route, text)
    if qos == 0:
        text = "to.qos: 0 delivers at most once, whatever QoS the sender used"
        yield _finding(Severity.WARNING, "weakened", route, text)
    elif qos == 1 and route.pattern.dialect.assurance_max > 1:
        text = "to.qos: 1 can deliver a QoS 2 message twice"
        yield _finding(Severity.WARNING, "weakened", route, text)


def _unreachable(route: Route, links: Collection[str]) -> Iterator[Finding]:
    """Yield a finding if no message can satisfy the pattern or the condition of a route."""
    pattern = route.pattern
    reason = ""
    if route.condition is not None and route.condition.constant() is False:
        reason = f"when is never true: {route.condition.text}"
    elif pattern.first is not None and (never := pattern.dialect.impossible_reason(pattern.first)):
        reason = never
    elif (
        pattern.dialect.queue_word is not None
        and pattern.queue is None
        and not pattern.scope
        and route.source in links
    ):
        reason = "queues cannot be bound to a remote broker's default exchange; set from.queue"
    else:
        try:
            example(pattern, _shortest(pattern))
        except NameRefused as error:
            reason = str(error)
    if reason:
        yield _finding(Severity.WARNING, "unreachable", route, f"matches no message: {reason}")


def _long_key(route: Route) -> Iterator[Finding]:
    """Yield a finding if the names that a route builds can be too long for the target's protocol.

    The cause is a long text in the template, or a source protocol that permits longer names.
    """
    if not route.target.names:
        return
    source, target = route.pattern.dialect, route.target.dialect
    most = target.name_bytes_max
    literal = route.target.name.literal_bytes()
    if literal > most - ROOM_SMALL:
        text = (
            f"the template's fixed text has {literal} of the {most} bytes that a key may have; longer"
            " keys are refused"
        )
        yield _finding(Severity.WARNING, "long_key", route, text)
    elif source.name_bytes_max > most:
        text = (
            f"a long {source.name_word} results in a key of more than {most} bytes; such messages are"
            " refused as name_invalid"
        )
        yield _finding(Severity.NOTE, "long_key", route, text)


def _literal(route: Route) -> Iterator[Finding]:
    """Yield a finding for each constant text of a template that looks like a wildcard or placeholder."""
    word = route.target.dialect.name_word
    for level in route.target.name.levels:
        first = "".join(map(str, level)) if all(isinstance(piece, str) for piece in level) else ""
        if first in ("#", "*", "+"):
            text = (
                f"to.{word}: {first} is sent literally, not as a wildcard; to insert levels of"
                ' the source, capture them: "{name}" is one level, "{name...}" the rest'
            )
            yield _finding(Severity.WARNING, "literal", route, text)
        for piece, following in pairwise(level):
            if isinstance(piece, str) and piece.endswith("$") and isinstance(following, Name):
                text = (
                    f"to.{word}: the $ before {{{following.name}}} is sent literally; write a"
                    " placeholder without $"
                )
                yield _finding(Severity.WARNING, "literal", route, text)


def _unidentified(route: Route) -> Iterator[Finding]:
    """Yield a note that a route with `deduplicate` recognizes a repeated message only by its message id."""
    if route.rule.deduplicate is None:
        return
    where = route.pattern.dialect.message_id_field
    text = f"deduplicate compares message ids ({where}); a message without an id is always delivered"
    yield _finding(Severity.NOTE, "unidentified", route, text)


# Two routes for one message


def _lint_duplicates(earlier: Route, later: Route) -> Iterator[Finding]:
    """Yield a warning if both routes deliver the same message to the same address.

    `earlier` precedes `later` in the mapping files.
    """
    if (earlier.source, earlier.target_endpoint) != (later.source, later.target_endpoint):
        return
    meeting = witness(earlier.pattern, later.pattern)
    if meeting is None or _exclusive(earlier, later):
        return
    for wide, narrow in ((earlier, later), (later, earlier)):
        if _shadows(wide, narrow):
            text = (
                f"route {wide.name!r} ({wide.file}:{wide.line}) delivers the same messages to the"
                " same address; remove one of the routes"
            )
            yield _finding(Severity.WARNING, "shadowed", narrow, text)
            return
    if _same_target(earlier, later, meeting):
        where = show(example(earlier.pattern, meeting))
        place = f"{earlier.file}:{earlier.line}"
        text = (
            f"overlaps route {earlier.name!r} ({place}): a message to {where!r} is delivered twice to"
            " the same address"
        )
        yield _finding(Severity.WARNING, "overlap", later, text)


def _shadows(wide: Route, narrow: Route) -> bool:
    """Return True if `wide` seems to deliver all messages of `narrow`, and to the same addresses.

    The addresses are compared for some example names that `narrow` matches.
    """
    if wide.condition is not None or not covers(wide.pattern, narrow.pattern):
        return False
    return all(_same_target(wide, narrow, levels) for levels in _samples(narrow.pattern))


def _exclusive(one: Route, other: Route) -> bool:
    """Return True if both routes have conditions and these differ: perhaps no message satisfies both."""
    if one.condition is None or other.condition is None:
        return False
    return one.condition.text != other.condition.text


def _same_target(one: Route, other: Route, levels: Levels) -> bool:
    """Return True if both routes deliver messages to one name to the same target address.

    `levels` are the levels of this name, which both routes match.
    """
    try:
        address = example(one.pattern, levels)
    except NameRefused:
        return False
    targets = [_target(route, address) for route in (one, other)]
    return targets[0] is not None and targets[0] == targets[1]


def _target(route: Route, address: Address) -> Address | None:
    """Return the target address to which `route` delivers a message that is published to `address`.

    Return None if the route does not match, or if the target's protocol refuses the target address.
    """
    queue = route.pattern.queue or ""
    captures = route.pattern.match(address, queue)
    return None if captures is None else route.resolve_for(address, captures, queue, HOPS_MAX, NOBODY).target


def example(pattern: Pattern, levels: Levels) -> Address:
    """Build an address from the levels of its name and from the pattern's scope. Raises NameRefused.

    If the pattern names a queue, return the address of this queue instead.
    """
    name = pattern.queue if pattern.queue is not None else pattern.dialect.separator.join(levels)
    return pattern.dialect.address(pattern.scope, name)


def _shortest(pattern: Pattern) -> Levels:
    """Return the levels of a short name, with at least one level, that the pattern matches."""
    tokens = [token for token in pattern.tokens if token.kind is not TokenKind.REST]
    return tuple(token.text if token.kind is TokenKind.LITERAL else "x" for token in tokens) or ("x",)


def _samples(pattern: Pattern) -> list[Levels]:
    """Return up to three example names that the pattern matches, each as its levels.

    In the three names, a multi-level wildcard stands for zero, one and two levels. Different wildcards get
    different texts.
    """
    made: list[Levels] = []
    for rest in range(3):
        levels: list[str] = []
        for at, token in enumerate(pattern.tokens):
            if token.kind is TokenKind.LITERAL:
                levels.append(token.text)
            elif token.kind is TokenKind.ONE:
                levels.append(f"x{at}")
            else:
                levels.extend(f"y{at}{step}" for step in range(rest))
        if levels:
            made.append(tuple(levels))
    return made


# Routes that lead back


def _returned(routes: tuple[Route, ...], domains: Map[str, str]) -> Iterator[Finding]:
    """Yield a finding for each route that delivers messages to the address to which they were published.

    This is possible between two listeners with one domain, whose clients reach each other without a route.
    """
    for route in routes:
        source = domains.get(route.source)
        if source is None or domains.get(route.target_endpoint) != source or route.pattern.queue is not None:
            continue
        addresses = [example(route.pattern, one) for one in _samples(route.pattern)]
        if addresses and all(_target(route, one) == one for one in addresses):
            text = (
                f"delivers each message to its original address at {route.target_endpoint!r}, so"
                " subscribers receive it twice; remove the route, or change its `to`"
            )
            yield _finding(Severity.WARNING, "returned", route, text)


def _find_cycles(routes: tuple[Route, ...], links: Collection[str]) -> Iterator[Finding]:
    """Yield a finding for each chain of routes that goes through links and leads back to its start.

    Also yield a finding for each route that returns messages from a link to the listener from which another
    route has sent them to this link.
    """
    leads = {
        route: [other for other in routes if route.target_endpoint in links and _leads(route, other)]
        for route in routes
    }
    reported: set[frozenset[str]] = set()
    for route in routes:
        circle = _shortest_cycle(route, leads)
        if circle:
            names = frozenset(one.name for one in circle)
            if names not in reported:
                reported.add(names)
                path = " -> ".join(repr(one.name) for one in (*circle, circle[0]))
                text = (
                    f"messages can loop: {path}; only the hop limit stops them. Let one of these"
                    " routes match addresses to which the others do not deliver"
                )
                yield _finding(Severity.WARNING, "loop", circle[-1], text)
        for back in leads[route]:
            if back.target_endpoint == route.source and route.source not in links:
                sent = f"route {route.name!r} ({route.file}:{route.line}) sent to {route.target_endpoint!r}"
                text = f"returns to {route.source!r} the messages that {sent}"
                yield _finding(Severity.WARNING, "echo", back, text)


def _shortest_cycle(start: Route, leads: dict[Route, list[Route]]) -> list[Route]:
    """Return the shortest chain of routes from `start` back to `start`, or an empty list if there is none.

    `leads` has, for each route, the routes that can match the messages that it delivers.
    """
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
    """Return True if `other` can match a message that `route` has delivered."""
    if other.source != route.target_endpoint:
        return False
    made, pattern = _produced_pattern(route, other.pattern.scope), other.pattern
    if pattern.queue is not None:
        levels = pattern.dialect.levels(pattern.queue)
        pattern = Pattern(pattern.dialect, tuple(PatternToken(TokenKind.LITERAL, level) for level in levels))
    return witness(made, pattern) is not None


def _produced_pattern(route: Route, unknown: str) -> Pattern:
    """Return a pattern that matches all addresses to which a route delivers.

    If the target's exchange depends on the message, `unknown` is the scope of the pattern.
    """
    target, several = route.target, vocabulary(route.pattern).several
    scope = target.service
    if target.scope is not None:
        scope = unknown if target.scope.names else target.scope.text
    tokens = tuple(token for level in target.name.levels for token in _level(level, route, several))
    return Pattern(target.dialect, tokens, scope)


def _level(level: list[str | Name], route: Route, several: frozenset[str]) -> list[PatternToken]:
    """Return pattern tokens that match all values which one level of the target's template can have.

    `level` has the pieces of this level. `several` has the names of variables that stand for several levels.
    """
    if all(isinstance(piece, str) for piece in level):
        return [PatternToken(TokenKind.LITERAL, "".join(map(str, level)))]
    first = level[0]
    if not isinstance(first, Name) or first.name not in several:
        return [PatternToken(TokenKind.ONE, "")]
    if first.name != route.pattern.dialect.name_word or route.pattern.queue is not None:
        return [PatternToken(TokenKind.REST, "")]
    return [
        PatternToken(
            kind, route.translate(text) if kind is TokenKind.LITERAL and route.escape != "reject" else text
        )
        for kind, text in route.pattern.tokens
    ]


def undivided_routes(
    routes: Iterable[Route], divides: Callable[[str, str | None], bool], workers: int
) -> list[MappingError]:
    """Return an error for each route that would apply to a message once in every worker.

    `divides` takes the name of an endpoint, and a queue or None. It returns True if each message there goes
    to only one of several consumers. `workers` is the number of workers.
    """
    return [
        MappingError(
            f"route {route.name!r}: each of the {workers} workers would receive every message of"
            f" link {route.source!r}. Set elected on the link, or let the broker divide the"
            " messages (share, or a queue)",
            file=route.file,
            line=route.line,
            column=route.column,
        )
        for route in routes
        if workers > 1 and not divides(route.source, route.pattern.queue)
    ]


def returning_routes(routes: Iterable[Route], links: Collection[str]) -> list[MappingError]:
    """Return an error for each route that does not work with several workers with embedded brokers.

    The clients of each worker are a domain of their own, so a route to a listener would reach only the
    clients of one worker. A route with `deduplicate` would have to know the messages of the other workers.
    """
    found: list[MappingError] = []
    for route in routes:
        if route.target_endpoint not in links:
            why = (
                f"delivers to {route.target_endpoint!r}, where only the clients of one worker would"
                " receive its messages"
            )
        elif route.rule.deduplicate is not None:
            why = "deduplicates, but does not know the message ids that other workers received"
        else:
            continue
        text = f"route {route.name!r} {why}. Remove the route, or set workers: 1"
        found.append(MappingError(text, file=route.file, line=route.line, column=route.column))
    return found


def unstorable_routes(
    routes: Iterable[Route], links: Collection[str], *, store: bool, shared: Collection[str] = ()
) -> list[MappingError]:
    """Return an error for each route with `settle: stored` that cannot have an outbox as configured.

    The target must be a link, and `store` must be True, which means that there is a store. For a link in
    `shared`, whose outboxes are on the cluster, no store is needed, but the route must not set limits of its
    own.
    """
    found: list[MappingError] = []
    for route in routes:
        if route.settle != "stored":
            continue
        text = f"route {route.name!r}: settle: stored"
        if route.target_endpoint not in links:
            text += (
                f" is only for links, and {route.target_endpoint!r} is a listener, whose durable"
                " queues and persistent sessions store messages on disk anyway. Remove settle"
            )
        elif route.target_endpoint in shared:
            if route.rule.outbox is None:
                continue
            text += (
                " uses an outbox on the cluster, whose limits are set at link "
                f"{route.target_endpoint!r}. Remove outbox from the route"
            )
        elif not store:
            text += " needs the store, and store.enabled is false; use settle: confirmed"
        else:
            continue
        found.append(MappingError(text, file=route.file, line=route.line, column=route.column))
    return found


def unkeyed_routes(routes: Iterable[Route]) -> list[MappingError]:
    """Return an error for each route with `private: hash`, which needs a configured key for hashes.

    Call this function only if no key is configured.
    """
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
