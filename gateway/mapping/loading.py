"""From a YAML file to a checked mapping, with the line of every key: each complaint names its place."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from glob import glob, has_magic
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel, ValidationError

from gateway.errors import MappingError
from gateway.mapping.schema import (
    Case,
    Deduplicate,
    Delivery,
    Expected,
    From,
    MappingFile,
    OutboxRule,
    Published,
    RouteRule,
    To,
)
from gateway.model.properties import is_unicode

Place = tuple[str | int, ...]
MAPPING_FILE_MAX: Final = 4_194_304  # octets; far above any hand-written file, far below what would hurt

VERSION_DIGITS: Final = 12  # of its digest

# Which model stands at a place, list positions left out.
_MODELS: Final[dict[Place, type[BaseModel]]] = {
    (): MappingFile,
    ("routes",): RouteRule,
    ("routes", "from"): From,
    ("routes", "to"): To,
    ("routes", "delivery"): Delivery,
    ("routes", "outbox"): OutboxRule,
    ("routes", "deduplicate"): Deduplicate,
    ("tests",): Case,
    ("tests", "publish"): Published,
    ("tests", "expect"): Expected,
}


class Mapping:
    """A checked mapping file: `document`, and the line (from 1) of every place in it.

    `version` is short and differs when the text does.
    """

    __slots__ = ("document", "file", "lines", "version")

    def __init__(self, file: str, document: MappingFile, lines: dict[Place, int], version: str) -> None:
        self.file = file
        self.document = document
        self.lines = lines
        self.version = version

    def line(self, place: Place) -> int:
        """The line of `place`, or of what encloses it when it was not written."""
        return _line(self.lines, place)

    def error(self, place: Place, reason: str) -> MappingError:
        """The error that `reason` is, at `place`."""
        return MappingError(f"{dotted(place)}: {reason}", file=self.file, line=self.line(place))


def load(paths: Iterable[str | Path]) -> list[Mapping]:
    """Read mapping files. A path with wildcards stands for all files that it matches, in order of name.

    Raises MappingError with file, line and reason.
    """
    files: list[str] = []
    for path in map(str, paths):
        matches = sorted(glob(path)) if has_magic(path) else [path]
        if not matches:
            raise MappingError("no file matches", file=path)
        files.extend(match for match in matches if match not in files)
    return [_read(file) for file in files]


def _read(file: str) -> Mapping:
    try:
        with open(file, "rb") as stream:
            octets = stream.read(MAPPING_FILE_MAX + 1)
    except OSError as error:
        raise MappingError(f"cannot be read: {error.strerror}", file=file) from error
    if len(octets) > MAPPING_FILE_MAX:
        raise MappingError(f"more than {MAPPING_FILE_MAX} octets", file=file)
    try:
        return parse(octets.decode(), file)
    except UnicodeDecodeError as error:
        raise MappingError(f"not UTF-8 at octet {error.start}", file=file) from error


def parse(text: str, file: str = "<text>") -> Mapping:
    """Check the text of a mapping file. Raises MappingError: the first complaint, the others below it."""
    lines: dict[Place, int] = {}
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _walk(node, (), lines, file)
        content = loader.construct_document(node) if node is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise MappingError(str(error.problem), file=file, line=mark.line + 1 if mark else 0) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise MappingError(f"not YAML: {error}", file=file) from error
    if not isinstance(content, dict):
        raise MappingError("a mapping file is a YAML mapping with version and routes", file=file, line=1)
    try:
        version = sha256(text.encode()).hexdigest()[:VERSION_DIGITS]
        return Mapping(file, MappingFile.model_validate(content), lines, version)
    except ValidationError as error:
        raise _complaint(error, file, lines) from error


def _walk(node: yaml.Node | None, place: Place, lines: dict[Place, int], file: str) -> None:
    """Note the line of every key and item; refuse a key that is given twice, and text that is none: YAML can
    escape half a character, which no protocol can say."""
    if node is None:
        return
    lines.setdefault(place, node.start_mark.line + 1)
    if isinstance(node, yaml.ScalarNode) and not is_unicode(node.value):
        raise MappingError(f"{dotted(place)}: half a character", file=file, line=node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            _walk(key, place, lines, file)
            inner = (*place, str(key.value))
            if inner in lines:
                raise MappingError(f"{dotted(inner)}: given twice", file=file, line=key.start_mark.line + 1)
            lines[inner] = key.start_mark.line + 1
            _walk(value, inner, lines, file)
    elif isinstance(node, yaml.SequenceNode):
        for at, item in enumerate(node.value):
            _walk(item, (*place, at), lines, file)


def _complaint(error: ValidationError, file: str, lines: dict[Place, int]) -> MappingError:
    """All complaints, ordered by line: the first is the error's reason, the others follow line by line."""
    found: dict[tuple[int, str], None] = {}
    for detail in error.errors(include_url=False):
        place = _known_place(detail["loc"], lines)
        found[_line(lines, place), f"{dotted(place)}: {_reason(detail, place)}"] = None
    (line, reason), *others = sorted(found)
    below = "".join(f"\n{file}:{other_line}: {other}" for other_line, other in others)
    return MappingError(reason + below, file=file, line=line)


def _reason(detail: Any, place: Place) -> str:
    """A complaint of pydantic in our words."""
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        model = _MODELS.get(tuple(step for step in place[:-1] if isinstance(step, str)))
        keys = [field.alias or name for name, field in model.model_fields.items()] if model else []
        return "unknown key" + _suggestion(str(place[-1]), keys)
    if kind == "missing":
        return f"needs {detail['loc'][-1]!r}"
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    if place[-1] == "window":
        return f"a number and s, m, h or d, as 10m; not {value!r}"
    text = str(detail["msg"])
    text = text[0].lower() + text[1:]
    if kind == "literal_error":
        return f"{text}, not {value!r}" + _suggestion(str(value), text.split("'")[1::2])
    return f"{text}, not {value!r}" if isinstance(value, str | int | float) else text


def _suggestion(word: str, options: list[str]) -> str:
    near = get_close_matches(word, options, 1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(options)}" if options else ""


def _known_place(place: Place, lines: dict[Place, int]) -> Place:
    """The longest part of `place` that stands in the file; pydantic also names missing keys and types."""
    while place and place not in lines:
        place = place[:-1]
    return place


def _line(lines: dict[Place, int], place: Place) -> int:
    return lines.get(_known_place(place, lines), 0)


def dotted(place: Place) -> str:
    """A place as people write it: `routes[0].to.topic`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    return text.lstrip(".") or "the file"
