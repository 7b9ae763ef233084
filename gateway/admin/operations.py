"""What can be asked over HTTP, as rows: one for each operation, out of which both the server's routes and the
OpenAPI document are made, so that neither knows what the other does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gateway.admin.admission import Admission, Serve
from gateway.admin.answers import BadChoiceError, choice_of
from gateway.admin.models import Row
from gateway.protocols import DIALECTS

PREFIX: Final = "/api/v1"
NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})

Kind = type | tuple[str, ...]
Words = Mapping[str, Kind]
"""The words of a choice, with the kind of each: str, int, float (not negative), bool, or the texts that it
may be."""
PROTOCOLS: Final = tuple(DIALECTS)
HOLDERS: Final = tuple(name for name, one in DIALECTS.items() if one.has_virtual_hosts)

MEANINGS: Final = {
    "address": "By the client's address, HOST:PORT.",
    "after": "Those behind this key, which `next` of the page before said.",
    "all": "All of them, in place of a choice.",
    "client": "By client id; in lists of sessions and retained messages * is any text.",
    "console": "What the token may do: `read` or `write`.",
    "count": "So many at most.",
    "days": "The token ends after so many; absent: never.",
    "destination": "By the name of what is bound.",
    "empty": "Without messages, or with some.",
    "endpoint": "By the endpoint's name.",
    "exact": "Names are meant as they are: * is a *, and a topic no filter.",
    "idle_longer_than": "Unused for so many seconds.",
    "in_use": "In use, or not; of removals: also those in use.",
    "kind": "By kind: `queue` or `subscription`, `listener` or `link`, of rates also `process` and `route`.",
    "name": "By name; * is any text.",
    "per_second": "So many at most.",
    "protocol": f"By protocol: {', '.join(f'`{name}`' for name in DIALECTS)}.",
    "queue": "By the queue's name; * is any text.",
    "rates": "Whether octets per second are wanted; they are counted while the answer waits, for a second.",
    "route": "By the route's name.",
    "sort": "In this order: by `name`, or those with the most `messages` first.",
    "source": "By the exchange that it is bound to.",
    "topic": "By an MQTT topic filter.",
    "user": "By user; in lists of sessions and retained messages * is any text.",
    "virtual_host": "By virtual host.",
    "what": "By what is counted: `in`, `out`, `settled`, `refused` or `dead_letters`.",
}


class Operation(NamedTuple):
    """One operation. `path` is below the prefix; what is in braces is a part of it. `reads` are the words of
    its query; `takes` what its body is made of; `paged`: the answer is a page of rows of `answers`. `door`:
    whoever gets in is decided elsewhere; else reading needs the right `read`, all else `write`.
    """

    method: str
    path: str
    summary: str
    serve: Serve
    answers: type[Row]
    reads: Words = NOTHING
    takes: Words | type[Row] | None = None
    paged: bool = False
    absent: bool = False  # it may answer 404
    conflicts: bool = False  # and 409
    streams: bool = False  # the answer is server-sent events, with such data
    door: bool = False
    by_host: bool = False  # callers with rights in some virtual hosts may ask, and see what is there


class Api(Protocol):
    """A part of the interface."""

    def operations(self) -> Sequence[Operation]:
        """What can be asked of it."""


def routes_of(operations: Iterable[Operation], admission: Admission) -> list[BaseRoute]:
    """The server's routes."""
    return [
        Route(
            PREFIX + one.path,
            one.serve if one.door else admission.admitted(_taking_nothing(one), by_host=one.by_host),
            methods=[one.method],
        )
        for one in operations
    ]


def _taking_nothing(one: Operation) -> Serve:
    """Who serves it; what takes nothing refuses to be told more: it would be taken for heard."""
    if one.method != "POST" or one.takes is not None:
        return one.serve

    async def serve(request: Request) -> Response:
        if await request.body() and await choice_of(request) != {}:
            raise BadChoiceError(f"{request.url.path} takes nothing")
        return await one.serve(request)

    return serve


