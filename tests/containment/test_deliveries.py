"""A message that cannot be encoded for its receiver: the sound ones around it arrive, it is a dead letter,
and nobody meets it again. The publisher and all others go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from gateway import containment
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.events import Confirms, GetResponse, MethodReceived
from gateway.protocols.amqpfast import commands as f
from gateway.protocols.mqtt.packets import Connack, Connect
from gateway.protocols.mqtt.spec import PacketType, Version
from gateway.settings import StoreSettings
from tests.containment.faults import FORESEEN, POISON, UNFORESEEN, by_type, counting, faulty, poisoned
from tests.durable.scenes import DAY
from tests.ingress.amqp_client import NOTHING, Amqp
from tests.ingress.amqpfast.client import TOPIC, Fast
from tests.ingress.clients import Mqtt, connect
from tests.interop.gateway_fixture import Running

BODIES: Final = (b"1", b"2", POISON, b"3", b"4")
SOUND: Final = [b"1", b"2", b"3", b"4"]
LARGE: Final = 2_000

Receive = Callable[[int], list[bytes]]


@pytest.fixture
def counted() -> Iterator[Counter[str]]:
    with counting() as found:
        yield found


# Receivers. Each gives a function that returns the next so many bodies.


@contextmanager
def amqp_consumer(gateway: Running, *, no_ack: bool = False, prefetch: int = 0) -> Iterator[Receive]:
    with Amqp(gateway).open() as client:
        client.call(m.QueueDeclare("q"), m.QueueDeclareOk)
        client.call(m.QueueBind("q", "amq.topic", "a.b"), m.QueueBindOk)
        if prefetch:
            client.call(m.BasicQos(0, prefetch, False), m.BasicQosOk)
        client.call(m.BasicConsume("q", no_ack=no_ack), m.BasicConsumeOk)

        def receive(count: int) -> list[bytes]:
            found: list[bytes] = []
            while len(found) < count:
                for _, _, tag, _, _, _, body in client.delivered(1):
                    found.append(body)
                    if not no_ack:
                        client.say(m.BasicAck(tag))
            return found

        yield receive


@contextmanager
def amqp_getter(gateway: Running) -> Iterator[Receive]:
    with Amqp(gateway).open() as client:
        client.call(m.QueueDeclare("q"), m.QueueDeclareOk)
        client.call(m.QueueBind("q", "amq.topic", "a.b"), m.QueueBindOk)

        def receive(count: int) -> list[bytes]:
            found: list[bytes] = []
            while len(found) < count:
                client.say(m.BasicGet("q", no_ack=True))
                found.append(client.next(GetResponse).body)
            client.say(m.BasicGet("q", no_ack=True))
            assert isinstance(client.next(MethodReceived).method, m.BasicGetEmpty)
            return found

        yield receive


@contextmanager
def fast_consumer(gateway: Running, *, unreliable: bool = False) -> Iterator[Receive]:
    with Fast(gateway).open() as client:
        client.consume(client.handle("a.b", TOPIC), unreliable=unreliable)

        def receive(count: int) -> list[bytes]:
            rows = client.rows(count)
            if not unreliable:
                client.ack(rows[-1][1])
            return [row[4] for row in rows]

        yield receive


@contextmanager
def mqtt_subscriber(gateway: Running, *, qos: int = 1) -> Iterator[Receive]:
    with Mqtt(gateway.mqtt) as client:
        client.say(Connect("subscriber", Version.V5, True))
        client.next(Connack)
        client.subscribe("a/b", qos)

        def receive(count: int) -> list[bytes]:
            found: list[bytes] = []
            while len(found) < count:
                _, _, packet_id, _, body = client.row()
                found.append(body)
                if packet_id:
                    client.ack(PacketType.PUBACK, packet_id)
            return found

        yield receive


# Publishers of another protocol: all bodies in one write. The poison has a content type, because properties
# that are equal are encoded once for all messages of a run.


def mqtt_publishes(gateway: Running, *bodies: bytes) -> None:
    client, _ = connect(gateway, "publisher", version=Version.V5)
    with client:
        for packet_id, body in enumerate(bodies, 1):
            properties = b"\x03\0\1p" if body == POISON else b""
            client.machine.publish(b"a/b", body, 1, packet_id=packet_id, properties=properties)
        client.flush()
        for _ in bodies:
            assert client.acked(PacketType.PUBACK)[1] in (0, 0x10)


def amqp_publishes(gateway: Running, *bodies: bytes) -> None:
    with Amqp(gateway).open() as client:
        for body in bodies:
            properties = b"\x80\0\1p" if body == POISON else NOTHING
            client.machine.send_content(1, m.BasicPublish("amq.topic", "a.b"), properties, body)
        client.flush()
        client.call(m.QueueDeclare("last"), m.QueueDeclareOk)


class Row(NamedTuple):
    """A way to receive, where its encoding is looked up, and who publishes."""

    receiver: Callable[[Running], object]
    encoder: str
    publish: Callable[..., None] = mqtt_publishes


AMQP: Final = "gateway.ingress.amqp091.channel.encode_properties"
FAST: Final = "gateway.ingress.amqpfast.channel.encode_properties"
MQTT: Final = "gateway.ingress.mqtt.connection.encode_properties"
ROWS: Final = {
    "amqp091": Row(amqp_consumer, AMQP),
    "amqp091 no-ack": Row(lambda gateway: amqp_consumer(gateway, no_ack=True), AMQP),
    "amqp091 one at a time": Row(lambda gateway: amqp_consumer(gateway, prefetch=1), AMQP),
    "amqp091 get": Row(amqp_getter, "gateway.broker.amqp091.dead_letter_routing.encode_properties"),
    "amqpfast": Row(fast_consumer, FAST),
    "amqpfast unreliable": Row(lambda gateway: fast_consumer(gateway, unreliable=True), FAST),
    "amqpfast from amqp091": Row(fast_consumer, FAST, amqp_publishes),
    "mqtt": Row(mqtt_subscriber, MQTT, amqp_publishes),
    "mqtt qos 0": Row(lambda gateway: mqtt_subscriber(gateway, qos=0), MQTT, amqp_publishes),
    "mqtt from mqtt": Row(mqtt_subscriber, MQTT),
}


def poison(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    module, _, function = name.rpartition(".")
    monkeypatch.setattr(name, poisoned(getattr(__import__(module, fromlist=[function]), function), error))


@pytest.mark.parametrize("error", [*UNFORESEEN, *FORESEEN], ids=by_type)
@pytest.mark.parametrize("row", ROWS)
def test_poison_is_one_dead_letter_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, counted: Counter[str], row: str, error: Exception
) -> None:
    receiver, encoder, publish = ROWS[row]
    poison(monkeypatch, encoder, error)
    unforeseen = error in UNFORESEEN
    with faulty() as gateway:
        with receiver(gateway) as receive:  # type: ignore[attr-defined]
            publish(gateway, *BODIES)
            assert receive(len(SOUND)) == SOUND
            publish(gateway, POISON, b"after")
            assert receive(1) == [b"after"]
        letters = gateway.gateway.dead_letters.counted
        reason = "internal" if unforeseen else "malformed"
        assert gateway.ask(lambda: dict(letters)) == {("", reason): 2}
        assert counted == ({"delivery": 2} if unforeseen else {})
        with receiver(gateway) as receive:  # type: ignore[attr-defined]
            publish(gateway, b"later")
            assert receive(1) == [b"later"]


@pytest.mark.parametrize("target", ["amqp091", "mqtt"])
def test_stored_poison_is_gone_after_it_was_met(
    monkeypatch: pytest.MonkeyPatch, counted: Counter[str], tmp_path: Path, target: str
) -> None:
    """Otherwise the next consumer, or the one after a restart, would meet it again."""
    poison(monkeypatch, AMQP if target == "amqp091" else MQTT, UNFORESEEN[0])
    store = StoreSettings(path=tmp_path)
    receiver = kept_consumer if target == "amqp091" else kept_subscriber
    with faulty(store=store) as gateway:
        with receiver(gateway):
            pass
        (mqtt_publishes if target == "amqp091" else amqp_publishes_durably)(gateway, *BODIES)
    with faulty(store=store) as gateway, receiver(gateway) as receive:
        assert receive(len(SOUND)) == SOUND
        gateway.until(lambda: len(gateway.gateway.dead_letters) == 1)
    assert counted == {"delivery": 1}
    with faulty(store=store) as gateway, receiver(gateway) as receive:
        (mqtt_publishes if target == "amqp091" else amqp_publishes_durably)(gateway, b"later")
        assert receive(1) == [b"later"]
        assert gateway.ask(lambda: len(gateway.gateway.dead_letters)) == 1
    assert counted == {"delivery": 1}


@contextmanager
def kept_consumer(gateway: Running) -> Iterator[Receive]:
    with Amqp(gateway).open() as client:
        client.call(m.QueueDeclare("kept", durable=True), m.QueueDeclareOk)
        client.call(m.QueueBind("kept", "amq.topic", "a.b"), m.QueueBindOk)

        def receive(count: int) -> list[bytes]:
            client.call(m.BasicConsume("kept"), m.BasicConsumeOk)
            rows = client.delivered(count)
            client.say(m.BasicAck(rows[-1][2], True))
            client.call(m.QueueDeclare("round trip"), m.QueueDeclareOk)
            return [row[6] for row in rows]

        yield receive


@contextmanager
def kept_subscriber(gateway: Running) -> Iterator[Receive]:
    with Mqtt(gateway.mqtt) as client:
        client.say(Connect("kept", Version.V5, False, properties=DAY))
        if not client.next(Connack).session_present:
            client.subscribe("a/b", 1)

        def receive(count: int) -> list[bytes]:
            found = []
            for _ in range(count):
                _, _, packet_id, _, body = client.row()
                found.append(body)
                client.ack(PacketType.PUBACK, packet_id)
            client.ping()
            return found

        yield receive


def amqp_publishes_durably(gateway: Running, *bodies: bytes) -> None:
    with Amqp(gateway).open() as client:
        client.call(m.ConfirmSelect(), m.ConfirmSelectOk)
        for body in bodies:
            properties = b"\x90\0\1p\2" if body == POISON else b"\x10\0\2"
            client.machine.send_content(1, m.BasicPublish("amq.topic", "a.b"), properties, body)
        client.flush()
        tags: set[int] = set()
        while len(tags) < len(bodies):
            for _, tag, multiple, _ in client.next(Confirms).confirms:
                tags |= set(range(1, tag + 1)) if multiple else {tag}


@pytest.mark.parametrize("row", ["amqp091", "amqp091 get"])
def test_poison_that_waited_in_a_queue(
    monkeypatch: pytest.MonkeyPatch, counted: Counter[str], row: str
) -> None:
    receiver, encoder, publish = ROWS[row]
    poison(monkeypatch, encoder, UNFORESEEN[0])
    with faulty() as gateway:
        with Amqp(gateway).open() as owner:
            owner.call(m.QueueDeclare("q"), m.QueueDeclareOk)
            owner.call(m.QueueBind("q", "amq.topic", "a.b"), m.QueueBindOk)
        publish(gateway, *BODIES)
        with receiver(gateway) as receive:  # type: ignore[attr-defined]
            assert receive(len(SOUND)) == SOUND
        with Amqp(gateway).open() as owner:
            gateway.until(lambda: not gateway.gateway.host.queues["q"].unacknowledged)
            assert owner.call(m.QueueDeclare("q"), m.QueueDeclareOk).message_count == 0
    assert counted == {"delivery": 1}


def test_poison_among_direct_replies(monkeypatch: pytest.MonkeyPatch, counted: Counter[str]) -> None:
    poison(monkeypatch, AMQP, UNFORESEEN[0])
    with faulty() as gateway, Amqp(gateway).open() as requester, Amqp(gateway).open() as server:
        requester.call(m.BasicConsume("amq.rabbitmq.reply-to", no_ack=True), m.BasicConsumeOk)
        (name,) = gateway.ask(lambda: list(gateway.gateway.host.replies._waiting))
        server.publish("", name, *BODIES)
        assert [row[6] for row in requester.delivered(len(SOUND))] == SOUND
        assert gateway.gateway.dead_letters.counted == {("", "internal"): 1}
    assert counted == {"delivery": 1}


def test_poison_among_large_messages(monkeypatch: pytest.MonkeyPatch, counted: Counter[str]) -> None:
    """These go in line, one after the other."""
    monkeypatch.setattr("gateway.ingress.amqpfast.channel.LARGE_BYTES", LARGE)
    poison(monkeypatch, FAST, UNFORESEEN[0])
    large = bytes(2 * LARGE)
    with faulty() as gateway, fast_consumer(gateway) as receive:
        mqtt_publishes(gateway, b"1", large, POISON, large, b"2")
        assert receive(4) == [b"1", large, large, b"2"]
    assert counted == {"delivery": 1}


def test_a_message_that_is_only_looked_at_stays(
    monkeypatch: pytest.MonkeyPatch, counted: Counter[str]
) -> None:
    poison(monkeypatch, FAST, UNFORESEEN[0])
    with faulty() as gateway, Fast(gateway).open() as client:
        handle = client.handle("q")
        client.put(handle, POISON)
        for _ in range(2):
            ids, _ = client.index(handle)
            client.say(f.HandleBrowse(handle, 0, ids[0]))
            assert client.bodies(1) == [POISON]


@pytest.mark.parametrize("kept", [False, True])
def test_poison_among_retained_messages_and_in_a_session(
    monkeypatch: pytest.MonkeyPatch, counted: Counter[str], kept: bool
) -> None:
    poison(monkeypatch, MQTT, UNFORESEEN[0])
    with faulty() as gateway:
        with connect(gateway, "publisher")[0] as publisher:
            for number, body in enumerate(BODIES):
                properties = b"\x03\0\1p" if body == POISON else b""
                publisher.publish(f"r/{number}", body, retain=True, properties=properties)
            publisher.ping()
        with Mqtt(gateway.mqtt) as client:
            client.say(Connect("c", Version.V5, not kept))
            client.next(Connack)
            client.subscribe("r/+", 1)
            assert sorted(client.body() for _ in SOUND) == SOUND
            client.ping()
    assert counted == {"delivery": 1}


def test_each_kind_of_error_is_told_once(monkeypatch: pytest.MonkeyPatch, counted: Counter[str]) -> None:
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(
        containment, "_log_error", lambda where, error, facts: told.append((where, facts["queue"]))
    )
    poison(monkeypatch, AMQP, UNFORESEEN[0])
    with faulty() as gateway, amqp_consumer(gateway) as receive:
        mqtt_publishes(gateway, *[POISON] * 20, b"last")
        assert receive(1) == [b"last"]
    assert counted == {"delivery": 20}
    assert told == [("delivery", "q")]
