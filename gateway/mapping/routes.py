"""Compiled routes, and resolved routes: the processing of each message of one address.

Everything that depends only on the address (the target, the headers, the guarantees) is computed once when
the route is resolved; the caller caches the resolved route. `cross` is the hot path: it creates one new
Message and changes nothing else. Each feature has its own class, so that a plain route costs nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple

from gateway.errors import RemoteProtocolError
from gateway.mapping.compiler import RenderLevels, compile_level_test, compile_template
from gateway.mapping.conditions import Condition
from gateway.mapping.names import LevelTranslation, plain_translation, translation
from gateway.mapping.patterns import Captures, Pattern
from gateway.mapping.return_addresses import ReturnAddresses
from gateway.mapping.schema import RouteRule
from gateway.mapping.templates import Template, Text, merge_captures, no_levels, vocabulary
from gateway.model.address import Address
from gateway.model.dialect import Dialect, Levels, NameRefused
from gateway.model.message import NOBODY, Message, Sender
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.properties import NO_PROPERTIES, Properties, PropertySet, Value, property_set, string

HOPS_ANY: Final = 1 << 16  # more hops than any message has
FORMS_MAX: Final = 1024  # cached derivations of one property set; when there are so many, all are dropped
SENDERS_MAX: Final = (
    1024  # senders that one resolved route caches, for templates that name the client or user
)

NO_WAY_BACK: Final = "no route leads back to it"
HOPS_EXCEEDED: Final = Outcome(
    Verdict.REJECTED, Reason.HOPS, "the message crossed too many routes; check the mapping for a loop"
)
Guarantee = tuple[tuple[int, bool], ...]  # (assurance, durable) as delivered, at assurance * 2 + durable
Extra = tuple[tuple[str, Value], ...]
ReplyKeptCallback = Callable[["Route", Message], None]


def ignore_reply_address(route: Route, message: Message) -> None:
    """Do nothing with a reply address that was left unchanged. Default of `on_reply_kept`."""


class Target:
    """Target of a route: the templates of the addresses to which it delivers."""

    __slots__ = ("dialect", "name", "scope", "service")

    def __init__(
        self, dialect: Dialect, name: Template, scope: Template | None = None, service: str = ""
    ) -> None:
        self.dialect = dialect
        self.name = name
        self.scope = scope  # the exchange; None: the default exchange, or `service`
        self.service = service

    @property
    def names(self) -> frozenset[str]:
        """Names of the variables to which the templates refer, such as captures of the route's pattern."""
        return self.name.names | (self.scope.names if self.scope else frozenset())


class CompiledRoute(NamedTuple):
    """Compiled form of a route whose target depends only on the levels of the source's name.

    `makes` is a function that takes the source's name and its levels, and returns the target's name. `scope`
    is the constant scope of the target, and `extra` has the constant headers that the route adds.
    """

    makes: RenderLevels
    scope: str
    extra: Extra


class LastLosses:
    """Last message of a route whose properties were compared with what the target's protocol can express.

    `losses` is the result: the names of the properties that get lost. It depends only on properties, hop
    count and retain flag, so later messages with the same ones are not examined again.
    """

    __slots__ = ("hops", "losses", "property_set", "retain")

    def __init__(self) -> None:
        self.property_set = NO_PROPERTIES
        self.hops = 0
        self.retain = False
        self.losses: tuple[str, ...] = ()


