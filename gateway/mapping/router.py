"""Router: finds the routes of each message.

`compile_routes` compiles mapping files into routes for the configured endpoints; a `Router` resolves them per
endpoint and address. Its results depend on nothing else and may be cached as long as the router exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Mapping as Map
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from itertools import count
from typing import Final, NamedTuple, Protocol, TypeVar

from gateway.errors import MappingError
from gateway.mapping.conditions import Condition, ExpressionError
from gateway.mapping.loader import Mapping, Place
from gateway.mapping.message_ids import IdentifyingRoute
from gateway.mapping.patterns import Pattern, PatternToken, TokenKind, covers, parse_tokens
from gateway.mapping.reply_routes import reply_route
from gateway.mapping.return_addresses import Return, ReturnAddresses
from gateway.mapping.routes import ReplyKeptCallback, ResolvedRoute, Route, Target, ignore_reply_address
from gateway.mapping.schema import EndpointAddress, From, HeaderValue, RouteRule
from gateway.mapping.templates import Template, Text, Vocabulary, no_levels, typed_value, vocabulary
from gateway.model.address import Address
from gateway.model.dialect import Dialect, Levels, NameRefused
from gateway.model.properties import Value
from gateway.protocols import DIALECTS

HOPS_MAX: Final = 8  # longer chains of routes are loops, in every known deployment
_EVERY_NAME: Final = (PatternToken(TokenKind.REST, ""),)
Built = TypeVar("Built")


class Located(Protocol):
    """Function that compiles a part of a rule, and adds the part's position in the file to errors."""

    def __call__(self, inner: tuple[str, ...], build: Callable[[], Built]) -> Built:
        """Return the result of `build`.

        If `build` raises a MappingError, raise it again with a position: that of the key to which the path
        `inner` leads within the rule.
        """


class Skipped(NamedTuple):
    """Optional route that is omitted because `endpoint` is not configured, with its position in the file."""

    route: str
    endpoint: str
    file: str
    line: int


