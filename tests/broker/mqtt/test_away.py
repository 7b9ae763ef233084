"""Sessions whose client is away: the one to go is the soonest of whoever has most, against a plain search."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.broker.mqtt.disconnected_sessions import SLACK, DisconnectedSessions
from gateway.broker.mqtt.session import Session, SessionLimits, SessionTally

WHO = st.tuples(st.sampled_from(["", "ann", "bob"]), st.sampled_from(["loopback", "192.0.2.7"]))


def session_of(user: str, place: str, expires_at: float) -> Session:
    session = Session("c", SessionLimits(), SessionTally(), user=user, place=place)
    session.expires_at = expires_at
    return session


class AwayModel(RuleBasedStateMachine):
    """Sessions go away and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.away = DisconnectedSessions()
        self.there: list[Session] = []

    @rule(who=WHO, at=st.integers(1, 1_000_000))
    def goes(self, who: tuple[str, str], at: int) -> None:
        session = session_of(*who, at + len(self.there) / 1_000_000)
        self.there.append(session)
        self.away.add(session)

    @rule(which=st.integers(0, 1_000))
    def comes_back(self, which: int) -> None:
        if self.there:
            session = self.there.pop(which % len(self.there))
            self.away.remove(session)
            self.away.remove(session)

    @rule(which=st.integers(0, 1_000), at=st.integers(1, 1_000_000))
    def goes_again(self, which: int, at: int) -> None:
        if self.there:
            session = self.there[which % len(self.there)]
            session.expires_at = at + 0.5 + which / 1_000_000
            self.away.add(session)

    @invariant()
    def the_soonest_of_whoever_has_most(self) -> None:
        assert len(self.away) == len(self.there)
        for user, place in ((None, None), ("ann", None), (None, "192.0.2.7"), ("bob", "loopback")):
            fitting = [one for one in self.there if user in (None, one.user) and place in (None, one.place)]
            found = self.away.session_to_evict(user, place)
            if not fitting:
                assert found is None
                continue
            assert found is not None
            counts = Counter((one.user, one.place) for one in fitting)
            assert counts[found.user, found.place] == max(counts.values())
            same = [one for one in fitting if (one.user, one.place) == (found.user, found.place)]
            assert found.expires_at == min(one.expires_at for one in same)


AwayModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestAway = pytest.mark.needs("time")(AwayModel.TestCase)


def test_one_that_comes_and_goes_fills_no_heap() -> None:
    away = DisconnectedSessions()
    session = session_of("ann", "loopback", 1.0)
    away.add(session_of("ann", "loopback", 2.0))
    for number in range(10_000):
        session.expires_at = float(number)
        away.add(session)
        away.remove(session)
    assert sum(map(len, away._heaps.values())) <= 2 + SLACK + 1
