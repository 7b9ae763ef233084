"""Repeats: accepted without being passed on, but never before the first was; bounded; known after a crash."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.broker.dead_letters import DeadLetters
from gateway.broker.deduplication import Deduplication
from gateway.broker.dispatcher import Dispatcher, DispatcherServices
from gateway.broker.queue import Queue
from gateway.broker.storage import MemoryLimits, QueueStorage
from gateway.mapping import parse
from gateway.mapping.router import Router
from gateway.model.batch import Batch, SubBatch
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.properties import NO_PROPERTIES, Properties, PropertySet, property_set
from gateway.model.times import Monotonic
from gateway.store.store import Store
from tests.broker.parts import SENDER, Answers, mqtt, newest, unreadable
from tests.store.journal.samples import until
from tests.store.parts import Disk, Opened

DOWN = Outcome(Verdict.RELEASED, Reason.TARGET_DOWN)
REFUSED = Outcome(Verdict.REJECTED, Reason.TARGET_REFUSED)

pytestmark = pytest.mark.ids_alone


def mapping(options: str = "window: 10m", more: str = "", target: str = "erp") -> Router:
    text = f"""
version: 1
routes:
  - {{name: once, from: {{endpoint: mqtt, topic: "#"}}, to: {{endpoint: {target}, exchange: e}},
     deduplicate: {{{options}}}{more}}}
