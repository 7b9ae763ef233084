"""Wall clocks that are set while a gateway runs or between two runs: nothing expires, and no life grows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pika
import pytest

from gateway.protocols.mqtt.properties import decode_list
from gateway.protocols.mqtt.spec import PacketType, Property
from gateway.store.journal.appender import RETENTION_SECS
from gateway.store.journal.segments import segments_in
from tests.durable.test_amqp import channel
from tests.ingress.clients import Mqtt, connect, eventually
from tests.interop.gateway_process import GatewayProcess
from tests.interop.wrong_clock import Clock
from tests.store.journal.samples import rows_of

HOUR_SECS: Final = 3_600.0
STEPS: Final = (2 * HOUR_SECS, -2 * HOUR_SECS, 8 * 24 * HOUR_SECS)


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path / "clock")


@pytest.fixture
def gateway(tmp_path: Path, clock: Clock) -> Iterator[GatewayProcess]:
    made = GatewayProcess(tmp_path / "gateway")
    made.clock = clock
    with made:
        yield made


@pytest.mark.parametrize("step", STEPS)
def test_a_step_ends_no_message(gateway: GatewayProcess, clock: Clock, step: float) -> None:
    with channel(gateway) as opened:
        opened.queue_declare("limited", durable=True, arguments={"x-message-ttl": 600_000})
        opened.queue_declare("plain", durable=True)
        limited = pika.BasicProperties(expiration="600000", delivery_mode=2)
        opened.basic_publish("", "limited", b"1")
        opened.basic_publish("", "plain", b"2", limited)
        clock.step(step)
        while "wall clock jumped" not in gateway.log:
            time.sleep(0.05)
        assert opened.basic_get("limited", auto_ack=True)[2] == b"1"
        assert opened.basic_get("plain", auto_ack=True)[2] == b"2"
        opened.basic_publish("", "plain", b"3", pika.BasicProperties(expiration="1"))
        opened.basic_publish("", "plain", b"4", limited)
        while opened.queue_declare("plain", passive=True).method.message_count > 1:
            pass
        assert opened.basic_get("plain", auto_ack=True)[2] == b"4"


@pytest.mark.parametrize("step", STEPS)
def test_a_subscriber_is_told_of_no_longer_life_than_was_given(
    gateway: GatewayProcess, clock: Clock, step: float
) -> None:
    lasting = {Property.SESSION_EXPIRY_INTERVAL: 7_200}
    client, _ = connect(gateway, clean=False, properties=lasting)
    with client:
        client.subscribe("a", 1)
    with connect(gateway, "writer")[0] as writer:
        writer.publish("a", b"x", 1, 1, properties=b"\x02\0\0\x02\x58", retain=True)
        writer.acked(PacketType.PUBACK)
    clock.step(step)
    client, connack = connect(gateway, clean=False, properties=lasting)
    with client:
        assert connack.session_present
        told = decode_list(client.row()[3], PacketType.PUBLISH)[Property.MESSAGE_EXPIRY_INTERVAL]
        assert 500 < told <= 600


MAPPING: Final = """version: 1
routes:
  - name: once
    from: {endpoint: amqp091, exchange: in}
    to: {endpoint: mqtt, topic: "once"}
    deduplicate: {window: 10m}
