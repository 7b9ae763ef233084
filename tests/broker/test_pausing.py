"""Paused routes: what comes waits in front of their end, in order; nothing is lost, or accepted early."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway import clock
from gateway.broker.core import BrokerCore
from gateway.broker.dead_letters.redrive import Redriving
from gateway.broker.memory import unlimited_memory
from gateway.broker.pauses import EXPIRED, HELD_FULL, HELD_USER_FULL, KIND, PauseGate, Pauses
from gateway.broker.shares import UserQuotas
from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome, Reason
from gateway.model.times import Monotonic
from gateway.protocols.mqtt.dialect import topic_address
from gateway.settings import Limits
from gateway.store.store import Store
from tests.broker.outbox.bench import Bench as OutboxBench
from tests.broker.outbox.bench import Devices, Link, mapping
from tests.broker.parts import SENDER, Answers, amqp, connected, mqtt, newest
from tests.broker.test_dispatcher import DIRECT, DOWN, OUT, REFUSED, UP, Asked, Bench, routes
from tests.configured import make_link
from tests.store.parts import Opened


def paused(*rows: str, name: str = "out") -> Bench:
    bench = Bench(*rows)
    bench.dispatcher.pauses._changed = bench.dispatcher.invalidate
    bench.dispatcher.pauses.pause("route", name)
    return bench


def out(*numbers: int) -> list[Message]:
    return [mqtt("out/x", b"%d" % number) for number in numbers]


def test_what_comes_waits_and_goes_in_its_order() -> None:
    bench = paused(OUT % "")
    first, _ = bench.publish("mqtt", *out(1, 2))
    second, _ = bench.publish("mqtt", *out(3))
    assert (first.told, second.told, bench.link.parts) == ([], [], [])
    assert bench.dispatcher.pauses.waiting_by_route() == {"out": 3}
    bench.dispatcher.pauses.resume("route", "out")
    assert [message.body for part in bench.link.parts for message in part.messages] == [b"1", b"2", b"3"]
    assert first.told == [], "the broker has not confirmed"
    for part in bench.link.parts:
        part.accept()
    assert (first.told, second.told) == ([(0, ACCEPTED), (1, ACCEPTED)], [(0, ACCEPTED)])
    assert bench.counts("out") == (3, 3, 0, 0)
    assert bench.dispatcher.pauses.waiting_by_route() == {}
    bench.link.parts.clear()
    bench.publish("mqtt", *out(4))
    assert bench.link.parts[0].recipient is not None
    assert bench.counts("out") == (4, 3, 0, 1), "it goes straight through again"


def test_what_expires_while_its_route_is_paused_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker, or a queue with a waiting consumer, would deliver it at once."""
    bench = paused(OUT % "")
    utc = clock.utc()
    old, new = (mqtt("out/x", body, expires=utc + secs) for body, secs in ((b"old", 60), (b"new", 600)))
    source, _ = bench.publish("mqtt", old, new)
    monkeypatch.setattr(clock, "utc", lambda: utc + 100)
    bench.dispatcher.pauses.resume("route", "out")
    (part,) = bench.link.parts
    assert [message.body for message in part.messages] == [b"new"]
    part.accept()
    assert source.told == [(0, EXPIRED), (1, ACCEPTED)]
    assert bench.counts("out") == (2, 1, 1, 0)


