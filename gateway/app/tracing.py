"""Tracing, if the configuration wants it: only then OpenTelemetry is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from gateway import __version__
from gateway.settings import Settings

if TYPE_CHECKING:
    from gateway.telemetry.tracing import LatencyOf, Tracing

CLOSE_SECS: Final = 3.0  # what has not been sent by then is lost: the collector is slow, or gone


def tracing_of(
    settings: Settings, *, latency_of_route: LatencyOf, latency_of_endpoint: LatencyOf
) -> Tracing | None:
    """What decides who is traced; None: nobody is. Traced messages are the exemplars of those histograms."""
    if not settings.tracing.enabled:
        return None
    from gateway.telemetry.tracing import Tracing

    return Tracing(
        **settings.tracing.model_dump(exclude={"enabled"}),
        version=__version__,
        replica=settings.replica,
        latency_of_route=latency_of_route,
        latency_of_endpoint=latency_of_endpoint,
    )


async def close(tracing: Tracing | None) -> None:
    """Send what is left, for as long as CLOSE_SECS."""
    if tracing is not None:
        with trio.move_on_after(CLOSE_SECS, shield=True):
            await trio.to_thread.run_sync(tracing.close, abandon_on_cancel=True)
