"""Messages on their way out: what does not change from one message to the next is encoded once.

A Deliverer belongs to one consumer, a Publisher to one channel. Both append to their connection's `out` the
pieces of each message, most of them octets that were made before: the method frame depends on the address,
the content header on properties and size. The pieces of the last message are recognised by identity, for
addresses and property sets are shared objects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from struct import Struct
from typing import Final

from gateway.errors import LocalProtocolError
from gateway.protocols.amqp091.codec import END, FRAME, U32, encode_short_string
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
START: Final = Struct(">BH").pack  # frame type, channel
BODY: Final = Struct(">BBHI").pack  # end of the frame before; type, channel, size
PREPARED_OCTETS_MAX: Final = 4096  # larger properties hardly repeat; remembering them would cost memory
ADDRESSES_MAX: Final = 4096  # method frames that one consumer or publisher remembers

DeliverRow = tuple[bool, bytes, bytes, bytes]
PublishRow = tuple[bytes, bytes, bytes]


class ContentWriter(ABC):
    """What delivering and publishing have in common: the frames behind the part that changes."""

    def __init__(self, connection: Connection, channel: int) -> None:
        found = connection._channels.get(channel)
        if found is None or found.state is not ChannelState.OPEN:
            raise LocalProtocolError(f"channel {channel} is not open")
        self._channel: Channel = found
        self._out = connection.out
        self._sent = connection.sent
        self._payload_max = connection.payload_max
        self._frames: dict[bytes, tuple[bytes, bytes]] = {}
        self._prepared: dict[tuple[bytes, int], tuple[bytes, bytes, bytes, bool]] = {}
        self._address = b""
        self._properties = b""
        self._size = -1
        self._head = b""
        self._middle = b""
        self._whole = False

    @property
    def usable(self) -> bool:
        """The channel is still open; otherwise what is sent is dropped, as the peer would discard it."""
        return self._channel.state is ChannelState.OPEN

    @abstractmethod
    def _method_frame(self, address: bytes) -> tuple[bytes, bytes]:
        """The method frame in two parts, before and behind what changes; the second part includes its end."""

    def _prepare(self, address: bytes, properties: bytes, size: int) -> bool:
        """Encode what goes around tag and body; False when the properties do not fit a frame."""
        known = self._prepared.get((address, size))
        if known is not None and known[0] is properties:
            _, self._head, self._middle, self._whole = known
            self._address, self._properties, self._size = address, properties, size
            return True
        if len(properties) + HEADER_SIZE > self._payload_max:
            return False
        frames = self._frames
        parts = frames.get(address)
        if parts is None:
            if len(frames) >= ADDRESSES_MAX:
                frames.clear()
            head, tail = self._method_frame(address)
            parts = frames[address] = (head, tail + START(FRAME_HEADER, self._channel.number))
        self._head = parts[0]
        middle = parts[1] + HEADER(len(properties) + HEADER_SIZE, BASIC_WEIGHT, size) + properties
        self._whole = 0 < size <= self._payload_max
        if self._whole:
            self._middle = middle + BODY(FRAME_END, FRAME_BODY, self._channel.number, size)
        else:
            self._middle = middle + END
        self._address = address
        self._properties = properties
        self._size = size
        if len(self._prepared) >= ADDRESSES_MAX or len(properties) > PREPARED_OCTETS_MAX:
            self._prepared.clear()
        self._prepared[address, size] = (properties, self._head, self._middle, self._whole)
        return True

    def _body(self, body: bytes) -> None:
        """A body that needs no frame, or several."""
        out = self._out
        room = self._payload_max
        for at in range(0, len(body), room):
            piece = body[at : at + room]
            out += (FRAME.pack(FRAME_BODY, self._channel.number, len(piece)), piece, END)
            self._sent["body"] += 1


class Deliverer(ContentWriter):
    """Delivers to one consumer of a client. Raises LocalProtocolError when its channel is not open."""

    def __init__(self, connection: Connection, channel: int, consumer_tag: str) -> None:
        super().__init__(connection, channel)
        self._tag = U32.pack(BASIC_DELIVER) + encode_short_string(consumer_tag)

    def _method_frame(self, address: bytes) -> tuple[bytes, bytes]:
        size = len(self._tag) + 9 + len(address)
        return FRAME.pack(FRAME_METHOD, self._channel.number, size) + self._tag, address + END

    def deliver(self, tag: int, redelivered: bool, address: bytes, properties: bytes, body: bytes) -> bool:
        """Queue one message; see `deliver_many`. Returns whether it could be encoded."""
        return not self.deliver_many(tag, ((redelivered, address, properties, body),))

    def deliver_many(self, first_tag: int, rows: Iterable[DeliverRow]) -> list[int]:
        """Queue messages with consecutive delivery tags from `first_tag` on.

        A row is (redelivered, AmqpAddress.wire, octets from the property flags on, body). Returns the tags of
        those that were not sent, because their properties do not fit a frame that the client takes.
        """
        unsent: list[int] = []
        if not self.usable:
            return unsent
        out = self._out
        address, properties, size = self._address, self._properties, self._size
        head, middle, whole = self._head, self._middle, self._whole
        tag = first_tag
        bodies = 0
        for redelivered, row_address, row_properties, body in rows:
            if row_address is not address or row_properties is not properties or len(body) != size:
                size = len(body)
                if not self._prepare(row_address, row_properties, size):
                    unsent.append(tag)
                    size = -1
                    tag += 1
                    continue
                address, properties = row_address, row_properties
                head, middle, whole = self._head, self._middle, self._whole
            if whole:
                out += (head, TAG(tag, redelivered), middle, body, END)
                bodies += 1
            else:
                out += (head, TAG(tag, redelivered), middle)
                self._body(body)
            tag += 1
        count = tag - first_tag - len(unsent)
        sent = self._sent
        sent["basic.deliver"] += count
        sent["header"] += count
        sent["body"] += bodies
        return unsent


class Publisher(ContentWriter):
    """Publishes on one channel of a server. Raises LocalProtocolError when the channel is not open."""

    def __init__(self, connection: Connection, channel: int, *, mandatory: bool = False) -> None:
        super().__init__(connection, channel)
        self._bits = bytes((mandatory,)) + END

    @property
    def published(self) -> int:
        """How many messages were sent on this channel: with confirms, the tag of the last one."""
        return self._channel.published

    def _method_frame(self, address: bytes) -> tuple[bytes, bytes]:
        arguments = U32.pack(BASIC_PUBLISH) + b"\0\0" + address
        return b"", FRAME.pack(
            FRAME_METHOD, self._channel.number, len(arguments) + 1
        ) + arguments + self._bits

    def publish_many(self, rows: Iterable[PublishRow]) -> list[int]:
        """Queue messages: (AmqpAddress.wire, octets from the property flags on, body).

        The confirms are numbered on from `published`. Returns the positions of the rows that were not sent,
        because their properties do not fit a frame that the server takes.
        """
        unsent: list[int] = []
        if not self.usable:
            return unsent
        out = self._out
        address, properties, size = self._address, self._properties, self._size
        middle, whole = self._middle, self._whole
        count = bodies = 0
        for row_address, row_properties, body in rows:
            if row_address is not address or row_properties is not properties or len(body) != size:
                size = len(body)
                if not self._prepare(row_address, row_properties, size):
                    unsent.append(count + len(unsent))
                    size = -1
                    continue
                address, properties = row_address, row_properties
                middle, whole = self._middle, self._whole
            if whole:
                out += (middle, body, END)
                bodies += 1
            else:
                out.append(middle)
                self._body(body)
            count += 1
        self._channel.published += count
        sent = self._sent
        sent["basic.publish"] += count
        sent["header"] += count
        sent["body"] += bodies
        return unsent
