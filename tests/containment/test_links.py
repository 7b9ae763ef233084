"""Faults on links: what cannot be sent is one dead letter, be it in an outbox or not, and all else flows.
What goes wrong with a link costs a connection; what goes round in a circle ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from gateway.broker.mqtt.echoes import (
    ECHO_SECS,
    HOPS_CERTAIN,
    KEYS_MAX,
    PROVEN_MAX,
    PROVEN_SECS,
    QUICK_MAX,
    QUICK_SECS,
    ROUNDS_PER_HOP,
    EchoDetector,
    Ledger,
)
from gateway.egress.link import Link as RunningLink
from gateway.egress.mqtt.session import MqttLinkConnection, MqttLinkSession
from gateway.model.message import Message, Sender
from gateway.protocols.amqp091.sender import Publisher
from gateway.protocols.amqpfast.sender import Producer
from gateway.protocols.mqtt.dialect import topic_address
from gateway.protocols.mqtt.properties import encode_property
from gateway.protocols.mqtt.spec import PacketType, Property
from gateway.settings import StoreSettings
from tests.configured import make_link, make_listener
from tests.containment.faults import FORESEEN, POISON, UNFORESEEN, by_type, counting, faulty, poisoned
from tests.ingress.clients import Mqtt, connect
from tests.interop.gateway_fixture import LOOPBACK, Running

BODIES: Final = (b"1", b"2", POISON, b"3", b"4")
SOUND: Final = [b"1", b"2", b"3", b"4"]
URLS: Final = {"mqtt": "mqtt", "amqp091": "amqp", "amqpfast": "amqpfast"}
TARGETS: Final = {
    "mqtt": 'topic: "a/b"',
    "amqp091": 'exchange: amq.topic, routing_key: "a.b"',
    "amqpfast": 'service: topic, destination: "a.b"',
}
ENCODERS: Final = {
    "mqtt": "gateway.egress.mqtt.publisher.encode_properties",
    "amqp091": "gateway.egress.amqp091.publisher.encode_properties",
    "amqpfast": "gateway.egress.amqpfast.publisher.encode_properties",
}


@pytest.fixture
def counted() -> Iterator[Counter[str]]:
    with counting() as found:
        yield found


def url_of(gateway: Running, protocol: str) -> str:
    user = "" if protocol == "mqtt" else "guest:guest@"
    return f"{URLS[protocol]}://{user}{LOOPBACK}:{gateway.port(protocol)}"


@contextmanager
def joined(
    folder: Path, protocol: str, *, stored: bool = False, **link: Any
) -> Iterator[tuple[Running, Running]]:
    """A gateway with a link to another one."""
    mapping = folder / "mapping.yaml"
    mapping.write_text(
        "version: 1\n"
        f"routes:\n  - {{name: up, from: {{endpoint: mqtt, topic: out}}, "
        f"to: {{endpoint: far, {TARGETS[protocol]}}}, settle: {'stored' if stored else 'confirmed'}}}\n"
    )
    with faulty() as far:
        given = {"url": url_of(far, protocol), "reconnect_min_secs": 0.01, "reconnect_max_secs": 0.02}
        store = StoreSettings(path=folder / "data") if stored else StoreSettings(enabled=False)
        with faulty(mappings=[str(mapping)], links={"far": make_link(**given)}, store=store) as near:
            near.until(lambda: near.gateway.links["far"].is_up)
            yield near, far


def publish(near: Running, *bodies: bytes) -> set[int]:
    """All in one write; returns the distinct reasons of the acknowledgements."""
    with connect(near, "publisher")[0] as client:
        for packet_id, body in enumerate(bodies, 1):
            named = encode_property(
                Property.USER_PROPERTY, ("body", body.decode())
            )  # each has a set of its own
            client.machine.publish(b"out", body, 1, packet_id=packet_id, properties=named)
        client.flush()
        return {client.acked(PacketType.PUBACK)[1] for _ in bodies}


def heard(client: Mqtt, wanted: int) -> list[bytes]:
    """Different bodies in the order in which they first came, until there are so many."""
    found: dict[bytes, None] = {}
    while len(found) < wanted:
        _, _, packet_id, _, body = client.row()
        found[body] = None
        client.ack(PacketType.PUBACK, packet_id)
    return list(found)


def nothing_waits(near: Running) -> bool:
    link = near.gateway.links["far"]
    return link.session.idle and not sum(state.messages for state in near.gateway.core.outbox_states())


@pytest.mark.parametrize("error", [*UNFORESEEN, *FORESEEN], ids=by_type)
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("protocol", URLS)
def test_poison_on_a_link_is_a_dead_letter_and_the_rest_flows(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    counted: Counter[str],
    protocol: str,
    stored: bool,
    error: Exception,
) -> None:
    name = ENCODERS[protocol]
    module, _, function = name.rpartition(".")
    real = getattr(__import__(module, fromlist=[function]), function)
    monkeypatch.setattr(name, poisoned(real, error))
    with joined(tmp_path, protocol, stored=stored) as (near, far), connect(far, "c")[0] as consumer:
        consumer.subscribe("a/b", 1)
        publish(near, *BODIES)
        assert heard(consumer, len(SOUND)) == SOUND
        publish(near, POISON, b"after")
        assert heard(consumer, 1) == [b"after"]
        near.until(lambda: nothing_waits(near))
        reason = "internal" if error in UNFORESEEN else "malformed"
        letters = near.gateway.dead_letters.counted
        assert near.ask(lambda: dict(letters)) == ({("up", reason): 2} if stored else {})
        assert near.gateway.links["far"].stats.connects == 1
    assert set(counted) == ({"delivery"} if error in UNFORESEEN else set())


SENDERS: Final[dict[str, tuple[type[Any], str]]] = {
    "mqtt": (MqttLinkConnection, "send"),
    "amqp091": (Publisher, "publish_many"),
    "amqpfast": (Producer, "send_many"),
}


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("protocol", URLS)
def test_what_fails_behind_the_encoding_is_found_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, counted: Counter[str], protocol: str, stored: bool
) -> None:
    """Nobody knows which message it is; each attempt costs a connection, and fewer are sent each time."""
    kind, name = SENDERS[protocol]
    real = getattr(kind, name)

    def send(self: Any, rows: Any, *others: Any) -> Any:
        if any(POISON in row for row in rows):
            raise UNFORESEEN[0]
        return real(self, rows, *others)

    monkeypatch.setattr(kind, name, send)
    with joined(tmp_path, protocol, stored=stored) as (near, far), connect(far, "c")[0] as consumer:
        consumer.subscribe("a/b", 1)
        publish(near, *BODIES)
        assert sorted(heard(consumer, len(SOUND))) == SOUND
        near.until(lambda: nothing_waits(near))
        publish(near, b"after")
        while heard(consumer, 1) != [b"after"]:
            continue
        assert near.gateway.links["far"].stats.connects > 1
        assert near.ask(lambda: sum(near.gateway.dead_letters.counted.values())) == int(stored)
    assert counted["connection"] >= 1


@pytest.mark.parametrize("error", UNFORESEEN, ids=by_type)
def test_a_fault_of_a_link_costs_an_attempt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, counted: Counter[str], error: Exception
) -> None:
    failures = [error, error]
    real = RunningLink._run_connection

    async def once(self: RunningLink) -> None:
        if failures:
            raise failures.pop()
        await real(self)

    monkeypatch.setattr(RunningLink, "_run_connection", once)
    with joined(tmp_path, "mqtt") as (near, far), connect(far, "c")[0] as consumer:
        consumer.subscribe("a/b", 1)
        publish(near, b"1")
        assert heard(consumer, 1) == [b"1"]
    assert counted == {"link": 2}


@pytest.mark.parametrize("what", ["peer", "conversation", "begin"])
def test_a_fault_of_a_tick_or_a_handshake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, counted: Counter[str], what: str
) -> None:
    kind: type[Any] = MqttLinkConnection if what == "peer" else MqttLinkSession
    name = "connect" if what == "begin" else "tick"
    real = getattr(kind, name)
    armed = [True, True]

    def twice(self: Any, *others: Any) -> Any:
        if armed:
            armed.pop()
            raise UNFORESEEN[0]
        return real(self, *others)

    monkeypatch.setattr(kind, name, twice)
    monkeypatch.setattr("gateway.egress.link.TICK_SECS", 0.02)
    with joined(tmp_path, "mqtt") as (near, far), connect(far, "c")[0] as consumer:
        near.until(lambda: not armed and near.gateway.links["far"].is_up)
        consumer.subscribe("a/b", 1)
        publish(near, b"1")
        assert heard(consumer, 1) == [b"1"]
    assert counted == {{"peer": "connection", "conversation": "timer", "begin": "link"}[what]: 2}


# Circles


ROUND: Final = """
version: 1
routes:
  - {name: round, from: {endpoint: mqtt, topic: "c/{rest...}"}, to: {endpoint: other, topic: "c/{rest...}"}}
