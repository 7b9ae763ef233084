"""Sessions: what is owed, how much may be in flight, and what a returning client gets again."""

from __future__ import annotations

import time

import pytest

from gateway import clock
from gateway.broker.mqtt.session import ROWS_BYTES_MAX, ROWS_MAX, Grant, SessionLimits, SubscriptionOptions
from gateway.model.message import Message, Sender
from gateway.protocols.mqtt.dialect import topic_address
from tests.broker.parts import Answers, Space, connected, mqtt, publish


def several(count: int, qos: int = 1) -> list[Message]:
    return [mqtt(body=str(number).encode(), qos=qos) for number in range(count)]


@pytest.mark.parametrize("published, granted, said", [(0, 2, 0), (1, 2, 1), (2, 1, 1), (2, 2, 2), (2, 0, 0)])
def test_the_lower_quality_of_service_wins(published: int, granted: int, said: int) -> None:
    space = Space()
    session = space.session("c", "a/+", qos=granted)
    outlet = connected(session)
    space.give(mqtt(qos=published))
    (row,) = outlet.rows
    assert (row.qos, bool(row.packet_id)) == (said, said > 0)


def test_no_more_is_in_flight_than_the_client_takes() -> None:
    space = Space()
    session = space.session("c", "#")
    outlet = connected(session, receive_maximum=2)
    space.give(*several(5))
    assert [body for body, *_ in outlet.said] == [b"0", b"1"]
    assert (len(session), session.credit) == (3, 0)
    assert session.complete_delivery(1)
    assert not session.complete_delivery(1)
    session.pump()
    assert [body for body, *_ in outlet.said] == [b"0", b"1", b"2"]


def test_quality_0_needs_no_credit_but_keeps_its_place() -> None:
    space = Space()
    session = space.session("c", "#")
    outlet = connected(session, receive_maximum=1)
    space.give(mqtt(body=b"1"), mqtt(body=b"2"), mqtt(body=b"0", qos=0))
    assert [body for body, *_ in outlet.said] == [b"1"]
    session.complete_delivery(1)
    session.pump()
    session.complete_delivery(2)
    session.pump()
    assert [body for body, *_ in outlet.said] == [b"1", b"2", b"0"]


def test_a_returning_client_gets_again_what_it_did_not_acknowledge_first_and_in_order() -> None:
    space = Space()
    session = space.session("c", "#", qos=2)
    connected(session)
    space.give(mqtt(body=b"1"), mqtt(body=b"2", qos=2), mqtt(body=b"3", qos=2), mqtt(body=b"4"))
    session.complete_delivery(1)
    assert session.handle_pubrec(2)
    session.detach()
    space.give(mqtt(body=b"5"), mqtt(body=b"6", qos=0))
    outlet = connected(session)
    assert outlet.releases == [2]
    assert outlet.said == [(b"3", 2, 3, True), (b"4", 1, 4, True), (b"5", 1, 5, False)]
    assert space.tally.offline == 1


def test_a_returning_client_that_takes_less_than_was_in_flight_is_not_overrun() -> None:
    space = Space()
    session = space.session("c", "#")
    connected(session)
    space.give(*several(5))
    session.detach()
    outlet = connected(session, receive_maximum=2)
    assert outlet.said == [(b"0", 1, 1, True), (b"1", 1, 2, True)]
    for packet_id in range(1, 6):
        session.complete_delivery(packet_id)
        session.pump()
    assert [body for body, *_ in outlet.said] == [b"0", b"1", b"2", b"3", b"4"]
    assert (session.in_flight, session.credit) == ({}, 2)


def test_what_a_client_acknowledges_before_it_is_resent_is_not_resent() -> None:
    space = Space()
    session = space.session("c", "#", qos=2)
    connected(session)
    space.give(*several(2), *several(3, qos=2))
    session.detach()
    outlet = connected(session, receive_maximum=1)
    assert session.complete_delivery(2)
    assert session.handle_pubrec(4)
    session.pump()
    assert [packet_id for *_, packet_id, _ in outlet.said] == [1]
    for packet_id in (1, 4, 3, 5):
        session.complete_delivery(packet_id)
        session.pump()
    assert [packet_id for *_, packet_id, _ in outlet.said] == [1, 3, 5]
    assert (session.in_flight, session.credit) == ({}, 1)


def test_a_client_without_a_lasting_session_is_owed_nothing_while_away() -> None:
    space = Space()
    session = space.session("c", "#", persistent=False)
    space.give(mqtt())
    assert len(session) == 0
    assert space.tally.offline == 1


def test_packet_ids_go_round_and_pass_over_those_in_flight() -> None:
    space = Space()
    session = space.session("c", "#")
    outlet = connected(session, receive_maximum=65_535)
    space.give(mqtt(body=b"stays"))
    session._last_id = 65_534
    space.give(mqtt(), mqtt())
    assert [packet_id for _, _, packet_id, _ in outlet.said] == [1, 65_535, 2]


