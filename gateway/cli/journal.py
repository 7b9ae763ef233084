"""`gateway journal tail | stat | verify | export`: what crossed, how much is kept, whether it is sound.

The commands read the files, beside a running gateway or without one.
"""

from __future__ import annotations

import base64
import time
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
import typer

from gateway.cli.exits import Exit
from gateway.cli.options import AsJson, ConfigFile, settings_of
from gateway.errors import PipelineError
from gateway.settings import Settings
from gateway.store.journal.reader import Extent, Gap, JournalReader, Only, Row, fits
from gateway.store.journal.segments import Hole

journal = typer.Typer(name="journal", help="Read the journal: what crossed, when, and what became of it.")
app = typer.Typer()
app.add_typer(journal)

Folder = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="The journal; default: that of the configuration.")
]
Shard = Annotated[str | None, typer.Option(help="One shard; default: all.")]


@journal.command()
def tail(
    config: ConfigFile = None,
    folder: Folder = None,
    shard: Shard = None,
    last: Annotated[int, typer.Option("--last", "-n", min=0, help="So many rows of each shard.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more.")] = False,
    start: Annotated[
        int | None, typer.Option(min=0, help="From this sequence number on, to the end.")
    ] = None,
    route: Annotated[list[str] | None, typer.Option(help="Only this route; may repeat.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Stop after so many rows.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the newest rows, one line each; gaps too, on standard error."""
    reader = _reader(config, folder)
    only = {"route": route} if route else None
    positions = dict.fromkeys(_shards(reader, shard), start or 0)
    left = count
    try:
        for item in _items(reader, positions, last if start is None else None, follow=follow, only=only):
            _print(item, as_json)
            if left is not None and not isinstance(item, Gap):
                left -= 1
                if not left:
                    return
    except KeyboardInterrupt:
        return


def _items(
    reader: JournalReader, positions: dict[str, int], last: int | None, *, follow: bool, only: Only | None
) -> Iterator[Row | Gap]:
    """The `last` rows of each shard (None: all from its position on), and what is written later."""
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
                    yield from (row for row in rows if fits(row, only))
                positions[name] = block.header.next
        if not follow:
            return
        time.sleep(0.2)


@journal.command()
def stat(
    config: ConfigFile = None, folder: Folder = None, shard: Shard = None, as_json: AsJson = False
) -> None:
    """Print what there is of each shard: rows, gaps, files, octets, times, small blocks, limits."""
    limits = settings_of(config).journal
    reader = _reader(config, folder)
    extents = [reader.extent(name) for name in _shards(reader, shard)]
    if as_json:
        kept = {"retention_bytes": limits.retention_bytes, "retention_secs": limits.retention_secs}
        typer.echo(orjson.dumps([extent._asdict() | kept for extent in extents]))
        return
    for extent in extents:
        typer.echo(_described(extent))
        typer.echo(f"  {_compaction(extent)}")
        typer.echo(f"  {_retention(extent, limits.retention_bytes, limits.retention_secs)}")
    if not extents:
        typer.echo("the journal is empty")


@journal.command()
def verify(
    config: ConfigFile = None, folder: Folder = None, shard: Shard = None, as_json: AsJson = False
) -> None:
    """Read and check every block. Exit code 1 when one is damaged or missing.

    An incomplete end is reported, and is no damage: the gateway is writing it, or cuts it off when it starts.
    So are rows that the gateway itself says it could not write.
    """
    reader = _reader(config, folder)
    findings: list[dict[str, Any]] = []
    for name in _shards(reader, shard):
        newest = reader.segments(name)[-1].path
        for item in reader.verify(name):
            torn = isinstance(item, Hole) and item.path == newest and item.end >= newest.stat().st_size
            findings.append(_finding(name, item, torn=torn))
    damaged = any(finding["damage"] for finding in findings)
    if as_json:
        typer.echo(orjson.dumps({"ok": not damaged, "findings": findings}))
    else:
        for finding in findings:
            typer.echo(f"shard {finding['shard']}: {finding['what']}: {finding['text']}")
        typer.echo("damaged" if damaged else "sound")
    if damaged:
        raise typer.Exit(Exit.FAILED)


@journal.command()
def export(
    config: ConfigFile = None,
    folder: Folder = None,
    shard: Shard = None,
    parquet: Annotated[Path | None, typer.Option(metavar="FILE", help="Write Parquet.")] = None,
    arrow: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an Arrow IPC file (Feather 2).")
    ] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="NAMES", help="These columns, with commas; default: all.")
    ] = None,
    route: Annotated[list[str] | None, typer.Option(help="Only this route; may repeat.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Received then or later, ISO 8601.")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Received before.")] = None,
) -> None:
    """Write the rows into one file that other programs read, without Spark.

    Needs pyarrow, which the extra `pipeline` has. Rows that are missing in the journal are told.
    """
    if (parquet is None) == (arrow is None):
        raise PipelineError("say --parquet FILE or --arrow FILE")
    try:
        from gateway.pipeline.journal.export import Chosen
        from gateway.pipeline.journal.export import export as job
    except ImportError as error:
        raise PipelineError("the export needs pyarrow: pip install 'gateway[pipeline]'") from error
    reader = _reader(config, folder)
    names = None if columns is None else [name.strip() for name in columns.split(",")]
    chosen = Chosen(
        None if shard is None else _shards(reader, shard),
        frozenset(route) if route else None,
        None if since is None else _micros(since),
        None if until is None else _micros(until),
    )
    to = parquet or arrow
    assert to is not None
    form: Literal["parquet", "arrow"] = "arrow" if parquet is None else "parquet"
    try:
        rows, missing = job(reader, to, form, columns=names, chosen=chosen)
    except OSError as error:
        raise PipelineError(f"{to} cannot be written: {error.strerror}") from error
    typer.echo(f"{rows} rows in {to}" + (f", {missing} missing in the journal" if missing else ""))


def _micros(text: str) -> int:
    try:
        time_ = datetime.fromisoformat(text)
    except ValueError as error:
        raise PipelineError(f"a time is said in ISO 8601, not as {text!r}") from error
    since = (time_ if time_.tzinfo else time_.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
    return since // timedelta(microseconds=1)


def tell_fate(settings: Settings, message_id: str, *, as_json: bool) -> None:
    """Print every row of a message, to which its sender gave this id: one for each target. Exit code 1 when
    there is none.
    """
    folder = settings.journal_path()
    reader = JournalReader(folder, skip=True)
    only = {"message_id": (message_id,)}
    found = False
    for shard in reader.shards() if folder.is_dir() else ():
        for item in reader.rows(shard, reader.extent(shard).first, only=only):
            if not isinstance(item, Gap):
                _print(item, as_json)
                found = True
    if not found:
        off = "" if settings.journal.enabled else "; the journal is off (journal.enabled)"
        typer.echo(f"no row of {folder} has the message id {message_id!r}{off}", err=True)
        raise typer.Exit(Exit.FAILED)


def _finding(shard: str, item: Gap | Hole, *, torn: bool) -> dict[str, Any]:
    if isinstance(item, Gap):
        text = f"rows {item.first} to {item.first + item.rows - 1}: {item.text or item.reason} {item.where}"
        damage = item.reason in ("damage", "gone")
        return {"shard": shard, "what": item.reason, "damage": damage, "text": text.rstrip()}
    text = f"{item.path}: octets {item.offset} to {item.end} are no block"
    return {"shard": shard, "what": "torn" if torn else "hole", "damage": not torn, "text": text}


def _reader(config: Path | None, folder: Path | None) -> JournalReader:
    return JournalReader(folder or settings_of(config).journal_path(), skip=True)


def _shards(reader: JournalReader, shard: str | None) -> list[str]:
    shards = reader.shards()
    if shard is None:
        return shards
    if shard not in shards:
        raise typer.BadParameter(f"no shard {shard}; there are: {', '.join(shards) or 'none'}")
    return [shard]


def _print(item: Row | Gap, as_json: bool) -> None:
    if isinstance(item, Gap):
        rows = f"{item.rows} rows from {item.first} on are missing"
        typer.echo(f"{item.shard} {rows}: {item.reason} {item.text}".rstrip(), err=True)
    elif as_json:
        typer.echo(orjson.dumps(_document(item)))
    else:
        way = f"{item['source_endpoint']} {item['source_address']}"
        if item["route"]:
            way += f" -[{item['route']}]-> {item['target_endpoint']} {item['target_address'] or '-'}"
        told = item["outcome"]
        if item["reason"] != "none":
            told += f" ({item['reason']}: {item['reason_text']})"
        place = f"{item['shard']}:{item['sequence']}"
        typer.echo(f"{_time(item['received'])} {place} {way} {item['body_size']} octets {told}")


def _document(row: Row) -> dict[str, Any]:
    """A row in JSON: times in ISO 8601, properties as an object, the body as text or in base64."""
    document = dict(row)
    for name in ("received", "settled", "expires"):
        document[name] = None if row[name] is None else _time(row[name])
    document["properties"] = orjson.loads(row["properties"])
    body = row["body"]
    if body is not None:
        try:
            document["body"], document["body_encoding"] = body.decode(), "utf-8"
        except UnicodeDecodeError:
            document["body"], document["body_encoding"] = base64.b64encode(body).decode(), "base64"
    return document


def _time(microseconds: int) -> str:
    return datetime.fromtimestamp(microseconds / 1_000_000, UTC).isoformat(timespec="microseconds")


def _compaction(extent: Extent) -> str:
    """What was merged, and what will be."""
    whole = extent.segments - extent.unindexed
    low = "not known" if extent.low_us is None else _time(extent.low_us)
    return (
        f"{extent.replaced} blocks were merged into fewer, {extent.small} are small;"
        f" {whole} files have an index; complete up to {low}"
    )


def _retention(extent: Extent, octets_max: int, secs_max: float) -> str:
    """How much of its limits is used."""
    used = f"{extent.octets / octets_max:.0%} of {octets_max} octets" if octets_max else "no limit of octets"
    if not secs_max:
        return f"retention: {used}, no limit of time"
    age = 0.0 if extent.first_us is None else max(time.time() - extent.first_us / 1e6, 0.0)
    return f"retention: {used}, the oldest row is {age / 3_600:.1f} of {secs_max / 3_600:.1f} hours old"


def _described(extent: Extent) -> str:
    span = "no rows"
    if extent.first_us is not None and extent.last_us is not None:
        span = f"received {_time(extent.first_us)} to {_time(extent.last_us)}"
    return (
        f"shard {extent.shard}: rows {extent.first} to {extent.next - 1} ({extent.rows} there,"
        f" {extent.missing} missing), {extent.blocks} blocks in {extent.segments} files,"
        f" {extent.octets} octets, {span}"
    )
