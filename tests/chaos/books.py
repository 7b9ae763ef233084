"""The books of a row: each message that was accepted was delivered, is a dead letter, or was dropped and
counted, and nothing is queued any more.

A row of one gateway has its own; replicas have common ones, whichever of them counted what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from tests.chaos.checker import Id
from tests.chaos.gateway_operator import Records
from tests.chaos.workers.common import Receiver

DAMAGED: Final = "store damaged"
EXPIRED: Final = frozenset({"expired", "queue_expired"})  # reasons of dropping


class BookedRow(Protocol):
    """What the books need of a row."""

    @property
    def faults(self) -> tuple[str, ...]: ...

    @property
    def discards(self) -> bool: ...

    @property
    def expiring(self) -> bool: ...


class BookedRig(Protocol):
    """What the books need of a rig, and what they note in it."""

    notes: list[str]
    discarded: int
    accounted: set[Id]
    account: str
    receiver: Receiver

    @property
    def row(self) -> BookedRow: ...

    @property
    def log(self) -> str: ...

    def may_expire(self, ids: set[Id]) -> set[Id]: ...


def close_books(
    rig: BookedRig, records: Records, wanted: set[Id], until: Callable[[Callable[[], bool]], bool]
) -> None:
    """Compare what gateways have counted with what arrived of what was accepted.

    Notes what is still queued, and dead letters and dropped messages that nothing in the row explains. What
    did not arrive is `accounted` if it is a dead letter, or dropped and counted.
    """
    row = rig.row
    if not until(lambda: not records.queued()):
        rig.notes += [f"still queued: {line}" for line in records.queued()]
    letters, dropped = records.letters(), records.dropped()
    missing = wanted - rig.receiver.heard
    buried = missing & letters.keys()
    ended = len(missing) - len(buried)
    explained = row.discards or (row.expiring and dropped.keys() <= EXPIRED)
    if (letters or dropped) and not explained:
        rig.notes.append(f"dead letters {dict(letters)}, dropped {dropped}")
    elif ended <= rig.discarded + sum(dropped.values()):
        rig.accounted = missing if row.discards else rig.may_expire(missing)
    if ended and "damage-row" in row.faults and DAMAGED not in rig.log:
        rig.notes.append("messages of a damaged row are lost without a word")
    rig.account = (
        f"{len(wanted)} accepted = {len(wanted) - len(missing)} delivered + {len(buried)} dead letters + "
        f"{ended} ended, of {rig.discarded} that may have been; dropped {dropped}"
    )