class Route:
    """Compiled route with its counters.

    `matched` counts messages that crossed the route, because it matched them and did not refuse them.
    `failed` counts messages that the route or its target refused, `unparsable` messages whose body is not
    JSON although `when` needs it, `undecided` messages for which `when` has no value, and `duplicates`
    repeated messages that were not passed on. `reply_kept` counts property sets whose reply address could not
    be translated. `lost` counts properties, by name, that the target's protocol cannot express. Other
    counters are updated by the code that delivers messages. After `connect_replies`, only the counters,
    `reply_kept_reason` and `last_losses` change.
    """

    __slots__ = (
        "_reverses",
        "changes_protocol",
        "column",
        "condition",
        "delivered",
        "dropped",
        "duplicates",
        "escape",
        "failed",
        "file",
        "fits",
        "guarantee",
        "headers",
        "in_flight",
        "key",
        "last_losses",
        "line",
        "lost",
        "mandatory",
        "matched",
        "name",
        "on_reject",
        "on_reply_kept",
        "pattern",
        "per_sender",
        "plain",
        "reply_kept",
        "reply_kept_reason",
        "retain",
        "retried",
        "returns",
        "rule",
        "settle",
        "shape",
        "short",
        "source",
        "target",
        "target_endpoint",
        "translate",
        "undecided",
        "unparsable",
        "unsubscribed",
    )

    def __init__(
        self,
        rule: RouteRule,
        pattern: Pattern,
        target: Target,
        headers: tuple[tuple[str, Text | Value], ...],
        condition: Condition | None,
        file: str,
        line: int,
        column: int = 0,
    ) -> None:
        self.rule = rule
        self.name = rule.name
        self.file = file
        self.line = line
        self.column = column
        self.source = rule.source.name
        self.target_endpoint = rule.to.name
        self.pattern = pattern
        self.target = target
        self.headers = headers
        self.condition = condition
        self.settle = rule.settle
        self.on_reject = rule.on_reject
        self.mandatory = rule.to.mandatory is not False
        self.escape = rule.escape
        self.translate: LevelTranslation = translation(pattern.dialect, target.dialect, rule.escape)
        self.plain: LevelTranslation = plain_translation(target.dialect, rule.escape)
        templates = (target.name, target.scope, *(template for _, template in headers))
        # True if target or headers name the client or the user.
        self.per_sender = any(isinstance(one, Template | Text) and one.per_message for one in templates)
        self.short = self._shortened()
        # Compiled test of a name's levels, for compiled routes without a queue; None: use the pattern.
        self.fits = None if self.short is None or pattern.queue is not None else compile_level_test(pattern)
        self.unsubscribed = UnsubscribedRoute(self)
        self.guarantee = guarantee_of(rule)
        self.retain = rule.to.retain
        self.changes_protocol = pattern.dialect is not target.dialect
        self.last_losses = LastLosses()
        self.lost: dict[str, int] = {}
        self.key = f"route {rule.name}"
        self.returns: ReturnAddresses | None = None  # translates reply addresses instead of `_reverses`
        self.reply_kept_reason = ""  # why the last reply address that was left unchanged was so
        self.on_reply_kept: ReplyKeptCallback = ignore_reply_address
        self._reverses: tuple[Route, ...] = ()
        self.shape = RouteChanges(self, () if self.short is None else self.short.extra)
        self.matched = self.delivered = self.failed = self.retried = self.dropped = self.in_flight = 0
        self.unparsable = self.undecided = self.reply_kept = self.duplicates = 0

    def __repr__(self) -> str:
        return f"Route({self.name!r}, {self.source!r} -> {self.target_endpoint!r})"

    def _shortened(self) -> CompiledRoute | None:
        """Return the compiled form of the route, or None if the route cannot be compiled.

        A route can be compiled if it has no condition, and if its target and headers depend only on the
        levels of the source's name.
        """
        scope = self.target.scope
        constant = not any(isinstance(value, Text) for _, value in self.headers)
        if self.condition is not None or self.per_sender or not constant or (scope and scope.names):
            return None
        makes_name = compile_template(self.pattern, self.target.name, self.translate)
        if makes_name is None:
            return None
        extra = tuple((name, value) for name, value in self.headers if not isinstance(value, Text))
        return CompiledRoute(makes_name, scope.render(no_levels) if scope else self.target.service, extra)

    def address(self, texts: dict[str, str], levels: Captures) -> Address:
        """Build the target's address from the values of the variables in its templates.

        `texts` is a result of `texts_of`, `levels` a result of `_levels`. Raises NameRefused.
        """

        def value(name: str) -> Levels:
            found = levels.get(name)
            return (self.plain(texts[name]),) if found is None else tuple(map(self.translate, found))

        target = self.target
        scope = target.scope.render(value) if target.scope else target.service
        return target.dialect.address(scope, target.name.render(value))

    def _levels(self, texts: dict[str, str], captures: Captures) -> Captures:
        """Return the values of those variables that stand for levels of a name, each as a tuple of levels.

        These variables are the captures, and the keys in `level_words` of the dialect. `texts` is a result of
        `texts_of`. An empty text has no levels.
        """
        dialect = self.pattern.dialect
        separator = dialect.separator
        levels = dict(captures)
        for word in dialect.level_words:
            levels[word] = tuple(texts[word].split(separator)) if texts[word] else ()
        return levels

    def texts_of(self, address: Address, captures: Captures, queue: str, sender: Sender) -> dict[str, str]:
        """Return the values of all variables to which templates and `when` may refer, by name.

        The values are texts in the notation of the source's protocol. `captures`, `queue` and `sender` are
        those of the message.
        """
        dialect = self.pattern.dialect
        separator = dialect.separator
        texts = {name: separator.join(levels) for name, levels in captures.items()}
        texts.update(dialect.words_of(address))
        if dialect.queue_word is not None:
            texts[dialect.queue_word] = queue or ("" if address.scope else address.name)
        texts.update(client_id=sender.client, user=sender.user, endpoint=self.source)
        return texts

    def resolve(
        self, address: Address, captures: Captures, queue: str, hops_max: int
    ) -> ResolvedRoute | None:
        """Resolve the route for messages to `address`: compute target address, headers and conditions once.

        Return the resolved route, or None if the route's condition `when` depends only on the address and is
        false for it. `captures` has the captured levels of the address by name. `queue` is the queue from
        which the messages were consumed, or "". `hops_max` is the number of routes that a message may cross.
        """
        if self.short is not None:
            return self.resolve_levels(self.pattern.dialect.levels(address.name), address.name, hops_max)
        condition = self.condition
        fixed: dict[str, Any] = {}
        if condition is not None:
            fixed = condition.fixed(self.texts_of(address, captures, queue, NOBODY))
            if not condition.per_message:
                if not condition.holds(Message(address, b""), fixed, self):
                    return None
                condition = None
        inner: ResolvedRoute
        if self.per_sender:
            inner = SenderRoute(self, address, captures, queue, hops_max)
        else:
            inner = self.resolve_for(address, captures, queue, hops_max, NOBODY)
        return inner if condition is None else ConditionalRoute(inner, condition, fixed)

    def resolve_levels(self, levels: Levels, name: str, hops_max: int) -> ResolvedRoute:
        """Resolve a route with a compiled form (`short`) for messages to `name`, which it matches.

        `levels` are the levels of `name`. `hops_max` is the number of routes that a message may cross.
        """
        short = self.short
        assert short is not None
        try:
            target = self.target.dialect.address(short.scope, short.makes(name, levels))
        except NameRefused as error:
            return RefusedRoute(self, Outcome(Verdict.REJECTED, Reason.NAME_INVALID, str(error)))
        return self._to(target, hops_max, short.extra)

    def _to(self, target: Address, hops_max: int, extra: Extra) -> ResolvedRoute:
        """Return a resolved route that delivers to the address `target` and adds the headers `extra`."""
        if not (extra or self.translates_replies) and self.guarantee is None and self.retain is None:
            return PlainRoute(self, target, hops_max)
        return ShapedRoute(
            self, target, hops_max, self.shape if extra is self.shape.extra else RouteChanges(self, extra)
        )

    def resolve_for(
        self, address: Address, captures: Captures, queue: str, hops_max: int, sender: Sender
    ) -> ResolvedRoute:
        """Resolve the route for messages from `sender` to `address`, without evaluating `when`.

        The result depends on the sender only if templates refer to the client or user. The other parameters
        are as in `resolve`.
        """
        texts = self.texts_of(address, captures, queue, sender)
        try:
            target = self.address(texts, self._levels(texts, captures))
        except NameRefused as error:
            return RefusedRoute(self, Outcome(Verdict.REJECTED, Reason.NAME_INVALID, str(error)))
        extra = tuple(
            (name, string(value.render(texts.__getitem__)) if isinstance(value, Text) else value)
            for name, value in self.headers
        )
        return self._to(target, hops_max, extra)

    def connect_replies(
        self,
        on_reply_kept: ReplyKeptCallback,
        returns: ReturnAddresses | None,
        reverses: tuple[Route, ...] = (),
    ) -> None:
        """Set the functions and routes by which this route translates reply addresses.

        `returns` builds return addresses. If it is None, reply addresses are translated by inverting one of
        `reverses`, the routes that lead back. If a reply address must be left unchanged, `on_reply_kept` is
        called with the route and the first message of each property set.
        """
        self.on_reply_kept = on_reply_kept
        self.returns = returns
        self._reverses = reverses
        self.shape = RouteChanges(self, self.shape.extra)

    @property
    def translates_replies(self) -> bool:
        """True if this route translates the reply addresses of messages."""
        return self.returns is not None or bool(self._reverses)

    @property
    def reversible(self) -> bool:
        """True if reply addresses can be translated by inverting this route.

        For that, a reply address must be able to express both ends of the route. In a protocol with queues,
        it names a queue, so the route must use the default exchange there. Templates that refer to the client
        or user cannot be inverted.
        """
        into_default = self.target.scope is None or not self.target.scope.text
        from_default = self.pattern.dialect.queue_word is None or not self.pattern.scope
        return into_default and from_default and not self.per_sender

    def invert(self, text: str) -> str | None:
        """Return the name at the source from which this route leads to the name `text` at the target.

        Return None if there is no such name, or if it is not unique because of a wildcard without a name.
        Call this only for a `reversible` route.
        """
        source, target = self.pattern, self.target
        backward = target.name.pattern(target.dialect, target.service, vocabulary(source).several)
        levels = tuple(text.split(target.dialect.separator)) if text else ()
        found = backward.capture(levels) if backward and levels else None
        captures = merge_captures(found) if found is not None else None
        if captures is None:
            return None
        try:
            return self._confirmed(captures, text)
        except NameRefused:
            return None

    def _confirmed(self, captures: Captures, text: str) -> str | None:
        """Return the source name that has these captures if the route leads from it to the name `text`.

        Otherwise return None. Raises NameRefused.
        """
        source = self.pattern
        back = translation(self.target.dialect, source.dialect, self.escape)
        source_captures = {name: tuple(map(back, levels)) for name, levels in captures.items()}
        levels = source_captures.get(source.dialect.name_word)
        if levels is None and source.queue is not None:
            levels = tuple(source.queue.split(source.dialect.separator))
        elif levels is None:
            levels = source.render(source_captures)
        if levels is None:
            return None
        name = source.dialect.separator.join(levels)
        address = source.dialect.address(source.scope, name)
        forward = source.match(address)
        if forward is None:
            return None
        texts = self.texts_of(address, forward, "", NOBODY)
        there = self.address(texts, self._levels(texts, forward))
        return name if there.name == text else None

    def derive(self, properties: PropertySet, key: str, extra: Extra) -> PropertySet:
        """Return `properties` with the headers `extra` added, and with the reply address translated.

        Return `properties` itself if nothing changes. The result is cached in `properties.forms` under `key`.
        Raises RemoteProtocolError if the sender's bytes are malformed.
        """
        meaning = properties.properties
        made = meaning
        if extra:
            names = {name for name, _ in extra}
            headers = tuple(header for header in meaning.headers if header[0] not in names)
            made = replace(made, headers=headers + extra)
        if meaning.reply_to and self.translates_replies:
            made = self._with_reply(made, meaning.reply_to)
        derived = properties if made is meaning else property_set(made)
        forms = properties.forms
        if len(forms) >= FORMS_MAX:
            forms.clear()
        forms[key] = (self, derived)
        return derived

    def losses(self, message: Message, count: int = 1) -> tuple[str, ...]:
        """Return the names of the properties of `message` that the target's protocol cannot express.

        Add `count` to the counter of each of them in `lost`: `count` messages have the same properties.
        """
        last = self.last_losses
        if (
            message.property_set is not last.property_set
            or message.hops != last.hops
            or message.retain != last.retain
        ):
            last.losses = self.target.dialect.losses(message)
            last.property_set, last.hops, last.retain = message.property_set, message.hops, message.retain
        for name in last.losses:
            self.lost[name] = self.lost.get(name, 0) + count
        return last.losses

    def _with_reply(self, properties: Properties, text: str) -> Properties:
        """Return `properties` with the reply address `text` translated to an address at the target.

        If no route leads back to this address, increment `reply_kept` and return `properties` unchanged.
        """
        if self.returns is None:
            for reverse in self._reverses:
                there = reverse.invert(text)
                if there is not None:
                    return replace(properties, reply_to=there)
            self.reply_kept_reason = NO_WAY_BACK
        else:
            source, target = (self.pattern.dialect, self.source), (self.target.dialect, self.target_endpoint)
            try:
                there, correlation = self.returns.build(source, target, text, properties.correlation)
                return replace(properties, reply_to=there, correlation=correlation)
            except NameRefused as error:
                self.reply_kept_reason = str(error)
        self.reply_kept += 1
        return properties


