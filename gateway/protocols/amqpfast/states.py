"""States of connection, channel and handle, and the commands that may arrive in each.

RULES are complete: for each end, each command of a channel or handle and each state there is one row, with
the clause that it comes from. The commands that each end expects for the connection itself are in its own
table, in `server.py` and `client.py`; there a missing row is the error. `Channel` and `Handle` also hold the
replies that are due and the message that is being received in fragments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum, auto
from typing import Final, NamedTuple

from gateway.errors import RemoteProtocolError
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.codec import BODY_SIZE, find_head_end
from gateway.protocols.amqpfast.spec import (
    DELIVERED,
    NOTIFY_STREAMING,
    OUT_OF_BAND,
    PARTIAL,
    RECOVERY,
    REDELIVERED,
    ReplyCode,
    Scope,
    Service,
)

STREAMING: Final = NOTIFY_STREAMING  # as the mode of a message in either direction
Fragmented = m.HandleSend | m.HandleNotify | m.HandlePrepare


class State(Enum):
    """State of a connection."""

    INITIATION = auto()  # server: 80 01 is expected
    AUTHENTICATION = auto()  # server: RESPONSE is expected; client: CHALLENGE or TUNE
    AUTHENTICATING = auto()  # the application decides
    TUNING = auto()  # server: TUNE is expected
    TUNED = auto()  # server: OPEN is expected
    OPENING = auto()  # server: the application decides; client: REPLY is expected
    ACTIVE = auto()
    CLOSING = auto()  # we sent CLOSE, and discard everything until the peer's CLOSE
    BROKEN = auto()  # as CLOSING, but frame boundaries are lost: the peer's CLOSE must be its last bytes
    LEFT = auto()  # the peer sent CLOSE; our response waits for the replies that are due
    FAILED = auto()  # the negotiation failed: input is ignored until the pause is over
    ENDING = auto()  # our last command is sent: input is ignored until the peer ends the stream
    CLOSED = auto()


DEAF: Final = frozenset({State.LEFT, State.FAILED, State.ENDING, State.CLOSED})


class ChannelState(Enum):
    """State of a channel."""

    NONE = auto()
    OPEN = auto()
    CLOSING = auto()  # we sent CLOSE, and discard everything until the peer's CLOSE
    LEFT = auto()  # the peer sent CLOSE; our response waits for the replies that are due
    GONE = auto()  # it was open once: a second close may still arrive


class HandleState(Enum):
    """State of a handle."""

    NONE = auto()
    OPEN = auto()
    LEAVING = auto()  # we sent CLOSE 200, and continue processing until the peer's CLOSE (3.5.16)
    CLOSING = auto()  # we sent CLOSE for a fault, or its channel did: everything is discarded
    LEFT = auto()  # the peer sent CLOSE; our response waits for the replies that are due


class ScopedFault(RemoteProtocolError):
    """Fault of the peer for which only one channel or handle is closed: `number` is its number."""

    def __init__(self, text: str, reason: ReplyCode, scope: Scope, number: int) -> None:
        super().__init__(text, reason=reason)
        self.scope = scope
        self.number = number


# --- rules


class Answer(Enum):
    """Treatment of a command that arrives: process it, discard it, or refuse it."""

    TAKE = auto()
    DISCARD = auto()
    AGAIN = auto()  # discard, and send CLOSE again
    REFUSE = auto()


class Rule(NamedTuple):
    """Rule for a command that arrives in one state: `answer` is its treatment.

    `clause` is the clause of the specification. A refused command closes what `scope` names, with the reply
    code `code`.
    """

    answer: Answer
    clause: str
    scope: Scope = Scope.CONNECTION
    code: ReplyCode = ReplyCode.SUCCESS


def _refuse(clause: str, code: ReplyCode, scope: Scope = Scope.CONNECTION) -> Rule:
    return Rule(Answer.REFUSE, clause, scope, code)


CHANNEL_COMMANDS: Final = frozenset(kind for kind in m.COMMANDS.values() if 20 <= kind.type < 30)
HANDLE_COMMANDS: Final = frozenset(kind for kind in m.COMMANDS.values() if kind.type >= 30)
Rules = dict[ChannelState | HandleState, dict[type[m.Command], Rule]]


def _rules(direction: int) -> Rules:
    """Return the rules for the commands that one end receives, by state and command.

    `direction` is TO_SERVER or TO_CLIENT.
    """
    found: Rules = {}
    for states, commands, clause, rows in (
        (ChannelState, CHANNEL_COMMANDS, "3.3.9", _channel_rows()),
        (HandleState, HANDLE_COMMANDS, "3.5.17", _handle_rows()),
    ):
        never = _refuse(clause, ReplyCode.COMMAND_NOT_VALID)
        for state, default, exceptions in rows:
            found[state] = {kind: exceptions.get(kind, default) for kind in commands}
            found[state] |= {kind: never for kind in commands if not kind.direction & direction}
        assert set(states) <= set(found)
    return found


Row = tuple[ChannelState | HandleState, Rule, dict[type[m.Command], Rule]]


def _channel_rows() -> Iterator[Row]:
    not_open = _refuse("3.3.10", ReplyCode.CHANNEL_NOT_READY)
    take, discard = Rule(Answer.TAKE, "3.3.9"), Rule(Answer.DISCARD, "3.3.7")
    again = Rule(Answer.AGAIN, "3.3.7")
    opened = _refuse("3.3.9", ReplyCode.COMMAND_NOT_VALID, Scope.CHANNEL)
    yield ChannelState.NONE, not_open, {m.ChannelOpen: take}
    yield ChannelState.OPEN, take, {m.ChannelOpen: opened}
    yield ChannelState.CLOSING, again, {m.ChannelClose: Rule(Answer.TAKE, "3.3.7")}
    yield ChannelState.LEFT, not_open, {m.ChannelOpen: take, m.ChannelClose: discard}
    yield ChannelState.GONE, not_open, {m.ChannelOpen: take, m.ChannelClose: discard}


def _handle_rows() -> Iterator[Row]:
    not_open = _refuse("3.5.17", ReplyCode.HANDLE_NOT_READY)
    take, discard = Rule(Answer.TAKE, "3.5.17"), Rule(Answer.DISCARD, "3.5.16")
    opened = _refuse("3.5.17", ReplyCode.COMMAND_NOT_VALID, Scope.HANDLE)
    yield HandleState.NONE, not_open, {m.HandleOpen: take}
    yield HandleState.OPEN, take, {m.HandleOpen: opened}
    yield HandleState.LEAVING, Rule(Answer.TAKE, "3.5.16"), {m.HandleOpen: opened}
    yield HandleState.CLOSING, discard, {m.HandleClose: Rule(Answer.TAKE, "3.5.16")}
    yield HandleState.LEFT, not_open, {m.HandleOpen: take, m.HandleClose: discard}


RULES: Final = {direction: _rules(direction) for direction in (m.TO_SERVER, m.TO_CLIENT)}
"""End (TO_SERVER: what a server may receive) -> state -> command -> rule."""

SERVICE_FAULTS: Final[dict[tuple[type[m.Command], int], ReplyCode]] = {
    (m.HandleConsume, Service.PEER): ReplyCode.COMMAND_NOT_VALID,  # 3.5.4
    (m.HandleCancel, Service.PEER): ReplyCode.COMMAND_NOT_VALID,  # 3.5.5
    (m.HandleCancel, Service.QUEUE): ReplyCode.BAD_FIELD_VALUE,
    (m.HandleFlow, Service.PEER): ReplyCode.COMMAND_NOT_VALID,  # 3.5.6
    (m.HandleUnget, Service.PEER): ReplyCode.COMMAND_NOT_VALID,  # 3.5.7
    (m.HandleUnget, Service.TOPIC): ReplyCode.COMMAND_NOT_VALID,
    (m.HandleQuery, Service.PEER): ReplyCode.COMMAND_NOT_VALID,  # 3.5.8
    (m.HandleBrowse, Service.PEER): ReplyCode.COMMAND_NOT_VALID,  # 3.5.9
}
"""Reply code for each command that is not valid for a service; it closes the handle."""

RIGHTS: Final[dict[type[m.Command], str]] = {
    m.HandleConsume: "consumer",
    m.HandleQuery: "browser",
    m.HandleBrowse: "browser",
}
"""Right that the handle must have been opened with for a command (403).

