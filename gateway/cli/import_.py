"""`gateway import`: writes a first configuration and mapping from another broker's configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from gateway.cli.exits import Exit
from gateway.cli.findings import documents_of, show
from gateway.cli.options import AsJson

if TYPE_CHECKING:
    from gateway.cli.importing.import_result import ImportResult

group = typer.Typer(
    name="import",
    no_args_is_help=True,
    help="Convert another broker's configuration into a first configuration and mapping.",
)
app = typer.Typer()
app.add_typer(group)

To = Annotated[
    Path,
    typer.Option(metavar="FOLDER", file_okay=False, help="Folder for gateway.yaml and mapping.yaml."),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]


@group.command()
def rabbitmq(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="DEFINITIONS",
            exists=True,
            dir_okay=False,
            help="File that `rabbitmqctl export_definitions` has written.",
        ),
    ],
    to: To = Path("."),
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Convert RabbitMQ's definitions: queues, users and policies unchanged, shovels and federation to links.

    Definitions without a counterpart are listed and left out. For an invalid file nothing is written, and the
    exit code is 1.
    """
    from gateway.cli.importing.rabbitmq import import_file

    _write(import_file, file, to, force, as_json)


@group.command()
def mosquitto(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="CONF", exists=True, dir_okay=False, help="Configuration file mosquitto.conf."
        ),
    ],
    to: To = Path("."),
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Convert Mosquitto's configuration: listeners, access rules and limits, bridges to links with routes.

    Lines without a counterpart are listed and left out. For an invalid file nothing is written, and the exit
    code is 1. Password hashes cannot be converted: set users' passwords again with `gateway passwd`.
    """
    from gateway.cli.importing.mosquitto import import_file

    _write(import_file, file, to, force, as_json)


def _write(
    make: Callable[[Path, Path], ImportResult], file: Path, to: Path, force: bool, as_json: bool
) -> None:
    """Import `file` with `make`, write the results to the folder `to`, and print the findings.

    Raises typer.Exit if there are errors, and BadParameter if files would be overwritten without `force`.
    """
    paths = [to / "gateway.yaml", to / "mapping.yaml", to / "imported-definitions.json"]
    if not force and (there := [str(path) for path in paths if path.exists()]):
        raise typer.BadParameter(
            f"{' and '.join(there)} exists already; overwrite with --force, or choose another folder"
            " with --to"
        )
    made = make(file, to.resolve())
    written: list[str] = []
    if not made.alien:
        to.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, (*made.texts(), made.definitions.decode()), strict=True):
            if text:
                path.touch(mode=0o600)  # it may contain passwords of links
                path.chmod(0o600)  # also if it has been there before
                path.write_text(text, encoding="utf-8")
                written.append(str(path))
    if as_json:
        typer.echo(orjson.dumps({"written": written, "findings": documents_of(made.findings)}))
    else:
        for name in written:
            typer.echo(f"written: {name}")
        show(made.findings)
        typer.echo(f"next step: gateway check -c {paths[0]}" if written else "no file was written")
    if not made.is_complete:
        raise typer.Exit(Exit.FAILED)
