"""The dispatcher: a message reaches its own namespace and, through routes, others; refusals find their
source.
"""

from __future__ import annotations

import time

import pytest
import structlog

from gateway.broker.amqp091.virtual_host import VirtualHost
from gateway.broker.dead_letters import DeadLetters
from gateway.broker.dead_letters.redrive import Redriving
from gateway.broker.dispatcher import Dispatcher, log_reply_kept
from gateway.broker.mqtt.session import SubscriptionOptions
from gateway.broker.routing import AnswerEntry, Namespace, RoutingEntry
from gateway.mapping import parse
from gateway.mapping.router import Router
from gateway.mapping.routes import Route
from gateway.model.address import Address
from gateway.model.batch import Batch, SubBatch
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.properties import Properties, property_set
from gateway.model.times import Monotonic
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqpfast.dialect import AMQPFAST
from gateway.protocols.mqtt.dialect import topic_address
from tests.broker.parts import Answers, Space, amqp, connected, mqtt, newest

ENDPOINTS = {"mqtt": "mqtt", "amqp": "amqp091", "erp": "amqp091"}
UP = "{name: up, from: {endpoint: mqtt, topic: '{all...}'}, to: {endpoint: amqp, exchange: amq.topic,"
UP += " routing_key: '{all...}'%s}%s}"
DOWN = "{name: down, from: {endpoint: amqp, exchange: amq.topic, binding_key: '{all...}'},"
DOWN += " to: {endpoint: mqtt, topic: '{all...}'}}"
OUT = "{name: out, from: {endpoint: mqtt, topic: 'out/#'}, to: {endpoint: erp, queue: out}%s}"
FAST = "version: 1\nroutes:\n  - {name: fast, from: {endpoint: mqtt, topic: '{all...}'},"
FAST += " to: {endpoint: fast, destination: q}}"
REFUSED = Outcome(Verdict.REJECTED, Reason.TARGET_REFUSED, "no")


def routes(*rows: str) -> Router:
    text = "version: 1\nroutes:\n" + "".join(f"  - {row}\n" for row in rows)
    return Router([parse(text, "t.yaml")] if rows else [], ENDPOINTS)


class Link:
    """A remote broker: keeps the parts that it is sent."""

    def __init__(self) -> None:
        self.parts: list[SubBatch] = []

    def sinks(self, address: object) -> tuple[Link, ...]:
        return (self,)

    def choose(self, message: Message) -> tuple[Link, ...]:
        raise AssertionError("the address decides")

    @property
    def retained(self) -> None:
        """The remote broker's business."""

    def publish(self, part: SubBatch) -> None:
        self.parts.append(part)


class Bench:
    """Two namespaces and a link joined by routes."""

    def __init__(self, *rows: str) -> None:
        self.letters = DeadLetters()
        self.dispatcher = Dispatcher(routes(*rows), self.letters)
        self.space = Space()
        self.host = VirtualHost("/", self.dispatcher.invalidate)
        self.link = Link()
        self.dispatcher.namespaces = {"mqtt": self.space, "amqp": self.host, "erp": self.link}

    def queue(self, name: str, key: str = "#", exchange: str = "amq.topic") -> None:
        made = self.host.declare_queue(
            name, self, durable=False, exclusive=False, auto_delete=False, arguments=()
        )
        self.host.bind(exchange, made, key, ())

    def publish(self, endpoint: str, *messages: Message) -> tuple[Answers, list[bool]]:
        source = Answers()
        batch = self.dispatcher.batch(source, Monotonic(0.0))
        placed = []
        for number, message in enumerate(messages):
            entry = self.dispatcher.entry(endpoint, self.dispatcher.namespaces[endpoint], message.address)
            placed.append(self.dispatcher.publish(batch, entry, message, number))
        batch.send()
        return source, placed

    def counts(self, route: str) -> tuple[int, int, int, int]:
        (found,) = [one for one in self.dispatcher.router.routes if one.name == route]
        return found.matched, found.delivered, found.failed, found.in_flight


