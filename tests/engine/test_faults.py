"""Replicas that are killed or frozen, and a broker that goes down and comes back."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path

from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.chaos.proxy import Proxy
from tests.engine.replicas import PATIENCE_SECS, Client, Replica, lasting, replicas
from tests.interop.gateway_process import GatewayProcess
from tests.interop.servers import LOOPBACK, RabbitMQ, free_ports

NAMESPACE = "faults"


def apart(folder: Path, rabbitmq: RabbitMQ, name: str) -> GatewayProcess:
    """A replica as a process, which RabbitMQ gives up when it says nothing for two seconds."""
    (port,) = free_ports(1)
    return GatewayProcess(
        folder / name,
        replica=name,
        listeners={"mqtt": {"protocol": "mqtt", "host": LOOPBACK, "port": port}},
        broker={
            "engine": "rabbitmq",
            "urls": [rabbitmq.url],
            "namespace": NAMESPACE,
            "heartbeat_secs": 1,
            "reconnect_max_secs": 0.5,
            "engine_timeout_secs": 4.0,
        },
    )


def test_a_frozen_replica_lets_go_of_a_client_that_went_elsewhere(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    here = Replica("awake", rabbitmq.url, NAMESPACE)
    with replicas(here), apart(tmp_path, rabbitmq, "frozen") as frozen:
        until(lambda: _serves(frozen))
        with Client(frozen.port("mqtt"), "wanderer") as before:
            before.subscribe("faults/frozen", qos=1)
            frozen.process.send_signal(signal.SIGSTOP)
            try:
                with Client(here.mqtt, "wanderer") as after:
                    after.subscribe("faults/frozen", qos=1)
                    after.publish("faults/frozen", b"x")
                    after.until(lambda: after.messages)
                    until(lambda: _given_up(rabbitmq, "frozen"))
                    frozen.process.send_signal(signal.SIGCONT)
                    before.until(lambda: before.ended)
                    assert before.ended[0].value == 0x8E
                    assert not after.ended
            finally:
                frozen.process.send_signal(signal.SIGCONT)


def test_what_a_killed_replica_leaves_is_everybodys(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    """Its clients go elsewhere, and find what it has retained, and what they are owed. Their wills are
    published by another replica, once: at once if the client comes back, for the connection was lost."""
    here = Replica("left", rabbitmq.url, NAMESPACE, engine_timeout_secs=4.0)
    third = Replica("third", rabbitmq.url, NAMESPACE, engine_timeout_secs=4.0)
    delayed = Properties(PacketTypes.WILLMESSAGE)
    delayed.WillDelayInterval = 2
    with replicas(here, third), apart(tmp_path, rabbitmq, "killed") as killed:
        until(lambda: _serves(killed))
        with (
            Client(here.mqtt, "heir") as heir,
            Client(killed.port("mqtt"), "poor", will="faults/will/poor") as poor,
            lasting(killed.port("mqtt"), "rich", ack=False, will="faults/will/rich") as rich,
            lasting(killed.port("mqtt"), "late", will="faults/will/late", will_properties=delayed) as late,
        ):
            heir.subscribe("faults/#", qos=1)
            rich.subscribe("faults/owed", qos=1)
            poor.publish("faults/kept", b"x", retain=True)
            poor.publish("faults/owed", b"1")
            rich.until(lambda: rich.messages)
            killed.kill()
            for client in (poor, rich, late):
                client.until(lambda one=client: one.ended)
            with lasting(here.mqtt, "rich") as again:
                assert again.present
                heir.publish("faults/owed", b"2")
                again.until(lambda: len(again.messages) >= 2)
                assert again.told == [("faults/owed", b"1"), ("faults/owed", b"2")]
                again.subscribe("faults/kept", qos=1)
                again.until(lambda: len(again.messages) >= 3)
                assert again.messages[2].retain
                heir.until(lambda: ("faults/will/rich", b"gone") in heir.told)
                heir.until(lambda: ("faults/will/late", b"gone") in heir.told)
                heir.until(lambda: ("faults/will/poor", b"gone") in heir.told)
            heir.publish("faults/end", b"")
            heir.until(lambda: ("faults/end", b"") in heir.told)
            wills = [name for name, body in heir.told if body == b"gone"]
            assert sorted(wills) == ["faults/will/late", "faults/will/poor", "faults/will/rich"]
            third.until(lambda: not third.stored("session", "poor"))
            third.until(lambda: not third.stored("will", "late"))


def test_a_frozen_owner_stops_when_it_wakes(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    """Others have long had what was its, and its client goes on where it came back: nothing is lost, and
    nothing of QoS 2 comes twice. What it held is not thrown in when it wakes."""
    here = Replica("host", rabbitmq.url, NAMESPACE, engine_timeout_secs=4.0)
    with replicas(here), apart(tmp_path, rabbitmq, "sleeper") as sleeper:
        until(lambda: _serves(sleeper))
        with (
            Client(here.mqtt, "feeding") as feeding,
            lasting(sleeper.port("mqtt"), "guest", will="faults/will/guest") as before,
            lasting(sleeper.port("mqtt"), "absent", will="faults/will/absent") as absent,
        ):
            feeding.subscribe("faults/will/#", qos=1)
            before.subscribe("faults/guest", qos=2)
            for at in range(5):
                feeding.publish("faults/guest", b"%d" % at, qos=2)
            before.until(lambda: len(before.messages) == 5)
            sleeper.process.send_signal(signal.SIGSTOP)
            try:
                for at in range(5, 10):
                    feeding.publish("faults/guest", b"%d" % at, qos=2)
                with lasting(here.mqtt, "guest") as after:
                    assert after.present
                    after.until(lambda: len(after.messages) >= 5)
                    feeding.until(lambda: ("faults/will/absent", b"gone") in feeding.told)
                    sleeper.process.send_signal(signal.SIGCONT)
                    before.until(lambda: before.ended)
                    absent.until(lambda: absent.ended)
                    feeding.publish("faults/guest", b"10", qos=2)
                    after.until(lambda: (("faults/guest", b"10")) in after.told)
                    assert [int(body) for _, body in after.told] == list(range(5, 11))
                    assert not after.ended
                until(lambda: _serves(sleeper))
                # A claim whose answer was lost comes again after some time.
                feeding.until(lambda: len(feeding.told) == 2)
                assert {name for name, _ in feeding.told} == {"faults/will/guest", "faults/will/absent"}
            finally:
                sleeper.process.send_signal(signal.SIGCONT)


def test_all_of_it_survives_a_broker_that_is_started_again(rabbitmq: RabbitMQ) -> None:
    one, other = (
        Replica(name, rabbitmq.url, NAMESPACE, reconnect_max_secs=0.5) for name in ("first", "second")
    )
    with (
        replicas(one, other),
        Client(one.mqtt, "publisher") as publisher,
        Client(other.mqtt, "subscriber") as subscriber,
    ):
        subscriber.subscribe("faults/broker/#", qos=2)
        publisher.publish("faults/broker/retained", b"before", retain=True)
        subscriber.until(lambda: subscriber.messages)
        rabbitmq.stop()
        try:
            held = [publisher.paho.publish(f"faults/broker/{at}", b"%d" % at, qos=2) for at in range(10)]
            one.until(lambda: bool(one.gateway.readiness.reasons()))
        finally:
            rabbitmq.start()
        for info in held:
            info.wait_for_publish(30)
        subscriber.until(lambda: len(subscriber.messages) > len(held))
        assert [body for _, body in subscriber.told[1:]] == [b"%d" % at for at in range(10)]
        assert not publisher.ended
        assert not subscriber.ended
        one.until_ready()
        with Client(one.mqtt, "late") as late:
            late.subscribe("faults/broker/retained", qos=1)
            late.until(lambda: late.messages)
            assert late.told == [("faults/broker/retained", b"before")]


def until(condition: Callable[..., object]) -> None:
    """Return when it holds."""
    deadline = time.monotonic() + PATIENCE_SECS
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.1)


def _given_up(rabbitmq: RabbitMQ, name: str) -> bool:
    """The broker has closed its connection."""
    return f".{name}." not in rabbitmq.control("list_connections", "client_properties")


def _serves(replica: GatewayProcess) -> bool:
    """It lets clients in."""
    with Client(replica.port("mqtt"), "probe") as probe:
        return probe.welcome is not None and not probe.welcome.is_failure


def test_what_a_replica_publishes_again_at_qos_2_comes_once_however_much_it_is(rabbitmq: RabbitMQ) -> None:
    with Proxy(rabbitmq.port) as way:
        near = Replica(
            "near", f"amqp://guest:guest@{LOOPBACK}:{way.port}/%2F", "again", reconnect_min_secs=0.1
        )
        far = Replica("far", rabbitmq.url, "again")
        with replicas(near, far), lasting(far.mqtt, "again") as consumer:
            consumer.subscribe("again/#", qos=2)
            sent = []
            with ExitStack() as stack:
                publishers = [
                    stack.enter_context(Client(near.mqtt, f"many {at}", window=900)) for at in range(4)
                ]
                for turn in range(3):
                    for at, publisher in product(range(500), publishers):
                        body = b"%d %s %d" % (turn, publisher.paho._client_id, at)
                        sent.append(publisher.paho.publish("again/all", body, qos=2))
                    consumer.until(partial(consumer.has_more_than, (turn * 4 + 1) * 500))
                    for wire in way.wires():
                        wire.stall("down")  # what the node confirms from now on is not heard of
                    before = -1
                    while before < (before := len(consumer.messages)):
                        time.sleep(0.1)
                    way.cut()
                for info in sent:
                    info.wait_for_publish(PATIENCE_SECS)
            consumer.until(lambda: len(consumer.messages) >= len(sent))
            assert len(set(consumer.told)) == len(consumer.told) == len(sent)
