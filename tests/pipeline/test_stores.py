"""Journals and archives in stores: S3 and HDFS, by the names and options of Spark."""

from __future__ import annotations

import os
import time
from pathlib import Path
from threading import Barrier
from typing import TYPE_CHECKING, Any, Final

import pytest

pytest.importorskip("pyspark")

from pyarrow import fs

from gateway.cli.pipeline.common import journal_of
from gateway.errors import PipelineError
from gateway.pipeline import exclusive, stores
from gateway.pipeline.archive.manifest import Archive
from gateway.pipeline.exclusive import FolderLease, InUseError
from gateway.pipeline.jobs import archive as job
from gateway.pipeline.jobs.replay import COLUMNS, select_rows
from gateway.pipeline.journal.options import options_of
from gateway.pipeline.journal.source import JournalTable
from gateway.pipeline.journal.table import read_journal
from gateway.pipeline.shipment import ship
from gateway.pipeline.stores import StoreFolder, _error_summary, hadoop_of, place_of, spark_reaches
from gateway.pipeline.traffic.loader import RowSelection, traffic
from gateway.store.journal.reader import JournalReader
from gateway.store.journal.segments import Segment
from tests.cli.conftest import Run
from tests.pipeline.journals import convert, written

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(params=["s3", "hdfs"])
def store(request: pytest.FixtureRequest) -> str:
    """A URI, of each kind that there is a server of here."""
    uri: str = request.getfixturevalue(request.param)
    return uri


def test_a_journal_is_shipped_read_and_archived(
    spark: SparkSession, store: str, run: Run, tmp_path: Path
) -> None:
    """By the commands; the second time only what is new goes, and every row is there once."""
    folder = tmp_path / "journal"
    written(folder / "replica", 300, block_rows=20, segment_bytes=40_000)
    ship = ("pipeline", "ship", "--journal", str(folder), "--to", f"{store}/journal")
    confs = [
        word for key, value in hadoop_of(spark).items() for word in ("--conf", f"spark.hadoop.{key}={value}")
    ]
    first = run(*ship, *confs)
    assert first.code == 0, first.err
    assert " 0 files shipped" not in first.out
    again = run(*ship, *confs)
    assert "0 files shipped" in again.out
    found = spark.read.format("gateway_journal").load(f"{store}/journal")
    there = found.count()
    assert 0 < there <= 300
    assert found.where("route = 'up' and sequence < 100").count() == 50
    assert found.select("sequence").distinct().count() == there
    done = job.run(spark, f"{store}/journal", f"{store}/archive")
    assert (done.rows, done.missing) == (there, 0)
    assert job.run(spark, f"{store}/journal", f"{store}/archive").rows == 0
    convert(folder / "replica", 0, 1)
    assert run(*ship, *confs).code == 0
    for table in (read_journal(spark, f"{store}/journal"), found):
        rows = table.select("shard", "sequence").orderBy("sequence").collect()
        assert [(row.shard, row.sequence) for row in rows] == [("replica/0", n) for n in range(there)]


MAPPING: Final = """version: 1
routes:
  - name: up
    from: {endpoint: mqtt, topic: "plant/{line}/t"}
    to: {endpoint: erp, exchange: amq.topic, routing_key: "{line}.t"}
"""


def test_what_is_asked_of_a_store_is_answered_as_of_a_folder(
    spark: SparkSession, store: str, run: Run, tmp_path: Path
) -> None:
    """Of the journal there, and of an archive."""
    mapping, folder = tmp_path / "mapping.yaml", tmp_path / "journal"
    mapping.write_text(MAPPING)
    config = tmp_path / "gateway.yaml"
    config.write_text("links: {erp: {url: 'amqp://erp'}}\nlisteners: {mqtt: {protocol: mqtt}}\n")
    written(folder, 300, block_rows=20, segment_bytes=40_000)
    ship(folder, place_of(f"{store}/asked", hadoop_of(spark)))
    job.run(spark, str(folder), f"{store}/asked-archive")
    there = [
        ("--journal", str(folder)),
        ("--journal", f"{store}/asked"),
        ("--archive", f"{store}/asked-archive"),
    ]
    only = ("--where", "sequence < 100")
    for command in (
        ("backtest", str(mapping), "--config", str(config), "--allow", "new", "--json"),
        ("reconcile", "--json"),
        ("schema", "up", "--mapping", str(mapping), "--last", "2"),
    ):
        said = [run("pipeline", *command, *place, *only) for place in there]
        assert said[0].code == said[1].code == said[2].code, [one.err for one in said]
        assert said[0].out == said[1].out == said[2].out
        assert said[0].out
    rows = [
        select_rows(
            traffic(
                spark,
                place[1] if place[0] == "--journal" else None,
                COLUMNS,
                RowSelection(where=only[1]),
                archive=place[1] if place[0] == "--archive" else None,
            )
        ).collect()
        for place in there
    ]
    assert len(rows[0]) == 100
    assert rows[0] == rows[1] == rows[2]


