"""What waits for a socket: pieces in memory and on disk, however little of them it takes at a time."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.broker.spool import Spool, SpoolFile
from gateway.model.spooled_bodies import Piece, SpooledPiece, join_pieces
from gateway.transport.backlog import GATHERED_MAX, Backlog

BODY = bytes(range(256)) * 4096


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SpoolFile]:
    spool = Spool(tmp_path / "spool", bytes_max=1 << 30, memory_bytes_max=0, memory_total_max=0)
    made = spool.draft()
    made.write(BODY)
    yield made
    spool.close()


def pieces_of(file: SpoolFile) -> list[Piece]:
    return [
        b"begin",
        memoryview(BODY)[1000:300_000],
        b"middle",
        SpooledPiece(file, 7, 500_000),
        b"",
        SpooledPiece(file, 0, 1),
        *[b"%d " % at for at in range(3 * GATHERED_MAX)],
        memoryview(BODY)[:1],
    ]


@pytest.mark.parametrize("buffer", [2_048, 65_536])
def test_all_of_it_comes_through_a_socket_that_takes_little(file: SpoolFile, buffer: int) -> None:
    pieces = pieces_of(file)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        ours.setblocking(False)
        backlog = Backlog()
        backlog.add(pieces)
        wanted, found, written = join_pieces(pieces), bytearray(), 0
        assert backlog.byte_count == len(wanted)
        while backlog.byte_count:
            written += backlog.write(ours)
            while len(found) < written:
                found += theirs.recv(written - len(found))
    assert found == wanted


def test_many_small_pieces_are_few(file: SpoolFile) -> None:
    backlog = Backlog()
    for _ in range(100_000):
        backlog.add([b"ack."])
    assert backlog.byte_count == 400_000
    assert len(backlog._pieces) < 10


def test_a_file_that_has_become_shorter_is_an_error(file: SpoolFile, tmp_path: Path) -> None:
    piece = SpooledPiece(file, len(BODY) - 10, 10)
    os.truncate(tmp_path / "spool" / file.name, len(BODY) - 10)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        backlog = Backlog()
        backlog.add([piece])
        with pytest.raises(OSError, match="was truncated"):
            backlog.write(ours)
    with pytest.raises(OSError, match="was truncated"):
        join_pieces([piece])
