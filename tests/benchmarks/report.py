"""Tables for people; the same rows go to a file for programs. And the machine that they were measured on."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trio

from gateway import is_compiled

GAP: Final = "  "


@dataclass(frozen=True)
class Figure:
    """One line: ours against the peer's. A larger `ratio` is better; `target` is the least that it may be.

    `more` is printed behind, by name, as it is.
    """

    what: str
    unit: str
    ours: float
    peer: float
    ratio: float | None = None
    target: float | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Whether the target is met."""
        if self.ratio is None or self.target is None:
            return ""
        return "yes" if self.ratio >= self.target else "NO"


def target(interpreted: float, compiled: float) -> float:
    """The least ratio that is asked of the gateway, as it runs here."""
    return compiled if is_compiled() else interpreted


def machine() -> str:
    """How the gateway runs, processor, cores, interpreter, kernel, and what else the machine is doing."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    load = "/".join(f"{one:.2f}" for one in os.getloadavg())
    python = f"{platform.python_implementation()} {platform.python_version()}, Trio {trio.__version__}"
    form = "compiled" if is_compiled() else "interpreted"
    system = f"{platform.system()} {platform.release()}"
    return f"Gateway {form}, {model}, {os.cpu_count()} cores, {python}, {system}, load {load}"


def median(values: Sequence[float]) -> float:
    """The middle one."""
    return statistics.median(values)


def number(value: float) -> str:
    """Three digits or more, with thin groups."""
    if abs(value) >= 100:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.3g}"


def table(title: str, peer: str, figures: Sequence[Figure]) -> str:
    """The figures under their title."""
    names = list(dict.fromkeys(name for figure in figures for name in figure.more))
    rows = [["", "unit", "ours", peer, "ratio", "target", "met", *names]]
    for one in figures:
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        target = "" if one.target is None else f"{one.target:g}"
        extra = [str(one.more.get(name, "")) for name in names]
        rows.append(
            [one.what, one.unit, number(one.ours), number(one.peer), ratio, target, one.verdict, *extra]
        )
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = [
        GAP.join(
            cell.ljust(width) if at < 2 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([title, *(f"  {line.rstrip()}" for line in lines), ""])
