"""Publishes of one client that wait until a full queue has room, while its connection is read on.

A full queue holds the channels that published to it. The connection goes on: pings, acknowledgements, closes
and the commands of other channels are processed. What a held channel publishes waits here, and so does what
the client sends on that channel behind it, unless its protocol lets that go ahead. The events of a channel
leave in their order, when nothing holds it any more. What the client sent before it closed the channel goes
ahead of the close, to a queue that accepts or refuses it.

What waits is bounded, for each channel and for the connection. Beyond the bound nothing more is read. What
waits counts in its user's share of the memory: of a user with more than that nothing more is read as soon as
anything waits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, Generic, TypeVar

from gateway import clock
from gateway.transport.stream import Stream

EVERY_CHANNEL: Final = 0  # no channel has this number; for protocols without channels, it is the only one
# A channel's publishes that wait weigh at most 1.25 MiB: a message in memory takes some 256 bytes by itself.
MESSAGES_MAX: Final = 4_096
MESSAGE_BYTES: Final = 256  # of an event or message that waits, besides its content
BYTES_MAX: Final = 262_144
CHANNELS_MAX: Final = 4  # full ones; of a connection with more of them nothing is read
EventT = TypeVar("EventT")


class Hold:
    """What holds a channel, and how often."""

    __slots__ = ("channel", "count")

    def __init__(self, channel: int) -> None:
        self.channel = channel
        self.count = 0


class Line(Generic[EventT]):
    """What waits of one channel."""

    __slots__ = ("bytes", "events", "messages")

    def __init__(self) -> None:
        self.events: list[EventT] = []
        self.messages = 0
        self.bytes = 0

    @property
    def is_full(self) -> bool:
        """Nothing more may come."""
        return self.messages > MESSAGES_MAX or self.bytes > BYTES_MAX


class WaitingPublishes(Generic[EventT]):
    """The waiting events of one connection, by channel."""

    __slots__ = ("_ended", "_holds", "_lines", "_restrained", "_stream", "_unread_since", "on")

    def __init__(self, stream: Stream) -> None:
        self.on = False  # something is held or waits; as long as it is not, nothing here has to be called
        self._stream = stream
        self._holds: dict[int, Hold] = {}
        self._lines: dict[int, Line[EventT]] = {}
        self._unread_since: float | None = None  # loop-clock seconds; None: the connection is read
        self._ended = False
        self._restrained = False

    @property
    def octets(self) -> int:
        """Bytes of memory that the waiting events occupy."""
        return sum([line.bytes + line.messages * MESSAGE_BYTES for line in self._lines.values()])

    def restrain(self, on: bool) -> None:
        """Let nothing more wait, or as much as usual. The owner of the stream gets a turn to act on it."""
        if on != self._restrained and not self._ended:
            self._restrained = on
            if not on and not self.full():
                self._read_on()
            self._stream.again()

    def hold(self, channel: int) -> Callable[[], None]:
        """Have the publishes of a channel, or of EVERY_CHANNEL, wait; returns what undoes it."""
        hold = self._holds.get(channel)
        if hold is None:
            hold = self._holds[channel] = Hold(channel)
        hold.count += 1
        self.on = not self._ended
        return partial(self._release, hold)

    def _release(self, hold: Hold) -> None:
        hold.count -= 1
        if not hold.count and self._holds.get(hold.channel) is hold:
            del self._holds[hold.channel]
            if any(not self.is_held(one) for one in self._lines):
                self._read_on()
                self._stream.again()
            self._look()

    def forget(self, channel: int) -> None:
        """Drop what holds a channel, which is closed: its number may be used for another."""
        if self._holds.pop(channel, None) is not None:
            self._look()

    def is_held(self, channel: int) -> bool:
        """Return True if publishes of the channel have to wait."""
        holds = self._holds
        return channel in holds or EVERY_CHANNEL in holds

    def is_held_alone(self, channel: int) -> bool:
        """Return True if the channel is held, and not the whole connection."""
        return channel in self._holds and EVERY_CHANNEL not in self._holds

    def has(self, channel: int) -> bool:
        """Return True if events of the channel wait."""
        return channel in self._lines

    def blocks(self, channel: int) -> bool:
        """Return True if what the channel publishes has to wait."""
        return channel in self._lines or self.is_held(channel)

    def add(self, channel: int, event: EventT, messages: int, size: int) -> None:
        """Have an event wait behind the others of its channel. `size` in bytes."""
        line = self._lines.get(channel)
        if line is None:
            line = self._lines[channel] = Line()
        line.events.append(event)
        line.messages += messages
        line.bytes += size

    def full(self) -> list[int]:
        """Return the channels that have as much waiting as may be, or more; all of them if the connection has
        too much, or its user has more than its share of the memory."""
        if self._restrained:
            return list(self._lines)
        full = [channel for channel, line in self._lines.items() if line.is_full]
        if not full and (
            sum(line.messages for line in self._lines.values()) > CHANNELS_MAX * MESSAGES_MAX
            or sum(line.bytes for line in self._lines.values()) > CHANNELS_MAX * BYTES_MAX
        ):
            return list(self._lines)
        return full

    def stop_reading(self) -> None:
        """Read nothing more until something has left."""
        if self._unread_since is None:
            self._unread_since = clock.now()
            self._stream.hold()

    def unread_seconds(self, now: float) -> float:
        """Return for how long the connection has not been read for what waits; 0.0 if it is read."""
        return 0.0 if self._unread_since is None else now - self._unread_since

    def _read_on(self) -> None:
        if self._unread_since is not None:
            self._unread_since = None
            self._stream.release()

    def take(self, channel: int) -> list[EventT]:
        """Remove and return the events of a channel."""
        line = self._lines.pop(channel, None)
        if line is None:
            return []
        if not self.full():
            self._read_on()
        self._look()
        return line.events

    def take_released(self) -> list[EventT]:
        """Remove and return the events of all channels that nothing holds any more."""
        free = [channel for channel in self._lines if not self.is_held(channel)]
        return [event for channel in free for event in self.take(channel)]

    def take_all(self) -> list[EventT]:
        """Remove and return all events, for the connection ends in an orderly way."""
        return [event for channel in list(self._lines) for event in self.take(channel)]

    def end(self) -> list[EventT]:
        """Remove and return all events: the connection is gone, and nothing waits from now on."""
        events = self.take_all()
        self._ended = True
        self.on = False
        return events

    def _look(self) -> None:
        self.on = bool(self._holds or self._lines) and not self._ended


def finish(
    waiting: WaitingPublishes[EventT], stream: Stream, process: Callable[[list[EventT]], None]
) -> None:
    """Process what waits of a connection that is lost: the client has sent it, and cannot send it again if it
    expects no acknowledgement. A full queue accepts or refuses it. What is pending by then is dropped.
    """
    events: list[EventT] | None = waiting.end()
    while events and not stream.is_suspended:
        stream.dear_until = 0.0
        process(events)
        events = stream.postponed()
