"""Exchanges, queues and bindings: where messages go, and what RabbitMQ's clients are refused with."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from gateway.broker.amqp091 import virtual_host
from gateway.broker.amqp091.header_index import HeaderIndex, comparable, parse_conditions
from gateway.broker.amqp091.queue import AmqpQueue
from gateway.broker.amqp091.refusals import AmqpRefused
from gateway.errors import RemoteProtocolError
from gateway.model.message import Message
from gateway.model.properties import Headers, Properties, PropertySet, Value, ValueType, string
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.settings import Limits
from tests.broker.amqp091.parts import ME, NONE, OTHER, Host, integer
from tests.broker.parts import Taker, amqp, publish
from tests.interop.oracle.wire import typed


@pytest.fixture
def host() -> Host:
    made = Host()
    for name in ("one", "two"):
        made.make(name)
    return made


BINDINGS = [
    ("amq.direct", "a.b", {"a.b": {"one"}, "a.c": set()}),
    ("amq.fanout", "ignored", {"a.b": {"one"}, "": {"one"}}),
    ("amq.topic", "a.*", {"a.b": {"one"}, "a": set(), "a.b.c": set(), "a.": {"one"}}),
    ("amq.topic", "a.#", {"a.b": {"one"}, "a": {"one"}, "a.b.c": {"one"}, "b": set()}),
    ("amq.topic", "#.z.#", {"z": {"one"}, "a.z.b": {"one"}, "a.b": set()}),
]


@pytest.mark.parametrize("exchange, key, rows", BINDINGS)
def test_exchanges_route_by_key(host: Host, exchange: str, key: str, rows: dict[str, set[str]]) -> None:
    host.bind(exchange, host.queues["one"], key, NONE)
    assert {routed: host.reached(exchange, routed) for routed in rows} == rows
    host.unbind(exchange, host.queues["one"], key, NONE)
    assert host.reached(exchange, "a.b") == set()


def test_the_default_exchange_names_queues(host: Host) -> None:
    assert host.reached("", "one") == {"one"}
    assert host.reached("", "none") == set()
    assert host.reached("no such exchange", "one") == set()


def test_a_queue_that_is_bound_twice_gets_a_message_once(host: Host) -> None:
    for key in ("a.*", "#", "a.b"):
        host.bind("amq.topic", host.queues["one"], key, NONE)
    host.bind("amq.topic", host.queues["one"], "#", (("other", string("arguments")),))
    assert host.reached("amq.topic", "a.b") == {"one"}
    host.unbind("amq.topic", host.queues["one"], "#", NONE)
    assert host.reached("amq.topic", "x") == {"one"}


HEADERS = [
    ((), {}, True),
    ((("a", string("1")),), {"a": "1", "b": "2"}, True),
    ((("a", string("1")), ("b", string("2"))), {"a": "1"}, False),
    ((("x-match", string("any")), ("a", string("1")), ("b", string("2"))), {"b": "2"}, True),
    ((("x-match", string("any")), ("a", string("1"))), {"a": "2"}, False),
    ((("a", Value(ValueType.VOID, None)),), {"a": 5}, True),
    ((("a", Value(ValueType.VOID, None)),), {"b": 5}, False),
    ((("x-other", string("1")), ("a", integer(1))), {"a": 1}, True),
    ((("x-match", string("all-with-x")), ("x-other", string("1"))), {}, False),
    ((("x-match", string("any-with-x")), ("x-other", string("1"))), {"x-other": "1"}, True),
]


@pytest.mark.parametrize("arguments, headers, matches", HEADERS)
def test_headers_bindings(arguments: Headers, headers: dict[str, object], matches: bool) -> None:
    index: HeaderIndex[str] = HeaderIndex()
    index.add(parse_conditions(arguments), "it", None)
    found = index.match({name: comparable(typed(value)) for name, value in headers.items()})
    assert (list(found) == ["it"]) is matches


def test_a_headers_exchange_looks_into_the_message_also_behind_others(host: Host) -> None:
    host.exchange_of("first", "fanout")
    host.exchange_of("second", "fanout")
    host.bind("first", host.exchange("second"), "", NONE)
    assert host.sinks(amqp_address("first", "")) == ()
    host.bind("second", host.exchange("amq.headers"), "", NONE)
    host.bind("amq.headers", host.queues["one"], "", (("a", string("1")),))
    assert host.sinks(amqp_address("first", "")) is None
    assert host.reached("first", "", (("a", string("1")),)) == {"one"}
    assert host.reached("first", "", (("a", string("2")),)) == set()


def test_exchanges_bound_in_a_circle_end(host: Host) -> None:
    host.exchange_of("left", "fanout")
    host.exchange_of("right", "fanout")
    host.bind("left", host.exchange("right"), "", NONE)
    host.bind("right", host.exchange("left"), "", NONE)
    host.bind("right", host.queues["two"], "", NONE)
    assert host.reached("left", "") == {"two"}


def declare(name: str, kind: str = "direct", **given: bool) -> Callable[[Host], object]:
    said: dict[str, Any] = {"durable": False, "auto_delete": False, "internal": False} | given
    return lambda host: host.declare_exchange(name, kind, arguments=NONE, **said)


def declare_queue(
    name: str, owner: object = ME, arguments: Headers = NONE, **given: bool
) -> Callable[[Host], object]:
    said: dict[str, Any] = {"durable": False, "exclusive": False, "auto_delete": False} | given
    return lambda host: host.declare_queue(name, owner, arguments=arguments, **said)


REFUSALS: list[tuple[str, Callable[[Host], object], int, str]] = [
    ("default exchange", declare(""), 403, "default exchange"),
    ("reserved exchange", declare("amq.mine"), 403, "reserved prefix"),
    ("unknown type", declare("x", "x-delayed"), 503, "unknown exchange type"),
    ("another type", declare("amq.topic", "direct", durable=True), 406, "inequivalent arg 'type'"),
    ("another durability", declare("amq.topic", "topic"), 406, "'durable'.*received 'false'.*'true'"),
    ("exchange missing", lambda host: host.exchange("none"), 404, "no exchange 'none' in vhost '/'"),
    ("queue missing", lambda host: host.queue("none", ME), 404, "no queue 'none' in vhost '/'"),
    ("reserved queue", declare_queue("amq.mine"), 403, "reserved prefix"),
    ("another queue", declare_queue("one", durable=True), 406, "inequivalent arg 'durable' for queue 'one'"),
    (
        "another ttl",
        declare_queue("one", arguments=(("x-message-ttl", integer(5)),)),
        406,
        "received the value '5' of type 'signedint' but current is none",
    ),
    (
        "an argument of another type",
        declare_queue("x", arguments=(("x-delivery-limit", integer(5)),)),
        406,
        "'x-delivery-limit' for queue 'x' in vhost '/' of queue type rabbit_classic_queue",
    ),
    ("a stream", declare_queue("x", arguments=(("x-queue-type", string("stream")),)), 406, "read again"),
    (
        "a quorum queue that does not last",
        declare_queue("x", arguments=(("x-queue-type", string("quorum")),)),
        406,
        "invalid property 'non-durable' for queue 'x'",
    ),
    ("bad ttl", declare_queue("x", arguments=(("x-message-ttl", integer(-1)),)), 406, "invalid arg"),
    ("bad expiry", declare_queue("x", arguments=(("x-expires", string("1")),)), 406, "invalid arg"),
    ("bind to default", lambda host: host.bind("", host.queues["one"], "k", NONE), 403, "default exchange"),
    ("unbind default", lambda host: host.unbind("", host.queues["one"], "k", NONE), 403, "default"),
    ("bind to none", lambda host: host.bind("none", host.queues["one"], "k", NONE), 404, "no exchange"),
    (
        "delete reserved",
        lambda host: host.delete_exchange("amq.topic", if_unused=False),
        403,
        "deletion of system exchange 'amq.topic'",
    ),
]


@pytest.mark.parametrize("name, action, code, text", REFUSALS, ids=[row[0] for row in REFUSALS])
def test_refusals(host: Host, name: str, action: Callable[[Host], object], code: int, text: str) -> None:
    changes = host.changes
    with pytest.raises(AmqpRefused, match=text) as refused:
        action(host)
    assert refused.value.code == code
    assert host.changes == changes


def test_an_exclusive_queue_is_locked_to_its_connection_and_goes_with_it(host: Host) -> None:
    declare_queue("mine", exclusive=True)(host)
    host.bind("amq.topic", host.queues["mine"], "#", NONE)
    for action in (declare_queue("mine", OTHER), lambda host: host.queue("mine", OTHER)):
        with pytest.raises(AmqpRefused, match="exclusive access") as refused:
            action(host)
        assert refused.value.code == 405
    host.delete_exclusive_queues(OTHER)
    assert host.reached("amq.topic", "a") == {"mine"}
    host.delete_exclusive_queues(ME)
    assert host.reached("amq.topic", "a") == set()
    assert "mine" not in host.queues


def test_an_auto_delete_queue_goes_with_its_last_consumer(host: Host) -> None:
    queue = host.make("brief", auto_delete=True)
    host.delete_if_unused(queue)
    assert "brief" not in host.queues, "nobody consumes"
    queue = host.make("brief", auto_delete=True)
    first, second = Taker(), Taker()
    queue.add(first)
    queue.add(second)
    queue.remove(first)
    host.delete_if_unused(queue)
    assert "brief" in host.queues
    queue.remove(second)
    host.delete_if_unused(queue)
    assert "brief" not in host.queues


def test_auto_delete_exchanges_go_with_their_last_binding_and_take_others_along(host: Host) -> None:
    for name in ("outer", "inner"):
        host.exchange_of(name, "fanout", auto_delete=True)
    host.bind("outer", host.exchange("inner"), "", NONE)
    host.bind("inner", host.queues["one"], "", NONE)
    host.delete_queue(host.queues["one"])
    assert {"outer", "inner"} & set(host.exchanges) == set()


def test_deleting_an_exchange_forgets_its_bindings_on_both_sides(host: Host) -> None:
    host.exchange_of("middle", "fanout")
    host.bind("amq.topic", host.exchange("middle"), "#", NONE)
    host.bind("middle", host.queues["one"], "", NONE)
    with pytest.raises(AmqpRefused, match="in use"):
        host.delete_exchange("middle", if_unused=True)
    host.delete_exchange("middle", if_unused=False)
    host.delete_exchange("middle", if_unused=False)
    assert host.reached("amq.topic", "a") == set()
    assert host.queues["one"].bound == {}
    assert host.exchanges["amq.topic"].has_no_bindings


@pytest.mark.parametrize("if_unused, if_empty, text", [(True, False, "in use"), (False, True, "not empty")])
def test_conditions_of_deleting_a_queue(host: Host, if_unused: bool, if_empty: bool, text: str) -> None:
    queue = host.queues["one"]
    queue.add(Taker(credit=0))
    publish(queue, [amqp(b"1"), amqp(b"2")])
    with pytest.raises(AmqpRefused, match=text) as refused:
        host.delete_queue(queue, if_unused=if_unused, if_empty=if_empty)
    assert refused.value.code == 406
    assert host.delete_queue(queue) == 2


def test_names_are_made_for_queues_without_one(host: Host) -> None:
    names = {host.make("").name for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("amq.gen-") for name in names)


def test_an_unused_queue_expires_and_a_used_one_does_not(host: Host) -> None:
    queue = host.make("idle", ("x-expires", integer(1_000)))
    taker = Taker()
    queue.add(taker)
    queue.used -= 5.0
    host.alarms.run_due(time.time() + 5.0)
    assert "idle" in host.queues, "it has a consumer"
    queue.remove(taker)
    host.alarms.run_due(time.time() + 5.0)
    assert "idle" in host.queues, "it had one until now"
    queue.used -= 1.1
    host.alarms.run_due(time.time() + 5.0)
    assert "idle" not in host.queues


def test_a_time_to_live_shortens_the_lives_of_messages_in_this_queue_only(host: Host) -> None:
    short = host.make("short", ("x-message-ttl", integer(0)))
    long = host.queues["one"]
    message = amqp(b"x")
    publish(short, [message])
    publish(long, [message])
    assert short.take() is None
    assert long.take() is not None


@pytest.mark.parametrize(
    "limits, text",
    [
        ({"queues_max": 1}, "queues_max"),
        ({"exchanges_max": 6}, "exchanges_max"),
        ({"bindings_max": 1}, "bindings_max"),
    ],
)
def test_whatever_a_client_can_make_grow_has_a_limit(limits: dict[str, int], text: str) -> None:
    host = Host(**limits)
    queue = host.make("first")
    host.exchange_of("first", "direct")
    host.bind("first", queue, "a", NONE)
    refused = []
    for action in (
        lambda: host.bind("first", queue, "b", NONE),
        lambda: host.exchange_of("second", "direct"),
        lambda: host.make("second"),
    ):
        try:
            action()
        except AmqpRefused as error:
            refused.append((error.code, text in str(error)))
    assert refused == [(506, True)]


LONG = 3_000  # far more than Python nests


@pytest.mark.parametrize("circle", [False, True])
@pytest.mark.parametrize("bound", [True, False])
def test_chains_of_exchanges_of_any_length_lead_to_their_end(bound: bool, circle: bool) -> None:
    """By bindings, or by alternate exchanges; and round again."""
    host = Host(exchanges_max=LONG + 10, exchanges_per_user_max=LONG + 10)
    end = host.make("end")
    for at in range(LONG):
        alternate = NONE if bound else (("alternate-exchange", string(f"x{at + 1}")),)
        host.declare_exchange(
            f"x{at}", "fanout", durable=False, auto_delete=False, internal=False, arguments=alternate
        )
    for at in range(LONG - 1):
        if bound:
            host.bind(f"x{at}", host.exchange(f"x{at + 1}"), "", NONE)
    host.bind(f"x{LONG - 1}", end, "", NONE)
    if circle:
        host.bind(f"x{LONG - 1}", host.exchange("x0"), "", NONE)
    assert host.reached("x0", "k") == {"end"}
    host.exchange_of("selective", "headers")
    host.bind(f"x{LONG - 1}", host.exchange("selective"), "", NONE)
    host.bind("selective", host.make("by header"), "", (("h", string("1")),))
    assert host.reached("x0", "k", (("h", string("1")),)) == {"end", "by header"}
    assert host.reached("x0", "k") == {"end"}


def test_a_chain_of_auto_delete_exchanges_goes_with_its_end() -> None:
    host = Host(exchanges_max=LONG + 10, exchanges_per_user_max=LONG + 10)
    before = len(host.exchanges)
    end = host.make("end")
    for at in range(LONG):
        host.exchange_of(f"x{at}", "fanout", auto_delete=True)
    for at in range(LONG - 1):
        host.bind(f"x{at}", host.exchange(f"x{at + 1}"), "", NONE)
    host.bind(f"x{LONG - 1}", end, "", NONE)
    assert host.bindings == LONG
    host.delete_queue(end)
    assert (len(host.exchanges), host.bindings) == (before, 0)


@pytest.mark.parametrize("kind", ["direct", "fanout", "topic", "headers"])
@pytest.mark.parametrize("deleted", ["queue", "exchange"])
def test_what_has_many_bindings_goes_at_once_and_they_are_swept_out_in_slices(
    kind: str, deleted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, slices = 800, 8
    monkeypatch.setattr(virtual_host, "SWEPT", size // slices)
    host = Host()
    host.exchange_of("x", kind)
    other = host.make("other")
    host.exchange_of("one", "fanout")
    one = host.make("one") if deleted == "queue" else host.exchange("one")
    behind = {"one"} if deleted == "queue" else {"behind"}
    host.bind("one", host.make("behind"), "", NONE)
    for at in range(size):
        host.bind("x", one, f"k.{at}", NONE)
        host.bind("x", other, f"k.{at}", (("h", integer(at)),))
    header = (("h", integer(1)),)
    assert host.reached("x", "k.1", header) == {"other"} | behind
    if isinstance(one, AmqpQueue):
        host.delete_queue(one)
    else:
        host.delete_exchange("one", if_unused=False)
    gone = weakref.ref(one)
    del one
    turns = 0
    while len(host.alarms):
        assert host.reached("x", "k.1", header) == {"other"}
        assert host.bindings == size + (deleted == "queue")
        host.alarms.run_due(time.time())
        turns += 1
    assert turns == slices - 1
    gc.collect()
    assert gone() is None, "something still knows it"
    assert host.reached("x", "k.1", header) == {"other"}
    assert host.bindings == size + (deleted == "queue")
    host.bind("x", host.make("one"), "k.1", NONE)
    assert host.reached("x", "k.1", header) == {"other", "one"}
    host.delete_exchange("x", if_unused=False)
    assert other.bound == {}


@pytest.mark.parametrize(
    "exchange, to", [("amq.headers", "queue"), ("amq.direct", "queue"), ("amq.fanout", "exchange")]
)
def test_the_order_of_arguments_does_not_tell_bindings_apart(exchange: str, to: str) -> None:
    """A client whose language orders maps by chance unbinds what it has bound."""
    host = Host()
    host.exchange_of("end", "fanout")
    end = host.make("q") if to == "queue" else host.exchange("end")
    nested = Value(ValueType.TABLE, (("x", integer(1)), ("y", integer(2))))
    turned = Value(ValueType.TABLE, (("y", integer(2)), ("x", integer(1))))
    bound = (("x-match", string("all")), ("a", integer(1)), ("b", nested))
    host.bind(exchange, end, "k", bound)
    host.bind(exchange, end, "k", (("b", turned), ("a", integer(1)), ("x-match", string("all"))))
    assert host.bindings == 1
    host.unbind(exchange, end, "k", (("b", turned), ("x-match", string("all")), ("a", integer(1))))
    assert (host.bindings, host.exchange(exchange).has_no_bindings) == (0, True)


@pytest.mark.parametrize("match", ["all", "any"])
def test_a_header_that_is_a_table_matches_in_any_order(match: str) -> None:
    host = Host()
    queue = host.make("q")
    tables = [
        Value(ValueType.TABLE, entries)
        for entries in ((("x", integer(1)), ("y", integer(2))), (("y", integer(2)), ("x", integer(1))))
    ]
    for bound in (*tables, Value(ValueType.ARRAY, (tables[1],))):
        arguments = (("x-match", string(match)), ("h", bound))
        host.bind("amq.headers", queue, "", arguments)
        same = tables if bound.type is ValueType.TABLE else [Value(ValueType.ARRAY, (one,)) for one in tables]
        for header in same:
            assert host.reached("amq.headers", "", (("h", header),)) == {"q"}
        host.unbind("amq.headers", queue, "", arguments)


def test_a_headers_binding_asks_for_so_many_headers_and_no_more() -> None:
    host = Host()
    many = tuple((f"h{at}", integer(at)) for at in range(Limits().arguments_max + 1))
    host.bind("amq.headers", host.make("q"), "", many[1:])
    with pytest.raises(AmqpRefused, match="more than limits.arguments_max"):
        host.bind("amq.headers", host.queues["q"], "", many)


def test_malformed_properties_are_their_senders_fault() -> None:
    def decode(raw: bytes) -> Properties:
        raise RemoteProtocolError("malformed", reason=502)

    host = Host()
    host.bind("amq.headers", host.make("any"), "", NONE)
    host.bind("amq.headers", host.make("some"), "", (("h", integer(1)),))
    broken = Message(amqp_address("amq.headers", ""), b"", PropertySet("amqp091", b"\xff", decode))
    with pytest.raises(RemoteProtocolError):
        host.choose(broken)
