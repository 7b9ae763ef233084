"""`gateway check`: is this configuration right, before anything runs?

Prints the configuration with its defaults and without its secrets on standard output, and what is wrong with
it on standard error; warnings alone leave the exit code 0.
"""

from __future__ import annotations

import os
from typing import Any, Final, NamedTuple

import orjson
import typer
from rich.console import Console
from rich.text import Text

from gateway.access.linting import lint_roles
from gateway.app.access import access_of, roles_of, with_imported_hosts
from gateway.broker.amqp091.declaring import gather, rehearse
from gateway.broker.amqp091.hosts import AmqpHosts
from gateway.broker.amqp091.unbound import unbound
from gateway.cli.exits import Exit
from gateway.cli.options import AsJson, ConfigFile, settings_of
from gateway.errors import ConfigurationError, MappingError
from gateway.mapping import load
from gateway.mapping.linter import Finding, Severity, lint, unstorable_routes
from gateway.mapping.router import compile_routes
from gateway.settings import FastListener, Settings, masked
from gateway.store.folder import fault

app = typer.Typer()

COLOURS: Final = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


@app.command()
def check(config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Check the configuration and its mapping files, and print what they come to."""
    try:
        settings: Settings | None = with_imported_hosts(settings_of(config))
    except ConfigurationError as error:
        settings, findings = None, [_error(line) for line in str(error).splitlines()]
    if settings is not None:
        rehearsed = rehearsal(settings)
        findings = [
            *(unreadable(settings) or unusable(settings)),
            *absent(settings),
            *unwritable(settings),
            *rehearsed.findings,
            *mapping_findings(settings, rehearsed),
            *role_findings(settings),
        ]
    wrong = any(finding.severity is Severity.ERROR for finding in findings)
    if as_json:
        typer.echo(orjson.dumps(_document(settings, findings, not wrong)))
    else:
        if settings is not None:
            typer.echo(masked(settings), nl=False)
        _print(findings)
    if wrong:
        raise typer.Exit(Exit.CONFIGURATION)


def unreadable(settings: Settings) -> list[Finding]:
    """The files that the configuration names and that this process may not read."""
    return [
        _error(f"{key}: this file cannot be read", str(path))
        for key, path in settings.files()
        if not (path.is_file() and os.access(path, os.R_OK))
    ]


def unusable(settings: Settings) -> list[Finding]:
    """Secrets of users that are neither hashes nor keys, as `run` would find them."""
    try:
        access_of(settings)
    except ConfigurationError as error:
        return [_error(str(error))]
    return []


def absent(settings: Settings) -> list[Finding]:
    """Folders shared with clients that are not there: until they are, channels that name them are closed."""
    return [
        Finding(
            Severity.WARNING, "absent", f"listeners.{name}.out_of_band.folder: no such folder", str(folder), 0
        )
        for name, listener in settings.listeners.items()
        if isinstance(listener, FastListener)
        and listener.out_of_band is not None
        and not (folder := listener.out_of_band.folder).is_dir()
    ]


def unwritable(settings: Settings) -> list[Finding]:
    """Folders that `run` writes, if this process may not. It may well be another one that shall."""
    folders = [("store.path", settings.store.path, settings.store.enabled)]
    folders.append(("journal.path", settings.journal_path(), settings.journal.enabled))
    return [
        Finding(Severity.WARNING, "unwritable", f"{key}: {why}", str(folder), 0)
        for key, folder, used in folders
        if used and (why := fault(folder))
    ]


class Rehearsal(NamedTuple):
    """What is declared, tried: what is wrong or unwise in it, the virtual hosts that come of it (None: it
    cannot be, so what is bound is not known), and in which of them anything is declared. What the store has,
    only the start can know.
    """

    findings: list[Finding]
    hosts: AmqpHosts | None
    declaring: set[str]


def rehearsal(settings: Settings) -> Rehearsal:
    """Read and try what is declared."""
    declared, findings = gather(settings)
    hosts, remarks = rehearse(settings, declared)
    whole = all(one.severity is not Severity.ERROR for one in remarks)
    return Rehearsal([*findings, *remarks], hosts if whole else None, {one.host for one in declared})


def mapping_findings(settings: Settings, rehearsed: Rehearsal) -> list[Finding]:
    """What is wrong or unwise in the mapping files, for the endpoints that are configured."""
    files = settings.mapping_files()
    if not files:
        reason = f"mappings: no file is found by {', '.join(settings.mappings)}"
        return [Finding(Severity.WARNING, "empty", reason, "", 0)]
    try:
        mappings = load(files)
    except MappingError as error:
        return [_error(error.reason, error.file, error.line, error.column)]
    routes = compile_routes(mappings, settings.endpoints(), settings.worlds()).routes
    refused = unstorable_routes(routes, settings.links, store=settings.store.enabled)
    hosts = rehearsed.hosts
    return [
        *map(_error, refused),
        *lint(mappings, settings.endpoints(), settings.links, settings.worlds()),
        *(() if hosts is None else unbound(routes, settings, hosts, rehearsed.declaring)),
    ]


def role_findings(settings: Settings) -> list[Finding]:
    """What is unwise in roles, and in routes because of them."""
    try:
        routes = compile_routes(
            load(settings.mapping_files()), settings.endpoints(), settings.worlds()
        ).routes
        return lint_roles(settings, roles_of(settings), routes)
    except ConfigurationError:
        return []  # which is told of already


def place_and_text(finding: Finding) -> str:
    """One line: where, how bad, what."""
    place = ":".join([finding.file, *(str(number) for number in (finding.line, finding.column) if number)])
    text = f"{finding.severity.value}: {finding.text}"
    return f"{place}: {text}" if place else text


def _error(text: str, file: str = "", line: int = 0, column: int = 0) -> Finding:
    return Finding(Severity.ERROR, "invalid", text, file, line, column)


def _document(settings: Settings | None, findings: list[Finding], good: bool) -> dict[str, Any]:
    return {
        "ok": good,
        "findings": [finding._asdict() for finding in findings],
        "configuration": None if settings is None else settings.model_dump(mode="json"),
    }


def _print(findings: list[Finding]) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    for finding in findings:
        console.print(Text(place_and_text(finding), style=COLOURS[finding.severity]))
