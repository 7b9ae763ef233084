"""What still waits in a gateway that should have nothing to do.

`idle_report` walks the live objects of a gateway and returns a line for each connection that is held back,
each callback that waits, and each queue or session that keeps messages from somebody who has room for them.
A gateway whose faults are repaired and whose clients are quiet has none of these, whatever happened before.
`await_idle` waits until that is so.

The walk follows references and not a list of objects. What it looks at is in two tables: EMPTY has attributes
that are empty in an idle gateway, CHECKS has functions for those that may be filled on some condition.
`tests/house/test_idle.py` finds in the code what may hold a callback or a message, and fails if such an
attribute is in neither table and has no reason to be filled.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import trio

from gateway import clock
from gateway.app import Gateway
from gateway.broker.amqp091.dead_letter_routing import DeadLettering, WaitingDeaths
from gateway.broker.amqp091.delays import DelayedMessages
from gateway.broker.amqp091.queue import AmqpQueue
from gateway.broker.amqpfast.destinations import TopicSubscription
from gateway.broker.dead_letters.letters import DeadLetters
from gateway.broker.memory import Memory
from gateway.broker.mqtt.durable_session import DurableSession
from gateway.broker.mqtt.ended_sessions import EndedSessions
from gateway.broker.mqtt.namespace import MqttNamespace
from gateway.broker.mqtt.packet_ids import RenumberedMessages
from gateway.broker.mqtt.retained import PIECE_MESSAGES_MAX
from gateway.broker.mqtt.session import Session
from gateway.broker.outbox.outbox import Outbox
from gateway.broker.pauses import PauseGate as PausedRoute
from gateway.broker.pressure import HeldReceipts
from gateway.broker.priorities import PriorityQueue
from gateway.broker.queue import Consumer, Queue
from gateway.broker.scheduler import SLEEP_SECS_MAX, CallScheduler
from gateway.broker.selection_work import SelectionWork
from gateway.broker.storage import QueueStorage
from gateway.egress.amqp091.consumer import AmqpLinkConsumer
from gateway.egress.amqp091.topology import Topology
from gateway.egress.amqpfast.channel import ClientChannel
from gateway.egress.amqpfast.consumer import FastLinkConsumer
from gateway.egress.amqpfast.large import LargeSender
from gateway.egress.amqpfast.session import FastLinkConnection
from gateway.egress.amqpfast.sources import LinkSources
from gateway.egress.confirms import ConfirmedSink
from gateway.egress.connection import QueueLinkConnection
from gateway.egress.held_back import HeldBack
from gateway.egress.mqtt.filters import Filters
from gateway.egress.mqtt.publisher import MqttLinkPublisher
from gateway.egress.mqtt.receiver import MqttLinkReceiver
from gateway.egress.session import QueueLinkSession
from gateway.engine.absent_sessions import AbsentReview
from gateway.engine.client_session import ClientSession
from gateway.engine.cluster import ClusterConnection
from gateway.engine.consumers import Consumers
from gateway.engine.ids import SharedGuard, SharedIds
from gateway.engine.letters import SharedLetters
from gateway.engine.namespace import EngineNamespace
from gateway.engine.outboxes import OutboxConnection
from gateway.engine.repeats import Repeats
from gateway.engine.requeue_order import RequeuedMessages
from gateway.engine.retain_queue import RetainQueue
from gateway.engine.retained import SharedRetained
from gateway.engine.retained_reads import RetainedReads
from gateway.engine.session import EngineSession
from gateway.engine.sessions import SessionWriter, SharedSessions
from gateway.engine.shares import SharedQueue
from gateway.engine.walks import SentRetained, SharedWalk
from gateway.ingress.amqp091.channel import Transaction
from gateway.ingress.amqpfast.ingress import FastIngress
from gateway.ingress.amqpfast.peer_services import PeerReplyStream
from gateway.ingress.mqtt.retries import Retries
from gateway.ingress.waiting_publishes import WaitingPublishes
from gateway.model.batch import SubBatch
from gateway.model.message import Message
from gateway.state.lanes import Committer
from gateway.store.gate import Gate as RefusalGate
from gateway.store.group import Group
from gateway.store.store import Store
from gateway.store.writer import Writer as StoreWriter
from gateway.transport.socket_loop import SocketLoop
from gateway.transport.stream import Stream
from tests.counters import drift_report

POLL_SECS: Final = 0.02
LATE_SECS: Final = 2.0  # after which something that is due at a time should have happened
# Leaves of the walk: they are many, and lead to nothing that waits.
LEAVES: Final = (Message, SubBatch, type, types.ModuleType, types.CodeType, str, bytes, int, float)
FOREIGN: Final = ("trio.", "structlog.", "ssl", "logging", "pydantic")


def _of_stream(stream: Any) -> Iterator[str]:
    if not stream.closed and not stream.ending:
        if stream._holds > sum(one is stream for _, _, one in stream._watcher._paused):  # by a rate limit
            yield f"connection of {stream.remote}: not read, held {stream._holds} times"
        if stream.is_suspended or stream._postponed:
            yield f"connection of {stream.remote}: a command of its client is pending"
        if stream._output_holds:
            yield f"connection of {stream.remote}: not written, held {stream._output_holds} times"


def _of_waiting(waiting: Any) -> Iterator[str]:
    if not waiting._ended:
        for channel in {*waiting._holds, *waiting._lines}:
            yield f"connection of {waiting._stream.remote}: publishes on channel {channel} are held"


def _of_queue(queue: Any) -> Iterator[str]:
    if queue.deleted:
        return
    if queue._pressure and queue.has_drained():
        yield f"queue {queue.name!r}: holds publishers and has drained ({len(queue)} messages)"
    if queue.gate.shut or queue.reads.shut:
        return
    for position, message, able in _apart(queue):
        if any(one.capacity() > 0 and queue._may_have(one, message) for one in able):
            yield f"queue {queue.name!r}: the message at {position} waits, a consumer has room for it"
            return
    if not (queue._ready or queue._returned or (queue.storage and queue.storage.count)):
        return
    open_ = [room for consumer in queue.consumers if (room := consumer.capacity()) > 0]
    if open_:
        yield f"queue {queue.name!r}: {len(queue)} messages wait, consumers have room for {open_}"


def _of_delay(delayed: Any) -> Iterator[str]:
    for user in delayed._user_pressure._users:
        if not delayed.deleted and not delayed._shares.count_of(user):
            yield f"exchange {delayed.name!r}: holds {user!r}, of whom no message waits"


def _apart(queue: Any) -> Iterator[tuple[int, Message, list[Consumer]]]:
    """Yield position and message of what not every consumer may have, and the consumers that may."""
    for position, aside in queue._aside.items():
        yield position, aside.message, [one for one in queue.consumers if one not in aside.unable_consumers]
    if isinstance(queue, PriorityQueue):
        for position, (message, _) in queue._waiting.items():
            able = [one for one in queue.consumers if not queue._avoids(position, one, message)]
            yield position, message, able


def _of_subscription(subscription: Any) -> Iterator[str]:
    if subscription._put_off:
        yield f"subscription {subscription.name!r}: messages wait for its selector"


def _of_session(session: Any) -> Iterator[str]:
    full = session._tight or (session._pace is not None and session._pace.on)
    if session.pressure and not full:
        yield f"session {session.client_id!r}: holds publishers and is not full"
    if session.outlet is None or session.outlet.congested:
        return
    if (session._waiting or session._again) and session.credit > 0:
        yield f"session {session.client_id!r}: {len(session)} messages wait, its client has room"
    if session.walks and len(session) < PIECE_MESSAGES_MAX and session.has_retained_to_queue:
        yield f"session {session.client_id!r}: retained messages wait, its client has room"


def _of_storage(storage: Any) -> Iterator[str]:
    if storage._loaded:
        yield f"storage of {storage.log}: {len(storage._loaded)} callbacks wait for it to be read"


def _of_outbox(outbox: Any) -> Iterator[str]:
    if outbox._later:
        yield f"outbox {outbox.name!r}: {len(outbox._later)} messages wait for another attempt"
    if outbox._letters_full:
        yield f"outbox {outbox.name!r}: waits for room for dead letters"


EMPTY: Final[dict[type, tuple[str, ...]]] = {
    # The embedded broker.
    SelectionWork: ("_calls",),
    DeadLettering: ("_next_turn", "_postponed", "_retry", "_waiting", "waiting_deaths"),
    WaitingDeaths: ("_lines",),
    AmqpQueue: ("_waiting_gets",),
    DeadLetters: ("_unread", "_waiting"),
    DurableSession: ("_moving",),
    EndedSessions: ("_evicted", "_logs", "_open", "_waiting"),
    MqttNamespace: ("_leftovers", "_sharing", "_unshared"),
    RenumberedMessages: ("_unrecorded",),
    PausedRoute: ("_waiting",),
    Memory: ("_stopped",),
    HeldReceipts: ("_behind", "_refused"),
    # Clients.
    Retries: ("_undone", "_waiting"),
    FastIngress: ("_soon",),
    Transaction: ("_committing", "_then"),
    PeerReplyStream: ("_buffer",),
    # Links.
    HeldBack: ("_backlogs", "_recorded_routes", "_tried", "_undone"),
    QueueLinkConnection: ("_owing",),
    QueueLinkSession: ("_burials",),
    AmqpLinkConsumer: ("_later",),
    Topology: ("_asked_leftovers", "_leftovers"),
    FastLinkConsumer: ("_later",),
    FastLinkConnection: ("_unanswered",),
    LinkSources: ("_left_behind",),
    LargeSender: ("_message",),
    ClientChannel: ("_awaited",),
    MqttLinkReceiver: ("_burials",),
    Filters: ("_unanswered",),
    # The store, and the loop.
    RefusalGate: ("_waiting",),
    Group: ("_unwritten_runs", "reads", "callbacks", "settled_callbacks"),
    StoreWriter: ("_delayed_reads",),
    Store: ("_calls", "_releases", "_refused"),
    SocketLoop: ("_calls",),
    # Replicas, and their database.
    ClusterConnection: ("_requests",),
    Consumers: ("_awaited", "_checks", "_missing", "_own", "_removals"),
    RequeuedMessages: ("_buffer",),
    SharedLetters: ("_added", "_unsaved"),
    EngineNamespace: ("_barrier_walks", "_lost", "_unbound", "_walks"),
    OutboxConnection: ("_counted_queues",),
    Repeats: ("_waiting",),
    SharedGuard: ("_lines",),
    SharedIds: ("_unfreed",),
    RetainedReads: ("_lines",),
    SharedRetained: ("_unsure",),
    RetainQueue: ("_later", "_queues"),
    EngineSession: ("_binding", "_blocked", "_waiting"),
    AbsentReview: ("_pending_unbinds",),
    SharedSessions: ("_after_releases", "_recounting", "_waiting"),
    SessionWriter: ("_flying", "_leaving", "_callbacks"),
    SharedQueue: ("unbound",),
    ClientSession: ("_unbound_options", "unbound"),
    SharedWalk: ("_then",),
    SentRetained: ("_numbers",),
    Committer: ("_noted", "_pending", "_uncertain_commit", "waiting"),
}
"""Attributes that hold something only while it waits."""


def _of_namespace(space: Any) -> Iterator[str]:
    late = [client for client, (at, *_) in space._wills.items() if at < clock.now() - LATE_SECS]
    if late:
        yield f"wills of {late} are due and not published"


def _of_alarms(alarms: Any) -> Iterator[str]:
    late = [one for at, _, one in alarms._alarms if at < clock.utc() - SLEEP_SECS_MAX - LATE_SECS]
    if any(one.call is not None for one in late):
        yield f"alarms: {len(late)} are due and were not called"


def _of_sink(sink: Any) -> Iterator[str]:
    usable = sink._flowing and sink._usable and not sink._stream.congested
    if sink._waiting and usable and sink._send_capacity() > 0:
        yield f"link: {sink.waiting_messages} messages wait, the broker has room"


def _of_publisher(publisher: Any) -> Iterator[str]:
    if publisher._flowing and (publisher._packet_ids or publisher._released):
        yield "MQTT link: messages of an earlier connection were not sent again"


CHECKS: Final[dict[type, Callable[[Any], Iterator[str]]]] = {
    Stream: _of_stream,
    WaitingPublishes: _of_waiting,
    Queue: _of_queue,
    DelayedMessages: _of_delay,
    TopicSubscription: _of_subscription,
    Session: _of_session,
    QueueStorage: _of_storage,
    Outbox: _of_outbox,
    MqttNamespace: _of_namespace,
    CallScheduler: _of_alarms,
    ConfirmedSink: _of_sink,
    MqttLinkPublisher: _of_publisher,
}


def _neighbours(one: object) -> list[Any]:
    if isinstance(one, LEAVES) or type(one).__module__.startswith(FOREIGN):
        return []
    if isinstance(one, types.FunctionType):
        # What tests put in place of a function leads to what they watch, such as an earlier gateway.
        return [] if (one.__module__ or "").startswith("tests.") else list(one.__closure__ or ())
    return gc.get_referents(one)


def objects_of(root: object) -> Iterator[Any]:
    """Yield every object that `root` refers to, each once."""
    seen = {id(root)}
    todo: list[Any] = [root]
    while todo:
        one = todo.pop()
        yield one
        for other in _neighbours(one):
            if id(other) not in seen:
                seen.add(id(other))
                todo.append(other)


def idle_report(root: object) -> list[str]:
    """Return what waits in a gateway or a part of one, and counters that have drifted, a line each.

    Call it in its event loop.
    """
    objects = list(objects_of(root))
    found = drift_report(objects)
    for one in objects:
        names, checks = _rows_of(type(one))
        if names:
            found.extend(filled(one))
        for check in checks:
            found.extend(check(one))
    return found


Rows = tuple[list[str], list[Callable[[Any], Iterator[str]]]]
_found_rows: dict[type, Rows] = {}


def _rows_of(kind: type) -> Rows:
    """Return the attributes of a class that must be empty, and its checks, with those of its bases."""
    found = _found_rows.get(kind)
    if found is None:
        names = [name for base in kind.__mro__ for name in EMPTY.get(base, ())]
        checks = [CHECKS[base] for base in kind.__mro__ if base in CHECKS]
        found = _found_rows[kind] = names, checks
    return found


def filled(one: object) -> Iterator[str]:
    """Yield a line for each attribute of an object that EMPTY names and that is not empty."""
    for name in _rows_of(type(one))[0]:
        value = getattr(one, name, None)
        if value:
            count = f": {len(value)}" if hasattr(value, "__len__") else ""
            yield f"{type(one).__module__}.{type(one).__name__}.{name} is not empty{count}"


async def await_idle(gateway: Gateway, seconds: float = 10.0) -> None:
    """Return when nothing waits in the gateway; raises AssertionError with the report if that never is so."""
    report = idle_report(gateway)
    with trio.move_on_after(seconds):
        while report:
            await trio.sleep(POLL_SECS)
            report = idle_report(gateway)
    assert not report, "\n".join(["the gateway is not idle:", *report])
