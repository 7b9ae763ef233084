"""Server-sent events: the state of the gateway, and messages that pass through it.

The number of streams that may be open at a time is limited, in all and for each user. The caller's rights are
checked before each event: a stream ends when the caller loses the right to it, and shows no bodies once the
caller has lost the right to bodies.
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
from gateway.admin.messages import Hide, hide_for_caller, hide_nothing, message_shown
from gateway.admin.models import Status, TappedRow
from gateway.admin.operations import ServedOperation
from gateway.admin.responses import NEVER_STORE, AbsentError, ShareFullError, UnavailableError
from gateway.admin.selection import matcher, query_of
from gateway.broker.shares import LISTENERS_MAX, TAPS_MAX
from gateway.broker.taps import Tap, TappedMessage, Taps
from gateway.model.message import Message
from gateway.model.shares import UserShares
from gateway.operations import EVENTS, TAP

STATE_INTERVAL_SECS: Final = 2.0
PER_SECOND: Final = 10.0
PER_SECOND_MAX: Final = 100.0

EventWaiter = Callable[[], Awaitable[Callable[[], bytes]]]
"""Function that waits for an event, and returns a function that encodes it by the caller's present rights."""


class WatchableNames(NamedTuple):
    """Functions that return the names of the routes and endpoints whose messages can be watched."""

    routes: Callable[[], Iterable[str]]
    endpoints: Callable[[], Iterable[str]]


NOBODY: Final = WatchableNames(tuple, tuple)


class EventsApi:
    """API operations whose responses are streams of server-sent events.

    `state` returns the state of the gateway that streams send to clients. `taps` delivers copies of passing
    messages; None disables the watching of messages. `names` returns the routes and endpoints that a client
    may watch.
    """

    def __init__(
        self,
        admission: Admission,
        state: Callable[[], dict[str, Any]],
        taps: Taps | None = None,
        names: WatchableNames = NOBODY,
        *,
        each_secs: float = STATE_INTERVAL_SECS,
        streams: UserShares | None = None,
        watched: UserShares | None = None,
        hide: Hide = hide_nothing,
    ) -> None:
        """Set the sources and limits of event streams.

        `state`, `taps` and `names` are described at the class. The state is sent every `each_secs` seconds.
        `streams` counts and limits all open streams, in total and per user. `watched` counts and limits only
        the streams that show messages. `hide` removes private fields from messages.
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
        """Return the operations with event streams, each with the function that serves it."""
        return [ServedOperation(EVENTS, self._listen, Status), ServedOperation(TAP, self._tap, TappedRow)]

    async def _listen(self, request: Request) -> Response:
        first = True

        async def next_event() -> Callable[[], bytes]:
            nonlocal first
            if not first:
                await trio.sleep(self.each_secs)
            first = False
            return lambda: _event("state", self._state())

        return self._events(request, next_event)

    async def _tap(self, request: Request) -> Response:
        """Return a stream of the messages that pass the selected route or endpoint.

        Raises AbsentError for an unknown route or endpoint, UnavailableError if messages cannot be watched or
        too many streams are open, and ShareFullError at the limit of the caller.
        """
        choice, _, _ = await query_of(request, TAP.words)
        for word, names in (("route", self._names.routes()), ("endpoint", self._names.endpoints())):
            if choice.get(word, "") not in ("", *names):
                raise AbsentError(f"unknown {word} {choice[word]!r}")
        taps = self._taps
        if taps is None:
            raise UnavailableError("this process has no message stream")
        owner = owner_of(request)
        _check_stream_limit(self._watched, owner)
        tap = Tap(
            route=choice.get("route", ""),
            endpoint=choice.get("endpoint", ""),
            name_matches=matcher(choice["name"]) if "name" in choice else None,
            per_second=min(choice.get("per_second", PER_SECOND), PER_SECOND_MAX),
        )

        def encoded(found: Iterable[TappedMessage], skipped: int) -> bytes:
            visible = hide_for_caller(request, self._hide)
            more = _event("skipped", {"messages": skipped}) if skipped else b""
            rows = [_event("message", _message_fields(one, visible(one.route, one.message))) for one in found]
            return b"".join(rows) + more or b": nothing\n\n"

        async def next_event() -> Callable[[], bytes]:
            return partial(encoded, *await tap.fetch(self.each_secs))

        def begins() -> None:
            self._watched.add(owner, 0)
            taps.add(tap)

        def stop_watching() -> None:
            self._watched.remove(owner, 0)
            taps.remove(tap)

        return self._events(request, next_event, begins, stop_watching)

    def _events(
        self,
        request: Request,
        next_chunk: EventWaiter,
        begins: Callable[[], None] = lambda: None,
        over: Callable[[], None] = lambda: None,
    ) -> Response:
        _check_stream_limit(self.streams, owner_of(request))
        return Events(self, request, next_chunk, begins, over)

    async def is_still_permitted(self, request: Request) -> bool:
        """Return True if the caller of a stream still has rights in all virtual hosts.

        Then the caller is stored with its present rights in `request.state.caller`.
        """
        return await self._admission.is_still_admitted(request)


class Events(Response):
    """Endless response with server-sent events.

    `next_chunk` waits for the next event, and returns a function that encodes this event as bytes. `begins`
    is called when the stream starts, `over` when it ends.
    """

    def __init__(
        self,
        api: EventsApi,
        request: Request,
        next_chunk: EventWaiter,
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
        """Send events until the caller loses the right to them.

        Raises what `send` raises when the client has disconnected.
        """
        api, owner = self._api, owner_of(self._request)
        api.streams.add(owner, 0)
        self._begins()
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if scope["method"] == "GET":
                await send({"type": "http.response.body", "body": b": begins\n\n", "more_body": True})
            while scope["method"] == "GET":
                encoded = await self._next_chunk()
                if not await api.is_still_permitted(self._request):
                    break
                await send({"type": "http.response.body", "body": encoded(), "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            api.streams.remove(owner, 0)
            self._over()


def _check_stream_limit(places: UserShares, owner: str) -> None:
    """Raise an error if the user `owner` may not open another stream.

    `places` counts and limits the open streams. Raises UnavailableError if the total limit is reached, and
    ShareFullError if the limit of this user is reached.
    """
    limit = places.refuse_if_full(owner, 0)
    if limit and places.count >= places.count_max:
        raise UnavailableError(
            f"the maximum of {places.count_max} open {places.resource} is reached; close one first"
        )
    if limit:
        raise ShareFullError(f"{limit} is reached: close another stream first")


def owner_of(request: Request) -> str:
    """Return the caller's user name, under which the streams and responses of a request are counted."""
    caller: Caller = request.state.caller
    return caller.principal.name


def _event(name: str, document: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(document))


def _message_fields(one: TappedMessage, message: Message) -> dict[str, Any]:
    return {
        "route": one.route,
        "endpoint": one.endpoint,
        "outcome": one.outcome.verdict.name.lower(),
        "reason": one.outcome.reason.value,
        "text": one.outcome.text,
        "message": message_shown(message),
    }
