"""`gateway test` and `gateway explain`: show what mapping files do, without a running gateway."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from gateway.cli.exits import Exit
from gateway.cli.findings import format_finding
from gateway.cli.options import AsJson, ConfigFile, settings_of

if TYPE_CHECKING:
    from gateway.mapping.explain import Explanation

app = typer.Typer()

Files = Annotated[
    list[Path] | None, typer.Argument(help="Mapping files; default: those of the configuration.")
]


@app.command(name="test")
def run_tests(files: Files = None, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Run the tests in mapping files. Exit code 1 if one fails."""
    from gateway.mapping import load
    from gateway.mapping.cases import run_cases

    chosen = files or settings_of(config).mapping_files()
    results = [(str(mapping.file), result) for mapping in load(chosen) for result in run_cases(mapping)]
    failed = [result for _, result in results if not result.passed]
    if as_json:
        rows = [
            {
                "file": file,
                "line": result.line,
                "column": result.column,
                "test": result.name,
                "passed": result.passed,
                "differences": list(result.differences),
            }
            for file, result in results
        ]
        typer.echo(orjson.dumps({"passed": len(results) - len(failed), "failed": len(failed), "tests": rows}))
    else:
        for file, result in results:
            if result.passed:
                typer.echo(f"ok {file}:{result.line}: {result.name}")
            for difference in result.differences:
                text = f"test {result.name!r}: {difference}"
                typer.echo(format_finding(text, "error", "failed", file, result.line, result.column))
        typer.echo(f"{len(results) - len(failed)} passed, {len(failed)} failed")
    if failed:
        raise typer.Exit(Exit.FAILED)


@app.command(name="explain")
def explain_address(
    endpoint: Annotated[str | None, typer.Argument(help="Endpoint that receives the message.")] = None,
    topic: Annotated[str | None, typer.Option(help="MQTT topic.")] = None,
    exchange: Annotated[str | None, typer.Option(help="AMQP 0-9-1 exchange.")] = None,
    routing_key: Annotated[str, typer.Option(help="AMQP 0-9-1 routing key.")] = "",
    queue: Annotated[str | None, typer.Option(help="AMQP 0-9-1 queue.")] = None,
    service: Annotated[str, typer.Option(help="AMQP/Fast service: queue, topic or peer.")] = "topic",
    destination: Annotated[str | None, typer.Option(help="AMQP/Fast destination.")] = None,
    client: Annotated[str, typer.Option(help="Client identifier, for templates that use it.")] = "",
    user: Annotated[str, typer.Option(help="User, for templates that use it.")] = "",
    body: Annotated[
        str | None,
        typer.Option(help="Body of the message, for conditions; @FILE reads a file."),
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option(help="Header NAME=VALUE of the message; may repeat.")
    ] = None,
    qos: Annotated[
        int | None, typer.Option(min=0, max=2, help="QoS of the message; above 0 is persistent.")
    ] = None,
    retain: Annotated[bool, typer.Option("--retain", help="Set the message's retain flag.")] = False,
    content_type: Annotated[str | None, typer.Option(help="Content type of the message.")] = None,
    reply_to: Annotated[str | None, typer.Option(help="Response topic or reply-to of the message.")] = None,
    message: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Id of a message whose journal rows are printed; replaces all other options."
        ),
    ] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Show which routes an address or a message matches, what they publish, and why others do not match.

    With --message, show what happened to a message; exit code 1 if the journal does not have it.
    """
    settings = settings_of(config)
    if message is not None:
        from gateway.cli.journal_rows import print_fate

        print_fate(settings, message, as_json=as_json)
        return
    from gateway.cli.explanation import MessageOptions, explanation_of

    if endpoint is None:
        raise typer.BadParameter("give an endpoint, or --message")
    address_options = {"topic": topic, "destination": destination, "queue": queue, "exchange": exchange}
    if all(word is None for word in address_options.values()):
        raise typer.BadParameter("give --topic, --exchange with --routing-key, --queue, or --destination")
    address_options["service"] = None if destination is None else service
    address_options["routing_key"] = None if exchange is None else routing_key
    stated = (body, header, qos, content_type, reply_to)
    options = MessageOptions(body or "", header or [], qos or 0, retain, content_type, reply_to)
    some = retain or any(one is not None for one in stated)
    found = explanation_of(settings, endpoint, address_options, client, user, options if some else None)
    typer.echo(orjson.dumps(asdict(found)) if as_json else _text(found))


def _text(found: Explanation) -> str:
    """Return an explanation of routes as lines of text for people."""
    lines = [f"{found.endpoint}: {found.address}"]
    for match in found.matches:
        lines.append(f"  + {match.route} ({match.file}:{match.line})")
        lines.append(
            f"      refused: {match.refused}"
            if match.refused
            else f"      -> {match.endpoint}: {match.address}"
        )
        if match.captures:
            lines.append("      " + ", ".join(f"{name}={value!r}" for name, value in match.captures.items()))
        if match.when is not None:
            decided = {None: "", True: "  (true)", False: f"  ({match.why})"}
            lines.append(f"      when {match.when}{decided[match.crosses]}")
        if match.crosses is not None and (match.crosses or match.when is None):
            lines.append(f"      {_properties_text(match.made) if match.made is not None else match.why}")
        lines.append(f"      settle {match.settle}")
    for miss in found.misses:
        lines.append(f"  - {miss.route} ({miss.file}:{miss.line}): {miss.reason}")
    return "\n".join(lines)


def _properties_text(words: dict[str, Any]) -> str:
    """Return one line of text with the properties that are set in the message that a route publishes."""
    parts = [
        f"{word.replace('_', ' ')} {value if isinstance(value, str | int) else orjson.dumps(value).decode()}"
        for word in ("qos", "retain", "content_type", "reply_to", "headers", "body")
        if (value := words[word]) not in (None, False, {}, "")
    ]
    return f"as {', '.join(parts)}"


@app.command()
def schema(
    config: Annotated[
        bool, typer.Option("--config", help="Print the schema of the configuration instead.")
    ] = False,
) -> None:
    """Print the JSON Schema of mapping files, or of the configuration, for editors."""
    if config:
        from gateway.settings import json_schema as of_settings

        document: dict[str, Any] = of_settings()
    else:
        from gateway.mapping.schema import json_schema

        document = json_schema()
    typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2))
