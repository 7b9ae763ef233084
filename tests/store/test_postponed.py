"""Settlements of delivered messages wait for the commit of something else, for a limited time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.store.index import Log
from gateway.store.store import POSTPONE_SECS, POSTPONED_MAX
from tests.store.parts import Opened, content, numbered, opened


class PostponingStore(Opened):
    """A store whose timers the test fires, and a log with ten stored messages."""

    def __init__(self, folder: Path) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []
        super().__init__(folder)
        self.store._call_later = lambda secs, call: self.timers.append((secs, call))
        self.log: Log = self.store.log("queue", "q")
        self.append(self.log, 0, *numbered(0, 10))

    @property
    def is_handed_over(self) -> bool:
        return not self.store._calls


@pytest.fixture
def one(tmp_path: Path) -> PostponingStore:
    return PostponingStore(tmp_path)


def rest(one: PostponingStore) -> list[int]:
    """Positions on disk after a restart."""
    folder = one.store.folder
    one.store.close()
    again = opened(folder)
    try:
        return [position for position, _ in content(again, again.log("queue", "q"))]
    finally:
        again.close()


def test_a_settlement_shares_the_next_commit(one: PostponingStore) -> None:
    commits = one.store.figures.commits
    one.store.settle_delivered(one.log, (0,))
    one.store.flush()
    assert not one.is_handed_over
    one.append(one.log, 10, b"10")
    assert one.store.figures.commits == commits + 1
    assert rest(one) == list(range(1, 11))


def test_a_settlement_alone_is_written_after_a_while(one: PostponingStore) -> None:
    commits = one.store.figures.commits
    one.store.settle_delivered(one.log, (0,))
    one.store.flush()
    one.store.settle_delivered(one.log, (1,))
    one.store.flush()
    [(secs, call)] = one.timers  # one timer for both
    assert secs == POSTPONE_SECS
    call()
    assert one.is_handed_over
    one.commit()
    assert one.store.figures.commits == commits + 1
    one.store.settle_delivered(one.log, (2,))
    one.store.flush()
    assert len(one.timers) == 2
    assert rest(one) == list(range(3, 10))


@pytest.mark.parametrize(
    "more",
    [
        lambda one: one.store.settle(one.log, (1,)),
        lambda one: one.store.settle_beside(one.log, (1,)),
        lambda one: one.store.put("kind", "key", b"value"),
        lambda one: one.store.after_settled(lambda: None),
        lambda one: one.store.after_commit(lambda outcome: None),
        lambda one: one.store.read_from(one.log, 0, lambda found: None, messages_max=1, bytes_max=1),
        lambda one: one.store.drop(one.log),
        lambda one: one.store.delete_letters(),
    ],
)
def test_nothing_else_is_postponed(one: PostponingStore, more: Callable[[PostponingStore], None]) -> None:
    one.store.settle_delivered(one.log, (0,))
    one.store.flush()
    more(one)
    one.store.flush()
    assert one.is_handed_over
    one.store.close()


def test_many_settlements_are_not_postponed(one: PostponingStore) -> None:
    for _ in range(POSTPONED_MAX):
        one.store.settle_delivered(one.log, (0,))
    one.store.flush()
    assert not one.is_handed_over
    one.store.settle_delivered(one.log, (1,))
    one.store.flush()
    assert one.is_handed_over
    one.timers[0][1]()  # finds nothing to do
    assert rest(one) == list(range(2, 10))


def test_closing_writes_what_was_postponed(one: PostponingStore) -> None:
    one.store.settle_delivered(one.log, (0, 1))
    one.store.flush()
    assert rest(one) == list(range(2, 10))
