"""One large message on its way to a server, a fragment at a time: plainly, or so that it can be taken up
again where it broke off (3.5.13, 3.5.14).

A restartable one begins with PREPARE, which carries its head and the SHA-1 of its body. The server answers
READY with how much of the body it holds from an earlier attempt of the same client with the same head, and
only the rest is sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import IO

from gateway.protocols.amqpfast.client import ClientConnection
from gateway.protocols.amqpfast.sending import Transfer

Read = Callable[[int, int], bytes | memoryview]
"""The octets of the body from an offset on, as many as asked for."""


def content_hash(body: bytes) -> bytes:
    """As PREPARE carries it."""
    return hashlib.sha1(body, usedforsecurity=False).hexdigest().encode()


def file_hash(file: IO[bytes]) -> bytes:
    """The same for what an open file holds from where it stands."""
    return hashlib.file_digest(file, "sha1").hexdigest().encode()  # type: ignore[arg-type]


class Digest:
    """The SHA-1 of a body that arrives in pieces, to be compared with the one that PREPARE announced."""

    def __init__(self, announced: bytes | None) -> None:
        """`announced`: 20 bytes; None for a hash that is no SHA-1, which nothing matches."""
        self._hash = hashlib.sha1(usedforsecurity=False)
        self._announced = announced

    def update(self, octets: bytes | memoryview) -> None:
        """Add the next piece of the body."""
        self._hash.update(octets)

    @property
    def matches(self) -> bool:
        """Return True if the body is the one that was announced."""
        return self._hash.digest() == self._announced


class Upload:
    """One message on an open handle. `at` is how much of the body has been written, or need not be.

    Call `begin`, then `write` whenever there is room, as long as `writable`.
    """

    def __init__(
        self,
        machine: ClientConnection,
        channel: int,
        handle: int,
        head: bytes,
        size: int,
        read: Read,
        *,
        name: bytes,
        digest: bytes = b"",
    ) -> None:
        self.handle = handle
        self.size = size
        self.at = 0
        self.resumed_at = 0
        self.prepared = False  # PREPARE was said, READY has not been heard
        self.tag = 0  # of the last fragment, once it is written
        self._machine = machine
        self._channel = channel
        self._head = head
        self._name = name
        self._digest = digest
        self._read = read
        self._transfer: Transfer | None = None

    def begin(self, *, restartable: bool) -> None:
        """Announce it, or begin at once. Raises LocalProtocolError when the handle is closed or its head does
        not fit a fragment."""
        if restartable:
            self._machine.prepare(self.handle, self._head, self.size, b"", self._digest)
            self.prepared = True
        else:
            self._start(resumed=False)

    def ready(self, held: int) -> None:
        """The server holds so much of the body. Raises LocalProtocolError as `begin`."""
        self.prepared = False
        self.at = self.resumed_at = held
        self._start(resumed=True)

    def _start(self, *, resumed: bool) -> None:
        self._transfer = Transfer(
            self._machine, self.handle, self._head, self.size, name=self._name, resumed=resumed
        )

    @property
    def writable(self) -> bool:
        """There is more to write, and the server waits for it."""
        return self._transfer is not None and self._transfer.usable and not self.tag

    def write(self) -> int:
        """Encode the next fragment; returns how many octets of the body it has."""
        transfer = self._transfer
        assert transfer is not None
        octets = self._read(self.at, min(transfer.room, self.size - self.at))
        self.at += len(octets)
        last = self.at == self.size
        if last:
            self.tag = self._machine.new_tag(self._channel)
        transfer.write(octets, last=last, tag=self.tag)
        return len(octets)