SEND needs `producer`, except on a peer service.
"""


# --- channels and handles

# Key of a channel's reply; the key of a handle's reply has the handle's number in bits 16 to 31.
CHANNEL_KEY: Final = 1 << 32
# Key of CREATED or INDEX on a handle, which have no tag, with the handle's number as above.
ANSWER: Final = 1 << 33
# Key of the response to CHANNEL CLOSE; that to HANDLE CLOSE is -2 less the handle's number.
CHANNEL_LEFT: Final = -1


def handle_close_key(number: int) -> int:
    """Return the key that stands for the response to the peer's HANDLE CLOSE in `Channel.reply_keys`."""
    return CHANNEL_LEFT - 1 - number


def _is_of(handle: int, key: int) -> bool:
    """Return True if the reply with this key belongs to a command of the handle."""
    return (key & ~ANSWER) >> 16 == handle or key == handle_close_key(handle)


class Channel:
    """Channel with its handles, the replies that are due, and incomplete messages.

    Commands of the channel are appended to `out`, normally the connection's own list. While this end sends a
    message in fragments on the handle `sending`, `out` is a separate list, whose commands wait for the end of
    the message (2.2.8.8). If the message is a stream (`streaming` is True), which has no end, no command
    waits.

    `reply_keys` has the keys of the replies that this end must send, including CREATED and INDEX, in the
    order of their commands. `early_replies` has encoded replies that wait for an earlier reply. `awaited` has
    the keys of the replies that a client expects. `incoming` is the incomplete message of the peer.
    """

    __slots__ = (
        "awaited",
        "close_deadline",
        "close_sent_at",
        "early_replies",
        "handles",
        "incoming",
        "last_tag",
        "number",
        "out",
        "out_of_band",
        "reply_keys",
        "restartable",
        "sending",
        "state",
        "streaming",
        "transacted",
    )

    def __init__(self, number: int, out: list[bytes], opened: m.ChannelOpen) -> None:
        self.number = number
        self.state = ChannelState.OPEN
        self.transacted = opened.transacted
        self.restartable = opened.restartable
        self.out_of_band = opened.out_of_band
        self.handles: dict[int, Handle] = {}
        self.incoming: PartialMessage | None = None
        self.out = out
        self.sending: Handle | None = None
        self.streaming = False
        self.reply_keys: deque[int] = deque()
        self.early_replies: dict[int, list[bytes]] = {}
        self.awaited: deque[int] = deque()
        self.last_tag = 0
        self.close_sent_at = 0.0
        self.close_deadline = 0.0

    def reply(self, key: int, data: bytes) -> None:
        """Queue `data`, the encoded reply with this key, as soon as all earlier replies are queued.

        If `data` is b"", nothing is sent, but later replies need not wait for this one any more.
        """
        reply_keys = self.reply_keys
        if reply_keys and reply_keys[0] == key:
            reply_keys.popleft()
            if data:
                self.out.append(data)
            if self.early_replies:
                self._send_early_replies()
        elif reply_keys:
            self.early_replies.setdefault(key, []).append(data)

    def _send_early_replies(self) -> None:
        """Queue those replies in `early_replies` that need not wait for an earlier reply any more."""
        reply_keys, done = self.reply_keys, self.early_replies
        while reply_keys:
            waiting = done.get(reply_keys[0])
            if waiting is None:
                return
            key = reply_keys.popleft()
            data = waiting.pop(0)
            if not waiting:
                del done[key]
            if data:
                self.out.append(data)
        done.clear()

    def has_due_reply(self, key: int = -1) -> bool:
        """Return True if a reply to a command is due.

        With `key`, return True only if a reply is due before the reply with this key. CREATED, INDEX and
        responses to CLOSE do not count.
        """
        for one in self.reply_keys:
            if one >= 0 and not one & ANSWER:
                return one != key
        return False

    def pop_close_replies(self) -> Iterator[int]:
        """Yield, and remove, the keys of those responses to CLOSE before which no other reply is due."""
        while self.reply_keys and self.reply_keys[0] < 0:
            yield self.reply_keys.popleft()
            self._send_early_replies()

    def drop_due_replies(self, handle: int) -> None:
        """Drop the replies that are due to the handle's commands, and queue replies that waited for them."""
        reply_keys = self.reply_keys
        if any(_is_of(handle, key) for key in reply_keys):
            remaining = [key for key in reply_keys if not _is_of(handle, key)]
            reply_keys.clear()
            reply_keys.extend(remaining)
            for key in [key for key in self.early_replies if _is_of(handle, key)]:
                del self.early_replies[key]
        self._send_early_replies()

    def forget_awaited(self, handle: int) -> None:
        """Stop expecting replies to this client's commands on the handle."""
        remaining = [key for key in self.awaited if key >> 16 != handle]
        if len(remaining) != len(self.awaited):
            self.awaited.clear()
            self.awaited.extend(remaining)

    def fault(self, text: str) -> ScopedFault:
        """Return the error for a command that is not valid now, for which the channel is closed."""
        return ScopedFault(text, ReplyCode.COMMAND_NOT_VALID, Scope.CHANNEL, self.number)


