"""The journal's options. Sizes are octets, times are seconds; a limit of 0 does not limit."""

from __future__ import annotations

from typing import Final

from pydantic import Field, SecretStr, field_validator

from gateway.settings.endpoints import FilePath
from gateway.settings.limits import Section

HASH_KEY_CHARACTERS_MIN: Final = 16  # a shorter one is found by trying


class Journal(Section):
    """A record of what crossed, which `gateway journal` and the pipeline read."""

    enabled: bool = False
    """Whether anything is written down."""
    all: bool = True
    """False: only routes that say `journal: true`."""
    unrouted: bool = True
    """Whether messages that no subscription, queue or route takes have a row, if `all` is true."""
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
    hash_key: SecretStr | None = None
    """With what `private` of a route hashes, 16 characters at least: the same key makes the same hash of a
    value for ever, and who has it can try values. Best said by the environment."""
    flush_interval_secs: float = Field(0.2, gt=0)
    """A row is in the file this soon; with little traffic, longer makes smaller files."""
    sync_interval_secs: float = Field(1.0, ge=0)
    """Between fsyncs; 0: when the system sees fit."""
    backlog_bytes_max: int = Field(64 * 1024 * 1024, ge=1_048_576)
    """Blocks that wait for the disk; beyond it rows are dropped, counted, and marked as a gap."""

    @field_validator("hash_key")
    @classmethod
    def _long_enough(cls, given: SecretStr | None) -> SecretStr | None:
        if given is not None and len(given.get_secret_value()) < HASH_KEY_CHARACTERS_MIN:
            raise ValueError(f"has less than {HASH_KEY_CHARACTERS_MIN} characters")
        return given
