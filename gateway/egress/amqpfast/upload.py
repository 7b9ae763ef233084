"""Upload of one large message to a server, in fragments, plain or restartable (3.5.13, 3.5.14).

A restartable upload begins with PREPARE, which carries the head and the SHA-1 of the body. The server answers
READY with the number of body bytes that it has from an earlier attempt of the same client with the same head,
and only the rest is sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import IO

from gateway.protocols.amqpfast.client import ClientConnection
from gateway.protocols.amqpfast.sender import Transfer

Read = Callable[[int, int], bytes | memoryview]
"""Function that returns bytes of the body: from an offset, as many as requested."""


def content_hash(body: bytes) -> bytes:
    """Return the SHA-1 of a body in hexadecimal digits, as PREPARE carries it."""
    return hashlib.sha1(body, usedforsecurity=False).hexdigest().encode()


def file_hash(file: IO[bytes]) -> bytes:
    """Return the SHA-1 of an open file from its current position on, in hexadecimal digits."""
    return hashlib.file_digest(file, "sha1").hexdigest().encode()  # type: ignore[arg-type]


class Digest:
    """SHA-1 of a body that arrives in pieces, to be compared with the one announced by PREPARE."""

    def __init__(self, announced: bytes | None) -> None:
        """Start the hash.

        `announced` is 20 bytes, or None for a hash other than SHA-1, which never matches.
        """
        self._hash = hashlib.sha1(usedforsecurity=False)
        self._announced = announced

    def update(self, data: bytes | memoryview) -> None:
        """Add the next piece of the body."""
        self._hash.update(data)

    @property
    def matches(self) -> bool:
        """True if the SHA-1 of the body equals the one that PREPARE has announced."""
        return self._hash.digest() == self._announced


class Upload:
    """Upload of one message on an open handle.

    `at` is the offset in the body of the next byte to write; the first bytes are not written if the server
    has them already. Call `begin`, then `write` as long as the upload is `writable` and the stream accepts
    more.
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
        self.prepared = False  # True if PREPARE was sent and READY has not arrived
        self.tag = 0  # of the last fragment, once it is written
        self._machine = machine
        self._channel = channel
        self._head = head
        self._name = name
        self._digest = digest
        self._read = read
        self._transfer: Transfer | None = None

    def begin(self, *, restartable: bool) -> None:
        """Send PREPARE (`restartable` True), or start to send the message at once.

        Raises LocalProtocolError if the handle is closed or the content header does not fit a fragment.
        """
        if restartable:
            self._machine.prepare(self.handle, self._head, self.size, b"", self._digest)
            self.prepared = True
        else:
            self._start(resumed=False)

    def ready(self, held_bytes: int) -> None:
        """Start to send the body behind the `held_bytes` bytes that the server already has.

        Raises LocalProtocolError like `begin`.
        """
        self.prepared = False
        self.at = self.resumed_at = held_bytes
        self._start(resumed=True)

    def _start(self, *, resumed: bool) -> None:
        self._transfer = Transfer(
            self._machine, self.handle, self._head, self.size, name=self._name, resumed=resumed
        )

    @property
    def writable(self) -> bool:
        """True if part of the body is left to write and the server is ready for it."""
        return self._transfer is not None and self._transfer.usable and not self.tag

    def write(self) -> int:
        """Encode the next fragment. Return the number of its body bytes."""
        transfer = self._transfer
        assert transfer is not None
        data = self._read(self.at, min(transfer.capacity, self.size - self.at))
        self.at += len(data)
        last = self.at == self.size
        if last:
            self.tag = self._machine.new_tag(self._channel)
        transfer.write(data, last=last, tag=self.tag)
        return len(data)
