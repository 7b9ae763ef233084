"""Commands that call one operation of a running gateway, derived from its row in gateway/operations.py.

The row has the path and the parameters of the operation, with their descriptions; the parameters become
options. Each command adds its help text, the columns of its table or the lines about its result, and the
condition for exit code 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlencode

import orjson
import typer

from gateway.cli.exits import Exit
from gateway.cli.options import HERE, AsJson, TokenFile, Url, call_gateway
from gateway.cli.tables import table
from gateway.operations import ApiOperation, OperationWord

UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
NUMBERS: Final = (
    "messages",
    "bytes",
    "unacknowledged",
    "consumers",
    "subscriptions",
    "waiting",
    "in flight",
    "QoS",
)
AGE: Final = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)([smhd]?)")

Document = dict[str, Any]
"""The JSON document of a response, or one of its rows."""
Columns = Mapping[str, Callable[[Document], object]]
"""Headings of a table, and functions that return the cell below them from a row."""
NOTHING: Final[Document] = {}
Options = dict[str, tuple[Any, object]]
"""Annotations and defaults of a command's parameters, by name."""

Count = Annotated[int, typer.Option("--limit", "-n", min=1, max=1_000, help="Maximum number of rows.")]
After = Annotated[
    str, typer.Option(metavar="KEY", help="Key after which the list begins, as the previous page printed it.")
]
All = Annotated[bool, typer.Option("--all", help="Select all objects; needs --yes.")]
Yes = Annotated[bool, typer.Option("--yes", help="Confirm --all.")]
GATEWAY: Final[Options] = {"url": (Url, HERE), "token_file": (TokenFile, None), "as_json": (AsJson, False)}


class ObjectCommands:
    """Group of commands for the objects of one kind, such as `gateway queues`."""

    def __init__(self, app: typer.Typer, name: str, text: str) -> None:
        """Add the group `name` to `app`; `text` is its help."""
        self.typer = typer.Typer(name=name, help=text)
        app.add_typer(self.typer)

    def add_list(
        self,
        operation: ApiOperation,
        text: str,
        columns: Columns,
        *,
        without: tuple[str, ...] = (),
        pages: bool = True,
        always: Document = NOTHING,
        measured: Columns = NOTHING,
    ) -> None:
        """Add the command `list`, which requests one page of a list and prints it as a table.

        `text` is the help of the command, `columns` the columns of the table. Parameters of the operation
        become options, except those named in `without`. With `pages` the command also has the option
        `--after`. `always` are parameters that each request has. `measured` are additional columns for the
        option `--rates`; they are also shown if rows are sorted by one of them.
        """

        def run(*, count: int, url: str, token_file: Path | None, as_json: bool, **options: Any) -> None:
            if options.get("sort") in measured:
                options["rates"] = True
            choice = {**_chosen(options, operation), **always}
            stated = {word: _in_query(value) for word, value in choice.items()}
            query = urlencode({**stated, "count": count})
            found = call_gateway(url, token_file, f"{operation.url}?{query}")
            if as_json:
                typer.echo(orjson.dumps(found))
            else:
                shown_columns = {**columns, **measured} if options.get("rates") else columns
                _print_page(found, shown_columns, pages=pages)

        page: Options = {"count": (Count, 100), **({"after": (After, "")} if pages else {})}
        self._add("list", text, run, {**_options(operation, without), **page, **GATEWAY})

    def add_change(self, name: str, operation: ApiOperation, text: str, done: str) -> None:
        """Add a command that changes the object with a given name, and prints the name and `done`."""

        def run(
            name: Annotated[str, typer.Argument(metavar="NAME", help="Name, as `list` prints it.")],
            url: Url = HERE,
            token_file: TokenFile = None,
            as_json: AsJson = False,
        ) -> None:
            act(
                operation,
                url,
                token_file,
                {"name": name},
                lambda found: typer.echo(f"{found['name']} {done}"),
                as_json=as_json,
            )

        self.typer.command(name=name, help=text)(run)

    def add_action(
        self,
        name: str,
        operation: ApiOperation,
        text: str,
        tell: Callable[[Document], None],
        *,
        failed: Callable[[Document], bool],
        without: tuple[str, ...] = (),
        check: Callable[[Document], None] = lambda _: None,
    ) -> None:
        """Add a command that acts on the objects that its options select.

        `text` is the help of the command. Parameters of the operation become options, except those named in
        `without`. `check` raises BadParameter for an invalid selection. `tell` prints the response for
        people. The exit code is 1 if `failed` returns True for the response.
        """

        def run(*, url: str, token_file: Path | None, as_json: bool, **options: Any) -> None:
            choice = _removal(options, operation) if operation.removes else _chosen(options, operation)
            check(choice)
            act(operation, url, token_file, choice, tell, failed=failed, as_json=as_json)

        every: Options = {"every": (All, False), "yes": (Yes, False)} if operation.removes else {}
        self._add(name, text, run, {**_options(operation, without), **every, **GATEWAY})

    def _add(self, name: str, text: str, run: Callable[..., None], options: Options) -> None:
        """Add the command `name`, which calls `run` with the values of `options` as keyword arguments."""
        parameters = [
            Parameter(word, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for word, (annotation, default) in options.items()
        ]
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        self.typer.command(name=name, help=text)(run)


def act(
    operation: ApiOperation,
    url: str,
    token_file: Path | None,
    choice: Document,
    tell: Callable[[Document], None],
    *,
    failed: Callable[[Document], bool] = lambda _: False,
    as_json: bool,
) -> None:
    """Call an operation and print the response: as JSON, or for people by `tell`.

    `choice` is the body of the request. Raises typer.Exit with code 1 if `failed` returns True for the
    response.
    """
    found = call_gateway(url, token_file, operation.url, choice)
    if as_json:
        typer.echo(orjson.dumps(found))
    else:
        tell(found)
    if failed(found):
        raise typer.Exit(Exit.FAILED)


def _options(operation: ApiOperation, without: tuple[str, ...]) -> Options:
    """Return the command-line options for the parameters of an operation, except those named in `without`."""
    choice = {word: _option(word, one, chooses=True) for word, one in operation.choice.items()}
    flags = {word: _option(word, one, chooses=False) for word, one in operation.flags.items()}
    return {word: option for word, option in {**choice, **flags}.items() if word not in without}


def _option(word: str, one: OperationWord, *, chooses: bool) -> tuple[Any, object]:
    """Return annotation and default of the command-line option for the parameter `word`.

    `one` describes the parameter. `chooses` is True if the parameter selects objects; the default is then
    None. Otherwise a flag is off, and a parameter with several permitted texts has the first of them as its
    default.
    """
    name, text = word.replace("_", "-"), one.meaning
    if one.kind is bool and chooses:
        return Annotated[bool | None, typer.Option(f"--{name}/--not-{name}", help=text)], None
    if one.kind is bool:
        return Annotated[bool, typer.Option(f"--{name}", help=text)], False
    if one.kind is float:
        text = f"{text[:-1]}, or 15m, 12h, 7d."
        return Annotated[float | None, typer.Option(metavar="TIME", parser=seconds_of, help=text)], None
    if isinstance(one.kind, tuple):
        literal: Any = Literal
        return Annotated[literal[one.kind] | None, typer.Option(help=text)], None if chooses else one.kind[0]
    if one.kind is str:
        return Annotated[str | None, typer.Option(metavar=one.metavar, help=text)], None
    if one.kind is list:
        return Annotated[list[str] | None, typer.Argument(metavar=one.metavar, help=text)], None
    names = _Names(one)
    return Annotated[
        str | None, typer.Option(callback=names.check, autocompletion=names.all, help=text)
    ], None


class _Names:
    """Permitted values of a parameter, for completion by the shell and to check an argument.

    The values are determined only when they are needed.
    """

    def __init__(self, word: OperationWord) -> None:
        self._word = word

    def all(self) -> list[str]:
        return list(self._word.texts or ())

    def check(self, name: str | None) -> str | None:
        """Return the argument unchanged. Raises BadParameter if it is not a permitted value."""
        if name is not None and name not in self.all():
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(self.all())}")
        return name


