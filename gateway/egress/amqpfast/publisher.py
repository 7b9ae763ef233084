"""Publisher of an AMQP/Fast link: `confirms.py` with handles, confirm-tags and closes.

Each destination has a handle of its own, all on one channel, so that a server that closes one because of its
destination does not affect the others. The channel assigns confirm-tags in one sequence, in whatever order
the handles send, so the number of a message is its tag minus a constant, except for the wrap at 65 535.

There is no negative reply: a message that the server refuses closes its handle or, with servers of 2005 that
lack resources, its channel. A code that concerns the destination is the outcome of all unconfirmed messages
for it, and nothing is sent there for a second. Otherwise fewer and fewer messages are sent at a time until
the faulty one is alone.

Servers of 2005 drop the connection on PREPARE, which would happen again on each connection. Therefore a
server that dropped the connection after a PREPARE, and has never answered one, is sent large messages without
it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import structlog

from gateway import clock
from gateway.broker.poison import outcome_of_error
from gateway.egress.amqpfast.large import LARGE_BYTES, LargeSender
from gateway.egress.amqpfast.login import OF_DESTINATIONS, open_for_sending, outcome_of
from gateway.egress.confirms import ConfirmedSink, Positions, settle_all
from gateway.errors import LocalProtocolError
from gateway.model.batch import SubBatch
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.protocols.amqpfast.client import ClientConnection
from gateway.protocols.amqpfast.codec import BODY_SIZE
from gateway.protocols.amqpfast.events import ReplyRow
from gateway.protocols.amqpfast.sender import Producer
from gateway.protocols.amqpfast.spec import ID_MAX, ReplyCode
from gateway.protocols.amqpfast.translate import encode_properties
from gateway.telemetry.stats import LinkStats
from gateway.transport.stream import Stream

log = structlog.get_logger(limited=True)

IN_FLIGHT_MAX: Final = 60_000  # there are 65 535 tags, and one that is unconfirmed may not be used again
HANDLES_MAX: Final = 4_096  # destinations of one connection; to use more, all handles are closed first
REFUSED_SECS: Final = 1.0  # seconds until a refused destination is tried again

HEAD_TOO_LONG: Final = Outcome(
    Verdict.REJECTED, Reason.TOO_LARGE, "the properties do not fit the server's frame-max"
)


class Destination(NamedTuple):
    """Open handle for one destination, and the name to use in each SEND."""

    producer: Producer
    name: bytes


class FastLinkPublisher(ConfirmedSink):
    """Destination end of routes to an AMQP/Fast link: it publishes to the broker."""

    def __init__(self, stats: LinkStats, *, in_flight_max: int, messages_max: int, bytes_max: int) -> None:
        super().__init__(
            stats,
            in_flight_max=min(in_flight_max, IN_FLIGHT_MAX),
            messages_max=messages_max,
            bytes_max=bytes_max,
        )
        self._machine: ClientConnection | None = None
        self._channel = 0
        self._destinations: dict[bytes, Destination] = {}
        self._wires: dict[int, bytes] = {}  # wire names of the destinations, by their handles
        self._shift = 0  # a tag minus the number of its message
        self._large: LargeSender | None = None
        self._retry_at: dict[bytes, float] = {}
        # By the server's address: True if it answers PREPARE, False if it does not.
        self._prepares: dict[str, bool] = {}

    # Connection.

    def open(self, machine: ClientConnection, channel: int, stream: Stream) -> None:
        """Start sending on an open channel."""
        self._stream = stream
        self._machine = machine
        self._channel = channel
        self._next = self._floor = 1
        restartable = self._prepares.get(stream.remote, True)
        self._large = LargeSender(machine, stream, self._large_settled, restartable=restartable)
        self._flowing = True
        self.pump()

    @property
    def is_open(self) -> bool:
        """True if there is a channel to send on."""
        return self._machine is not None

    def close(self) -> int:
        """Requeue unconfirmed messages after the channel is lost. Return their number."""
        if self._large is not None and self._large.announced:
            assert self._stream is not None
            self._disable_prepare(self._stream.remote)
        self._machine = None
        self._large = None
        self._destinations.clear()
        self._wires.clear()
        return super().close()

    def _disable_prepare(self, server: str) -> None:
        if server not in self._prepares:
            self._prepares[server] = False
            log.warning("PREPARE no longer used, server closed connections after it", server=server)

    def handle_channel_closed(self, code: int, text: str) -> None:
        """Process the server's close of the channel or connection, which a published message has caused.

        Unconfirmed messages are requeued. If `code` reports an error, one of them may be the cause, and the
        search for it begins (`_suspect`).
        """
        unconfirmed_count = self.close()
        if unconfirmed_count and code >= ReplyCode.MESSAGE_NOT_FOUND:
            self._settle_suspect(unconfirmed_count, code, text)

    def _settle_suspect(self, count: int, code: int, text: str) -> None:
        outcome = outcome_of(code, text)
        message = self._suspect(count, outcome)
        if message is not None and code in OF_DESTINATIONS:
            self._refuse_for_now(message.address.wire, outcome)

    def _refuse_for_now(self, wire: bytes, outcome: Outcome) -> None:
        self._retry_at[wire] = clock.now() + REFUSED_SECS
        self.refuse(wire, outcome)

    def tick(self, now: float) -> None:
        """Retry refused destinations whose wait is over, and check the deadline of a large message.

        `now` is in loop-clock seconds.
        """
        if self._retry_at:
            for wire in [wire for wire, at in self._retry_at.items() if at <= now]:
                del self._retry_at[wire]
                self.allow(wire)
        if self._large is not None:
            self._large.tick(now)
        self.pump()

    def resume_writing(self) -> None:
        """Continue to send messages, because the stream's send buffer has drained."""
        if self._large is not None:
            self._large.write()
        self.pump()

    # Sending.

    @property
    def _usable(self) -> bool:
        return self._machine is not None and not (self._large is not None and self._large.busy)

    def _destination_of(self, message: Message) -> bytes:
        return message.address.wire

    def _send(self, sub_batch: SubBatch, positions: Positions, messages: list[Message]) -> Positions:
        """Send `messages`, which are at `positions` in the sub-batch.

        Return the positions that have to wait.
        """
        rows: list[tuple[bytes, bytes, bytes]] = []
        chosen: list[int] = []
        sent: list[int] = []
        wire, destination = b"", None
        rest: Positions = ()
        large: Message | None = None
        offset = clock.wall_offset()
        for index, message in enumerate(messages):
            address = message.address
            if address.wire != wire:
                if destination is not None and rows:
                    self._send_rows(destination, rows, chosen, sent)
                    rows, chosen = [], []
                wire = address.wire
                destination = self._destination(message, alone=not sent and not self.in_flight)
                if destination is None:
                    rest = positions[index:]
                    break
            assert destination is not None
            body = message.body
            if len(body) > LARGE_BYTES:
                rest = positions[index:]
                large = None if sent or rows or self.in_flight else message
                break
            try:
                rows.append((destination.name, encode_properties(message, offset), body))
            except Exception as error:
                self._settle_unsent([positions[index]], outcome_of_error(error))
            else:
                chosen.append(positions[index])
        if destination is not None and rows:
            self._send_rows(destination, rows, chosen, sent)
        self._record_sent(sub_batch, sent, sum([len(sub_batch.messages[at].body) for at in sent]))
        return rest if large is None else self._send_large(sub_batch, rest, large)

    def _send_rows(
        self,
        destination: Destination,
        rows: list[tuple[bytes, bytes, bytes]],
        chosen: list[int],
        sent: list[int],
    ) -> None:
        """Send messages to one destination, and append the positions of sent messages to `sent`.

        Each of `rows` is name, content header and body of a message; `chosen` has the messages' positions. A
        message whose header is too long is not sent, but settled.
        """
        tags = destination.producer.send_many(rows)
        if -1 in tags:
            unsent = [at for at, tag in zip(chosen, tags, strict=True) if tag < 0]
            self._settle_unsent(unsent, HEAD_TOO_LONG)
            chosen = [at for at, tag in zip(chosen, tags, strict=True) if tag >= 0]
            tags = [tag for tag in tags if tag >= 0]
        if tags:
            self._shift = tags[0] - self._next - len(sent)
            sent += chosen

    def _destination(self, message: Message, *, alone: bool) -> Destination | None:
        """Return the open destination of a message, or None if no message can be sent to it now.

        `alone` is True if no message is in flight. If no handle is free, all handles are then closed, so that
        one is free at the next attempt.
        """
        wire = message.address.wire
        found = self._destinations.get(wire)
        if found is not None:
            return found if found.producer.usable else None  # its close has been read, and is reported soon
        machine = self._machine
        assert machine is not None
        address = message.address
        try:
            if len(self._destinations) >= HANDLES_MAX:
                raise LocalProtocolError("too many destinations")
            handle, name = open_for_sending(machine, self._channel, address.scope, address.name)
        except LocalProtocolError:
            if alone:
                self._close_all_handles()
            return None
        found = Destination(Producer(machine, handle, confirm=True), name)
        self._destinations[wire] = found
        self._wires[handle] = wire
        return found

    def _close_all_handles(self) -> None:
        """Close all handles, because none is free and no message is in flight."""
        machine = self._machine
        assert machine is not None
        for handle in self._wires:
            machine.close_handle(handle)
        self._destinations.clear()
        self._wires.clear()
        assert self._stream is not None
        self._stream.mark_for_flush()

    def _send_large(self, sub_batch: SubBatch, positions: Positions, message: Message) -> Positions:
        """Send `message`, which is at the first of `positions`, in fragments on a channel for large messages.

        Return the positions that wait: those of the messages behind it, and its own if no handle is free.
        """
        assert self._large is not None
        try:
            head = encode_properties(message, clock.wall_offset())
        except Exception as error:
            self._settle_unsent(positions[:1], outcome_of_error(error))
            return positions[1:]
        assert self._machine is not None
        if len(head) + BODY_SIZE.size > self._machine.frame_max:
            self._settle_unsent(positions[:1], HEAD_TOO_LONG)
            return positions[1:]
        self._record_sent(sub_batch, positions[:1], 0)
        try:
            self._large.send(message, head)
        except LocalProtocolError:
            self._withdraw(lambda one: True)
            return positions
        return positions[1:]

    # Outcomes.

    def settle_replies(self, rows: list[ReplyRow]) -> None:
        """Settle messages to which the server has replied.

        `rows` are replies on the publishing channel or on the channel for large messages.
        """
        floor, shift = self._floor, self._shift
        early = self._early
        singles: list[int] = []
        refused: list[tuple[int, int, str]] = []
        for channel, handle, tag, code, text in rows:
            if channel != self._channel:
                if self._large is not None and channel == self._large.channel:
                    self._large.handle_reply(handle, code, text)
                continue
            number = floor + (tag - shift - floor) % ID_MAX
            if code >= ReplyCode.MESSAGE_NOT_FOUND:
                refused.append((number, code, text))
            elif number == floor:
                floor += 1
                while early and floor in early:
                    early.remove(floor)
                    floor += 1
            elif number < self._next:
                singles.append(number)
                early.add(number)
        self._advance(floor)
        self._settle_singles(singles, ACCEPTED)
        for number, code, text in refused:
            self._settle_singles([number], outcome_of(code, text))
        self._count_in_flight()
        self.pump()

    def ready(self, handle: int, held_bytes: int) -> None:
        """Process READY: the server already has `held_bytes` bytes of a large message's body."""
        if self._large is not None:
            assert self._stream is not None
            self._prepares[self._stream.remote] = True
            self._large.ready(handle, held_bytes)

    def handle_closed(self, handle: int, code: int, text: str) -> None:
        """Process the server's close of a handle, if it is a handle of this publisher.

        Its unconfirmed messages are settled if `code` refuses the destination; otherwise they are sent again.
        """
        wire = self._wires.pop(handle, None)
        if wire is None:
            if self._large is not None:
                self._large.handle_closed(handle, code, text)
            return
        del self._destinations[wire]
        withdrawn = self._withdraw(lambda message: message.address.wire == wire)
        if code in OF_DESTINATIONS:
            outcome = outcome_of(code, text)
            self._refuse_for_now(wire, outcome)
            settle_all(withdrawn, outcome)
        else:
            repeated = self._requeue(withdrawn)
            if repeated and code >= ReplyCode.MESSAGE_NOT_FOUND:
                self._settle_suspect(repeated, code, text)
        self.pump()

    def large_closed(self, channel: int, code: int, text: str) -> None:
        """Process the server's close of a channel, if it is the channel for large messages."""
        if self._large is not None and channel == self._large.channel:
            self._large.channel_closed(code, text)

    def _large_settled(self, outcome: Outcome, code: int) -> None:
        """Settle the large message, which was the only message in flight.

        `code` is the code with which the server has closed its handle or channel, or 200.
        """
        if outcome is ACCEPTED:
            self._advance(self._next)
        else:
            withdrawn = self._withdraw(lambda message: True)
            if code in OF_DESTINATIONS and withdrawn:
                sub_batch, positions = withdrawn[0]
                self._refuse_for_now(sub_batch.messages[positions[0]].address.wire, outcome)
            settle_all(withdrawn, outcome)
        self._count_in_flight()
        self.pump()
