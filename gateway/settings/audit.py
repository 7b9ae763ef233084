"""Section `audit` of the configuration: the audit log, its file and its limits."""

from __future__ import annotations

from pydantic import Field

from gateway.settings.endpoints import FilePath
from gateway.settings.limits import Section


class Audit(Section):
    """Audit log of clients and operators.

    The log has one line for each client that connects, is refused or disconnects, for each denied request,
    and for each operation of an operator.
    """

    enabled: bool = True
    """True if audit lines are written. Otherwise events are only counted."""
    path: FilePath | None = None
    """File of JSON lines for audit events. Absent: the general log."""
    file_bytes_max: int = Field(67_108_864, ge=65_536)
    """Size in bytes at which a new file is begun; earlier files are renamed to `.1`, `.2` and so on."""
    files: int = Field(5, ge=1, le=1_000)
    """Number of earlier files that are preserved."""
    per_second_max: int = Field(1_000, ge=0)
    """Lines per second of each kind of event, since unauthenticated clients can provoke some kinds. Further
    lines are counted and reported in one line. 0: no limit."""
