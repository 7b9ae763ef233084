"""STOMP on a listener: CONNECT, SEND, SUBSCRIBE, ACK, NACK, UNSUBSCRIBE, DISCONNECT, and receipts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from gateway.broker.queue import Queue
from gateway.errors import RemoteProtocolError
from gateway.ingress.client import CloseReason, InFlight, IngressClient
from gateway.ingress.clients import IngressClients
from gateway.ingress.services import Services
from gateway.ingress.source import ListenerSource
from gateway.model.dialect import NameRefused
from gateway.model.message import Message, Sender
from gateway.model.outcome import Outcome
from gateway.model.properties import PropertySet
from gateway.settings.endpoints import AnonymousListener
from gateway.transport.stream import Stream
from tests.stomp.namespace import StompNamespace
from tests.stomp.protocol.codec import (
    Decoder,
    Frame,
    decode_properties,
    encode_frame,
    encode_headers,
    headers_of,
)
from tests.stomp.protocol.dialect import STOMP

UNACKNOWLEDGED_MAX: Final = 1_000


class StompIngress(ListenerSource):
    """The STOMP side of one listener. A receipt is (connection, receipt-id)."""

    def __init__(self, name: str, services: Services, ingress_clients: IngressClients) -> None:
        super().__init__(name, services, ingress_clients)
        given = services.settings.listeners[name]
        assert isinstance(given, AnonymousListener)
        self.anonymous = given.anonymous
        self._namespace = StompNamespace()

    @property
    def namespace(self) -> StompNamespace:
        return self._namespace

    def connect(self, stream: Stream, now: float) -> StompConnection:
        return StompConnection(self, stream)

    def settle(
        self, receipts: list[tuple[StompConnection, str]], refused: dict[int, Outcome] | None, received: float
    ) -> None:
        for at, (connection, receipt) in enumerate(receipts):
            outcome = None if refused is None else refused.get(at)
            if outcome is not None:
                connection.say(Frame("ERROR", {"message": outcome.text, "receipt-id": receipt}))
            elif receipt:
                connection.say(Frame("RECEIPT", {"receipt-id": receipt}))
        self.stats.count_settled(len(receipts), refused, self.now() - received)


class Subscription:
    """The consumer of one subscription's queue."""

    def __init__(self, connection: StompConnection, identifier: str, queue: Queue, *, acks: bool) -> None:
        self.connection = connection
        self.identifier = identifier
        self.queue = queue
        self.acks = acks
        self.taken: dict[str, tuple[int, Message]] = {}

    def capacity(self) -> int:
        return 0 if self.connection.stream.congested else UNACKNOWLEDGED_MAX - len(self.taken)

    def deliver(self, queue: Queue, position: int, messages: list[Message], redelivered: bool) -> None:
        for at, message in enumerate(messages, position):
            name = f"{self.identifier}-{at}"
            headers = headers_of(message.properties) | {
                "subscription": self.identifier,
                "destination": message.address.name,
                "message-id": name,
                "content-length": str(len(message.body)),
            }
            if self.acks:
                headers["ack"] = name
                self.taken[name] = (at, message)
            self.connection.say(Frame("MESSAGE", headers, message.body))
        if not self.acks:
            queue.acknowledged(range(position, position + len(messages)))

    def handle_error(self, error: Exception) -> None:
        self.connection.stream.fail(error)

    def cancelled(self, queue: Queue) -> None:
        self.taken.clear()