def test_an_archive_in_s3(spark: SparkSession, s3: str, run: Run, tmp_path: Path) -> None:
    """Spark's own reader of Parquet and Arrow's writer agree on where it is."""
    folder, to = str(written(tmp_path / "j", 100)), f"{s3}/plain"
    ran = run("pipeline", "archive", "--journal", folder, "--to", to)
    assert (ran.code, ran.out.startswith("100 rows archived in 2 files")) == (0, True), ran.err
    assert job.read_archive(spark, to).where("route = 'up'").count() == 50
    rates = run("pipeline", "rates", "--archive", to, "--to", f"{s3}/rates")
    assert rates.out == "100 messages in 2 rows\n", rates.err
    assert spark.read.parquet(f"{s3}/rates").count() == 2


NOBODY = [
    ("s3a://plant/a", {"fs.s3a.endpoint": "http://127.0.0.1:1"}, "is unreachable"),
    ("hdfs://127.0.0.1:1/a", {}, "is unreachable"),
    ("ftp://host/a", {}, "folders are paths, or begin with s3a://"),
]


@pytest.mark.needs("time")
@pytest.mark.parametrize("uri, hadoop, text", NOBODY, ids=[uri for uri, _, _ in NOBODY])
def test_who_does_not_answer_is_named_within_seconds(uri: str, hadoop: dict[str, str], text: str) -> None:
    begun = time.monotonic()
    with pytest.raises(PipelineError, match=text) as raised:
        place_of(uri, hadoop | {"fs.s3a.access.key": "a", "fs.s3a.secret.key": "b"}).check_reachable()
    assert time.monotonic() - begun < 20
    assert "\n" not in str(raised.value)


def test_secrets_are_not_shown() -> None:
    place = place_of("s3a://plant/a", {"fs.s3a.secret.key": "very secret"})
    assert "very secret" not in repr(place)


def test_a_scheme_that_spark_has_no_classes_for(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreFolder, "check_reachable", lambda place: place)
    with pytest.raises(PipelineError, match=r"cannot read gs:// here: .*gcs-connector") as raised:
        spark_reaches(spark, place_of("gs://bucket/folder"))
    assert "\n" not in str(raised.value)


NAMES = [
    ("/data/a", "/data/a", "file", "/data/a"),
    ("/data/a:/b", "/data/a:/b", "file", "/data/a:/b"),
    ("file:/data/a", "/data/a", "file", "/data/a"),
    ("file:///data/a#b?c", "/data/a#b?c", "file", "/data/a#b?c"),
    ("hdfs:/data/a", "hdfs:///data/a", "hdfs", "/data/a"),
    ("hdfs://name:8020/", "hdfs://name:8020", "hdfs", "/"),
    ("s3a://plant/a#b/", "s3a://plant/a#b", "s3a", "plant/a#b"),
    ("abfss://box@plant.dfs.core.windows.net/a", None, "abfss", "box/a"),
]


@pytest.mark.parametrize(("name", "uri", "scheme", "path"), NAMES, ids=[name for name, *_ in NAMES])
def test_names(monkeypatch: pytest.MonkeyPatch, name: str, uri: str | None, scheme: str, path: str) -> None:
    """As Spark has them; a `#` is a letter as others."""
    monkeypatch.setattr(stores, "_SYSTEMS", dict.fromkeys(stores._SYSTEMS, lambda *_: None))
    stores._arrow_path.cache_clear()
    for given in {name, journal_of(name, None)}:
        place = place_of(given)
        assert (place.uri, place.scheme, place.arrow().path) == (uri or name, scheme, path)
    stores._arrow_path.cache_clear()


