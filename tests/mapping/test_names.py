"""Names of one protocol as another writes them, and back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.mapping.names import plain_translation, split_levels, translation
from gateway.model.address import Address
from gateway.model.dialect import NameRefused
from gateway.protocols import DIALECTS, dialect_of, show
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqpfast.dialect import fast_address
from gateway.protocols.mqtt.dialect import topic_address

PAIRS = [(source, target) for source in DIALECTS for target in DIALECTS]
LETTERS = [
    *list("ab./+#*% &%%%%"),
    "é",
    "🙂",
    "\x01",
    "%2E",
    "%25",
    "%2F",
    "%2A",
    "2",
    "5",
    "E",
    "\x00",
    "%2e",
]


def level_of(protocol: str) -> st.SearchStrategy[str]:
    allowed = [text for text in LETTERS if not any(one in DIALECTS[protocol].forbidden for one in text)]
    return st.lists(st.sampled_from(allowed) | st.text(max_size=2), max_size=8).map(
        lambda parts: "".join(one for one in "".join(parts) if one not in DIALECTS[protocol].forbidden)
    )


@pytest.mark.parametrize("source, target", PAIRS)
def test_percent_is_reversible_for_every_level(source: str, target: str) -> None:
    there, back = (
        translation(DIALECTS[source], DIALECTS[target], "percent"),
        translation(DIALECTS[target], DIALECTS[source], "percent"),
    )

    @given(level_of(source))
    def reversible(level: str) -> None:
        crossed = there(level)
        assert not any(character in crossed for character in DIALECTS[target].forbidden)
        assert back(crossed) == level

    reversible()


@given(st.lists(level_of("mqtt"), min_size=2, max_size=6))
def test_whole_topics_come_back(levels: list[str]) -> None:
    there, back = (
        translation(DIALECTS["mqtt"], DIALECTS["amqp091"], "percent"),
        translation(DIALECTS["amqp091"], DIALECTS["mqtt"], "percent"),
    )
    key = ".".join(map(there, levels))
    assert "/".join(map(back, key.split("."))) == "/".join(levels)


@given(st.lists(level_of("mqtt").filter(lambda level: "%" not in level), min_size=1, max_size=4))
def test_swap_comes_back(levels: list[str]) -> None:
    there, back = (
        translation(DIALECTS["mqtt"], DIALECTS["amqp091"], "swap"),
        translation(DIALECTS["amqp091"], DIALECTS["mqtt"], "swap"),
    )
    assert [back(there(level)) for level in levels] == levels


@pytest.mark.parametrize(
    "source, target, escape, level, crossed",
    [
        ("mqtt", "amqp091", "percent", "v1.2", "v1%2E2"),
        ("mqtt", "amqp091", "percent", "v1%2E2", "v1%252E2"),
        ("mqtt", "amqp091", "percent", "v1%252E2", "v1%25252E2"),
        ("mqtt", "amqp091", "percent", "*", "%2A"),
        ("mqtt", "amqp091", "percent", "%2A", "*"),
        ("mqtt", "amqp091", "percent", "%252A", "%252A"),
        ("mqtt", "amqp091", "percent", "50%", "50%"),
        ("mqtt", "amqp091", "percent", "%", "%"),
        ("mqtt", "amqp091", "percent", "a%2Fb", "a/b"),
        ("mqtt", "amqp091", "percent", "a%23", "a#"),
        ("mqtt", "amqp091", "percent", "v1%2e2", "v1%2e2"),
        ("mqtt", "amqp091", "percent", "", ""),
        ("mqtt", "amqp091", "percent", "größe", "größe"),
        ("amqp091", "mqtt", "percent", "a/b", "a%2Fb"),
        ("amqp091", "mqtt", "percent", "a+#", "a%2B%23"),
        ("amqp091", "mqtt", "percent", "\0", "%00"),
        ("amqp091", "mqtt", "percent", "a%2Fb", "a%252Fb"),
        ("mqtt", "amqpfast", "percent", "a b&c.", "a%20b%26c%2E"),
        ("mqtt", "amqpfast", "percent", "a%2Fb", "a%2Fb"),
        ("amqp091", "amqpfast", "percent", "a/b#*", "a%2Fb%23*"),
        ("amqpfast", "mqtt", "percent", "old/name", "old%2Fname"),
        ("mqtt", "mqtt", "percent", "v1.2%2F", "v1.2%2F"),
        ("mqtt", "amqp091", "swap", "v1.2", "v1/2"),
        ("amqp091", "mqtt", "swap", "a/b", "a.b"),
        ("amqp091", "amqpfast", "swap", "a/b", "a/b"),
        ("mqtt", "amqp091", "keep", "v1.2*", "v1.2*"),
        ("mqtt", "amqp091", "reject", "plain", "plain"),
    ],
)
def test_one_level(source: str, target: str, escape: str, level: str, crossed: str) -> None:
    assert translation(DIALECTS[source], DIALECTS[target], escape)(level) == crossed


@pytest.mark.parametrize(
    "source, target, level",
    [
        ("mqtt", "amqp091", "v1.2"),
        ("mqtt", "amqp091", "*"),
        ("amqp091", "mqtt", "a/b"),
        ("amqp091", "mqtt", "#"),
    ],
)
def test_reject_refuses_what_percent_would_encode(source: str, target: str, level: str) -> None:
    with pytest.raises(NameRefused, match="escape: reject"):
        translation(DIALECTS[source], DIALECTS[target], "reject")(level)


@pytest.mark.parametrize(
    "target, text, level",
    [("amqp091", "a.b*#c", "a%2Eb%2A%23c"), ("mqtt", "a/b+#", "a%2Fb%2B%23"), ("amqpfast", "a b", "a%20b")],
)
def test_plain_text_never_splits_a_name(target: str, text: str, level: str) -> None:
    assert plain_translation(DIALECTS[target], "percent")(text) == level


def test_plain_text_under_the_other_policies() -> None:
    assert (
        plain_translation(DIALECTS["mqtt"], "keep")("a/b")
        == plain_translation(DIALECTS["mqtt"], "swap")("a/b")
        == "a/b"
    )
    with pytest.raises(NameRefused):
        plain_translation(DIALECTS["mqtt"], "reject")("a/b")


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: DIALECTS["mqtt"].address("", ""), "not a topic name"),
        (lambda: DIALECTS["mqtt"].address("", "a/+"), "not a topic name"),
        (lambda: DIALECTS["mqtt"].address("", "a\0"), "not a topic name"),
        (lambda: DIALECTS["mqtt"].address("", "é" * 32_768), "65536 bytes"),
        (lambda: DIALECTS["amqp091"].address("", "é" * 128), "256 bytes"),
        (lambda: DIALECTS["amqp091"].address("e" * 256, "k"), "256 bytes"),
        (lambda: DIALECTS["amqpfast"].address("topic", ""), "not a destination"),
        (lambda: DIALECTS["amqpfast"].address("topic", "a" * 256), "256 bytes"),
    ],
)
def test_names_that_no_broker_may_see(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(NameRefused, match=reason):
        make()


def test_the_longest_names_are_allowed() -> None:
    assert len(DIALECTS["mqtt"].address("", "t" * 65_535).wire) == 65_535
    assert len(DIALECTS["amqp091"].address("", "k" * 255).wire) == 257


@pytest.mark.parametrize(
    "protocol, text, address",
    [
        ("mqtt", "a/b", topic_address("a/b")),
        ("amqp091", "amq.topic:a.b", amqp_address("amq.topic", "a.b")),
        ("amqp091", ":jobs", amqp_address("", "jobs")),
        ("amqp091", "Shop%3AOrder%25:a:b", amqp_address("Shop:Order%", "a:b")),
        ("amqp091", "e:", amqp_address("e", "")),
        ("amqpfast", "topic:queue:x", fast_address("topic", "queue:x")),
        ("amqpfast", "queue:jobs.x", fast_address("queue", "jobs.x")),
    ],
)
def test_addresses_as_people_write_them(protocol: str, text: str, address: Address) -> None:
    assert DIALECTS[protocol].parse(text) == address
    assert show(address) == text


def test_a_destination_without_a_service_is_a_topic() -> None:
    assert DIALECTS["amqpfast"].parse("a:b.c") == fast_address("topic", "a:b.c")


@pytest.mark.parametrize(
    "address, levels",
    [
        (topic_address("/a//"), ("", "a", "", "")),
        (amqp_address("x", ""), ()),
        (amqp_address("x", "a..b"), ("a", "", "b")),
        (fast_address("queue", "a.b"), ("a", "b")),
    ],
)
def test_levels(address: Address, levels: tuple[str, ...]) -> None:
    assert dialect_of(address).levels(address.name) == levels


def test_separators_inside_braces_do_not_split() -> None:
    assert split_levels("a.{b...}.c", DIALECTS["amqp091"].separator) == ["a", "{b...}", "c"]
