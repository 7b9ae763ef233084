"""What still waits in a gateway that should have nothing to do.

`idle_report` walks the live objects of a gateway and returns a line for each connection that is held back,
each callback that waits, and each queue or session that keeps messages from somebody who has room for them.
A gateway whose faults are repaired and whose clients are quiet has none of these, whatever happened before.
`await_idle` waits until that is so.

The walk follows references and not a list of places, so a new kind of holder cannot be forgotten: it has to
use one of the classes in CHECKS, or to be added to them.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import trio

from gateway.app import Gateway
from gateway.broker.amqp091.dead_lettering import DeadLettering
from gateway.broker.amqpfast.destinations import Subscription
from gateway.broker.memory import Memory
from gateway.broker.mqtt.session import Session
from gateway.broker.outbox.outbox import Outbox
from gateway.broker.pausing import Gate
from gateway.broker.pressure import Held
from gateway.broker.queue import Queue
from gateway.broker.storage import QueueStorage
from gateway.ingress.mqtt.retries import Retries
from gateway.ingress.waiting_publishes import WaitingPublishes
from gateway.model.batch import SubBatch
from gateway.model.message import Message
from gateway.store.store import Store
from gateway.transport.stream import Stream
from tests.counters import drift_report

POLL_SECS: Final = 0.02
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
    if queue._pressure and queue.drained():
        yield f"queue {queue.name!r}: holds publishers and has drained ({len(queue)} messages)"
    if queue.gate.shut or not (queue._ready or queue._returned or (queue.storage and queue.storage.count)):
        return
    open_ = [room for consumer in queue.consumers if (room := consumer.room()) > 0]
    if open_:
        yield f"queue {queue.name!r}: {len(queue)} messages wait, consumers have room for {open_}"


def _of_subscription(subscription: Any) -> Iterator[str]:
    if subscription._put_off:
        yield f"subscription {subscription.name!r}: messages wait for its selector"


def _of_session(session: Any) -> Iterator[str]:
    full = session._tight or (session._pace is not None and session._pace.on)
    if session.pressure and not full:
        yield f"session {session.client_id!r}: holds publishers and is not full"
    if (
        session._waiting
        and session.outlet is not None
        and not session.outlet.congested
        and session.credit > 0
    ):
        yield f"session {session.client_id!r}: {len(session._waiting)} messages wait, its client has room"


def _of_storage(storage: Any) -> Iterator[str]:
    if storage._loaded:
        yield f"storage of {storage.log}: {len(storage._loaded)} callbacks wait for it to be read"


def _of_store(store: Any) -> Iterator[str]:
    if store._held:
        yield f"store: holds {len(store._held)} publishers"
    if store._calls or store._refused:
        yield f"store: {len(store._calls)} calls and {len(store._refused)} refusals were not handed on"


def _of_outbox(outbox: Any) -> Iterator[str]:
    if outbox._later:
        yield f"outbox {outbox.name!r}: {len(outbox._later)} messages wait for another attempt"
    if outbox._letters_full:
        yield f"outbox {outbox.name!r}: waits for room for dead letters"


CHECKS: Final[dict[type, Callable[[Any], Iterator[str]]]] = {
    Stream: _of_stream,
    WaitingPublishes: _of_waiting,
    Queue: _of_queue,
    Subscription: _of_subscription,
    Session: _of_session,
    QueueStorage: _of_storage,
    Store: _of_store,
    Outbox: _of_outbox,
    Held: lambda held: iter(["receipts wait for the disk"] if held.on else []),
    Gate: lambda gate: iter([f"route {gate.route.name!r}: {gate.messages} wait"] if gate.messages else []),
    Retries: lambda retries: iter(["publishes are to be retried"] if retries._waiting else []),
    Memory: lambda memory: iter(["publishers wait for memory"] if memory._stopped else []),
    DeadLettering: lambda dead: iter(["dead letters wait for their turn"] if dead._next_turn else []),
}


def _neighbours(one: object) -> list[Any]:
    if isinstance(one, LEAVES) or type(one).__module__.startswith(FOREIGN):
        return []
    if isinstance(one, types.FunctionType):
        return list(one.__closure__ or ())
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
        for kind, check in CHECKS.items():
            if isinstance(one, kind):
                found.extend(check(one))
    return found


async def await_idle(gateway: Gateway, seconds: float = 10.0) -> None:
    """Return when nothing waits in the gateway; raises AssertionError with the report if that never is so."""
    report = idle_report(gateway)
    with trio.move_on_after(seconds):
        while report:
            await trio.sleep(POLL_SECS)
            report = idle_report(gateway)
    assert not report, "\n".join(["the gateway is not idle:", *report])
