"""What topics lead to is looked up again when a subscription that may match them comes or goes."""

from __future__ import annotations

import pytest

from gateway.broker.dead_letters import DeadLetters
from gateway.broker.dispatcher import FILTERS_MAX, Dispatcher
from gateway.broker.mqtt.namespace import MqttNamespace
from gateway.broker.mqtt.session import SubscriptionOptions
from gateway.ingress.mqtt.routing_table import TOPIC_BYTES_MAX, RoutingTable
from gateway.protocols.mqtt.dialect import topic_address
from tests.broker.test_dispatcher import routes

BACK = (
    "{name: back, from: {endpoint: mqtt, topic: 'in/{rest...}'},"
    " to: {endpoint: mqtt, topic: 'out/{rest...}'}}"
)
TOPICS = ("a", "a/b", "a/b/c", "ab", "b", "in/x")


class Bench:
    """RoutingTable of one user over a topic tree."""

    def __init__(self, *rows: str) -> None:
        self.dispatcher = Dispatcher(routes(*rows), DeadLetters())
        self.space = MqttNamespace(self.dispatcher.invalidate_filter)
        self.dispatcher.namespaces = {"mqtt": self.space}
        self.entries = RoutingTable("mqtt", self.dispatcher, self.space, 100)
        self.session, _ = self.space.open("c", clean=True, expiry_secs=0.0)
        for topic in TOPICS:
            self.entries.resolve(topic_address(topic), self.entries.of("u"))

    def kept(self) -> set[str]:
        return {topic.decode() for topic in self.entries.of("u")}

    def subscribe(self, topic_filter: str) -> None:
        self.space.subscribe(self.session, topic_filter, SubscriptionOptions())


@pytest.mark.parametrize(
    "topic_filter, forgotten",
    [
        ("a", {"a"}),
        ("c", set()),
        ("a/#", {"a", "a/b", "a/b/c"}),
        ("a/+", {"a", "a/b", "a/b/c"}),
        ("#", set(TOPICS)),
        ("+/b", set(TOPICS)),
        ("$share/g/b", {"b"}),
    ],
)
def test_only_what_a_filter_may_match_is_forgotten(topic_filter: str, forgotten: set[str]) -> None:
    bench = Bench()
    bench.subscribe(topic_filter)
    assert bench.kept() == set(TOPICS) - forgotten
    for topic in TOPICS:
        bench.entries.resolve(topic_address(topic), bench.entries.of("u"))
    bench.space.unsubscribe(bench.session, topic_filter)
    assert bench.kept() == set(TOPICS) - forgotten


def test_many_filters_forget_what_any_of_them_may_match() -> None:
    bench = Bench()
    for topic_filter in ("a/b/#", "b", "c/+"):
        bench.subscribe(topic_filter)
    assert bench.kept() == {"a", "ab", "in/x"}


def test_a_full_table_forgets_what_came_first() -> None:
    bench = Bench()
    table = bench.entries.of("u")
    for number in range(200):
        bench.entries.resolve(topic_address(f"t/{number}"), table)
        assert len(table) <= 100
    assert {f"t/{number}".encode() for number in range(110, 200)} <= table.keys()
    assert b"t/0" not in table


def test_all_tables_together_have_a_limit() -> None:
    """With {client_id} in a rule each client has its own rights: a user with many clients has many tables."""
    bench = Bench()
    for number in range(1_000):
        bench.entries.resolve(topic_address(str(number)), bench.entries.of("another"))
        assert sum(map(len, bench.entries._tables.values())) <= 100
    assert bench.kept() == set(TOPICS)  # a small table loses nothing to a large one
    assert len(bench.entries.of("another")) > 80


def test_many_small_tables_have_a_limit_too() -> None:
    bench = Bench()
    for client in range(1_000):
        bench.entries.resolve(topic_address("a"), bench.entries.of(client))
        assert sum(map(len, bench.entries._tables.values())) <= 100
    bench.entries.forget()
    for number in range(100):
        bench.entries.resolve(topic_address(str(number)), bench.entries.of("u"))
    assert len(bench.kept()) == 100


def test_when_memory_is_short_connections_hold_no_old_tables() -> None:
    bench = Bench()
    table = bench.entries.of("u")
    bench.entries.forget()
    assert table == {}
    assert bench.entries.of("u") is table


def test_what_a_route_leads_back_is_forgotten_with_any_filter() -> None:
    bench = Bench(BACK)
    bench.subscribe("out/x")
    assert bench.kept() == set(TOPICS) - {"in/x"}


def test_any_other_change_forgets_everything() -> None:
    bench = Bench()
    bench.subscribe("c")
    bench.dispatcher.invalidate()
    assert bench.kept() == set()


def test_so_do_too_many_changes() -> None:
    bench = Bench()
    for number in range(FILTERS_MAX + 1):
        bench.subscribe(f"c/{number}")
    assert bench.kept() == set()


def test_a_long_topic_is_looked_up_and_not_kept() -> None:
    bench = Bench(BACK)
    for topic in ("x" * TOPIC_BYTES_MAX, "y" * (TOPIC_BYTES_MAX + 1), "in/" + "z" * TOPIC_BYTES_MAX):
        entry = bench.entries.resolve(topic_address(topic), bench.entries.of("u"))
        assert entry.address == topic_address(topic)
    assert bench.kept() == {*TOPICS, "x" * TOPIC_BYTES_MAX}


def test_what_is_known_of_routes_back_is_bounded_too() -> None:
    bench = Bench(BACK)
    for number in range(1_000):
        bench.entries.resolve(topic_address(f"in/{number}"), bench.entries.of("u"))
    assert len(bench.entries._through) <= 100
    assert "in/999" in bench.kept()
    bench.subscribe("out/x")
    assert "in/999" not in bench.kept()
