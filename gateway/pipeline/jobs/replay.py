"""Job `replay`: publish recorded messages again in their order, at the recorded or another speed.

Spark selects and sorts the rows; the driver publishes them on one connection, since order and speed concern
all of them. After each confirmed run of messages the position is written to a file, and a replay that is
started with that file continues behind it. If a replay ends before it has written the position of published
messages, they are published again, with the same id: the message's own, or else its place in the journal.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.sql import functions as F

from gateway.clients.wire import IN_FLIGHT, Client
from gateway.errors import PipelineError, RemoteProtocolError
from gateway.model.address import Address
from gateway.model.message import NEVER, Message
from gateway.model.properties import property_set
from gateway.pipeline.traffic.rows import ASIDE, address_of, message_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RUN_MAX: Final = 1_000  # Messages between two writes of the position.
PROGRESS_SECS: Final = 2.0
SECOND: Final = 1_000_000
ORDER: Final = ("received", "shard", "source_endpoint", "slot")
COLUMNS: Final = (
    *(*ORDER, "sequence", "source_protocol", "source_scope", "source_name", "client", "user"),
    *("target_protocol", "target_scope", "target_name", "target_address"),
    *("assurance", "durable", "retain", "expires", "properties", "body", "body_size"),
)


class ReplaySpeed(NamedTuple):
    """Speed of a replay.

    `speed` is a multiple of the recorded speed, and `rate` a number of messages per second. If both are None,
    the replay is as fast as possible.
    """

    speed: float | None = None
    rate: float | None = None

    def due_at(self, number: int, since_first: float) -> float:
        """Return when message `number` is to be sent, in seconds after the start of the replay.

        The message was recorded `since_first` seconds after the first one.
        """
        if self.rate is not None:
            return number / self.rate
        return since_first / self.speed if self.speed is not None else 0.0


@dataclass
class ReplayResult:
    """Result of a replay: the numbers of messages that were sent, refused, and skipped.

    Messages that were not fully recorded are skipped.
    """

    sent: int = 0
    refused: int = 0
    incomplete: int = 0
    """Rows whose body or properties are not in the journal; they are not sent."""


def select_rows(
    traffic: DataFrame, *, where: str | None = None, after: ReplayPosition | None = None
) -> DataFrame:
    """Return the rows to replay, in their order. A message has one row for each of its targets.

    `where` is an SQL condition on the columns; rows up to the position `after` are left out.
    """
    rows = traffic.where(~F.coalesce(F.expr(ASIDE), F.lit(False)))
    if where is not None:
        rows = rows.where(where)
    if after is not None:
        # SQL compares structs field by field.
        here = F.struct(F.unix_micros("received").alias("us"), "shard", "source_endpoint", "slot")
        there = F.struct(*(F.lit(value).alias(name) for name, value in after._asdict().items()))
        rows = rows.where(here > there)
    # As numbers, because a Spark time loses its zone in Python.
    micros = [F.unix_micros(name).alias(f"{name}_us") for name in ("received", "expires")]
    return rows.select(*COLUMNS, *micros).drop("expires").orderBy(*ORDER, "sequence")


class ReplayPosition(NamedTuple):
    """Position of a message in the order of a replay.

    The order is by time of receipt (`us`, microseconds UTC), shard, source endpoint, and `slot`: the position
    among the messages that were received together.
    """

    us: int
    shard: str
    source_endpoint: str
    slot: int


class Progress:
    """File in which a replay stores its position. If the path is None, nothing is stored."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the position file for the duration of the block, by means of a lock file beside it.

        Raises PipelineError if another process holds the lock.
        """
        if self._file is None:
            yield
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.with_name(f"{self._file.name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise PipelineError(
                    f"another replay uses {self._file} and would send the same messages: wait"
                    " until it ends, or name another file"
                ) from error
            yield

    def read(self) -> ReplayPosition | None:
        """Return the position after which to continue, or None to start at the beginning.

        Raises PipelineError for an invalid file.
        """
        if self._file is None or not self._file.exists():
            return None
        try:
            document = json.loads(self._file.read_text())
            return ReplayPosition(**document)
        except (ValueError, TypeError) as error:
            raise PipelineError(f"{self._file} is not a position file of a replay: {error}") from error

    def write(self, position: ReplayPosition) -> None:
        """Store `position`, up to which all messages are confirmed."""
        if self._file is None:
            return
        fresh = self._file.with_name(self._file.name + ".new")
        fresh.parent.mkdir(parents=True, exist_ok=True)
        with fresh.open("w") as file:
            json.dump(position._asdict(), file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._file)


class Replay:
    """Replay of recorded messages over one connection to a broker.

    The messages go to the address `to`. If `to` is None, they go to the address to which they were published
    or, with `at_target`, to the target to which they were routed.
    """

    def __init__(
        self,
        client: Client,
        pace: ReplaySpeed,
        progress: Progress,
        *,
        to: Address | None = None,
        at_target: bool = False,
        in_flight: int = IN_FLIGHT,
        tell: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client = client
        self._pace = pace
        self._progress = progress
        self._to = to
        self._at_target = at_target
        self._in_flight = in_flight
        self._tell = tell
        self._clock = clock
        self._sleep = sleep
        self._reported_at = clock()
        self.done = ReplayResult()

    def send(self, rows: Iterable[Any]) -> ReplayResult:
        """Publish the messages in `rows` in their order, and return the result.

        The position is stored after each group of messages that the broker has confirmed. Raises LinkError if
        the connection fails.
        """
        begun = self._clock()
        first: int | None = None
        run: list[Message] = []
        last: ReplayPosition | None = None
        whole: ReplayPosition | None = (
            None  # Last message of which all targets are in this run or earlier ones.
        )
        for number, row in enumerate(self._messages(rows)):
            first = row["received_us"] if first is None else first
            whole = whole if _position(row) == last else last
            due_at = begun + self._pace.due_at(number, (row["received_us"] - first) / SECOND)
            if due_at > self._clock() or len(run) >= RUN_MAX:
                self._flush(run, whole)
                run = []
                self._idle(due_at)
            message = self._message(row)
            last = _position(row)
            if message is None:
                self.done.incomplete += 1
            else:
                run.append(message)
        self._flush(run, last)
        return self.done

    def _idle(self, due_at: float) -> None:
        """Keep the connection alive until the time `due_at`, at which the next message is due."""
        while (remaining_secs := due_at - self._clock()) > 0:
            self._client.pause_reading(0.0)
            self._sleep(min(remaining_secs, 1.0))

    def _messages(self, rows: Iterable[Any]) -> Iterator[Any]:
        """Yield one row for each message or, with `at_target`, for each target of a message.

        With `at_target`, rows without a target are skipped.
        """
        before = None
        for row in rows:
            here = (_position(row), row["target_address"] if self._at_target else None)
            if here != before and not (self._at_target and row["target_address"] is None):
                yield row
            before = here

    def _message(self, row: Any) -> Message | None:
        """Return the message of a row as it is to be published. Return None if it was not fully recorded.

        A message without an id gets an id built from its position in the journal.
        """
        if row["body"] is None and row["body_size"]:
            return None
        found = message_of(row.asDict())
        try:
            properties = found.properties
        except RemoteProtocolError:
            return None
        if not properties.message_id:
            properties = replace(properties, message_id=f"{row['shard']}:{row['sequence']}")
        expires = NEVER
        if row["expires_us"] is not None:
            # The remaining lifetime is that at the time of receipt.
            expires = time.time() + max((row["expires_us"] - row["received_us"]) / SECOND, 1.0)
        address = self._to
        if address is None and self._at_target:
            address = address_of(row["target_protocol"], row["target_scope"], row["target_name"])
        return Message(
            address or found.address,
            found.body,
            property_set(properties),
            found.assurance,
            found.durable,
            found.retain,
            expires,
        )

    def _flush(self, run: list[Message], last: ReplayPosition | None) -> None:
        if run:
            refused = self._client.publish_many(run, in_flight=self._in_flight)
            self.done.sent += len(run) - len(refused)
            self.done.refused += len(refused)
            for at, why in list(refused.items())[:3]:
                self._tell(f"refused: {run[at].address!r}: {why.text}")
        if last is not None:
            self._progress.write(last)
            if self._clock() - self._reported_at >= PROGRESS_SECS:
                self._reported_at = self._clock()
                moment = datetime.fromtimestamp(last.us / SECOND, UTC).isoformat(timespec="seconds")
                self._tell(f"{self.done.sent} messages sent, up to {moment}")


def _position(row: Any) -> ReplayPosition:
    return ReplayPosition(row["received_us"], row["shard"], row["source_endpoint"], row["slot"])
