"""The process as a whole over HTTP: its endpoints and routes, its users and limits, what crossed last; and
what an operator does to all of it: publish a message, read the mapping again, drain.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog
import trio
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response

from gateway.access.authorization import Roles
from gateway.admin.answers import AbsentError, BadChoiceError, answer, choice_of
from gateway.admin.choosing import matcher, page_of, query_of
from gateway.admin.messages import asked_of
from gateway.admin.models import (
    Draining,
    DryRun,
    EndpointRow,
    JournalRows,
    LimitRow,
    OutboxRow,
    PublishAsked,
    Published,
    Reloaded,
    RoleRow,
    RouteRow,
    UserRow,
)
from gateway.admin.operations import Operation
from gateway.broker.outbox.outbox import OutboxState
from gateway.broker.publishing import Publishing
from gateway.errors import ConfigurationError
from gateway.mapping.router import Router
from gateway.mapping.routes import Route
from gateway.model.address import Address
from gateway.model.dialect import NameRefused
from gateway.model.message import Message, Sender
from gateway.model.outcome import Outcome
from gateway.model.properties import Properties, property_set, string
from gateway.protocols import DIALECT_OF_WORD, DIALECTS, dialect_of
from gateway.store.journal.reader import Gap, JournalReader
from gateway.store.journal.shown import document_of
from gateway.telemetry.stats import EndpointStats, LinkStats

PUBLISH_SECS: Final = 10.0
JOURNAL_LOOKED_AT: Final = 100_000  # rows of a shard, for those of a route
ADDRESS_WORDS: Final = ("topic", "exchange", "routing_key", "queue", "service", "destination")

log = structlog.get_logger()


class Limit(NamedTuple):
    """How much of a limit is used; `of`: the listener or virtual host, "" for all. 0: there is no limit."""

    name: str
    of: str
    limit: int
    used: int

    @property
    def key(self) -> str:
        """What pages are ordered by."""
        return f"{self.name}\n{self.of}"


class State(NamedTuple):
    """Where an endpoint is, whether it serves, and why not."""

    place: str
    up: bool
    why: str = ""


@dataclass(frozen=True)
class Process:
    """What the process tells, and takes. `candidate` reads the mapping files and puts nothing in force."""

    stats: Callable[[], Iterable[EndpointStats]]
    states: Callable[[], Mapping[str, State]]
    router: Callable[[], Router]
    outboxes: Callable[[], list[OutboxState]]
    roles: Callable[[], Roles]
    limits: Callable[[], Iterable[Limit]]
    publishing: Publishing
    protocols: Mapping[str, str]
    journal: Path | None
    candidate: Callable[[], Router]
    reload: Callable[[], str]
    drain: Callable[[], None]
    flush: Callable[[], None]


class ProcessApi:
    """See Process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def operations(self) -> Sequence[Operation]:
        """What can be asked."""
        named = {"name": str}
        return [
            Operation("GET", "/endpoints", "Listeners and links", self._endpoints, EndpointRow, paged=True),
            Operation(
                "GET", "/routes", "Routes with their counters", self._routes, RouteRow, named, paged=True
            ),
            Operation("GET", "/outboxes", "What waits for links", self._outboxes, OutboxRow, paged=True),
            Operation("GET", "/users", "Users and their roles", self._users, UserRow, named, paged=True),
            Operation("GET", "/roles", "Roles", self._roles, RoleRow, named, paged=True),
            Operation("GET", "/limits", "How much of limits is used", self._limits, LimitRow, paged=True),
            Operation(
                "GET",
                "/journal",
                "The newest rows of the journal, the newest first",
                self._journal,
                JournalRows,
                {"route": str, "count": int},
                absent=True,
            ),
            Operation("POST", "/publish", "Publish a message", self._publish, Published, takes=PublishAsked),
            Operation("POST", "/mappings/reload", "Read the mapping files again", self._reload, Reloaded),
            Operation("POST", "/mappings/dry-run", "What a reload would change", self.dry_run, DryRun),
            Operation("POST", "/drain", "Stop when what is under way has settled", self._drain, Draining),
        ]

    async def _rows(
        self, request: Request, rows: Iterable[dict[str, Any]], key: str = "name", words: Any = None
    ) -> Response:
        """A page of few rows."""
        wanted, count, after = await query_of(request, words or {})
        named = matcher(wanted.get("name", "*"))
        page = await page_of(
            rows,
            lambda row: "name" not in row or named(row["name"]),
            lambda row: str(row[key]),
            lambda row: row,
            count,
            after,
        )
        return page.answer()

    async def _endpoints(self, request: Request) -> Response:
        states = self._process.states()
        rows = [_endpoint(one, states.get(one.name)) for one in self._process.stats()]
        return await self._rows(request, rows)

    async def _routes(self, request: Request) -> Response:
        router = self._process.router()
        rows = [_route(one) for one in (*router.routes, *router.answers)]
        return await self._rows(request, rows, words={"name": str})

    async def _outboxes(self, request: Request) -> Response:
        return await self._rows(request, [one._asdict() for one in self._process.outboxes()], "route")

    async def _users(self, request: Request) -> Response:
        rows = [{"name": name, "roles": list(has)} for name, has in self._process.roles().users.items()]
        return await self._rows(request, rows, words={"name": str})

    async def _roles(self, request: Request) -> Response:
        rows = [
            {
                "name": name,
                "console": role.console,
                "says": role.model_dump(mode="json", exclude_unset=True),
            }
            for name, role in self._process.roles().roles.items()
        ]
        return await self._rows(request, rows, words={"name": str})

    async def _limits(self, request: Request) -> Response:
        _, count, after = await query_of(request, {})
        page = await page_of(
            self._process.limits(), lambda _: True, lambda one: one.key, Limit._asdict, count, after
        )
        return page.answer()

    async def _journal(self, request: Request) -> Response:
        wanted, count, _ = await query_of(request, {"route": str})
        if self._process.journal is None:
            raise AbsentError("the journal is off (journal.enabled)")
        route = wanted.get("route")
        rows = await trio.to_thread.run_sync(_newest, self._process.journal, count, route)
        return answer({"items": rows})

    # Acts.

    async def _publish(self, request: Request) -> Response:
        asked = asked_of(await choice_of(request), PublishAsked)
        caller = request.state.caller
        message = self._message(asked, caller.principal.name)
        told: list[Outcome] = []
        heard = trio.Event()

        def tell(outcome: Outcome) -> None:
            told.append(outcome)
            heard.set()

        self._process.publishing.publish(asked.endpoint, message, tell)
        self._process.flush()
        with trio.move_on_after(PUBLISH_SECS):
            await heard.wait()
        if not told:
            return answer({"outcome": "waiting", "reason": "", "text": "nobody has settled it yet"})
        outcome = told[0]
        return answer(
            {"outcome": outcome.verdict.name.lower(), "reason": outcome.reason.value, "text": outcome.text}
        )

    def _message(self, asked: PublishAsked, user: str) -> Message:
        """Raises BadChoiceError for what cannot be."""
        protocol = self._process.protocols.get(asked.endpoint)
        if protocol is None:
            known = ", ".join(self._process.protocols)
            raise BadChoiceError(f"endpoint: {asked.endpoint!r} is none; there are: {known}")
        words = {word: text for word in ADDRESS_WORDS if (text := getattr(asked, word)) is not None}
        other = {DIALECT_OF_WORD[word].name for word in words} - {protocol}
        if other or not words:
            raise BadChoiceError(f"{asked.endpoint!r} speaks {protocol}, the address does not")
        try:
            address: Address = DIALECTS[protocol].published(words)[0]
            body = base64.b64decode(asked.body, validate=True) if asked.body_encoding == "base64" else None
        except NameRefused as error:
            raise BadChoiceError(str(error)) from error
        except ValueError as error:
            raise BadChoiceError(f"body: {error}") from error
        if not 0 <= asked.qos <= dialect_of(address).assurance_max:
            raise BadChoiceError(f"qos: {protocol} has no {asked.qos}")
        properties = Properties(
            content_type=asked.content_type,
            reply_to=asked.reply_to,
            headers=tuple((name, string(text)) for name, text in asked.headers.items()),
        )
        return Message(
            address,
            asked.body.encode() if body is None else body,
            property_set(properties),
            asked.qos,
            asked.qos > 0,
            asked.retain and "retain" in dialect_of(address).target_options,
            sender=Sender(asked.endpoint, "", user),
        )

    async def _reload(self, _: Request) -> Response:
        why = self._process.reload()
        routes = len(self._process.router().routes)
        log.info("an operator has the mapping read again", taken=not why)
        return answer({"taken": not why, "why": why, "routes": routes})

    async def dry_run(self, _: Request | None) -> Response:
        """What is wrong with the mapping files, or which routes they would add, remove and change."""
        try:
            candidate = await trio.to_thread.run_sync(self._process.candidate)
        except ConfigurationError as error:
            faults = [
                {"file": one.file, "line": one.line, "column": one.column, "message": one.reason}
                for one in (error, *error.others)
            ]
            return answer({"good": False, "faults": faults, "added": [], "removed": [], "changed": []})
        now = {one.name: one.rule for one in self._process.router().routes}
        then = {one.name: one.rule for one in candidate.routes}
        return answer(
            {
                "good": True,
                "faults": [],
                "added": sorted(then.keys() - now.keys()),
                "removed": sorted(now.keys() - then.keys()),
                "changed": sorted(name for name in now.keys() & then.keys() if now[name] != then[name]),
            }
        )

    async def _drain(self, _: Request) -> Response:
        response = answer({"draining": True})
        response.background = BackgroundTask(self._drain_now)  # once that is said
        return response

    async def _drain_now(self) -> None:
        log.info("an operator has the gateway drain and stop")
        self._process.drain()


