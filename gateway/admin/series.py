"""Detailed metrics at `/metrics/detailed`: a series for each queue or each MQTT session, on request.

These are the only metrics with labels whose values clients choose. So they are requested separately
(`series`), need the scrape token or the right to see such names, and have a limited number of series: of the
matching ones, the first by name. The number of series left out is a metric as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.operations import HOLDERS
from gateway.admin.queues import ListedQueue, count_removed
from gateway.admin.responses import BadChoiceError
from gateway.admin.selection import matcher, page_of
from gateway.broker.mqtt.session import Session
from gateway.telemetry.metrics import QUEUE_SERIES, SESSION_SERIES, Series, detailed

SERIES_MAX: Final = 1_000  # Queues, or sessions, whatever is requested.
WORDS: Final = frozenset(("series", "queue", "virtual_host", "protocol", "client", "count"))

T = TypeVar("T")


class SeriesKind(NamedTuple, Generic[T]):
    """Kind of detailed metrics, such as the metrics of queues.

    `every` returns the objects, `key` the sort key of an object, `labels` its label values, and `numbers` its
    metric values by the name of the metric. `metrics` describes the metrics by name.
    """

    every: Callable[[], Iterable[T]]
    key: Callable[[T], str]
    labels: Callable[[T], Sequence[str]]
    numbers: Callable[[T], dict[str, float]]
    metrics: dict[str, Series]


class DetailedMetrics:
    """Detailed metrics of queues and MQTT sessions, in the format of Prometheus."""

    def __init__(
        self, queues: Callable[[], Iterable[ListedQueue]], sessions: Callable[[], Iterable[Session]]
    ) -> None:
        self._kinds: dict[str, SeriesKind[Any]] = {
            "queues": SeriesKind(queues, lambda one: one.key, _queue_labels, _queue_numbers, QUEUE_SERIES),
            "sessions": SeriesKind(sessions, _client, _session_labels, _session_numbers, SESSION_SERIES),
        }

    async def serve(self, request: Request) -> Response:
        """Return the metrics that the query of the request selects.

        Raises BadChoiceError for an invalid query.
        """
        query = request.query_params
        names = query.getlist("series")
        if not names or not set(names) <= self._kinds.keys():
            raise BadChoiceError(f"series: must be one or more of {', '.join(self._kinds)}")
        if unknown := sorted(query.keys() - WORDS):
            raise BadChoiceError(f"{unknown[0]} is not one of {', '.join(sorted(WORDS))}")
        try:
            count = min(max(int(query.get("count", SERIES_MAX)), 0), SERIES_MAX)
        except ValueError:
            raise BadChoiceError("count: must be a number") from None
        chosen: dict[str, Callable[[Any], bool]] = {
            "queues": _queue_chooser(query),
            "sessions": _session_chooser(query),
        }
        rows: list[tuple[str, Sequence[str], float]] = []
        left_out: dict[str, int] = {}
        for name in dict.fromkeys(names):
            series_kind = self._kinds[name]

            def show(
                one: Any, series_kind: SeriesKind[Any] = series_kind
            ) -> list[tuple[str, Sequence[str], float]]:
                labels = series_kind.labels(one)
                return [(metric, labels, number) for metric, number in series_kind.numbers(one).items()]

            page = await page_of(series_kind.every(), chosen[name], series_kind.key, show, count, "")
            rows += [row for some in page.rows for row in some]
            left_out[name] = page.matching - len(page.rows)
        text, content_type = detailed(rows, left_out, request.headers.get("Accept", ""))
        return Response(text, headers={"Content-Type": content_type, "Vary": "Accept"})


def _queue_chooser(query: Any) -> Callable[[ListedQueue], bool]:
    matches_name = matcher(query.get("queue", "*"))
    host, protocol = query.get("virtual_host"), query.get("protocol")
    if protocol not in (None, *HOLDERS):
        raise BadChoiceError(f"protocol: must be one of {', '.join(HOLDERS)}, not {protocol!r}")
    return lambda one: (
        matches_name(one.name) and host in (None, one.virtual_host) and protocol in (None, one.protocol)
    )


def _session_chooser(query: Any) -> Callable[[Session], bool]:
    matches_name = matcher(query.get("client", "*"))
    return lambda one: matches_name(one.client_id)


def _client(session: Session) -> str:
    return session.client_id


def _queue_labels(one: ListedQueue) -> Sequence[str]:
    return one.protocol, one.virtual_host, one.kind, one.name


def _queue_numbers(one: ListedQueue) -> dict[str, float]:
    queue = one.queue
    return {
        "gateway_detailed_queue_messages": len(queue),
        "gateway_detailed_queue_bytes": queue.byte_count,
        "gateway_detailed_queue_unacknowledged": queue.unacknowledged,
        "gateway_detailed_queue_consumers": len(queue.consumers),
        "gateway_detailed_queue_in": queue.next,
        "gateway_detailed_queue_out": count_removed(queue),
    }


def _session_labels(session: Session) -> Sequence[str]:
    return (session.client_id,)


def _session_numbers(session: Session) -> dict[str, float]:
    return {
        "gateway_detailed_session_messages": len(session),
        "gateway_detailed_session_in_flight": len(session.in_flight),
        "gateway_detailed_session_subscriptions": len(session.subscriptions),
        "gateway_detailed_session_connected": int(session.outlet is not None),
    }
