"""Client end of a connection, which links use.

    AUTHENTICATION -> AUTHENTICATING [-> AUTHENTICATION -> AUTHENTICATING ...] -> OPENING -> ACTIVE

The initiation is queued at once. The first challenge and TUNE are answered without the caller (the smaller
limit wins), and OPEN follows immediately. A reply must be one that is awaited, and NOTIFY and INDEX must have
been requested; anything else closes the connection. The module does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from struct import Struct
from typing import ClassVar, Final

from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.model.properties import Headers
from gateway.model.spooled_bodies import Body
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.codec import BODY_SIZE, encode_command
from gateway.protocols.amqpfast.connection import Action, Connection
from gateway.protocols.amqpfast.events import (
    NO_HANDLE,
    Challenged,
    CommandReceived,
    Event,
    Notifies,
    NotifyRow,
    Opened,
    Replies,
    ReplyRow,
)
from gateway.protocols.amqpfast.spec import (
    DELIVERED,
    FRAME_END,
    FRAME_MAX,
    FRAME_MAX_MIN,
    HANDLE_NOTIFY,
    HANDLE_REPLY,
    ID_MAX,
    INITIATION,
    MESSAGE_BYTES_MAX,
    NONE,
    PROTOCOL_VERSION,
    REDELIVERED,
    ReplyCode,
)
from gateway.protocols.amqpfast.states import (
    CHANNEL_KEY,
    Channel,
    ChannelState,
    Fragmented,
    Handle,
    HandleState,
    State,
)

NOTIFY: Final = Struct(">HBHIIBB").unpack_from  # size, type, handle, number, fragment-size, bits, name length
NOTIFY_FIELDS: Final = 14  # the size of NOTIFY with an empty name
SIZE_BYTES: Final = 2  # of the size field itself, which it does not count
NUMBER: Final = BODY_SIZE.unpack_from
REPLY: Final = Struct(">HBHHHBB")  # size, type, handle, tag, code, length of text, end
REPLY_SIZE: Final = 9
OPEN: Final = HandleState.OPEN  # a global name costs a quarter of an enum's attribute
LEAVING: Final = HandleState.LEAVING
SUCCESS: Final = int(ReplyCode.SUCCESS)
OPEN_TAG: Final = 1
WHOLE_BITS: Final = DELIVERED | REDELIVERED
Lead = tuple[bytes, bytes, int, int, int, int, bytes, bytes]
# Bytes before the message number; those behind it up to the body, and their number; body size, handle, bits,
# head, name.
NO_LEAD: Final[Lead] = (b"", b"", 0, 0, 0, 0, b"", b"")


class ClientConnection(Connection):
    """State machine of an AMQP/Fast connection at the client's end: bytes in, events out.

    `frame_max` (bytes), `channel_max` and `handle_max` (0: no limit) are the limits that this client
    requests. `heartbeat` is the interval in seconds at which the server should send. If `pings` is False, no
    PING is sent to a server that has sent none, and the server may be silent without limit, because the
    server of 2005 reads nothing that follows a PING. `responses` is what `encode_credentials` returned, for
    mechanism PLAIN; a server that offers only NONE gets no credentials. If `bounded` is True, each call of
    `receive_data` does a limited amount of work and sets `unread` if bytes remain.
    """

    _side: ClassVar[int] = m.TO_CLIENT
    _pauses: ClassVar[bool] = False

    def __init__(
        self,
        *,
        mechanism: str,
        responses: Headers,
        virtual_path: str = "/",
        client_name: str = "",
        frame_max: int = FRAME_MAX,
        channel_max: int = 0,
        handle_max: int = 0,
        heartbeat: int = 30,
        pings: bool = True,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        bounded: bool = False,
    ) -> None:
        super().__init__(State.AUTHENTICATION, message_bytes_max=message_bytes_max)
        self._bounded = bounded
        self.heartbeat = heartbeat
        self._pings = pings
        self._wish = m.ConnectionTune(frame_max, channel_max, handle_max, heartbeat)
        self._response = m.ConnectionResponse(mechanism, responses)
        self._responded = False
        self._open = m.ConnectionOpen(OPEN_TAG, virtual_path, client_name)
        self._last_channel = 0
        self._last_handle = 0
        self._lead = NO_LEAD
        self._runs: dict[int, Callable[[bytes, int, int, list[Event]], int]] = {
            HANDLE_NOTIFY: self._read_notifies,
            HANDLE_REPLY: self._read_replies,
        }
        self.out.append(INITIATION)

    # --- calls of the application

    def respond(self, responses: Headers) -> None:
        """Queue CONNECTION RESPONSE to a `Challenged` event.

        Raises LocalProtocolError if the server waits for no response.
        """
        if self._state is not State.AUTHENTICATION or not self._responded:
            raise LocalProtocolError("no challenge to answer")
        self._send(m.ConnectionResponse(self._response.mechanism, responses))
        self._state = State.AUTHENTICATING

    def open_channel(
        self,
        *,
        transacted: bool = False,
        restartable: bool = False,
        out_of_band: str = "",
        options: Headers = (),
        confirm: bool = True,
    ) -> int:
        """Queue CHANNEL OPEN with these options, and return the channel number, which can be used at once.

        `out_of_band` names the folder for bodies that are not sent over the connection. If `confirm` is True,
        the event Replies reports the server's reply. Raises LocalProtocolError if the connection is not open
        or all channel numbers are in use.
        """
        if self._state is not State.ACTIVE:
            raise LocalProtocolError("a channel needs an open connection")
        if self.channel_max and len(self._channels) >= self.channel_max:
            raise LocalProtocolError(f"all {self.channel_max} channels are in use")
        number = self._last_channel = _free(self._last_channel, self._channels)
        command = m.ChannelOpen(number, 0, transacted, restartable, options, out_of_band)
        channel = self._channels[number] = Channel(number, self.out, command)
        if confirm:
            command.tag = self._tag(channel, CHANNEL_KEY)
        self._closed_channels.discard(number)
        self._send(command)
        return number

    def open_handle(self, command: m.HandleOpen, *, confirm: bool = True) -> int:
        """Queue `command`, and return the number of the new handle, which can be used at once.

        `handle_id` and `tag` of `command` are set by this method. If `confirm` is True, the event Replies
        reports the server's reply. Raises LocalProtocolError if the channel is not open or all handle numbers
        are in use.
        """
        channel = self._channels.get(command.channel_id)
        if channel is None or channel.state is not ChannelState.OPEN:
            raise LocalProtocolError(f"channel {command.channel_id} is not open")
        if self.handle_max and len(self._handles) >= self.handle_max:
            raise LocalProtocolError(f"all {self.handle_max} handles are in use")
        number = self._last_handle = _free(self._last_handle, self._handles)
        handle = self._handles[number] = channel.handles[number] = Handle(number, channel, command)
        command.handle_id = number
        command.tag = self._tag(channel, number << 16) if confirm else 0
        if handle.expects_notify:
            self._ready[number] = handle
        self._send(command, channel.out)
        return number

    def new_tag(self, channel: int) -> int:
        """Return an unused confirm-tag for a command of `channel` or of one of its handles.

        Raises LocalProtocolError if the channel is not open or all tags are in use.
        """
        found = self._channels.get(channel)
        if found is None:
            raise LocalProtocolError(f"channel {channel} is not open")
        return self._next_tag(found)

    def _next_tag(self, channel: Channel) -> int:
        if len(channel.awaited) >= ID_MAX:
            raise LocalProtocolError(f"{ID_MAX} replies are pending already")
        channel.last_tag = channel.last_tag % ID_MAX + 1
        return channel.last_tag

    def _tag(self, channel: Channel, scope: int) -> int:
        tag = self._next_tag(channel)
        channel.awaited.append(scope | tag)
        return tag

    def send(self, command: m.Command) -> bool:
        """Queue a command of a channel or handle for which this class has no method of its own.

        Its tag is 0 or comes from `new_tag`. Return False, and queue nothing, if the channel or handle is
        closed. Raises LocalProtocolError if a selector makes the command larger than the server's frame-max
        (3.2.5), and for a command of another kind.
        """
        if isinstance(command, m.ChannelAck | m.ChannelCommit | m.ChannelRollback):
            channel = self._channels.get(command.channel_id)
            if channel is None or channel.state is not ChannelState.OPEN:
                return False
            if command.tag:
                channel.awaited.append(CHANNEL_KEY | command.tag)
        elif isinstance(command, SENT_BY_HANDLES):
            handle = self._handles.get(command.handle_id)
            if handle is None or handle.state is not OPEN:
                return False
            channel = handle.channel
            if isinstance(command, m.HandleConsume | m.HandleQuery):
                self._check_selector(command)
            tag = getattr(command, "tag", 0)
            if tag:
                channel.awaited.append(handle.number << 16 | tag)
            if isinstance(command, m.HandleConsume | m.HandleBrowse):
                handle.expects_notify = True
                self._ready[handle.number] = handle
            elif isinstance(command, m.HandleQuery):
                handle.queries += 1
        else:
            raise LocalProtocolError(f"{command.name} is not sent this way")
        self._send(command, channel.out)
        return True

    def _check_selector(self, command: m.HandleConsume | m.HandleQuery) -> None:
        """Raise LocalProtocolError if the selector makes the command larger than frame-max."""
        if not command.selector:
            return  # no other field of a command is long
        size = len(encode_command(command)) - SIZE_BYTES
        if size > self.frame_max:
            raise LocalProtocolError(
                f"a selector of {len(command.selector)} bytes is too long: {command.name} would"
                f" have {size} bytes, but frame-max is {self.frame_max}"
            )

    def ack(self, channel: int, message_number: int) -> None:
        """Queue CHANNEL ACK of all messages up to `message_number`, without a confirm-tag."""
        self.send(m.ChannelAck(channel, 0, message_number))

    # --- the negotiation

    def _take_challenge(self, command: m.ConnectionChallenge, events: list[Event]) -> None:
        """Process CONNECTION CHALLENGE: queue the response to the first one, report a later one by an event.

        Raises RemoteProtocolError for an unsupported version, and if the mechanism is not offered.
        """
        if command.version != PROTOCOL_VERSION:
            text = f"the server uses version {command.version}"
            raise RemoteProtocolError(text, reason=ReplyCode.NOT_IMPLEMENTED)
        if self._responded:
            self._state = State.AUTHENTICATION
            events.append(Challenged(command.mechanisms, command.challenges))
            return
        offered = command.mechanisms.upper().split()
        is_offered = self._response.mechanism.upper() in offered
        if not is_offered and NONE in offered:
            self._response = m.ConnectionResponse(NONE)
        elif not is_offered:
            text = f"the server offers {command.mechanisms}, not {self._response.mechanism}"
            raise RemoteProtocolError(text, reason=ReplyCode.BAD_FIELD_VALUE)
        self._responded = True
        self._send(self._response)
        self._state = State.AUTHENTICATING

    def _take_tune(self, command: m.ConnectionTune, events: list[Event]) -> None:
        """Process CONNECTION TUNE: apply and queue the smaller limits, and queue CONNECTION OPEN."""
        if command.frame_max < FRAME_MAX_MIN:
            text = f"frame-max {command.frame_max} is below {FRAME_MAX_MIN}"
            raise RemoteProtocolError(text, reason=ReplyCode.BAD_FIELD_VALUE)
        wish = self._wish
        agreed = m.ConnectionTune(
            min(wish.frame_max, command.frame_max),
            _smaller(wish.channel_max, command.channel_max),
            _smaller(wish.handle_max, command.handle_max),
            wish.heartbeat,
        )
        self._send(agreed)
        self._agree(agreed, command.heartbeat)
        self._send(self._open)
        self._state = State.OPENING

    def _take_reply(self, command: m.ConnectionReply, events: list[Event]) -> None:
        if command.tag != OPEN_TAG:
            raise self._invalid(command)
        self._state = State.ACTIVE
        events.append(Opened())

    # --- channels and handles

    def _channel_command(self, command: m.ChannelCommand, events: list[Event]) -> None:
        if isinstance(command, m.ChannelClose):
            self._take_channel_close(command, events)
            return
        assert isinstance(command, m.ChannelReply)
        channel = self._channels[command.channel_id]
        self._settle(channel, CHANNEL_KEY | command.tag, command)
        row = (channel.number, NO_HANDLE, command.tag, command.reply_code, command.reply_text)
        self._append_replies([row], events)

    def _handle_command(self, command: m.HandleCommand, events: list[Event]) -> None:
        """Process a command on a handle, other than NOTIFY and PREPARE, that the handle's state allows."""
        handle = self._handles[command.handle_id]
        if isinstance(command, m.HandleReply):
            tag, code = command.tag, command.reply_code
            if tag or code < ReplyCode.MESSAGE_NOT_FOUND:  # a failed BROWSE has a reply without a tag, too
                self._settle(handle.channel, handle.number << 16 | tag, command)
            row = (handle.channel.number, handle.number, tag, code, command.reply_text)
            self._append_replies([row], events)
        elif isinstance(command, m.HandleClose):
            self._take_handle_close(command, events)
        elif isinstance(command, m.HandleReady):
            self._take_ready(handle, command, events)
        else:
            if isinstance(command, m.HandleCreated) and handle.unnamed:
                handle.unnamed = False
            elif isinstance(command, m.HandleIndex) and handle.queries:
                handle.queries -= 1
            else:
                raise self._invalid(command)
            events.append(CommandReceived(command))

    def _settle(self, channel: Channel, key: int, command: m.ChannelReply | m.HandleReply) -> None:
        """Stop waiting for the reply that has arrived as `command`.

        `key` identifies the reply if it comes from the handle or channel that sent the request. The reply to
        an ACK may come from the channel or from one of its handles (3.3.9). Raises RemoteProtocolError 503 if
        no such reply is expected.
        """
        awaited = channel.awaited
        for wanted in (key, CHANNEL_KEY | command.tag):
            if wanted in awaited:
                awaited.remove(wanted)
                return
        raise self._invalid(command)

    @staticmethod
    def _append_replies(rows: list[ReplyRow], events: list[Event]) -> None:
        last = events[-1] if events else None
        if isinstance(last, Replies):
            last.rows += rows
        else:
            events.append(Replies(rows))

    def _read_replies(self, data: bytes, at: int, end: int, events: list[Event]) -> int:
        """Decode consecutive HANDLE REPLY from position `at` to `end`, and append their event.

        Return the position behind the last one. Decoding stops at a reply with a text or with a code other
        than 200, and at a reply that is not the next expected one.
        """
        rows: list[ReplyRow] = []
        handles = self._handles
        last_whole = end - REPLY.size
        while at <= last_whole:
            size, kind, number, tag, code, text_size, mark = REPLY.unpack_from(data, at)
            handle = handles.get(number)
            if (
                kind != HANDLE_REPLY
                or size != REPLY_SIZE
                or code != SUCCESS
                or text_size
                or mark != FRAME_END
                or handle is None
                or (handle.state is not OPEN and handle.state is not LEAVING)
            ):
                break
            awaited = handle.channel.awaited
            if not awaited or awaited[0] != number << 16 | tag:
                break
            awaited.popleft()
            rows.append((handle.channel.number, number, tag, code, ""))
            at += REPLY.size
        if rows:
            self.received[HANDLE_REPLY] += len(rows)
            self._append_replies(rows, events)
        return at

    # --- messages

    def _forget_lead(self) -> None:
        self._lead = NO_LEAD

    def _admit(self, handle: Handle, command: Fragmented) -> None:
        if handle.number not in self._ready and not isinstance(command, m.HandlePrepare):
            raise self._invalid(command)
        handle.admit(command)

    def _append_whole(
        self,
        handle: Handle,
        command: m.HandleSend | m.HandleNotify,
        head: bytes,
        body: Body,
        events: list[Event],
    ) -> None:
        assert isinstance(command, m.HandleNotify)
        bits = command.delivered * DELIVERED | command.redelivered * REDELIVERED
        name = command.dest_name.encode()
        self._append_notifies([(handle.number, command.message_number, bits, head, body, name)], events)

    @staticmethod
    def _append_notifies(rows: list[NotifyRow], events: list[Event]) -> None:
        last = events[-1] if events else None
        if isinstance(last, Notifies):
            last.rows += rows
        else:
            events.append(Notifies(rows))

    def _read_notifies(self, data: bytes, at: int, end: int, events: list[Event]) -> int:
        """Decode consecutive complete NOTIFY from position `at` to `end`, and append their event.

        Return the position behind the last one. Decoding stops at a message with several fragments, and at
        any other command. Bytes that equal those of the previous message are not decoded again.
        """
        rows: list[NotifyRow] = []
        add = rows.append
        lead, middle, middle_size, size, handle, bits, head, name = self._lead
        while True:
            body_at = at + 9 + middle_size
            if data[at : at + 5] != lead or data[at + 9 : body_at] != middle:
                found = self._lead_at(data, at, end)
                if found is None:
                    break
                lead, middle, middle_size, size, handle, bits, head, name = self._lead = found
                body_at = at + 9 + middle_size
            after = body_at + size
            if after > end:
                break
            add((handle, NUMBER(data, at + 5)[0], bits, head, data[body_at:after], name))
            at = after
        if rows:
            self.received[HANDLE_NOTIFY] += len(rows)
            self._append_notifies(rows, events)
        return at

    def _lead_at(self, data: bytes, at: int, end: int) -> Lead | None:
        """Return the constant bytes of the message at offset `at`, and the values decoded from them.

        The constant bytes are those before and after the delivery number, up to the body. Later messages are
        compared with these bytes instead of being decoded. `end` is the end of the received bytes. Return
        None if the message is incomplete, or if the fast path cannot decode it.
        """
        if at + NOTIFY_FIELDS + 2 > end:
            return None
        size, kind, number, _, fragment_size, bits, name_size = NOTIFY(data, at)
        handle = self._ready.get(number)
        if (
            kind != HANDLE_NOTIFY
            or handle is None
            or handle.channel.incoming is not None
            or bits & 0x3F & ~WHOLE_BITS
            or size != NOTIFY_FIELDS + name_size
        ):
            return None
        whole = self._whole_at(data, at, end, size, NOTIFY_FIELDS, fragment_size)
        if whole is None:
            return None
        name, head, body_size, body_at = whole
        handle.begin()
        middle = data[at + 9 : body_at]
        return data[at : at + 5], middle, len(middle), body_size, number, bits & WHOLE_BITS, head, name


