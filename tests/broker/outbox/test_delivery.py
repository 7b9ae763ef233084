"""Outboxes: accepted when stored, delivered in order within the window, tried again, and kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway import clock
from gateway.broker import storage
from gateway.broker.dispatcher import RouteRecipient
from gateway.broker.outbox.outbox import OUTBOX_REMOVED
from gateway.mapping import parse
from gateway.mapping.router import Router
from gateway.model.message import MESSAGE_BYTES
from gateway.model.outcome import ACCEPTED
from tests.broker.outbox.bench import DOWN, REFUSED, TOO_LARGE, Bench, made, mapping


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.one.store.close()


def test_a_message_is_accepted_when_it_is_on_disk_though_the_link_is_down(bench: Bench) -> None:
    bench.link.up = False
    source = bench.publish(1, 2)
    assert source.told == []
    bench.commit()
    assert source.told == [(1, ACCEPTED), (2, ACCEPTED)]
    assert (bench.state.messages, bench.state.messages_bytes, bench.state.problem) == (
        2,
        2 * (1 + MESSAGE_BYTES),
        "the link is down",
    )
    assert bench.link.parts == []
    bench.link.up = True
    bench.outboxes.link_up("erp")
    assert bench.link.bodies == [1, 2]
    bench.link.settle()
    assert (bench.state.messages, bench.state.problem) == (0, "")
    assert bench.counts() == {"matched": 2, "delivered": 2}


def test_what_is_delivered_before_the_commit_is_never_written(bench: Bench) -> None:
    source = bench.publish(1)
    bench.link.settle()
    bench.commit()
    assert source.outcomes == [ACCEPTED]
    assert bench.one.store.figures.messages == 0


def test_a_transient_message_does_not_wait_for_the_disk(bench: Bench) -> None:
    bench.link.up = False
    assert bench.publish(1, qos=0).outcomes == [ACCEPTED]


def test_the_target_learns_whether_a_route_is_mandatory(bench: Bench) -> None:
    bench.publish(1)
    recipient = bench.link.parts[0].recipient
    assert isinstance(recipient, RouteRecipient)
    assert recipient.mandatory


def test_never_more_than_the_window_is_on_its_way(tmp_path: Path) -> None:
    bench = made(tmp_path, window=10)
    bench.link.up = False
    for start in range(0, 200, 20):
        bench.stored(*range(start, start + 20))
    bench.link.up = True
    bench.outboxes.link_up("erp")
    got: list[int] = []
    while len(got) < 200:
        assert len(bench.link.bodies) == 10
        got += bench.link.bodies
        bench.link.settle()
        bench.until(lambda: bench.link.parts or not bench.state.messages)
    assert got == list(range(200)), "in order, though most of it was on disk alone"
    assert bench.counts() == {"matched": 200, "delivered": 200}
    bench.one.store.close()


def test_large_messages_do_not_fill_memory_with_the_window(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.broker.outbox.outbox.IN_FLIGHT_BYTES_MAX", 4 + 2 * MESSAGE_BYTES)
    bench.link.up = False
    bench.stored(*range(10, 20))
    monkeypatch.setattr("gateway.broker.queue.DISPATCH_MESSAGES_MAX", 1)
    bench.link.up = True
    bench.outboxes.tick()
    assert bench.link.bodies == [10, 11]


def test_what_was_not_settled_is_there_after_a_crash_in_order(bench: Bench) -> None:
    bench.stored(1, 2, 3)
    bench.link.parts[0].settle_at((1,))
    bench.link.up = False
    bench.stored(4)
    bench.restart()
    assert bench.state.messages == 3
    bench.link.up = True
    bench.outboxes.link_up("erp")
    bench.until(lambda: len(bench.link.bodies) == 3)
    assert bench.link.bodies == [1, 3, 4]


def test_an_outbox_of_many_pieces_is_there_after_a_crash_in_order(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the store's thread runs, each piece comes while the one before is put in its place."""
    monkeypatch.setattr(storage, "PIECE_MESSAGES_MAX", 3)
    bench.link.up = False
    for number in range(20):
        bench.stored(number)
    bench.restart()
    assert len(next(iter(bench.outboxes))) == 20
    bench.link.up = True
    bench.outboxes.link_up("erp")
    bench.until(lambda: len(bench.link.bodies) == 20)
    assert bench.link.bodies == list(range(20))


