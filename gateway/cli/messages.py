"""`gateway publish` and `gateway subscribe`: one message in, or what comes out, of any broker or gateway."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import orjson
import typer

from gateway.cli.amqpfast.commands import FastCommands
from gateway.cli.exits import Exit
from gateway.cli.options import AsJson
from gateway.egress.amqpfast.opening import SERVICES
from gateway.errors import LinkError
from gateway.model.address import AmqpAddress, FastAddress, MqttAddress
from gateway.model.message import Message
from gateway.model.properties import Properties, ValueType, is_unicode, property_set, string
from gateway.peers.amqp import AmqpPeer
from gateway.peers.mqtt import MqttPeer
from gateway.peers.wire import Access, messages
from gateway.settings import Target, parse_url

app = typer.Typer()

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
    for said in (topic, exchange, routing_key, queue, destination, content_type, reply_to, *(header or ())):
        if said is not None and not is_unicode(said):
            raise typer.BadParameter(f"{said!r} is not UTF-8")
    target = _target(url)
    whole = file is not None and target.protocol == "amqpfast" and transaction is None
    body = b"" if whole else _body(message, file)
    headers = tuple((name, string(value)) for name, value in (_pair(one) for one in header or ()))
    properties = property_set(Properties(content_type=content_type, reply_to=reply_to, headers=headers))
    if target.protocol == "mqtt":
        if topic is None:
            raise typer.BadParameter("MQTT wants --topic")
        made = Message(MqttAddress(topic), body, properties, qos, qos > 0, retain)
        refused = _publish(MqttPeer(Access(target, timeout, ca_file)), made)
    elif target.protocol == "amqp091":
        if queue is None and not exchange and not routing_key:
            raise typer.BadParameter("AMQP wants --queue, or --exchange with --routing-key")
        address = AmqpAddress("", queue) if queue is not None else AmqpAddress(exchange, routing_key)
        made = Message(address, body, properties, qos, qos > 0)
        refused = _publish(AmqpPeer(Access(target, timeout, ca_file)), made)
    else:
        made = Message(_fast_address(service, destination), body, properties, qos, qos > 0)
        show = Shown(None, as_json=False).show
        refused = FastCommands(target, timeout, ca_file).publish(
            made, file if whole else None, transaction, show
        )
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
    if target.protocol == "amqpfast":
        interrupted = FastCommands(target, timeout, ca_file).subscribe(
            _fast_address(service, destination),
            shown.show,
            seconds=seconds,
            browse=browse,
            transaction=transaction,
            save=save,
        )
        shown.left = None if interrupted else shown.left
    else:
        peer = _listening(target, topic, queue, exchange, binding_key, qos, timeout, ca_file)
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


def _listening(
    target: Target,
    topic: str | None,
    queue: str | None,
    exchange: str | None,
    binding_key: str,
    qos: int,
    timeout: float,
    ca_file: str | None,
) -> MqttPeer | AmqpPeer:
    if target.protocol == "mqtt":
        if topic is None:
            raise typer.BadParameter("MQTT wants --topic")
        mqtt = MqttPeer(Access(target, timeout, ca_file))
        mqtt.subscribe(topic, qos)
        return mqtt
    if queue is None and exchange is None:
        raise typer.BadParameter("AMQP wants --queue, or --exchange with --binding-key")
    amqp = AmqpPeer(Access(target, timeout, ca_file))
    amqp.consume(queue, exchange, binding_key)
    return amqp


def _publish(peer: MqttPeer | AmqpPeer, message: Message) -> str:
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


def _fast_address(service: str, destination: str | None) -> FastAddress:
    if destination is None:
        raise typer.BadParameter("AMQP/Fast wants --destination")
    if service not in SERVICES:
        raise typer.BadParameter(f"--service is one of {', '.join(SERVICES)}, not {service!r}")
    return FastAddress(service, destination)


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
    if isinstance(address, MqttAddress):
        place = {"topic": address.topic}
    elif isinstance(address, FastAddress):
        place = {"service": address.service, "destination": address.destination}
    else:
        place = {"exchange": address.exchange, "routing_key": address.routing_key}
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
