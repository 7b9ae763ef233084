"""HTTP server of a gateway: Starlette routes on the server in `http/`, in the gateway's event loop.

`/livez`, `/readyz` and `/metrics` need no login and may have a port of their own. The others need a login
(`admission.py`, `logins.py`): the console (`page.py`), the API below `/api/v1`, described by
`/api/v1/openapi.json`, and RabbitMQ's API below `/api` (`rabbitmq.py`).
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from gateway import clock
from gateway.admin.admission import ELSEWHERE, Admission, address_owner, shows_secret
from gateway.admin.events import EventsApi, WatchableNames
from gateway.admin.http import HttpServer
from gateway.admin.logins import LoginsApi
from gateway.admin.messages import Hide, hide_nothing, moment
from gateway.admin.models import Status
from gateway.admin.operations import Api, ServedOperation, description_of, routes_of
from gateway.admin.page import ConsoleFiles
from gateway.admin.process import outbox_shown
from gateway.admin.rabbitmq import RabbitApi
from gateway.admin.readiness import Readiness
from gateway.admin.responses import NEVER_STORE, PROBLEMS, json_response, problem_response
from gateway.admin.series import DetailedMetrics
from gateway.admin.status import status
from gateway.broker.outbox.outbox import OutboxState
from gateway.broker.shares import UserQuotas
from gateway.broker.taps import Taps
from gateway.errors import ConfigurationError
from gateway.operations import PREFIX, STATUS
from gateway.settings import Http, HttpTls
from gateway.telemetry.alarms import Alarm
from gateway.telemetry.metrics import Metrics
from gateway.transport.certificates import server_context
from gateway.transport.computation import computed


@dataclass
class AdminState:
    """Parts of the running gateway that its HTTP server shows and changes.

    `clock` returns the monotonic time in seconds, and `started_secs` is the time by this clock at which the
    gateway started. `health_port` is the port of `/livez`, `/readyz` and `/metrics` once the server listens.
    """

    metrics: Metrics
    readiness: Readiness
    admission: Admission
    apis: Sequence[Api] = ()
    outboxes: Callable[[], list[OutboxState]] = list
    alarms: Callable[[], list[Alarm]] = list
    scrape_token_file: Path | None = None
    rabbit: RabbitApi | None = None
    taps: Taps | None = None
    quotas: UserQuotas | None = None
    hide: Hide = hide_nothing
    detailed: DetailedMetrics | None = None
    clock: Callable[[], float] = clock.now
    started_secs: float = field(init=False)
    health_port: int = 0

    def __post_init__(self) -> None:
        self.started_secs = self.clock()


def health(state: AdminState) -> list[BaseRoute]:
    """Return the routes of health probes and metrics.

    The probes need no login. `/metrics` needs the scrape token or a login if a scrape token is configured;
    `/metrics/detailed` always needs one of the two.
    """

    async def metrics(request: Request) -> Response:
        owner = address_owner(request)
        if state.scrape_token_file is not None and not shows_secret(request, state.scrape_token_file):
            caller = await state.admission.caller(request)
            if isinstance(caller, Response):
                return caller
            owner = caller.principal.name

        async def metrics_page() -> Response:
            body, content_type = state.metrics.exposition(request.headers.get("Accept", ""))
            return Response(body, headers={"Content-Type": content_type, "Vary": "Accept"})

        return await state.admission.unsent.serve_counted(owner, metrics_page)

    async def detailed(request: Request) -> Response:
        """Return detailed metrics of queues and sessions.

        A scrape token or a login is always required, because clients choose the names in these metrics.
        """
        file = state.scrape_token_file
        owner = address_owner(request)
        if file is None or not shows_secret(request, file):
            caller = await state.admission.caller(request)
            if isinstance(caller, Response):
                return caller
            if caller.rights.read_hosts is not None:
                return problem_response(403, f"{caller.principal.name!r} {ELSEWHERE}")
            owner = caller.principal.name
        if state.detailed is None:
            return problem_response(404, "detailed metrics are disabled")
        return await state.admission.unsent.serve_counted(owner, partial(state.detailed.serve, request))

    return [
        *probes(state.readiness.reasons),
        Route("/metrics", metrics),
        Route("/metrics/detailed", detailed),
    ]


def _alarm_shown(alarm: Alarm) -> dict[str, Any]:
    return {**alarm._asdict(), "since": moment(alarm.since), "page": alarm.page}


def probes(why_not: Callable[[], list[str]]) -> list[BaseRoute]:
    """Return the routes of the health probes, including paths that load balancers use by default.

    `why_not` returns the reasons why the gateway is not ready; none if it is ready.
    """

    async def livez(_: Request) -> Response:
        return PlainTextResponse("alive\n", headers=NEVER_STORE)

    async def readyz(_: Request) -> Response:
        reasons = why_not()
        text = "".join(f"{reason}\n" for reason in reasons) or "ready\n"
        return PlainTextResponse(text, 503 if reasons else 200, NEVER_STORE)

    return [
        *(Route(path, livez) for path in ("/livez", "/livez/")),
        *(Route(path, readyz) for path in ("/readyz", "/readyz/", "/health", "/health/")),
        Route("/", readyz, methods=["OPTIONS"]),
    ]


def application(state: AdminState, *, with_health: bool = True) -> Starlette:
    """Return the ASGI application of the console and the API.

    With `with_health` the application includes health probes and metrics. Its other routes need a login,
    except the login itself and the static files of the console.
    """
    admitted = state.admission.with_admission_control

    def status_document() -> dict[str, Any]:
        document = status(state.metrics, state.readiness.reasons(), state.clock(), state.started_secs)
        document["alarms"] = [_alarm_shown(one) for one in state.alarms()]
        document["outboxes"] = [outbox_shown(outbox) for outbox in state.outboxes()]
        return document

    async def api_status(_: Request) -> Response:
        return json_response(status_document())

    page = ConsoleFiles()

    async def console(request: Request) -> Response:
        if isinstance(await state.admission.caller(request, quiet=True), Response):
            return Response(status_code=303, headers={**NEVER_STORE, "Location": "login"})
        return page.file(request, "index.html")

    metrics = state.metrics
    names = WatchableNames(
        lambda: [one.name for one in metrics.sources.routes()],
        lambda: [one.name for one in metrics.endpoints()],
    )
    quotas = state.quotas
    logins = LoginsApi(state.admission)
    events = EventsApi(
        state.admission,
        status_document,
        state.taps,
        names,
        streams=None if quotas is None else quotas.streams,
        watched=None if quotas is None else quotas.taps,
        hide=state.hide,
    )
    state_of = ServedOperation(STATUS, api_status, Status)
    apis: tuple[Api, ...] = (logins, events, *state.apis)
    operations = [state_of, *(one for api in apis for one in api.operations())]
    described: list[bytes] = []
    describing = trio.Lock()  # The first request builds the document, and concurrent ones wait for it.

    async def description(_: Request) -> Response:
        async with describing:
            if not described:
                document = partial(description_of, operations, state.metrics.version)
                described.append(orjson.dumps(await computed(document)))
        headers = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
        return Response(described[0], headers=headers, media_type="application/json")

    routes: list[BaseRoute] = [
        Route("/", console),
        *page.routes(),
        Route(f"{PREFIX}/openapi.json", admitted(description, by_host=True)),
        *routes_of(operations, state.admission),
        *(() if state.rabbit is None else state.rabbit.routes(state.admission)),
        *(health(state) if with_health else ()),
    ]
    return serving(routes)


def serving(routes: list[BaseRoute]) -> Starlette:
    """Return an ASGI application for these routes. The application never redirects.

    Errors of the API become problem documents. Requests for unknown paths or methods outside `/api` receive
    an error in plain text.
    """
    handlers: dict[Any, Any] = {
        **dict.fromkeys(PROBLEMS, _problem),
        HTTPException: _http_error_response,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False  # A redirect would send clients to the host that their request names.
    return app


async def _problem(_: Request, error: Exception) -> Response:
    return problem_response(PROBLEMS[type(error)], str(error))


async def _http_error_response(request: Request, error: HTTPException) -> Response:
    """Return the error response for an unknown path or method."""
    if not request.url.path.startswith("/api"):
        return PlainTextResponse(f"{error.detail}\n", error.status_code, error.headers)
    detail = error.detail
    if error.status_code == 404:
        detail = "no such path; see /api/v1/openapi.json"
    elif error.headers and "Allow" in error.headers:
        detail = f"method {request.method} is not allowed; allowed: {error.headers['Allow']}"
    return problem_response(error.status_code, detail, error.headers)


def listen(key: str, host: str, port: int) -> socket.socket:
    """Return a socket that listens on a host and port.

    Raises ConfigurationError, which names the setting `key`, if the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        bound = socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except OSError as error:
        # The system's text repeats the address.
        reason = str(error.strerror or error).partition(" (while ")[0]
        raise ConfigurationError(f"{key}: cannot listen on {host}:{port}: {reason}") from error
    bound.setblocking(False)
    return bound


