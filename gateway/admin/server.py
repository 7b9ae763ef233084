"""The HTTP side: Starlette's routes on a small server of our own (http/), in the gateway's own event loop.

/livez       200 as long as the event loop turns
/readyz      200, or 503 with one reason per line
/metrics     Prometheus
/api/status  everything that the page shows, as JSON
/api/dead-letters  see dead_letters.py
/api/clients see clients.py; likewise sessions, queues, retained
/            the live page
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Final

import orjson
import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from gateway.admin.answers import NEVER_STORE, UnavailableError, answer
from gateway.admin.clients import ClientsApi
from gateway.admin.dead_letters import LettersApi
from gateway.admin.http import HttpServer
from gateway.admin.queues import QueuesApi
from gateway.admin.readiness import Readiness
from gateway.admin.retained import RetainedApi
from gateway.admin.sessions import SessionsApi
from gateway.admin.status import status
from gateway.broker.outbox.outbox import OutboxState
from gateway.errors import ConfigurationError
from gateway.settings import Http
from gateway.telemetry.metrics import CONTENT_TYPE, Metrics

# The page is one file without anything from elsewhere, and the browser is told to hold it to that.
PAGE_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass
class AdminState:
    """What HTTP shows of the running gateway, and may change. `clock` gives monotonic seconds."""

    metrics: Metrics
    readiness: Readiness
    dead_letters: LettersApi | None = None
    clients: ClientsApi | None = None
    broker: Sequence[SessionsApi | QueuesApi | RetainedApi] = ()
    outboxes: Callable[[], list[OutboxState]] = list
    clock: Callable[[], float] = trio.current_time
    started_secs: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_secs = self.clock()


def application(state: AdminState) -> Starlette:
    """The ASGI application."""

    async def livez(_: Request) -> Response:
        return PlainTextResponse("alive\n", headers=NEVER_STORE)

    async def readyz(_: Request) -> Response:
        reasons = state.readiness.reasons()
        text = "".join(f"{reason}\n" for reason in reasons) or "ready\n"
        return PlainTextResponse(text, 503 if reasons else 200, NEVER_STORE)

    async def metrics(_: Request) -> Response:
        return Response(state.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def api_status(_: Request) -> Response:
        document = status(state.metrics, state.readiness.reasons(), state.clock(), state.started_secs)
        document["outboxes"] = [outbox._asdict() for outbox in state.outboxes()]
        return Response(orjson.dumps(document), headers=NEVER_STORE, media_type="application/json")

    page = files("gateway.admin").joinpath("page.html").read_text(encoding="utf-8")

    async def live_page(_: Request) -> Response:
        return HTMLResponse(page, headers=NEVER_STORE | {"Content-Security-Policy": PAGE_POLICY})

    routes: list[BaseRoute] = [
        Route("/", live_page),
        Route("/api/status", api_status),
        Route("/livez", livez),
        Route("/metrics", metrics),
        Route("/readyz", readyz),
    ]
    for api in (state.dead_letters, state.clients, *state.broker):
        if api is not None:
            routes += api.routes()
    app = Starlette(routes=routes, exception_handlers={UnavailableError: _unavailable})
    app.router.redirect_slashes = False  # it would send people to whatever place their request names
    return app


async def _unavailable(_: Request, error: Exception) -> Response:
    return answer({"error": str(error)}, 503)


def _listen(http: Http) -> socket.socket:
    """Bind ourselves, since a taken port is our error to explain."""
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    both = http.host == "::" and socket.has_dualstack_ipv6()
    try:
        bound = socket.create_server((http.host, http.port), family=family, dualstack_ipv6=both)
    except OSError as error:
        place = f"{http.host}:{http.port}"
        reason = str(error.strerror or error).partition(" (while ")[0]  # behind that: the address again
        raise ConfigurationError(f"http: cannot listen on {place}: {reason}") from error
    bound.setblocking(False)
    return bound


async def serve(
    http: Http, state: AdminState, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve until cancelled; `started` tells the port. Raises ConfigurationError when it cannot listen."""
    bound = _listen(http)
    port = int(bound.getsockname()[1])
    server = HttpServer(application(state), http, state.metrics.http_refused)
    state.metrics.http_connections = lambda: len(server.connections)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run, bound)
        task_status.started(port)
