"""A blocking AMQP 0-9-1 client that speaks method by method, for tests that no library would let happen."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import TypeVar

from gateway.egress.amqp091.session import client_properties
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.client import ClientConnection
from gateway.protocols.amqp091.codec import encode_response
from gateway.protocols.amqp091.events import (
    ChannelClosed,
    ChannelOpened,
    Closed,
    Confirms,
    Deliveries,
    Event,
    GetResponse,
    MethodReceived,
    Opened,
    Returned,
)
from tests.ingress.clients import Ported, Raw

Kind = TypeVar(
    "Kind",
    ChannelClosed,
    ChannelOpened,
    Closed,
    Confirms,
    Deliveries,
    GetResponse,
    MethodReceived,
    Opened,
    Returned,
)
Answer = TypeVar("Answer", bound=m.Method)
NOTHING = b"\0\0"  # a content header without properties
Delivery = tuple[int, bytes, int, bool, bytes, bytes, bytes]


class Amqp(Raw):
    """A connection with one channel open."""

    def __init__(
        self,
        gateway: Ported,
        *,
        user: str = "guest",
        password: str = "guest",
        virtual_host: str = "/",
        heartbeat: int = 60,
        frame_max: int = 131_072,
        listener: str = "amqp091",
        mechanism: str = "PLAIN",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(gateway.port(listener))
        if tls is not None:
            self.sock = tls.wrap_socket(self.sock, server_hostname="127.0.0.1")
        self.machine = ClientConnection(
            mechanism=mechanism,
            response=encode_response(mechanism, user, password),
            virtual_host=virtual_host,
            heartbeat=heartbeat,
            frame_max=frame_max,
            client_properties=client_properties("test"),
        )
        self._events: list[Event] = []
        self.flush()

    def open(self) -> Amqp:
        """Wait for the handshake and open channel 1."""
        self.next(Opened)
        self.open_channel()
        return self

    def open_channel(self) -> None:
        """One more channel."""
        self.machine.open_channel()
        self.flush()
        self.next(ChannelOpened)

    def events(self) -> list[Event]:
        """What has been heard and not been asked for yet; waits until there is something."""
        while not self._events:
            data = self.sock.recv(65_536)
            if not data:
                raise ConnectionError("the gateway has closed the connection")
            self._events += self.machine.receive_data(data, 0.0)
            self.flush()
        found, self._events = self._events, []
        return found

    def flush(self) -> None:
        data = self.machine.data_to_send()
        if data:
            self.send(data)

    def next(self, kind: type[Kind]) -> Kind:
        """The next event of a kind; others in between are passed over."""
        while True:
            while self._events:
                event = self._events.pop(0)
                if isinstance(event, kind):
                    return event
            data = self.sock.recv(65_536)
            if not data:
                raise ConnectionError("the gateway has closed the connection")
            self._events += self.machine.receive_data(data, 0.0)
            self.flush()

    def call(self, method: m.Method, answer: type[Answer]) -> Answer:
        self.machine.send_method(1, method)
        self.flush()
        found = self.next(MethodReceived).method
        assert isinstance(found, answer)
        return found

    def say(self, *methods: m.Method) -> None:
        """Methods in one write, without waiting."""
        for method in methods:
            self.machine.send_method(1, method)
        self.flush()

    def publish(
        self, exchange: str, key: str, *bodies: bytes, mandatory: bool = False, properties: bytes = NOTHING
    ) -> None:
        """All in one write."""
        for body in bodies:
            self.machine.send_content(1, m.BasicPublish(exchange, key, mandatory), properties, body)
        self.flush()

    def delivered(self, count: int) -> Sequence[Delivery]:
        """The next messages: channel, consumer tag, tag, redelivered, address, properties, body."""
        found: list[Delivery] = []
        while len(found) < count:
            found += self.next(Deliveries).contents
        return found

    def refusal(self) -> ChannelClosed:
        """Why the channel was closed; another one is opened in its place."""
        closed = self.next(ChannelClosed)
        self.machine.open_channel()
        self.flush()
        self.next(ChannelOpened)
        return closed
