"""The index of headers bindings: finds what a comparison with every binding finds, and bounds its work."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.broker.amqp091.header_index import HeaderConditions, HeaderIndex, parse_conditions
from gateway.broker.amqp091.queue import AmqpQueue
from gateway.broker.amqp091.refusals import AmqpRefused
from gateway.model.properties import Headers, Value, ValueType, string
from tests.broker.amqp091.parts import ME, Host, integer

NAMES = st.sampled_from(["a", "b", "c", "x-d"])
VALUES = st.sampled_from([1, 1.0, True, "1", b"1", None, ("n", 1)])
VOID = Value(ValueType.VOID, None)
MODES = st.sampled_from([None, "all", "any", "all-with-x", "any-with-x"])


def arguments_of(mode: str | None, pairs: list[tuple[str, Any]]) -> Headers:
    given = [
        (name, Value(ValueType.VOID if value is None else ValueType.STRING, value)) for name, value in pairs
    ]
    return (*([] if mode is None else [("x-match", string(mode))]), *given)


def fits(arguments: Headers, headers: dict[str, Any]) -> bool:
    """The specification's own words: each binding is compared with the headers."""
    mode = next((str(value.value) for name, value in arguments if name == "x-match"), "all")
    asked = [(name, value.value) for name, value in arguments if name != "x-match"]
    if not mode.endswith("-with-x"):
        asked = [(name, value) for name, value in asked if not name.startswith("x-")]
    hits = [name in headers and value in (None, headers[name]) for name, value in asked]
    return all(hits) if mode.startswith("all") else any(hits)


BINDINGS = st.lists(
    st.builds(arguments_of, MODES, st.lists(st.tuples(NAMES, VALUES), max_size=4)), min_size=1, max_size=12
)


@given(bindings=BINDINGS, headers=st.dictionaries(NAMES, VALUES, max_size=4), gone=st.integers(0, 4_095))
def test_finds_what_a_comparison_with_each_binding_finds(
    bindings: list[Headers], headers: dict[str, Any], gone: int
) -> None:
    index: HeaderIndex[int] = HeaderIndex()
    steps = 0
    for number, arguments in enumerate(bindings):
        steps += index.add(parse_conditions(arguments), number, f"user {number % 2}")
    for number, arguments in enumerate(bindings):
        if gone >> number & 1:
            steps -= index.remove(parse_conditions(arguments), number, f"user {number % 2}")
    left = [number for number in range(len(bindings)) if not gone >> number & 1]
    assert sorted(index.match(headers)) == [number for number in left if fits(bindings[number], headers)]
    for number in left:
        steps -= index.remove(parse_conditions(bindings[number]), number, f"user {number % 2}")
    assert steps == 0
    assert not index.match(headers)
    empty: HeaderIndex[int] = HeaderIndex()
    assert vars_of(index) == vars_of(empty)


def vars_of(index: HeaderIndex[int]) -> list[Any]:
    return [index._groups, index._always, index._all, index._any, index._names, index._steps, index._levels]


class Compared(str):
    """A header's value that counts how often it is compared or looked up."""

    count = 0

    def __hash__(self) -> int:
        Compared.count += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return super().__eq__(other)


def test_bindings_that_differ_in_one_argument_cost_no_comparison_of_the_others() -> None:
    shared = [(f"h{at}", string("same")) for at in range(62)]
    index: HeaderIndex[int] = HeaderIndex()
    steps = [index.add(parse_conditions((*shared, ("id", string(f"{at}")))), at, "u") for at in range(3_000)]
    assert sum(steps) < 5_000  # without an index: 3 000 x 63
    headers: dict[str, Any] = {name: Compared(value.value) for name, value in shared}
    headers["id"] = Compared("2999")
    Compared.count = 0
    assert list(index.match(headers)) == [2_999]
    assert Compared.count < 10_000  # without: 189 000, each hashed and compared


@pytest.mark.parametrize("mode, least", [("all", 1_024), ("any", 1_024 * 5)])
def test_the_worst_message_is_counted_before_it_comes(mode: str, least: int) -> None:
    """Every two bindings have half of their arguments in common: no argument separates them."""
    index: HeaderIndex[int] = HeaderIndex()
    total = 0
    for at in range(1_024):
        pairs = [(f"bit {bit}", string("01"[at >> bit & 1])) for bit in range(10)]
        total += index.add(parse_conditions((("x-match", string(mode)), *pairs)), at, "u")
    assert total >= least


def bound_until_refused(host: Host, queue: AmqpQueue, bindings: list[tuple[str, Headers]]) -> int:
    """Return how many of the bindings are made before one is refused."""
    for made, (key, arguments) in enumerate(bindings):
        try:
            host.bind("e", queue, key, arguments)
        except AmqpRefused:
            return made
    return len(bindings)


def numbered(at: int) -> Headers:
    return tuple((f"bit {bit}", integer(at >> bit & 1)) for bit in range(10))


def test_a_binding_beyond_the_users_steps_is_refused_and_changes_nothing() -> None:
    host = Host(matching_steps_per_user_max=1_000)
    host.exchange_of("e", "headers")
    queue = host.make("q")
    made = bound_until_refused(host, queue, [("", numbered(at)) for at in range(1_024)])
    assert 100 < made < 1_000
    assert host.bindings == made
    with pytest.raises(AmqpRefused, match="matching_steps_per_user_max"):
        host.bind("e", queue, "", numbered(made))
    before = host.steps.of(queue.user)
    assert before <= 1_000
    host.bind("e", queue, "", (("one of a kind", integer(1)),))  # it is found by itself
    host.unbind("e", queue, "", numbered(0))
    assert host.steps.of(queue.user) < before + 10


@pytest.mark.parametrize("way", ["queue", "exchange"])
def test_steps_are_free_again_when_an_end_is_deleted(way: str) -> None:
    host = Host()
    for kind in ("headers", "topic"):
        host.exchange_of(kind, kind)
        queue = host.make(f"q {kind}")
        for at in range(50):
            host.bind(kind, queue, f"*.*.{at}.#.x", numbered(at))
    assert host.steps.of("") > 50
    for kind in ("headers", "topic"):
        if way == "queue":
            host.delete_queue(host.queue(f"q {kind}", ME))
        else:
            host.delete_exchange(kind, if_unused=False)
    assert host.steps.of("") == 0


def test_wildcards_of_a_topic_binding_are_steps() -> None:
    host = Host(matching_steps_per_user_max=1_000)
    host.exchange_of("e", "topic")
    queue = host.make("q")
    for at in range(2_000):
        host.bind("e", queue, f"plain.*.{at}.#", ())
    assert host.steps.of(queue.user) == 0
    with pytest.raises(AmqpRefused, match="matching_steps_per_user_max"):
        host.bind("e", queue, "*." * 60 + "end", ())
    assert bound_until_refused(host, queue, [(f"#.{at}.x", ()) for at in range(1_000)]) < 130
    assert host.steps.of(queue.user) <= 1_000


def test_empty_conditions_match_everything_or_nothing() -> None:
    index: HeaderIndex[str] = HeaderIndex()
    index.add(HeaderConditions(True, frozenset()), "all", None)
    index.add(HeaderConditions(False, frozenset()), "any", None)
    assert list(index.match({"a": 1})) == ["all"]
