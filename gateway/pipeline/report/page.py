"""HTML page of the job `rates`: totals, charts over time, and tables by route and by client.

Percentiles cannot be combined exactly. Where rows are combined (the clients of a route), the page shows the
highest value, and says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Final

from gateway.pipeline.report.chart import Points, chart, legend, number

SERIES_MAX: Final = 8  # Lines of a chart; the others are combined.
CLIENTS_MAX: Final = 25
STYLE: Final = """
:root{color-scheme:light dark;--ink:#1c2330;--soft:#667085;--line:#d5dae1;--page:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--soft:#98a2b3;--line:#333b49;--page:#14181f}}
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:900px;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.05rem;margin:2rem 0 .3rem}
p{color:var(--soft);margin:.2rem 0}
svg{width:100%;height:auto;display:block}
svg text{font:11px system-ui,sans-serif;fill:var(--soft)}svg .y{text-anchor:end}
svg .grid{stroke:var(--line);stroke-width:1}
svg path{fill:none;stroke-width:1.6;stroke-linejoin:round;stroke-linecap:round}
svg circle{opacity:0}svg circle:hover{opacity:1}
.legend span{margin-right:1rem;white-space:nowrap}
.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.35em;border-radius:2px}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
table{font-size:14px}
th,td{padding:.25rem .45rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th{color:var(--soft);font-weight:500}td:first-child,th:first-child{text-align:left}
.totals{display:flex;flex-wrap:wrap;gap:.4rem 2.2rem;margin-top:1rem}
.totals b{display:block;font-size:1.35rem}
"""


@dataclass(frozen=True, slots=True)
class WindowRate:
    """Number, size and latency of messages for one window of time, route and client.

    Times are in UTC seconds; latencies are in milliseconds, and None if unknown. `frames` is the number of
    frames, packets and commands of the protocols.
    """

    begin: float
    end: float
    route: str
    source_protocol: str
    target_protocol: str
    client: str
    messages: int
    body_bytes: int
    frames: int
    released: int
    rejected: int
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    max_ms: float | None

    @property
    def way(self) -> str:
        """Name of the route. For messages that took no route, a text in parentheses with the protocols."""
        if not (self.route or self.target_protocol):
            return f"({self.source_protocol}, no recipient)"
        return self.route or f"({self.source_protocol} to {self.target_protocol}, no route)"

    @property
    def errors(self) -> int:
        """Number of messages that were not accepted."""
        return self.released + self.rejected


def page(rates: Sequence[WindowRate], source: str) -> str:
    """Return an HTML page with `rates`; `source` is the name of the journal or archive."""
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>What crossed</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{STYLE}</style></head><body><h1>What crossed</h1>"
    )
    if not rates:
        return f"{head}<p>{escape(source)}</p><p>Nothing crossed.</p></body></html>"
    begin, end = min(rate.begin for rate in rates), max(rate.end for rate in rates)
    step = rates[0].end - rates[0].begin
    ways = _busiest(rates)
    parts = [
        head,
        f"<p>{escape(source)}, {_utc(begin)} to {_utc(end)} UTC, windows of {step:g} s</p>",
        _totals(rates, end - begin),
        legend(ways),
        _chart("Messages per second", "messages/s", rates, ways, step, lambda one: one.messages / step),
        _chart("Bytes per second", "bytes/s", rates, ways, step, lambda one: one.body_bytes / step),
        _chart("Frames per second", "frames/s", rates, ways, step, lambda one: one.frames / step),
        _chart(
            "Released and rejected per second", "errors/s", rates, ways, step, lambda one: one.errors / step
        ),
        _chart(
            "Time to settle, 99th percentile, ms", "ms", rates, ways, step, lambda one: one.p99_ms, worst=True
        ),
        "<h2>By route</h2>",
        _table("route", _together(rates, lambda one: one.way), end - begin),
    ]
    if any(rate.client for rate in rates):
        clients = _together(rates, lambda one: one.client or "(unknown)")
        parts.append(f"<h2>By client</h2>{_table('client', clients[:CLIENTS_MAX], end - begin)}")
        if len(clients) > CLIENTS_MAX:
            parts.append(f"<p>and {len(clients) - CLIENTS_MAX} more</p>")
    parts.append(
        "<p>Latencies are from receipt to settlement; over several windows or clients the worst is shown."
        " Frames are computed from sizes and guarantees, for the journal records messages.</p></body></html>"
    )
    return "".join(parts)


def _totals(rates: Sequence[WindowRate], seconds: float) -> str:
    """Return the totals of all rates as HTML; `seconds` is the length of the reported period."""
    messages, errors = sum(one.messages for one in rates), sum(one.errors for one in rates)
    body_bytes = sum(one.body_bytes for one in rates)
    totals = (
        (f"{messages:,}", "messages"),
        (number(messages / seconds), "messages per second"),
        (f"{number(body_bytes)}B", "of bodies"),
        (f"{errors:,}", f"released or rejected ({100 * errors / messages:.2g} %)"),
        (
            _ms(max((one.p99_ms for one in rates if one.p99_ms is not None), default=None)),
            "ms, worst 99th percentile",
        ),
    )
    return (
        f'<div class="totals">{"".join(f"<span><b>{value}</b>{says}</span>" for value, says in totals)}</div>'
    )


def _busiest(rates: Iterable[WindowRate]) -> list[str]:
    """Return the names of the routes with the most messages, at most SERIES_MAX names.

    If there are more routes, the last name stands for all others.
    """
    counts: defaultdict[str, int] = defaultdict(int)
    for rate in rates:
        counts[rate.way] += rate.messages
    ways = sorted(counts, key=lambda way: -counts[way])
    return ways if len(ways) <= SERIES_MAX else [*ways[: SERIES_MAX - 1], "all others"]


def _chart(
    title: str,
    unit: str,
    rates: Iterable[WindowRate],
    ways: Sequence[str],
    step: float,
    value: Callable[[WindowRate], float | None],
    *,
    worst: bool = False,
) -> str:
    """Return a chart, as HTML, with a line for each route in `ways`; `step` is the window length in seconds.

    `value` returns a number for a rate, in the unit `unit`. The numbers of one route and window are added;
    with `worst`, the highest is shown instead.
    """
    found: dict[str, dict[float, float]] = {way: {} for way in ways}
    for rate in rates:
        one = value(rate)
        if one is not None:
            line = found.get(rate.way, found[ways[-1]])
            before = line.get(rate.begin, 0.0)
            line[rate.begin] = max(before, one) if worst else before + one
    series: dict[str, Points] = {way: sorted(line.items()) for way, line in found.items()}
    return f"<h2>{escape(title)}</h2>{chart(series, step, unit)}"


def _together(
    rates: Iterable[WindowRate], key: Callable[[WindowRate], str]
) -> list[tuple[str, list[WindowRate]]]:
    """Group the rates by the result of `key`. Sort the groups by number of messages, the highest first."""
    groups: defaultdict[str, list[WindowRate]] = defaultdict(list)
    for rate in rates:
        groups[key(rate)].append(rate)
    return sorted(groups.items(), key=lambda item: -sum(one.messages for one in item[1]))


def _table(name: str, groups: Sequence[tuple[str, list[WindowRate]]], seconds: float) -> str:
    """Return an HTML table with one row for each group of rates.

    `name` is the title of the first column. `seconds` is the length of the reported period.
    """
    heads = (
        name,
        "messages",
        "/s",
        "bytes",
        "frames",
        "released",
        "rejected",
        "p50 ms",
        "p95 ms",
        "p99 ms",
        "max ms",
    )
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td>{cell}</td>"
            for cell in (
                escape(key),
                f"{sum(one.messages for one in some):,}",
                number(sum(one.messages for one in some) / seconds),
                number(sum(one.body_bytes for one in some)),
                number(sum(one.frames for one in some)),
                f"{sum(one.released for one in some):,}",
                f"{sum(one.rejected for one in some):,}",
                *(_largest_text(some, which) for which in ("p50_ms", "p95_ms", "p99_ms", "max_ms")),
            )
        )
        + "</tr>"
        for key, some in groups
    )
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div>'


def _largest_text(rates: Iterable[WindowRate], which: str) -> str:
    found = [value for rate in rates if (value := getattr(rate, which)) is not None]
    return _ms(max(found, default=None))


def _ms(value: float | None) -> str:
    return "-" if value is None else number(value)


def _utc(time: float) -> str:
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S}"
