"""A library that makes a disk slow or broken does so below its folder, and while it is told to."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.disk_errors import CompilerError, FailingDisk

PROGRAM = """
import os, sqlite3, sys, time
folder, elsewhere = sys.argv[1:]
inside = os.open(os.path.join(folder, "a"), os.O_RDWR | os.O_CREAT)
outside = os.open(elsewhere, os.O_RDWR | os.O_CREAT)

def outcome(function, *arguments):
    began = time.monotonic()
    try:
        function(*arguments)
    except (OSError, sqlite3.OperationalError) as error:
        return f"{getattr(error, 'errno', None) or error}"
    return "slow" if time.monotonic() - began > 0.09 else "ok"

connection = sqlite3.connect(os.path.join(folder, "db"), isolation_level=None)

def commit():
    connection.execute("CREATE TABLE t (x)")
    connection.execute("DROP TABLE t")

connection.execute("PRAGMA journal_mode = WAL")
connection.execute("PRAGMA synchronous = FULL")
for _ in sys.stdin:
    print(
        outcome(os.pwrite, inside, b"x", 0),
        outcome(os.pwritev, inside, [b"x"], 0),
        outcome(os.fdatasync, inside),
        outcome(os.fsync, inside),
        outcome(os.pwrite, outside, b"x", 0),
        outcome(os.fsync, outside),
        outcome(commit),
        sep=", ",
        flush=True,
    )
"""


def test_writes_and_syncs_of_one_folder_fail_as_told(tmp_path: Path) -> None:
    stored = tmp_path / "stored"
    stored.mkdir()
    try:
        disk = FailingDisk(tmp_path / "failing", stored)
    except CompilerError as error:
        pytest.skip(str(error))
    eio, full = errno.EIO, errno.ENOSPC
    with subprocess.Popen(
        (sys.executable, "-c", PROGRAM, str(stored), str(tmp_path / "stored-elsewhere")),
        env=os.environ | disk.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def told() -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline().rstrip()

        assert told() == "ok, ok, ok, ok, ok, ok, ok"
        disk.set(write_error=eio)
        assert told() == f"{eio}, {eio}, ok, ok, ok, ok, disk I/O error"
        disk.set(write_error=full)
        assert told() == f"{full}, {full}, ok, ok, ok, ok, database or disk is full"
        disk.set(sync_error=eio)
        assert told() == f"ok, ok, {eio}, {eio}, ok, ok, disk I/O error"
        disk.set(delay_secs=0.1)
        assert told() == "ok, ok, slow, slow, ok, ok, slow"
        disk.set()
        assert told() == "ok, ok, ok, ok, ok, ok, ok"
        process.stdin.close()