class Compiled(NamedTuple):
    """Result of a compilation: routes in the order of the files, errors, and omitted optional routes."""

    routes: tuple[Route, ...]
    problems: tuple[MappingError, ...]
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True)
class Subscriptions:
    """Subscriptions at a remote broker that a link needs for the routes that start at it.

    `queues` are the queues to consume from. `bindings` are pairs (scope, pattern) for all other routes, with
    the wildcards of the link's protocol. `prefixes` are pairs (scope, text) for the same routes: a text that
    is empty or ends in the separator is the beginning of all names, any other text is a whole name. A
    subscription is omitted if another one covers it.
    """

    queues: tuple[str, ...] = ()
    bindings: tuple[tuple[str, str], ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Targets:
    """Objects, such as exchanges, that must exist at an endpoint for the routes that end there.

    `scopes` are scopes such as exchanges, and `queues` are queues to which routes publish directly. `names`
    are addresses (scope, name) in a protocol without queues. Objects whose names depend on the message are
    omitted.
    """

    scopes: tuple[str, ...] = ()
    queues: tuple[str, ...] = ()
    names: tuple[tuple[str, str], ...] = ()


HasNoReceivers = Callable[[Route], bool]


def _assume_receivers(route: Route) -> bool:
    return False


class RouteIndex:
    """Index of the routes from one endpoint by the first literal level of their patterns."""

    __slots__ = ("_always", "_by_level", "_everywhere", "_places")

    def __init__(self, routes: Sequence[Route]) -> None:
        self._always: list[tuple[int, Route]] = []  # with their order in the files
        self._by_level: dict[tuple[int, str], list[tuple[int, Route]]] = {}
        for number, route in enumerate(routes):
            literals = route.pattern.leading_literals()
            into = self._by_level.setdefault(literals[0], []) if literals else self._always
            into.append((number, route))
        self._places = sorted({at for at, _ in self._by_level})
        self._everywhere = [route for _, route in self._always]

    def candidates(self, levels: Levels) -> list[Route]:
        """Return the routes that may match a name with these levels, in the order of the mapping files.

        These are all routes whose first literal is at the same index in `levels`, and all routes whose
        patterns have no literal before a multi-level wildcard.
        """
        found = self._always
        for at in self._places:
            if at >= len(levels):
                break
            more = self._by_level.get((at, levels[at]))
            if more is not None:
                found = found + more
        if found is self._always:
            return self._everywhere
        found.sort(key=_number)
        return [route for _, route in found]


def _number(entry: tuple[int, Route]) -> int:
    return entry[0]


class Router:
    """Routes of all mapping files, compiled for the configured endpoints.

    `endpoints` has the protocol of each endpoint, by name. `domains` has the domain of each listener: the
    namespace that its clients share with those of other listeners. None means that all endpoints are
    listeners with domains of their own. `ids` yields message ids for routes with `message_id: add`; None
    yields consecutive numbers, for tests. `return_key` is the secret that signs return addresses; with None
    there are no return addresses, so that replies need routes of their own. `reply_kept` is called with the
    route and the message if the message's reply address leads nowhere and is left unchanged, once for all
    messages with the same properties.

    Raises MappingError for the first fault that the linter reports as an error.
    """

    def __init__(
        self,
        mappings: Iterable[Mapping],
        endpoints: Map[str, str],
        *,
        domains: Map[str, str] | None = None,
        hops_max: int = HOPS_MAX,
        ids: Iterator[str] | None = None,
        return_key: bytes | None = None,
        reply_kept: ReplyKeptCallback = ignore_reply_address,
    ) -> None:
        mappings = tuple(mappings)
        compiled = compile_routes(mappings, endpoints, domains)
        self._domains = dict(domains or {})
        self.versions = {mapping.file: mapping.version for mapping in mappings}
        self.texts = {mapping.version: (mapping.file, mapping.text) for mapping in mappings}
        if compiled.problems:
            raise compiled.problems[0]
        self.routes = compiled.routes
        self.skipped = compiled.skipped
        self.endpoints = dict(endpoints)
        self.hops_max = hops_max
        self._ids = map(str, count(1)) if ids is None else ids
        self._by_source: dict[str, list[Route]] = {}
        for route in self.routes:
            self._by_source.setdefault(route.source, []).append(route)
        self._indexes = {source: RouteIndex(routes) for source, routes in self._by_source.items()}
        self.returns: ReturnAddresses | None = None
        if return_key is not None:
            self.returns = ReturnAddresses(return_key, domains or {name: name for name in endpoints})
        self._answering: dict[tuple[str, str], Route] = {}
        self._reversible: dict[tuple[str, str], list[Route]] = {}  # by the domains of both endpoints
        for route in self.routes:
            if route.reversible:
                ends = self._ends(route.source, route.target_endpoint)
                self._reversible.setdefault(ends, []).append(route)
        for route in self.routes:
            direct = self.returns is not None and route.rule.answers == "direct"
            reverses = tuple(self.reverses(route.source, route.target_endpoint))
            route.connect_replies(reply_kept, self.returns if direct else None, reverses)
            if direct:  # the route of its replies: from its target's domain to its own source
                world = self._domains.get(route.target_endpoint, route.target_endpoint)
                self._answering.setdefault((world, route.source), reply_route(route))
        self.answers = tuple(self._answering.values())

    def resolve(
        self,
        endpoint: str,
        address: Address,
        queue: str = "",
        has_no_receivers: HasNoReceivers = _assume_receivers,
    ) -> tuple[ResolvedRoute, ...]:
        """Return the resolved routes for messages from `endpoint` to `address`, in the order of the files.

        `queue` is the queue from which a link has consumed the messages if a route names this queue,
        otherwise "". `has_no_receivers` takes a route, and returns True if no subscriber is at its target at
        present; a route that has a compiled form is then resolved to an UnsubscribedRoute.
        """
        index = self._indexes.get(endpoint)
        if index is None:
            return ()
        found: list[ResolvedRoute] = []
        dialect = DIALECTS[address.protocol]
        levels = dialect.levels(address.name)
        hidden = bool(dialect.hidden and levels and levels[0].startswith(dialect.hidden))
        scope = address.scope
        for route in index.candidates(levels):
            pattern = route.pattern
            resolved: ResolvedRoute | None
            fits = route.fits
            if fits is not None and not queue and pattern.dialect is dialect:
                if pattern.scope != scope or (hidden and pattern.first is None) or not fits(levels):
                    continue
                if has_no_receivers(route):
                    resolved = route.unsubscribed
                else:
                    resolved = self.identified(route.resolve_levels(levels, address.name, self.hops_max))
            else:
                resolved = self._resolve(route, address, levels, queue)
            if resolved is not None:
                found.append(resolved)
        return tuple(found)

    def _resolve(self, route: Route, address: Address, levels: Levels, queue: str) -> ResolvedRoute | None:
        """Resolve a route for messages to `address`, without a compiled form of its pattern.

        `levels` are the levels of the address's name, and `queue` is as in `resolve`. Return None if the
        route does not match.
        """
        pattern = route.pattern
        if not pattern.accepts_source(address, queue):
            return None
        captures = pattern.match_levels(levels)
        resolved = None if captures is None else route.resolve(address, captures, queue, self.hops_max)
        return None if resolved is None else self.identified(resolved)

    def identified(self, resolved: ResolvedRoute) -> ResolvedRoute:
        """Return `resolved`, or an IdentifyingRoute around it if its route adds message ids."""
        return IdentifyingRoute(resolved, self._ids) if resolved.route.rule.message_id == "add" else resolved

    def is_return(self, address: Address) -> bool:
        """Return True if `address` looks like a return address.

        No route of a mapping file applies to such an address, only the route for the reply.
        """
        return self._returned(address) is not None

    def requester(self, address: Address) -> Return | None:
        """Return the requester in a return address, or None if this gateway has not built the address."""
        rest = self._returned(address)
        return None if rest is None or self.returns is None else self.returns.read(rest)

    def _returned(self, address: Address) -> str | None:
        """Return the part of a return address behind its prefix, or None if `address` has no such prefix."""
        dialect = DIALECTS[address.protocol]
        if self.returns is None or not address.name.startswith(dialect.return_prefix):
            return None
        return dialect.return_part(address)

    def answer_route(self, endpoint: str, requester: str) -> Route | None:
        """Return the route for replies from the endpoint `endpoint` to the endpoint `requester`.

        Return None if no route with `answers: direct` leads from `requester` to `endpoint`, or to a listener
        with the same domain (see Router).
        """
        return self._answering.get((self._domains.get(endpoint, endpoint), requester))

    def subscriptions(self, endpoint: str) -> Subscriptions:
        """Return the subscriptions that the link named `endpoint` needs for the routes that start at it."""
        sources = _widest([route.pattern for route in self._by_source.get(endpoint, ())])
        bound = [one for one in sources if one.queue is None]
        return Subscriptions(
            queues=_unique(one.queue for one in sources if one.queue is not None),
            bindings=_unique((one.scope, one.show()) for one in bound),
            prefixes=_unique((one.scope, one.literal_prefix()) for one in bound),
        )

    def targets(self, endpoint: str) -> Targets:
        """Return the objects that must exist at the endpoint `endpoint` for the routes that end there."""
        ends = [route.target for route in self.routes if route.target_endpoint == endpoint]
        literal = [one for one in ends if one.scope is None and not one.name.names]
        return Targets(
            scopes=_unique(
                one.scope.render(no_levels)
                for one in ends
                if one.scope and one.scope.text and not one.scope.names
            ),
            queues=_unique(one.name.render(no_levels) for one in literal if one.dialect.queue_word),
            names=_unique(
                (one.service, one.name.render(no_levels)) for one in literal if not one.dialect.queue_word
            ),
        )

    def reverses(self, origin: str, target: str) -> Sequence[Route]:
        """Return the routes from `target` back to `origin`, which are inverted to translate reply addresses.

        A request that crosses from `origin` to `target` gets a new reply address: the name at `target` from
        which one of these routes leads to the original reply address.
        """
        return self._reversible.get(self._ends(target, origin), ())

    def _ends(self, source: str, target: str) -> tuple[str, str]:
        """Return the domains of two endpoints (see Router), or the name of an endpoint without a domain."""
        return self._domains.get(source, source), self._domains.get(target, target)


def _widest(patterns: list[Pattern]) -> list[Pattern]:
    """Return those patterns that no other pattern covers. Of equal patterns, return only the first.

    Each pattern is compared only with patterns that may cover it. If one pattern covers another, the literals
    before its first multi-level wildcard are in the other pattern at the same levels.
    """
    widest: dict[Pattern, None] = {}
    by_first: dict[tuple[object, ...], dict[Pattern, None]] = {}  # by the first literal, or by None
    by_any: dict[tuple[object, ...], dict[Pattern, None]] = {}  # by each literal, and by None
    for pattern in patterns:
        scope = (pattern.dialect, pattern.scope, pattern.queue)
        literals: list[tuple[object, ...]] = [(scope, at, text) for at, text in pattern.leading_literals()]
        everywhere = (scope, None)
        wider = [other for key in (*literals, everywhere) for other in by_first.get(key, ())]
        if any(covers(other, pattern) for other in wider):
            continue
        first = literals[0] if literals else everywhere
        for other in [other for other in by_any.get(first, ()) if covers(pattern, other)]:
            del widest[other]
            for index in (by_first, by_any):
                for group in index.values():
                    group.pop(other, None)
        widest[pattern] = None
        by_first.setdefault(first, {})[pattern] = None
        for key in (*literals, everywhere):
            by_any.setdefault(key, {})[pattern] = None
    return list(widest)


def _unique(items: Iterable[Built]) -> tuple[Built, ...]:
    return tuple(dict.fromkeys(items))


def compile_routes(
    mappings: Iterable[Mapping], endpoints: Map[str, str], domains: Map[str, str] | None = None
) -> Compiled:
    """Compile all rules of the mapping files. `endpoints` has the protocol of each endpoint, by name.

    A rule that cannot be compiled becomes an error in the result. A rule for all listeners of a protocol
    becomes one route for each listener. `domains` is as in Router.
    """
    routes: list[Route] = []
    problems: list[MappingError] = []
    skipped: list[Skipped] = []
    names: dict[str, str] = {}
    for mapping in mappings:
        for at, rule in enumerate(mapping.document.routes):
            place: Place = ("routes", at)
            line = mapping.position((*place, "name")).line
            for single in _singles(rule, endpoints, domains):
                if single.name in names:
                    reason = f"{single.name!r} is also the name of the route at {names[single.name]}"
                    problems.append(mapping.error((*place, "name"), reason))
                    continue
                names[single.name] = f"{mapping.file}:{line}"
                missing = [words.name for words in (single.source, single.to) if words.name not in endpoints]
                if missing and rule.optional:
                    skipped.append(Skipped(rule.name, missing[0], mapping.file, line))
                    continue
                try:
                    if single.answers == "direct" and not _are_listeners(single, domains):
                        reason = "answers: direct is for routes between two listeners"
                        raise mapping.error((*place, "answers"), reason)
                    routes.append(_compile(mapping, single, place, endpoints))
                except MappingError as error:
                    problems.append(error)
    return Compiled(tuple(routes), tuple(problems), tuple(skipped))


def _are_listeners(rule: RouteRule, domains: Map[str, str] | None) -> bool:
    return domains is None or {rule.source.name, rule.to.name} <= domains.keys()


def _singles(rule: RouteRule, endpoints: Map[str, str], domains: Map[str, str] | None) -> Iterator[RouteRule]:
    """Yield a rule for each pair of a source and a target endpoint to which `rule` applies.

    Only rules for all listeners of a protocol have several pairs. If several target listeners share their
    clients' namespace (have one domain in `domains`), only the first is used. The rule of the first pair
    keeps the original name.
    """
    domains = domains or {}
    targets: dict[str, str] = {}  # by domain
    for target in _listeners(rule.to, endpoints, domains):
        targets.setdefault(domains.get(target, target), target)
    pairs = [
        (source, target)
        for source in _listeners(rule.source, endpoints, domains)
        for world, target in targets.items()
        if rule.to.group is None or domains.get(source, source) != world  # one domain needs no route
    ]
    for at, (source, target) in enumerate(pairs):
        if not at and (source, target) == (rule.source.endpoint, rule.to.endpoint):
            yield rule
            continue
        yield rule.model_copy(
            update={
                "name": f"{rule.name}.{source}.{target}" if at else rule.name,
                "source": rule.source.model_copy(update={"endpoint": source}),
                "to": rule.to.model_copy(update={"endpoint": target}),
            }
        )


def _listeners(words: EndpointAddress, endpoints: Map[str, str], domains: Map[str, str] | None) -> list[str]:
    """Return the endpoints to which a rule applies: one endpoint, or all listeners of a protocol.

    `words` is the source or target of the rule. If the protocol has no listeners, return the name of the
    protocol.
    """
    if words.group is None:
        return [words.name]
    there = endpoints if domains is None else domains
    return [name for name in there if endpoints[name] == words.group] or [words.name]


def _compile(mapping: Mapping, rule: RouteRule, place: Place, endpoints: Map[str, str]) -> Route:
    """Compile one rule to a route. Raises MappingError with the position of the fault in the file.

    `place` is the path of the rule in the file.
    """

    def located(inner: tuple[str, ...], build: Callable[[], Built]) -> Built:
        try:
            return build()
        except ExpressionError as misread:
            raise mapping.error((*place, *inner), misread.reason, misread.inner) from misread
        except MappingError as error:
            raise mapping.error((*place, *inner), error.reason) from error

    located(("from",), lambda: _check_words(rule.source, endpoints))
    located(("to",), lambda: _check_words(rule.to, endpoints))
    pattern = located(("from", _name_word(rule.source)), lambda: _pattern(rule.source))
    words = vocabulary(pattern)
    to = rule.to
    target = _target(to.dialect, to.given_words(), words, located)
    located(("to", _name_word(to)), lambda: _check_literals(target))
    headers = tuple(
        (header, located(("headers", header), partial(_header, value, words)))
        for header, value in rule.headers.items()
    )
    condition = None
    if rule.when is not None:
        when = rule.when
        condition = located(("when",), lambda: Condition(when, words.names))
    at = mapping.position((*place, "name"))
    return Route(rule, pattern, target, headers, condition, mapping.file, at.line, at.column)


def _header(value: HeaderValue, words: Vocabulary) -> Text | Value:
    return Text(value, words) if isinstance(value, str) else typed_value(value)


def _name_word(words: EndpointAddress) -> str:
    """Return the key, such as `topic`, at whose position in the file an error about the name is reported."""
    address_words, dialect = words.given_words(), words.dialect
    order = (dialect.queue_word, dialect.pattern_word, dialect.name_word, dialect.scope_word)
    return next(word for word in order if word in address_words and word is not None)


def _check_words(words: EndpointAddress, endpoints: Map[str, str]) -> None:
    """Check the source or target of a rule: the endpoint must be known and use the address's protocol.

    Raises MappingError.
    """
    protocol = endpoints.get(words.name)
    if protocol is None:
        near = get_close_matches(words.name, sorted(endpoints), 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(endpoints)) or 'none'}"
        raise MappingError(f"unknown endpoint {words.name!r}; {hint}")
    if protocol != words.dialect.name:
        own = DIALECTS[protocol]
        name = (own.pattern_word if isinstance(words, From) else None) or own.name_word
        address = " and ".join(word for word in (own.scope_word, name) if word is not None)
        raise MappingError(
            f"the protocol of {words.name!r} is {protocol}, and {', '.join(words.given_words())} belongs to "
            f"{words.dialect.name}: write {address}{f', or {own.queue_word}' if own.queue_word else ''}"
        )


