"""States of a connection and of a channel, and the methods that may arrive in each channel state.

The methods that each end expects on channel 0 are in its own table, in `server.py` and `client.py`. `Channel`
also holds the content that is being received on it.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from gateway.errors import RemoteProtocolError
from gateway.model.byte_buffer import ByteBuffer
from gateway.model.spooled_bodies import BodySink
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.spec import ReplyCode

CONNECTION_CLASS: Final = 10


class State(Enum):
    """State of a connection."""

    HEADER = auto()
    START = auto()
    AUTHENTICATING = auto()
    SECURE = auto()
    TUNE = auto()
    TUNED = auto()
    OPENING = auto()
    OPEN = auto()
    CLOSING = auto()  # we sent close, and discard everything until close-ok
    CLOSED = auto()


class ChannelState(Enum):
    """State of a channel. A channel that is not in the connection's dictionary is not open."""

    OPENING = auto()  # the client sent channel.open
    OPEN = auto()
    CLOSING = auto()  # we sent close, and discard everything until close-ok
    CLOSED = auto()


class Channel:
    """Channel of a connection, with the message that is arriving on it.

    A message is a method such as basic.publish, then a header, then the body, which is complete when
    `bytes_remaining` is 0.
    """

    __slots__ = (
        "body",
        "bytes_remaining",
        "index",
        "method",
        "number",
        "properties",
        "published",
        "sink",
        "state",
    )

    def __init__(self, number: int, state: ChannelState) -> None:
        self.number = number
        self.state = state
        self.published = 0  # number of our messages, by which a client's confirms are numbered
        self.reset()

    def reset(self) -> None:
        """Discard the incomplete message. The channel then expects a method."""
        self.index = 0
        self.method = b""
        self.properties: bytes | None = None
        self.bytes_remaining = 0
        self.body: ByteBuffer | None = None  # received parts of the body; None if there are none
        self.sink: BodySink | None = None  # receives a large body instead of `body`

    @property
    def held_bytes(self) -> int:
        """Number of received bytes of the incomplete message."""
        body = 0 if self.body is None else self.body.byte_count
        return len(self.method) + len(self.properties or b"") + body

    def unexpected_frame_error(self) -> RemoteProtocolError:
        """Return the error (505) for a frame that does not continue the incomplete message."""
        part = "header" if self.properties is None else "body"
        text = (
            f"UNEXPECTED_FRAME - expected content {part} for class 60, got non content {part} frame instead"
        )
        class_id, method_id = self.index >> 16, self.index & 0xFFFF
        return RemoteProtocolError(
            text, reason=ReplyCode.UNEXPECTED_FRAME, class_id=class_id, method_id=method_id
        )


def legal_methods(direction: int) -> dict[ChannelState, frozenset[type[m.Method]]]:
    """Return the methods without content that may arrive on a channel, by the state of the channel.

    `direction` is a flag for the end that receives them, server or client.
    """
    arriving = {kind for kind in m.METHODS.values() if kind.direction & direction and not kind.content}
    arriving = {kind for kind in arriving if kind.index >> 16 != CONNECTION_CLASS}
    return {
        ChannelState.OPENING: frozenset({m.ChannelOpenOk, m.ChannelClose}),
        ChannelState.OPEN: frozenset(arriving - {m.ChannelOpen, m.ChannelOpenOk, m.ChannelCloseOk}),
    }
