"""Common part of both ends of a connection: frames with their fragments, and how they are processed.

Bytes go in with the time, events come out, and output gathers in `out`. Tables say what may arrive in which
state (`states.py`, and one for the connection itself at each end). A fault of the peer never leaves
`receive_data` as an exception: it becomes the close that its scope requires, of a handle, a channel or the
connection, and an event.

Commands that arrive in large numbers are decoded by the loops of the two ends; `_runs` names them. They
accept only complete, plain commands and leave the rest to `_take_frame`, one at a time, which alone decides
what is an error. At most one frame with its fragment waits for its end, and a fragment that continues a
message does not wait at all; the fragment of a refused or discarded command is skipped. A server limits the
work of each call, since 64 KiB may be 8 192 commands: it counts steps (each costs about as much as a small
command), stops at STEPS_MAX, and is `unread` until the next call.

The response to a peer's CLOSE is not queued while its bytes are decoded, because earlier commands may still
be replied to. It follows with the next `data_to_send` after the due replies, or after 5 s in any case.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Final

from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.model.byte_buffer import ByteBuffer
from gateway.model.spooled_bodies import Body, Piece, join_pieces
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.codec import (
    BODY_SIZE,
    CLOSE_BYTES_MAX,
    HEAD_MAX,
    HEAD_MIN,
    decode_command,
    decode_frame,
    decode_head_properties,
    ends_with_close,
    find_head_end,
    frame_bytes,
    framing_error,
)
from gateway.protocols.amqpfast.events import Event, Fragment, Prepared, Ready
from gateway.protocols.amqpfast.lifetime import PING, PING_RESPOND, Lifetime
from gateway.protocols.amqpfast.spec import (
    FRAME_END,
    MESSAGE_BYTES_MAX,
    NEGOTIATION_PAUSE_SECS,
    PAUSED_BYTES_MAX,
    ReplyCode,
    Scope,
)
from gateway.protocols.amqpfast.states import (
    DEAF,
    RULES,
    Answer,
    ChannelState,
    Flowing,
    Fragmented,
    Handle,
    HandleState,
    Rule,
    ScopedFault,
    State,
    bits_of,
)
from gateway.protocols.amqpfast.tables import FIELD_BYTES_MIN, FIELDS_MAX

STEPS_MAX: Final = 128  # per call of a server: a few milliseconds, so that no flood delays the others
STEP_BYTES: Final = 32  # bytes of a command or a head per step, in addition to the step of the command
RUN_STEP_BYTES: Final = 1_024  # bytes per step that a run has consumed
PIECE_BYTES_MIN: Final = 16_384  # bytes that are passed on before their fragment is complete
LARGE_PIECE_BYTES: Final = 16_384  # bytes; shorter pieces are joined with their neighbours
Action = Callable[[Any, Any, list[Event]], None]


Whole = tuple[bytes, bytes, int, int]  # name, head, size of the body, position of the body


class Connection(Lifetime):
    """Base class of ServerConnection and ClientConnection: one end of an AMQP/Fast connection.

    `received` and `sent` count commands by type; FRAME_NAMES has the names of the types.
    """

    _side: ClassVar[int]  # direction of the commands that this end receives: TO_SERVER for a server
    _table: ClassVar[dict[State, dict[type[m.Command], Action]]]
    _paused: ClassVar[frozenset[State]] = frozenset()  # states in which the application has to respond first
    _bounded: bool = False  # each call does a limited number of steps

    def __init__(
        self,
        state: State,
        *,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        negotiation_pause: float = NEGOTIATION_PAUSE_SECS,
        properties_max: int = FIELDS_MAX,
        properties_bytes_max: int = HEAD_MAX,
    ) -> None:
        """Create a connection in `state`.

        The content header of a message may have `properties_max` headers and `properties_bytes_max` bytes.
        `negotiation_pause` is the time in seconds from a failed negotiation to the end of the connection.
        """
        super().__init__(state, negotiation_pause)
        self.message_bytes_max = message_bytes_max
        self.unread = False  # `receive_data(b"", now)` would return more, but only in another pass
        self._properties_max = properties_max
        self._properties_bytes_max = properties_bytes_max
        self._steps = 0
        self._rules = RULES[self._side]
        self._rest: ByteBuffer | None = None  # bytes behind what has been decoded
        self._needed = 0  # bytes that `_rest` needs before it can be decoded further
        self._last_bytes = b""  # the latest bytes of a peer whose frames are corrupt
        self._large: list[Piece] = []  # large pieces, and what precedes each; `out` follows them
        self._flow: Flowing | None = None  # the fragment whose bytes are being passed on
        self._skip = 0  # remaining bytes of a fragment that is skipped
        self._runs: dict[int, Callable[[bytes, int, int, list[Event]], int]] = {}

    # --- bytes

    @property
    def closed(self) -> bool:
        """True if the connection has ended: write the queued bytes, then close the socket."""
        return self._state is State.CLOSED

    @property
    def state(self) -> State:
        """State of the connection itself; channels and handles have their own states."""
        return self._state

    @property
    def channels(self) -> list[int]:
        """Numbers of the open channels."""
        return [number for number, one in self._channels.items() if one.state is ChannelState.OPEN]

    @property
    def handles(self) -> list[int]:
        """Numbers of the open handles."""
        return [number for number, one in self._handles.items() if one.state is HandleState.OPEN]

    def data_to_send(self) -> bytes:
        """Remove and return the queued bytes. Raises OSError if a body cannot be read from disk."""
        if self._large:
            return join_pieces(self.pieces_to_send())
        if self._leaving or self._state is State.LEFT:
            self._answer_closes()
        out = self.out
        if not out:
            return b""
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        if data not in (PING, PING_RESPOND):
            self._beats.has_sent = True
        return data

    @property
    def large(self) -> bool:
        """True if large parts of bodies are queued: `pieces_to_send` returns them without a copy."""
        return bool(self._large)

    def to_send(self) -> bytes | list[Piece]:
        """Remove and return the queued bytes; as a list of pieces if some of them should not be copied."""
        return self.pieces_to_send() if self.large else self.data_to_send()

    def pieces_to_send(self) -> list[Piece]:
        """Remove and return the queued bytes as a list of pieces.

        Large parts of bodies are neither copied nor read from disk.
        """
        pieces, self._large = self._large, []
        self._beats.has_sent |= bool(pieces)
        if data := self.data_to_send():
            pieces.append(data)
        return pieces

    def queue(self, data: Piece) -> None:
        """Queue a part of a body, to be sent after everything that is already queued."""
        if isinstance(data, bytes) and len(data) < LARGE_PIECE_BYTES:
            self.out.append(data)
        else:
            self._large += (b"".join(self.out), data)
            self.out.clear()

    def receive_data(self, data: bytes, now: float) -> list[Event]:
        """Decode the bytes `data`, and return their events in order. `now` is in monotonic seconds.

        After an Authenticate or Open event, further bytes are not decoded until the caller has responded to
        the event. Then call this method with b"" to have them decoded.
        """
        self._now = now
        self._steps = 0
        self.unread = False
        events: list[Event] = []
        if data:
            self._last_received = now
            self._ping_sent = False
        if self._state in DEAF:
            return events
        if self._state is State.BROKEN:
            self._look_for_close(data)
            return events
        if self._rest is not None:
            self._rest.add(data)
            if self._rest.byte_count < self._needed:
                return events
            data = self._rest.take_all()
            self._rest = None
        try:
            at = self._read(data, events)
        except RemoteProtocolError as fault:
            self._fail(fault, events)
            if self._state is State.CLOSING:
                self._state = State.BROKEN
                self._look_for_close(data)
            return events
        if self._state in DEAF:
            self.unread = False
        elif at < len(data):
            self._rest = ByteBuffer(data[at:])
            if self._rest.byte_count > PAUSED_BYTES_MAX and self._state in self._paused:
                self._rest = None
                self._fail(framing_error("too many bytes before the connection is open"), events)
        return events

    @property
    def begun_bytes(self) -> int:
        """Number of received bytes of a frame or fragment that has not arrived completely."""
        return 0 if self._rest is None else self._rest.byte_count

    def _look_for_close(self, data: bytes) -> None:
        """Close the connection if the bytes received so far end with the peer's CONNECTION CLOSE.

        Called after an invalid frame, when nothing else can be decoded any more. CLOSE is the peer's last
        command.
        """
        raw = self._last_bytes + data[-CLOSE_BYTES_MAX:]
        self._last_bytes = raw[-CLOSE_BYTES_MAX:]
        if ends_with_close(self._last_bytes):
            self._state = State.CLOSED

    def _read(self, data: bytes, events: list[Event]) -> int:
        """Decode complete frames and fragments until the limit of work for one call is reached.

        Return the position behind the last decoded one. Set `_needed` to the number of bytes that must be
        there before the next one can be decoded.
        """
        self._needed = 0
        at = self._read_initiation(data, events)
        end = len(data)
        runs = self._runs
        while at < end and self._state not in self._paused and self._state not in DEAF:
            if self._steps >= STEPS_MAX and self._bounded:
                self.unread = True
                break
            if self._skip:
                passed = min(self._skip, end - at)
                self._skip -= passed
                at += passed
                continue
            flow = self._flow
            if flow is not None:
                passed = self._report_fragment(flow, data, at, end, events)
                if not passed and self._flow is flow:
                    break
                at += passed
                continue
            run = runs.get(data[at + 2]) if at + 2 < end else None
            if run is not None:
                after = run(data, at, end, events)
                if after != at:
                    self._steps += (after - at) // RUN_STEP_BYTES
                    at = after
                    continue
            frame = decode_frame(data, at, self.frame_max)
            if frame is None:
                self._needed = frame_bytes(data, at)
                break
            begin, stop, after = frame
            self._steps += 1 + (stop - begin) // STEP_BYTES
            frame_end = self._take_frame(data, begin, stop, after, events)
            if frame_end < 0:
                self._needed = after - at - frame_end
                break
            at = frame_end
        return at

    def _read_initiation(self, data: bytes, events: list[Event]) -> int:
        """Decode protocol id and version, if this end expects them now. Return the position behind them."""
        return 0

    # --- commands, one by one

    def _take_frame(self, data: bytes, begin: int, stop: int, after: int, events: list[Event]) -> int:
        """Process a command, with the fragment that follows it. Return the position behind both.

        `begin`, `stop` and `after` are the result of `decode_frame`. If the fragment is incomplete, return
        its size in bytes as a negative number instead.
        """
        kind = m.COMMANDS.get(data[begin])
        try:
            command = decode_command(data[begin:stop])
        except RemoteProtocolError as fault:
            if kind is not None and kind.fragment:
                raise  # the end of its fragment cannot be known
            self._fail(fault, events)
            return after
        size = 0
        if command.fragment and not getattr(command, "out_of_band", False):
            size = command.fragment_size  # type: ignore[attr-defined]
        try:
            if command.fragment and size > self.frame_max:
                raise framing_error(f"a fragment of {size} bytes exceeds frame-max {self.frame_max}")
            rule = self._rule(command)
            if rule is not None and rule.answer is Answer.TAKE and command.fragment:
                handle = self._handles[command.handle_id]  # type: ignore[attr-defined]
                self._admit(handle, command)  # type: ignore[arg-type]
                whole = after + size <= len(data)
                if not whole or size >= PIECE_BYTES_MIN:
                    self._flow = handle.begin_flow(command)  # type: ignore[arg-type]
                    if self._flow is not None:
                        self.received[command.type] += 1
                        return after
                if not whole:
                    return -size
                self.received[command.type] += 1
                after, fragment, size = after + size, data[after : after + size], 0
                self._take_fragment(handle, command, fragment, events)  # type: ignore[arg-type]
            else:
                self.received[command.type] += 1
                self._take(command, rule, events)
        except RemoteProtocolError as fault:
            self.refuse(fault, events)
        self._skip = size
        return after

    def _rule(self, command: m.Command) -> Rule | None:
        """Return the row of RULES for a command of a channel or handle in its present state.

        Return None for a command of the connection itself, and while the connection is closing. Raises
        RemoteProtocolError 503 for a command of a channel or handle if the connection is not active.
        """
        if self._state is State.CLOSING:
            return None
        if isinstance(command, m.HandleCommand):
            handle = self._handles.get(command.handle_id)
            rule = self._rules[HandleState.NONE if handle is None else handle.state][type(command)]
        elif isinstance(command, m.ChannelCommand):
            rule = self._rules[self._channel_state(command.channel_id)][type(command)]
        else:
            return None
        if self._state is not State.ACTIVE:
            raise self._invalid(command)
        return rule

    def _channel_state(self, number: int) -> ChannelState:
        channel = self._channels.get(number)
        if channel is not None:
            return channel.state
        return ChannelState.GONE if number in self._closed_channels else ChannelState.NONE

    def _take(self, command: m.Command, rule: Rule | None, events: list[Event]) -> None:
        """Process, refuse or discard a command without a fragment, according to `rule`.

        `rule` is None for a command of the connection itself.
        """
        if rule is None:
            if self._state is State.CLOSING:
                self._take_while_closing(command)
            else:
                action = self._table[self._state].get(type(command))
                if action is None:
                    raise self._invalid(command)
                action(self, command, events)
        elif rule.answer is Answer.TAKE:
            if isinstance(command, m.HandleCommand):
                self._handle_command(command, events)
            else:
                assert isinstance(command, m.ChannelCommand)
                self._channel_command(command, events)
        elif rule.answer is Answer.REFUSE:
            number = getattr(command, "channel_id" if rule.scope is Scope.CHANNEL else "handle_id", 0)
            raise ScopedFault(
                f"{command.name} is not valid here ({rule.clause})", rule.code, rule.scope, number
            )
        elif isinstance(command, m.ChannelCommand):
            if rule.answer is Answer.AGAIN:
                self._close_again(self._channels[command.channel_id])
        elif isinstance(command, m.HandleCommand):
            channel = self._handles[command.handle_id].channel
            if channel.state is ChannelState.CLOSING:
                self._close_again(channel)

    @abstractmethod
    def _channel_command(self, command: m.ChannelCommand, events: list[Event]) -> None:
        """Process a command on a channel that the channel's state allows."""

    @abstractmethod
    def _handle_command(self, command: m.HandleCommand, events: list[Event]) -> None:
        """Process a command on a handle that the handle's state allows."""

    @abstractmethod
    def _admit(self, handle: Handle, command: Fragmented) -> None:
        """Raise RemoteProtocolError if a command with a fragment is not allowed on the handle now.

        Called before the fragment is decoded.
        """

    @abstractmethod
    def _append_whole(
        self,
        handle: Handle,
        command: m.HandleSend | m.HandleNotify,
        head: bytes,
        body: Body,
        events: list[Event],
    ) -> None:
        """Append the event for a message that has arrived in a single fragment.

        `head` is its encoded content header.
        """

    def _take_fragment(self, handle: Handle, command: Fragmented, data: bytes, events: list[Event]) -> None:
        self._forget_lead()
        if isinstance(command, m.HandlePrepare):
            found = handle.take_prepare(data, self.message_bytes_max)
            self._check_head(handle, found[0])
            events.append(Prepared(handle.number, *found, command.content_hash))
        else:
            self._take_part(handle, command, data, events)

    def _take_part(
        self, handle: Handle, command: m.HandleSend | m.HandleNotify, data: bytes, events: list[Event]
    ) -> None:
        """Process a SEND or NOTIFY whose fragment, `data`, has arrived completely. Append its event."""
        found = handle.take_fragment(command, data, self.message_bytes_max)
        first, head, body_size, offset, body = found
        self._check_head(handle, head)
        last = not command.partial
        if last or command.streaming:
            self._note_due_reply(handle, getattr(command, "tag", 0))
        if first and last and head:
            self._append_whole(handle, command, head, body, events)
            return
        events.append(
            Fragment(
                handle.number,
                getattr(command, "tag", 0),
                getattr(command, "message_number", 0),
                bits_of(command, last=last),
                first,
                last,
                head,
                body_size,
                offset,
                command.fragment_size if command.out_of_band else len(body),
                body,
                command.dest_name.encode(),
            )
        )

    def _whole_at(
        self, data: bytes, at: int, end: int, size: int, fields: int, fragment_size: int
    ) -> Whole | None:
        """Return name, content header, body size and body position of the message at `at`, for the fast path.

        The message's command has `size` bytes, of which the first `fields` are not the name. Its only
        fragment has `fragment_size` bytes. Return None if the message is incomplete or has further fragments,
        or if the fast path cannot decode it.
        """
        begin = at + size + 2
        stop = begin + fragment_size
        if (
            size > self.frame_max
            or not HEAD_MIN <= fragment_size <= self.frame_max
            or stop > end
            or data[begin - 1] != FRAME_END
        ):
            return None
        name = data[at + fields + 1 : begin - 1]
        try:
            name.decode()
            body_at = find_head_end(data, begin, stop)
        except (UnicodeDecodeError, RemoteProtocolError):
            return None
        body_size = BODY_SIZE.unpack_from(data, begin)[0]
        if body_at + body_size != stop or body_size > self.message_bytes_max or 0 in name:
            return None
        return name, data[begin + 4 : body_at], body_size, body_at

    def _check_head(self, handle: Handle, head: bytes) -> None:
        """Raise ScopedFault 542 if a content header has too many bytes or too many headers."""
        size, most = len(head), self._properties_bytes_max
        self._steps += size // STEP_BYTES
        text = f"a head of {size} bytes exceeds {most}" if size > most else ""
        if not text and size > self._properties_max * FIELD_BYTES_MIN:
            try:
                decode_head_properties(head, self._properties_max)
            except RemoteProtocolError as fault:
                text = str(fault)
        if text:
            raise ScopedFault(text, ReplyCode.MESSAGE_CONTENTS_INVALID, Scope.HANDLE, handle.number)

    def _report_fragment(self, flow: Flowing, data: bytes, at: int, end: int, events: list[Event]) -> int:
        """Append an event for the bytes of a fragment that have arrived so far, and return their number.

        Return 0 if they are too few for an event, or if the message is not accepted any more.
        """
        handle, command, incoming = flow.handle, flow.command, flow.incoming
        if handle.channel.incoming is not incoming or self._state is not State.ACTIVE:
            self._flow, self._skip = None, flow.missing_bytes  # the message is no longer accepted
            return 0
        passed = min(flow.missing_bytes, end - at)
        if passed < flow.missing_bytes and end < PIECE_BYTES_MIN:
            self._needed = min(flow.missing_bytes, PIECE_BYTES_MIN)
            return 0
        offset = incoming.got
        incoming.got += passed
        flow.missing_bytes -= passed
        last = not command.partial and not flow.missing_bytes
        tag = 0
        if not flow.missing_bytes:
            self._flow = None
            if last:
                handle.channel.incoming = None
            if last or command.streaming:
                tag = getattr(command, "tag", 0)
                self._note_due_reply(handle, tag)
        events.append(
            Fragment(
                handle.number,
                tag,
                getattr(command, "message_number", 0),
                bits_of(command, last=last),
                False,
                last,
                b"",
                max(incoming.body_size, 0),
                offset,
                passed,
                memoryview(data)[at : at + passed] if passed >= PIECE_BYTES_MIN else data[at : at + passed],
                command.dest_name.encode(),
            )
        )
        return passed

    def _note_due_reply(self, handle: Handle, tag: int) -> None:
        """Record that a reply to the command with this tag is due, unless this end has closed the handle."""
        if tag and handle.state is HandleState.OPEN:
            handle.channel.reply_keys.append(handle.number << 16 | tag)

    def _take_ready(self, handle: Handle, command: m.HandleReady, events: list[Event]) -> None:
        if handle.announced is None:
            raise self._invalid(command)
        if command.message_size > handle.announced:
            text = f"message-size {command.message_size} exceeds the message"
            raise ScopedFault(text, ReplyCode.BAD_FIELD_VALUE, Scope.HANDLE, handle.number)
        handle.announced = None
        events.append(Ready(handle.number, command.message_size))

    @staticmethod
    def _invalid(command: m.Command) -> RemoteProtocolError:
        return RemoteProtocolError(f"{command.name} is not valid here", reason=ReplyCode.COMMAND_NOT_VALID)

    # --- calls of the application

    def _usable(self, number: int) -> Handle | None:
        """Return the handle with this number if this end may send commands on it, otherwise None.

        The handle must be open, or closed by the peer but not yet by this end.
        """
        handle = self._handles.get(number)
        if handle is None or handle.state not in (HandleState.OPEN, HandleState.LEFT):
            return None
        return handle

    def ready(self, handle: int, message_size: int) -> None:
        """Queue READY, which tells the peer that this end has the first `message_size` bytes of the body.

        READY is the response to PREPARE; the peer sends the body from the next byte on. Raises
        LocalProtocolError if no PREPARE waits for a response, or if the body is smaller.
        """
        found = self._usable(handle)
        if found is None:
            return
        if found.prepared is None or found.prepared[2] is not None:
            raise LocalProtocolError("READY without PREPARE")
        head, body_size, _ = found.prepared
        if message_size > body_size:
            raise LocalProtocolError("READY exceeds the prepared message")
        found.prepared = (head, body_size, message_size)
        self._forget_lead()
        self._send(m.HandleReady(handle, message_size), found.channel.out)

    def prepare(
        self, handle: int, head: bytes, body_size: int, data: bytes = b"", content_hash: bytes = b""
    ) -> None:
        """Queue PREPARE, which announces a large message and carries the first bytes of its body (3.5.13).

        `head` is the message's content header, and `data` are these first bytes. The event Ready reports the
        peer's response. Raises LocalProtocolError if the channel is not restartable, a response is still due,
        or the fragment is too large.
        """
        found = self._usable(handle)
        if found is None:
            return
        if not found.channel.restartable or found.announced is not None:
            raise LocalProtocolError("PREPARE is not valid now")
        fragment = body_size.to_bytes(4, "big") + head + data
        if len(fragment) > self.frame_max:
            raise LocalProtocolError(f"a fragment of {len(fragment)} bytes exceeds frame-max")
        found.announced = body_size
        self._send(m.HandlePrepare(handle, len(fragment), content_hash), found.channel.out)
        found.channel.out.append(fragment)
