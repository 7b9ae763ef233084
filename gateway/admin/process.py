"""Operations on the process: endpoints, routes, users, limits and journal, publishing, pausing and draining.

The functions read and change a running gateway only through the callbacks in `Process`; this module imports
nothing from `gateway/app`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response

from gateway import operations as table
from gateway.access.authorization import Roles
from gateway.admin.admission import Caller
from gateway.admin.messages import message_of, moment, parse_request
from gateway.admin.models import (
    DrainResult,
    EndpointRow,
    JournalRows,
    LimitRow,
    NamedObject,
    OutboxRow,
    PauseResult,
    PublishRequest,
    PublishResult,
    RoleRow,
    RouteRow,
    UserRow,
)
from gateway.admin.operations import ServedOperation
from gateway.admin.responses import AbsentError, BadChoiceError, json_body, json_response
from gateway.admin.selection import CallbackFuture, matcher, page_of, query_of, wait_until_durable
from gateway.admin.status import endpoint_counters, route_counters
from gateway.broker.operator_publish import Publishing
from gateway.broker.outbox.outbox import OutboxState
from gateway.broker.pauses import Pauses
from gateway.mapping.router import Router
from gateway.mapping.routes import Route
from gateway.model.outcome import Outcome
from gateway.operations import NO_WORDS, Words
from gateway.store.journal.reader import Gap, JournalReader
from gateway.store.journal.shown import document_of
from gateway.store.store import Store
from gateway.telemetry.history import CounterKey, History
from gateway.telemetry.stats import EndpointStats, Latency, LinkStats
from gateway.transport.computation import computed

# Fields of rows for callers who may not see bodies.
WITHHELD: Final = {"body": "", "body_encoding": "withheld"}
PUBLISH_SECS: Final = 10.0
JOURNAL_LOOKED_AT: Final = 100_000  # Rows of a shard that are searched for those of one route.
NEVER_MEASURED: Final = Latency()

log = structlog.get_logger()


class Limit(NamedTuple):
    """Limit of the gateway, and how much of it is used.

    `of` is the listener or virtual host to which the limit applies, or "" for the whole gateway. `limit` is 0
    if there is no limit.
    """

    name: str
    of: str
    limit: int
    used: int

    @property
    def key(self) -> str:
        """Sort key of the limit in paged lists."""
        return f"{self.name}\n{self.of}"


class EndpointState(NamedTuple):
    """State of a listener or link: its address, and whether it is up, with the reason if not."""

    place: str
    up: bool
    why: str = ""
    paused: bool = False


@dataclass(frozen=True)
class Process:
    """Running gateway process, as the API sees and changes it.

    `candidate` compiles the mapping files without putting them in force; its argument has texts by file name
    that replace those of the files. `reload` puts the files in force, and returns "" or the reason why it
    failed. `pause` and `resume` take a kind, `route` or `link`, and a name. `protocols` has the protocol of
    each endpoint.
    """

    stats: Callable[[], Iterable[EndpointStats]]
    states: Callable[[], Mapping[str, EndpointState]]
    router: Callable[[], Router]
    outboxes: Callable[[], list[OutboxState]]
    roles: Callable[[], Roles]
    limits: Callable[[], Iterable[Limit]]
    publishing: Publishing
    protocols: Mapping[str, str]
    links: Container[str]
    journal: Path | None
    store: Store | None
    history: History
    latencies: Callable[[], Mapping[str, Latency]]
    mapping_files: Callable[[], list[str]]
    candidate: Callable[[Mapping[str, str]], Router]
    reload: Callable[[], Awaitable[str]]
    pauses: Pauses
    pause: Callable[[str, str], None]
    resume: Callable[[str, str], None]
    drain: Callable[[], None]
    flush: Callable[[], None]


class ProcessApi:
    """API operations on the running gateway process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def operations(self) -> Sequence[ServedOperation]:
        """Return the operations on the process, each with the function that serves it."""
        return [
            ServedOperation(table.ENDPOINTS, self._endpoints, EndpointRow),
            ServedOperation(table.ROUTES, self._routes, RouteRow),
            ServedOperation(table.OUTBOXES, self._outboxes, OutboxRow),
            ServedOperation(table.USERS, self._users, UserRow),
            ServedOperation(table.ROLES, self._roles, RoleRow),
            ServedOperation(table.LIMITS, self._limits, LimitRow),
            ServedOperation(table.JOURNAL, self._journal, JournalRows),
            ServedOperation(table.PUBLISH, self._publish, PublishResult, PublishRequest),
            ServedOperation(table.PAUSE_ROUTE, partial(self._pause, "route"), PauseResult, NamedObject),
            ServedOperation(table.RESUME_ROUTE, partial(self._resume, "route"), PauseResult, NamedObject),
            ServedOperation(table.PAUSE_LINK, partial(self._pause, "link"), PauseResult, NamedObject),
            ServedOperation(table.RESUME_LINK, partial(self._resume, "link"), PauseResult, NamedObject),
            ServedOperation(table.DRAIN, self._drain, DrainResult),
        ]

    async def _pause(self, kind: str, request: Request) -> Response:
        return await self._set_paused(kind, request, self._process.pause)

    async def _resume(self, kind: str, request: Request) -> Response:
        return await self._set_paused(kind, request, self._process.resume)

    async def _set_paused(self, kind: str, request: Request, act: Callable[[str, str], None]) -> Response:
        """Pause or resume the route or link that the body of the request names.

        `act` pauses or resumes; its arguments are `kind` and the name. Wait until the change is stored.
        Raises AbsentError if the route or link does not exist.
        """
        name = parse_request(await json_body(request), NamedObject).name
        process = self._process
        if kind == "route":
            exists = any(one.name == name for one in process.router().routes)
        else:
            exists = name in process.links
        if not exists:
            raise AbsentError(f"no {kind} {name!r}")
        act(kind, name)
        await wait_until_durable(process.store, process.flush)
        pauses = process.pauses
        names = pauses.routes if kind == "route" else pauses.links
        return json_response({"name": name, "paused": name in names})

    async def _rows(
        self, request: Request, rows: Iterable[dict[str, Any]], key: str = "name", words: Words = NO_WORDS
    ) -> Response:
        """Return one page of a list, given all `rows` of the list.

        The request's filters `name` and `kind` select rows. `key` is the field by which rows are sorted, and
        `words` are the filters that the request may have.
        """
        choice, count, after = await query_of(request, words)
        matches_name = matcher(choice.get("name", "*"))
        page = await page_of(
            rows,
            lambda row: (
                ("name" not in row or matches_name(row["name"]))
                and ("kind" not in choice or row["kind"] == choice["kind"])
            ),
            lambda row: str(row[key]),
            lambda row: row,
            count,
            after,
        )
        return page.to_response()

    async def _endpoints(self, request: Request) -> Response:
        states = self._process.states()
        history = self._process.history
        rows = [_endpoint(one, states.get(one.name), history) for one in self._process.stats()]
        return await self._rows(request, rows, words=table.ENDPOINTS.words)

    async def _routes(self, request: Request) -> Response:
        router = self._process.router()
        rows = [self._route(one) for one in (*router.routes, *router.answers)]
        return await self._rows(request, rows, words=table.ROUTES.words)

    def _route(self, route: Route) -> dict[str, Any]:
        rule, pauses = route.rule, self._process.pauses
        gate = pauses.gates.get(route.name)
        latency = self._process.latencies().get(route.name, NEVER_MEASURED)
        return {
            **route_counters(route),
            "file": route.file,
            "line": route.line,
            "when": rule.when,
            "settle": route.settle,
            "paused": route.name in pauses.routes,
            "held": 0 if gate is None else gate.messages,
            **_rates(self._process.history, "route", route.name, "in", "out", "refused"),
            **_latency(latency),
        }

    async def _outboxes(self, request: Request) -> Response:
        return await self._rows(request, [outbox_shown(one) for one in self._process.outboxes()], "route")

    async def _users(self, request: Request) -> Response:
        rows = [{"name": name, "roles": list(has)} for name, has in self._process.roles().users.items()]
        return await self._rows(request, rows, words=table.USERS.words)

    async def _roles(self, request: Request) -> Response:
        rows = [
            {
                "name": name,
                "console": role.console,
                "says": role.model_dump(mode="json", exclude_unset=True),
            }
            for name, role in self._process.roles().roles.items()
        ]
        return await self._rows(request, rows, words=table.ROLES.words)

    async def _limits(self, request: Request) -> Response:
        _, count, after = await query_of(request, NO_WORDS)
        page = await page_of(
            self._process.limits(), lambda _: True, lambda one: one.key, Limit._asdict, count, after
        )
        return page.to_response()

    async def _journal(self, request: Request) -> Response:
        """Return a page of the journal's newest rows, without bodies if the caller may not see bodies."""
        choice, count, after = await query_of(request, table.JOURNAL.choice)
        if self._process.journal is None:
            raise AbsentError("the journal is disabled (journal.enabled)")
        route = choice.get("route")
        try:
            before = _places(after)
        except ValueError:
            raise BadChoiceError("after: must be the value of `next` of another page") from None
        rows, reached = await computed(partial(_newest, self._process.journal, count, route, before))
        caller: Caller = request.state.caller
        if not caller.rights.shows_bodies(None):
            rows = [row | WITHHELD if row.get("body") is not None else row for row in rows]
        return json_response({"items": rows, "next": reached})

    # Operations that change something.

    async def _publish(self, request: Request) -> Response:
        """Publish the message in the request's body, and return its outcome.

        Return the outcome `waiting` if the message is not settled within PUBLISH_SECS seconds.
        """
        choice = parse_request(await json_body(request), PublishRequest)
        caller = request.state.caller
        message = message_of(choice, self._process.protocols, "", caller.principal.name)
        result = CallbackFuture[Outcome]()
        self._process.publishing.publish(choice.endpoint, message, result.set)
        self._process.flush()
        outcome = await result.wait(PUBLISH_SECS)
        if outcome is None:
            return json_response({"outcome": "waiting", "reason": "", "text": "not settled yet"})
        return json_response(
            {"outcome": outcome.verdict.name.lower(), "reason": outcome.reason.value, "text": outcome.text}
        )

    async def _drain(self, _: Request) -> Response:
        response = json_response({"draining": True})
        response.background = BackgroundTask(self._drain_now)  # After the response.
        return response

    async def _drain_now(self) -> None:
        log.info("operator requested drain")
        self._process.drain()


