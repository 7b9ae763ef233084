"""Journals for the tests of the pipeline, written by the gateway's own writer, with times of our choosing.

Message number n has the body {"n": n}, comes from line n % 3, stays at home when n is even and crosses on
route `up` when it is odd; every fiftieth was refused by the route. One is received each millisecond and
settled 2 ms later.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from gateway.broker.journal import SLOTS_UNROUTED, UNROUTED_LABELS
from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED, NO_TAKER, Outcome, Reason, Verdict
from gateway.model.properties import Properties, Value, ValueType, property_set, string
from gateway.model.times import Monotonic
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.mqtt.dialect import topic_address
from gateway.store.journal.column_buffers import RowLabels
from gateway.store.journal.reader import JournalReader
from gateway.store.journal.segments import parquet_name
from gateway.store.journal.writer import JournalOptions, JournalWriter

START: Final = 1_700_000_000.0
"""UTC seconds at which message 0 is received: 2023-11-14 22:13:20."""
STEP: Final = 0.001
LATENCY: Final = 0.002
HOME: Final = RowLabels("", "", "mqtt", "mqtt")
UP: Final = RowLabels("up", "7f3a", "erp", "amqp091")
REFUSED: Final = Outcome(Verdict.REJECTED, Reason.HOPS, "a loop?")
RETURNED: Final = Outcome(Verdict.REJECTED, Reason.NO_ROUTE, "unrouted: no queue takes it")
SENDERS: Final = tuple(Sender("mqtt", f"press-{n}", "plant", f"10.0.0.{n}:40123") for n in range(3))
SETS: Final = tuple(
    property_set(
        Properties(
            content_type="application/json",
            message_id=f"m-{n}",
            headers=(("unit", string("°C")), ("line", Value(ValueType.INT32, n))),
        )
    )
    for n in range(3)
)


def message(number: int) -> Message:
    """Message `number` as it comes in."""
    line = number % 3
    return Message(
        topic_address(f"plant/{line}/t"),
        b'{"n": %d}' % number,
        sender=SENDERS[line],
        property_set=SETS[line],
        assurance=1,
        durable=True,
    )


def crossed(number: int) -> Message:
    """The same as route `up` sends it out."""
    made = message(number)
    made.address = amqp_address("amq.topic", f"{number % 3}.t")
    return made


class Clock:
    """A clock that is set by hand; UTC and the gateway's own are the same."""

    def __init__(self, now: float = START) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Journal:
    """A journal that is written: `write` as often as wanted, then `close`."""

    def __init__(
        self,
        folder: Path,
        *,
        shard: int = 0,
        start: float = START,
        options: JournalOptions | None = None,
        route: str = "up",
    ):
        self.clock = Clock(start)
        self._start = start
        self._up = UP._replace(route=route)
        self.writer = JournalWriter(
            folder, shard, options or JournalOptions(), clock=self.clock, utc=self.clock
        )

    def write(self, first: int, count: int) -> None:
        """Record messages `first` on, one after the other."""
        for number in range(first, first + count):
            received = self._start + number * STEP
            self.clock.now = received + LATENCY
            if number % 50 == 49:
                self.writer.refuse(self._up, [message(number)], REFUSED, Monotonic(received))
            elif number % 2:
                self.writer.record(
                    self._up, [crossed(number)], ACCEPTED, Monotonic(received), [message(number)]
                )
            else:
                self.writer.record(HOME, [message(number)], ACCEPTED, Monotonic(received))

    def write_unrouted(self, first: int, count: int, outcome: Outcome = NO_TAKER) -> None:
        """Record messages `first` on that had no target."""
        for number in range(first, first + count):
            received = self._start + number * STEP
            self.clock.now = received + LATENCY
            slots = [SLOTS_UNROUTED + number]
            self.writer.refuse(UNROUTED_LABELS, [message(number)], outcome, Monotonic(received), slots)

    def close(self) -> None:
        """Write what has gathered, and end."""
        self.writer.close()


def written(
    folder: Path,
    count: int,
    *,
    first: int = 0,
    shard: int = 0,
    block_rows: int = 4_096,
    route: str = "up",
    start: float = START,
    **options: Any,
) -> Path:
    """A journal of `count` messages from number `first` on, in blocks of `block_rows`; `options` are the
    writer's."""
    made = Journal(
        folder,
        shard=shard,
        start=start,
        route=route,
        options=JournalOptions(
            flush_rows=block_rows, block_rows_max=block_rows, flush_interval_secs=60, **options
        ),
    )
    made.write(first, count)
    made.close()
    return folder


def convert(folder: Path, begin: int, end: int, shard: int = 0) -> None:
    """Put complete segments number `begin` to before `end` of a shard into one file in Parquet."""
    from gateway.pipeline.journal.parquet_writer import close_segments

    own = JournalReader(folder).segments(str(shard))
    some, behind = own[begin:end], own[end].first
    draft = folder / "draft.tmp"
    close_segments(folder, shard, some[0].first, behind, draft)
    draft.replace(folder / parquet_name(shard, some[0].first, behind))
    for one in some:
        one.path.unlink()
