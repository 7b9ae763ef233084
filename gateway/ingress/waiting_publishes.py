"""Publishes of one client that wait until a full queue has capacity, while its connection is still read.

A full queue holds the channels that publish to it. Reading goes on, so that pings, acknowledgements, closes
and commands of other channels are processed. Publishes of a held channel wait here, together with later
commands of the channel, unless the protocol lets those go ahead. When nothing holds the channel any more, its
events leave in order. If the client closes the channel, earlier publishes go ahead of the close, to a queue
that accepts or refuses them.

The waiting events are limited for each channel and for the connection; beyond the limit the connection is not
read. Their bytes count toward the user's part of the memory limit: a user above it is not read as soon as
anything waits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, Generic, TypeVar

from gateway import clock
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.transport.stream import Stream

EVERY_CHANNEL: Final = 0  # no channel has this number; the only one in protocols without channels
# Waiting publishes of a channel occupy at most 1.25 MiB, as each message has an overhead of some 256 bytes.
MESSAGES_MAX: Final = 4_096
MESSAGE_BYTES: Final = 256  # overhead of a waiting event or message
BYTES_MAX: Final = 262_144
CHANNELS_MAX: Final = 4  # full channels; a connection with more of them is not read
LOST_WAITING: Final = Outcome(
    Verdict.RELEASED,
    Reason.TARGET_DOWN,
    "the connection was lost while the message waited for an authorization response",
)
EventT = TypeVar("EventT")


class Hold:
    """Request to hold the publishes of a channel; `count` is the number of full queues that need this."""

    __slots__ = ("channel", "count")

    def __init__(self, channel: int) -> None:
        self.channel = channel
        self.count = 0


class ChannelBacklog(Generic[EventT]):
    """Waiting events of one channel, with the number of their messages and bytes."""

    __slots__ = ("bytes", "events", "messages")

    def __init__(self) -> None:
        self.events: list[EventT] = []
        self.messages = 0
        self.bytes = 0

    @property
    def is_full(self) -> bool:
        """True if no more events may be added."""
        return self.messages > MESSAGES_MAX or self.bytes > BYTES_MAX


class WaitingPublishes(Generic[EventT]):
    """Events of one connection that wait in the gateway, by channel.

    Publishes wait while a full queue holds their channel. Later events wait if they must not overtake them.
    """

    __slots__ = ("_ended", "_holds", "_lines", "_restrained", "_stream", "_unread_since", "on")

    def __init__(self, stream: Stream) -> None:
        self.on = False  # something is held or waits; if False, no method need be called
        self._stream = stream
        self._holds: dict[int, Hold] = {}
        self._lines: dict[int, ChannelBacklog[EventT]] = {}
        self._unread_since: float | None = None  # loop-clock seconds; None: the connection is read
        self._ended = False
        self._restrained = False

    @property
    def byte_count(self) -> int:
        """Bytes of memory that the waiting events occupy."""
        return sum([line.bytes + line.messages * MESSAGE_BYTES for line in self._lines.values()])

    def restrain(self, on: bool) -> None:
        """Allow no more events to wait (`on` True), or allow events to wait again.

        Schedules a call of the stream's owner, which applies the change.
        """
        if on != self._restrained and not self._ended:
            self._restrained = on
            if not on and not self.full_channels():
                self._read_on()
            self._stream.request_turn()

    def hold(self, channel: int) -> Callable[[], None]:
        """Hold the publishes of one channel or EVERY_CHANNEL. Return a function that ends this hold."""
        hold = self._holds.get(channel)
        if hold is None:
            hold = self._holds[channel] = Hold(channel)
        hold.count += 1
        self.on = not self._ended
        return partial(self._release, hold)

    def _release(self, hold: Hold) -> None:
        """End one hold of a channel.

        If waiting events can be processed now, the stream's owner is called, which has to take them.
        """
        hold.count -= 1
        if not hold.count and self._holds.get(hold.channel) is hold:
            del self._holds[hold.channel]
            if any(not self.is_held(one) for one in self._lines):
                self._read_on()
                self._stream.request_turn()
            self._update_state()

    def forget(self, channel: int) -> None:
        """End all holds of a closed channel, because its number may be reused."""
        if self._holds.pop(channel, None) is not None:
            self._update_state()

    def is_held(self, channel: int) -> bool:
        """Return True if publishes of the channel have to wait."""
        holds = self._holds
        return channel in holds or EVERY_CHANNEL in holds

    def is_held_alone(self, channel: int) -> bool:
        """Return True if this channel is held by itself, and not because the whole connection is held."""
        return channel in self._holds and EVERY_CHANNEL not in self._holds

    def has(self, channel: int) -> bool:
        """Return True if events of the channel wait."""
        return channel in self._lines

    def blocks(self, channel: int) -> bool:
        """Return True if a publish of the channel has to wait: it is held, or earlier events of it wait."""
        return channel in self._lines or self.is_held(channel)

    def add(self, channel: int, event: EventT, messages: int, size: int) -> None:
        """Append an event to the waiting ones of its channel.

        `messages` is the number of its messages, `size` the bytes that it occupies.
        """
        line = self._lines.get(channel)
        if line is None:
            line = self._lines[channel] = ChannelBacklog()
        line.events.append(event)
        line.messages += messages
        line.bytes += size

    def full_channels(self) -> list[int]:
        """Return the channels that have reached a limit, so that no more of their events may wait.

        These are all channels with waiting events if the connection exceeds its limit, or if `restrain`
        allows no more events to wait.
        """
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
        """Stop reading from the connection until some of the waiting events are removed."""
        if self._unread_since is None:
            self._unread_since = clock.now()
            self._stream.hold()

    def unread_seconds(self, now: float) -> float:
        """Return for how many seconds the connection has not been read; 0.0 if it is read."""
        return 0.0 if self._unread_since is None else now - self._unread_since

    def _read_on(self) -> None:
        if self._unread_since is not None:
            self._unread_since = None
            self._stream.release()

    def take(self, channel: int) -> list[EventT]:
        """Remove and return the waiting events of a channel."""
        line = self._lines.pop(channel, None)
        if line is None:
            return []
        if not self.full_channels():
            self._read_on()
        self._update_state()
        return line.events

    def take_released(self) -> list[EventT]:
        """Remove and return the waiting events of all channels that are not held any more."""
        free = [channel for channel in self._lines if not self.is_held(channel)]
        return [event for channel in free for event in self.take(channel)]

    def take_all(self) -> list[EventT]:
        """Remove and return all waiting events, because the client closes the connection properly."""
        return [event for channel in list(self._lines) for event in self.take(channel)]

    def end(self) -> list[EventT]:
        """Remove and return all waiting events, because the connection is lost; none can be added later."""
        events = self.take_all()
        self._ended = True
        self.on = False
        return events

    def _update_state(self) -> None:
        """Update `on`, which is True while a channel is held or events wait."""
        self.on = bool(self._holds or self._lines) and not self._ended


def finish(
    waiting: WaitingPublishes[EventT], stream: Stream, process: Callable[[list[EventT]], None]
) -> list[EventT]:
    """Process the events that wait on a lost connection, until one of them is pending.

    The client has sent these messages, and cannot repeat those that have no acknowledgement. A full queue
    accepts or refuses them. Return the events that are not processed because a decision of a database or an
    authorization server is pending; the caller counts their messages as refused (LOST_WAITING).
    """
    postponed: list[EventT] = stream.postponed() or []
    events: list[EventT] | None = waiting.end()
    while events and not stream.is_suspended:
        stream.slow_work_deadline = 0.0
        process(events)
        events = stream.postponed()
    return [*(events or ()), *postponed]
