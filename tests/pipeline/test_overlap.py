"""Of two jobs that write to one place at a time, one fails and says so, and the other's result is whole."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

pytest.importorskip("pyspark")

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from gateway.mapping.loader import parse
from gateway.pipeline import exclusive
from gateway.pipeline.exclusive import CLAIM_SECS, LEASE_SECS, LEASES, FolderLease, InUseError, create
from gateway.pipeline.jobs import archive, rates, table
from gateway.pipeline.jobs.bodies import schema_of
from gateway.pipeline.stores import StoreFolder, place_of
from gateway.pipeline.traffic.fates import CandidateMapping
from tests.pipeline.journals import written
from tests.pipeline.streams import TOO_LATE

MAPPING: Final = """version: 1
routes:
  - name: up
    from: {endpoint: mqtt, topic: "plant/{line}/t"}
    to: {endpoint: erp, exchange: amq.topic, routing_key: "{line}.t"}
    delivery: {qos1: persistent}
"""
SCHEMA: Final = {"type": "object", "properties": {"n": {"type": "integer"}}}
IN_USE: Final = "another run writes to"


@pytest.fixture
def place(tmp_path: Path) -> StoreFolder:
    return place_of(str(tmp_path / "to"))


def files(place: StoreFolder) -> list[Path]:
    return sorted((Path(place.uri) / LEASES).glob("*.json"))


@pytest.fixture(params=[True, False], ids=["a disk", "no links"])
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that creates files exclusively, and one that does not, as a store."""
    if not request.param:
        monkeypatch.setattr("gateway.pipeline.exclusive._try_link", lambda *_: False)


@pytest.mark.usefixtures("links")
def test_a_lease_is_one_run_s(place: StoreFolder) -> None:
    with FolderLease([place]) as one:
        with pytest.raises(InUseError, match=IN_USE):
            FolderLease([place])
        one.check()
        assert len(files(place)) == 1
    with FolderLease([place]):
        pass
    assert not Path(place.uri, LEASES, "claims", "x").exists()
    assert not files(place)


