"""A blocking AMQP/Fast client that speaks command by command, for tests of what the listener answers."""

from __future__ import annotations

import ssl
from typing import Any, Final, Self, TypeVar

from gateway.model.properties import Headers, Value, ValueType, string
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.client import ClientConnection
from gateway.protocols.amqpfast.codec import (
    Head,
    decode_message_list,
    encode_credentials,
    encode_head_properties,
)
from gateway.protocols.amqpfast.events import (
    ChannelClosed,
    Closed,
    CommandReceived,
    Event,
    Fragment,
    HandleClosed,
    Notifies,
    NotifyRow,
    Opened,
    Prepared,
    Ready,
    Replies,
    ReplyRow,
)
from gateway.protocols.amqpfast.sender import Producer
from gateway.protocols.amqpfast.spec import DELIVERED, REDELIVERED
from tests.ingress.clients import Ported, Raw

Kind = TypeVar(
    "Kind",
    ChannelClosed,
    Closed,
    CommandReceived,
    Fragment,
    HandleClosed,
    Notifies,
    Opened,
    Prepared,
    Ready,
    Replies,
)
QUEUE: Final = 1
TOPIC: Final = 2
PEER: Final = 3


def head(
    *, persistent: bool = False, priority: int = 0, headers: dict[str, Any] | None = None, **more: Any
) -> bytes:
    """The bytes of a head behind the body-size."""
    pairs: Headers = tuple((name, _value(value)) for name, value in (headers or {}).items())
    return encode_head_properties(Head(persistent=persistent, priority=priority, headers=pairs, **more))


def _value(value: Any) -> Value:
    return string(value) if isinstance(value, str) else Value(ValueType.INT32, value)


EMPTY: Final = head()
PERSISTENT: Final = head(persistent=True)


