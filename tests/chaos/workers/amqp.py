"""Senders and receivers that speak AMQP 0-9-1, to a gateway or to RabbitMQ.

A sender has each message confirmed, or commits some at a time, and publishes again whatever was not answered,
over the next connection. A receiver is its queue's
only consumer (`exclusive`): as long as the broker believes in an earlier connection of its own, it waits, so
that a half-open connection cannot make two of it, between which no order would hold.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final, Literal

from gateway.errors import LocalProtocolError
from gateway.model.properties import Headers, Value, ValueType, string
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import (
    BasicProperties,
    decode_address,
    decode_properties,
    encode_basic_properties,
)
from gateway.protocols.amqp091.events import (
    ChannelClosed,
    Closed,
    Confirms,
    Deliveries,
    Event,
    MethodReceived,
)
from gateway.protocols.amqp091.translate import decode_model
from tests.chaos.checker import MARK, Carried, History, Id, body_of
from tests.chaos.workers.common import (
    SILENCE_SECS_MAX,
    WINDOW,
    At,
    Receiver,
    Sender,
    Worker,
    carried_in,
    readable,
)
from tests.ingress.amqp_client import Amqp

HEARTBEAT_SECS: Final = 1
PREFETCH: Final = 50
Declaration = tuple[m.Method, type[m.Method]]


class Channel(Amqp):
    """A connection whose events are fetched without waiting long."""

    def arrived(self) -> list[Event]:
        """What has come since. Raises ConnectionError when the broker has closed anything."""
        events, self._events = self._events, []
        if data := readable(self.sock):
            events += self.machine.receive_data(data, time.monotonic())
        for event in events:
            if isinstance(event, ChannelClosed | Closed):
                raise ConnectionError(f"closed: {event.reply_code} {event.text}")
        return events

    def ask(self, method: m.Method, answer: type[m.Method]) -> None:
        """Say a method and wait for its answer; raises ConnectionError when something else is the answer."""
        self.machine.send_method(1, method)
        self.flush()
        deadline = time.monotonic() + SILENCE_SECS_MAX
        while time.monotonic() < deadline:
            events = self.arrived()
            for at, event in enumerate(events):
                if isinstance(event, MethodReceived) and isinstance(event.method, answer):
                    self._events = events[at + 1 :]
                    return
        raise ConnectionError(f"no answer to {method.name}")

    def beat(self) -> None:
        """Say that we are there."""
        self.machine.tick(time.monotonic())
        self.flush()


def opened(worker: Worker, declarations: Iterable[Declaration]) -> Channel:
    """A connection with a channel and what the worker needs in the broker."""
    channel = Channel(At(worker.port), heartbeat=HEARTBEAT_SECS)
    try:
        channel.sock.settimeout(SILENCE_SECS_MAX)
        channel.open()
        for method, answer in declarations:
            channel.ask(method, answer)
    except LocalProtocolError as error:  # it was let in and closed at once
        channel.cut()
        raise ConnectionError(str(error)) from error
    except BaseException:
        channel.cut()
        raise
    worker.connected()
    return channel


def queue_at(
    queue: str,
    exchange: str,
    key: str,
    kind: Literal["", "topic"] = "topic",
    *,
    single: bool = False,
    quorum: bool = False,
) -> tuple[Declaration, ...]:
    """A durable queue bound to an exchange, which is declared as `kind`, or there already.

    `single`: of several consumers one gets messages, and the next one when that is gone. `quorum`: it goes on
    when a node is lost; such queues know no exclusive consumer.
    """
    arguments: Headers = (("x-single-active-consumer", Value(ValueType.BOOL, True)),) if single else ()
    if quorum:
        arguments = (*arguments, ("x-queue-type", string("quorum")))
    exchanges: tuple[Declaration, ...] = (
        ((m.ExchangeDeclare(exchange, kind, durable=True), m.ExchangeDeclareOk),) if kind else ()
    )
    return (
        *exchanges,
        (m.QueueDeclare(queue, durable=True, arguments=arguments), m.QueueDeclareOk),
        (m.QueueBind(queue, exchange, key), m.QueueBindOk),
    )


def _native(carried: Carried) -> BasicProperties:
    """Return the properties of a persistent message."""
    return BasicProperties(
        content_type=carried.content_type,
        headers=None if carried.mark is None else ((MARK, string(carried.mark)),),
        delivery_mode=2,
        expiration=None if carried.life_secs is None else str(int(carried.life_secs * 1_000)),
        message_id=carried.message_id,
    )


class AmqpSender(Sender):
    """Publishes persistent messages to `exchange`, with `prefix` and the address as their key."""

    def __init__(
        self,
        name: str,
        port: int,
        history: History,
        *,
        addresses: Iterable[str],
        count: int,
        rate: float,
        exchange: str,
        prefix: str,
        declarations: tuple[Declaration, ...] = (),
        transacted: bool = False,
    ) -> None:
        super().__init__(name, port, history, addresses=addresses, count=count, rate=rate)
        self._exchange = exchange
        self._prefix = prefix
        self._transacted = transacted
        selected: Declaration = (m.ConfirmSelect(), m.ConfirmSelectOk)
        if transacted:
            selected = (m.TxSelect(), m.TxSelectOk)
        self._declarations: list[Declaration] = [*declarations, selected]
        self._tag = 0
        self._open: dict[int, Id] = {}  # by delivery tag, in order

    def converse(self) -> None:
        """One connection."""
        with opened(self, self._declarations) as channel:
            self._tag = 0
            self._open.clear()
            self.again.clear()
            self._publish(channel, list(self.unacked))
            while self.going:
                if not (self._transacted and self._open):
                    self._publish(channel, self.due(WINDOW - len(self._open)))
                events = channel.arrived()
                for event in events:
                    if isinstance(event, Confirms):
                        for _, tag, multiple, accepted in event.confirms:
                            self._answered(tag, multiple, accepted)
                    elif isinstance(event, MethodReceived) and isinstance(event.method, m.TxCommitOk):
                        self._answered(self._tag, True, True)
                if self.alive(bool(events)):
                    channel.beat()

    def _publish(self, channel: Channel, ids: list[Id]) -> None:
        for id in ids:
            self._tag += 1
            self._open[self._tag] = id
            properties = encode_basic_properties(_native(self.noted(id)))
            method = m.BasicPublish(self._exchange, f"{self._prefix}{id.address}")
            channel.machine.send_content(1, method, properties, body_of(id))
        if ids and self._transacted:
            channel.machine.send_method(1, m.TxCommit())
        channel.flush()

    def _answered(self, tag: int, multiple: bool, accepted: bool) -> None:
        tags = [one for one in self._open if one <= tag] if multiple else [tag]
        for one in tags:
            self.told(self._open.pop(one), accepted)


class AmqpReceiver(Receiver):
    """Consumes `queue`, whose keys begin with `prefix`."""

    def __init__(
        self,
        name: str,
        port: int,
        history: History,
        *,
        queue: str,
        prefix: str,
        declarations: tuple[Declaration, ...],
        exclusive: bool = True,
    ) -> None:
        """Not `exclusive`: the queue has a single active consumer."""
        super().__init__(name, port, history)
        self._exclusive = exclusive
        self._queue = queue
        self._prefix = prefix
        self._declarations: list[Declaration] = [*declarations, (m.BasicQos(0, PREFETCH), m.BasicQosOk)]

    def converse(self) -> None:
        """One connection."""
        with opened(self, self._declarations) as channel:
            channel.ask(m.BasicConsume(self._queue, exclusive=self._exclusive), m.BasicConsumeOk)
            self.ready.set()
            while self.going:
                self.dawdle()
                events = channel.arrived()
                for event in events:
                    if isinstance(event, Deliveries):
                        self._take(channel, event)
                if self.alive(bool(events)):
                    channel.beat()
                channel.flush()

    def _take(self, channel: Channel, event: Deliveries) -> None:
        for _, _, _, redelivered, wire, raw, body in event.contents:
            key = decode_address(wire)[1]
            left = decode_properties(raw).expiration
            carried = carried_in(decode_model(raw), None if left is None else int(left) / 1_000)
            self.note(body, key.removeprefix(self._prefix), redelivered, carried)
        channel.machine.ack(1, event.contents[-1][2], multiple=True)
