"""Client end of a connection, which links use.

    START -> AUTHENTICATING [-> AUTHENTICATING ...] -> OPENING -> OPEN

The protocol header is queued at once. Tune is answered without the caller (the smaller limit wins, and 0 is
no limit), and connection.open follows immediately. Runs of deliveries and confirms are decoded in fast loops;
each event carries a whole run. The module does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, ClassVar, Final

from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.model.properties import Headers
from gateway.model.spooled_bodies import Body, BodySink
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import decode_method
from gateway.protocols.amqp091.connection import (
    BODY_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    SETTLE,
    SETTLE_SIZE,
    Connection,
)
from gateway.protocols.amqp091.events import (
    Challenged,
    ChannelOpened,
    Confirms,
    Deliveries,
    Event,
    GetResponse,
    MethodReceived,
    Opened,
    Returned,
)
from gateway.protocols.amqp091.spec import (
    BASIC_ACK,
    BASIC_DELIVER,
    BASIC_GET_OK,
    BASIC_NACK,
    BASIC_RETURN,
    DELIVER_METHOD_MAX,
    FRAME_END,
    FRAME_METHOD,
    FRAME_MIN,
    PROTOCOL_HEADER,
    ReplyCode,
)
from gateway.protocols.amqp091.states import Channel, ChannelState, State, legal_methods

TAG: Final = Struct(">QB").unpack_from  # delivery tag, redelivered
# Strings are empty, and their lengths, the tag and redelivered remain.
DELIVER_METHOD_MIN: Final = 1 + 8 + 1 + 1 + 1
READ_SETTLE: Final = SETTLE.unpack_from
Delivery = tuple[int, bytes, int, bool, bytes, bytes, bytes]
Lead = tuple[bytes, int, bytes, int, int, int, bytes, bytes, bytes]
# Bytes before the delivery tag and their number, bytes between redelivered and body and their number, body
# size, channel, consumer tag, address, properties. NO_LEAD has size 1, which never equals b"".
NO_LEAD: Final[Lead] = (b"", 1, b"", 0, 0, 0, b"", b"", b"")


class ClientConnection(Connection):
    """State machine of an AMQP 0-9-1 connection at the client's end: bytes in, events out.

    `frame_max` (bytes), `channel_max` and `heartbeat` (seconds) are the limits that this client requests; 0
    leaves them to the server. `response` is what `encode_response` returned for `mechanism`. If `bounded` is
    True, each call of `receive_data` does a limited amount of work and sets `unread` if bytes remain.
    """

    _contents: ClassVar[dict[int, int]] = {
        BASIC_DELIVER: DELIVER_METHOD_MAX,
        BASIC_RETURN: DELIVER_METHOD_MAX,
        BASIC_GET_OK: DELIVER_METHOD_MAX,
    }
    _legal = legal_methods(m.TO_CLIENT)

    def __init__(
        self,
        *,
        mechanism: str,
        response: bytes,
        virtual_host: str = "/",
        client_properties: Headers = (),
        frame_max: int = 131_072,
        channel_max: int = 2047,
        heartbeat: int = 60,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        bounded: bool = False,
        sink: Callable[[int], BodySink] | None = None,
    ) -> None:
        """Create a connection, and queue the protocol header.

        `sink` takes the size of a body that has more than `message_bytes_max` bytes, and returns the object
        to which this body is written. Without `sink`, such a body is an error.
        """
        super().__init__(
            State.START,
            message_bytes_max=message_bytes_max if sink is None else BODY_BYTES_MAX,
            held_bytes_max=message_bytes_max,
            sink=sink,
        )
        self._bounded = bounded
        self._wish = (channel_max, frame_max, heartbeat)
        self._start_ok = m.ConnectionStartOk(client_properties, mechanism, response, "en_US")
        self._virtual_host = virtual_host
        self._server_properties: Headers = ()
        self._lead = NO_LEAD
        self._runs = {
            BASIC_DELIVER.to_bytes(4, "big"): self._read_deliveries,
            BASIC_ACK.to_bytes(4, "big"): self._read_confirms,
            BASIC_NACK.to_bytes(4, "big"): self._read_confirms,
        }
        self.out.append(PROTOCOL_HEADER)

    # --- calls of the application

    def secure_ok(self, response: bytes) -> None:
        """Queue connection.secure-ok with the response to a `Challenged` event.

        Raises LocalProtocolError if no login is in progress.
        """
        if self._state is not State.AUTHENTICATING:
            raise LocalProtocolError("no challenge to answer")
        self._send(0, m.ConnectionSecureOk(response))

    def open_channel(self) -> int:
        """Queue channel.open and return the channel number.

        The event ChannelOpened reports when the channel can be used. Raises LocalProtocolError if the
        connection is not open or all channel numbers are in use.
        """
        if self._state is not State.OPEN:
            raise LocalProtocolError("a channel needs an open connection")
        number = next((n for n in range(1, self.channel_max + 1) if n not in self._channels), 0)
        if not number:
            raise LocalProtocolError(f"all {self.channel_max} channels are in use")
        self._channels[number] = Channel(number, ChannelState.OPENING)
        self._send(number, m.ChannelOpen())
        return number

    # --- the handshake

    def _read_greeting(self, data: bytes, events: list[Event]) -> int:
        if self._state is State.START and data[:1] == PROTOCOL_HEADER[:1]:
            # 4.2.2: a server that does not support our version sends the version that it supports, and
            # closes.
            spoken = ".".join(str(byte) for byte in data[5:8])
            raise RemoteProtocolError(f"the server uses {spoken}", reason=ReplyCode.FRAME_ERROR)
        return 0

    def _take_start(self, method: m.ConnectionStart, events: list[Event]) -> None:
        offered = method.mechanisms.decode(errors="replace").split()
        if self._start_ok.mechanism not in offered:
            text = f"the server offers {' '.join(offered)}, not {self._start_ok.mechanism}"
            raise self._fault(text, ReplyCode.NOT_ALLOWED, method.index)
        self._server_properties = method.server_properties
        self._send(0, self._start_ok)
        self._state = State.AUTHENTICATING

    def _take_secure(self, method: m.ConnectionSecure, events: list[Event]) -> None:
        events.append(Challenged(method.challenge))

    def _take_tune(self, method: m.ConnectionTune, events: list[Event]) -> None:
        """Process connection.tune: apply the smaller limits, and queue tune-ok and connection.open."""
        channel_max, frame_max, heartbeat = (
            min(ours, theirs) if ours and theirs else ours or theirs
            for ours, theirs in zip(
                self._wish, (method.channel_max, method.frame_max, method.heartbeat), strict=True
            )
        )
        frame_max = frame_max or 131_072
        channel_max = channel_max or 65_535
        if frame_max < FRAME_MIN:
            raise self._fault(
                f"frame-max {frame_max} is below {FRAME_MIN}", ReplyCode.NOT_ALLOWED, method.index
            )
        self._send(0, m.ConnectionTuneOk(channel_max, frame_max, heartbeat))
        self._agree(channel_max, frame_max, heartbeat)
        self._send(0, m.ConnectionOpen(self._virtual_host))
        self._state = State.OPENING

    def _take_open_ok(self, method: m.ConnectionOpenOk, events: list[Event]) -> None:
        self._state = State.OPEN
        events.append(Opened(self._server_properties))

    def _take_notice(self, method: m.Method, events: list[Event]) -> None:
        events.append(MethodReceived(0, method))

    def _connection_method(self, method: m.Method, events: list[Event]) -> None:
        action = TABLE[self._state].get(type(method))
        if action is None:
            raise self._invalid(method)
        action(self, method, events)

    def _open_method(
        self, number: int, channel: Channel | None, method: m.Method, events: list[Event]
    ) -> bool:
        """Process channel.open-ok on channel `number`, and append its event.

        Return False for any other method, and if this end has not sent channel.open on the channel.
        """
        if (
            channel is None
            or channel.state is not ChannelState.OPENING
            or not isinstance(method, m.ChannelOpenOk)
        ):
            return False
        channel.state = ChannelState.OPEN
        self._ready.add(number)
        events.append(ChannelOpened(number))
        return True

    # --- messages

    def _forget_lead(self, number: int) -> None:
        self._lead = NO_LEAD

    def _content(
        self, number: int, index: int, method: bytes, properties: bytes, body: Body, events: list[Event]
    ) -> None:
        """Append the event for a message that has arrived completely.

        `index` is the method with which it has arrived, basic.deliver, basic.return or basic.get-ok, as
        class-id << 16 | method-id. `method` has the encoded arguments of that method.
        """
        if index == BASIC_DELIVER:
            if not method or len(method) < method[0] + DELIVER_METHOD_MIN:
                raise self._fault("basic.deliver is cut short", ReplyCode.SYNTAX_ERROR, index)
            tag_at = 1 + method[0]
            tag, redelivered = TAG(method, tag_at)
            address = method[tag_at + 9 :]
            delivery = (number, method[:tag_at], tag, redelivered & 1 == 1, address, properties, body)
            self._append_deliveries([delivery], events)
            return
        found = decode_method(index.to_bytes(4, "big") + method)
        if isinstance(found, m.BasicReturn):
            events.append(Returned(number, found, properties, body))
        elif isinstance(found, m.BasicGetOk):
            events.append(GetResponse(number, found, properties, body))

    def _read_deliveries(self, data: bytes, at: int, end: int, events: list[Event]) -> int:
        """Decode consecutive complete deliveries from position `at` to `end`, and append their event.

        Return the position behind the last one. Decoding stops at a message with several body frames, and at
        any other frame. Bytes that equal those of the previous message are not decoded again.
        """
        contents: list[Delivery] = []
        add = contents.append
        lead, lead_size, middle, middle_size, size, number, consumer_tag, address, properties = self._lead
        empty = 0
        while True:
            tag_at = at + lead_size
            middle_at = tag_at + 9
            body_at = middle_at + middle_size
            if data[at:tag_at] != lead or data[middle_at:body_at] != middle:
                found = self._lead_at(data, at, end)
                if found is None:
                    break
                self._lead = found
                lead, lead_size, middle, middle_size, size, number, consumer_tag, address, properties = found
                tag_at = at + lead_size
                body_at = tag_at + 9 + middle_size
            after = body_at + size
            if after >= end or data[after] != FRAME_END:
                break
            tag, redelivered = TAG(data, tag_at)
            add((number, consumer_tag, tag, redelivered & 1 == 1, address, properties, data[body_at:after]))
            at = after + 1
            if not size:
                empty += 1
        if contents:
            count = len(contents)
            self.received["basic.deliver"] += count
            self.received["header"] += count
            self.received["body"] += count - empty
            self._append_deliveries(contents, events)
        return at

    def _lead_at(self, data: bytes, at: int, end: int) -> Lead | None:
        """Return the bytes around the delivery tag of the message at `at`, and the values decoded from them.

        Later messages are compared with these bytes instead of being decoded. Return None if the message is
        incomplete, or if the fast path cannot decode it.
        """
        plain = self._plain_at(data, at, end, BASIC_DELIVER)
        if plain is None:
            return None
        number, header_at, properties, size, body_at = plain
        tag_at = at + 12 + data[at + 11]
        if tag_at + 12 > header_at:
            return None
        middle = data[tag_at + 9 : body_at]
        address = data[tag_at + 9 : header_at - 1]
        lead = data[at:tag_at]
        return lead, tag_at - at, middle, len(middle), size, number, lead[11:], address, properties

    def _append_deliveries(self, contents: list[Delivery], events: list[Event]) -> None:
        last = events[-1] if events else None
        if isinstance(last, Deliveries):
            last.contents += contents
        else:
            events.append(Deliveries(contents))

    def _read_confirms(self, data: bytes, at: int, end: int, events: list[Event]) -> int:
        """Decode consecutive basic.ack and basic.nack from position `at` to `end`, and append their event.

        Return the position behind the last one.
        """
        confirms: list[tuple[int, int, bool, bool]] = []
        ready = self._ready
        last_whole = end - SETTLE.size
        nacks = 0
        while at <= last_whole:
            kind, number, size, index, tag, bits, last = READ_SETTLE(data, at)
            if size != SETTLE_SIZE or last != FRAME_END or number not in ready or kind != FRAME_METHOD:
                break
            if index == BASIC_NACK:
                nacks += 1
            elif index != BASIC_ACK:
                break
            confirms.append((number, tag, bits & 1 == 1, index == BASIC_ACK))
            at += SETTLE.size
        if confirms:
            self.received["basic.ack"] += len(confirms) - nacks
            self.received["basic.nack"] += nacks
            previous = events[-1] if events else None
            if isinstance(previous, Confirms):
                previous.confirms += confirms
            else:
                events.append(Confirms(confirms))
        return at


Action = Callable[[ClientConnection, Any, list[Event]], None]
CLOSING: Final[dict[type[m.Method], Action]] = {m.ConnectionClose: ClientConnection._take_close}
TABLE: Final[dict[State, dict[type[m.Method], Action]]] = {
    State.START: {m.ConnectionStart: ClientConnection._take_start, **CLOSING},
    State.AUTHENTICATING: {
        m.ConnectionSecure: ClientConnection._take_secure,
        m.ConnectionTune: ClientConnection._take_tune,
        **CLOSING,
    },
    State.OPENING: {m.ConnectionOpenOk: ClientConnection._take_open_ok, **CLOSING},
    State.OPEN: {
        m.ConnectionBlocked: ClientConnection._take_notice,
        m.ConnectionUnblocked: ClientConnection._take_notice,
        m.ConnectionUpdateSecretOk: ClientConnection._take_notice,
        **CLOSING,
    },
    State.CLOSING: {m.ConnectionCloseOk: ClientConnection._take_close_ok, **CLOSING},
}
