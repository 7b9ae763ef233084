"""YAML with the position of every key: what is read, what is refused, and what could take for ever."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from gateway import documents
from gateway.documents import DOCUMENT_BYTES_MAX, Complaint, Document, complaints, parse, read, suggestion
from gateway.errors import ConfigurationError

TEXT = "a:\n  b: [1, {c: x}]\n'1': &one {d: y}\ne: *one\nf:\n"


def test_every_key_and_item_has_its_position() -> None:
    document = parse(TEXT, "f")
    assert document.content == {"a": {"b": [1, {"c": "x"}]}, "1": {"d": "y"}, "e": {"d": "y"}, "f": None}
    assert {place: tuple(position) for place, position in document.positions.items()} == {
        (): (1, 1),
        ("a",): (1, 1),
        ("a", "b"): (2, 3),
        ("a", "b", 0): (2, 7),
        ("a", "b", 1): (2, 10),
        ("a", "b", 1, "c"): (2, 11),
        ("1",): (3, 1),
        ("1", "d"): (3, 12),
        ("e",): (4, 1),
        ("e", "d"): (3, 12),
        ("f",): (5, 1),
    }
    assert document.position(("a", "b", 1, "c", "z", 5)) == (2, 11)
    assert document.position(("z",)) == (1, 1)


def test_nothing_has_no_position() -> None:
    for document in (Document(), parse("", "f"), parse("# only a comment\n", "f")):
        assert (document.content, document.position(("a",))) == (None, (0, 0))


REFUSED = [
    ("a: 1\nb: {a: 1, a: 2}\n", r"f:2:11: b\.a: duplicate key, first set in line 2$"),
    ("a: 1\n'a': 2\n", r"f:2:1: a: duplicate key, first set in line 1$"),
    ('a: ["\\uD800"]\n', r"f:1:[58]: .*(unpaired surrogate|invalid Unicode)"),
    ('"\\uD800": 1\n', r"f:1:[14]: .*(unpaired surrogate|invalid Unicode)"),
    ("a: \ud800\n", r"f: not YAML: "),
    ("a: 2001-99-99\n", r"f: not YAML: month must be in 1\.\.12(, not 99)?$"),
    ("a: &x [*x]\n", r"f: not YAML: maximum recursion depth exceeded"),
    ("[" * 4_000_000, r"f:1:101: nested more than 100 levels deep$"),
    ("- " * 2_000_000, r"f:1:201: nested more than 100 levels deep$"),
    ("a: *b\n", r"f:1:4: not YAML: found undefined alias"),
    ("a: [1\n", r"f:2:1: not YAML: .*expected ',' or '\]'"),
    ("a: 1\n\tb: 1\n", r"f:2:1: not YAML: found .*(tab|\\t)"),
    ("? [a, {b: 1}]\n: 2\n", r"f:1:3: not YAML: found unhashable key"),
    ("a: 1\n--- \nb: 2\n", r"f:2:1: not YAML: but found another document"),
    ("\x00", r"f: not YAML: unacceptable character #x0000"),
]


@pytest.mark.parametrize("loader", [yaml.CSafeLoader, yaml.SafeLoader])
@pytest.mark.parametrize("text, expected", REFUSED, ids=[row[1] for row in REFUSED])
def test_refused(
    monkeypatch: pytest.MonkeyPatch, loader: type[yaml.SafeLoader], text: str, expected: str
) -> None:
    monkeypatch.setattr(documents, "_LOADER", loader)
    with pytest.raises(ConfigurationError) as caught:
        parse(text, "f")
    assert re.match(expected, str(caught.value)), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.needs("time")
def test_a_few_lines_of_aliases_that_mean_billions() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    with pytest.raises(ConfigurationError, match="^f: more than 500000 keys and items$"):
        parse("\n".join(lines), "f")


@pytest.mark.parametrize(
    "data, reason",
    [
        (b"a: \xff", "1: not UTF-8 at byte 3: save the file as UTF-8"),
        (b"#" * (DOCUMENT_BYTES_MAX + 1), f" more than {DOCUMENT_BYTES_MAX} bytes"),
    ],
)
def test_bytes_that_are_no_text(tmp_path: Path, data: bytes, reason: str) -> None:
    file = tmp_path / "f.yaml"
    file.write_bytes(data)
    with pytest.raises(ConfigurationError) as caught:
        read(file)
    assert str(caught.value) == f"{file}:{reason}"


def test_a_folder_and_a_byte_order_mark(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: Is a directory$"):
        read(tmp_path)
    file = tmp_path / "f.yaml"
    file.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read(file).content == {"a": 1}


class Inner(BaseModel, extra="forbid", strict=True):
    count: int = 0
    either: int | str = 0


class Outer(BaseModel, extra="forbid", strict=True):
    inner: dict[str, Inner] = {}
    items: list[Inner | None] = []
    needed: bool


@pytest.mark.parametrize(
    "content, expected",
    [
        (
            {"needed": True, "inner": {"x": {"cuont": 1}}},
            ["inner.x.cuont: unknown key; did you mean 'count'?"],
        ),
        (
            {"needed": True, "items": [{"either": 1.5}]},
            [
                "items[0].either: input should be a valid integer, not 1.5",
                "items[0].either: input should be a valid string, not 1.5",
            ],
        ),
        ({"needed": 1}, ["needed: input should be a valid boolean, not 1"]),
        ({}, ["needs 'needed'"]),
        ({"needed": True, 1: 2}, ["keys should be strings, not 1"]),
        ({"needed": True, "zz": 2}, ["zz: unknown key; known: inner, items, needed"]),
    ],
)
def test_what_a_model_finds_wrong(content: object, expected: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(content)
    assert [one.text for one in complaints(caught.value, Outer)] == expected


def test_a_complaint_without_its_value() -> None:
    assert Complaint(("a", 0), "no", "x", "; yes?").text == "a[0]: no, not 'x'; yes?"
    assert Complaint(("a", 0), "no", "x")._replace(value=None).text == "a[0]: no"


def test_suggestions() -> None:
    assert suggestion("PROT", ["port", "host"]) == "; did you mean 'port'?"
    assert suggestion("re", ["receive_bytes_max", "x"]) == "; did you mean 'receive_bytes_max'?"
    assert suggestion("zz", ["port", "host"]) == "; known: port, host"
    assert suggestion("zz", []) == ""
