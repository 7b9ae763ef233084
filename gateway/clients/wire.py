"""Blocking connection to a broker, and the interface that the clients of all three protocols have in common.

A client belongs to one thread. It either publishes or consumes. To publish, it sends a sequence of messages
with a limited number in flight and waits until the broker has acknowledged or refused every one. To consume,
`arrivals` returns the received messages, each with a token, and `acknowledge` acknowledges all messages up to
a token: all three protocols can acknowledge messages in order.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from gateway.egress.connect_errors import GARBLED, LOOK_BYTES, explain_end, reason
from gateway.errors import LinkError, RemoteProtocolError
from gateway.model.message import Message
from gateway.protocols import DIALECTS
from gateway.settings.endpoints import LinkUrl, address_of
from gateway.settings.mqtt import ByteOrder
from gateway.transport.websocket import WebSocketClient

READ_BYTES: Final = 262_144
TICK_SECS: Final = 1.0
IN_FLIGHT: Final = 1_000  # published messages without a response
Event = TypeVar("Event")


class ConnectionOptions(NamedTuple):
    """Address of a broker, and the options for a connection to it.

    The files are in PEM format: `ca_file` has the trusted certificate authorities, `cert_file` and `key_file`
    the client's own certificate and key. `version` and `byte_order` have the meaning that they have in the
    configuration of an MQTT link.
    """

    target: LinkUrl
    timeout_secs: float = 10.0
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    version: str = "auto"
    byte_order: ByteOrder = "auto"

    def __repr__(self) -> str:
        """Return protocol, host and port without the password, because the text may end up in a log."""
        return f"Access({self.target.protocol} {self.place})"

    @property
    def place(self) -> str:
        """Host and port of the broker as `host:port`, with an IPv6 address in brackets."""
        return address_of(self.target)


class BrokerRefusal(NamedTuple):
    """Reason why a broker did not accept a message; if `final` is True, a retry cannot succeed."""

    text: str
    final: bool


class ReceivedMessage(NamedTuple):
    """Message received from a broker, with the `token` to acknowledge it and the redelivered flag.

    Acknowledging a token also acknowledges all messages received before.
    """

    message: Message
    token: int
    redelivered: bool


class Client(Protocol):
    """Interface of a connection to a broker of any protocol."""

    def publish_many(
        self, messages: Sequence[Message], *, in_flight: int = IN_FLIGHT
    ) -> dict[int, BrokerRefusal]:
        """Publish messages and wait for the broker's responses.

        Return the refused messages, by their position in `messages`, with the reasons. At most `in_flight`
        messages await a response at a time. Raises LinkError if the connection fails or a response does not
        arrive in time; the broker may then have some of the messages.
        """

    def listen(self, address_options: Mapping[str, str], qos: int) -> None:
        """Consume from the address in `address_options`. Raises LinkError.

        `address_options` has the parts of the address by the protocol's names for them, such as `queue`.
        `qos` is used if the protocol has a QoS.
        """

    def arrivals(self, seconds: float) -> list[ReceivedMessage]:
        """Return the messages that have arrived, after waiting for at most `seconds` seconds.

        The list may be empty. Raises LinkError.
        """

    def pause_reading(self, seconds: float) -> None:
        """Stay connected for `seconds` seconds without reading messages. Raises LinkError."""

    def acknowledge(self, arrivals: Sequence[ReceivedMessage]) -> None:
        """Acknowledge these messages, which must be the oldest unacknowledged ones, in order of arrival."""

    def close(self) -> None:
        """Disconnect properly, with the protocol's own message."""

    def close_abruptly(self) -> None:
        """Close the socket without a DISCONNECT or its equivalent, for a connection that has failed."""


def connect(access: ConnectionOptions) -> Client:
    """Connect to the broker that `access` describes, by the client of its protocol. Raises LinkError."""
    made: Client = resolve_name(DIALECTS[access.target.protocol].client)(access)
    return made


class Silence(LinkError):
    """Error for a server that has accepted the TCP connection but sends no response."""


def messages(client: Client, seconds: float | None) -> Iterator[Message]:
    """Yield the messages that `client` receives, for `seconds` seconds; None means without end.

    Each message is acknowledged when the caller requests the next one. Raises LinkError.
    """
    end = None if seconds is None else time.monotonic() + seconds
    while end is None or time.monotonic() < end:
        for arrival in client.arrivals(TICK_SECS if end is None else end - time.monotonic()):
            yield arrival.message
            client.acknowledge([arrival])


class ClientMachine(Protocol):
    """Interface of a protocol's client state machine."""

    def receive_data(self, data: bytes, now: float) -> Sequence[Any]:
        """Parse received bytes and return their events; `now` is in seconds of the monotonic clock."""

    def data_to_send(self) -> bytes:
        """Remove and return the bytes to send."""


