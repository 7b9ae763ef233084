"""`gateway test` and `gateway explain`: what mapping files do, before anything runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from gateway.cli.exits import Exit
from gateway.cli.findings import line_of
from gateway.cli.options import AsJson, ConfigFile, settings_of

if TYPE_CHECKING:
    from gateway.mapping.explain import Explanation

app = typer.Typer()

Files = Annotated[
    list[Path] | None, typer.Argument(help="Mapping files; default: those of the configuration.")
]


@app.command(name="test")
def run_tests(files: Files = None, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Run the tests that stand in mapping files. Exit code 1 when one fails."""
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
                typer.echo(
                    line_of(f"test {result.name!r}: {difference}", "error", "failed", file, result.line)
                )
        typer.echo(f"{len(results) - len(failed)} passed, {len(failed)} failed")
    if failed:
        raise typer.Exit(Exit.FAILED)


@app.command(name="explain")
def explain_address(
    endpoint: Annotated[str | None, typer.Argument(help="Endpoint that brings the message in.")] = None,
    topic: Annotated[str | None, typer.Option(help="MQTT topic.")] = None,
    exchange: Annotated[str | None, typer.Option(help="AMQP 0-9-1 exchange.")] = None,
    routing_key: Annotated[str, typer.Option(help="AMQP 0-9-1 routing key.")] = "",
    queue: Annotated[str | None, typer.Option(help="AMQP 0-9-1 queue.")] = None,
    service: Annotated[str, typer.Option(help="AMQP/Fast service: queue, topic or peer.")] = "topic",
    destination: Annotated[str | None, typer.Option(help="AMQP/Fast destination.")] = None,
    client: Annotated[str, typer.Option(help="Client identifier, for templates that name it.")] = "",
    user: Annotated[str, typer.Option(help="User, for templates that name it.")] = "",
    message: Annotated[
        str | None, typer.Option(metavar="ID", help="Instead: what the journal says became of this message.")
    ] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Show which routes take an address, what they produce, and why the others do not; or what became of one
    message. Exit code 1 when the journal does not know it.
    """
    settings = settings_of(config)
    if message is not None:
        from gateway.cli.journal_rows import tell_fate

        tell_fate(settings, message, as_json=as_json)
        return
    from gateway.mapping import load
    from gateway.mapping.explain import explain
    from gateway.mapping.router import Router
    from gateway.model.dialect import NameRefused
    from gateway.model.message import Sender
    from gateway.protocols import DIALECT_OF_WORD, DIALECTS

    endpoints = settings.endpoints()
    if endpoint is None:
        raise typer.BadParameter("say an endpoint, or --message")
    if endpoint not in endpoints:
        raise typer.BadParameter(f"{endpoint!r} is no endpoint; there are: {', '.join(endpoints)}")
    given = {"topic": topic, "destination": destination, "queue": queue, "exchange": exchange}
    if all(word is None for word in given.values()):
        raise typer.BadParameter("say --topic, --exchange with --routing-key, --queue, or --destination")
    given["service"] = None if destination is None else service
    given["routing_key"] = None if exchange is None else routing_key
    protocol = endpoints[endpoint]
    other = {DIALECT_OF_WORD[word].name for word, text in given.items() if text is not None} - {protocol}
    if other:
        raise typer.BadParameter(
            f"{endpoint} speaks {protocol}, the address is of {', '.join(sorted(other))}"
        )
    try:
        address, _ = DIALECTS[protocol].published(given)
    except NameRefused as error:
        raise typer.BadParameter(str(error)) from error
    router = Router(
        load(settings.mapping_files()),
        endpoints,
        worlds=settings.worlds(),
        hops_max=settings.limits.hops_max,
    )
    found = explain(router, endpoint, address, queue or "", Sender(endpoint, client, user))
    if as_json:
        typer.echo(orjson.dumps(asdict(found)))
    else:
        typer.echo(_text(found))


def _text(found: Explanation) -> str:
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
            lines.append(f"      when {match.when}")
        lines.append(f"      settle {match.settle}")
    for miss in found.misses:
        lines.append(f"  - {miss.route} ({miss.file}:{miss.line}): {miss.reason}")
    return "\n".join(lines)


@app.command()
def schema() -> None:
    """Print the JSON Schema of mapping files, for editors."""
    from gateway.mapping.schema import json_schema

    document: dict[str, Any] = json_schema()
    typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2))