# Fragment of a message: True if it is the first, head, body size, offset, bytes of the body.
TakenFragment = tuple[bool, bytes, int, int, bytes]


class Handle:
    """Handle with its rights, and the messages that were announced on it by PREPARE.

    `granted` are the rights with which the handle was opened. `prepared` belongs to a message that the peer
    has announced: (head, body size, size of the part of the body that this end has, or None until READY is
    sent). `announced` is the body size of the message that this end has announced, or None; sizes are in
    bytes. `expects_notify` is True if this client may receive NOTIFY; `queries` is the number of INDEX that
    it expects. `opened` is the command that opened the handle.
    """

    __slots__ = (
        "announced",
        "channel",
        "expects_notify",
        "granted",
        "number",
        "opened",
        "prepared",
        "queries",
        "service",
        "state",
        "unnamed",
    )

    def __init__(self, number: int, channel: Channel, opened: m.HandleOpen) -> None:
        self.number = number
        self.opened = opened
        self.channel = channel
        self.state = HandleState.OPEN
        self.service = opened.service_type
        self.granted = frozenset(
            right for right in ("producer", "consumer", "browser") if getattr(opened, right)
        )
        self.unnamed = opened.temporary  # CREATED has not been sent
        self.prepared: tuple[bytes, int, int | None] | None = None
        self.announced: int | None = None
        self.expects_notify = opened.service_type == Service.PEER
        self.queries = 0

    def begin(self) -> None:
        """Forget the peer's announced message if READY was sent for it, because a message begins."""
        if self.prepared is not None and self.prepared[2] is not None:
            self.prepared = None

    # Messages in fragments, 2.2.8.8 and 3.5.3.

    def admit(self, command: Fragmented) -> None:
        """Raise RemoteProtocolError if a SEND, NOTIFY or PREPARE is not allowed now.

        The fragment that follows the command is not examined.
        """
        incoming = self.channel.incoming
        if isinstance(command, m.HandlePrepare):
            if incoming is not None or not self.channel.restartable:
                raise self.channel.fault("PREPARE is not valid now on this channel")
            if self.prepared is not None and self.prepared[2] is None:
                raise self._fault("a second PREPARE before READY", ReplyCode.COMMAND_NOT_VALID)
            return
        if incoming is None:
            self._admit_mode(command)
        elif incoming.handle is not self or incoming.number != getattr(command, "message_number", 0):
            raise self.channel.fault("a message begins within another")
        elif incoming.mode != mode_of(command):
            if incoming.mode & STREAMING:
                raise self.channel.fault("a message begins within a stream")
            raise self._fault("the fragments of a message differ in mode", ReplyCode.BAD_FIELD_VALUE)
        if command.streaming and not command.partial:
            raise self._fault("streaming without partial", ReplyCode.BAD_FIELD_VALUE)

    def _admit_mode(self, command: m.HandleSend | m.HandleNotify) -> None:
        """Raise ScopedFault if a message may not begin in the mode of `command`.

        The mode is streaming, out of band or recovery.
        """
        if command.streaming:
            if self.service != Service.PEER:
                raise self._fault("only peers stream", ReplyCode.COMMAND_NOT_VALID)
            if command.recovery:
                raise self._fault("streaming with recovery", ReplyCode.BAD_FIELD_VALUE)
        if command.out_of_band and not self.channel.out_of_band:
            raise self._fault("no out-of-band transfer was agreed", ReplyCode.NOT_IMPLEMENTED)
        if command.recovery and (self.prepared is None or self.prepared[2] is None):
            raise self._fault("recovery without PREPARE and READY", ReplyCode.COMMAND_NOT_VALID)

    def begin_flow(self, command: Fragmented) -> Flowing | None:
        """Return a Flowing object to process the fragment of `command` in parts, as they arrive.

        Return None if the fragment must arrive completely first. Raises ScopedFault if all fragments together
        exceed the body size.
        """
        incoming = self.channel.incoming
        if incoming is None or isinstance(command, m.HandlePrepare):
            return None
        self._check_total(incoming.got + command.fragment_size, incoming.body_size, last=not command.partial)
        return Flowing(self, command, incoming)

    def take_fragment(self, command: m.HandleSend | m.HandleNotify, data: bytes, limit: int) -> TakenFragment:
        """Process `data`, a complete fragment whose command `admit` has accepted.

        Return a tuple: True for the first fragment of a message, the content header (b"" in later fragments),
        the size of the whole body, the offset of this fragment in the body, and the fragment's bytes of the
        body. Raises ScopedFault for an invalid content header, a body over `limit` bytes, and fragments that
        exceed the body size.
        """
        mode, incoming = mode_of(command), self.channel.incoming
        head = b""
        if incoming is not None:
            body_size, offset = incoming.body_size, incoming.got
        elif mode & OUT_OF_BAND:
            body_size, offset = -1, 0
        elif mode & RECOVERY:
            assert self.prepared is not None
            _, body_size, held_bytes = self.prepared
            offset = held_bytes or 0
        else:
            head, body_size, data = self._take_head(data, limit)
            offset = 0
            if mode & STREAMING:
                if body_size:
                    raise self._fault("a stream with a body-size", ReplyCode.BAD_FIELD_VALUE)
                body_size = -1
        got = offset + (command.fragment_size if mode & OUT_OF_BAND else len(data))
        last = not command.partial
        self._check_total(got, body_size, last=last)
        if incoming is None:
            self.begin()
        if last:
            self.channel.incoming = None
        elif incoming is not None:
            incoming.got = got
        else:
            number = getattr(command, "message_number", 0)
            self.channel.incoming = PartialMessage(self, mode, number, body_size, got)
        return incoming is None, head, max(body_size, 0), offset, data

    def take_prepare(self, data: bytes, limit: int) -> tuple[bytes, int, bytes]:
        """Process the fragment of a PREPARE. Return content header, body size and first bytes of the body.

        Raises ScopedFault for an invalid content header, a body over `limit` bytes, and more bytes than the
        body has.
        """
        head, body_size, data = self._take_head(data, limit)
        if len(data) > body_size:
            text = f"{len(data)} bytes of a body of {body_size}"
            raise self._fault(text, ReplyCode.MESSAGE_CONTENTS_INVALID)
        self.prepared = (head, body_size, None)
        return head, body_size, data

    def _take_head(self, data: bytes, limit: int) -> tuple[bytes, int, bytes]:
        """Split the first fragment of a message into content header, body size and first bytes of the body.

        Raises ScopedFault if the content header is invalid or the body size exceeds `limit` bytes.
        """
        try:
            end = find_head_end(data, 0, len(data))
        except RemoteProtocolError as fault:
            raise self._fault(str(fault), ReplyCode.MESSAGE_CONTENTS_INVALID) from None
        body_size: int = BODY_SIZE.unpack_from(data)[0]
        if body_size > limit:
            text = f"a message of {body_size} bytes exceeds {limit}"
            raise ScopedFault(text, ReplyCode.MESSAGE_TOO_LARGE, Scope.CHANNEL, self.channel.number)
        return data[BODY_SIZE.size : end], body_size, data[end:]

    def _check_total(self, got: int, body_size: int, *, last: bool) -> None:
        """Raise ScopedFault if `got` received bytes are more than the body has.

        If `last` is True, fewer bytes are an error, too. If `body_size` is -1, nothing is checked.
        """
        if body_size >= 0 and (got > body_size or (last and got != body_size)):
            text = f"{got} bytes of a body of {body_size}"
            raise self._fault(text, ReplyCode.MESSAGE_CONTENTS_INVALID)

    def _fault(self, text: str, code: ReplyCode) -> ScopedFault:
        return ScopedFault(text, code, Scope.HANDLE, self.number)


