"""How soon the gateway answers again with a durable queue of a million messages, and in how much memory.

A gateway makes the queue. While it is down the messages are put into its store, in rows of as many as a busy
gateway commits together, and in rows of one, as a quiet one does. Then it is started: from the start of the
process until both protocols answer, which they do when everything has been found again.
"""

from __future__ import annotations

import struct
import threading
import time
from pathlib import Path
from typing import Final

from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.store.store import Store
from tests.benchmarks import wires
from tests.benchmarks.report import Figure, median
from tests.benchmarks.subjects import Gateway, SubjectError
from tests.interop.servers import LOOPBACK, free_ports

MESSAGES: Final = 1_000_000
ROWS: Final = (100, 1)  # messages in each
FLUSH_ROWS: Final = 1_000  # put into the store together
SECS_MAX: Final = 5.0
EMPTY_SECS_MAX: Final = 1.5
QUEUE: Final = "stored"
BODY: Final = bytes(128)


def _fill(folder: Path, length: int) -> None:
    """Put MESSAGES into the queue's log, in rows of `length`."""
    store = Store(folder)
    (log,) = [one for one in store.logs() if QUEUE in one.name]
    address, sender = amqp_address("", QUEUE), Sender("amqp091", "bench")
    row = [Message(address, BODY, assurance=1, durable=True, sender=sender) for _ in range(length)]
    told: list[Outcome] = []
    committed = threading.Event()

    def done(outcome: Outcome) -> None:
        told.append(outcome)
        if len(told) == MESSAGES // length:
            committed.set()

    store.start(lambda call: call())
    for number in range(MESSAGES // length):
        # A free position between two of them, for what adjoins in one commit makes one row.
        store.append(log, number * (length + 1), row, done)
        if number % FLUSH_ROWS == 0:
            store.flush()
    store.flush()
    committed.wait()
    store.close()
    if any(outcome is not ACCEPTED for outcome in told):
        raise SubjectError("the store did not take the messages")


def _found(port: int) -> int:
    """How many messages the queue has."""
    with wires.amqp_connect(port) as sock:
        sock.sendall(wires.method(1, 50, 10, b"\x00\x00" + wires.short(QUEUE) + b"\x01" + b"\x00" * 4))
        answer = wires.expect(sock, 50, 11)
        count: int = struct.unpack_from(">I", answer, 1 + answer[0])[0]
        return count


def _measured(folder: Path, length: int) -> Figure:
    gateway = Gateway(folder, store={"path": str(folder / "data")})
    with gateway, wires.amqp_connect(gateway.amqp_port) as sock:
        wires.amqp_queue(sock, QUEUE, "amq.topic", QUEUE, durable=True)
    _fill(folder / "data", length)
    begin = time.monotonic()
    with gateway:
        secs = time.monotonic() - begin
        memory = gateway.rss()
        count = _found(gateway.amqp_port)
    if count != MESSAGES:
        raise SubjectError(f"{count} of {MESSAGES} messages were found again")
    return Figure(
        f"start-up with {MESSAGES} stored messages of {len(BODY)} bytes, rows of {length}",
        "s",
        secs,
        SECS_MAX,
        ratio=SECS_MAX / secs,
        target=1.0,
        more={"MB of memory": round(memory / 1e6)},
    )


def _empty(folder: Path, repeat: int) -> Figure:
    """Without stored messages, with a store and HTTP, as people have it."""
    found = []
    for number in range(repeat):
        at = folder / str(number)
        (http,) = free_ports(1)
        gateway = Gateway(at, store={"path": str(at / "data")}, http={"host": LOOPBACK, "port": http})
        begin = time.monotonic()
        with gateway:
            found.append((time.monotonic() - begin, gateway.rss()))
    secs = median([one for one, _ in found])
    return Figure(
        "start-up without stored messages",
        "s",
        secs,
        EMPTY_SECS_MAX,
        ratio=EMPTY_SECS_MAX / secs,
        target=1.0,
        more={"MB of memory": round(max(byte_count for _, byte_count in found) / 1e6)},
    )


def measure(folder: Path, seconds: float, repeat: int) -> list[Figure]:
    """One figure per length of row, each measured once; and one of nothing."""
    stored = [_measured(folder / f"rows-of-{length}", length) for length in ROWS]
    return [_empty(folder / "empty", repeat), *stored]
