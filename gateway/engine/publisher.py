"""Publisher of a replica's MQTT messages to the cluster.

Senders are acknowledged once the cluster has confirmed their messages. Messages with RETAIN are stored in the
database first (retain_queue.py). At QoS 2 a message gets a number, by which subscribers' replicas recognize
duplicates.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

from gateway import clock
from gateway.broker.poison import outcome_of_error
from gateway.broker.shares import UserQuotas
from gateway.egress.amqp091.publisher import AmqpLinkPublisher, outcome_of_unsent
from gateway.egress.confirms import Positions, settle_all
from gateway.engine.cluster_clock import ClusterClock
from gateway.engine.envelope import LIFE_BYTES, Number, encode
from gateway.engine.names import Names, key_of
from gateway.engine.retain_queue import RetainQueue
from gateway.engine.retained import RetainedPublication, SharedRetained, encode_retained
from gateway.model.batch import Receipt, SubBatch
from gateway.model.caches import make_room
from gateway.model.message import Message
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.properties import NO_PROPERTIES
from gateway.protocols.amqp091.codec import encode_short_string
from gateway.protocols.amqp091.sender import PublishRow
from gateway.protocols.amqp091.spec import ReplyCode
from gateway.protocols.amqp091.translate import outlasts
from gateway.telemetry.stats import LinkStats

KEY_TOO_LONG: Final = Outcome(
    Verdict.REJECTED, Reason.NAME_INVALID, "the topic has more than 255 bytes as a routing key"
)
NOT_TAKEN: Final = Outcome(Verdict.RELEASED, Reason.QUOTA, "a queue of the cluster is full")
ELSEWHERE: Final = Outcome(Verdict.RELEASED, Reason.TARGET_DOWN, "another replica is publishing the message")
GONE: Final = frozenset({ReplyCode.NOT_FOUND, ReplyCode.ACCESS_REFUSED})
RAWS_MAX: Final = 4_096
ONCE: Final = 2  # of assurance
NumberOf = Callable[[SubBatch, int], "Number | None"]
"""Function that returns the stored number of a message of a sub-batch, or None if it has none."""
EpochOf = Callable[[SubBatch, int], tuple[str, int, bool]]
"""Function that returns the client that has sent a message of a sub-batch, and its session's epoch, or 0.

