"""Blocking AMQP 0-9-1 client for a broker that is given by a URL, with one channel."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from gateway.clients.wire import IN_FLIGHT, BrokerRefusal, ConnectionOptions, ReceivedMessage, Wire
from gateway.errors import LinkError, RemoteProtocolError
from gateway.model.delivery_mode import QOS_OF_DURABLE
from gateway.model.message import NEVER, Message
from gateway.model.properties import Value, ValueType, string
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.client import ClientConnection
from gateway.protocols.amqp091.codec import decode_address, encode_response
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.events import (
    ChannelClosed,
    ChannelOpened,
    Closed,
    Confirms,
    Deliveries,
    MethodReceived,
    Opened,
    Returned,
)
from gateway.protocols.amqp091.sender import Publisher
from gateway.protocols.amqp091.translate import (
    EXPIRATION_MS_MAX,
    content_properties,
    encode_properties,
    essentials,
    outlasts,
)

PREFETCH = 100
Answer = TypeVar("Answer", bound=m.Method)
YES = Value(ValueType.BOOL, True)
CLIENT_PROPERTIES = (
    ("product", string("gateway")),
    (
        "capabilities",
        Value(
            ValueType.TABLE,
            tuple(
                (name, YES)
                for name in (
                    *("publisher_confirms", "basic.nack"),
                    *("authentication_failure_close", "consumer_cancel_notify"),
                )
            ),
        ),
    ),
)
NACKED: Final = BrokerRefusal("the server refused it (basic.nack)", final=False)
TOO_LARGE: Final = BrokerRefusal("the properties do not fit into the server's frame-max", final=True)
SHORTENED: Final = "an expiry of more than ten years was shortened to ten, the maximum of AMQP brokers"
NOTHING: Final = b"\0\0"  # property flags of a message without properties
Sent = tuple[bytes, bytes, bytes]
"""Address, properties and body of a published message, in their encoded forms."""


class AmqpClient:
    """AMQP 0-9-1 connection with one open channel.

    `shortened` is the number of published messages that expire in more than ten years; they were sent with an
    expiration of ten years.
    """

    def __init__(self, access: ConnectionOptions) -> None:
        """Connect to the broker that `access` describes, log in and open the channel.

        Raises LinkError if the broker is unreachable or refuses.
        """
        target = access.target
        user, password = target.username or "guest", target.password or "guest"
        self._machine = ClientConnection(
            mechanism="PLAIN",
            response=encode_response("PLAIN", user, password),
            virtual_host=target.virtual_host,
            client_properties=CLIENT_PROPERTIES,
        )
        self.shortened = 0
        self._publisher: Publisher | None = None
        self._wire = Wire(access, self._machine, self._machine.tick)
        try:
            self._wire.wait(Opened, Closed)
            self._wire.mark_open()
            self._channel = self._machine.open_channel()
            self._wire.wait(ChannelOpened, ChannelClosed, Closed)
        except LinkError:
            self._wire.close_abruptly()
            raise

    def publish_many(
        self, messages: Sequence[Message], *, in_flight: int = IN_FLIGHT
    ) -> dict[int, BrokerRefusal]:
        """Publish messages and wait for confirms. Return the refused ones, as Client.publish_many defines.

        Every message is mandatory: a message that is routed to no queue counts as refused.
        """
        publisher = self._publisher
        if publisher is None:
            self._call(m.ConfirmSelect(), m.ConfirmSelectOk)
            publisher = self._publisher = Publisher(self._machine, self._channel, mandatory=True)
        confirming = Confirming()
        at = 0
        answers = self._wire.read_events()
        while at < len(messages) or confirming:
            end = min(len(messages), at + in_flight - len(confirming))
            self._send(publisher, messages, range(at, end), confirming)
            at = end
            self._wire.flush()
            if not confirming:
                continue
            for event in next(answers):
                if isinstance(event, Returned):
                    confirming.record_return(event)
                elif isinstance(event, Confirms):
                    for _, tag, multiple, accepted in event.confirms:
                        confirming.confirmed(tag, multiple=multiple, accepted=accepted)
                elif isinstance(event, ChannelClosed | Closed):
                    raise LinkError(event.text)
        return confirming.refused

    def _send(
        self, publisher: Publisher, messages: Sequence[Message], positions: range, confirming: Confirming
    ) -> None:
        """Send the messages at `positions`, and record them in `confirming` as sent or refused.

        Messages that cannot be encoded or are too large are refused.
        """
        utc = time.time()
        rows: list[Sent] = []
        sent_positions: list[int] = []
        for position in positions:
            message = messages[position]
            try:
                raw = encode_properties(message, utc, ms_max=EXPIRATION_MS_MAX)
            except RemoteProtocolError as error:
                confirming.refused[position] = BrokerRefusal(str(error), final=True)
                continue
            if message.expires and outlasts(message, utc):
                self.shortened += 1
                warnings.warn(SHORTENED, RuntimeWarning, stacklevel=3)
            rows.append((message.address.wire, raw, message.body))
            sent_positions.append(position)
        first = publisher.published + 1
        unsent = set(publisher.publish_many(rows))
        for at in unsent:
            confirming.refused[sent_positions[at]] = TOO_LARGE
        sent = [(sent_positions[at], row) for at, row in enumerate(rows) if at not in unsent]
        confirming.record_sent(first, sent)

    # Consuming.

    def declare(self, queue: str, exchange: str, binding_keys: Sequence[str]) -> None:
        """Declare a durable queue and bind it to an exchange with each of the binding keys.

        Raises LinkError.
        """
        self._call(m.QueueDeclare(queue, durable=True), m.QueueDeclareOk)
        for key in binding_keys:
            self._call(m.QueueBind(queue, exchange, key), m.QueueBindOk)

    def check_exists(self, *, queue: str = "", exchange: str = "") -> None:
        """Check with a passive declare that the queue exists, or the exchange if `queue` is empty.

        Raises LinkError if it does not exist; the server has then closed the channel.
        """
        if queue:
            self._call(m.QueueDeclare(queue, passive=True), m.QueueDeclareOk)
        else:
            self._call(m.ExchangeDeclare(exchange, passive=True), m.ExchangeDeclareOk)

    def try_publishing(self, exchange: str) -> None:
        """Check that this user may publish to an exchange.

        An empty message is published in a transaction, which is rolled back, so that no queue receives the
        message. Raises LinkError if the server denies the access; it has then closed the channel.
        """
        self._call(m.TxSelect(), m.TxSelectOk)
        Publisher(self._machine, self._channel).publish_many(
            [(amqp_address(exchange, "").wire, NOTHING, b"")]
        )
        self._call(m.TxRollback(), m.TxRollbackOk)

    def listen(self, address_options: Mapping[str, str], qos: int) -> None:
        """Consume from the address in `address_options`, as Client.listen defines.

        The options are `queue`, or `exchange` and `binding_key`. `qos` has no effect.
        """
        self.consume(
            address_options.get("queue"),
            address_options.get("exchange"),
            address_options.get("binding_key", "#"),
        )

    def consume(
        self, queue: str | None, exchange: str | None, binding_key: str, *, prefetch: int = PREFETCH
    ) -> None:
        """Consume from `queue`, with at most `prefetch` unacknowledged messages. Raises LinkError.

        If `queue` is None, an exclusive auto-delete queue is declared and bound to `exchange` with
        `binding_key`.
        """
        if queue is None:
            queue = self._call(m.QueueDeclare(exclusive=True, auto_delete=True), m.QueueDeclareOk).queue
            self._call(m.QueueBind(queue, exchange or "", binding_key), m.QueueBindOk)
        self._call(m.BasicQos(prefetch_count=prefetch), m.BasicQosOk)
        # Not awaited, for messages may come with the answer; a refusal closes the channel.
        self._machine.send_method(self._channel, m.BasicConsume(queue))

    def arrivals(self, seconds: float) -> list[ReceivedMessage]:
        """Return received messages after at most `seconds` seconds, as Client.arrivals defines."""
        found: list[ReceivedMessage] = []
        for event in self._wire.turn(seconds):
            if isinstance(event, Deliveries):
                found += [
                    ReceivedMessage(_message(address, raw, body), tag, redelivered)
                    for _, _, tag, redelivered, address, raw, body in event.contents
                ]
            elif isinstance(event, ChannelClosed | Closed):
                raise LinkError(event.text)
            elif isinstance(event, MethodReceived) and isinstance(event.method, m.BasicCancel):
                raise LinkError("the server has cancelled the consumer: its queue was deleted")
        if self._machine.timed_out(time.monotonic()):
            raise LinkError("the server is silent")
        return found

    def pause_reading(self, seconds: float) -> None:
        """Stay connected without reading for `seconds` seconds, as Client.pause_reading defines."""
        self._wire.pause_reading(seconds)

    def acknowledge(self, arrivals: Sequence[ReceivedMessage]) -> None:
        """Acknowledge these messages with one cumulative basic.ack, as Client.acknowledge defines."""
        if arrivals:
            self._machine.ack(self._channel, arrivals[-1].token, multiple=True)
            self._wire.flush()

    def close(self) -> None:
        """Send connection.close and close the socket without awaiting the response."""
        self._machine.close()
        self._wire.close()

    def close_abruptly(self) -> None:
        """Close the socket at once, as Client.close_abruptly defines."""
        self._wire.close_abruptly()

    def _call(self, method: m.Method, answer: type[Answer]) -> Answer:
        self._machine.send_method(self._channel, method)
        for event in self._wire.events(self._wire.timeout_secs):
            if isinstance(event, MethodReceived) and isinstance(event.method, answer):
                return event.method
            if isinstance(event, ChannelClosed | Closed):
                raise LinkError(event.text)
        raise self._wire.failure(f"no {answer.__name__} received within {self._wire.timeout_secs:g} s")


class Confirming:
    """Published messages that await a confirm, by delivery tag, and refused messages, by position.

    `len()` is the number of messages that await a confirm.
    """

    def __init__(self) -> None:
        self.refused: dict[int, BrokerRefusal] = {}
        self._open: dict[int, tuple[int, Sent]] = {}
        self._returned: dict[int, BrokerRefusal] = {}  # by tag; a positive confirm follows

    def __len__(self) -> int:
        return len(self._open)

    def record_sent(self, first: int, rows: Sequence[tuple[int, Sent]]) -> None:
        """Record published messages as unconfirmed.

        `rows` has the position and the encoded form of each message. Their delivery tags are consecutive;
        `first` is the delivery tag of the first message.
        """
        self._open.update(enumerate(rows, first))

    def record_return(self, event: Returned) -> None:
        """Record the message of a basic.return as refused; the server confirms it afterwards.

        The returned message is the oldest unconfirmed one with equal address, properties and body, or else
        with equal address and body.
        """
        method = event.method
        wire = amqp_address(method.exchange, method.routing_key).wire
        text = f"{method.reply_text} ({method.reply_code})"
        for alike in ((wire, event.properties, event.body), None):
            for tag, (_, row) in self._open.items():
                same = row == alike if alike is not None else (row[0], row[2]) == (wire, event.body)
                if same and tag not in self._returned:
                    self._returned[tag] = BrokerRefusal(text, final=True)
                    return

    def confirmed(self, tag: int, *, multiple: bool, accepted: bool) -> None:
        """Process a confirm of the server: basic.ack if `accepted` is True, otherwise basic.nack.

        The confirm is for the message with delivery tag `tag` and, if `multiple`, for all earlier messages.
        """
        tags = [one for one in self._open if one <= tag] if multiple else [tag]
        for one in tags:
            found = self._open.pop(one, None)
            refusal = self._returned.pop(one, None) or (None if accepted else NACKED)
            if found is not None and refusal is not None:
                self.refused[found[0]] = refusal


def _message(address: bytes, raw: bytes, body: bytes) -> Message:
    properties = content_properties(raw)
    durable, expiration, retain, hops, _ = essentials(properties)
    expires = NEVER if expiration is None else time.time() + expiration / 1000
    made = amqp_address(*decode_address(address))
    return Message(made, body, properties, QOS_OF_DURABLE[durable], durable, retain, expires, hops)
