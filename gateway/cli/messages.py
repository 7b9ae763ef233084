"""`gateway publish` and `gateway subscribe`: one message in, or what comes out, of any broker or gateway."""

from __future__ import annotations

import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated

import orjson
import typer

from gateway.cli.amqpfast.commands import FastCommands
from gateway.cli.exits import Exit
from gateway.cli.options import AsJson
from gateway.clients.wire import Access, Client, messages
from gateway.errors import LinkError
from gateway.model.address import Address
from gateway.model.dialect import Dialect, NameRefused
from gateway.model.message import Message
from gateway.model.properties import Properties, ValueType, is_unicode, property_set, string
from gateway.protocols import DIALECTS, dialect_of
from gateway.protocols.amqpfast.dialect import AMQPFAST
from gateway.settings import Target, parse_url

app = typer.Typer()

_DEFAULTED = frozenset(("service",))  # words that have a value when nobody says one

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="Of mqtt(s), ws(s), amqp(s) or amqpfast(s): amqp://user:password@host:port/virtual-host",
    ),
]
Service = Annotated[str, typer.Option(help="AMQP/Fast: queue, topic or peer.")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for an answer.", min=0.1)]


def _file(path: str) -> str:
    if not Path(path).is_file():
        raise typer.BadParameter(f"there is no file {path}")
    return path


CaFile = Annotated[
    str | None, typer.Option(parser=_file, metavar="FILE", help="PEM file of the authorities to trust.")
]


@app.command()
def publish(
    url: Url,
    topic: Annotated[str | None, typer.Option(help="MQTT topic.")] = None,
    exchange: Annotated[str, typer.Option(help="AMQP exchange.")] = "",
    routing_key: Annotated[str, typer.Option(help="AMQP routing key.")] = "",
    queue: Annotated[str | None, typer.Option(help="AMQP queue (the default exchange).")] = None,
    service: Service = "topic",
    destination: Annotated[str | None, typer.Option(help="AMQP/Fast destination.")] = None,
    message: Annotated[str | None, typer.Option("--message", "-m", help="The body.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="Read the body from a file; default: standard input.", exists=True)
    ] = None,
    transaction: Annotated[
        int | None,
        typer.Option(help="AMQP/Fast: each line is a message; commit after so many.", min=1),
    ] = None,
    qos: Annotated[int, typer.Option(min=0, max=2, help="MQTT QoS; others: above 0 is persistent.")] = 1,
    retain: Annotated[bool, typer.Option(help="MQTT: retain it.")] = False,
    header: Annotated[list[str] | None, typer.Option(help="NAME=VALUE; may repeat.")] = None,
    content_type: Annotated[str | None, typer.Option(help="Content type.")] = None,
    reply_to: Annotated[str | None, typer.Option(help="Response topic or reply-to.")] = None,
    timeout: Timeout = 10.0,
    ca_file: CaFile = None,
) -> None:
    """Publish one message and wait until the broker has it. Exit code 1 when it does not take it."""
    for given in (topic, exchange, routing_key, queue, destination, content_type, reply_to, *(header or ())):
        if given is not None and not is_unicode(given):
            raise typer.BadParameter(f"{given!r} is not UTF-8")
    target = _target(url)
    address = _address(
        target,
        topic=topic,
        exchange=exchange if queue is None else None,
        routing_key=routing_key if queue is None else None,
        queue=queue,
        service=service,
        destination=destination,
    )
    file_by_itself = file is not None and target.protocol == AMQPFAST.name and transaction is None
    body = b"" if file_by_itself else _body(message, file)
    headers = tuple((name, string(value)) for name, value in (_pair(one) for one in header or ()))
    properties = property_set(Properties(content_type=content_type, reply_to=reply_to, headers=headers))
    made = Message(
        address, body, properties, qos, qos > 0, retain and "retain" in _dialect(target).target_options
    )
    if target.protocol == AMQPFAST.name:
        show = Shown(None, as_json=False).show
        refused = FastCommands(target, timeout, ca_file).publish(
            made, file if file_by_itself else None, transaction, show
        )
    else:
        refused = _publish(_peer(target, timeout, ca_file), made)
    if refused:
        typer.echo(f"not accepted: {refused}", err=True)
        raise typer.Exit(Exit.FAILED)


@app.command()
def subscribe(
    url: Url,
    topic: Annotated[str | None, typer.Option(help="MQTT topic filter.")] = None,
    queue: Annotated[str | None, typer.Option(help="AMQP queue to consume from.")] = None,
    exchange: Annotated[str | None, typer.Option(help="AMQP exchange to bind a queue of our own to.")] = None,
    binding_key: Annotated[str, typer.Option(help="With --exchange.")] = "#",
    service: Service = "topic",
    destination: Annotated[
        str | None, typer.Option(help="AMQP/Fast destination, or a prefix that ends in a dot.")
    ] = None,
    browse: Annotated[bool, typer.Option(help="AMQP/Fast: show what waits, and take nothing.")] = False,
    transaction: Annotated[
        int | None, typer.Option(help="AMQP/Fast: commit after so many messages.", min=1)
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="AMQP/Fast: folder for the bodies.", exists=True, file_okay=False)
    ] = None,
    qos: Annotated[int, typer.Option(min=0, max=2)] = 1,
    count: Annotated[int | None, typer.Option(help="Stop after so many messages.", min=1)] = None,
    seconds: Annotated[float | None, typer.Option(help="Stop after so long.", min=0.1)] = None,
    timeout: Timeout = 10.0,
    ca_file: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Print messages as they come, one line each. Exit code 1 when --count was not reached in --seconds."""
    target = _target(url)
    shown = Shown(count, as_json)
    if target.protocol == AMQPFAST.name:
        interrupted = FastCommands(target, timeout, ca_file).subscribe(
            _address(target, service=service, destination=destination),
            shown.show,
            seconds=seconds,
            browse=browse,
            transaction=transaction,
            save=save,
        )
        shown.left = None if interrupted else shown.left
    else:
        given = {"topic": topic, "queue": queue, "exchange": exchange, "binding_key": binding_key}
        _wanted(target, topic=topic, queue=queue, exchange=exchange)
        peer = _peer(target, timeout, ca_file)
        peer.listen({word: text for word, text in given.items() if text is not None}, qos)
        try:
            for message in messages(peer, seconds):
                if not shown.show(message, None):
                    break
        except KeyboardInterrupt:
            shown.left = None
        peer.close()
    if shown.left:
        raise typer.Exit(Exit.FAILED)


class Shown:
    """Prints messages, `left` more of them; None: as many as come."""

    def __init__(self, left: int | None, as_json: bool) -> None:
        self.left = left
        self._as_json = as_json

    def show(self, message: Message, saved: Path | None) -> bool:
        """Print one; False when that was the last that is wanted."""
        typer.echo(_line(message, self._as_json, saved))
        if self.left is None:
            return True
        self.left -= 1
        return self.left > 0


def _dialect(target: Target) -> Dialect:
    return DIALECTS[target.protocol]


def _peer(target: Target, timeout: float, ca_file: str | None) -> Client:
    if not _dialect(target).peer:
        raise typer.BadParameter(f"the command line does not speak {_dialect(target).title}")
    made: Client = resolve_name(_dialect(target).peer)(Access(target, timeout, ca_file))
    return made


def _wanted(target: Target, **given: str | None) -> None:
    """Raises BadParameter when the protocol's own words are not among those that were said."""
    dialect = _dialect(target)
    if not any(given.get(word) for word in dialect.address_words if word not in _DEFAULTED):
        wants = f"--{dialect.name_word}"
        if dialect.queue_word is not None:
            wants = (
                f"--{dialect.queue_word}, or --{dialect.scope_word} with {wants} or --{dialect.pattern_word}"
            )
        raise typer.BadParameter(f"{dialect.title} wants {wants.replace('_', '-')}")


def _address(target: Target, **given: str | None) -> Address:
    """What was said in the words of the target's protocol. Raises BadParameter."""
    _wanted(target, **given)
    try:
        return _dialect(target).published({word: text for word, text in given.items() if text is not None})[0]
    except NameRefused as error:
        raise typer.BadParameter(str(error)) from error


def _publish(peer: Client, message: Message) -> str:
    """Publish and say goodbye; returns why it was refused, or ""."""
    try:
        refused = peer.publish_many([message])
    except LinkError as error:
        peer.cut()
        return str(error)
    peer.close()
    return refused[0].text if refused else ""


def _body(message: str | None, file: Path | None) -> bytes:
    if message is not None:
        return message.encode()
    return file.read_bytes() if file is not None else sys.stdin.buffer.read()


def _target(url: str) -> Target:
    try:
        return parse_url(url)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"--header wants NAME=VALUE, not {text!r}")
    return name, value


def _line(message: Message, as_json: bool, saved: Path | None) -> str:
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