def test_a_message_fans_out_to_its_own_world_and_across() -> None:
    bench = Bench(UP % (", mandatory: false", ""), DOWN)
    bench.queue("q")
    session = bench.space.session("c", "#")
    outlet = connected(session)
    source, placed = bench.publish("mqtt", mqtt("a/b.c", b"1"))
    assert (source.outcomes, placed) == ([ACCEPTED], [True])
    assert [row.message.address for row in outlet.rows] == [mqtt("a/b.c").address]
    taken = bench.host.queues["q"].take()
    assert taken is not None
    assert taken[1].address == amqp_address("amq.topic", "a.b%2Ec")
    assert taken[1].hops == 1
    assert bench.counts("up") == (1, 1, 0, 0)


def test_what_a_route_delivers_takes_no_further_route() -> None:
    bench = Bench(UP % (", mandatory: false", ""), DOWN)
    outlet = connected(bench.space.session("c", "#"))
    bench.publish("mqtt", mqtt("a"))
    assert len(outlet.rows) == 1


@pytest.mark.parametrize(
    "rows",
    [(), (UP % (", mandatory: false", ""),), (DOWN,)],
    ids=["no route", "a route that need not arrive", "no subscriber of a topic"],
)
def test_what_nothing_takes_is_the_callers_to_answer(rows: tuple[str, ...]) -> None:
    bench = Bench(*rows)
    endpoint, message = ("amqp", amqp(exchange="amq.topic")) if rows == (DOWN,) else ("mqtt", mqtt())
    source, placed = bench.publish(endpoint, message)
    assert (source.told, placed) == ([], [False])


def test_a_mandatory_route_whose_target_has_no_queue_refuses() -> None:
    bench = Bench(UP % ("", ""))
    source, placed = bench.publish("mqtt", mqtt())
    assert placed == [True]
    assert [outcome.reason for outcome in source.outcomes] == [Reason.NO_ROUTE]
    assert bench.counts("up") == (1, 0, 1, 0)


def test_a_mandatory_route_that_dead_letters_accepts_and_keeps_the_message() -> None:
    bench = Bench(UP % ("", ", on_reject: dead_letter"))
    source, _ = bench.publish("mqtt", mqtt(body=b"kept"))
    assert source.outcomes == [ACCEPTED]
    (letter,) = newest(bench.letters)
    assert (letter.message.body, letter.route, letter.outcome.reason) == (b"kept", "up", Reason.NO_ROUTE)


def test_a_key_that_is_too_long_is_refused_alone() -> None:
    bench = Bench(UP % ("", ""))
    bench.queue("q")
    source, _ = bench.publish("mqtt", mqtt("a" * 256), mqtt("a"))
    assert [(receipt, outcome.reason) for receipt, outcome in source.told] == [
        (0, Reason.NAME_INVALID),
        (1, Reason.NONE),
    ]


def test_a_refusal_of_one_target_waits_for_the_others() -> None:
    bench = Bench(OUT % "")
    connected(bench.space.session("c", "#"))
    source, _ = bench.publish("mqtt", mqtt("out/1"))
    assert source.told == []
    assert bench.counts("out") == (1, 0, 0, 1)
    bench.link.parts[0].settle(REFUSED)
    assert source.told == [(0, REFUSED)]
    assert bench.counts("out") == (1, 0, 1, 0)
    assert len(bench.letters) == 0


def test_a_route_that_dead_letters_takes_the_blame_from_the_source() -> None:
    bench = Bench(OUT % ", on_reject: dead_letter")
    source, _ = bench.publish("mqtt", mqtt("out/1"))
    bench.link.parts[0].settle(REFUSED)
    assert source.outcomes == [ACCEPTED]
    assert [letter.route for letter in newest(bench.letters)] == ["out"]


@pytest.mark.parametrize("said, kept", [("", 1), (", on_reject: dead_letter", 1), (", on_reject: retry", 0)])
def test_what_a_link_brought_is_kept_unless_its_broker_shall_be_told(said: str, kept: int) -> None:
    bench = Bench(OUT % said)
    bench.dispatcher.links = {"mqtt", *bench.dispatcher.links}
    source, _ = bench.publish("mqtt", mqtt("out/1"))
    with structlog.testing.capture_logs() as lines:
        bench.link.parts[0].settle(REFUSED)
    assert [(line["event"], line["route"], line["reason"]) for line in lines] == [
        ("message rejected by route target", "out", REFUSED.reason.value)
    ]
    assert len(bench.letters) == kept
    assert source.outcomes == [ACCEPTED if kept else REFUSED]


