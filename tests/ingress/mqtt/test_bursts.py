"""Packets that come together are published together when nothing but identifier and body differs; whoever
sends or receives them cannot tell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.broker.dispatcher import Dispatcher
from gateway.ingress.mqtt import connection
from gateway.ingress.mqtt.bursts import burst_in
from gateway.protocols.mqtt.properties import encode_list
from gateway.protocols.mqtt.runs import Acks, Publishes, PublishRow
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode, Version
from gateway.settings import Limits
from tests.ingress.clients import Mqtt, connect, stats
from tests.interop.gateway_fixture import Running, running, settings_of

FLAGS = (0, 1, 2, 3, 4, 10, 11)
EXPIRES = encode_list({Property.MESSAGE_EXPIRY_INTERVAL: 60}, PacketType.PUBLISH)
TEXT = encode_list({Property.PAYLOAD_FORMAT_INDICATOR: 1}, PacketType.PUBLISH)


# Which packets are a burst.

different = st.tuples(
    st.sampled_from(FLAGS), st.sampled_from([b"t", b"u"]), st.just(1), st.sampled_from([b"", EXPIRES, TEXT])
)


@given(
    st.lists(different, min_size=1, max_size=3), st.integers(1, 5), st.lists(st.integers(0, 9), min_size=20)
)
def test_a_burst_has_everything_but_identifiers_and_bodies_in_common(
    kinds: list[tuple[int, bytes, int, bytes]], times: int, sizes: list[int]
) -> None:
    rows: list[PublishRow] = [
        (flags, topic, at, raw, bytes(sizes[at])) for at, (flags, topic, _, raw) in enumerate(kinds * times)
    ]
    flags, _, _, raw, _ = rows[0]
    alike = len({(row[0], row[1], row[3]) for row in rows}) == 1
    small = max(len(row[4]) for row in rows) <= 8
    found = burst_in(rows, 8)
    if not alike or not small or flags not in (0, 2, 10) or raw == TEXT:
        assert found is None
        return
    assert found is not None
    assert found[:2] == (flags, raw)
    assert list(zip(found.packet_ids, found.bodies, strict=True)) == [(row[2], row[4]) for row in rows]


# What clients see of it.

ROUTES = """
version: 1
routes:
  - {name: plain, from: {endpoint: mqtt, topic: "plain/{x}"}, to: {endpoint: mqtt, topic: "out/{x}"}}
  - {name: shaped, from: {endpoint: mqtt, topic: "shaped/{x}"}, to: {endpoint: mqtt, topic: "out/{x}"},
     headers: {by: route}}
  - {name: chosen, from: {endpoint: mqtt, topic: "chosen/{x}"}, to: {endpoint: mqtt, topic: "out/{x}"},
     when: "body.n > 9"}
