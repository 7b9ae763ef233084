"""Bytes that a socket has not accepted yet, stored as the pieces in which they were queued.

Only small pieces are joined. Many pieces are handed to the kernel in one call, and the written part of a
piece is skipped, so that only the kernel copies the bytes of a large body. Pieces that are on disk
(SpooledPiece) go from the disk cache to the socket without passing through this process.
"""

from __future__ import annotations

import socket
from collections import deque
from typing import Final

from gateway.model.spooled_bodies import Piece, SpooledPiece

SMALL_BYTES: Final = 4_096  # bytes; smaller pieces are joined: a client that does not read can cause many
JOINED_BYTES: Final = 65_536  # bytes, the approximate size limit of a joined piece
GATHERED_MAX: Final = 64  # pieces per call; operating systems allow 1 024
TURN_BYTES_MAX: Final = 4_194_304  # bytes, a few milliseconds: a peer may read as fast as we write
MORE: Final = getattr(socket, "MSG_MORE", 0)  # send flag: bytes of a file follow and may share a TCP segment


class Backlog:
    """Queue of output that a socket has not accepted yet, in pieces.

    It has `byte_count` bytes, of which `memory_bytes` are in memory and the others on disk.
    """

    __slots__ = ("_pieces", "_skip", "byte_count", "memory_bytes")

    def __init__(self) -> None:
        self.byte_count = 0
        self.memory_bytes = 0
        self._pieces: deque[Piece | bytearray] = deque()
        self._skip = 0  # bytes of the first piece that are written

    def add(self, pieces: list[Piece]) -> None:
        """Append `pieces` to the queue, joining small ones."""
        waiting = self._pieces
        for piece in pieces:
            self.byte_count += len(piece)
            if not isinstance(piece, SpooledPiece):
                self.memory_bytes += len(piece)
            if not isinstance(piece, bytes) or len(piece) >= SMALL_BYTES:
                waiting.append(piece)
            elif waiting and isinstance(waiting[-1], bytearray) and len(waiting[-1]) < JOINED_BYTES:
                waiting[-1] += piece
            else:
                waiting.append(bytearray(piece))

    def write(self, sock: socket.socket) -> int:
        """Write until the socket accepts no more or TURN_BYTES_MAX bytes are written.

        Return the number of bytes that the socket accepted. Raises OSError.
        """
        before = self.byte_count
        while self._pieces and before - self.byte_count < TURN_BYTES_MAX:
            first = self._pieces[0]
            try:
                if isinstance(first, SpooledPiece):
                    offered, written = len(first) - self._skip, first.send(sock.fileno(), self._skip)
                else:
                    offered, written = self._write_memory(sock)
            except BlockingIOError:
                break
            self._step(written)
            if written < offered:
                break
        return before - self.byte_count

    def _write_memory(self, sock: socket.socket) -> tuple[int, int]:
        """Write pieces from the front of the queue, up to the first one on disk, with one system call.

        Return the number of bytes passed to the socket, and the number that it accepted.
        """
        gathered: list[bytes | bytearray | memoryview] = []
        flags = 0
        for piece in self._pieces:
            if isinstance(piece, SpooledPiece):
                flags = MORE
                break
            if len(gathered) == GATHERED_MAX:
                break
            gathered.append(piece)
        if self._skip:
            gathered[0] = memoryview(gathered[0])[self._skip :]
        byte_count = sum(map(len, gathered))
        if len(gathered) == 1:
            return byte_count, sock.send(gathered[0], flags)
        return byte_count, sock.sendmsg(gathered, (), flags)

    def _step(self, count: int) -> None:
        """Remove the first `count` bytes from the queue, because the socket has accepted them."""
        self.byte_count -= count
        pieces, skip = self._pieces, self._skip
        while pieces:
            piece = pieces[0]
            step = min(count, len(piece) - skip)
            count -= step
            skip += step
            if not isinstance(piece, SpooledPiece):
                self.memory_bytes -= step
            if skip < len(piece):
                break
            pieces.popleft()
            skip = 0
        self._skip = skip

    def take(self, byte_count: int) -> list[Piece]:
        """Remove and return pieces of about `byte_count` bytes in total, at least one piece.

        No part of the first piece may have been written already.
        """
        pieces: list[Piece] = []
        while self._pieces and byte_count > 0:
            piece = self._pieces.popleft()
            byte_count -= len(piece)
            self.byte_count -= len(piece)
            if not isinstance(piece, SpooledPiece):
                self.memory_bytes -= len(piece)
            pieces.append(bytes(piece) if isinstance(piece, bytearray) else piece)
        return pieces