def description_of(operations: Iterable[Operation], version: str) -> dict[str, Any]:
    """The OpenAPI document (3.1)."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for one in operations:
        path = PREFIX + one.path.replace(":path}", "}")
        paths.setdefault(path, {})[one.method.lower()] = _operation(one, schemas)
    schemas["Problem"] = PROBLEM
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Gateway",
            "version": version,
            "summary": "What an operator sees and does of one gateway process.",
        },
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "basic": {"type": "http", "scheme": "basic"},
                "session": {"type": "apiKey", "in": "cookie", "name": "gateway_session"},
            },
        },
        "security": [{"bearer": []}, {"basic": []}, {"session": []}],
    }


TYPES: Final[Mapping[Any, dict[str, Any]]] = {
    str: {"type": "string"},
    int: {"type": "integer", "minimum": 0},
    float: {"type": "number", "minimum": 0},
    bool: {"type": "boolean"},
}
PROBLEM: Final = {
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "What is wrong, for people."},
    },
}
ANY: Final = "405: the path takes other methods; 400, 408, 431, 501, 505: this is no request that is taken."
FAILURES: Final = {
    400: "What is asked for cannot be.",
    401: "A login or a token is needed.",
    403: "The right to do this is needed.",
    404: "There is no such thing.",
    409: "What there is already is in the way.",
    413: "The body is larger than `http.body_bytes_max`.",
    415: "The body is of another type.",
    429: "The user has its share of what there is already.",
    503: "It cannot be had now.",
}


def _operation(one: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    answers = _schema(one.answers, schemas)
    if one.paged:
        answers = {
            "type": "object",
            "required": ["total", "items", "next"],
            "properties": {
                "total": {"type": "integer", "description": "So many match in all."},
                "items": {"type": "array", "items": answers},
                "next": {
                    "type": ["string", "null"],
                    "description": "What to say as `after` to get the next page; null: this is the last.",
                },
            },
        }
    takes = one.takes is not None
    may = (
        (404, one.absent),
        (429, one.streams),
        (409, one.conflicts),
        (413, takes),
        (415, takes and one.door),
    )
    without = {code for code, does in may if not does}
    kind = "text/event-stream" if one.streams else "application/json"
    given: dict[str, Any] = {
        "operationId": "_".join(
            word.strip("{}").replace("-", "_").replace(":", "_")
            for word in (one.method.lower(), *one.path.split("/"))
            if word
        ),
        "tags": [one.path.split("/")[1]],
        "summary": one.summary,
        "responses": {
            "200": {"description": "Done.", "content": {kind: {"schema": answers}}},
            "default": _failure(ANY),
            **{str(code): _failure(why) for code, why in FAILURES.items() if code not in without},
        },
    }
    reads = {**one.reads, **({"count": int, "after": str} if one.paged else {})}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _named(one.path)
    ]
    parameters += [
        {"name": word, "in": "query", "schema": _said(kind), "description": MEANINGS[word]}
        for word, kind in reads.items()
    ]
    if parameters:
        given["parameters"] = parameters
    if one.takes is not None:
        given["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _body(one.takes, schemas)}},
        }
    return given


def _named(path: str) -> list[str]:
    return [part.partition(":")[0] for piece in path.split("{")[1:] for part in (piece.partition("}")[0],)]


def _body(takes: Words | type[Row], schemas: dict[str, Any]) -> dict[str, Any]:
    if isinstance(takes, type):
        return _schema(takes, schemas)
    properties = {word: {**_said(kind), "description": MEANINGS[word]} for word, kind in takes.items()}
    return {"type": "object", "minProperties": 1, "additionalProperties": False, "properties": properties}


def _said(kind: Kind) -> dict[str, Any]:
    return {"type": "string", "enum": list(kind)} if isinstance(kind, tuple) else TYPES[kind]


def _schema(model: type[Row], schemas: dict[str, Any]) -> dict[str, Any]:
    """A reference to the schema of a model, which is put beside the others."""
    given = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(given.pop("$defs", {}))
    schemas[model.__name__] = given
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _failure(why: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Problem"}
    return {"description": why, "content": {"application/problem+json": {"schema": schema}}}
