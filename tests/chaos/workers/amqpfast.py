"""Senders and receivers that speak AMQP/Fast, to a gateway.

A sender asks for a reply to each message, or commits some at a time, and sends what was not answered again
over the next connection. A receiver brings a name, which the server lets in once: as long as it believes in
an earlier connection, the receiver waits, so that a half-open connection cannot make two of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from math import ceil
from typing import Any, Final

from gateway.errors import LocalProtocolError
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.codec import decode_head_properties
from gateway.protocols.amqpfast.events import (
    NO_HANDLE,
    ChannelClosed,
    Closed,
    Event,
    HandleClosed,
    Notifies,
    Replies,
    ReplyRow,
)
from gateway.protocols.amqpfast.sender import Producer
from gateway.protocols.amqpfast.spec import REDELIVERED
from gateway.protocols.amqpfast.translate import decode_model
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
from tests.ingress.amqpfast.client import QUEUE, Fast, head

HEARTBEAT_SECS: Final = 1
PREFETCH: Final = 50
REFUSED: Final = 300  # and above


class Courier(Fast):
    """A connection whose events are fetched without waiting long."""

    def arrived(self) -> list[Event]:
        """What has come since. Raises ConnectionError when the server has closed anything."""
        events, self.events = self.events, []
        if data := readable(self.sock):
            events += self.machine.receive_data(data, time.monotonic())
        for event in events:
            if isinstance(event, Closed | ChannelClosed | HandleClosed):
                raise ConnectionError(f"closed: {event.reply_code} {event.text}")
        return events

    def need(self, command: Any) -> None:
        """Say a command and wait for its reply. Raises ConnectionError when it is refused."""
        command.tag = self.machine.new_tag(1)
        self.say(command)
        self.settled()

    def settled(self) -> ReplyRow:
        """The reply that comes next; ConnectionError when there is none, or it refuses."""
        deadline = time.monotonic() + SILENCE_SECS_MAX
        while time.monotonic() < deadline:
            events = self.arrived()
            for at, event in enumerate(events):
                if isinstance(event, Replies):
                    row, *more = event.rows
                    self.events = [*events[:at], *([Replies(more)] if more else []), *events[at + 1 :]]
                    if row[3] >= REFUSED:
                        raise ConnectionError(f"refused: {row[3]} {row[4]}")
                    return row
            self.events = events
        raise ConnectionError("no reply")

    def handle_of(self, name: str, service: int) -> int:
        """A handle, once it is open."""
        number = self.ask_handle(name, service)
        self.settled()
        return number

    def beat(self) -> None:
        """Say that we are there."""
        self.machine.tick(time.monotonic())
        self.flush()


def opened(worker: Worker, client_name: str = "", *, transacted: bool = False) -> Courier:
    """A connection with channel 1. Raises ConnectionError when it is refused."""
    courier = Courier(At(worker.port), client_name, heartbeat=HEARTBEAT_SECS)
    try:
        courier.sock.settimeout(SILENCE_SECS_MAX)
        courier.open(transacted=transacted)
    except LocalProtocolError as error:  # it was let in and closed at once
        courier.cut()
        raise ConnectionError(str(error)) from error
    except BaseException:
        courier.cut()
        raise
    worker.connected()
    return courier


def _head(carried: Carried) -> bytes:
    """Return the head of a persistent message."""
    more: dict[str, Any] = {}
    if carried.mark is not None:
        more["headers"] = {MARK: carried.mark}
    if carried.life_secs is not None:
        more["expiration"] = ceil(time.time() + carried.life_secs)
    return head(
        persistent=True,
        identifier=carried.message_id or "",
        mime_type=carried.content_type or "",
        **more,
    )


def _carried(raw: bytes) -> Carried:
    expiration = decode_head_properties(raw).expiration
    return carried_in(decode_model(raw), expiration - time.time() if expiration else None)


class FastSender(Sender):
    """Sends persistent messages to destinations of `service`: `prefix` and the address.

    `transacted`: each commit answers for what was sent since the last one.
    """

    def __init__(
        self,
        name: str,
        port: int,
        history: History,
        *,
        addresses: Iterable[str],
        count: int,
        rate: float,
        service: int,
        prefix: str,
        transacted: bool,
    ) -> None:
        super().__init__(name, port, history, addresses=addresses, count=count, rate=rate)
        self._service = service
        self._prefix = prefix
        self._transacted = transacted
        self._producers: dict[str, tuple[int, Producer]] = {}  # with the number of the handle
        self._open: dict[tuple[int, int], list[Id]] = {}  # by handle and tag

    def converse(self) -> None:
        """One connection."""
        with opened(self, transacted=self._transacted) as courier:
            for address in self._addresses:
                handle = courier.handle_of(f"{self._prefix}{address}", self._service)
                producer = Producer(courier.machine, handle, confirm=not self._transacted)
                self._producers[address] = (handle, producer)
            self._open.clear()
            self.again.clear()
            self._send(courier, list(self.unacked))
            while self.going:
                if not (self._transacted and self._open):
                    self._send(courier, self.due(WINDOW - len(self._open)))
                events = courier.arrived()
                for event in events:
                    if isinstance(event, Replies):
                        for row in event.rows:
                            self._answered(row)
                if self.alive(bool(events)):
                    courier.beat()

    def _send(self, courier: Courier, ids: list[Id]) -> None:
        for id in ids:
            said = _head(self.noted(id))
            handle, producer = self._producers[id.address]
            (tag,) = producer.send_many([(b"", said, body_of(id))])
            if not self._transacted:
                self._open[handle, tag] = [id]
        if ids and self._transacted:
            commit = m.ChannelCommit(1, courier.machine.new_tag(1))
            courier.say(commit)
            self._open[NO_HANDLE, commit.tag] = ids
        courier.flush()

    def _answered(self, row: ReplyRow) -> None:
        _, handle, tag, code, _ = row
        for id in self._open.pop((handle, tag), ()):
            self.told(id, code < REFUSED)


class FastReceiver(Receiver):
    """Consumes the queues of all `addresses`, whose names begin with `prefix`."""

    def __init__(
        self, name: str, port: int, history: History, *, addresses: Iterable[str], prefix: str
    ) -> None:
        super().__init__(name, port, history)
        self._addresses = tuple(addresses)
        self._prefix = prefix

    def converse(self) -> None:
        """One connection."""
        with opened(self, f"chaos-{self.name}") as courier:
            for address in self._addresses:
                handle = courier.handle_of(f"{self._prefix}{address}", QUEUE)
                courier.need(m.HandleConsume(handle, prefetch=PREFETCH))
            self.ready.set()
            while self.going:
                self.dawdle()
                events = courier.arrived()
                for event in events:
                    if isinstance(event, Notifies):
                        for _, _, bits, raw, body, name in event.rows:
                            address = name.decode().removeprefix(self._prefix)
                            self.note(body, address, bool(bits & REDELIVERED), _carried(raw))
                        courier.machine.ack(1, event.rows[-1][1])
                if self.alive(bool(events)):
                    courier.beat()
                courier.flush()
