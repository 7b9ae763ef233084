"""Connected clients over HTTP: who they are, and an operator's way to send them off. Both need admission.

GET  /api/clients?client=ID&user=NAME&address=HOST:PORT&endpoint=NAME&count=100
POST /api/clients/disconnect

The latter takes a JSON object with the same words, of which it must have one beside `endpoint`. What a client
hears, and what becomes of its session and its will, is its protocol's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gateway.admin.admission import Admission
from gateway.admin.answers import BadChoiceError, answer, choice_of

SHOWN: Final = 100
SHOWN_MAX: Final = 1_000
WORDS: Final = ("client", "user", "address")

log = structlog.get_logger()


class Connected(NamedTuple):
    """A connection. `client` and `user` are "" until it has said who it is; `dismiss` says goodbye to it."""

    endpoint: str
    protocol: str
    client: str
    user: str
    address: str
    dismiss: Callable[[], None]

    def shown(self) -> dict[str, str]:
        """For people and programs."""
        facts = self._asdict()
        del facts["dismiss"]
        return facts


class ClientsApi:
    """`connected` finds the connections; `flush` writes to sockets what was said to them."""

    def __init__(
        self,
        connected: Callable[[], Iterable[Connected]],
        flush: Callable[[], None],
        admission: Admission,
    ) -> None:
        self._connected = connected
        self._flush = flush
        self._admission = admission

    def routes(self) -> list[BaseRoute]:
        """The routes for the application."""
        admitted = self._admission.admitted
        return [
            Route("/api/clients", admitted(self._list)),
            Route("/api/clients/disconnect", admitted(self._disconnect), methods=["POST"]),
        ]

    async def _list(self, request: Request) -> Response:
        wanted = dict(request.query_params)
        try:
            count = min(max(int(wanted.pop("count", SHOWN)), 0), SHOWN_MAX)
        except ValueError:
            return answer({"error": "count is a number"}, 400)
        if unknown := wanted.keys() - {*WORDS, "endpoint"}:
            return answer({"error": f"unknown: {', '.join(sorted(unknown))}"}, 400)
        found = self._chosen(wanted)
        return answer({"connected": len(found), "clients": [one.shown() for one in found[:count]]})

    async def _disconnect(self, request: Request) -> Response:
        wanted = await _choice(request)
        chosen = self._chosen(wanted)
        for one in chosen:
            one.dismiss()
        self._flush()
        if chosen:
            log.info("an operator disconnected clients", count=len(chosen), **wanted)
        return answer({"disconnected": len(chosen)})

    def _chosen(self, wanted: Mapping[str, str]) -> list[Connected]:
        return [
            one
            for one in self._connected()
            if all(getattr(one, word) == value for word, value in wanted.items())
        ]


async def _choice(request: Request) -> dict[str, str]:
    choice: Any = await choice_of(request)
    if (
        not isinstance(choice, dict)
        or not all(isinstance(value, str) and value for value in choice.values())
        or not choice.keys() <= {*WORDS, "endpoint"}
        or choice.keys().isdisjoint(WORDS)
    ):
        raise BadChoiceError('give one of {"client": ID}, {"user": NAME}, {"address": "HOST:PORT"}')
    return choice