def test_the_ends_of_files_are_asked_for_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a store each takes longer than it is long; once each."""
    written(tmp_path, 600, block_rows=20, segment_bytes=20_000)
    monkeypatch.setattr(stores, "_SYSTEMS", {"mem": lambda *_: fs.LocalFileSystem()})
    together, read = Barrier(4), JournalReader.summary
    asked: list[object] = []

    def slow(reader: JournalReader, segment: Segment) -> object:
        if segment.path not in asked:
            asked.append(segment.path)
            if len(asked) <= 4:
                together.wait(30)
        return read(reader, segment)

    monkeypatch.setattr(JournalReader, "summary", slow)
    table = JournalTable(options_of({"path": f"mem://{tmp_path}"}, stream=False), ("sequence",))
    parts = table.partitions()
    assert len(asked) == len(list(tmp_path.glob("*.gwj"))) > 4
    assert [row for part in parts for rows in table.read(part) for row in rows["sequence"].to_pylist()] == [
        *range(600)
    ]


CLOUDS = [
    ("core.windows.net", "https://login.microsoftonline.com/T/oauth2/token", "login.microsoftonline.com"),
    ("core.usgovcloudapi.net", "https://login.microsoftonline.us/T/oauth2/token", "login.microsoftonline.us"),
]


@pytest.mark.parametrize(("cloud", "endpoint", "login"), CLOUDS)
def test_other_clouds(monkeypatch: pytest.MonkeyPatch, cloud: str, endpoint: str, login: str) -> None:
    """Their hosts have other names, and who logs in does so elsewhere."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(stores.fs, "AzureFileSystem", lambda **given: seen.update(given))
    monkeypatch.delenv("AZURE_AUTHORITY_HOST", raising=False)
    monkeypatch.setitem(os.environ, "AZURE_AUTHORITY_HOST", "")
    del os.environ["AZURE_AUTHORITY_HOST"]
    host = f"plant.dfs.{cloud}"
    stores._abfs(
        {f"fs.azure.account.key.{host}": "K", "fs.azure.account.oauth2.client.endpoint": endpoint},
        f"box@{host}",
    )
    assert (seen["account_name"], seen["account_key"], seen["tenant_id"]) == ("plant", "K", "T")
    authorities = seen["dfs_storage_authority"], seen["blob_storage_authority"]
    assert authorities == (f".dfs.{cloud}", f".blob.{cloud}")
    assert os.environ["AZURE_AUTHORITY_HOST"] == f"https://{login}"


def test_a_name_in_s3_is_created_once(spark: SparkSession, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run comes between the last look and the creation, as after a pause of any length."""
    place = place_of(f"{s3}/once", hadoop_of(spark))
    put = exclusive.put_once

    def overtaken(where: StoreFolder, below: str, data: bytes) -> bool:
        system, root = where.arrow()
        with system.open_output_stream(f"{root}/{below}") as stream:
            stream.write(b"another run's")
        return put(where, below, data)

    exclusive.create(place, "folder", "1", b"one", "a")
    with pytest.raises(FileExistsError):
        exclusive.create(place, "folder", "1", b"two", "b")
    monkeypatch.setattr(exclusive, "put_once", overtaken)
    with pytest.raises(FileExistsError):
        exclusive.create(place, "folder", "2", b"two", "b")
    system, root = place.arrow()
    found = {one.base_name: one.path for one in system.get_file_info(fs.FileSelector(f"{root}/folder"))}
    assert {name: system.open_input_stream(found[name]).read() for name in "12"} == {
        "1": b"one",
        "2": b"another run's",
    }
    assert put(place, "folder/1", b"one"), "a request that was repeated"
    monkeypatch.setattr(exclusive, "put_once", put)
    with FolderLease([place]) as lease:
        lease.check()
        with pytest.raises(InUseError):
            FolderLease([place])


def test_the_other_name_of_s3(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreFolder, "check_reachable", lambda place: place)
    with pytest.raises(PipelineError, match=r"write s3a://plant/folder"):
        spark_reaches(spark, place_of("s3://plant/folder"))


def test_what_a_store_says_is_cut() -> None:
    assert len(_error_summary(OSError("x" * 5_000))) < 310


def test_what_readers_may_still_be_at_stays(spark: SparkSession, tmp_path: Path) -> None:
    """A reader that has planned finds its files, though they were merged since; later they go."""
    folder, to = tmp_path / "j", tmp_path / "a"
    for first in range(0, 80, 10):
        written(folder, 10, first=first)
        job.run(spark, str(folder), str(to), file_bytes=1)
    planned = job.read_archive(spark, str(to))
    before = Archive(place_of(str(to))).manifest()
    assert len(before.files) == 16
    merged = job.run(spark, str(folder), str(to))
    assert (merged.merged, merged.total_files) == (16, 2)
    assert planned.count() == 80
    assert job.read_archive(spark, str(to)).count() == 80
    job.run(spark, str(folder), str(to), grace_secs=0)
    assert not (to / before.files[0].path).exists()
    assert len(list(to.rglob("*.parquet"))) == 2
    assert Archive(place_of(str(to))).manifest().left == ()


def test_a_password_in_a_uri_is_refused_and_not_repeated() -> None:
    with pytest.raises(PipelineError, match="has a user and a password") as caught:
        place_of("s3a://ann:topsecret@bucket/x")
    assert "topsecret" not in str(caught.value)
    assert place_of("abfss://plant@account.example/x").uri == "abfss://plant@account.example/x"
