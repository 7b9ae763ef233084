"""Retained messages for sessions on disk: a disk that fails delays them, and none is forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.broker.mqtt.durable_session import DurableSession
from gateway.broker.mqtt.records import OWED
from gateway.broker.mqtt.session import SubscriptionOptions
from gateway.model.outcome import ACCEPTED
from gateway.store.store import Store
from tests.broker.mqtt.test_durable_sessions import World
from tests.broker.parts import Connection, connected, mqtt
from tests.store.parts import Opened

COUNT = 600


def subscribed(world: World, qos: int = 1) -> tuple[DurableSession, Connection]:
    """Return a session that lacks COUNT retained messages, and its connection."""
    for number in range(COUNT):
        world.space.retained.set_retained(mqtt(f"a/{number}", b"%d" % number, qos, retain=True))
    session = world.session("c")
    outlet = connected(session, receive_maximum=1_000)
    world.space.subscribe(session, "a/#", SubscriptionOptions(qos))
    assert world.one.commit() is ACCEPTED
    return session, outlet


def fail(world: World, *, is_known: bool) -> None:
    world.fail()
    if is_known:
        world.one.store.put("x", "y", b"")
        world.one.commit()
        world.one.until_healthy(False)
        world.one.commit()


def pull_all(session: DurableSession) -> None:
    """Pull as the listener does, until nothing comes."""
    while session.has_retained_to_queue and session.queue_retained():
        session.pump()


def repair(world: World) -> None:
    world.disk.fault = ""
    world.one.until(lambda: world.one.store.healthy)


def pull_until_done(world: World, session: DurableSession, qos: int) -> None:
    """Pull and acknowledge until the session lacks nothing."""

    def is_done() -> bool:
        session.queue_retained()
        for packet_id, row in list(session.in_flight.items()):
            if row.qos == 2:
                session.handle_pubrec(packet_id)
            session.complete_delivery(packet_id)
        session.pump()
        return not (session.walks or len(session) or session.in_flight)

    world.one.until(is_done)


def records(folder: Path) -> list[bytes | str]:
    found: list[bytes | str] = []

    def read(store: Store) -> None:
        found.extend(key for key, _ in store.records(OWED))

    with Opened(folder, before=read):
        return found


@pytest.mark.parametrize("is_known", [True, False], ids=["known to fail", "fails since just now"])
@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("pieces", [0, 1, 2])
def test_a_session_gets_its_retained_messages_when_the_disk_works_again(
    tmp_path: Path, is_known: bool, qos: int, pieces: int
) -> None:
    with World(tmp_path) as world:
        session, outlet = subscribed(world, qos)
        for _ in range(pieces):
            session.queue_retained()
            assert world.one.commit() is ACCEPTED
            for packet_id in list(session.in_flight):
                session.handle_pubrec(packet_id) if qos == 2 else None
                session.complete_delivery(packet_id)
            session.pump()
        fail(world, is_known=is_known)
        pull_all(session)
        world.one.commit()
        world.one.until_healthy(False)
        assert list(session.walks) == ["a/#"]
        assert session.has_retained_to_queue
        assert outlet.pulls or is_known
        repair(world)
        pull_until_done(world, session, qos)
        bodies = [int(row.message.body) for row in outlet.rows]
        assert set(bodies) == set(range(COUNT))
        assert len(bodies) == COUNT or qos == 1
        assert world.one.commit() is ACCEPTED
    assert records(tmp_path) == []


def test_the_record_outlives_a_commit_that_fails(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        session, _ = subscribed(world)
        fail(world, is_known=False)
        pull_all(session)
        world.one.commit()
        repair(world)
        assert world.one.commit() is ACCEPTED
        world.one.store.close()
    assert records(tmp_path) == [b"c\0a/#"]


def test_without_acknowledgement_they_do_not_wait_for_the_disk(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        session, outlet = subscribed(world, qos=0)
        fail(world, is_known=True)
        pull_all(session)
        assert len(outlet.rows) == COUNT
        assert session.walks == {}
        repair(world)


def test_a_subscription_that_ends_meanwhile_is_not_owed_again(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        session, outlet = subscribed(world)
        fail(world, is_known=False)
        pull_all(session)
        world.space.unsubscribe(session, "a/#")
        world.one.commit()
        world.one.until_healthy(False)
        assert session.walks == {}
        repair(world)
        count = len(outlet.rows)
        assert not session.queue_retained()
        assert world.one.commit() is ACCEPTED
        assert len(outlet.rows) == count
    assert records(tmp_path) == []