def test_a_target_that_is_only_down_is_no_dead_letter() -> None:
    bench = Bench(OUT % ", on_reject: dead_letter")
    source, _ = bench.publish("mqtt", mqtt("out/1"))
    bench.link.parts[0].settle(Outcome(Verdict.RELEASED, Reason.TARGET_DOWN))
    assert [outcome.verdict for outcome in source.outcomes] == [Verdict.RELEASED]


def test_messages_of_one_batch_that_take_one_lane_travel_together() -> None:
    bench = Bench(OUT % "")
    bench.publish("mqtt", *[mqtt(f"out/{number}") for number in range(3)])
    (part,) = bench.link.parts
    assert len(part.messages) == 3


def test_a_retained_message_is_retained_across() -> None:
    bench = Bench(DOWN)
    plain = amqp(b"x", "a.b", "amq.topic")
    bench.publish("amqp", Message(plain.address, b"kept", retain=True))
    session = bench.space.session("later")
    bench.space.subscribe(session, "a/b", SubscriptionOptions())
    assert [one.body for one in session.walks["a/b"].next()] == [b"kept"]


def test_new_mappings_and_changed_bindings_make_entries_stale() -> None:
    bench = Bench()
    before = bench.dispatcher.generation
    bench.queue("q")
    assert bench.dispatcher.generation > before
    before = bench.dispatcher.generation
    bench.dispatcher.use(routes(UP % ("", "")))
    assert bench.dispatcher.generation > before
    bench.publish("mqtt", mqtt("a"))
    assert len(bench.host.queues["q"]) == 1


def test_a_route_to_an_endpoint_that_is_not_here_is_passed_over() -> None:
    bench = Bench(OUT % "")
    del bench.dispatcher.namespaces["erp"]
    _, placed = bench.publish("mqtt", mqtt("out/1"))
    assert placed == [False]


IDLE = "{name: idle, from: {endpoint: mqtt, topic: '#'}, to: {endpoint: amqp, exchange: amq.fanout%s}}"


def test_a_route_that_leads_nowhere_is_counted_and_costs_the_others_nothing() -> None:
    bench = Bench(OUT % "", IDLE % ", mandatory: false")
    entry = bench.dispatcher.entry("mqtt", bench.space, mqtt("out/x").address)
    assert entry.plan.only_recipient is not None, "the prepared way is taken"
    source, _ = bench.publish("mqtt", mqtt("out/x"), mqtt("out/x"))
    bench.link.parts[0].accept()
    assert source.outcomes == [ACCEPTED] * 2
    assert [route.matched for route in bench.dispatcher.router.routes] == [2, 2]
    described = mqtt("out/x")
    described.property_set = property_set(Properties(content_type="a/b"))
    bench.publish("mqtt", described)
    assert [route.matched for route in bench.dispatcher.router.routes] == [3, 3]
    far = Message(mqtt("out/x").address, b"x", hops=200)
    refused, _ = bench.publish("mqtt", far)
    assert [outcome.reason for outcome in refused.outcomes] == [Reason.HOPS]