"""


@pytest.fixture
def routed(tmp_path: Path, clock: Clock) -> Iterator[GatewayProcess]:
    """A gateway with a route that refuses repeats, and a journal of it."""
    mapping = tmp_path / "mapping.yaml"
    mapping.write_text(MAPPING)
    journal = {
        "enabled": True,
        "flush_interval_secs": 0.01,
        "segment_bytes": 1,
        "retention_secs": 7 * 86_400.0,
    }
    made = GatewayProcess(tmp_path / "gateway", mappings=[str(mapping)], journal=journal)
    made.clock = clock
    with made:
        yield made


def notice(gateway: GatewayProcess, clock: Clock, step: float) -> None:
    """Set the wall clock, and wait until the gateway has noticed."""
    clock.step(step)
    while "wall clock jumped" not in gateway.log:
        time.sleep(0.05)


@pytest.mark.parametrize("step", STEPS)
def test_a_step_neither_ends_nor_prolongs_a_window(routed: GatewayProcess, clock: Clock, step: float) -> None:
    with channel(routed) as opened, connect(routed, "reader")[0] as reader:
        opened.exchange_declare("in", "fanout", durable=True)
        reader.subscribe("once")
        same = pika.BasicProperties(message_id="1", delivery_mode=2)
        opened.basic_publish("in", "", b"1", same)
        assert reader.body() == b"1"
        notice(routed, clock, step)
        opened.basic_publish("in", "", b"a repeat", same)
        opened.basic_publish("in", "", b"2", pika.BasicProperties(message_id="2"))
        assert reader.body() == b"2"
        clock.advance(601.0)
        opened.basic_publish("in", "", b"3", same)
        assert reader.body() == b"3"


@pytest.mark.parametrize("step", STEPS)
def test_a_step_delays_no_dead_letter(gateway: GatewayProcess, clock: Clock, step: float) -> None:
    with channel(gateway) as opened:
        dying = {"x-message-ttl": 600_000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
        opened.queue_declare("q", durable=True, arguments=dying)
        opened.queue_declare("dead", durable=True)
        opened.basic_publish("", "q", b"1", pika.BasicProperties(delivery_mode=2))
        notice(gateway, clock, step)
        assert opened.queue_declare("dead", passive=True).method.message_count == 0
        clock.advance(601.0)
        while not opened.queue_declare("dead", passive=True).method.message_count:
            time.sleep(0.05)  # until the alarms look at the clock again
        assert opened.queue_declare("q", passive=True).method.message_count == 0


@pytest.mark.parametrize("step", STEPS)
def test_a_step_deletes_no_segment_of_the_journal(routed: GatewayProcess, clock: Clock, step: float) -> None:
    folder = routed.folder / "data" / "journal"

    def bodies() -> list[bytes]:
        return [row["body"] for row in rows_of(folder)]

    with channel(routed) as opened, connect(routed, "reader")[0] as reader:
        opened.exchange_declare("in", "fanout", durable=True)
        reader.subscribe("once")
        sent: list[bytes] = []

        def journaled(body: bytes) -> None:
            opened.basic_publish("in", "", body, pika.BasicProperties(message_id=body.decode()))
            sent.append(body)
            eventually(lambda: bodies()[-1:] == [body])

        for number in range(3):
            journaled(b"%d" % number)
        notice(routed, clock, step)
        for number in range(3, 6):
            clock.advance(RETENTION_SECS + 1.0)  # it looks at what may go
            journaled(b"%d" % number)
        assert bodies() == sent
        clock.advance(8 * 86_400.0)
        opened.basic_publish("in", "", b"last", pika.BasicProperties(message_id="last"))
        sent.append(b"last")
        eventually(lambda: min(one.first for one in segments_in(folder)) == len(sent) - 1)


# Steps while no gateway runs.


@pytest.fixture(params=["stopped", "killed"])
def restart(request: pytest.FixtureRequest, gateway: GatewayProcess, clock: Clock) -> Callable[[float], None]:
    """A function that ends the gateway, sets the wall clock by a step and starts the gateway."""

    def stepped(step: float) -> None:
        gateway.terminate() if request.param == "stopped" else gateway.kill()
        clock.step(step)
        gateway.start()

    return stepped


LASTING: Final = {Property.SESSION_EXPIRY_INTERVAL: 36_000}


def expiry_told(client: Mqtt) -> int:
    """Return the expiry that the next message has."""
    return int(decode_list(client.row()[3], PacketType.PUBLISH)[Property.MESSAGE_EXPIRY_INTERVAL])


@pytest.mark.parametrize("step", STEPS[:2])
def test_a_step_before_a_restart_leaves_each_message_its_life(
    gateway: GatewayProcess, clock: Clock, restart: Callable[[float], None], step: float
) -> None:
    with connect(gateway, clean=False, properties=LASTING)[0] as client:
        client.subscribe("owed", 1)
    with connect(gateway, "writer")[0] as writer, channel(gateway) as opened:
        opened.queue_declare("plain", durable=True)
        opened.basic_publish("", "plain", b"1", pika.BasicProperties(expiration="600000", delivery_mode=2))
        for packet_id, (topic, retain) in enumerate((("owed", False), ("kept", True)), 1):
            writer.publish(topic, b"x", 1, packet_id, properties=b"\x02\0\0\x02\x58", retain=retain)
            writer.acked(PacketType.PUBACK)
        clock.advance(100.0)
        writer.publish("owed", b"x", 1, 3, properties=b"\x02\0\0\x02\x58")
        writer.acked(PacketType.PUBACK)
    restart(step)
    restart(-step / 2)
    client, connack = connect(gateway, clean=False, properties=LASTING)
    with client, channel(gateway) as opened:
        assert connack.session_present
        assert 400 < expiry_told(client) <= 501
        assert 500 < expiry_told(client) <= 600
        client.subscribe("kept", 1)
        assert 400 < expiry_told(client) <= 501
        method, properties, _ = opened.basic_get("plain", auto_ack=True)
        assert method is not None
        assert properties.expiration is not None
        assert 400_000 < int(properties.expiration) <= 600_000


@pytest.mark.parametrize("step", STEPS[:2])
def test_a_step_before_a_restart_ends_and_prolongs_no_time_to_live_or_delay(
    gateway: GatewayProcess, clock: Clock, restart: Callable[[float], None], step: float
) -> None:
    persistent = {"delivery_mode": 2}
    with channel(gateway) as opened:
        dying = {"x-message-ttl": 600_000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
        opened.queue_declare("limited", durable=True, arguments=dying)
        for name in ("dead", "late"):
            opened.queue_declare(name, durable=True)
        opened.exchange_declare(
            "later", "x-delayed-message", durable=True, arguments={"x-delayed-type": "fanout"}
        )
        opened.queue_bind("late", "later")
        opened.basic_publish("", "limited", b"1", pika.BasicProperties(**persistent))
        opened.basic_publish(
            "later", "", b"2", pika.BasicProperties(headers={"x-delay": 600_000}, **persistent)
        )
    restart(step)
    with channel(gateway) as opened:

        def waiting(queue: str) -> int:
            return int(opened.queue_declare(queue, passive=True).method.message_count)

        assert (waiting("limited"), waiting("dead"), waiting("late")) == (1, 0, 0)
        clock.advance(601.0)
        eventually(lambda: (waiting("limited"), waiting("dead"), waiting("late")) == (0, 1, 1))


@pytest.mark.parametrize("step", STEPS[:2])
def test_a_step_before_a_restart_keeps_a_window(routed: GatewayProcess, clock: Clock, step: float) -> None:
    same = pika.BasicProperties(message_id="1", delivery_mode=2)
    with connect(routed, clean=False, properties=LASTING)[0] as reader, channel(routed) as opened:
        opened.exchange_declare("in", "fanout", durable=True)
        reader.subscribe("once", 1)
        opened.basic_publish("in", "", b"1", same)
    routed.kill()
    clock.step(step)
    routed.start()
    with connect(routed, clean=False, properties=LASTING)[0] as reader, channel(routed) as opened:
        assert reader.body() == b"1"
        opened.basic_publish("in", "", b"a repeat", same)
        clock.advance(601.0)
        opened.basic_publish("in", "", b"2", same)
        assert reader.body() == b"2"


@pytest.mark.parametrize("is_killed", [True, False])
@pytest.mark.parametrize("step", [8 * 86_400.0, -8 * 86_400.0])
def test_a_step_before_a_restart_deletes_and_keeps_no_segment(
    routed: GatewayProcess, clock: Clock, step: float, is_killed: bool
) -> None:
    """Retention goes by the age of a segment, of which the step is no part."""
    folder = routed.folder / "data" / "journal"

    def publish(*numbers: int, sees: Callable[[int], bool]) -> None:
        with channel(routed) as opened, connect(routed, "reader")[0] as reader:
            opened.exchange_declare("in", "fanout", durable=True)
            reader.subscribe("once")
            for number in numbers:
                opened.basic_publish("in", "", b"%d" % number, pika.BasicProperties(message_id=str(number)))
                assert reader.body() == b"%d" % number
                eventually(lambda last=number: sees(last))

    def is_last(number: int) -> bool:
        return [one["body"] for one in rows_of(folder)[-1:]] == [b"%d" % number]

    publish(0, 1, 2, sees=is_last)
    routed.kill() if is_killed else routed.terminate()
    clock.step(step)
    routed.start()
    publish(3, sees=is_last)
    clock.advance(RETENTION_SECS + 1.0)  # it looks at what may go
    publish(4, sees=is_last)
    assert [row["body"] for row in rows_of(folder)] == [b"%d" % number for number in range(5)]
    clock.advance(8 * 86_400.0)
    # Its rows are deleted in this moment, so nobody reads them.
    publish(5, sees=lambda last: min(one.first for one in segments_in(folder)) == last)


@pytest.mark.parametrize(("step", "away"), [(2 * HOUR_SECS, 500.0), (-2 * HOUR_SECS, 700.0)])
def test_a_step_before_a_restart_ends_and_prolongs_no_session(
    gateway: GatewayProcess, clock: Clock, restart: Callable[[float], None], step: float, away: float
) -> None:
    lasting = {Property.SESSION_EXPIRY_INTERVAL: 600}
    with connect(gateway, clean=False, properties=lasting)[0] as client:
        client.subscribe("a", 1)
        client.machine.disconnect()
        client.flush()
        assert client.closed()
    with connect(gateway, "writer")[0] as writer:  # so that something is written
        clock.advance(away)
        writer.publish("a", b"x", 1, 1)
        writer.acked(PacketType.PUBACK)
    restart(step)
    client, connack = connect(gateway, clean=False, properties=lasting)
    with client:
        assert connack.session_present is (away < 600.0)
