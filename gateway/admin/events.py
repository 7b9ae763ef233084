"""What the gateway tells by itself over HTTP: its state, every two seconds, as server-sent events.

Whoever listens holds a place of the server's for as long as he does, so there are only so many, and each is
looked at anew before everything that it is told: a session that has ended hears no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import orjson
import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.admin.admission import Admission
from gateway.admin.answers import NEVER_STORE, UnavailableError
from gateway.admin.models import Status
from gateway.admin.operations import Operation

LISTENERS_MAX: Final = 20
TOLD_EACH_SECS: Final = 2.0


class EventsApi:
    """`state` is what is told."""

    def __init__(
        self, admission: Admission, state: Callable[[], dict[str, Any]], *, each_secs: float = TOLD_EACH_SECS
    ) -> None:
        self._admission = admission
        self._state = state
        self.each_secs = each_secs
        self.listeners = 0

    def operations(self) -> Sequence[Operation]:
        """What can be asked."""
        summary = "The state of the gateway, again and again, as server-sent events named `state`"
        return [Operation("GET", "/events", summary, self._listen, Status, streams=True)]

    async def _listen(self, request: Request) -> Response:
        if self.listeners >= LISTENERS_MAX:
            raise UnavailableError(f"{LISTENERS_MAX} listen already")
        return Events(self, request)

    async def event(self, request: Request) -> bytes | None:
        """The next one; None: who listens may not any more."""
        if isinstance(await self._admission.caller(request, quiet=True), Response):
            return None
        return b"event: state\ndata: " + orjson.dumps(self._state()) + b"\n\n"


class Events(Response):
    """An answer without an end."""

    def __init__(self, api: EventsApi, request: Request) -> None:
        super().__init__(headers={**NEVER_STORE, "X-Accel-Buffering": "no"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._api = api
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell until whoever listens has gone, which `send` raises, or may not any more."""
        self._api.listeners += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while scope["method"] == "GET" and (event := await self._api.event(self._request)) is not None:
                await send({"type": "http.response.body", "body": event, "more_body": True})
                await trio.sleep(self._api.each_secs)
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._api.listeners -= 1