class Wire:
    """Socket connected to a broker, with the state machine of the protocol.

    While the connection is used, `tick` is called about once a second with the present time, in seconds of
    the monotonic clock.
    """

    def __init__(
        self, access: ConnectionOptions, machine: ClientMachine, tick: Callable[[float], None]
    ) -> None:
        """Connect to the broker that `access` describes, with TLS and WebSocket if its URL requires them.

        `machine` is the protocol's state machine, `tick` a function for its timers. Raises LinkError if the
        broker is unreachable.
        """
        self.machine = machine
        self.timeout_secs = access.timeout_secs
        self._tick = tick
        self._ticked = time.monotonic()
        self._place = access.place
        target = access.target
        self._protocol = target.protocol
        self._first = b""
        self._open = False
        try:
            sock = socket.create_connection((target.host, target.port), timeout=access.timeout_secs)
        except OSError as error:
            raise LinkError(f"{self._place}: {reason(error)}") from error
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sock = _secured(sock, access) if target.tls else sock
            self._layer = (
                WebSocketClient(
                    address_of(target), target.websocket, DIALECTS[target.protocol].subprotocols[0]
                )
                if target.websocket
                else None
            )
        except (OSError, ValueError) as error:
            sock.close()
            raise LinkError(f"{self._place}: {reason(error)}") from error

    def mark_open(self) -> None:
        """Record that the server uses the expected protocol and has accepted the login."""
        self._open = True

    def failure(self, why: str, kind: type[LinkError] = LinkError) -> LinkError:
        """Return an error of class `kind` for a connection that has ended for the reason `why`.

        Until `mark_open` has been called, the text also says which protocol the server seems to use instead.
        """
        return kind(f"{self._place}: {why if self._open else explain_end(self._protocol, self._first, why)}")

    def flush(self) -> None:
        """Write the bytes that the machine has to send. Raises LinkError."""
        data = self.machine.data_to_send()
        if self._layer is not None:
            data = self._layer.send(data)
        if data:
            try:
                self._sock.settimeout(self.timeout_secs)
                self._sock.sendall(data)
            except OSError as error:
                raise self.failure(reason(error)) from error

    def pause_reading(self, seconds: float) -> None:
        """Write pending bytes, then stay connected without reading for `seconds` seconds."""
        now = time.monotonic()
        if now - self._ticked >= TICK_SECS:
            self._ticked = now
            self._tick(now)
        self.flush()
        time.sleep(seconds)

    def turn(self, seconds: float) -> list[Any]:
        """Write pending bytes, read once, and return the events of the received bytes.

        The list is empty if no bytes arrive within `seconds` seconds or TICK_SECS, whichever is less. Raises
        LinkError if the connection fails or the received bytes are malformed.
        """
        now = time.monotonic()
        if now - self._ticked >= TICK_SECS:
            self._ticked = now
            self._tick(now)
        self.flush()
        try:
            self._sock.settimeout(max(0.001, min(seconds, TICK_SECS)))
            data = self._sock.recv(READ_BYTES)
        except (TimeoutError, ssl.SSLWantReadError):
            return []
        except OSError as error:
            raise self.failure(reason(error)) from error
        if not data:
            raise self.failure("the server closed the connection")
        if self._layer is not None:
            data = self._layer.receive(data)
            while self._layer.unread:
                data += self._layer.receive(b"")
            if not data and self._layer.ended is not None:
                raise LinkError(f"{self._place}: {self._layer.ended.text}")
        if not self._open:
            self._first += data[:LOOK_BYTES]
        try:
            return self._events_of(data) if data else []
        except RemoteProtocolError as error:
            raise self.failure(f"{GARBLED}: {error}") from error

    def _events_of(self, data: bytes) -> list[Any]:
        now = time.monotonic()
        events = list(self.machine.receive_data(data, now))
        while getattr(self.machine, "pending", False):
            events += self.machine.receive_data(b"", now)
        return events

    def events(self, seconds: float | None = None) -> Iterator[Any]:
        """Yield events as they arrive, until `seconds` have passed (None: forever). Raises LinkError."""
        end = None if seconds is None else time.monotonic() + seconds
        while end is None or time.monotonic() < end:
            yield from self.turn(TICK_SECS if end is None else end - time.monotonic())

    def read_events(self) -> Iterator[list[Any]]:
        """Yield a list of events for each read, which may be empty.

        Raises LinkError if no event arrives for `timeout_secs` seconds.
        """
        last_read = time.monotonic()
        while True:
            events = self.turn(TICK_SECS)
            if events:
                last_read = time.monotonic()
            elif time.monotonic() - last_read > self.timeout_secs:
                raise self.failure(f"no response within {self.timeout_secs:g} s", Silence)
            yield events

    def wait(self, event_type: type[Event], *ends: type[Any]) -> Event:
        """Return the next event of type `event_type`, and drop other events.

        `ends` are the types of events by which AMQP closes a channel or connection. Raises LinkError if an
        event of such a type arrives first, or if `timeout_secs` seconds pass.
        """
        for event in self.events(self.timeout_secs):
            if isinstance(event, event_type):
                return event
            if isinstance(event, ends):
                why = f"{event.text} ({event.reply_code})"
                raise self.failure(why if event.by_peer else f"{GARBLED}: {why}")
        raise self.failure(f"no response within {self.timeout_secs:g} s", Silence)

    def close(self) -> None:
        """Write pending bytes and close the socket. Raises LinkError if they cannot be written."""
        try:
            self.flush()
        finally:
            self._sock.close()

    def close_abruptly(self) -> None:
        """Close the socket without writing pending bytes."""
        self._sock.close()


def _secured(sock: socket.socket, access: ConnectionOptions) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=access.ca_file)
    if access.cert_file is not None:
        context.load_cert_chain(access.cert_file, access.key_file)
    return context.wrap_socket(sock, server_hostname=access.target.host)
