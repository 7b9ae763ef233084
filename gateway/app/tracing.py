"""Tracing, if the configuration wants it: only then OpenTelemetry is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from gateway import __version__
from gateway.broker.dispatcher import Dispatcher
from gateway.settings import Settings
from gateway.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from gateway.telemetry.tracing import Tracing

CLOSE_SECS: Final = 3.0  # what has not been sent by then is lost: the collector is slow, or gone


def tracing_of(settings: Settings) -> Tracing | None:
    """What decides who is traced; None: nobody is."""
    if not settings.tracing.enabled:
        return None
    from gateway.telemetry.tracing import Tracing

    stated = settings.tracing.model_dump(exclude={"enabled"})
    return Tracing(**stated, version=__version__, replica=settings.replica)


def exemplify(tracing: Tracing | None, dispatcher: Dispatcher, metrics: Metrics) -> None:
    """Have traced messages be the exemplars of these histograms."""
    if tracing is not None:
        tracing.latency_of_route = lambda name: dispatcher.latencies.get(name)
        tracing.latency_of_endpoint = metrics.latency_of


async def close(tracing: Tracing | None) -> None:
    """Send what is left, for as long as CLOSE_SECS."""
    if tracing is not None:
        with trio.move_on_after(CLOSE_SECS, shield=True):
            await trio.to_thread.run_sync(tracing.close, abandon_on_cancel=True)