def test_what_expires_at_a_paused_route_leaves_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its source waits for nothing, and others get its place."""
    bench = paused(OUT % "")
    pauses = bench.dispatcher.pauses
    utc = clock.utc()
    rows = [(b"1", 600), (b"2", 60), (b"3", 0), (b"4", 60)]
    first = [mqtt("out/x", body, expires=secs and utc + secs) for body, secs in rows]
    source, _ = bench.publish("mqtt", *first)
    other, _ = bench.publish("mqtt", mqtt("out/x", b"5", expires=utc + 60))
    pauses.tick()
    assert (source.told, other.told) == ([], [])
    monkeypatch.setattr(clock, "utc", lambda: utc + 100)
    pauses.tick()
    assert (other.told, pauses.waiting_by_route()) == ([(0, EXPIRED)], {"out": 2})
    assert bench.counts("out") == (5, 0, 3, 0)
    pauses.resume("route", "out")
    assert [message.body for part in bench.link.parts for message in part.messages] == [b"1", b"3"]
    for part in bench.link.parts:
        part.accept()
    assert source.told == [(1, EXPIRED), (3, EXPIRED), (0, ACCEPTED), (2, ACCEPTED)]
    assert bench.counts("out") == (5, 2, 3, 0)
    assert pauses.waiting_by_route() == {}


@pytest.mark.parametrize("is_full", [True, False])
def test_a_redriven_letter_that_waits_and_is_refused_again_stays_the_same(is_full: bool) -> None:
    bench = paused(OUT % ", on_reject: dead_letter")
    pauses = bench.dispatcher.pauses
    pauses.resume("route", "out")
    bench.publish("mqtt", *out(1))
    bench.link.parts.pop().settle(REFUSED)
    (letter,) = newest(bench.letters)
    if is_full:
        bench.letters.messages_max = 1
    pauses.pause("route", "out")
    told: list[tuple[str, Outcome]] = []
    Redriving(bench.dispatcher, bench.letters).redrive(
        [letter], lambda name, outcome: told.append((name, outcome))
    )
    assert told == []
    pauses.resume("route", "out")
    again = REFUSED._replace(text="another reason")
    bench.link.parts.pop().settle(again)
    assert told == [(letter.id, again)]
    assert newest(bench.letters) == [letter]


def test_other_routes_and_the_own_world_go_on() -> None:
    bench = paused(OUT % "", UP % (", mandatory: false", ""))
    bench.queue("q")
    outlet = connected(bench.space.session("c", "#"))
    source, _ = bench.publish("mqtt", *out(1))
    assert len(outlet.rows) == 1
    assert len(bench.host.queues["q"]) == 1
    assert source.told == [], "the worst outcome counts, and one is open"
    bench.dispatcher.pauses.resume("route", "out")
    bench.link.parts[0].accept()
    assert source.outcomes == [ACCEPTED]


def test_a_refusal_behind_the_gate_is_told_once() -> None:
    bench = paused(OUT % "")
    source, _ = bench.publish("mqtt", *out(1, 2))
    bench.dispatcher.pauses.resume("route", "out")
    (part,) = bench.link.parts
    part.settle_at((0,), REFUSED)
    part.accept()
    assert [outcome.verdict.name for outcome in source.outcomes] == ["REJECTED", "ACCEPTED"]
    assert bench.counts("out") == (2, 1, 1, 0)
    kept = paused(OUT % ", on_reject: dead_letter")
    source, _ = kept.publish("mqtt", *out(1))
    kept.dispatcher.pauses.resume("route", "out")
    kept.link.parts[0].settle(REFUSED)
    assert source.outcomes == [ACCEPTED]
    assert [letter.route for letter in newest(kept.letters)] == ["out"], "and one letter"


def test_who_is_there_when_it_goes_on_gets_the_message() -> None:
    bench = paused(UP % ("", ""), name="up")
    first, _ = bench.publish("mqtt", mqtt("a/b", b"1"))
    bench.queue("late")
    bench.dispatcher.pauses.resume("route", "up")
    assert (first.outcomes, len(bench.host.queues["late"])) == ([ACCEPTED], 1)
    alone = paused(UP % ("", ""), name="up")
    source, _ = alone.publish("mqtt", mqtt("a/b"))
    alone.dispatcher.pauses.resume("route", "up")
    assert [outcome.reason for outcome in source.outcomes] == [Reason.NO_ROUTE]
    assert alone.counts("up") == (1, 0, 1, 0)


def test_what_is_retained_is_so_when_it_goes_on() -> None:
    bench = paused(DOWN.replace("topic: '{all...}'}", "topic: '{all...}', retain: true}"), name="down")
    bench.queue("q")
    bench.publish("amqp", amqp(b"kept", "a.b", "amq.topic"))
    assert len(bench.space.retained) == 0
    bench.dispatcher.pauses.resume("route", "down")
    assert len(bench.space.retained) == 1


def test_an_answer_goes_home_while_questions_wait() -> None:
    bench = Asked(DIRECT)
    bench.dispatcher.pauses._changed = bench.dispatcher.invalidate
    outlet = connected(bench.space.session("c", "r/x"))
    there = bench.there("r/x")
    bench.dispatcher.pauses.pause("route", "up")
    asked, _ = bench.publish("mqtt", mqtt("ask", b"again?"))
    answered, _ = bench.publish("amqp", Message(there, b"42"))
    assert (asked.told, answered.outcomes) == ([], [ACCEPTED])
    assert [row.message.body for row in outlet.rows] == [b"42"]


def test_what_is_held_is_counted_once_for_each_sender() -> None:
    bench = paused(OUT % "", OUT.replace("name: out", "name: too") % "")
    bench.dispatcher.pauses.pause("route", "too")
    other = Sender("mqtt", "other")
    bench.publish("mqtt", *out(1, 2), mqtt("out/x", b"3", sender=other))
    assert bench.dispatcher.pauses.waiting_by_route() == {"out": 3, "too": 3}
    assert bench.dispatcher.pauses.waiting_by_sender() == {SENDER: 2, other: 1}


@pytest.mark.parametrize("limit", ["HELD_MESSAGES_MAX", "HELD_BYTES_MAX"])
def test_there_is_a_most_that_waits(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    most = {"HELD_MESSAGES_MAX": 3, "HELD_BYTES_MAX": 3 * mqtt("out/x", b"1").byte_count}[limit]
    monkeypatch.setattr(f"gateway.broker.pauses.{limit}", most)
    bench = paused(OUT % "")
    bench.publish("mqtt", *out(1, 2))
    source, _ = bench.publish("mqtt", *out(3, 4, 5))
    assert source.told == [(1, HELD_FULL), (2, HELD_FULL)]
    last, _ = bench.publish("mqtt", *out(6))
    assert last.outcomes == [HELD_FULL]
    assert bench.counts("out") == (6, 0, 3, 0)
    bench.dispatcher.pauses.resume("route", "out")
    assert [message.body for part in bench.link.parts for message in part.messages] == [b"1", b"2", b"3"]
    for part in bench.link.parts:
        part.accept()
    assert source.told[2:] == [(0, ACCEPTED)]


def test_one_user_has_no_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.broker.pauses.HELD_MESSAGES_MAX", 8)
    bench = Bench(OUT % "")
    bench.dispatcher.quotas = UserQuotas(Limits(user_share=0.5))
    pauses = bench.dispatcher.pauses
    pauses._changed = bench.dispatcher.invalidate
    pauses.pause("route", "out")

    def send(*rows: tuple[int, str]) -> list[Outcome]:
        messages = [
            Message(topic_address("out/x"), b"%d" % number, assurance=1, sender=Sender("mqtt", user, user))
            for number, user in rows
        ]
        return bench.publish("mqtt", *messages)[0].outcomes

    assert send(*((number, "greedy") for number in range(3))) == []
    assert send((3, "greedy"), (4, "greedy"), (5, "modest")) == [HELD_USER_FULL]
    assert send((6, "modest"), (7, "greedy")) == [HELD_USER_FULL]
    assert bench.dispatcher.quotas.refusal_counts()["waiting_messages"] == 2
    pauses.resume("route", "out")
    assert [int(message.body) for part in bench.link.parts for message in part.messages] == [0, 1, 2, 3, 5, 6]
    pauses.pause("route", "out")
    assert send((8, "greedy"), (9, "greedy")) == [], "what has gone on no longer counts"


def test_much_that_waited_goes_in_turns_and_before_what_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.broker.pauses.RELEASED_AT_ONCE", 2)
    bench = paused(OUT % "")
    for number in range(5):
        bench.publish("mqtt", *out(number))
    pauses = bench.dispatcher.pauses
    pauses.resume("route", "out")
    bench.publish("mqtt", *out(5))
    assert pauses.waiting_by_route() == {"out": 4}
    pauses.tick()
    pauses.pause("route", "out")
    pauses.tick()
    assert pauses.waiting_by_route() == {"out": 2}, "it was paused again meanwhile"
    pauses.resume("route", "out")
    pauses.tick()
    bodies = [message.body for part in bench.link.parts for message in part.messages]
    assert bodies == [b"%d" % number for number in range(6)]
    assert pauses.gates == {}


def test_a_new_mapping_keeps_the_pause_and_counts_on_the_new_route() -> None:
    bench = paused(OUT % "")
    bench.publish("mqtt", *out(1))
    router = routes(OUT % "")
    bench.dispatcher.use(router)
    bench.dispatcher.pauses.use(router.routes)
    bench.publish("mqtt", *out(2))
    assert bench.link.parts == []
    bench.dispatcher.pauses.resume("route", "out")
    for part in bench.link.parts:
        part.accept()
    assert bench.counts("out")[1] == 2


@pytest.mark.parametrize("more", ["", ", deduplicate: {window: 60s}", ", on_reject: retry"])
def test_what_does_not_fit_a_new_target_is_a_dead_letter(more: str) -> None:
    """The route leads to MQTT after a reload: an address of AMQP is no topic."""
    bench = paused(OUT % more)
    source, _ = bench.publish("mqtt", *out(1, 2))
    router = routes(
        (OUT % more).replace("out/#", "out/{x}").replace("erp, queue: out", "mqtt, topic: 'got/{x}'")
    )
    bench.dispatcher.use(router)
    bench.dispatcher.pauses.use(router.routes)
    outlet = connected(bench.space.session("c", "got/#"))
    bench.publish("mqtt", *out(3))
    bench.dispatcher.pauses.resume("route", "out")
    assert bench.link.parts == []
    assert [(row.message.address.name, row.message.body) for row in outlet.rows] == [("got/x", b"3")]
    kept = [(one.message.body, one.route, one.crossed, one.outcome.reason) for one in newest(bench.letters)]
    assert kept == [(b"2", "out", True, Reason.NAME_INVALID), (b"1", "out", True, Reason.NAME_INVALID)]
    assert "leads to mqtt now" in newest(bench.letters)[0].outcome.text
    assert source.outcomes == [ACCEPTED, ACCEPTED], "they are safe"
    assert bench.counts("out") == (1, 1, 2, 0)


def test_a_route_that_is_no_more_lets_go_what_it_held() -> None:
    bench = paused(OUT % "")
    source, _ = bench.publish("mqtt", *out(1))
    router = routes()
    bench.dispatcher.use(router)
    bench.dispatcher.pauses.use(router.routes)
    assert [message.body for part in bench.link.parts for message in part.messages] == [b"1"]
    bench.link.parts[0].accept()
    assert source.outcomes == [ACCEPTED]
    assert (bench.dispatcher.pauses.routes, bench.dispatcher.pauses.gates) == (set(), {})


def test_a_route_that_refuses_repeats_waits_behind_its_guard() -> None:
    bench = paused(OUT % ", deduplicate: {window: 60s}")
    bench.publish("mqtt", *out(1))
    assert bench.link.parts == []
    bench.dispatcher.pauses.resume("route", "out")
    assert [message.body for part in bench.link.parts for message in part.messages] == [b"1"]
    bench.link.parts[0].accept()
    assert bench.counts("out") == (1, 1, 0, 0)


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[OutboxBench]:
    made = OutboxBench(tmp_path)
    yield made
    made.one.store.close()


def test_an_outbox_fills_while_its_route_is_paused(outbox: OutboxBench) -> None:
    outbox.outboxes.pause({"out"})
    source = outbox.stored(1, 2)
    assert source.outcomes == [ACCEPTED, ACCEPTED]
    assert (outbox.link.parts, outbox.state.messages, outbox.state.problem) == ([], 2, "the route is paused")
    outbox.after(60.0)
    outbox.use(outbox.dispatcher.router)
    assert outbox.link.parts == []
    outbox.outboxes.pause(set())
    assert outbox.link.bodies == [1, 2]
    assert outbox.state.problem == ""


async def test_what_waits_in_front_of_a_route_that_gets_an_outbox_stays_first(tmp_path: Path) -> None:
    """A reload changes a paused route to `settle: stored`, and its publisher goes on."""
    made: list[BrokerCore] = []
    direct, stored, link = mapping(settle="confirmed"), mapping(), Link()
    links = {"erp": make_link(url="amqp://erp")}

    def create(store: Store) -> None:
        made.append(BrokerCore(store, direct, Limits(), links=links, memory=unlimited_memory()))

    with Opened(tmp_path, before=create) as one:
        (core,) = made
        core.dispatcher.namespaces |= {"mqtt": Devices(), "erp": link}
        core.add_link("erp", links["erp"], link, lambda: True)
        core.use(direct.routes)

        def published(*numbers: int) -> Answers:
            source = Answers()
            batch = core.dispatcher.batch(source, Monotonic(0.0))
            for message in out(*numbers):
                entry = core.dispatcher.entry("mqtt", core.dispatcher.namespaces["mqtt"], message.address)
                assert core.dispatcher.publish(batch, entry, message, message.body)
            batch.send()
            return source

        core.pauses.pause("route", "out")
        first = published(1, 2)
        assert (first.told, core.pauses.waiting_by_route()) == ([], {"out": 2})
        core.dispatcher.use(stored)
        core.use(stored.routes)
        second = published(3)
        assert one.commit() is ACCEPTED
        assert (first.outcomes, second.outcomes) == ([ACCEPTED, ACCEPTED], [ACCEPTED])
        assert (link.parts, core.pauses.waiting_by_route()) == ([], {"out": 0})
        core.pauses.resume("route", "out")
        assert link.bodies == [1, 2, 3]
        link.settle()


def test_pauses_are_there_after_a_restart(tmp_path: Path) -> None:
    found: list[Pauses] = []
    one = Opened(tmp_path, before=lambda store: found.append(Pauses(store)))
    for kind, name in (("route", "up"), ("route", "a/b"), ("link", "erp"), ("link", "gone")):
        found[0].pause(kind, name)
    found[0].resume("link", "gone")
    one.commit()
    one.store.put(KIND, "strange", b"")
    one.commit()
    one.store.close()
    again = Opened(tmp_path, before=lambda store: found.append(Pauses(store)))
    assert (found[1].routes, found[1].links) == ({"up", "a/b"}, {"erp"})
    again.store.close()


def test_a_gate_is_no_place_that_retains() -> None:
    bench = paused(OUT % "")
    bench.publish("mqtt", mqtt("out/x", retain=True))
    (gate,) = bench.dispatcher.pauses.gates.values()
    assert isinstance(gate, PauseGate)
    assert bench.dispatcher.pauses.waiting_by_route() == {"out": 1}
