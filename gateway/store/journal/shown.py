"""Rows of the journal as JSON documents, for people and programs."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Any

import orjson

from gateway.store.journal.reader import Row


def document_of(row: Row) -> dict[str, Any]:
    """Convert a row of the journal to JSON values.

    Times become ISO 8601 texts, and properties an object. The body becomes text or base64; `body_encoding`
    says which.
    """
    document = dict(row)
    for name in ("received", "settled", "expires"):
        document[name] = None if row[name] is None else time_of(row[name])
    document["properties"] = orjson.loads(row["properties"])
    body = row["body"]
    if body is not None:
        try:
            document["body"], document["body_encoding"] = body.decode(), "utf-8"
        except UnicodeDecodeError:
            document["body"], document["body_encoding"] = base64.b64encode(body).decode(), "base64"
    return document


def time_of(microseconds: int) -> str:
    """Convert microseconds since 1970 UTC to a time in ISO 8601."""
    return datetime.fromtimestamp(microseconds / 1_000_000, UTC).isoformat(timespec="microseconds")