def context_of(key: str, tls: HttpTls | None) -> Callable[[], ssl.SSLContext] | None:
    """Return a function that returns the TLS context for a new connection. Return None if `tls` is None.

    `key` is the section of the configuration, for error messages.
    """
    return None if tls is None else server_context(key, tls.cert_file, tls.key_file)


async def serve(
    http: Http, state: AdminState, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve the console, the API, probes and metrics until cancelled.

    `task_status` receives the console's port. Raises ConfigurationError if a port cannot be opened.
    """
    apart = http.health
    refused = state.metrics.http_refused
    bound = listen("http", http.host, http.port)
    servers = [
        HttpServer(application(state, with_health=apart is None), http, refused, context_of("http", http.tls))
    ]
    sockets = [bound]
    with bound:
        if apart is not None:
            at = "http.health"
            sockets.append(listen(at, apart.host, apart.port))
            servers.append(HttpServer(serving(health(state)), http, refused, context_of(at, apart.tls)))
        state.metrics.http_servers += servers
        async with trio.open_nursery() as nursery:
            for server, bound_socket in zip(servers, sockets, strict=True):
                await nursery.start(server.run, bound_socket)
            state.health_port = int(sockets[-1].getsockname()[1])
            task_status.started(int(bound.getsockname()[1]))
