"""Parts of error messages about YAML and values: what to write instead of a common mistake.

Functions named `..._hint` return "" or a text that begins with "; ", for the end of an error message.
"""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

BRACES: Final = '; YAML reads a text that begins with { as a table: put it in quotes, as "{name}"'
BRACES_WITHIN: Final = (
    '; inside a YAML table in braces, put a text that contains { or } in quotes, as "plant/{name}"'
)
WORDS: Final = "; YAML reads on, off, yes and no as true and false: put the word in quotes"
QUOTED: Final = "; put a text that begins with {0} in quotes"
COLON: Final = "; put a text that contains a colon and a space in quotes"
TAB: Final = "; the line has a tab: indent with spaces"
INDENTED: Final = "; the keys of one table must begin in the same column"
OPEN_QUOTE: Final = "; the quote that begins in line {0} is not closed"
INI: Final = "; write sections as `listeners:`, and their keys below them, indented"
ONE_DOCUMENT: Final = "; a file must have only one document: remove the line ---"
SPACED: Final = "; write a space after the colon of a key"
COMMENT: Final = "; YAML reads a text that begins with # as a comment: put it in quotes"
UTF_16: Final = "the file is UTF-16: save it as UTF-8"

SECONDS: Final = {"ms": 0.001, "s": 1, "sec": 1, "secs": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400}
BYTES: Final = {
    "b": 1,
    **{unit: 1_000**power for power, unit in enumerate(("kb", "mb", "gb", "tb"), 1)},
    **{unit: 1_024**power for power, unit in enumerate(("kib", "mib", "gib", "tib"), 1)},
    **{unit: 1_024**power for power, unit in enumerate(("ki", "mi", "gi", "ti"), 1)},
    **{unit: 1_024**power for power, unit in enumerate(("k", "m", "g", "t"), 1)},
}
MEASURE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")
NUMBER: Final = re.compile(r"\s*0*(\d+(?:\.\d+)?)\s*")
BRACE_FIRST: Final = re.compile(r"(?:[:,\[-]|^)\s*\{[^{}:,]*\}\s*[^\s,\]}#]")
BRACE_WITHIN: Final = re.compile(r"\{.*:\s*[^\s\"'{\[,][^\"',]*\{[^{}]*\}")
COLON_WITHIN: Final = re.compile(r":\s+[^\s\"'{\[,#][^\"',{}\[\]]*:\s")
WITHIN: Final = ((BRACE_FIRST, BRACES), (BRACE_WITHIN, BRACES_WITHIN), (COLON_WITHIN, COLON))
PROBLEMS: Final = (
    ("another document", ONE_DOCUMENT),
    ("alphabetic or numeric", QUOTED.format("* or &")),
    ("expected key", INDENTED),
    ("block end", INDENTED),
)
PAIR: Final = re.compile(r"([a-z_]+)\s*[:=]\s*(\S+)")
NUMBERS: Final = frozenset(("int_type", "float_type", "int_parsing", "float_parsing"))
TABLES: Final = frozenset(("dict_type", "model_type", "model_attributes_type", "dataclass_type"))
LISTS: Final = frozenset(("list_type", "tuple_type", "set_type", "frozen_set_type"))


def yaml_hint(text: str, error: yaml.MarkedYAMLError) -> str:
    """Return the end of an error message about a text that is not YAML: what to write instead.

    `error` is the parser's error for this text. Return "" if the cause is not recognized.
    """
    problem, mark = error.problem or "", error.problem_mark
    lines = text.splitlines()
    near = [lines[one.line] for one in (error.context_mark, mark) if one and one.line < len(lines)]
    rest = "" if mark is None or mark.line >= len(lines) else lines[mark.line][mark.column :]
    if rest.startswith("\t") or any("\t" in line[: len(line) - len(line.lstrip())] for line in near):
        return TAB
    if "unexpected end of stream" in problem and error.context_mark is not None:
        return OPEN_QUOTE.format(error.context_mark.line + 1)
    if "<document start>" in problem:
        return INI if text.lstrip().startswith("[") else ""
    for pattern, hint in WITHIN:
        if any(pattern.search(line) for line in near):
            return hint
    if "cannot start any token" in problem and rest:
        return QUOTED.format(rest[0])
    return next((hint for words, hint in PROBLEMS if words in problem), "")


def content_hint(content: Any) -> str:
    """Return the end of an error message for a document that is a text like `key=value`, not a table.

    Return "" for any other document.
    """
    if isinstance(content, str) and (found := PAIR.match(content)):
        return f"; write {found[1]}: {found[2]}, with a colon and a space"
    return ""


def key_hint(key: str) -> str:
    """Return the end of an error message about a key that contains a colon, or "" for other keys.

    A colon without a space behind it is part of the key in YAML.
    """
    return SPACED if ":" in key else ""


def value_reason(kind: str, value: Any) -> str:
    """Return the reason why `value` is invalid if a table or list is needed; otherwise return "".

    `kind` is the type of pydantic's error. The result replaces pydantic's own text, which speaks of Python's
    types.
    """
    if kind in TABLES:
        needed = "must be a table of keys, as `key: value`"
    elif kind in LISTS:
        needed = "must be a list, each item on its own line after `- `"
    else:
        return ""
    return f"is empty, and {needed}" if value is None else needed


def value_hint(key: str, kind: str, value: Any) -> str:
    """Return the end of an error message about the value of a key: what to write instead.

    `kind` is the type of pydantic's error. Return "" if the mistake is not recognized.
    """
    if kind == "string_type" and isinstance(value, dict):
        return BRACES
    if isinstance(value, bool):
        return "" if kind in TABLES or kind in LISTS or kind in NUMBERS else WORDS
    if kind in ("bool_type", "bool_parsing") and isinstance(value, str):
        return "; write true or false, without quotes"
    if kind not in NUMBERS:
        return ""
    if value is None:
        return "; the key has no value"
    if not isinstance(value, str):
        return ""
    if found := NUMBER.fullmatch(value):
        return f"; write {found[1]}, without quotes or leading zeros"
    return _unit_hint(key, value)


def _unit_hint(key: str, value: str) -> str:
    found = MEASURE.fullmatch(value)
    if found is None:
        return "; write only the digits" if value[:1].isdigit() else ""
    for word, name, units in (("sec", "seconds", SECONDS), ("bytes", "bytes", BYTES)):
        factor = units.get(found[2].lower())
        if word in key and factor is not None:
            return f"; write the number of {name}: {float(found[1]) * factor:.15g}"
    return f"; write the number without a unit: {found[1]}"