class StompConnection(IngressClient):
    """One client."""

    def __init__(self, ingress: StompIngress, stream: Stream) -> None:
        self.ingress = ingress
        self.stream = stream
        self.sender = Sender(ingress.name)
        self.received: dict[str, int] = {}
        self.sent: dict[str, int] = {}
        self._decoder = Decoder(ingress.limits.message_bytes_max)
        self._subscriptions: dict[str, Subscription] = {}
        self._out = b""

    @property
    def frames(self) -> StompConnection:
        return self

    @property
    def outstanding_bytes(self) -> int:
        return sum(
            len(message.body) for one in self._subscriptions.values() for _, message in one.taken.values()
        )

    @property
    def idle(self) -> bool:
        return not any(one.taken for one in self._subscriptions.values())

    def in_flight(self) -> InFlight:
        return InFlight(0, sum(len(one.taken) for one in self._subscriptions.values()))

    def receive(self, data: bytes, now: float) -> None:
        try:
            for frame in self._decoder.receive(data):
                self.received[frame.command.lower()] = self.received.get(frame.command.lower(), 0) + 1
                self._take(frame)
        except (RemoteProtocolError, NameRefused) as error:
            self.ingress.stats.protocol_errors.add("malformed")
            self.say(Frame("ERROR", {"message": str(error)}))
            self.stream.end(str(error))

    def _take(self, frame: Frame) -> None:
        act = ACTS.get(frame.command)
        if act is None or (not self.sender.client and frame.command not in ("CONNECT", "STOMP")):
            raise RemoteProtocolError(f"{frame.command[:20]!r} is not understood here", reason=0)
        try:
            act(self, frame.headers, frame.body)
        except KeyError as error:
            raise RemoteProtocolError(f"{frame.command} without a {error} that is known", reason=0) from error
        receipt = frame.headers.get("receipt")
        if receipt is not None and frame.command != "SEND":
            self.say(Frame("RECEIPT", {"receipt-id": receipt}))

    def _connect(self, headers: dict[str, str], body: bytes) -> None:
        principal = self.ingress.access.anonymous_principal(self.stream.remote, self.ingress.anonymous)
        if principal is None or self.ingress.admit_client(
            self, principal, self.ingress.rights_of(principal), "", "1.2"
        ):
            raise RemoteProtocolError("this client may not connect", reason=0)
        self.sender = Sender(self.ingress.name, self.stream.remote, principal.name, self.stream.remote)
        self.ingress.logins.count_accepted()
        self.ingress.stats.set_version(self, "1.2")
        self.say(Frame("CONNECTED", {"version": "1.2"}))

    def _send(self, headers: dict[str, str], body: bytes) -> None:
        ingress = self.ingress
        address = STOMP.address("", headers["destination"])
        rest = {name: value for name, value in headers.items() if name not in ("destination", "receipt")}
        found = PropertySet(STOMP.name, encode_headers(rest), decode_properties)
        receipt = headers.get("receipt", "")
        assured = bool(receipt)
        message = Message(address, body, found, int(assured), assured, sender=self.sender)
        entry = ingress.dispatcher.entry(ingress.name, ingress.namespace, address)
        if not ingress.dispatcher.publish(ingress.batch, entry, message, (self, receipt)):
            ingress.settle([(self, receipt)], None, ingress.now())

    def _subscribe(self, headers: dict[str, str], body: bytes) -> None:
        identifier = headers["id"]
        STOMP.address("", headers["destination"])
        if identifier in self._subscriptions:
            raise RemoteProtocolError(f"subscription {identifier!r} is there already", reason=0)
        queue = self.ingress.namespace.subscribe(headers["destination"])
        one = Subscription(self, identifier, queue, acks=headers.get("ack", "auto") != "auto")
        self._subscriptions[identifier] = one
        queue.add(one)
        self.ingress.dispatcher.invalidate()

    def _unsubscribe(self, headers: dict[str, str], body: bytes) -> None:
        self.ingress.namespace.unsubscribe(self._subscriptions.pop(headers["id"]).queue)
        self.ingress.dispatcher.invalidate()

    def _settled(self, headers: dict[str, str], *, done: bool) -> None:
        one = self._subscriptions[headers["id"].rpartition("-")[0]]
        position, message = one.taken.pop(headers["id"])
        if done:
            one.queue.acknowledged([position])
        else:
            one.queue.requeue([(position, message)])
        one.queue.dispatch()

    def _ack(self, headers: dict[str, str], body: bytes) -> None:
        self._settled(headers, done=True)

    def _nack(self, headers: dict[str, str], body: bytes) -> None:
        self._settled(headers, done=False)

    def _disconnect(self, headers: dict[str, str], body: bytes) -> None:
        self.stream.end("the client has said goodbye")

    def say(self, frame: Frame) -> None:
        """To be written when the wake-up ends."""
        self.sent[frame.command.lower()] = self.sent.get(frame.command.lower(), 0) + 1
        self._out += encode_frame(frame)
        self.stream.mark_for_flush()

    def data_to_send(self) -> bytes:
        out, self._out = self._out, b""
        return out

    def resume_writing(self) -> None:
        for one in self._subscriptions.values():
            one.queue.dispatch()

    def connection_lost(self, reason: str) -> None:
        for one in self._subscriptions.values():
            self.ingress.namespace.unsubscribe(one.queue)
        self._subscriptions.clear()
        self.ingress.dispatcher.invalidate()
        self.ingress.forget(self)

    def shut_down(self, farewell: CloseReason) -> None:
        self.say(Frame("ERROR", {"message": farewell.value}))
        self.stream.end(farewell.value)


ACTS: Final[dict[str, Callable[[StompConnection, dict[str, str], bytes], Any]]] = {
    "CONNECT": StompConnection._connect,
    "STOMP": StompConnection._connect,
    "SEND": StompConnection._send,
    "SUBSCRIBE": StompConnection._subscribe,
    "UNSUBSCRIBE": StompConnection._unsubscribe,
    "ACK": StompConnection._ack,
    "NACK": StompConnection._nack,
    "DISCONNECT": StompConnection._disconnect,
}