class Asked(Bench):
    """The same with return addresses, and `requesters` of MQTT who wait at any topic but `nowhere`."""

    def __init__(self, *rows: str) -> None:
        super().__init__(*rows)
        text = "version: 1\nroutes:\n" + "".join(f"  - {row}\n" for row in rows)
        domains = {"mqtt": "mqtt", "amqp": "amqp"}
        router = Router([parse(text, "t.yaml")], ENDPOINTS, domains=domains, return_key=b"key")
        self.dispatcher.use(router)
        self.dispatcher.links = {"erp"}
        self.dispatcher.requesters = {
            "mqtt": lambda text: None if text == "nowhere" else topic_address(text),
            "amqp": lambda text: amqp_address("", text),
        }

    def there(self, reply_to: str) -> Address:
        """What this reply address of an MQTT client is in AMQP."""
        (resolved,) = self.dispatcher.router.resolve("mqtt", topic_address("q"))
        crossed = resolved.cross(mqtt("q", properties=property_set(Properties(reply_to=reply_to))))
        assert isinstance(crossed, Message)
        assert crossed.properties.reply_to is not None
        return amqp_address("", crossed.properties.reply_to)

    def lost(self, endpoint: str, address: Address) -> str:
        """Why nobody takes what is published there."""
        namespace = self.dispatcher.namespaces[endpoint]
        entry = self.dispatcher.entry(endpoint, namespace, address)
        assert isinstance(entry, AnswerEntry)
        assert not self.dispatcher.publish(Batch(Answers(), Monotonic(0.0)), entry, Message(address, b"!"), 0)
        return entry.lost


DIRECT = UP % (", mandatory: false", ", answers: direct")


def test_an_answer_goes_to_who_asked_and_to_nobody_else() -> None:
    bench = Asked(DIRECT)
    outlet = connected(bench.space.session("c", "r/x"))
    there = bench.there("r/x")
    source, placed = bench.publish("amqp", Message(there, b"!", retain=True))
    assert (placed, source.outcomes) == ([True], [ACCEPTED])
    assert [(row.message.address.name, row.message.retain) for row in outlet.rows] == [("r/x", False)]
    assert bench.dispatcher.requester_of(there) == ("mqtt", topic_address("r/x"))
    (route,) = bench.dispatcher.router.answers
    assert (route.matched, route.delivered, route.in_flight) == (1, 1, 0)


def test_why_nobody_takes_an_answer() -> None:
    bench = Asked(DIRECT)
    there = bench.there("r/x")
    assert bench.lost("amqp", there) == "gone"
    assert bench.lost("amqp", bench.there("nowhere")) == "gone"
    assert bench.dispatcher.requester_of(bench.there("nowhere")) is None
    assert bench.lost("amqp", amqp_address("", there.name + "x")) == "unknown"
    assert bench.lost("mqtt", topic_address("$gateway/reply/" + there.name[13:])) == "no_route"
    del bench.dispatcher.requesters["mqtt"]
    assert bench.lost("amqp", there) == "gone"
    bench.dispatcher.use(Router([], ENDPOINTS, return_key=b"key"))
    assert bench.lost("amqp", there) == "no_route"


def test_what_a_link_brings_is_no_answer() -> None:
    """Its broker has names of its own; and without a key nothing is one."""
    bench = Asked(DIRECT, OUT % "")
    there = bench.there("r/x")
    for entry in (
        bench.dispatcher.entry("erp", None, there),
        Bench(UP % ("", "")).dispatcher.entry("amqp", None, there),
    ):
        assert type(entry) is RoutingEntry
        assert entry.plan.branches == ()
    asks = mqtt("out/1", properties=property_set(Properties(reply_to="r/x")))
    bench.publish("mqtt", asks)
    (part,) = bench.link.parts
    assert part.messages[0].properties.reply_to == "r/x"


def test_the_log_hears_of_reply_addresses_that_are_kept() -> None:
    bench = Asked(DIRECT)
    bench.queue("q")
    (route,) = bench.dispatcher.router.routes
    route.connect_replies(log_reply_kept, route.returns)
    with structlog.testing.capture_logs() as lines:
        for _ in range(2):
            bench.publish("mqtt", mqtt("q", properties=property_set(Properties(reply_to="r" * 300))))
    assert [(line["event"], line["route"], line["reason"]) for line in lines] == [
        ("reply address not translatable by route, forwarded unchanged", "up", "reply_kept")
    ] * 2


def test_the_way_to_the_end_of_a_route_is_found_once_for_all_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walked: list[str] = []
    end = Dispatcher.end

    def noted(dispatcher: Dispatcher, route: Route) -> Namespace | None:
        walked.append(route.name)
        return end(dispatcher, route)

    monkeypatch.setattr(Dispatcher, "end", noted)
    bench = Bench(UP % (", mandatory: false", ""), DOWN, OUT % "")
    bench.queue("q")
    bench.publish("mqtt", mqtt("out/a"), mqtt("out/b"), mqtt("out/a"))
    assert sorted(walked) == ["out", "up"]
    bench.dispatcher.invalidate()
    bench.publish("mqtt", mqtt("out/a"))
    assert sorted(walked) == ["out", "out", "up", "up"], "something else may be at the end now"