def guarantee_of(rule: RouteRule) -> Guarantee | None:
    """Return the delivery guarantees that a rule gives to messages, by their guarantees before.

    A guarantee is a pair (QoS, `durable`). The result has a new guarantee at the index `QoS * 2 + durable` of
    the received message. Return None if the rule changes no guarantee.
    """
    delivery, qos = rule.delivery, rule.to.qos
    modes = (delivery.qos0, delivery.qos1, delivery.qos2)
    levels = (delivery.transient, delivery.persistent)
    if qos is None and modes == (None,) * 3 and levels == (None,) * 2:
        return None
    made: list[tuple[int, bool]] = []
    for assurance in range(3):
        for durable in (False, True):
            mode, level = modes[assurance], levels[durable] if qos is None else qos
            is_durable = durable if mode is None else mode == "persistent"
            made.append((assurance if level is None else level, is_durable))
    return tuple(made)


class ResolvedRoute:
    """Route resolved for one address: applies to each message that is published to this address.

    `target` is None if the target address is invalid, or depends on the sender. A message without a reply
    address is certain to cross if it has crossed fewer than `bare_hops_max` routes; if this is 0, call
    `will_cross` to find out.
    """

    __slots__ = ("bare_hops_max", "route", "target")
    plain = False
    """True if the route only changes the address and counts a hop."""

    def __init__(self, route: Route, target: Address | None, bare_hops_max: int = 0) -> None:
        self.route = route
        self.target = target
        self.bare_hops_max = bare_hops_max

    @property
    def bare_plain(self) -> bool:
        """True if the address is all that the route changes in a message without a reply address."""
        return self.plain

    def cross(self, message: Message) -> Message | Outcome | None:
        """Return the message for the target, None if `when` is false, or an Outcome if the route refuses it.

        Never raises.
        """
        raise NotImplementedError

    def will_cross(self, message: Message) -> bool:
        """Return True if `cross` would certainly return a message, False if only `cross` can find out.

        No counter changes. This method is for callers that do not need the message itself.
        """
        return False


