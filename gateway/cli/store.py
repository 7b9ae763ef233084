"""`gateway store backup | restore | check | repair`: copies a store, and recovers data of a damaged one.

Only `backup` may be called while a gateway uses the store.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from gateway.cli.exits import Exit
from gateway.cli.options import AsJson, ConfigFile, settings_of
from gateway.cli.progress import progress_bar

if TYPE_CHECKING:
    from gateway.store.damage import Findings

store = typer.Typer(name="store", help="Back up, restore, check and repair a store.")
app = typer.Typer()
app.add_typer(store)

Folder = Annotated[
    Path | None,
    typer.Option(
        "--store",
        metavar="FOLDER",
        exists=True,
        file_okay=False,
        help="Folder of the store; default: store.path of --config.",
    ),
]


@store.command()
def backup(
    to: Annotated[
        Path,
        typer.Option("--to", metavar="FOLDER", help="Folder of the copy; new or empty.", show_default=False),
    ],
    config: ConfigFile = None,
    folder: Folder = None,
) -> None:
    """Copy the store to another folder, also while a gateway uses it."""
    from gateway.store.backup import back_up

    at = _folder(config, folder)
    with progress_bar("copying the store"):
        byte_count = back_up(at, to)
    typer.echo(f"copied the store {at} to {to}: {byte_count} bytes")


@store.command()
def restore(
    backup: Annotated[
        Path, typer.Option("--from", metavar="FOLDER", help="Folder of the backup.", show_default=False)
    ],
    config: ConfigFile = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--store", metavar="FOLDER", help="Folder of the new store; default: store.path of --config."
        ),
    ] = None,
) -> None:
    """Copy a backup into the folder of a store. A folder that has a store is refused."""
    from gateway.store.backup import restore as restore_backup

    at = _folder(config, folder)
    with progress_bar("copying the backup"):
        byte_count = restore_backup(backup, at)
    typer.echo(f"restored the backup {backup} to {at}: {byte_count} bytes")


@store.command()
def check(config: ConfigFile = None, folder: Folder = None, as_json: AsJson = False) -> None:
    """Print which parts of the store cannot be read. Exit code 1 if something is lost.

    The store is not changed.
    """
    from gateway.store import repair as repairing

    at = _folder(config, folder)
    with progress_bar("reading the store"):
        findings = repairing.check(at)
    if as_json:
        typer.echo(orjson.dumps(_document(findings)))
    else:
        _print_findings(findings)
    if not findings.is_intact:
        raise typer.Exit(Exit.FAILED)


@store.command()
def repair(config: ConfigFile = None, folder: Folder = None, as_json: AsJson = False) -> None:
    """Copy everything readable into a new database, and keep the old one under another name."""
    from gateway.store import repair as repairing

    at = _folder(config, folder)
    with progress_bar("copying the store"):
        findings, aside = repairing.repair(at)
    if as_json:
        typer.echo(orjson.dumps({**_document(findings), "aside": None if aside is None else str(aside)}))
        return
    _print_findings(findings)
    if aside is not None:
        typer.echo(f"repaired; the damaged files are in {aside}")


def _folder(config: Path | None, folder: Path | None) -> Path:
    return settings_of(config).store.path if folder is None else folder


def _document(findings: Findings) -> dict[str, Any]:
    lost = [
        {"kind": kind, "name": name, **asdict(one)} for (kind, name), one in sorted(findings.logs.items())
    ]
    things = [{"kind": kind, "key": key} for kind, key in findings.things]
    return {**asdict(findings), "logs": lost, "things": things, "intact": findings.is_intact}


def _print_findings(findings: Findings) -> None:
    """Print which parts of a store could not be read, and how many messages could be read."""
    for line in findings.file:
        typer.echo(f"database file: {line}")
    for table, count in sorted(findings.hidden.items()):
        typer.echo(f"table {table}: {count} ranges of rows are unreadable")
    for (kind, name), lost in sorted(findings.logs.items()):
        whose = f"{kind} {name}" if kind else "queues or sessions with unreadable names"
        perhaps = f", and perhaps {lost.perhaps} more" if lost.perhaps else ""
        typer.echo(f"{whose}: {lost.messages} messages are lost{perhaps}")
    for kind, key in findings.things:
        typer.echo(f"{kind} {key}: lost")
    if (more := findings.things_lost - len(findings.things)) > 0:
        typer.echo(f"and {more} more lost records")
    for line in findings.bodies:
        typer.echo(f"body: {line}")
    if findings.letters:
        typer.echo(f"{findings.letters} dead letters are lost")
    if findings.settled:
        typer.echo(
            f"{findings.settled} records of acknowledgements are lost: these messages will be redelivered"
        )
    summary = f"{findings.messages} messages" + (f", {findings.rows.get('things', 0)} other records")
    typer.echo(f"{'intact' if findings.is_intact else 'readable'}: {summary}")
