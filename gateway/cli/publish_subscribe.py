"""Functions of `gateway publish` and `gateway subscribe`.

They build addresses and messages from options, and a client for the protocol of a URL.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from pkgutil import resolve_name
from typing import Final, NamedTuple, Protocol

import orjson
import typer

from gateway.clients.wire import Client, ConnectionOptions, connect, messages
from gateway.errors import LinkError
from gateway.model.address import Address
from gateway.model.delivery_mode import DURABLE_AT_QOS
from gateway.model.dialect import Dialect, NameRefused
from gateway.model.message import Message
from gateway.model.properties import Properties, Value, ValueType, is_unicode, property_set, string
from gateway.protocols import DIALECTS, dialect_of
from gateway.protocols.mqtt.dialect import MQTT
from gateway.settings import LinkUrl, parse_url
from gateway.settings.mqtt import ByteOrder

__all__ = [
    "MessagePrinter",
    "SubscribeOptions",
    "address_of",
    "body_of",
    "build_message",
    "demand",
    "headers_of",
    "is_unicode",
    "messages",
    "open_client",
    "protocol_commands",
    "publish_with",
    "target_of",
]

DEFAULTED: Final = frozenset(("service",))  # words that have a default


Show = Callable[[Message, Path | None], bool]
"""Function that prints a message, or the path of its saved body. It returns False if it wants no more."""


class MessagePrinter:
    """Printer of messages.

    `remaining` is the number of messages that are still to be printed, or None for no limit.
    """

    def __init__(self, remaining: int | None, as_json: bool) -> None:
        self.remaining = remaining
        self._as_json = as_json

    def show(self, message: Message, saved: Path | None) -> bool:
        """Print a message. Return False if it was the last one to print.

        `saved` is the path of the file with the message's body, or None if the body was not saved.
        """
        typer.echo(format_message(message, self._as_json, saved))
        if self.remaining is None:
            return True
        self.remaining -= 1
        return self.remaining > 0


def dialect_to(target: LinkUrl) -> Dialect:
    return DIALECTS[target.protocol]


def open_client(
    target: LinkUrl,
    timeout: float,
    ca_file: str | None,
    version: str = "auto",
    byte_order: ByteOrder = "auto",
) -> Client:
    """Connect to a broker and return the client.

    `version` and `byte_order` are for MQTT only. Raises BadParameter or LinkError.
    """
    dialect = dialect_to(target)
    if not dialect.client:
        raise typer.BadParameter(f"the command does not support {dialect.title}")
    check_version(target, version, byte_order)
    access = ConnectionOptions(target, timeout, ca_file, version=version, byte_order=byte_order)
    return connect(access)


def check_version(target: LinkUrl, version: str, byte_order: str) -> None:
    """Check the options --mqtt-version and --byte-order.

    Raises BadParameter if they do not fit the protocol of the target, or each other.
    """
    if (version, byte_order) == ("auto", "auto"):
        return
    if target.protocol != MQTT.name:
        raise typer.BadParameter("--mqtt-version and --byte-order are only for MQTT brokers")
    if byte_order != "auto" and version not in ("3.1", "mqipdp"):
        raise typer.BadParameter("--byte-order needs --mqtt-version 3.1 or mqipdp")


class SubscribeOptions(NamedTuple):
    """Options for receiving messages of an AMQP/Fast destination.

    `selector` selects messages, "" all; `selector_type` is the MIME type of its language. With `unreliable`
    messages are not acknowledged. With `browse` waiting messages are shown without being consumed.
    `transaction` is the number of messages in each transaction; the last transaction may have fewer. `save`
    is a folder in which bodies are saved.
    """

    selector: str = ""
    selector_type: str = ""
    unreliable: bool = False
    browse: bool = False
    transaction: int | None = None
    save: Path | None = None


class ProtocolCommands(Protocol):
    """Implementation of the commands `publish` and `subscribe` for one protocol.

    It supports options of the protocol that the common client interface does not have.
    """

    def publish(self, message: Message, transaction: int | None, show: Show) -> str:
        """Publish one message, or with `transaction` one message for each line of its body.

        `transaction` is the number of messages after which to commit. Replies are passed to `show`. Return ""
        or the reason of a refusal.
        """

    def upload(self, message: Message, file: Path) -> str:
        """Publish one message whose body is the content of `file`. Return "" or the reason of a refusal."""

    def subscribe(
        self, address: Address, show: Show, seconds: float | None, options: SubscribeOptions
    ) -> bool:
        """Pass arriving messages to `show`.

        Stop when `show` returns False, when `seconds` are over, or when the user interrupts. Return True if
        the user interrupted.
        """


def protocol_commands(target: LinkUrl, timeout: float, ca_file: str | None) -> ProtocolCommands | None:
    """Return the target protocol's own implementation of the commands, or None if it has none."""
    name = dialect_to(target).commands
    made: ProtocolCommands | None = resolve_name(name)(target, timeout, ca_file) if name else None
    return made