def test_a_released_message_returns_to_its_place_and_the_outbox_waits(bench: Bench) -> None:
    bench.stored(1, 2, 3)
    part = bench.link.parts.pop()
    part.settle_at((1,), DOWN)
    part.settle_at((2,), DOWN)
    bench.publish(4)
    assert bench.link.parts == []
    bench.after(0.4)
    assert bench.link.parts == []
    bench.after(0.2)
    assert bench.link.parts == [], "one is on its way still, and the next goes alone"
    part.settle_at((0,))
    assert part.slots == [0, 1, 2]
    for body in (2, 3, 4):
        assert bench.link.bodies == [body]
        bench.link.settle()
    assert len(bench.letters) == 0
    assert bench.state.messages == 0
    assert bench.counts() == {"matched": 4, "delivered": 4, "retried": 2}


def test_waits_grow_and_a_success_ends_them(bench: Bench) -> None:
    bench.link.at_once = DOWN
    bench.publish(1)
    for wait in (0.5, 1, 2, 4, 8, 16, 30, 30):
        bench.link.parts.clear()
        bench.after(wait - 0.01)
        assert bench.link.parts == []
        bench.after(0.02)
        assert bench.link.bodies == [1]
    bench.link.at_once = None
    bench.link.parts.clear()
    bench.after(31)
    bench.link.settle()
    bench.link.at_once = DOWN
    bench.publish(2)
    bench.link.parts.clear()
    bench.after(0.51)
    assert bench.link.bodies == [2]


def test_a_poison_message_becomes_a_dead_letter_and_blocks_nobody(tmp_path: Path) -> None:
    bench = made(tmp_path, ", attempts_max: 3")
    bench.stored(1, 2, 3)
    part = bench.link.parts.pop()
    part.settle_at((0,), REFUSED)
    part.settle_at((1, 2))
    bench.stored(4)
    assert bench.link.bodies == [4]
    bench.link.settle()
    for wait in (0.6, 1.1):
        assert bench.dead() == []
        bench.after(wait)
        assert bench.link.bodies == [1]
        bench.link.settle(REFUSED)
    bench.commit()
    assert bench.dead() == [(1, "out", "target_refused")]
    assert bench.counts() == {"matched": 4, "delivered": 3, "failed": 1, "retried": 2}
    bench.restart()
    assert bench.outboxes.states()[0].messages == 0
    assert bench.dead() == [(1, "out", "target_refused")]
    bench.one.store.close()


