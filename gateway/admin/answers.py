"""How everything below /api speaks: JSON that is never stored, and requests that choose by a JSON object."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

CHOICE_OCTETS_MAX: Final = 1_048_576
NEVER_STORE: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class BadChoiceError(Exception):
    """The body of the request chooses nothing that there could be; the text says why."""


class UnavailableError(Exception):
    """What was asked for cannot be had now; the text says why. Answered 503."""


def answer(document: Any, code: int = 200) -> Response:
    """`document` as JSON."""
    return Response(orjson.dumps(document), code, NEVER_STORE, "application/json")


async def choice_of(request: Request) -> Any:
    """The JSON document in the body. Raises BadChoiceError when it is none, or longer than anybody needs."""
    octets = b""
    async with aclosing(request.stream()) as pieces:
        async for piece in pieces:
            octets += piece
            if len(octets) > CHOICE_OCTETS_MAX:
                raise BadChoiceError(f"more than {CHOICE_OCTETS_MAX} octets")
    try:
        return orjson.loads(octets)
    except orjson.JSONDecodeError as error:
        raise BadChoiceError(f"not JSON: {error}") from error
