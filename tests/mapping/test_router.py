"""Routes: which ones a message takes, and what arrives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import MappingError, RemoteProtocolError
from gateway.mapping.conditions import plain_headers
from gateway.mapping.loader import parse
from gateway.mapping.patterns import Pattern, covers, parse_tokens
from gateway.mapping.router import Router, Subscriptions, Targets, _widest
from gateway.mapping.routes import (
    FORMS_MAX,
    HOPS_EXCEEDED,
    SENDERS_MAX,
    PlainRoute,
    Route,
    SenderRoute,
)
from gateway.model.address import Address
from gateway.model.message import MESSAGE_BYTES, Message, Sender
from gateway.model.outcome import Reason, Verdict
from gateway.model.properties import (
    NO_PROPERTIES,
    Properties,
    PropertySet,
    Value,
    ValueType,
    property_set,
    string,
)
from gateway.protocols import DIALECTS, show
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqpfast.dialect import fast_address
from gateway.protocols.mqtt.dialect import topic_address
from tests.mapping.rows import ENDPOINTS, crossed, down, mapping, refused, resolved, router, up


@pytest.mark.parametrize(
    "route, endpoint, address, produced",
    [
        (up(), "mqtt", "plant/v1.2/t", "e:plant.v1%2E2.t"),
        (up(), "mqtt", "/a//*", "e:.a..%2A"),
        (up(to="exchange: e, routing_key: '{topic...}'"), "mqtt", "a/b", "e:a.b"),
        (up(to="exchange: e, routing_key: 'x.{all...}.y'"), "mqtt", "a/b", "e:x.a.b.y"),
        (up(topic="'a/{all...}'", to="exchange: e, routing_key: 'x.{all...}.y'"), "mqtt", "a", "e:x.y"),
        (
            up(topic="'{a}/{b}'", to="exchange: e, routing_key: 'dev-{b}.{a}'"),
            "mqtt",
            "1/2.3",
            "e:dev-2%2E3.1",
        ),
        (up(topic="'{a}/{b}'", to="exchange: 'x-{a}', routing_key: '{{{b}}}'"), "mqtt", "1/2", "x-1:{2}"),
        (up(topic="'{a}/+'", to="queue: 'q.{a}'"), "mqtt", "1/2", ":q.1"),
        (up(to="exchange: amq.fanout"), "mqtt", "1/2", "amq.fanout:"),
        (up(to="exchange: e, routing_key: 'from.{endpoint}'"), "mqtt", "1", "e:from.mqtt"),
        (up(", escape: swap"), "mqtt", "v1.2/t", "e:v1/2.t"),
        (up(", escape: keep"), "mqtt", "v1.2/t", "e:v1.2.t"),
        (down(), "amqp", "e:plant.v1%2E2.t", "plant/v1.2/t"),
        (down(), "amqp", "e:a/b.c", "a%2Fb/c"),
        (down(to="topic: '{exchange}/{routing_key}'"), "amqp", "e:a.b", "e/a/b"),
        (down(source="queue: q.1", to="topic: 'q/{queue...}'"), "amqp", ":q.1", "q/q/1"),
        (
            "name: r, from: {endpoint: amqp, exchange: amq.topic}, "
            "to: {endpoint: erp, exchange: '{exchange}', routing_key: '{routing_key}'}",
            "amqp",
            "amq.topic:a%2Eb.*",
            "amq.topic:a%2Eb.*",
        ),
        (
            "name: r, from: {endpoint: fast, service: queue, destination: 'a.{x}'}, "
            "to: {endpoint: mqtt, topic: '{service}/{x}'}",
            "fast",
            "queue:a.b%2Fc",
            "queue/b%2Fc",
        ),
        (
            "name: r, from: {endpoint: mqtt, topic: '{x...}'}, to: {endpoint: fast, destination: '{x...}'}",
            "mqtt",
            "a b/c",
            "topic:a%20b.c",
        ),
    ],
)
def test_targets(route: str, endpoint: str, address: str, produced: str) -> None:
    target = resolved(router(route), endpoint, address).target
    assert target is not None
    assert show(target) == produced


@pytest.mark.parametrize(
    "route, endpoint, address, text",
    [
        (up(), "mqtt", topic_address("k" * 256), "256 bytes"),
        (up(), "mqtt", topic_address("." * 100), "300 bytes"),
        (up(", escape: reject"), "mqtt", topic_address("a.b"), "escape: reject"),
        (down(", escape: keep"), "amqp", amqp_address("e", "a#"), "not a topic name"),
        (down(), "amqp", amqp_address("e", ""), "not a topic name"),
    ],
)
def test_names_that_the_target_cannot_have_are_refused(
    route: str, endpoint: str, address: Address, text: str
) -> None:
    made = router(route)
    outcome = refused(made, endpoint, Message(address, b""))
    assert (outcome.verdict, outcome.reason) == (Verdict.REJECTED, Reason.NAME_INVALID)
    assert text in outcome.text
    assert made.routes[0].failed == 1


def test_a_plain_route_changes_the_address_and_counts_the_hop() -> None:
    made = router(up())
    sender = Sender("mqtt", "c", "u")
    before = Message(topic_address("a/b"), b"body", NO_PROPERTIES, 2, True, True, 12.5, 3, sender)
    after = crossed(made, "mqtt", before)
    assert after.address == amqp_address("e", "a.b")
    kept = ("body", "property_set", "assurance", "durable", "retain", "expires", "sender")
    assert [getattr(after, name) for name in kept] == [getattr(before, name) for name in kept]
    assert (after.hops, before.hops) == (4, 3)
    assert isinstance(resolved(made, "mqtt", "a/b"), PlainRoute)
    assert made.routes[0].matched == 1


@pytest.mark.parametrize("more", ["", ", headers: {a: b}", ", when: qos == 0"])
def test_too_many_hops(more: str) -> None:
    made = router(up(more), hops_max=2)
    assert crossed(made, "mqtt", Message(topic_address("a"), b"", hops=1)).hops == 2
    assert refused(made, "mqtt", Message(topic_address("a"), b"", hops=2)).reason is Reason.HOPS


@pytest.mark.parametrize(
    "more, to, before, after",
    [
        (", delivery: {qos0: persistent}", "queue: q", (0, False), (0, True)),
        (", delivery: {qos0: persistent}", "queue: q", (1, False), (1, False)),
        (", delivery: {qos1: transient, qos2: transient}", "queue: q", (2, True), (2, False)),
        (", delivery: {persistent: 2}", "queue: q", (0, True), (2, True)),
        (", delivery: {persistent: 2}", "queue: q", (0, False), (0, False)),
        (", delivery: {transient: 1}", "queue: q", (0, False), (1, False)),
    ],
)
def test_delivery(more: str, to: str, before: tuple[int, bool], after: tuple[int, bool]) -> None:
    message = crossed(
        router(up(more, to=to)), "mqtt", Message(topic_address("a"), b"", NO_PROPERTIES, *before)
    )
    assert (message.assurance, message.durable) == after


@pytest.mark.parametrize(
    "to, before, after",
    [
        ("topic: t, qos: 1", (0, False), (1, False)),
        ("topic: t, qos: 0", (2, True), (0, True)),
        ("topic: t, retain: true", (0, False), (0, True)),
        ("topic: t, retain: false", (0, True), (0, False)),
        ("topic: t", (1, True), (1, True)),
    ],
)
def test_qos_and_retain_of_the_target(to: str, before: tuple[int, bool], after: tuple[int, bool]) -> None:
    message = Message(amqp_address("e", "k"), b"", assurance=before[0], retain=before[1])
    result = crossed(router(down(to=to)), "amqp", message)
    assert (result.assurance, result.retain) == after


HEADERS = ", headers: {line: '{line} of {topic}', n: 3, f: 1.5, b: true, fixed: '{{x}}'}"


def test_headers_are_set_typed_and_made_once() -> None:
    made = router(up(HEADERS, topic="'{line}/#'", to="queue: q"))
    sent = property_set(
        Properties(content_type="text/plain", headers=(("line", string("forged")), ("own", string("1"))))
    )
    result = crossed(made, "mqtt", Message(topic_address("l.1/x"), b"", sent))
    assert result.properties == Properties(
        content_type="text/plain",
        headers=(
            ("own", string("1")),
            ("line", string("l.1 of l.1/x")),
            ("n", Value(ValueType.INT64, 3)),
            ("f", Value(ValueType.DOUBLE, 1.5)),
            ("b", Value(ValueType.BOOL, True)),
            ("fixed", string("{x}")),
        ),
    )
    again = crossed(made, "mqtt", Message(topic_address("l.1/x"), b"", sent))
    assert again.property_set is result.property_set
    other = crossed(made, "mqtt", Message(topic_address("l2/x"), b"", sent))
    assert plain_headers(other.properties.headers)["line"] == "l2 of l2/x"


def test_a_reloaded_route_of_the_same_name_does_not_find_the_old_headers() -> None:
    sent = property_set(Properties())
    message = Message(topic_address("a"), b"", sent)
    for value in ("one", "two"):
        made = router(up(f", headers: {{h: x, v: '{{endpoint}}', {value}: '{{endpoint}}'}}"))
        assert value in plain_headers(crossed(made, "mqtt", message).properties.headers)


def test_headers_that_join_alike_are_kept_apart() -> None:
    made = router(down(", headers: {a: '{a}', b: '{b}'}", "exchange: e, binding_key: '{a}.{b}'", "topic: t"))
    sent = property_set(Properties())
    for key, value in (("x', 'y.z", "x', 'y"), ("x.y', 'z", "x")):
        result = crossed(made, "amqp", Message(amqp_address("e", key), b"", sent))
        assert plain_headers(result.properties.headers)["a"] == value


def test_forms_are_bounded() -> None:
    made = router(up(", headers: {t: '{topic}'}"))
    sent = property_set(Properties())
    for at in range(FORMS_MAX + 10):
        crossed(made, "mqtt", Message(topic_address(f"t{at}"), b"", sent))
    assert len(sent.forms) <= FORMS_MAX


def malformed() -> PropertySet:
    def decode(raw: bytes) -> Properties:
        raise RemoteProtocolError("malformed property", reason=0x81)

    return PropertySet("mqtt", b"\xff", decode)


def test_malformed_properties_are_refused_where_they_are_needed() -> None:
    message = Message(topic_address("a"), b"", malformed())
    outcome = refused(router(up(", headers: {a: b}")), "mqtt", message)
    assert (outcome.reason, outcome.text) == (Reason.MALFORMED, "malformed property")
    assert crossed(router(up()), "mqtt", message).property_set is message.property_set


def test_message_ids_are_given_to_messages_that_have_none() -> None:
    made = router(up(", headers: {a: b}, message_id: add"))
    found = resolved(made, "mqtt", "a")
    first, second = (found.cross(Message(topic_address("a"), b"")) for _ in range(2))
    named = found.cross(Message(topic_address("a"), b"", property_set(Properties(message_id="own"))))
    assert isinstance(first, Message)
    assert isinstance(second, Message)
    assert isinstance(named, Message)
    assert [one.properties.message_id for one in (first, second, named)] == ["1", "2", "own"]
    assert plain_headers(first.properties.headers) == {"a": "b"}
    assert first.byte_count == len(first.body) + first.property_set.byte_count + MESSAGE_BYTES
    plain = router(up(", message_id: add"))
    outcome = refused(plain, "mqtt", Message(topic_address("a"), b"", malformed()))
    assert (outcome.reason, plain.routes[0].failed) == (Reason.MALFORMED, 1)
    looped = refused(plain, "mqtt", Message(topic_address("a"), b"", hops=plain.hops_max))
    assert looped.reason is Reason.HOPS


def test_a_template_that_names_the_client() -> None:
    made = router(up(", headers: {by: '{user}'}", to="exchange: e, routing_key: 'from.{client_id}'"))
    found = resolved(made, "mqtt", "a")
    assert isinstance(found, SenderRoute)
    assert found.target is None
    for client in ("c.1", "c2", "c.1"):
        result = found.cross(Message(topic_address("a"), b"", sender=Sender("mqtt", client, "ann")))
        assert isinstance(result, Message)
        assert result.address == amqp_address("e", f"from.{client.replace('.', '%2E')}")
        assert plain_headers(result.properties.headers) == {"by": "ann"}
    for at in range(SENDERS_MAX + 10):
        found.for_sender(Sender("mqtt", f"c{at}"))
    assert len(found._cache) <= SENDERS_MAX
    too_long = found.cross(Message(topic_address("a"), b"", sender=Sender("mqtt", "c" * 300)))
    assert not isinstance(too_long, Message)
    assert too_long is not None
    assert too_long.reason is Reason.NAME_INVALID


def test_conditions_of_the_message_and_of_the_address() -> None:
    made = router(
        up(", when: body.t > 1"), up(", when: line == 'l1'", topic="'{line}/#'").replace("up", "line")
    )
    body, line = made.resolve("mqtt", topic_address("l1/x"))
    assert isinstance(line, PlainRoute)
    assert body.cross(Message(topic_address("l1/x"), b'{"t": 2}')) is not None
    assert body.cross(Message(topic_address("l1/x"), b'{"t": 1}')) is None
    assert body.cross(Message(topic_address("l1/x"), b"{}")) is None
    assert body.cross(Message(topic_address("l1/x"), b"\xff")) is None
    route = made.routes[0]
    assert (route.matched, route.unparsable, route.undecided) == (1, 1, 1)
    assert [one.route.name for one in made.resolve("mqtt", topic_address("l2/x"))] == ["up"]


def test_all_matching_routes_in_the_order_of_the_files() -> None:
    first = mapping(up(), down(), file="1.yaml")
    second = mapping(up(topic="a/#", to="queue: q").replace("up", "more"), file="2.yaml")
    made = Router([first, second], ENDPOINTS)
    names = [one.route.name for one in made.resolve("mqtt", topic_address("a/b"))]
    assert names == ["up", "more"]
    assert made.resolve("mqtt", topic_address("$SYS/x")) == ()
    assert made.resolve("nobody", topic_address("a")) == ()


def test_a_route_knows_what_its_deliverer_needs() -> None:
    made = router(up(", settle: stored, on_reject: dead_letter", to="queue: q, mandatory: false"), down())
    one, other = made.routes
    assert (one.source, one.target_endpoint, one.settle, one.on_reject) == (
        "mqtt",
        "amqp",
        "stored",
        "dead_letter",
    )
    assert (one.mandatory, one.file, one.line) == (False, "test.yaml", 3)
    assert (other.mandatory, other.settle, other.on_reject) == (True, "confirmed", None)


def reply_address(made: Router, origin: str, target: str, text: str) -> str | None:
    """That at `target` from which a route leads back to `text` at `origin`; None: no route does."""
    found = (route.invert(text) for route in made.reverses(origin, target))
    return next((there for there in found if there is not None), None)


REPLY = (
    down(source="exchange: '', binding_key: 'mqtt.{caller...}'", to="topic: '{caller...}'"),
    up(topic="'answer/{caller...}'", to="queue: '{caller...}'"),
)


@pytest.mark.parametrize(
    "origin, target, text, there",
    [
        ("mqtt", "amqp", "c.1/r", "mqtt.c%2E1.r"),
        ("amqp", "mqtt", "amq.gen-x/y", "answer/amq/gen-x%2Fy"),
        ("mqtt", "amqp", "k" * 300, None),
        ("mqtt", "amqp", "", None),
        ("mqtt", "erp", "a", None),
    ],
)
def test_reply_addresses(origin: str, target: str, text: str, there: str | None) -> None:
    assert reply_address(router(*REPLY), origin, target, text) == there


@pytest.mark.parametrize(
    "route",
    [
        down(source="exchange: named", to="topic: 'r/{routing_key...}'"),
        down(source="exchange: '', binding_key: 'r.*'", to="topic: r/x"),
        down(source="exchange: '', binding_key: 'r.{a}.{b}'", to="topic: 'r/{a}'"),
        down(source="exchange: '', binding_key: 'r.{a}'", to="topic: 'r/x-{a}'"),
        down(source="exchange: '', binding_key: 'r.{a}'", to="topic: 'r/{a}/{client_id}'"),
        down(source="exchange: '', binding_key: 'r.{a}'", to="topic: 's/{a}'"),
    ],
)
def test_routes_that_cannot_be_reversed(route: str) -> None:
    assert reply_address(router(route), "mqtt", "amqp", "r/x") is None


@pytest.mark.parametrize(
    "route, text, there",
    [
        (down(source="queue: answers", to="topic: r/x"), "r/x", "answers"),
        (down(source="exchange: '', binding_key: 'r.#'", to="topic: '{routing_key...}'"), "r/x", "r.x"),
        (down(source="exchange: '', binding_key: 'r.{a}'", to="topic: '{a}/{a}'"), "x/x", "r.x"),
        (down(source="exchange: '', binding_key: 'r.{a}'", to="topic: '{a}/{a}'"), "x/y", None),
    ],
)
def test_routes_that_can_be_reversed(route: str, text: str, there: str | None) -> None:
    assert reply_address(router(route), "mqtt", "amqp", text) == there


def test_reply_addresses_cross_with_the_message() -> None:
    made = router(*REPLY, up(topic="ask", to="queue: ask").replace("up", "ask"))
    ask = made.routes[2]

    def reply_of(properties: PropertySet) -> str | None:
        found = crossed(made, "mqtt", Message(topic_address("ask"), b"", properties))
        return found.properties.reply_to

    sent = property_set(Properties(reply_to="c/r", correlation=b"1"))
    assert reply_of(sent) == "mqtt.c.r"
    assert (reply_of(property_set(Properties(reply_to="$"))), ask.reply_kept) == ("mqtt.$", 0)
    assert (reply_of(property_set(Properties(reply_to="x" * 255))), ask.reply_kept) == ("x" * 255, 1)
    plain = property_set(Properties(content_type="t"))
    assert crossed(made, "mqtt", Message(topic_address("ask"), b"", plain)).property_set is plain


def test_reply_addresses_of_amqp_fast() -> None:
    made = router(
        "name: a, from: {endpoint: mqtt, topic: '{x...}'}, to: {endpoint: fast, destination: '{x...}'}",
        "name: b, from: {endpoint: fast, destination: '{x...}'}, to: {endpoint: mqtt, topic: '{x...}'}",
    )
    assert reply_address(made, "mqtt", "fast", "r/v1.2") == "r.v1%2E2"
    assert reply_address(made, "fast", "mqtt", "tmp-1.x") == "tmp-1/x"
    result = crossed(made, "mqtt", Message(topic_address("q"), b"", property_set(Properties(reply_to="r/1"))))
    assert (result.address, result.properties.reply_to) == (fast_address("topic", "q"), "r.1")


def test_subscriptions_leave_out_what_others_cover() -> None:
    made = router(
        "name: a, from: {endpoint: plant, topic: 'a/{x}'}, to: {endpoint: mqtt, topic: '{x}'}",
        "name: b, from: {endpoint: plant, topic: 'a/#'}, to: {endpoint: mqtt, topic: b}",
        "name: c, from: {endpoint: plant, topic: 'a/+'}, to: {endpoint: erp, exchange: x}",
        "name: d, from: {endpoint: erp, queue: q}, to: {endpoint: mqtt, topic: d}",
        "name: e, from: {endpoint: erp, exchange: e, binding_key: 'k.#'}, to: {endpoint: mqtt, topic: e}",
        "name: f, from: {endpoint: erp, exchange: f}, to: {endpoint: erp, queue: 'made.{routing_key}'}",
        "name: g, from: {endpoint: fast, destination: 'a.b.{x}'}, to: {endpoint: erp, queue: fixed}",
        "name: h, from: {endpoint: fast, service: queue, destination: a.b}, "
        "to: {endpoint: fast, destination: z}",
        "name: i, from: {endpoint: mqtt, topic: i}, to: {endpoint: erp, exchange: 'x.{topic}'}",
    )
    assert made.subscriptions("plant").bindings == (("", "a/#"),)
    erp = made.subscriptions("erp")
    assert (erp.queues, erp.bindings) == (("q",), (("e", "k.#"), ("f", "#")))
    assert made.subscriptions("fast").prefixes == (("topic", "a.b."), ("queue", "a.b"))
    assert made.targets("erp") == Targets(scopes=("x",), queues=("fixed",))
    assert made.targets("fast") == Targets(names=(("topic", "z"),))
    assert made.subscriptions("hall") == Subscriptions()


def test_one_queue_and_its_exchange_are_told_apart() -> None:
    made = router(
        "name: a, from: {endpoint: erp, queue: q}, to: {endpoint: mqtt, topic: a}",
        "name: b, from: {endpoint: erp, exchange: e}, to: {endpoint: mqtt, topic: b}",
    )
    address = DIALECTS["amqp091"].parse("e:k")
    assert [one.route.name for one in made.resolve("erp", address, "q")] == ["a"]
    assert [one.route.name for one in made.resolve("erp", address)] == ["b"]


def test_an_optional_route_without_its_endpoint_is_left_out() -> None:
    route = "name: o, from: {endpoint: mqtt, topic: a}, to: {endpoint: gone, topic: b}, optional: true"
    made = router(route, up())
    assert [one.name for one in made.routes] == ["up"]
    assert [(one.route, one.endpoint, one.line) for one in made.skipped] == [("o", "gone", 3)]


@pytest.mark.parametrize(
    "route, reason",
    [
        (
            up().replace("endpoint: amqp", "endpoint: ampq"),
            "routes[0].to: unknown endpoint 'ampq'; did you mean 'amqp'?",
        ),
        (
            up().replace("endpoint: mqtt", "endpoint: zzz"),
            "routes[0].from: unknown endpoint 'zzz'; known: amqp, ",
        ),
        (
            up().replace("endpoint: mqtt", "endpoint: erp"),
            "topic belongs to mqtt: write exchange and binding_key, or queue",
        ),
        (up(topic="a/#/b"), "routes[0].from.topic: 'a/#/b'"),
        (up(to="queue: '{lin}'", topic="'{line}'"), "unknown name 'lin'; did you mean 'line'?"),
        (up(to="queue: 'x{all...}'"), "must fill a whole level, between two '.'"),
        (up(to="queue: '{line...}'", topic="'{line}'"), "one level; write it without the dots"),
        (up(to="queue: 'a}'"), "unmatched brace"),
        (up(to="exchange: '{nope}'"), "routes[0].to.exchange: '{nope}': unknown name"),
        (up(to=f"queue: {'q' * 256}"), "routes[0].to.queue: 'qqq"),
        (up(to=f"queue: '{'q' * 256}.{{all...}}'"), "its fixed text has 256 bytes"),
        (down(to="topic: a/+"), "routes[0].to.topic: 'a/+' is not a topic name"),
        (up(", headers: {h: '{nope}'}"), "routes[0].headers.h: '{nope}': unknown name"),
        (up(f", headers: {{h: {2**63}}}"), "routes[0].headers.h: 9223372036854775808 has more than 64 bits"),
        (up(", when: bodi.x"), "routes[0].when: unknown name 'bodi'; did you mean 'body'?"),
        (up(", when: routing_key == 'a'"), "routes[0].when: unknown name 'routing_key'"),
    ],
)
def test_routes_that_are_refused(route: str, reason: str) -> None:
    with pytest.raises(MappingError) as caught:
        router(route)
    assert reason in caught.value.reason
    assert (caught.value.file, caught.value.line) == ("test.yaml", 3)


def test_a_name_is_given_once() -> None:
    with pytest.raises(MappingError, match="is also the name of the route at 1.yaml:3"):
        Router([mapping(up(), file="1.yaml"), mapping(up(), file="2.yaml")], ENDPOINTS)


def test_routes_show_where_they_lead() -> None:
    route: Route = router(up()).routes[0]
    assert repr(route) == "Route('up', 'mqtt' -> 'amqp')"


CERTAIN = [
    ((up(),), True),
    ((up(), down()), True),  # a reply address might have to be translated, but there is none
    ((up(", delivery: {qos0: persistent}"),), True),
    ((up(", headers: {a: b}"),), False),
    ((up(", when: body.t > 1"),), False),
    ((up(", message_id: add"),), False),
    ((up(to="exchange: e, routing_key: 'from.{client_id}'"),), False),
]


@pytest.mark.parametrize("rows, bare", CERTAIN)
def test_whether_a_message_without_properties_is_certain_to_cross(rows: tuple[str, ...], bare: bool) -> None:
    made = router(*rows)
    found = resolved(made, "mqtt", "a")
    assert found.bare_hops_max == (made.hops_max if bare else 0)
    for hops in (0, made.hops_max - 1, made.hops_max):
        message = Message(topic_address("a"), b"", hops=hops)
        crossed = found.cross(message)
        if hops < found.bare_hops_max:
            assert found.will_cross(message)
            assert isinstance(crossed, Message)
            assert crossed.property_set is NO_PROPERTIES
        elif bare:
            assert crossed is HOPS_EXCEEDED


TOKENS = st.lists(st.sampled_from(["a", "b", "*", "#"]), min_size=1, max_size=4).map(".".join)


@given(st.lists(st.tuples(TOKENS, st.sampled_from(["x", "y"])), max_size=12))
def test_the_widest_patterns_cover_all_and_none_another(texts: list[tuple[str, str]]) -> None:
    patterns = [
        Pattern(DIALECTS["amqp091"], parse_tokens(DIALECTS["amqp091"], text), scope) for text, scope in texts
    ]
    kept: list[Pattern] = []  # by comparing all with all
    for one in patterns:
        if not any(covers(other, one) for other in kept):
            kept = [other for other in kept if not covers(one, other)]
            kept.append(one)
    assert _widest(patterns) == kept


GROUPS = """
version: 1
routes:
  - name: up
    from: {endpoint: {protocol: mqtt}, topic: "{all...}"}
    to: {endpoint: {protocol: amqp091}, exchange: e, routing_key: "{all...}"}
  - name: down
    from: {endpoint: {protocol: amqp091}, exchange: e, binding_key: "{all...}"}
    to: {endpoint: {protocol: mqtt}, topic: "{all...}"}
