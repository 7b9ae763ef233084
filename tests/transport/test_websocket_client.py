"""The link's side of a WebSocket: the upgrade that it asks for, what waits for it, and what ends it."""

from __future__ import annotations

import pytest
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Event, Ping, Request, TextMessage

from gateway.transport.filter import Ending
from gateway.transport.websocket import WebSocketClient, WebSocketFilter
from tests.transport.test_websocket import MESSAGE_MAX

BYE = CloseConnection(1001, "maintenance")


class Server:
    """wsproto's server at the other end."""

    def __init__(self, *, subprotocol: str | None = "mqtt") -> None:
        self.client = WebSocketClient("broker:8083", "/mqtt?token=a%20b", "mqtt")
        self.ws = WSConnection(ConnectionType.SERVER)
        self.ws.receive_data(self.client.send(b"CONNECT"))
        (request,) = self.ws.events()
        assert isinstance(request, Request)
        self.request = request
        self.answer = self.ws.send(AcceptConnection(subprotocol=subprotocol))

    def say(self, *events: Event) -> bytes:
        return self.client.receive(b"".join(self.ws.send(event) for event in events))

    def hear(self, data: bytes = b"") -> list[Event]:
        self.ws.receive_data(self.client.send(data))
        return list(self.ws.events())


@pytest.fixture
def server() -> Server:
    """One whose upgrade is over, and who has heard what waited for it."""
    one = Server()
    assert one.client.receive(one.answer) == b""
    assert one.hear(b"PUBLISH") == [BytesMessage(b"CONNECTPUBLISH")]
    return one


def test_the_upgrade_says_where_to_and_offers_mqtt() -> None:
    request = Server().request
    assert (request.host, request.target) == ("broker:8083", "/mqtt?token=a%20b")
    assert request.subprotocols == ["mqtt"]
    assert not request.extensions


def test_what_is_said_before_the_upgrade_waits_for_it(server: Server) -> None:
    assert server.hear() == []
    assert server.hear(b"later") == [BytesMessage(b"later")]


def test_frames_may_come_right_behind_the_upgrade_or_byte_by_byte() -> None:
    one = Server()
    assert one.client.receive(one.answer + one.ws.send(BytesMessage(b"CONNACK"))) == b"CONNACK"
    one = Server()
    data = one.answer + one.ws.send(BytesMessage(b"CONNACK"))
    assert b"".join(one.client.receive(data[at : at + 1]) for at in range(len(data))) == b"CONNACK"


def test_a_message_may_be_of_any_size(server: Server) -> None:
    assert server.say(BytesMessage(b"x" * 200_000)) == b"x" * 200_000


def test_a_ping_is_answered_and_a_close_is_taken(server: Server) -> None:
    assert server.say(Ping(b"there?"), BytesMessage(b"one"), BYE) == b"one"
    assert server.client.ended == Ending("closed by the peer")
    assert [type(event).__name__ for event in server.hear(b"never")] == ["Pong", "CloseConnection"]


def test_text_is_no_mqtt(server: Server) -> None:
    """MQTT-6.0.0-1."""
    assert server.say(TextMessage("hello")) == b""
    assert server.client.ended is not None
    assert server.client.ended.violation == "websocket_1003"
    assert [event.code for event in server.hear() if isinstance(event, CloseConnection)] == [1003]


def test_the_goodbye_is_a_close_frame(server: Server) -> None:
    server.ws.receive_data(server.client.finish())
    assert list(server.ws.events()) == [CloseConnection(1000, "")]
    assert WebSocketClient("h", "/", "mqtt").finish() == b""


REFUSALS = {
    "another subprotocol [MQTT-6.0.0-4]": (None, "the server does not support MQTT at this path"),
    "a status": (
        b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno",
        "the server responded with status 403 instead",
    ),
    "a page": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
        "the server responded with status 200 instead",
    ),
    "MQTT": (b"\x20\x02\x00\x00\r\n\r\n", "the server's response is not an upgrade"),
    "another upgrade": (
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
        "the server's response is not an upgrade",
    ),
    "no end": (b"HTTP/1.1 101 " + b"x" * 70_000, "the server's response is not an upgrade"),
}


@pytest.mark.parametrize("data, text", REFUSALS.values(), ids=REFUSALS)
def test_an_answer_that_is_no_upgrade_ends_it(data: bytes | None, text: str) -> None:
    one = Server(subprotocol=None)
    assert one.client.receive(one.answer if data is None else data) == b""
    assert one.client.ended is not None
    assert one.client.ended.refused == "websocket_upgrade"
    assert text in one.client.ended.text
    assert one.client.receive(b"more") == b""


def test_both_of_our_sides_understand_each_other() -> None:
    client, server = (
        WebSocketClient("h", "/mqtt", "mqtt"),
        WebSocketFilter("/mqtt", subprotocols=["mqtt"], message_bytes_max=MESSAGE_MAX),
    )
    assert server.receive(client.send(b"CONNECT")) == b""
    assert client.receive(server.send(b"")) == b""
    assert server.receive(client.send(b"")) == b"CONNECT"
    assert client.receive(server.send(b"CONNACK")) == b"CONNACK"
