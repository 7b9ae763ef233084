"""An AMQP 0-9-1 client for scripts that must see exactly what a broker says: method by method, in order.

It has no state machine of its own, so it can say what no client would, and notes what it hears in a form that
two brokers can be compared by: what a broker makes up (names, tokens, times) is blanked out, and confirms are
counted singly, for how many one `multiple` covers is up to the broker's luck.
"""

from __future__ import annotations

import re
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, Final, NamedTuple, Self

from gateway.model.properties import Headers, Value, ValueType
from gateway.model.spooled_bodies import join_pieces
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import (
    BasicProperties,
    decode_content_header,
    decode_method,
    decode_properties,
    encode_basic_properties,
    encode_content_frames,
    encode_frame,
    encode_method_frame,
    encode_response,
)
from gateway.protocols.amqp091.spec import PROTOCOL_HEADER

LOOPBACK: Final = "127.0.0.1"
PATIENCE_SECS: Final = 10.0
MOVED_SECS: Final = 5.0
QUIET_SECS: Final = 0.25  # how long nothing must come, where a script says that nothing does
HEAD: Final = struct.Struct(">BHI")
MADE_UP: Final = re.compile(r"(amq\.gen-|amq\.ctag-|amq\.rabbitmq\.reply-to\.)[^' ]+")
SAID: Final[set[str]] = set()  # the names of all methods that were said
METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8


class Heard(NamedTuple):
    """One thing that a broker said. `said`: arguments in order; for a content, properties and body too."""

    who: str
    channel: int
    name: str
    said: tuple[Any, ...]


Log = list[Heard]