def _places(after: str) -> dict[str, int]:
    """Parse the query parameter `after` of the journal's list; return a sequence number for each shard.

    The page has the rows before these sequence numbers. A client copies the parameter from the field `next`
    of the previous page. Raises ValueError if the parameter is malformed.
    """
    pairs = [one.rpartition(":") for one in after.split(",") if one]
    return {shard: int(number) for shard, _, number in pairs}


def _newest(
    folder: Path, count: int, route: str | None, before: Mapping[str, int]
) -> tuple[list[dict[str, Any]], str | None]:
    """Return the newest `count` rows of the journal in `folder`, and the parameter `after` of the next page.

    The rows of all shards are merged, the newest first. `route` selects the rows of one route; None selects
    all. `before` maps shards to sequence numbers; only earlier rows are returned. The parameter is None if
    there are no more rows. The function reads files, so call it in a thread.
    """
    reader = JournalReader(folder, skip=True)
    only = None if route is None else {"route": [route]}
    firsts: dict[str, int] = {}
    reached: dict[str, int] = {}
    each: dict[str, list[Any]] = {}
    for shard in reader.shards() if folder.is_dir() else ():
        extent = reader.extent(shard)
        end = min(before.get(shard, extent.next), extent.next)
        start = max(extent.first, end - (count if only is None else JOURNAL_LOOKED_AT))
        last: deque[Any] = deque(maxlen=count)
        for row in reader.rows(shard, start, only=only) if start < end else ():
            if isinstance(row, Gap):
                continue
            if row["sequence"] >= end:
                break
            last.append(row)
        each[shard] = list(reversed(last))
        firsts[shard], reached[shard] = extent.first, start if len(last) < count else end
    merged = heapq.merge(*each.values(), key=lambda row: -row["received"])
    found = list(islice(merged, count))
    for shard, rows_of in each.items():
        used_count = sum(row["shard"] == shard for row in found)
        if used_count and (used_count < len(rows_of) or used_count == count):
            reached[shard] = rows_of[used_count - 1]["sequence"]
        elif rows_of and not used_count:
            reached[shard] = rows_of[0]["sequence"] + 1
    more = any(reached[shard] > first for shard, first in firsts.items())
    words = [f"{shard}:{number}" for shard, number in sorted(reached.items())]
    return [document_of(row) for row in found], ",".join(words) if more else None


