"""Exchanges of type `x-consistent-hash`: shares by weight, and how little moves when something is bound."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from gateway.broker.amqp091.queue import AmqpQueue
from gateway.broker.amqp091.refusals import AmqpRefused
from gateway.model.message import Message
from gateway.model.properties import Headers, Properties, property_set, string
from gateway.protocols.amqp091.dialect import amqp_address
from tests.broker.amqp091.parts import NONE, Host, integer

KEYS = [f"key {number}" for number in range(4_000)]


def hashing(host: Host, *arguments: tuple[str, Any], name: str = "h") -> None:
    host.declare_exchange(
        name, "x-consistent-hash", durable=False, auto_delete=False, internal=False, arguments=arguments
    )


@pytest.fixture
def host() -> Host:
    made = Host()
    hashing(made)
    for name in ("a", "b", "c"):
        made.make(name)
    return made


def places(host: Host) -> dict[str, str]:
    found = {}
    for key in KEYS:
        (found[key],) = host.reached("h", key)
    return found


def bound(host: Host, **weights: int) -> None:
    for name, weight in weights.items():
        host.bind("h", host.queues[name], str(weight), NONE)


def test_each_key_has_one_queue_and_the_queues_have_shares_by_their_weights(host: Host) -> None:
    assert host.reached("h", "x") == set()
    bound(host, a=1, b=1, c=2)
    assert host.sinks(amqp_address("h", "x")) is not None  # the address decides, so it is remembered
    counts = Counter(places(host).values())
    assert counts["a"] == pytest.approx(1_000, abs=150)
    assert counts["b"] == pytest.approx(1_000, abs=150)
    assert counts["c"] == pytest.approx(2_000, abs=150)


def test_a_queue_that_is_bound_takes_from_all_and_one_that_goes_gives_to_all(host: Host) -> None:
    bound(host, a=1, b=1)
    before = places(host)
    bound(host, c=1)
    with_c = places(host)
    assert {with_c[key] for key in KEYS if with_c[key] != before[key]} == {"c"}
    host.unbind("h", host.queues["a"], "1", NONE)
    without_a = places(host)
    assert {with_c[key] for key in KEYS if without_a[key] != with_c[key]} == {"a"}
    host.delete_queue(host.queues["c"])
    assert set(places(host).values()) == {"b"}


def test_the_choice_does_not_depend_on_the_order_of_bindings(host: Host) -> None:
    bound(host, a=1, b=2, c=3)
    other = Host()
    hashing(other)
    for name in ("c", "a", "b"):
        other.make(name)
    bound(other, c=3, a=1, b=2)
    assert places(other) == places(host)


@pytest.mark.parametrize("weights", [("1", "9", "10"), ("10", "1", "9"), ("9", "10", "1")])
def test_a_queue_that_is_bound_several_times_has_its_largest_weight(
    host: Host, weights: tuple[str, ...]
) -> None:
    """Whatever the order, which is another one after a restart."""
    bound(host, a=10, b=1)
    before = places(host)
    host.unbind("h", host.queues["a"], "10", NONE)
    for weight in weights:
        host.bind("h", host.queues["a"], weight, NONE)
    host.bind("h", host.queues["a"], "10", (("other", string("arguments")),))
    assert places(host) == before
    host.unbind("h", host.queues["a"], "10", NONE)
    assert places(host) == before  # it is still bound with other arguments
    host.unbind("h", host.queues["a"], "10", (("other", string("arguments")),))
    counts = Counter(places(host).values())
    assert counts["a"] == pytest.approx(3_600, abs=150)
    host.unbind("h", host.queues["a"], "9", NONE)
    host.unbind("h", host.queues["a"], "1", NONE)
    assert set(places(host).values()) == {"b"}


def test_exchanges_are_destinations_too(host: Host) -> None:
    host.exchange_of("a", "fanout")
    host.bind("a", host.queues["b"], "", NONE)
    host.bind("h", host.exchange("a"), "1", NONE)
    bound(host, a=1)
    assert set(places(host).values()) == {"a", "b"}


def test_what_many_queues_cost_is_counted(host: Host) -> None:
    host.steps.user_max = 50
    bound(host, a=1, b=1)
    with pytest.raises(AmqpRefused, match="matching_steps_per_user_max"):
        bound(host, c=1)
    host.unbind("h", host.queues["a"], "1", NONE)
    bound(host, c=1)
    host.delete_exchange("h", if_unused=False)
    assert host.steps.of("") == 0


@pytest.mark.parametrize(
    "key, text",
    [
        ("", 'The binding key must be an integer: <<"">>'),
        ("x", 'must be an integer: <<"x">>'),
        ("1.5", 'must be an integer: <<"1.5">>'),
        (" 1", 'must be an integer: <<" 1">>'),
        ("\u0661", "must be an integer"),
        ("0", "must be greater than 0"),
        ("-3", "must be greater than 0"),
        ("1234567890", "no more than 9 digits"),
    ],
)
def test_weights_that_are_refused(host: Host, key: str, text: str) -> None:
    with pytest.raises(AmqpRefused, match=text) as refused:
        host.bind("h", host.queues["a"], key, NONE)
    assert refused.value.code == 406
    assert host.bindings == 0


BY = [
    ("hash-header", "device", Properties(headers=(("device", string("1")),))),
    ("hash-header", "device", Properties(headers=(("device", integer(1)),))),
    ("hash-property", "message_id", Properties(message_id="m")),
    ("hash-property", "correlation_id", Properties(correlation=b"\xff")),
    ("hash-property", "timestamp", Properties(timestamp=7)),
]


@pytest.mark.parametrize("argument, name, properties", BY)
def test_a_header_or_property_is_hashed_and_not_the_key(
    host: Host, argument: str, name: str, properties: Properties
) -> None:
    hashing(host, (argument, string(name)), name="by")
    for queue in ("a", "b", "c"):
        host.bind("by", host.queues[queue], "1", NONE)

    def place(given: Properties, key: str) -> set[str]:
        message = Message(amqp_address("by", key), b"", property_set(given))
        assert host.sinks(message.address) is None
        return {sink.name for sink in host.choose(message) if isinstance(sink, AmqpQueue)}

    assert len(set.union(*(place(properties, key) for key in KEYS[:50]))) == 1
    assert len(set.union(*(place(Properties(), key) for key in KEYS[:50]))) == 1  # those without it


def test_different_values_of_a_header_have_different_places(host: Host) -> None:
    hashing(host, ("hash-header", string("device")), name="by")
    for queue in ("a", "b", "c"):
        host.bind("by", host.queues[queue], "1", NONE)
    reached = [host.reached("by", "", (("device", string(key)),)) for key in KEYS[:50]]
    assert set.union(*reached) == {"a", "b", "c"}


@pytest.mark.parametrize(
    "arguments, text",
    [
        ((("hash-header", integer(1)),), "invalid arg 'hash-header'"),
        ((("hash-property", string("app_id")),), "Unsupported property: app_id"),
        ((("hash-header", string("a")), ("hash-property", string("message_id"))), "mutually exclusive"),
    ],
)
def test_arguments_that_are_refused(arguments: Headers, text: str) -> None:
    with pytest.raises(AmqpRefused, match=text):
        hashing(Host(), *arguments)
