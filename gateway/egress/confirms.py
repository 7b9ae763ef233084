"""Publishing with confirms on a link, for any protocol.

A `ConfirmedSink` stores the messages that wait to be sent and those that were sent but not confirmed, and
settles both. It gets messages as sub-batches (SubBatch); a position is an index in one.

Messages are numbered as they are sent. Consecutive numbers of messages from one sub-batch form an
UnconfirmedRun, so that a confirm of many costs little more than a confirm of one: all runs below the lowest
unconfirmed number (`_floor`) are settled as a whole. A number that is settled out of order is stored until
the floor has passed it.

Parts that cannot be sent now wait in order. When the connection is lost, its unconfirmed messages go to the
front of the waiting ones, and all are sent again, never more than the window allows at a time.

A broker that rejects one message may close the channel or connection without identifying the message. The
window is then narrowed for the messages that were in flight, and again each time that this happens, until one
message is alone and thereby identified; with a broker that gives no reason, this takes several attempts. The
same is done when the gateway itself cannot send a message and the cause is not known. Messages for a place
(an exchange or a destination) that does not exist are refused together.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from gateway import clock
from gateway.broker.shares import UserQuotas
from gateway.containment import contained
from gateway.model.batch import SubBatch
from gateway.model.message import NEVER, Message
from gateway.model.outcome import ACCEPTED, INTERNAL, Outcome, Reason, Verdict
from gateway.model.shares import UserShares
from gateway.telemetry.stats import LinkStats
from gateway.transport.stream import Stream

# Waiting messages are sent in slices of at most this size. The stream may pause sending between slices.
SLICE_MESSAGES_MAX: Final = 500
SLICE_BYTES_MAX: Final = 1_048_576
UNSENT_AT_ONCE: Final = 1_000  # expired messages that are settled before other tasks run
SEARCHED_MAX: Final = 10_000  # waiting parts of sub-batches in which expired messages are searched
MESSAGE_OVERHEAD: Final = 64  # approximate bytes on the wire besides body and properties

WAITING_FULL: Final = Outcome(
    Verdict.RELEASED, Reason.TARGET_DOWN, "the link is down or slow, and its queue is full"
)
WAITING_USER_FULL: Final = Outcome(
    Verdict.RELEASED, Reason.QUOTA, "the user's share of the link's queue is used up (limits.user_share)"
)
EXPIRED: Final = Outcome(Verdict.REJECTED, Reason.EXPIRED, "the message expired while it waited for the link")
REDELIVERED: Final = Outcome(
    Verdict.RELEASED, Reason.TARGET_DOWN, "the link was down, and the broker delivers the message again"
)

Positions = Sequence[int]
Place = str | bytes
RefusedPositions = tuple[SubBatch, Positions, Outcome]
"""Messages of a sub-batch that are not sent because their place is refused, and the reason."""


class Unconfirmed(NamedTuple):
    """Messages of one sub-batch that are not confirmed: those at the indexes `positions` in `sub_batch`."""

    sub_batch: SubBatch
    positions: Positions


class UnconfirmedRun:
    """Sent messages of one sub-batch (`sub_batch`) that have the consecutive numbers `first` to `last`.

    The message with the number first + n is at the index `positions[n]` in `sub_batch`; n is called its
    offset.
    """

    __slots__ = ("done", "first", "last", "mandatory", "positions", "sent", "settled", "sub_batch")

    def __init__(
        self, first: int, sub_batch: SubBatch, positions: Positions, mandatory: bool, sent: float
    ) -> None:
        self.first = first
        self.last = first + len(positions) - 1
        self.sub_batch = sub_batch
        self.positions = positions
        self.mandatory = mandatory
        self.sent = sent
        self.done = 0  # offsets below it are settled
        self.settled: set[int] = set()  # higher offsets that are settled or were withdrawn from this run

    def settle_to(self, number: int, outcome: Outcome) -> None:
        """Settle all unsettled messages up to `number` with this outcome."""
        begin, self.done = self.done, min(number, self.last) - self.first + 1
        if not begin and not self.settled and self.done == len(self.sub_batch.slots):
            self.sub_batch.settle(outcome)
        elif not self.settled:
            self.sub_batch.settle_at(self.positions[begin : self.done], outcome)
        else:
            open_offsets = [offset for offset in range(begin, self.done) if offset not in self.settled]
            self.sub_batch.settle_at([self.positions[offset] for offset in open_offsets], outcome)

    def settle_some(self, offsets: list[int], outcome: Outcome) -> None:
        """Settle only the messages at these offsets (number minus `first`) with this outcome."""
        self.settled.update(offsets)
        positions = self.positions
        self.sub_batch.settle_at([positions[offset] for offset in offsets], outcome)

    def open(self) -> list[int]:
        """Return the offsets (number minus `first`) of the messages that are not settled."""
        return [offset for offset in range(self.done, len(self.positions)) if offset not in self.settled]

    def unsettled_positions(self) -> Positions:
        """Return the indexes, in the sub-batch, of the messages that are not settled."""
        if not self.settled:
            return self.positions[self.done :]
        return [self.positions[offset] for offset in self.open()]


class ConfirmedSink:
    """Destination end of routes to a link: sends messages, and settles them when the broker confirms."""

    def __init__(self, stats: LinkStats, *, in_flight_max: int, messages_max: int, bytes_max: int) -> None:
        """Create the publisher of a link.

        At most `in_flight_max` messages are sent and not confirmed at a time. At most `messages_max` messages
        of `bytes_max` bytes in all wait to be sent.
        """
        self.in_flight_max = in_flight_max
        self.messages_max = messages_max
        self.bytes_max = bytes_max
        self.in_flight = 0
        self.waiting_messages = 0
        self.waiting_bytes = 0
        self._shares: UserShares | None = None  # of users among the waiting messages
        self._stats = stats
        self._waiting: deque[Unconfirmed] = deque()
        self._refusals: dict[Place, Outcome] = {}
        self._flowing = False
        self._stream: Stream | None = None
        self._runs: list[UnconfirmedRun] = []
        self._firsts: list[int] = []  # first numbers of the runs
        self._next = 1
        self._floor = 1
        self._early: set[int] = set()  # numbers above the floor that are settled
        self._window = in_flight_max
        self._suspects = 0  # number of messages for which the window stays narrow
        self._blamed = 0  # how often one of the suspects has caused a close
        self._settleable = UNSENT_AT_ONCE  # waiting messages that may be settled unsent in this turn
        # Positions in the sub-batch being sent that have an outcome already.
        self._unsent: list[tuple[Positions, Outcome]] = []

    def share_among(self, quotas: UserQuotas) -> None:
        """Limit the waiting messages of each user (limits.user_share). Call this before the first message."""
        self._shares = quotas.waiting_in(self.messages_max, self.bytes_max)

    # Interface for the protocols.

    @property
    @abstractmethod
    def _usable(self) -> bool:
        """True if the channel can be used: messages that are sent now will reach the broker."""

    @abstractmethod
    def _send(self, sub_batch: SubBatch, positions: Positions, messages: list[Message]) -> Positions:
        """Send `messages`, which are at `positions` in the sub-batch. Return the positions that have to wait.

        A message that cannot be encoded raises no error; its position is passed to `_settle_unsent`.
        """

    @abstractmethod
    def _destination_of(self, message: Message) -> Place:
        """Return the exchange or destination of a message, by which `refuse` selects messages."""

    # Connection.

    @property
    def idle(self) -> bool:
        """True if no message waits or is unconfirmed."""
        return not self._waiting and not self._runs

    def close(self) -> int:
        """Requeue unconfirmed messages after the connection is lost. Return their number."""
        self._flowing = False
        self._stream = None
        runs, self._runs, self._firsts = self._runs, [], []
        self._early.clear()
        self._next = self._floor = 1
        self._count_in_flight()
        return self._requeue(
            [Unconfirmed(run.sub_batch, left) for run in runs if (left := run.unsettled_positions())]
        )

    def _requeue(self, again: list[Unconfirmed]) -> int:
        """Queue the messages `again` in front of the waiting messages. Return the number of messages."""
        for waiting in again:
            self._count_waiting(waiting, 1)
        self._waiting.extendleft(reversed(again))
        return sum(len(waiting.positions) for waiting in again)

    def _suspect(self, count: int, outcome: Outcome, *, window: int = 0, times: int = 1) -> Message | None:
        """Send fewer messages at a time, until the message that causes closes or errors is identified.

        It is one of the first `count` waiting messages. If there are several, at most `window` messages (0:
        half of `count`) are in flight from now on. A single message is sent alone again; at the call number
        `times` in succession it is settled with `outcome` and returned. Return None in all other cases.
        """
        self._blamed += 1
        if count > 1:
            self._window = window or max(1, count // 2)
            self._suspects = count + self.in_flight
            return None
        if self._blamed < times:
            self._window = self._suspects = 1
            return None
        sub_batch, positions = self._take_slice(1)
        sub_batch.settle_at(positions, outcome)
        self._reset_window()
        return sub_batch.messages[positions[0]]

    def refuse(self, place: Place, outcome: Outcome) -> None:
        """Refuse all messages for the exchange or destination `place` until `allow` is called.

        Waiting and later messages for it are settled with `outcome`.
        """
        self._refusals[place] = outcome
        refused: list[RefusedPositions] = []
        waiting, self._waiting = self._waiting, deque()
        for one in waiting:
            remaining = self._without_refused(one.sub_batch, one.positions, refused)
            if len(remaining) == len(one.positions):
                self._waiting.append(one)
                continue
            self._count_waiting(one, -1)
            if remaining:
                self._waiting.append(Unconfirmed(one.sub_batch, remaining))
                self._count_waiting(self._waiting[-1], 1)
        _settle_refused(refused)

    def allow(self, place: Place) -> None:
        """End the effect of `refuse`: send messages for the exchange or destination `place` again."""
        self._refusals.pop(place, None)

    # Handover to another replica.

    def has_doubtful(self, selects: Callable[[SubBatch], bool]) -> bool:
        """Return True if the broker may have unconfirmed messages that only this link can safely send again.

        The broker would recognise such a message as a duplicate if this link sent it, but not if another
        replica did. Only sub-batches for which `selects` returns True are considered.
        """
        return False

    def release_waiting(self, selects: Callable[[SubBatch], bool], outcome: Outcome) -> None:
        """Settle waiting messages with this outcome, because another replica may send them.

        Only sub-batches for which `selects` returns True are considered. Messages that the broker may already
        have (see `has_doubtful`) are not included.
        """
        settle_all(self._withdraw_waiting(lambda sub_batch, at: selects(sub_batch)), outcome)

    # Sending.

    def publish(self, sub_batch: SubBatch) -> None:
        """Send the messages of a sub-batch, or queue them.

        They are sent at once if no earlier message waits and all of them fit into the in-flight window.
        """
        messages = sub_batch.messages
        every = range(len(messages))
        if (
            self._flowing
            and not self._waiting
            and not self._refusals
            and self.in_flight + len(messages) <= self._window
            and self._usable
            and not self._stream.congested  # type: ignore[union-attr]
        ):
            self._send_or_requeue(sub_batch, every, messages)
            return
        self._queue_part(sub_batch, every)

    def _queue_part(self, sub_batch: SubBatch, positions: Positions) -> None:
        """Queue messages of a sub-batch behind the waiting messages, and send as many as possible.

        If the waiting messages then exceed the limits, the newest of `sub_batch` are settled as released:
        their source retries them.
        """
        refused: list[RefusedPositions] = []
        accepted = self._without_refused(sub_batch, positions, refused) if self._refusals else positions
        if accepted:
            one = Unconfirmed(sub_batch, accepted)
            self._waiting.append(one)
            self._count_waiting(one, 1)
            self.pump()
            if self._waiting and self._waiting[-1].sub_batch is sub_batch:
                self._trim_users()
                if self._is_over_limit() and self._waiting:
                    self._trim()
        _settle_refused(refused)

    def _is_over_limit(self) -> bool:
        return self.waiting_messages > self.messages_max or self.waiting_bytes > self.bytes_max

    def _trim_users(self) -> None:
        """Release messages of the sub-batch queued last whose users exceed their part of the limits.

        Their source retries them.
        """
        shares = self._shares
        if shares is None or (
            shares.count <= shares.user_count_max and shares.total <= shares.user_bytes_max
        ):
            return
        one = self._waiting.pop()
        sub_batch, positions = one
        self._count_waiting(one, -1)
        refused = [
            positions[at] for at in shares.refuse_over_share([sub_batch.messages[at] for at in positions])
        ]
        out = set(refused)
        if remaining := [at for at in positions if at not in out]:
            self._waiting.append(Unconfirmed(sub_batch, remaining))
            self._count_waiting(self._waiting[-1], 1)
        if refused:
            sub_batch.settle_at(refused, WAITING_USER_FULL)

    def _trim(self) -> None:
        """Release the newest messages of the sub-batch queued last, until the queue's limits are observed.

        Their source retries them.
        """
        one = self._waiting.pop()
        sub_batch, positions = one
        self._count_waiting(one, -1)
        room = self.messages_max - self.waiting_messages
        byte_count = self.bytes_max - self.waiting_bytes
        fitting_count = 0
        for at in positions:
            byte_count -= sub_batch.messages[at].byte_count
            if byte_count < 0 or fitting_count >= room:
                break
            fitting_count += 1
        if fitting_count:
            self._waiting.append(Unconfirmed(sub_batch, positions[:fitting_count]))
            self._count_waiting(self._waiting[-1], 1)
        sub_batch.settle_at(positions[fitting_count:], WAITING_FULL)

    def pump(self) -> None:
        """Send waiting messages as far as the in-flight window and the stream allow. Settle expired ones.

        If many have expired, the rest waits for `continue_turn`.
        """
        while self._waiting and self._flowing:
            assert self._stream is not None
            if self._settleable <= 0:
                self._stream.request_turn()
                return
            room = self._send_capacity()
            if room <= 0 or not self._usable or self._stream.congested:
                return
            sub_batch, positions = self._take_slice(min(room, SLICE_MESSAGES_MAX))
            messages = [sub_batch.messages[at] for at in positions]
            if unwanted := self._unwanted(sub_batch, positions, messages):
                out = {at for some, _ in unwanted for at in some}
                if remaining := [at for at in positions if at not in out]:
                    self._requeue(
                        [Unconfirmed(sub_batch, remaining)]
                    )  # before what their source publishes then
                self._settleable -= len(out)
                for some, outcome in unwanted:
                    sub_batch.settle_at(some, outcome)
                continue
            if not self._send_or_requeue(sub_batch, positions, messages):
                return

    def continue_turn(self) -> None:
        """Send and settle more of the waiting messages; the connection calls this in its stream's turns."""
        if self._settleable <= 0:
            self._settleable = UNSENT_AT_ONCE
            self.pump()

    def _unwanted(
        self, sub_batch: SubBatch, positions: Positions, messages: list[Message]
    ) -> list[tuple[list[int], Outcome]]:
        """Return the positions of messages that must not be sent any more, grouped by their outcome.

        Such a message has expired, or its source broker delivers it again after a reconnect.
        """
        utc = clock.utc()
        expired = [
            at
            for at, message in zip(positions, messages, strict=True)
            if message.expires and message.expires <= utc and self._may_expire(sub_batch, at)
        ]
        again: list[int] = []
        if sub_batch.batch.redelivered is not None:
            again = [
                at for at in positions if sub_batch.is_redelivered(at) and self._may_expire(sub_batch, at)
            ]
        return [(some, outcome) for some, outcome in ((again, REDELIVERED), (expired, EXPIRED)) if some]

    def _send_capacity(self) -> int:
        """Return how many messages may be sent now."""
        return self._window - self.in_flight

    def _may_expire(self, sub_batch: SubBatch, at: int) -> bool:
        """Return True if the message at index `at` of the sub-batch may be settled as expired, not sent."""
        return True

    def _send_or_requeue(self, sub_batch: SubBatch, positions: Positions, messages: list[Message]) -> bool:
        """Send messages of a sub-batch by `_send`. Return False if some of them are queued again.

        An error closes the connection, and any unconfirmed message may be its cause. After several
        connections, each with fewer messages in flight, the faulty message is alone and thereby identified.
        """
        try:
            rest = self._send(sub_batch, positions, messages)
        except Exception as error:
            self._unsent.clear()
            stream = self._stream
            count = self._requeue([Unconfirmed(sub_batch, positions)]) + self.close()
            if self._suspect(count, INTERNAL) is not None:
                contained("delivery", error)
            if stream is not None:
                stream.fail_later(error)
            return True
        if rest:
            self._requeue([Unconfirmed(sub_batch, rest)])
        unsent, self._unsent = self._unsent, []
        for settled, outcome in unsent:
            if len(settled) == len(sub_batch.slots):
                sub_batch.settle(outcome)
            else:
                sub_batch.settle_at(settled, outcome)
        return not rest

    def _settle_unsent(self, positions: Positions, outcome: Outcome) -> None:
        """Record positions of the sub-batch being sent, to be settled with this outcome after `_send`.

        Their source may publish more messages as soon as they are settled. These must not overtake the
        messages of the sub-batch that have to wait.
        """
        self._unsent.append((positions, outcome))

    def settle_expired(self) -> None:
        """Settle expired messages among the first waiting ones, also while nothing can be sent.

        Called once per second, so that their sources do not wait for a link that is down.
        """
        utc = clock.utc()

        def is_expired(sub_batch: SubBatch, at: int) -> bool:
            return NEVER < sub_batch.messages[at].expires <= utc and self._may_expire(sub_batch, at)

        settle_all(self._withdraw_waiting(is_expired, UNSENT_AT_ONCE, SEARCHED_MAX), EXPIRED)

    def _withdraw_waiting(
        self,
        selects: Callable[[SubBatch, int], bool],
        most: int = sys.maxsize,
        searched_max: int = sys.maxsize,
    ) -> list[Unconfirmed]:
        """Remove at most `most` waiting messages for which `selects` returns True. Return them unsettled.

        `selects` gets the sub-batch and the message's index in it. Only the first `searched_max` parts of
        sub-batches that wait are searched.
        """
        withdrawn: list[Unconfirmed] = []
        remaining: list[Unconfirmed] = []
        while self._waiting and most > 0 and searched_max > 0:
            searched_max -= 1
            one = self._waiting.popleft()
            chosen = [at for at in one.positions if selects(one.sub_batch, at)][:most]
            if not chosen:
                remaining.append(one)
                continue
            most -= len(chosen)
            self._count_waiting(one, -1)
            withdrawn.append(Unconfirmed(one.sub_batch, chosen))
            if len(chosen) < len(one.positions):
                out = set(chosen)
                remaining.append(Unconfirmed(one.sub_batch, [at for at in one.positions if at not in out]))
                self._count_waiting(remaining[-1], 1)
        self._waiting.extendleft(reversed(remaining))
        return withdrawn

    def _take_slice(self, room: int) -> Unconfirmed:
        """Remove and return the next waiting messages of one sub-batch: at least one, at most `room`.

        If they are several, their bodies have at most SLICE_BYTES_MAX bytes in all.
        """
        sub_batch, positions = self._waiting.popleft()
        messages = sub_batch.messages
        byte_count = 0
        count = 0
        for at in positions[:room]:
            byte_count += messages[at].byte_count
            if count and byte_count > SLICE_BYTES_MAX:
                break
            count += 1
        unconfirmed = Unconfirmed(sub_batch, positions[:count])
        self._count_waiting(unconfirmed, -1)
        if count < len(positions):
            self._waiting.appendleft(Unconfirmed(sub_batch, positions[count:]))
        return unconfirmed

    def _record_sent(
        self, sub_batch: SubBatch, positions: Positions, byte_count: int, *, mandatory: bool = False
    ) -> None:
        """Assign numbers to messages that were just encoded, and count them.

        Their bodies have `byte_count` bytes in all. `mandatory` is True if the broker returns unroutable
        messages.
        """
        if positions:
            self._number(sub_batch, positions, clock.now(), mandatory=mandatory)
            self._count_in_flight()
            self._written(len(positions), byte_count)

    def _number(
        self, sub_batch: SubBatch, positions: Positions, sent: float, *, mandatory: bool = False
    ) -> range:
        """Assign the next publish sequence numbers to the messages at `positions`. Return these numbers.

        `sent` is the time of sending in loop-clock seconds. `mandatory` is True if the broker returns
        unroutable messages.
        """
        first = self._next
        self._runs.append(UnconfirmedRun(first, sub_batch, positions, mandatory, sent))
        self._firsts.append(first)
        self._next = first + len(positions)
        return range(first, self._next)

    def _written(self, count: int, byte_count: int) -> None:
        """Count `count` messages that were encoded to the stream's send buffer.

        The buffer is written at the end of the pass of the event loop. The bodies of the messages have
        `byte_count` bytes in all.
        """
        self._stats.messages_out += count
        stream = self._stream
        assert stream is not None
        stream.queued += byte_count + MESSAGE_OVERHEAD * count
        stream.mark_for_flush()

    # Outcomes.

    def _advance(self, floor: int, outcome: Outcome = ACCEPTED) -> None:
        """Settle all unsettled messages whose number is below `floor` with this outcome."""
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
            rest: UnconfirmedRun | None = self._runs[whole]
        else:
            rest = None
        finished = self._runs[:whole]
        del self._runs[:whole]
        del self._firsts[:whole]
        now = clock.now()
        observe = self._stats.latency.observe
        for run in finished:
            observe(now - run.sent, run.last - run.first + 1)
            run.settle_to(run.last, outcome)
        if rest is not None:
            rest.settle_to(floor - 1, outcome)
        if self._suspects:
            self._suspects -= passed
            if self._suspects <= 0:
                self._reset_window()

    def _settle_singles(self, numbers: list[int], outcome: Outcome) -> None:
        """Settle the messages with these numbers with this outcome. The numbers may be in any order."""
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

    def _run_of(self, number: int) -> UnconfirmedRun | None:
        index = bisect_right(self._firsts, number) - 1
        if index < 0 or number > self._runs[index].last:
            return None  # confirmed before, or never sent
        return self._runs[index]

    def _withdraw(self, selects: Callable[[Message], bool]) -> list[Unconfirmed]:
        """Remove sent, unconfirmed messages for which `selects` returns True. Return them unsettled.

        Later confirms of their numbers have no effect.
        """
        withdrawn: list[Unconfirmed] = []
        for run in self._runs:
            messages, positions = run.sub_batch.messages, run.positions
            offsets = [offset for offset in run.open() if selects(messages[positions[offset]])]
            if offsets:
                run.settled.update(offsets)
                self._early.update(run.first + offset for offset in offsets)
                withdrawn.append(Unconfirmed(run.sub_batch, [positions[offset] for offset in offsets]))
        self._advance(self._floor)
        self._count_in_flight()
        return withdrawn

    # Counts.

    def _concerns(self, place: Place) -> bool:
        """Return True if a waiting message goes to the exchange or destination `place`."""
        return any(
            self._destination_of(sub_batch.messages[at]) == place
            for sub_batch, left in self._waiting
            for at in left
        )

    def _without_refused(
        self, sub_batch: SubBatch, positions: Positions, into: list[RefusedPositions]
    ) -> Positions:
        """Return the positions of messages whose exchange or destination is not refused.

        The other messages are appended to `into` with their outcome; the caller settles them by
        `_settle_refused`.
        """
        refused: dict[Place, list[int]] = {}
        for at in positions:
            place = self._destination_of(sub_batch.messages[at])
            if place in self._refusals:
                refused.setdefault(place, []).append(at)
        if not refused:
            return positions
        out = {at for found in refused.values() for at in found}
        into += [(sub_batch, found, self._refusals[place]) for place, found in refused.items()]
        return [at for at in positions if at not in out]

    def _reset_window(self) -> None:
        self._window = self.in_flight_max
        self._suspects = self._blamed = 0

    def _count_waiting(self, one: Unconfirmed, sign: int) -> None:
        messages = one.sub_batch.messages
        self.waiting_messages += sign * len(one.positions)
        self.waiting_bytes += sign * sum([messages[at].byte_count for at in one.positions])
        if self._shares is not None:
            counted = [messages[at] for at in one.positions]
            if sign > 0:
                self._shares.add_messages(counted)
            else:
                self._shares.remove_messages(counted)

    def _count_in_flight(self) -> None:
        self.in_flight = self._stats.in_flight = self._next - self._floor - len(self._early)


def _settle_refused(refused: list[RefusedPositions]) -> None:
    """Settle refused messages with their outcomes.

    Call this after the accepted messages are queued: a source may publish more messages as soon as its
    message is settled, and they must not overtake the accepted ones.
    """
    for sub_batch, positions, outcome in refused:
        sub_batch.settle_at(positions, outcome)


def settle_all(waiting: Iterable[Unconfirmed], outcome: Outcome) -> None:
    """Settle these messages with the outcome."""
    for sub_batch, positions in waiting:
        sub_batch.settle_at(positions, outcome)