class Wire:
    """One connection to a broker."""

    def __init__(self, port: int, log: Log, who: str = "a") -> None:
        self.port = port
        self.log = log
        self.who = who
        self._unconfirmed: dict[int, set[int]] = {}  # by channel
        self._published: dict[int, int] = {}  # since confirms were selected
        self._sock = socket.create_connection((LOOPBACK, port), timeout=PATIENCE_SECS)
        self._rest = b""
        self._last: dict[str, Any] = {}
        self._others: list[Wire] = []
        self._ended = False

    # Saying.

    def data(self, data: bytes) -> Self:
        """Say anything at all."""
        self._sock.sendall(data)
        return self

    def say(self, *methods: m.Method, channel: int = 1) -> Self:
        """Say methods, in one write."""
        if any(isinstance(method, m.ConfirmSelect) for method in methods):
            self._published.setdefault(channel, 0)
        SAID.update(method.name for method in methods)
        if not self._ended:
            self.data(b"".join(encode_method_frame(channel, method) for method in methods))
        return self

    def call(self, *methods: m.Method, channel: int = 1) -> Self:
        """Say each method and note one answer."""
        for method in methods:
            self.say(method, channel=channel).hear()
        return self

    def counted(self, queue: str, messages: int) -> Self:
        """Declare a queue passively until it has so many messages: RabbitMQ counts before it has done what
        was said earlier. When it never has, that is heard."""
        return self._until(
            m.QueueDeclare(queue, passive=True), lambda: self.last("message_count") == messages
        )

    def fetch(self, queue: str, no_ack: bool = False) -> Self:
        """Get a message that died elsewhere: a broker moves it when it has the time. One that never does is
        heard saying that there is none."""
        return self._until(m.BasicGet(queue, no_ack), lambda: self.log[-1].name != m.BasicGetEmpty.name)

    def _until(self, method: m.Method, there: Callable[[], bool]) -> Self:
        """Call a method until its answer is as awaited, and note the last one only."""
        deadline = time.monotonic() + MOVED_SECS
        while True:
            before = len(self.log)
            self.call(method)
            if there() or time.monotonic() > deadline:
                return self
            del self.log[before:]

    def publish(
        self,
        exchange: str,
        key: str,
        *bodies: bytes,
        channel: int = 1,
        mandatory: bool = False,
        immediate: bool = False,
        **properties: Any,
    ) -> Self:
        """Publish bodies with properties of class basic."""
        if "headers" in properties:
            properties["headers"] = table(properties["headers"])
        raw = encode_basic_properties(BasicProperties(**properties))
        method = m.BasicPublish(exchange, key, mandatory, immediate)
        SAID.add(method.name)
        for body in bodies:
            frames = [
                encode_method_frame(channel, method),
                *encode_content_frames(channel, raw, body, 131_072),
            ]
            self.data(join_pieces(frames))
            if channel in self._published:
                self._published[channel] += 1
                self._unconfirmed.setdefault(channel, set()).add(self._published[channel])
        return self

    def header(self) -> Self:
        """The protocol header, and the broker's answer."""
        return self.data(PROTOCOL_HEADER).hear()

    def login(
        self,
        *,
        user: str = "guest",
        password: str = "guest",
        mechanism: str = "PLAIN",
        capabilities: Iterable[str] = (
            "consumer_cancel_notify",
            "basic.nack",
            "authentication_failure_close",
        ),
        response: bytes | None = None,
    ) -> Self:
        """Header and start-ok; notes start and its answer."""
        said = {"capabilities": dict.fromkeys(capabilities, True)}
        data = encode_response(mechanism, user, password) if response is None else response
        return self.header().say(m.ConnectionStartOk(table(said), mechanism, data, "en_US"), channel=0).hear()

    def tune(self, channel_max: int = 2047, frame_max: int = 131_072, heartbeat: int = 0) -> Self:
        return self.say(m.ConnectionTuneOk(channel_max, frame_max, heartbeat), channel=0)

    def open(self, *, host: str = "/", channel: int = 1, **login: Any) -> Self:
        """All of the handshake, and a channel; none of it is noted."""
        before = len(self.log)
        self.login(**login).tune().call(m.ConnectionOpen(host), channel=0)
        self.call(m.ChannelOpen(), channel=channel)
        assert self.log[-1].name == "channel.open-ok", self.log
        del self.log[before:]
        return self

    def another(self, who: str = "b", **login: Any) -> Wire:
        """One more connection, with a channel."""
        other = Wire(self.port, self.log, who).open(**login)
        self._others.append(other)
        return other

    def channel(self, number: int) -> Self:
        return self.call(m.ChannelOpen(), channel=number)

    # Hearing.

    def hear(self, count: int = 1) -> Self:
        """Note the next `count` things that are said; a confirm of many counts as many."""
        wanted = len(self.log) + count
        while len(self.log) < wanted:
            if not self._note():
                break
        return self

    def confirms(self, count: int) -> Self:
        """Hear that many confirms, and note them in order, as a broker may confirm in any."""
        before = len(self.log)
        self.hear(count)
        self.log[before:] = sorted(self.log[before:], key=lambda heard: (heard.name, heard.said))
        return self

    def silence(self) -> Self:
        """Nothing is said for a while."""
        self._sock.settimeout(QUIET_SECS)
        try:
            self._note()
        except TimeoutError:
            self._add(0, "silence")
        finally:
            self._sock.settimeout(PATIENCE_SECS)
        return self

    def last(self, argument: str) -> Any:
        """What the last method said, as it came."""
        return self._last[argument]

    def close(self) -> None:
        for other in self._others:
            other.close()
        self._sock.close()

    def cut(self) -> None:
        """Vanish without a word."""
        self._sock.close()

    def _add(self, channel: int, name: str, *said: Any) -> None:
        self.log.append(Heard(self.who, channel, name, said))

    def _read(self, count: int) -> bytes:
        while len(self._rest) < count:
            data = self._sock.recv(65_536)
            if not data:
                raise ConnectionResetError
            self._rest += data
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    def _frame(self) -> tuple[int, int, bytes]:
        head = self._read(7)
        if head == PROTOCOL_HEADER[:7]:
            self._read(1)
            return 0, 0, PROTOCOL_HEADER
        kind, channel, size = HEAD.unpack(head)
        payload = self._read(size)
        assert self._read(1) == b"\xce"
        return kind, channel, payload

    def _note(self) -> bool:
        """Note one thing; False: the broker has closed the connection."""
        if self._ended:
            return False
        try:
            kind, channel, payload = self._frame()
        except ConnectionResetError:
            self._ended = True
            self._add(0, "end")
            return False
        if kind == 0:
            self._add(0, "protocol header")
        elif kind == HEARTBEAT:
            self._add(channel, "heartbeat")
        else:
            assert kind == METHOD, kind
            self._note_method(channel, decode_method(payload))
        return True

    def _note_method(self, channel: int, method: m.Method) -> None:
        self._last = {one.name: getattr(method, one.name) for one in fields(method)}  # type: ignore[arg-type]
        if isinstance(method, m.BasicAck | m.BasicNack):
            last, open_ = method.delivery_tag, self._unconfirmed[channel]
            for tag in sorted(open_) if method.multiple else (last,):
                if tag <= last:
                    open_.discard(tag)
                    self._add(channel, method.name, tag)
        elif isinstance(method, m.ConnectionStart):
            self._add(channel, method.name)
        elif method.content:
            self._add(channel, method.name, *self._bare(method), *self._content(channel))
        else:
            self._add(channel, method.name, *self._bare(method))
        if isinstance(method, m.ChannelClose):
            self.say(m.ChannelCloseOk(), channel=channel)
        elif isinstance(method, m.ConnectionClose):
            self.say(m.ConnectionCloseOk(), channel=0).hear()

    def _bare(self, method: m.Method) -> list[Any]:
        return [blank(getattr(method, one.name)) for one in fields(method)]  # type: ignore[arg-type]

    def _content(self, channel: int) -> tuple[dict[str, Any], bytes]:
        """Properties and body of a content. Frames of one channel never mix; ours are one at a time."""
        kind, number, payload = self._frame()
        assert (kind, number) == (HEADER, channel)
        size, raw = decode_content_header(payload)
        body = b""
        while len(body) < size:
            kind, number, piece = self._frame()
            assert (kind, number) == (BODY, channel)
            body += piece
        native = decode_properties(raw)
        self._last |= {one.name: getattr(native, one.name) for one in fields(native)}
        said = {one.name: getattr(native, one.name) for one in fields(native)}
        return {name: blank(value) for name, value in said.items() if value is not None}, body


