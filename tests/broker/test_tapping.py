"""Messages that are watched: what a tap hears of, how much of it, and that nobody else notices."""

from __future__ import annotations

import pytest
import trio

from gateway.broker import taps
from gateway.broker.taps import Tap
from gateway.model.outcome import ACCEPTED, Reason
from tests.broker.parts import connected, mqtt
from tests.broker.test_dispatcher import OUT, REFUSED, UP, Bench


def bodies(tap: Tap) -> tuple[list[bytes], int]:
    found, skipped = trio.run(tap.fetch, 0.0)
    return [one.message.body for one in found], skipped


def test_a_tap_hears_of_what_has_been_settled_as_it_was_delivered() -> None:
    bench = Bench(OUT % "")
    tap = Tap(route="out")
    bench.dispatcher.taps.add(tap)
    source, _ = bench.publish("mqtt", mqtt("out/x", b"1"), mqtt("out/y", b"2"))
    assert bodies(tap) == ([], 0), "nobody has said what became of them"
    bench.link.parts[0].settle_at((0,))
    bench.link.parts[0].settle(REFUSED)
    found, _ = trio.run(tap.fetch, 0.0)
    assert [(one.message.body, one.message.address.name, one.route) for one in found] == [
        (b"1", "out", "out"),
        (b"2", "out", "out"),
    ]
    assert [one.outcome.reason for one in found] == [Reason.NONE, Reason.TARGET_REFUSED]
    assert len(source.told) == 2
    assert bench.counts("out") == (2, 1, 1, 0)


def test_who_is_not_watched_pays_nothing() -> None:
    bench = Bench(OUT % "", UP % (", mandatory: false", ""))
    bench.queue("q")
    tap = Tap(route="up")
    bench.dispatcher.taps.add(tap)
    bench.publish("mqtt", mqtt("out/x", b"1"))
    watched = {one.route.name: one._recorder is not None for one in bench.dispatcher._recipients.values()}  # type: ignore[attr-defined]
    assert watched == {"out": False, "up": True}
    bench.dispatcher.taps.remove(tap)
    bench.publish("mqtt", mqtt("out/x", b"2"))
    assert all(one._recorder is None for one in bench.dispatcher._recipients.values())
    assert bodies(tap) == ([b"1"], 0)


def test_what_stays_in_its_own_world_is_heard_of_once() -> None:
    bench = Bench()
    for client in ("one", "two", "three"):
        connected(bench.space.session(client, "a/#"))
    everything, other = Tap(), Tap(endpoint="amqp")
    for tap in (everything, other):
        bench.dispatcher.taps.add(tap)
    bench.publish("mqtt", mqtt("a/b", b"1", qos=0), mqtt("a/b", b"2", qos=0))
    assert bodies(everything) == ([b"1", b"2"], 0)
    assert bodies(other) == ([], 0)


def test_names_choose() -> None:
    bench = Bench()
    connected(bench.space.session("c", "#"))
    tap = Tap(name_matches=lambda name: name.startswith("a/"))
    bench.dispatcher.taps.add(tap)
    bench.publish("mqtt", mqtt("b/a", b"1", qos=0), mqtt("a/b", b"2", qos=0))
    assert bodies(tap) == ([b"2"], 0)


def test_of_many_some_are_taken_and_the_others_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 50.0
    monkeypatch.setattr(taps.clock, "now", lambda: now)
    tap = Tap(per_second=4.0)
    many = [mqtt("a", b"%d" % number) for number in range(10)]
    tap.offer("r", "mqtt", many, ACCEPTED)
    assert bodies(tap) == ([b"0", b"1", b"2", b"3"], 6)
    now = 50.5
    tap.offer("r", "mqtt", many, ACCEPTED)
    assert bodies(tap) == ([b"0", b"1"], 8)
    now = 1_000.0
    tap.offer("r", "mqtt", many, ACCEPTED)
    assert bodies(tap) == ([b"0", b"1", b"2", b"3"], 6), "nothing is saved up"
    slow = Tap(per_second=0.5)
    slow.offer("r", "mqtt", many, ACCEPTED)
    assert bodies(slow) == ([b"0"], 9)


@pytest.mark.parametrize("limit", ["KEPT_MAX", "KEPT_BYTES_MAX"])
def test_who_does_not_fetch_holds_no_more_than_so_much(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    one = mqtt("a", b"x")
    monkeypatch.setattr(taps, limit, {"KEPT_MAX": 3, "KEPT_BYTES_MAX": 3 * one.byte_count}[limit])
    tap = Tap(per_second=100.0)
    tap.offer("r", "mqtt", [one] * 10, ACCEPTED)
    assert bodies(tap) == ([b"x"] * 3, 7)
    tap.offer("r", "mqtt", [one], ACCEPTED)
    assert bodies(tap) == ([b"x"], 0)


def test_messages_that_were_reported_occupy_no_more_memory_than_a_tap_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are remembered to report each once, also those that the rate leaves out."""
    one = mqtt("a", b"x")
    monkeypatch.setattr(taps, "KEPT_BYTES_MAX", 3 * one.byte_count)
    tap = Tap(per_second=1.0)
    tap.offer("", "mqtt", [mqtt("a", b"%d" % number) for number in range(10)], ACCEPTED)
    assert len(tap._recent) == 3
    assert bodies(tap) == ([b"0"], 9)


def test_a_tap_that_fails_costs_nobody_anything() -> None:
    bench = Bench(OUT % "")

    def fails(name: str) -> bool:
        raise RuntimeError("not foreseen")

    bench.dispatcher.taps.add(Tap(name_matches=fails))
    source, _ = bench.publish("mqtt", mqtt("out/x"))
    bench.link.parts[0].accept()
    assert source.outcomes == [ACCEPTED]
