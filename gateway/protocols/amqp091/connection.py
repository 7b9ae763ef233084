"""Common part of both ends of a connection: frames, channels, contents in parts, closing, heartbeats.

Bytes go in with the time, events come out, and output gathers in `out`. The connection has a state, each
channel has a state, and tables say which method is legal in which; a missing key is the error. A fault of the
peer never leaves `receive_data` as an exception: it becomes the close that the specification requires, of the
channel (soft errors) or of the connection, and an event.

Frames that arrive in large numbers are decoded by the loops of the two ends, which handle whole runs; `_runs`
names them. They accept only complete, plain frames, and leave the rest to `_take`, one frame at a time, which
alone decides what is an error.

A server limits the work of each call, since 64 KiB may be 8 192 heartbeats. It counts steps (each costs about
as much as a small frame), stops at STEPS_MAX, and is `unread` until the next call. It also stops before a
method or a fault that ends a channel or the connection, because everything before it on the channel must be
processed and responded to first.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable
from struct import Struct
from typing import Any, ClassVar, Final

from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.model.byte_buffer import ByteBuffer
from gateway.model.heartbeats import HeartbeatSchedule
from gateway.model.spooled_bodies import Body, BodySink, Piece, is_large, join_pieces
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import (
    CONTENT_HEADER_MIN,
    check_fields,
    decode_content_header,
    decode_frame,
    decode_method,
    encode_content_frames,
    encode_method_frame,
    frame_bytes,
    frame_error,
    reply_text,
)
from gateway.protocols.amqp091.events import ChannelClosed, Closed, Event, MethodReceived
from gateway.protocols.amqp091.spec import (
    BASIC,
    BASIC_ACK,
    BASIC_NACK,
    BASIC_WEIGHT,
    CLOSE_WAIT_SECS,
    CONTENTS_IN_PARTS,
    FRAME_BODY,
    FRAME_END,
    FRAME_HEADER,
    FRAME_METHOD,
    FRAME_OVERHEAD,
    FRAME_PREFIX,
    HANDSHAKE_FRAME_MAX,
    HEARTBEAT_FRAME,
    PAUSED_BYTES_MAX,
    SOFT_CODES,
    ReplyCode,
)
from gateway.protocols.amqp091.states import CONNECTION_CLASS, Channel, ChannelState, State
from gateway.protocols.amqp091.table import FIELDS_UNBOUNDED

MESSAGE_BYTES_MAX: Final = 16 * 1024 * 1024
BODY_BYTES_MAX: Final = 0xFFFF_FFFF_FFFF_FFFF  # the maximum in a content header
STEPS_MAX: Final = 128  # per call of a server: a few milliseconds, so that no flood delays the others
STEP_BYTES: Final = 32  # bytes of a method or of properties per step, in addition to the step of the frame
PARTS_BYTES_MIN: Final = 32_768  # bytes; a larger body frame is accepted in parts, and copied once
RUN_STEP_BYTES: Final = 1_024  # bytes per step that a run has consumed
ENDINGS: Final = frozenset(kind.index.to_bytes(4, "big") for kind in (m.ChannelClose, m.ConnectionClose))
SETTLE_SIZE: Final = 4 + 8 + 1  # payload of basic.ack and basic.nack
SETTLE: Final = Struct(">BHIIQBB")  # the whole frame: type, channel, size, ids, tag, bits, end
METHOD_HEAD: Final = Struct(">BHII").unpack_from  # type, channel, size, ids
CONTENT_HEAD: Final = Struct(">BHIIQ").unpack_from  # type, channel, size, class and weight, body size
CONTENT_HEAD_SIZE: Final = 19
BODY_HEAD: Final = Struct(">BHI").unpack_from
# Channel, position of the header frame, properties, body size, position of the body.
Plain = tuple[int, int, bytes, int, int]
SILENT_INTERVALS: Final = 2  # 4.2.7: heartbeats that may be missing


class Connection:
    """Base class of ServerConnection and ClientConnection: one end of an AMQP 0-9-1 connection."""

    _contents: ClassVar[
        dict[int, int]
    ]  # ids of the methods that carry content -> largest size of their arguments
    _legal: ClassVar[dict[ChannelState, frozenset[type[m.Method]]]]
    _paused: ClassVar[frozenset[State]] = frozenset()  # states in which the application has to respond first
    # States in which a fault closes the connection without a response.
    _silent: ClassVar[frozenset[State]] = frozenset()
    _bounded: bool = False  # each call does a limited number of steps

    def __init__(
        self,
        state: State,
        *,
        message_bytes_max: int,
        properties_max: int = FIELDS_UNBOUNDED,
        properties_bytes_max: int = FIELDS_UNBOUNDED,
        held_bytes_max: int | None = None,
        sink: Callable[[int], BodySink] | None = None,
    ) -> None:
        """Create a connection in `state`.

        A table may have `properties_max` fields, and the properties of a message `properties_bytes_max`
        bytes. `sink` takes the size of a body that has more than `held_bytes_max` bytes, and returns the
        object to which this body is written, or raises RemoteProtocolError to refuse the body.
        """
        self.out: list[Any] = []  # Pieces; if `large` is set, some of them are large or not bytes
        self.frame_max = HANDSHAKE_FRAME_MAX
        self.channel_max = 0
        self.heartbeat = 0
        self.message_bytes_max = message_bytes_max
        self.received: defaultdict[str, int] = defaultdict(int)
        self.sent: defaultdict[str, int] = defaultdict(int)
        self.closed_by_peer = False  # our last frame is connection.close-ok
        self.unread = False  # `receive_data(b"", now)` would return more, but only in another pass
        self.body_bytes_remaining = 0  # of the body whose header came last; 0 if it is complete
        self.large = False  # `data_to_send` would copy much or read from disk: use `pieces_to_send`
        self._state = state
        self._held_bytes_max = message_bytes_max if held_bytes_max is None else held_bytes_max
        self._sink = sink
        self._properties_max = properties_max
        self._properties_bytes_max = properties_bytes_max
        self._steps = 0
        self._rest: ByteBuffer | None = None  # bytes behind what has been decoded
        self._needed = 0  # bytes that `_rest` needs before it can be decoded further
        # Missing bytes of a body frame that is accepted in parts, with its end byte; 0 if there is none.
        self._lacking = 0
        self._taken_on = 0  # the channel of that frame
        # Fault on this channel, to be refused by the next call.
        self._guilt: tuple[RemoteProtocolError, int] | None = None
        self._channels: dict[int, Channel] = {}
        self._ready: set[int] = set()  # open channels without an incomplete content
        self._runs: dict[bytes, Callable[[bytes, int, int, list[Event]], int]] = {}
        self._whole_max = 0  # the largest message that a run may decode, with all its frames
        self._plain_max = sys.maxsize  # the largest header that a run may decode
        self._partial = 0  # bytes of incomplete contents over all channels
        self._now = 0.0
        self._last_received = 0.0
        self._beats = HeartbeatSchedule()
        self._closing_since = 0.0

    # --- bytes

    @property
    def closed(self) -> bool:
        """True if the connection has ended: write the queued bytes, then close the socket."""
        return self._state is State.CLOSED

    @property
    def ending(self) -> bool:
        """True once this end or the peer has sent connection.close, so that no more requests are possible."""
        return self._state in (State.CLOSING, State.CLOSED)

    @property
    def channels(self) -> list[int]:
        """Numbers of the open channels."""
        return [number for number, channel in self._channels.items() if channel.state is ChannelState.OPEN]

    def data_to_send(self) -> bytes:
        """Remove and return the queued bytes. Raises OSError if a body cannot be read from disk."""
        if self.large:
            return join_pieces(self.pieces_to_send())
        out = self.out
        if not out:
            return b""
        data: bytes = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        if data is not HEARTBEAT_FRAME:
            self._beats.has_sent = True
        return data

    def to_send(self) -> bytes | list[Piece]:
        """Remove and return the queued bytes; as a list of pieces if some of them should not be copied."""
        return self.pieces_to_send() if self.large else self.data_to_send()

    def pieces_to_send(self) -> list[Piece]:
        """Remove and return the queued bytes as a list of pieces, without copying or reading bodies."""
        pieces: list[Piece] = self.out.copy()
        self.out.clear()  # other objects append to this list
        self.large = False
        self._beats.has_sent = True
        return pieces

    def receive_data(self, data: bytes, now: float) -> list[Event]:
        """Decode the bytes `data`, and return their events in order. `now` is in monotonic seconds.

        After an Authenticate, SecureResponse or Open event, further bytes are not decoded until the caller
        has responded to the event. Then call this method with b"" to have them decoded.
        """
        self._now = now
        self._steps = 0
        self.unread = False
        events: list[Event] = []
        if data:
            self._last_received = now
        if self._rest is not None:
            self._rest.add(data)
            if self._rest.byte_count < self._needed:
                return events
            data = self._rest.take_all()
            self._rest = None
        if self.closed:
            return events
        try:
            at = self._read(data, events)
        except RemoteProtocolError as fault:
            # The frames themselves are corrupt, so nothing behind the fault can be decoded, not even a
            # close-ok.
            self.refuse(fault, 0, events)
            self._state = State.CLOSED
            return events
        if not self.closed and at < len(data):
            self._rest = ByteBuffer(data[at:])
            if self._rest.byte_count > PAUSED_BYTES_MAX and self._state in self._paused:
                self.refuse(frame_error("too many bytes before the connection is open"), 0, events)
        return events

    def _read(self, data: bytes, events: list[Event]) -> int:
        """Decode complete frames until the limit of work for one call is reached, and append their events.

        Return the position behind the last decoded frame.
        """
        self._needed = 0
        if self._guilt is not None:
            (fault, number), self._guilt = self._guilt, None
            self.refuse(fault, number, events)
        at = self._continue_partial_body(data, events) if self._lacking else self._read_greeting(data, events)
        end = len(data)
        runs = self._runs
        while at < end and not self.closed and self._state not in self._paused:
            if self._steps >= STEPS_MAX and self._bounded:
                self.unread = True
                break
            run = runs.get(data[at + 7 : at + 11])
            if run is not None:
                after = run(data, at, end, events)
                if after != at:
                    self._steps += (after - at) // RUN_STEP_BYTES
                    at = after
                    continue
            try:
                frame = decode_frame(data, at, self.frame_max)
            except RemoteProtocolError:
                if self._must_pause(events):
                    break
                raise
            if frame is None:
                self._needed = frame_bytes(data, at)
                if self._needed >= PARTS_BYTES_MIN and self._begin_partial_body(data, at):
                    return end
                break
            kind, number, payload, after = frame
            if kind == FRAME_METHOD and payload[:4] in ENDINGS and self._must_pause(events):
                break
            at = after
            self._steps += 1 if kind == FRAME_BODY else 1 + len(payload) // STEP_BYTES
            try:
                self._take(kind, number, payload, events)
            except RemoteProtocolError as fault:
                if self._must_pause(events):
                    self._guilt = fault, number
                    break
                self.refuse(fault, number, events)
        return at

    def _must_pause(self, events: list[Event]) -> bool:
        """Return True if decoding must pause, because this call has produced `events`. Then set `unread`."""
        if not (events and self._bounded):
            return False
        self.unread = True
        return True

    @abstractmethod
    def _read_greeting(self, data: bytes, events: list[Event]) -> int:
        """Decode the peer's protocol header, if one is expected now.

        Return the position where frames begin.
        """

    # --- frames, one by one

    def _take(self, kind: int, number: int, payload: bytes, events: list[Event]) -> None:
        """Process one frame of the type `kind` on channel `number`."""
        if kind == FRAME_METHOD:
            self._take_method(number, payload, events)
        elif kind == FRAME_HEADER:
            self.received["header"] += 1
            channel = self._content_channel(number, begun=True)
            if channel is not None:
                self._take_header(channel, payload, events)
        elif kind == FRAME_BODY:
            self.received["body"] += 1
            channel = self._content_channel(number, begun=True)
            if channel is not None:
                self._take_body(channel, payload, events)
        else:
            self.received["heartbeat"] += 1

    def _take_method(self, number: int, payload: bytes, events: list[Event]) -> None:
        """Process a method frame, whose method either begins a content or has none."""
        index = int.from_bytes(payload[:4], "big")
        if index in self._contents:
            self.received[m.METHODS[index].name] += 1
            channel = self._content_channel(number, begun=False)
            if channel is not None:
                self._begin(channel, index, payload)
            return
        method = decode_method(payload, self._properties_max)
        self.received[method.name] += 1
        if number == 0:
            if self._state is State.CLOSING and type(method) not in (m.ConnectionClose, m.ConnectionCloseOk):
                return
            self._connection_method(method, events)
        elif self._state is State.OPEN:
            self._channel_method(number, method, events)
        elif self._state is not State.CLOSING:
            text = "UNEXPECTED_FRAME - a channel before the connection is open"
            raise RemoteProtocolError(text, reason=ReplyCode.UNEXPECTED_FRAME)

    def _content_channel(self, number: int, begun: bool) -> Channel | None:
        """Return the channel for a frame that belongs to a message, or None if the frame must be discarded.

        A message is a method such as basic.publish, followed by a header and body frames. `begun` is False
        for the method, and True for the header and body. Raises RemoteProtocolError: 505 if the channel
        expects another frame, 504 if the channel is not open.
        """
        if self._state is State.CLOSING:
            return None
        channel = self._channels.get(number)
        if channel is None:
            raise RemoteProtocolError(
                f"content on channel {number}, which is not open",
                reason=ReplyCode.CHANNEL_ERROR,
                class_id=BASIC,
            )
        if channel.state is ChannelState.CLOSING:
            return None
        if channel.state is not ChannelState.OPEN or (begun and not channel.index):
            text = "UNEXPECTED_FRAME - expected method frame, got non method frame instead"
            raise RemoteProtocolError(text, reason=ReplyCode.UNEXPECTED_FRAME)
        if channel.index and not begun:
            raise channel.unexpected_frame_error()
        return channel

    def _begin(self, channel: Channel, index: int, payload: bytes) -> None:
        """Store the method with which a message begins, until its header and body have arrived.

        `payload` is the encoded method, and `index` its number (class-id << 16 | method-id). Raises
        RemoteProtocolError 502 if its arguments are too long.
        """
        if len(payload) - 4 > self._contents[index]:
            raise self._fault("arguments too long", ReplyCode.SYNTAX_ERROR, index)
        self._unready(channel.number)
        channel.index = index
        channel.method = payload[4:]
        self._hold(len(channel.method))

    def _take_header(self, channel: Channel, payload: bytes, events: list[Event]) -> None:
        """Process a content header frame.

        Raises RemoteProtocolError 406 if the announced body or the properties are too large.
        """
        if channel.properties is not None:
            raise channel.unexpected_frame_error()
        size, properties = decode_content_header(payload, channel.index)
        if size > self.message_bytes_max:
            most = self.message_bytes_max
            text = f"PRECONDITION_FAILED - message size {size} is larger than configured max size {most}"
            raise self._fault(text, ReplyCode.PRECONDITION_FAILED, channel.index)
        self._check_properties(properties, channel.index)
        channel.properties = properties
        channel.bytes_remaining = self.body_bytes_remaining = size
        self._hold(len(properties))
        if size > self._held_bytes_max and self._sink is not None:
            channel.sink = self._sink(size)
        if not size:
            self._complete(channel, b"", events)

    def _check_properties(self, properties: bytes, index: int) -> None:
        """Raise RemoteProtocolError 406 if the properties have too many bytes or too many fields."""
        size, most = len(properties), self._properties_bytes_max
        if size > most:
            text = f"PRECONDITION_FAILED - properties of {size} bytes exceed configured max size {most}"
            raise self._fault(text, ReplyCode.PRECONDITION_FAILED, index)
        try:
            check_fields(properties, self._properties_max)
        except RemoteProtocolError as fault:
            text = f"PRECONDITION_FAILED - headers: {fault}"
            raise self._fault(text, ReplyCode.PRECONDITION_FAILED, index) from None

    def _take_body(self, channel: Channel, payload: bytes, events: list[Event]) -> None:
        """Process a body frame, and append the event of the message if the body is complete."""
        if channel.properties is None:
            raise channel.unexpected_frame_error()
        size = len(payload)
        if size > channel.bytes_remaining:
            raise self._fault("a body longer than announced", ReplyCode.FRAME_ERROR, channel.index)
        if channel.sink is not None:
            channel.sink.write(payload)
            channel.bytes_remaining -= size
            if not channel.bytes_remaining:
                self._complete(channel, channel.sink.finish(), events)
            return
        if size == channel.bytes_remaining and channel.body is None:
            self._complete(channel, payload, events)
            return
        self._add(channel, payload, 0, size)
        self._end_frame(channel, events)

    def _begin_partial_body(self, data: bytes, at: int) -> bool:
        """Begin to process the large body frame at `at` before it has arrived completely, and return True.

        The bytes that have arrived are added to the body. Return False without any change if the frame must
        arrive completely first.
        """
        kind, number, size = BODY_HEAD(data, at)
        channel = self._channels.get(number)
        if (
            kind != FRAME_BODY
            or self._state is not State.OPEN
            or channel is None
            or channel.state is not ChannelState.OPEN
            or channel.properties is None
            or size > channel.bytes_remaining
            or channel.sink is not None
            or self._is_too_much(len(data) - at)
        ):
            return False  # an error, or a body that is written to a sink
        self.received["body"] += 1
        self._taken_on = number
        self._lacking = size + 1 - self._add(channel, data, at + FRAME_PREFIX, len(data))
        return True

    def _continue_partial_body(self, data: bytes, events: list[Event]) -> int:
        """Process the next bytes of the body frame that `_begin_partial_body` has begun.

        Return the position behind the bytes that belong to the frame. Raises RemoteProtocolError 501 if the
        frame ends with a wrong byte.
        """
        count = self._lacking
        end = min(count, len(data))
        if end == count and data[end - 1] != FRAME_END:
            raise frame_error(f"a frame ends with 0x{data[end - 1]:02x}")
        self._lacking = count - end
        try:
            channel = self._content_channel(self._taken_on, begun=True)
            if channel is not None:
                self._add(channel, data, 0, min(end, count - 1))
                if not self._lacking:
                    self._end_frame(channel, events)
        except RemoteProtocolError as fault:
            self.refuse(fault, self._taken_on, events)
        return end

    def _add(self, channel: Channel, data: bytes, begin: int, end: int) -> int:
        """Add `data[begin:end]` to the body that is arriving on the channel, and return the number of bytes.

        If this is more than half of `data`, it is not copied, and all of `data` stays in memory until the
        body is complete.
        """
        count = end - begin
        part: bytes | memoryview = data
        if count < len(data):
            part = memoryview(data)[begin:end] if count > len(data) // 2 else data[begin:end]
        body = channel.body
        if body is None:
            body = channel.body = ByteBuffer()
        body.add(part)
        channel.bytes_remaining -= count
        self._hold(count)
        return count

    def _end_frame(self, channel: Channel, events: list[Event]) -> None:
        body = channel.body
        if not channel.bytes_remaining and body is not None:
            self._partial -= (
                body.byte_count
            )  # `take_all` moves them out, so that the channel no longer holds them
            self._complete(channel, body.take_all(), events)

    def _complete(self, channel: Channel, body: bytes, events: list[Event]) -> None:
        index, method, properties = channel.index, channel.method, channel.properties
        assert properties is not None
        self._drop_content(channel)
        self._ready.add(channel.number)
        self._content(channel.number, index, method, properties, body, events)

    @abstractmethod
    def _content(
        self, number: int, index: int, method: bytes, properties: bytes, body: Body, events: list[Event]
    ) -> None:
        """Append the event for a message that has arrived completely.

        `index` is the method with which the message began (class-id << 16 | method-id), and `method` has its
        encoded arguments.
        """

    @property
    def begun_bytes(self) -> int:
        """Number of received bytes that belong to incomplete messages, or to an incomplete frame."""
        return self._partial + (0 if self._rest is None else self._rest.byte_count)

    def _is_too_much(self, byte_count: int) -> bool:
        """Return True if the incomplete messages, with `byte_count` more bytes, exceed the memory limit."""
        return self._partial + byte_count > CONTENTS_IN_PARTS * self._held_bytes_max + self.frame_max

    def _hold(self, byte_count: int) -> None:
        """Add `byte_count` to the size of the incomplete messages.

        Raises RemoteProtocolError 506 if the size over all channels exceeds the memory limit.
        """
        self._partial += byte_count
        if self._is_too_much(0):
            raise RemoteProtocolError("too many unfinished messages", reason=ReplyCode.RESOURCE_ERROR)

    def _drop_content(self, channel: Channel) -> None:
        self.body_bytes_remaining = 0
        self._partial -= channel.held_bytes
        channel.reset()

    def _unready(self, number: int) -> None:
        self._ready.discard(number)
        self._forget_lead(number)

    @abstractmethod
    def _forget_lead(self, number: int) -> None:
        """Discard the cached bytes of the last message on channel `number`, because its state has changed.

        If the next message began with the same bytes, it would be accepted without a check of the channel.
        """

    def _plain_at(self, data: bytes, at: int, end: int, method_index: int) -> Plain | None:
        """Return the positions of the frames of the message at `at`, if the fast path can decode the message.

        Return None if the message does not begin with the method `method_index`, has several body frames, or
        is too large, or if the bytes before its body are incomplete. The body of an empty message is located
        at the last byte of its header frame, where the end byte of a body frame would be.
        """
        if at + 11 > end:
            return None
        kind, number, method_size, index = METHOD_HEAD(data, at)
        header_at = at + method_size + 8
        if (
            index != method_index
            or kind != FRAME_METHOD
            or method_size > self._contents[method_index]
            or number not in self._ready
            or header_at + 22 > end
        ):
            return None
        kind, header_number, header_size, weight, size = CONTENT_HEAD(data, header_at)
        last = header_at + header_size + 7
        if (
            kind != FRAME_HEADER
            or header_number != number
            or weight != BASIC_WEIGHT
            or not CONTENT_HEADER_MIN <= header_size <= self._plain_max
            or last >= end
            or data[header_at - 1] != FRAME_END
            or data[last] != FRAME_END
        ):
            return None
        body_at = last
        if size:
            body_at = last + 8
            if body_at > end or BODY_HEAD(data, last + 1) != (FRAME_BODY, number, size):
                return None
        if body_at + size - at > self._whole_max:
            return None
        return number, header_at, data[header_at + CONTENT_HEAD_SIZE : last], size, body_at

    # --- methods

    @abstractmethod
    def _connection_method(self, method: m.Method, events: list[Event]) -> None:
        """Process a method on channel 0.

        Raises RemoteProtocolError if the state of the connection does not allow the method.
        """

    @abstractmethod
    def _open_method(
        self, number: int, channel: Channel | None, method: m.Method, events: list[Event]
    ) -> bool:
        """Process channel.open (server) or channel.open-ok (client) on channel `number`.

        Return False for any other method, and if the state of the channel does not allow the method.
        """

    def _channel_method(self, number: int, method: m.Method, events: list[Event]) -> None:
        """Process a method without content on channel `number`, which is not 0.

        Raises RemoteProtocolError if the state of the channel does not allow the method.
        """
        if method.index >> 16 == CONNECTION_CLASS:
            raise self._invalid(method)
        channel = self._channels.get(number)
        if self._open_method(number, channel, method, events):
            return
        if channel is None:
            text = "CHANNEL_ERROR - expected 'channel.open'"
            raise self._fault(text, ReplyCode.CHANNEL_ERROR, method.index)
        if channel.state is ChannelState.CLOSING:
            if isinstance(method, m.ChannelCloseOk):
                self._forget(channel)
            elif isinstance(method, m.ChannelClose):
                self._send(number, m.ChannelCloseOk())
            return
        if channel.index:
            raise channel.unexpected_frame_error()
        if type(method) not in self._legal[channel.state]:
            raise self._invalid(method)
        if isinstance(method, m.ChannelClose):
            self._send(number, m.ChannelCloseOk())
            self._forget(channel)
            ids = (method.class_id, method.method_id)
            events.append(ChannelClosed(number, method.reply_code, method.reply_text, *ids, by_peer=True))
        else:
            events.append(MethodReceived(number, method))

    def _forget(self, channel: Channel) -> None:
        channel.state = ChannelState.CLOSED
        self._channels.pop(channel.number, None)
        self._drop_content(channel)
        self._unready(channel.number)

    def _take_close(self, method: m.ConnectionClose, events: list[Event]) -> None:
        was_closing = self._state is State.CLOSING
        self._forget_all()
        self._send(0, m.ConnectionCloseOk())
        self._state = State.CLOSED
        self.closed_by_peer = True
        if not was_closing:
            ids = (method.class_id, method.method_id)
            events.append(Closed(method.reply_code, method.reply_text, *ids, by_peer=True))

    def _take_close_ok(self, method: m.ConnectionCloseOk, events: list[Event]) -> None:
        self._state = State.CLOSED

    def _forget_all(self) -> None:
        for channel in list(self._channels.values()):
            self._forget(channel)

    @staticmethod
    def _fault(text: str, code: ReplyCode, index: int) -> RemoteProtocolError:
        return RemoteProtocolError(text, reason=code, class_id=index >> 16, method_id=index & 0xFFFF)

    def _invalid(self, method: m.Method) -> RemoteProtocolError:
        return self._fault("COMMAND_INVALID - unimplemented method", ReplyCode.COMMAND_INVALID, method.index)

    # --- calls of the application

    def _send(self, number: int, method: m.Method) -> None:
        self.out.append(encode_method_frame(number, method))
        self.sent[method.name] += 1

    def _usable(self, number: int) -> bool:
        channel = self._channels.get(number)
        return channel is not None and channel.state is ChannelState.OPEN

    def send_method(self, channel: int, method: m.Method) -> None:
        """Queue a method without content.

        The method is dropped if the channel is closed, because the peer would discard it. Raises
        LocalProtocolError for a method with content, and on channel 0 before the connection is open.
        """
        if method.content:
            raise LocalProtocolError(f"{method.name} without content")
        if channel == 0 and self._state is not State.OPEN:
            raise LocalProtocolError(f"{method.name} before the connection is open")
        if channel == 0 or self._usable(channel):
            self._send(channel, method)

    def send_content(self, channel: int, method: m.Method, properties: bytes, body: bytes) -> None:
        """Queue a method with its message, such as basic.get-ok, basic.return or a single basic.publish.

        `properties` are the encoded property flags and property list. The message is dropped if the channel
        is closed. Raises OSError if the body cannot be read from disk.
        """
        if not method.content:
            raise LocalProtocolError(f"{method.name} has no content")
        if self._usable(channel):
            frames = encode_content_frames(channel, properties, body, self.frame_max)
            self._send(channel, method)
            self.large |= is_large(body)
            self.out += frames
            self.sent["header"] += 1
            self.sent["body"] += -(-len(body) // self.payload_max)

    def ack(self, channel: int, delivery_tag: int, multiple: bool = False) -> None:
        """Queue basic.ack: a server's confirm of a publish, or a client's acknowledgement of a delivery."""
        if channel in self._ready or self._usable(channel):
            self.out.append(
                SETTLE.pack(FRAME_METHOD, channel, SETTLE_SIZE, BASIC_ACK, delivery_tag, multiple, FRAME_END)
            )
            self.sent["basic.ack"] += 1

    def nack(self, channel: int, delivery_tag: int, multiple: bool = False, requeue: bool = False) -> None:
        """Queue basic.nack: a server's negative confirm of a publish, or a client's rejection of a delivery.

        `requeue` has a meaning for deliveries only.
        """
        if channel in self._ready or self._usable(channel):
            bits = multiple | requeue << 1
            self.out.append(
                SETTLE.pack(FRAME_METHOD, channel, SETTLE_SIZE, BASIC_NACK, delivery_tag, bits, FRAME_END)
            )
            self.sent["basic.nack"] += 1

    def close_channel(
        self,
        channel: int,
        code: int = ReplyCode.SUCCESS,
        text: str = "",
        class_id: int = 0,
        method_id: int = 0,
    ) -> None:
        """Queue channel.close.

        Frames that arrive on the channel are discarded until the peer's channel.close-ok.
        """
        found = self._channels.get(channel)
        if found is not None and found.state in (ChannelState.OPEN, ChannelState.OPENING):
            found.state = ChannelState.CLOSING
            self._drop_content(found)
            self._unready(channel)
            self._send(channel, m.ChannelClose(code, reply_text(text), class_id, method_id))

    def close(
        self, code: int = ReplyCode.SUCCESS, text: str = "", class_id: int = 0, method_id: int = 0
    ) -> None:
        """Queue connection.close.

        Frames that arrive are discarded until the peer's connection.close-ok; then `closed` is True.
        """
        if self.ending:
            return
        self._forget_all()
        if self._state is State.HEADER:
            self._state = State.CLOSED
            return
        self._send(0, m.ConnectionClose(code, reply_text(text), class_id, method_id))
        self._state = State.CLOSING
        self._closing_since = self._now

    def refuse(self, fault: RemoteProtocolError, channel: int, events: list[Event]) -> None:
        """Close the channel or the connection because of `fault`, as the specification requires.

        Queue the close method and append its event to `events`. Users of this class also call this method for
        faults that only they can detect, such as arguments that `decode_publish` cannot decode.
        """
        code, text, ids = fault.reason, str(fault), (fault.class_id, fault.method_id)
        if code in SOFT_CODES and self._usable(channel):
            self.close_channel(channel, code, text, *ids)
            events.append(ChannelClosed(channel, code, text, *ids, by_peer=False))
        elif self._state not in (State.CLOSING, State.CLOSED):
            if self._state in self._silent:
                self._state = State.CLOSED
            self.close(code, text, *ids)
            events.append(Closed(code, text, *ids, by_peer=False))

    def abandon(self) -> None:
        """Mark the connection as closed without sending anything, because the socket is closed."""
        self._forget_all()
        self._state = State.CLOSED

    # --- time

    def _agree(self, channel_max: int, frame_max: int, heartbeat: int) -> None:
        """Apply the negotiated limits: frame size in bytes, heartbeat in seconds."""
        self.channel_max = channel_max
        self.frame_max = frame_max
        self.heartbeat = heartbeat
        self._whole_max = min(self.payload_max, self._held_bytes_max)
        self._beats.agree(heartbeat, self._now)

    def deadline(self) -> float | None:
        """Return the time of the next call of `tick` and `timed_out`, in monotonic seconds; None if never."""
        if self._state is State.CLOSING:
            return self._closing_since + CLOSE_WAIT_SECS
        if not self.heartbeat or self._state is State.CLOSED:
            return None
        return min(self._beats.at, self._last_received + SILENT_INTERVALS * self.heartbeat)

    def tick(self, now: float) -> None:
        """Queue a heartbeat if nothing was written for half of the heartbeat interval.

        Any other output replaces a heartbeat (4.2.7). `now` is in monotonic seconds.
        """
        self._now = now
        if self.heartbeat and self._state is not State.CLOSED and self._beats.is_due(now) and not self.out:
            self.out.append(HEARTBEAT_FRAME)
            self.sent["heartbeat"] += 1

    def excuse(self, now: float) -> None:
        """Measure the peer's silence only from `now` on, because nothing was read before.

        `now` is in monotonic seconds.
        """
        self._last_received = now

    def timed_out(self, now: float) -> bool:
        """Return True if the peer was silent for two heartbeat intervals.

        Return True also if the peer has not responded to connection.close within CLOSE_WAIT_SECS. `now` is in
        monotonic seconds.
        """
        if self._state is State.CLOSING and now >= self._closing_since + CLOSE_WAIT_SECS:
            return True
        return bool(self.heartbeat) and now >= self._last_received + SILENT_INTERVALS * self.heartbeat

    @property
    def payload_max(self) -> int:
        """Maximum size of a frame's payload in bytes."""
        return self.frame_max - FRAME_OVERHEAD
