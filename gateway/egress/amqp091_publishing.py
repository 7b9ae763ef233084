"""What a link publishes: what waits to be sent, what was sent and is not confirmed, and what becomes of it.

A broker confirms messages by their number on the channel. Consecutive numbers that were given to messages of
one part form a Run, so that a confirm of many costs little more than a confirm of one: the runs below the
lowest unconfirmed number (`floor`) are settled whole. Whatever is confirmed, refused or returned out of order
is settled at once and remembered until the floor has passed it.

Parts that cannot be sent now wait in order. When the channel is gone, what it had not confirmed goes to the
front of them, and all of it is sent again, never more than the window allows at a time.

A broker that dislikes one message closes the channel, and rarely says which message it was. An exchange that
it names is refused from then on, until it has been found. Otherwise the window is halved for the messages
that were on their way, and again each time that it happens, until one message is alone and so found out.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import trio

from gateway.broker.switch import RouteLane
from gateway.errors import ProtocolError
from gateway.model.address import AmqpAddress
from gateway.model.batch import Part
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.protocols.amqp091.client import ClientConnection
from gateway.protocols.amqp091.events import Returned
from gateway.protocols.amqp091.sending import Publisher, PublishRow
from gateway.protocols.amqp091.spec import ReplyCode
from gateway.protocols.amqp091.translate import encode_properties
from gateway.telemetry.stats import LinkStats
from gateway.transport.stream import Stream

# What has waited is sent in pieces of at most this much, between which the stream may call a halt.
SLICE_MESSAGES_MAX: Final = 500
SLICE_OCTETS_MAX: Final = 1_048_576
MESSAGE_OVERHEAD: Final = 64  # octets on the wire besides body and properties, about

WAITING_FULL: Final = Outcome(
    Verdict.RELEASED, Reason.TARGET_DOWN, "the link is down or slow, its queue is full"
)
REFUSED_BY_BROKER: Final = Outcome(Verdict.REJECTED, Reason.TARGET_REFUSED, "basic.nack")
FRAME_TOO_SMALL: Final = Outcome(
    Verdict.REJECTED, Reason.TOO_LARGE, "the properties do not fit the broker's frame-max"
)
EXPIRED: Final = Outcome(Verdict.REJECTED, Reason.EXPIRED, "it expired while it waited for the link")
NAMED_EXCHANGE: Final = re.compile(r"exchange '(.*?)' in vhost")  # how RabbitMQ words 403 and 404

Positions = Sequence[int]


class Waiting(NamedTuple):
    """Messages of a part that have to be sent."""

    part: Part
    positions: Positions


class Run:
    """Messages with consecutive numbers `first` to `last`; offset n is message `positions[n]` of `part`."""

    __slots__ = ("done", "first", "last", "mandatory", "part", "positions", "sent", "settled")

    def __init__(self, first: int, part: Part, positions: Positions, mandatory: bool, sent: float) -> None:
        self.first = first
        self.last = first + len(positions) - 1
        self.part = part
        self.positions = positions
        self.mandatory = mandatory
        self.sent = sent
        self.done = 0  # offsets below it are settled
        self.settled: set[int] = set()  # offsets above it that are

    def settle_to(self, number: int, outcome: Outcome) -> None:
        """Everything up to `number` that is still open has this outcome."""
        begin, self.done = self.done, min(number, self.last) - self.first + 1
        if not begin and self.done == len(self.part.slots):
            self.part.settle(outcome)
        else:
            self.part.settle_at(self.positions[begin : self.done], outcome)

    def settle_some(self, offsets: list[int], outcome: Outcome) -> None:
        """These offsets have this outcome, those below them may still be open."""
        self.settled.update(offsets)
        positions = self.positions
        self.part.settle_at([positions[offset] for offset in offsets], outcome)

    def left(self) -> Positions:
        """The positions that are not settled."""
        if not self.settled:
            return self.positions[self.done :]
        return [
            self.positions[offset]
            for offset in range(self.done, len(self.positions))
            if offset not in self.settled
        ]

    def find(self, start: int, address: AmqpAddress, properties: bytes | None, body: bytes) -> int:
        """The first open offset from number `start` on that is this message; -1 when there is none.

        `properties` are not compared when they are None, or hold what is left of a lifetime.
        """
        messages = self.part.messages
        for offset in range(max(self.done, start - self.first), len(self.positions)):
            message = messages[self.positions[offset]]
            if (
                message.body == body
                and message.address == address
                and offset not in self.settled
                and (properties is None or message.expires or encode_properties(message, 0.0) == properties)
            ):
                return offset
        return -1


class Outgoing:
    """The sink of a link: takes parts, and settles their messages as the broker confirms them.

    `missing` is called with an exchange that the broker does not have or does not let us use, and why.
    """

    def __init__(
        self,
        stats: LinkStats,
        missing: Callable[[str, Outcome], None],
        *,
        in_flight_max: int,
        messages_max: int,
        octets_max: int,
    ) -> None:
        self.in_flight_max = in_flight_max
        self.messages_max = messages_max
        self.octets_max = octets_max
        self.in_flight = 0
        self.waiting_messages = 0
        self.waiting_octets = 0
        self._stats = stats
        self._missing = missing
        self._waiting: deque[Waiting] = deque()
        self._refusals: dict[str, Outcome] = {}  # by exchange
        self._flowing = False
        self._stream: Stream | None = None
        self._publishers: tuple[Publisher, Publisher] | None = None  # not mandatory, mandatory
        self._runs: list[Run] = []
        self._firsts: list[int] = []  # of the runs
        self._next = 1
        self._floor = 1
        self._early: set[int] = set()  # numbers above the floor that are confirmed
        self._returned = 0  # number of the last message that came back
        self._window = in_flight_max
        self._suspects = 0  # messages for which the window stays narrow

    @property
    def idle(self) -> bool:
        """Nothing waits, and everything sent is confirmed."""
        return not self._waiting and not self._runs

    # The channel.

    def open(self, machine: ClientConnection, channel: int, stream: Stream) -> None:
        """A channel in confirm mode can be used; `flow` lets messages through."""
        self._stream = stream
        self._publishers = Publisher(machine, channel), Publisher(machine, channel, mandatory=True)
        self._next = self._floor = 1
        self._returned = 0

    def flow(self, on: bool) -> None:
        """Send, or hold back: the broker is blocked, or what the routes need is not known to exist yet."""
        self._flowing = on and self._publishers is not None
        self.pump()

    def close(self) -> int:
        """The channel is gone: what it has not confirmed is to be sent again. Returns how many messages."""
        self._flowing = False
        self._publishers = None
        self._stream = None
        runs, self._runs, self._firsts = self._runs, [], []
        self._early.clear()
        self._next = self._floor = 1
        self._count_in_flight()
        again = [Waiting(run.part, left) for run in runs if (left := run.left())]
        for waiting in again:
            self._count_waiting(waiting, 1)
        self._waiting.extendleft(reversed(again))
        return sum(len(waiting.positions) for waiting in again)

    def close_over(self, code: int, text: str) -> None:
        """The broker closed the channel, or the connection, because of a message that it was sent."""
        left = self.close()
        if not left:
            return
        reason = Reason.NOT_AUTHORIZED if code == ReplyCode.ACCESS_REFUSED else Reason.TARGET_REFUSED
        outcome = Outcome(Verdict.REJECTED, reason, text)
        named = (
            NAMED_EXCHANGE.search(text) if code in (ReplyCode.ACCESS_REFUSED, ReplyCode.NOT_FOUND) else None
        )
        if named is not None and self._concerns(named[1]):
            self.refuse(named[1], outcome)
            self._missing(named[1], outcome)
        elif left == 1:
            waiting = self._take(1)
            waiting.part.settle_at(waiting.positions, outcome)
            self._widen()
        else:
            self._window = max(1, left // 2)
            self._suspects = left

    def refuse(self, exchange: str, outcome: Outcome) -> None:
        """Messages for `exchange` are not sent any more; those that wait are settled too."""
        self._refusals[exchange] = outcome
        waiting, self._waiting = self._waiting, deque()
        for one in waiting:
            kept = self._without_refused(one.part, one.positions)
            if len(kept) == len(one.positions):
                self._waiting.append(one)
                continue
            self._count_waiting(one, -1)
            if kept:
                self._waiting.append(Waiting(one.part, kept))
                self._count_waiting(self._waiting[-1], 1)

    def allow(self, exchange: str) -> None:
        """The exchange is there."""
        self._refusals.pop(exchange, None)

    # Sending.

    def publish(self, part: Part) -> None:
        """Send the part now, if nothing waits and there is room, or let it wait."""
        messages = part.messages
        if (
            self._flowing
            and not self._waiting
            and not self._refusals
            and self.in_flight + len(messages) <= self._window
            and not self._stream.congested  # type: ignore[union-attr]
        ):
            self._send(part, range(len(messages)), messages)
            return
        kept = self._without_refused(part, range(len(messages))) if self._refusals else range(len(messages))
        if not kept:
            return
        one = Waiting(part, kept)
        octets = sum([len(message.body) for message in messages])
        if (
            self.waiting_messages + len(messages) > self.messages_max
            or self.waiting_octets + octets > self.octets_max
        ):
            part.settle_at(kept, WAITING_FULL)
            return
        self._waiting.append(one)
        self._count_waiting(one, 1)
        self.pump()

    def pump(self) -> None:
        """Send what waits, as far as the window and the stream go."""
        while self._waiting and self._flowing:
            assert self._stream is not None
            assert self._publishers is not None
            room = self._window - self.in_flight
            if room <= 0 or not self._publishers[0].usable or self._stream.congested:
                return
            part, positions = self._take(min(room, SLICE_MESSAGES_MAX))
            messages = [part.messages[at] for at in positions]
            utc = time.time()
            late = {
                at
                for at, message in zip(positions, messages, strict=True)
                if message.expires and message.expires <= utc
            }
            if late:
                part.settle_at(late, EXPIRED)
                positions = [at for at in positions if at not in late]
                messages = [part.messages[at] for at in positions]
            if messages:
                self._send(part, positions, messages)

    def _take(self, room: int) -> Waiting:
        """The next of what waits, at most `room` messages and SLICE_OCTETS_MAX, but at least one message."""
        part, positions = self._waiting.popleft()
        messages = part.messages
        octets = 0
        count = 0
        for at in positions[:room]:
            octets += len(messages[at].body)
            if count and octets > SLICE_OCTETS_MAX:
                break
            count += 1
        taken = Waiting(part, positions[:count])
        self._count_waiting(taken, -1)
        if count < len(positions):
            self._waiting.appendleft(Waiting(part, positions[count:]))
        return taken

    def _send(self, part: Part, positions: Positions, messages: list[Message]) -> None:
        assert self._publishers is not None
        assert self._stream is not None
        lane = part.lane
        mandatory = not isinstance(lane, RouteLane) or lane.mandatory
        utc = time.time()
        try:
            rows = [
                (message.address.wire, encode_properties(message, utc), message.body) for message in messages
            ]
        except ProtocolError:
            rows, positions = self._rows_one_by_one(part, positions, utc)
        unsent = self._publishers[mandatory].publish_many(rows)
        if unsent:
            part.settle_at([positions[at] for at in unsent], FRAME_TOO_SMALL)
            positions = [at for row, at in enumerate(positions) if row not in unsent]
        count = len(positions)
        if not count:
            return
        self._runs.append(Run(self._next, part, positions, mandatory, trio.current_time()))
        self._firsts.append(self._next)
        self._next += count
        stats = self._stats
        stats.messages_out += count
        self._count_in_flight()
        stream = self._stream
        stream.queued += sum([len(row[2]) for row in rows]) + MESSAGE_OVERHEAD * count
        stream.mark()

    @staticmethod
    def _rows_one_by_one(part: Part, positions: Positions, utc: float) -> tuple[list[PublishRow], list[int]]:
        """As the loop in `_send`, when the properties of some message cannot be written."""
        rows: list[PublishRow] = []
        kept: list[int] = []
        for at in positions:
            message = part.messages[at]
            try:
                rows.append((message.address.wire, encode_properties(message, utc), message.body))
            except ProtocolError as error:
                part.settle_at((at,), Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error)))
            else:
                kept.append(at)
        return rows, kept

    # Outcomes.

    def confirm(self, confirms: list[tuple[int, int, bool, bool]]) -> None:
        """The broker's acks and nacks, in their order: (channel, number, multiple, whether it is an ack)."""
        floor = self._floor
        early = self._early
        singles: list[int] = []
        for _, number, multiple, accepted in confirms:
            if not accepted:
                self._advance(floor)
                self._settle_singles(singles, ACCEPTED)
                singles = []
                if multiple:
                    self._advance(number + 1, REFUSED_BY_BROKER)
                else:
                    self._settle_singles([number], REFUSED_BY_BROKER)
                floor = self._floor
            elif multiple:
                if number >= floor:
                    floor = number + 1
            elif number == floor:
                floor += 1
                while early and floor in early:
                    early.remove(floor)
                    floor += 1
            elif floor < number < self._next:
                singles.append(number)
                early.add(number)
        self._advance(floor)
        self._settle_singles(singles, ACCEPTED)
        self._count_in_flight()
        self.pump()

    def _advance(self, floor: int, outcome: Outcome = ACCEPTED) -> None:
        """Everything below `floor` that is still open has this outcome."""
        early = self._early
        if early:
            if floor - self._floor < len(early):
                early.difference_update(range(self._floor, floor))
            else:
                early.difference_update([number for number in early if number < floor])
            while floor in early:
                early.remove(floor)
                floor += 1
        floor = min(floor, self._next)
        passed = floor - self._floor
        if passed <= 0:
            return
        self._floor = floor
        whole = bisect_right(self._firsts, floor - 1)
        if self._runs[whole - 1].last >= floor:
            whole -= 1
            rest: Run | None = self._runs[whole]
        else:
            rest = None
        finished = self._runs[:whole]
        del self._runs[:whole]
        del self._firsts[:whole]
        now = trio.current_time()
        observe = self._stats.latency.observe
        for run in finished:
            observe(now - run.sent, run.last - run.first + 1)
            run.settle_to(run.last, outcome)
        if rest is not None:
            rest.settle_to(floor - 1, outcome)
        if self._suspects:
            self._suspects -= passed
            if self._suspects <= 0:
                self._widen()

    def _settle_singles(self, numbers: list[int], outcome: Outcome) -> None:
        """These numbers have this outcome; none of them need be the lowest that is open."""
        at = 0
        while at < len(numbers):
            run = self._run_of(numbers[at])
            if run is None:
                at += 1
                continue
            begin = at
            while at < len(numbers) and run.first <= numbers[at] <= run.last:
                at += 1
            run.settle_some([number - run.first for number in numbers[begin:at]], outcome)
        if numbers and outcome is not ACCEPTED:
            self._early.update(number for number in numbers if self._floor <= number < self._next)
            self._advance(self._floor)

    def _run_of(self, number: int) -> Run | None:
        index = bisect_right(self._firsts, number) - 1
        if index < 0 or number > self._runs[index].last:
            return None  # confirmed before, or never sent
        return self._runs[index]

    def returned(self, event: Returned) -> bool:
        """A mandatory message came back. Returns arrive in the order of publishing, each before its ack.

        False: no message on its way looks like this one.
        """
        method = event.method
        address = AmqpAddress(method.exchange, method.routing_key)
        reason = Reason.NO_ROUTE if method.reply_code == ReplyCode.NO_ROUTE else Reason.TARGET_REFUSED
        text = f"{method.reply_text}: exchange {method.exchange!r}, key {method.routing_key!r}"
        after = self._returned + 1
        # A broker may write the properties of what it returns differently, and may have lost the order.
        for start, properties in ((after, event.properties), (after, None), (0, None)):
            for index in range(max(0, bisect_right(self._firsts, start) - 1), len(self._runs)):
                run = self._runs[index]
                offset = run.find(start, address, properties, event.body) if run.mandatory else -1
                if offset >= 0:
                    self._returned = run.first + offset
                    run.settle_some([offset], Outcome(Verdict.REJECTED, reason, text))
                    return True
        return False

    # Counting.

    def _concerns(self, exchange: str) -> bool:
        """Whether a message for `exchange` waits."""
        return any(_exchange_of(part.messages[at]) == exchange for part, left in self._waiting for at in left)

    def _without_refused(self, part: Part, positions: Positions) -> Positions:
        """The positions whose exchange is not refused; the others are settled."""
        refused: dict[str, list[int]] = {}
        for at in positions:
            exchange = _exchange_of(part.messages[at])
            if exchange in self._refusals:
                refused.setdefault(exchange, []).append(at)
        if not refused:
            return positions
        out = {at for found in refused.values() for at in found}
        for exchange, found in refused.items():
            part.settle_at(found, self._refusals[exchange])
        return [at for at in positions if at not in out]

    def _widen(self) -> None:
        self._window = self.in_flight_max
        self._suspects = 0

    def _count_waiting(self, one: Waiting, sign: int) -> None:
        messages = one.part.messages
        self.waiting_messages += sign * len(one.positions)
        self.waiting_octets += sign * sum([len(messages[at].body) for at in one.positions])

    def _count_in_flight(self) -> None:
        self.in_flight = self._stats.in_flight = self._next - self._floor - len(self._early)


def _exchange_of(message: Message) -> str:
    address = message.address
    assert isinstance(address, AmqpAddress)
    return address.exchange
