"""YAML documents with the line and column of each key, and error messages that refer to these positions.

The configuration and the mapping files are both read here. A place is the path of keys and list indexes to a
part of a document: `("routes", 0, "to", "topic")`. Errors that a pydantic model finds in a document are
formatted here, too: with the place as people write it (`routes[0].to.topic`), in plain words, and with a
suggestion for a misspelt key.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, Tag, ValidationError

from gateway.errors import ConfigurationError, without_users
from gateway.hints import UTF_16, key_hint, value_hint, value_reason, yaml_hint
from gateway.model.properties import is_unicode

Place = tuple[str | int, ...]
DOCUMENT_BYTES_MAX: Final = 4_194_304  # far above any hand-written file, far below what would hurt
UTF_16_MARKS: Final = (b"\xff\xfe", b"\xfe\xff")
DOCUMENT_NESTING_MAX: Final = 100  # the C library is recursive; no hand-written file is nested so deeply
DOCUMENT_PLACES_MAX: Final = 500_000  # an alias repeats what it names: ten lines of them can mean billions

# libyaml is eighteen times faster; a PyYAML built without it has the same loader in Python.
_LOADER: Final[type[yaml.SafeLoader]] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Position(NamedTuple):
    """Line and column of a part of a file, both from 1; 0 if unknown."""

    line: int = 0
    column: int = 0


class Document:
    """Parsed YAML file: its `content`, and the position in the file of each key and list item.

    The keys of `positions` are paths: tuples of keys and list indexes.
    """

    __slots__ = ("content", "file", "positions", "text")

    def __init__(
        self,
        file: str = "",
        text: str = "",
        content: Any = None,
        positions: dict[Place, Position] | None = None,
    ) -> None:
        self.file = file
        self.text = text
        self.content = content
        self.positions = {} if positions is None else positions

    def position(self, place: Place) -> Position:
        """Return the line and column of the part at `place`, a path of keys and list indexes.

        If the file has no such part, return those of the nearest part that would contain it.
        """
        while place and place not in self.positions:
            place = place[:-1]
        return self.positions.get(place, Position())

    def position_inside(self, place: Place, line: int, column: int) -> Position | None:
        """Convert a position within the text value at `place` to a position in the file.

        `place` is a path of keys and list indexes. `line` and `column` count from 1 within the value. Return
        None if the value is written in a YAML style in which positions cannot be converted.
        """
        node: Any = _LOADER(self.text).get_single_node()
        for step in place:
            if isinstance(node, yaml.MappingNode):
                node = next((value for key, value in node.value if key.value == str(step)), None)
            elif isinstance(node, yaml.SequenceNode):
                node = node.value[int(step)]
        if not isinstance(node, yaml.ScalarNode):
            return None
        lines, start = self.text.splitlines(), node.start_mark
        if node.style == "|":
            at = start.line + line
            written = lines[at] if at < len(lines) else ""
            indent = len(written) - len(written.lstrip(" "))
            return Position(at + 1, indent + column)
        quote = node.style or ""
        if line > 1 or not lines[start.line][start.column :].startswith(f"{quote}{node.value}{quote}"):
            return None
        return Position(start.line + 1, start.column + len(quote) + column)


class Complaint(NamedTuple):
    """Error that a pydantic model has found in a document.

    `place` is the path of keys and list indexes to the faulty part. `reason` is what is wrong. `value` is the
    value of this part, or None if the message needs no value. `hint` is the end of the message: what to write
    instead.
    """

    place: Place
    reason: str
    value: str | float | None = None
    hint: str = ""

    @property
    def text(self) -> str:
        """Error message in one line, without file, line and column."""
        suffix = "" if self.value is None else f", not {without_users(repr(self.value))}"
        place = f"{dotted(self.place)}: " if self.place else ""
        return f"{place}{self.reason}{suffix}{self.hint}"


def read(file: str | Path) -> Document:
    """Read and parse a YAML file.

    Raises ConfigurationError with file, line, column and reason.
    """
    try:
        with open(file, "rb") as stream:
            data = stream.read(DOCUMENT_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigurationError(f"cannot be read: {error.strerror}", file=str(file)) from error
    if len(data) > DOCUMENT_BYTES_MAX:
        raise ConfigurationError(f"more than {DOCUMENT_BYTES_MAX} bytes", file=str(file))
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if data.startswith(UTF_16_MARKS):
            raise ConfigurationError(UTF_16, file=str(file)) from error
        reason = f"not UTF-8 at byte {error.start}: save the file as UTF-8"
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(reason, file=str(file), line=line) from error
    return parse(text, str(file))


def parse(text: str, file: str) -> Document:
    """Parse a YAML text; `file` is the file name to use in errors. Raises ConfigurationError."""
    positions: dict[Place, Position] = {}
    try:
        _refuse_deep(text, file)
        loader = _LOADER(text)
        node = loader.get_single_node()
        if node is None:
            return Document(file, text)
        positions[()] = _position(node)
        for place, position in _places(node, (), file):
            if place in positions:
                before = positions[place].line
                raise _fault(file, position, f"{dotted(place)}: duplicate key, first set in line {before}")
            positions[place] = position
            if len(positions) > DOCUMENT_PLACES_MAX:
                raise ConfigurationError(f"more than {DOCUMENT_PLACES_MAX} keys and items", file=file)
        return Document(file, text, loader.construct_document(node), positions)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = Position() if mark is None else Position(mark.line + 1, mark.column + 1)
        raise _fault(file, position, f"not YAML: {error.problem}{yaml_hint(text, error)}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"not YAML: {str(error).splitlines()[0]}", file=file) from error


def refuse_lost_end(before: str, now: str, file: str, *, sections: bool = True) -> None:
    """Raise ConfigurationError if a YAML file seems to have lost its end when it was written.

    `before` is the previous text of the file, `now` the present one. The end seems to be lost if `now` is the
    beginning of `before`, and is empty, ends within a line, or ends within an item. Whole items at the end (a
    role, a user, a route) may be removed. With `sections` the items are those of the sections at the top
    level, and no section may be removed.
    """
    if not before.startswith(now) or now == before:
        return
    if not now.strip():
        raise ConfigurationError(
            "the file is empty but was not at the last load; restart the gateway if that is intended",
            file=file,
        )
    if not now.endswith("\n"):
        raise ConfigurationError(
            "the file is a truncated copy of the version loaded before; write the whole file", file=file
        )
    old, new = parse(before, file).content, parse(now, file).content
    parts = _pairs(old, new) if not sections else [pair for two in _pairs(old, new) for pair in _pairs(*two)]
    if sections and isinstance(old, dict) and isinstance(new, dict) and old.keys() > new.keys():
        lost = next(key for key in old if key not in new)
        raise ConfigurationError(
            (
                f"{lost}: missing at the end of the file, which looks truncated; restart the gateway if"
                " that is intended"
            ),
            file=file,
        )
    if any(was != item for was, item in parts):
        reason = "the last item of the file looks truncated; if it is complete, add a comment line after it"
        raise ConfigurationError(reason, file=file)


def _pairs(old: Any, new: Any) -> list[tuple[Any, Any]]:
    """Return the pairs of items that have the same key in two tables, or the same index in two lists.

    For other values return one pair: the values themselves.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        return [(old[key], new[key]) for key in old if key in new]
    if isinstance(old, list) and isinstance(new, list):
        return list(zip(old, new, strict=False))
    return [(old, new)]


