"""RabbitMQ's policies: which holds for a queue, and what it changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.broker.amqp091.arguments import queue_arguments
from gateway.broker.amqp091.policies import read_policies, with_policy
from gateway.broker.amqp091.virtual_host import VirtualHost
from gateway.errors import ConfigurationError
from gateway.model.properties import Headers, Value, ValueType, string
from gateway.protocols.amqp091.dialect import amqp_address

POLICIES: list[dict[str, Any]] = [
    {"pattern": "^orders", "definition": {"max-length": 10, "ha-mode": "all"}, "priority": 1},
    {"pattern": "", "definition": {"message-ttl": 5_000, "dead-letter-exchange": "dead"}, "priority": 0},
    {
        "pattern": "^orders\\.urgent",
        "definition": {"max-length": 3, "overflow": "reject-publish"},
        "priority": 9,
    },
    {"pattern": "quorum", "apply-to": "quorum_queues", "definition": {"delivery-limit": 7}, "priority": 5},
    {"pattern": "^x", "apply-to": "exchanges", "definition": {"alternate-exchange": "a"}, "priority": 5},
    {"pattern": "^key", "definition": {"dead-letter-routing-key": "k"}, "priority": 5},
]


def written(folder: Path, *policies: dict[str, Any]) -> Path:
    file = folder / "definitions.json"
    every = [{"vhost": "/", "name": str(at), **one} for at, one in enumerate(policies)]
    file.write_bytes(orjson.dumps({"queues": [], "policies": every}))
    return file


def number(value: int) -> Value:
    return Value(ValueType.INT32, value)


@pytest.mark.parametrize(
    "name, own, wanted",
    [
        ("orders.new", (), {"length_max": 10, "ttl_ms": None}),
        ("orders.urgent", (), {"length_max": 3, "overflow": "reject-publish"}),
        ("orders.new", (("x-max-length", number(4)),), {"length_max": 4}),
        ("orders.new", (("x-max-length", number(40)),), {"length_max": 10}),
        ("other", (), {"ttl_ms": 5_000, "dead_letter_exchange": "dead"}),
        ("other", ((("x-dead-letter-exchange"), string("mine")),), {"dead_letter_exchange": "mine"}),
        ("quorum", (("x-queue-type", string("quorum")),), {"delivery_limit": 7, "ttl_ms": None}),
        ("quorum.not", (), {"delivery_limit": None, "ttl_ms": 5_000}),
        ("x", (), {"ttl_ms": 5_000}),
        ("key", (), {"dead_letter_key": None}),
        ("key", (("x-dead-letter-exchange", string("d")),), {"dead_letter_key": "k"}),
    ],
)
def test_which_policy_holds(tmp_path: Path, name: str, own: Headers, wanted: dict[str, Any]) -> None:
    policies = read_policies(written(tmp_path, *POLICIES))["/"]
    found = queue_arguments(with_policy(policies, name, own), "queue")
    assert {key: getattr(found, key) for key in wanted} == wanted


def test_a_queue_is_as_declared_and_does_as_its_policy_says(tmp_path: Path) -> None:
    host = VirtualHost("/", lambda: None, policies=read_policies(written(tmp_path, *POLICIES))["/"])
    given: dict[str, Any] = {"durable": True, "exclusive": False, "auto_delete": False, "arguments": ()}
    queue = host.declare_queue("orders.new", None, **given)
    assert queue.options.length_max == 10
    assert host.declare_queue("orders.new", None, **given) is queue


ALTERNATES: list[dict[str, Any]] = [
    {"pattern": "^x", "apply-to": "exchanges", "definition": {"alternate-exchange": "a"}, "priority": 2},
    {"pattern": "^x.all", "definition": {"alternate-exchange": "b", "max-length": 2}, "priority": 3},
    {"pattern": "^x", "apply-to": "queues", "definition": {"alternate-exchange": "no"}, "priority": 9},
    {"pattern": "^amq.fan", "apply-to": "exchanges", "definition": {"alternate-exchange": "a"}},
    {"pattern": "^x.none", "apply-to": "exchanges", "definition": {}, "priority": 7},
]


@pytest.mark.parametrize(
    "name, own, wanted",
    [
        ("x", (), "a"),
        ("x.all", (), "b"),
        ("x", (("alternate-exchange", string("mine")),), "mine"),
        ("x.none", (), None),  # one policy holds, as in RabbitMQ
        ("y", (), None),
    ],
)
def test_an_alternate_exchange_by_policy(tmp_path: Path, name: str, own: Headers, wanted: str | None) -> None:
    host = VirtualHost("/", lambda: None, policies=read_policies(written(tmp_path, *ALTERNATES))["/"])
    given: dict[str, Any] = {"durable": True, "auto_delete": False, "internal": False, "arguments": own}
    exchange = host.declare_exchange(name, "direct", **given)
    assert exchange.alternate == wanted
    assert exchange.arguments == own
    assert host.declare_exchange(name, "direct", **given) is exchange  # as declared, not as governed


def test_what_nothing_is_bound_for_goes_where_the_policy_says(tmp_path: Path) -> None:
    host = VirtualHost("/", lambda: None, policies=read_policies(written(tmp_path, *ALTERNATES))["/"])
    host.declare_exchange("x", "direct", durable=True, auto_delete=False, internal=False, arguments=())
    for source in ("x", "amq.fanout"):
        assert host.sinks(amqp_address(source, "k")) == ()
    host.declare_exchange("a", "fanout", durable=True, auto_delete=False, internal=False, arguments=())
    given: dict[str, Any] = {"durable": False, "exclusive": False, "auto_delete": False, "arguments": ()}
    queue, other = (host.declare_queue(name, None, **given) for name in ("q", "other"))
    host.bind("a", queue, "", ())
    for source in ("x", "amq.fanout"):
        assert host.sinks(amqp_address(source, "k")) == (queue,)
    host.bind("x", other, "k", ())
    assert host.sinks(amqp_address("x", "k")) == (other,)
    host.delete_exchange("a", if_unused=False)
    assert host.sinks(amqp_address("x", "else")) == ()


@pytest.mark.parametrize(
    "policy",
    [
        {"pattern": "(", "definition": {}},
        {"pattern": ""},
        {"pattern": "", "definition": []},
    ],
)
def test_a_policy_that_no_export_has(tmp_path: Path, policy: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigurationError, match=r"policies\[0\]: does not have the form of a RabbitMQ export"
    ):
        read_policies(written(tmp_path, policy))


@pytest.mark.parametrize(
    "definition, fault",
    [
        ({"max-length": -1}, r"max-length: \{value_negative,-1\}"),
        ({"max-length": "many"}, "max-length: .*expected integer"),
        ({"alternate-exchange": 1}, "alternate-exchange: must be the name of an exchange"),
        ({"overflow": "explode"}, "overflow: invalid_overflow"),
        ({"message-ttl": 315_360_000_001}, r"message-ttl: \{value_too_large,315360000001\}"),
    ],
)
def test_a_policy_with_a_value_that_cannot_be(tmp_path: Path, definition: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"policies\[0\]: {fault}"):
        read_policies(written(tmp_path, {"pattern": "", "definition": definition}))


@pytest.mark.parametrize("days", [1, 90, 3_650])
def test_a_policy_with_a_long_time_to_live(tmp_path: Path, days: int) -> None:
    milliseconds = days * 86_400_000
    policy = {"pattern": "", "definition": {"message-ttl": milliseconds, "expires": milliseconds}}
    (found,) = read_policies(written(tmp_path, policy))["/"]
    assert {name: value.value for name, value in found.arguments.items()} == {
        "x-message-ttl": milliseconds,
        "x-expires": milliseconds,
    }
