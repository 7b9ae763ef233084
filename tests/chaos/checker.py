"""Who knows every message: what was sent, told to be safe, received, and what that says of the gateway.

Senders and receivers write a history, one record after the other; `judge` is a pure function of it. A message
says in its body which one it is (source, address, number), and the rest of the body follows from that, so
that one which was mangled is known by itself.

Verdicts: *lost* was acknowledged and never came. *Duplicated* came again where it must not. *Reordered* came
for the first time after a later one of its source and address; a message that was refused once is excused,
for its sender sent it again behind others. *Unexpected* was never sent, or came elsewhere, or not as it was.
*Unflagged* came again without the mark of a repeat, although it was sent once, or repeats are recognised.
*Altered* came with other properties than it was sent with, or with a time to live that is longer than it was
or shorter than the time since then explains. *Stuck* was never acknowledged, even after everything had been
mended.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final, NamedTuple

BODY_BYTES: Final = 128
SHOWN_MAX: Final = 8
LIFE_SECS: Final = 200 * 86_400  # time to live of messages that have one: longer than any step of a clock
SHORT_LIFE_SECS: Final = 1  # that of every SHORT_EVERYth message of a row that has such
SHORT_EVERY: Final = 5
LIFE_ERROR_SECS: Final = 3.0  # protocols count whole seconds, and each hop rounds
Interval = tuple[float, float]


class What(Enum):
    """What happened to a message."""

    SENT = "sent"
    ACKED = "acknowledged"
    REFUSED = "refused"
    RECEIVED = "received"


class Id(NamedTuple):
    """A message: the `number`th of its source to its address."""

    source: str
    address: str
    number: int


class Carried(NamedTuple):
    """Properties that a message of the chaos has: those that each protocol can carry."""

    message_id: str | None = None
    content_type: str | None = None
    mark: str | None = None  # header or user property of the name MARK
    life_secs: float | None = None  # time to live that is left


MARK: Final = "chaos"


class Record(NamedTuple):
    """One thing that happened, at a monotonic time. `address` and `repeat` are of what was received: where it
    came, and whether it was marked as redelivered (DUP). `carried` is None where the protocol version has no
    properties."""

    what: What
    id: Id
    at: float
    address: str = ""
    repeat: bool = False
    carried: Carried | None = None


class Verdict(NamedTuple):
    """What a history says; the fields from `lost` on are faults, if there are any in them."""

    sent: int
    acknowledged: int
    received: int
    repeated: int  # receipts that were not the first
    lost: tuple[Id, ...] = ()
    duplicated: tuple[Id, ...] = ()
    reordered: tuple[Id, ...] = ()
    unexpected: tuple[Id, ...] = ()
    unflagged: tuple[Id, ...] = ()
    altered: tuple[Id, ...] = ()
    stuck: tuple[Id, ...] = ()

    @property
    def faults(self) -> dict[str, tuple[Id, ...]]:
        """What is wrong, by the name of the fault; empty when all is well."""
        named = zip(self._fields[4:], self[4:], strict=True)
        return {name: found for name, found in named if isinstance(found, tuple) and found}

    def __str__(self) -> str:
        lines = [
            f"{self.sent} sent, {self.acknowledged} acknowledged, {self.received} received, "
            f"{self.repeated} repeats"
        ]
        for name, found in self.faults.items():
            shown = ", ".join("/".join(map(str, one)) for one in found[:SHOWN_MAX])
            lines.append(f"{name} {len(found)}: {shown}{', ...' if len(found) > SHOWN_MAX else ''}")
        return "\n".join(lines)


class History:
    """What happened, in the order in which it was noted, by any number of threads."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def sent(self, id: Id, carried: Carried | None = None) -> None:
        """It is about to be sent, for the first time or again."""
        self._note(Record(What.SENT, id, time.monotonic(), carried=carried))

    def acked(self, id: Id) -> None:
        """Its sender was told that it is safe."""
        self._note(Record(What.ACKED, id, time.monotonic()))

    def refused(self, id: Id) -> None:
        """Its sender was told that it is not taken."""
        self._note(Record(What.REFUSED, id, time.monotonic()))

    def received(self, id: Id, address: str, repeat: bool, carried: Carried | None = None) -> None:
        """It came, at an address, marked as a repeat or not."""
        self._note(Record(What.RECEIVED, id, time.monotonic(), address, repeat, carried))

    def _note(self, record: Record) -> None:
        self.records.append(record)  # one step, whichever thread it is


def is_short_lived(id: Id) -> bool:
    """Return True if this message soon expires, in a row that has such messages."""
    return id.number % SHORT_EVERY == 0


def carried_by(id: Id, *, expiring: bool = False) -> Carried:
    """Return the properties that a message is sent with: every second one has all of them. With `expiring`
    some live for SHORT_LIFE_SECS."""
    name = "/".join(map(str, id))
    is_short = expiring and is_short_lived(id)
    if id.number % 2 == 0 and not is_short:
        return Carried(name)
    return Carried(name, "text/chaos", str(id.number), float(SHORT_LIFE_SECS if is_short else LIFE_SECS))


