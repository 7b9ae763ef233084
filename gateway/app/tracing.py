"""Construction and shutdown of tracing. OpenTelemetry is imported only if tracing is enabled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from gateway import __version__
from gateway.settings import Settings

if TYPE_CHECKING:
    from gateway.telemetry.tracing import LatencyOf, Tracing

CLOSE_SECS: Final = 3.0  # Spans that are not sent within this time are lost.


def tracing_of(
    settings: Settings, *, latency_of_route: LatencyOf, latency_of_endpoint: LatencyOf
) -> Tracing | None:
    """Return the tracer, or None if tracing is disabled.

    The two functions take the name of a route or endpoint, and return its latency histogram, to which traced
    messages are added as exemplars.
    """
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
    """Export the remaining spans and stop tracing. Returns after CLOSE_SECS at most."""
    if tracing is not None:
        with trio.move_on_after(CLOSE_SECS, shield=True):
            await trio.to_thread.run_sync(tracing.close, abandon_on_cancel=True)
