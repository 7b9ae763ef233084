"""Who must treat protocols differently asks the dialect: their names are known in their own folders only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Final

import pytest

from gateway.errors import ConfigurationError
from gateway.protocols import DIALECTS, GROUP, OWN, join_dialects
from tests.house.sources import OURS, ROOT, nodes_of


def literals_of(path: Path) -> list[str]:
    """The protocols' names that stand in a file as texts of their own."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and node.value in DIALECTS
    ]


def test_a_name_stands_in_the_folders_of_its_protocol_only() -> None:
    assert [
        found for path in OURS if not set(path.parent.parts) & set(DIALECTS) for found in literals_of(path)
    ] == []


NAMED: Final = {
    one.name: re.compile(rf"(?<![\w./])({re.escape(one.name)}|{re.escape(one.title)})(?![\w./])")
    for one in OWN
}


def lists_of(path: Path) -> Iterator[str]:
    """Texts, but for those that explain the code, in which several protocols are named."""
    explains = {
        id(node.body[0].value)
        for node in nodes_of(path)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    explains |= {id(node.value) for node in nodes_of(path) if isinstance(node, ast.Expr)}
    for node in nodes_of(path):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in explains:
            continue
        if sum(bool(pattern.search(node.value)) for pattern in NAMED.values()) > 1:
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.value[:60]}"


def test_no_text_lists_the_protocols() -> None:
    """A list that is made of the dialects has the fourth one, too."""
    assert [found for path in OURS for found in lists_of(path)] == []


@pytest.mark.parametrize("name", DIALECTS)
def test_an_address_survives_its_text_and_its_bytes(name: str) -> None:
    dialect = DIALECTS[name]
    scopes = dialect.scopes or (
        ("", "e", "Shop.Contracts:OrderCreated", "50%", "%3A") if dialect.scope_word else ("",)
    )
    for scope in scopes:
        for text in ("a", "a:b", "queue:a", "%25", "a/b", "é"):
            address = dialect.address(scope, text)
            for again in (dialect.parse(dialect.show(address)), dialect.read_address(address.wire)):
                assert (again, again.scope, again.name) == (address, scope, text)


@pytest.mark.parametrize("name", DIALECTS)
def test_the_words_of_an_address_are_its_protocols_own(name: str) -> None:
    others = {word for other, one in DIALECTS.items() if other != name for word in one.words}
    assert not set(DIALECTS[name].words) & others
    assert set(DIALECTS[name].address_words) <= set(DIALECTS[name].words)


STOMP: Final = "tests.stomp.protocol.dialect:STOMP"


def offered(*values: str) -> list[EntryPoint]:
    return [EntryPoint(f"offered-{at}", value, GROUP) for at, value in enumerate(values)]


def test_another_distribution_offers_a_dialect() -> None:
    assert list(join_dialects(offered(STOMP))) == [*(one.name for one in OWN), "stomp"]


@pytest.mark.parametrize(
    "values, why",
    [
        (
            (STOMP, STOMP),
            r"offered-1 .*name stomp, stomp://, stomps://, word stomp_destination: already used by protocol",
        ),
        (
            ("gateway.protocols.mqtt.dialect:MQTT",),
            "name mqtt, .*word topic.*: already used by protocol mqtt",
        ),
        (("tests.stomp.nowhere:STOMP",), "cannot be loaded: ModuleNotFoundError"),
        (("tests.stomp.protocol.dialect:NOTHING",), "cannot be loaded: AttributeError"),
    ],
)
def test_one_that_cannot_be_joined_is_named(values: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        join_dialects(offered(*values))
