"""Line charts over time as SVG, without a library or script, for light and dark displays.

A chart has a line for each series, gaps where a series has no values, and values under the pointer (`title`
elements, which every browser shows).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from math import floor, log10
from typing import Final

Points = Sequence[tuple[float, float]]
"""(UTC seconds, value), in order of time."""

WIDTH: Final = 860
HEIGHT: Final = 220
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 26
COLOURS: Final = ("#2f6fde", "#d9622b", "#2a9d63", "#a04bc4", "#c23b5a", "#1b9aaa", "#8a6d1d", "#6b7280")
DOTS_MAX: Final = 400  # Of a series; more would overlap.


def chart(series: Mapping[str, Points], step: float, unit: str) -> str:
    """Return a line chart as SVG, or "" if there are no values.

    `series` has the points of each line by the line's name. Points are `step` seconds apart. `unit` is the
    unit of the values, for the labels.
    """
    times = [time for points in series.values() for time, _ in points]
    if not times:
        return ""
    begin, end = min(times), max(times)
    if end == begin:
        begin, end = begin - step / 2, end + step / 2
    top = max((value for points in series.values() for _, value in points), default=0.0) or 1.0
    ticks = ticks_of(top)
    x = _Scale(begin, end, LEFT, WIDTH - RIGHT)
    y = _Scale(0.0, max(top, ticks[-1]), HEIGHT - BOTTOM, TOP)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for tick in ticks:
        at = y.position(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{at + 4:.1f}">{number(tick)}</text>')
    for place in range(5):
        time = begin + (end - begin) * place / 4
        anchor = ("start", "middle", "middle", "middle", "end")[place]
        parts.append(
            f'<text x="{x.position(time):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">'
            f"{_moment(time, end - begin)}</text>"
        )
    for place, (name, points) in enumerate(series.items()):
        parts += _line(name, points, step, unit, x, y, COLOURS[place % len(COLOURS)])
    return "".join((*parts, "</svg>"))


def legend(names: Sequence[str]) -> str:
    """Return a legend with the names of the series, as HTML."""
    items = (
        f'<span><i style="background:{COLOURS[place % len(COLOURS)]}"></i>{escape(name)}</span>'
        for place, name in enumerate(names)
    )
    return f'<p class="legend">{"".join(items)}</p>'


class _Scale:
    """Linear mapping of the values from `low` to `high` to the positions from `first` to `last`."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        self._low, self._first = low, first
        self._factor = (last - first) / (high - low)

    def position(self, value: float) -> float:
        return self._first + (value - self._low) * self._factor


def _line(name: str, points: Points, step: float, unit: str, x: _Scale, y: _Scale, colour: str) -> list[str]:
    """Return the SVG elements for the series `name`: a line, and dots that show values under the pointer.

    `x` and `y` map times and values to positions. `step` is the time between points in seconds: the line is
    interrupted where no value follows within 1.5 `step`. A series of more than DOTS_MAX values has no dots.
    """
    path: list[str] = []
    before = None
    for time, value in points:
        move = before is None or time - before > 1.5 * step
        place = f"{x.position(time):.1f} {y.position(value):.1f}"
        path.append(f"M{place}h0" if move else f"L{place}")  # h0: a value without neighbours is a dot.
        before = time
    parts = [f'<path d="{"".join(path)}" stroke="{colour}"/>']
    if len(points) <= DOTS_MAX:
        parts += [
            f'<circle cx="{x.position(time):.1f}" cy="{y.position(value):.1f}" r="4" fill="{colour}"><title>'
            f"{escape(name)}: {number(value)} {escape(unit)} at {_moment(time, 0)}</title></circle>"
            for time, value in points
        ]
    return parts


def ticks_of(top: float) -> list[float]:
    """Return the values for the labels of an axis: round, equidistant numbers from 0 up to at least `top`."""
    rough = top / 4
    power: float = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    count = -int(-top // step)
    return [step * place for place in range(count + 1)]


def number(value: float) -> str:
    """Return a number in short notation: 1.2k, 35, 0.04."""
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}"


def _moment(time: float, span: float) -> str:
    """Format `time`, in UTC seconds, for a label of an axis that covers `span` seconds.

    The text has date and time if `span` is 0.
    """
    moment = datetime.fromtimestamp(time, UTC)
    if span > 2 * 86_400:
        return f"{moment:%m-%d %H:%M}"
    return f"{moment:%H:%M:%S}" if span else f"{moment:%Y-%m-%d %H:%M:%S}"
