"""AMQP/Fast through the embedded broker: against AMQP 0-9-1 through it, and large bodies against bare TCP.

Both protocols publish persistent messages with confirms to a durable queue, over as many connections with the
same window, and one consumer acknowledges each message singly. A large body goes from one producer through
the gateway to one consumer; its peer is a process that does nothing but copy bytes from one Trio stream to
another, for the same two programs at its ends.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import trio

from tests.benchmarks import wires
from tests.benchmarks.load import Measured, run
from tests.benchmarks.report import Figure, median
from tests.benchmarks.roles import Load, Wrong
from tests.benchmarks.sections.comparing import compared
from tests.benchmarks.subjects import Gateway
from tests.interop.servers import LOOPBACK

MESSAGES: Final = "AMQP/Fast confirmed, persistent, 20 connections, window 100 -> acks"
TARGET: Final = 1.0
LARGE: Final = {8 << 20: None, 64 << 20: 0.8}  # bytes of a body, which is held in memory or on disk: target
RUN_BYTES: Final = 256 << 20  # of bodies, in one run
FRAGMENT_BYTES: Final = 131_072
READ_BYTES: Final = 1 << 18
COPY_BYTES: Final = 65_536  # what the gateway reads at a time, too
MEGABYTE: Final = 1_000_000
CONNECT_SECS_MAX: Final = 30.0


def measure(folder: Path, seconds: float, repeat: int) -> list[Figure]:
    """Messages against AMQP 0-9-1; and for each size of body MB/s against a bare copy."""
    with Gateway(folder / "gateway", store={"path": str(folder / "data")}) as gateway:
        fast: list[Measured] = []
        amqp: list[Measured] = []
        for _ in range(repeat):
            load = Load("fast", "fast", gateway.fast_port, gateway.fast_port, durable=True, seconds=seconds)
            fast.append(run(load, gateway.cpu))
            load = Load("amqp", "amqp", gateway.amqp_port, gateway.amqp_port, durable=True, seconds=seconds)
            amqp.append(run(load, gateway.cpu))
        through = {size: [_large(gateway, size) for _ in range(repeat)] for size in LARGE}
    bare = {size: [_through_copy(size) for _ in range(repeat)] for size in LARGE}
    return [
        compared(MESSAGES, fast, amqp, TARGET),
        *[_body(size, through[size], bare[size]) for size in LARGE],
    ]


Passed = tuple[float, float]
"""MB/s, and seconds of CPU that the process in the middle used."""


def _body(size: int, ours: list[Passed], peer: list[Passed]) -> Figure:
    rates = median([rate for rate, _ in ours]), median([rate for rate, _ in peer])
    used = median([cpu for _, cpu in ours]), median([cpu for _, cpu in peer])
    return Figure(
        f"AMQP/Fast body of {size >> 20} MiB in fragments, against a bare TCP copy",
        "MB/s",
        *rates,
        ratio=rates[0] / rates[1],
        target=LARGE[size],
        more={
            "CPU us/MB": f"{used[0] / (RUN_BYTES / MEGABYTE) * 1e6:.0f}",
            "peer's": f"{used[1] / (RUN_BYTES / MEGABYTE) * 1e6:.0f}",
        },
    )


# Large bodies.


def _timed(sending: Callable[[Connection], None], receive: Callable[[], int]) -> float:
    """MB/s from the first byte sent to the last one received. `sending` runs in a process of its own, and
    starts when it hears anything."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=sending, args=(theirs,), daemon=True)
    process.start()
    try:
        ours.recv()
        begin = time.perf_counter()
        ours.send(True)
        byte_count = receive()
        return byte_count / MEGABYTE / (time.perf_counter() - begin)
    finally:
        process.join(CONNECT_SECS_MAX)


def _message(size: int) -> bytes:
    """One message as its producer writes it, without a tag."""
    head = wires.fast_head(size, persistent=False)
    piece = bytes(FRAGMENT_BYTES)
    first = piece[: FRAGMENT_BYTES - len(head)]
    left = size - len(first)
    parts = [wires.fast_send(0, head + first, partial=True)]
    while left > 0:
        byte_count = min(left, FRAGMENT_BYTES)
        left -= byte_count
        parts.append(wires.fast_send(0, piece[:byte_count], partial=left > 0))
    return b"".join(parts)


