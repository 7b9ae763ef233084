"""The checker finds each fault that it is there for, and nothing in what is right."""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.chaos.checker import (
    LIFE_SECS,
    Carried,
    History,
    Id,
    Record,
    What,
    body_of,
    carried_by,
    id_of,
    judge,
    stranger,
)

S, A, N, R = What.SENT, What.ACKED, What.REFUSED, What.RECEIVED
Step = tuple[Any, ...]
# Steps are (what, number), with the address and the mark of a repeat where something was received.


def history(steps: list[Step]) -> list[Record]:
    """Records one second apart, of source s at address a."""
    made = []
    for at, (what, number, *more) in enumerate(steps):
        record = Record(what, Id("s", "a", number), float(at), "a" if what is R else "")
        made.append(record._replace(**dict(zip(("address", "repeat"), more, strict=False))))
    return made


def whole(*numbers: int) -> list[Step]:
    """Sent, acknowledged and received, one after the other."""
    return [(what, number) for number in numbers for what in (S, A, R)]


ROWS: Final[list[tuple[str, list[Step], dict[str, Any], dict[str, list[int]]]]] = [
    ("nothing happened", [], {}, {}),
    ("all is well", whole(0, 1, 2), {"once": True, "flagged": True}, {}),
    ("received before it was acknowledged", [(S, 0), (R, 0), (A, 0)], {}, {}),
    ("acknowledged and gone", [*whole(0), (S, 1), (A, 1)], {}, {"lost": [1]}),
    ("lost, but in a moment that is excused", [(S, 1), (A, 1)], {"excused": [(0.5, 1.5)]}, {}),
    ("lost outside of it", [(S, 1), (A, 1)], {"excused": [(1.5, 9.0), (0.0, 0.5)]}, {"lost": [1]}),
    ("never acknowledged", [(S, 0), (R, 0), *whole(1)], {}, {"stuck": [0]}),
    ("never acknowledged nor received", [(S, 0)], {}, {"stuck": [0]}),
    ("refused for good", [(S, 0), (N, 0)], {}, {"stuck": [0]}),
    ("twice, which may be", [*whole(0), (R, 0)], {}, {}),
    ("twice, which must not be", [*whole(0, 1), (R, 0, "a", True)], {"once": True}, {"duplicated": [0]}),
    ("a repeat without a mark", [*whole(0), (R, 0)], {"flagged": True}, {"unflagged": [0]}),
    ("a repeat with a mark", [*whole(0), (R, 0, "a", True)], {"flagged": True}, {}),
    ("a repeat of its sender's", [(S, 0), *whole(0), (R, 0)], {"flagged": True}, {}),
    ("a repeat of its sender's, which is known", [(S, 0), *whole(0), (R, 0)], {"deduplicated": True},
     {"unflagged": [0]}),
    ("refused, though it came, and sent again", [(S, 0), (R, 0), (N, 0), *whole(0)],
     {"deduplicated": True, "flagged": True}, {}),
    ("a repeat with a mark, though repeats are known", [(S, 0), *whole(0), (R, 0, "a", True)],
     {"deduplicated": True}, {}),
    ("the first may be marked", [(S, 0), (A, 0), (R, 0, "a", True)], {"flagged": True, "once": True}, {}),
    ("overtaken", [(S, 0), (S, 1), (A, 0), (A, 1), (R, 1), (R, 0)], {}, {"reordered": [0]}),
    ("overtaken twice", [*[(x, n) for x in (S, A) for n in range(3)], (R, 2), (R, 1), (R, 0)], {},
     {"reordered": [1, 0]}),
    ("overtaken where that may be", [(S, 0), (S, 1), (A, 0), (A, 1), (R, 1), (R, 0)], {"ordered": False}, {}),
    ("a repeat overtakes nobody", [*whole(0, 1, 2), (R, 0), (R, 1)], {}, {}),
    ("a gap that is filled late", [*whole(0), *[(x, n) for x in (S, A) for n in (1, 2)], (R, 2), (R, 1)], {},
     {"reordered": [1]}),
    ("refused and sent again behind", [(S, 0), (S, 1), (N, 0), *whole(1), *whole(0)], {}, {}),
    ("never sent", [*whole(0), (R, 7)], {}, {"unexpected": [7]}),
    ("somewhere else", [(S, 0), (A, 0), (R, 0, "b")], {}, {"unexpected": [0]}),
    ("everything at once", [(S, 0), (S, 1), (S, 2), (A, 0), (A, 1), (A, 2), (R, 2), (R, 1), (R, 2), (R, 9)],
     {"once": True, "flagged": True},
     {"lost": [0], "reordered": [1], "duplicated": [2], "unflagged": [2], "unexpected": [9]}),
]  # fmt: skip


