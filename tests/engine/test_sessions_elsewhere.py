"""Usage of users by sessions at other replicas: what a query finds meanwhile does not count twice."""

from __future__ import annotations

from gateway.engine.sessions_elsewhere import IGNORED_MAX, SessionsElsewhere
from gateway.model.times import Monotonic
from gateway.state.interface import UserSessions, Weight

ONE = UserSessions(1, 2, 30)
WEIGHT = Weight(2, 30)
NOW = Monotonic(1.0)


def test_a_session_that_leaves_during_a_query_counts_once() -> None:
    elsewhere = SessionsElsewhere()
    elsewhere.begin_leaving("a", WEIGHT)
    elsewhere.begin(NOW)
    assert elsewhere.end({"a": ONE, "b": ONE})  # the database had stored it already
    elsewhere.end_leaving("a", WEIGHT, WEIGHT)
    assert (elsewhere.of("a"), elsewhere.of("b"), elsewhere.subscriptions) == (ONE, ONE, 4)
    elsewhere.begin(NOW)
    assert not elsewhere.end({"a": ONE})
    assert (elsewhere.of("a"), elsewhere.of("b"), elsewhere.subscriptions) == (ONE, UserSessions(), 2)


def test_a_session_that_changes_after_the_query_has_begun_counts_once() -> None:
    elsewhere = SessionsElsewhere()
    elsewhere.begin(NOW)
    elsewhere.begin_leaving("a", WEIGHT)
    elsewhere.end_leaving("a", WEIGHT, WEIGHT)
    assert elsewhere.end({"a": ONE})
    assert elsewhere.of("a") == ONE
    elsewhere.begin(NOW)
    elsewhere.change("a", WEIGHT, -1)
    assert elsewhere.end({})
    assert (elsewhere.of("a"), elsewhere.subscriptions) == (UserSessions(), 0)


def test_a_user_whose_sessions_always_change_is_counted_at_last() -> None:
    elsewhere = SessionsElsewhere()
    for _ in range(IGNORED_MAX):
        elsewhere.begin(NOW)
        elsewhere.change("a", WEIGHT, 1)
        elsewhere.change("a", WEIGHT, -1)
        assert elsewhere.end({"a": ONE})
        assert elsewhere.of("a") == UserSessions()
    elsewhere.begin(NOW)
    elsewhere.change("a", WEIGHT, 1)
    assert not elsewhere.end({"a": ONE})
    assert elsewhere.of("a") == UserSessions(2, 4, 60)
