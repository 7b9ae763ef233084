"""How much memory there is, from made-up control groups; and what this process says of itself."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from gateway.app.memory import PAGE, available, resident_reader, watched_memory

MACHINE = 1 << 40
CASES = {
    "no control groups": ("", {}, MACHINE),
    "version 2": ("0::/pod\n", {"pod/memory.max": "512\n"}, 512),
    "version 2, unlimited": ("0::/pod\n", {"pod/memory.max": "max\n"}, MACHINE),
    "version 2, a group above": ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "300"}, 300),
    "version 2, the smallest": ("0::/a/b\n", {"a/b/memory.max": "900", "a/memory.max": "300"}, 300),
    "version 2, in a name space of its own": ("0::/\n", {"memory.max": "77"}, 77),
    "version 1": (
        "5:cpu,cpuacct:/x\n4:memory:/x\n0::/\n",
        {"memory/x/memory.limit_in_bytes": "400", "memory/memory.limit_in_bytes": "9223372036854771712"},
        400,
    ),
    "version 1, the path is the host's": ("4:memory:/x/y\n", {"memory/memory.limit_in_bytes": "600"}, 600),
    "more than the machine has": ("0::/\n", {"memory.max": str(2 * MACHINE)}, MACHINE),
    "a colon in the name": ("0::/a:b\n", {"a:b/memory.max": "5"}, 5),
    "nonsense": ("0::/\n", {"memory.max": "?"}, MACHINE),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_control_group_allows(tmp_path: Path, name: str) -> None:
    said, files, expected = CASES[name]
    groups, process = tmp_path / "groups", tmp_path / "process"
    process.mkdir()
    if said:
        (process / "cgroup").write_text(said)
    for path, text in files.items():
        (groups / path).parent.mkdir(parents=True, exist_ok=True)
        (groups / path).write_text(text)
    assert available(groups, process, MACHINE) == expected


def test_this_process_has_less_than_the_machine() -> None:
    resident = resident_reader()
    if resident is None:
        pytest.skip("there is no /proc here")
    assert 0 < resident() < available()
    assert resident() % PAGE == 0


def test_a_gateway_that_is_gone_has_left_no_file_open() -> None:
    readers = [resident_reader() for _ in range(10)]
    if None in readers:
        pytest.skip("there is no /proc here")
    held = len(os.listdir("/proc/self/fd"))
    readers.clear()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= held - 10


def test_without_a_file_to_read_there_is_no_watermark(tmp_path: Path) -> None:
    assert resident_reader(tmp_path) is None


def test_a_mark_is_taken_as_it_was_given_or_is_a_share_of_all() -> None:
    if resident_reader() is None:
        pytest.skip("there is no /proc here")
    assert watched_memory(12_345, lambda short: None, list).watermark == 12_345
    assert 0.5 * available() < watched_memory(0, lambda short: None, list).watermark < 0.7 * available()
