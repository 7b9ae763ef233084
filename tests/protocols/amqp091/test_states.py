"""The handshake, what is agreed in it, and which methods each state allows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gateway.errors import LocalProtocolError
from gateway.model.properties import string
from gateway.protocols.amqp091 import events as e
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import (
    encode_method_frame,
)
from gateway.protocols.amqp091.server import ServerConnection
from gateway.protocols.amqp091.spec import HANDSHAKE_FRAME_MAX, PAUSED_BYTES_MAX, PROTOCOL_HEADER, ReplyCode
from tests.protocols.amqp091.wires import Wire, bytes_apart, new_client, open_wire


def test_the_handshake() -> None:
    server = ServerConnection(server_properties=(("product", string("x")),), heartbeat=30, frame_max=50_000)
    wire = Wire(server, new_client(virtual_host="v", heartbeat=10, channel_max=5))
    wire.move()
    at_server, at_client = wire.take()
    assert at_server == [e.Authenticate("PLAIN", b"\0guest\0guest", ()), e.Open("v")]
    assert at_client == [e.Opened((("product", string("x")),))]
    for side in (wire.server, wire.client):
        assert (side.frame_max, side.channel_max, side.heartbeat) == (50_000, 5, 10)
    assert server.received == {
        "connection.start-ok": 1,
        "connection.tune-ok": 1,
        "connection.open": 1,
    }
    assert server.sent == {"connection.start": 1, "connection.tune": 1, "connection.open-ok": 1}


def test_the_handshake_byte_by_byte() -> None:
    wire = Wire()
    wire.move(bytes_apart)
    assert [type(event) for event in wire.to_server + wire.to_client] == [e.Authenticate, e.Open, e.Opened]


def test_a_challenge() -> None:
    server, client = ServerConnection(mechanisms="PLAIN X"), new_client(mechanism="X", response=b"1")
    server.receive_data(client.data_to_send(), 0)
    client.receive_data(server.data_to_send(), 0)
    server.receive_data(client.data_to_send(), 0)
    server.secure(b"more?")
    assert client.receive_data(server.data_to_send(), 0) == [e.Challenged(b"more?")]
    client.secure_ok(b"2")
    assert server.receive_data(client.data_to_send(), 0) == [e.SecureResponse(b"2")]
    with pytest.raises(LocalProtocolError):
        server.opened()


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n", b"AMQP\x03\x01\x00\x00", b"\x10", b"AMQP\x00\x00\x09\x02"]
)
def test_another_protocol_is_told_ours(data: bytes) -> None:
    server = ServerConnection()
    assert server.receive_data(data, 0) == []
    assert (server.data_to_send(), server.closed) == (PROTOCOL_HEADER, True)
    assert server.receive_data(PROTOCOL_HEADER, 0) == []


def test_a_server_of_another_version() -> None:
    client = new_client()
    (event,) = client.receive_data(b"AMQP\x00\x01\x00\x00", 0)
    assert isinstance(event, e.Closed)
    assert "1.0.0" in event.text
    assert client.closed


def test_pipelined_bytes_wait_for_the_decision() -> None:
    server = ServerConnection()
    start = [m.ConnectionStartOk((), "PLAIN", b"\0a\0b"), m.ConnectionTuneOk(9, 9_999), m.ConnectionOpen()]
    data = PROTOCOL_HEADER + b"".join(encode_method_frame(0, method) for method in start)
    data += encode_method_frame(1, m.ChannelOpen())
    assert [type(event) for event in server.receive_data(data, 0)] == [e.Authenticate]
    server.authenticated()
    assert [type(event) for event in server.receive_data(b"", 0)] == [e.Open]
    server.opened()
    assert server.receive_data(b"", 0) == [e.ChannelOpened(1)]


def test_what_waits_is_limited() -> None:
    server = ServerConnection()
    server.receive_data(
        PROTOCOL_HEADER + encode_method_frame(0, m.ConnectionStartOk((), "PLAIN", b"\0a\0b")), 0
    )
    (event,) = server.receive_data(bytes(PAUSED_BYTES_MAX + 1), 0)
    assert isinstance(event, e.Closed)
    assert event.reply_code == ReplyCode.FRAME_ERROR


@pytest.mark.parametrize("more", [0, 1])
def test_a_start_ok_has_a_limit_that_a_token_fits_into(more: int) -> None:
    """The type, channel, size and end of the frame are 8 bytes; its head is enough for the refusal."""
    empty = len(encode_method_frame(0, m.ConnectionStartOk((), "PLAIN", b"")))
    token = bytes(HANDSHAKE_FRAME_MAX - empty + more)
    data = PROTOCOL_HEADER + encode_method_frame(0, m.ConnectionStartOk((), "PLAIN", token))
    if not more:
        assert ServerConnection().receive_data(data, 0) == [e.Authenticate("PLAIN", token, ())]
        return
    (event,) = ServerConnection().receive_data(data[:100], 0)
    assert isinstance(event, e.Closed)
    assert event.reply_code == ReplyCode.FRAME_ERROR


TUNE_FAULTS = [
    m.ConnectionTuneOk(0, 200_000, 0),
    m.ConnectionTuneOk(0, 4095, 0),
    m.ConnectionTuneOk(3000, 9_999, 0),
    m.ConnectionTuneOk(9, 0, 0),
    m.ConnectionTuneOk(0, 9_999, 0),
]


@pytest.mark.parametrize("tune_ok", TUNE_FAULTS)
def test_limits_beyond_the_offer_are_refused(tune_ok: m.Method) -> None:
    server = ServerConnection()
    server.receive_data(PROTOCOL_HEADER + encode_method_frame(0, m.ConnectionStartOk((), "PLAIN", b"")), 0)
    server.authenticated()
    (event,) = server.receive_data(encode_method_frame(0, tune_ok), 0)
    assert isinstance(event, e.Closed)
    assert (event.reply_code, event.class_id, event.method_id) == (530, 10, 31)


def test_a_mechanism_that_is_not_offered() -> None:
    wire = Wire(ServerConnection(mechanisms="EXTERNAL"), new_client())
    wire.move()
    (event,) = wire.to_client
    assert isinstance(event, e.Closed)
    assert event.reply_code == ReplyCode.NOT_ALLOWED


def after_start(server: ServerConnection) -> None:
    server.receive_data(PROTOCOL_HEADER, 0)


def after_tune(server: ServerConnection) -> None:
    server.receive_data(PROTOCOL_HEADER + encode_method_frame(0, m.ConnectionStartOk((), "PLAIN", b"")), 0)
    server.authenticated()


@pytest.mark.parametrize(
    "prepare, legal", [(after_start, m.ConnectionStartOk), (after_tune, m.ConnectionTuneOk)]
)
def test_only_the_methods_of_the_state(
    prepare: Callable[[ServerConnection], None], legal: type[m.Method]
) -> None:
    for kind in m.METHODS.values():
        if kind in (legal, m.ConnectionClose) or kind.content:
            continue
        server = ServerConnection()
        prepare(server)
        (event,) = server.receive_data(encode_method_frame(0, kind()), 0)
        assert isinstance(event, e.Closed), kind.name
        assert event.reply_code == ReplyCode.CHANNEL_ERROR, kind.name
        assert server.closed, "a stranger's faults are not worth an answer"


@pytest.mark.parametrize("at_server", [True, False])
def test_the_methods_of_an_open_channel(at_server: bool) -> None:
    direction = m.TO_SERVER if at_server else m.TO_CLIENT
    openers = (m.ChannelOpen, m.ChannelOpenOk, m.ChannelCloseOk)
    for kind in m.METHODS.values():
        wire = open_wire()
        side = wire.server if at_server else wire.client
        if kind.content or kind in (m.BasicAck, m.BasicNack, m.ChannelClose):
            continue
        (event,) = side.receive_data(encode_method_frame(1, kind()), 0)
        if kind.direction & direction and kind.index >> 16 != 10 and kind not in openers:
            assert event == e.MethodReceived(1, kind())
        else:
            assert isinstance(event, e.Closed), kind.name
            second = at_server and kind is m.ChannelOpen
            assert event.reply_code == (ReplyCode.CHANNEL_ERROR if second else ReplyCode.COMMAND_INVALID)
