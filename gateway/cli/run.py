"""`gateway run`: the gateway itself."""

from __future__ import annotations

import typer

from gateway import app as composition
from gateway.app import Gateway
from gateway.cli.exits import Exit
from gateway.cli.options import ConfigFile, settings_of
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


def welcome(gateway: Gateway) -> str:
    """Where to connect, and what to try first."""
    lines = ["The gateway is running.", ""]
    ports: dict[str, int] = {}
    for name, listener in gateway.listeners.items():
        given = gateway.settings.listeners[name]
        ports.setdefault(given.protocol, listener.port)
        secure = " with TLS" if given.tls is not None else ""
        lines.append(f"  {name:<10} {given.protocol}{secure} on {listener.host}:{listener.port}")
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
