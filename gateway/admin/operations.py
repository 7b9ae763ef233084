"""HTTP routes and OpenAPI document of the API.

Both are derived from the table of operations (gateway/operations.py) and the functions that serve them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gateway.admin.admission import Admission, Serve
from gateway.admin.models import Model
from gateway.admin.responses import BadChoiceError, json_body
from gateway.operations import (
    AFTER,
    COUNT,
    ApiOperation,
    OperationWord,
    Words,
    protocols,
    protocols_with_queues,
)

PROTOCOLS: Final = protocols()
HOLDERS: Final = protocols_with_queues()


class ServedOperation(NamedTuple):
    """API operation with the function that serves it.

    `answers` is the model of the response. If the operation returns pages, it is the model of one row; if the
    response is a stream, the model of the data of one event. `takes` is the model of the request's body. It
    is None if the request has no body, or if the parameters in `operation.words` describe the body
    completely.
    """

    operation: ApiOperation
    serve: Serve
    answers: type[Model]
    takes: type[Model] | None = None

    @property
    def has_body(self) -> bool:
        """True if requests of the operation have a body."""
        return self.takes is not None or (self.operation.method == "POST" and bool(self.operation.words))


class Api(Protocol):
    """Interface of one part of the HTTP API, a group of related operations."""

    def operations(self) -> Sequence[ServedOperation]:
        """Return the operations of this part, each with the function that serves it."""


def routes_of(operations: Iterable[ServedOperation], admission: Admission) -> list[BaseRoute]:
    """Return the HTTP routes of the operations.

    All but the open operations (such as the login) have admission control and a check of the request's body.
    """
    return [
        Route(
            one.operation.url,
            one.serve
            if one.operation.is_open
            else admission.with_admission_control(_refuse_request_body(one), by_host=one.operation.by_host),
            methods=[one.operation.method],
        )
        for one in operations
    ]


def _refuse_request_body(one: ServedOperation) -> Serve:
    """Return a function that serves requests as `one` does, but refuses a body that `one` does not expect.

    If the operation is a POST without parameters, the function raises BadChoiceError for a body other than
    `{}`, which would otherwise be ignored.
    """
    if one.operation.method != "POST" or one.has_body:
        return one.serve

    async def serve(request: Request) -> Response:
        if await request.body() and await json_body(request) != {}:
            raise BadChoiceError(f"{request.url.path}: the request must not have a body")
        return await one.serve(request)

    return serve


def description_of(operations: Iterable[ServedOperation], version: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the operations. `version` is the gateway's version."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for one in operations:
        path = one.operation.url.replace(":path}", "}")
        paths.setdefault(path, {})[one.operation.method.lower()] = _described(one, schemas)
    schemas["Problem"] = PROBLEM
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Gateway",
            "version": version,
            "summary": "Monitoring and operation of one gateway process.",
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
    list: {"type": "array", "items": {"type": "string"}},
}
PROBLEM: Final = {
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "Human-readable description of the problem."},
    },
}
ANY: Final = (
    "405: the path has other methods; 400, 408, 431, 501, 505: the request is invalid or not supported."
)
FAILURES: Final = {
    400: "The request is invalid.",
    401: "Authentication is required.",
    403: "The caller lacks the right.",
    404: "The object does not exist.",
    409: "The request conflicts with existing state.",
    413: "The body is larger than `http.body_bytes_max`.",
    415: "The body has another content type.",
    429: "The user has reached a limit.",
    503: "Temporarily unavailable.",
}


def _described(served: ServedOperation, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI description of one operation, and add the models that it refers to to `schemas`."""
    one = served.operation
    answers = _schema(served.answers, schemas)
    if one.paged:
        answers = {
            "type": "object",
            "required": ["total", "items", "next"],
            "properties": {
                "total": {"type": "integer", "description": "Number of all matching objects."},
                "items": {"type": "array", "items": answers},
                "next": {
                    "type": ["string", "null"],
                    "description": "Value of `after` for the next page; null on the last one.",
                },
            },
        }
    may = (
        (404, one.absent),
        (429, one.streams),
        (409, one.conflicts),
        (413, served.has_body),
        (415, served.has_body and one.is_open),
    )
    without = {code for code, does in may if not does}
    kind = "text/event-stream" if one.streams else "application/json"
    document: dict[str, Any] = {
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
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _named(one.path)
    ]
    if one.method == "GET":
        pages = {"count": COUNT, "after": AFTER} if one.paged else {}
        parameters += [
            {"name": name, "in": "query", "schema": _shape(word), "description": word.meaning}
            for name, word in {**one.words, **pages}.items()
        ]
    if parameters:
        document["parameters"] = parameters
    if served.has_body:
        schema = _body(one.words) if served.takes is None else _schema(served.takes, schemas)
        document["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return document


def _named(path: str) -> list[str]:
    return [part.partition(":")[0] for piece in path.split("{")[1:] for part in (piece.partition("}")[0],)]


def _body(words: Words) -> dict[str, Any]:
    properties = {name: {**_shape(word), "description": word.meaning} for name, word in words.items()}
    return {"type": "object", "minProperties": 1, "additionalProperties": False, "properties": properties}


def _shape(word: OperationWord) -> dict[str, Any]:
    """Return the JSON Schema for the values of `word`, a parameter of requests."""
    texts = word.texts
    return TYPES[word.kind] if texts is None else {"type": "string", "enum": list(texts)}


def _schema(model: type[Model], schemas: dict[str, Any]) -> dict[str, Any]:
    """Add the JSON Schema of a model to `schemas`, and return a reference to it."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(schema.pop("$defs", {}))
    schemas[model.__name__] = schema
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _failure(why: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Problem"}
    return {"description": why, "content": {"application/problem+json": {"schema": schema}}}
