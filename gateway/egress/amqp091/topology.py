"""Declarations: objects that the routes of a link need at its broker, and how they are checked and created.

A Declaration is an exchange, a queue, or a queue of the link's own with its bindings. Each is first declared
passively, because it may exist with any properties; only missing objects are created. A broker closes the
channel when a passive declaration finds nothing, so a separate channel is used. The steps of a declaration
are a generator of methods, into which the broker's replies are sent one by one.
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
Steps = Generator[m.Method, Answer, str]  # returns why the need cannot be met, "" if it is

RETRY_SECS_MIN: Final = 1.0
# Number of remembered exchanges that only messages name (by templates) and that a publish found missing.
UNDECLARED_MAX: Final = 256
# Arguments of declared queues, so that only one replica at a time is sent their messages.
SINGLE_ACTIVE: Final[Headers] = (("x-single-active-consumer", Value(ValueType.BOOL, True)),)
RESERVED: Final = "amq."  # 3.1.3.1: such names are the broker's own, and exist or cannot be created


class DeclarationState(Enum):
    """Progress of a declaration on the current connection."""

    NEW = auto()  # no reply yet; publishing waits for it
    THERE = auto()
    FAILED = auto()  # waits for `retry_at`
    AGAIN = auto()  # being retried


class Declaration:
    """Exchange or queue that has to exist at the broker, with its bindings.

    `consume` is True if the link consumes its messages. `keys` are the binding keys that a queue needs from
    `exchange`; `drop` are binding keys of an earlier mapping, to be removed.
    """

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
        self.drop = drop  # binding keys of an earlier mapping
        self.reached_by = (
            reached_by  # direct exchange that routes to the queue by its name; "" for the default one
        )
        # True if only messages name the exchange: it is checked, and never created.
        self.undeclared = undeclared
        self.state = DeclarationState.NEW
        self.made = ""  # the kind that was missing at the last check, and was created
        self.consumer_count = 0  # of the queue, at the last check
        self.was_there = False  # on this connection
        self.why = ""
        self.wait = RETRY_SECS_MIN
        self.retry_at = 0.0

    def has_same_needs(self, other: Declaration) -> bool:
        """Return True if `other` requires the same object with the same use and bindings."""
        return (self.consume, self.exchange, self.keys) == (other.consume, other.exchange, other.keys)

    @property
    def route_queue(self) -> str:
        """Name by which routes select the messages of this queue; "" for a queue of the link's own."""
        return self.name if self.kind == "queue" else ""

    def steps(self, declare: Declare, arguments: Headers = ()) -> Steps:
        """Return a generator that yields the methods to send to the broker, and returns why they failed.

        The caller sends it the broker's reply to each method. Its return value is "" if the object is
        declared. `arguments` are those of a queue that has to be created.
        """
        create = declare == "create" and not self.undeclared
        self.made = ""
        if self.kind == "exchange":
            return (yield from self._exchange(self.name, create))
        if declare == "none":
            return ""
        if self.is_leftover:
            return (yield from self._unbind())
        if self.kind == "bound" and not self.exchange.startswith(RESERVED):
            why = yield from self._exchange(self.exchange, create)
            if why:
                return why
        why = yield from self._queue(create, arguments)
        if why or not create:
            return why
        if self.reached_by:
            for request in (
                m.ExchangeDeclare(self.reached_by, "direct", durable=True),
                m.QueueBind(self.name, self.reached_by, self.name),
            ):
                answer = yield request
                if isinstance(answer, ChannelClosed):
                    return answer.text
        if why := (yield from self._unbind()):
            return why
        for key in sorted(self.keys):
            answer = yield m.QueueBind(self.name, self.exchange, key)
            if isinstance(answer, ChannelClosed):
                return answer.text
        return ""

    @property
    def is_leftover(self) -> bool:
        """True if only bindings of an earlier mapping have to be removed from the queue."""
        return self.kind == "bound" and not self.keys

    def _unbind(self) -> Steps:
        """Remove the bindings in `drop`. A binding that does not exist is no error: its queue was deleted."""
        for key in sorted(self.drop):
            answer = yield m.QueueUnbind(self.name, self.exchange, key)
            if isinstance(answer, ChannelClosed) and answer.reply_code != ReplyCode.NOT_FOUND:
                return answer.text
        return ""

    def _exchange(self, name: str, create: bool) -> Steps:
        made = m.ExchangeDeclare(name, "topic", durable=True) if create else None
        return (yield from self._find_or_create("exchange", m.ExchangeDeclare(name, passive=True), made))

    def _queue(self, create: bool, arguments: Headers) -> Steps:
        made = m.QueueDeclare(self.name, durable=True, arguments=arguments) if create else None
        return (yield from self._find_or_create("queue", m.QueueDeclare(self.name, passive=True), made))

    def _find_or_create(self, kind: str, find: m.Method, make: m.Method | None) -> Steps:
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
    """Return the name of the link's own queue for its bindings to `exchange`; at most 255 bytes."""
    name = f"{client_id}.{exchange}"
    if len(name.encode()) <= SHORT_STRING_MAX:
        return name
    return f"gateway.{hashlib.sha256(name.encode()).hexdigest()}"


