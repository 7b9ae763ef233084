"""Whatever holds callbacks, messages or receipts until something happens is in a table: empty in an idle
gateway (tests/idle.py), or in STANDING with the reason why it need not be.

The places are found in the code: attributes whose annotation is a collection, or an optional value, of
callbacks, messages, parts or receipts, or of small classes that hold such; and collections with a name like
`_waiting` or `_pending`.
"""

from __future__ import annotations

import ast
import importlib
import re
import types
from collections.abc import Iterable, Iterator
from functools import cache
from inspect import unwrap
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tests import idle
from tests.house.sources import OURS, ROOT, nodes_of
from tests.idle import CHECKS, EMPTY, filled

ROOMS: Final = ("broker", "egress", "engine", "ingress", "model", "state", "store", "transport")
COLLECTIONS: Final = frozenset({"defaultdict", "deque", "dict", "list", "set"})
CARRIED: Final = frozenset({"Batch", "EventT", "Message", "QueuedMessage", "R", "Receipt", "SubBatch"})
# They have callbacks, and are no events that wait.
NO_CARRIERS: Final = frozenset(
    {
        "Action",
        "AnswerEntry",
        "DelayedAcknowledgements",
        "Entries",
        "FastHosts",
        "Route",
        "RoutingEntry",
        "RoutingPlan",
        "Rules",
    }
)
WAITS: Final = re.compile(
    "aside|asked|awaited|behind|buffer$|callbacks|consumable|doubt|flight|flying|held$|holds|later|leftover|moving"
    "|owed|owing|pending|postponed|put_off|ready_sizes|releases|reply_keys|soon|stopped|tried|unaccepted|unanswered|unbound"
    "|unconfirmed|undone|unrecorded|unsaved|unsure|waiting|walks"
)
METHODS_MAX: Final = 4  # of a class that is little more than a record


class Attribute(NamedTuple):
    """An attribute of a class: `place` is module and class without the package, e.g. `broker.queue.Queue`."""

    place: str
    name: str

    def __str__(self) -> str:
        return f"{self.place}.{self.name}"

    @property
    def owner(self) -> type:
        module, _, name = self.place.rpartition(".")
        found = getattr(importlib.import_module(f"gateway.{module}"), name)
        assert isinstance(found, type)
        return found


