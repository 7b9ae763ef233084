"""MQTT session that survives a restart: its undelivered messages are in a log of the store.

Messages to be acknowledged (QoS above 0) get a position in the log and are written, whether the client is
connected or not; their publisher is informed after the commit. They wait in memory while the client is
connected and the limits allow; otherwise they are only on disk, and are read back in pieces. QoS 0 waits in
memory only, and overtakes messages that are only on disk: order is kept for each QoS (5: 4.6).

The packet id of a message is its position, modulo. An unacknowledged message is therefore resent under its
old id after a restart, too. If that id is in use by an earlier message, or by one whose PUBREL is unanswered,
the message gets another id, which is recorded first (packet_ids.py). DUP says that a message may have been
sent before: its position is below `sent`, which is recorded when the client disconnects. If the gateway was
killed while the client was connected, `sent` is unknown, and all messages stored then have DUP.

QoS 2 waits for its own commit before it is sent. Otherwise, after a crash, the packet id under which the
client already has one message could belong to another, which the client would take for a repeat. On PUBREC
the message is forgotten and its id recorded as released, together; PUBREL waits for that commit.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import ClassVar

from gateway import clock
from gateway.broker.mqtt.packet_ids import RenumberedMessages
from gateway.broker.mqtt.received_ids import DurableReceivedIds
from gateway.broker.mqtt.records import SESSION, Records, SessionRecord
from gateway.broker.mqtt.session import (
    CHECKED_PER_SECOND,
    PACKET_IDS,
    ROWS_BYTES_MAX,
    ROWS_MAX,
    UNKEPT,
    EndedSessionLog,
    Grant,
    OutcomeCallback,
    OutgoingPublish,
    PassOn,
    PendingRetained,
    QueuedRow,
    RetainedWalk,
    Session,
    SessionLimits,
    SessionOutlet,
    SessionTally,
    decode_grant,
)
from gateway.broker.pressure import hold_sources
from gateway.broker.storage import PIECE_BYTES_MAX, PIECE_MESSAGES_MAX, PagedLog
from gateway.model.batch import SubBatch
from gateway.model.message import NEVER, Message, weight_of
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.store.database import Stored
from gateway.store.index import Log


class DurableSession(Session):
    """MQTT session with a Session Expiry Interval, whose messages are in the store."""

    __slots__ = (
        "_aside",
        "_grants",
        "_ids",
        "_is_checking",
        "_log_passed_on",
        "_moving",
        "_positions",
        "_records",
        "_renumbered",
        "_safe",
        "_settled_positions",
        "_stays",
        "_stuck",
        "away_secs",
        "log",
        "next",
        "sent",
    )
    is_durable: ClassVar[bool] = True

    def __init__(self, client_id: str, limits: SessionLimits, tally: SessionTally, records: Records) -> None:
        super().__init__(client_id, limits, tally)
        self._ids = self.received_ids = DurableReceivedIds(records.store, client_id, self._send_pubrec)
        self.log = records.store.log(SESSION, client_id)
        self.next = 0  # position of the next message
        self.sent = 0  # messages below this position may have been sent
        self.away_secs = 0.0  # seconds the client had been disconnected when this process started
        self._records = records
        self._aside: PagedLog | None = None  # most sessions never need it
        self._positions: dict[int, int] = {}  # of messages in flight, by packet id
        self._moving: dict[int, QueuedRow] = {}  # being passed to other sessions, by position
        self._renumbered: RenumberedMessages | None = None  # most sessions never need it
        self._log_passed_on = False  # its log was passed on to others
        self._stays = 0  # times that a client was attached, or the session ended
        self._is_checking = False  # reading what is only on disk, for expired messages
        self._settled_positions: list[int] = []  # acknowledged or expired; settled once in a pass
        self._safe = 0  # messages below this position were committed or refused
        self._stuck = False  # the next message has QoS 2 or a packet id that is not on disk yet
        self._grants: tuple[bytes, Grant] | None = None  # the last tag that was decoded, and its grant

    def end_retained(self, topic_filter: str) -> None:
        """End the delivery of retained messages for the subscription with this filter.

        Also deletes the stored record that some of them are still to be sent.
        """
        if self.walks.pop(topic_filter, None) is not None:
            self._records.delete_owed(self.client_id, topic_filter)

    # Over a restart.

    def restore_received(self, log: Log) -> None:
        """Restore from `log` the packet ids of the QoS 2 messages that an earlier process has received.

        Only valid before the store starts.
        """
        self._ids.restore(log)

    def restore(self, record: SessionRecord) -> None:
        """Restore the session's state from the record of an earlier process.

        Only valid before the store starts.
        """
        extent = self._records.store.extent(self.log)
        self.expiry_secs = record.expiry_secs
        self.user, self.place = record.user, record.place
        # The client was connected when the process ended: it has been disconnected since now.
        self.away_secs = 0.0 if record.attached else max(clock.utc() - record.utc, 0.0)
        self.next = self._safe = extent.end
        self.sent = extent.end if record.attached else min(record.sent, extent.end)
        if extent.count:
            self._on_disk().put(*extent)
            self._byte_count = extent.byte_count
            self._expect_expired()
        if record.attached or record.sent != self.sent:
            self._record(attached=False)

    def restore_released(self, packet_id: int) -> None:
        """Restore the packet id of a message for which PUBREL may have been sent and PUBCOMP is missing.

        Must be called for the messages in the order of their positions in the session's log.
        """
        self.released[packet_id] = None

    def restore_renumbered(self, position: int, packet_id: int) -> None:
        """Restore the recorded packet id of the message at `position` in the session's log.

        The message may have been sent with it by an earlier process. If the message is not in the log any
        more, the record is deleted.
        """
        extent = self._records.store.extent(self.log)
        if extent.count and position >= extent.first:
            self._other_ids().restore(position, packet_id)
        else:
            self._records.delete_renumbered(self.client_id, position)

    def _other_ids(self) -> RenumberedMessages:
        if self._renumbered is None:
            used = (self.in_flight, self.released)
            self._renumbered = RenumberedMessages(self._records, self.client_id, used, self.pump)
        return self._renumbered

    def _mark_settled(self, position: int) -> None:
        """Mark the message at this position of the session's log for deletion: its delivery has ended.

        It is deleted from disk at the end of the pass of the event loop.
        """
        self._settled_positions.append(position)
        if self._renumbered:
            self._renumbered.forget(position)

    def _record(self, *, attached: bool) -> None:
        record = SessionRecord(self.expiry_secs, clock.utc(), attached, self.sent, self.user, self.place)
        self._records.put_session(self.client_id, record)

    # Publishing.

    def __len__(self) -> int:
        return super().__len__() + (0 if self._aside is None else self._aside.count)

    def take(self, sub_batch: SubBatch, grant: Grant) -> None:
        """Queue the messages of a sub-batch for the client, and settle them.

        Messages that are written to disk are settled after their commit, the others at once. `grant` has the
        options of the session's subscriptions that match.
        """
        if not grant.qos:
            super().take(sub_batch, grant)
            return
        if self.outlet is not None and self.may_pause_sources:
            self._hold_if_late(sub_batch)
        messages = sub_batch.messages
        start = 0
        for stored, group in groupby(
            messages, lambda one: one.assurance > 0 and not (grant.no_local and self._is_own(one))
        ):
            stop = start + len(list(group))
            run = messages if stop - start == len(messages) else messages[start:stop]
            if stored:
                fitting = self._within_limits(run)
                end = start + len(fitting)
                if fitting:
                    self._store_messages(
                        fitting,
                        grant,
                        partial(_settle, sub_batch, start, end),
                        sub_batch.recipient.stored_first,
                    )
                if end < stop:
                    sub_batch.settle_at(range(end, stop))
            else:
                self._queue_in_memory(self._without_own(run, grant), grant)
                sub_batch.settle_at(range(start, stop))
            start = stop
        if self._records.store.congested:
            self._records.store.hold(hold_sources(sub_batch))
        if self.outlet is not None:
            self.pump()

    def offer(self, messages: list[Message], grant: Grant) -> None:
        """Queue messages that no publisher waits for, such as those of `$SYS`.

        `grant` has the options of the session's subscriptions that match.
        """
        self._offer(messages, grant, _ignore_outcome)

    def _offer(self, messages: list[Message], grant: Grant, on_outcome: OutcomeCallback) -> None:
        """Queue messages, and write those of QoS 1 and 2 to disk.

        `on_outcome` is called with the outcome of each write, once or several times. It is not called for
        messages of QoS 0.
        """
        for stored, group in groupby(messages, lambda one: one.assurance > 0 and grant.qos > 0):
            run = list(group)
            if stored:
                run = self._within_limits(run)
                self._store_messages(run, grant, on_outcome)
            else:
                self._queue_in_memory(run, grant)
        if self.outlet is not None:
            self.pump()

    # Retained messages of its subscriptions. Refused ones are queued again when the disk works.

    def _may_walk(self, walk: PendingRetained) -> bool:
        return not (walk.grant.qos and self.failing)

    def _queue_retained(self, walk: PendingRetained, messages: list[Message]) -> None:
        on_outcome: OutcomeCallback = _ignore_outcome
        if isinstance(walk, RetainedWalk):
            on_outcome = partial(self._handle_piece_stored, walk, walk.returns, walk.piece_place)
        self._offer(messages, walk.grant, on_outcome)

    def _handle_piece_stored(
        self, walk: RetainedWalk, returns: int, place: list[str] | None, outcome: Outcome
    ) -> None:
        """Read some retained messages again if `outcome` says that the disk has refused them.

        `walk` has read them; it continues at `place`, the topic levels at which they began. Nothing is done
        if `walk` was rewound since then, so that its count of rewinds is not `returns` any more.
        """
        if outcome is not ACCEPTED and walk.returns == returns:
            walk.rewind(place)
            if self.outlet is not None:
                self.outlet.send_due_retained()

    def _finish_walk(self, topic_filter: str, walk: PendingRetained) -> None:
        """End the delivery of retained messages for a new subscription, once all of them are on disk.

        `walk` has read the last of them. At QoS 0 nothing is stored, and the delivery ends at once.
        """
        if not walk.grant.qos:
            self.end_retained(topic_filter)
            return
        walk.waits = True
        self._records.store.after_commit(partial(self._handle_walk_stored, topic_filter, walk))

    def _handle_walk_stored(self, topic_filter: str, walk: PendingRetained, outcome: Outcome) -> None:
        """End the delivery of retained messages for a subscription, unless `walk` must read some again.

        Called after a commit. Its outcome is ignored, because earlier commits may have contained the
        messages. If the disk refused messages, `walk` was rewound.
        """
        if walk.done and self.walks.get(topic_filter) is walk:
            self.end_retained(topic_filter)
            if self.outlet is not None:
                self.outlet.send_due_retained()

    def _queue_in_memory(self, messages: list[Message], grant: Grant) -> None:
        """Queue messages in memory only. If the client is disconnected, drop and count them."""
        if self.outlet is None:
            self.tally.offline += len(messages)
            return
        messages = self._within_limits(messages)
        self._wait([(message, grant, UNKEPT) for message in messages])
        self._byte_count += weight_of(messages)

    def _store_messages(
        self, messages: list[Message], grant: Grant, on_outcome: OutcomeCallback, stored_first: bool = False
    ) -> None:
        """Append messages to the session's log on disk, and queue them in memory, too, if there is space.

        With `stored_first`, and for a disconnected client, they are on disk only. `on_outcome` is called with
        the outcome of the commit. While the disk fails, the messages are refused at once and not queued, as
        they could otherwise be sent before they are refused.
        """
        if not self._records.store.healthy:
            self._records.store.refuse(on_outcome)
            return
        first = self.next
        count = len(messages)
        byte_count = weight_of(messages)
        self.next += count
        alone = stored_first or self.outlet is None or bool(self._aside) or self._memory_full()
        if alone:
            self._on_disk().put(first, self.next, count, byte_count)
        else:
            self._wait([(message, grant, first + at) for at, message in enumerate(messages)])
        self._byte_count += byte_count
        written = partial(self._written, first, count, byte_count, alone, on_outcome)
        self._records.store.append(self.log, first, messages, written, tag=grant.encode())

    @property
    def in_memory(self) -> int:
        """Size in bytes of the messages that wait or are in flight, without those that are only on disk."""
        return self._byte_count if self._aside is None else self._byte_count - self._aside.byte_count

    def _restrained_limits(self, limits: SessionLimits) -> SessionLimits:
        """Return `limits` changed so that new messages are only on disk.

        Used while the messages of the session's user occupy too much memory.
        """
        return replace(limits, memory_bytes_max=0)

    def _memory_full(self) -> bool:
        limits = self.limits
        return super().__len__() >= limits.memory_messages_max or self.in_memory >= limits.memory_bytes_max

    def _on_disk(self) -> PagedLog:
        if self._aside is None:
            self._aside = PagedLog(self._records.store, self.log, self._release_loaded)
        return self._aside

    def _written(
        self,
        first: int,
        count: int,
        byte_count: int,
        alone: bool,
        on_outcome: OutcomeCallback,
        outcome: Outcome,
    ) -> None:
        """Call `on_outcome` with the outcome of writing `count` messages from position `first`.

        If the store has refused the messages, which have `byte_count` bytes, they are removed from the queue.
        `alone` is True if they were not in memory.
        """
        self._safe = first + count
        if outcome is not ACCEPTED:
            if alone:
                self._on_disk().subtract_refused(first, count, byte_count)
                self._subtract_bytes(byte_count)
            else:
                self._withdraw(first, first + count)
        on_outcome(outcome)
        if self._stuck:
            self.pump()

    def _withdraw(self, first: int, end: int) -> None:
        """Remove the messages at the positions from `first` to before `end`, which the store has refused.

        Those that were sent already stay in flight. They are not passed to another session, because their
        publishers send them again.
        """
        for packet_id, position in self._positions.items():
            if first <= position < end:
                self.in_flight[packet_id] = self.in_flight[packet_id].unshared()
        for position in [at for at in self._moving if first <= at < end]:
            del self._moving[position]
        if self._renumbered:
            for position in range(first, end):
                self._renumbered.forget(position)
        waiting, self._waiting = self._waiting or (), None
        self._wait([row for row in waiting if not first <= row[2] < end])
        self._subtract_bytes(weight_of(message for message, _, at in waiting if first <= at < end))

    # Delivery and settlement.

    def drop_expired(self) -> None:
        """Drop the expired messages that wait for a disconnected client, and count them.

        To find expired messages that are only on disk, messages are read in pieces, in the background.
        """
        if self.failing:
            self.purge_at = clock.utc() + 1.0
            return
        self.purge_at = NEVER
        if self._is_checking:
            return
        super().drop_expired()
        if self.outlet is None and self._aside and (first := self._aside.first) is not None:
            self._is_checking = True
            self._check_from(first, self._stays)

    @property
    def is_checking(self) -> bool:
        """True while messages are read from disk to find expired ones."""
        return self._is_checking

    def _settle_expired(self, row: QueuedRow) -> None:
        self._release_expired(*row)
        self._records.store.settle(self.log, (row[2],))

    def _release_expired(self, message: Message, grant: Grant, position: int) -> None:
        """Send PUBREL for an expired message if it may have been sent at QoS 2 before a restart.

        The client may have received it. Without PUBREL it would take a later message with the same packet id
        for a repeat (5: 4.3.3).
        """
        if not self._was_sent_at_qos_2(message, grant, position):
            return
        packet_id = position % PACKET_IDS + 1
        if self._renumbered:
            packet_id = self._renumbered.recorded(position, packet_id)
        if packet_id in self.in_flight or packet_id in self.released:
            return  # so this message was not sent
        self.released[packet_id] = None
        self.credit -= 1
        self._records.put_released(self.client_id, packet_id, position)
        if self.outlet is not None:  # otherwise PUBREL is sent when the client returns
            self._records.store.after_settled(partial(self._send_release, packet_id, self._stays))

    def _send_release(self, packet_id: int, stays: int) -> None:
        if self.outlet is not None and stays == self._stays and packet_id in self.released:
            self.outlet.send_release(packet_id)

    def _check_from(self, position: int, stays: int) -> None:
        self._records.store.read_from(
            *(self.log, position, partial(self._checked, stays)),
            messages_max=PIECE_MESSAGES_MAX,
            bytes_max=PIECE_BYTES_MAX,
        )

    def _checked(self, stays: int, found: list[Stored]) -> None:
        """Drop the expired messages among `found`, which were read from disk, and read the next messages.

        `stays` is the value that `_stays` had when the check for expired messages began. The value changes
        when the client connects and when the session ends; the check ends then.
        """
        if not found or stays != self._stays or self._aside is None:
            self._is_checking = False
            self._rests_until = clock.utc() + len(self) / CHECKED_PER_SECOND
            if stays == self._stays:
                self._plan_purge()
            elif self.outlet is None:
                self._expect_expired()
            return
        utc = clock.utc()
        positions: list[int] = []
        byte_count = 0
        for position, message, tag in found:
            # The disk may still refuse one that is not safe.
            if message.expires and message.expires <= utc and position < self._safe:
                self._release_expired(message, self._decode_grant(tag), position)
                positions.append(position)
                byte_count += message.byte_count
            else:
                self._note_expiry((message,))
        if positions:
            self.tally.expired += len(positions)
            byte_count = min(byte_count, self._aside.byte_count)  # an earlier version counted them with less
            self._aside.subtract_refused(positions[0], len(positions), byte_count)
            self._records.store.settle(self.log, positions)
            self._subtract_bytes(byte_count)
        self._check_from(found[-1][0] + 1, stays)

    def pump(self) -> None:
        """Send waiting messages, first those in memory and then those on disk."""
        if (gate := self._records.store.gate).shut:
            self._settle_on_disk()  # in the transaction of their released ids
            gate.wait(self.pump)
            return
        super().pump()
        while self._refill():
            super().pump()
        self._settle_on_disk()

    def _settle_on_disk(self) -> None:
        if self._settled_positions:
            positions, self._settled_positions = self._settled_positions, []
            self._records.store.settle(self.log, positions)

    @property
    def is_at_rest(self) -> bool:
        """True if `has_stalled` need not be called until the outlet's `require_ticks` is called."""
        return not self._renumbered and super().is_at_rest

    def has_stalled(self, now: float, *, is_read: bool = True) -> bool:
        """Return True if publishers were paused for `stall_secs` while nothing was sent to the client.

        The parameters are those of `Session.has_stalled`. While the client waits for the disk, return False.
        """
        if self._stuck or (self._aside and not self._waiting):
            self.has_progressed = True
        if self._renumbered:
            self._renumbered.retry()
        return super().has_stalled(now, is_read=is_read)

    def _refill(self) -> bool:
        """Move the next messages from disk into memory, if no message waits in memory.

        Return False if there are none, or if they are still being read.
        """
        if self._waiting or not self._aside or self.outlet is None:
            return False
        piece = self._aside.next_piece()
        self._wait([(message, self._decode_grant(tag), at) for at, message, tag in piece])
        self._aside.read_ahead()
        return bool(piece)

    def _decode_grant(self, tag: bytes) -> Grant:
        if self._grants is None or self._grants[0] != tag:
            self._grants = (tag, decode_grant(self, tag))
        return self._grants[1]

    def _release_loaded(self, lacking: int) -> None:
        self._subtract_bytes(lacking)
        self.pump()

    def _next_rows(self) -> list[OutgoingPublish]:
        """Remove the next messages from the queue, and return them as PUBLISH packets to be sent.

        Stops before a message that must wait for the disk: one of QoS 2, or one with a new packet id.
        """
        if self._again:
            return self._rows_to_resend()
        rows: list[OutgoingPublish] = []
        waiting = self._waiting
        byte_count = dropped_bytes = 0
        self._stuck = False
        while waiting and len(rows) < ROWS_MAX and byte_count < ROWS_BYTES_MAX:
            message, grant, position = waiting[0]
            qos = packet_id = 0
            if position != UNKEPT:
                qos = min(message.assurance, grant.qos)
                if self.credit <= 0:
                    break
                if qos == 2 and position >= self._safe:
                    self._stuck = True
                    break
                packet_id = position % PACKET_IDS + 1
                if self._renumbered or packet_id in self.in_flight or packet_id in self.released:
                    packet_id = self._other_ids().packet_id(position, packet_id)
                    if not packet_id:
                        self._stuck = True
                        break
            waiting.popleft()
            if message.expires and message.expires <= clock.utc():
                self.tally.expired += 1
                dropped_bytes += message.byte_count
                if position != UNKEPT:
                    self._release_expired(message, grant, position)
                    self._mark_settled(position)
                continue
            byte_count += message.byte_count
            row = OutgoingPublish(message, grant, qos, packet_id, UNKEPT < position < self.sent)
            if qos:
                self.credit -= 1
                self.in_flight[packet_id] = row
                self._positions[packet_id] = position
                self.sent = max(self.sent, position + 1)
            else:
                dropped_bytes += message.byte_count
            rows.append(row)
        self._subtract_bytes(dropped_bytes)
        if self._pace is not None:
            self._count_paced(len(rows))
        return rows

    # The client comes and goes, and acknowledges.

    def attach(self, outlet: SessionOutlet, receive_maximum: int) -> None:
        """Attach a connection as `Session.attach` does, and record that the client is connected."""
        self._stays += 1
        self.outlet = outlet
        self.credit = receive_maximum - len(self.released)
        self._again = {at: row.with_dup(before=True) for at, row in self.in_flight.items()}
        self._record(attached=True)
        for packet_id in self.released:
            outlet.send_release(packet_id)
        self.pump()

    def detach(self) -> None:
        """Detach the connection as `Session.detach` does.

        Records the time, and the position up to which messages were sent.
        """
        super().detach()
        if self._aside is not None:
            self._aside.unload()
        if self.persistent:
            self._record(attached=False)

    def queue_transferred(self, message: Message, grant: Grant, on_outcome: OutcomeCallback) -> None:
        """Queue a message of a shared subscription that another member of the group could not deliver.

        `on_outcome` is called with the outcome when the message is on disk or was refused by it, and at once
        if the message is not written to disk.
        """
        if not message.assurance or not grant.qos:
            super().queue_transferred(message, grant, on_outcome)
            return
        fitting = self._within_limits([message])
        if fitting:
            self._store_messages(fitting, grant, on_outcome)
        else:
            on_outcome(ACCEPTED)  # the newest is dropped, and counted
        if self.outlet is not None:
            self.pump()

    @property
    def failing(self) -> bool:
        """True if the disk fails."""
        return not self._records.store.healthy

    def _pass_to_other(self, message: Message, grant: Grant, position: int, pass_on: PassOn) -> bool:
        """Pass the message at `position` to another session by `pass_on`. Return False if none accepts it.

        The message is deleted from this log in the transaction that adds it to the other log. If the disk
        refuses the message there, it is queued here again. A message of QoS 2 is only passed on when it is on
        disk here: if the disk refused it, its publisher would repeat it, and another client could have it
        already.
        """
        if position == UNKEPT:
            return super()._pass_to_other(message, grant, position, pass_on)
        self._moving[position] = (message, grant, position)
        if message.assurance == 2 and position >= self._safe:
            self._records.store.after_commit(partial(self._pass_stored, position, pass_on))
        elif not self._pass_moving(position, pass_on):
            del self._moving[position]
            return False
        return True

    def _pass_moving(self, position: int, pass_on: PassOn) -> bool:
        """Pass a message of `_moving` to another session by `pass_on`. Return False if none accepts it."""
        message, grant, _ = self._moving[position]
        if not pass_on(message, grant, partial(self._handle_moved, position)):
            return False
        if position in self._moving:
            self._records.store.settle_beside(self.log, (position,))
        return True

    def _pass_stored(self, position: int, pass_on: PassOn, _: Outcome) -> None:
        """Pass on a message of QoS 2 that has waited for its commit; queue it again if no session accepts it.

        Nothing is done if the disk has refused the message, or if the session has ended: its log is passed on
        then.
        """
        is_here = position in self._moving and not self._log_passed_on
        if is_here and not self._pass_moving(position, pass_on):
            self._requeue(self._moving.pop(position))

    def _handle_moved(self, position: int, outcome: Outcome) -> None:
        """Settle a message that another session has stored, or queue it again if the disk refused it."""
        row = self._moving.pop(position, None)
        if row is None:  # it was refused here, too, and its publisher informed
            return
        if outcome is ACCEPTED:
            self._records.store.settle(self.log, (position,))
            if self._renumbered:
                self._renumbered.forget(position)
        else:
            self._requeue(row)

    def _requeue(self, row: QueuedRow) -> None:
        """Insert a message at its old place in the queue, as it could not be passed to another session."""
        if self._waiting is None:
            self._waiting = deque()
        self._waiting.insert(bisect(self._waiting, row[2], key=_position), row)
        self._byte_count += row[0].byte_count
        self.pump()

    def _position_of(self, packet_id: int) -> int:
        return self._positions[packet_id]

    def _forget_in_flight(self, packet_id: int, row: OutgoingPublish) -> None:
        """Drop a message in flight that was passed to another session.

        Its deletion from disk is done by `_pass_to_other` and `_handle_moved`.
        """
        del self.in_flight[packet_id]
        del self._positions[packet_id]
        self._subtract_bytes(row.message.byte_count)

    def _was_sent_at_qos_2(self, message: Message, grant: Grant, position: int) -> bool:
        """Return True if this waiting message may have been sent at QoS 2 before a restart."""
        return UNKEPT < position < self.sent and min(message.assurance, grant.qos) == 2

    def detach_log(self) -> EndedSessionLog | None:
        """Return the log of an ending session, or None if it has no messages of shared subscriptions.

        The caller passes these messages to other members of their groups. Messages in flight at QoS 2 are
        removed from the log. Messages that were sent at QoS 2 before a restart are still in it; the caller
        must not pass them on.
        """
        if not self.shares or not (self.in_flight or self._waiting or self._aside or self._moving):
            return None
        sent = [self._positions[packet_id] for packet_id, row in self.in_flight.items() if row.qos == 2]
        self._records.store.settle(self.log, [*self._settled_positions, *sent])
        self._log_passed_on = True
        return EndedSessionLog(self.log, self.sent, self._byte_count)

    def discarded(self) -> None:
        """Delete the records and the log of the session, because it has ended."""
        self._stays += 1
        super().discarded()
        self._records.forget_session(self.client_id)
        if not self._log_passed_on:
            self._records.store.drop(self.log)

    def may_resend(self, packet_id: int) -> bool:
        """Return True if a message sent with this packet id before a restart may still wait to be resent."""
        if packet_id in self.in_flight or packet_id in self.released:
            return False
        on_disk = None if self._aside is None else self._aside.first
        first = next((at for _, _, at in self._waiting or () if at != UNKEPT), on_disk)
        if first is None or first >= self.sent:
            return False
        return bool(self._renumbered) or (packet_id - 1 - first) % PACKET_IDS < self.sent - first

    def handle_pubrec(self, packet_id: int) -> bool:
        """Process PUBREC: settle the message; its packet id stays in use until PUBCOMP.

        Returns False if the packet id is unknown.
        """
        if packet_id in self.released:
            return True
        row = self.in_flight.pop(packet_id, None)
        if row is None:
            return False
        position = self._positions.pop(packet_id)
        self._subtract_bytes(row.message.byte_count)
        self.released[packet_id] = None
        if self._again:
            self._cancel_resend(packet_id)
        self._records.put_released(self.client_id, packet_id, position)
        self._mark_settled(position)
        return True

    def complete_delivery(self, packet_id: int) -> bool:
        """Process the last acknowledgement of a message (PUBACK or PUBCOMP), which ends its delivery.

        Return False if the packet id is unknown.
        """
        if packet_id in self.released:
            del self.released[packet_id]
            self._records.delete_released(self.client_id, packet_id)
        elif (row := self.in_flight.pop(packet_id, None)) is not None:
            self._mark_settled(self._positions.pop(packet_id))
            self._subtract_bytes(row.message.byte_count)
            if self._again:
                self._cancel_resend(packet_id)
        else:
            return False
        self.credit += 1
        return True

    def _send_pubrec(self, packet_id: int) -> None:
        if self.outlet is not None:
            self.outlet.send_received(packet_id)


def _settle(sub_batch: SubBatch, start: int, stop: int, outcome: Outcome) -> None:
    if stop - start == len(sub_batch.messages):
        sub_batch.settle(outcome)
    else:
        sub_batch.settle_at(range(start, stop), outcome)


def _position(row: QueuedRow) -> int:
    return row[2]


def _ignore_outcome(outcome: Outcome) -> None:
    """Ignore the outcome: newer messages of `$SYS` replace a refused one."""
