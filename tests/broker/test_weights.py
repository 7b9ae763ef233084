"""Whatever holds messages counts them with their properties, and counts nothing when they have gone."""

from __future__ import annotations

import gc
import tracemalloc
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from gateway import clock
from gateway.broker.amqp091.arguments import queue_arguments
from gateway.broker.amqp091.queue import AmqpQueue
from gateway.broker.dead_letters import DeadLetters
from gateway.broker.mqtt.durable_session import DurableSession
from gateway.broker.mqtt.retained import RetainedTopics
from gateway.broker.mqtt.session import SessionLimits
from gateway.broker.priorities import PriorityQueue
from gateway.broker.queue import Queue
from gateway.broker.storage import MemoryLimits, QueueStorage
from gateway.model.address import Address
from gateway.model.message import MESSAGE_BYTES, Message, bodies_of, weight_of
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.properties import Properties, PropertySet, Value, ValueType, property_set, string
from gateway.protocols.amqp091.codec import BasicProperties, encode_basic_properties
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.translate import content_properties
from gateway.protocols.amqpfast.dialect import fast_address
from gateway.protocols.mqtt.dialect import topic_address
from gateway.store.store import Store
from tests.broker.amqp091.parts import Host, integer
from tests.broker.parts import Space, Taker, connected, publish
from tests.counters import drift_report
from tests.store.parts import Disk, Opened, accepted

LOST = Outcome(Verdict.REJECTED, Reason.TARGET_REFUSED, "no")
RAW = 1_000


def described(byte_count: int, body: bytes = b"x") -> Message:
    """A message with so many bytes of properties, all its own."""
    return Message(amqp_address("", "q"), body, PropertySet("amqp091", bytes(byte_count)), 1, True)


def several(count: int = 5) -> list[Message]:
    return [described(RAW + at, b"x" * at) for at in range(count)]


# What a message weighs.


def test_a_message_weighs_its_body_its_properties_and_what_an_empty_one_costs() -> None:
    assert Message(amqp_address("", "q"), b"").byte_count == MESSAGE_BYTES
    message = described(RAW, b"body")
    assert message.byte_count == RAW + 4 + MESSAGE_BYTES
    assert message.with_crossing(topic_address("a")).byte_count == message.byte_count
    others = message.crossed_with([described(RAW, b"longer body")], topic_address("a"))
    assert weight_of(others) == RAW + 11 + MESSAGE_BYTES
    assert (weight_of([message, message]), bodies_of([message, message])) == (2 * message.byte_count, 8)


LONG: list[Address] = [
    *(topic_address("x" * 65_535), topic_address("/".join("é" * 3_000))),
    *(amqp_address("e" * 255, "k" * 255), fast_address("queue", "q" * 255)),
]


@pytest.mark.parametrize("address", LONG, ids=["topic", "deep topic", "routing key", "destination"])
def test_a_long_address_counts_as_text_and_as_bytes(address: Address) -> None:
    """A message may have a body of one byte and a topic of 64 KiB."""
    message = Message(address, b"x")
    assert message.byte_count == 1 + MESSAGE_BYTES + max(2 * len(address.wire) - 512, 0)
    short = message.with_crossing(topic_address("a" * 256))
    assert short.byte_count == 1 + MESSAGE_BYTES
    assert short.with_crossing(address).byte_count == message.byte_count
    assert weight_of(short.crossed_with([short, short], address)) == 2 * message.byte_count


@pytest.mark.needs("time")
def test_the_weight_of_messages_with_long_topics_is_about_their_memory() -> None:
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    held = [Message(topic_address(f"{at:05}" + "x" * 65_000), b"x") for at in range(100)]
    byte_count = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0.9 < weight_of(held) / byte_count < 1.1


def array(*values: Value) -> Value:
    return Value(ValueType.ARRAY, values)


PROPERTIES: dict[str, tuple[Properties, int]] = {
    "none": (Properties(), 0),
    "texts": (Properties(content_type="x" * 100, correlation=bytes(200), user_id="y" * 50), 350),
    "a header": (Properties(headers=(("n" * 10, string("v" * 500)),)), 510),
    "bytes": (Properties(headers=(("n", Value(ValueType.BYTES, bytes(500))),)), 501),
    "a table": (
        Properties(headers=(("t", Value(ValueType.TABLE, (("n", string("v" * 500)),))),)),
        502,
    ),
    "an array of arrays": (
        Properties(headers=(("t", array(array(string("v" * 500)), string("w" * 9))),)),
        510,
    ),
    "many numbers": (Properties(headers=tuple((f"{at:03}", integer(at)) for at in range(100))), 300),
    "a table that is none": (Properties(headers=(("t", Value(ValueType.TABLE, {})),)), 1),
}


