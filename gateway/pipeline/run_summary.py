"""Summary of a command's run as a file, for schedulers or Prometheus' node exporter.

`FILE.prom` is in Prometheus' text format (for the textfile collector), any other name JSON. The file is
written when the command ends, also when it fails, and for a stream after each micro-batch. Each time the
whole file is replaced.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from gateway.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

WATCH_SECS: Final = 1
PREFIX: Final = "gateway_pipeline_"
FIGURES: Final = {
    "ok": "1 if the command succeeded and found no fault.",
    "running": "1 while the command runs; an old file with 1 means that it was killed.",
    "finished_seconds": "Time of this summary in seconds since 1970.",
    "duration_seconds": "Duration of the run in seconds.",
    "rows": "Rows that were read and written.",
    "rows_missing": "Rows that are missing in the journal.",
    "rows_behind": "Rows of the journal that were not read yet.",
    "total_rows": "Rows of the archive or table.",
    "messages": "Messages in the rows.",
    "rejected": "Bodies that do not fit their schema.",
    "rescued": "Messages with values that change in their column, or have none.",
    "files": "Files that were written.",
    "deleted": "Files that were deleted.",
    "bytes": "Bytes that were written.",
    "lost": "Messages that are lost.",
    "repeated": "Messages that were delivered more than once.",
    "unknown": "Messages that the consumer received although none was accepted.",
    "double": "Rows that occur more than once.",
    "waiting": "Messages that wait.",
    "sent": "Messages that were published again.",
}
"""Descriptions by name without the prefix."""

Figures = dict[str, float]


class RunSummary:
    """Summary of one run of a command; `figures` has the values that are written to the summary file.

    The file has Prometheus' text format if its name ends in `.prom`, otherwise JSON. If the path is None, no
    file is written.
    """

    def __init__(self, command: str, path: Path | None) -> None:
        self._command = command
        self._path = path
        self._begun = time.time()
        self.figures: Figures = {}

    def write(self, *, ok: bool, running: bool = False) -> None:
        """Write the summary, replacing the file. Raises PipelineError if the file cannot be written.

        `ok` is True if the command has succeeded, and `running` if it continues.
        """
        if self._path is None:
            return
        now = time.time()
        fields = {
            "ok": float(ok),
            "running": float(running),
            "finished_seconds": now,
            "duration_seconds": now - self._begun,
        }
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            draft.write_bytes(self._data(fields | self.figures))
            draft.replace(self._path)
        except OSError as error:
            raise PipelineError(f"{self._path} cannot be written: {error.strerror}") from error

    def _data(self, fields: Mapping[str, float]) -> bytes:
        assert self._path is not None
        if self._path.suffix != ".prom":
            whole = {"command": self._command, **fields} | {
                one: bool(fields[one]) for one in ("ok", "running")
            }
            return json.dumps(whole).encode() + b"\n"
        registry = CollectorRegistry()
        for name, value in fields.items():
            gauge = Gauge(f"{PREFIX}{name}", FIGURES[name], ["command"], registry=registry)
            gauge.labels(self._command).set(value)
        return generate_latest(registry)


@contextmanager
def write_summary(command: str, path: Path | None) -> Iterator[RunSummary]:
    """Write the summary of the command `command` to the file `path` when the block ends.

    The value `ok` in the file is False if the block raised an error.
    """
    summary = RunSummary(command, path)
    try:
        yield summary
    except BaseException:
        try:
            summary.write(ok=False)
        except PipelineError as error:  # In addition to the error of the command itself.
            print(error, file=sys.stderr)
        raise
    summary.write(ok=True)


def rows_behind(progress: Mapping[str, Any]) -> int:
    """Return how many journal rows a stream has not read yet.

    `progress` is a StreamingQueryProgress of Spark, as a mapping.
    """
    return sum(
        max(0, number - taken.get(shard, 0))
        for source in progress["sources"]
        for taken in [_position(source["endOffset"])]
        for shard, number in _position(source["latestOffset"]).items()
    )


def _position(text: str | None) -> dict[str, int]:
    """Parse the offsets in Spark's JSON text: row numbers by shard. Return an empty dictionary for None."""
    return {} if text is None else dict(json.loads(text))


def watch(query: StreamingQuery, summary: RunSummary, *, follow: bool) -> None:
    """Wait for a stream to end, and write the summary after each micro-batch.

    While the stream runs, `ok` in the file is the value of `follow`: True if the stream is meant to run
    without end.
    """
    last_timestamp: object = None
    ended = False
    while not ended:
        ended = bool(query.awaitTermination(WATCH_SECS))
        progress = query.lastProgress
        if progress is not None and progress["timestamp"] != last_timestamp:
            last_timestamp = progress["timestamp"]
            summary.figures["rows_behind"] = rows_behind(progress)
            if not ended:
                summary.write(ok=follow, running=True)
