"""Topics as keys, filters as binding keys, and which of them a replica has asked for."""

from __future__ import annotations

import pytest

from gateway.engine.bindings import Bindings
from gateway.engine.names import binding_of, key_of, topic_of
from gateway.model.dialect import NameRefused

KEYS = [
    ("plant/l1/t", "plant.l1.t"),
    ("plant/v1.2/t", "plant.v1%2E2.t"),
    ("a/*/b", "a.%2A.b"),
    ("%2E", "%252E"),
    ("/", "."),
    ("a//b/", "a..b."),
    ("$data/x", "$data.x"),
    ("Ünï/☃", "Ünï.☃"),
]


@pytest.mark.parametrize("topic, key", KEYS)
def test_a_topic_comes_back_from_its_key(topic: str, key: str) -> None:
    assert key_of(topic) == key.encode()
    assert topic_of(key).name == topic


@pytest.mark.parametrize("key", ["a/b", "a+b", "#", "*", "a#.b"])
def test_every_key_of_others_is_a_topic_that_leads_back(key: str) -> None:
    topic = topic_of(key).name
    assert not set(topic.replace("/", "")) & set("+#")
    assert key_of(topic) is not None


def test_the_empty_key_is_no_topic() -> None:
    with pytest.raises(NameRefused):
        topic_of("")


@pytest.mark.parametrize("topic", ["x" * 256, "é" * 128, "." * 86])
def test_a_key_has_255_bytes_at_most(topic: str) -> None:
    assert key_of(topic) is None
    assert binding_of(topic.split("/")) is None
    assert key_of(topic[:-1]) is not None


@pytest.mark.parametrize(
    "topic_filter, key",
    [
        ("#", "#"),
        ("+/a/#", "*.a.#"),
        ("a/+", "a.*"),
        ("a.b/*/+", "a%2Eb.%2A.*"),
        ("+", "*"),
    ],
)
def test_a_filter_is_a_binding_key(topic_filter: str, key: str) -> None:
    assert binding_of(topic_filter.split("/")) == key


@pytest.mark.parametrize(
    "topic_filter, key",
    [
        ("a" * 253 + "/#", "a" * 253 + ".#"),
        ("a" * 254 + "/+", "a" * 254 + "."),  # the only topic that it matches and that fits
        ("a" * 255 + "/#", "a" * 255),
        ("a" * 255 + "/+", None),
        ("a" * 254 + "/#", "#"),
        ("b/" + "a" * 252 + "/#", "b.#"),
        ("b/c/" + "é" * 125 + "/#", "b.c.#"),
        ("b/" + "/".join("+" * 200), "b." + ".".join("*" * 126) + ".#"),
        ("/".join("+" * 256) + "/#", "." * 255),
        ("/".join("+" * 257), None),
    ],
)
def test_a_filter_whose_key_is_too_long_is_bound_to_all_that_it_matches(
    topic_filter: str, key: str | None
) -> None:
    assert binding_of(topic_filter.split("/")) == key


def test_a_key_is_bound_once_and_unbound_when_nobody_needs_it() -> None:
    bindings = Bindings()
    assert [bindings.add(["a", "+"]) for _ in range(3)] == ["a.*", None, None]
    assert list(bindings.pending_changes()) == [("a.*", True)]
    assert [bindings.remove(["a", "+"]) for _ in range(3)] == [None, None, "a.*"]
    assert not len(bindings)


def test_only_the_difference_is_asked_for_over_another_connection() -> None:
    bindings = Bindings()
    for level in "abc":
        bindings.add([level])
    bindings.set_bound("a", True)
    bindings.set_bound("b", True)
    bindings.remove(["b"])
    assert list(bindings.pending_changes()) == [("c", True), ("b", False)]
    bindings.set_bound("b", False)
    bindings.set_bound("c", True)
    assert not list(bindings.pending_changes())
    bindings.reset()
    assert list(bindings.pending_changes()) == [("a", True), ("c", True)]


def test_what_is_of_this_replica_alone_is_not_bound() -> None:
    bindings = Bindings()
    for levels in (["$SYS", "#"], ["x" * 300]):
        assert bindings.add(levels) is None
        assert bindings.remove(levels) is None
    assert not len(bindings)
