"""Rates of the gateway's counters during the last hour, from `gateway/telemetry/history.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from gateway import clock
from gateway.admin.messages import moment
from gateway.admin.models import RateRow
from gateway.admin.operations import ServedOperation
from gateway.admin.selection import matcher, page_of, query_of
from gateway.operations import RATES
from gateway.telemetry.history import STEP_SECS, CounterKey, History

METERED_MAX: Final = 20_000
METERED_SECS_MIN: Final = 1.0
SHOWN_MAX: Final = 200  # Series per page, of 360 numbers each.


class Meter:
    """Rates of counters that are calculated only on request.

    A rate is the average since the previous request for the same counter; within METERED_SECS_MIN seconds,
    the previous rate is returned again. At most METERED_MAX counters are remembered; beyond this number, the
    counter that was requested longest ago is forgotten.
    """

    def __init__(self, clock: Callable[[], float] = clock.now) -> None:
        self._clock = clock
        self._samples: dict[
            str, tuple[float, int, float]
        ] = {}  # time, count and rate of the previous request

    def rate(self, key: str, count: int) -> float:
        """Return the rate per second of the counter `key`, whose present value is `count`.

        Return 0.0 at the first request for the counter.
        """
        now = self._clock()
        sample = self._samples.pop(key, None)
        if sample is None:
            sample = (now, count, 0.0)
        elif now - sample[0] >= METERED_SECS_MIN:
            sample = (now, count, round(max(count - sample[1], 0) / (now - sample[0]), 3))
        self._samples[key] = sample
        if len(self._samples) > METERED_MAX:
            del self._samples[next(iter(self._samples))]
        return sample[2]


class RatesApi:
    """API operation that lists the rates of the gateway's counters."""

    def __init__(self, history: History) -> None:
        self._history = history

    def operations(self) -> Sequence[ServedOperation]:
        """Return the operation that lists rates, with the function that serves it."""
        return [ServedOperation(RATES, self._list, RateRow)]

    async def _list(self, request: Request) -> Response:
        choice, count, after = await query_of(request, RATES.words)
        matches_name = matcher(choice.get("name", "*"))
        exact = [(word, choice[word]) for word in ("kind", "what") if word in choice]

        def is_selected(key: CounterKey) -> bool:
            return matches_name(key.name) and all(getattr(key, word) == value for word, value in exact)

        page = await page_of(
            self._history.counters(), is_selected, "\n".join, self._rate_row, min(count, SHOWN_MAX), after
        )
        return page.to_response()

    def _rate_row(self, key: CounterKey) -> dict[str, Any]:
        series = self._history.series(key)
        return {
            **key._asdict(),
            "now": round(series.now, 3),
            "step_secs": STEP_SECS,
            "until": moment(self._history.end),
            "values": series.values,
        }