def _newest(folder: Path, count: int, route: str | None) -> list[dict[str, Any]]:
    """The newest rows of all shards, of one route or all; the newest first. In a thread: files are read."""
    reader = JournalReader(folder, skip=True)
    only = None if route is None else {"route": [route]}
    found: list[Any] = []
    for shard in reader.shards() if folder.is_dir() else ():
        extent = reader.extent(shard)
        start = max(extent.first, extent.next - (count if only is None else JOURNAL_LOOKED_AT))
        rows = (one for one in reader.rows(shard, start, only=only) if not isinstance(one, Gap))
        found += deque(rows, maxlen=count)
    found.sort(key=lambda row: row["received"], reverse=True)
    return [document_of(row) for row in found[:count]]


def _endpoint(stats: EndpointStats, state: State | None) -> dict[str, Any]:
    link = isinstance(stats, LinkStats)
    errors = dict(stats.protocol_errors.counts)
    if isinstance(stats, LinkStats):
        errors |= stats.failures.counts
    return {
        "name": stats.name,
        "kind": "link" if link else "listener",
        "protocol": stats.protocol,
        "place": "" if state is None else state.place,
        "up": state is not None and state.up,
        "why": "" if state is None else state.why,
        "connections": stats.connections,
        "messages_in": stats.messages_in,
        "messages_out": stats.messages_out,
        "bytes_in": stats.octets_in,
        "bytes_out": stats.octets_out,
        "errors": errors,
        "in_flight": stats.in_flight if isinstance(stats, LinkStats) else 0,
    }


def _route(route: Route) -> dict[str, Any]:
    rule = route.rule
    return {
        "name": route.name,
        "file": route.file,
        "line": route.line,
        "source": route.source,
        "target": route.target_endpoint,
        "when": rule.when,
        "settle": route.settle,
        "matched": route.matched,
        "delivered": route.delivered,
        "failed": route.failed,
        "retried": route.retried,
        "dropped": route.dropped,
        "unparsable": route.unparsable,
        "undecided": route.undecided,
        "duplicates": route.duplicates,
        "in_flight": route.in_flight,
    }
