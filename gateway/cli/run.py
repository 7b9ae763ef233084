"""`gateway run`: the gateway itself."""

from __future__ import annotations

import typer

from gateway import app as composition
from gateway.app import Gateway
from gateway.cli.exits import Exit
from gateway.cli.options import ConfigFile, settings_of
from gateway.settings import Listener
from gateway.telemetry.logs import configure_logs

app = typer.Typer()


@app.command()
def run(config: ConfigFile = None) -> None:
    """Run the gateway until SIGTERM or Ctrl-C."""
    settings = settings_of(config)
    configure_logs(settings.log.level, settings.log.format)
    code = composition.run(settings, lambda gateway: typer.echo(welcome(gateway)))
    if code:
        raise typer.Exit(Exit.FAILED)


def spoken(listener: Listener) -> str:
    """What a client has to speak there."""
    words: list[str] = [listener.protocol]
    if listener.websocket_path is not None:
        words.append(f"over WebSocket at {listener.websocket_path}")
    if listener.tls is not None:
        words.append("with and without TLS" if listener.protocol == "shared" else "with TLS")
    if listener.shares:
        words.append(f"for {', '.join(listener.shares)}")
    if listener.proxy_protocol == "required":
        words.append("behind the PROXY protocol")
    return " ".join(words)


def welcome(gateway: Gateway) -> str:
    """Where to connect, and what to try first."""
    lines = ["The gateway is running.", ""]
    ports: dict[str, int] = {}
    for name, listener in gateway.listeners.items():
        given = gateway.settings.listeners[name]
        if spoken(given) == given.protocol:  # the commands below know no more than that
            ports.setdefault(given.protocol, listener.port)
        lines.append(f"  {name:<10} {spoken(given)} on {listener.host}:{listener.port}")
    for name, link in gateway.settings.links.items():
        lines.append(f"  {name:<10} link to {', or '.join(link.addresses)}")
    if gateway.http_port:
        lines.append(f"  page       http://localhost:{gateway.http_port}/  (metrics: /metrics)")
    if "mqtt" in ports and "amqp091" in ports:
        mqtt, amqp = ports["mqtt"], ports["amqp091"]
        lines += [
            "",
            "Try it from two other terminals (the program stands in .venv/bin in a checkout):",
            f"  gateway subscribe amqp://guest:guest@localhost:{amqp}"
            " --exchange amq.topic --binding-key 'plant.#'",
            f"  gateway publish mqtt://localhost:{mqtt} --topic plant/line1/temperature --message 21.5",
            f"or with any client: mosquitto_pub -p {mqtt} -t plant/line1/temperature -m 21.5",
            "",
            "Ctrl-C stops it.",
        ]
    return "\n".join(lines)
