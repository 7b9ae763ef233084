"""Publisher of an AMQP 0-9-1 link: `confirms.py` with this protocol's confirms, returns and closes.

A broker confirms messages by their number on the channel. A message for which the broker closes the channel
is identified as described in `confirms.py`. If the text of the close names an exchange, messages for it are
refused until the exchange has been found again.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar, Final

import structlog

from gateway import clock
from gateway.broker.dispatcher import RouteRecipient
from gateway.broker.poison import outcome_of_error
from gateway.egress.confirms import ConfirmedSink, Positions, UnconfirmedRun
from gateway.errors import LocalProtocolError
from gateway.model.address import Address
from gateway.model.batch import SubBatch
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.spooled_bodies import ReadFault
from gateway.protocols.amqp091.client import ClientConnection
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.events import Returned
from gateway.protocols.amqp091.sender import Publisher, PublishRow
from gateway.protocols.amqp091.spec import ReplyCode
from gateway.protocols.amqp091.translate import (
    EXPIRATION_MS_MAX,
    encode_properties,
    outlasts,
    without_orders,
)
from gateway.telemetry.stats import LinkStats
from gateway.transport.stream import Stream

# A broker nacks when it cannot take responsibility for a message now (a queue that is full with `x-overflow:
# reject-publish`, a quorum queue without a leader), and never because a message is wrong.
NOT_NOW: Final = Outcome(
    Verdict.RELEASED, Reason.TARGET_REFUSED, "the broker refused the message (basic.nack)"
)
FRAME_TOO_SMALL: Final = Outcome(
    Verdict.REJECTED, Reason.TOO_LARGE, "the properties do not fit the broker's frame-max"
)
log = structlog.get_logger(limited=True)

RENEW_SECS_MIN: Final = 1.0
RENEW_SECS_MAX: Final = 60.0
DRAIN_SECS: Final = 5.0  # time for messages in flight before another channel is opened
NAMED_EXCHANGE: Final = re.compile(r"exchange '(.*?)' in vhost")  # the text of 403 and 404 in RabbitMQ


class AmqpLinkPublisher(ConfirmedSink):
    """Destination end of routes to an AMQP 0-9-1 link: it publishes to the broker.

    `missing` is called with the name of an exchange that the broker does not have or does not permit, and the
    outcome of its messages. If it is None, no exchange is treated as missing.
    """

    _nacked: ClassVar[Outcome] = NOT_NOW

    def __init__(
        self,
        stats: LinkStats,
        missing: Callable[[str, Outcome], None] | None,
        *,
        in_flight_max: int,
        messages_max: int,
        bytes_max: int,
    ) -> None:
        super().__init__(stats, in_flight_max=in_flight_max, messages_max=messages_max, bytes_max=bytes_max)
        self._missing = missing
        self._publishers: tuple[Publisher, Publisher] | None = None  # not mandatory, mandatory
        self._machine: ClientConnection | None = None
        self._channel = 0
        self._refuses = False  # True if a message was nacked on the channel
        self._renew_at = 0.0
        self._renew_wait = RENEW_SECS_MIN
        self._drain_until: float | None = None  # nothing is sent until this time
        self._should_flow = False  # True if messages should flow apart from that
        self._returned = 0  # number of the last message that the broker returned
        self._harmless = b""  # the last content header found without such properties; many messages share one

    # Channel.

    def open(self, machine: ClientConnection, channel: int, stream: Stream) -> None:
        """Use a channel in confirm mode. Messages are sent after `flow` was called with True."""
        self._stream = stream
        self._publishers = Publisher(machine, channel), Publisher(machine, channel, mandatory=True)
        self._machine, self._channel = machine, channel
        self._refuses = False
        self._next = self._floor = 1
        self._returned = 0

    def flow(self, on: bool) -> None:
        """Allow sending (`on` True), or hold messages until it is called again.

        Messages are held while the broker is blocked or declarations are pending.
        """
        self._should_flow = on
        self._flowing = on and self._publishers is not None and self._drain_until is None
        self.pump()

    def renew(self, now: float) -> int:
        """Replace the channel if the broker nacks messages on it. Return the number of the new one, or 0.

        Called once per second; the caller has to put the new channel into confirm mode. RabbitMQ (3.10)
        nacks, as long as a channel lives, every message for a quorum queue whose leader had just failed when
        the channel published to it first. So a channel with nacks is closed once everything sent on it is
        confirmed. If the nacks have another reason, such as a full queue, this costs a round trip, with
        growing intervals. `now` is in loop-clock seconds.
        """
        machine = self._machine
        if machine is None or self._publishers is None or not self._refuses:
            if now >= self._renew_at:
                self._renew_wait = RENEW_SECS_MIN
            return 0
        if self._drain_until is None:
            if now < self._renew_at:
                return 0
            self._drain_until = now + DRAIN_SECS
            self._flowing = False
        if self.in_flight and now < self._drain_until:
            return 0
        fresh = 0
        if not self.in_flight:
            with suppress(LocalProtocolError):  # the connection is ending, or has no number left
                fresh = machine.open_channel()
        self._drain_until = None
        self._renew_wait = min(2 * self._renew_wait, RENEW_SECS_MAX)
        self._renew_at = now + self._renew_wait
        if fresh:
            log.warning("publishing channel replaced because broker refused messages", link=self._stats.name)
            machine.close_channel(self._channel)
            self.close()
        else:
            self.flow(self._should_flow)
        return fresh

    def close(self) -> int:
        """Requeue unconfirmed messages after the channel is lost. Return their number."""
        self._publishers = None
        self._drain_until = None
        return super().close()

    def handle_channel_closed(self, code: int, text: str) -> None:
        """Process the broker's close of the channel or connection, which a published message has caused.

        If `text` names an exchange, all messages for that exchange are refused. Otherwise any unconfirmed
        message may be the cause, and the search for it begins (`_suspect`). `code` is the reply code of the
        close.
        """
        unconfirmed_count = self.close()
        if not unconfirmed_count:
            return
        reason = Reason.NOT_AUTHORIZED if code == ReplyCode.ACCESS_REFUSED else Reason.TARGET_REFUSED
        outcome = Outcome(Verdict.REJECTED, reason, text)
        if code == ReplyCode.RESOURCE_ERROR:
            outcome = Outcome(Verdict.RELEASED, Reason.QUOTA, text)
        match = (
            NAMED_EXCHANGE.search(text) if code in (ReplyCode.ACCESS_REFUSED, ReplyCode.NOT_FOUND) else None
        )
        if match is not None and self._missing is not None and self._concerns(match[1]):
            self.refuse(match[1], outcome)
            self._missing(match[1], outcome)
        else:
            self._suspect(unconfirmed_count, outcome)

    # Sending.

    @property
    def _usable(self) -> bool:
        return self._publishers is not None and self._publishers[0].usable

    def _destination_of(self, message: Message) -> str:
        return _exchange_of(message)

    def _send(self, sub_batch: SubBatch, positions: Positions, messages: list[Message]) -> Positions:
        """Send `messages`, which are at `positions` in the sub-batch. Return (): none of them has to wait."""
        assert self._publishers is not None
        recipient = sub_batch.recipient
        mandatory = not isinstance(recipient, RouteRecipient) or recipient.mandatory
        utc = clock.utc()
        try:
            rows = [
                (message.address.wire, self._encode_header(message, utc), message.body)
                for message in messages
            ]
        except Exception:
            rows, positions = self._rows_one_by_one(sub_batch, positions, utc)
        publisher = self._publishers[mandatory]
        unsent = publisher.publish_many(rows)
        if unsent:
            for row in unsent:
                self._settle_unsent([positions[row]], outcome_of_unsent(publisher.faults.get(row)))
            positions = [at for row, at in enumerate(positions) if row not in unsent]
        self._record_sent(sub_batch, positions, sum([len(row[2]) for row in rows]), mandatory=mandatory)
        return ()

    def _encode_header(self, message: Message, utc: float) -> bytes:
        """Return the encoded content header, without CC, BCC and user id (see `without_orders`).

        `utc` is the present time in UTC seconds, from which the expiration is computed.
        """
        data = encode_properties(message, utc, ms_max=EXPIRATION_MS_MAX)
        if message.expires and outlasts(message, utc):
            self._stats.degraded.add("expiration")
        if data is self._harmless:
            return data
        header = without_orders(data)
        if header is data:
            self._harmless = data
        else:
            self._stats.degraded.add("orders")
        return header

    def _rows_one_by_one(
        self, sub_batch: SubBatch, positions: Positions, utc: float
    ) -> tuple[list[PublishRow], list[int]]:
        """Encode messages one at a time. Return the rows to publish, and the positions of their messages.

        A row is a message's address, content header and body. A message that cannot be encoded is settled
        with the outcome of the error. `utc` is the present time in UTC seconds.
        """
        rows: list[PublishRow] = []
        encoded_positions: list[int] = []
        for at in positions:
            message = sub_batch.messages[at]
            try:
                rows.append((message.address.wire, self._encode_header(message, utc), message.body))
            except Exception as error:
                self._settle_unsent([at], outcome_of_error(error))
            else:
                encoded_positions.append(at)
        return rows, encoded_positions

    # Outcomes.

    def confirm(self, confirms: list[tuple[int, int, bool, bool]]) -> None:
        """Settle messages by the broker's acks and nacks, in order.

        Each is a tuple of channel, number, multiple flag, and True for an ack.
        """
        floor = self._floor
        early = self._early
        singles: list[int] = []
        for _, number, multiple, accepted in confirms:
            if not accepted:
                self._refuses = True
                self._advance(floor)
                self._settle_singles(singles, ACCEPTED)
                singles = []
                if multiple:
                    self._advance(number + 1, self._nacked)
                else:
                    self._settle_singles([number], self._nacked)
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

    def settle_returned(self, event: Returned) -> bool:
        """Settle a mandatory message that the broker returned. Return False if no sent message matches it.

        Returns arrive in the order of publishing, each before the ack of its message.
        """
        method = event.method
        address = amqp_address(method.exchange, method.routing_key)
        reason = Reason.NO_ROUTE if method.reply_code == ReplyCode.NO_ROUTE else Reason.TARGET_REFUSED
        text = f"{method.reply_text}: exchange {method.exchange!r}, key {method.routing_key!r}"
        after = self._returned + 1
        # A broker may encode the properties of a returned message differently, and may have lost the order.
        for start, properties in ((after, event.properties), (after, None), (0, None)):
            for index in range(max(0, bisect_right(self._firsts, start) - 1), len(self._runs)):
                run = self._runs[index]
                offset = _find(run, start, address, properties, event.body) if run.mandatory else -1
                if offset >= 0:
                    self._returned = run.first + offset
                    run.settle_some([offset], Outcome(Verdict.REJECTED, reason, text))
                    return True
        return False


def outcome_of_unsent(fault: ReadFault | None) -> Outcome:
    """Return the outcome of a message that could not be encoded; `fault` is why its body cannot be read."""
    if fault is None:
        return FRAME_TOO_SMALL
    verdict = Verdict.REJECTED if fault.is_lost else Verdict.RELEASED
    return Outcome(verdict, Reason.STORE, f"the body cannot be read: {fault.why}")


def _find(run: UnconfirmedRun, start: int, address: Address, properties: bytes | None, body: bytes) -> int:
    """Return the first unsettled offset of `run` that has this message, or -1 if there is none.

    The search begins at the message number `start`. `properties` are not compared if they are None, or if the
    message has an expiration, which changes with time.
    """
    messages = run.sub_batch.messages
    for offset in range(max(run.done, start - run.first), len(run.positions)):
        message = messages[run.positions[offset]]
        if message.body == body and message.address == address and offset not in run.settled:
            if properties is None or message.expires:
                return offset
            if without_orders(encode_properties(message, 0.0)) == properties:
                return offset
    return -1


def _exchange_of(message: Message) -> str:
    address = message.address
    return address.scope
