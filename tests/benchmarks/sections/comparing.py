"""The figure of runs of a load here and at a peer."""

from __future__ import annotations

from tests.benchmarks.load import Measured
from tests.benchmarks.report import Figure, median


def compared(name: str, ours: list[Measured], peer: list[Measured], target: float | None) -> Figure:
    """Messages/s, medians of both; `target` is the least ratio."""
    rates = median([one.rate for one in ours]), median([one.rate for one in peer])
    return Figure(
        name,
        "messages/s",
        *rates,
        ratio=rates[0] / rates[1],
        target=target,
        more={
            "CPU us/message": f"{median([one.server_us for one in ours]):.1f}",
            "peer's": f"{median([one.server_us for one in peer]):.1f}",
            "load's core": f"{max(one.busiest for one in (*ours, *peer)):.0%}",
            "lost": sum(one.lost for one in (*ours, *peer)),
        },
    )
