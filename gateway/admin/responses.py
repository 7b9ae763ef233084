"""Responses and errors of everything below /api, and parsing of JSON bodies.

Responses are JSON that must never be cached; errors are problem documents by RFC 9457.
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
ENTITY: Final = ("content-length", "content-type")  # Headers that describe a body.
PROBLEM: Final = "application/problem+json"


class BadChoiceError(Exception):
    """Error for an invalid parameter or JSON body of a request, with the fault as text. Response 400."""


class AbsentError(Exception):
    """Error for a request for an object that does not exist; the text names the object. Response 404."""


class ConflictError(Exception):
    """Error for a request that conflicts with the existing state; the text tells how. Response 409."""


class ShareFullError(Exception):
    """Error for a user who has reached a limit per user; the text names the limit. Response 429."""


class UnavailableError(Exception):
    """Error for an operation that cannot be performed at present, with the reason as text. Response 503."""


PROBLEMS: Final[Mapping[type[Exception], int]] = {
    BadChoiceError: 400,
    AbsentError: 404,
    ConflictError: 409,
    ShareFullError: 429,
    UnavailableError: 503,
}


def json_response(document: Any, code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an HTTP response with the status `code` and `document` as JSON."""
    return Response(orjson.dumps(document), code, {**NEVER_STORE, **(headers or {})}, "application/json")


def problem_response(code: int, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return an HTTP response with the status `code`, whose body is a problem document (RFC 9457).

    `detail` is the text of the problem.
    """
    return Response(problem_document(code, detail), code, {**NEVER_STORE, **(headers or {})}, PROBLEM)


def problem_document(code: int, detail: str) -> bytes:
    """Return a problem document (RFC 9457) as JSON, for the HTTP status `code` and the text `detail`."""
    document = {"type": "about:blank", "title": HTTPStatus(code).phrase, "status": code, "detail": detail}
    return orjson.dumps(document)


def etag_of(data: bytes) -> str:
    """Return the ETag of a response with the body `data`."""
    return f'"{blake2b(data, digest_size=12).hexdigest()}"'


def with_etag(request: Request, response: Response) -> Response:
    """Return the response with an ETag, or 304 without a body if the client already has this version.

    The request header `If-None-Match` lists the ETags of the versions that the client has.
    """
    if response.status_code != 200 or not response.body:
        return response
    tag = response.headers.setdefault("ETag", etag_of(bytes(response.body)))
    etags = [one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")]
    if "*" not in etags and tag.removeprefix("W/") not in etags:
        return response
    headers = {name: value for name, value in response.headers.items() if name not in ENTITY}
    return Response(status_code=304, headers=headers)


async def json_body(request: Request) -> Any:
    """Return the JSON document in the request's body. Raises BadChoiceError if it is not JSON."""
    try:
        return orjson.loads(await request.body())
    except orjson.JSONDecodeError as error:
        raise BadChoiceError(f"not JSON: {error}") from error