class Topology:
    """All declarations of a link.

    The object outlives connections; `connected` begins to check the declarations on a new one.
    """

    def __init__(self, client_id: str, declare: Declare, wait_max: float) -> None:
        self.declare: Declare = declare
        self.reached_by = ""  # see Declaration; for queues that routes name
        self.declarations: dict[tuple[Kind, str], Declaration] = {}
        self._client_id = client_id
        self._wait_max = wait_max
        self._leftovers: list[Declaration] = []  # see `leftovers`; not requested on this connection
        self._asked_leftovers: list[Declaration] = []  # requested on this connection, without a reply

    @property
    def surveyed(self) -> bool:
        """True if the broker has replied for every declaration on this connection."""
        return all(
            declaration.state is not DeclarationState.NEW for declaration in self.declarations.values()
        )

    def set_needs(
        self, subscriptions: Subscriptions, targets: Targets
    ) -> tuple[list[Declaration], list[Declaration]]:
        """Set the declarations that a changed mapping requires.

        Return the new or changed ones, and those that are no longer needed.
        """
        before = self.declarations
        needed = {
            (declaration.kind, declaration.name): declaration
            for declaration in self._declarations_of(subscriptions, targets)
        }
        carried_over = {
            key: declaration
            for key, declaration in before.items()
            if declaration.undeclared and key not in needed
        }
        fresh: list[Declaration] = []
        for key, declaration in needed.items():
            old = before.get(key)
            if old is not None and not old.undeclared and old.has_same_needs(declaration):
                needed[key] = old
                continue
            if old is not None:
                declaration.drop = (old.keys | old.drop) - declaration.keys
            fresh.append(declaration)
        self.declarations = needed | carried_over
        unneeded = [declaration for key, declaration in before.items() if key not in self.declarations]
        if self.declare == "create":
            self._leftovers += [
                Declaration(
                    declaration.kind,
                    declaration.name,
                    exchange=declaration.exchange,
                    drop=declaration.keys | declaration.drop,
                )
                for declaration in unneeded
                if declaration.keys or declaration.drop
            ]
        return fresh, unneeded

    def _declarations_of(self, subscriptions: Subscriptions, targets: Targets) -> Iterable[Declaration]:
        """Yield the declarations of the exchanges and queues that the routes consume from or publish to."""
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

    def current(self, declaration: Declaration) -> Declaration | None:
        """Return the present declaration with the kind and name of `declaration`, or None."""
        return self.declarations.get((declaration.kind, declaration.name))

    def connected(self) -> list[Declaration]:
        """Reset the states of all declarations for a new connection. Return all, to be checked on it."""
        self._leftovers = self._asked_leftovers + self._leftovers
        self._asked_leftovers = []
        for declaration in self.declarations.values():
            declaration.state = DeclarationState.NEW
            declaration.was_there = False
            declaration.wait = RETRY_SECS_MIN
        return [*self.leftovers(), *self.declarations.values()]

    def leftovers(self) -> list[Declaration]:
        """Return declarations that remove unneeded bindings, and were not requested on this connection yet.

        Call `forget_leftover` with each when the broker has replied. If the connection is lost before,
        `connected` returns the declaration again.
        """
        leftovers, self._leftovers = self._leftovers, []
        for leftover in leftovers:
            needed = self.current(leftover)
            if needed is not None:  # again, since
                leftover.drop -= needed.keys
        self._asked_leftovers += leftovers
        return leftovers

    def forget_leftover(self, declaration: Declaration) -> None:
        """Forget a declaration that removes bindings, because the broker has replied. Others are ignored."""
        if declaration in self._asked_leftovers:
            self._asked_leftovers.remove(declaration)

    def take_due(self, now: float) -> list[Declaration]:
        """Return the failed declarations whose retry is due, and mark them as being retried.

        `now` is in loop-clock seconds.
        """
        found = [
            declaration
            for declaration in self.declarations.values()
            if declaration.state is DeclarationState.FAILED and declaration.retry_at <= now
        ]
        for declaration in found:
            declaration.state = DeclarationState.AGAIN
        return found

    def survey(self) -> list[Declaration]:
        """Return the declarations that existed at the last check, to be checked again.

        A user may have deleted an object, or created it again without its bindings. The state of a
        declaration changes only if its object is found missing.
        """
        return [one for one in self.declarations.values() if one.state is DeclarationState.THERE]

    def unmet_needs(self) -> dict[str, str]:
        """Return why declarations failed: the reason for each object, by its kind and name.

        Exchanges that the mapping does not name, but only a published message, are not included.
        """
        return {
            f"{one.kind if one.kind != 'bound' else 'queue'} {one.name!r}": one.why
            for one in self.declarations.values()
            if one.why and not one.undeclared
        }

    def mark_failed(self, declaration: Declaration, why: str, now: float) -> bool:
        """Record why a declaration failed, and when to retry it. Return True if the reason is new.

        `now` is in loop-clock seconds.
        """
        news = declaration.why != why
        declaration.why = why
        declaration.state = DeclarationState.FAILED
        declaration.retry_at = now + declaration.wait
        declaration.wait = min(declaration.wait * 2, self._wait_max)
        return news

    def declaration_of_missing(self, exchange: str) -> tuple[Declaration, list[Declaration]]:
        """Return the declaration of an exchange that the broker did not find on a publish.

        It is created if the mapping does not name the exchange. The second result has declarations of such
        exchanges that were removed to limit their number.
        """
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
    """Sender of declarations to the broker, one at a time, on a channel that it opens and closes itself.

    `arguments_of` gets the name of a queue to create, and returns its arguments. `answered` is called with
    each declaration and the reason why it failed, or "" if it succeeded.
    """

    def __init__(
        self,
        machine: ClientConnection,
        declare: Declare,
        arguments_of: Callable[[str], Headers],
        answered: Callable[[Declaration, str], None],
    ) -> None:
        self.channel = 0  # 0 if none is open
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
        """True if no declaration is being processed or waits."""
        return self._declaration is None and not self._queue

    def queue(self, declarations: Iterable[Declaration]) -> None:
        """Queue these declarations behind the pending ones."""
        self._queue.extend(declarations)
        if self._declaration is None:
            self._start_next()

    def send_pending(self) -> None:
        """Send the method that waits until the channel is open."""
        if self._question is not None:
            self._machine.send_method(self.channel, self._question)
            self._question = None

    def process_reply(self, answer: Answer) -> None:
        """Process the broker's reply to the method sent last, or its close of the channel."""
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
            self._send_method(question)

    def _start_next(self) -> None:
        """Start to process the next declaration; close the channel if there is none."""
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
                self._send_method(question)
        if self._declaration is None and self.channel:
            self._machine.close_channel(self.channel)
            self.channel = 0

    def _finish(self, why: str) -> None:
        declaration, self._declaration, self._steps = self._declaration, None, None
        assert declaration is not None
        self._answered(declaration, why)
        self._start_next()

    def _send_method(self, question: m.Method) -> None:
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
