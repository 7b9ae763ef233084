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
    from gateway.cli.importing.made import Made

group = typer.Typer(
    name="import", no_args_is_help=True, help="A first configuration and mapping out of another broker's."
)
app = typer.Typer()
app.add_typer(group)

To = Annotated[
    Path,
    typer.Option(metavar="FOLDER", file_okay=False, help="Where gateway.yaml and mapping.yaml are written."),
]
Force = Annotated[bool, typer.Option("--force", help="Write over files that are there.")]


@group.command()
def rabbitmq(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="DEFINITIONS",
            exists=True,
            dir_okay=False,
            help="What `rabbitmqctl export_definitions` writes.",
        ),
    ],
    to: To = Path("."),
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Take RabbitMQ's definitions: queues, users and policies as they are, shovels and federation as links.

    What means nothing here, or cannot be taken, is told, and left out. When the file is none, nothing is
    written: exit code 1.
    """
    from gateway.cli.importing.rabbitmq import made_of

    _write(made_of, file, to, force, as_json)


@group.command()
def mosquitto(
    file: Annotated[
        Path, typer.Argument(metavar="CONF", exists=True, dir_okay=False, help="mosquitto.conf.")
    ],
    to: To = Path("."),
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Take Mosquitto's configuration: listeners, access rules and limits, bridges as links with routes.

    What means nothing here, or cannot be taken, is told with its line, and left out. When the file is none,
    nothing is written: exit code 1. Passwords are hashed otherwise: users have to be given theirs again, by
    `gateway passwd`.
    """
    from gateway.cli.importing.mosquitto import made_of

    _write(made_of, file, to, force, as_json)


def _write(make: Callable[[Path, Path], Made], file: Path, to: Path, force: bool, as_json: bool) -> None:
    paths = [to / "gateway.yaml", to / "mapping.yaml", to / "imported-definitions.json"]
    if not force and (there := [str(path) for path in paths if path.exists()]):
        raise typer.BadParameter(f"there is {' and '.join(there)} already; say --force, or --to elsewhere")
    made = make(file, to.resolve())
    written: list[str] = []
    if not made.alien:
        to.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, (*made.texts(), made.definitions.decode()), strict=True):
            if text:
                path.touch(mode=0o600)  # it may contain passwords of links
                path.write_text(text, encoding="utf-8")
                written.append(str(path))
    if as_json:
        typer.echo(orjson.dumps({"written": written, "findings": documents_of(made.findings)}))
    else:
        for name in written:
            typer.echo(f"written: {name}")
        show(made.findings)
        typer.echo(f"next: gateway check -c {paths[0]}" if written else "nothing is written")
    if not made.whole:
        raise typer.Exit(Exit.FAILED)
