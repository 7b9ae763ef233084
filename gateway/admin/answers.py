"""How everything below /api speaks: JSON that is never stored, problems by RFC 9457, and requests that choose
by a JSON object.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from http import HTTPStatus
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

NEVER_STORE: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
ENTITY: Final = ("content-length", "content-type")  # what speaks of a body
PROBLEM: Final = "application/problem+json"


class BadChoiceError(Exception):
    """The request chooses nothing that there could be; the text says why. Answered 400."""


class AbsentError(Exception):
    """There is no such thing; the text says what is not there. Answered 404."""


class ConflictError(Exception):
    """What there is already is in the way; the text says what. Answered 409."""


class ShareFullError(Exception):
    """The user has its share of something already; the text says of what. Answered 429."""


class UnavailableError(Exception):
    """What was asked for cannot be had now; the text says why. Answered 503."""


PROBLEMS: Final[Mapping[type[Exception], int]] = {
    BadChoiceError: 400,
    AbsentError: 404,
    ConflictError: 409,
    ShareFullError: 429,
    UnavailableError: 503,
}


def answer(document: Any, code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`document` as JSON."""
    return Response(orjson.dumps(document), code, {**NEVER_STORE, **(headers or {})}, "application/json")


def problem(code: int, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    """What is wrong, as RFC 9457 has it."""
    return Response(problem_of(code, detail), code, {**NEVER_STORE, **(headers or {})}, PROBLEM)


def problem_of(code: int, detail: str) -> bytes:
    """The document of a problem."""
    document = {"type": "about:blank", "title": HTTPStatus(code).phrase, "status": code, "detail": detail}
    return orjson.dumps(document)


def tag_of(octets: bytes) -> str:
    """The ETag of an answer."""
    return f'"{blake2b(octets, digest_size=12).hexdigest()}"'


def unless_known(request: Request, response: Response) -> Response:
    """The answer with its ETag, its own or that of its octets; 304, and nothing more, when whoever asks has
    it (`If-None-Match`).
    """
    if response.status_code != 200 or not response.body:
        return response
    tag = response.headers.setdefault("ETag", tag_of(bytes(response.body)))
    known = [one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")]
    if "*" not in known and tag.removeprefix("W/") not in known:
        return response
    kept = {name: value for name, value in response.headers.items() if name not in ENTITY}
    return Response(status_code=304, headers=kept)


async def choice_of(request: Request) -> Any:
    """The JSON document in the body. Raises BadChoiceError when it is none."""
    try:
        return orjson.loads(await request.body())
    except orjson.JSONDecodeError as error:
        raise BadChoiceError(f"not JSON: {error}") from error