def _pattern(source: From) -> Pattern:
    dialect, stated = source.dialect, source.given_words()
    queue = stated.get(dialect.queue_word or "")
    if queue is not None:
        return Pattern(dialect, _EVERY_NAME, queue=queue)
    text = stated.get(dialect.pattern_word)
    tokens = _EVERY_NAME if text is None else parse_tokens(dialect, text)
    return Pattern(dialect, tokens, stated.get(dialect.scope_word or "") or dialect.scope_default)


def _target(dialect: Dialect, stated: Map[str, str], words: Vocabulary, located: Located) -> Target:
    """Compile the templates of a target address.

    `stated` has the texts of the templates by their keys in the mapping file, and `words` the variables that
    they may use. The scope is a template, too, unless the protocol has a fixed set of scopes. Raises
    MappingError.
    """
    word = dialect.name_word
    if dialect.queue_word is not None and dialect.queue_word in stated:
        word = dialect.queue_word
    text = stated.get(word, "")
    name = located(("to", word), lambda: Template(text, dialect, words))
    place = dialect.scope_word or ""
    scope = stated.get(place)
    if dialect.scopes or scope is None:
        return Target(dialect, name, None, scope or dialect.scope_default)
    build = partial(Template, scope, dialect, words)
    return Target(dialect, name, located(("to", place), build))


def _check_literals(target: Target) -> None:
    """Check that some values of its placeholders make the target's address valid.

    Raises MappingError if the text outside of placeholders is too long, or if there are no placeholders and
    the protocol refuses the address.
    """
    byte_count = target.name.literal_bytes()
    if target.names:
        most = target.dialect.name_bytes_max
        if byte_count > most:
            raise MappingError(f"its fixed text has {byte_count} bytes, but a name may have at most {most}")
        return
    scope = target.scope.render(no_levels) if target.scope else target.service
    try:
        target.dialect.address(scope, target.name.render(no_levels))
    except NameRefused as error:
        raise MappingError(str(error)) from error
