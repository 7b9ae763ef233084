"""Regular expressions of users: linear in time, and refused with a reason where that cannot be."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.access.scopes import parse_scope
from gateway.access.templates import expression, wildcard
from gateway.broker.amqp091.policies import applicable_policy, read_policies
from gateway.errors import ConfigurationError
from gateway.regexes import Regex, RegexError, quote, wildcard_regex
from gateway.settings import Settings

QUICK_SECS = 0.5  # a backtracking engine takes hours
HOSTILE = [
    (r"^(a+)+$", "a" * 200 + "b"),
    (r"^(a|a)*$", "a" * 200 + "b"),
    (r"^(a|aa)+$", "a" * 200 + "b"),
    (r"(.*a){12}b", "a" * 250),
    (r"^([a-z]+\.)*[a-z]+$", "a." * 120 + "!"),
]


@pytest.mark.parametrize("pattern, text", HOSTILE)
def test_hostile_patterns_take_no_time(pattern: str, text: str) -> None:
    begin = time.perf_counter()
    assert not Regex(pattern).search(text)
    assert time.perf_counter() - begin < QUICK_SECS


def test_scopes_and_client_ids_with_many_stars_take_no_time() -> None:
    begin = time.perf_counter()
    scope = parse_scope("read:*/" + "a*" * 60 + "b")
    assert scope is not None
    assert not scope.name.search("a" * 255)
    client_id = wildcard("a*" * 60 + "b", {})
    assert client_id is not None
    assert not client_id.search("a" * 1_024)
    assert time.perf_counter() - begin < QUICK_SECS


@pytest.mark.parametrize(
    "pattern", [r"^(?!amq\.)", r"(a)\1", r"(?<=a)b", "a++", "(?>a)", r"a\Z", "(", "((a{99}){99}){99}"]
)
def test_what_cannot_be_linear_is_refused_with_a_reason(pattern: str) -> None:
    with pytest.raises(RegexError, match="RE2"):
        Regex(pattern)
    given: dict[str, Any] = {"roles": {"r": {"amqp091": {"/": {"read": pattern}}}}}
    with pytest.raises(ValidationError, match=r"not a regular expression: .*RE2"):
        Settings.model_validate(given)


@pytest.mark.parametrize("pattern", ["^(a+)+$", r"^(?!amq\.)"])
def test_policies_of_an_export(tmp_path: Path, pattern: str) -> None:
    file = tmp_path / "definitions.json"
    policy = {"vhost": "/", "name": "p", "pattern": pattern, "definition": {"max-length": 1}}
    file.write_bytes(orjson.dumps({"queues": [], "policies": [policy]}))
    if "?!" in pattern:
        with pytest.raises(ConfigurationError, match=r"policies\[0\].*RE2"):
            read_policies(file)
        return
    begin = time.perf_counter()
    assert applicable_policy(read_policies(file)["/"], "a" * 250 + "!", ()) is None
    assert time.perf_counter() - begin < QUICK_SECS


@given(pieces=st.lists(st.text(max_size=5), min_size=1, max_size=4), text=st.text(max_size=20))
def test_wildcards_match_as_re_does(pieces: list[str], text: str) -> None:
    reference = re.compile(".*".join(map(re.escape, pieces)), re.DOTALL)
    found = wildcard_regex(pieces)
    assert found.search(text) is (reference.fullmatch(text) is not None)
    whole = "x".join(pieces)
    assert found.search(whole)


@given(value=st.text(min_size=1, max_size=20))
def test_a_value_that_is_put_in_stands_for_itself(value: str) -> None:
    assert Regex(rf"^{quote(value)}\z").search(value)
    filled = expression("^{user}$", {"user": value})
    assert filled is not None
    assert filled.search(value)
    assert not filled.search(value + "x")


@pytest.mark.parametrize("value", ["\ud800", "u" * 1_000])
def test_a_rule_does_not_apply_where_its_value_makes_no_expression(value: str) -> None:
    assert expression("^({user}){900}$", {"user": value}) is None
    assert expression("^{user}$", {"user": "\ud800"}) is None


def test_text_that_is_not_unicode_matches_nothing() -> None:
    assert not Regex(".*").search("\ud800")


def test_results_are_remembered_and_forgotten() -> None:
    found = Regex("^a")
    for at in range(1_000):
        assert found.search(f"a{at}")
        assert not found.search(f"b{at}")
    assert len(found._found) <= 256