"""


def test_a_circle_of_two_gateways_without_hops_ends(tmp_path: Path, counted: Counter[str]) -> None:
    """Each has a link to the other, and a route that sends on what comes from there."""
    mapping = tmp_path / "mapping.yaml"
    mapping.write_text(ROUND)
    with faulty() as probe:
        port = probe.mqtt  # free as soon as the probe is gone
    given = {"reconnect_min_secs": 0.01, "reconnect_max_secs": 0.05, "version": "3.1.1"}

    def settings(url: str, port: int) -> dict[str, Any]:
        listener = make_listener(protocol="mqtt", host=LOOPBACK, port=port)
        return {
            "mappings": [str(mapping)],
            "links": {"other": make_link(url=url, **given)},
            "listeners": {"mqtt": listener},
        }

    with (
        faulty(**settings(f"mqtt://{LOOPBACK}:{port}", 0)) as one,
        faulty(**settings(url_of(one, "mqtt"), port)) as two,
    ):
        both = (one, two)

        def passed() -> int:
            return sum(gateway.gateway.links["other"].stats.messages_out for gateway in both)

        def refused() -> int:
            return sum(route.failed for gateway in both for route in gateway.gateway.dispatcher.router.routes)

        one.until(lambda: all(gateway.gateway.links["other"].is_up for gateway in both))
        with connect(two, "c")[0] as listening, connect(one, "d")[0] as device:
            listening.subscribe("c/#")
            for number in range(20):
                device.publish(f"c/{number % 5}", b"%d" % (number % 7), 1, number + 1)
                device.acked(PacketType.PUBACK)
            one.until(lambda: refused() >= 20)
            device.ping()
            listening.ping()
            assert passed() == 2 * 20, "there and back, and no further"
    assert not counted


DEVICE: Final = Sender("mqtt", "device")
PEER: Final = Sender("mqtt", "peer")
OTHER: Final = Sender("mqtt", "other")


def sent(
    ledger: Ledger, body: bytes, sender: Sender = DEVICE, *, now: float = 0.0, packet_id: int = 0
) -> None:
    ledger.send([Message(topic_address("t"), body, sender=sender)], now, [packet_id])


def hop(echoes: EchoDetector, body: bytes, sender: Sender, now: float = 0.0) -> int:
    return echoes.hops(b"t", body, sender, now)


def _nothing(receipt: int) -> Message | None:
    """Return no message: the link has none in flight."""
    return None


def test_a_slow_echo_counts_a_hop_after_so_many_rounds() -> None:
    echoes = EchoDetector()
    ledger = echoes.ledger("link", _nothing)
    assert not echoes.has_sent
    sent(ledger, b"x")
    hops = []
    for round in range(1, 3 * ROUNDS_PER_HOP + 1):
        now = round * QUICK_SECS
        hops.append(hop(echoes, b"x", PEER, now))
        sent(ledger, b"x", PEER, now=now)
    assert hops == [round // ROUNDS_PER_HOP for round in range(1, 3 * ROUNDS_PER_HOP + 1)]


def test_who_brings_a_message_back_quickly_is_the_other_end_of_a_circle() -> None:
    echoes = EchoDetector()
    ledger = echoes.ledger("link", _nothing)
    sent(ledger, b"x")
    for _ in range(QUICK_MAX - 1):
        assert hop(echoes, b"x", PEER) == 0
        sent(ledger, b"x", PEER)
    assert hop(echoes, b"x", PEER) == HOPS_CERTAIN
    sent(ledger, b"y")
    assert hop(echoes, b"y", OTHER) == 0, "nothing is proved of others"
    sent(ledger, b"y")
    assert hop(echoes, b"y", PEER) == HOPS_CERTAIN
    assert hop(echoes, b"y", PEER) == 0, "as many as were sent can be echoes"
    sent(ledger, b"z", now=PROVEN_SECS)
    assert hop(echoes, b"z", PEER, PROVEN_SECS) == 0


def test_in_turn_they_prove_nothing() -> None:
    echoes = EchoDetector()
    ledger = echoes.ledger("link", _nothing)
    sent(ledger, b"x")
    for round in range(2 * QUICK_MAX):
        sender = (PEER, OTHER)[round % 2]
        assert hop(echoes, b"x", sender) == 0
        sent(ledger, b"x", sender)


def test_what_is_unconfirmed_is_an_echo_at_once() -> None:
    echoes = EchoDetector()
    unconfirmed = {7: Message(topic_address("t"), b"x"), 8: Message(topic_address("t"), b"another")}
    ledger = echoes.ledger("link", unconfirmed.get)
    for packet_id in (6, 7, 8):  # the first is confirmed, of the last the id has come to be another's
        sent(ledger, b"x", packet_id=packet_id)
    assert hop(echoes, b"x", DEVICE) == 0
    assert [hop(echoes, b"x", PEER) for _ in range(4)] == [HOPS_CERTAIN, 0, 0, 0]
    assert not echoes.has_sent


def test_a_last_round_that_is_unconfirmed_is_proof_all_the_same() -> None:
    echoes = EchoDetector()
    ledger = echoes.ledger("link", {7: Message(topic_address("t"), b"x")}.get)
    sent(ledger, b"x")
    for round in range(1, QUICK_MAX):
        assert hop(echoes, b"x", PEER) == 0
        sent(ledger, b"x", PEER, packet_id=7 if round == QUICK_MAX - 1 else 0)
    assert hop(echoes, b"x", PEER) == HOPS_CERTAIN
    sent(ledger, b"y")
    assert hop(echoes, b"y", PEER) == HOPS_CERTAIN


def test_an_echo_of_anothers_is_found_behind_its_own() -> None:
    echoes = EchoDetector()
    ledger = echoes.ledger("link", {7: Message(topic_address("t"), b"x")}.get)
    sent(ledger, b"x", PEER)
    sent(ledger, b"x", DEVICE, packet_id=7)
    assert [hop(echoes, b"x", PEER) for _ in range(2)] == [HOPS_CERTAIN, 0]


def test_who_repeats_himself_is_no_echo() -> None:
    echoes = EchoDetector()
    ledger = echoes.ledger("link", _nothing)
    for _ in range(100):
        assert hop(echoes, b"x", DEVICE) == 0
        sent(ledger, b"x")


def test_who_repeats_what_another_said_loses_one_of_them_at_most() -> None:
    echoes = EchoDetector()
    ledger = echoes.ledger("link", _nothing)
    sent(ledger, b"x")
    hops = []
    for _ in range(100):
        hops.append(hop(echoes, b"x", PEER))
        if not hops[-1]:
            sent(ledger, b"x", PEER)
    assert hops.count(HOPS_CERTAIN) == 1
    assert hops.count(0) == 99


def test_copies_of_one_message_are_told_apart() -> None:
    """A device that keeps saying the same does not lend new life to what goes round already."""
    echoes = EchoDetector()
    ledger = echoes.ledger("link", _nothing)
    alive = 0
    for round in range(20 * ROUNDS_PER_HOP):
        now = round * QUICK_SECS
        sent(ledger, b"x", now=now - QUICK_SECS)
        returned = alive + 1
        alive = 0
        for _ in range(returned):
            if hop(echoes, b"x", PEER, now) < 1:
                sent(ledger, b"x", PEER, now=now)
                alive += 1
        assert alive <= ROUNDS_PER_HOP + 1


def test_another_message_or_a_late_one_is_no_echo() -> None:
    echoes = EchoDetector()
    ledger = echoes.ledger("link", _nothing)
    for _ in range(100):
        sent(ledger, b"x")
    assert hop(echoes, b"y", PEER) == 0
    assert echoes.hops(b"u", b"x", PEER, 0.0) == 0
    assert [hop(echoes, b"x", PEER, ECHO_SECS) for _ in range(100)] == [0] * 100
    sent(ledger, b"z")
    ledger.tick(ECHO_SECS)
    assert not echoes.has_sent


def test_the_memory_is_bounded() -> None:
    echoes = EchoDetector()
    ledger = echoes.ledger("link", _nothing)
    for number in range(KEYS_MAX + 100):
        sent(ledger, b"%d" % number)
    for _ in range(1_000):
        sent(ledger, b"same")
    assert len(ledger.sent) == KEYS_MAX
    assert max(map(len, ledger.sent.values())) <= 64
    for number in range(2 * PROVEN_MAX):
        peer = Sender("mqtt", f"peer {number}")
        for _ in range(QUICK_MAX):
            sent(ledger, b"%d" % number)
            hop(echoes, b"%d" % number, peer)
            sent(ledger, b"%d" % number, peer)
    assert len(ledger._proven) <= PROVEN_MAX
