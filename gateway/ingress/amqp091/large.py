"""Incoming message bodies that are too large for memory, written to the spool while they arrive.

The protocol machine creates a `LargeBody` when a content header announces such a body, and writes each body
frame to it. Errors of the spool become channel errors with code 406 (PRECONDITION_FAILED).
"""

from __future__ import annotations

from gateway.broker.spool import Spool, SpoolFull
from gateway.errors import RemoteProtocolError
from gateway.protocols.amqp091.spec import BASIC_PUBLISH, ReplyCode


class LargeBody:
    """Incoming body of `size` bytes in a file of the spool.

    The file is deleted when neither this object nor the finished body refers to it any more.
    """

    __slots__ = ("_file",)

    def __init__(self, spool: Spool, size: int, user: str) -> None:
        """Create a file for `size` bytes, which count toward the per-user limit of `user`.

        Raises RemoteProtocolError with code 406 if the spool, or the user's part of its limit, is full.
        """
        try:
            spool.check_room(size, user)
            self._file = spool.draft(user)
        except SpoolFull as error:
            raise _refusal(error) from error

    def write(self, data: bytes) -> None:
        """Append the next bytes. Raises RemoteProtocolError with code 406 if the spool is full."""
        try:
            self._file.write(data)
        except SpoolFull as error:
            raise _refusal(error) from error

    def finish(self) -> bytes:
        """Return the complete body. Raises RemoteProtocolError with code 406 if it cannot be read."""
        try:
            return self._file.body()
        except OSError as error:
            raise _refusal(error) from error


def _refusal(error: Exception) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"PRECONDITION_FAILED - {error}",
        reason=ReplyCode.PRECONDITION_FAILED,
        class_id=BASIC_PUBLISH >> 16,
        method_id=BASIC_PUBLISH & 0xFFFF,
    )