class PlainRoute(ResolvedRoute):
    """Resolved route that changes only the address."""

    __slots__ = ("_address", "_hops_max")
    plain = True

    def __init__(self, route: Route, target: Address, hops_max: int) -> None:
        super().__init__(route, target, hops_max)
        self._address = target
        self._hops_max = hops_max

    def will_cross(self, message: Message) -> bool:
        """Return True if the message has crossed fewer routes than allowed; nothing else is checked."""
        return message.hops < self._hops_max

    def cross(self, message: Message) -> Message | Outcome | None:
        """Return the message with the target's address, or HOPS_EXCEEDED after too many routes."""
        route = self.route
        if message.hops >= self._hops_max:
            route.failed += 1
            return HOPS_EXCEEDED
        route.matched += 1
        return message.with_crossing(self._address)


class RouteChanges:
    """Changes that a route makes to messages, apart from the address. Several addresses can share them.

    They concern headers (`extra`), the reply address, the delivery guarantee and the retain flag.
    """

    __slots__ = ("derives", "extra", "key", "only_replies")

    def __init__(self, route: Route, extra: Extra) -> None:
        self.extra = extra
        self.derives = bool(extra or route.translates_replies)
        self.key = f"{route.key} {[value.value for _, value in extra]!r}" if extra else route.key
        self.only_replies = not extra and route.guarantee is None and route.retain is None


