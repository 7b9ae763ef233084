"""From a YAML file to a checked mapping: each complaint names its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from glob import glob, has_magic
from hashlib import sha256
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from gateway import documents
from gateway.documents import Complaint, Document, Place, Position, complaints, dotted
from gateway.errors import ConfigurationError, MappingError
from gateway.mapping.schema import MappingFile

__all__ = ["Mapping", "Place", "load", "parse"]

VERSION_DIGITS: Final = 12  # of its digest


class Mapping:
    """A checked mapping file: `document`, and the line (from 1) of every place in it.

    `version` is short and differs when the text does.
    """

    __slots__ = ("_source", "document", "file", "text", "version")

    def __init__(self, source: Document) -> None:
        """Raises pydantic's ValidationError."""
        self.file = source.file
        self.document = MappingFile.model_validate(source.content)
        self.text = source.text
        self.version = sha256(source.text.encode()).hexdigest()[:VERSION_DIGITS]
        self._source = source

    def position(self, place: Place) -> Position:
        """Where `place` is, or what encloses it when it was not written."""
        return self._source.position(place)

    def error(self, place: Place, reason: str, inner: tuple[int, int] | None = None) -> MappingError:
        """The error that `reason` is, at `place`; `inner`: at this line and column of the text there."""
        told = f"{dotted(place)}: {reason}"
        at = None if inner is None else self._source.inside(place, *inner)
        if at is None:
            return _error(self._source, place, told)
        return MappingError(told, file=self.file, line=at.line, column=at.column)


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
    return _checked(lambda: documents.read(file))


def parse(text: str, file: str = "<text>") -> Mapping:
    """Check the text of a mapping file. Raises MappingError: the first complaint, the others below it."""
    return _checked(lambda: documents.parse(text, file))


def _checked(given: Callable[[], Document]) -> Mapping:
    try:
        source = given()
    except ConfigurationError as error:
        raise MappingError(error.reason, file=error.file, line=error.line, column=error.column) from error
    if not isinstance(source.content, dict):
        reason = "a mapping file is a YAML mapping with version and routes"
        raise MappingError(reason, file=source.file, line=1, column=1)
    try:
        return Mapping(source)
    except ValidationError as error:
        raise _all(error, source) from error


def _all(error: ValidationError, source: Document) -> MappingError:
    """All complaints by position: the first is the error's reason, the others follow."""
    found = {
        (source.position(one.place), _worded(one).text): one.place for one in complaints(error, MappingFile)
    }
    (first, reason), *others = sorted(found)
    below = [_error(source, found[one], one[1]) for one in others]
    return MappingError(reason, file=source.file, line=first.line, column=first.column, others=below)


def _worded(complaint: Complaint) -> Complaint:
    """In words where the model has a regular expression."""
    if complaint.place[-1:] == ("window",) and complaint.given is not None:
        return complaint._replace(reason="a number and s, m, h or d, as 10m")
    return complaint


def _error(source: Document, place: Place, reason: str) -> MappingError:
    line, column = source.position(place)
    return MappingError(reason, file=source.file, line=line, column=column)
