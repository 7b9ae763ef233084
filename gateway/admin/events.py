"""Server-sent events: the state of the gateway, and messages that pass.

Each stream occupies one of a limited number of places while it is open, and each user has a share of them.
The caller's rights are checked before each event: the stream ends with the right to it, and shows no bodies
after the right to bodies has ended.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import orjson
import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.admin.admission import Admission, Caller
from gateway.admin.answers import NEVER_STORE, AbsentError, ShareFullError, UnavailableError
from gateway.admin.messages import Hide, message_shown, nothing_hidden, seen_by
from gateway.admin.models import PassedRow, Status
from gateway.admin.operations import ServedOperation
from gateway.admin.selection import matcher, query_of
from gateway.broker.shares import LISTENERS_MAX, TAPS_MAX
from gateway.broker.taps import Passed, Tap, Taps
from gateway.model.message import Message
from gateway.model.shares import UserShares
from gateway.operations import EVENTS, TAP

TOLD_EACH_SECS: Final = 2.0
PER_SECOND: Final = 10.0
PER_SECOND_MAX: Final = 100.0

Told = Callable[[], Awaitable[Callable[[], bytes]]]
"""Function that waits for an event, and returns a function that encodes it by the caller's present rights."""


class WatchableNames(NamedTuple):
    """Names of the routes and endpoints that can be watched."""

    routes: Callable[[], Iterable[str]]
    endpoints: Callable[[], Iterable[str]]


NOBODY: Final = WatchableNames(tuple, tuple)


class EventsApi:
    """Operations with event streams.

    `state` returns the state to send. Without `taps` no messages can be watched; `names` may be watched.
    """

    def __init__(
        self,
        admission: Admission,
        state: Callable[[], dict[str, Any]],
        taps: Taps | None = None,
        names: WatchableNames = NOBODY,
        *,
        each_secs: float = TOLD_EACH_SECS,
        streams: UserShares | None = None,
        watched: UserShares | None = None,
        hide: Hide = nothing_hidden,
    ) -> None:
        """Set the limits of event streams.

        `streams` and `watched` limit all streams, and streams of messages, by user. `hide` removes private
        fields from messages. `each_secs` is the interval in seconds at which the state is sent.
        """
        self._admission = admission
        self._state = state
        self._taps = taps
        self._names = names
        self._hide = hide
        self.each_secs = each_secs
        self.streams = streams or UserShares("event streams", count_max=LISTENERS_MAX)
        self._watched = watched or UserShares("message streams", count_max=TAPS_MAX)

    def operations(self) -> Sequence[ServedOperation]:
        """Return the operations with their functions."""
        return [ServedOperation(EVENTS, self._listen, Status), ServedOperation(TAP, self._tap, PassedRow)]

    async def _listen(self, request: Request) -> Response:
        first = True

        async def told() -> Callable[[], bytes]:
            nonlocal first
            if not first:
                await trio.sleep(self.each_secs)
            first = False
            return lambda: _event("state", self._state())

        return self._events(request, told)

    async def _tap(self, request: Request) -> Response:
        choice, _, _ = await query_of(request, TAP.words)
        for word, names in (("route", self._names.routes()), ("endpoint", self._names.endpoints())):
            if choice.get(word, "") not in ("", *names):
                raise AbsentError(f"there is no {word} {choice[word]!r}, so no message would pass")
        taps = self._taps
        if taps is None:
            raise UnavailableError("messages cannot be watched here")
        owner = owner_of(request)
        _check_place(self._watched, owner)
        tap = Tap(
            route=choice.get("route", ""),
            endpoint=choice.get("endpoint", ""),
            name_matches=matcher(choice["name"]) if "name" in choice else None,
            per_second=min(choice.get("per_second", PER_SECOND), PER_SECOND_MAX),
        )

        def encoded(found: Iterable[Passed], skipped: int) -> bytes:
            visible = seen_by(request, self._hide)
            more = _event("skipped", {"messages": skipped}) if skipped else b""
            rows = [_event("message", _passed(one, visible(one.route, one.message))) for one in found]
            return b"".join(rows) + more or b": nothing\n\n"

        async def told() -> Callable[[], bytes]:
            return partial(encoded, *await tap.fetch(self.each_secs))

        def begins() -> None:
            self._watched.add(owner, 0)
            taps.add(tap)

        def over() -> None:
            self._watched.remove(owner, 0)
            taps.remove(tap)

        return self._events(request, told, begins, over)

    def _events(
        self,
        request: Request,
        next_chunk: Told,
        begins: Callable[[], None] = lambda: None,
        over: Callable[[], None] = lambda: None,
    ) -> Response:
        _check_place(self.streams, owner_of(request))
        return Events(self, request, next_chunk, begins, over)

    async def may(self, request: Request) -> bool:
        """Return True if the caller still has the right to the stream; update its rights in the request."""
        return await self._admission.is_still_admitted(request)


class Events(Response):
    """Endless response.

    `next_chunk` returns the next event; `begins` and `over` are called at its start and end.
    """

    def __init__(
        self,
        api: EventsApi,
        request: Request,
        next_chunk: Told,
        begins: Callable[[], None],
        over: Callable[[], None],
    ) -> None:
        super().__init__(headers={**NEVER_STORE, "X-Accel-Buffering": "no"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._api = api
        self._request = request
        self._next_chunk = next_chunk
        self._begins = begins
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events while the caller has the right to them. `send` raises when the client is gone."""
        api, owner = self._api, owner_of(self._request)
        api.streams.add(owner, 0)
        self._begins()
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if scope["method"] == "GET":
                await send({"type": "http.response.body", "body": b": begins\n\n", "more_body": True})
            while scope["method"] == "GET":
                encoded = await self._next_chunk()
                if not await api.may(self._request):
                    break
                await send({"type": "http.response.body", "body": encoded(), "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            api.streams.remove(owner, 0)
            self._over()


def _check_place(places: UserShares, owner: str) -> None:
    """Raise UnavailableError if all places are occupied, ShareFullError if the user's share of them is."""
    limit = places.full_with(owner, 0)
    if limit and places.count >= places.count_max:
        raise UnavailableError(f"all {places.count_max} {places.resource} are open already")
    if limit:
        raise ShareFullError(f"{limit} is reached: close another stream first")


def owner_of(request: Request) -> str:
    """Return the user whose share a request counts against."""
    caller: Caller = request.state.caller
    return caller.principal.name


def _event(name: str, document: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(document))


def _passed(one: Passed, message: Message) -> dict[str, Any]:
    return {
        "route": one.route,
        "endpoint": one.endpoint,
        "outcome": one.outcome.verdict.name.lower(),
        "reason": one.outcome.reason.value,
        "text": one.outcome.text,
        "message": message_shown(message),
    }
