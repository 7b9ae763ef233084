"""Sessions of disconnected clients that are full of expired messages: these make room for new ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway import clock
from gateway.broker.mqtt import durable_session
from gateway.broker.mqtt.namespace import CHECKED_AT_ONCE
from gateway.broker.mqtt.session import Session, SessionLimits
from gateway.model.message import NEVER
from gateway.model.outcome import ACCEPTED
from gateway.protocols.mqtt.dialect import topic_address
from tests.broker.mqtt.test_durable_sessions import World
from tests.broker.parts import Space, connected, mqtt, publish

MOST = 12
NOW = 1_000_000.0


class Rig:
    """A session of a client that is away, and the time by which messages expire."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, stored: bool) -> None:
        self.now = NOW
        monkeypatch.setattr(clock, "utc", lambda: self.now)
        self.folder = folder
        self.stored = stored
        self.open()
        if not stored:
            self.world.space = Space(SessionLimits(messages_max=MOST))
        session = self.world.space.session("c", "#")
        session.expiry_secs = 1e6
        connected(session)
        session.detach()

    def open(self) -> None:
        self.world = World(self.folder, messages_max=MOST)

    def restart(self) -> None:
        assert self.world.one.commit() is ACCEPTED
        self.world.one.store.close()
        self.open()

    @property
    def session(self) -> Session:
        return self.world.space.sessions["c"]

    def give(self, *bodies: int, secs: float = 0.0) -> None:
        messages = [mqtt("a", b"%d" % body, expires=self.now + secs if secs else NEVER) for body in bodies]
        answers = publish(self.world.space.sinks(topic_address("a"))[0], messages)
        assert self.world.one.commit() is ACCEPTED
        assert answers.outcomes == [ACCEPTED] * len(bodies)

    def after(self, secs: float) -> None:
        """Let the time pass, and the clock tick until all that has expired is looked at."""
        self.now += secs
        for _ in range(4 * MOST):
            self.now += 0.01
            self.world.space.expire(0.0)
            assert self.world.one.commit() is ACCEPTED

    def received(self, count: int) -> list[int]:
        outlet = connected(self.session, receive_maximum=1_000)
        self.world.one.until(lambda: len(outlet.rows) >= count)
        for row in outlet.rows:
            assert self.session.complete_delivery(row.packet_id)
        self.session.pump()
        assert self.world.one.commit() is ACCEPTED
        assert (len(self.session), self.session.in_memory) == (0, 0)
        return [int(row.message.body) for row in outlet.rows]

    @property
    def counts(self) -> tuple[int, int]:
        tally = self.world.space.tally
        return tally.expired, tally.queue_full


@pytest.fixture(params=[False, True], ids=["in memory", "stored"])
def rig(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    one = Rig(tmp_path, monkeypatch, stored=request.param)
    yield one
    one.world.one.store.close()


def test_what_has_expired_makes_room_for_what_is_fresh(rig: Rig) -> None:
    rig.give(*range(MOST), secs=60)
    rig.after(59)
    assert len(rig.session) == MOST
    rig.after(2)
    assert (len(rig.session), rig.counts) == (0, (MOST, 0))
    rig.give(*range(100, 100 + MOST))
    assert rig.counts == (MOST, 0)
    assert rig.received(MOST) == list(range(100, 100 + MOST))


@pytest.mark.parametrize("piece", [1, 5, 4_096])
def test_what_does_not_expire_stays_in_order_wherever_it_waits(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(durable_session, "PIECE_MESSAGES_MAX", piece)
    rig.give(0)
    for body in range(1, MOST, 2):
        rig.give(body, secs=60 if body < 6 else 600)
        rig.give(body + 1)
    rig.after(61)
    assert rig.counts == (3, 1)
    rig.give(50, 51, 52)
    rig.after(600)
    assert rig.counts == (6, 1)
    assert rig.received(9) == [0, 2, 4, 6, 8, 10, 50, 51, 52]


def test_a_session_that_is_not_half_full_is_left_alone(rig: Rig) -> None:
    rig.give(1, 2, secs=60)
    rig.after(61)
    assert (len(rig.session), rig.counts) == (2, (0, 0))
    rig.give(3)
    assert rig.received(1) == [3]
    assert rig.counts == (2, 0)


def test_what_expires_while_the_client_is_here_counts_when_it_has_left(rig: Rig) -> None:
    outlet = connected(rig.session)
    outlet.congested = True
    rig.give(*range(MOST), secs=60)
    rig.after(61)
    rig.session.detach()
    rig.after(0)
    assert (len(rig.session), rig.counts) == (0, (MOST, 0))
    rig.give(7)
    assert rig.received(1) == [7]


def test_a_client_that_returns_meanwhile_gets_what_is_left(rig: Rig) -> None:
    rig.give(*range(MOST - 1), secs=60)
    rig.give(99)
    rig.now += 61
    rig.world.space.expire(0.0)
    assert rig.received(1) == [99]
    assert rig.counts == (MOST - 1, 0)


def test_a_session_that_ends_meanwhile_leaves_nothing(rig: Rig) -> None:
    rig.give(*range(MOST), secs=60)
    rig.now += 61
    rig.world.space.expire(0.0)
    rig.world.space.discard(rig.session)
    assert rig.world.one.commit() is ACCEPTED
    assert [log.kind for log in rig.world.one.store.logs()] == []


def test_many_sessions_take_turns(rig: Rig) -> None:
    names = [f"c{at}" for at in range(3 * CHECKED_AT_ONCE)]
    for name in names:
        rig.world.space.session(name, f"own/{name}").expiry_secs = 1e6
    for name in names:
        sink = rig.world.space.sinks(topic_address(f"own/{name}"))[0]
        publish(sink, [mqtt(f"own/{name}", expires=NOW + 60) for _ in range(MOST)])
    assert rig.world.one.commit() is ACCEPTED
    rig.after(61)
    assert [len(rig.world.space.sessions[name]) for name in names] == [0] * len(names)


@pytest.mark.parametrize("rig", [True], indirect=True, ids=["stored"])
def test_on_a_failing_disk_it_is_done_when_the_disk_works_again(rig: Rig) -> None:
    rig.give(*range(MOST - 1), secs=60)
    rig.world.fail()
    answers = publish(rig.world.space.sinks(topic_address("a"))[0], [mqtt("a", b"7")])
    rig.world.one.store.flush()
    rig.world.one.until_healthy(False)
    rig.now += 61
    rig.world.space.expire(0.0)
    assert rig.counts[0] == 0
    rig.world.disk.fault = ""
    rig.world.one.until_healthy(True)
    rig.after(2)
    assert (len(rig.session), rig.counts[0]) == (0, MOST - 1)
    rig.give(8)
    assert rig.received(1) == [8]
    assert len(answers.outcomes) == 1


@pytest.mark.parametrize("rig", [True], indirect=True, ids=["stored"])
def test_after_a_restart_what_has_expired_makes_room(rig: Rig) -> None:
    rig.give(*range(MOST), secs=60)
    rig.restart()
    rig.after(61)
    assert (len(rig.session), rig.counts) == (0, (MOST, 0))
    rig.give(5)
    rig.restart()
    assert rig.received(1) == [5]
