"""Bodies that a client sends and that are too large to be held: they go to the spool as they come."""

from __future__ import annotations

from gateway.broker.spool import Spool, SpoolFull
from gateway.errors import RemoteProtocolError
from gateway.protocols.amqp091.spec import BASIC_PUBLISH, ReplyCode


class LargeBody:
    """One of `size` octets: what the machine writes to. Its file goes when the body is forgotten, or this."""

    __slots__ = ("_file",)

    def __init__(self, spool: Spool, size: int, user: str) -> None:
        """`user` sends it. Raises RemoteProtocolError: 406 for want of room, also in that share."""
        try:
            spool.check_room(size, user)
            self._file = spool.draft(user)
        except SpoolFull as error:
            raise _refusal(error) from error

    def write(self, octets: bytes) -> None:
        """The next of it. Raises RemoteProtocolError: 406 for want of room."""
        try:
            self._file.write(octets)
        except SpoolFull as error:
            raise _refusal(error) from error

    def finish(self) -> bytes:
        """It is whole. Raises RemoteProtocolError: 406 when it cannot be read."""
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
