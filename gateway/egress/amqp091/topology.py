"""What the routes of a link need at its broker, and how that is looked up and made.

A Declaration is an exchange, a queue, or a queue of the link's own with its bindings. Each is first asked for
passively, because it may exist in any form; only what is missing is declared. A broker answers a question
about something that does not exist by closing the channel, so all of this happens on a channel that nothing
else uses. What a need takes is written as a generator of methods, which is sent the broker's answers one by
one.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterable
from enum import Enum, auto
from typing import Final, Literal

from gateway.errors import LocalProtocolError
from gateway.mapping.router import Subscriptions, Targets
from gateway.model.properties import Headers, Value, ValueType
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.client import ClientConnection
from gateway.protocols.amqp091.events import ChannelClosed
from gateway.protocols.amqp091.spec import SHORT_STRING_MAX, ReplyCode

Declare = Literal["create", "check", "none"]
Kind = Literal["exchange", "queue", "bound"]
Answer = m.Method | ChannelClosed
Steps = Generator[m.Method, Answer, str]  # returns why the need cannot be met; "" when it is

RETRY_SECS_MIN: Final = 1.0
# Exchanges that only messages name (by templates) and that a publish found missing: how many are remembered.
UNDECLARED_MAX: Final = 256
# Of the queues that the link declares, so that only one replica at a time is given messages of them.
SINGLE_ACTIVE: Final[Headers] = (("x-single-active-consumer", Value(ValueType.BOOL, True)),)
RESERVED: Final = "amq."  # 3.1.3.1: such names are the broker's own, and exist or cannot be made


class DeclarationState(Enum):
    """How far a need has come on this connection."""

    NEW = auto()  # not answered yet; publishing waits for it
    THERE = auto()
    FAILED = auto()  # waits for `retry_at`
    AGAIN = auto()  # being asked for again


class Declaration:
    """Something that has to exist. `consume`: its messages are wanted. `keys`: bindings to `exchange`."""

    __slots__ = (
        "consume",
        "consumer_count",
        "drop",
        "exchange",
        "keys",
        "kind",
        "made",
        "name",
        "reached_by",
        "retry_at",
        "state",
        "undeclared",
        "wait",
        "was_there",
        "why",
    )

    def __init__(
        self,
        kind: Kind,
        name: str,
        *,
        consume: bool = False,
        exchange: str = "",
        keys: frozenset[str] = frozenset(),
        drop: frozenset[str] = frozenset(),
        undeclared: bool = False,
        reached_by: str = "",
    ) -> None:
        self.kind = kind
        self.name = name
        self.consume = consume
        self.exchange = exchange
        self.keys = keys
        self.drop = drop  # bindings that an earlier mapping wanted
        self.reached_by = (
            reached_by  # a direct exchange that leads to the queue by its name; "": the default one
        )
        self.undeclared = undeclared  # only messages name it: it is looked for, and never made
        self.state = DeclarationState.NEW
        self.made = ""  # what was missing when it was looked for last, and was made
        self.consumer_count = 0  # of the queue, when it was looked for last
        self.was_there = False  # on this connection
        self.why = ""
        self.wait = RETRY_SECS_MIN
        self.retry_at = 0.0

    def says_the_same(self, other: Declaration) -> bool:
        """Whether `other` wants nothing else."""
        return (self.consume, self.exchange, self.keys) == (other.consume, other.exchange, other.keys)

    @property
    def route_queue(self) -> str:
        """The queue by which routes know its messages; "" for a queue of the link's own."""
        return self.name if self.kind == "queue" else ""

    def steps(self, declare: Declare, arguments: Headers = ()) -> Steps:
        """What has to be said to the broker. `arguments` are those of a queue that has to be made."""
        create = declare == "create" and not self.undeclared
        self.made = ""
        if self.kind == "exchange":
            return (yield from self._exchange(self.name, create))
        if declare == "none":
            return ""
        if self.kind == "bound" and not self.exchange.startswith(RESERVED):
            why = yield from self._exchange(self.exchange, create)
            if why:
                return why
        why = yield from self._queue(create, arguments)
        if why or not create:
            return why
        if self.reached_by:
            for asked in (
                m.ExchangeDeclare(self.reached_by, "direct", durable=True),
                m.QueueBind(self.name, self.reached_by, self.name),
            ):
                answer = yield asked
                if isinstance(answer, ChannelClosed):
                    return answer.text
        for key in sorted(self.drop):
            answer = yield m.QueueUnbind(self.name, self.exchange, key)
            if isinstance(answer, ChannelClosed):
                return answer.text
        for key in sorted(self.keys):
            answer = yield m.QueueBind(self.name, self.exchange, key)
            if isinstance(answer, ChannelClosed):
                return answer.text
        return ""

    def _exchange(self, name: str, create: bool) -> Steps:
        made = m.ExchangeDeclare(name, "topic", durable=True) if create else None
        return (yield from self._found_or_made("exchange", m.ExchangeDeclare(name, passive=True), made))

    def _queue(self, create: bool, arguments: Headers) -> Steps:
        made = m.QueueDeclare(self.name, durable=True, arguments=arguments) if create else None
        return (yield from self._found_or_made("queue", m.QueueDeclare(self.name, passive=True), made))

    def _found_or_made(self, kind: str, find: m.Method, make: m.Method | None) -> Steps:
        answer = yield find
        if isinstance(answer, m.QueueDeclareOk):
            self.consumer_count = answer.consumer_count
        if not isinstance(answer, ChannelClosed):
            return ""
        if make is None or answer.reply_code != ReplyCode.NOT_FOUND:
            return answer.text
        answer = yield make
        if isinstance(answer, ChannelClosed):
            return answer.text
        self.made = self.made or kind
        return ""


