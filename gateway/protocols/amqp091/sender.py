"""Fast encoding of outgoing messages: what does not change between messages is encoded once.

A Deliverer belongs to one consumer, a Publisher to one channel. Both append the pieces of each message to
their connection's `out`. The bytes before the address depend on its length alone, and those behind it on the
properties and the body size. Both are therefore cached, so that messages of a thousand devices with a
thousand addresses share them. Properties are compared by identity, because they are shared objects.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from struct import Struct
from typing import Final

from gateway.errors import LocalProtocolError
from gateway.model.spooled_bodies import (
    APART_BYTES_MIN,
    Body,
    Piece,
    ReadFault,
    fault_in,
    is_large,
    is_lost,
)
from gateway.protocols.amqp091.codec import END, FRAME, U32, body_frames, encode_short_string
from gateway.protocols.amqp091.connection import Connection
from gateway.protocols.amqp091.spec import (
    BASIC_DELIVER,
    BASIC_PUBLISH,
    BASIC_WEIGHT,
    FRAME_BODY,
    FRAME_END,
    FRAME_HEADER,
    FRAME_METHOD,
)
from gateway.protocols.amqp091.states import Channel, ChannelState

TAG: Final = Struct(">QB").pack  # delivery tag, redelivered
HEADER: Final = Struct(">IIQ").pack  # size of the content header, class and weight, body size
HEADER_SIZE: Final = 12
TAG_SIZE: Final = 9
BITS_SIZE: Final = 1
START: Final = Struct(">BH").pack  # frame type, channel
BODY: Final = Struct(">BBHI").pack  # end of the frame before; type, channel, size

DeliverRow = tuple[bool, bytes, bytes, Body]
PublishRow = tuple[bytes, bytes, Body]


class ContentWriter:
    """Base class of Deliverer and Publisher: caches the encoded bytes that consecutive messages share."""

    def __init__(self, connection: Connection, channel: int, arguments: bytes, end: bytes) -> None:
        """Prepare to send messages on an open channel.

        The encoded method of each message consists of `arguments`, the message's address, and `end`. Raises
        LocalProtocolError if the channel is not open.
        """
        found = connection._channels.get(channel)
        if found is None or found.state is not ChannelState.OPEN:
            raise LocalProtocolError(f"channel {channel} is not open")
        self._channel: Channel = found
        self._out = connection.out
        self._sent = connection.sent
        self._connection = connection
        self._payload_max = connection.payload_max
        self._arguments = arguments
        self._end = end + START(FRAME_HEADER, channel)
        self._heads: dict[int, bytes] = {}
        self._properties = b""
        self._size = -1
        self._middle = b""
        self._behind = b""  # end of the header frame, and the head of a body frame for bodies of that size
        self._whole = False

    @property
    def usable(self) -> bool:
        """True while the channel is open; otherwise messages are dropped, as the peer would discard them."""
        return self._channel.state is ChannelState.OPEN

    def fits(self, properties: bytes) -> bool:
        """Return True if encoded properties fit a header frame of the negotiated frame size."""
        return len(properties) + HEADER_SIZE <= self._payload_max

    @abstractmethod
    def _head(self, size: int) -> bytes:
        """Return the bytes with which all messages begin whose addresses have `size` bytes.

        The result is cached.
        """

    def _prepare(self, properties: bytes, size: int) -> bool:
        """Encode and store the bytes between the address and the body, for messages with these properties.

        `size` is the size of the body in bytes. Return False if the properties are too large for a frame.
        """
        if not self.fits(properties):
            return False
        length = len(properties) + HEADER_SIZE
        if size != self._size:
            self._whole = 0 < size <= self._payload_max
            self._behind = BODY(FRAME_END, FRAME_BODY, self._channel.number, size) if self._whole else END
        head = HEADER(length, BASIC_WEIGHT, size)
        self._middle = b"".join((self._end, head, properties, self._behind))
        self._properties, self._size = properties, size
        self._connection.large |= size >= APART_BYTES_MIN
        return True

    def _frames(self, body: Body) -> list[Piece]:
        """Return the frames of a body that is larger than one frame, or the empty list for an empty body.

        Raises OSError if the body cannot be read from disk.
        """
        frames = body_frames(self._channel.number, body, self._connection.frame_max)
        self._sent["body"] += -(-len(body) // self._payload_max)
        self._connection.large |= is_large(body)
        return frames


class Deliverer(ContentWriter):
    """Encoder of the deliveries to one consumer of a client.

    If a body cannot be read from disk at present, `stopped` is set to the delivery tag of its message and the
    reason; the caller resets it to None. The constructor raises LocalProtocolError if the channel is not
    open.
    """

    def __init__(self, connection: Connection, channel: int, consumer_tag: str) -> None:
        self.stopped: tuple[int, str] | None = None
        arguments = U32.pack(BASIC_DELIVER) + encode_short_string(consumer_tag)
        super().__init__(connection, channel, arguments, END)

    def _head(self, size: int) -> bytes:
        head = FRAME.pack(FRAME_METHOD, self._channel.number, len(self._arguments) + TAG_SIZE + size)
        head = self._heads[size] = head + self._arguments
        return head

    def deliver_many(self, first_tag: int, rows: Iterable[DeliverRow]) -> list[int]:
        """Queue messages with consecutive delivery tags, beginning with `first_tag`.

        A row is (redelivered, Address.wire, encoded property flags and list, body). Return the tags of the
        messages that were not queued because their properties do not fit a frame of the client, or because
        their bodies are lost. If a body cannot be read at present, stop before its message and set `stopped`.
        """
        unsent: list[int] = []
        if not self.usable:
            return unsent
        out, heads = self._out, self._heads
        properties, size = self._properties, self._size
        middle, whole = self._middle, self._whole
        if size >= APART_BYTES_MIN:
            self._connection.large = True  # `_prepare` sets it for other sizes
        tag = first_tag
        bodies = 0
        for redelivered, address, row_properties, body in rows:
            if row_properties is not properties or len(body) != size:
                size = len(body)
                if not self._prepare(row_properties, size):
                    unsent.append(tag)
                    size = -1
                    tag += 1
                    continue
                properties, middle, whole = row_properties, self._middle, self._whole
            head = heads.get(len(address)) or self._head(len(address))
            if whole:
                out += (head, TAG(tag, redelivered), address, middle, body, END)
                bodies += 1
            else:
                try:
                    frames = self._frames(body)
                except OSError as error:
                    if not is_lost(error):
                        self.stopped = tag, str(error)
                        break
                    unsent.append(tag)
                else:
                    out += (head, TAG(tag, redelivered), address, middle, *frames)
            tag += 1
        count = tag - first_tag - len(unsent)
        sent = self._sent
        sent["basic.deliver"] += count
        sent["header"] += count
        sent["body"] += bodies
        return unsent


class Publisher(ContentWriter):
    """Encoder of the messages that a client publishes on one channel.

    `faults` has the ReadFault of each row of the last `publish_many` whose body could not be read, by
    position. The constructor raises LocalProtocolError if the channel is not open.
    """

    def __init__(self, connection: Connection, channel: int, *, mandatory: bool = False) -> None:
        self.faults: dict[int, ReadFault] = {}
        super().__init__(connection, channel, U32.pack(BASIC_PUBLISH) + b"\0\0", bytes((mandatory,)) + END)

    @property
    def published(self) -> int:
        """Number of messages published on this channel, which is also the confirm tag of the last one."""
        return self._channel.published

    def _head(self, size: int) -> bytes:
        head = FRAME.pack(FRAME_METHOD, self._channel.number, len(self._arguments) + size + BITS_SIZE)
        head = self._heads[size] = head + self._arguments
        return head

    def publish_many(self, rows: Iterable[PublishRow]) -> list[int]:
        """Queue messages; a row is (`wire` of the address, encoded property flags and list, body).

        The queued messages get consecutive confirm tags, beginning with `published` + 1. Return the positions
        of the rows that were not queued, because their properties do not fit a frame of the server, or
        because their bodies cannot be read from disk. `faults` has the reasons of the latter.
        """
        unsent: list[int] = []
        self.faults.clear()
        if not self.usable:
            return unsent
        out, heads = self._out, self._heads
        properties, size = self._properties, self._size
        middle, whole = self._middle, self._whole
        if size >= APART_BYTES_MIN:
            self._connection.large = True  # `_prepare` sets it for other sizes
        count = bodies = 0
        for address, row_properties, body in rows:
            if row_properties is not properties or len(body) != size:
                size = len(body)
                if not self._prepare(row_properties, size):
                    unsent.append(count + len(unsent))
                    size = -1
                    continue
                properties, middle, whole = row_properties, self._middle, self._whole
            head = heads.get(len(address)) or self._head(len(address))
            if whole:
                out += (head, address, middle, body, END)
                bodies += 1
            else:
                try:
                    frames = self._frames(body)
                except OSError as error:
                    self.faults[count + len(unsent)] = fault_in(error)
                    unsent.append(count + len(unsent))
                    continue
                out += (head, address, middle, *frames)
            count += 1
        self._channel.published += count
        sent = self._sent
        sent["basic.publish"] += count
        sent["header"] += count
        sent["body"] += bodies
        return unsent
