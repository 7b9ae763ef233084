"""Records of the log besides retained messages: JSON, each with a version.

A mark says nothing: whoever wrote it knows, when it comes back, that he has read all that was written before.
A client has been opened: it is connected to that replica, and to none that said so before. What another
version says besides is passed over, and counted.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import orjson

VERSION: Final = 1
MARK: Final = "mark"
OPENED: Final = "opened"


class Mark(NamedTuple):
    """The replica that wrote it, one of its lives, and a number of that."""

    replica: str
    life: str
    number: int


class Opened(NamedTuple):
    """A client has come to a replica, one of its lives, for which that is the `number`th time."""

    client: str
    replica: str
    life: str
    number: int


def encode_record(record: Mark | Opened) -> bytes:
    """The body of a record."""
    kind = MARK if isinstance(record, Mark) else OPENED
    return orjson.dumps({"version": VERSION, "kind": kind, **record._asdict()})


def decode_record(body: bytes) -> Mark | Opened | None:
    """The record; None: it is none that this version knows."""
    try:
        given: Any = orjson.loads(body)
        if given["version"] != VERSION:
            return None
        fields = {name: given[name] for name in FIELDS[given["kind"]]}
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    texts = {name: value for name, value in fields.items() if name != "number"}
    number = fields["number"]
    if not isinstance(number, int) or not all(isinstance(value, str) for value in texts.values()):
        return None
    return Mark(**texts, number=number) if given["kind"] == MARK else Opened(**texts, number=number)


FIELDS: Final = {MARK: Mark._fields, OPENED: Opened._fields}
