"""The states of a connection and of a channel, and which methods may arrive on a channel in which.

What each side expects of a connection is in the side's own table, in `server.py` and `client.py`.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from gateway.errors import RemoteProtocolError
from gateway.model.gathered import Gathered
from gateway.model.spooled import BodySink
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.spec import ReplyCode

CONNECTION_CLASS: Final = 10


class State(Enum):
    """Of a connection."""

    HEADER = auto()
    START = auto()
    AUTHENTICATING = auto()
    SECURE = auto()
    TUNE = auto()
    TUNED = auto()
    OPENING = auto()
    OPEN = auto()
    CLOSING = auto()  # we said close, and discard everything until close-ok
    CLOSED = auto()


class ChannelState(Enum):
    """Of a channel; a channel that is not in the connection's dictionary is not open."""

    OPENING = auto()  # the client asked for it
    OPEN = auto()
    CLOSING = auto()  # we said close, and discard everything until close-ok
    CLOSED = auto()


class Channel:
    """A channel and the content that it has begun: method, then header, then body until `left` is 0."""

    __slots__ = ("body", "index", "left", "method", "number", "properties", "published", "sink", "state")

    def __init__(self, number: int, state: ChannelState) -> None:
        self.number = number
        self.state = state
        self.published = 0  # messages of ours, which is how a client's confirms are numbered
        self.reset()

    def reset(self) -> None:
        """No content has begun."""
        self.index = 0
        self.method = b""
        self.properties: bytes | None = None
        self.left = 0
        self.body: Gathered | None = None  # of which some has come; None: nothing
        self.sink: BodySink | None = None  # of a large body, instead

    @property
    def held(self) -> int:
        """Octets of the content that has begun."""
        body = 0 if self.body is None else self.body.octets
        return len(self.method) + len(self.properties or b"") + body

    def interrupted(self) -> RemoteProtocolError:
        """The fault of a peer who has begun a content here, and says something else."""
        what = "header" if self.properties is None else "body"
        text = (
            f"UNEXPECTED_FRAME - expected content {what} for class 60, got non content {what} frame instead"
        )
        class_id, method_id = self.index >> 16, self.index & 0xFFFF
        return RemoteProtocolError(
            text, reason=ReplyCode.UNEXPECTED_FRAME, class_id=class_id, method_id=method_id
        )


def legal_methods(direction: int) -> dict[ChannelState, frozenset[type[m.Method]]]:
    """The methods that may arrive on a channel, by its state, at the side that `direction` names."""
    arriving = {kind for kind in m.METHODS.values() if kind.direction & direction and not kind.content}
    arriving = {kind for kind in arriving if kind.index >> 16 != CONNECTION_CLASS}
    return {
        ChannelState.OPENING: frozenset({m.ChannelOpenOk, m.ChannelClose}),
        ChannelState.OPEN: frozenset(arriving - {m.ChannelOpen, m.ChannelOpenOk, m.ChannelCloseOk}),
    }