The third value is True if the message is the client's will.
"""


class EnginePublisher(AmqpLinkPublisher):
    """Sink of messages to every topic: it publishes them to the topic exchange of the cluster."""

    _nacked: ClassVar[Outcome] = NOT_TAKEN

    def __init__(
        self,
        stats: LinkStats,
        names: Names,
        time: ClusterClock,
        retained: SharedRetained,
        alone: Callable[[Message], SubBatch],
        *,
        in_flight_max: int,
        messages_max: int,
        bytes_max: int,
        topics_max: int,
    ) -> None:
        """Create the publisher of messages to the topic exchange that `names` has.

        `stats` has the counters of the connection, `time` is the cluster's clock, `retained` stores retained
        messages. `alone` returns a sub-batch with one message whose publisher does not wait for the outcome.
        At most `topics_max` routing keys are cached; the other limits are those of waiting and unconfirmed
        messages.
        """
        super().__init__(
            stats,
            None,
            in_flight_max=in_flight_max,
            messages_max=messages_max,
            bytes_max=bytes_max,
        )
        self._topics_max = topics_max
        self._time = time
        self.retain_queue = RetainQueue(
            retained, self._publish_retained, alone, messages_max=messages_max, bytes_max=bytes_max
        )
        self._exchange = encode_short_string(names.topics)
        self._wires: dict[str, bytes] = {}  # encoded exchange and routing key, by topic
        self.listeners: frozenset[str] = frozenset()  # of MQTT: endpoints of the clients of sessions
        self.number_of: NumberOf = _no_number  # returns the stored number of a message
        self.epoch_of: EpochOf = _no_epoch
        # Returns True for the receipt of a message that another replica publishes.
        self.is_left: Callable[[Receipt], bool] = _is_not_left
        self._life = secrets.token_bytes(LIFE_BYTES)
        self._next_number = 1
        # Content headers by client (with True if it is none of MQTT), QoS, durability and hops, of messages
        # without other properties.
        self._raws: dict[tuple[str, bool, int, bool, int], bytes] = {}

    def share_among(self, quotas: UserQuotas) -> None:
        """Limit the messages of each user that wait for the cluster or the database by `quotas`."""
        super().share_among(quotas)
        self.retain_queue.share_among(quotas)

    def handle_channel_closed(self, code: int, text: str) -> None:
        """Process that the broker has closed the publishing channel, with a reply code and its text.

        If the exchange is missing or may not be used, all messages wait for the next connection. With any
        other code, one of the unconfirmed messages is assumed to be the cause.
        """
        if code in GONE:
            self.close()
        else:
            super().handle_channel_closed(code, text)

    @property
    def idle(self) -> bool:
        """True if no message waits, and the cluster has confirmed all that were sent."""
        return super().idle and not len(self.retain_queue)

    def publish(self, sub_batch: SubBatch) -> None:
        """Publish the messages of a sub-batch. Messages with RETAIN wait until the database retains them.

        Later messages of the same client wait behind them.
        """
        messages = sub_batch.messages
        if not len(self.retain_queue) and not any(message.retain for message in messages):
            super().publish(sub_batch)
            return
        passing = [
            at for at, message in enumerate(messages) if not self._queue_if_waiting(sub_batch, at, message)
        ]
        if passing:
            self._queue_part(sub_batch, passing)

    def leave_to_others(self) -> None:
        """Settle the waiting wills that another replica may publish now, without publishing them."""
        settle_all(self._withdraw_waiting(self._is_left), ELSEWHERE)

    def _is_left(self, sub_batch: SubBatch, at: int) -> bool:
        return self.is_left(sub_batch.batch.receipts[sub_batch.slots[at]])

    def _publish_retained(self, sub_batch: SubBatch, positions: Sequence[int]) -> None:
        """Publish the messages at `positions`, which have waited until the database retained them.

        Wills that another replica may publish by now are left out: this process may have been frozen before
        it read the reply of the database.
        """
        left = [at for at in positions if self._is_left(sub_batch, at)]
        if left:
            sub_batch.settle_at(left, ELSEWHERE)
            positions = [at for at in positions if at not in left]
        if positions:
            self._queue_part(sub_batch, positions)

    def _queue_if_waiting(self, sub_batch: SubBatch, at: int, message: Message) -> bool:
        """Queue the message at position `at` if it has RETAIN or its client has a waiting message.

        Return False for any other message. A message that cannot be encoded is settled, and True is returned.
        """
        if not message.retain:
            if not self.retain_queue.has(message):
                return False
            self.retain_queue.add(sub_batch, at, None)
            return True
        if self._encoded_target(message.address.name) is None:
            sub_batch.settle_at((at,), KEY_TOO_LONG)
            return True
        stored = b""
        if len(message.body):
            try:
                number = self._number_of(sub_batch, at) if message.assurance == ONCE else None
                header = encode(message, clock.utc(), number=number, is_other=self._is_other(message))
                stored = encode_retained(header, bytes(message.body))
            except Exception as error:
                sub_batch.settle_at((at,), outcome_of_error(error))
                return True
        self.retain_queue.add(
            sub_batch, at, RetainedPublication(message, stored, *self.epoch_of(sub_batch, at))
        )
        return True

    def _send(self, sub_batch: SubBatch, positions: Positions, messages: list[Message]) -> Positions:
        """Encode and send messages of a sub-batch. Return (), because none has to wait."""
        utc = clock.utc()
        rows: list[PublishRow] = []
        sent: list[int] = []
        byte_count = 0
        for at, message in zip(positions, messages, strict=True):
            where = self._encoded_target(message.address.name)
            if where is None:
                self._settle_unsent([at], KEY_TOO_LONG)
                continue
            try:
                number = self._number_of(sub_batch, at) if message.assurance == ONCE else None
                raw = self._encoded(message, utc, number)
            except Exception as error:
                self._settle_unsent([at], outcome_of_error(error))
                continue
            if message.expires and outlasts(message, utc):  # only replicas know this expiry time
                self._stats.degraded.add("expiration")
            byte_count += len(message.body)
            rows.append((where, raw, message.body))
            sent.append(at)
        assert self._publishers is not None
        unsent = self._publishers[0].publish_many(rows)
        if unsent:
            for row in unsent:
                self._settle_unsent([sent[row]], outcome_of_unsent(self._publishers[0].faults.get(row)))
            sent = [at for row, at in enumerate(sent) if row not in unsent]
        whole = len(sent) == len(positions)
        self._record_sent(sub_batch, positions if whole else sent, byte_count)
        return ()

    def _number_of(self, sub_batch: SubBatch, at: int) -> Number:
        """Return the number of the QoS 2 message at position `at`, by which replicas recognize duplicates.

        The number stays the same when the message is resent after a lost connection.
        """
        number = self.number_of(sub_batch, at)
        if number is not None:
            return number
        if not sub_batch.number:
            sub_batch.number = self._next_number
            self._next_number += len(sub_batch.messages)
        return self._life, sub_batch.number + at

    def next_number(self) -> Number:
        """Return a new number for a QoS 2 message that is published later."""
        self._next_number += 1
        return self._life, self._next_number - 1

    def _encoded(self, message: Message, utc: float, number: Number | None) -> bytes:
        """Return the content header of a message, which is cached for messages without properties.

        `utc` is the present time in seconds; `number` is the message's number at QoS 2, otherwise None.
        """
        correction = self._time.correction if message.expires else 0.0
        is_other = self._is_other(message)
        plain = message.property_set is NO_PROPERTIES and not (message.expires or message.retain)
        if not plain or number is not None:
            return encode(message, utc, number=number, correction=correction, is_other=is_other)
        key = (message.sender.client, is_other, message.assurance, message.durable, message.hops)
        raw = self._raws.get(key)
        if raw is None:
            make_room(self._raws, RAWS_MAX)
            raw = self._raws[key] = encode(message, utc, is_other=is_other)
        return raw

    def _is_other(self, message: Message) -> bool:
        """Return True if no client of an MQTT listener has sent the message."""
        return message.sender.endpoint not in self.listeners

    def _encoded_target(self, topic: str) -> bytes | None:
        """Return the encoded exchange and routing key of a topic, or None if the key is too long."""
        found = self._wires.get(topic)
        if found is not None:
            return found
        key = key_of(topic)
        if key is None:  # not cached: such topics have up to 64 KB each
            return None
        make_room(self._wires, self._topics_max)
        found = self._wires[topic] = self._exchange + bytes((len(key),)) + key
        return found


def _no_number(sub_batch: SubBatch, at: int) -> Number | None:
    return None


def _is_not_left(receipt: Receipt) -> bool:
    return False


def _no_epoch(sub_batch: SubBatch, at: int) -> tuple[str, int, bool]:
    return "", 0, False