class Fast(Raw):
    """A connection; `open` waits for it and opens channel 1."""

    def __init__(
        self,
        gateway: Ported,
        client_name: str = "",
        *,
        user: str = "guest",
        password: str = "guest",
        virtual_path: str = "/",
        responses: Headers | None = None,
        listener: str = "amqpfast",
        tls: ssl.SSLContext | None = None,
        **tuning: Any,
    ) -> None:
        super().__init__(gateway.port(listener))
        if tls is not None:
            self.sock = tls.wrap_socket(self.sock, server_hostname="127.0.0.1")
        self.machine = ClientConnection(
            mechanism="PLAIN",
            responses=encode_credentials(user, password) if responses is None else responses,
            virtual_path=virtual_path,
            client_name=client_name,
            **tuning,
        )
        self.events: list[Event] = []
        self._producers: dict[int, Producer] = {}
        self.flush()

    def open(self, **options: Any) -> Self:
        """Wait for the negotiation and open channel 1."""
        self.next(Opened)
        self.channel(**options)
        return self

    def channel(self, **options: Any) -> int:
        number = self.machine.open_channel(**options)
        self.flush()
        assert self.reply()[3] == 200
        return number

    def handle(self, name: str = "", service: int = QUEUE, *, channel: int = 1, **more: Any) -> int:
        """A handle with every right, opened and confirmed."""
        number = self.ask_handle(name, service, channel=channel, **more)
        assert self.reply()[3] == 200
        return number

    def ask_handle(self, name: str = "", service: int = QUEUE, *, channel: int = 1, **more: Any) -> int:
        rights = {"producer": True, "consumer": service != PEER, "browser": service != PEER} | more
        number = self.machine.open_handle(
            m.HandleOpen(channel_id=channel, service_type=service, dest_name=name, **rights)
        )
        self.flush()
        return number

    # Saying.

    def flush(self) -> None:
        data = self.machine.data_to_send()
        if data:
            self.send(data)

    def say(self, *commands: m.Command) -> None:
        """Commands in one write, without waiting."""
        for command in commands:
            self.machine.send(command)
        self.flush()

    def ask(self, command: Any, channel: int = 1) -> ReplyRow:
        """A command with a confirm-tag, and its reply."""
        command.tag = self.machine.new_tag(channel)
        self.say(command)
        row = self.reply()
        assert row[2] == command.tag
        return row

    def put(
        self, handle: int, *bodies: bytes, name: str = "", head: bytes = EMPTY, confirm: bool = True
    ) -> list[int]:
        """Messages in one write; with `confirm` each is replied to, which is waited for."""
        producer = Producer(self.machine, handle, confirm=confirm)
        tags = producer.send_many([(name.encode(), head, body) for body in bodies])
        self.flush()
        if confirm:
            for tag in tags:
                assert self.reply()[1:4] == (handle, tag, 200)
        return tags

    def consume(self, handle: int, channel: int = 1, **more: Any) -> None:
        given = {"prefetch": 100} | more
        assert self.ask(m.HandleConsume(handle, **given), channel)[3] == 200

    # Hearing.

    def next(self, kind: type[Kind]) -> Kind:
        """The next event of a kind; others in between stay."""
        at = 0
        while True:
            while at < len(self.events):
                event = self.events[at]
                if isinstance(event, kind):
                    del self.events[at]
                    return event
                at += 1
            self.hear()

    def hear(self) -> None:
        """What comes next."""
        data = self.sock.recv(65_536)
        if not data:
            raise ConnectionError(f"the gateway has closed the connection; before: {self.events}")
        self.events += self.machine.receive_data(data, 0.0)
        self.flush()

    def reply(self) -> ReplyRow:
        """The next reply: channel, handle, tag, code, text."""
        replies = self.next(Replies)
        first, *others = replies.rows
        if others:
            self.events.insert(0, Replies(others))
        return first

    def command(self, kind: type[Any]) -> Any:
        found = self.next(CommandReceived).command
        assert isinstance(found, kind)
        return found

    def rows(self, count: int) -> list[NotifyRow]:
        """The next messages: handle, number, bits, head, body, name."""
        found: list[NotifyRow] = []
        while len(found) < count:
            found += self.next(Notifies).rows
        if len(found) > count:
            self.events.insert(0, Notifies(found[count:]))
        return found[:count]

    def bodies(self, count: int) -> list[bytes]:
        return [row[4] for row in self.rows(count)]

    def index(self, handle: int, above: int = 0, **more: Any) -> tuple[list[int], int]:
        """The ids of a QUERY, and what its INDEX says about more."""
        self.say(m.HandleQuery(handle, above, **more))
        found = self.command(m.HandleIndex)
        ranges = decode_message_list(found.message_list)
        return [one for first, last in ranges for one in range(first, last + 1)], found.message_number

    def quiet(self) -> bool:
        """Nothing more has come: a round trip brings only its own answer."""
        channel = self.machine.open_channel()
        self.flush()
        assert self.reply()[0] == channel
        self.machine.close_channel(channel)
        self.flush()
        return not any(isinstance(event, Notifies) for event in self.events)

    def handle_closed(self) -> tuple[int, int]:
        """The handle that was closed for a fault, and the code."""
        event = self.next(HandleClosed)
        return event.handle, event.reply_code

    def channel_closed(self) -> tuple[int, int]:
        event = self.next(ChannelClosed)
        return event.channel, event.reply_code

    def closed(self) -> int:
        return self.next(Closed).reply_code

    def ack(self, number: int, channel: int = 1) -> None:
        """Acknowledge, and wait until that is done."""
        assert self.ask(m.ChannelAck(channel, 0, number), channel)[3] == 200

    def leave(self) -> None:
        """Close in the protocol's words, and wait for the answer."""
        self.machine.close()
        self.flush()
        while not self.machine.closed:
            self.hear()
        self.sock.close()


def fresh(row: NotifyRow) -> bool:
    """Delivered for the first time."""
    return row[2] & DELIVERED != 0 and row[2] & REDELIVERED == 0
