"""`gateway publish` and `gateway subscribe`: one message in, or what comes out, of any broker or gateway."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import orjson
import typer

from gateway.cli.amqp import AmqpPeer
from gateway.cli.exits import Exit
from gateway.cli.mqtt import MqttPeer
from gateway.cli.options import AsJson
from gateway.model.address import AmqpAddress, MqttAddress
from gateway.model.message import Message
from gateway.model.properties import Properties, ValueType, property_set, string
from gateway.settings import Target, parse_url

app = typer.Typer()

Url = Annotated[
    str, typer.Argument(help="mqtt://, mqtts://, amqp:// or amqps://, with user:password@host:port")
]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for an answer.", min=0.1)]
CaFile = Annotated[str | None, typer.Option(help="PEM file of the authorities to trust.")]


@app.command()
def publish(
    url: Url,
    topic: Annotated[str | None, typer.Option(help="MQTT topic.")] = None,
    exchange: Annotated[str, typer.Option(help="AMQP exchange.")] = "",
    routing_key: Annotated[str, typer.Option(help="AMQP routing key.")] = "",
    queue: Annotated[str | None, typer.Option(help="AMQP queue (the default exchange).")] = None,
    message: Annotated[str | None, typer.Option("--message", "-m", help="The body.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="Read the body from a file; default: standard input.")
    ] = None,
    qos: Annotated[int, typer.Option(min=0, max=2, help="MQTT QoS; AMQP: above 0 is persistent.")] = 1,
    retain: Annotated[bool, typer.Option(help="MQTT: retain it.")] = False,
    header: Annotated[list[str] | None, typer.Option(help="NAME=VALUE; may repeat.")] = None,
    content_type: Annotated[str | None, typer.Option(help="Content type.")] = None,
    reply_to: Annotated[str | None, typer.Option(help="Response topic or reply-to.")] = None,
    timeout: Timeout = 10.0,
    ca_file: CaFile = None,
) -> None:
    """Publish one message and wait until the broker has it. Exit code 1 when it does not take it."""
    target = _target(url)
    body = message.encode() if message is not None else file.read_bytes() if file else sys.stdin.buffer.read()
    headers = tuple((name, string(value)) for name, value in (_pair(one) for one in header or ()))
    properties = property_set(Properties(content_type=content_type, reply_to=reply_to, headers=headers))
    if target.protocol == "mqtt":
        if topic is None:
            raise typer.BadParameter("MQTT wants --topic")
        made = Message(MqttAddress(topic), body, properties, qos, qos > 0, retain)
        peer: MqttPeer | AmqpPeer = MqttPeer(target, timeout, ca_file)
    else:
        address = AmqpAddress("", queue) if queue is not None else AmqpAddress(exchange, routing_key)
        made = Message(address, body, properties, qos, qos > 0)
        peer = AmqpPeer(target, timeout, ca_file)
    refused = peer.publish(made)
    peer.close()
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
    qos: Annotated[int, typer.Option(min=0, max=2)] = 1,
    count: Annotated[int | None, typer.Option(help="Stop after so many messages.", min=1)] = None,
    seconds: Annotated[float | None, typer.Option(help="Stop after so long.", min=0.1)] = None,
    timeout: Timeout = 10.0,
    ca_file: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Print messages as they come, one line each. Exit code 1 when --count was not reached in --seconds."""
    target = _target(url)
    if target.protocol == "mqtt":
        if topic is None:
            raise typer.BadParameter("MQTT wants --topic")
        mqtt = MqttPeer(target, timeout, ca_file)
        mqtt.subscribe(topic, qos)
        peer: MqttPeer | AmqpPeer = mqtt
    else:
        if queue is None and exchange is None:
            raise typer.BadParameter("AMQP wants --queue, or --exchange with --binding-key")
        amqp = AmqpPeer(target, timeout, ca_file)
        amqp.consume(queue, exchange, binding_key)
        peer = amqp
    left = count
    try:
        for message in peer.messages(seconds):
            typer.echo(_line(message, as_json))
            if left is not None:
                left -= 1
                if not left:
                    break
    except KeyboardInterrupt:
        left = None
    peer.close()
    if left:
        raise typer.Exit(Exit.FAILED)


def _target(url: str) -> Target:
    try:
        target = parse_url(url)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if target.protocol == "amqpfast":
        raise typer.BadParameter("AMQP/Fast is not available yet")
    return target


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"--header wants NAME=VALUE, not {text!r}")
    return name, value


def _line(message: Message, as_json: bool) -> str:
    address = message.address
    properties = message.properties
    headers = [
        (name, value.value if value.type is ValueType.STRING else str(value.value))
        for name, value in properties.headers
    ]
    try:
        body, encoding = message.body.decode(), "utf-8"
    except UnicodeDecodeError:
        body, encoding = message.body.hex(), "hex"
    if isinstance(address, MqttAddress):
        place = {"topic": address.topic}
    else:
        assert isinstance(address, AmqpAddress)
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