"""
MANY = 20
Packet = dict[str, Any]


def packets(topic: str, *, qos: int = 1, **more: Any) -> list[Packet]:
    """A burst, whose bodies are their numbers."""
    return [
        {"topic": topic, "body": b'{"n":%d}' % at, "qos": qos, "packet_id": at + 1 if qos else 0, **more}
        for at in range(MANY)
    ]


def but(rows: list[Packet], at: int, **other: Any) -> list[Packet]:
    """The same with one that is different."""
    return [row | other if place == at else row for place, row in enumerate(rows)]


# What is sent, how much of it arrives, and whether it is published together.
SENT: dict[str, tuple[list[Packet], int, bool]] = {
    "kept at home": (packets("home/a"), MANY, True),
    "at most once": (packets("home/a", qos=0), MANY, True),
    "crossing": (packets("plain/a"), MANY, True),
    "crossing, at most once": (packets("plain/a", qos=0), MANY, True),
    "with properties": (packets("home/a", properties=EXPIRES), MANY, True),
    "crossing with properties": (packets("shaped/a", properties=EXPIRES), MANY, False),
    "changed on the way": (packets("shaped/a"), MANY, False),
    "chosen one by one": (packets("chosen/a"), MANY - 10, False),
    "text": (packets("plain/a", properties=TEXT), MANY, False),
    "one is no text": (but(packets("plain/a", properties=TEXT), 7, body=b"\xff"), MANY - 1, False),
    "retained": (packets("home/a", retain=True), MANY, False),
    "one goes elsewhere": (but(packets("home/a"), 9, topic="plain/b"), MANY, False),
    "one is retained": (but(packets("home/a"), 9, retain=True), MANY, False),
    "one is too large": (but(packets("home/a"), 9, body=bytes(1_001)), MANY - 1, False),
    "nobody wants it": (packets("nowhere/a"), 0, False),
    "what only we may say": (packets("$SYS/a"), 0, False),
    "exactly once": (packets("home/a", qos=2), MANY, False),
    "the last is different": (but(packets("home/a"), MANY - 1, qos=0, packet_id=0), MANY, False),
}


@pytest.fixture(scope="module")
def mapped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    mapping = tmp_path_factory.mktemp("mapping") / "m.yaml"
    mapping.write_text(ROUTES)
    with running(settings_of(limits=Limits(message_bytes_max=1_000), mappings=(str(mapping),))) as gateway:
        yield gateway


def sent(gateway: Running, rows: list[Packet]) -> tuple[list[tuple[int, int]], list[PublishRow], int]:
    """The answers to packets that were sent at once, what a subscriber got, and what was counted."""
    counted = stats(gateway).messages_in
    with connect(gateway, "reader")[0] as reader, connect(gateway, "writer")[0] as writer:
        writer.machine.peer_packet_bytes_max = 1 << 28  # it says also what it should not
        for topic_filter in ("home/#", "out/#"):
            reader.subscribe(topic_filter, 0)
        for row in rows:
            writer.machine.publish(**(row | {"topic": row["topic"].encode()}))
        writer.flush()
        writer.ping()
        reader.ping()
        answers = [one for event in writer.events(Acks) for one in event.rows]
        arrived = [one for event in reader.events(Publishes) for one in event.rows]
        counted = stats(gateway).messages_in - counted
        writer.publish("home/a", b"", retain=True)
        writer.ping()
    return answers, arrived, counted


@pytest.mark.parametrize("rows, arrive, together", SENT.values(), ids=SENT)
def test_nobody_can_tell(
    mapped: Running, monkeypatch: pytest.MonkeyPatch, rows: list[Packet], arrive: int, together: bool
) -> None:
    taken: list[bool] = []
    publish_burst = Dispatcher.publish_burst

    def watched(*given: Any) -> bool:
        taken.append(publish_burst(*given))
        return taken[-1]

    monkeypatch.setattr(Dispatcher, "publish_burst", watched)
    at_once = sent(mapped, rows)
    assert any(taken) is together
    monkeypatch.setattr(connection, "BURST_MIN", MANY + 1)
    taken.clear()
    assert sent(mapped, rows) == at_once
    assert not taken
    answers, arrived, _ = at_once
    assert len(arrived) == arrive
    assert sorted(packet_id for packet_id, _ in answers) == [row["packet_id"] for row in rows if row["qos"]]


def sent_by(client: Mqtt, topic: bytes, times: int = 1) -> None:
    for row in packets("") * times:
        client.machine.publish(**(row | {"topic": topic}))
    client.flush()


def test_too_much_at_once_is_read_no_further() -> None:
    """Before MQTT 5 nothing tells a client how much may be unacknowledged; it is held until less is."""
    held = running(settings_of(limits=Limits(inflight_max=5)))
    with held as gateway, connect(gateway, "old", version=Version.V311)[0] as client:
        sent_by(client, b"nowhere", 3)
        assert [client.acked(PacketType.PUBACK)[0] for _ in range(3 * MANY)] == [*range(1, MANY + 1)] * 3


def test_a_topic_that_cannot_be_is_refused_and_the_connection_goes_on() -> None:
    with running(settings_of(limits=Limits(topic_levels_max=3))) as gateway:
        with connect(gateway)[0] as client:
            sent_by(client, b"a/b/c/d")
            heard = [client.acked(PacketType.PUBACK) for _ in range(MANY)]
            assert heard == [(number, ReasonCode.TOPIC_NAME_INVALID) for number in range(1, MANY + 1)]
            client.ping()
        assert stats(gateway).accepted_messages == 0
