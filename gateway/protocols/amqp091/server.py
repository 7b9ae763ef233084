"""Server end of a connection, which listeners use.

    HEADER -> START -> AUTHENTICATING [-> SECURE -> AUTHENTICATING ...] -> TUNE -> TUNED -> OPENING -> OPEN

In AUTHENTICATING and OPENING the application decides; in every other state the client sends next. Messages
are decoded by `_read_publishes`, which passes on method and properties undecoded. What a client repeats from
message to message (address, properties, size) is recognised by comparing bytes with those of its last
message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, ClassVar, Final

from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.model.properties import Headers
from gateway.model.spooled_bodies import Body, BodySink
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import CONTENT_HEADER_MIN
from gateway.protocols.amqp091.connection import (
    CONTENT_HEAD_SIZE,
    MESSAGE_BYTES_MAX,
    SETTLE,
    SETTLE_SIZE,
    STEPS_MAX,
    Connection,
)
from gateway.protocols.amqp091.events import (
    Acks,
    Authenticate,
    ChannelOpened,
    Event,
    LargePublish,
    MethodReceived,
    Open,
    Publishes,
    SecureResponse,
)
from gateway.protocols.amqp091.spec import (
    BASIC_ACK,
    BASIC_PUBLISH,
    BASIC_WEIGHT,
    FRAME_BODY,
    FRAME_END,
    FRAME_METHOD,
    FRAME_MIN,
    OLD_HEADERS,
    PROTOCOL_HEADER,
    PUBLISH_METHOD_MAX,
    ReplyCode,
)
from gateway.protocols.amqp091.states import Channel, ChannelState, State, legal_methods
from gateway.protocols.amqp091.table import FIELD_BYTES_MIN, FIELDS_UNBOUNDED

READ_SETTLE: Final = SETTLE.unpack_from
LEAD_BYTES_MAX: Final = 1024  # bytes; longer leads are not cached, because clients choose their properties
# Bytes per step of properties that differ from those of the message before.
PROPERTIES_STEP_BYTES: Final = 64
TAIL: Final = Struct(">BBHI").pack  # end of the header frame; type, channel and size of the body frame
SMALL_CONTENT: Final = BASIC_WEIGHT.to_bytes(4, "big") + bytes(
    4
)  # class, weight, upper half of the body size


class Lead:
    """First bytes of the last message on a channel, up to its body, and the values decoded from them.

    `data` has these bytes, and `size` is their number. If the next message begins with the same bytes, they
    are not decoded again.
    """

    __slots__ = ("body_size", "channel", "data", "head", "method", "number", "properties", "size", "tail")

    def __init__(self, channel: bytes) -> None:
        self.channel = channel
        self.number = 0
        self.data = b""
        self.size = 1  # never equal to the length of b""
        self.body_size = 0
        self.method = b""  # its arguments
        self.properties = b""
        self.head = b""  # the method's frame, and type and channel of the header frame
        self.tail = b""  # bytes between properties and body


class ServerConnection(Connection):
    """State machine of an AMQP 0-9-1 connection at the server's end: bytes in, events out.

    `frame_max` (bytes), `channel_max` and `heartbeat` (seconds) are the limits that the server proposes; the
    client may choose lower ones.
    """

    _contents: ClassVar[dict[int, int]] = {BASIC_PUBLISH: PUBLISH_METHOD_MAX}
    _legal = legal_methods(m.TO_SERVER)
    _paused = frozenset({State.HEADER, State.AUTHENTICATING, State.OPENING})
    _bounded = True
    _silent = frozenset({State.START, State.AUTHENTICATING, State.SECURE, State.TUNE})

    def __init__(
        self,
        *,
        frame_max: int = 131_072,
        channel_max: int = 2047,
        heartbeat: int = 60,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        server_properties: Headers = (),
        mechanisms: str = "PLAIN AMQPLAIN EXTERNAL",
        properties_max: int = FIELDS_UNBOUNDED,
        properties_bytes_max: int = FIELDS_UNBOUNDED,
        held_bytes_max: int | None = None,
        sink: Callable[[int], BodySink] | None = None,
    ) -> None:
        super().__init__(
            State.HEADER,
            message_bytes_max=message_bytes_max,
            properties_max=properties_max,
            properties_bytes_max=properties_bytes_max,
            held_bytes_max=held_bytes_max,
            sink=sink,
        )
        # A run of messages only has headers that are certain to be within both limits.
        self._plain_max = CONTENT_HEADER_MIN + min(properties_max * FIELD_BYTES_MIN, properties_bytes_max)
        self._offer = m.ConnectionTune(channel_max, frame_max, heartbeat)
        self._server_properties = server_properties
        self._mechanisms = mechanisms
        self._lead = Lead(b"")
        self._leads: dict[bytes, Lead] = {}  # by the bytes of the channel number
        self._runs = {
            BASIC_PUBLISH.to_bytes(4, "big"): self._read_publishes,
            BASIC_ACK.to_bytes(4, "big"): self._read_acks,
        }

    # --- responses of the application

    def authenticated(self) -> None:
        """Accept the login after Authenticate or SecureResponse: queue connection.tune (1.4.2.5)."""
        self._expect(State.AUTHENTICATING)
        self._send(0, self._offer)
        self._state = State.TUNE

    def secure(self, challenge: bytes) -> None:
        """Queue connection.secure with a challenge, after Authenticate or SecureResponse."""
        self._expect(State.AUTHENTICATING)
        self._send(0, m.ConnectionSecure(challenge))
        self._state = State.SECURE

    def opened(self) -> None:
        """Accept the virtual host after Open: queue connection.open-ok."""
        self._expect(State.OPENING)
        self._send(0, m.ConnectionOpenOk())
        self._state = State.OPEN

    def _expect(self, state: State) -> None:
        if self._state is not state:
            raise LocalProtocolError(f"the connection is in {self._state.name}, not in {state.name}")

    # --- the handshake

    def _read_greeting(self, data: bytes, events: list[Event]) -> int:
        """Decode the client's protocol header, and queue connection.start.

        Return the position where frames begin. For any other header, queue the supported protocol header and
        close the connection (4.2.2).
        """
        if self._state is not State.HEADER:
            return 0
        prefix = data[: len(PROTOCOL_HEADER)]
        if not any(header.startswith(prefix) for header in (PROTOCOL_HEADER, *OLD_HEADERS)):
            self.out.append(PROTOCOL_HEADER)  # 4.2.2: the version that we would accept
            self._state = State.CLOSED
            return 0
        if len(prefix) < len(PROTOCOL_HEADER):
            return 0
        start = m.ConnectionStart(0, 9, self._server_properties, self._mechanisms.encode(), b"en_US")
        self._send(0, start)
        self._state = State.START
        return len(PROTOCOL_HEADER)

    def _take_start_ok(self, method: m.ConnectionStartOk, events: list[Event]) -> None:
        if method.mechanism not in self._mechanisms.split():
            text = f"mechanism {method.mechanism!r} is not supported"
            raise self._fault(text, ReplyCode.NOT_ALLOWED, method.index)
        self._state = State.AUTHENTICATING
        events.append(Authenticate(method.mechanism, method.response, method.client_properties))

    def _take_secure_ok(self, method: m.ConnectionSecureOk, events: list[Event]) -> None:
        self._state = State.AUTHENTICATING
        events.append(SecureResponse(method.response))

    def _take_tune_ok(self, method: m.ConnectionTuneOk, events: list[Event]) -> None:
        offer = self._offer
        frame_max, channel_max = method.frame_max, method.channel_max
        if not FRAME_MIN <= frame_max <= offer.frame_max:
            text = f"frame-max {frame_max} is not between {FRAME_MIN} and {offer.frame_max}"
            raise self._fault(text, ReplyCode.NOT_ALLOWED, method.index)
        if not 0 < channel_max <= offer.channel_max:
            text = f"channel-max {channel_max} is not between 1 and {offer.channel_max}"
            raise self._fault(text, ReplyCode.NOT_ALLOWED, method.index)
        self._agree(channel_max, frame_max, method.heartbeat)
        self._state = State.TUNED

    def _take_open(self, method: m.ConnectionOpen, events: list[Event]) -> None:
        self._state = State.OPENING
        events.append(Open(method.virtual_host))

    def _take_update_secret(self, method: m.ConnectionUpdateSecret, events: list[Event]) -> None:
        events.append(MethodReceived(0, method))

    def _connection_method(self, method: m.Method, events: list[Event]) -> None:
        action = TABLE[self._state].get(type(method))
        if action is None:
            state = "running" if self._state is State.OPEN else self._state.name.lower()
            text = f"CHANNEL_ERROR - unexpected method in connection state {state}"
            raise self._fault(text, ReplyCode.CHANNEL_ERROR, method.index)
        action(self, method, events)

    def _open_method(
        self, number: int, channel: Channel | None, method: m.Method, events: list[Event]
    ) -> bool:
        """Process channel.open on channel `number`, and append its event.

        Return False for any other method, and while the channel is closing. Raises RemoteProtocolError if the
        channel is already open, or if there are too many channels.
        """
        if not isinstance(method, m.ChannelOpen) or (
            channel is not None and channel.state is not ChannelState.OPEN
        ):
            return False
        if channel is not None:
            text = "CHANNEL_ERROR - second 'channel.open' seen"
            raise self._fault(text, ReplyCode.CHANNEL_ERROR, method.index)
        if len(self._channels) >= self.channel_max:
            text = (
                f"NOT_ALLOWED - number of channels opened ({len(self._channels)}) has reached the negotiated "
                f"channel_max ({self.channel_max})"
            )
            raise RemoteProtocolError(text, reason=ReplyCode.NOT_ALLOWED)
        self._channels[number] = Channel(number, ChannelState.OPEN)
        self._ready.add(number)
        self._send(number, m.ChannelOpenOk())
        events.append(ChannelOpened(number))
        return True

    # --- messages

    def _forget_lead(self, number: int) -> None:
        self._lead = Lead(b"")
        self._leads.pop(number.to_bytes(2, "big"), None)

    def _content(
        self, number: int, index: int, method: bytes, properties: bytes, body: Body, events: list[Event]
    ) -> None:
        last = events[-1] if events else None
        if len(body) > self._held_bytes_max:
            events.append(LargePublish((number, method, properties, body)))
        elif isinstance(last, Publishes):
            last.contents.append((number, method, properties, body))
        else:
            events.append(Publishes([(number, method, properties, body)]))

    def ack_each(self, rows: Sequence[tuple[int, int]]) -> None:
        """Queue basic.ack for rows of (channel, delivery tag)."""
        ready, add, pack = self._ready, self.out.append, SETTLE.pack
        for channel, delivery_tag in rows:
            if channel in ready or self._usable(channel):
                add(pack(FRAME_METHOD, channel, SETTLE_SIZE, BASIC_ACK, delivery_tag, 0, FRAME_END))
                self.sent["basic.ack"] += 1

    def _read_publishes(self, data: bytes, at: int, end: int, events: list[Event]) -> int:
        """Decode consecutive complete publishes from position `at` to `end`, and append their event.

        Return the position behind the last one. Decoding stops at a message with several body frames, and at
        any other frame. Bytes that equal those of the previous message are not decoded again.
        """
        contents: list[tuple[int, bytes, bytes, bytes]] = []
        add = contents.append
        lead = self._lead
        raw, lead_size, size = lead.data, lead.size, lead.body_size
        number, method, properties = lead.number, lead.method, lead.properties
        empty = 0
        while True:
            body_at = at + lead_size
            if data[at:body_at] != raw:
                found = self._lead_at(data, at, end)
                if found is None:
                    break
                raw, lead_size, size = found.data, found.size, found.body_size
                number, method, properties = found.number, found.method, found.properties
                body_at = at + lead_size
            after = body_at + size
            if after >= end or data[after] != FRAME_END:
                break
            add((number, method, properties, data[body_at:after]))
            at = after + 1
            if not size:
                empty += 1
        if contents:
            count = len(contents)
            self.received["basic.publish"] += count
            self.received["header"] += count
            self.received["body"] += count - empty
            last = events[-1] if events else None
            if isinstance(last, Publishes):
                last.contents += contents
            else:
                events.append(Publishes(contents))
        return at

    def _lead_at(self, data: bytes, at: int, end: int) -> Lead | None:
        """Decode the message at `at` up to its body, and return its first bytes and their values as a Lead.

        Return None if the message is incomplete, if the fast path cannot decode it, or if this call has
        reached its limit of work.
        """
        before = self._lead
        channel = data[at + 1 : at + 3]
        lead: Lead | None = before
        if channel != before.channel:
            lead = self._leads.get(channel)
            if lead is None:
                lead = Lead(channel)
            elif data[at : at + lead.size] == lead.data:
                self._lead = lead
                return lead
        assert lead is not None
        if self._steps >= STEPS_MAX:
            return None
        head = lead.head
        same = head and data[at : at + len(head)] == head and self._read_lead(lead, data, at, end)
        if not same and not self._read_first(lead, data, at, end):
            return None
        self._steps += len(lead.properties) // PROPERTIES_STEP_BYTES
        # Equal values on several channels become one object, so that they are not looked up for each channel.
        if lead is not before:
            if lead.method == before.method:
                lead.method = before.method
            if lead.properties == before.properties:
                lead.properties = before.properties
        if lead.size <= LEAD_BYTES_MAX:
            self._leads[channel] = lead
        else:
            self._leads.pop(channel, None)
        self._lead = lead
        return lead

    def _read_lead(self, lead: Lead, data: bytes, at: int, end: int) -> bool:
        """Decode header and size of the message at `at` into `lead`; its method equals that stored in `lead`.

        Return False if the message is incomplete or empty, or if the fast path cannot decode it.
        """
        header_at = at + len(lead.head) - 3
        if header_at + 22 > end or data[header_at + 7 : header_at + 15] != SMALL_CONTENT:
            return False
        header_size = (
            data[header_at + 3] << 24
            | data[header_at + 4] << 16
            | data[header_at + 5] << 8
            | data[header_at + 6]
        )
        size = (
            data[header_at + 15] << 24
            | data[header_at + 16] << 16
            | data[header_at + 17] << 8
            | data[header_at + 18]
        )
        tail = lead.tail
        if size != lead.body_size or not tail:
            tail = TAIL(FRAME_END, FRAME_BODY, lead.number, size) if size else b""
        last = header_at + header_size + 7
        body_at = last + len(tail)
        if (
            not size
            or not CONTENT_HEADER_MIN <= header_size <= self._plain_max
            or data[last:body_at] != tail
            or body_at + size - at > self._whole_max
        ):
            return False
        properties = data[header_at + CONTENT_HEAD_SIZE : last]
        if properties != lead.properties:
            lead.properties = properties
        lead.data = data[at:body_at]
        lead.size = body_at - at
        lead.body_size = size
        lead.tail = tail
        return True

    def _read_first(self, lead: Lead, data: bytes, at: int, end: int) -> bool:
        """Decode method, header and size of the message at `at` into `lead`.

        Return False if the message is incomplete, or if the fast path cannot decode it.
        """
        plain = self._plain_at(data, at, end, BASIC_PUBLISH)
        if plain is None:
            return False
        lead.number, header_at, properties, lead.body_size, body_at = plain
        method = data[at + 11 : header_at - 1]
        if method != lead.method:
            lead.method = method
        if properties != lead.properties:
            lead.properties = properties
        lead.data = data[at:body_at]
        lead.size = body_at - at
        lead.head = data[at : header_at + 3]
        lead.tail = b""
        return True

    def _read_acks(self, data: bytes, at: int, end: int, events: list[Event]) -> int:
        """Decode consecutive basic.ack from position `at` to `end`, and append their event.

        Return the position behind the last one.
        """
        acks: list[tuple[int, int, bool]] = []
        add = acks.append
        ready = self._ready
        last_whole = end - SETTLE.size
        while at <= last_whole:
            kind, number, size, index, tag, bits, last = READ_SETTLE(data, at)
            if (
                index != BASIC_ACK
                or size != SETTLE_SIZE
                or last != FRAME_END
                or number not in ready
                or kind != 1
            ):
                break
            add((number, tag, bits & 1 == 1))
            at += 21
        if acks:
            self.received["basic.ack"] += len(acks)
            previous = events[-1] if events else None
            if isinstance(previous, Acks):
                previous.acks += acks
            else:
                events.append(Acks(acks))
        return at


Action = Callable[[ServerConnection, Any, list[Event]], None]
CLOSING: Final[dict[type[m.Method], Action]] = {m.ConnectionClose: ServerConnection._take_close}
TABLE: Final[dict[State, dict[type[m.Method], Action]]] = {
    State.START: {m.ConnectionStartOk: ServerConnection._take_start_ok, **CLOSING},
    State.SECURE: {m.ConnectionSecureOk: ServerConnection._take_secure_ok, **CLOSING},
    State.TUNE: {m.ConnectionTuneOk: ServerConnection._take_tune_ok, **CLOSING},
    State.TUNED: {m.ConnectionOpen: ServerConnection._take_open, **CLOSING},
    State.OPEN: {m.ConnectionUpdateSecret: ServerConnection._take_update_secret, **CLOSING},
    State.CLOSING: {m.ConnectionCloseOk: ServerConnection._take_close_ok, **CLOSING},
}