def _refuse_deep(text: str, file: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DOCUMENT_NESTING_MAX:
            reason = f"nested more than {DOCUMENT_NESTING_MAX} levels deep"
            raise _fault(file, _position(event), reason)


def _places(node: yaml.Node, place: Place, file: str) -> Iterator[tuple[Place, Position]]:
    """Yield the path and position of every key and list item below `node`. `place` is the path of `node`.

    Raises ConfigurationError for a text with a lone surrogate, which YAML can escape but no protocol can
    encode.
    """
    if isinstance(node, yaml.ScalarNode) and not is_unicode(node.value):
        raise _fault(
            file,
            _position(node),
            f"{dotted(place)}: contains an unpaired surrogate, which is not valid Unicode",
        )
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below = (*place, str(key.value))
            if not is_unicode(below[-1]):
                raise _fault(
                    file,
                    _position(key),
                    f"{dotted(place)}: contains an unpaired surrogate, which is not valid Unicode",
                )
            yield below, _position(key)
            yield from _places(value, below, file)
    elif isinstance(node, yaml.SequenceNode):
        for at, item in enumerate(node.value):
            yield (*place, at), _position(item)
            yield from _places(item, (*place, at), file)


def _position(part: yaml.Node | yaml.Event) -> Position:
    mark = part.start_mark
    return Position() if mark is None else Position(mark.line + 1, mark.column + 1)


def _fault(file: str, position: Position, reason: str) -> ConfigurationError:
    return ConfigurationError(reason, file=file, line=position.line, column=position.column)


def complaints(error: ValidationError, model: type[BaseModel]) -> Iterator[Complaint]:
    """Yield one Complaint for each error in a ValidationError of the pydantic model `model`."""
    details = error.errors(include_url=False)
    for detail in details:
        kind, value, steps = detail["type"], detail["input"], detail["loc"]
        if kind == "extra_forbidden":
            place, owner, kinds = _follow(model, steps[:-1])
            key = str(steps[-1])
            others = [tag for tag, part in kinds.items() if tag and key in keys_of(part)]
            reason = f"for protocol {' and '.join(others)} only"
            if not others:
                lacking = [
                    one["loc"][-1]
                    for one in details
                    if one["type"] == "missing" and one["loc"][:-1] == steps[:-1]
                ]
                near = get_close_matches(key.lower(), map(str, lacking), 1)  # what must be there comes first
                meant = suggestion(key, near or keys_of(owner))
                reason = f"unknown key{key_hint(key) or _section_hint(owner, key) or meant}"
            yield Complaint((*place, key), reason)
            continue
        place, _, _ = _follow(model, steps)
        reason = detail["msg"][:1].lower() + detail["msg"][1:]
        if kind == "missing":
            yield Complaint(place[:-1], f"needs {place[-1]!r}")
        elif kind == "value_error":
            yield Complaint(place, str(detail["ctx"]["error"]))
        elif kind == "literal_error":
            near = get_close_matches(str(value).lower(), reason.split("'")[1::2], 1)
            hint = f"; did you mean {near[0]!r}?" if near else value_hint(str(place[-1]), kind, value)
            yield Complaint(place, reason, _scalar_or_none(value), hint)
        else:
            key = str(place[-1]) if place else ""
            reason = value_reason(kind, value) or reason
            yield Complaint(place, reason, _scalar_or_none(value), value_hint(key, kind, value))


def _scalar_or_none(value: Any) -> str | float | None:
    return value if isinstance(value, str | float | int) else None


def _section_hint(owner: Any, key: str) -> str:
    """Return the end of an error message for a key in the wrong section, or "".

    It names the sections below the model `owner` that accept this key. The result is "" if there are none, or
    if `key` resembles a key of `owner` itself.
    """
    near = get_close_matches(key.lower(), keys_of(owner), 1)
    parts = [] if near else [part for part in keys_of(owner) if key in keys_of(type_below(owner, part))]
    return f"; it belongs below {' or '.join(parts)}" if parts else ""


def suggestion(word: str, known_words: list[str]) -> str:
    """Return the end of an error message for an unknown word, which suggests a similar known word.

    If there is none, it lists all known words. Return "" if there are no known words at all.
    """
    near = get_close_matches(word.lower(), known_words, 1) or [
        one for one in known_words if one.startswith(word)
    ]
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(known_words)}" if known_words else ""