@pytest.mark.parametrize("name", PROPERTIES)
def test_properties_that_no_protocol_has_written_weigh_their_texts(name: str) -> None:
    properties, texts = PROPERTIES[name]
    assert texts <= property_set(properties).byte_count <= texts + 16 * (1 + len(properties.headers) * 4)


def test_tables_may_be_as_deep_as_they_like() -> None:
    value = string("x" * 100)
    for _ in range(10_000):
        value = array(value)
    assert property_set(Properties(headers=(("deep", value),))).byte_count >= 100


@pytest.mark.needs("time")
def test_an_empty_message_costs_about_so_much() -> None:
    """The constant is of the right order: with a property set of its own, and without."""
    count = 2_000
    address = amqp_address("", "q")

    def cost(make: Callable[[], Message]) -> float:
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        held = deque(make() for _ in range(count))
        byte_count = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert len(held) == count
        return byte_count / count

    assert MESSAGE_BYTES / 3 < cost(lambda: Message(address, b"")) < MESSAGE_BYTES
    assert cost(lambda: Message(address, b"", PropertySet("mqtt", bytes(1)))) < 2 * MESSAGE_BYTES


# Queues.

KINDS: dict[str, Callable[[], Queue]] = {
    "plain": lambda: Queue("q"),
    "priorities": lambda: PriorityQueue("q", lambda message: len(message.body) % 3),
    "amqp": lambda: Host().make("q"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_queue(kind: str) -> None:
    queue, taker = KINDS[kind](), Taker(2)
    publish(queue, several())
    assert queue.byte_count == weight_of(several())
    queue.add(taker)
    assert queue.byte_count == weight_of(several()) - weight_of(message for _, message, _ in taker.taken)
    queue.requeue([(position, message) for position, message, _ in taker.taken])
    assert queue.byte_count == weight_of(several())
    assert queue.take() is not None
    taker.credit = 100
    queue.dispatch()
    assert queue.byte_count == 0
    publish(queue, [Message(amqp_address("", "q"), b"x", PropertySet("amqp091", bytes(9)), expires=1.0)])
    queue.dispatch()
    assert queue.byte_count == 0
    taker.credit = 0
    publish(queue, several())
    queue.purge()
    assert queue.byte_count == 0


@pytest.mark.parametrize("kind", KINDS)
def test_properties_fill_a_queue(kind: str) -> None:
    queue = KINDS[kind]()
    queue.bytes_max = 3 * RAW
    for _ in range(3):
        source = publish(queue, [described(RAW)])
    assert source.held == []
    assert publish(queue, [described(RAW)]).held != []
    for _ in range(5):
        source = publish(queue, [described(RAW)])
    assert source.outcomes != [ACCEPTED]


def limited(byte_count: int, **more: Value) -> AmqpQueue:
    return Host().make("q", ("x-max-length-bytes", integer(byte_count)), *more.items())


def test_a_length_in_bytes_is_of_bodies_as_it_is_in_rabbitmq() -> None:
    queue = limited(30)
    for _ in range(4):
        publish(queue, [described(RAW, b"x" * 10)])
    assert (len(queue), queue.body_byte_count) == (3, 30)
    taken = queue.take()
    assert taken is not None
    assert queue.body_byte_count == 20
    queue.requeue([taken[:2]])
    publish(queue, [described(RAW, b"x" * 10)])
    assert (len(queue), queue.body_byte_count) == (3, 30)
    assert queue.purge() == 3
    assert (queue.byte_count, queue.body_byte_count) == (0, 0)


def ranked(priority: int, body: bytes = b"", *, expires: float = 0.0) -> Message:
    """A message with a priority and RAW bytes of other properties, as an AMQP client publishes it."""
    headers = (("pad", string("x" * RAW)),)
    raw = encode_basic_properties(BasicProperties(priority=priority, headers=headers))
    return Message(amqp_address("", "q"), body, content_properties(raw), expires=expires)


@pytest.mark.parametrize("kind", ["classic", "quorum", "priorities"])
def test_a_length_in_bytes_lifts_no_other_limit(kind: str) -> None:
    more = {"quorum": ("x-queue-type", string("quorum")), "priorities": ("x-max-priority", integer(5))}
    arguments = ("x-max-length-bytes", integer(1 << 30)), *([more[kind]] if kind in more else [])
    queue = Host().declare_queue(
        "q", None, durable=True, exclusive=False, auto_delete=False, arguments=arguments
    )
    queue.bytes_max = 3 * RAW
    for priority in range(3):
        source = publish(queue, [ranked(priority)])
    assert source.held == []
    assert queue.in_memory == queue.byte_count == 3 * ranked(0).byte_count
    assert publish(queue, [ranked(1)]).held != []
    for _ in range(5):
        source = publish(queue, [ranked(1)])
    assert source.outcomes != [ACCEPTED]


@pytest.mark.parametrize("priorities", [False, True])
def test_bodies_are_counted_through_priorities_expiry_and_refusal(priorities: bool) -> None:
    more = {"x-max-priority": integer(5)} if priorities else {}
    queue = limited(30, **{"x-overflow": string("reject-publish"), **more})
    for at in range(3):
        publish(queue, [ranked(at % 2, b"x" * 10, expires=1.0 if at == 0 else 0.0)])
        queue.settle_head()
    assert (len(queue), queue.body_byte_count) == (2, 20)
    assert publish(queue, [ranked(1, b"x" * 10)]).outcomes == [ACCEPTED]
    assert publish(queue, [ranked(1, b"x")]).outcomes != [ACCEPTED]
    assert publish(queue, [ranked(0)]).outcomes == [ACCEPTED]  # has no body
    assert (len(queue), queue.body_byte_count) == (4, 30)
    taker = Taker()
    queue.add(taker)
    assert (len(taker.taken), queue.byte_count, queue.body_byte_count) == (4, 0, 0)
    queue.requeue([(position, message) for position, message, _ in taker.taken])
    assert queue.body_byte_count == 30


def keep_limited(queues: list[AmqpQueue], store: Store) -> None:
    """Put a durable queue with a limit in bytes, and 2 messages in memory, in the place of an earlier one."""
    given = (("x-max-length-bytes", integer(10_000)),)
    options = queue_arguments(given, "queue 'q'")
    queues[:] = [AmqpQueue("q", Host(), durable=True, auto_delete=False, arguments=given, options=options)]
    QueueStorage(queues[0], store, store.log("queue", "q"), MemoryLimits(2, 1 << 20))


def test_it_is_of_bodies_after_a_restart_too(tmp_path: Path) -> None:
    queues: list[AmqpQueue] = []
    weight = described(RAW, b"x" * 10).byte_count
    with Opened(tmp_path, before=partial(keep_limited, queues)) as one:
        (queue,) = queues
        source = publish(queue, [described(RAW, b"x" * 10) for _ in range(7)])
        one.commit()
        assert source.outcomes == [ACCEPTED] * 7
        publish(queue, [described(RAW, b"x" * 10) for _ in range(2)])  # on disk alone
        one.commit()
        assert (len(queue), queue.byte_count, queue.body_byte_count) == (9, 9 * weight, 90)
        assert queue.in_memory == 7 * weight
        taker = Taker(3)
        queue.add(taker)
        queue.acknowledged([position for position, _, _ in taker.taken[1:]])
        queue.remove(taker)
        one.commit()
        assert queue.body_byte_count == 60
    with Opened(tmp_path, before=partial(keep_limited, queues)) as one:
        (queue,) = queues
        assert (len(queue), queue.body_byte_count) == (7, 70)
        taker = Taker()
        queue.add(taker)
        while len(taker.taken) < 7:
            one.commit()  # what was asked for is read
        assert (len(queue), queue.byte_count, queue.body_byte_count) == (0, 0, 0)


def test_bodies_that_the_disk_has_lost_count_no_longer(tmp_path: Path) -> None:
    queues: list[AmqpQueue] = []
    with Opened(tmp_path, before=partial(keep_limited, queues)) as one:
        (queue,) = queues
        publish(queue, [described(RAW, b"x" * 10) for _ in range(5)])
        one.commit()
    with Opened(tmp_path, before=partial(keep_limited, queues)) as one:
        (queue,) = queues
        assert isinstance(queue.storage, QueueStorage)
        one.store.settle(queue.storage.log, (3,))  # unknown to the queue
        one.commit()
        queue.dispatch()
        one.until(lambda: not queue.loading)
        assert (queue.byte_count, queue.body_byte_count) == (4 * described(RAW, b"x" * 10).byte_count, 40)


def test_bodies_that_the_disk_refuses_do_not_count(tmp_path: Path) -> None:
    queues: list[AmqpQueue] = []
    disk = Disk()
    factory = disk.factory()
    with Opened(tmp_path, before=partial(keep_limited, queues), factory=factory) as one:
        (queue,) = queues
        publish(queue, [described(RAW, b"x" * 10) for _ in range(3)])
        one.commit()
        assert (queue.body_byte_count, queue.full) == (30, False)
        disk.fault = "disk is full"
        publish(queue, [described(RAW, b"x" * 10)])
        assert one.commit() is not ACCEPTED
        assert (len(queue), queue.body_byte_count) == (3, 30)
        disk.fault = ""
        one.until_healthy(True)


def test_a_queue_on_disk(tmp_path: Path) -> None:
    def keep(store: Store) -> None:
        nonlocal queue
        queue = Queue("q", durable=True)
        QueueStorage(queue, store, store.log("queue", "q"), MemoryLimits(2, 1 << 20))

    queue: Queue
    with Opened(tmp_path, before=keep) as one:
        publish(queue, several())
        publish(queue, several())
        assert one.store.figures.pending_bytes == weight_of([*several(), *several()])
        one.commit()
        assert one.store.figures.pending_bytes == 0
        assert queue.byte_count == weight_of([*several(), *several()])
    with Opened(tmp_path, before=keep) as one:
        assert queue.byte_count == weight_of([*several(), *several()])
        taker = Taker()
        queue.add(taker)
        while len(taker.taken) < 10:
            one.commit()  # what was asked for is read
        assert queue.byte_count == 0


# A store of an earlier version, which counted no addresses.


def earlier(key: int, body: bytes = b"x" * 10, expires: float = 0.0, qos: int = 1) -> Message:
    """A message with a topic of 60 000 bytes, and with the weight that an earlier version gave it."""
    address = topic_address(f"a/{key}/" + "x" * 60_000)
    message = Message(address, body, assurance=qos, durable=True, expires=expires)
    message.byte_count -= address.excess_bytes
    return message


def weight_earlier(count: int) -> int:
    return count * (10 + MESSAGE_BYTES)


@pytest.mark.parametrize("bodies_limited", [False, True], ids=["plain", "limited"])
def test_a_queue_of_an_earlier_version_drains_to_nothing(tmp_path: Path, bodies_limited: bool) -> None:
    """The size is never negative, although messages of which the store knows less weight leave the queue."""

    def keep(store: Store) -> None:
        queues[:] = [limited(1 << 30) if bodies_limited else Host().make("q")]
        QueueStorage(queues[0], store, store.log("queue", "q"), MemoryLimits(2, 1 << 20))

    queues: list[AmqpQueue] = []
    count = 200
    with Opened(tmp_path, before=keep) as one:
        publish(queues[0], [earlier(at) for at in range(count)])
        one.commit()
        assert queues[0].byte_count == weight_earlier(count)
    with Opened(tmp_path, before=keep) as one:
        (queue,) = queues
        assert (len(queue), queue.byte_count) == (count, weight_earlier(count))
        if not bodies_limited:  # it is known how many bodies are there
            count -= 1
            one.store.settle(one.store.log("queue", "q"), (count,))  # unknown: it looks as if there were more
        taker, sizes = Taker(0), {queue.byte_count}
        queue.add(taker)
        while len(taker.taken) < count:
            taker.credit = 7
            queue.dispatch()
            one.commit()  # what was asked for is read
            assert not [line for line in drift_report([queue]) if line.startswith("bytes")]
            sizes.add(queue.byte_count)
            sizes.add(queue.in_memory)
        assert min(sizes) == queue.byte_count == queue.body_byte_count == 0
        queue.requeue([(position, message) for position, message, _ in taker.taken])
        assert queue.byte_count == weight_of(message for _, message, _ in taker.taken)
        queue.purge()


@pytest.mark.parametrize("expired", [False, True], ids=["received", "expired"])
def test_a_session_of_an_earlier_version_drains_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expired: bool
) -> None:
    def restore(store: Store) -> None:
        nonlocal space
        space = Space(store=store)

    space: Space
    count = 100
    now = [1e9]
    monkeypatch.setattr(clock, "utc", lambda: now[0])
    expires = now[0] + 60 if expired else 0.0
    with Opened(tmp_path, before=restore) as one:
        session = space.session("c", "#", qos=1)
        connected(session)
        session.detach()
        space.give(*[earlier(at, expires=expires) for at in range(count)])
        one.commit()
    with Opened(tmp_path, before=restore) as one:
        session = space.session("c", "#", qos=1)
        assert isinstance(session, DurableSession)
        assert (len(session), session._byte_count) == (count, weight_earlier(count))
        sizes = {session._byte_count}
        if expired:
            now[0] += 61
            session.drop_expired()
            while len(session):
                one.commit()
                sizes.add(session._byte_count)
        else:
            count -= 1
            one.store.settle(session.log, (count,))  # unknown: it looks as if there were more
            outlet, done = connected(session, 5), 0
            while done < count:
                one.commit()
                for row in outlet.rows[done:]:
                    done += 1
                    assert session.complete_delivery(row.packet_id)
                    sizes.add(session._byte_count)
                session.pump()
        assert min(sizes) == session._byte_count == 0


# MQTT.


def owed(byte_count: int = RAW, qos: int = 1) -> Message:
    return Message(
        topic_address("a"), b"x", PropertySet("mqtt", bytes(byte_count), lambda raw: Properties()), qos
    )


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("kept", [False, True])
def test_a_session_counts_what_is_in_flight_too(tmp_path: Path, qos: int, kept: bool) -> None:
    def restore(store: Store) -> None:
        nonlocal space
        space = Space(store=store if kept else None)

    space: Space
    with Opened(tmp_path, before=restore) as one:
        session = space.session("c", "a", qos=2)
        outlet = connected(session, 3)
        space.give(*[owed(qos=qos) for _ in range(5)])
        if kept:
            one.commit()
        flying = 0 if not qos else 5
        assert session._byte_count == flying * owed().byte_count
        done: set[int] = set()
        while len(done) < flying:
            for row in outlet.rows:
                if row.packet_id not in done:
                    done.add(row.packet_id)
                    if qos == 2:
                        assert session.handle_pubrec(row.packet_id)
                    assert session.complete_delivery(row.packet_id)
            session.pump()
            if kept:
                one.commit()
        assert session._byte_count == 0


def test_a_client_that_acknowledges_nothing_stops_its_publishers_and_lets_them_go_on() -> None:
    space = Space(SessionLimits(bytes_max=3 * RAW))
    session = space.session("c", "a")
    outlet = connected(session)
    source = space.give(*[owed() for _ in range(4)])
    assert len(outlet.rows) == 4
    assert source.held != []
    for row in outlet.rows[:2]:
        session.complete_delivery(row.packet_id)
    assert source.released == 0
    for row in outlet.rows[2:]:
        session.complete_delivery(row.packet_id)
    assert source.released == len(source.held)


def test_what_is_retained() -> None:
    retained = RetainedTopics(bytes_max=3 * RAW + 3 * MESSAGE_BYTES)
    for topic in "abcd":
        retained.set_retained(
            Message(topic_address(topic), b"x", PropertySet("mqtt", bytes(RAW - 1)), retain=True)
        )
    assert (len(retained), retained.refused) == (3, 1)
    for topic in "abc":
        retained.set_retained(Message(topic_address(topic), b"", retain=True))
    assert retained.byte_count == 0


# Dead letters.


def test_dead_letters_are_bounded_by_their_properties() -> None:
    letters = DeadLetters(bytes_max=10 * RAW)
    for _ in range(195):
        letters.add([described(RAW)], "", LOST)
    assert len(letters) <= 10
    assert 8 * RAW < letters.byte_count <= 10 * RAW
    ids: list[str] = []
    letters.ids(None, ids.extend)
    letters.delete(ids)
    assert letters.byte_count == 0


def test_dead_letters_on_disk_are_too(tmp_path: Path) -> None:
    with Opened(tmp_path, letters_bytes_max=10 * RAW) as one:
        letters = DeadLetters(store=one.store)
        for _ in range(50):
            letters.add([described(RAW)], "", LOST)
        one.commit()
        assert 8 * RAW < letters.byte_count <= 10 * RAW


def test_nothing_is_pending_when_all_is_written(tmp_path: Path) -> None:
    with Opened(tmp_path) as one:
        one.store.append(one.store.log("queue", "q"), 0, several(), accepted)
        assert one.store.figures.pending_bytes == weight_of(several())
        one.commit()
        assert one.store.figures.pending_bytes == 0
