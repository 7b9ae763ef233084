"""Queues of shared subscriptions that have ended: which of them a replica deletes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest

from gateway import clock
from gateway.broker.mqtt.namespace import SessionShares
from gateway.broker.mqtt.session import SessionLimits, SubscriptionOptions
from gateway.engine.client_session import ClientSession, SessionChange
from gateway.engine.names import names_of
from gateway.engine.namespace import EngineNamespace
from gateway.engine.retained import SharedRetained
from gateway.engine.shares import GRACE_SECS, queue_of
from gateway.model.shares import UserShares
from gateway.model.times import Monotonic
from gateway.state.interface import Owner, SharedFilters
from tests.engine.local_state import LocalDatabase, LocalState
from tests.engine.test_endings import ENGINE
from tests.engine.test_shared_sessions import World

FILTER: Final = "$share/g/t"


class Here:
    """A replica with its clients, which notes the queues that are deleted."""

    def __init__(self, store: LocalState) -> None:
        self.removed: list[str] = []
        self.is_live = True
        self.names = names_of("ended", "amq.topic")
        self.queue = queue_of(self.names.shares, FILTER)
        engine: Any = SimpleNamespace(
            names=self.names,
            settings=ENGINE,
            serve=lambda *_: None,
            share=lambda *_, on: None,
            forget_entries=lambda: None,
            change=lambda _: SessionChange(),
        )
        retained = SharedRetained(store, UserShares("retained"))
        self.space = EngineNamespace(
            engine, store, SessionLimits(), retained, shares=SessionShares(), sessions_max=10
        )
        session = ClientSession("a", SessionLimits(), self.space.tally, engine, Owner("r", 1))
        self.space.sessions["a"] = session
        self.session = session

    def begin(self, shared: object) -> None:
        """A queue with members here is consumed."""

    def touch(self, queue: str) -> None:
        """A queue that is needed does not expire."""

    def remove(self, queue: str) -> None:
        self.removed.append(queue)

    def come_and_go(self) -> None:
        """A client subscribes, and unsubscribes."""
        self.space.subscribe(self.session, FILTER, SubscriptionOptions(1))
        self.space.unsubscribe(self.session, FILTER)

    def sweep(self, store: LocalState) -> None:
        """Run the timer, up to the query for the filters that sessions have."""
        self.space.sweep(cast(Any, self), clock.now())
        assert isinstance(store._waiting[0][0], SharedFilters)


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of the monotonic clock."""
    seconds = [1_000.0]
    monkeypatch.setattr(clock, "now", lambda: Monotonic(seconds[0]))
    return seconds


@pytest.mark.parametrize("late", [False, True])
def test_a_list_that_came_late_ends_nothing(tmp_path: Path, passed: list[float], late: bool) -> None:
    """A session may have subscribed elsewhere whose client is away: only the queue has its messages."""
    local = LocalDatabase(tmp_path)
    store, other = local.store(), World(local, "other")
    here = Here(store)
    here.come_and_go()
    passed[0] += GRACE_SECS
    here.sweep(store)
    hear = store.take()
    if late:
        absent = other.let_in("c")
        absent.change().subscriptions[FILTER] = b"{}"
        other.run()
        other.leave("c")
        other.run()
        passed[0] += 60.0
    hear()
    assert here.removed == ([] if late else [here.queue])
    if late:
        here.sweep(store)
        local.settle()
        assert not here.removed


def test_a_queue_is_deleted_over_the_next_connection(tmp_path: Path, passed: list[float]) -> None:
    """Nothing is deleted over one that was lost while the filters were queried."""
    local = LocalDatabase(tmp_path)
    store = local.store()
    here = Here(store)
    here.come_and_go()
    passed[0] += GRACE_SECS
    here.sweep(store)
    here.is_live = False
    local.settle()
    assert not here.removed
    here.is_live = True
    here.sweep(store)
    local.settle()
    assert here.removed == [here.queue]
