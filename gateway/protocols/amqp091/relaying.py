"""A conversation that is passed on, between a client and a server that speak for themselves: octets in,
octets out, one direction each.

Frames are passed as they are, whole, many at a time: what lies between two frames that need a look is one
slice. Methods that name something are decoded and put before a Judge; a message's method waits for its
content header, so that a message is passed on or refused as a whole; of everything else only the seven octets
in front are read. Heartbeats are each side's own. What breaks the rules costs the connection, as with a
server.

A refused method costs its channel. The server is told that the channel closes, and when it has answered, and
all that it had to say on it is said, the client hears why (`ToClient.refuse`). Until then nothing more of the
client is read: it might open the channel again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from struct import Struct
from typing import Final, Protocol

from gateway.errors import RemoteProtocolError
from gateway.model.gathered import Gathered
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import (
    CONTENT_HEADER_MIN,
    FRAME,
    check_fields,
    decode_content_header,
    decode_method,
    encode_frame,
    encode_method_frame,
    encode_short_string,
    frame_error,
    frame_octets,
    reply_text,
)
from gateway.protocols.amqp091.connection import SETTLE, SETTLE_SIZE
from gateway.protocols.amqp091.spec import (
    BASIC,
    BASIC_ACK,
    BASIC_DELIVER,
    BASIC_GET_OK,
    BASIC_PUBLISH,
    BASIC_RETURN,
    FLAG_HEADERS,
    FLAG_USER_ID,
    FRAME_BODY,
    FRAME_END,
    FRAME_HEADER,
    FRAME_HEARTBEAT,
    FRAME_KINDS,
    FRAME_METHOD,
    FRAME_OVERHEAD,
    FRAME_PREFIX,
    PUBLISH_METHOD_MAX,
    ReplyCode,
)
from gateway.protocols.amqp091.states import CONNECTION_CLASS
from gateway.protocols.amqp091.table import FIELD_OCTETS_MIN
from gateway.protocols.amqp091.translate import COPIES, ENGINE_HEADER

HEAD: Final = FRAME.unpack_from
BODY_SIZE: Final = Struct(">Q").unpack_from
TAG_OCTETS: Final = 9  # a delivery tag, and whether it comes again
IDS: Final = Struct(">I").unpack_from
READ_SETTLE: Final = SETTLE.unpack_from
FLAGS: Final = Struct(">H").unpack_from
JUDGED_MAX: Final = 64  # methods that are decoded in one turn: a few milliseconds
CHANNEL_CLOSE: Final = m.ChannelClose.index
CHANNEL_CLOSE_OK: Final = m.ChannelCloseOk.index
CHANNEL_OPEN: Final = m.ChannelOpen.index
CLOSE: Final = m.ConnectionClose.index
CLOSE_OK: Final = m.ConnectionCloseOk.index
SECRET: Final = m.ConnectionUpdateSecret.index
CONSUME_OK: Final = m.BasicConsumeOk.index
CANCEL: Final = m.BasicCancel.index
CONTENTS: Final = frozenset({BASIC_DELIVER, BASIC_GET_OK, BASIC_RETURN})
PLAIN: Final = frozenset(
    one.index
    for one in (
        m.ChannelFlow,
        m.ChannelFlowOk,
        m.BasicQos,
        m.BasicAck,
        m.BasicCancelOk,
        m.BasicNack,
        m.BasicReject,
        m.BasicRecover,
        m.BasicRecoverAsync,
        m.ConfirmSelect,
        m.TxSelect,
        m.TxCommit,
        m.TxRollback,
    )
)
"""What a client says that names nothing."""
JUDGED: Final = frozenset(
    one.index
    for one in (
        m.AccessRequest,
        m.ExchangeDeclare,
        m.ExchangeDelete,
        m.ExchangeBind,
        m.ExchangeUnbind,
        m.QueueDeclare,
        m.QueueBind,
        m.QueueUnbind,
        m.QueuePurge,
        m.QueueDelete,
        m.BasicConsume,
        m.BasicCancel,
        m.BasicGet,
    )
)
"""What a client says that names something."""
WATCHED: Final = frozenset({CHANNEL_CLOSE, CHANNEL_CLOSE_OK, CONSUME_OK, CANCEL})
"""What a server says that the relay has to know."""


SPECIAL: Final = FLAG_HEADERS | FLAG_USER_ID
OBEYED: Final = tuple(encode_short_string(name) for name in (*COPIES, ENGINE_HEADER))
"""Headers that a server obeys, or other gateways believe."""


Lead = tuple[bytes, int, "Relayed | None", bytes]
"""Octets in front of a body that are as those of the last message, how far it is to the next one, the channel
and the arguments of the publish."""
NO_LEAD: Final[Lead] = (b"", 1, None, b"")


class Judge(Protocol):
    """Whether a client may have what it asks for. Both methods raise RemoteProtocolError for what it may not,
    with a code that closes a channel; False: that is not known yet, and they are asked again."""

    def allows(self, channel: Relayed, method: m.Method) -> bool:
        """A method that names something; for a publish, what its octets say."""

    def content(self, channel: Relayed, publish: bytes, raw: bytes) -> bytes | None:
        """The properties of a message that says who sends it, or has headers of its own meaning; returns
        those that it may have. None: that is not known yet."""

    def remember(self, publish: bytes) -> None:
        """A publish of these octets has been allowed."""

    def knows(self, publish: bytes) -> bool:
        """The octets of this publish have been allowed before."""


class Relayed:
    """A channel of the client's: what it has begun to publish, and what it consumes."""

    __slots__ = (
        "client_owes",
        "closing",
        "consumers",
        "last_queue",
        "left",
        "number",
        "pending",
        "publish",
        "refused",
        "server_owes",
        "unnamed",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.closing = False  # nothing the client says on it counts but the end
        self.client_owes = False  # a channel.close-ok
        self.server_owes = False
        self.refused = False  # and the server is done with it
        self.publish: bytes | None = None  # arguments of the method whose content header has not come
        self.pending = b""  # the frame of that method, when it is not passed on together with the header
        self.left = 0  # octets of the body that are still to come
        self.last_queue = ""  # which an empty name means
        self.consumers: dict[str, str] = {}  # queues by consumer tag
        self.unnamed: deque[str] = deque()  # queues whose consumers the server is about to name

    @property
    def consuming(self) -> list[str]:
        """The queues that are consumed."""
        return [*self.consumers.values(), *self.unnamed]

    def close(self) -> None:
        """It is over, but for the client's agreement."""
        self.closing = True
        self.publish = None
        self.pending = b""
        self.left = 0
        self.consumers.clear()
        self.unnamed.clear()


class Refusal:
    """What the client is told of a channel that it loses."""

    __slots__ = ("channel", "fault")

    def __init__(self, channel: Relayed, fault: RemoteProtocolError) -> None:
        self.channel = channel
        self.fault = fault


class Direction:
    """Frames of one side, as far as they have come whole."""

    def __init__(self, frame_max: int, counts: defaultdict[str, int]) -> None:
        """`counts`: of frames, by name."""
        self.counts = counts
        self.messages = 0
        self.closing = False  # a connection.close has passed: its answer is all that is to come
        self.closed = False  # the answer has passed
        self._payload_max = frame_max - FRAME_OVERHEAD
        self._rest: Gathered | None = None  # a frame that has not come whole, or what waits
        self._needed = 0  # octets before it says more

    def _gathered(self, data: bytes) -> bytes | None:
        """All that has come and waits; None: of a frame that has begun more is needed."""
        rest = self._rest
        if rest is None:
            return data
        rest.add(data)
        if rest.octets < self._needed:
            return None
        self._rest = None
        return rest.joined()

    def unread_octets(self) -> bytes:
        """What has come and is not passed on, once."""
        rest, self._rest = self._rest, None
        return b"" if rest is None else rest.joined()

    def _keep_rest(self, data: bytes, at: int, *, waits: bool) -> None:
        """From `at` on: a frame that has not come whole, or what `waits` to be looked at again."""
        left = len(data) - at
        self._rest = Gathered(data[at:]) if left else None
        # The size of a frame counts when that has been looked at.
        self._needed = 0 if waits else FRAME_OVERHEAD if left < FRAME_OVERHEAD else frame_octets(data, at)

    def _head(self, data: bytes, at: int, end: int) -> tuple[int, int, int]:
        """Type, channel and end of the frame at `at`; the end is 0 when it is not here. Raises
        RemoteProtocolError."""
        kind, number, size = HEAD(data, at)
        if kind not in FRAME_KINDS:
            raise frame_error(f"frame type {kind} is not known")
        if size > self._payload_max:
            most = self._payload_max + FRAME_OVERHEAD
            raise frame_error(f"a frame of {size} octets exceeds frame-max {most}")
        after = at + size + FRAME_OVERHEAD
        if after > end:
            return kind, number, 0
        if data[after - 1] != FRAME_END:
            raise frame_error(f"a frame ends with 0x{data[after - 1]:02x}")
        return kind, number, after

    @staticmethod
    def _index(data: bytes, at: int, after: int) -> int:
        if after - at < FRAME_OVERHEAD + 4:
            raise frame_error("a method frame holds no method")
        index: int = IDS(data, at + FRAME_PREFIX)[0]
        return index


class ToServer(Direction):
    """What a client says."""

    def __init__(
        self,
        judge: Judge,
        counts: defaultdict[str, int],
        *,
        frame_max: int,
        channel_max: int,
        message_bytes_max: int,
        properties_max: int,
        properties_bytes_max: int,
    ) -> None:
        super().__init__(frame_max, counts)
        self.channels: dict[int, Relayed] = {}
        self.refusal: Refusal | None = None  # for which everything waits
        self.secrets: list[m.ConnectionUpdateSecret] = []  # for the gateway, and not for the server
        self.answers: list[bytes] = []  # for the client
        self.undecided = False  # the judge has to be asked again
        self.unread = False  # it was enough for one turn
        self._judge = judge
        self._channel_max = channel_max
        self._message_bytes_max = message_bytes_max
        self._properties_max = properties_max
        self._properties_bytes_max = properties_bytes_max
        self._plain_max = min(properties_max * FIELD_OCTETS_MIN, properties_bytes_max)
        self._judged = 0
        self._out: list[bytes] = []
        self._start = 0  # of what is not in `_out` yet
        self._sound = 0  # the end of what came before a fault
        self._plain = False  # the last header was of the plainest form
        self._octets = b""  # arguments of the last publish
        self._lead: Lead = NO_LEAD

    def receive_data(self, data: bytes) -> None:
        """Look at what has come; `taken` is for the server. Stops behind what is refused, before what is
        `undecided`, and when it was enough (`unread`); then call it with b"". Raises RemoteProtocolError for
        what ends the connection."""
        whole = self._gathered(data)
        if whole is None:
            return
        self._start = self._judged = 0
        self.undecided = self.unread = False
        at = 0
        if self.refusal is None:
            try:
                at = self._read(whole)
            except RemoteProtocolError:
                self._cut(whole, self._sound)  # what was said before counts
                raise
        self._cut(whole, at)
        waits = self.undecided or self.unread or self.refusal is not None or self.closed
        self._keep_rest(whole, at, waits=waits)

    def taken(self) -> list[bytes]:
        """Octets for the server, once."""
        out, self._out = self._out, []
        return out

    def _cut(self, data: bytes, at: int, after: int = -1) -> None:
        """Everything up to `at` is passed on, and what is between that and `after` is not."""
        if at > self._start:
            self._out.append(data[self._start : at])
        self._start = at if after < 0 else after

    def _read(self, data: bytes) -> int:  # noqa: C901, PLR0912, PLR0915 - every frame
        """Look at all frames that are whole; returns where the first one begins that is not."""
        at, end = 0, len(data)
        counts, channels = self.counts, self.channels
        waiting: Relayed | None = None  # has a publish right before `at`, which waits for its header
        publish_at = 0
        plain: Relayed | None = None  # has a message of the plainest form, from `plain_at` on
        plain_at = plain_end = -1
        try:
            while at + FRAME_OVERHEAD <= end:
                kind, number, after = self._head(data, at, end)
                if not after:
                    break
                if waiting is not None and (kind != FRAME_HEADER or number != waiting.number):
                    self._keep(data, waiting, publish_at, at)
                    waiting = None
                if kind == FRAME_BODY:
                    counts["body"] += 1
                    channel = channels.get(number)
                    if channel is None or channel.closing:
                        self._drop(data, at, after, channel, number)
                    else:
                        size = after - at - FRAME_OVERHEAD
                        if size > channel.left or channel.publish is not None:
                            raise _unexpected(channel)
                        channel.left -= size
                        if plain_at >= 0 and at == plain_end and not channel.left and channel is plain:
                            lead = data[plain_at : at + FRAME_PREFIX]
                            self._lead = (lead, len(lead) + size + 1, channel, self._octets)
                            plain_at = -1
                            after = self._take_run(data, after, end)
                elif kind == FRAME_HEADER:
                    counts["header"] += 1
                    channel = channels.get(number)
                    if channel is None or channel.closing:
                        self._drop(data, at, after, channel, number)
                    else:
                        taken = self._take_header(data, channel, at, after, publish_at if waiting else -1)
                        plain_at = publish_at if waiting is not None and self._plain else -1
                        plain, plain_end = channel, after
                        if not taken:
                            if waiting is not None:
                                waiting.publish = None
                                counts["basic.publish"] -= 1
                                at = publish_at
                            counts["header"] -= 1
                            self.undecided = True
                            return at
                    waiting = None
                elif kind == FRAME_HEARTBEAT:
                    if number or after - at != FRAME_OVERHEAD:
                        text = "a heartbeat is empty and on channel 0"
                        raise RemoteProtocolError(text, reason=ReplyCode.UNEXPECTED_FRAME)
                    counts["heartbeat"] += 1
                    self._cut(data, at, after)
                else:
                    index = self._index(data, at, after)
                    plain_at = -1
                    if index == BASIC_ACK and after - at == SETTLE.size and number:
                        after = self._take_acks(data, at, end)
                    elif not number:
                        self._take_connection(data, at, after, index)
                    elif index == BASIC_PUBLISH:
                        channel = self._open_channel(number, index)
                        if channel.closing:
                            self._cut(data, at, after)
                        elif (run := self._take_run(data, at, end)) != at:
                            after = run
                        elif not self._take_publish(data, channel, at, after):
                            return at
                        elif channel.publish is not None:
                            waiting, publish_at = channel, at
                    elif not self._take_method(data, number, at, after, index):
                        return at
                at = after
                if self.refusal is not None or self.closed:
                    return at
                if self._judged >= JUDGED_MAX and waiting is None and at < end:
                    self.unread = True
                    return at
        except RemoteProtocolError:
            self._sound = at if waiting is None else publish_at
            raise
        if waiting is not None:
            self._keep(data, waiting, publish_at, at)
        return at

    def _keep(self, data: bytes, channel: Relayed, publish_at: int, at: int) -> None:
        """A publish whose header does not follow is passed on when that has come."""
        self._cut(data, publish_at, at)
        channel.pending = data[publish_at:at]

    def _drop(self, data: bytes, at: int, after: int, channel: Relayed | None, number: int) -> None:
        """Content for a channel that is about to end."""
        if channel is None:
            raise RemoteProtocolError(
                f"content on channel {number}, which is not open",
                reason=ReplyCode.CHANNEL_ERROR,
                class_id=BASIC,
            )
        self._cut(data, at, after)

    def _refuse(self, data: bytes, at: int, after: int, channel: Relayed, fault: RemoteProtocolError) -> None:
        """What is in front is passed on, and this is not."""
        self._cut(data, at, after)
        channel.close()
        self.refusal = Refusal(channel, fault)

    # Runs.

    def _take_run(self, data: bytes, at: int, end: int) -> int:
        """Messages that differ from the last one in nothing but their bodies; returns where they end."""
        lead, step, channel, publish = self._lead
        if channel is None or channel.closing or channel.left or channel.publish is not None:
            return at
        began = at
        if not data.startswith(lead, at) or not self._judge.knows(publish):
            return at
        while data.startswith(lead, at) and at + step <= end and data[at + step - 1] == FRAME_END:
            at += step
        if at != began:
            count = (at - began) // step
            self.messages += count
            for word in ("basic.publish", "header", "body"):
                self.counts[word] += count
        return at

    def _take_acks(self, data: bytes, at: int, end: int) -> int:
        """Acknowledgements; returns where they end, behind the first one at least."""
        began, channels = at, self.channels
        while at + SETTLE.size <= end:
            kind, number, size, index, _, _, last = READ_SETTLE(data, at)
            if index != BASIC_ACK or kind != FRAME_METHOD or size != SETTLE_SIZE or last != FRAME_END:
                break
            channel = channels.get(number)
            if channel is None or channel.closing or channel.left or channel.publish is not None:
                if at == began:
                    self._take_method(data, number, at, at + SETTLE.size, index)
                    return at + SETTLE.size
                break
            at += SETTLE.size
        self.counts["basic.ack"] += (at - began) // SETTLE.size
        return at

    # Contents.

    def _take_publish(self, data: bytes, channel: Relayed, at: int, after: int) -> bool:
        """False: it is not decided whether it may."""
        octets = data[at + FRAME_PREFIX + 4 : after - 1]
        if channel.left or channel.publish is not None:
            raise _unexpected(channel)
        if not self._judge.knows(octets):
            if len(octets) > PUBLISH_METHOD_MAX:
                raise _fault("arguments too long", ReplyCode.SYNTAX_ERROR, BASIC_PUBLISH)
            self._judged += 1
            method = decode_method(data[at + FRAME_PREFIX : after - 1])
            try:
                if not self._judge.allows(channel, method):
                    self.undecided = True
                    return False
            except RemoteProtocolError as fault:
                self._refuse(data, at, after, channel, fault)
                return True
            self._judge.remember(octets)
        channel.publish = octets
        self.counts["basic.publish"] += 1
        return True

    def _take_header(self, data: bytes, channel: Relayed, at: int, after: int, publish_at: int) -> bool:
        """`publish_at`: where its publish stands, right in front of it; -1: that came before. False: it is
        not decided whether it may."""
        publish = channel.publish
        if publish is None:
            raise _unexpected(channel)
        payload_at = at + FRAME_PREFIX
        octets = after - 1 - payload_at
        if octets < CONTENT_HEADER_MIN:
            raise frame_error("a content header is cut short")
        size, raw = decode_content_header(data[payload_at : after - 1], BASIC_PUBLISH)
        given = raw
        try:
            if size > self._message_bytes_max:
                text = f"message size {size} is larger than configured max size {self._message_bytes_max}"
                raise _fault(f"PRECONDITION_FAILED - {text}", ReplyCode.PRECONDITION_FAILED, BASIC_PUBLISH)
            if len(raw) > self._plain_max:
                self._check_properties(raw)
            special = FLAGS(raw)[0] & SPECIAL != 0 and self._special(raw)
            if special:
                self._judged += 1
                allowed = self._judge.content(channel, publish, raw)
                if allowed is None:
                    return False
                given = allowed
        except RemoteProtocolError as fault:
            self._refuse(data, at if publish_at < 0 else publish_at, after, channel, fault)
            return True
        channel.publish = None
        channel.left = size
        self.messages += 1
        self._plain = bool(size) and not special
        self._octets = publish
        if channel.pending:
            self._cut(data, at)
            self._out.append(channel.pending)
            channel.pending = b""
        if given is not raw:
            self._cut(data, at, after)
            head = data[payload_at : payload_at + CONTENT_HEADER_MIN - 2]
            self._out.append(encode_frame(FRAME_HEADER, channel.number, head + given))
        return True

    @staticmethod
    def _special(raw: bytes) -> bool:
        """Whether the properties say what the server would obey, or other gateways would believe."""
        flags = FLAGS(raw)[0]
        return bool(flags & FLAG_USER_ID) or (flags & FLAG_HEADERS and any(name in raw for name in OBEYED))

    def _check_properties(self, raw: bytes) -> None:
        """Raise 406 when there are more than we take."""
        size, most = len(raw), self._properties_bytes_max
        if size > most:
            text = f"PRECONDITION_FAILED - properties of {size} octets exceed configured max size {most}"
            raise _fault(text, ReplyCode.PRECONDITION_FAILED, BASIC_PUBLISH)
        try:
            check_fields(raw, self._properties_max)
        except RemoteProtocolError as fault:
            text = f"PRECONDITION_FAILED - headers: {fault}"
            raise _fault(text, ReplyCode.PRECONDITION_FAILED, BASIC_PUBLISH) from None

    # Methods.

    def _open_channel(self, number: int, index: int) -> Relayed:
        channel = self.channels.get(number)
        if channel is None:
            raise _fault("CHANNEL_ERROR - expected 'channel.open'", ReplyCode.CHANNEL_ERROR, index)
        return channel

    def _take_connection(self, data: bytes, at: int, after: int, index: int) -> None:
        """On channel 0."""
        if index == CLOSE:
            self.closing = True
        elif index == CLOSE_OK:
            self.closed = True
        elif index == SECRET:
            method = decode_method(data[at + FRAME_PREFIX : after - 1], self._properties_max)
            assert isinstance(method, m.ConnectionUpdateSecret)
            self.secrets.append(method)
            self._cut(data, at, after)
        else:
            text = "CHANNEL_ERROR - unexpected method in connection state running"
            raise _fault(text, ReplyCode.CHANNEL_ERROR, index)
        self.counts[m.METHODS[index].name] += 1

    def _take_method(self, data: bytes, number: int, at: int, after: int, index: int) -> bool:
        """On a channel. False: it is not decided whether it may."""
        if index not in m.METHODS:
            text = f"FRAME_ERROR - method {index >> 16}.{index & 0xFFFF} is not known"
            raise _fault(text, ReplyCode.FRAME_ERROR, index)
        if index == CHANNEL_OPEN:
            self._begin(number, index)
            self.counts["channel.open"] += 1
            return True
        channel = self._open_channel(number, index)
        if index == CHANNEL_CLOSE_OK:
            if not channel.client_owes:
                raise _invalid(index)
            channel.client_owes = False
            if channel.refused:
                self._cut(data, at, after)
            if not channel.server_owes:
                del self.channels[number]
        elif index == CHANNEL_CLOSE:
            if not channel.closing and (channel.left or channel.publish is not None):
                raise _unexpected(channel)
            if channel.refused:  # both at once, and the server does not know it any more
                self._cut(data, at, after)
                self.answers.append(encode_method_frame(number, m.ChannelCloseOk()))
            else:
                channel.server_owes = True
            channel.close()
        elif channel.closing:
            self._cut(data, at, after)
            return True
        elif channel.left or channel.publish is not None:
            raise _unexpected(channel)
        elif index in JUDGED:
            return self._put_before_judge(data, channel, at, after)
        elif index not in PLAIN:
            raise _invalid(index)
        self.counts[m.METHODS[index].name] += 1
        return True

    def _put_before_judge(self, data: bytes, channel: Relayed, at: int, after: int) -> bool:
        self._judged += 1
        method = decode_method(data[at + FRAME_PREFIX : after - 1], self._properties_max)
        try:
            if not self._judge.allows(channel, method):
                self.undecided = True
                return False
        except RemoteProtocolError as fault:
            self._refuse(data, at, after, channel, fault)
        self.counts[method.name] += 1
        return True

    def _begin(self, number: int, index: int) -> None:
        """channel.open."""
        if number in self.channels:
            raise _fault("CHANNEL_ERROR - second 'channel.open' seen", ReplyCode.CHANNEL_ERROR, index)
        if len(self.channels) >= self._channel_max:
            text = (
                f"NOT_ALLOWED - number of channels opened ({len(self.channels)}) has reached the negotiated "
                f"channel_max ({self._channel_max})"
            )
            raise RemoteProtocolError(text, reason=ReplyCode.NOT_ALLOWED)
        self.channels[number] = Relayed(number)


class ToClient(Direction):
    """What a server says. `channels` are those of the client."""

    def __init__(
        self, channels: dict[int, Relayed], counts: defaultdict[str, int], *, frame_max: int
    ) -> None:
        super().__init__(frame_max, counts)
        self.answers: list[bytes] = []  # for the server
        self.refused: Refusal | None = None  # the server has been told that its channel closes
        self._channels = channels
        self._lead: tuple[bytes, bytes, int] = (b"", b"", 0)

    def refuse(self, refusal: Refusal) -> bytes:
        """The client is told when the server has closed the channel; returns what tells the server."""
        self.refused = refusal
        return encode_method_frame(refusal.channel.number, m.ChannelClose(ReplyCode.SUCCESS, "", 0, 0))

    def receive_data(self, data: bytes) -> list[bytes]:  # noqa: C901, PLR0912 - every frame
        """Octets for the client; `answers` for the server. Raises RemoteProtocolError for a server that
        breaks the rules."""
        whole = self._gathered(data)
        if whole is None:
            return []
        data = whole
        out: list[bytes] = []
        start = at = 0
        end = len(data)
        counts = self.counts
        while at + FRAME_OVERHEAD <= end:
            kind, number, after = self._head(data, at, end)
            if not after:
                break
            if kind == FRAME_BODY:
                counts["body"] += 1
            elif kind == FRAME_HEADER:
                counts["header"] += 1
            elif kind == FRAME_HEARTBEAT:
                if at > start:
                    out.append(data[start:at])
                start = after
            else:
                index = self._index(data, at, after)
                if index == BASIC_DELIVER:
                    run = self._take_run(data, at, after, end)
                    if run:
                        at = run
                        continue
                method = m.METHODS.get(index)
                if method is None:
                    raise frame_error(f"method {index >> 16}.{index & 0xFFFF} is not known")
                counts[method.name] += 1
                if index in CONTENTS:
                    self.messages += 1
                elif index >> 16 == CONNECTION_CLASS:
                    self.closing |= index == CLOSE
                    self.closed |= index == CLOSE_OK
                elif index in WATCHED:
                    instead = self._watch(number, index, data[at + FRAME_PREFIX : after - 1])
                    if instead is not None:
                        if at > start:
                            out.append(data[start:at])
                        if instead:
                            out.append(instead)
                        start = after
            at = after
            if self.closed:
                break
        if at > start:
            out.append(data[start:at] if start or at < end else data)
        self._keep_rest(data, at, waits=self.closed)
        return out

    def _take_run(self, data: bytes, at: int, after: int, end: int) -> int:
        """Deliveries that differ from the last one in nothing but tag and body; returns where they end. 0:
        this one does, or has not come whole, or in several frames."""
        began = at
        count = 0
        while True:
            lead, middle, step = self._lead
            middle_at = at + len(lead) + TAG_OCTETS
            if not (lead and data.startswith(lead, at) and data.startswith(middle, middle_at)):
                if at != began or not self._look(data, at, after, end):
                    break
                continue
            if at + step > end or data[at + step - 1] != FRAME_END:
                break
            at += step
            count += 1
        self.messages += count
        for word in ("basic.deliver", "header", "body"):
            self.counts[word] += count
        return at if count else 0

    def _look(self, data: bytes, at: int, after: int, end: int) -> bool:
        """Whether a delivery is of the plainest form: its method up to `after`, a header, and one body."""
        header_at, number = after, HEAD(data, at)[1]
        if header_at + FRAME_PREFIX + CONTENT_HEADER_MIN + 1 > end:
            return False
        kind, other, size = HEAD(data, header_at)
        body_at = header_at + size + FRAME_OVERHEAD
        if kind != FRAME_HEADER or other != number or body_at + FRAME_OVERHEAD > end:
            return False
        if not CONTENT_HEADER_MIN <= size <= self._payload_max or data[body_at - 1] != FRAME_END:
            return False
        octets = BODY_SIZE(data, header_at + FRAME_PREFIX + 4)[0]
        if not octets or HEAD(data, body_at) != (FRAME_BODY, number, octets) or octets > self._payload_max:
            return False
        tag_at = at + FRAME_PREFIX + 4
        tag_at += 1 + data[tag_at]
        if tag_at + TAG_OCTETS >= after:
            return False
        begin = body_at + FRAME_PREFIX
        self._lead = (data[at:tag_at], data[tag_at + TAG_OCTETS : begin], begin + octets + 1 - at)
        return True

    def _watch(self, number: int, index: int, payload: bytes) -> bytes | None:
        """What the client is told instead; None: just this."""
        channel = self._channels.get(number)
        refused = self.refused
        of_refused = refused is not None and refused.channel is channel
        if index == CHANNEL_CLOSE_OK:
            if refused is not None and of_refused:
                return self._tell(refused)
            if channel is not None:
                channel.server_owes = False
                if not channel.client_owes:
                    del self._channels[number]
        elif index == CHANNEL_CLOSE:
            if of_refused:  # both at once: the client hears ours, and the server need not wait for it
                self.answers.append(encode_method_frame(number, m.ChannelCloseOk()))
                return b""
            if channel is not None:
                channel.close()
                channel.client_owes = True
        elif channel is not None and not channel.closing:
            method = decode_method(payload)
            if isinstance(method, m.BasicConsumeOk):
                if method.consumer_tag not in channel.consumers and channel.unnamed:
                    channel.consumers[method.consumer_tag] = channel.unnamed.popleft()
            elif isinstance(method, m.BasicCancel):
                channel.consumers.pop(method.consumer_tag, None)
        return None

    def _tell(self, refused: Refusal) -> bytes:
        """The server has closed a channel for us: the client hears why."""
        self.refused = None
        channel, fault = refused.channel, refused.fault
        channel.refused = channel.client_owes = True
        self.counts["channel.close-ok"] -= 1
        self.counts["channel.close"] += 1
        ids = (fault.class_id, fault.method_id)
        return encode_method_frame(channel.number, m.ChannelClose(fault.reason, reply_text(str(fault)), *ids))


def _fault(text: str, code: ReplyCode, index: int) -> RemoteProtocolError:
    return RemoteProtocolError(text, reason=code, class_id=index >> 16, method_id=index & 0xFFFF)


def _invalid(index: int) -> RemoteProtocolError:
    return _fault("COMMAND_INVALID - unimplemented method", ReplyCode.COMMAND_INVALID, index)


def _unexpected(channel: Relayed) -> RemoteProtocolError:
    """A content that is not what the channel has come to."""
    if channel.publish is None and not channel.left:
        text = "UNEXPECTED_FRAME - expected method frame, got non method frame instead"
        return RemoteProtocolError(text, reason=ReplyCode.UNEXPECTED_FRAME)
    what = "body" if channel.publish is None else "header"
    instead = f"got non content {what} frame instead"
    text = f"UNEXPECTED_FRAME - expected content {what} for class 60, {instead}"
    return _fault(text, ReplyCode.UNEXPECTED_FRAME, BASIC_PUBLISH)