"""
UP = GROUPS[: GROUPS.index("  - name: down")]
LISTENERS = {"devices": "mqtt", "web": "mqtt", "apps": "amqp091", "tls": "amqp091", "tenant": "amqp091"}
WORLDS = {"devices": "m", "web": "m", "apps": "a /", "tls": "a /", "tenant": "a t"}


def grouped(text: str = GROUPS, **more: str) -> Router:
    return Router([parse(text, "t.yaml")], LISTENERS | {"far": "mqtt"} | more, domains=WORLDS)


def test_a_group_is_all_listeners_and_no_link_and_leads_to_each_world_once() -> None:
    routes = [(route.name, route.source, route.target_endpoint) for route in grouped().routes]
    assert routes[:4] == [
        ("up", "devices", "apps"),
        ("up.devices.tenant", "devices", "tenant"),
        ("up.web.apps", "web", "apps"),
        ("up.web.tenant", "web", "tenant"),
    ]
    assert [(source, target) for _, source, target in routes[4:]] == [
        ("apps", "devices"),
        ("tls", "devices"),
        ("tenant", "devices"),
    ]
    assert len({name for name, _, _ in routes}) == len(routes)


def test_a_reply_finds_its_way_back_to_whichever_listener() -> None:
    made = grouped()
    for source in ("devices", "web"):
        message = Message(topic_address("q"), b"", property_set(Properties(reply_to="r/1")))
        resolved = made.resolve(source, message.address)[0]
        made_of_it = resolved.cross(message)
        assert isinstance(made_of_it, Message)
        assert made_of_it.properties.reply_to == "r/1"  # exchange e has no word in a reply address


def test_a_group_within_one_world_leads_nowhere() -> None:
    text = GROUPS[: GROUPS.index("  - name: down")].replace(
        "amqp091}, exchange: e, routing_key", "mqtt}, topic"
    )
    assert grouped(text).routes == ()


def test_a_group_without_a_listener_is_an_unknown_endpoint() -> None:
    text = GROUPS.replace("protocol: amqp091", "protocol: amqpfast").replace(
        "exchange: e, routing_key", "destination"
    )
    with pytest.raises(MappingError, match="unknown endpoint 'amqpfast'"):
        grouped(text[: text.index("  - name: down")])
    made = grouped(text[: text.index("  - name: down")].rstrip() + "\n    optional: true\n")
    assert {one.endpoint for one in made.skipped} == {"amqpfast"}


@pytest.mark.parametrize("group", ["{protocol: amqp091}", "{protocol: nobody}"])
def test_the_words_are_those_of_the_groups_protocol(group: str) -> None:
    with pytest.raises(MappingError):
        grouped(GROUPS.replace("from: {endpoint: {protocol: mqtt}", "from: {endpoint: " + group))


def test_a_route_that_a_group_makes_has_no_name_of_another() -> None:
    text = GROUPS.replace("name: down", "name: up.web.apps")
    with pytest.raises(MappingError, match="'up.web.apps' is also the name of the route at t.yaml:4"):
        grouped(text)