def blank(value: Any) -> Any:
    """The value without what a broker makes up."""
    if isinstance(value, str):
        return MADE_UP.sub(r"\1*", value)
    if isinstance(value, Value):
        if value.type is ValueType.TIMESTAMP:
            return value._replace(value=0)
        return value._replace(value=blank(value.value))
    if isinstance(value, tuple):
        return tuple(blank(one) for one in value)
    return value


def table(said: dict[str, Any]) -> Headers:
    """A field table of plain values, with the types that most clients choose; a Value stays as it is."""
    return tuple((name, typed(value)) for name, value in said.items())


def typed(value: Any) -> Value:
    if isinstance(value, Value):
        return value
    if isinstance(value, bool):
        return Value(ValueType.BOOL, value)
    if isinstance(value, int):
        return Value(ValueType.INT32 if -(1 << 31) <= value < 1 << 31 else ValueType.INT64, value)
    if isinstance(value, dict):
        return Value(ValueType.TABLE, table(value))
    if isinstance(value, list):
        return Value(ValueType.ARRAY, tuple(typed(one) for one in value))
    if value is None:
        return Value(ValueType.VOID, None)
    if isinstance(value, float):
        return Value(ValueType.DOUBLE, value)
    return Value(ValueType.STRING, value)


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    """One frame of any kind."""
    return encode_frame(kind, channel, payload)
