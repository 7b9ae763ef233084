"""Options by which `sessions`, `queues` and `retained` choose, and how what was chosen is shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import orjson
import typer

from gateway.cli.options import ask
from gateway.cli.tables import table

UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
NUMBERS: Final = (
    "messages",
    "octets",
    "unacknowledged",
    "consumers",
    "subscriptions",
    "waiting",
    "in flight",
    "QoS",
)
AGE: Final = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)([smhd]?)")


def seconds_of(text: str) -> float:
    """`90`, `90s`, `15m`, `12h` or `7d` in seconds. Raises BadParameter."""
    found = AGE.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is no duration such as 90s, 15m, 12h or 7d")
    return float(found[1]) * UNITS[found[2]]


Count = Annotated[int, typer.Option("--count", "-n", min=1, max=1_000, help="So many.")]
After = Annotated[str, typer.Option(metavar="KEY", help="Those behind this one, as the page before said.")]
Idle = Annotated[
    str | None,
    typer.Option("--idle-longer-than", metavar="TIME", help="Unused for so long: 90s, 15m, 12h, 7d."),
]
Exact = Annotated[bool, typer.Option("--exact", help="Names as they are: * is a *, and a topic no filter.")]
All = Annotated[bool, typer.Option("--all", help="All of them; needs --yes.")]
Yes = Annotated[bool, typer.Option("--yes", help="Yes, all of them.")]


def chosen(*, idle: str | None = None, **words: Any) -> dict[str, Any]:
    """The words that were given, for the HTTP API."""
    given = {word: value for word, value in words.items() if value is not None}
    return given if idle is None else {**given, "idle_longer_than": seconds_of(idle)}


def removal(words: dict[str, Any], *, every: bool, yes: bool, **flags: bool) -> dict[str, Any]:
    """The choice of a removal. Raises BadParameter for none, and for all without a confirmation."""
    if bool(words) is every:
        raise typer.BadParameter("say which: give options that choose, or --all")
    if every and not yes:
        raise typer.BadParameter("--all removes all of them; say --yes, too")
    return {**words, **({"all": True} if every else {}), **{word: True for word, on in flags.items() if on}}


def show_page(
    url: str,
    token_file: Path | None,
    path: str,
    words: dict[str, Any],
    columns: Mapping[str, Callable[[dict[str, Any]], object]],
    *,
    count: int,
    after: str,
    as_json: bool,
) -> None:
    """Print one page of a list; where the next one begins goes to standard error.

    `columns` have headings, and say what stands below them.
    """
    stated = {word: str(value).lower() if isinstance(value, bool) else value for word, value in words.items()}
    found = ask(url, token_file, f"{path}?{urlencode({**stated, 'count': count, 'after': after})}")
    if as_json:
        typer.echo(orjson.dumps(found))
        return
    if found["items"]:
        rows = [[said_of(one) for said_of in columns.values()] for one in found["items"]]
        typer.echo("\n".join(table(rows, tuple(columns), right=NUMBERS)))
    if not found["items"]:
        typer.echo("there are none" if not found["total"] else "there are no more")
    elif found["next"] is not None:
        typer.echo(f"{found['total']} in all; the next: --after {_quoted(found['next'])}", err=True)


def _quoted(key: str) -> str:
    """A key for a shell."""
    quoted = key.replace("'", "'\\''")
    return f"'{quoted}'"


def age(secs: float | None) -> str:
    """Seconds for people, in the largest unit that fits."""
    if secs is None:
        return "-"
    unit = next(unit for unit in ("d", "h", "m", "s") if secs >= UNITS[unit] or unit == "s")
    return f"{secs / UNITS[unit]:.0f}{unit}"
