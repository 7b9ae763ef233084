"""Messages, batches, consumers, connections and an MQTT namespace for the broker's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.broker.dead_letters import DeadLetters, Letter
from gateway.broker.mqtt.namespace import MqttNamespace
from gateway.broker.mqtt.session import OutgoingPublish, Session, SessionLimits, SubscriptionOptions
from gateway.broker.queue import Queue
from gateway.errors import RemoteProtocolError
from gateway.model.batch import Batch, Recipient, Sink
from gateway.model.message import NEVER, Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.model.properties import NO_PROPERTIES, Properties, PropertySet
from gateway.model.times import Monotonic
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.mqtt.dialect import topic_address

SENDER = Sender("test", "publisher")


def amqp(body: bytes = b"", key: str = "key", exchange: str = "", expires: float = NEVER) -> Message:
    return Message(amqp_address(exchange, key), body, expires=expires, sender=SENDER)


def mqtt(
    topic: str = "a/b",
    body: bytes = b"x",
    qos: int = 1,
    *,
    retain: bool = False,
    expires: float = NEVER,
    sender: Sender = SENDER,
    properties: PropertySet = NO_PROPERTIES,
) -> Message:
    return Message(topic_address(topic), body, properties, qos, qos > 0, retain, expires, 0, sender)


def unreadable() -> PropertySet:
    """Properties whose bytes are malformed."""

    def decode(raw: bytes) -> Properties:
        raise RemoteProtocolError("malformed", reason=1)

    return PropertySet("amqp091", b"", decode)


class Answers:
    """A source that notes outcomes by receipt, and whom it was told to hold."""

    def __init__(self) -> None:
        self.told: list[tuple[object, Outcome]] = []
        self.held: list[set[Sender]] = []
        self.released = 0

    def settle(self, receipts: list[object], refused: dict[int, Outcome] | None, received: float) -> None:
        for at, receipt in enumerate(receipts):
            self.told.append((receipt, (refused or {}).get(at, ACCEPTED)))

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        self.held.append(senders)
        return [self._release]

    def _release(self) -> None:
        self.released += 1

    @property
    def outcomes(self) -> list[Outcome]:
        return [outcome for _, outcome in self.told]


def newest(letters: DeadLetters, count: int = 99, route: str | None = None) -> list[Letter]:
    """The newest of dead letters that are in memory."""
    found: list[Letter] = []
    letters.newest(count, found.extend, route=route)
    return found


def publish(
    sink: Sink, messages: list[Message], source: Answers | None = None, recipient: Recipient | None = None
) -> Answers:
    """Send the messages to one sink as a batch; their receipts are their positions."""
    answers = source or Answers()
    batch = Batch(answers, Monotonic(0.0))
    recipient = recipient or Recipient(sink)
    for receipt, message in enumerate(messages):
        batch.add_only(receipt, recipient, message)
    batch.send()
    return answers


class Taker:
    """A consumer with credit that notes what it was given."""

    def __init__(self, credit: int = 1_000_000) -> None:
        self.credit = credit
        self.taken: list[tuple[int, Message, bool]] = []
        self.runs: list[int] = []
        self.gone: list[Queue] = []

    def capacity(self) -> int:
        return self.credit

    def deliver(self, queue: Queue, position: int, messages: list[Message], redelivered: bool) -> None:
        assert len(messages) <= self.credit
        self.credit -= len(messages)
        self.runs.append(len(messages))
        self.taken += [(position + at, message, redelivered) for at, message in enumerate(messages)]

    def handle_error(self, error: Exception) -> None:
        raise error

    def cancelled(self, queue: Queue) -> None:
        self.gone.append(queue)

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for _, message, _ in self.taken]


class Connection:
    """An outlet that notes what it is told to write."""

    def __init__(self, too_large: int = 1 << 30) -> None:
        self.rows: list[OutgoingPublish] = []
        self.runs: list[int] = []
        self.releases: list[int] = []
        self.receipts: list[int] = []
        self.pulls = 0  # times that it was told to continue with retained messages
        self.ticks_required = 0
        self.congested = False
        self._too_large = too_large

    def send(self, rows: list[OutgoingPublish]) -> list[OutgoingPublish]:
        refused = [row for row in rows if len(row.message.body) > self._too_large]
        self.rows += [row for row in rows if row not in refused]
        self.runs.append(len(rows))
        return refused

    def send_release(self, packet_id: int) -> None:
        self.releases.append(packet_id)

    def send_received(self, packet_id: int) -> None:
        self.receipts.append(packet_id)

    def send_due_retained(self) -> None:
        self.pulls += 1

    def require_ticks(self) -> None:
        self.ticks_required += 1

    @property
    def said(self) -> list[tuple[bytes, int, int, bool]]:
        return [(row.message.body, row.qos, row.packet_id, row.dup) for row in self.rows]


class Space(MqttNamespace):
    """A namespace with shorter words for the tests."""

    def __init__(self, limits: SessionLimits | None = None, **more: Any) -> None:
        self.changes = 0
        super().__init__(self._note, limits, **more)

    def _note(self, pattern: list[str]) -> None:
        self.changes += 1

    def session(self, client: str, *filters: str, qos: int = 1, persistent: bool = True) -> Session:
        session, _ = self.open(client, clean=False, expiry_secs=60.0 if persistent else 0.0)
        for one in filters:
            self.subscribe(session, one, SubscriptionOptions(qos))
        return session

    def give(self, *messages: Message) -> Answers:
        source = Answers()
        for message in messages:
            for sink in self.sinks(message.address):
                publish(sink, [message], source)
        return source


def connected(session: Session, receive_maximum: int = 100, **more: int) -> Connection:
    outlet = Connection(**more)
    session.attach(outlet, receive_maximum)
    return outlet
