"""Operations on dead letters: listing, showing, redriving (publishing again) and deleting them.

Redriving and deleting take a JSON object that selects the dead letters: {"ids": [...]}, {"route": NAME} or
{"all": true}. A dead letter that is being redriven is not deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, TypeVar

import trio
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.messages import (
    BODY_SHOWN,
    Hide,
    hide_for_caller,
    hide_nothing,
    properties_shown,
    text_of,
)
from gateway.admin.models import LetterDetail, LetterPurgeResult, LetterRow, RedriveResult
from gateway.admin.operations import ServedOperation
from gateway.admin.responses import AbsentError, BadChoiceError, UnavailableError, json_body, json_response
from gateway.admin.selection import CallbackFuture, ListPage, query_of
from gateway.broker.dead_letters import DeadLetters, Letter
from gateway.broker.dead_letters.letters import is_full
from gateway.broker.dead_letters.redrive import Redriving
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.model.spooled_bodies import WithheldBody
from gateway.operations import DEAD_LETTER, DEAD_LETTERS, PURGE_DEAD_LETTERS, REDRIVE
from gateway.protocols import show

REDRIVEN_AT_ONCE: Final = 500
READ_SECS: Final = 20.0  # For a slow disk.
# For a link that is down; messages accepted later are removed from the list as well.
REDRIVE_SECS: Final = 10.0

Result = TypeVar("Result")


class LettersApi:
    """API operations on dead letters.

    `flush` passes changes to the store and writes to sockets, as the end of each pass of the event loop does.
    """

    def __init__(
        self,
        letters: DeadLetters,
        redriving: Redriving,
        flush: Callable[[], None],
        *,
        redrive_secs: float = REDRIVE_SECS,
        read_secs: float = READ_SECS,
        hide: Hide = hide_nothing,
    ) -> None:
        """Build the operations on dead letters.

        `redrive_secs` is the longest time in seconds that a request waits for redriven messages to settle,
        and `read_secs` the longest time that it waits for the store. `redriving` publishes dead letters
        again. `hide` removes private fields from messages before they are shown.
        """
        self._letters = letters
        self._redriving = redriving
        self._flush = flush
        self._redrive_secs = redrive_secs
        self._read_secs = read_secs
        self._hide = hide

    def operations(self) -> Sequence[ServedOperation]:
        """Return the operations on dead letters, each with the function that serves it."""
        return [
            ServedOperation(DEAD_LETTERS, self._list, LetterRow),
            ServedOperation(REDRIVE, self._redrive, RedriveResult),
            ServedOperation(PURGE_DEAD_LETTERS, self._purge, LetterPurgeResult),
            ServedOperation(DEAD_LETTER, self._show, LetterDetail),
        ]

    async def _list(self, request: Request) -> Response:
        choice, count, after = await query_of(request, DEAD_LETTERS.words)
        route = choice.get("route")
        if not after and route is None:
            found = await self._read(partial(self._letters.newest, count, route=None))
            total = len(self._letters)
            has_more = total > len(found) and (len(found) == count or is_full(found))
            return self._page(request, total, found, found[-1].id if found and has_more else None)
        ids = (await self._ids(route))[::-1]
        behind = ids[ids.index(after) + 1 :] if after in ids else [] if after else ids
        requested_ids = behind[:count]
        found = await self._find_letters(requested_ids)
        if is_full(found):
            requested_ids = requested_ids[: requested_ids.index(found[-1].id) + 1]
        has_more = 0 < len(requested_ids) < len(behind)
        return self._page(request, len(ids), found, requested_ids[-1] if has_more else None)

    def _page(self, request: Request, total: int, page: list[Letter], next: str | None) -> Response:
        """Return a response with the dead letters `page`, in a list of `total` selected dead letters.

        The next page begins after the id `next`; None on the last page.
        """
        visible = hide_for_caller(request, self._hide)
        rows = [letter_row(one, visible(one.route, one.message)) for one in page]
        return ListPage(total, rows, next).to_response()

    async def _show(self, request: Request) -> Response:
        id = request.path_params["id"]
        found = await self._find_letters([id])
        if not found:
            raise AbsentError(f"no dead letter {id}")
        message = hide_for_caller(request, self._hide)(found[0].route, found[0].message)
        return json_response(letter_row(found[0], message, whole=True))

    async def _purge(self, request: Request) -> Response:
        """Delete the dead letters that the body selects, except those that are being redriven."""
        ids = await self._selected_ids(request)
        there = await self._read(partial(self._letters.existing, ids))
        # Deleting these would not stop their messages.
        waiting = [id for id in there if self._redriving.is_redriving(id)]
        chosen = [id for id in there if not self._redriving.is_redriving(id)]

        def ask(then: Callable[[tuple[Outcome, list[str]]], None]) -> None:
            self._letters.purge(chosen, lambda *found: then(found))

        outcome, stay = await self._read(ask)
        waiting += stay
        if outcome is not ACCEPTED:
            raise UnavailableError(f"the deletion of the dead letters is not on disk yet: {outcome.text}")
        known_ids = set(there)
        unknown = [id for id in ids if id not in known_ids]
        return json_response({"purged": len(chosen) - len(stay), "waiting": waiting, "unknown": unknown})

    async def _redrive(self, request: Request) -> Response:
        """Redrive the dead letters that the body selects, in batches, and return the results.

        If some dead letters of a batch are not settled in time, the following batches are not redriven, and
        are counted as `untried`.
        """
        ids = await self._selected_ids(request)
        outcomes: dict[str, Outcome] = {}
        unknown: list[str] = []
        waiting: list[str] = []
        untried = ids
        while untried and not waiting:
            some, missing = await self._redrive_some(untried[:REDRIVEN_AT_ONCE], outcomes)
            untried = untried[len(some) :]
            unknown += missing
            waiting += [id for id in some if id not in outcomes and id not in missing]
        refused = [
            {"id": id, "reason": outcome.reason.value, "text": outcome.text}
            for id, outcome in outcomes.items()
            if outcome is not ACCEPTED
        ]
        return json_response(
            {
                "redriven": len(outcomes) - len(refused),
                "left": refused,
                "waiting": waiting,
                "untried": len(untried),
                "unknown": unknown,
            }
        )

    async def _redrive_some(
        self, ids: list[str], outcomes: dict[str, Outcome]
    ) -> tuple[list[str], list[str]]:
        """Redrive the first dead letters of `ids`; wait at most `redrive_secs` seconds for their outcomes.

        As many dead letters are redriven as the store returns at once. Outcomes that arrive in time are added
        to `outcomes`, by id. Return two lists: the ids that this call has processed (all `ids`, if no dead
        letter exists), and those among them that do not exist.
        """
        letters = await self._find_letters(ids)
        if letters:
            ids = ids[: ids.index(letters[-1].id) + 1]
        there = {letter.id for letter in letters}
        open_ = set(there)
        over = trio.Event()

        def on_outcome(id: str, outcome: Outcome) -> None:
            if over.is_set():
                return  # Too late for this response.
            outcomes[id] = outcome
            open_.discard(id)
            if not open_:
                over.set()

        if letters:
            self._redriving.redrive(letters, on_outcome)
            self._flush()
            with trio.move_on_after(self._redrive_secs):
                await over.wait()
            over.set()
            self._flush()
        return ids, [id for id in ids if id not in there]

    async def _selected_ids(self, request: Request) -> list[str]:
        """Return the ids of the dead letters that the body of a request selects, each id once.

        Raises BadChoiceError for an invalid body.
        """
        choice = await json_body(request)
        usage = 'give one of {"ids": [...]}, {"route": NAME}, {"all": true}'
        if not isinstance(choice, dict) or len(choice) != 1:
            raise BadChoiceError(usage)
        ((word, value),) = choice.items()
        if word == "ids" and isinstance(value, list) and all(isinstance(id, str) for id in value):
            return list(dict.fromkeys(value))
        if word == "route" and isinstance(value, str):
            return await self._ids(value)
        if word == "all" and value is True:
            return await self._ids(None)
        raise BadChoiceError(usage)

    async def _ids(self, route: str | None) -> list[str]:
        return await self._read(partial(self._letters.ids, route))

    async def _find_letters(self, ids: list[str]) -> list[Letter]:
        return await self._read(partial(self._letters.find, ids))

    async def _read(self, ask: Callable[[Callable[[Result], None]], None]) -> Result:
        """Call `ask` with a callback, wait for the result that is passed to the callback, and return it.

        Raises UnavailableError if the callback is not called within `read_secs`.
        """
        result = CallbackFuture[Result]()
        ask(result.set)
        found = await result.wait(self._read_secs)
        if found is None:
            raise UnavailableError(f"the store of dead letters has not responded for {self._read_secs:g} s")
        return found


def letter_row(letter: Letter, message: Message, *, whole: bool = False) -> dict[str, Any]:
    """Return a dead letter as a JSON object of the API (LetterRow, or LetterDetail if `whole` is True).

    `message` is the dead letter's message without the fields that the caller may not see. With `whole` the
    object has all properties and the whole body.
    """
    document: dict[str, Any] = {
        "id": letter.id,
        "time": datetime.fromtimestamp(letter.utc, UTC).isoformat(timespec="milliseconds"),
        "route": letter.route,
        "reason": letter.outcome.reason.value,
        "text": letter.outcome.text,
        "protocol": message.address.protocol,
        "address": show(message.address),
        "crossed": letter.crossed,
        "sender": message.sender.to_dict(),
        "body_bytes": len(message.body),
    }
    withheld = isinstance(message.body, WithheldBody)
    if not whole and withheld:
        return document | {"body": ""}
    if not whole:
        return document | {"body": message.body[:BODY_SHOWN].decode(errors="replace")}
    document |= {
        "assurance": message.assurance,
        "durable": message.durable,
        "retain": message.retain,
        "expires": message.expires or None,
        "hops": message.hops,
        "properties": properties_shown(message),
    }
    if withheld:
        return document | {"body": "", "body_encoding": "withheld"}
    body, encoding = text_of(message.body)
    return document | {"body": body, "body_encoding": encoding}
