"""HTTP server of the supervisor: `/livez`, `/readyz` and `/metrics` for all workers.

A console shows one process. Each worker therefore has a console of its own, at the supervisor's port plus the
worker's number. The response to every other path names these ports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gateway.admin.admission import LOGIN, shows_secret
from gateway.admin.http import HttpServer
from gateway.admin.responses import problem_response
from gateway.admin.server import context_of, listen, probes, serving
from gateway.settings import Http


@dataclass(frozen=True)
class WorkersState:
    """Parts of the supervisor that its HTTP server shows.

    `reasons` returns the reasons why the running workers are not ready. `exposed` takes the header `Accept`
    of a request, and returns the metrics of all workers with their content type. `consoles` describes the
    ports of the workers' consoles. `refused` counts refused requests by reason.
    """

    reasons: Callable[[], list[str]]
    exposed: Callable[[str], Awaitable[tuple[bytes, str]]]
    consoles: str
    scrape_token_file: Path | None
    refused: Counter[str] = field(default_factory=Counter)


def _routes(state: WorkersState) -> list[BaseRoute]:
    """Return the routes of the supervisor's HTTP server.

    Requests for paths other than probes and metrics get a text that names the consoles of the workers.
    """

    async def metrics(request: Request) -> Response:
        if state.scrape_token_file is not None and not shows_secret(request, state.scrape_token_file):
            return problem_response(401, "metrics need the scrape token: `Authorization: Bearer`", LOGIN)
        body, content_type = await state.exposed(request.headers.get("Accept", ""))
        return Response(body, headers={"Content-Type": content_type, "Vary": "Accept"})

    async def not_found(_: Request) -> Response:
        return problem_response(404, f"each worker has its own console and API: {state.consoles}")

    return [
        *probes(state.reasons),
        Route("/metrics", metrics),
        Route("/{path:path}", not_found, methods=["GET", "POST", "PUT", "DELETE"]),
    ]


async def serve_workers(
    http: Http, state: WorkersState, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve probes and metrics of all workers at the configured port until cancelled.

    `task_status` receives the port. Raises ConfigurationError if the port cannot be opened.
    """
    key, at = ("http", http) if http.health is None else ("http.health", http.health)
    bound = listen(key, at.host, at.port)
    server = HttpServer(serving(_routes(state)), http, state.refused, context_of(key, at.tls))
    with bound:
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run, bound)
            task_status.started(int(bound.getsockname()[1]))
