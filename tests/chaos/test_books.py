"""The books of a row: what was accepted and did not arrive is told of, or it is lost."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest

from tests.chaos import gateway_operator
from tests.chaos.checker import Id, body_of
from tests.chaos.faults import spoil
from tests.chaos.gateway_operator import DAMAGED, ROUTE, Operator, ReplicaOperator
from tests.chaos.rig import Rig
from tests.chaos.scenarios import Row

PLAIN: Final = Row("mqtt", "amqp", "qos1", "confirmed", ("kill-gateway",))
PURGED: Final = PLAIN._replace(faults=("purge-queue",))
SPOILED: Final = PLAIN._replace(faults=("damage-row",))
EXPIRING: Final = PLAIN._replace(faults=("cut",), expiring=True)


def ids(*numbers: int) -> set[Id]:
    return {Id("s", "a", number) for number in numbers}


class Books:
    """What the gateway of a row says."""

    def __init__(self, letters: set[Id], dropped: dict[str, int], queued: list[str]) -> None:
        self._letters = letters
        self._dropped = dropped
        self._queued = queued

    def letters(self) -> Counter[Id]:
        return Counter(self._letters)

    def dropped(self) -> dict[str, int]:
        return self._dropped

    def queued(self) -> list[str]:
        return self._queued


# Row, numbers that did not arrive of 0 to 9, dead letters, dropped, ended by operators, and what comes of it:
# how many are lost, and how many notes there are.
CASES: Final[list[tuple[Row, set[Id], set[Id], dict[str, int], int, tuple[int, int]]]] = [
    (PLAIN, ids(), ids(), {}, 0, (0, 0)),
    (PLAIN, ids(1), ids(), {}, 0, (1, 0)),
    (PLAIN, ids(1), ids(1), {}, 0, (1, 1)),
    (PLAIN, ids(1), ids(), {"offline": 1}, 0, (1, 1)),
    (PLAIN, ids(), ids(), {"offline": 1}, 0, (0, 1)),
    (PLAIN, ids(), ids(1), {}, 0, (0, 1)),
    (PURGED, ids(1, 2), ids(), {}, 2, (0, 0)),
    (PURGED, ids(1, 2), ids(), {}, 1, (2, 0)),
    (PURGED, ids(1, 2), ids(2), {}, 1, (0, 0)),
    (PURGED, ids(1, 2), ids(), {"queue_expired": 1}, 1, (0, 0)),
    (EXPIRING, ids(0, 5), ids(), {"expired": 2}, 0, (0, 0)),
    (EXPIRING, ids(0, 5), ids(5), {"queue_expired": 1}, 0, (0, 0)),
    (EXPIRING, ids(0, 5), ids(), {"expired": 1}, 0, (2, 0)),
    (EXPIRING, ids(0, 1), ids(), {"expired": 2}, 0, (1, 0)),
    (EXPIRING, ids(0), ids(), {"queue_full": 1}, 0, (1, 1)),
    (SPOILED, ids(1), {DAMAGED}, {}, 1, (0, 1)),  # the log says nothing
]


@pytest.mark.parametrize("row, missing, letters, dropped, discarded, expected", CASES)
def test_what_is_lost_and_what_is_told(
    row: Row,
    missing: set[Id],
    letters: set[Id],
    dropped: dict[str, int],
    discarded: int,
    expected: tuple[int, int],
) -> None:
    wanted = ids(*range(10))
    rig, operator = rig_of(row, wanted - missing, Books(letters, dropped, []))
    rig.discarded = discarded
    rig.close_books(wanted, once)
    assert (len(missing - rig.accounted), len(rig.notes)) == expected
    assert operator is rig.operator


def test_what_is_still_queued_is_told() -> None:
    rig, _ = rig_of(PLAIN, ids(0), Books(set(), {}, ["queues 'out': messages 1"]))
    rig.close_books(ids(0), once)
    assert rig.notes == ["still queued: queues 'out': messages 1"]


def rig_of(row: Row, heard: set[Id], books: Books) -> tuple[Rig, Operator]:
    """A rig of which nothing runs."""
    nothing: Any = SimpleNamespace(heard=heard, log="")
    operator = cast(Operator, books)
    path = Path()
    history: Any = None
    rig = Rig(row, "", nothing, history, [], nothing, nothing, nothing, nothing, operator, path, path)
    return rig, operator


def once(condition: Callable[[], bool]) -> bool:
    return condition()


def test_replicas_have_common_letters_and_count_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "one": Books(ids(1, 2), {"offline": 1}, []),
        "two": Books(ids(2), {"offline": 2, "expired": 1}, ["sessions 'c': waiting 1"]),
    }
    monkeypatch.setattr(gateway_operator, "Operator", lambda replica: said[replica])
    records = ReplicaOperator(cast(Any, ["one", "two"]), lambda: ["queue"])
    assert set(records.letters().elements()) == ids(1, 2)
    assert records.letters().total() == 2
    assert records.dropped() == {"offline": 3, "expired": 1}
    assert records.queued() == ["sessions 'c': waiting 1"]
    said["two"] = Books(set(), {}, [])
    assert ReplicaOperator(cast(Any, ["one", "two"]), lambda: ["queue"]).queued() == ["queue"]


def test_letters_are_known_by_their_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"route": ROUTE, "reason": "no_route", "body": body_of(Id("s", "a", 1)).decode()},
        {"route": "", "reason": "no_taker", "body": "17"},
        {"route": "", "reason": "no_taker", "body": body_of(Id("probe", "a", 1)).decode()},
        {"route": "", "reason": "store", "body": ""},
    ]
    operator = Operator(cast(Any, None))
    monkeypatch.setattr(operator, "rows", lambda path: rows)
    assert operator.letters() == {Id("s", "a", 1): 1, DAMAGED: 1}


def test_a_spoiled_row_is_one_that_clients_are_owed(tmp_path: Path) -> None:
    database = tmp_path / "gateway.db"
    whole = bytes(40)
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE logs (id INTEGER PRIMARY KEY, kind TEXT, name TEXT)")
        connection.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, log, count, messages)")
        connection.execute("INSERT INTO logs VALUES (1, 'session', 'chaos-watcher'), (2, 'queue', 'out')")
        connection.executemany("INSERT INTO rows VALUES (?, ?, 3, ?)", [(1, 1, whole), (2, 2, b"")])
    assert spoil(database, Random(1)) == 0
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("INSERT INTO rows VALUES (3, 2, 7, ?)", (whole,))
    assert spoil(database, Random(1)) == 7
    with closing(sqlite3.connect(database)) as connection:
        found = dict(connection.execute("SELECT id, messages FROM rows"))
    assert found[1] == whole
    assert found[2] == b""
    assert [found[3].count(0), found[3][:4]] == [39, bytes(4)]