class ShapedRoute(ResolvedRoute):
    """Resolved route that changes the address, and also makes the changes in `shape`.

    The changed property set is cached in `forms` of the original property set. The cache key consists of the
    route's name and the values of the headers. The cache entry also has the route itself, so that a route of
    the same name in a new mapping does not use it.
    """

    __slots__ = ("_address", "_hops_max", "_shape")

    def __init__(self, route: Route, target: Address, hops_max: int, shape: RouteChanges) -> None:
        super().__init__(route, target, 0 if shape.extra else hops_max)
        self._address = target
        self._hops_max = hops_max
        self._shape = shape

    @property
    def bare_plain(self) -> bool:
        """True if the changes concern only reply addresses."""
        return self._shape.only_replies

    def will_cross(self, message: Message) -> bool:
        """Return True if the message has crossed fewer routes than allowed, and its properties cannot fail.

        This is certain if they do not change, or if the changed ones are cached. Otherwise malformed
        properties may prevent the message from crossing.
        """
        if message.hops >= self._hops_max:
            return False
        shape = self._shape
        if not shape.derives or not (shape.extra or message.property_set.has_reply_to):
            return True
        form = message.property_set.forms.get(shape.key)
        return form is not None and form[0] is self.route

    def cross(self, message: Message) -> Message | Outcome | None:
        """Return the message with the target's address and all changes, or an Outcome if it is refused.

        The route refuses a message that has crossed too many routes, or whose properties are malformed.
        """
        route = self.route
        hops = message.hops
        if hops >= self._hops_max:
            route.failed += 1
            return HOPS_EXCEEDED
        properties = message.property_set
        shape = self._shape
        if shape.derives and (shape.extra or properties.has_reply_to):
            form = properties.forms.get(shape.key)
            if form is not None and form[0] is route:
                properties = form[1]
            else:
                kept_before = route.reply_kept
                try:
                    properties = route.derive(properties, shape.key, shape.extra)
                except RemoteProtocolError as error:
                    route.failed += 1
                    return Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error))
                if route.reply_kept != kept_before:
                    route.on_reply_kept(route, message)
        assurance, durable = message.assurance, message.durable
        if route.guarantee is not None:
            assurance, durable = route.guarantee[assurance * 2 + durable]
        retain = route.retain
        route.matched += 1
        return Message(
            self._address,
            message.body,
            properties,
            assurance,
            durable,
            message.retain if retain is None else retain,
            message.expires,
            hops + 1,
            message.sender,
        )


