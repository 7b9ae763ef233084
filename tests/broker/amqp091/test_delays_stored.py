"""Delayed messages and dead letters on disk: each is stored once at every moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.broker.amqp091.dead_letter_routing import BURIED_MAX, EXPIRED_MAX
from gateway.broker.amqp091.definitions import Definitions
from gateway.broker.amqp091.delays import RETRY_SECS, DelayedMessages
from gateway.broker.amqp091.queue import AmqpQueue
from gateway.broker.amqp091.virtual_host import VirtualHost
from gateway.broker.bodies import SpooledBodies
from gateway.broker.queue import Queue
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.model.properties import Value, string
from gateway.model.shares import NO_LIMIT
from gateway.protocols.amqp091.codec import BasicProperties, encode_basic_properties
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.translate import content_properties
from gateway.settings.limits import Limits
from gateway.store.database import Stored
from gateway.store.store import Store
from tests.broker.amqp091.parts import NONE, integer
from tests.broker.amqp091.test_delays import Time
from tests.broker.parts import SENDER, publish
from tests.store.parts import Disk, Opened, numbered

FAULT = "disk I/O error"
TURNS_MAX = 100


def native(body: bytes, delay_ms: int | None = None) -> Message:
    headers = () if delay_ms is None else (("x-delay", integer(delay_ms)),)
    properties = content_properties(
        encode_basic_properties(BasicProperties(delivery_mode=2, headers=headers))
    )
    return Message(amqp_address("d", "k"), body, properties, assurance=1, durable=True, sender=SENDER)


class Scene:
    """A virtual host in a store whose disk can fail. Its exchange `d` delays messages for queue `q`."""

    def __init__(self, folder: Path, time: Time) -> None:
        self.time = time
        self.disk = Disk()
        self.lost: list[tuple[bytes, Outcome]] = []
        self.opened = Opened(folder, before=self._create, factory=self.disk.factory())
        arguments = (("x-delayed-type", string("direct")),)
        exchange = self.host.declare_exchange(
            "d", "x-delayed-message", durable=True, auto_delete=False, internal=False, arguments=arguments
        )
        assert exchange.delayed is not None
        self.delayed: DelayedMessages = exchange.delayed
        self.q = self.queue("q")
        self.host.bind("d", self.q, "k", NONE)

    def _create(self, store: Store) -> None:
        definitions = Definitions(store, "/", SpooledBodies(Limits(), store), Limits())
        self.host = VirtualHost("/", lambda: None, definitions=definitions, lost=self._note_lost)

    def _note_lost(self, messages: list[Message], outcome: Outcome) -> None:
        self.lost += [(message.body, outcome) for message in messages]

    def queue(self, name: str, *arguments: tuple[str, Value], durable: bool = True) -> AmqpQueue:
        return self.host.declare_queue(
            name, None, durable=durable, exclusive=False, auto_delete=False, arguments=arguments
        )

    def dying(self) -> AmqpQueue:
        """Return a queue whose messages expire after a second and go to `q`."""
        return self.queue(
            "dying",
            ("x-message-ttl", integer(1_000)),
            ("x-dead-letter-exchange", string("")),
            ("x-dead-letter-routing-key", string("q")),
        )

    def store(self, queue: Queue, *bodies: bytes) -> None:
        """Publish messages with a delay of a second to a queue, and wait until they are on disk."""
        answers = publish(queue, [native(body, 1_000) for body in bodies])
        self.opened.until(lambda: len(answers.outcomes) == len(bodies))
        assert set(answers.outcomes) == {ACCEPTED}

    def advance(self, secs: float = 0.0) -> None:
        """Advance the clock, ring what is due, and end the wake-up."""
        self.time.advance(secs, self.host)
        self.opened.commit()

    def on_disk(self) -> list[bytes]:
        """Return the bodies of all messages that a process would find that started now."""
        found: list[bytes] = []
        for log in self.opened.store.logs():
            found += [body for _, body in self.opened.read_from(log, 0, NO_LIMIT)]
        return sorted(found)

    def taken(self) -> list[bytes]:
        found = []
        while (row := self.q.take()) is not None:
            found.append(row[1].body)
        return found


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    one = Scene(tmp_path, Time(monkeypatch))
    with one.opened:
        yield one


def turns_until_all_are_in(scene: Scene, bodies: list[bytes]) -> None:
    """Ring the alarms one by one; after each wake-up every message is stored in one log, and in no other."""
    scene.advance(1)
    for _ in range(TURNS_MAX):
        assert scene.on_disk() == sorted(bodies)
        if len(scene.q) == len(bodies):
            return
        scene.advance()
    raise AssertionError(f"only {len(scene.q)} of {len(bodies)} came")


def test_many_due_messages_are_each_stored_once_after_every_turn(scene: Scene) -> None:
    bodies = numbered(0, 3 * EXPIRED_MAX)
    scene.store(scene.delayed, *bodies)
    turns_until_all_are_in(scene, bodies)
    assert scene.taken() == bodies


def test_many_that_expire_are_each_stored_once_after_every_turn(scene: Scene) -> None:
    bodies = numbered(0, 3 * EXPIRED_MAX)
    scene.store(scene.dying(), *bodies)
    turns_until_all_are_in(scene, bodies)


def test_due_messages_do_not_wait_for_the_dead_letters_of_others(scene: Scene) -> None:
    dead, due = numbered(0, 2 * EXPIRED_MAX), [b"due %d" % at for at in range(EXPIRED_MAX)]
    scene.store(scene.dying(), *dead)
    scene.store(scene.delayed, *due)
    turns_until_all_are_in(scene, dead + due)


def test_a_dropped_message_without_a_dead_letter_is_settled_while_others_wait(scene: Scene) -> None:
    short = scene.queue("short", ("x-message-ttl", integer(1_000)))
    scene.store(short, b"dropped")
    bodies = numbered(0, EXPIRED_MAX)
    scene.store(scene.delayed, *bodies)
    scene.advance(1)
    short.settle_head()
    assert scene.host.dead_lettering.has_unsent
    assert scene.on_disk() == sorted(bodies)


def test_due_messages_that_the_disk_refuses_wait_until_it_works_again(scene: Scene) -> None:
    scene.store(scene.delayed, b"1", b"2")
    scene.disk.fault = FAULT
    scene.advance(1)
    scene.opened.until_healthy(False)
    for _ in range(3):
        scene.advance(RETRY_SECS)
    assert (len(scene.delayed), scene.lost, scene.taken()) == (2, [], [])
    scene.disk.fault = ""
    scene.opened.until(lambda: scene.opened.store.healthy)
    assert scene.on_disk() == [b"1", b"2"]
    scene.advance(RETRY_SECS)
    assert scene.on_disk() == [b"1", b"2"]
    assert (len(scene.delayed), scene.delayed.byte_count, scene.lost) == (0, 0, [])
    assert scene.taken() == [b"1", b"2"]


def test_due_messages_beyond_one_turn_wait_for_the_disk_as_well(scene: Scene) -> None:
    bodies = numbered(0, 2 * EXPIRED_MAX)
    scene.store(scene.delayed, *bodies)
    scene.disk.fault = FAULT
    scene.advance(1)
    scene.opened.until_healthy(False)
    for _ in range(20):
        scene.advance()
    scene.disk.fault = ""
    scene.opened.until(lambda: scene.opened.store.healthy)
    scene.advance(RETRY_SECS)
    turns_until_all_are_in(scene, bodies)
    assert scene.lost == []


def test_a_due_message_that_the_disk_refuses_is_in_the_next_process(scene: Scene, tmp_path: Path) -> None:
    """The failing disk takes nothing until the end, not even what is settled."""
    scene.store(scene.delayed, b"1")
    scene.disk.fault = FAULT
    scene.advance(1)
    scene.opened.until_healthy(False)
    scene.opened.store.close()
    scene.disk.fault = ""
    again = Opened(tmp_path)
    with again:
        (log,) = [one for one in again.store.logs() if one.kind == "delayed"]
        assert [body for _, body in again.read_from(log, 0, 10)] == [b"1"]


def test_a_refused_message_of_a_deleted_exchange_is_a_dead_letter(scene: Scene) -> None:
    scene.store(scene.delayed, b"1")
    scene.disk.fault = FAULT
    scene.time.advance(1, scene.host)
    scene.host.delete_exchange("d", if_unused=False)
    scene.opened.commit()
    assert [(body, outcome.reason.value) for body, outcome in scene.lost] == [(b"1", "store")]


def test_due_messages_for_a_queue_in_memory_leave_the_disk_at_once(scene: Scene) -> None:
    passing = scene.queue("passing", durable=False)
    scene.host.unbind("d", scene.q, "k", NONE)
    scene.host.bind("d", passing, "k", NONE)
    bodies = numbered(0, 2 * EXPIRED_MAX)
    scene.store(scene.delayed, *bodies)
    scene.advance(1)
    for _ in range(TURNS_MAX):
        assert len(scene.on_disk()) + len(passing) == len(bodies)
        if len(passing) == len(bodies):
            return
        scene.advance()
    raise AssertionError(f"only {len(passing)} of {len(bodies)} came")


def test_unroutable_due_messages_leave_the_disk_as_dead_letters(scene: Scene) -> None:
    scene.host.unbind("d", scene.q, "k", NONE)
    scene.store(scene.delayed, b"1", b"2")
    scene.advance(1)
    assert scene.on_disk() == []
    assert [body for body, _ in scene.lost] == [b"1", b"2"]


@pytest.mark.parametrize("fresh", [0, 2])
def test_a_purge_leaves_what_waits_to_become_a_dead_letter(scene: Scene, fresh: int) -> None:
    """It has left the queue; after a kill it would be neither here nor there."""
    dying = scene.dying()
    bodies = numbered(0, BURIED_MAX + 100)
    scene.store(dying, *bodies)
    scene.time.advance(2.0, scene.host)
    assert scene.host.dead_lettering.has_unsent
    if fresh:
        scene.store(dying, *[b"fresh"] * fresh)
    assert dying.purge() == fresh
    scene.opened.commit()
    assert scene.on_disk() == sorted(bodies)
    while scene.host.dead_lettering.has_unsent:
        scene.advance()
    assert scene.on_disk() == sorted(bodies)
    assert scene.taken() == bodies


# Dead letters and a disk that fails.

Arguments = tuple[tuple[str, Value], ...]
Die = Callable[[Scene, AmqpQueue], None]
TO_Q: Arguments = (("x-dead-letter-exchange", string("")), ("x-dead-letter-routing-key", string("q")))


def fetched(queue: AmqpQueue) -> list[tuple[int, Message]]:
    return [row[:2] for _ in range(len(queue)) if (row := queue.take()) is not None]


def expire(scene: Scene, queue: AmqpQueue) -> None:
    scene.time.advance(2, scene.host)


def reject(scene: Scene, queue: AmqpQueue) -> None:
    for position, message in fetched(queue):
        queue.reject(position, message)
    queue.dispatch()


def overflow(scene: Scene, queue: AmqpQueue) -> None:
    publish(queue, [in_memory(b"new 1"), in_memory(b"new 2")])


def return_too_often(scene: Scene, queue: AmqpQueue) -> None:
    queue.requeue(fetched(queue))
    queue.dispatch()


DEATHS: list[tuple[Die, Arguments]] = [
    (expire, (("x-message-ttl", integer(1_000)),)),
    (reject, ()),
    (overflow, (("x-max-length", integer(2)),)),
    (return_too_often, (("x-queue-type", string("quorum")), ("x-delivery-limit", integer(0)))),
]


def in_memory(body: bytes) -> Message:
    message = native(body)
    return Message(message.address, body, message.property_set, assurance=1, sender=SENDER)


def fail(scene: Scene, *, is_known: bool) -> None:
    scene.disk.fault = FAULT
    if is_known:
        scene.opened.store.put("x", "y", b"")
        scene.opened.commit()
        scene.opened.until_healthy(False)
        scene.opened.commit()


def repair(scene: Scene) -> None:
    scene.disk.fault = ""
    scene.opened.until(lambda: scene.opened.store.healthy)


@pytest.mark.parametrize(("die", "arguments"), DEATHS)
@pytest.mark.parametrize("is_known", [False, True])
def test_dead_letters_that_the_disk_refuses_wait_until_it_works_again(
    scene: Scene, die: Die, arguments: Arguments, is_known: bool
) -> None:
    dying = scene.queue("dying", *arguments, *TO_Q)
    scene.store(dying, b"1", b"2")
    fail(scene, is_known=is_known)
    die(scene, dying)
    scene.opened.commit()
    scene.opened.until_healthy(False)
    for _ in range(3):
        scene.advance(RETRY_SECS)
    assert (scene.lost, scene.taken()) == ([], [])
    repair(scene)
    assert scene.on_disk() == [b"1", b"2"]
    scene.advance(RETRY_SECS)
    assert scene.on_disk() == [b"1", b"2"]
    assert (scene.taken(), scene.lost, dying.awaiting_dead_letters) == ([b"1", b"2"], [], 0)


def test_dead_letters_in_memory_do_not_wait_for_the_disk(scene: Scene) -> None:
    dying = scene.queue("dying", ("x-message-ttl", integer(1_000)), *TO_Q, durable=False)
    publish(dying, [in_memory(b"1")])
    fail(scene, is_known=True)
    expire(scene, dying)
    assert scene.taken() == [b"1"]
    repair(scene)


def test_a_queue_whose_dead_letters_wait_for_the_disk_checks_it_now_and_then(scene: Scene) -> None:
    dying = scene.dying()
    scene.store(dying, b"1")
    fail(scene, is_known=True)
    scene.time.advance(2, scene.host)
    assert scene.host.alarms.next_due == scene.time.utc + RETRY_SECS
    assert (len(dying), dying.take()) == (1, None)
    repair(scene)


@pytest.mark.parametrize("delayed", [False, True])
def test_a_message_whose_copy_one_queue_refuses_stays_until_that_copy_is_a_dead_letter(
    scene: Scene, delayed: bool
) -> None:
    """Of two queues one is full. A crash after the commit of the other copy must not lose the refused one."""
    full = scene.queue("full", ("x-max-length", integer(0)), ("x-overflow", string("reject-publish")))
    scene.host.bind("d" if delayed else "amq.fanout", full, "k", NONE)
    scene.host.bind("amq.fanout", scene.q, "k", NONE)
    dying = scene.queue(
        "dying", ("x-message-ttl", integer(1_000)), ("x-dead-letter-exchange", string("amq.fanout"))
    )
    scene.store(scene.delayed if delayed else dying, b"1")
    on_disk: list[list[Stored]] = []
    name = '["/", "d"]' if delayed else '["/", "dying"]'
    (log,) = [log for log in scene.opened.store.logs() if log.name == name]
    scene.time.advance(2, scene.host)
    scene.opened.store.read_from(log, 0, on_disk.append, messages_max=9, bytes_max=NO_LIMIT)
    assert scene.lost == []
    scene.opened.until(lambda: on_disk)
    assert [len(found) for found in on_disk] == [1]
    scene.opened.commit()
    assert [body for body, _ in scene.lost] == [b"1"]
    assert scene.on_disk() == [b"1"]
    assert scene.taken() == [b"1"]


def test_stored_messages_count_for_their_sender_before_a_client_can_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Time(monkeypatch)
    before = Scene(tmp_path, time)
    with before.opened:
        before.store(before.delayed, *numbered(0, 9_000))
    after = Scene(tmp_path, time)
    with after.opened:
        shares = after.delayed._shares
        assert (shares.count_of(SENDER.user), shares.total) == (9_000, before.delayed.byte_count)
        assert (len(after.delayed), after.delayed.byte_count) == (9_000, before.delayed.byte_count)
        after.advance(1)
        while len(after.q) < 9_000:
            after.advance()
        assert after.on_disk() == sorted(numbered(0, 9_000))
        assert (len(after.delayed), after.delayed.byte_count, shares.count) == (0, 0, 0)
