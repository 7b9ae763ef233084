"""What `gateway publish` and `gateway subscribe` do: addresses out of words, messages out of bodies, and a
client that speaks the protocol of a URL.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from pkgutil import resolve_name
from typing import Final, NamedTuple, Protocol

import orjson
import typer

from gateway.clients.wire import Access, Client, messages
from gateway.errors import LinkError
from gateway.model.address import Address
from gateway.model.delivery_mode import DURABLE_AT_QOS
from gateway.model.dialect import Dialect, NameRefused
from gateway.model.message import Message
from gateway.model.properties import Properties, Value, ValueType, is_unicode, property_set, string
from gateway.protocols import DIALECTS, dialect_of
from gateway.settings import Target, parse_url

__all__ = [
    "Shown",
    "Wanted",
    "address_of",
    "body_of",
    "client_to",
    "commands_to",
    "demand",
    "headers_of",
    "is_unicode",
    "made_of",
    "messages",
    "publish_with",
    "target_of",
]

DEFAULTED: Final = frozenset(("service",))  # words that have a value when nobody says one


Show = Callable[[Message, Path | None], bool]
"""Prints a message, or where its body was saved; False: that was the last one that is wanted."""


class Shown:
    """Prints messages, `left` more of them; None: as many as come."""

    def __init__(self, left: int | None, as_json: bool) -> None:
        self.left = left
        self._as_json = as_json

    def show(self, message: Message, saved: Path | None) -> bool:
        """Print one; False when that was the last that is wanted."""
        typer.echo(line_of(message, self._as_json, saved))
        if self.left is None:
            return True
        self.left -= 1
        return self.left > 0


def dialect_to(target: Target) -> Dialect:
    return DIALECTS[target.protocol]


def client_to(target: Target, timeout: float, ca_file: str | None) -> Client:
    if not dialect_to(target).client:
        raise typer.BadParameter(f"the command line does not speak {dialect_to(target).title}")
    made: Client = resolve_name(dialect_to(target).client)(Access(target, timeout, ca_file))
    return made


class Wanted(NamedTuple):
    """Which messages of a destination are wanted: those of a selector, whose language is a MIME type, or all.
    With `unreliable` they are not acknowledged."""

    selector: str = ""
    selector_type: str = ""
    unreliable: bool = False


class Commands(Protocol):
    """A protocol whose words have more to them than a client of any protocol can do."""

    def publish(self, message: Message, file: Path | None, transaction: int | None, show: Show) -> str:
        """Send a message, or what is in a file; returns why it was refused, or ""."""

    def subscribe(
        self,
        address: Address,
        show: Show,
        *,
        seconds: float | None,
        browse: bool,
        transaction: int | None,
        save: Path | None,
        wanted: Wanted,
    ) -> bool:
        """Show what comes. True: it was interrupted."""


def commands_to(target: Target, timeout: float, ca_file: str | None) -> Commands | None:
    """Those of the target's own protocol; None: it has none."""
    name = dialect_to(target).commands
    made: Commands | None = resolve_name(name)(target, timeout, ca_file) if name else None
    return made


def demand(target: Target, **given: str | None) -> None:
    """Raises BadParameter when the protocol's own words are not among those that were said."""
    dialect = dialect_to(target)
    if not any(given.get(word) for word in dialect.address_words if word not in DEFAULTED):
        wants = f"--{dialect.name_word}"
        if dialect.queue_word is not None:
            wants = (
                f"--{dialect.queue_word}, or --{dialect.scope_word} with {wants} or --{dialect.pattern_word}"
            )
        raise typer.BadParameter(f"{dialect.title} wants {wants.replace('_', '-')}")


def address_of(target: Target, **given: str | None) -> Address:
    """What was said in the words of the target's protocol. Raises BadParameter."""
    demand(target, **given)
    try:
        return dialect_to(target).published({word: text for word, text in given.items() if text is not None})[
            0
        ]
    except NameRefused as error:
        raise typer.BadParameter(str(error)) from error


def publish_with(client: Client, message: Message) -> str:
    """Publish and say goodbye; returns why it was refused, or ""."""
    try:
        refused = client.publish_many([message])
    except LinkError as error:
        client.cut()
        return str(error)
    client.close()
    return refused[0].text if refused else ""


def body_of(message: str | None, file: Path | None) -> bytes:
    if message is not None:
        return message.encode()
    return file.read_bytes() if file is not None else sys.stdin.buffer.read()


def target_of(url: str) -> Target:
    try:
        return parse_url(url)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def headers_of(texts: Iterable[str]) -> tuple[tuple[str, Value], ...]:
    """NAME=VALUE each. Raises BadParameter."""
    pairs = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"--header wants NAME=VALUE, not {text!r}")
        pairs.append((name, string(value)))
    return tuple(pairs)


def made_of(
    target: Target,
    address: Address,
    body: bytes,
    qos: int,
    retain: bool,
    content_type: str | None,
    reply_to: str | None,
    headers: tuple[tuple[str, Value], ...],
) -> Message:
    """The message that a target is sent; what it has no word for is left out."""
    properties = property_set(Properties(content_type=content_type, reply_to=reply_to, headers=headers))
    retained = retain and "retain" in dialect_to(target).target_options
    return Message(address, body, properties, qos, DURABLE_AT_QOS[qos], retained)


def line_of(message: Message, as_json: bool, saved: Path | None) -> str:
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
