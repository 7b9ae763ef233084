"""What both sides of a connection have in common: frames with their fragments, and what is done with them.

Octets go in with the time, events come out, and what has to be written gathers in `out`. What may arrive in
which state is in tables (`states.py`, and one for the connection itself on each side). A fault of the peer
never leaves `receive_data` as an exception; it becomes the close that its scope asks for, of a handle, a
channel or the connection, and an event.

Commands that come in number are taken by the loops of the two sides; `_runs` says which. They take only what
is complete and plainly right, and leave the rest to `_take_frame`, one at a time, which is the authority on
what is an error. Never more than one frame with its fragment waits here for its end, and of a fragment that
continues a message nothing does; one whose command was refused or discarded is passed over.

A server does only so much at each call, for 64 KiB may be 8 192 commands: it counts steps, each of which
costs about what a small command does, stops at STEPS_MAX, and is `unread` until it is called again.

The answer to a peer's CLOSE of a channel, a handle or the connection is not queued while its octets are read,
for what came before it may still be answered: it follows with the next `data_to_send` by which the replies
that we owe have been given, after 5 s in any case.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Final

from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.model.gathered import Gathered
from gateway.model.spooled import Body, Piece, joined
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.codec import (
    BODY_SIZE,
    CLOSE_OCTETS_MAX,
    HEAD_MAX,
    HEAD_MIN,
    decode_command,
    decode_frame,
    decode_head_properties,
    ends_with_close,
    find_head_end,
    frame_octets,
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
from gateway.protocols.amqpfast.tables import FIELD_OCTETS_MIN, FIELDS_MAX

STEPS_MAX: Final = 128  # of a server at each call: a few milliseconds, so that no flood holds up the others
STEP_OCTETS: Final = 32  # of a command or a head, beside the step for itself
RUN_STEP_OCTETS: Final = 1_024  # of what a run has taken
PIECE_OCTETS_MIN: Final = 16_384  # of what is passed on before its fragment is whole
LARGE_PIECE_OCTETS: Final = 16_384  # shorter ones are joined with what is around them
Action = Callable[[Any, Any, list[Event]], None]


Whole = tuple[bytes, bytes, int, int]  # name, head, size of the body, where that begins


class Connection(Lifetime):
    """One side of a connection; see ServerConnection and ClientConnection.

    `received` and `sent` count commands by type; FRAME_NAMES has their names.
    """

    _side: ClassVar[int]  # TO_SERVER for a server: the direction of what it hears
    _table: ClassVar[dict[State, dict[type[m.Command], Action]]]
    _paused: ClassVar[frozenset[State]] = frozenset()  # states in which the application has to speak first
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
        """The head of a message may have `properties_max` headers and `properties_bytes_max` octets."""
        super().__init__(state, negotiation_pause)
        self.message_bytes_max = message_bytes_max
        self.unread = False  # `receive_data` with b"" would tell more, but that is for another turn
        self._properties_max = properties_max
        self._properties_bytes_max = properties_bytes_max
        self._steps = 0
        self._rules = RULES[self._side]
        self._rest: Gathered | None = None  # behind what has been read
        self._needed = 0  # octets that `_rest` needs before it says more
        self._last_octets = b""  # of what a peer says whose frames cannot be read
        self._large: list[Piece] = []  # of bodies, and what goes before each; `out` is behind them
        self._flow: Flowing | None = None  # the fragment whose octets are being passed on
        self._skip = 0  # octets of a fragment that nobody wants, still to come
        self._runs: dict[int, Callable[[bytes, int, int, list[Event]], int]] = {}

    # --- octets

    @property
    def closed(self) -> bool:
        """Nothing more will be said or heard: write what is queued, then close the socket."""
        return self._state is State.CLOSED

    @property
    def state(self) -> State:
        """The state of the connection itself."""
        return self._state

    @property
    def channels(self) -> list[int]:
        """The channels that can be used."""
        return [number for number, one in self._channels.items() if one.state is ChannelState.OPEN]

    @property
    def handles(self) -> list[int]:
        """The handles that can be used."""
        return [number for number, one in self._handles.items() if one.state is HandleState.OPEN]

    def data_to_send(self) -> bytes:
        """All that has to be written, once. Raises OSError when some of it is on disk and cannot be read."""
        if self._large:
            return joined(self.pieces_to_send())
        if self._leaving or self._state is State.LEFT:
            self._answer_closes()
        out = self.out
        if not out:
            return b""
        octets = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        if octets not in (PING, PING_RESPOND):
            self._beats.spoke = True
        return octets

    @property
    def large(self) -> bool:
        """There are large parts of bodies to write: ask for pieces."""
        return bool(self._large)

    def to_send(self) -> bytes | list[Piece]:
        """The same, in pieces if some of it is large."""
        return self.pieces_to_send() if self.large else self.data_to_send()

    def pieces_to_send(self) -> list[Piece]:
        """The same, with large parts of bodies as they were given to a Transfer."""
        pieces, self._large = self._large, []
        self._beats.spoke |= bool(pieces)
        if octets := self.data_to_send():
            pieces.append(octets)
        return pieces

    def queue(self, octets: Piece) -> None:
        """Part of a body, behind what is queued already."""
        if isinstance(octets, bytes) and len(octets) < LARGE_PIECE_OCTETS:
            self.out.append(octets)
        else:
            self._large += (b"".join(self.out), octets)
            self.out.clear()

    def receive_data(self, data: bytes, now: float) -> list[Event]:
        """What the octets say, in order. `now` is monotonic seconds.

        While the application owes an answer (Authenticate, Open), octets wait; after giving it, call this
        with b"" to have them read.
        """
        self._now = now
        self._steps = 0
        self.unread = False
        events: list[Event] = []
        if data:
            self._heard = now
            self._asked = False
        if self._state in DEAF:
            return events
        if self._state is State.BROKEN:
            self._look_for_close(data)
            return events
        if self._rest is not None:
            self._rest.add(data)
            if self._rest.octets < self._needed:
                return events
            data = self._rest.joined()
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
            self._rest = Gathered(data[at:])
            if self._rest.octets > PAUSED_BYTES_MAX and self._state in self._paused:
                self._rest = None
                self._fail(framing_error("too many octets before the connection is open"), events)
        return events

    @property
    def begun(self) -> int:
        """Octets of what has not come whole."""
        return 0 if self._rest is None else self._rest.octets

    def _look_for_close(self, data: bytes) -> None:
        """Frames are broken, so nothing of what follows can be read but the peer's CLOSE: it is the last that
        a peer says."""
        octets = self._last_octets + data[-CLOSE_OCTETS_MAX:]
        self._last_octets = octets[-CLOSE_OCTETS_MAX:]
        if ends_with_close(self._last_octets):
            self._state = State.CLOSED

    def _read(self, data: bytes, events: list[Event]) -> int:
        """Read all that is complete; returns where the incomplete begins, which needs `_needed` octets."""
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
                passed = self._pass_on(flow, data, at, end, events)
                if not passed and self._flow is flow:
                    break
                at += passed
                continue
            run = runs.get(data[at + 2]) if at + 2 < end else None
            if run is not None:
                after = run(data, at, end, events)
                if after != at:
                    self._steps += (after - at) // RUN_STEP_OCTETS
                    at = after
                    continue
            frame = decode_frame(data, at, self.frame_max)
            if frame is None:
                self._needed = frame_octets(data, at)
                break
            begin, stop, after = frame
            self._steps += 1 + (stop - begin) // STEP_OCTETS
            taken = self._take_frame(data, begin, stop, after, events)
            if taken < 0:
                self._needed = after - at - taken
                break
            at = taken
        return at

    def _read_initiation(self, data: bytes, events: list[Event]) -> int:
        """Read the protocol id and version, if this is their place; returns where frames begin."""
        return 0

    # --- commands, one by one

    def _take_frame(self, data: bytes, begin: int, stop: int, after: int, events: list[Event]) -> int:
        """Take a command with its fragment; returns what follows, or how many octets of the fragment are due,
        negated, when it is not whole."""
        kind = m.COMMANDS.get(data[begin])
        try:
            command = decode_command(data[begin:stop])
        except RemoteProtocolError as fault:
            if kind is not None and kind.fragment:
                raise  # where its fragment ends will never be known
            self._fail(fault, events)
            return after
        size = 0
        if command.fragment and not getattr(command, "out_of_band", False):
            size = command.fragment_size  # type: ignore[attr-defined]
        try:
            if command.fragment and size > self.frame_max:
                raise framing_error(f"a fragment of {size} octets exceeds frame-max {self.frame_max}")
            rule = self._rule(command)
            if rule is not None and rule.answer is Answer.TAKE and command.fragment:
                handle = self._handles[command.handle_id]  # type: ignore[attr-defined]
                self._admit(handle, command)  # type: ignore[arg-type]
                whole = after + size <= len(data)
                if not whole or size >= PIECE_OCTETS_MIN:
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
        """The rule for a command of a channel or handle; None for one of the connection itself.

        Raises RemoteProtocolError 503 unless the connection is active.
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
        return ChannelState.GONE if number in self._gone else ChannelState.NONE

    def _take(self, command: m.Command, rule: Rule | None, events: list[Event]) -> None:
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
        """Take a command of a channel that its state allows."""

    @abstractmethod
    def _handle_command(self, command: m.HandleCommand, events: list[Event]) -> None:
        """Take a command of a handle that its state allows."""

    @abstractmethod
    def _admit(self, handle: Handle, command: Fragmented) -> None:
        """Raise the fault of a command with a fragment that may not come now."""

    @abstractmethod
    def _took_whole(
        self,
        handle: Handle,
        command: m.HandleSend | m.HandleNotify,
        head: bytes,
        body: Body,
        events: list[Event],
    ) -> None:
        """Report a message that came in one fragment."""

    def _take_fragment(self, handle: Handle, command: Fragmented, octets: bytes, events: list[Event]) -> None:
        self._forget_lead()
        if isinstance(command, m.HandlePrepare):
            found = handle.take_prepare(octets, self.message_bytes_max)
            self._check_head(handle, found[0])
            events.append(Prepared(handle.number, *found, command.content_hash))
        else:
            self._take_part(handle, command, octets, events)

    def _take_part(
        self, handle: Handle, command: m.HandleSend | m.HandleNotify, octets: bytes, events: list[Event]
    ) -> None:
        found = handle.take_fragment(command, octets, self.message_bytes_max)
        first, head, body_size, offset, body = found
        self._check_head(handle, head)
        last = not command.partial
        if last or command.streaming:
            self._owe(handle, getattr(command, "tag", 0))
        if first and last and head:
            self._took_whole(handle, command, head, body, events)
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
        """How a message lies behind the command at `at`, which has `size` octets, `fields` of them before the
        name it ends with: in one fragment of `fragment_size`. None: it is not plainly right, or not here.
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
        """Raise the fault of a head that holds more than we take."""
        size, most = len(head), self._properties_bytes_max
        self._steps += size // STEP_OCTETS
        text = f"a head of {size} octets exceeds {most}" if size > most else ""
        if not text and size > self._properties_max * FIELD_OCTETS_MIN:
            try:
                decode_head_properties(head, self._properties_max)
            except RemoteProtocolError as fault:
                text = str(fault)
        if text:
            raise ScopedFault(text, ReplyCode.MESSAGE_CONTENTS_INVALID, Scope.HANDLE, handle.number)

    def _pass_on(self, flow: Flowing, data: bytes, at: int, end: int, events: list[Event]) -> int:
        """Report what has come of a fragment; returns how many octets that were.

        Of what comes in drops a piece is gathered first.
        """
        handle, command, incoming = flow.handle, flow.command, flow.incoming
        if handle.channel.incoming is not incoming or self._state is not State.ACTIVE:
            self._flow, self._skip = None, flow.left  # nobody wants it any more
            return 0
        passed = min(flow.left, end - at)
        if passed < flow.left and end < PIECE_OCTETS_MIN:
            self._needed = min(flow.left, PIECE_OCTETS_MIN)
            return 0
        offset = incoming.got
        incoming.got += passed
        flow.left -= passed
        last = not command.partial and not flow.left
        tag = 0
        if not flow.left:
            self._flow = None
            if last:
                handle.channel.incoming = None
            if last or command.streaming:
                tag = getattr(command, "tag", 0)
                self._owe(handle, tag)
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
                memoryview(data)[at : at + passed] if passed >= PIECE_OCTETS_MIN else data[at : at + passed],
                command.dest_name.encode(),
            )
        )
        return passed

    def _owe(self, handle: Handle, tag: int) -> None:
        """A reply is owed to a command of a handle that we have not closed."""
        if tag and handle.state is HandleState.OPEN:
            handle.channel.owed.append(handle.number << 16 | tag)

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

    # --- what the application says

    def _usable(self, number: int) -> Handle | None:
        """The handle, if it may be spoken on: it is open, or the peer waits for the answer to its close."""
        handle = self._handles.get(number)
        if handle is None or handle.state not in (HandleState.OPEN, HandleState.LEFT):
            return None
        return handle

    def ready(self, handle: int, message_size: int) -> None:
        """The answer to Prepared: so much of the body is here, go on behind it. Raises LocalProtocolError."""
        found = self._usable(handle)
        if found is None:
            return
        if found.prepared is None or found.prepared[2] is not None:
            raise LocalProtocolError("READY answers a PREPARE")
        head, body_size, _ = found.prepared
        if message_size > body_size:
            raise LocalProtocolError("READY for more than there is")
        found.prepared = (head, body_size, message_size)
        self._forget_lead()
        self._send(m.HandleReady(handle, message_size), found.channel.out)

    def prepare(
        self, handle: int, head: bytes, body_size: int, octets: bytes = b"", content_hash: bytes = b""
    ) -> None:
        """Announce a large message, with the first `octets` of its body; Ready is the answer (3.5.13).

        Raises LocalProtocolError when the channel is not restartable or an answer is still due.
        """
        found = self._usable(handle)
        if found is None:
            return
        if not found.channel.restartable or found.announced is not None:
            raise LocalProtocolError("PREPARE is not valid now")
        fragment = body_size.to_bytes(4, "big") + head + octets
        if len(fragment) > self.frame_max:
            raise LocalProtocolError(f"a fragment of {len(fragment)} octets exceeds frame-max")
        found.announced = body_size
        self._send(m.HandlePrepare(handle, len(fragment), content_hash), found.channel.out)
        found.channel.out.append(fragment)