HOOK: Final = "called again and again, and set once"
OF_THE_CLIENT: Final = "until the client acknowledges it"
HELD: Final = "a hold, which WaitingPublishes has, too"
DUE: Final = "until its time: Alarms knows those that are late"
OF_THE_LOOP: Final = "a part on its way, in one wake-up"
STANDING: Final[dict[str, str]] = {
    "broker.scheduler.ScheduledCall.call": DUE,
    "broker.amqp091.delays.DelayedMessages._alarm": DUE,
    "broker.amqp091.queue.AmqpQueue._alarm": DUE,
    "broker.amqp091.queue.AmqpQueue._watch": DUE,
    "broker.amqpfast.destinations.DestinationQueue._alarm": DUE,
    "broker.amqp091.replies.RequesterNames._waiting": "consumers of direct replies",
    "broker.dead_letters.letters.DeadLetters._letters": "dead letters",
    "broker.journal.RecordedBatch.sources": OF_THE_LOOP,
    "broker.journal.UnroutedRows.messages": OF_THE_LOOP,
    "broker.memory.Memory._rising": HOOK,
    "broker.mqtt.namespace.MqttNamespace._set_aside": "sessions that could not be read",
    "broker.mqtt.retained.RetainedTopics._messages": "retained messages",
    "broker.mqtt.session.Session.in_flight": OF_THE_CLIENT,
    "broker.outbox.outbox.Outbox._on_departure": HOOK,
    "broker.outbox.outbox.Outbox._open": "until the broker confirms it",
    "broker.pressure.Pressure._waiting": "checked with its queue or session",
    "broker.pressure.PressureByUser._users": "checked with its exchange",
    "broker.priorities.PriorityQueue._selector_results": "consumers",
    "broker.queue.Queue._offered": "a message that a consumer is getting",
    "broker.selection_work.SelectionWork._results": "a cache",
    "broker.storage.PagedLog._pieces": "messages of a queue or session",
    "broker.storage.QueueStorage.on_refused": HOOK,
    "broker.taps.Tap._buffer": "until the operator reads it",
    "broker.taps.Tap._recent": "until the operator reads it",
    "egress.amqp091.topology.Declarer._steps": "suspended until the broker replies; Topology retries",
    "egress.amqpfast.handles.ClientSender._ready_sizes": "of a command line",
    "egress.amqpfast.handles.OpenHandle._came": "of a command line",
    "egress.held_back.RouteBacklog.waiting": "checked with HeldBack._backlogs",
    "engine.client_session.ClientSession._flight": OF_THE_CLIENT,
    "engine.consumers.ClusterConsumer.on_finished": "until its broker has its messages back",
    "engine.elections.Elections.candidates": "links",
    "engine.membership.Membership.on_declared_dead": HOOK,
    "engine.membership.Membership.on_claimed_work": HOOK,
    "engine.outboxes.SharedOutboxes.waiting": "counts of messages, by queue",
    "engine.ids.SharedIds._lines": "checked with SharedGuard._lines: an empty entry for each route",
    "engine.ids.WaitingClaim.sub_batch": "checked with SharedGuard._lines",
    "engine.retain_queue.WaitingMessage.sub_batch": "checked with RetainQueue._queues",
    "engine.session.EngineSession.on_dropped": HOOK,
    "engine.sessions.SharedSessions.on_keys_to_unbind": HOOK,
    "engine.sessions.SharedSessions._consumable": "sessions of this replica",
    "ingress.amqp091.channel.AmqpChannel._raise": DUE,
    "ingress.amqp091.channel.AmqpChannel.requester": "a consumer of direct replies",
    "ingress.amqp091.channel.AmqpChannel.unacknowledged": OF_THE_CLIENT,
    "ingress.amqp091.channel.AmqpChannel.unconfirmed": "until the target settles it, as WaitingPublishes has",
    "ingress.amqp091.channel.Transaction._publishes": "until the client commits",
    "ingress.amqp091.channel.Transaction._settlements": "until the client commits",
    "ingress.amqp091.ingress.AmqpIngress._entries": "a cache",
    "ingress.amqp091.connection.AmqpConnection._release_publishes": HELD,
    "ingress.amqpfast.channel.FastChannel.pending": "until the client commits",
    "ingress.amqpfast.channel.FastHandle.scan": "a query of the client",
    "ingress.amqpfast.large_deliveries.LargeDeliveries._answers": "until the client replies",
    "ingress.amqpfast.large_deliveries.LargeDeliveries._waiting": "until the client replies",
    "ingress.amqpfast.large_deliveries.LargeDeliveries.active": "until the client replies",
    "ingress.amqpfast.peer_services.TunnelSession._release": "a hold, which Stream has, too",
    "ingress.amqpfast.publisher.FastPublisher._release_publishes": HELD,
    "ingress.mqtt.connection.MqttConnection._release_ids": HELD,
    "ingress.mqtt.connection.MqttConnection._release_publishes": HELD,
    "ingress.mqtt.ingress.MqttIngress._sessions_awaiting_retained": "checked with Session.walks",
    "ingress.source.ListenerSource._unwanted": "the last message that nobody wanted",
    "ingress.waiting_publishes.ChannelBacklog.events": "checked with WaitingPublishes._lines",
    "model.batch.Batch._unaccepted": OF_THE_LOOP,
    "model.batch.Batch._parts": OF_THE_LOOP,
    "model.batch.Batch.receipts": OF_THE_LOOP,
    "model.batch.Batch.redelivered": HOOK,
    "model.batch.Batch.rejected": HOOK,
    "model.batch.Batch.returned": HOOK,
    "model.batch.Batch.cannot_notify": HOOK,
    "model.batch.SubBatch.messages": OF_THE_LOOP,
    "state.table.Table.rows": "rows of a database",
    "broker.dispatcher.Dispatcher._confirmed_later": "names of endpoints",
    "store.group.Group.things": "of one transaction",
    "store.journal.bursts.Bursts.firsts": "of the journal's thread, for one block",
}


def _sources() -> list[Path]:
    return [path for path in OURS if path.relative_to(ROOT).parts[1] in ROOMS]


def _is_callback(node: ast.AST) -> bool:
    """Return True for `Callable[[...], None]`; a function that returns something is no callback."""
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id == "Callable"
        and isinstance(node.slice, ast.Tuple)
        and isinstance(last := node.slice.elts[-1], ast.Constant)
        and last.value is None
    )


def _carries(node: ast.AST, carriers: Iterable[str]) -> bool:
    for one in ast.walk(node):
        if _is_callback(one) or (isinstance(one, ast.Name) and one.id in carriers):
            return True
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value.isidentifier():
            return one.value in carriers
    return False


def _is_small(node: ast.ClassDef) -> bool:
    """Return True for a record, and for a class that is little more."""
    return len([one for one in node.body if isinstance(one, ast.FunctionDef)]) <= METHODS_MAX


