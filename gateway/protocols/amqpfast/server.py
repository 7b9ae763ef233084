"""Server end of a connection, which listeners use (3.2.2 - 3.2.8).

    INITIATION -> AUTHENTICATION -> AUTHENTICATING [-> AUTHENTICATION ...]
        -> TUNING -> TUNED -> OPENING -> ACTIVE

In AUTHENTICATING and OPENING the application decides; in every other state the client sends next. A failed
negotiation leads to FAILED, where `deadline` says when `tick` will end it. Messages are decoded by
`_read_sends`, which passes on heads undecoded. What a client repeats from message to message (handle, name,
head, size) is recognised by comparing bytes with those of its last message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from struct import Struct
from typing import ClassVar, Final

from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.model.properties import Headers
from gateway.model.spooled_bodies import Body
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.codec import HEAD_MAX, framing_error
from gateway.protocols.amqpfast.connection import STEP_BYTES, STEPS_MAX, Action, Connection
from gateway.protocols.amqpfast.events import (
    Acks,
    Authenticate,
    CommandReceived,
    Event,
    Open,
    SendRow,
    Sends,
)
from gateway.protocols.amqpfast.lifetime import reply_text
from gateway.protocols.amqpfast.spec import (
    CHANNEL_ACK,
    FRAME_END,
    FRAME_MAX,
    FRAME_MAX_MIN,
    HANDLE_REPLY,
    HANDLE_SEND,
    INDEX_BYTES_MAX,
    INDEX_FIELDS,
    MESSAGE_BYTES_MAX,
    NEGOTIATION_PAUSE_SECS,
    PROTOCOL_ID,
    PROTOCOL_VERSION,
    ReplyCode,
    Scope,
    Service,
)
from gateway.protocols.amqpfast.states import (
    ANSWER,
    CHANNEL_KEY,
    CHANNEL_LEFT,
    RIGHTS,
    SERVICE_FAULTS,
    Channel,
    ChannelState,
    Fragmented,
    Handle,
    HandleState,
    ScopedFault,
    State,
)
from gateway.protocols.amqpfast.tables import FIELD_BYTES_MIN, FIELDS_MAX

SEND: Final = Struct(">HBHHIBB").unpack_from  # size, type, handle, tag, fragment-size, bits, length of name
SEND_FIELDS: Final = 12  # the size of SEND with an empty name
ACK: Final = Struct(">HBHHIB")
ACK_SIZE: Final = 10
REPLY: Final = Struct(">HBHHHBB").pack  # size, type, handle, tag, code, length of text, end
REPLY_SIZE: Final = 9
BROWSER: Final = frozenset({"browser"})
OPEN: Final = HandleState.OPEN  # a global name costs a quarter of an enum's attribute
LEFT: Final = HandleState.LEFT
SUCCESS: Final = int(ReplyCode.SUCCESS)
Lead = tuple[bytes, bytes, int, int, int, Callable[[int], None], bytes, bytes]
# Bytes before the tag; those between tag and body, and their number; body size, handle, function that stores
# the key of a due reply, head, name.
NOTHING_OWED: Final[list[int]] = []
NO_LEAD: Final[Lead] = (b"", b"", 0, 0, 0, NOTHING_OWED.append, b"", b"")


class ServerConnection(Connection):
    """State machine of an AMQP/Fast connection at the server's end: bytes in, events out.

    `frame_max` (bytes), `channel_max` and `handle_max` (0: no limit) are the limits that the server proposes;
    the client may choose lower ones. `heartbeat` is the interval in seconds at which the client should send.
    With 0 the server never sends the first PING, because the Java client of 2005 does not support it.
    `mechanisms` are separated by blanks. If `all_browse` is True, every handle may QUERY and BROWSE, because
    the C client of 2005 cannot request that right.
    """

    _side: ClassVar[int] = m.TO_SERVER
    _pauses: ClassVar[bool] = True
    _bounded = True
    _paused = frozenset({State.INITIATION, State.AUTHENTICATING, State.OPENING})

    def __init__(
        self,
        *,
        frame_max: int = FRAME_MAX,
        channel_max: int = 1024,
        handle_max: int = 8192,
        heartbeat: int = 30,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        negotiation_pause: float = NEGOTIATION_PAUSE_SECS,
        mechanisms: str = "PLAIN",
        properties_max: int = FIELDS_MAX,
        properties_bytes_max: int = HEAD_MAX,
        all_browse: bool = False,
    ) -> None:
        super().__init__(
            State.INITIATION,
            message_bytes_max=message_bytes_max,
            negotiation_pause=negotiation_pause,
            properties_max=properties_max,
            properties_bytes_max=properties_bytes_max,
        )
        # A run of messages only has heads that are certain to be within both limits.
        self._plain_max = min(properties_max * FIELD_BYTES_MIN, properties_bytes_max)
        self.heartbeat = heartbeat
        self._offer = m.ConnectionTune(frame_max, channel_max, handle_max, heartbeat)
        self._mechanisms = mechanisms
        self._all_browse = all_browse
        self._version = PROTOCOL_VERSION
        self._open_tag = 0
        self._lead = NO_LEAD
        self._runs = {HANDLE_SEND: self._read_sends, CHANNEL_ACK: self._read_acks}

    # --- responses of the application

    def challenge(self, challenges: Headers) -> None:
        """Queue a further CHALLENGE, after Authenticate."""
        self._expect(State.AUTHENTICATING)
        self._send(m.ConnectionChallenge(self._version, self._mechanisms, challenges))
        self._state = State.AUTHENTICATION

    def tune(self) -> None:
        """Accept the login after Authenticate: queue TUNE with the offered limits (3.2.5)."""
        self._expect(State.AUTHENTICATING)
        self._send(self._offer)
        self._state = State.TUNING

    def fail(self, code: int, text: str) -> None:
        """Refuse the login after Authenticate; the connection is closed after a pause.

        `code` is 403, or 502 for a mechanism that is not offered.
        """
        self._expect(State.AUTHENTICATING)
        self._pause(code, text, speak=True)

    def opened(self) -> None:
        """Accept the virtual host after Open: queue CONNECTION REPLY if the client requested it."""
        self._expect(State.OPENING)
        if self._open_tag:
            self._send(m.ConnectionReply(self._open_tag))
        self._state = State.ACTIVE

    def _expect(self, state: State) -> None:
        if self._state is not state:
            raise LocalProtocolError(f"the connection is in {self._state.name}, not in {state.name}")

    def reply_channel(self, channel: int, tag: int, code: int = ReplyCode.SUCCESS, text: str = "") -> None:
        """Queue CHANNEL REPLY to the command with this tag, in the order that `reply` describes."""
        found = self._channels.get(channel)
        if not tag or found is None or found.state is ChannelState.CLOSING:
            return
        command = m.ChannelReply(channel, tag, code, reply_text(text))
        found.reply(CHANNEL_KEY | tag, self._reply_bytes(command))

    def reply(self, handle: int, tag: int, code: int = ReplyCode.SUCCESS, text: str = "") -> None:
        """Queue HANDLE REPLY to the command with this tag. Tag 0 gets no reply, except for a failed BROWSE.

        Replies on a channel are sent in the order of its commands, so a reply to a later command waits for
        the earlier ones. The reply is dropped if the handle or channel has been closed meanwhile. If the
        handle number may have been opened again since the command, check `is_reopened` first.
        """
        found = self._usable(handle)
        key = handle << 16 | tag
        if found is None or (not tag and key not in found.channel.reply_keys):
            return
        encoded = b""
        if tag or code >= ReplyCode.MESSAGE_NOT_FOUND:
            encoded = self._reply_bytes(m.HandleReply(handle, tag, code, reply_text(text)))
        found.channel.reply(key, encoded)

    def is_reopened(self, opened: m.HandleOpen) -> bool:
        """Return True if the handle that `opened` opened was closed, and its number is in use again.

        The number then belongs to a later handle. The client may have opened it in bytes that were received,
        and whose events the caller has not processed yet.
        """
        found = self._handles.get(opened.handle_id)
        return found is not None and found.opened is not opened

    def reply_many(self, rows: Iterable[tuple[int, int]]) -> None:
        """Queue HANDLE REPLY with code 200 for each row (handle, tag), as `reply` does.

        Rows with tag 0 need no reply.
        """
        handle: Handle | None = None
        last = -1
        count = 0
        for number, tag in rows:
            if number != last:
                last = number
                handle = self._usable(number)
            if tag and handle is not None:
                encoded = REPLY(REPLY_SIZE, HANDLE_REPLY, number, tag, SUCCESS, 0, FRAME_END)
                key = number << 16 | tag
                channel = handle.channel
                reply_keys = channel.reply_keys
                # The common case of `Channel.reply`.
                if reply_keys and reply_keys[0] == key and not channel.early_replies:
                    reply_keys.popleft()
                    channel.out.append(encoded)
                else:
                    channel.reply(key, encoded)
                count += 1
        self.sent[HANDLE_REPLY] += count

    def has_due_reply(self, channel: int, key: int = -1) -> bool:
        """Return True if a reply is due on a channel: nothing else may be sent before it (3.2.11).

        `key` identifies a command by `handle << 16 | tag`. With `key`, return True only if a reply is due
        before the reply to this command.
        """
        found = self._channels.get(channel)
        return found is not None and found.has_due_reply(key)

    def _reply_bytes(self, command: m.Command) -> bytes:
        replies: list[bytes] = []
        self._send(command, replies)
        return replies[0]

    @property
    def index_bytes_max(self) -> int:
        """Maximum size in bytes of the message list in an INDEX that fits a frame of the client (3.2.5).

        The client requests the remaining numbers with another QUERY (3.5.12).
        """
        return min(INDEX_BYTES_MAX, self.frame_max - INDEX_FIELDS)

    def send(self, command: m.HandleCreated | m.HandleIndex) -> None:
        """Queue CREATED or INDEX, after the replies that are due to earlier commands.

        The command is dropped if the handle was closed meanwhile.
        """
        handle = self._usable(command.handle_id)
        if handle is not None:
            key = ANSWER | handle.number << 16
            if key in handle.channel.reply_keys:
                handle.channel.reply(key, self._reply_bytes(command))
            else:
                self._send(command, handle.channel.out)

    # --- the negotiation

    def _read_initiation(self, data: bytes, events: list[Event]) -> int:
        if self._state is not State.INITIATION or not data:
            return 0
        if data[0] != PROTOCOL_ID or data[1:2] == b"\0":
            self._fail(framing_error("not an AMQP/Fast connection initiation"), events)
        elif len(data) > 1:
            self._version = min(data[1], PROTOCOL_VERSION)
            self._send(m.ConnectionChallenge(self._version, self._mechanisms))
            self._state = State.AUTHENTICATION
            return 2
        return 0

    def _take_response(self, command: m.ConnectionResponse, events: list[Event]) -> None:
        self._state = State.AUTHENTICATING
        offered = command.mechanism.upper() in self._mechanisms.upper().split()
        events.append(Authenticate(command.mechanism, command.responses, offered))

    def _take_tune(self, command: m.ConnectionTune, events: list[Event]) -> None:
        """Apply the limits that the client has chosen in TUNE.

        Raises RemoteProtocolError if they exceed the limits that this end has proposed.
        """
        offer = self._offer
        if not FRAME_MAX_MIN <= command.frame_max <= offer.frame_max:
            raise _bad_tune("frame-max", command.frame_max, offer.frame_max)
        if offer.channel_max and command.channel_max > offer.channel_max:
            raise _bad_tune("channel-max", command.channel_max, offer.channel_max)
        if offer.handle_max and command.handle_max > offer.handle_max:
            raise _bad_tune("handle-max", command.handle_max, offer.handle_max)
        agreed = m.ConnectionTune(
            command.frame_max,
            command.channel_max or offer.channel_max,
            command.handle_max or offer.handle_max,
        )
        self._agree(agreed, command.heartbeat if self.heartbeat else 0)
        self._state = State.TUNED

    def _take_open(self, command: m.ConnectionOpen, events: list[Event]) -> None:
        self._state = State.OPENING
        self._open_tag = command.tag
        events.append(Open(command.virtual_path, command.client_name, command.options))

    # --- channels

    def _channel_command(self, command: m.ChannelCommand, events: list[Event]) -> None:
        """Process a command on a channel, and record that a reply is due if the command requests one."""
        if isinstance(command, m.ChannelOpen):
            self._open_channel(command, events)
            return
        if isinstance(command, m.ChannelClose):
            self._take_channel_close(command, events)
            return
        channel = self._channels[command.channel_id]
        if isinstance(command, m.ChannelAck):
            if command.tag:
                channel.reply_keys.append(CHANNEL_KEY | command.tag)
            self._append_acks([(channel.number, command.tag, command.message_number)], events)
            return
        assert isinstance(command, m.ChannelCommit | m.ChannelRollback)
        if not channel.transacted:
            text = f"{command.name} on a channel without transactions"
            raise ScopedFault(text, ReplyCode.COMMAND_NOT_VALID, Scope.CHANNEL, channel.number)
        if command.tag:
            channel.reply_keys.append(CHANNEL_KEY | command.tag)
        events.append(CommandReceived(command))

    def _open_channel(self, command: m.ChannelOpen, events: list[Event]) -> None:
        """Process CHANNEL OPEN, and append its event.

        Raises RemoteProtocolError for channel-id 0, and for too many channels.
        """
        number = command.channel_id
        if not number:
            raise RemoteProtocolError("channel-id 0", reason=ReplyCode.BAD_FIELD_VALUE)
        existing = self._channels.get(number)
        # The client reuses the number without waiting for our response, so it is sent now.
        if existing is not None:
            existing.reply_keys.clear()
            self._answer_close(existing, CHANNEL_LEFT)
        if self.channel_max and len(self._channels) >= self.channel_max <= len(self.channels):
            text = f"more than {self.channel_max} channels"
            raise RemoteProtocolError(text, reason=ReplyCode.INSUFFICIENT_RESOURCES)
        channel = self._channels[number] = Channel(number, self.out, command)
        self._closed_channels.discard(number)
        if command.tag:
            channel.reply_keys.append(CHANNEL_KEY | command.tag)
        events.append(CommandReceived(command))

    # --- handles

    def _handle_command(self, command: m.HandleCommand, events: list[Event]) -> None:
        """Process a command on a handle, except SEND and PREPARE, and record the reply that is due.

        Raises ScopedFault if the handle's service type or rights do not allow the command.
        """
        if isinstance(command, m.HandleOpen):
            self._open_handle(command, events)
            return
        if isinstance(command, m.HandleClose):
            self._take_handle_close(command, events)
            return
        handle = self._handles[command.handle_id]
        if isinstance(command, m.HandleReady):
            self._take_ready(handle, command, events)
            return
        kind = type(command)
        code = SERVICE_FAULTS.get((kind, handle.service))
        if code is not None:
            text = f"{command.name} is not valid for this service"
            raise ScopedFault(text, code, Scope.HANDLE, handle.number)
        right = RIGHTS.get(kind)
        if right is not None and right not in handle.granted:
            raise _no_right(handle, right)
        tag = getattr(command, "tag", 0)
        self._note_due_reply(handle, tag)
        if isinstance(command, m.HandleQuery) and handle.state is OPEN:
            handle.channel.reply_keys.append(ANSWER | handle.number << 16)
        elif not tag and isinstance(command, m.HandleBrowse):  # for a failure, which always has a reply
            handle.channel.reply_keys.append(handle.number << 16)
        events.append(CommandReceived(command))

    def _open_handle(self, command: m.HandleOpen, events: list[Event]) -> None:
        """Process HANDLE OPEN, and record the replies that are due.

        Raises RemoteProtocolError if the channel is not open, and ScopedFault for too many handles or an
        invalid service type.
        """
        number = command.handle_id
        if not command.channel_id:
            raise RemoteProtocolError("channel-id 0", reason=ReplyCode.BAD_FIELD_VALUE)
        channel = self._channels.get(command.channel_id)
        if channel is None or channel.state is ChannelState.LEFT:
            text = f"channel {command.channel_id} is not open"
            raise RemoteProtocolError(text, reason=ReplyCode.CHANNEL_NOT_READY)
        existing = self._handles.get(number)
        # The client reuses the number without waiting for our response, so it is sent now.
        if existing is not None:
            self._answer_at_once(existing)
        handle = Handle(number, channel, command)
        if channel.state is ChannelState.CLOSING:
            handle.state = HandleState.CLOSING
            self._close_again(channel)
        elif self.handle_max and len(self._handles) >= self.handle_max <= len(self.handles):
            text = f"more than {self.handle_max} handles"
            raise ScopedFault(text, ReplyCode.INSUFFICIENT_RESOURCES, Scope.CHANNEL, channel.number)
        self._handles[number] = channel.handles[number] = handle
        if handle.state is OPEN:
            self._check_service(handle, command)
            if self._all_browse:
                handle.granted |= BROWSER
            if "producer" in handle.granted or handle.service == Service.PEER:
                self._ready[number] = handle
            if command.temporary and not self._all_browse:
                channel.reply_keys.append(ANSWER | number << 16)
            self._note_due_reply(handle, command.tag)
            if command.temporary and self._all_browse:
                channel.reply_keys.append(ANSWER | number << 16)
            events.append(CommandReceived(command))

    @staticmethod
    def _check_service(handle: Handle, command: m.HandleOpen) -> None:
        if not Service.QUEUE <= command.service_type <= Service.PEER:
            text = f"service-type {command.service_type}"
            raise ScopedFault(text, ReplyCode.SERVICE_TYPE_NOT_VALID, Scope.HANDLE, handle.number)
        if handle.service == Service.PEER and (command.consumer or command.browser or command.temporary):
            text = "consumer, browser and temporary are not for peers"
            raise ScopedFault(text, ReplyCode.BAD_FIELD_VALUE, Scope.HANDLE, handle.number)

    # --- messages

    def _forget_lead(self) -> None:
        self._lead = NO_LEAD

    def _admit(self, handle: Handle, command: Fragmented) -> None:
        if handle.number not in self._ready:
            raise _no_right(handle, "producer")
        handle.admit(command)

    def _append_whole(
        self,
        handle: Handle,
        command: m.HandleSend | m.HandleNotify,
        head: bytes,
        body: Body,
        events: list[Event],
    ) -> None:
        assert isinstance(command, m.HandleSend)
        self._append_sends([(handle.number, command.tag, head, body, command.dest_name.encode())], events)

    @staticmethod
    def _append_sends(rows: list[SendRow], events: list[Event]) -> None:
        last = events[-1] if events else None
        if isinstance(last, Sends):
            last.rows += rows
        else:
            events.append(Sends(rows))

    def _read_sends(self, data: bytes, at: int, end: int, events: list[Event]) -> int:
        """Decode consecutive complete SEND from position `at` to `end`, and append their event.

        Return the position behind the last one. Decoding stops at a message with several fragments, and at
        any other command. Bytes that equal those of the previous message are not decoded again.
        """
        rows: list[SendRow] = []
        add = rows.append
        lead, middle, middle_size, size, number, owe, head, name = self._lead
        while True:
            body_at = at + 7 + middle_size
            if data[at : at + 5] != lead or data[at + 7 : body_at] != middle:
                found = self._lead_at(data, at, end) if self._steps < STEPS_MAX else None
                if found is None:
                    break
                lead, middle, middle_size, size, number, owe, head, name = self._lead = found
                body_at = at + 7 + middle_size
            after = body_at + size
            if after > end:
                break
            tag = data[at + 5] << 8 | data[at + 6]
            if tag:
                owe(number << 16 | tag)
            add((number, tag, head, data[body_at:after], name))
            at = after
        if rows:
            self.received[HANDLE_SEND] += len(rows)
            self._append_sends(rows, events)
        return at

    def _lead_at(self, data: bytes, at: int, end: int) -> Lead | None:
        """Return the bytes around the confirm-tag of the message at `at`, and the values decoded from them.

        Later messages are compared with these bytes instead of being decoded. Return None if the message is
        incomplete, or if the fast path cannot decode it.
        """
        if at + SEND_FIELDS + 2 > end:
            return None
        size, kind, number, _, fragment_size, bits, name_size = SEND(data, at)
        handle = self._ready.get(number)
        if (
            kind != HANDLE_SEND
            or handle is None
            or handle.state is not OPEN
            or handle.channel.incoming is not None
            or bits & 0x0F
            or size != SEND_FIELDS + name_size
        ):
            return None
        whole = self._whole_at(data, at, end, size, SEND_FIELDS, fragment_size)
        if whole is None:
            return None
        name, head, body_size, body_at = whole
        middle = data[at + 7 : body_at]
        if len(head) > self._plain_max:
            return None
        self._steps += len(head) // STEP_BYTES
        handle.begin()
        return (
            data[at : at + 5],
            middle,
            len(middle),
            body_size,
            number,
            handle.channel.reply_keys.append,
            head,
            name,
        )

    def _read_acks(self, data: bytes, at: int, end: int, events: list[Event]) -> int:
        """Decode consecutive CHANNEL ACK from position `at` to `end`, and append their event.

        Return the position behind the last one.
        """
        rows: list[tuple[int, int, int]] = []
        channels = self._channels
        last_whole = end - ACK.size
        while at <= last_whole:
            size, kind, number, tag, message, mark = ACK.unpack_from(data, at)
            channel = channels.get(number)
            if (
                size != ACK_SIZE
                or kind != CHANNEL_ACK
                or mark != FRAME_END
                or channel is None
                or channel.state is not ChannelState.OPEN
            ):
                break
            if tag:
                channel.reply_keys.append(CHANNEL_KEY | tag)
            rows.append((number, tag, message))
            at += 12
        if rows:
            self.received[CHANNEL_ACK] += len(rows)
            self._append_acks(rows, events)
        return at

    @staticmethod
    def _append_acks(rows: list[tuple[int, int, int]], events: list[Event]) -> None:
        last = events[-1] if events else None
        if isinstance(last, Acks):
            last.rows += rows
        else:
            events.append(Acks(rows))


def _bad_tune(field: str, value: int, most: int) -> RemoteProtocolError:
    return RemoteProtocolError(f"{field} {value} does not fit {most}", reason=ReplyCode.BAD_FIELD_VALUE)


def _no_right(handle: Handle, right: str) -> ScopedFault:
    text = f"the handle was not opened as {right}"
    return ScopedFault(text, ReplyCode.ACCESS_REFUSED, Scope.HANDLE, handle.number)


ALWAYS: Final[dict[type[m.Command], Action]] = {
    m.ConnectionPing: ServerConnection._take_ping,
    m.ConnectionClose: ServerConnection._take_close,
}
ServerConnection._table = {
    State.AUTHENTICATION: {m.ConnectionResponse: ServerConnection._take_response, **ALWAYS},
    State.TUNING: {m.ConnectionTune: ServerConnection._take_tune, **ALWAYS},
    State.TUNED: {m.ConnectionOpen: ServerConnection._take_open, **ALWAYS},
    State.ACTIVE: ALWAYS,
}
