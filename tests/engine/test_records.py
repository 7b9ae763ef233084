"""What replicas say of sessions in the log."""

from __future__ import annotations

import pytest

from gateway.engine.records import (
    Changed,
    Ended,
    Freed,
    Gone,
    Inherited,
    Left,
    Mark,
    Opened,
    Record,
    Snapshot,
    Willed,
    WillSaid,
    decode_record,
    encode_record,
)

WILL = WillSaid("a/b", b"\xff\0", 1, True, b"\x01\x01", 5, "mqtt", "user", "127.0.0.1")
NUMBER = (b"\xff\0345678", 2**40)
OWNER = ("life", 7)


@pytest.mark.parametrize(
    "record",
    [
        Mark("a", "life", 3),
        Opened("a client\0é", "b", "life", 4, False, 60.0, 1e9, "user", "place", WILL),
        Opened("c", "b", "life", 4, True, 0.0, 1e9, "", "", None, only_own=True),
        Left("c", "life", 5, OWNER, 1e9, 60.0, 0.0),
        Freed("c", "life", 5, OWNER),
        Freed("c", "life", 5, OWNER, (2**32 - 1, 0)),
        Changed("c", "life", 6, OWNER),
        Changed(
            "c",
            "life",
            6,
            OWNER,
            {"a/+": (2, True, False, 1, 268_435_455), "gone": None},
            (1,),
            {2: NUMBER, 65_535: None},
            (3, 4),
            (5,),
            {6: NUMBER},
        ),
        Ended("c", "life", 7, OWNER),
        Willed("c", "life", 7, OWNER),
        Gone("life", 8, 1e9),
        Inherited("life", 9, "other", 1e9),
        Snapshot(
            "c", "life", 9, 17, OWNER, "other", "queue", False, 1e9, 60.0, "user", "place", WILL, 1e9,
            {"a/+": (1, False, True, 0, 0)}, {2: NUMBER, 3: None}, (2,), {6: NUMBER},
            ((b"\xff\0345678", bytes(range(240, 256)) * 2), (b"empty678", b"")),
        ),
    ],
    ids=lambda record: record.kind,
)  # fmt: skip
def test_records_come_back(record: Record) -> None:
    assert decode_record(encode_record(record)) == record


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"3",
        b'{"version": 0, "record": {"kind": "mark", "replica": "a", "life": "b", "number": 1}}',
        b'{"version": "2", "record": {"kind": "mark", "replica": "a", "life": "b", "number": 1}}',
        b'{"version": 2, "record": {"kind": "mark", "replica": "a", "number": 1}}',
        b'{"version": 1, "record": {"kind": "other"}}',
        b'{"version": 1, "record": {"kind": ["mark"]}}',
        b'{"version": 1, "record": {"kind": "mark", "replica": "a", "life": "b", "number": "1"}}',
        b'{"version": 1, "record": {"kind": "mark", "replica": "a", "life": 5, "number": 1}}',
        b'{"version": 1, "kind": "mark", "replica": "a", "life": "b", "number": 1}',
    ],
)
def test_records_of_others_are_passed_over(body: bytes) -> None:
    assert decode_record(body) is None


@pytest.mark.parametrize("version", [1, 2, 2**40])
def test_a_record_that_says_more_is_understood(version: int) -> None:
    body = (
        b'{"version": %d, "record": {"kind": "mark", "replica": "a", "life": "b", "number": 1, "more": {}},'
        b' "besides": []}' % version
    )
    assert decode_record(body) == Mark("a", "b", 1)
