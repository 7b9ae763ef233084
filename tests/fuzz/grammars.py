"""What a client of each protocol may say, valid for the most part: sequences that lead somewhere, made of
words that mean something to the embedded broker, with values that no encoder expects.

A grammar gives runs of bytes for one connection: a greeting, which is never mutated for otherwise nothing
would be reached, and packets. It keeps as much state as it needs to be believed (which channels are open).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

from gateway.errors import ProtocolError
from gateway.model.properties import Headers, Value, ValueType
from gateway.model.spooled_bodies import join_pieces
from gateway.protocols.amqp091 import methods as a
from gateway.protocols.amqp091.codec import (
    BasicProperties,
    encode_basic_properties,
    encode_content_frames,
    encode_method_frame,
    encode_response,
)
from gateway.protocols.amqpfast import commands as f
from gateway.protocols.amqpfast.client import ClientConnection as FastClient
from gateway.protocols.amqpfast.codec import Head, encode_command, encode_credentials
from gateway.protocols.mqtt import packets as p
from gateway.protocols.mqtt.spec import PacketType, Property, Version
from gateway.protocols.mqtt.writers import encode
from tests.protocols.amqpfast.heads import encode_head

TEXTS: Final = (
    *(
        "",
        "a",
        "b/c",
        "a/b",
        "a.b",
        "b.c",
        "#",
        "+",
        "a/#",
        "+/b",
        "a.#",
        "*.b",
        "*",
        "$share/g/a/#",
        "$SYS/#",
    ),
    *("$share//a", "amq.topic", "amq.fanout", "amq.direct", "amq.headers", "amq.match", "fuzz", "q", "topic"),
    *(
        "direct",
        "headers",
        "fanout",
        "\x01",
        "\u0000",
        "é",
        "\U0001f600",
        "\ufffe",
        "a" * 255,
        "a/" * 100 + "a",
    ),
    *("%2F", "%00", "%D8%00", "\r\n", "0", "-1", "60000", "1e999", "nan", "true", "guest", "reply/x", "x:y"),
)
NUMBERS: Final = (0, 1, 2, 3, 7, 127, 128, 255, 256, 65_535)
SELECTORS: Final = (
    *(
        "",
        "a = 1",
        "a LIKE '%x_'",
        "NOT (a IN ('1','2')) OR b IS NULL",
        "a BETWEEN 1 AND 'x'",
        "JMSPriority > 3",
    ),
    *(
        "1/0 = a",
        "a + b * -c <> 1e400",
        "((((a))))=1",
        "'",
        "a LIKE 'x' ESCAPE ''",
        "size > 2",
        "headers.h == '1'",
    ),
    *("body.a > 1", "headers['h'][0] == 2", "[1,2].all(x, x > 0)", "content_type.matches('a*')", "qos == 1"),
)
JSONS: Final = (
    *(
        "1",
        "-1",
        '"x"',
        '"\\ud800"',
        '["\\ud800"]',
        "[]",
        "{}",
        "null",
        "Infinity",
        "1e400",
        "9" * 400,
        "[[[[]]]]",
    ),
    *(
        '[["int32", Infinity]]',
        '[["table",{"a":["bytes",{"base64":"!"}]}]]',
        '{"a":{"b":[1,null]}}',
        "[" * 600,
    ),
    *('[["decimal","1e99999"]]', '[["timestamp",-1]]', '[["int8",300]]', "\ud800", "x"),
)
TYPES: Final[tuple[Any, ...]] = (*(kind.value for kind in ValueType), "nothing", "repeated", None, 1, [], {})
MANNERS: Final = (
    "gateway-types",
    "GATEWAY_TYPES",
    "x-gateway-hops",
    "HOPS",
    "x-death",
    "CC",
    "BCC",
    "x-mqtt-retain",
)
QUEUE_ARGUMENTS: Final = (
    *("x-message-ttl", "x-max-length", "x-max-length-bytes", "x-overflow", "x-dead-letter-exchange"),
    *("x-dead-letter-routing-key", "x-max-priority", "x-expires", "x-single-active-consumer", "x-queue-type"),
    *("alternate-exchange", "x-match", "x-priority", "x-unknown"),
)


def note(chance: random.Random) -> str:
    """A note of header types, which may fit the headers or not."""
    kind = chance.choice(TYPES)
    shape: Any = chance.choice(
        (kind, {"array": [kind]}, {"table": {"a": kind}}, {"array": [{"table": {}}]}, {})
    )
    return chance.choice((json.dumps({"h": shape, "a": kind}), "{", "[]", json.dumps({"h": shape})))


def text(chance: random.Random) -> str:
    return chance.choice(TEXTS)


def value(chance: random.Random, depth: int = 0) -> Value:
    """A value of any type, often one that its type can just hold."""
    kind = chance.choice(list(ValueType))
    if kind in (ValueType.ARRAY, ValueType.TABLE) and depth > 3:
        kind = ValueType.STRING
    match kind:
        case ValueType.VOID:
            found: Any = None
        case ValueType.BOOL:
            found = chance.random() < 0.5
        case ValueType.STRING:
            found = chance.choice((text(chance), chance.choice(JSONS).encode("utf-8", "surrogatepass")))
        case ValueType.BYTES:
            found = chance.randbytes(3)
        case ValueType.FLOAT | ValueType.DOUBLE:
            found = chance.choice((0.0, -1.5, float("inf"), float("nan"), 1e30))
        case ValueType.DECIMAL:
            found = Decimal(chance.choice(("0", "-1.5", "12345")))
        case ValueType.ARRAY:
            found = tuple(value(chance, depth + 1) for _ in range(chance.randrange(3)))
        case ValueType.TABLE:
            found = table(chance, depth + 1)
        case ValueType.TIMESTAMP | ValueType.UINT32:
            found = chance.choice((0, 1, 1 << 31))
        case _:
            found = chance.choice((0, 1, 100))
    return Value(kind, found)


def table(chance: random.Random, depth: int = 0) -> Headers:
    """A few headers; some mean something to the gateway."""
    rows = []
    for _ in range(chance.randrange(4)):
        name = chance.choice(("h", "a", "b", "", *MANNERS))
        found = Value(ValueType.STRING, note(chance)) if "ypes" in name.lower() else value(chance, depth)
        rows.append((name, found))
    return tuple(rows)


class MqttGrammar:
    """A client of MQTT 5, 3.1.1 or 3.1."""

    listener = "mqtt"

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._version = chance.choice((Version.V5, Version.V5, Version.V311, Version.V31))

    def greeting(self) -> bytes:
        """CONNECT, under one of a few names, so that sessions are taken over and resumed."""
        chance = self._chance
        will = None
        if chance.random() < 0.2:
            will = p.Will("a/will", b"w", chance.randrange(3), chance.random() < 0.5)
        properties: dict[Property, Any] = {}
        if self._version is Version.V5:
            properties = {
                Property.SESSION_EXPIRY_INTERVAL: chance.choice((0, 1, 1_000)),
                Property.RECEIVE_MAXIMUM: chance.choice((1, 5, 65_535)),
                Property.TOPIC_ALIAS_MAXIMUM: chance.choice((0, 2)),
            }
        name = f"fuzz {chance.randrange(6)}"
        return encode(
            p.Connect(name, self._version, chance.random() < 0.5, 0, will, None, None, properties),
            self._version,
        )

    def packet(self) -> bytes:
        """The next thing said."""
        chance = self._chance
        number = chance.choice((1, 2, 3, 10))
        match chance.randrange(10):
            case 0 | 1 | 2 | 3:
                qos = chance.randrange(3)
                body = chance.choice(
                    (b"", b"x", b'{"a": 2}', b"\xff", chance.choice(JSONS).encode("utf-8", "replace"))
                )
                made: p.Packet = p.Publish(
                    chance.choice(("a/b", "b/c", "a", text(chance))),
                    body,
                    qos,
                    chance.random() < 0.1,
                    chance.random() < 0.1,
                    number if qos else 0,
                    self._properties(),
                )
            case 4:
                filters = tuple(
                    p.Subscription(
                        text(chance) or "a", chance.randrange(3), False, False, chance.randrange(3)
                    )
                    for _ in range(chance.randint(1, 3))
                )
                made = p.Subscribe(number, filters)
            case 5:
                made = p.Unsubscribe(number, (text(chance) or "a",))
            case 6 | 7:
                kinds = (PacketType.PUBACK, PacketType.PUBREC, PacketType.PUBREL, PacketType.PUBCOMP)
                made = p.Ack(chance.choice(kinds), number)
            case 8:
                made = p.Pingreq()
            case _:
                made = p.Disconnect() if chance.random() < 0.1 else p.Pingreq()
        return encode(made, self._version)

    def _properties(self) -> dict[Property, Any]:
        chance = self._chance
        if self._version is not Version.V5 or chance.random() < 0.3:
            return {}
        pairs = [
            chance.choice(
                (
                    ("h", chance.choice(JSONS).encode("utf-8", "replace").decode()),
                    ("gateway-types", note(chance)),
                    ("a", text(chance).replace("\0", "")),
                    (chance.choice(MANNERS), text(chance).replace("\0", "")),
                )
            )
            for _ in range(chance.randrange(5))
        ]
        found: dict[Property, Any] = {Property.USER_PROPERTY: pairs} if pairs else {}
        if chance.random() < 0.2:
            found[Property.RESPONSE_TOPIC] = chance.choice(("reply/x", "a", "a/b"))
            found[Property.CORRELATION_DATA] = chance.randbytes(3)
        if chance.random() < 0.2:
            found[Property.MESSAGE_EXPIRY_INTERVAL] = chance.choice((0, 1, 0xFFFF_FFFF))
        if chance.random() < 0.1:
            found[Property.CONTENT_TYPE] = text(chance).replace("\0", "")
        return found


def filled(chance: random.Random, layout: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """A value for every argument of a method or command, by its domain."""
    made: dict[str, Callable[[], Any]] = {
        "o": lambda: chance.choice((0, 1, 2, 255)),
        "s": lambda: chance.choice((0, 1, 1, 2, 3, 65_535)),
        "l": lambda: chance.choice((0, 1, 5, 4_096, 0xFFFF_FFFF)),
        "ll": lambda: chance.choice((0, 1, 2, 3, 1 << 63)),
        "ss": lambda: text(chance),
        "sb": lambda: text(chance).encode(),
        "ls": lambda: chance.choice(SELECTORS).encode(),
        "T": lambda: _arguments(chance),
        "b": lambda: chance.random() < 0.3,
    }
    return {name: made[domain]() for domain, name in layout if name}


def _arguments(chance: random.Random) -> Headers:
    if chance.random() < 0.5:
        return ()
    return tuple((chance.choice(QUEUE_ARGUMENTS), value(chance)) for _ in range(chance.randint(1, 3)))


USUAL_METHODS: Final = (
    *(a.QueueDeclare, a.QueueBind, a.QueueUnbind, a.QueuePurge, a.QueueDelete, a.ExchangeDeclare),
    *(a.ExchangeBind, a.BasicConsume, a.BasicQos, a.BasicAck, a.BasicNack, a.BasicReject, a.BasicGet),
    *(a.BasicCancel, a.BasicRecover, a.ConfirmSelect, a.TxSelect, a.TxCommit, a.TxRollback, a.ChannelFlow),
)


class AmqpGrammar:
    """A client of AMQP 0-9-1."""

    listener = "amqp091"

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def greeting(self) -> bytes:
        """All of the handshake without waiting for the answers, and two channels."""
        start = a.ConnectionStartOk((), "PLAIN", encode_response("PLAIN", "guest", "guest"))
        return b"AMQP\0\0\x09\x01" + b"".join(
            encode_method_frame(channel, method)
            for channel, method in (
                (0, start),
                (0, a.ConnectionTuneOk(10, 131_072, 0)),
                (0, a.ConnectionOpen("/")),
                (1, a.ChannelOpen()),
                (2, a.ChannelOpen()),
                (1, a.QueueDeclare("fuzz")),
                (1, a.QueueBind("fuzz", "amq.topic", "#")),
            )
        )

    def packet(self) -> bytes:
        """A method with its content, if it has one; now and then a channel is opened again."""
        chance = self._chance
        channel = chance.choice((1, 1, 1, 2))
        if chance.random() < 0.1:
            return encode_method_frame(chance.choice((1, 2, 3)), a.ChannelOpen())
        if chance.random() < 0.45:
            exchange = chance.choice(("", "amq.topic", "amq.topic", "amq.headers", text(chance)))
            method = a.BasicPublish(
                exchange, chance.choice(("fuzz", "a.b", text(chance))), chance.random() < 0.3
            )
            body = chance.choice((b"", b"x", b'{"a": 2}', bytes(300)))
            frames = encode_content_frames(channel, self._properties(), body, 4_096)
            return encode_method_frame(channel, method) + join_pieces(frames)
        kind: Any = chance.choice(USUAL_METHODS)
        if chance.random() < 0.05:
            kind = chance.choice(list(a.METHODS.values()))
        return encode_method_frame(channel, kind(**filled(chance, kind.layout)))

    def _properties(self) -> bytes:
        chance = self._chance

        def maybe(made: Any) -> Any:
            return made if chance.random() < 0.3 else None

        return encode_basic_properties(
            BasicProperties(
                content_type=maybe(text(chance)),
                content_encoding=maybe("utf-8"),
                headers=maybe(table(chance)),
                delivery_mode=maybe(chance.choice((0, 1, 2, 255))),
                priority=maybe(chance.choice((0, 9, 255))),
                correlation_id=maybe(text(chance)),
                reply_to=maybe(chance.choice(("fuzz", "amq.rabbitmq.reply-to", text(chance)))),
                expiration=maybe(chance.choice(("0", "1", "60000", "-1", "x", "9" * 30))),
                message_id=maybe(text(chance)),
                timestamp=maybe(chance.choice((0, 1, 1 << 63))),
                type=maybe(text(chance)),
                user_id=maybe(chance.choice(("guest", "other"))),
                app_id=maybe(text(chance)),
            )
        )


class FastGrammar:
    """A client of AMQP/Fast."""

    listener = "amqpfast"

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def greeting(self) -> bytes:
        """What our own client says first; the rest of the negotiation is `answers`' to say."""
        self.client = FastClient(
            mechanism="PLAIN",
            responses=encode_credentials("guest", "guest"),
            virtual_path="/",
            client_name=f"fuzz {self._chance.randrange(4)}" if self._chance.random() < 0.3 else "",
        )
        return self.client.data_to_send()

    def opening(self) -> bytes:
        """A channel and two handles."""
        rights: dict[str, Any] = {"producer": True, "consumer": True, "browser": True}
        return b"".join(
            encode_command(command)
            for command in (
                f.ChannelOpen(1, transacted=self._chance.random() < 0.2),
                f.HandleOpen(1, 1, 1, 0, dest_name="fuzz", **rights),
                f.HandleOpen(1, 2, 2, 0, dest_name="a.b", **rights),
            )
        )

    def packet(self) -> bytes:
        """A command, with a fragment behind it if it has one."""
        chance = self._chance
        if chance.random() < 0.45:
            head = self._head()
            body = chance.choice((b"", b"x", b'{"a": 2}', bytes(300)))
            fragment = encode_head(chance.choice((len(body), len(body), 5)), head) + body
            return (
                encode_command(f.HandleSend(chance.choice((1, 2, 3)), chance.randrange(3), len(fragment)))
                + fragment
            )
        kind: Any = chance.choice(list(f.COMMANDS.values()))
        fields = filled(chance, kind.layout)
        fields |= {name: chance.choice((1, 2)) for name in ("channel_id", "handle_id") if name in fields}
        if kind.fragment:
            fields["fragment_size"] = 0
        return encode_command(kind(**fields))

    def _head(self) -> Head:
        chance = self._chance
        headers = tuple(
            (name, found)
            for name, found in ((name.replace("-", "_") or "E", found) for name, found in table(chance, 9))
            if found.type in (ValueType.STRING, ValueType.INT32, ValueType.TIMESTAMP, ValueType.DECIMAL)
        )
        return Head(
            chance.random() < 0.3,
            chance.choice((0, 4, 9)),
            chance.choice((0, 1, 1 << 31)),
            chance.choice(("", "text/plain", text(chance))),
            "",
            chance.choice(("", "id")),
            headers,
        )


Grammar = MqttGrammar | AmqpGrammar | FastGrammar
GRAMMARS: Final[tuple[type[Grammar], ...]] = (MqttGrammar, AmqpGrammar, FastGrammar)


def packets(grammar: Grammar, count: int) -> list[bytes]:
    """As many as can be encoded: our own encoders refuse some of what is asked of them, in their own way."""
    found = []
    for _ in range(count):
        try:
            found.append(grammar.packet())
        except (ProtocolError, ValueError, OverflowError):
            continue
    return found