@pytest.mark.usefixtures("links")
def test_of_two_that_look_at_once_one_gets_it(place: StoreFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = exclusive._names
    others: list[FolderLease] = []

    def overtaken(where: StoreFolder) -> list[str]:
        names = listed(where)
        monkeypatch.setattr(exclusive, "_names", listed)
        others.append(FolderLease([place]))
        return names

    monkeypatch.setattr(exclusive, "_names", overtaken)
    with pytest.raises(InUseError):
        FolderLease([place])
    others[0].check()
    assert len(files(place)) == 1


def test_where_one_of_several_is_another_s_none_is_taken(tmp_path: Path, place: StoreFolder) -> None:
    free = place_of(str(tmp_path / "free"))
    with FolderLease([place]), pytest.raises(InUseError):
        FolderLease([free, place])
    assert not files(free)


def held_by(place: StoreFolder, **holder: Any) -> Path:
    """A lease of another process."""
    lease = FolderLease([place])
    (path,) = files(place)
    path.write_text(json.dumps(json.loads(path.read_text()) | holder))
    del lease
    return path


def test_the_lease_of_a_killed_process_of_this_machine_is_free(place: StoreFolder) -> None:
    with subprocess.Popen((sys.executable, "-c", "input()"), stdin=subprocess.PIPE) as other:
        held_by(place, process=other.pid)
        with pytest.raises(InUseError):
            FolderLease([place])
        other.kill()
    with FolderLease([place]):
        assert [path.name for path in files(place)] == [f"{2:020}.json"]


def test_the_lease_of_another_machine_ends_by_time_and_its_run_notices(place: StoreFolder) -> None:
    silent = FolderLease([place])
    (path,) = files(place)
    path.write_text(json.dumps({"run": "x", "host": "elsewhere", "process": 1}))
    with pytest.raises(InUseError):
        FolderLease([place])
    os.utime(path, (time.time() - LEASE_SECS - 1.0,) * 2)
    with FolderLease([place]) as other:
        with pytest.raises(InUseError):
            silent.check()
        other.check()


def test_a_clock_that_is_ahead_ends_no_lease(place: StoreFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    held_by(place, host="elsewhere")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 86_400.0)
    with pytest.raises(InUseError):
        FolderLease([place])


def test_a_process_of_another_container_of_this_name_may_live(place: StoreFolder) -> None:
    """Its number says nothing here."""
    with subprocess.Popen((sys.executable, "-c", "")) as ended:
        pass
    path = held_by(place, process=ended.pid)
    name = json.loads(path.read_text())["host"]
    assert (socket.gethostname() in name, name != socket.gethostname()) == (True, True)
    path.write_text(json.dumps({"run": "x", "host": f"{name[:-2]}0]", "process": ended.pid}))
    with pytest.raises(InUseError):
        FolderLease([place])


def test_a_run_that_was_suspended_does_not_rely_on_its_claim(
    place: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than others respect the claim: the name may be theirs by now, or in a moment."""
    monkeypatch.setattr("gateway.pipeline.exclusive._try_link", lambda *_: False)
    times = iter([0.0, CLAIM_SECS])
    monkeypatch.setattr(exclusive, "time", SimpleNamespace(time=time.time, monotonic=lambda: next(times)))
    with pytest.raises(FileExistsError):
        create(place, "folder", "name", b"data", "run")
    assert not [path for path in Path(place.uri).rglob("*") if path.is_file()]


def test_a_lease_is_renewed(place: StoreFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = FolderLease([place])
    (path,) = files(place)
    os.utime(path, (0, 0))
    ends = iter([False, True])
    lease._renew(lambda _: next(ends))
    assert not files(place), "it ends with the stream"
    lease = FolderLease([place])
    (path,) = files(place)
    os.utime(path, (0, 0))

    def look(_: float) -> bool:
        return path.stat().st_mtime > 0

    lease._renew(look)


def test_a_lease_outlives_a_disk_that_is_full_for_a_moment(
    place: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run goes on writing; nobody else may begin meanwhile, and it is renewed when that works again."""
    lease = FolderLease([place])
    (path,) = files(place)
    named = exclusive._names
    tries: list[bool] = []

    def failing(where: StoreFolder) -> list[str]:
        tries.append(False)
        raise OSError(28, "No space left on device")

    def waited(_: float) -> bool:
        if len(tries) == 1:
            monkeypatch.setattr(exclusive, "_names", named)
            with pytest.raises(InUseError):
                FolderLease([place])
            lease.check()
            os.utime(path, (0, 0))
            tries.append(True)
            return False
        return len(tries) > 1

    monkeypatch.setattr(exclusive, "_names", failing)
    lease._renew(waited)
    assert tries == [False, True]
    assert not files(place), "it ends with the run"


@pytest.fixture
def journal(tmp_path: Path) -> str:
    written(tmp_path / "journal", 200)
    return str(tmp_path / "journal")


def test_two_rates_to_one_folder(
    spark: SparkSession, journal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins when the first has checked that the folder is new and has not written yet."""
    to, computed = str(tmp_path / "rates"), rates.rates
    refused: list[str] = []

    def overlap(rows: DataFrame, window: str, **also: Any) -> DataFrame:
        monkeypatch.setattr(rates, "rates", computed)
        with pytest.raises(InUseError, match=IN_USE) as error:
            rates.run(spark, journal, to=to)
        refused.append(str(error.value))
        return computed(rows, window, **also)

    monkeypatch.setattr(rates, "rates", overlap)
    done = rates.run(spark, journal, to=to)
    assert len(refused) == 1
    assert spark.read.parquet(to).count() == done.rows
    assert not Path(to, LEASES).exists()


def test_rates_that_fail_leave_no_folder(
    spark: SparkSession, journal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "rates", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rates.run(spark, journal, to=str(tmp_path / "rates"))
    assert not (tmp_path / "rates").exists()


Start = Callable[[], StreamingQuery]


@pytest.fixture(params=["rates", "table", "rates, another checkpoint"])
def start(
    request: pytest.FixtureRequest, spark: SparkSession, journal: str, tmp_path: Path
) -> Iterator[Start]:
    """What starts one more stream of a kind, each with the same target."""
    to = str(tmp_path / "to")
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    candidate = CandidateMapping([parse(MAPPING)], {"<text>": MAPPING}, {})
    begun: list[StreamingQuery] = []

    def begin() -> StreamingQuery:
        if request.param == "table":
            schema = schema_of(tmp_path / "schema.json")
            query = table.follow(spark, journal, candidate, "up", schema, to=to, rejected=f"{to}-no")
        else:
            kept = f"{to}-{len(begun)}" if "another" in request.param else None
            query = rates.follow(spark, journal, to=to, checkpoint=kept)
        begun.append(query)
        return query

    yield begin
    for query in begun:
        query.stop()


@pytest.mark.usefixtures("streams")
def test_two_streams_on_one_checkpoint_or_folder(start: Start) -> None:
    first = start()
    with pytest.raises(InUseError, match=IN_USE):
        start()
    assert first.isActive
    first.stop()
    assert start().isActive, "one that was stopped makes room at once"


@pytest.mark.usefixtures("streams")
def test_two_streams_into_one_archive_of_another_format(
    spark: SparkSession, journal: str, tmp_path: Path
) -> None:
    to = tmp_path / "archive"
    with FolderLease([place_of(f"{to}/_checkpoint")]), pytest.raises(InUseError, match=IN_USE):
        archive.run_stream(spark, journal, str(to), "json")
    rows = None
    while rows is None:
        try:
            rows = archive.run_stream(spark, journal, str(to), "json")
        except StreamingQueryException as error:
            if TOO_LATE not in str(error):
                raise
    assert rows == 200