def demand(target: LinkUrl, **address_options: str | None) -> None:
    """Check that the user gave the options that make an address of the target's protocol.

    `address_options` are the values of all address options by name; None means that an option is not given.
    Raises BadParameter if no address is given.
    """
    dialect = dialect_to(target)
    if not any(address_options.get(word) for word in dialect.address_words if word not in DEFAULTED):
        wants = f"--{dialect.name_word}"
        if dialect.queue_word is not None:
            wants = (
                f"--{dialect.queue_word}, or --{dialect.scope_word} with {wants} or --{dialect.pattern_word}"
            )
        raise typer.BadParameter(f"{dialect.title} needs {wants.replace('_', '-')}")


def address_of(target: LinkUrl, **address_options: str | None) -> Address:
    """Return the address that the options describe, for the protocol of the target.

    Raises BadParameter if the options give no address or an invalid one.
    """
    demand(target, **address_options)
    try:
        return dialect_to(target).published(
            {word: text for word, text in address_options.items() if text is not None}
        )[0]
    except NameRefused as error:
        raise typer.BadParameter(str(error)) from error


def publish_with(client: Client, message: Message) -> str:
    """Publish a message and disconnect. Return the reason of a refusal or failure, or ""."""
    try:
        refused = client.publish_many([message])
    except LinkError as error:
        client.close_abruptly()
        return str(error)
    client.close()
    return refused[0].text if refused else ""


def body_of(message: str | None, file: Path | None) -> bytes:
    """Return the body of the message to publish.

    The body is the text `message`, or else the content of `file`, or else what is read from standard input.
    """
    if message is not None:
        return message.encode()
    return file.read_bytes() if file is not None else sys.stdin.buffer.read()


def target_of(url: str) -> LinkUrl:
    """Parse the URL of a broker. Raises BadParameter if it is invalid."""
    try:
        return parse_url(url)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def headers_of(texts: Iterable[str]) -> tuple[tuple[str, Value], ...]:
    """Parse the values NAME=VALUE of the option --header. Raises BadParameter."""
    pairs = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"--header: write NAME=VALUE, not {text!r}")
        pairs.append((name, string(value)))
    return tuple(pairs)


def build_message(
    target: LinkUrl,
    address: Address,
    body: bytes,
    qos: int,
    retain: bool,
    content_type: str | None,
    reply_to: str | None,
    headers: tuple[tuple[str, Value], ...],
) -> Message:
    """Return a message with this address, body and properties, to be published to the broker `target`.

    Headers are NAME, VALUE pairs. `retain` is ignored if the protocol of the broker has no retained messages.
    """
    properties = property_set(Properties(content_type=content_type, reply_to=reply_to, headers=headers))
    retained = retain and "retain" in dialect_to(target).target_options
    return Message(address, body, properties, qos, DURABLE_AT_QOS[qos], retained)


def format_message(message: Message, as_json: bool, saved: Path | None) -> str:
    """Return a message as one line of text or JSON.

    `saved` is the path of the file with the message's body, or None if the body was not saved.
    """
    address = message.address
    properties = message.properties
    headers = [
        (name, value.value if value.type is ValueType.STRING else str(value.value))
        for name, value in properties.headers
    ]
    try:
        body, encoding = (message.body.decode(), "utf-8") if saved is None else (str(saved), "file")
    except UnicodeDecodeError:
        body, encoding = message.body.hex(), "hex"
    place = dialect_of(address).words_of(address)
    if not as_json:
        return f"{' '.join(place.values()).strip()} {body}"
    document = place | {
        "qos": message.assurance,
        "durable": message.durable,
        "retain": message.retain,
        "content_type": properties.content_type,
        "reply_to": properties.reply_to,
        "headers": headers,
        "body": body,
        "body_encoding": encoding,
    }
    return orjson.dumps(document, default=str).decode()