@pytest.mark.parametrize("name, steps, rules, faults", ROWS, ids=[row[0] for row in ROWS])
def test_a_verdict(name: str, steps: list[Step], rules: dict[str, Any], faults: dict[str, list[int]]) -> None:
    verdict = judge(history(steps), **rules)
    assert {fault: [id.number for id in ids] for fault, ids in verdict.faults.items()} == faults
    for fault, ids in faults.items():
        assert f"{fault} {len(ids)}" in str(verdict)


def test_order_is_a_matter_of_one_source_and_one_address() -> None:
    noted = History()
    ids = [Id(source, address, number) for source in "st" for address in "ab" for number in (1, 0)]
    for id in ids:
        noted.sent(id)
        noted.acked(id)
        noted.received(id, id.address, False)
    assert judge(noted.records).reordered == tuple(id for id in ids if id.number == 0)
    assert judge(noted.records[:3] + noted.records[6:9]).faults == {}  # s/a/1, then s/b/1


def test_counts() -> None:
    verdict = judge(history([*whole(0, 1), (R, 0), (R, 0), (S, 2), (S, 2)]))
    assert verdict[:4] == (3, 2, 2, 2)


ALL: Final = carried_by(Id("s", "a", 1))
BARE: Final = carried_by(Id("s", "a", 2))
PROPERTIES: Final[list[tuple[str, Carried | None, Carried | None, float, bool]]] = [
    ("unchanged", ALL, ALL, 0.0, True),
    ("an hour later, and an hour less", ALL, ALL._replace(life_secs=LIFE_SECS - 3_600.0), 3_600.0, True),
    ("an hour less at once", ALL, ALL._replace(life_secs=LIFE_SECS - 3_600.0), 0.0, False),
    ("longer than it was", ALL, ALL._replace(life_secs=LIFE_SECS + 60.0), 0.0, False),
    ("no life any more", ALL, ALL._replace(life_secs=None), 0.0, False),
    ("a life from nowhere", BARE, BARE._replace(life_secs=9.0), 0.0, False),
    ("another id", ALL, ALL._replace(message_id="s/a/2"), 0.0, False),
    ("no id", ALL, ALL._replace(message_id=None), 0.0, False),
    ("another content type", ALL, ALL._replace(content_type="text/plain"), 0.0, False),
    ("a header twice", ALL, ALL._replace(mark="1,1"), 0.0, False),
    ("sent without properties", None, Carried(), 0.0, True),
    ("received without properties", ALL, None, 0.0, True),
]  # fmt: skip


@pytest.mark.parametrize(
    "name, sent, received, passed, sound", PROPERTIES, ids=[row[0] for row in PROPERTIES]
)
def test_properties(
    name: str, sent: Carried | None, received: Carried | None, passed: float, sound: bool
) -> None:
    id = Id("s", "a", 1)
    records = [
        Record(S, id, 0.0, carried=sent),
        Record(A, id, 0.0),
        Record(R, id, passed, "a", carried=received),
    ]
    assert judge(records).altered == (() if sound else (id,))
    assert judge([*records, records[-1]]).altered == (() if sound else (id,)), "each is named once"


def test_a_life_may_be_off_by_as_much_as_clocks_were_set() -> None:
    id = Id("s", "a", 1)
    longer = ALL._replace(life_secs=LIFE_SECS + 60.0)
    records = [Record(S, id, 0.0, carried=ALL), Record(A, id, 0.0), Record(R, id, 0.0, "a", carried=longer)]
    assert judge(records, clock_error_secs=50.0).altered == (id,)
    assert judge(records, clock_error_secs=60.0).altered == ()


@pytest.mark.parametrize("byte_count", [0, 30, 128, 4_096])
def test_a_body_says_which_message_it_is(byte_count: int) -> None:
    id = Id("mqtt", "a1", 1_234)
    body = body_of(id, byte_count)
    assert id_of(body) == id
    assert byte_count - 6 < len(body) <= max(byte_count, 13)


@pytest.mark.parametrize(
    "mangled",
    [b"", b"x", b"s|a", b"s|a|b|", body_of(Id("s", "a", 12))[:-1], body_of(Id("s", "a", 12)) + b"1",
     body_of(Id("s", "a", 12)).replace(b"12.12", b"12.13", 1), b"\xff" * 50],
)  # fmt: skip
def test_a_mangled_body_is_nobodys(mangled: bytes) -> None:
    assert id_of(mangled) is None
    assert judge([Record(R, stranger(mangled), 0.0)]).faults.keys() == {"unexpected"}
