"""AMQP 0-9-1 for the command line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TypeVar

from gateway.cli.peers.wire import Wire
from gateway.errors import LinkError
from gateway.model.address import AmqpAddress
from gateway.model.message import NEVER, Message
from gateway.model.properties import Value, ValueType, string
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.client import ClientConnection
from gateway.protocols.amqp091.codec import decode_address, encode_response
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
from gateway.protocols.amqp091.translate import content_properties, encode_properties, facts
from gateway.settings import Target

PREFETCH = 100
Answer = TypeVar("Answer", bound=m.Method)
YES = Value(ValueType.BOOL, True)
CLIENT_PROPERTIES = (
    ("product", string("gateway command line")),
    (
        "capabilities",
        Value(
            ValueType.TABLE,
            (("publisher_confirms", YES), ("basic.nack", YES), ("authentication_failure_close", YES)),
        ),
    ),
)


class AmqpPeer:
    """A connection with one open channel."""

    def __init__(self, target: Target, timeout_secs: float, ca_file: str | None) -> None:
        """Raises LinkError when the server cannot be reached or refuses."""
        user, password = target.username or "guest", target.password or "guest"
        self._machine = ClientConnection(
            mechanism="PLAIN",
            response=encode_response("PLAIN", user, password),
            virtual_host=target.virtual_host,
            client_properties=CLIENT_PROPERTIES,
        )
        self._wire = Wire(target, self._machine, timeout_secs, ca_file)
        self._wait(Opened)
        self._channel = self._machine.open_channel()
        self._wait(ChannelOpened)

    def publish(self, message: Message) -> str:
        """Publish, mandatory, and wait for the confirm; returns why it was refused, or ""."""
        assert isinstance(message.address, AmqpAddress)
        self._call(m.ConfirmSelect(), m.ConfirmSelectOk)
        address = message.address
        self._machine.send_content(
            self._channel,
            m.BasicPublish(address.exchange, address.routing_key, mandatory=True),
            encode_properties(message, time.time()),
            message.body,
        )
        returned = ""
        for event in self._wire.events(self._wire.timeout_secs):
            if isinstance(event, Returned):
                returned = f"{event.method.reply_text} ({event.method.reply_code})"
            elif isinstance(event, Confirms):
                return returned or ("" if event.confirms[0][3] else "the server refused it (basic.nack)")
            elif isinstance(event, ChannelClosed | Closed):
                return event.text
        return f"no confirm within {self._wire.timeout_secs} s"

    def consume(self, queue: str | None, exchange: str | None, binding_key: str) -> None:
        """Consume from `queue`, or from a queue of our own bound to `exchange`. Raises LinkError."""
        if queue is None:
            queue = self._call(m.QueueDeclare(exclusive=True, auto_delete=True), m.QueueDeclareOk).queue
            self._call(m.QueueBind(queue, exchange or "", binding_key), m.QueueBindOk)
        self._call(m.BasicQos(prefetch_count=PREFETCH), m.BasicQosOk)
        self._call(m.BasicConsume(queue), m.BasicConsumeOk)

    def messages(self, seconds: float | None) -> Iterator[Message]:
        """Messages as they come; each is acknowledged when the next one is asked for."""
        for event in self._wire.events(seconds, lambda: self._machine.tick(time.monotonic())):
            if isinstance(event, Deliveries):
                for channel, _, tag, _, address, raw, body in event.contents:
                    properties = content_properties(raw)
                    durable, expiration, retain, hops, _ = facts(properties)
                    expires = NEVER if expiration is None else time.time() + expiration / 1000
                    made = AmqpAddress(*decode_address(address))
                    yield Message(made, body, properties, int(durable), durable, retain, expires, hops)
                    self._machine.ack(channel, tag)
                    self._wire.flush()
            elif isinstance(event, ChannelClosed | Closed):
                raise LinkError(event.text)

    def close(self) -> None:
        """Close politely; the answer is not awaited."""
        self._machine.close()
        self._wire.close()

    def _call(self, method: m.Method, answer: type[Answer]) -> Answer:
        self._machine.send_method(self._channel, method)
        for event in self._wire.events(self._wire.timeout_secs):
            if isinstance(event, MethodReceived) and isinstance(event.method, answer):
                return event.method
            if isinstance(event, ChannelClosed | Closed):
                raise LinkError(event.text)
        raise LinkError(f"no {answer.__name__} within {self._wire.timeout_secs} s")

    def _wait(self, wanted: type[Opened] | type[ChannelOpened]) -> None:
        for event in self._wire.events(self._wire.timeout_secs):
            if isinstance(event, wanted):
                return
            if isinstance(event, ChannelClosed | Closed):
                raise LinkError(event.text)
        raise LinkError(f"no answer within {self._wire.timeout_secs} s")