def dotted(place: Place) -> str:
    """Return a path of keys and list indexes as people write it, as `routes[0].to.topic`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    return text.lstrip(".") or "the file"


# Types of a model by place.


def _follow(model: type[BaseModel], steps: Place) -> tuple[Place, Any, dict[str, Any]]:
    """Follow the path `steps` of a pydantic error through the types of `model`, as far as it leads.

    Return three values: the path without the names of types that pydantic inserts; the type of the part at
    this path; and the alternatives by tag, if this type is one of a tagged union.
    """
    found: Any = model
    place: Place = ()
    kinds: dict[str, Any] = {}
    for step in steps:
        tags = tagged_alternatives(found)
        if step in tags:
            found, kinds = tags[str(step)], tags
            continue
        if (told := _option_with_key(found, step)) is not None:
            found = told
            continue
        further = type_below(found, step)
        if further is None:
            break
        place, found, kinds = (*place, step), further, {}
    return place, found, kinds


def tagged_alternatives(annotation: Any) -> dict[str, Any]:
    """Return the alternatives of a tagged union by their tags, or an empty dictionary for another type."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        tags = [one.tag for one in parts[1:] if isinstance(one, Tag)]
        return {tags[0]: parts[0]} if tags else tagged_alternatives(parts[0])
    if origin is Union or origin is types.UnionType:
        return {tag: part for one in parts for tag, part in tagged_alternatives(one).items()}
    return {}


def _option_with_key(annotation: Any, step: str | int) -> Any:
    """Return the alternative of a union that has a key whose only value is `step`, or None.

    Pydantic uses this value as the name of the alternative in the path of an error.
    """
    parts = options(annotation)
    for option in parts if len(parts) > 1 else ():
        if any(get_args(kind) == (step,) for _, kind in _fields(option)):
            return option
    return None


def type_below(annotation: Any, step: str | int) -> Any:
    """Return the type of the key or list item `step` of a value of the type `annotation`.

    Return None if there is no such key or item.
    """
    found: list[Any] = []
    for option in options(annotation):
        origin = get_origin(option)
        if origin is dict and isinstance(step, str):
            return get_args(option)[1]
        if origin in (list, tuple) and isinstance(step, int):
            return get_args(option)[0]
        found += [field for name, field in _fields(option) if name == step and field not in found]
    return Union[tuple(found)] if found else None  # noqa: UP007 - as many as there are


def keys_of(annotation: Any) -> list[str]:
    """Return the keys that a model accepts, or that any model of a union accepts.

    Return an empty list for other types.
    """
    return list(dict.fromkeys(name for option in options(annotation) for name, _ in _fields(option)))


def options(annotation: Any) -> list[Any]:
    """Return the alternatives of a union, or a list of one for any other type. `Annotated` is removed."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return options(get_args(annotation)[0])
    if origin is Union or origin is types.UnionType:
        return [one for part in get_args(annotation) for one in options(part)]
    return [annotation]


def _fields(option: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(option, type) and issubclass(option, BaseModel):
        for name, field in option.model_fields.items():
            yield field.alias or name, field.annotation