def body_of(id: Id, byte_count: int = BODY_BYTES) -> bytes:
    """The body of a message: who it is, and filling that follows from it, at least `byte_count` long."""
    head = f"{id.source}|{id.address}|{id.number}|".encode()
    return head + (b"%d." % id.number) * max(0, (byte_count - len(head)) // (len(str(id.number)) + 1))


def id_of(body: bytes) -> Id | None:
    """Which message a body is of; None when it is of none, or not whole."""
    parts = body.split(b"|", 3)
    if len(parts) != 4 or not parts[2].isdigit():
        return None
    found = Id(parts[0].decode(errors="replace"), parts[1].decode(errors="replace"), int(parts[2]))
    return found if body_of(found, len(body)) == body else None


def stranger(body: bytes) -> Id:
    """The name under which a body is noted that is no message of ours."""
    return Id("stranger", body[:40].decode(errors="replace"), len(body))


def owed(history: Iterable[Record], excused: Sequence[Interval] = ()) -> set[Id]:
    """What must arrive, as far as it is known by now."""
    acked = (record for record in history if record.what is What.ACKED)
    return {record.id for record in acked if not _within(record.at, excused)}


def judge(
    history: Iterable[Record],
    *,
    once: bool = False,
    ordered: bool = True,
    flagged: bool = False,
    deduplicated: bool = False,
    excused: Sequence[Interval] = (),
    clock_error_secs: float = 0.0,
) -> Verdict:
    """What a history says. `once`: nothing may come twice. `ordered`: nothing may be overtaken. `flagged`:
    what was sent once does not come again without a mark; `deduplicated`: nor does what was sent again,
    unless it was refused before, for only repeats of what was accepted are recognised.
    `excused`: what a remote broker acknowledged then, it may lose by itself. `clock_error_secs`: by how much
    clocks were set, which a time to live may be off by when a gateway has restarted.
    """
    sends: Counter[Id] = Counter()
    acked: set[Id] = set()
    refused: set[Id] = set()
    receipts: list[Record] = []
    records = list(history)
    for record in records:
        match record.what:
            case What.SENT:
                sends[record.id] += 1
            case What.ACKED:
                acked.add(record.id)
            case What.REFUSED:
                refused.add(record.id)
            case What.RECEIVED:
                receipts.append(record)
    came = Counter(record.id for record in receipts)
    return Verdict(
        sent=len(sends),
        acknowledged=len(acked),
        received=len(came),
        repeated=came.total() - len(came),
        lost=tuple(sorted(owed(records, excused) - came.keys())),
        duplicated=tuple(id for id, count in came.items() if once and count > 1),
        reordered=tuple(_reordered(receipts, refused)) if ordered else (),
        unexpected=tuple(
            record.id for record in receipts if record.id not in sends or record.address != record.id.address
        ),
        unflagged=tuple(
            id
            for id in _unmarked(receipts)
            if (deduplicated and id not in refused) or (flagged and sends[id] == 1)
        ),
        altered=tuple(_altered(records, clock_error_secs)),
        stuck=tuple(id for id in sends if id not in acked),
    )


def _within(at: float, intervals: Sequence[Interval]) -> bool:
    return any(begin <= at <= end for begin, end in intervals)


def _reordered(receipts: Sequence[Record], refused: set[Id]) -> Iterable[Id]:
    """Messages that came first when a later one of their stream had come."""
    highest: dict[tuple[str, str], int] = {}
    seen: set[Id] = set()
    for record in receipts:
        id = record.id
        if id in seen:
            continue
        seen.add(id)
        if id in refused:
            continue
        stream = id[:2]
        if id.number < highest.get(stream, -1):
            yield id
        else:
            highest[stream] = id.number


def _altered(records: Sequence[Record], clock_error_secs: float) -> Iterable[Id]:
    """Messages that came with other properties than they were sent with, as far as both ends carry them."""
    sent: dict[Id, Record] = {}
    found: dict[Id, None] = {}
    for record in records:
        if record.what is What.SENT:
            sent.setdefault(record.id, record)
        elif record.what is What.RECEIVED and record.carried is not None and record.id in sent:
            first = sent[record.id]
            if first.carried is None:
                continue
            if not carries(record.carried, first.carried, record.at - first.at, clock_error_secs):
                found[record.id] = None
    return found


def carries(found: Carried, sent: Carried, passed: float, clock_error_secs: float) -> bool:
    """Return True if a message has the properties that it was sent with, `passed` seconds ago."""
    error_secs = LIFE_ERROR_SECS + clock_error_secs
    return found[:-1] == sent[:-1] and _lives(sent.life_secs, found.life_secs, passed, error_secs)


def _lives(sent: float | None, left: float | None, passed: float, error_secs: float) -> bool:
    """Return True if the rest of a time to live fits the time that has passed; all are in seconds."""
    if sent is None or left is None:
        return sent is left
    return sent - passed - error_secs <= left <= sent + error_secs


def _unmarked(receipts: Sequence[Record]) -> Iterable[Id]:
    """Messages that came again without the mark of a repeat."""
    seen: set[Id] = set()
    for record in receipts:
        if record.id in seen and not record.repeat:
            yield record.id
        seen.add(record.id)
