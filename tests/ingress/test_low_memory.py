"""Memory gets short while clients of each protocol publish: publishers wait, consumers make room, and nothing
that was accepted is lost. The readings are made up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest
import trio

from gateway.app.memory import resident_reader
from gateway.broker.memory import BEGUN_SECS
from gateway.ingress.mqtt.ingress import MqttIngress
from gateway.ingress.mqtt.routing_table import EVERYBODY
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.events import ChannelClosed, Confirms, MethodReceived
from gateway.protocols.amqpfast.events import ChannelClosed as FastChannelClosed
from gateway.protocols.amqpfast.spec import ReplyCode
from gateway.protocols.mqtt.packets import Disconnect
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode, Version
from tests.ingress.amqp_client import Amqp
from tests.ingress.amqpfast.client import Fast
from tests.ingress.clients import Raw, connect, eventually, stats
from tests.interop.gateway_fixture import Running, running

MARK = 1_000
PLENTY, SHORT, SCARCE = 0, MARK + 1, 2 * MARK
BLOCKED_SECS = 0.2  # how long nothing is said by a gateway that would have answered in a millisecond


class Watched(Running):
    """A gateway whose memory is as the test says."""

    def use(self, byte_count: int) -> None:
        memory = self.gateway.memory

        def read() -> None:
            memory.watermark = MARK
            memory._resident = lambda: byte_count
            memory._trim = None
            memory.measure()
            self.gateway.writes.flush()

        self.ask(read)

    def reading(self, client: Raw, listener: str) -> bool:
        """Whether a client's connection is read."""
        port = client.sock.getsockname()[1]
        found = self.ask(
            lambda: [
                one.stream.reading
                for one in self.gateway.listeners[listener].connections
                if one.stream.remote.endswith(f":{port}")
            ]
        )
        return found == [True]


@pytest.fixture
def gateway() -> Iterator[Watched]:
    with running() as one:
        one.__class__ = Watched
        assert isinstance(one, Watched)
        yield one


def unanswered(client: Raw) -> bool:
    """Nothing comes for a while."""
    before = client.sock.gettimeout()
    client.sock.settimeout(BLOCKED_SECS)
    try:
        return client.sock.recv(1) == b"?"
    except TimeoutError:
        return True
    finally:
        client.sock.settimeout(before)


# AMQP 0-9-1.


def publisher(gateway: Watched) -> Amqp:
    client = Amqp(gateway).open()
    client.call(m.QueueDeclare("q"), m.QueueDeclareOk)
    client.call(m.ConfirmSelect(), m.ConfirmSelectOk)
    return client


def test_amqp_publishers_wait_and_consumers_make_room(gateway: Watched) -> None:
    with publisher(gateway) as writer, Amqp(gateway).open() as reader, Amqp(gateway).open() as idle:
        gateway.use(SHORT)
        assert all(gateway.reading(client, "amqp091") for client in (writer, reader, idle))
        writer.publish("", "q", b"1")  # the first one is still taken
        found = writer.next(MethodReceived).method
        assert isinstance(found, m.ConnectionBlocked)
        assert found.reason == "low on memory"
        assert writer.next(Confirms).confirms[0][3]
        assert not gateway.reading(writer, "amqp091")
        writer.publish("", "q", b"2", b"3")
        assert unanswered(writer)
        reader.call(m.BasicConsume("q"), m.BasicConsumeOk)
        assert [row[6] for row in reader.delivered(1)] == [b"1"]
        reader.say(m.BasicAck(1))
        gateway.use(PLENTY)
        assert isinstance(writer.next(MethodReceived).method, m.ConnectionUnblocked)
        assert [row[6] for row in reader.delivered(2)] == [b"2", b"3"]
        assert all(row[3] for row in writer.next(Confirms).confirms)
        idle.call(m.QueueDeclare("other"), m.QueueDeclareOk)