SENT_BY_HANDLES: Final = (
    m.HandleConsume,
    m.HandleCancel,
    m.HandleFlow,
    m.HandleUnget,
    m.HandleQuery,
    m.HandleBrowse,
)


def _free(last: int, used: dict[int, Channel] | dict[int, Handle]) -> int:
    """Return the lowest number above `last` that is not in `used`, or else the lowest one from 1.

    Raises LocalProtocolError if all numbers up to ID_MAX are in use.
    """
    for number in chain(range(last + 1, ID_MAX + 1), range(1, last + 1)):
        if number not in used:
            return number
    raise LocalProtocolError("all numbers are in use")


def _smaller(ours: int, theirs: int) -> int:
    """Return the smaller of two limits, where 0 means no limit."""
    return min(ours, theirs) if ours and theirs else ours or theirs


ALWAYS: Final[dict[type[m.Command], Action]] = {
    m.ConnectionPing: ClientConnection._take_ping,
    m.ConnectionClose: ClientConnection._take_close,
}
ClientConnection._table = {
    State.AUTHENTICATION: {m.ConnectionChallenge: ClientConnection._take_challenge, **ALWAYS},
    State.AUTHENTICATING: {
        m.ConnectionChallenge: ClientConnection._take_challenge,
        m.ConnectionTune: ClientConnection._take_tune,
        **ALWAYS,
    },
    State.OPENING: {m.ConnectionReply: ClientConnection._take_reply, **ALWAYS},
    State.ACTIVE: ALWAYS,
}
