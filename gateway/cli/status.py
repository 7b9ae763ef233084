"""`gateway status`: reports whether a running gateway is healthy, and what is wrong if it is not."""

from __future__ import annotations

import orjson
import typer

from gateway.cli.exits import Exit
from gateway.cli.operations import age
from gateway.cli.options import HERE, AsJson, TokenFile, Url, call_gateway
from gateway.cli.tables import table
from gateway.operations import STATUS

app = typer.Typer()


@app.command()
def status(url: Url = HERE, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Print the state of a gateway in a few lines. Exit code 1 if it is not ready."""
    found = call_gateway(url, token_file, STATUS.url)
    if as_json:
        typer.echo(orjson.dumps(found))
    else:
        listeners = [one for one in found["endpoints"] if one["kind"] == "listener"]
        links = [one for one in found["endpoints"] if one["kind"] == "link"]
        down = [one["name"] for one in links if not one["up"]]
        state = "ready" if found["ready"] else f"NOT READY: {'; '.join(found['not_ready'])}"
        rows = [
            ("state:", state),
            ("version:", found["version"]),
            ("up for:", age(found["uptime_secs"])),
            ("clients:", f"{sum(one['connections'] for one in listeners)} at {len(listeners)} listeners"),
            ("links:", f"{len(links) - len(down)} of {len(links)} up"),
            ("down:", ", ".join(down)),
            ("routes:", len(found["routes"])),
            (
                "failed:",
                f"{sum(one['failed'] for one in found['routes'])} messages since the start",
            ),
        ]
        typer.echo("\n".join(table(rows)))
        for one in found.get("alarms", ()):
            of = f" {one['of']}" if one["of"] else ""
            typer.echo(f"{one['name']}{of} since {one['since']}: {one['text']}. {one['act']} ({one['page']})")
    if not found["ready"]:
        raise typer.Exit(Exit.FAILED)