class AmendingRoute(ResolvedRoute):
    """Base class of resolved routes that change properties of the messages of another route (`inner`).

    A subclass makes the change in its method `amended`.
    """

    __slots__ = ("_inner",)

    def __init__(self, inner: ResolvedRoute) -> None:
        super().__init__(inner.route, inner.target)
        self._inner = inner

    def amended(self, stated: Properties) -> Properties:
        """Return the changed properties of a message, or `stated`, its properties, if nothing changes."""
        raise NotImplementedError

    def cross(self, message: Message) -> Message | Outcome | None:
        """Return the result of the inner route; if it is a message, change its properties first.

        Return an Outcome if the properties are malformed.
        """
        crossed = self._inner.cross(message)
        if type(crossed) is not Message:
            return crossed
        try:
            stated = crossed.property_set.properties
        except RemoteProtocolError as error:
            self.route.failed += 1
            return Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error))
        amended = self.amended(stated)
        if amended is not stated:  # the message is new and referenced only here
            made = property_set(amended)
            crossed.byte_count += made.byte_count - crossed.property_set.byte_count
            crossed.property_set = made
        return crossed


class UnsubscribedRoute(ResolvedRoute):
    """Resolved route to a target without subscribers, which therefore builds no messages."""

    __slots__ = ()

    def __init__(self, route: Route) -> None:
        super().__init__(route, None, HOPS_ANY)

    def will_cross(self, message: Message) -> bool:
        """Return True: without a subscriber, no message can be refused."""
        return True

    def cross(self, message: Message) -> None:
        """Count the message as matched, and return None, because no subscriber would receive it."""
        self.route.matched += 1