def test_expired_messages_are_passed_over_however_many_there_are() -> None:
    space = Space()
    session = space.session("c", "#")
    old = time.time() - 1.0
    space.give(*[mqtt(expires=old) for _ in range(2 * ROWS_MAX)], mqtt(body=b"fresh"))
    outlet = connected(session)
    assert [body for body, *_ in outlet.said] == [b"fresh"]
    assert space.tally.expired == 2 * ROWS_MAX


def test_what_is_written_in_one_go_is_bounded() -> None:
    space = Space()
    session = space.session("c", "#")
    space.give(*several(ROWS_MAX + 1), *[mqtt(body=bytes(ROWS_BYTES_MAX)) for _ in range(2)])
    outlet = connected(session, receive_maximum=1_000)
    assert outlet.runs == [ROWS_MAX, 2, 1]


def test_a_congested_connection_is_given_nothing_until_it_drains() -> None:
    space = Space()
    session = space.session("c", "#")
    outlet = connected(session)
    outlet.congested = True
    space.give(*several(3))
    assert outlet.rows == []
    outlet.congested = False
    session.pump()
    assert len(outlet.rows) == 3


def test_what_is_too_large_for_the_client_is_dropped_counted_and_frees_its_credit() -> None:
    space = Space()
    session = space.session("c", "#")
    outlet = connected(session, receive_maximum=1, too_large=1)
    space.give(mqtt(body=b"large"), mqtt(body=b"s"))
    assert [body for body, *_ in outlet.said] == [b"s"]
    assert space.tally.undeliverable == 1
    assert len(session.in_flight) == 1


def test_a_session_of_a_client_that_is_away_is_bounded() -> None:
    space = Space(SessionLimits(messages_max=3))
    session = space.session("c", "#")
    space.give(*several(5))
    assert len(session) == 3
    assert space.tally.queue_full == 2


def test_a_connected_client_that_does_not_keep_up_holds_its_sources() -> None:
    space = Space(SessionLimits(messages_max=4))
    session = space.session("c", "#")
    outlet = connected(session, receive_maximum=1)
    source = space.give(*several(6))
    assert source.held
    assert source.released == 0
    for packet_id in range(1, 6):
        session.complete_delivery(packet_id)
        session.pump()
    assert source.released == len(source.held)
    assert len(outlet.rows) == 6


def test_a_client_that_the_gateway_does_not_read_has_not_stalled() -> None:
    """Its acknowledgements may be on their way; its sources are let go all the same."""
    space = Space(SessionLimits(messages_max=4, stall_secs=10.0))
    session = space.session("c", "#")
    connected(session, receive_maximum=1)
    source = space.give(*several(6))
    assert not session.has_stalled(0.0)
    assert (len(source.held), source.released) == (1, 0)
    read = {5.0: False}
    assert not any(session.has_stalled(now, is_read=read.get(now, True)) for now in (1.0, 5.0, 9.0, 10.0))
    assert source.released == 1
    assert not session.has_stalled(11.0)
    while session.in_flight:
        session.complete_delivery(next(iter(session.in_flight)))
        session.pump()
    again = space.give(*several(6))
    assert (len(again.held), again.released) == (1, 0)
    assert not session.has_stalled(12.0)
    assert [session.has_stalled(now) for now in (21.9, 22.0)] == [False, True]
    session.detach()


def test_a_session_asks_for_ticks_when_its_sources_are_held() -> None:
    """Until then, nobody needs to look whether it has stalled; its time begins when they are held."""
    space = Space(SessionLimits(messages_max=4, stall_secs=10.0))
    session = space.session("c", "#")
    outlet = connected(session, receive_maximum=1)
    space.give(*several(2))
    assert not session.has_stalled(0.0)
    assert not session.has_stalled(1.0)
    assert session.is_at_rest
    space.give(*several(4))
    assert (session.is_at_rest, outlet.ticks_required) == (False, 1)
    assert [session.has_stalled(now) for now in (100.0, 109.9, 110.0)] == [False, False, True]
    session.detach()


def test_sources_are_held_for_a_client_that_goes_on_and_not_for_one_that_stalls() -> None:
    space = Space(SessionLimits(messages_max=4, stall_secs=10.0))
    session = space.session("c", "#")
    connected(session, receive_maximum=1)
    assert not session.has_stalled(0.0)
    source = space.give(*several(6))
    assert not session.has_stalled(1.0)  # it has just taken one
    session.complete_delivery(1)
    session.pump()
    assert [session.has_stalled(now) for now in (10.0, 15.0, 19.9, 20.0)] == [False, False, False, True]
    assert (len(source.held), source.released) == (1, 0)
    session.detach()
    assert source.released == 1
    connected(session, receive_maximum=1)
    again = space.give(*several(6))
    assert not again.held
    assert space.tally.queue_full == 6
    for packet_id in (2, 3):  # half of what it may be owed is left
        session.complete_delivery(packet_id)
        session.pump()
    assert space.give(*several(4)).held


