"""The audit log: whether it is kept, and where."""

from __future__ import annotations

from pydantic import Field

from gateway.settings.endpoints import FilePath
from gateway.settings.limits import Section


class Audit(Section):
    """One line for each client that came, was refused or went, for what was denied, and for what operators
    did."""

    enabled: bool = True
    """Off: events are only counted."""
    path: FilePath | None = None
    """A file of their own, of JSON lines; absent: the log."""
    file_bytes_max: int = Field(67_108_864, ge=65_536)
    """The file begins anew at this size; those before it stay as `.1`, `.2` and so on."""
    files: int = Field(5, ge=1, le=1_000)
    """How many of those."""
    per_second_max: int = Field(1_000, ge=0)
    """Lines of one event in a second, for strangers can provoke some; what is beyond is counted and told in
    one line. 0: any number."""