class RefusedRoute(ResolvedRoute):
    """Resolved route whose target address is invalid, so that every message is refused."""

    __slots__ = ("outcome",)

    def __init__(self, route: Route, outcome: Outcome) -> None:
        super().__init__(route, None)
        self.outcome = outcome

    def cross(self, message: Message) -> Message | Outcome | None:
        """Count the message as failed, and return the outcome with the reason of the refusal."""
        self.route.failed += 1
        return self.outcome


class ConditionalRoute(ResolvedRoute):
    """Resolved route that delivers only messages for which `when` is true."""

    __slots__ = ("_condition", "_fixed", "inner")

    def __init__(self, inner: ResolvedRoute, condition: Condition, fixed: dict[str, Any]) -> None:
        super().__init__(inner.route, inner.target)
        self.inner = inner
        self._condition = condition
        self._fixed = fixed

    def cross(self, message: Message) -> Message | Outcome | None:
        """Return the result of the inner route if `when` is true for the message, otherwise None."""
        if self._condition.holds(message, self._fixed, self.route):
            return self.inner.cross(message)
        return None


class SenderRoute(ResolvedRoute):
    """Resolved route whose templates refer to the client or user, with an inner route for each sender."""

    __slots__ = ("_address", "_cache", "_captures", "_hops_max", "_queue")

    def __init__(self, route: Route, address: Address, captures: Captures, queue: str, hops_max: int) -> None:
        super().__init__(route, None)
        self._address = address
        self._captures = captures
        self._queue = queue
        self._hops_max = hops_max
        self._cache: dict[tuple[str, str], ResolvedRoute] = {}

    def for_sender(self, sender: Sender) -> ResolvedRoute:
        """Return the inner route for messages of this sender.

        Up to SENDERS_MAX inner routes are cached.
        """
        key = (sender.client, sender.user)
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) >= SENDERS_MAX:
                self._cache.clear()
            found = self.route.resolve_for(self._address, self._captures, self._queue, self._hops_max, sender)
            self._cache[key] = found
        return found

    def cross(self, message: Message) -> Message | Outcome | None:
        """Return the result of the inner route for the message's sender."""
        return self.for_sender(message.sender).cross(message)