def test_an_amqp_client_that_consumes_too_goes_on_and_is_refused_at_last(gateway: Watched) -> None:
    with publisher(gateway) as client:
        client.call(m.BasicConsume("q"), m.BasicConsumeOk)
        gateway.use(SHORT)
        client.publish("", "q", b"1")
        assert isinstance(client.next(MethodReceived).method, m.ConnectionBlocked)
        assert [row[6] for row in client.delivered(1)] == [b"1"]
        gateway.use(SCARCE)
        client.publish("", "q", b"2")
        client.say(m.BasicAck(1))
        refused = False
        while not refused:
            refused = not all(row[3] for row in client.next(Confirms).confirms)
        eventually(lambda: gateway.ask(lambda: gateway.gateway.host.queues["q"].unacknowledged) == 0)
        gateway.use(PLENTY)
        client.publish("", "q", b"3")
        assert [row[6] for row in client.delivered(1)] == [b"3"]
        assert gateway.gateway.memory.refused == 1


def test_a_transaction_ends_where_there_is_no_memory_for_it(gateway: Watched) -> None:
    with Amqp(gateway).open() as client:
        client.call(m.QueueDeclare("q"), m.QueueDeclareOk)
        client.call(m.BasicConsume("q"), m.BasicConsumeOk)
        client.call(m.TxSelect(), m.TxSelectOk)
        client.publish("", "q", b"1")
        gateway.use(SCARCE)
        client.publish("", "q", b"2")
        closed = client.next(ChannelClosed)
        assert (closed.reply_code, "low on memory" in closed.text) == (406, True)


def test_unconfirmed_messages_are_dropped_and_counted(gateway: Watched) -> None:
    with Amqp(gateway).open() as client:
        client.call(m.QueueDeclare("q"), m.QueueDeclareOk)
        client.call(m.BasicConsume("q"), m.BasicConsumeOk)
        gateway.use(SCARCE)
        client.publish("", "q", b"1", b"2")
        eventually(lambda: gateway.gateway.metrics.sources.dropped()["memory"] == 2)


def test_clients_who_come_later_are_told_when_they_publish(gateway: Watched) -> None:
    gateway.use(SHORT)
    with publisher(gateway) as late:
        assert gateway.reading(late, "amqp091")
        late.publish("", "q", b"1")
        assert isinstance(late.next(MethodReceived).method, m.ConnectionBlocked)
    gateway.use(PLENTY)  # a connection that is not read is not seen to end before
    eventually(lambda: stats(gateway, "amqp091").connections == 0)


# MQTT.


@pytest.mark.parametrize("version", [Version.V5, Version.V311])
def test_mqtt_publishers_wait_and_subscribers_go_on(gateway: Watched, version: Version) -> None:
    writer, _ = connect(gateway, "writer", version=version)
    reader, _ = connect(gateway, "reader", version=version)
    with writer, reader:
        reader.subscribe("a", 1)
        gateway.use(SHORT)
        writer.publish("a", b"1", 1, packet_id=1)
        assert writer.acked(PacketType.PUBACK)[0] == 1
        assert not gateway.reading(writer, "mqtt")
        writer.publish("a", b"2", 1, packet_id=2)
        assert unanswered(writer)
        row = reader.row()
        reader.ack(PacketType.PUBACK, row[2])
        assert reader.quiet()
        gateway.use(PLENTY)
        assert writer.acked(PacketType.PUBACK)[0] == 2
        assert (row[4], reader.body()) == (b"1", b"2")


def test_an_mqtt_client_that_subscribes_too_is_told_its_quota(gateway: Watched) -> None:
    client, _ = connect(gateway, "both", properties={Property.SESSION_EXPIRY_INTERVAL: 60})
    with client, connect(gateway, "reader")[0] as reader:
        client.subscribe("a", 1)
        reader.subscribe("a", 1)
        gateway.use(SHORT)
        client.publish("a", b"1", 1, packet_id=1)
        assert client.acked(PacketType.PUBACK) == (1, 0)
        gateway.use(SCARCE)
        client.publish("a", b"dropped")
        client.publish("a", b"2", 1, packet_id=2)
        assert client.acked(PacketType.PUBACK) == (2, ReasonCode.QUOTA_EXCEEDED)
        client.publish("a", b"3", 2, packet_id=3)
        assert client.acked(PacketType.PUBREC) == (3, ReasonCode.QUOTA_EXCEEDED)
        gateway.use(PLENTY)
        client.publish("a", b"4", 2, packet_id=3)  # the refused one has left its id free
        assert client.acked(PacketType.PUBREC) == (3, 0)
        assert [reader.body(), reader.body()] == [b"1", b"4"]
        assert gateway.gateway.memory.refused == 3


