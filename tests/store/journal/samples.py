"""Messages, labels and writers for the tests of the journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED
from gateway.model.times import Monotonic
from gateway.protocols.mqtt.dialect import topic_address
from gateway.store.journal.column_buffers import (
    TOGETHER,
    Gathering,
    Memories,
    RowLabels,
    SettledMessages,
    UnsharedColumns,
)
from gateway.store.journal.encoder import Encoder
from gateway.store.journal.format import Draft, lay_out, seal
from gateway.store.journal.reader import Block, Gap, JournalReader, Row
from gateway.store.journal.writer import JournalOptions, JournalWriter

UTC_US = 1_700_000_000_000_000
HOME = RowLabels("", "", "mqtt", "mqtt")
UP = RowLabels("up", "7f3a", "erp", "amqpfast")
SENDER = Sender("mqtt", "press-7", "plant", "10.0.0.7:40123")


def message(number: int, **also: Any) -> Message:
    """A message whose body is its number."""
    return Message(topic_address(f"plant/{number % 3}"), str(number).encode(), sender=SENDER, **also)


def settled(first: int, count: int, *, at: int = UTC_US) -> SettledMessages:
    return SettledMessages(
        HOME, [message(first + place) for place in range(count)], None, ACCEPTED, at, at + 5
    )


def draft(base: int, count: int, shard: int = 0) -> Draft:
    """A block of `count` messages."""
    return Encoder(shard).encode(base, gathered([settled(base, count)]))


def block(base: int, count: int, shard: int = 0, level: int = 0) -> bytes:
    """Its bytes."""
    return bytes_of(draft(base, count, shard), level)


def gathered(
    parts: Iterable[SettledMessages], *, body_bytes_max: int = 1_000, apart: UnsharedColumns = TOGETHER
) -> Gathering:
    """What a block is made of."""
    gathering = Gathering(Memories(), body_bytes_max=body_bytes_max, apart=apart)
    for part in parts:
        gathering.add(part)
    return gathering


def bytes_of(draft: Draft, level: int = 0) -> bytes:
    """A block as it is written."""
    header, pieces, _ = seal(lay_out(draft, level))
    data = b"".join(pieces)
    assert len(data) == header.byte_count
    return data


def writer(folder: Path, shard: int = 0, options: JournalOptions | None = None, **also: Any) -> JournalWriter:
    return JournalWriter(folder, shard, options, **({"clock": time.monotonic} | also))


def write(
    folder: Path, *numbers: range, shard: int = 0, options: JournalOptions | None = None, **also: Any
) -> None:
    """Record each range as a part of its own, and close."""
    made = writer(folder, shard, options, **also)
    for part in numbers:
        made.record(HOME, [message(number) for number in part], ACCEPTED, Monotonic(time.monotonic()))
    made.close()


def rows_of(folder: Path, shard: str = "0", **also: Any) -> list[Row]:
    """All rows; there must be no gaps."""
    return [whole(item) for item in JournalReader(folder).rows(shard, **also)]


def whole(item: Row | Gap) -> Row:
    assert not isinstance(item, Gap)
    return item


def whole_block(item: Block | Gap) -> Block:
    assert isinstance(item, Block)
    return item


def numbers_of(rows: list[Row]) -> list[int]:
    return [int(row["body"]) for row in rows]


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for another thread or process."""
    deadline = time.monotonic() + seconds
    pause = 0.0001
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(pause)
        pause = min(pause * 2, 0.01)