def test_what_expires_before_its_retry_becomes_a_dead_letter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link may send it, and its broker deliver it at once."""
    bench = made(tmp_path, ", attempts_max: 9")
    utc = clock.utc()
    bench.stored(1, expires=utc + 60)
    bench.link.settle(REFUSED)
    monkeypatch.setattr(clock, "utc", lambda: utc + 100)
    bench.after(1)
    assert bench.link.bodies == []
    bench.commit()
    assert bench.dead() == [(1, "out", "expired")]
    assert bench.state.messages == 0
    bench.one.store.close()


def test_a_refusal_that_cannot_change_is_final_at_once(bench: Bench) -> None:
    bench.stored(1)
    bench.link.settle(TOO_LARGE)
    bench.commit()
    assert bench.dead() == [(1, "out", "too_large")]
    assert bench.state.messages == 0


def test_many_refusals_hold_no_more_than_the_window(tmp_path: Path) -> None:
    bench = made(tmp_path, window=5)
    bench.link.at_once = REFUSED
    bench.stored(*range(20))
    assert bench.link.bodies == [0, 1, 2, 3, 4]
    assert (bench.state.messages, bench.state.in_flight) == (20, 0)
    bench.one.store.close()


def test_a_message_that_expires_in_the_outbox_is_a_dead_letter(bench: Bench) -> None:
    bench.link.up = False
    bench.stored(1, expires=1.0)
    bench.stored(2)
    bench.link.up = True
    bench.outboxes.link_up("erp")
    assert bench.link.bodies == [2]
    bench.commit()
    assert bench.dead() == [(1, "out", "expired")]


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    "other, problem",
    [
        (mapping(name="other"), "route 'out' is in no mapping"),
        (mapping(target="crm", settle="confirmed"), "route 'out' is in no mapping"),
    ],
    ids=["renamed", "to another link"],
)
def test_an_outbox_without_its_route_keeps_its_messages_until_it_returns(
    bench: Bench, other: Router, problem: str, restart: bool
) -> None:
    bench.link.up = False
    bench.stored(1, 2)
    bench.link.up = True
    with capture_logs() as lines:
        if restart:
            bench.restart(other)
        else:
            bench.use(other)
        bench.after(60)
    assert [line["messages"] for line in lines if "lost its route" in line["event"]] == [2]
    found = {state.route: state for state in bench.outboxes.states()}
    assert (found["out"].messages, found["out"].problem) == (2, problem)
    assert bench.link.parts == []
    bench.use(mapping())
    bench.until(lambda: bench.link.parts)
    assert bench.link.bodies == [1, 2]


def test_an_outbox_of_a_route_that_now_confirms_is_emptied_and_goes(bench: Bench) -> None:
    bench.link.up = False
    bench.stored(1)
    bench.use(mapping(settle="confirmed"))
    assert bench.publish(2).told == []
    assert bench.link.bodies == [2], "straight to the link"
    bench.link.parts.clear()
    bench.link.up = True
    bench.outboxes.link_up("erp")
    assert bench.link.bodies == [1]
    bench.link.settle()
    bench.after(1)
    assert bench.outboxes.states() == []
    assert bench.one.store.logs() == []


def test_an_empty_outbox_without_a_route_goes(bench: Bench) -> None:
    bench.publish(1)
    bench.link.settle()
    bench.use(mapping(name="other"))
    assert [state.route for state in bench.outboxes.states()] == ["other"]


def test_messages_routed_before_a_reload_are_not_stored_in_an_outbox_that_it_removes(bench: Bench) -> None:
    source, batch = bench.routed(1)
    bench.use(mapping(name="other"))
    batch.send()
    bench.commit()
    assert source.told == [(1, OUTBOX_REMOVED)], "their source routes them again"
    assert bench.dead() == []


def test_messages_are_stored_in_an_outbox_that_a_reload_is_about_to_create(bench: Bench) -> None:
    bench.link.up = False
    router = mapping(name="other")
    bench.dispatcher.use(router)
    assert bench.stored(1).told == [(1, ACCEPTED)]
    bench.outboxes.use(router.routes)
    assert [(state.route, state.messages) for state in bench.outboxes.states()] == [("other", 1)]
    bench.link.up = True
    bench.outboxes.link_up("erp")
    assert bench.link.bodies == [1]


def test_an_outbox_that_is_created_before_a_reload_is_complete_may_be_paused(bench: Bench) -> None:
    bench.outboxes.pause({"other"})
    router = mapping(name="other")
    bench.dispatcher.use(router)
    assert bench.stored(1).told == [(1, ACCEPTED)]
    assert bench.link.bodies == []
    bench.outboxes.use(router.routes)
    assert bench.link.bodies == []
    bench.outboxes.pause(set())
    assert bench.link.bodies == [1]


def test_nothing_is_handed_out_when_the_gateway_leaves(bench: Bench) -> None:
    bench.outboxes.stop()
    bench.stored(1)
    bench.outboxes.tick()
    assert bench.link.parts == []
    bench.use(mapping(name="other"))
    bench.stored(2)
    bench.after(1)
    assert bench.link.parts == [], "nor from an outbox that a reload creates meanwhile"


def leading_to_mqtt() -> Router:
    """The same route when its link has become one to an MQTT broker."""
    text = """
version: 1
routes:
  - {name: out, from: {endpoint: mqtt, topic: "out/#"}, to: {endpoint: erp, topic: "got/x"}, settle: stored}
"""
    return Router([parse(text, "t.yaml")], {"mqtt": "mqtt", "erp": "mqtt"})


@pytest.mark.parametrize("restarted", [True, False])
def test_what_has_an_address_of_another_protocol_is_a_dead_letter(bench: Bench, restarted: bool) -> None:
    bench.link.up = False
    bench.stored(*range(60))  # more than are in memory
    if restarted:
        bench.restart(leading_to_mqtt())
    else:
        bench.use(leading_to_mqtt())
    bench.stored(100)
    bench.link.up, bench.link.at_once = True, None
    bench.after(1.0)
    bench.until(lambda: bench.link.parts)
    messages = [message for part in bench.link.parts for message in part.messages]
    assert [(message.address.protocol, message.body) for message in messages] == [("mqtt", b"100")]
    bench.link.settle()
    assert bench.dead() == [(number, "out", "name_invalid") for number in range(60)]
    assert bench.state.messages == 0
    bench.stored(101)
    assert bench.link.bodies == [101]


def test_what_is_to_be_tried_again_is_looked_at_too(tmp_path: Path) -> None:
    bench = made(tmp_path, ", attempts_max: 9")
    bench.link.at_once = REFUSED
    bench.stored(1)
    bench.link.at_once = None
    bench.link.parts.clear()
    bench.use(leading_to_mqtt())
    bench.after(5.0)
    assert bench.link.parts == []
    assert bench.dead() == [(1, "out", "name_invalid")]
    bench.one.store.close()
