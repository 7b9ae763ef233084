"""Reading and printing of journal rows for `gateway journal` and `gateway explain --message`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import typer

from gateway.cli.exits import Exit
from gateway.cli.options import settings_of
from gateway.cli.progress import progress_bar
from gateway.settings import Settings
from gateway.store.journal.reader import Gap, JournalReader, Only, Row, ShardExtent, row_matches
from gateway.store.journal.segments import Hole
from gateway.store.journal.shown import document_of, time_of


def newest(
    reader: JournalReader, positions: dict[str, int], last: int | None, *, follow: bool, only: Only | None
) -> Iterator[Row | Gap]:
    """Yield the newest `last` rows of each shard; with `follow`, also the rows that are written later.

    If `last` is None, begin in each shard at the sequence number that `positions` has for it. `positions` is
    updated while rows are read. `only` selects rows by the values of columns. A Gap is yielded for missing
    rows.
    """
    if last is not None:
        for name in positions:
            extent = reader.extent(name)
            positions[name] = extent.next
            start = max(extent.first, extent.next - last) if only is None else extent.first
            rows = (item for item in reader.rows(name, start, only=only) if not isinstance(item, Gap))
            yield from deque((row for row in rows if row["sequence"] < extent.next), maxlen=last)
    while follow or last is None:
        for name in positions:
            for block in reader.blocks(name, positions[name]):
                if isinstance(block, Gap):
                    yield block
                    positions[name] = block.first + block.rows
                    continue
                if only is None or block.may_hold(only):
                    rows = (row for row in block.rows() if row["sequence"] >= positions[name])
                    yield from (row for row in rows if row_matches(row, only))
                positions[name] = block.header.next
        if not follow:
            return
        time.sleep(0.2)


def print_fate(settings: Settings, message_id: str, *, as_json: bool) -> None:
    """Print the journal rows of all messages with this message id: one row for each target.

    Raises typer.Exit with code 1 if there are none.
    """
    folder = settings.journal_path()
    reader = JournalReader(folder, skip=True)
    only = {"message_id": (message_id,)}
    found = False
    shards = reader.shards() if folder.is_dir() else []
    with progress_bar("searching the journal, one shard at a time", len(shards)) as bar:
        for at, shard in enumerate(shards):
            bar.update(at)
            for item in reader.rows(shard, reader.extent(shard).first, only=only):
                if not isinstance(item, Gap):
                    bar.end()  # the bar must not mix with the rows
                    print_item(item, as_json)
                    found = True
    if not found:
        off = "" if settings.journal.enabled else "; the journal is disabled (journal.enabled: false)"
        typer.echo(f"no row of {folder} has the message id {message_id!r}{off}", err=True)
        raise typer.Exit(Exit.FAILED)


def finding_of(shard: str, item: Gap | Hole, *, torn: bool) -> dict[str, Any]:
    """Return a gap or hole in a shard as a JSON object with the keys shard, what, damage and text.

    A gap is damage if its rows were written, but cannot be read or were deleted. `torn` is True for a hole
    that an interrupted write has left at the end of the shard, which is no damage.
    """
    if isinstance(item, Gap):
        text = f"rows {item.first} to {item.first + item.rows - 1}: {item.text or item.reason} {item.where}"
        damage = item.reason in ("damage", "gone")
        return {"shard": shard, "what": item.reason, "damage": damage, "text": text.rstrip()}
    text = f"{item.path}: bytes {item.offset} to {item.end} are not a valid block"
    return {"shard": shard, "what": "torn" if torn else "hole", "damage": not torn, "text": text}


def reader_of(config: Path | None, folder: Path | None) -> JournalReader:
    """Return a reader of the journal that skips damaged parts.

    The journal is in `folder`, or if that is None, in the folder of the configuration. Raises
    ConfigurationError.
    """
    return JournalReader(folder or settings_of(config).journal_path(), skip=True)


def chosen_shards(reader: JournalReader, shard: str | None) -> list[str]:
    """Return the names of the shards to read: `shard` alone, or all if it is None.

    Raises BadParameter if the journal has no such shard.
    """
    shards = reader.shards()
    if shard is None:
        return shards
    if shard not in shards:
        raise typer.BadParameter(f"unknown shard {shard}; known: {', '.join(shards) or 'none'}")
    return [shard]


def print_item(item: Row | Gap, as_json: bool) -> None:
    """Print a journal row, as text or as a line of JSON; print a gap to standard error."""
    if isinstance(item, Gap):
        rows = f"{item.rows} rows from {item.first} on are missing"
        typer.echo(f"{item.shard} {rows}: {item.reason} {item.text}".rstrip(), err=True)
    elif as_json:
        typer.echo(orjson.dumps(document_of(item)))
    else:
        way = f"{item['source_endpoint']} {item['source_address']}"
        if item["route"]:
            way += f" -[{item['route']}]-> {item['target_endpoint']} {item['target_address'] or '-'}"
        text = item["outcome"]
        if item["reason"] != "none":
            text += f" ({item['reason']}: {item['reason_text']})"
        place = f"{item['shard']}:{item['sequence']}"
        typer.echo(f"{time_of(item['received'])} {place} {way} {item['body_size']} bytes {text}")


def compaction(extent: ShardExtent) -> str:
    """Return a line of text about the merging of a shard's blocks and the index of its files."""
    whole = extent.segments - extent.unindexed
    low = "unknown up to when all is settled"
    if extent.low_us is not None:
        low = f"everything received before {time_of(extent.low_us)} is settled"
    return (
        f"{extent.replaced} blocks were merged, {extent.small} small blocks remain; {whole} files"
        f" have an index; {low}"
    )


def retention(extent: ShardExtent, bytes_max: int, secs_max: float) -> str:
    """Return a line of text about how much of its limits a shard uses.

    `bytes_max` and `secs_max` are the limits in bytes and seconds; 0 is no limit.
    """
    used = f"{extent.byte_count / bytes_max:.0%} of {bytes_max} bytes" if bytes_max else "no limit on bytes"
    if not secs_max:
        return f"retention: {used}, no limit on age"
    age = 0.0 if extent.first_us is None else max(time.time() - extent.first_us / 1e6, 0.0)
    return f"retention: {used}, the oldest row is {age / 3_600:.1f} of {secs_max / 3_600:.1f} hours old"


def describe_extent(extent: ShardExtent) -> str:
    """Return a line of text about a shard: its rows, blocks, files, bytes and times."""
    span = "no rows"
    numbers = (
        f"rows {extent.first} to {extent.next - 1}" if extent.next > extent.first else "no row numbers yet"
    )
    if extent.first_us is not None and extent.last_us is not None:
        span = f"received {time_of(extent.first_us)} to {time_of(extent.last_us)}"
    return (
        f"shard {extent.shard}: {numbers} ({extent.rows} present, {extent.missing} missing), "
        f"{extent.blocks} blocks in {extent.segments} files, {extent.byte_count} bytes, {span}"
    )
