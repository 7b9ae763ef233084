"""What replicas make of the log's records of sessions: the same, however late they are."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from gateway.engine.envelope import Number
from gateway.engine.once import CHUNK
from gateway.engine.records import (
    Changed,
    Ended,
    Freed,
    Gone,
    Inherited,
    Left,
    Mark,
    Opened,
    Owner,
    Record,
    Willed,
    WillSaid,
)
from gateway.engine.table import ENDED_MAX, Arrival, SessionState, SessionTable
from gateway.store.store import Store

RECENT_CHUNKS = 3
WILL = WillSaid("a/b", b"x", 1, False, b"", 5, "mqtt", "user", "")


class Heard:
    """What a table has told."""

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.letting: list[Owner] = []
        self.freed: list[Owner] = []
        self.over: list[str] = []
        self.dead: list[str] = []

    def came(self, record: Opened, arrival: Arrival) -> None:
        self.arrivals.append(arrival)

    def letting_go(self, client: str, owner: Owner) -> None:
        self.letting.append(owner)

    def let_go(self, client: str, owner: Owner, given_back: Sequence[int]) -> None:
        self.freed.append(owner)

    def is_over(self, state: SessionState, record: Record) -> None:
        self.over.append(state.client)

    def buried(self, life: str) -> None:
        self.dead.append(life)


class Log:
    """A log with a table that follows it."""

    def __init__(self, store: Store | None = None) -> None:
        self.heard = Heard()
        self.now = 0.0
        self.table = SessionTable("ns", self.heard, store, lambda: self.now, time.time, RECENT_CHUNKS)
        self.offset = 0

    def say(self, *records: Record) -> list[bool]:
        found = []
        for record in records:
            self.offset += 1
            found.append(self.table.apply(record, self.offset))
        return found

    def state(self, client: str = "c") -> SessionState:
        return self.table.states[client]


def opened(
    life: str = "one",
    number: int = 1,
    *,
    clean: bool = False,
    secs: float = 60.0,
    utc: float = 1000.0,
    will: WillSaid | None = None,
    user: str = "",
    only_own: bool = False,
    client: str = "c",
) -> Opened:
    return Opened(client, life, life, number, clean, secs, utc, user, "", will, only_own)


def left(owner: Owner, *, utc: float = 1000.0, secs: float = 60.0, will_at: float = 0.0) -> Left:
    return Left("c", owner[0], 99, owner, utc, secs, will_at)


def test_who_comes_last_is_the_owner_and_the_one_before_changes_nothing() -> None:
    log = Log()
    log.say(opened("one", 1), opened("two", 1))
    assert log.state().owner == ("two", 1)
    assert log.heard.arrivals[1].resumed
    assert log.heard.arrivals[1].before == ("one", 1)
    options = (1, False, False, 0, 0)
    late = Changed("c", "one", 2, ("one", 1), {"late": options})
    good = Changed("c", "two", 2, ("two", 1), {"good": options})
    assert log.say(late, good, left(("one", 1))) == [False, True, False]
    assert list(log.state().subscribed) == ["good"]
    assert log.state().attached
    log.say(Freed("c", "one", 3, ("one", 1)))
    assert log.heard.freed == [("one", 1)]  # the queue is free all the same
    assert log.state().consumer == ("two", 1)


def test_a_session_is_found_until_its_time_is_over() -> None:
    log = Log()
    log.say(opened("one", 1), left(("one", 1), utc=1000.0, secs=10.0))
    log.say(opened("two", 1, utc=1009.0))
    assert log.heard.arrivals[-1].resumed
    assert log.heard.arrivals[-1].before == ("one", 1)  # who has not said that the queue is free
    log.say(left(("two", 1), utc=1010.0, secs=10.0), Freed("c", "two", 2, ("two", 1)))
    log.say(opened("one", 2, utc=1015.0))
    assert log.heard.arrivals[-1].resumed
    assert log.heard.arrivals[-1].before is None
    log.say(left(("one", 2), utc=1015.0, secs=5.0), opened("one", 3, utc=1021.0))
    assert not log.heard.arrivals[-1].resumed
    found = log.heard.arrivals[-1].ended
    assert found is not None
    assert found.queue != log.state().queue


def test_a_clean_start_and_a_client_that_says_so_end_it() -> None:
    log = Log()
    log.say(opened("one", 1), opened("two", 1, clean=True, secs=0.0))
    assert not log.table.states
    assert log.heard.arrivals[-1].ended is not None
    log.say(opened("one", 2), left(("one", 2), secs=0.0))
    assert not log.table.states
    assert log.heard.over == ["c"]


def test_another_users_session_stays_his() -> None:
    log = Log()
    log.say(opened("one", 1, user="his"))
    assert log.say(opened("two", 1, user="hers", only_own=True)) == [False]
    assert log.heard.arrivals[-1].refused
    assert log.state().owner == ("one", 1)
    assert log.say(opened("two", 2, user="his", only_own=True)) == [True]


def test_nobody_waits_for_what_is_clean_and_has_no_will() -> None:
    log = Log()
    log.say(opened("one", 1, secs=0.0))
    assert not log.table.states
    log.say(opened("one", 2, secs=0.0, will=WILL))
    assert log.state().queue == ""


def test_qos_2_is_known_step_by_step() -> None:
    numbers: list[Number] = [(b"12345678", at) for at in range((RECENT_CHUNKS + 1) * CHUNK + 1)]
    owner = ("one", 1)
    log = Log()
    log.say(opened("one", 1))
    log.say(Changed("c", "one", 2, owner, sent={1: numbers[0], 2: None}, taken={7: numbers[1]}))
    log.say(Changed("c", "one", 3, owner, released=(1,)))
    state = log.state()
    assert (state.sent, list(state.released)) == ({1: numbers[0], 2: None}, [1])
    assert [number in state.recent for number in numbers[:2]] == [True, False]
    log.say(Changed("c", "one", 4, owner, completed=(1, 2), sent={1: numbers[1]}, freed=(7,)))
    assert (state.sent, state.taken, list(state.released)) == ({1: numbers[1]}, {}, [])
    for at, number in enumerate(numbers):
        log.say(Changed("c", "one", 5 + at, owner, completed=(1,), sent={1: number}))
    assert [number in state.recent for number in numbers[:-1]] == [False] * CHUNK + [
        True
    ] * CHUNK * RECENT_CHUNKS


def test_a_life_that_is_inherited_is_heard_no_more() -> None:
    log = Log()
    log.say(opened("one", 1, will=WILL))
    assert log.table.silent("two", -1.0, 0.0) == []
    assert log.table.silent("two", 0.0, 0.0) == ["one"]
    assert log.say(Inherited("two", 1, "one", 1005.0), Inherited("three", 1, "one", 1006.0)) == [True, False]
    state = log.state()
    assert (state.keeper, state.attached, state.will_at) == ("two", False, 1010.0)
    assert log.heard.freed == [("one", 1)]
    assert log.heard.dead == ["one"]
    assert log.say(opened("one", 2), Mark("one", "one", 3)) == [False, False]
    assert [one.client for one in log.table.kept_by("two")] == ["c"]
    log.say(Willed("c", "two", 2, ("one", 1)))
    assert log.state().will is None
    log.say(Ended("c", "two", 3, ("one", 1)))
    assert not log.table.states


def test_an_end_that_comes_too_late_ends_nothing() -> None:
    log = Log()
    log.say(opened("one", 1), left(("one", 1)), opened("two", 1))
    assert log.say(Ended("c", "one", 2, ("one", 1)), Ended("c", "two", 2, ("two", 1))) == [False, False]
    assert log.state().attached


def test_a_life_that_is_gone_is_inherited_at_once() -> None:
    log = Log()
    log.now = 100.0
    log.say(opened("one", 1, secs=0.0, will=WILL), opened("one", 2, client="other"))
    assert log.table.silent("two", 50.0, 0.0) == []
    log.say(Gone("one", 2, 1005.0))
    assert log.table.silent("two", 50.0, 0.0) == ["one"]
    assert log.state().will_at == 1005.0  # its session ends with its connection
    assert log.heard.freed == [("one", 1), ("one", 2)]


def test_what_is_written_again_undoes_nothing() -> None:
    options = (1, False, False, 0, 0)
    log, other = Log(), Log()
    records: Iterable[Record] = (
        opened("one", 1, will=WILL),
        Changed("c", "one", 2, ("one", 1), {"a": options}, sent={5: (b"12345678", 1)}),
    )
    log.say(*records)
    as_of = log.offset
    whole = log.state().snapshot("two", 1, as_of)
    other.offset = 10
    other.say(whole)  # it knew nothing before
    assert other.state().snapshot("two", 1, as_of) == whole
    log.say(Changed("c", "one", 3, ("one", 1), {"b": options}))
    assert log.say(whole) == [False]
    assert list(log.state().subscribed) == ["a", "b"]
    placed = log.state().placed
    again = log.state().snapshot("two", 2, log.offset)
    assert log.say(again) == [True]
    assert log.state().placed > placed
    log.say(left(("one", 1), secs=0.0))
    assert log.say(again) == [False]
    assert not log.table.states


def test_ends_are_remembered_within_limits() -> None:
    log = Log()
    for at in range(ENDED_MAX + 10):
        log.say(opened("one", at, client=f"c{at}"), opened("one", at, client=f"c{at}", secs=0.0, clean=True))
    assert len(log.table._ended) == ENDED_MAX
    assert not log.table.states


def test_what_has_stood_for_long_is_due() -> None:
    log = Log()
    log.say(opened("one", 1, client="old"), opened("one", 2, client="new"))
    log.state("old").written -= 80_000.0
    assert [one.client for one in log.table.due(100_000.0, lambda share: -1.0)] == ["old"]
    assert [one.client for one in log.table.due(1e9, lambda share: 1.5)] == ["old"]


def test_it_is_there_after_a_restart(tmp_path: Path) -> None:
    store = Store(tmp_path)
    log = Log(store)
    log.say(opened("one", 1, will=WILL), opened("one", 2, client="gone"))
    log.say(Changed("c", "one", 3, ("one", 1), {"a": (1, True, False, 2, 7)}, taken={5: (b"\xff2345678", 1)}))
    log.say(opened("one", 4, client="gone", clean=True, secs=0.0))
    log.table.note(log.offset)
    before = log.state().snapshot("", 0, 0)
    store.close()
    store = Store(tmp_path)
    again = Log(store)
    assert list(again.table.states) == ["c"]
    assert again.state().snapshot("", 0, 0) == before
    again.table.begin_anew()
    again.table.note(0)
    store.close()
    store = Store(tmp_path)
    assert not Log(store).table.states
    store.close()
