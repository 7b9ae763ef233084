"""Reader of mapping files: parses YAML and checks it. Each error names file, line and column."""

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

VERSION_DIGITS: Final = 12  # hexadecimal digits of the text's SHA-256 digest


class Mapping:
    """Validated mapping file: its content (`document`), and the position in the text of each part of it.

    `version` is a short digest of the text.
    """

    __slots__ = ("_source", "document", "file", "text", "version")

    def __init__(self, source: Document) -> None:
        """Validate the document. Raises pydantic's ValidationError."""
        self.file = source.file
        self.document = MappingFile.model_validate(source.content)
        self.text = source.text
        self.version = sha256(source.text.encode()).hexdigest()[:VERSION_DIGITS]
        self._source = source

    def position(self, place: Place) -> Position:
        """Return the line and column, both starting at 1, of a part of the document.

        `place` is the path of keys and indices that leads to the part. If the file does not contain it,
        return the position of the part that would contain it.
        """
        return self._source.position(place)

    def error(self, place: Place, reason: str, inner: tuple[int, int] | None = None) -> MappingError:
        """Build a MappingError with the text `reason` for the part of the document at `place`.

        `place` is the path of keys and indices that leads to the part. `inner` is a line and column, both
        starting at 1, within the text there; None stands for the whole part.
        """
        text = f"{dotted(place)}: {reason}"
        at = None if inner is None else self._source.position_inside(place, *inner)
        if at is None:
            return _error(self._source, place, text)
        return MappingError(text, file=self.file, line=at.line, column=at.column)


def load(paths: Iterable[str | Path]) -> list[Mapping]:
    """Read mapping files.

    A path with wildcards stands for all files that match it, sorted by name. Raises MappingError with file,
    line and reason.
    """
    files: list[str] = []
    for path in map(str, paths):
        matches = sorted(glob(path)) if has_magic(path) else [path]
        if not matches:
            raise MappingError("no file matches it", file=path)
        files.extend(match for match in matches if match not in files)
    return [_read(file) for file in files]


def _read(file: str) -> Mapping:
    return _checked(lambda: documents.read(file))


def parse(text: str, file: str = "<text>") -> Mapping:
    """Parse and validate the text of a mapping file.

    Raises a MappingError for the first fault; `others` of the error are the further faults.
    """
    return _checked(lambda: documents.parse(text, file))


def _checked(read: Callable[[], Document]) -> Mapping:
    try:
        source = read()
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
    """Build a MappingError with all faults that pydantic has found in a file, sorted by position.

    The error has the reason and position of the first fault; `others` of the error has the further faults.
    """
    found = {
        (source.position(one.place), _worded(one).text): one.place for one in complaints(error, MappingFile)
    }
    (first, reason), *others = sorted(found)
    below = [_error(source, found[one], one[1]) for one in others]
    return MappingError(reason, file=source.file, line=first.line, column=first.column, others=below)


def _worded(complaint: Complaint) -> Complaint:
    """Return a complaint about an invalid `window` with a readable reason. Return others unchanged."""
    if complaint.place[-1:] == ("window",) and complaint.value is not None:
        return complaint._replace(reason="a number and s, m, h or d, as 10m")
    return complaint


def _error(source: Document, place: Place, reason: str) -> MappingError:
    line, column = source.position(place)
    return MappingError(reason, file=source.file, line=line, column=column)
