"""Large messages from and to a client: in fragments, announced, broken off, out of band."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any, Final

from gateway.protocols.amqpfast.events import Fragment, NotifyRow, Prepared, Ready
from gateway.protocols.amqpfast.sender import Transfer
from gateway.protocols.amqpfast.spec import DELIVERED, NOTIFY_STREAMING, RECOVERY, REDELIVERED
from gateway.settings import Limits
from tests.ingress.amqpfast.client import EMPTY, Fast

MIB: Final = 1_048_576
WRITTEN_BYTES: Final = 262_144  # handed to the socket at once
BODY_MAX: Final = 0xFFFF_FFFF
SMALL_MEMORY: Final = Limits(fast_memory_bytes_max=MIB)


def data(size: int, seed: int = 1) -> bytes:
    """A body that is like no other."""
    return random.Random(seed).randbytes(size)


def sha1(body: bytes) -> bytes:
    return hashlib.sha1(body, usedforsecurity=False).hexdigest().encode()


def files(gateway: Any) -> list[Path]:
    """What is in the spool of a gateway process, or of one in this process."""
    folder = gateway.folder / "data" / "spool"
    return sorted(folder.iterdir())


class Whole(Fast):
    """A client that takes messages of any size, one after the other."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **({"heartbeat": 0} | more))
        self.machine.message_bytes_max = BODY_MAX

    def transfer(
        self, handle: int, body: bytes, head: bytes = EMPTY, *, name: str = "", **more: Any
    ) -> Transfer:
        """The beginning of a message, of which nothing is sent yet."""
        return self.sized(handle, len(body), head, name=name.encode(), **more)

    def sized(self, handle: int, size: int, head: bytes = EMPTY, **more: Any) -> Transfer:
        return Transfer(self.machine, handle, head, size, **more)

    def write(self, transfer: Transfer, body: bytes, tag: int = 0, *, last: bool = True) -> None:
        """Bytes of a transfer, to its end unless `last` is not set."""
        at = written = 0
        while True:
            piece = body[at : at + transfer.capacity]
            at += len(piece)
            transfer.write(piece, last=last and at == len(body), tag=tag if last and at == len(body) else 0)
            if at - written >= WRITTEN_BYTES or at == len(body):
                self.flush()
                written = at
            if at == len(body):
                return

    def put_large(
        self, handle: int, body: bytes, head: bytes = EMPTY, *, channel: int = 1, name: str = ""
    ) -> None:
        """A message in fragments, replied to."""
        tag = self.machine.new_tag(channel)
        self.write(self.transfer(handle, body, head, name=name), body, tag)
        assert self.reply()[1:4] == (handle, tag, 200)

    def prepare(
        self, handle: int, body: bytes, head: bytes = EMPTY, *, first: int = 0, content_hash: bytes = b""
    ) -> int:
        """PREPARE, and what READY says."""
        self.machine.prepare(handle, head, len(body), body[:first], content_hash)
        self.flush()
        return self.next(Ready).message_size

    def resume(
        self, handle: int, body: bytes, at: int, tag: int = 0, *, stop: int | None = None, name: str = ""
    ) -> Transfer:
        """Go on behind the `at` data that the gateway has, up to `stop`."""
        transfer = self.transfer(handle, body, resumed=True, name=name)
        self.write(transfer, body[at:stop], tag, last=stop is None)
        return transfer

    def large(self, *, ready: int | None = None) -> NotifyRow:
        """The next message, which comes in fragments: handle, number, bits, head, body, name.

        On a restartable channel it is prepared; `ready` is what we claim to have of it.
        """
        parts: list[bytes] = []
        head = b""
        if ready is not None:
            prepared = self.next(Prepared)
            head = prepared.head
            self.machine.ready(prepared.handle, ready)
            self.flush()
        while True:
            part = self.next(Fragment)
            head = part.head or head
            parts.append(part.data)
            if part.last:
                bits = part.bits & (DELIVERED | REDELIVERED | RECOVERY | NOTIFY_STREAMING)
                return (part.handle, part.number, bits, head, b"".join(parts), part.dest_name)

    def part(self) -> Fragment:
        """The next fragment of a message."""
        return self.next(Fragment)

    def next_part(self) -> tuple[int, bytes]:
        """The next fragment of a message: handle and bytes."""
        part = self.next(Fragment)
        return part.handle, part.data
