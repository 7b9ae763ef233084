"""Retained messages of all replicas, in the database; those of `$SYS` are each replica's own, in memory.

The usage of each user (number and bytes of messages) is read from the database every ten seconds; in between
a replica adds the messages that it has retained. So replicas that retain in the same ten seconds may together
exceed the limits. The database knows which message is replaced: the allowed growth in number and bytes is
sent with each message, and is checked while its topic is locked. If a message exceeds the limits by an old
reading of the usage, the usage is read again, and the message is retried before its publisher is refused.

The database remembers topics that were cleared for a minute, so that no late message follows. A replica lets
each user have as many of them as retained messages; others are cleared without.

Bytes of a message in the database: version (1), length of the content header (4), the header as live messages
have it (envelope.py), body.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from struct import Struct
from typing import Final, NamedTuple

from gateway import clock
from gateway.broker.mqtt.retained import RETAINED_FULL
from gateway.broker.mqtt.retained import RetainedTopics as LocalRetained
from gateway.broker.mqtt.system import SYS
from gateway.containment import contained
from gateway.engine.envelope import Number, decode
from gateway.engine.repeats import Repeats
from gateway.engine.retained_reads import PageQuery, RetainedReads
from gateway.errors import StoreError
from gateway.model.batch import SubBatch
from gateway.model.message import NEVER, Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.shares import UserShares
from gateway.model.times import Monotonic
from gateway.protocols.mqtt.dialect import MQTT
from gateway.state.interface import (
    CLEARED_SECS,
    MatchRetained,
    Reply,
    Retain,
    Retained,
    RetainedCapacity,
    Retention,
    StateStore,
    WeighRetained,
)
from gateway.state.interface import OperationOutcome as Committed

VERSION: Final = 1
HEAD: Final = Struct(">BI")
WEIGH_SECS: Final = 10.0
FRESH_SECS: Final = 1.0  # usage read more recently is not read again for a message without capacity
RESTS: Final = 10  # multiple of the duration of the last read that passes before the next one, at least
REST_SECS_MAX: Final = 60.0
UNSURE_SECS_MAX: Final = 3.0  # how long a message without capacity waits until the usage is read again
LATE: Final = Outcome(
    Verdict.RELEASED,
    Reason.TARGET_DOWN,
    "the client has published a newer message to this topic through another replica",
)
AWAY: Final = Outcome(
    Verdict.RELEASED, Reason.TARGET_DOWN, "the database of retained messages is unreachable"
)
REFUSED: Final = Outcome(Verdict.REJECTED, Reason.NAME_INVALID, "the database rejects the topic or user")
Done = Callable[[Outcome], None]
OnPage = Callable[[list[Retained] | None], None]
Weights = dict[str, tuple[int, int]]


class NumberedMessage(NamedTuple):
    """Decoded message and, at QoS 2, its number, by which replicas recognize repeated messages."""

    message: Message
    number: Number | None


class RetainedPublication(NamedTuple):
    """Message to retain, with its encoding for the database.

    `client` has sent it in its session with this `epoch`; 0 means without a session. `is_will` is True if the
    message is the will that the client has left in that session.
    """

    message: Message
    data: bytes
    client: str = ""
    epoch: int = 0
    is_will: bool = False


class UncertainPublication(NamedTuple):
    """Message that may exceed the limits, and the callback for its outcome.

    It waits until the number and bytes of each user's retained messages are queried again.
    """

    publication: RetainedPublication
    done: Done


def encode_retained(header: bytes, body: bytes) -> bytes:
    """Return the encoding of a retained message for the database. `header` is its content header."""
    return HEAD.pack(VERSION, len(header)) + header + body


def decode_retained(found: Retained) -> NumberedMessage | None:
    """Decode `found`, a retained message of the database. Return None if it cannot be decoded.

    Then the error is logged and counted.
    """
    try:
        version, size = HEAD.unpack_from(found.message)
        if version != VERSION:
            raise StoreError(f"a retained message has format {version}, but this gateway reads {VERSION}")
        arrived = decode(found.message[HEAD.size : HEAD.size + size])
        message = Message(
            MQTT.address("", found.topic),
            found.message[HEAD.size + size :],
            arrived.property_set,
            arrived.qos,
            arrived.durable,
            True,
            NEVER if found.expires_in is None else clock.utc() + found.expires_in,
            arrived.hops,
            Sender(arrived.sender.endpoint, arrived.sender.client, found.user),
        )
    except Exception as error:  # it concerns one topic
        contained("message", error, topic=found.topic)
        return None
    return NumberedMessage(message, arrived.number)


class SharedRetained(LocalRetained):
    """Retained messages of all replicas in the database, and those of `$SYS` topics in memory.

    As a sink it accepts all messages, because the cluster's publisher stores them in the database itself.
    """

    def __init__(self, state: StateStore, quota: UserShares) -> None:
        """Create the retained messages in the database `state`.

        `quota` has the limits, and the number and bytes of each user's retained messages.
        """
        super().__init__()
        self.quota = quota
        self._state = state
        self._repeats = Repeats(state)
        self._pending: Weights = {}  # submitted messages without a reply, by user
        self.reads = RetainedReads(state)
        self._changes: list[tuple[str, int, int]] | None = None  # since the current read began
        self._unsure: list[UncertainPublication] = []
        self._remembered = UserShares("cleared topics")  # that the database remembers
        self._remembered_until = Monotonic(0.0)
        self._on_way = 0  # operations without a reply yet
        self._is_exact = False  # True if no operation was pending when the figures were read
        self._read_at = self._weigh_at = self._weigh_soonest = Monotonic(0.0)

    def __len__(self) -> int:
        return len(self._messages) + self.quota.count

    @property
    def byte_count(self) -> int:
        """Size of all retained messages in bytes, including those of `$SYS` topics."""
        return self.shares.total + self.quota.total

    def publish(self, sub_batch: SubBatch) -> None:
        """Store the messages to `$SYS` topics in memory, and accept all messages of the sub-batch."""
        for message in sub_batch.messages:
            if message.address.name.startswith(SYS):
                self.show(message)
        sub_batch.accept()

    def tick(self) -> None:
        """Do nothing: messages in the database expire by its clock."""

    def run(self, now: Monotonic) -> None:
        """Run the timer, several times per second; `now` is in loop-clock seconds.

        The timer repeats operations that have failed, and queries the number and bytes of each user's
        retained messages.
        """
        self._repeats.tick()
        if now >= self._remembered_until:
            self._remembered.replace({})
            self._remembered_until = Monotonic(now + CLEARED_SECS)
        if self.reads.waiting_count and self._state.health.failure:
            self.reads.fail_all()
        if self._changes is None and now >= self._weigh_at and not self._state.health.failure:
            self._query_usage()
        elif self._unsure and self._changes is None and self._state.health.failure:
            self._fail_uncertain(AWAY)

    # Writing.

    def retain(self, publication: RetainedPublication, done: Done, *, is_sure: bool = False) -> None:
        """Retain a message for its topic in the database; a message without a body clears the topic.

        `done` is called with ACCEPTED when that is committed, with AWAY if the database is unavailable (it
        may be committed or not), with LATE if the client has published to the topic in a later session, or
        with another refusal. Only one message of a topic may be pending. With `is_sure` True a message beyond
        the limits is refused at once; otherwise the usage is queried first.
        """
        message, data, client, epoch, _ = publication
        topic, user = message.address.name, _storable(message.sender.user)
        client = _storable(client)
        if not len(message.body):
            remembered = epoch > 0 and self._may_remember(user, message.byte_count)
            operation = Retain(
                topic, None, client=client, epoch=epoch, domain=MQTT.name, remembered=remembered
            )
            self._submit_clear(operation, lambda one: done(_outcome_of(one)))
            return
        is_sure = is_sure or (
            self._is_exact and not self._on_way and clock.now() - self._read_at < FRESH_SECS
        )
        self._on_way += 1
        lifetime = message.expires - clock.utc() if message.expires else None
        room, weight = RetainedCapacity(*self.quota.room_of(user)), message.byte_count
        self._count_pending(user, 1, weight)
        operation = Retain(topic, data, lifetime, user, weight, room, client, epoch, MQTT.name)
        self._state.submit(
            operation, partial(self._replied, UncertainPublication(publication, done), user, is_sure)
        )

    def _may_remember(self, user: str, byte_count: int) -> bool:
        """Return True if the database may remember for a minute that a user has cleared a topic; count it.

        Return False, without counting, if the remembered topics of the user, or of all users, reach their
        limits. `byte_count` is the size of the clearing message.
        """
        remembered, quota = self._remembered, self.quota
        count, total = remembered.count_of(user), remembered.of(user)
        if (
            count >= quota.user_count_max
            or total + byte_count > quota.user_bytes_max
            or remembered.count >= quota.count_max
            or remembered.total + byte_count > quota.bytes_max
        ):
            return False
        remembered.add(user, byte_count)
        return True

    def clear(self, found: Retained, done: Callable[[Reply[Retention]], None]) -> None:
        """Remove the retained message `found`, unless its topic has a newer message by now.

        `done` is called with the reply of the database.
        """
        self._submit_clear(Retain(found.topic, None, expected=found.message), done)

    def _submit_clear(self, operation: Retain, done: Callable[[Reply[Retention]], None]) -> None:
        def on_cleared(reply: Reply[Retention]) -> None:
            self._on_way -= 1
            if reply.value is not None and reply.value.stored:
                self._subtract_replaced(reply.value)
            done(reply)

        self._on_way += 1
        self._state.submit(operation, on_cleared)

    def _replied(
        self, unsure: UncertainPublication, user: str, is_sure: bool, reply: Reply[Retention]
    ) -> None:
        """Process the reply to a Retain of the message in `unsure`: report the outcome to its callback.

        If the message exceeds the limits, it waits until the number and bytes of each user are queried again;
        if `is_sure` is True it is refused.
        """
        (message, *_), done = unsure
        self._on_way -= 1
        self._count_pending(user, -1, -message.byte_count)
        if reply.value is not None and not reply.value.stored:
            if is_sure:
                self._refuse(user, message)
                done(RETAINED_FULL)
            else:
                self._unsure.append(unsure)
                self._weigh_at = min(self._weigh_at, self._weigh_soonest)
            return
        if reply.value is not None:
            self._change(user, 1, message.byte_count)
        self._subtract_replaced(reply.value)
        done(_outcome_of(reply))

    def _refuse(self, user: str, message: Message) -> None:
        self.refused += 1
        if not self.quota.refuse_if_full(user, message.byte_count):
            self.quota.refused += 1

    # Usage.

    def _subtract_replaced(self, retention: Retention | None) -> None:
        """Subtract a message that was replaced or removed from the number and bytes of its user.

        `retention` is the reply of the database, which has that message's user and size.
        """
        if retention is not None and retention.before is not None:
            user, weight = retention.before
            self._change(user, -1, -weight)

    def _change(self, user: str, count: int, byte_count: int) -> None:
        """Add a message to the number and bytes of its user (`count` 1), or subtract it (-1).

        `byte_count` is its size with the same sign. The change is committed, and is recorded if the numbers
        are being queried, because the reply may lack it.
        """
        if self._changes is not None:
            self._changes.append((user, count, byte_count))
        _add(self.quota, user, count, byte_count)

    def _count_pending(self, user: str, count: int, byte_count: int) -> None:
        """Add a submitted message to the number and bytes of its user (`count` 1), or subtract it (-1).

        It is subtracted after the reply. `byte_count` is its size with the same sign.
        """
        before = self._pending.get(user, (0, 0))
        pending = self._pending[user] = before[0] + count, before[1] + byte_count
        if not pending[0]:
            del self._pending[user]
        _add(self.quota, user, count, byte_count)

    def _query_usage(self) -> None:
        """Query the number and bytes of each user's retained messages."""
        self._changes = []
        self._is_exact = not self._on_way
        self._state.query(WeighRetained(), partial(self._apply_usage, clock.now()))

    def _apply_usage(self, requested_at: Monotonic, reply: Reply[Weights]) -> None:
        """Apply the reply to `_query_usage`, and retry the messages that seemed to exceed the limits.

        Messages that were committed during the query may be included in the reply already, so they may count
        twice until the next one. The longer the query has taken, because there are many messages, the later
        it is repeated. `requested_at` is when it was submitted.
        """
        changes, self._changes = self._changes or [], None
        now = clock.now()
        rest = min(RESTS * (now - requested_at), REST_SECS_MAX)
        self._weigh_at = now + max(WEIGH_SECS, rest)
        self._weigh_soonest = now + min(max(FRESH_SECS, rest), UNSURE_SECS_MAX)
        if reply.value is None:
            self._fail_uncertain(AWAY)
            return
        self._read_at = now
        self._is_exact = self._is_exact and not self._on_way and not changes
        weights = dict(reply.value)
        for user, count, byte_count in (*((user, *more) for user, more in self._pending.items()), *changes):
            before = weights.get(user, (0, 0))
            weights[user] = max(before[0] + count, 0), max(before[1] + byte_count, 0)
        self.quota.replace(weights)
        unsure, self._unsure = self._unsure, []
        for publication, done in unsure:
            self.retain(publication, done, is_sure=True)

    def _fail_uncertain(self, outcome: Outcome) -> None:
        """Report `outcome` for all messages that wait for the next reply to `_query_usage`."""
        unsure, self._unsure = self._unsure, []
        for one in unsure:
            one.done(outcome)

    # Reading.

    @property
    def is_away(self) -> bool:
        """True while the database cannot be used."""
        return bool(self._state.health.failure)

    def call_later(self, function: Callable[[], None]) -> None:
        """Call `function` at the next tick."""
        self._repeats.call_later(function)

    def match(
        self,
        query: MatchRetained,
        user: str,
        is_wanted: Callable[[], bool],
        found: OnPage,
        away: Callable[[], None],
    ) -> None:
        """Query a page of retained messages for a subscriber, in turn with the queries of other users.

        `found` is called with the page, or with None if the database rejects the filter. While the database
        is unavailable `away` is called, and the query is repeated later. If `is_wanted` returns False when
        the query is due, it is dropped and `away` is called.
        """

        def submit_read() -> None:
            self.reads.submit(user, PageQuery(query, is_wanted, on_reply, away))

        def on_reply(reply: Reply[list[Retained]]) -> None:
            if reply.verdict is Committed.UNAVAILABLE:
                self._repeats.call_later(submit_read)
                away()
            else:
                found(reply.value)

        submit_read()

    def read(self, query: MatchRetained, done: Callable[[Reply[list[Retained]]], None]) -> None:
        """Query a page of retained messages without waiting for other queries, and do not repeat it.

        `done` is called with the database's reply.
        """
        self._state.query(query, done)


def _outcome_of(reply: Reply[Retention]) -> Outcome:
    """Return the outcome for the publisher of a retained message, from the database's reply."""
    if reply.value is not None:
        return ACCEPTED
    if reply.verdict is Committed.FENCED:
        return LATE
    return AWAY if reply.verdict is Committed.UNAVAILABLE else REFUSED


def _add(shares: UserShares, user: str, count: int, byte_count: int) -> None:
    """Add a message to the number and bytes of `user` in `shares` (`count` 1), or subtract it (-1).

    Do nothing if the user has no messages to subtract. `byte_count` is its size with the same sign.
    """
    if count > 0:
        shares.add(user, byte_count, count)
    elif shares.count_of(user):
        shares.remove(user, min(-byte_count, shares.of(user)), 1)


def _storable(user: str) -> str:
    """Return a user or client name without the characters that a database rejects."""
    return user.encode(errors="replace").decode().replace("\0", "")
