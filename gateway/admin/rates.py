"""The rates of the last hour over HTTP: what `gateway/telemetry/history.py` keeps, a page at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from gateway import clock
from gateway.admin.choosing import matcher, page_of, query_of
from gateway.admin.models import RateRow
from gateway.admin.operations import Served
from gateway.operations import RATES
from gateway.telemetry.history import STEP_SECS, History, Key

METERED_MAX: Final = 20_000
METERED_SECS_MIN: Final = 1.0
SHOWN_MAX: Final = 200  # series, of 360 numbers each


class Meter:
    """Rates of counts that nobody reads unless somebody asks: each over the time since it was asked for last,
    and at least a second. What was asked for longest ago is forgotten when there are too many.
    """

    def __init__(self, clock: Callable[[], float] = clock.now) -> None:
        self._clock = clock
        self._known: dict[str, tuple[float, int, float]] = {}  # when, how many there were, and the rate then

    def rate(self, key: str, count: int) -> float:
        """Per second; 0.0 when this is asked for the first time."""
        now = self._clock()
        known = self._known.pop(key, None)
        if known is None:
            known = (now, count, 0.0)
        elif now - known[0] >= METERED_SECS_MIN:
            known = (now, count, round(max(count - known[1], 0) / (now - known[0]), 3))
        self._known[key] = known
        if len(self._known) > METERED_MAX:
            del self._known[next(iter(self._known))]
        return known[2]


class RatesApi:
    """It only reads."""

    def __init__(self, history: History) -> None:
        self._history = history

    def operations(self) -> Sequence[Served]:
        """What can be asked."""
        return [Served(RATES, self._list, RateRow)]

    async def _list(self, request: Request) -> Response:
        wanted, count, after = await query_of(request, RATES.words)
        named = matcher(wanted.get("name", "*"))
        exact = [(word, wanted[word]) for word in ("kind", "what") if word in wanted]

        def chosen(key: Key) -> bool:
            return named(key.name) and all(getattr(key, word) == value for word, value in exact)

        page = await page_of(
            self._history.counters(), chosen, "\n".join, self._shown, min(count, SHOWN_MAX), after
        )
        return page.answer()

    def _shown(self, key: Key) -> dict[str, Any]:
        series = self._history.series(key)
        until = datetime.fromtimestamp(self._history.until, UTC)
        return {
            **key._asdict(),
            "now": round(series.now, 3),
            "step_secs": STEP_SECS,
            "until": until.isoformat(timespec="seconds"),
            "values": series.values,
        }