class PartialMessage:
    """Incomplete message of the peer, with the number of body bytes that have arrived (`got`).

    `body_size` is -1 if the size is unknown: a stream has no end, and bytes sent out of band are not received
    here.
    """

    __slots__ = ("body_size", "got", "handle", "mode", "number")

    def __init__(self, handle: Handle, mode: int, number: int, body_size: int, got: int) -> None:
        self.handle = handle
        self.mode = mode  # the bits RECOVERY, OUT_OF_BAND and streaming, equal in all fragments
        self.number = number
        self.body_size = body_size
        self.got = got


def mode_of(command: m.HandleSend | m.HandleNotify) -> int:
    """Return those flags of a SEND or NOTIFY that are equal in all fragments of a message.

    They are OUT_OF_BAND, RECOVERY and STREAMING.
    """
    return command.out_of_band * OUT_OF_BAND | command.recovery * RECOVERY | command.streaming * STREAMING


def bits_of(command: m.HandleSend | m.HandleNotify, *, last: bool) -> int:
    """Return the flags of a SEND or NOTIFY for a Fragment event, as the flags of a NOTIFY.

    If `last` is False, they include PARTIAL.
    """
    bits = mode_of(command) | (not last) * PARTIAL
    if isinstance(command, m.HandleNotify):
        bits |= command.delivered * DELIVERED | command.redelivered * REDELIVERED
    return bits


class Flowing:
    """Fragment, but not the first of its message, that is processed in parts as they arrive.

    `missing_bytes` is the number of bytes that have not arrived yet.
    """

    __slots__ = ("command", "handle", "incoming", "missing_bytes")

    def __init__(
        self, handle: Handle, command: m.HandleSend | m.HandleNotify, incoming: PartialMessage
    ) -> None:
        self.handle = handle
        self.command = command
        self.incoming = incoming
        self.missing_bytes = command.fragment_size