def _chosen(options: Document, operation: ApiOperation) -> Document:
    """Return the parameters that the user has given, without flags that are off and without empty lists."""
    return {
        word: value
        for word, value in options.items()
        if value is not None and value != [] and (word in operation.choice or value)
    }


def _removal(options: Document, operation: ApiOperation) -> Document:
    """Return the parameters that select the objects to remove.

    Raises BadParameter if the user selected nothing, or selected everything without the option --yes.
    """
    every, yes = options.pop("every"), options.pop("yes")
    choice = _chosen(options, operation)
    if every is not choice.keys().isdisjoint(operation.choice):
        raise typer.BadParameter("nothing is selected: give options that select objects, or --all")
    if every and not yes:
        raise typer.BadParameter("--all selects everything: confirm with --yes")
    return {**choice, **({"all": True} if every else {})}


def _in_query(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value


def _print_page(found: Document, columns: Columns, *, pages: bool) -> None:
    """Print one page of a list as a table.

    With `pages`, print to standard error how to request the next page; else print how many rows are left out.
    """
    items, total = found["items"], found["total"]
    if items:
        rows = [[said_of(one) for said_of in columns.values()] for one in items]
        typer.echo("\n".join(table(rows, tuple(columns), right=NUMBERS)))
    else:
        typer.echo("no rows found" if not total else "no more rows")
    if items and not pages and total > len(items):
        typer.echo(f"and {total - len(items)} more")
    elif items and pages and found["next"] is not None:
        typer.echo(f"{total} rows in total; next page: --after {_quoted(found['next'])}", err=True)


def _quoted(key: str) -> str:
    """Return the key after which the next page of a list begins, quoted for a shell."""
    quoted = key.replace("'", "'\\''")
    return f"'{quoted}'"


def seconds_of(text: str) -> float:
    """Convert a duration such as `90`, `90s`, `15m`, `12h` or `7d` to seconds. Raises BadParameter."""
    found = AGE.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a duration; write 90s, 15m, 12h or 7d")
    return float(found[1]) * UNITS[found[2]]


def age(secs: float | None) -> str:
    """Return a duration in seconds as text for people, in the largest unit that fits, such as `15m`.

    Return "-" for None.
    """
    if secs is None:
        return "-"
    unit = next(unit for unit in ("d", "h", "m", "s") if secs >= UNITS[unit] or unit == "s")
    return f"{secs / UNITS[unit]:.0f}{unit}"
