"""End of a connection, its channels and its handles (3.2.7, 3.2.9, 3.3.7, 3.5.16).

Either end may send CLOSE for any of the three at any time. The other end's CLOSE is the response; if both
send it at the same time, each is the response to the other. The end that sent CLOSE discards what arrives
before the response, except that a handle closed without a fault continues processing. `Lifetime` is a base of
the connections and reads no clock: `deadline` says when `tick` and `timed_out` are due next.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Final

from gateway.errors import RemoteProtocolError
from gateway.model.heartbeats import HeartbeatSchedule
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.codec import decode_command, decode_frame, encode_command
from gateway.protocols.amqpfast.events import (
    ChannelClosed,
    Closed,
    Event,
    HandleClosed,
    NegotiationFailed,
    Released,
)
from gateway.protocols.amqpfast.spec import (
    CLOSE_AGAIN_SECS,
    CLOSE_WAIT_SECS,
    HANDSHAKE_FRAME_MAX,
    LONG_SIZE_MAX,
    NEGOTIATION_PAUSE_SECS,
    SHORT_STRING_MAX,
    SILENT_INTERVALS,
    ReplyCode,
    Scope,
)
from gateway.protocols.amqpfast.states import (
    CHANNEL_LEFT,
    Channel,
    ChannelState,
    Handle,
    HandleState,
    ScopedFault,
    State,
    handle_close_key,
)

PING: Final = encode_command(m.ConnectionPing(respond=False))
PING_RESPOND: Final = encode_command(m.ConnectionPing(respond=True))
NEGOTIATING: Final = frozenset({State.INITIATION, State.AUTHENTICATION, State.AUTHENTICATING, State.TUNING})
SILENT: Final = frozenset({State.BROKEN, State.FAILED, State.ENDING, State.CLOSED})


class Lifetime:
    """Base class of Connection: closing, faults of the peer, and heartbeats."""

    _pauses: ClassVar[bool]  # True if a failed negotiation ends only after a pause: a server's duty

    def __init__(self, state: State, negotiation_pause: float = NEGOTIATION_PAUSE_SECS) -> None:
        self.out: list[bytes] = []
        self.frame_max = HANDSHAKE_FRAME_MAX
        self.channel_max = 0
        self.handle_max = 0
        self.heartbeat = 0
        self.peer_heartbeat = 0
        self.pause_until = 0.0
        self.received = [0] * len(m.FRAME_NAMES)
        self.sent = [0] * len(m.FRAME_NAMES)
        self._negotiation_pause = negotiation_pause
        self._state = state
        self._channels: dict[int, Channel] = {}
        self._handles: dict[int, Handle] = {}
        self._closed_channels: set[int] = set()  # channels that were open once
        self._leaving: dict[Channel, None] = {}  # channels on which the response to a close is due
        self._ready: dict[int, Handle] = {}  # handles whose messages a run may decode
        self._now = 0.0
        self._last_received = 0.0
        self._ping_sent = False  # a PING for a response was sent since the last received byte
        self._beats = HeartbeatSchedule()
        self._pings = True  # the peer accepts PING
        self._closing_since = 0.0
        self._said_at = 0.0
        self._last_words: m.ConnectionClose | None = None

    @abstractmethod
    def _forget_lead(self) -> None:
        """Discard the cached bytes of the last message, because the state of a channel or handle has changed.

        If the next message began with the same bytes, it would be accepted without a check of this state.
        """

    def _send(self, command: m.Command, out: list[bytes] | None = None) -> None:
        (self.out if out is None else out).append(encode_command(command))
        self.sent[command.type] += 1

    # --- faults

    def refuse(self, fault: RemoteProtocolError, events: list[Event]) -> None:
        """Close the handle, channel or connection in which `fault`, a fault of the peer, has occurred.

        Queue CLOSE and append its event to `events`.
        """
        code, text = fault.reason, str(fault)
        if not isinstance(fault, ScopedFault) or fault.scope is Scope.CONNECTION:
            self._fail(fault, events)
        elif fault.scope is Scope.CHANNEL:
            self.close_channel(fault.number, code, text)
            events.append(ChannelClosed(fault.number, code, text, by_peer=False))
        else:
            channel = self._handles[fault.number].channel.number
            self.close_handle(fault.number, code, text)
            events.append(HandleClosed(fault.number, channel, code, text, by_peer=False))

    def _fail(self, fault: RemoteProtocolError, events: list[Event]) -> None:
        """Close the connection because of `fault`, a fault of the peer, and append the event to `events`.

        During the negotiation, the connection is closed only after a pause.
        """
        code, text = fault.reason, str(fault)
        if self._pauses and self._state in NEGOTIATING:
            unparsable = code == ReplyCode.FRAMING_ERROR and self._state is not State.TUNING
            begun = self._state is not State.INITIATION
            self._pause(code, text, speak=not unparsable)
            events.append(NegotiationFailed(code, text, begun))
        elif self._state not in (State.CLOSING, State.LEFT) and self._state not in SILENT:
            self.close(code, text)
            events.append(Closed(code, text, by_peer=False))

    def _pause(self, code: int, text: str, *, speak: bool) -> None:
        """Close the connection after a pause, because the negotiation has failed.

        If `speak` is True, CONNECTION CLOSE with `code` and `text` is sent at the end of the pause.
        """
        self._state = State.FAILED
        self._last_words = m.ConnectionClose(code, reply_text(text)) if speak else None
        self.pause_until = self._now + self._negotiation_pause

    # --- closed by the application

    def close(self, code: int = ReplyCode.SUCCESS, text: str = "") -> None:
        """Queue CONNECTION CLOSE.

        Input is discarded until the peer responds; then `closed` is True.
        """
        if self._state in (State.CLOSING, State.LEFT) or self._state in SILENT:
            return
        self._forget_all()
        if self._state is State.INITIATION:
            self._state = State.CLOSED
            return
        self._send(m.ConnectionClose(code, reply_text(text)))
        self._state = State.CLOSING
        self._closing_since = self._said_at = self._now

    def close_channel(self, channel: int, code: int = ReplyCode.SUCCESS, text: str = "") -> None:
        """Queue CHANNEL CLOSE, which also closes the channel's handles.

        Input for them is discarded until the peer responds.
        """
        found = self._channels.get(channel)
        if found is None or found.state not in (ChannelState.OPEN, ChannelState.LEFT):
            return
        self._send(m.ChannelClose(channel, code, reply_text(text)))
        if found.state is ChannelState.LEFT:
            self._forget_channel(found)
            return
        found.state = ChannelState.CLOSING
        found.close_sent_at = self._now
        self._drop_sending(found)
        self._set_handle_states(found, HandleState.CLOSING)
        found.reply_keys.clear()
        found.early_replies.clear()
        self._leaving.pop(found, None)

    def close_handle(self, handle: int, code: int = ReplyCode.SUCCESS, text: str = "") -> None:
        """Queue HANDLE CLOSE, and drop the replies to the handle's commands that this end has not sent yet.

        If `code` is a success, commands that still arrive are reported until the peer responds; after an
        error they are discarded.
        """
        found = self._handles.get(handle)
        if found is None or found.channel.state is ChannelState.CLOSING:
            return
        command = m.HandleClose(handle, code, reply_text(text))
        if found.state is HandleState.LEFT:
            self._send_close(found, command)
            self._forget_handle(found)
        elif found.state is HandleState.OPEN or (
            found.state is HandleState.LEAVING and code >= ReplyCode.MESSAGE_NOT_FOUND
        ):
            if found.state is HandleState.OPEN:
                self._send_close(found, command)
            found.channel.drop_due_replies(handle)
            found.state = HandleState.LEAVING
            if code >= ReplyCode.MESSAGE_NOT_FOUND:
                found.state = HandleState.CLOSING
                self._ready.pop(handle, None)
                self._drop_incoming(found)

    def _send_close(self, handle: Handle, command: m.HandleClose) -> None:
        """Queue the HANDLE CLOSE `command`, behind a message that is being sent in fragments on the channel.

        If that message belongs to the closed handle itself, it is abandoned instead.
        """
        channel = handle.channel
        if channel.sending is handle:
            self._send(command)
            output = channel.out if channel.out is not self.out else []
            self._drop_sending(channel)
            channel.out += without_handle(b"".join(output), handle.number)
        else:
            self._send(command, channel.out)

    # --- closed by the peer

    def _take_close(self, command: m.ConnectionClose, events: list[Event]) -> None:
        events.append(Closed(command.reply_code, command.reply_text, by_peer=True))
        self._state = State.LEFT
        self._closing_since = self._now

    def _take_while_closing(self, command: m.Command) -> None:
        if isinstance(command, m.ConnectionClose):
            self._state = State.CLOSED
        elif self._now >= self._said_at + CLOSE_AGAIN_SECS:
            self._said_at = self._now
            self._send(m.ConnectionClose())

    def _take_channel_close(self, command: m.ChannelClose, events: list[Event]) -> None:
        channel = self._channels[command.channel_id]
        if channel.state is ChannelState.CLOSING:
            self._forget_channel(channel)
            events.append(Released(channel.number, 0))
            return
        channel.state = ChannelState.LEFT
        self._drop_sending(channel)
        self._set_handle_states(channel, HandleState.LEFT)
        self._await_close_reply(channel, CHANNEL_LEFT)
        events.append(ChannelClosed(channel.number, command.reply_code, command.reply_text, by_peer=True))

    def _take_handle_close(self, command: m.HandleClose, events: list[Event]) -> None:
        """Process a HANDLE CLOSE of the peer: a response to this end's CLOSE, or a CLOSE of its own."""
        handle = self._handles[command.handle_id]
        channel = handle.channel
        if handle.state is not HandleState.OPEN:
            self._forget_handle(handle)
            events.append(Released(0, handle.number))
            return
        handle.state = HandleState.LEFT
        self._ready.pop(handle.number, None)
        self._drop_incoming(handle)
        self._await_close_reply(channel, handle_close_key(handle.number))
        events.append(
            HandleClosed(handle.number, channel.number, command.reply_code, command.reply_text, by_peer=True)
        )

    def _await_close_reply(self, channel: Channel, key: int) -> None:
        """Record that a response to the peer's CLOSE is due, behind all replies that are due now.

        `key` identifies the response.
        """
        if channel not in self._leaving:
            self._leaving[channel] = None
            channel.close_deadline = self._now + CLOSE_WAIT_SECS
        channel.reply_keys.append(key)

    def _answer_closes(self, *, now: float | None = None) -> None:
        """Queue the response to each CLOSE of the peer for which all earlier replies have been queued.

        If `now` is given, in monotonic seconds, also respond to each CLOSE that has waited for
        CLOSE_WAIT_SECS.
        """
        for channel in list(self._leaving):
            if now is not None and now >= channel.close_deadline:
                self._answer_overdue(channel)
            for key in channel.pop_close_replies():
                self._answer_close(channel, key)
            if not any(key < 0 for key in channel.reply_keys):
                self._leaving.pop(channel, None)
        if self._state is State.LEFT:
            timed_out = now is not None and now >= self._closing_since + CLOSE_WAIT_SECS
            if timed_out or not any(channel.reply_keys for channel in self._channels.values()):
                self._forget_all()
                self._send(m.ConnectionClose())
                self._state = State.ENDING
                self._closing_since = self._now

    def _answer_overdue(self, channel: Channel) -> None:
        if channel.state is ChannelState.LEFT:
            channel.reply_keys.clear()
            channel.reply_keys.append(CHANNEL_LEFT)
            return
        for key in [key for key in channel.reply_keys if key < 0]:
            channel.drop_due_replies(CHANNEL_LEFT - 1 - key)
            self._answer_close(channel, key)

    def _answer_close(self, channel: Channel, key: int) -> None:
        if key == CHANNEL_LEFT:
            self._send(m.ChannelClose(channel.number))
            self._forget_channel(channel)
        else:
            handle = self._handles[CHANNEL_LEFT - 1 - key]
            self._send_close(handle, m.HandleClose(handle.number))
            self._forget_handle(handle)

    def _answer_at_once(self, handle: Handle) -> None:
        """Queue the response to the peer's HANDLE CLOSE at once, and drop the replies that are due before it.

        Called because the peer already uses the number of the handle again.
        """
        handle.channel.drop_due_replies(handle.number)
        self._answer_close(handle.channel, handle_close_key(handle.number))

    def _close_again(self, channel: Channel) -> None:
        if self._now >= channel.close_sent_at + CLOSE_AGAIN_SECS:
            channel.close_sent_at = self._now
            self._send(m.ChannelClose(channel.number))

    # --- clean-up

    def _set_handle_states(self, channel: Channel, state: HandleState) -> None:
        """Set the state of all handles of a channel, and discard the peer's incomplete message."""
        channel.incoming = None
        for handle in channel.handles.values():
            handle.state = state
            self._ready.pop(handle.number, None)
        self._forget_lead()

    def _drop_incoming(self, handle: Handle) -> None:
        incoming = handle.channel.incoming
        if incoming is not None and incoming.handle is handle:
            handle.channel.incoming = None
        self._forget_lead()

    def _drop_sending(self, channel: Channel) -> None:
        """Abandon the message that this end is sending in fragments on the channel."""
        channel.sending = None
        channel.streaming = False
        channel.out = self.out

    def _forget_handle(self, handle: Handle) -> None:
        handle.state = HandleState.NONE
        channel = handle.channel
        self._ready.pop(handle.number, None)
        self._handles.pop(handle.number, None)
        channel.handles.pop(handle.number, None)
        channel.drop_due_replies(handle.number)
        channel.forget_awaited(handle.number)
        self._drop_incoming(handle)

    def _forget_channel(self, channel: Channel) -> None:
        self._set_handle_states(channel, HandleState.NONE)
        for number in channel.handles:
            self._handles.pop(number, None)
        channel.handles.clear()
        channel.reply_keys.clear()
        channel.state = ChannelState.GONE
        self._channels.pop(channel.number, None)
        self._closed_channels.add(channel.number)
        self._leaving.pop(channel, None)

    def _forget_all(self) -> None:
        for channel in list(self._channels.values()):
            self._drop_sending(channel)
            self._forget_channel(channel)

    # --- time

    def _agree(self, tune: m.ConnectionTune, peer_heartbeat: int) -> None:
        """Apply the negotiated limits in `tune`.

        `peer_heartbeat` is the interval in seconds at which the peer expects output from this end.
        """
        self.frame_max = tune.frame_max
        self.channel_max = tune.channel_max
        self.handle_max = tune.handle_max
        self.peer_heartbeat = peer_heartbeat
        self._beats.agree(peer_heartbeat, self._now)

    @property
    def _silence_max(self) -> float:
        """Seconds of silence of the peer after which this end sends PING.

        If this end has already sent PING, these are the seconds after which it closes the connection.
        """
        return self.heartbeat * (SILENT_INTERVALS + self._ping_sent)

    @property
    def _tuned(self) -> bool:
        return self._state in (State.TUNED, State.OPENING, State.ACTIVE)

    def deadline(self) -> float | None:
        """Return the time of the next call of `tick` and `timed_out`, in monotonic seconds; None if never."""
        if self._state is State.FAILED:
            return self.pause_until
        if self._state in (State.CLOSING, State.BROKEN, State.LEFT, State.ENDING):
            return self._closing_since + CLOSE_WAIT_SECS
        times = [channel.close_deadline for channel in self._leaving]
        if self._tuned and self._pings:
            if self.peer_heartbeat:
                times.append(self._beats.at)
            if self.heartbeat:
                times.append(self._last_received + self._silence_max)
        return min(times, default=None)

    def tick(self, now: float) -> None:
        """End a failed negotiation, respond to CLOSE commands that have waited too long, and send PING.

        PING is sent if this end has written nothing for half of the interval that the peer has requested.
        PING with a request for a response is sent if the peer was silent for two of the intervals that this
        end has requested. A peer that may not support PING gets none until it has sent one itself. `now` is
        in monotonic seconds.
        """
        self._now = now
        if self._state is State.FAILED and now >= self.pause_until:
            if self._last_words is not None:
                self._send(self._last_words)
            self._state = State.CLOSED
        elif self._leaving or self._state is State.LEFT:
            self._answer_closes(now=now)
        if not (self._tuned and self._pings):
            return
        if self.peer_heartbeat and self._beats.is_due(now) and not self.out:
            self._ping(PING)
        if self.heartbeat and not self._ping_sent and now >= self._last_received + self._silence_max:
            self._ping_sent = True
            self._ping(PING_RESPOND)

    def _ping(self, data: bytes) -> None:
        """Queue `data`, an encoded PING, in front of everything else that is queued.

        This is allowed, because the queue consists of whole commands with their fragments.
        """
        self.out.insert(0, data)
        self.sent[m.ConnectionPing.type] += 1

    def _take_ping(self, command: m.ConnectionPing, events: list[Event]) -> None:
        self._pings = True
        if command.respond:
            self._ping(PING)

    def excuse(self, now: float) -> None:
        """Measure the peer's silence only from `now` on, because nothing was read before.

        `now` is in monotonic seconds.
        """
        self._last_received = now
        self._ping_sent = False

    @property
    def unanswered(self) -> bool:
        """True if this end has sent CONNECTION CLOSE and the peer has not responded yet."""
        return self._state in (State.CLOSING, State.BROKEN)

    def timed_out(self, now: float) -> bool:
        """Return True if the peer is late with its response to PING or CLOSE, or with closing the socket.

        `now` is in monotonic seconds.
        """
        if self.unanswered or self._state is State.ENDING:
            return now >= self._closing_since + CLOSE_WAIT_SECS
        if not (self.heartbeat and self._ping_sent and self._tuned):
            return False
        return now >= self._last_received + self._silence_max


def without_handle(data: bytes, handle: int) -> list[bytes]:
    """Return the encoded commands in `data`, except those of the handle with the number `handle`."""
    remaining = []
    at = 0
    while at < len(data):
        frame = decode_frame(data, at, LONG_SIZE_MAX)
        assert frame is not None
        begin, stop, after = frame
        command = decode_command(data[begin:stop])
        if command.fragment and not getattr(command, "out_of_band", False):
            after += command.fragment_size  # type: ignore[attr-defined]
        if not isinstance(command, m.HandleCommand) or command.handle_id != handle:
            remaining.append(data[at:after])
        at = after
    return remaining


def reply_text(text: str) -> str:
    """Return the text without NUL, truncated to 255 bytes, the maximum of a short string."""
    return text.replace("\0", "").encode()[:SHORT_STRING_MAX].decode(errors="ignore")
