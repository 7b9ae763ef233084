"""The journal's options. Sizes are octets, times are seconds; a limit of 0 does not limit."""

from __future__ import annotations

from pydantic import Field

from gateway.settings.endpoints import FilePath
from gateway.settings.limits import Section


class Journal(Section):
    """A record of what crossed, which `gateway journal` and the pipeline read."""

    enabled: bool = False
    """Whether anything is written down."""
    all: bool = True
    """False: only routes that say `journal: true`."""
    path: FilePath | None = None
    """Folder of the segments, which replicas may share if each has a folder below it; absent: `journal` in
    the store's folder."""
    shard: int = Field(0, ge=0)
    """Number of this process among those that write to the folder."""
    segment_bytes: int = Field(64 * 1024 * 1024, ge=0)
    """A new segment is begun at this size; 0: no limit."""
    segment_secs: float = Field(3_600.0, ge=0)
    """A new segment is begun at this age; 0: no limit."""
    retention_bytes: int = Field(10 * 1024**3, ge=0)
    """Of each shard: the oldest segments go when all have more than this; the newest stays; 0: no limit."""
    retention_secs: float = Field(7 * 86_400.0, ge=0)
    """They go when they are older; 0: no limit."""
    compress: int = Field(0, ge=0, le=9)
    """zlib's level; 0: blocks are not compressed."""
    body_bytes_max: int = Field(65_536, ge=0)
    """Larger bodies are left out, their size is kept; 0: all are left out."""
    flush_interval_secs: float = Field(0.2, gt=0)
    """A row is in the file this soon; with little traffic, longer makes smaller files."""
    sync_interval_secs: float = Field(1.0, ge=0)
    """Between fsyncs; 0: when the system sees fit."""
    backlog_bytes_max: int = Field(64 * 1024 * 1024, ge=1_048_576)
    """Blocks that wait for the disk; beyond it rows are dropped, counted, and marked as a gap."""
