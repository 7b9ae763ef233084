"""An AMQP client on the listener, method by method: what client libraries never let happen, or hide."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from gateway.containment import counted
from gateway.model.properties import Headers, Value, ValueType, string
from gateway.model.spooled_bodies import join_pieces
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import (
    BasicProperties,
    decode_frame,
    decode_method,
    encode_basic_properties,
    encode_content_frames,
    encode_method_frame,
    encode_response,
)
from gateway.protocols.amqp091.events import (
    ChannelClosed,
    ChannelOpened,
    Closed,
    Confirms,
    GetResponse,
    MethodReceived,
    Returned,
)
from gateway.protocols.amqp091.spec import FRAME_METHOD, NESTING_MAX
from gateway.protocols.mqtt.spec import Version
from gateway.settings import Limits, StoreSettings, User
from tests.broker.parts import newest
from tests.ingress.amqp_client import Amqp
from tests.ingress.clients import PATIENCE_SECS, connect, eventually, stats
from tests.interop.gateway_fixture import Running, running, settings_of
from tests.passwords import hashed

ALIEN: Headers = (("x-max-age", Value(ValueType.STRING, "1D")),)  # of streams
NUMBER: Headers = (("alternate-exchange", Value(ValueType.INT32, 1)),)
UNREADABLE = b"\x80\x00\x02\xff\xfe"  # a content type that is not UTF-8


def tags(client: Amqp, count: int) -> list[tuple[int, bytes, bool]]:
    return [(tag, body, again) for _, _, tag, again, _, _, body in client.delivered(count)]


def queue(client: Amqp, name: str = "q", *, exclusive: bool = False) -> str:
    return client.call(m.QueueDeclare(name, exclusive=exclusive), m.QueueDeclareOk).queue


def test_what_is_published_before_a_method_is_there_for_the_method(gateway: Running) -> None:
    with Amqp(gateway).open() as client:
        queue(client)
        for body in (b"1", b"2"):
            client.machine.send_content(1, m.BasicPublish("", "q"), b"\0\0", body)
        client.say(m.BasicGet("q"), m.QueueDeclare("q", passive=True))
        got = client.next(GetResponse)
        assert (got.body, got.method.message_count) == (b"1", 1)
        declared = client.next(MethodReceived).method
        assert isinstance(declared, m.QueueDeclareOk)
        assert declared.message_count == 1


def test_confirms_come_in_runs_and_returns_come_before_theirs(gateway: Running) -> None:
    with Amqp(gateway).open() as client:
        queue(client)
        client.call(m.ConfirmSelect(), m.ConfirmSelectOk)
        client.publish("", "q", *[b"x"] * 5)
        confirmed: list[tuple[int, int, bool, bool]] = []
        while not confirmed or confirmed[-1][1] < 5:
            confirmed += client.next(Confirms).confirms
        assert all(is_ack for *_, is_ack in confirmed)
        client.publish("", "nowhere", b"back", mandatory=True)
        returned = client.next(Returned)
        assert (returned.method.reply_code, returned.method.reply_text) == (312, "NO_ROUTE")
        assert (returned.method.routing_key, returned.body) == ("nowhere", b"back")
        assert client.next(Confirms).confirms == [(1, 6, False, True)]
        client.publish("", "nowhere", b"gone")
        assert client.next(Confirms).confirms == [(1, 7, False, True)]


def test_a_get_waits_until_it_is_known_what_the_disk_refuses(tmp_path: Path) -> None:
    """It does not say that there is nothing."""
    settings = settings_of(store=StoreSettings(path=tmp_path / "data"))
    with running(settings) as gateway, Amqp(gateway).open() as client:
        client.call(m.QueueDeclare("q", durable=True), m.QueueDeclareOk)
        client.publish("", "q", b"there")
        queue = gateway.gateway.host.queues["q"]
        gateway.until(lambda: len(queue) == 1)
        gateway.ask(queue.gate.close)
        client.say(m.BasicGet("q", no_ack=True))
        gateway.until(lambda: bool(queue.gate._waiting))
        gateway.ask(lambda: (queue.gate.open(), gateway.gateway.writes.flush()))
        assert client.next(GetResponse).body == b"there"


def test_prefetch_bounds_what_is_unacknowledged_and_requeueing_keeps_the_place(gateway: Running) -> None:
    with Amqp(gateway).open() as client:
        queue(client)
        client.publish("", "q", *[str(number).encode() for number in range(6)])
        client.call(m.BasicQos(prefetch_count=3), m.BasicQosOk)
        client.call(m.BasicConsume("q"), m.BasicConsumeOk)
        assert tags(client, 3) == [(1, b"0", False), (2, b"1", False), (3, b"2", False)]
        client.say(m.BasicNack(2, requeue=True))
        assert tags(client, 1) == [(4, b"1", True)]
        client.say(m.BasicReject(1, requeue=False), m.BasicAck(4, multiple=True))
        assert tags(client, 3) == [(5, b"3", False), (6, b"4", False), (7, b"5", False)]


def test_deliveries_return_when_their_connection_is_lost(gateway: Running) -> None:
    with Amqp(gateway).open() as other:
        queue(other)
        client = Amqp(gateway).open()
        client.call(m.BasicConsume("q"), m.BasicConsumeOk)
        other.publish("", "q", b"1", b"2")
        assert [body for _, body, _ in tags(client, 2)] == [b"1", b"2"]
        client.cut()
        other.call(m.BasicConsume("q"), m.BasicConsumeOk)
        assert tags(other, 2) == [(1, b"1", True), (2, b"2", True)]


@pytest.mark.parametrize(
    "method, code, text",
    [
        (m.BasicAck(9), 406, "unknown delivery tag 9"),
        (m.BasicReject(9), 406, "unknown delivery tag 9"),
        (m.BasicNack(9), 406, "unknown delivery tag 9"),
        (m.QueueDeclare("none", passive=True), 404, "no queue 'none'"),
        (m.ExchangeDeclare("none", "direct", passive=True), 404, "no exchange 'none'"),
        (m.QueueBind("q", "none", "k"), 404, "no exchange 'none'"),
        (m.BasicConsume("none"), 404, "no queue 'none'"),
        (m.QueueDeclare("q", durable=True), 406, "inequivalent arg 'durable'"),
        (m.ExchangeDeclare("amq.direct", "topic", durable=True), 406, "inequivalent arg 'type'"),
        (m.ExchangeDeclare("amq.new", "topic"), 403, "reserved prefix"),
        (m.QueueDeclare("new", arguments=ALIEN), 406, "x-max-age"),
        (m.ExchangeDeclare("new", "topic", arguments=NUMBER), 406, "alternate-exchange"),
        (m.QueueDelete("full", if_empty=True), 406, "not empty"),
    ],
)
def test_soft_faults_close_the_channel_only(gateway: Running, method: m.Method, code: int, text: str) -> None:
    with Amqp(gateway).open() as client:
        queue(client)
        queue(client, "full")
        client.publish("", "full", b"x")
        client.say(method)
        refusal = client.refusal()
        assert (refusal.reply_code, text in refusal.text) == (code, True)
        assert (refusal.class_id, refusal.method_id) == (method.index >> 16, method.index & 0xFFFF)
        queue(client)
        word = {403: "access_refused", 404: "not_found", 406: "precondition_failed"}[code]
        assert stats(gateway, "amqp091").protocol_errors.counts == {word: 1}


@pytest.mark.parametrize(
    "method, code",
    [
        (m.ChannelFlow(False), 540),
        (m.BasicQos(prefetch_size=1), 540),
        (m.ExchangeDeclare("x", "x-delayed"), 503),
    ],
)
def test_hard_faults_close_the_connection(gateway: Running, method: m.Method, code: int) -> None:
    with Amqp(gateway).open() as client:
        client.say(method)
        assert client.next(Closed).reply_code == code
        assert client.rest() == b""


def test_a_client_that_closes_reads_close_ok_and_closes_the_socket_itself(gateway: Running) -> None:
    """As at RabbitMQ; the gateway waits for some seconds only."""
    with Amqp(gateway).open() as client:
        client.machine.close()
        client.flush()
        while not client.machine.closed:
            client.machine.receive_data(client.sock.recv(1), 0.0)
        with Amqp(gateway).open():
            """Several wake-ups of the gateway later."""
        client.sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.sock.recv(1)
        client.sock.settimeout(PATIENCE_SECS)
        assert client.rest() == b""


def test_publishing_to_an_exchange_that_is_not_there_closes_the_channel(gateway: Running) -> None:
    with Amqp(gateway).open() as client:
        client.publish("none", "k", b"1", b"2")
        refusal = client.refusal()
        assert (refusal.reply_code, refusal.class_id, refusal.method_id) == (404, 60, 40)
        queue(client)


def test_a_consumer_hears_that_its_queue_was_deleted(gateway: Running) -> None:
    with Amqp(gateway).open() as client, Amqp(gateway).open() as other:
        queue(client)
        client.call(m.BasicConsume("q", "tag"), m.BasicConsumeOk)
        assert other.call(m.QueueDelete("q"), m.QueueDeleteOk).message_count == 0
        other.call(m.QueueDelete("q"), m.QueueDeleteOk)
        assert client.next(MethodReceived).method == m.BasicCancel("tag", True)
        assert isinstance(client.call(m.BasicCancel("tag"), m.BasicCancelOk), m.BasicCancelOk)


def test_exclusive_queues_and_consumers(gateway: Running) -> None:
    with Amqp(gateway).open() as owner, Amqp(gateway).open() as other:
        name = queue(owner, "", exclusive=True)
        other.say(m.BasicConsume(name))
        assert other.refusal().reply_code == 405
        queue(owner)
        owner.call(m.BasicConsume("q", exclusive=True), m.BasicConsumeOk)
        other.say(m.BasicConsume("q"))
        assert other.refusal().reply_code == 403
        owner.cut()
        eventually(lambda: name not in gateway.gateway.host.queues)
        other.call(m.BasicConsume("q"), m.BasicConsumeOk)


def test_a_client_that_does_not_wait_for_our_answers_in_the_handshake(gateway: Running) -> None:
    with Amqp(gateway) as client:
        response = encode_response("PLAIN", "guest", "guest")
        machine = client.machine
        for method in (
            m.ConnectionStartOk((), "PLAIN", response, "en_US"),
            m.ConnectionTuneOk(10, 131_072, 0),
            m.ConnectionOpen("/"),
        ):
            machine._send(0, method)
        machine._send(1, m.ChannelOpen())
        machine._send(1, m.QueueDeclare("early"))
        client.flush()
        eventually(lambda: "early" in gateway.gateway.host.queues)


def test_passwords_are_verified_beside_the_loop() -> None:
    with running(settings_of(users={"ann": User(password_hash=SecretStr(hashed("right")))})) as gateway:
        with Amqp(gateway, user="ann", password="wrong") as client:
            assert client.next(Closed).reply_code == 403
        with Amqp(gateway, user="ann", password="right").open() as client:
            queue(client)


def test_a_silent_client_is_let_go_after_two_heartbeats(gateway: Running) -> None:
    with Amqp(gateway, heartbeat=1).open() as client:
        began = time.monotonic()
        client.rest()
        assert time.monotonic() - began > 1.0
    assert stats(gateway, "amqp091").protocol_errors.counts == {"heartbeat_timeout": 1}


def test_a_message_over_the_limit_closes_the_channel_and_one_at_the_limit_passes() -> None:
    settings = settings_of(limits=Limits(amqp_message_bytes_max=100_000))
    with running(settings) as gateway, Amqp(gateway, frame_max=8_192).open() as client:
        queue(client)
        client.publish("", "q", bytes(100_000), bytes(100_001))
        refusal = client.refusal()
        assert (refusal.reply_code, "100001" in refusal.text) == (406, True)
        client.say(m.BasicGet("q", no_ack=True))
        assert client.next(GetResponse).body == bytes(100_000)


def test_properties_that_cannot_be_read_harm_nobody_else(gateway: Running) -> None:
    with Amqp(gateway).open() as client, connect(gateway, "five")[0] as five:
        five.subscribe("#", 1)
        with connect(gateway, "old", version=Version.V311)[0] as old:
            old.subscribe("#", 1)
            client.publish("amq.topic", "a", b"unreadable", properties=UNREADABLE)
            client.publish("amq.topic", "a", b"fine")
            assert five.body() == b"fine"
            assert {old.body(), old.body()} == {b"unreadable", b"fine"}
            assert gateway.ask(lambda: gateway.gateway.mqtt.tally.undeliverable) == 1
            assert gateway.ask(lambda: len(gateway.gateway.dead_letters)) == 1


def nested(depth: int) -> bytes:
    """The properties of a message whose headers are tables within each other."""
    pairs: Headers = ()
    for _ in range(depth):
        pairs = (("t", Value(ValueType.TABLE, pairs)),)
    return encode_basic_properties(BasicProperties(headers=pairs))


def test_headers_are_nested_to_a_limit(gateway: Running) -> None:
    """Tables at the limit arrive byte for byte; beyond it they cost the connection, as malformed."""
    deepest = nested(NESTING_MAX)
    table = b"\x01tF" + deepest[2:]  # what stands behind the flags, as a field of one more table
    deeper = deepest[:2] + len(table).to_bytes(4, "big") + table
    with Amqp(gateway).open() as client:
        queue(client)
        client.say(m.BasicConsume("q", no_ack=True))
        client.publish("", "q", b"deep", properties=deepest)
        ((*_, properties, body),) = client.delivered(1)
        assert (properties, body) == (deepest, b"deep")
        client.publish("", "q", b"deeper", properties=deeper)
        closed = client.next(Closed)
        assert (closed.reply_code, "nested" in closed.text) == (502, True)


def test_a_headers_exchange_that_must_read_them_ends_the_connection(gateway: Running) -> None:
    with Amqp(gateway).open() as client:
        queue(client)
        client.call(m.QueueBind("q", "amq.headers", ""), m.QueueBindOk)
        client.publish("amq.headers", "", b"x", properties=UNREADABLE)
        assert client.next(Closed).reply_code == 502


def wide(client: Amqp, *bodies: bytes, expiration: str | None = None, name: str = "q") -> None:
    """Publish messages whose properties need a frame of 10 kB."""
    headers = (("wide", string("v" * 10_000)),)
    properties = encode_basic_properties(BasicProperties(headers=headers, expiration=expiration))
    client.publish("", name, *bodies, properties=properties)


@pytest.mark.parametrize("no_ack", [True, False])
@pytest.mark.parametrize("kind", ["classic", "priority", "quorum"])
def test_properties_larger_than_a_consumers_frames_wait_for_others(
    gateway: Running, no_ack: bool, kind: str
) -> None:
    with Amqp(gateway).open() as client, Amqp(gateway, frame_max=4_096).open() as small:
        more: dict[str, Any] = {}
        if kind == "quorum":
            more = {"durable": True, "arguments": (("x-queue-type", string("quorum")),)}
        elif kind == "priority":
            more = {"arguments": (("x-max-priority", Value(ValueType.INT32, 5)),)}
        client.call(m.QueueDeclare("q", **more), m.QueueDeclareOk)
        small.call(m.BasicConsume("q", no_ack=no_ack), m.BasicConsumeOk)
        wide(client, b"1")
        client.publish("", "q", b"2")
        wide(client, b"3")
        client.publish("", "q", b"4")
        assert [body for _, body, _ in tags(small, 2)] == [b"2", b"4"], "they pass"
        assert client.call(m.QueueDeclare("q", passive=True), m.QueueDeclareOk).message_count == 2
        assert gateway.ask(lambda: newest(gateway.gateway.dead_letters)) == []
        client.call(m.BasicConsume("q", no_ack=no_ack), m.BasicConsumeOk)
        assert [(body, again) for _, body, again in tags(client, 2)] == [(b"1", False), (b"3", False)]
        wide(client, b"5")
        assert [body for _, body, _ in tags(client, 1)] == [b"5"], "whoever was asked first"
        assert client.call(m.QueueDeclare("q", passive=True), m.QueueDeclareOk).message_count == 0


def test_what_is_given_back_is_offered_anew(gateway: Running) -> None:
    with Amqp(gateway).open() as client, Amqp(gateway, frame_max=4_096).open() as small:
        queue(client)
        small.call(m.BasicConsume("q"), m.BasicConsumeOk)
        client.call(m.BasicQos(prefetch_count=1), m.BasicQosOk)
        client.call(m.BasicConsume("q"), m.BasicConsumeOk)
        wide(client, b"1", b"2")
        ((tag, body, _),) = tags(client, 1)
        assert body == b"1"
        client.say(m.BasicNack(tag, requeue=True))
        ((tag, body, _),) = tags(client, 1)
        client.say(m.BasicAck(tag))
        ((_, other, _),) = tags(client, 1)
        assert {body, other} == {b"1", b"2"}


def test_a_get_takes_what_fits_and_sends_no_frame_over_the_limit(gateway: Running) -> None:
    with Amqp(gateway).open() as client, Amqp(gateway, frame_max=4_096).open() as small:
        queue(client)
        wide(client, b"1")
        small.say(m.BasicGet("q"))
        assert isinstance(small.next(MethodReceived).method, m.BasicGetEmpty)
        client.publish("", "q", b"2")
        client.call(m.QueueDeclare("q", passive=True), m.QueueDeclareOk)
        small.say(m.BasicGet("q"))
        got = small.next(GetResponse)
        assert (got.body, got.method.message_count) == (b"2", 1)
        client.say(m.BasicGet("q"))
        assert client.next(GetResponse).body == b"1"


def test_what_is_set_aside_expires_and_is_purged(gateway: Running) -> None:
    with Amqp(gateway).open() as client, Amqp(gateway, frame_max=4_096).open() as small:
        queue(client)
        small.call(m.BasicConsume("q", no_ack=True), m.BasicConsumeOk)
        wide(client, b"1", b"2", expiration="50")
        wide(client, b"3")
        client.publish("", "q", b"4")
        tags(small, 1)
        held = gateway.gateway.host.queues["q"]
        gateway.until(lambda: held.drop_expired() == 0.0 and len(held) == 1)
        assert client.call(m.QueuePurge("q"), m.QueuePurgeOk).message_count == 1
        assert gateway.ask(lambda: (len(held), held.byte_count, held.unacknowledged)) == (0, 0, 0)
        wide(client, b"5")
        small.cut()
        gateway.until(lambda: not held.consumers)
        client.say(m.BasicGet("q"))
        assert client.next(GetResponse).body == b"5"


def test_in_an_exclusive_queue_nobody_else_can_take_it(gateway: Running) -> None:
    with Amqp(gateway).open() as client, Amqp(gateway, frame_max=4_096).open() as small:
        queue(small, exclusive=True)
        wide(client, b"1", b"2")
        client.publish("", "q", b"3")
        client.call(m.QueueDeclare("other"), m.QueueDeclareOk)
        small.say(m.BasicGet("q"))
        assert small.next(GetResponse).body == b"3"
        letters = gateway.ask(lambda: newest(gateway.gateway.dead_letters))
        assert [letter.message.body for letter in letters] == [b"2", b"1"]


def test_channels_are_independent(gateway: Running) -> None:
    with Amqp(gateway).open() as client:
        client.machine.open_channel()
        client.flush()
        client.next(ChannelOpened)
        client.machine.send_method(2, m.QueueDeclare("none", passive=True))
        client.flush()
        assert client.next(ChannelClosed).channel == 2
        queue(client)


def answers(client: Amqp, *said: bytes) -> list[str]:
    """The methods that answer frames of channel 1 which were sent in one segment, up to what ends it."""
    client.send(b"".join(said))
    data, at = b"", 0
    names: list[str] = []
    while not names or names[-1] not in ("channel.close", "channel.close-ok", "connection.close"):
        frame = decode_frame(data, at, 131_072)
        if frame is None:
            data += client.sock.recv(65_536)
            continue
        kind, _, payload, at = frame
        if kind == FRAME_METHOD:
            names.append(decode_method(payload).name)
    return names


def published(exchange: str, key: str, *, mandatory: bool = False) -> bytes:
    method = encode_method_frame(1, m.BasicPublish(exchange, key, mandatory))
    return method + join_pieces(encode_content_frames(1, b"\0\0", b"x", 4_096))


CLOSE = encode_method_frame(1, m.ChannelClose(200, "bye"))
CONSUME = encode_method_frame(1, m.BasicConsume("q", no_ack=True))
CONFIRM = encode_method_frame(1, m.ConfirmSelect())
IN_ONE_SEGMENT = [
    (
        (
            encode_method_frame(1, m.ConfirmSelect()),
            published("", "q"),
            published("", "?", mandatory=True),
            CLOSE,
        ),
        ["confirm.select-ok", "basic.return", "basic.ack", "channel.close-ok"],
    ),
    ((published("", "q"), CONSUME, CLOSE), ["basic.consume-ok", "basic.deliver", "channel.close-ok"]),
    ((published("nowhere", "k"), CLOSE), ["channel.close"]),
    ((published("nowhere", "k"), CONSUME, CLOSE), ["channel.close"]),
    ((encode_method_frame(1, m.TxSelect()), CLOSE), ["tx.select-ok", "channel.close-ok"]),
    ((CONSUME, encode_method_frame(1, m.ChannelOpen())), ["basic.consume-ok", "connection.close"]),
]


@pytest.mark.parametrize("said, heard", IN_ONE_SEGMENT)
def test_what_ends_a_channel_comes_behind_what_was_said_before(
    gateway: Running, said: tuple[bytes, ...], heard: list[str]
) -> None:
    before = counted["connection"] + counted["delivery"]
    with Amqp(gateway).open() as client:
        queue(client, exclusive=True)
        assert answers(client, *said) == heard
    assert counted["connection"] + counted["delivery"] == before


def test_more_consumers_than_a_connection_may_have_cost_a_channel() -> None:
    limits = Limits(consumers_max=2)
    with running(settings_of(limits=limits)) as gateway, Amqp(gateway).open() as client:
        queue(client)
        for tag in ("a", "b"):
            client.call(m.BasicConsume("q", tag), m.BasicConsumeOk)
        client.say(m.BasicConsume("q", "c"))
        refused = client.refusal()
        text = "PRECONDITION_FAILED - reached maximum (2) of consumers per connection (limits.consumers_max)"
        assert (refused.reply_code, refused.text, refused.method_id) == (406, text, 20)
        client.call(m.BasicConsume("q", "c"), m.BasicConsumeOk)  # those of the channel have gone with it


def test_malformed_headers_are_told_when_they_come_also_within_a_transaction(gateway: Running) -> None:
    with Amqp(gateway).open() as client:
        client.call(m.TxSelect(), m.TxSelectOk)
        client.publish("amq.headers", "", b"x", properties=b"\x20\x00\x00\x00\x00\x09x")
        assert client.next(Closed).reply_code == 502