class Taking:
    """A client that takes so many messages a second, and publishers who send twice as many, by a clock of its
    own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, per_sec: int, limits: SessionLimits) -> None:
        self.now = 1_000.0
        monkeypatch.setattr(clock, "monotonic", lambda: self.now)
        self.space = Space(limits)
        self.session = self.space.session("c", "#")
        self.outlet = connected(self.session, receive_maximum=1_000)
        self._per_step = per_sec // 1_000
        self.waited: list[int] = []

    def run(self, millis: int, published: int = 2) -> int:
        """How often publishers were held."""
        held = 0
        for _ in range(millis):
            self.now += 0.001
            source = self.give(published * self._per_step)
            held += len(source.held)
            self.take()
            self.waited.append(len(self.session))
            while source.released < len(source.held) and self.session.in_flight and self.session.pressure:
                self.now += 0.001  # those who are held publish nothing
                self.take()
        return held

    def give(self, count: int) -> Answers:
        """All of them in one batch."""
        source = Answers()
        messages = several(count)
        for sink in self.space.sinks(messages[0].address):
            publish(sink, messages, source)
        return source

    def take(self) -> None:
        for packet_id in list(self.session.in_flight)[: self._per_step]:
            self.session.complete_delivery(packet_id)
        self.session.pump()


@pytest.mark.needs("time")
def test_who_takes_much_is_not_left_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = Taking(monkeypatch, 100_000, SessionLimits(delay_secs=0.02))
    assert fast.run(1_000) > 10
    assert max(fast.waited[500:]) <= 2_000 + 2 * 200
    assert fast.session.pressure or not fast.session.has_stalled(1.0)


def test_who_takes_less_than_the_delay_is_worth_is_left_no_further_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """512 messages are 26 ms of hers, and no more than those wait."""
    steady = Taking(monkeypatch, 20_000, SessionLimits(delay_secs=0.005))
    assert steady.run(500) > 5
    assert max(steady.waited[250:]) <= 512 + 2 * 40


@pytest.mark.needs("time")
def test_without_a_delay_the_session_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = Taking(monkeypatch, 100_000, SessionLimits(delay_secs=0))
    assert fast.run(500) == 0
    assert max(fast.waited) > 40_000


def test_nobody_waits_for_who_takes_little(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Taking(monkeypatch, 5_000, SessionLimits(delay_secs=0.02))
    assert slow.run(1_000) == 0
    assert len(slow.session) == 4_000


@pytest.mark.needs("time")
def test_nobody_waits_early_for_who_takes_nothing_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = Taking(monkeypatch, 100_000, SessionLimits(delay_secs=0.02))
    fast.run(300)
    while not (source := fast.give(200)).held:
        fast.take()
        fast.now += 0.001
    assert not fast.session.has_stalled(0.0)  # it has just taken some
    assert source.released == 0
    fast.now += 1.0
    assert not fast.session.has_stalled(1.0)
    assert source.released == 1
    for _ in range(100):
        fast.now += 0.001
        assert not fast.give(200).held
    assert fast.space.tally.queue_full == 0


@pytest.mark.needs("time")
def test_nobody_waits_for_what_came_while_the_client_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = Taking(monkeypatch, 50_000, SessionLimits(delay_secs=0.02))
    fast.session.detach()
    fast.give(90_000)
    connected(fast.session, receive_maximum=1_000)
    assert fast.run(10, published=1) == 0
    assert len(fast.session) > 80_000


def test_where_the_newest_are_dropped_nobody_is_held() -> None:
    space = Space(SessionLimits(messages_max=4, holds=False))
    session = space.session("c", "#")
    connected(session, receive_maximum=1)
    assert not space.give(*several(7)).held
    assert (len(session), space.tally.queue_full) == (4, 2)
    for packet_id in range(1, 5):
        session.complete_delivery(packet_id)
        session.pump()
    assert not space.give(*several(9)).held


def test_a_subscription_may_pass_over_its_own_messages() -> None:
    space = Space(SessionLimits(listeners=frozenset(("mqtt",))))
    session = space.session("me")
    space.subscribe(session, "#", SubscriptionOptions(1, no_local=True))
    outlet = connected(session)
    mine, namesake = (mqtt(body=name.encode(), sender=Sender(name, "me")) for name in ("mqtt", "link"))
    source = space.give(mine, mqtt(body=b"theirs"), namesake)
    assert [body for body, *_ in outlet.said] == [b"theirs", b"link"]
    assert len(source.told) == 3


def test_overlapping_subscriptions_deliver_once_with_the_best_of_each() -> None:
    space = Space()
    session = space.session("c")
    space.subscribe(session, "a/+", SubscriptionOptions(0, identifier=7))
    space.subscribe(session, "a/#", SubscriptionOptions(2, retain_as_published=True, identifier=3))
    (sink,) = space.sinks(topic_address("a/b"))
    assert isinstance(sink, Grant)
    assert (sink.qos, sink.retain_as_published, sink.identifiers) == (2, True, (3, 7))
    assert sink == space.sinks(topic_address("a/c"))[0]
    assert sink != space.sinks(topic_address("a"))[0]