def own_queue(client_id: str, exchange: str) -> str:
    """The name of the link's own queue for what it wants from `exchange`; at most 255 octets."""
    name = f"{client_id}.{exchange}"
    if len(name.encode()) <= SHORT_STRING_MAX:
        return name
    return f"gateway.{hashlib.sha256(name.encode()).hexdigest()}"


class Topology:
    """All needs of a link. It outlives connections; `connected` starts a new round of questions."""

    def __init__(self, client_id: str, declare: Declare, wait_max: float) -> None:
        self.declare: Declare = declare
        self.reached_by = ""  # see Declaration; of queues that routes name
        self.declarations: dict[tuple[Kind, str], Declaration] = {}
        self._client_id = client_id
        self._wait_max = wait_max
        self._leftovers: list[Declaration] = []

    @property
    def surveyed(self) -> bool:
        """Every need has been answered on this connection, one way or the other."""
        return all(
            declaration.state is not DeclarationState.NEW for declaration in self.declarations.values()
        )

    def want(
        self, subscriptions: Subscriptions, targets: Targets
    ) -> tuple[list[Declaration], list[Declaration]]:
        """The mapping changed. Returns the needs that are new or changed, and those that are gone."""
        before = self.declarations
        wanted = {
            (declaration.kind, declaration.name): declaration
            for declaration in self._declarations_of(subscriptions, targets)
        }
        kept = {
            key: declaration
            for key, declaration in before.items()
            if declaration.undeclared and key not in wanted
        }
        fresh: list[Declaration] = []
        for key, declaration in wanted.items():
            old = before.get(key)
            if old is not None and not old.undeclared and old.says_the_same(declaration):
                wanted[key] = old
                continue
            if old is not None:
                declaration.drop = (old.keys | old.drop) - declaration.keys
            fresh.append(declaration)
        self.declarations = wanted | kept
        gone = [declaration for key, declaration in before.items() if key not in self.declarations]
        if self.declare == "create":
            self._leftovers += [
                Declaration(
                    declaration.kind,
                    declaration.name,
                    exchange=declaration.exchange,
                    drop=declaration.keys | declaration.drop,
                )
                for declaration in gone
                if declaration.keys or declaration.drop
            ]
        return fresh, gone

    def _declarations_of(self, subscriptions: Subscriptions, targets: Targets) -> Iterable[Declaration]:
        if self.declare != "none":
            for name in targets.scopes:
                if name and not name.startswith(RESERVED):
                    yield Declaration("exchange", name)
            for name in targets.queues:
                if name not in subscriptions.queues:
                    yield Declaration("queue", name, reached_by=self.reached_by)
        for name in subscriptions.queues:
            yield Declaration("queue", name, consume=True, reached_by=self.reached_by)
        keys: dict[str, set[str]] = {}
        for exchange, key in subscriptions.bindings:
            keys.setdefault(exchange, set()).add(key)
        for exchange, bound in keys.items():
            name = own_queue(self._client_id, exchange)
            yield Declaration("bound", name, consume=True, exchange=exchange, keys=frozenset(bound))

    def in_force(self, declaration: Declaration) -> Declaration | None:
        """The need of that kind and name in the mapping of today."""
        return self.declarations.get((declaration.kind, declaration.name))

    def connected(self) -> list[Declaration]:
        """A connection stands: returns all that has to be asked for."""
        for declaration in self.declarations.values():
            declaration.state = DeclarationState.NEW
            declaration.was_there = False
            declaration.wait = RETRY_SECS_MIN
        return [*self.leftovers(), *self.declarations.values()]

    def leftovers(self) -> list[Declaration]:
        """Bindings that nobody wants any more, once."""
        leftovers, self._leftovers = self._leftovers, []
        return leftovers

    def due(self, now: float) -> list[Declaration]:
        """The failed needs whose turn it is; they count as asked for."""
        found = [
            declaration
            for declaration in self.declarations.values()
            if declaration.state is DeclarationState.FAILED and declaration.retry_at <= now
        ]
        for declaration in found:
            declaration.state = DeclarationState.AGAIN
        return found

    def survey(self) -> list[Declaration]:
        """Return what was there when it was looked for last: somebody may have deleted it, or made it anew
        without its bindings. It counts as there until it is found missing."""
        return [one for one in self.declarations.values() if one.state is DeclarationState.THERE]

    def lacking(self) -> dict[str, str]:
        """Return why routes cannot have what they need, by kind and name; without what only messages name."""
        return {
            f"{one.kind if one.kind != 'bound' else 'queue'} {one.name!r}": one.why
            for one in self.declarations.values()
            if one.why and not one.undeclared
        }

    def failed(self, declaration: Declaration, why: str, now: float) -> bool:
        """The need is not met; it is tried again later. Returns whether the reason is news."""
        news = declaration.why != why
        declaration.why = why
        declaration.state = DeclarationState.FAILED
        declaration.retry_at = now + declaration.wait
        declaration.wait = min(declaration.wait * 2, self._wait_max)
        return news

    def refused(self, exchange: str) -> tuple[Declaration, list[Declaration]]:
        """The need for an exchange that a publish found missing; and such needs that had to be forgotten."""
        found = self.declarations.get(("exchange", exchange))
        if found is not None:
            return found, []
        forgotten = [declaration for declaration in self.declarations.values() if declaration.undeclared]
        if len(forgotten) < UNDECLARED_MAX:
            forgotten = []
        for declaration in forgotten:
            del self.declarations[declaration.kind, declaration.name]
        made = self.declarations["exchange", exchange] = Declaration("exchange", exchange, undeclared=True)
        return made, forgotten