def outbox_shown(outbox: OutboxState) -> dict[str, Any]:
    """Return an outbox as a JSON object of the API (OutboxRow)."""
    limits: dict[str, Any] = outbox.limits._asdict()
    return {word: value for word, value in outbox._asdict().items() if word != "limits"} | limits


def _endpoint(stats: EndpointStats, state: EndpointState | None, history: History) -> dict[str, Any]:
    link, last = isinstance(stats, LinkStats), stats.last_error
    errors = dict(stats.protocol_errors.counts)
    if isinstance(stats, LinkStats):
        errors |= stats.failures.counts
    return {
        **endpoint_counters(stats),
        "kind": "link" if link else "listener",
        "place": "" if state is None else state.place,
        "up": state is not None and state.up,
        "why": "" if state is None else state.why,
        "last_error": "" if last is None else last.text,
        "last_error_at": None if last is None else moment(last.utc),
        "errors": errors,
        "in_flight": stats.in_flight if isinstance(stats, LinkStats) else 0,
        "paused": state is not None and state.paused,
        **_rates(history, "link" if link else "listener", stats.name, "in", "out"),
        **_latency(stats.latency),
    }


def _rates(history: History, kind: str, name: str, *counters: str) -> dict[str, float]:
    return {f"{one}_per_sec": round(history.current_rate(CounterKey(kind, name, one)), 3) for one in counters}


def _latency(latency: Latency) -> dict[str, float | None]:
    return {"p50_secs": latency.quantile(0.5), "p99_secs": latency.quantile(0.99)}