def test_a_run_of_equal_properties_is_examined_once_and_each_message_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    examined: list[Message] = []
    losses = type(AMQPFAST).losses

    def noted(dialect: object, message: Message) -> tuple[str, ...]:
        examined.append(message)
        return losses(AMQPFAST, message)

    monkeypatch.setattr(type(AMQPFAST), "losses", noted)
    dispatcher = Dispatcher(
        Router([parse(FAST, "t.yaml")], {"mqtt": "mqtt", "fast": "amqpfast"}), DeadLetters()
    )
    link = Link()
    dispatcher.namespaces = {"mqtt": Space(), "fast": link}
    address = topic_address("a")
    entry = dispatcher.entry("mqtt", None, address)
    said, other = (property_set(Properties(priority=10 + one)) for one in range(2))
    batch = dispatcher.batch(Answers(), Monotonic(0.0))
    for number, (properties, hops) in enumerate([(said, 0)] * 3 + [(said, 1)] * 2 + [(other, 1), (said, 1)]):
        message = Message(address, b"x", properties, hops=hops)
        assert dispatcher.publish(batch, entry, message, number)
    (route,) = dispatcher.router.routes
    assert [(one.property_set, one.hops) for one in examined] == [(said, 1), (said, 2), (other, 2), (said, 2)]
    assert route.lost == {"priority_range": 7}


def redriven(bench: Bench, route: str, message: Message) -> list[Outcome]:
    """What becomes of a letter that has this message."""
    bench.letters.add([message], route, REFUSED, crossed=True)
    told: list[Outcome] = []
    redriving = Redriving(bench.dispatcher, bench.letters)
    redriving.redrive(newest(bench.letters), lambda letter, outcome: told.append(outcome))
    return told


def test_a_letter_whose_message_has_expired_stays_when_it_is_redriven() -> None:
    """The queue would accept and drop it at once, and the letter would be deleted."""
    bench = Bench(UP % ("", ""))
    bench.queue("q")
    (outcome,) = redriven(bench, "up", amqp(b"x", "a", "amq.topic", expires=time.time() - 5))
    assert (outcome.verdict, outcome.reason) == (Verdict.REJECTED, Reason.EXPIRED)
    assert len(newest(bench.letters)) == 1
    assert redriven(Bench(UP % ("", "")), "up", amqp(b"x", "a", "amq.topic"))[0].reason is Reason.NO_ROUTE


def test_a_retained_letter_is_redriven_to_a_topic_without_subscribers() -> None:
    bench = Bench(DOWN)
    assert redriven(bench, "down", mqtt("t/x", b"last", retain=True)) == [ACCEPTED]
    assert ("t/x" in bench.space.retained, newest(bench.letters)) == (True, [])


def test_what_a_cluster_confirms_is_not_there_in_the_wake_up() -> None:
    """A transaction then writes its acknowledgements only after all targets have accepted."""
    down = DOWN[:-1] + ", deduplicate: {window: 1h}}"
    bench = Bench(UP % ("", ""), down, OUT % ", settle: stored")
    dispatcher, (up, through, out) = bench.dispatcher, bench.dispatcher.router.routes
    assert [dispatcher.delivers_locally(route) for route in (up, through, out)] == [True, True, True]
    dispatcher.deduplication.is_shared = True
    dispatcher.shared_outboxes.add("erp")
    assert [dispatcher.delivers_locally(route) for route in (up, through, out)] == [True, False, False]
    dispatcher.deduplication.is_shared = False
    bench.space.confirms_later = True  # type: ignore[attr-defined] # as the topics of replicas
    dispatcher.add_endpoint("mqtt", bench.space)
    assert [dispatcher.delivers_locally(route) for route in (up, through, out)] == [True, False, False]
