"""`gateway publish` and `gateway subscribe`: send and show messages at any broker or gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from gateway.cli.exits import Exit
from gateway.cli.options import AsJson

app = typer.Typer()

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="URL of any broker, such as amqp://user:password@host:port/virtual-host. An unknown "
        "scheme prints the list.",
    ),
]
Service = Annotated[str, typer.Option(help="AMQP/Fast service: queue, topic or peer.")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for a response.", min=0.1)]


def _file(path: str) -> str:
    if not Path(path).is_file():
        raise typer.BadParameter(f"no such file: {path}")
    return path


CaFile = Annotated[
    str | None,
    typer.Option(parser=_file, metavar="FILE", help="PEM file of trusted certificate authorities."),
]


MqttVersionOption = Annotated[
    Literal["auto", "5.0", "3.1.1", "3.1", "mqipdp"],
    typer.Option(
        "--mqtt-version",
        help=(
            "MQTT version; auto: 5.0, or 3.1.1 if the broker refuses it. mqipdp is the version before 3.1."
        ),
    ),
]
ByteOrderOption = Annotated[
    Literal["auto", "little", "big"],
    typer.Option(
        "--byte-order",
        help="Byte order of keep-alive and packet identifiers in MQTT 3.1 and mqipdp; "
        "auto: little for mqipdp, big for 3.1.",
    ),
]


@app.command()
def publish(
    url: Url,
    topic: Annotated[str | None, typer.Option(help="MQTT topic.")] = None,
    exchange: Annotated[str, typer.Option(help="AMQP exchange.")] = "",
    routing_key: Annotated[str, typer.Option(help="AMQP routing key.")] = "",
    queue: Annotated[str | None, typer.Option(help="AMQP queue, through the default exchange.")] = None,
    service: Service = "topic",
    destination: Annotated[str | None, typer.Option(help="AMQP/Fast destination.")] = None,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Body of the message.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="File with the body; default: standard input.", exists=True, dir_okay=False),
    ] = None,
    transaction: Annotated[
        int | None,
        typer.Option(help="AMQP/Fast: publish each line as a message, and commit after this number.", min=1),
    ] = None,
    qos: Annotated[
        int, typer.Option(min=0, max=2, help="MQTT QoS; for other protocols, above 0 is persistent.")
    ] = 1,
    retain: Annotated[bool, typer.Option(help="MQTT: set the retain flag.")] = False,
    header: Annotated[list[str] | None, typer.Option(help="Header NAME=VALUE; may repeat.")] = None,
    content_type: Annotated[str | None, typer.Option(help="Content type of the message.")] = None,
    reply_to: Annotated[str | None, typer.Option(help="Response topic or reply-to.")] = None,
    timeout: Timeout = 10.0,
    ca_file: CaFile = None,
    mqtt_version: MqttVersionOption = "auto",
    byte_order: ByteOrderOption = "auto",
) -> None:
    """Publish one message and wait for its confirmation. Exit code 1 if the broker refuses it."""
    from gateway.cli.publish_subscribe import (
        MessagePrinter,
        address_of,
        body_of,
        build_message,
        check_version,
        headers_of,
        is_unicode,
        open_client,
        protocol_commands,
        publish_with,
        target_of,
    )

    for option in (topic, exchange, routing_key, queue, destination, content_type, reply_to, *(header or ())):
        if option is not None and not is_unicode(option):
            raise typer.BadParameter(f"{option!r} is not UTF-8")
    target = target_of(url)
    address = address_of(
        target,
        topic=topic,
        exchange=exchange if queue is None else None,
        routing_key=routing_key if queue is None else None,
        queue=queue,
        service=service,
        destination=destination,
    )
    check_version(target, mqtt_version, byte_order)
    own = protocol_commands(target, timeout, ca_file)
    if message is not None and file is not None:
        raise typer.BadParameter("--message cannot be combined with --file")
    if transaction is not None and own is None:
        raise typer.BadParameter("--transaction is for AMQP/Fast")
    uploads = file is not None and own is not None and transaction is None and service != "peer"
    body = b"" if uploads else body_of(message, file)
    made = build_message(target, address, body, qos, retain, content_type, reply_to, headers_of(header or ()))
    if own is not None and file is not None and uploads:
        refused = own.upload(made, file)
    elif own is not None:
        refused = own.publish(made, transaction, MessagePrinter(None, as_json=False).show)
    else:
        refused = publish_with(open_client(target, timeout, ca_file, mqtt_version, byte_order), made)
    if refused:
        typer.echo(f"not accepted: {refused}", err=True)
        raise typer.Exit(Exit.FAILED)


@app.command()
def subscribe(
    url: Url,
    topic: Annotated[str | None, typer.Option(help="MQTT topic filter.")] = None,
    queue: Annotated[str | None, typer.Option(help="AMQP queue to consume from.")] = None,
    exchange: Annotated[
        str | None, typer.Option(help="AMQP exchange to which a temporary queue is bound.")
    ] = None,
    binding_key: Annotated[str, typer.Option(help="Binding key, with --exchange.")] = "#",
    service: Service = "topic",
    destination: Annotated[
        str | None, typer.Option(help="AMQP/Fast destination, or a prefix that ends in a dot.")
    ] = None,
    browse: Annotated[
        bool, typer.Option(help="AMQP/Fast: show ready messages without consuming them.")
    ] = False,
    transaction: Annotated[
        int | None, typer.Option(help="AMQP/Fast: commit after this number of messages.", min=1)
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="AMQP/Fast: folder in which bodies are saved.", exists=True, file_okay=False),
    ] = None,
    selector: Annotated[str, typer.Option(help='AMQP/Fast: selector for messages, such as "size > 3".')] = "",
    selector_type: Annotated[
        str, typer.Option(help="AMQP/Fast: MIME type of the selector's language; default: application/jms.")
    ] = "",
    unreliable: Annotated[
        bool,
        typer.Option(help="AMQP/Fast: let the server regard messages as acknowledged when it sends them."),
    ] = False,
    qos: Annotated[int, typer.Option(help="MQTT: QoS of the subscription.", min=0, max=2)] = 1,
    count: Annotated[int | None, typer.Option(help="Stop after this number of messages.", min=1)] = None,
    seconds: Annotated[float | None, typer.Option(help="Stop after this number of seconds.", min=0.1)] = None,
    timeout: Timeout = 10.0,
    ca_file: CaFile = None,
    mqtt_version: MqttVersionOption = "auto",
    byte_order: ByteOrderOption = "auto",
    as_json: AsJson = False,
) -> None:
    """Print messages as they arrive, one per line. Exit code 1 if --seconds end before --count messages."""
    from gateway.cli.publish_subscribe import (
        MessagePrinter,
        SubscribeOptions,
        address_of,
        check_version,
        demand,
        messages,
        open_client,
        protocol_commands,
        target_of,
    )

    target = target_of(url)
    printer = MessagePrinter(count, as_json)
    check_version(target, mqtt_version, byte_order)
    own = protocol_commands(target, timeout, ca_file)
    if (selector or selector_type or unreliable) and (own is None or service == "peer"):
        raise typer.BadParameter("--selector and --unreliable are for queues and topics of AMQP/Fast")
    if unreliable and (browse or transaction is not None):
        raise typer.BadParameter("--unreliable cannot be combined with --browse or --transaction")
    if browse and transaction is not None:
        raise typer.BadParameter("--browse cannot be combined with --transaction")
    if (own is None or service == "peer") and (browse or transaction is not None or save is not None):
        raise typer.BadParameter("--browse, --transaction and --save are for queues and topics of AMQP/Fast")
    if own is not None:
        options = SubscribeOptions(selector, selector_type, unreliable, browse, transaction, save)
        address = address_of(target, service=service, destination=destination)
        interrupted = own.subscribe(address, printer.show, seconds, options)
        printer.remaining = None if interrupted else printer.remaining
    else:
        address_options = {"topic": topic, "queue": queue, "exchange": exchange, "binding_key": binding_key}
        demand(target, topic=topic, queue=queue, exchange=exchange)
        client = open_client(target, timeout, ca_file, mqtt_version, byte_order)
        client.listen({word: text for word, text in address_options.items() if text is not None}, qos)
        try:
            for message in messages(client, seconds):
                if not printer.show(message, None):
                    break
        except KeyboardInterrupt:
            printer.remaining = None
        client.close()
    if printer.remaining:
        raise typer.Exit(Exit.FAILED)
