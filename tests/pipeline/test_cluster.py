"""On a cluster of two workers, with what `gateway pipeline bundle` makes: every row once, though executors
and the driver are killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

pytest.importorskip("pyspark")

from gateway.errors import PipelineError
from gateway.pipeline.archive.manifest import Archive
from gateway.pipeline.stores import place_of
from tests.conftest import missing
from tests.needs import needed
from tests.pipeline.cluster import EQUIPPED, Cluster, until
from tests.pipeline.journals import written
from tests.pipeline.killing import PATIENCE_SECS, ROOT, commits, killed
from tests.pipeline.streams import TOO_LATE

pytestmark = pytest.mark.timeout(900)  # a driver starts three times, and executors more often
SHARDS: Final = 12
ROWS: Final = 2_000  # of a shard
DRIVER: Final = ROOT / "tests" / "pipeline" / "kill_driver.py"


@pytest.fixture(scope="module")
@needed("Spark")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    try:
        with Cluster(tmp_path_factory.mktemp("cluster"), quick=True) as found:
            yield found
    except PipelineError as error:
        missing(str(error))
        raise


def ended(command: tuple[str, ...], folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A driver, from its start to its end."""
    return subprocess.run(
        command,
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECS,
    )


def test_an_archive_while_an_executor_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    """From a folder with a relative path to the journal, which no executor works in."""
    for shard in range(SHARDS):
        written(tmp_path / "journal", ROWS, shard=shard)
    command = cluster.command("archive", "--journal", "journal", "--to", "archive")
    with (tmp_path / "log").open("wb") as said:
        driver = subprocess.Popen(
            command, cwd=tmp_path, env=cluster.environment(EQUIPPED), stdout=said, stderr=said
        )
    try:
        until(
            lambda: driver.poll() is not None or any((tmp_path / "archive").rglob("*.parquet")),
            "no task writes",
        )
        assert driver.poll() is None, (tmp_path / "log").read_text()[-3_000:]
        cluster.kill_an_executor()
        driver.wait(PATIENCE_SECS)
    finally:
        driver.kill()
    text = (tmp_path / "log").read_text()
    assert driver.returncode == 0, text[-3_000:]
    assert f"{SHARDS * ROWS} rows archived" in text
    manifest = Archive(place_of(str(tmp_path / "archive"))).manifest()
    assert manifest.offsets == {str(shard): ROWS for shard in range(SHARDS)}
    assert sum(file.rows for file in manifest.files) == SHARDS * ROWS


def test_the_documented_line_whose_driver_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    """In the middle of a batch, with all that it has started: nothing counts, and the next run has it all."""
    for shard in range(SHARDS):
        written(tmp_path / "journal", ROWS, shard=shard)
    to = tmp_path / "archive"
    line = cluster.documented("archive", "--journal", "journal", "--to", str(to))
    with (tmp_path / "log").open("wb") as said:
        driver = subprocess.Popen(
            line, cwd=tmp_path, env=cluster.environment(), stdout=said, stderr=said, start_new_session=True
        )
    try:
        until(lambda: driver.poll() is not None or any(to.rglob("*.parquet")), "no task writes")
        assert driver.poll() is None, (tmp_path / "log").read_text()[-3_000:]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    assert Archive(place_of(str(to))).manifest().number == 0
    done = ended(line, tmp_path, cluster.environment())
    assert done.returncode == 0, done.stderr[-3_000:]
    assert f"{SHARDS * ROWS} rows archived" in done.stdout
    manifest = Archive(place_of(str(to))).manifest()
    assert sum(file.rows for file in manifest.files) == SHARDS * ROWS
    on_disk = {str(path.relative_to(to)) for path in to.rglob("*.parquet")}
    assert on_disk >= {file.path for file in (*manifest.files, *manifest.left)}  # the others are swept later


@pytest.mark.parametrize("command", [("archive",), ("rates",)], ids=" ".join)
def test_executors_with_other_disks(cluster: Cluster, tmp_path: Path, command: tuple[str, ...]) -> None:
    """What they would write there nobody would see: it is said, and nothing counts as done."""
    journal = written(tmp_path / "journal", ROWS)
    to = "/proc/self/cwd/out"  # another folder for each process
    line = cluster.command(*command, "--journal", str(journal), "--to", to)
    done = ended(line, tmp_path, cluster.environment(EQUIPPED))
    assert done.returncode == 1
    assert f"{to} is not the same folder on the driver and on all executors" in done.stderr
    assert "Traceback" not in done.stderr
    if command == ("archive",):
        assert Archive(place_of(str(tmp_path / "out"))).manifest().number == 0


def test_a_stream_while_an_executor_and_the_driver_are_killed(cluster: Cluster, tmp_path: Path) -> None:
    journal, folder = written(tmp_path / "journal", SHARDS * ROWS), tmp_path / "out"
    env = cluster.environment(EQUIPPED)
    command = cluster.submit(DRIVER, str(journal), str(folder))
    assert killed(command, folder, then=cluster.kill_an_executor, env=env) > 1
    before = commits(folder)
    finish = cluster.submit(DRIVER, str(journal), str(folder), "finish")
    done = ended(finish, tmp_path, env)
    while TOO_LATE in done.stderr and done.returncode:
        done = ended(finish, tmp_path, env)
    assert done.returncode == 0, done.stderr[-3_000:]
    assert commits(folder) > before
    found = json.loads(done.stdout.splitlines()[-1])
    rows = SHARDS * ROWS
    assert found == {"rows": rows, "distinct": rows, "first": 0, "last": rows - 1, "bodies": rows}