class Declarer:
    """Asks the broker for needs, one question at a time, on a channel that it opens and closes itself.

    `arguments_of` gives those of a queue that it makes. `answered` is called with each need and why it cannot
    be met ("" when it is).
    """

    def __init__(
        self,
        machine: ClientConnection,
        declare: Declare,
        arguments_of: Callable[[str], Headers],
        answered: Callable[[Declaration, str], None],
    ) -> None:
        self.channel = 0  # 0: none is open
        self._machine = machine
        self._declare: Declare = declare
        self._arguments_of = arguments_of
        self._answered = answered
        self._queue: deque[Declaration] = deque()
        self._declaration: Declaration | None = None
        self._steps: Steps | None = None
        self._question: m.Method | None = None  # waits for its channel

    @property
    def idle(self) -> bool:
        """Return True if nothing is being asked for."""
        return self._declaration is None and not self._queue

    def ask(self, declarations: Iterable[Declaration]) -> None:
        """Work through `needs` as well."""
        self._queue.extend(declarations)
        if self._declaration is None:
            self._next()

    def opened(self) -> None:
        """The channel can be used."""
        if self._question is not None:
            self._machine.send_method(self.channel, self._question)
            self._question = None

    def hear(self, answer: Answer) -> None:
        """The broker answered the question, or closed the channel over it."""
        if isinstance(answer, ChannelClosed):
            self.channel = 0
            self._question = None
        if self._steps is None:
            return
        try:
            question = self._steps.send(answer)
        except StopIteration as end:
            self._finish(end.value)
        else:
            self._say(question)

    def _next(self) -> None:
        while self._queue and self._declaration is None:
            declaration = self._declaration = self._queue.popleft()
            arguments = self._arguments_of(declaration.name)
            steps = self._steps = declaration.steps(self._declare, arguments)
            try:
                question = next(steps)
            except StopIteration as end:
                self._declaration = self._steps = None
                self._answered(declaration, end.value)
            else:
                self._say(question)
        if self._declaration is None and self.channel:
            self._machine.close_channel(self.channel)
            self.channel = 0

    def _finish(self, why: str) -> None:
        declaration, self._declaration, self._steps = self._declaration, None, None
        assert declaration is not None
        self._answered(declaration, why)
        self._next()

    def _say(self, question: m.Method) -> None:
        if self.channel and self._question is None:
            self._machine.send_method(self.channel, question)
            return
        self._question = question
        if not self.channel:
            try:
                self.channel = self._machine.open_channel()
            except LocalProtocolError as error:
                self._question = None
                self._finish(str(error))
