"""Output of `gateway top`: two snapshots of the gateway, and the rates between them.

Counters only grow, so a rate is the difference of two snapshots by the gateway's own clock. An object that
was not in the first snapshot, or whose counters were reset, has no rate yet.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import typer

from gateway.cli.api_client import request_json
from gateway.cli.tables import table
from gateway.errors import GatewayError
from gateway.operations import QUEUES, STATUS

ROWS_MAX: Final = 12  # rows of each table
QUEUES_READ: Final = 100  # longest queues to read: more than are shown, so that their growth is known
UNITS: Final = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
RIGHT: Final = (
    *("connections", "in/s", "out/s", "B/s in", "B/s out", "in flight", "errors", "matched/s", "delivered/s"),
    *("failed", "messages", "unacknowledged", "consumers", "bytes", "+/s"),
)


HEADINGS: Final = {
    "endpoint": (
        *("protocol", "state", "connections", "in/s", "out/s", "B/s in", "B/s out", "in flight", "errors"),
    ),
    "route": ("way", "matched/s", "delivered/s", "in flight", "failed"),
    "outbox": ("link", "messages", "problem"),
    "queue": ("of", "messages", "+/s", "unacknowledged", "consumers", "bytes"),
}
COLUMNS: Final = tuple(dict.fromkeys(word for title, row in HEADINGS.items() for word in (title, *row)))


class Snapshot(NamedTuple):
    """Snapshot of a gateway: its status, and its longest queues."""

    status: Mapping[str, Any]
    queues: list[Mapping[str, Any]]


def take_snapshot(url: str, token_file: Path | None) -> Snapshot:
    """Request status and longest queues from the gateway. Raises GatewayError."""
    status = request_json(url, token_file, STATUS.url)
    query = f"count={QUEUES_READ}&empty=false&sort=messages"
    found = request_json(url, token_file, f"{QUEUES.url}?{query}")
    return Snapshot(status, found["items"])


def check_column(sort: str) -> None:
    """Check the value of the option --sort; "" means that the option is not given.

    Raises BadParameter if no table has a column of this name.
    """
    if sort not in ("", *COLUMNS):
        raise typer.BadParameter(f"--sort: must be one of {', '.join(COLUMNS)}, not {sort!r}")


def print_once(url: str, token_file: Path | None, interval: float, sort: str = "") -> None:
    """Take two snapshots, `interval` seconds apart, and print one page with the rates between them.

    Raises GatewayError.
    """
    before = take_snapshot(url, token_file)
    time.sleep(interval)
    typer.echo("\n".join(page(before, take_snapshot(url, token_file), sort)))


def watch(url: str, token_file: Path | None, interval: float, sort: str = "") -> None:
    """Show a new page on the terminal every `interval` seconds until Ctrl-C.

    If the gateway stops responding, retry. Raises GatewayError if the first request fails.
    """
    from rich.live import Live
    from rich.text import Text

    before = now = take_snapshot(url, token_file)
    try:
        with Live(auto_refresh=False, screen=True) as live:
            while True:
                size = shutil.get_terminal_size()
                lines = [line[: size.columns] for line in page(before, now, sort)][: size.lines - 1]
                live.update(Text("\n".join(lines)), refresh=True)
                time.sleep(interval)
                try:
                    before, now = now, take_snapshot(url, token_file)
                except GatewayError as error:
                    live.update(Text(f"{error}\nRetrying; stop with Ctrl-C."), refresh=True)
                    time.sleep(interval)
    except KeyboardInterrupt:
        return


def page(before: Snapshot, now: Snapshot, sort: str = "") -> list[str]:
    """Return the lines of a page with the tables of endpoints, routes, outboxes and queues.

    Rates are those between the two snapshots. Tables with the column `sort` are sorted by it.
    """
    status = now.status
    secs = status["at_secs"] - before.status["at_secs"]
    ready = "ready" if status["ready"] else f"NOT READY: {'; '.join(status['not_ready'])}"
    lines = [f"gateway {status['version']}, up {status['uptime_secs'] / 3_600:.1f} h, {ready}"]

    def part(title: str, rows: list[list[object]], headings: tuple[str, ...]) -> None:
        if sort in (title, *headings):
            at = (title, *headings).index(sort)
            rows.sort(key=lambda row: _order(row[at]))
        if rows:
            lines.extend(["", *table(rows[:ROWS_MAX], (title, *headings), right=RIGHT)])
        if len(rows) > ROWS_MAX:
            lines.append(f"and {len(rows) - ROWS_MAX} more")

    rate = _rates(before.status["endpoints"], secs)
    part(
        "endpoint",
        [
            [
                one["name"],
                one["protocol"],
                _state(one),
                one["connections"],
                *(rate(one, word) for word in ("messages_in", "messages_out", "bytes_in", "bytes_out")),
                one.get("in_flight", 0),
                sum(one["protocol_errors"].values()) + sum(one.get("failures", {}).values()),
            ]
            for one in status["endpoints"]
        ],
        HEADINGS["endpoint"],
    )
    rate = _rates(before.status["routes"], secs)
    part(
        "route",
        [
            [
                one["name"],
                f"{one['source']} -> {one['target']}",
                *(rate(one, word) for word in ("matched", "delivered")),
                one["in_flight"],
                one["failed"],
            ]
            for one in sorted(status["routes"], key=lambda one: (-one["failed"], -one["matched"]))
        ],
        HEADINGS["route"],
    )
    part(
        "outbox",
        [
            [
                one["route"],
                one["link"],
                "?" if one["messages"] is None else one["messages"],
                one["problem"] or "-",
            ]
            for one in status["outboxes"]
        ],
        HEADINGS["outbox"],
    )
    lengths = {_key(one): one["messages"] for one in before.queues}
    part(
        "queue",
        [
            [
                one["queue"],
                f"{one['protocol']} {one['virtual_host']}",
                one["messages"],
                _signed(one["messages"] - lengths.get(_key(one), 0), secs),
                one["unacknowledged"],
                one["consumers"],
                _format_number(one["messages_bytes"]),
            ]
            for one in sorted(now.queues, key=lambda one: -one["messages"])
        ],
        HEADINGS["queue"],
    )
    return lines


def _rates(before: list[Mapping[str, Any]], secs: float) -> Callable[[Mapping[str, Any], str], str]:
    previous = {one["name"]: one for one in before}

    def rate(one: Mapping[str, Any], word: str) -> str:
        grown = one[word] - previous.get(one["name"], {}).get(word, one[word])
        return _format_number(grown / secs) if secs > 0 and grown >= 0 else "-"

    return rate


def _key(queue: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(queue[word] for word in ("protocol", "virtual_host", "kind", "queue"))


def _state(endpoint: Mapping[str, Any]) -> str:
    if endpoint["kind"] == "listener":
        return "open"
    return ("blocked" if endpoint["blocked"] else "up") if endpoint["up"] else "DOWN"


def _order(cell: object) -> tuple[float, str]:
    """Return the sort key of a cell: the largest numbers are first, then texts."""
    text = str(cell)
    for size, unit in (*UNITS, (1.0, "")):
        if text.endswith(unit):
            with suppress(ValueError):
                return -float(text.removesuffix(unit)) * size, ""
    return math.inf, text


def _signed(grown: int, secs: float) -> str:
    return "-" if secs <= 0 or not grown else f"{grown / secs:+.1f}"


def _format_number(number: float) -> str:
    """Return a number as text with about three digits and a unit k, M or G."""
    for size, unit in UNITS:
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"