def _annotations_of(node: ast.ClassDef) -> Iterator[ast.AST]:
    for one in node.body:
        if isinstance(one, ast.AnnAssign):
            yield one.annotation
        elif isinstance(one, ast.FunctionDef) and one.name == "__init__":
            yield from (arg.annotation for arg in one.args.args if arg.annotation is not None)


@cache
def carriers() -> frozenset[str]:
    """Return the names of types that hold a callback, a message, a part or a receipt."""
    found = set(CARRIED)
    before = 0
    nodes = [node for path in _sources() for node in nodes_of(path)]
    while before != len(found):
        before = len(found)
        for node in nodes:
            match node:
                case ast.Assign([ast.Name(name)], value) if name[0].isupper() and not name.isupper():
                    if isinstance(value, ast.Subscript | ast.BinOp) and _carries(value, found):
                        found.add(name)
                case ast.ClassDef(name) if _is_small(node):
                    if any(_carries(one, found) for one in _annotations_of(node)):
                        found.add(name)
        found -= NO_CARRIERS
    return frozenset(found)


def _is_collection(node: ast.AST) -> bool:
    return any(
        isinstance(one, ast.Subscript) and isinstance(one.value, ast.Name) and one.value.id in COLLECTIONS
        for one in ast.walk(node)
    )


def _is_optional(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant) and node.right.value is None


@cache
def holding() -> frozenset[Attribute]:
    """Return the attributes of the gateway's objects that may hold what waits."""
    found = set()
    for path in _sources():
        module = ".".join(path.relative_to(ROOT / "gateway").with_suffix("").parts)
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                found |= {Attribute(f"{module}.{node.name}", name) for name in _holding(node)}
    return frozenset(found)


def _holding(node: ast.ClassDef) -> Iterator[str]:
    for one in ast.walk(node):
        match one:
            case ast.AnnAssign(ast.Attribute(ast.Name("self"), name), annotation):
                carries = _carries(annotation, carriers())
                if (_is_collection(annotation) and (carries or WAITS.search(name))) or (
                    _is_optional(annotation) and carries
                ):
                    yield name


def _names_in(code: types.CodeType) -> set[str]:
    """Return the attributes that a function of tests/idle.py names, or another one that it calls."""
    found = set(code.co_names)
    for name in code.co_names:
        called = getattr(idle, name, None)
        if isinstance(called, types.FunctionType) and called.__code__ is not code:
            found |= _names_in(called.__code__)
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            found |= _names_in(one)
    return found


def _is_checked(attribute: Attribute) -> bool:
    bases = attribute.owner.__mro__
    if any(attribute.name in EMPTY.get(base, ()) for base in bases):
        return True
    # A check of the class, or of one derived from it (`PriorityQueue` in that of `Queue`).
    checks = [check for kind, check in CHECKS.items() if kind in bases or attribute.owner in kind.__mro__]
    return any(attribute.name in _names_in(check.__code__) for check in checks)


def test_whatever_may_wait_is_checked_or_stands_for_a_reason() -> None:
    unchecked = {str(one) for one in holding() if not _is_checked(one)}
    assert unchecked == STANDING.keys(), sorted(unchecked ^ STANDING.keys())


def test_the_search_finds_what_waits() -> None:
    """It is not empty, and finds each kind: callbacks, messages, records with them, and names."""
    found = {str(one) for one in holding()}
    assert {
        "store.gate.Gate._waiting",
        "broker.pauses.PauseGate._waiting",
        "broker.queue.Queue._aside",
        "egress.confirms.ConfirmedSink._waiting",
        "egress.held_back.HeldBack._backlogs",
        "state.lanes.Committer.waiting",
        "engine.sessions.SessionWriter._flying",
    } <= found


ROWS: Final = [
    pytest.param(kind, name, id=f"{kind.__name__}.{name}") for kind, names in EMPTY.items() for name in names
]


@pytest.mark.interpreted
@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_what_waits_in_an_attribute_is_reported(kind: type, name: str) -> None:
    names = {one for base in kind.__mro__ for one in (*getattr(base, "__slots__", ()), *_assigned(base))}
    assert name in names, "there is no such attribute"
    one: Any = kind.__new__(kind)
    for other in EMPTY[kind]:
        setattr(one, other, [])
    assert list(filled(one)) == []
    setattr(one, name, ["something"])
    assert list(filled(one)) == [f"{kind.__module__}.{kind.__name__}.{name} is not empty: 1"]


def _assigned(kind: type) -> Iterator[str]:
    """Yield the attributes that the class assigns in its `__init__`."""
    method = unwrap(kind.__dict__.get("__init__", object.__init__))
    if isinstance(method, types.FunctionType):
        yield from method.__code__.co_names