def test_before_mqtt_5_only_the_end_refuses(gateway: Watched) -> None:
    client, _ = connect(gateway, "both", version=Version.V311)
    with client:
        client.subscribe("a", 1)
        gateway.use(SCARCE)
        client.publish("a", b"dropped")
        client.ping()
        client.publish("a", b"1", 1, packet_id=1)
        assert client.closed()
        assert stats(gateway).protocol_errors.counts == {"quota_exceeded": 1}


def test_a_repeat_of_what_was_taken_is_answered(gateway: Watched) -> None:
    client, _ = connect(gateway, "both")
    with client:
        client.subscribe("other", 1)
        client.publish("a", b"1", 2, packet_id=1)
        assert client.acked(PacketType.PUBREC) == (1, 0x10)
        gateway.use(SCARCE)
        client.publish("a", b"1", 2, packet_id=1, dup=True)
        assert client.acked(PacketType.PUBREC) == (1, 0)
        assert not client.events(Disconnect)


# AMQP/Fast.


def test_fast_publishers_wait_and_consumers_make_room(gateway: Watched) -> None:
    with Fast(gateway).open() as writer, Fast(gateway).open() as reader:
        handle = writer.handle("q")
        gateway.use(SHORT)
        writer.put(handle, b"1")
        assert not gateway.reading(writer, "amqpfast")
        writer.put(handle, b"2", confirm=False)
        reader.consume(reader.handle("q"))
        assert reader.bodies(1) == [b"1"]
        assert gateway.reading(reader, "amqpfast")
        gateway.use(PLENTY)
        assert reader.bodies(1) == [b"2"]


def test_a_fast_client_that_consumes_too_loses_its_channel_at_last(gateway: Watched) -> None:
    with Fast(gateway).open() as client:
        handle = client.handle("q")
        client.consume(handle)
        gateway.use(SHORT)
        client.put(handle, b"1")
        assert client.bodies(1) == [b"1"]
        gateway.use(SCARCE)
        client.put(handle, b"2", b"3", confirm=False)
        closed = client.next(FastChannelClosed)
        assert closed.reply_code == ReplyCode.INSUFFICIENT_RESOURCES
        assert "low on memory" in closed.text


# Messages that have begun.


def starting(gateway: Watched, protocol: str) -> tuple[Raw, str]:
    """A client that stops in the middle of a message, or of a transaction; and its listener."""
    if protocol == "mqtt":
        client, _ = connect(gateway, "half")
        client.send(b"\x30\x80\x80\x10\x00\x01a\x00" + bytes(200_000))
        return client, "mqtt"
    if protocol == "amqpfast":
        fast = Fast(gateway).open(transacted=True)
        fast.put(fast.handle("q"), bytes(100_000))
        return fast, "amqpfast"
    amqp = Amqp(gateway).open()
    if protocol == "tx":
        amqp.call(m.QueueDeclare("q"), m.QueueDeclareOk)
        amqp.call(m.TxSelect(), m.TxSelectOk)
        amqp.publish("", "q", bytes(100_000))
        return amqp, "amqp091"
    amqp.machine.send_content(1, m.BasicPublish("", "q"), b"\0\0", bytes(400_000))
    amqp.send(amqp.machine.data_to_send()[:300_000])
    return amqp, "amqp091"


