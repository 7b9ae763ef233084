"""Dead letters over HTTP.

GET  /api/dead-letters?count=100&route=NAME   the newest, bodies cut
GET  /api/dead-letters/ID                     one, whole; needs admission
POST /api/dead-letters/redrive                publish again; needs admission
POST /api/dead-letters/purge                  forget; needs admission

The two last take a JSON object that chooses: {"ids": [...]}, {"route": NAME} or {"all": true}.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import orjson
import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gateway.admin.admission import Admission
from gateway.admin.answers import BadChoiceError, UnavailableError, answer, choice_of
from gateway.broker.dead_letters import DeadLetters, Letter
from gateway.broker.dead_letters.redriving import Redriving
from gateway.errors import RemoteProtocolError
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.protocols import show
from gateway.store.properties import encode_properties

SHOWN: Final = 100
SHOWN_MAX: Final = 1_000
BODY_SHOWN: Final = 1_024  # octets of a body in the list
REDRIVEN_AT_ONCE: Final = 500
READ_SECS: Final = 20.0  # the disk may be slow
REDRIVE_SECS: Final = 10.0  # a link may be down; what is accepted later is still taken off the list

Found = TypeVar("Found")


class LettersApi:
    """`flush` hands what was done to the store and writes to sockets, as the end of a wake-up does."""

    def __init__(
        self,
        letters: DeadLetters,
        redriving: Redriving,
        flush: Callable[[], None],
        admission: Admission,
        *,
        redrive_secs: float = REDRIVE_SECS,
        read_secs: float = READ_SECS,
    ) -> None:
        self._letters = letters
        self._redriving = redriving
        self._flush = flush
        self._admission = admission
        self._redrive_secs = redrive_secs
        self._read_secs = read_secs

    def routes(self) -> list[BaseRoute]:
        """The routes for the application."""
        at, admitted = "/api/dead-letters", self._admission.admitted
        return [
            Route(at, admitted(self._list)),
            Route(f"{at}/redrive", admitted(self._redrive), methods=["POST"]),
            Route(f"{at}/purge", admitted(self._purge), methods=["POST"]),
            Route(at + "/{id}", admitted(self._show)),
        ]

    async def _list(self, request: Request) -> Response:
        query = request.query_params
        try:
            count = min(max(int(query.get("count", SHOWN)), 0), SHOWN_MAX)
        except ValueError:
            return answer({"error": "count is a number"}, 400)
        route = query.get("route")

        def ask(then: Callable[[list[Letter]], None]) -> None:
            self._letters.newest(count, then, route=route)

        return answer([shown(letter) for letter in await self._read(ask)])

    async def _show(self, request: Request) -> Response:
        id = request.path_params["id"]
        found = await self._found([id])
        if not found:
            return answer({"error": f"there is no dead letter {id}"}, 404)
        return answer(shown(found[0], whole=True))

    async def _purge(self, request: Request) -> Response:
        ids = await self._chosen(request)
        there = [letter.id for letter in await self._found(ids)]

        def ask(then: Callable[[Outcome], None]) -> None:
            self._letters.delete(there, then)

        outcome = await self._read(ask)
        if outcome is not ACCEPTED:
            raise UnavailableError(f"they are purged when the disk takes it: {outcome.text}")
        known = set(there)
        return answer({"purged": len(there), "unknown": [id for id in ids if id not in known]})

    async def _redrive(self, request: Request) -> Response:
        ids = await self._chosen(request)
        told: dict[str, Outcome] = {}
        unknown: list[str] = []
        waiting: list[str] = []
        untried: list[str] = []
        for start in range(0, len(ids), REDRIVEN_AT_ONCE):
            some = ids[start : start + REDRIVEN_AT_ONCE]
            if waiting:
                untried += some
                continue
            missing = await self._redrive_some(some, told)
            unknown += missing
            waiting += [id for id in some if id not in told and id not in missing]
        left = [
            {"id": id, "reason": outcome.reason.value, "text": outcome.text}
            for id, outcome in told.items()
            if outcome is not ACCEPTED
        ]
        return answer(
            {
                "redriven": len(told) - len(left),
                "left": left,
                "waiting": waiting,
                "untried": len(untried),
                "unknown": unknown,
            }
        )

    async def _redrive_some(self, ids: list[str], told: dict[str, Outcome]) -> list[str]:
        """Wait until all have been answered, or as long as we may. Returns those that there are not."""
        letters = await self._found(ids)
        there = {letter.id for letter in letters}
        open_ = set(there)
        over = trio.Event()

        def tell(id: str, outcome: Outcome) -> None:
            if over.is_set():
                return  # too late for this answer
            told[id] = outcome
            open_.discard(id)
            if not open_:
                over.set()

        if letters:
            self._redriving.redrive(letters, tell)
            self._flush()
            with trio.move_on_after(self._redrive_secs):
                await over.wait()
            over.set()
            self._flush()
        return [id for id in ids if id not in there]

    async def _chosen(self, request: Request) -> list[str]:
        """The ids that the body chooses, without repeats."""
        choice = await choice_of(request)
        wanted = 'give one of {"ids": [...]}, {"route": NAME}, {"all": true}'
        if not isinstance(choice, dict) or len(choice) != 1:
            raise BadChoiceError(wanted)
        ((word, value),) = choice.items()
        if word == "ids" and isinstance(value, list) and all(isinstance(id, str) for id in value):
            return list(dict.fromkeys(value))
        if word == "route" and isinstance(value, str):
            return await self._ids(value)
        if word == "all" and value is True:
            return await self._ids(None)
        raise BadChoiceError(wanted)

    async def _ids(self, route: str | None) -> list[str]:
        def ask(then: Callable[[list[str]], None]) -> None:
            self._letters.ids(route, then)

        return await self._read(ask)

    async def _found(self, ids: list[str]) -> list[Letter]:
        def ask(then: Callable[[list[Letter]], None]) -> None:
            self._letters.find(ids, then)

        return await self._read(ask)

    async def _read(self, ask: Callable[[Callable[[Found], None]], None]) -> Found:
        """What `ask` tells its function. Raises UnavailableError when the disk does not answer."""
        found: list[Found] = []
        there = trio.Event()

        def then(one: Found) -> None:
            found.append(one)
            there.set()

        ask(then)
        with trio.move_on_after(self._read_secs):
            await there.wait()
        if not found:
            raise UnavailableError(f"the disk has not answered for {self._read_secs:g} s")
        return found[0]


def shown(letter: Letter, *, whole: bool = False) -> dict[str, Any]:
    """A letter for people and programs; `whole`: with its properties and all of its body."""
    message = letter.message
    document: dict[str, Any] = {
        "id": letter.id,
        "time": datetime.fromtimestamp(letter.utc, UTC).isoformat(timespec="milliseconds"),
        "route": letter.route,
        "reason": letter.outcome.reason.value,
        "text": letter.outcome.text,
        "protocol": message.address.protocol,
        "address": show(message.address),
        "crossed": letter.crossed,
        "sender": message.sender._asdict(),
        "body_bytes": len(message.body),
    }
    if not whole:
        return document | {"body": message.body[:BODY_SHOWN].decode(errors="replace")}
    try:
        properties = orjson.loads(encode_properties(message.properties) or b"{}")
    except RemoteProtocolError as error:
        properties = {"unreadable": str(error)}
    document |= {
        "assurance": message.assurance,
        "durable": message.durable,
        "retain": message.retain,
        "expires": message.expires or None,
        "hops": message.hops,
        "properties": properties,
    }
    try:
        return document | {"body": message.body.decode(), "body_encoding": "utf-8"}
    except UnicodeDecodeError:
        return document | {"body": base64.b64encode(message.body).decode(), "body_encoding": "base64"}