"""
    return Router([parse(text, "t.yaml")], {"mqtt": "mqtt", "erp": "amqp091", "here": "amqp091"})


class Target:
    """A namespace with as many sinks as it is told, which are all this one."""

    def __init__(self, sinks: int = 1) -> None:
        self.parts: list[SubBatch] = []
        self.at_once: Outcome | None = None
        self.others = [Target(0) for _ in range(sinks - 1)] if sinks else []
        self.count = sinks

    def sinks(self, address: object) -> tuple[Target, ...]:
        return (self, *self.others) if self.count else ()

    def choose(self, message: Message) -> tuple[Target, ...]:
        raise AssertionError("the address decides")

    @property
    def retained(self) -> None:
        """Nothing is."""

    def publish(self, part: SubBatch) -> None:
        self.parts.append(part)
        if self.at_once is not None:
            part.settle(self.at_once)

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for part in self.parts for message in part.messages]

    def settle(self, outcome: Outcome = ACCEPTED) -> None:
        parts, self.parts = self.parts, []
        for part in parts:
            part.settle(outcome)


class Bench:
    def __init__(
        self,
        router: Router | None = None,
        folder: Path | None = None,
        target: Target | None = None,
        **more: Any,
    ) -> None:
        self.router = router or mapping()
        self.folder = folder
        self.more = more
        self.target = target or Target()
        self.utc = 1_000.0
        self.one: Opened | None = None
        self.open()

    def open(self) -> None:
        if self.folder is None:
            self._make(None)
        else:
            self.one = Opened(self.folder, before=self._make, **self.more)

    def _make(self, store: Store | None) -> None:
        self.ids = Deduplication(store, lambda: self.utc)
        self.letters = DeadLetters()
        self.dispatcher = Dispatcher(
            self.router,
            self.letters,
            DispatcherServices(
                self.ids,
                links={"erp"},
                namespaces={"mqtt": Target(0), "erp": self.target, "here": self.target},
            ),
        )

    def restart(self) -> None:
        assert self.one is not None
        self.one.store.close()
        self.target.parts.clear()
        self.open()

    def publish(
        self, *rows: tuple[str | None, bytes], sets: PropertySet | None = None, user: str = ""
    ) -> Answers:
        """(message id, body) each; receipts are bodies."""
        source = Answers()
        batch = Batch(source, Monotonic(0.0))
        for id, body in rows:
            said = sets or (NO_PROPERTIES if id is None else property_set(Properties(message_id=id)))
            sender = SENDER._replace(user=user) if user else SENDER
            message = mqtt("a", body, properties=said, sender=sender)
            entry = self.dispatcher.entry("mqtt", self.dispatcher.namespaces["mqtt"], message.address)
            assert self.dispatcher.publish(batch, entry, message, body)
        batch.send()
        return source

    def commit(self) -> None:
        assert self.one is not None
        assert self.one.commit() is ACCEPTED

    @property
    def repeats(self) -> int:
        (route,) = self.dispatcher.router.routes
        return route.duplicates


def verdicts(source: Answers) -> list[str]:
    return [outcome.verdict.name.lower() for outcome in source.outcomes]


def test_a_repeat_is_accepted_and_goes_no_further() -> None:
    bench = Bench()
    first = bench.publish(("1", b"first"), ("2", b"other"))
    assert bench.target.bodies == [b"first", b"other"]
    bench.target.settle()
    assert verdicts(first) == ["accepted"] * 2
    again = bench.publish(("1", b"again"), ("3", b"third"))
    assert bench.target.bodies == [b"third"]
    assert again.told == [(b"again", ACCEPTED)]
    assert bench.repeats == 1
    (route,) = bench.dispatcher.router.routes
    assert (route.matched, route.delivered, route.in_flight) == (4, 2, 1)


def test_a_repeat_of_what_is_not_settled_is_released() -> None:
    bench = Bench()
    first = bench.publish(("1", b"first"), ("1", b"second"))
    assert bench.target.bodies == [b"first"]
    assert (verdicts(first), first.told[0][0]) == (["released"], b"second")
    third = bench.publish(("1", b"third"))
    assert verdicts(third) == ["released"]
    bench.target.settle()
    assert verdicts(first) == ["released", "accepted"]
    assert bench.repeats == 0


@pytest.mark.parametrize("outcome", [DOWN, REFUSED])
def test_what_was_not_accepted_may_come_again(outcome: Outcome) -> None:
    bench = Bench()
    first = bench.publish(("1", b"first"), ("2", b"fine"))
    part = bench.target.parts.pop()
    part.settle_at((0,), outcome)
    part.settle_at((1,))
    assert first.outcomes == [outcome, ACCEPTED]
    bench.publish(("1", b"again"), ("2", b"repeat"))
    assert bench.target.bodies == [b"again"]


def test_messages_without_an_id_always_pass() -> None:
    bench = Bench()
    source = bench.publish((None, b"1"), (None, b"2"), ("", b"3"))
    assert bench.target.bodies == [b"1", b"2", b"3"]
    bench.target.settle()
    assert verdicts(source) == ["accepted"] * 3


def test_a_message_that_cannot_be_read_is_refused_alone() -> None:
    bench = Bench()
    source = bench.publish((None, b"bad"), sets=unreadable())
    assert [outcome.reason for outcome in source.outcomes] == [Reason.MALFORMED]


@pytest.mark.parametrize("restart", [False, True])
def test_a_user_pushes_out_its_own_ids_alone(tmp_path: Path, restart: bool) -> None:
    bench = Bench(mapping("window: 1h, ids_max: 6"), tmp_path if restart else None)
    for number in range(20):
        bench.publish((f"m{number}", b"%d" % number), user="modest" if number < 2 else "greedy")
        bench.target.settle()
    if restart:
        bench.commit()
        bench.restart()
    (ids,) = bench.ids
    assert list(ids.accepted) == ["m0", "m1", "m16", "m17", "m18", "m19"]
    for number in range(20, 40):
        bench.publish((f"m{number}", b"%d" % number), user="greedy")
        bench.target.settle()
    if restart:
        bench.commit()  # nobody knows any more whose the older ones were
        assert list(ids.accepted)[-3:] == ["m37", "m38", "m39"]
    else:
        assert list(ids.accepted) == ["m0", "m1", "m36", "m37", "m38", "m39"]
        assert ids.forgotten == 34
    assert len(ids.accepted) == 6
    if bench.one is not None:
        bench.one.store.close()


def test_an_id_is_forgotten_after_the_window() -> None:
    bench = Bench(mapping("window: 2m"))
    bench.target.at_once = ACCEPTED
    for wait, passed in ((0, 1), (119, 1), (2, 2), (119, 2), (2, 3)):
        bench.utc += wait
        bench.publish(("1", b"x"))
        assert len(bench.target.bodies) == passed
    bench.utc += 121
    bench.ids.tick()
    assert [ids.accepted for ids in bench.ids] == [{}]


def test_the_oldest_ids_are_forgotten_when_there_are_too_many() -> None:
    bench = Bench(mapping("window: 1h, ids_max: 3"))
    bench.target.at_once = ACCEPTED
    for number in range(5):
        bench.publish((str(number), b"%d" % number))
    assert [ids.forgotten for ids in bench.ids] == [2]
    bench.target.parts.clear()
    for number in (4, 3, 2, 1):
        bench.publish((str(number), b"%d" % number))
    assert bench.target.bodies == [b"1"]


def test_a_long_id_is_remembered_by_its_hash() -> None:
    bench = Bench()
    bench.target.at_once = ACCEPTED
    bench.publish(("x" * 60_000, b"1"))
    bench.publish(("x" * 60_000, b"2"), ("x" * 59_999, b"3"))
    assert bench.target.bodies == [b"1", b"3"]
    assert all(len(id) <= 255 for ids in bench.ids for id in ids.accepted)


def test_a_fan_out_is_accepted_when_all_have_it() -> None:
    bench = Bench(mapping(target="here"), target=Target(2))
    source = bench.publish(("1", b"1"))
    bench.target.settle()
    assert verdicts(bench.publish(("1", b"2"))) == ["released"]
    bench.target.others[0].settle()
    assert verdicts(source) == ["accepted"]
    assert verdicts(bench.publish(("1", b"3"))) == ["accepted"]


@pytest.mark.parametrize(
    "more, outcome, letters",
    [
        ("", Reason.NO_ROUTE, 0),
        (", on_reject: dead_letter", Reason.NONE, 1),
    ],
)
def test_a_mandatory_route_without_a_queue_refuses(more: str, outcome: Reason, letters: int) -> None:
    bench = Bench(mapping(more=more, target="here"), target=Target(0))
    source = bench.publish(("1", b"1"))
    assert [one.reason for one in source.outcomes] == [outcome]
    assert len(newest(bench.letters)) == letters
    (route,) = bench.dispatcher.router.routes
    assert route.failed == 1


def test_ids_outlive_a_reload() -> None:
    bench = Bench()
    bench.target.at_once = ACCEPTED
    bench.publish(("1", b"1"))
    bench.dispatcher.use(mapping("window: 5m"))
    bench.publish(("1", b"2"))
    assert bench.target.bodies == [b"1"]


def test_senders_are_held_through_the_guard() -> None:
    bench = Bench()
    source = bench.publish(("1", b"1"))
    part = bench.target.parts[0]
    (release,) = part.batch.source.hold({message.sender for message in part.messages})
    release()
    assert (len(source.held), source.released) == (1, 1)


# With a store.


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(router: Router | None = None, **more: Any) -> Bench:
        bench = Bench(router, tmp_path, **more)
        benches.append(bench)
        return bench

    yield make
    for bench in benches:
        assert bench.one is not None
        bench.one.store.close()


def test_the_source_hears_when_the_id_is_on_disk(stored: Callable[..., Bench]) -> None:
    bench = stored()
    source = bench.publish(("1", b"1"))
    bench.target.settle()
    assert source.told == []
    assert verdicts(bench.publish(("1", b"2"))) == ["released"]
    bench.commit()
    assert verdicts(source) == ["accepted"]


@pytest.mark.parametrize("target", ["erp", "here"])
def test_a_repeat_is_known_after_a_crash(stored: Callable[..., Bench], target: str) -> None:
    bench = stored(mapping("window: 1m", target=target))
    bench.publish(("1", b"1"))
    bench.target.settle()
    bench.commit()
    bench.utc += 50
    bench.restart()
    bench.publish(("1", b"2"))
    assert (bench.target.bodies, bench.repeats) == ([], 1)
    bench.utc += 11
    bench.restart()
    bench.publish(("1", b"3"))
    assert bench.target.bodies == [b"3"]


@pytest.mark.parametrize("target", ["erp", "here"])
def test_an_id_of_a_clock_that_was_ahead_is_forgotten_after_the_window(
    stored: Callable[..., Bench], target: str
) -> None:
    bench = stored(mapping("window: 1m", target=target))
    bench.utc += 8 * 86_400
    bench.publish(("1", b"1"))
    bench.target.settle()
    bench.commit()
    bench.utc -= 8 * 86_400
    bench.restart()
    bench.publish(("1", b"2"))
    assert (bench.target.bodies, bench.repeats) == ([], 1)
    bench.utc += 61
    bench.publish(("1", b"3"))
    assert bench.target.bodies == [b"3"]


@pytest.mark.parametrize("target", ["erp", "here"])
def test_what_was_refused_is_not_known_after_a_crash(stored: Callable[..., Bench], target: str) -> None:
    bench = stored(mapping(target=target))
    bench.publish(("1", b"1"))
    bench.commit()
    bench.target.settle(DOWN)
    bench.commit()
    bench.restart()
    bench.publish(("1", b"2"))
    assert bench.target.bodies == [b"2"]


def test_an_id_whose_window_is_over_is_not_swept_with_the_old_one(stored: Callable[..., Bench]) -> None:
    bench = stored(mapping("window: 1m", target="here"))
    bench.publish(("1", b"1"))
    bench.target.settle()
    bench.utc += 61
    bench.publish(("1", b"2"))
    bench.ids.tick()
    bench.target.settle()
    bench.commit()
    bench.restart()
    bench.publish(("1", b"3"))
    assert bench.target.bodies == []


def test_what_was_forgotten_is_forgotten_on_disk(stored: Callable[..., Bench]) -> None:
    bench = stored(mapping("window: 1h, ids_max: 1"))
    for number in (b"1", b"2"):
        bench.publish((number.decode(), number))
        bench.target.settle()
        bench.commit()
    bench.restart()
    bench.publish(("2", b"2"), ("1", b"1"))
    assert bench.target.bodies == [b"1"]


def test_a_target_of_our_own_has_the_id_in_the_transaction_of_the_message(
    stored: Callable[..., Bench],
) -> None:
    bench = stored(mapping(target="here"))
    bench.publish(("1", b"1"))
    bench.commit()
    bench.restart()
    bench.publish(("1", b"2"))
    assert bench.target.bodies == [], "it was committed, and the source may not have heard"


class Stored(Target):
    """One that writes its messages."""

    bench: Bench

    def publish(self, part: SubBatch) -> None:
        super().publish(part)
        assert self.bench.one is not None
        store = self.bench.one.store
        store.append(store.log("queue", "q"), 0, part.messages, part.settle)


def test_an_id_is_not_stored_when_its_message_was_not(stored: Callable[..., Bench]) -> None:
    """The disk fails for one commit and takes the next; the process ends before it could say more."""
    disk = Disk()
    target = Stored()
    bench = target.bench = stored(mapping(target="here"), target=target, factory=disk.factory())
    assert bench.one is not None
    bench.commit()
    figures = bench.one.store.figures
    disk.fault = "disk is full"
    source = bench.publish(("1", b"1"))
    bench.one.store.put("kind", "key", b"written by the probe")
    bench.one.store.flush()
    until(lambda: figures.failures > 0)
    commits, disk.fault = figures.commits, ""
    until(lambda: figures.commits > commits)
    assert source.told == []
    bench.restart()
    bench.publish(("1", b"1"))
    assert target.bodies == [b"1"]


def test_without_the_disk_new_ids_are_refused_and_known_ones_are_not(stored: Callable[..., Bench]) -> None:
    disk = Disk()
    bench = stored(factory=disk.factory())
    bench.publish(("1", b"1"))
    bench.target.settle()
    bench.commit()
    late = bench.publish(("2", b"2"))
    disk.fault = "disk is full"
    bench.target.settle()
    assert bench.one is not None
    bench.one.commit()
    assert verdicts(late) == ["accepted"], "the target has it, and we know its id"
    bench.one.until_healthy(False)
    source = bench.publish(("1", b"1"), ("2", b"2"), ("3", b"3"), (None, b"4"))
    bench.one.loop.run_until(lambda: len(source.told) == 3)
    reasons = {receipt: outcome.reason for receipt, outcome in source.told}
    assert reasons == {b"1": Reason.NONE, b"2": Reason.NONE, b"3": Reason.STORE}
    assert bench.target.bodies == [b"4"]
    disk.fault = ""
    bench.one.until_healthy(True)
    bench.commit()
    bench.restart()
    bench.publish(("2", b"2"))
    assert bench.target.bodies == []


def test_no_id_is_stored_of_a_message_that_one_of_two_targets_has_refused(tmp_path: Path) -> None:
    """Its source is told when the other target is done: a crash before that must not make it a repeat."""
    target = Target(2)
    bench = Bench(mapping(target="here"), tmp_path, target)
    target.others[0].at_once = DOWN
    first = bench.publish(("1", b"first"))
    bench.commit()
    assert first.outcomes == []
    bench.restart()
    target.others[0].at_once = None
    again = bench.publish(("1", b"again"))
    assert (target.bodies, target.others[0].bodies[-1]) == ([b"again"], b"again")
    for one in (target, target.others[0]):
        one.settle()
    assert verdicts(again) == ["accepted"]
    assert bench.one is not None
    bench.one.store.close()


def test_the_source_s_batch_knows_what_a_target_behind_the_guard_has_refused() -> None:
    target = Target(2)
    bench = Bench(mapping(target="here"), None, target)
    target.others[0].at_once = DOWN
    source = Answers()
    batch = Batch(source, Monotonic(0.0))
    entry = bench.dispatcher.entry("mqtt", bench.dispatcher.namespaces["mqtt"], mqtt("a").address)
    assert bench.dispatcher.publish(batch, entry, mqtt("a", properties=property_set(Properties())), 1)
    batch.send()
    assert (source.outcomes, batch.unaccepted_slots) == ([], [0])
    target.settle()
    assert verdicts(source) == ["released"]


class DurableQueue(Target):
    """A namespace with one durable queue, all of whose messages wait on disk alone."""

    def use(self, store: Store) -> None:
        self.queue = Queue("q")
        QueueStorage(self.queue, store, store.log("queue", "q"), MemoryLimits(0, 0))

    def sinks(self, address: object) -> tuple[Any, ...]:
        return (self.queue,)


@pytest.mark.parametrize("durable", [True, False])
def test_the_id_of_a_message_that_ends_with_the_process_does_so_too(tmp_path: Path, durable: bool) -> None:
    """A transient message on disk alone is accepted late, and is not there after a restart."""
    target = DurableQueue()
    bench = Bench(mapping(target="here"), tmp_path, target)
    assert bench.one is not None
    target.use(bench.one.store)
    source = Answers()
    batch = Batch(source, Monotonic(0.0))
    entry = bench.dispatcher.entry("mqtt", bench.dispatcher.namespaces["mqtt"], mqtt("a").address)
    message = mqtt("a", qos=int(durable), properties=property_set(Properties(message_id="1")))
    bench.dispatcher.publish(batch, entry, message, 1)
    batch.send()
    assert (source.outcomes, batch.unaccepted_slots) == ([], [] if durable else [0])
    bench.commit()
    assert source.outcomes == [ACCEPTED]
    bench.commit()
    bench.restart()
    assert [list(ids.accepted) for ids in bench.ids] == ([["1"]] if durable else [])
    assert bench.one is not None
    bench.one.store.close()