@pytest.mark.parametrize("protocol", ["mqtt", "amqp091", "tx", "amqpfast"])
def test_whoever_stops_in_the_middle_is_stopped_and_then_let_go(gateway: Watched, protocol: str) -> None:
    client, listener = starting(gateway, protocol)
    with client:
        found = gateway.gateway.memory
        eventually(
            lambda: sum(one.begun_bytes for one in gateway.ask(lambda: list(found.connections()))) > 90_000
        )
        assert gateway.reading(client, listener)
        gateway.use(SHORT)
        assert not gateway.reading(client, listener)
        gateway.ask(lambda: found.tick(trio.current_time()))
        gateway.ask(lambda: found.tick(trio.current_time() + BEGUN_SECS))
        gateway.ask(gateway.gateway.writes.flush)
        client.rest()
        eventually(lambda: stats(gateway, listener).connections == 0)


# All of them.


def half_a_message(gateway: Watched, protocol: str) -> Raw:
    if protocol == "mqtt":
        client, _ = connect(gateway, "half", user=("guest", b"guest"))
        client.send(b"\x32\xff\xff\x7f\0\1t\0\1\0" + bytes(200_000))
        return client
    amqp = Amqp(gateway).open()
    publish = b"\1\0\1\0\0\0\x0a\0\x3c\0\x28\0\0\0\1q\0\xce"
    body = b"\3\0\1" + (100_000).to_bytes(4, "big") + bytes(100_000) + b"\xce"
    amqp.send(publish + LARGE_HEAD + body * 2)
    return amqp


@pytest.mark.parametrize("protocol", ["mqtt", "amqp091"])
def test_incomplete_messages_count_for_their_user(gateway: Watched, protocol: str) -> None:
    """Before memory is short: other publishers do not wait because one user stops in the middle."""
    memory, shares = gateway.gateway.memory, gateway.gateway.memory_shares

    def near(mark: int) -> None:
        memory.watermark, memory._trim = mark, None
        memory._resident = lambda: mark * 4 // 5
        memory.measure()

    with half_a_message(gateway, protocol) as client:
        gateway.until(lambda: any(claim[1] > 150_000 for claim in gateway.gateway._claims()))
        gateway.ask(lambda: near(1_000_000))
        gateway.await_(shares.enforce)
        assert gateway.reading(client, protocol), "it is within its share"
        gateway.ask(lambda: near(400_000))
        gateway.await_(shares.enforce)
        gateway.ask(gateway.gateway.writes.flush)
        while client.sock.recv(65_536):  # until the end
            pass


LARGE_HEAD: Final = b"\2\0\1\0\0\0\x0e\0\x3c\0\0" + (300_000).to_bytes(8) + b"\0\0\xce"


def test_readiness_and_the_log_say_so(gateway: Watched) -> None:
    gateway.use(SHORT)
    assert gateway.ask(gateway.gateway.readiness.reasons) == ["memory: short, publishers paused"]
    gateway.use(PLENTY)
    assert gateway.ask(gateway.gateway.readiness.reasons) == []


def test_the_watermark_of_a_gateway_reads_its_own_memory(gateway: Watched) -> None:
    if resident_reader() is None:
        pytest.skip("there is no /proc here")
    eventually(lambda: gateway.gateway.memory.used > 1 << 20)


def test_what_is_remembered_of_addresses_makes_room(gateway: Watched) -> None:
    """It would be worked out again, and a small gateway has nothing else to give."""
    ingress = gateway.gateway.listeners["mqtt"]._protocol
    assert isinstance(ingress, MqttIngress)
    with connect(gateway, "one")[0] as one:
        for number in range(1, 21):
            one.machine.publish(b"t/%d" % number, b"", 1, packet_id=number)
        one.flush()
        for number in range(1, 21):
            assert one.acked(PacketType.PUBACK)[0] == number
        kept = [gateway.ask(lambda: len(ingress.entries.of(EVERYBODY)))]
        gateway.use(SHORT)
        kept.append(gateway.ask(lambda: len(ingress.entries.of(EVERYBODY))))
        gateway.use(PLENTY)
        one.machine.publish(b"t/1", b"", 1, packet_id=21)
        one.flush()
        assert one.acked(PacketType.PUBACK)[0] == 21
    assert kept == [20, 0]
