"""Section `journal` of the configuration: the record of messages that crossed the gateway.

Sizes are bytes, times are seconds; a limit of 0 is no limit. The module holds and checks the values only;
`gateway/store/journal` writes the files.
"""

from __future__ import annotations

from typing import Final

from pydantic import Field, SecretStr, field_validator

from gateway.settings.endpoints import FilePath
from gateway.settings.limits import Section

HASH_KEY_CHARACTERS_MIN: Final = 16  # Shorter keys can be found by trying.


class Journal(Section):
    """Record of the messages that crossed the gateway, for `gateway journal` and the data pipeline."""

    enabled: bool = False
    """True if the journal is written."""
    all: bool = True
    """True if all routes are recorded. False: only routes with `journal: true`."""
    unrouted: bool = True
    """True if messages that no subscription, queue or route accepts are recorded as well, if `all` is true.
    """
    path: FilePath | None = None
    """Folder of the segments. Replicas may share it if each has a subfolder. Absent: `journal` in the store's
    folder."""
    shard: int = Field(0, ge=0)
    """Number of this process among those that write to the folder."""
    segment_bytes: int = Field(64 * 1024 * 1024, ge=0)
    """Size at which a new segment is begun; 0: no limit."""
    segment_secs: float = Field(3_600.0, ge=0)
    """Age at which a new segment is begun; 0: no limit."""
    retention_bytes: int = Field(10 * 1024**3, ge=0)
    """Size of all segments of one shard; beyond it the oldest are deleted, but never the newest. 0: no limit.
    """
    retention_secs: float = Field(7 * 86_400.0, ge=0)
    """Age at which segments are deleted; 0: no limit."""
    parquet: bool = True
    """True if complete segments are written as Parquet, by a process of low priority, if pyarrow is installed
    (`gateway[parquet]`)."""
    compress: int = Field(0, ge=0, le=9)
    """Compression level of zlib; 0: blocks are not compressed."""
    body_bytes_max: int = Field(65_536, ge=0)
    """Largest body that is recorded; of a larger one only the size is recorded. 0: no bodies are recorded."""
    hash_key: SecretStr | None = None
    """Key of the hashes that a route's `private` writes, at least 16 characters. The same key always gives
    the same hash of a value, and anyone who has it can find values by trying. Best set by an environment
    variable."""
    flush_interval_secs: float = Field(0.2, gt=0)
    """Longest time until a row is written to the file. With little traffic, a longer time makes smaller
    files."""
    sync_interval_secs: float = Field(1.0, ge=0)
    """Interval of fsync; 0 leaves it to the operating system."""
    backlog_bytes_max: int = Field(64 * 1024 * 1024, ge=1_048_576)
    """Blocks that wait for the disk; beyond it rows are dropped, counted, and marked as a gap."""

    @field_validator("hash_key")
    @classmethod
    def _long_enough(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and len(value.get_secret_value()) < HASH_KEY_CHARACTERS_MIN:
            raise ValueError(f"must have at least {HASH_KEY_CHARACTERS_MIN} characters")
        return value
