"""A replica whose clock is wrong: it says so, is not ready, and ends no session of anybody."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from gateway import clock
from tests.engine.replicas import Client, Replica, lasting, replicas
from tests.engine.test_elections import Door, until
from tests.interop.servers import RabbitMQ
from tests.interop.wrong_clock import Clock

SESSIONS = 5  # of each of three kinds
HOUR = 3_600


def door(folder: Path, name: str, rabbitmq: RabbitMQ, replica: str, wrong: Clock | None = None) -> Door:
    made = Door(folder, name, rabbitmq.url, rabbitmq.url, "", replica)
    made.configuration |= {"links": {}, "mappings": []}
    made.configuration["broker"]["queue_type"] = "classic"
    made.clock = wrong
    return made


def ready(one: Door) -> bool:
    return one.asked("/readyz") == (200, "ready\n")


@contextmanager
def clients(port: int, name: str) -> Iterator[None]:
    """They have sessions of an hour, and are gone when the block ends; wills are due much later."""
    delayed = Properties(PacketTypes.WILLMESSAGE)
    delayed.WillDelayInterval = HOUR
    with ExitStack() as stack:
        found = []
        for at in range(SESSIONS):
            client = stack.enter_context(
                lasting(port, f"{name}-{at}", secs=HOUR, will=f"{name}/will", will_properties=delayed)
            )
            client.subscribe(f"{name}/{at}", qos=1)
            found.append(client)
        yield
        for client in found:
            client.vanish()


def find(port: int, name: str) -> int:
    """How many of the sessions are there."""
    present = 0
    for at in range(SESSIONS):
        with lasting(port, f"{name}-{at}", secs=HOUR) as client:
            present += client.present
    return present


@pytest.mark.parametrize("off", [2 * HOUR, -2 * HOUR])
def test_sessions_outlive_a_wrong_clock(rabbitmq: RabbitMQ, tmp_path: Path, off: int) -> None:
    """Those that a replica has left when its clock is set, those of another one, and those of its clients."""
    name = f"clocks-{off}".replace("--", "-back-")
    its = Clock(tmp_path / "clock")
    with ExitStack() as stack:
        right = stack.enter_context(door(tmp_path, name, rabbitmq, "right"))
        wrong = stack.enter_context(door(tmp_path, name, rabbitmq, "wrong", its))
        until(lambda: ready(right) and ready(wrong))
        assert abs(wrong.sample("gateway_engine_clock_skew_seconds")) < 1.0
        watcher = stack.enter_context(Client(right.port("mqtt"), "watcher"))
        watcher.subscribe(f"{name}/will", qos=1)
        with clients(wrong.port("mqtt"), f"{name}-kept"), clients(right.port("mqtt"), f"{name}-others"):
            pass
        with clients(wrong.port("mqtt"), f"{name}-leave"):
            its.step(off)
            until(lambda: not ready(wrong))
        assert "clock" in wrong.asked("/readyz")[1]
        assert wrong.sample("gateway_engine_clock_skew_seconds") == pytest.approx(off, abs=2.0)
        assert wrong.log.count("clock differs from cluster, replica not ready") == 1
        with Client(wrong.port("mqtt"), "refused") as refused:
            assert refused.welcome is not None
            assert refused.welcome.value == 0x88
        for whose in ("kept", "others", "leave"):
            assert find(right.port("mqtt"), f"{name}-{whose}") == SESSIONS
        assert not watcher.messages
        watcher.leave()
        right.kill()  # whose sessions others end by the database's clock
        third = stack.enter_context(door(tmp_path, name, rabbitmq, "third"))
        until(lambda: ready(third))
        for whose in ("kept", "others", "leave"):
            assert find(third.port("mqtt"), f"{name}-{whose}") == SESSIONS
        its.step(-off)
        until(lambda: ready(wrong))


def test_a_replica_that_begins_with_a_wrong_clock_is_not_ready(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    """And what others have retained and remember is not old for it."""
    name = "clocks-begin"
    its = Clock(tmp_path / "clock")
    its.step(2 * HOUR)
    with door(tmp_path, name, rabbitmq, "right") as right:
        until(lambda: ready(right))
        with clients(right.port("mqtt"), name), Client(right.port("mqtt"), "sets") as client:
            client.publish(f"{name}/kept", b"x", retain=True)
        with door(tmp_path, name, rabbitmq, "wrong", its) as wrong:
            until(lambda: "clock" in wrong.asked("/readyz")[1])
            until(lambda: wrong.sample("gateway_retained_messages") == 1)
            assert find(right.port("mqtt"), name) == SESSIONS
            its.step(-2 * HOUR)
            until(lambda: ready(wrong))
            assert find(wrong.port("mqtt"), name) == SESSIONS


@pytest.mark.parametrize("off", [2 * HOUR, -2 * HOUR])
def test_a_node_whose_clock_is_wrong_ends_nothing(rabbitmq: RabbitMQ, off: int) -> None:
    """Its replica is not ready until the next answer is right."""
    one = Replica("one", rabbitmq.url, "clocks-node", engine_timeout_secs=4.0)

    def hear_wrong() -> None:
        time = one.engine.time
        time.apply_reply(int(clock.utc() + off), clock.now(), clock.now())

    with replicas(one, but="clock differs from cluster, replica not ready"):
        with lasting(one.mqtt, f"node {off}", secs=HOUR) as client:
            client.subscribe("clocks/node", qos=1)
        one.until(lambda: one.stored("session", f"node {off}", "connected") == [(0,)])
        one.ask(hear_wrong)
        assert "clock" in str(one.ask(one.gateway.readiness.reasons))
        one.until_ready()
        with lasting(one.mqtt, f"node {off}", secs=HOUR) as client:
            assert client.present