def _write(sock: socket.socket, pipe: Connection, size: int) -> None:
    message = _message(size)
    pipe.send(True)
    pipe.recv()
    for _ in range(RUN_BYTES // size):
        sock.sendall(message)


def _large(gateway: Gateway, size: int) -> Passed:
    before = gateway.cpu()
    rate = _through_gateway(gateway.fast_port, size)
    return rate, gateway.cpu() - before


def _through_gateway(port: int, size: int) -> float:
    count = RUN_BYTES // size
    with closing(wires.fast_connect(port, "large", producer=False)) as consumer:
        wires.fast_consume(consumer, count)

        def sending(pipe: Connection) -> None:
            with closing(wires.fast_connect(port, "large", producer=True)) as sock:
                _write(sock, pipe, size)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(READ_BYTES):
                    continue

        messages = _Messages(consumer)
        return _timed(sending, lambda: sum(messages.read(size) for _ in range(count)))


class _Messages:
    """Reads messages in fragments, as much at once as the reader of the copy, which is not to be measured."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._inbox = memoryview(bytearray(READ_BYTES))
        self._at = self._end = 0  # what of the inbox has not been looked at

    def _fill(self, wanted: int) -> None:
        """Have `wanted` bytes, few, in the inbox."""
        if self._end - self._at < wanted:
            left = bytes(self._inbox[self._at : self._end])
            self._inbox[: len(left)] = left
            self._at, self._end = 0, len(left)
        while self._end - self._at < wanted:
            read = self._sock.recv_into(self._inbox[self._end :])
            if not read:
                raise ConnectionError("the server closed the connection")
            self._end += read

    def _take(self, size: int) -> bytes:
        self._fill(size)
        self._at += size
        return bytes(self._inbox[self._at - size : self._at])

    def _skip(self, size: int) -> None:
        while size > self._end - self._at:
            size -= self._end - self._at
            self._at = self._end = 0
            self._fill(1)
        self._at += size

    def read(self, wanted: int) -> int:
        """Read one message and acknowledge it; returns the bytes of its body."""
        byte_count, partial, number = -15, True, 0
        while partial:
            command = self._take(int.from_bytes(self._take(2), "big"))
            if command[0] != 41 or command[-1] != 0xCE:
                raise Wrong(f"no NOTIFY: {command!r}")
            number = int.from_bytes(command[3:7], "big")
            fragment = int.from_bytes(command[7:11], "big")
            partial = bool(command[11] & 1)
            self._skip(fragment)
            byte_count += fragment
        if byte_count != wanted:
            raise Wrong(f"{byte_count} bytes of {wanted}")
        self._sock.sendall(wires.fast_frame(21, b"\0\1\0\0" + number.to_bytes(4, "big")))
        return byte_count


def _through_copy(size: int) -> Passed:
    """The same bytes through a process that copies them."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    copier = context.Process(target=_copier, args=(theirs,), daemon=True)
    copier.start()
    port = ours.recv()
    total = len(_message(size)) * (RUN_BYTES // size)
    with closing(wires.open_socket(port)) as sock:

        def sending(pipe: Connection) -> None:
            with closing(wires.open_socket(port)) as out:
                _write(out, pipe, size)
                out.shutdown(socket.SHUT_WR)

        def receive() -> int:
            left, inbox = total, bytearray(READ_BYTES)
            while left:
                read = sock.recv_into(inbox)
                if not read:
                    raise ConnectionError("the copy ended early")
                left -= read
            return total

        try:
            rate = _timed(sending, receive)
            return rate, ours.recv()
        finally:
            copier.join(CONNECT_SECS_MAX)


def _copier(pipe: Connection) -> None:
    trio.run(_copy, pipe)
    pipe.send(time.process_time())


async def _copy(pipe: Connection) -> None:
    """Accept two connections, and copy what the second one says to the first one."""
    (listener,) = await trio.open_tcp_listeners(0, host=LOOPBACK)
    pipe.send(listener.socket.getsockname()[1])
    async with listener:
        target = await listener.accept()
        source = await listener.accept()
        async with target, source:
            while data := await source.receive_some(COPY_BYTES):
                await target.send_all(data)
