"""Counters that are kept as messages come and go, against what there is: one that drifts becomes a limit that
nobody has reached, or one that nobody reaches.

`drift_report` gets the live objects of a gateway, as `tests.idle.objects_of` finds them, and returns a line
for each counter that differs from a count of what it stands for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Final

from gateway.broker.amqp091.queue import AmqpQueue
from gateway.broker.amqpfast.destinations import FastQueue, TopicSubscription
from gateway.broker.matching_steps import filter_steps
from gateway.broker.mqtt.namespace import MqttNamespace
from gateway.broker.mqtt.session import Session
from gateway.broker.priorities import PriorityQueue
from gateway.broker.queue import HOLE, Queue
from gateway.ingress.amqp091.channel import AmqpChannel
from gateway.ingress.amqp091.connection import AmqpConnection
from gateway.ingress.amqpfast.channel import FastChannel
from gateway.model.message import bodies_of, weight_of
from gateway.model.shares import UserShares
from gateway.store.store import Store


def _differ(what: str, counted: object, found: object) -> Iterator[str]:
    if counted != found:
        yield f"{what}: counted {counted}, found {found}"


def _of_queue(queue: Queue) -> Iterator[str]:
    all_in_memory = queue.storage is None or not queue.storage.count
    if isinstance(queue, AmqpQueue) and queue.options.bytes_max is not None and all_in_memory:
        bodies = bodies_of(queue.messages_in_memory())
        yield from _differ(f"bytes of bodies in queue {queue.name!r}", queue.body_byte_count, bodies)
    rows = chain(
        queue._ready,
        (one for _, one in queue._returned),
        (one.message for one in queue._aside.values()),
        (one for one, _ in queue._waiting.values()) if isinstance(queue, PriorityQueue) else (),
    )
    byte_count = weight_of([message for message in rows if message is not HOLE])
    on_disk = 0 if queue.storage is None else queue.storage.byte_count
    yield from _differ(f"bytes of queue {queue.name!r}", queue.byte_count, byte_count + on_disk)


def _of_session(session: Session) -> Iterator[str]:
    held = weight_of(message for message, _, _ in session._waiting or ())
    held += weight_of(row.message for row in session.in_flight.values())
    aside = getattr(session, "_aside", None)
    held += 0 if aside is None else aside.byte_count
    yield from _differ(f"bytes of session {session.client_id!r}", session._byte_count, held)


def _of_shares(shares: UserShares) -> Iterator[str]:
    yield from _differ(f"number of {shares.resource}", shares.count, sum(shares._counts.values()))
    yield from _differ(f"bytes of {shares.resource}", shares.total, sum(shares._byte_count.values()))
    for name, number in chain(shares._counts.items(), shares._byte_count.items()):
        if number < 0:
            yield f"{shares.resource} of {name!r}: counted {number}"


def _of_namespace(space: MqttNamespace) -> Iterator[str]:
    subscribed: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    for session in space.sessions.values():
        subscribed[session.user] += len(session.subscriptions)
        steps[session.user] += sum(filter_steps(one) for one in session.subscriptions)
    yield from _differ("subscriptions", space.subscriptions, subscribed.total())
    yield from _differ("subscriptions by user", Counter(space._subscribed), +subscribed)
    yield from _differ("steps of topic filters", Counter(space.steps._of_users), +steps)


def _of_store(store: Store) -> Iterator[str]:
    if not store._calls:
        yield from _differ("messages that the disk has not got", store.figures.pending, 0)
        yield from _differ("bytes that the disk has not got", store.figures.pending_bytes, 0)


def _of_channel(channel: AmqpChannel) -> Iterator[str]:
    taken = Counter(consumer for _, consumer, _, _ in channel.unacknowledged.values() if consumer is not None)
    if channel.transaction is None:
        yield from _differ(f"sent on channel {channel.number}", channel.outstanding, taken.total())
        for consumer, count in taken.items():
            yield from _differ(f"sent to consumer {consumer.tag!r}", consumer.outstanding, count)


def _of_connection(connection: AmqpConnection) -> Iterator[str]:
    channels = list(connection.channels.values())
    if all(channel.transaction is None for channel in channels):
        rows = chain.from_iterable(channel.unacknowledged.values() for channel in channels)
        byte_count = weight_of(message for _, _, _, message in rows)
        yield from _differ("bytes that a connection holds", connection.outstanding.byte_count, byte_count)


CHECKS: Final[dict[type, Callable[[Any], Iterator[str]]]] = {
    Queue: _of_queue,
    Session: _of_session,
    UserShares: _of_shares,
    MqttNamespace: _of_namespace,
    Store: _of_store,
    AmqpChannel: _of_channel,
    AmqpConnection: _of_connection,
}


def _unacknowledged(objects: list[Any]) -> Iterator[str]:
    """What each queue of clients has handed out, against what channels say that they have from it."""
    held: dict[Queue, int] = defaultdict(int)
    for one in objects:
        if isinstance(one, AmqpChannel):
            if one.transaction is not None:
                return  # it holds settlements that are not in force
            for queue, _, _, _ in one.unacknowledged.values():
                held[queue] += 1
        elif isinstance(one, FastChannel):
            for delivery in chain(one._deliveries, one._acked):
                held[delivery.queue] += delivery.count
    for one in objects:
        if isinstance(one, AmqpQueue | FastQueue | TopicSubscription) and not one.deleted:
            yield from _differ(f"handed out of queue {one.name!r}", one.unacknowledged, held[one])


def drift_report(objects: Iterable[Any]) -> list[str]:
    """Return a line for each counter that is not what it counts."""
    listed = list(objects)
    found = list(_unacknowledged(listed))
    for one in listed:
        for kind, check in CHECKS.items():
            if isinstance(one, kind):
                found.extend(check(one))
    return found
