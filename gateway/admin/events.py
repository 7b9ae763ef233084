"""What the gateway tells by itself over HTTP, as server-sent events: its state, and messages that pass.

Whoever listens holds a place of the server's for as long as he does, so there are only so many, and each is
looked at anew before everything that it is told: a session that has ended hears no more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import orjson
import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.admin.admission import Admission
from gateway.admin.answers import NEVER_STORE, AbsentError, UnavailableError
from gateway.admin.choosing import matcher, query_of
from gateway.admin.messages import message_shown
from gateway.admin.models import PassedRow, Status
from gateway.admin.operations import Operation
from gateway.broker.tapping import Passed, Tap, Taps

LISTENERS_MAX: Final = 20
TAPS_MAX: Final = 5
TOLD_EACH_SECS: Final = 2.0
PER_SECOND: Final = 10.0
PER_SECOND_MAX: Final = 100.0
TAPPED: Final = {"route": str, "endpoint": str, "name": str, "per_second": float}

Told = Callable[[], Awaitable[bytes]]


class Names(NamedTuple):
    """What there is to be watched."""

    routes: Callable[[], Iterable[str]]
    endpoints: Callable[[], Iterable[str]]


NOBODY: Final = Names(tuple, tuple)


class EventsApi:
    """`state` is what is told; None of `taps`: nobody can watch messages. `names` may be watched."""

    def __init__(
        self,
        admission: Admission,
        state: Callable[[], dict[str, Any]],
        taps: Taps | None = None,
        names: Names = NOBODY,
        *,
        each_secs: float = TOLD_EACH_SECS,
    ) -> None:
        self._admission = admission
        self._state = state
        self._taps = taps
        self._names = names
        self.each_secs = each_secs
        self.listeners = 0

    def operations(self) -> Sequence[Operation]:
        """What can be asked."""
        state = "The state of the gateway, again and again, as server-sent events named `state`"
        passed = "Messages that pass, some of each second, as server-sent events named `message`"
        return [
            Operation("GET", "/events", state, self._listen, Status, streams=True),
            Operation("GET", "/tap", passed, self._tap, PassedRow, TAPPED, streams=True, absent=True),
        ]

    async def _listen(self, request: Request) -> Response:
        first = True

        async def told() -> bytes:
            nonlocal first
            if not first:
                await trio.sleep(self.each_secs)
            first = False
            return _event("state", self._state())

        return self._events(request, told)

    async def _tap(self, request: Request) -> Response:
        wanted, _, _ = await query_of(request, TAPPED)
        for word, names in (("route", self._names.routes()), ("endpoint", self._names.endpoints())):
            if wanted.get(word, "") not in ("", *names):
                raise AbsentError(f"there is no {word} {wanted[word]!r}: nothing would ever pass")
        taps = self._taps
        if taps is None or len(taps.open) >= TAPS_MAX:
            raise UnavailableError(f"{TAPS_MAX} watch already")
        tap = Tap(
            route=wanted.get("route", ""),
            endpoint=wanted.get("endpoint", ""),
            named=matcher(wanted["name"]) if "name" in wanted else None,
            per_second=min(wanted.get("per_second", PER_SECOND), PER_SECOND_MAX),
        )

        async def told() -> bytes:
            found, skipped = await tap.fetch(self.each_secs)
            more = _event("skipped", {"messages": skipped}) if skipped else b""
            return b"".join([_event("message", _passed(one)) for one in found]) + more or b": nothing\n\n"

        return self._events(request, told, lambda: taps.add(tap), lambda: taps.remove(tap))

    def _events(
        self,
        request: Request,
        told: Told,
        begins: Callable[[], None] = lambda: None,
        over: Callable[[], None] = lambda: None,
    ) -> Response:
        if self.listeners >= LISTENERS_MAX:
            raise UnavailableError(f"{LISTENERS_MAX} listen already")
        return Events(self, request, told, begins, over)

    async def may(self, request: Request) -> bool:
        """Whether who listens still may."""
        return not isinstance(await self._admission.caller(request, quiet=True), Response)


class Events(Response):
    """An answer without an end. `told` gives what is next, from `begins` until `over`."""

    def __init__(
        self,
        api: EventsApi,
        request: Request,
        told: Told,
        begins: Callable[[], None],
        over: Callable[[], None],
    ) -> None:
        super().__init__(headers={**NEVER_STORE, "X-Accel-Buffering": "no"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._api = api
        self._request = request
        self._told = told
        self._begins = begins
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell until whoever listens has gone, which `send` raises, or may not any more."""
        api = self._api
        api.listeners += 1
        self._begins()
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if scope["method"] == "GET":
                await send({"type": "http.response.body", "body": b": begins\n\n", "more_body": True})
            while scope["method"] == "GET" and await api.may(self._request):
                await send({"type": "http.response.body", "body": await self._told(), "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            api.listeners -= 1
            self._over()


def _event(name: str, document: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(document))


def _passed(one: Passed) -> dict[str, Any]:
    return {
        "route": one.route,
        "endpoint": one.endpoint,
        "outcome": one.outcome.verdict.name.lower(),
        "reason": one.outcome.reason.value,
        "text": one.outcome.text,
        "message": message_shown(one.message),
    }
