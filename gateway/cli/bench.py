"""`gateway bench`: measures the message rate and latency of a broker of any protocol."""

from __future__ import annotations

from typing import Annotated

import orjson
import typer

from gateway.cli.exits import Exit
from gateway.cli.messages import CaFile, Service, Timeout, Url
from gateway.cli.options import AsJson

app = typer.Typer()


@app.command()
def bench(
    url: Url,
    topic: Annotated[str | None, typer.Option(help="MQTT topic.")] = None,
    exchange: Annotated[str, typer.Option(help="AMQP exchange.")] = "",
    routing_key: Annotated[str, typer.Option(help="AMQP routing key.")] = "",
    queue: Annotated[str | None, typer.Option(help="AMQP queue, which must exist.")] = None,
    service: Service = "topic",
    destination: Annotated[str | None, typer.Option(help="AMQP/Fast destination.")] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Number of messages.")] = 10_000,
    size: Annotated[int, typer.Option(min=8, max=1 << 24, help="Size of each body in bytes.")] = 100,
    qos: Annotated[
        int, typer.Option(min=0, max=2, help="MQTT QoS; for other protocols, above 0 is persistent.")
    ] = 1,
    in_flight: Annotated[
        int, typer.Option(min=1, max=65_535, help="Maximum number of unconfirmed messages.")
    ] = 500,
    rate: Annotated[
        float | None, typer.Option(min=0.1, help="Messages per second; default: as fast as possible.")
    ] = None,
    receive: Annotated[
        bool, typer.Option("--receive", help="Also consume the messages, on a second connection.")
    ] = False,
    timeout: Timeout = 10.0,
    ca_file: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Publish messages and measure the time. Exit code 1 if some are refused or do not arrive.

    Without --receive, times are from publishing a group of messages to its confirmation. A group has
    --in-flight messages; with --rate, as many as are published in 10 ms. With --receive, times are until each
    message arrives.
    """
    from gateway.cli.bench_load import Load, run_load
    from gateway.cli.publish_subscribe import address_of, target_of

    target = target_of(url)
    words = {
        "topic": topic,
        "exchange": exchange if queue is None else None,
        "routing_key": routing_key if queue is None else None,
        "queue": queue,
        "service": service,
        "destination": destination,
    }
    address = address_of(target, **words)
    result = run_load(target, address, Load(count, size, qos, in_flight, rate, receive), timeout, ca_file)
    typer.echo(orjson.dumps(result.as_json()) if as_json else "\n".join(result.lines()))
    if result.refused or result.lost:
        raise typer.Exit(Exit.FAILED)
