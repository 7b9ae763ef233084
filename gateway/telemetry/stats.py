"""The counters that the message path adds to: plain integers, read only when metrics are scraped.

A batch, a turn or a connection adds once for all its messages. Frames are counted by the protocol machines
themselves (`received` and `sent`: a list of integers indexed by a small number, or a dictionary by name); an
endpoint's stats refer to the machines of its open connections, and keep the sums of those that have closed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

from gateway.model.outcome import Outcome

LATENCY_BUCKETS_SECS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
REASONS_MAX: Final = 32  # a reason is a label: whatever else a peer may provoke is counted as `other`
UNKNOWN_VERSION: Final = "unknown"

Counts = Sequence[int] | Mapping[str, int]


class FrameCounts(Protocol):
    """A protocol machine, as it is counted."""

    @property
    def received(self) -> Counts:
        """Frames by kind."""

    @property
    def sent(self) -> Counts:
        """Frames by kind."""


class OctetCounts(Protocol):
    """A stream, as it is counted."""

    @property
    def octets_in(self) -> int:
        """Octets read from the socket."""

    @property
    def octets_out(self) -> int:
        """Octets that the socket took."""


class RouteCounts(Protocol):
    """A route, as it is counted. `source` and `target_endpoint` are names of endpoints."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def target_endpoint(self) -> str: ...
    @property
    def matched(self) -> int: ...
    @property
    def delivered(self) -> int: ...
    @property
    def failed(self) -> int: ...
    @property
    def retried(self) -> int: ...
    @property
    def dropped(self) -> int: ...
    @property
    def unparsable(self) -> int: ...
    @property
    def undecided(self) -> int: ...
    @property
    def reply_kept(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def duplicates(self) -> int: ...


class OutboxCounts(Protocol):
    """An outbox, as it is counted. `link` is an endpoint's name, `route` a route's."""

    @property
    def link(self) -> str: ...
    @property
    def route(self) -> str: ...
    @property
    def messages(self) -> int: ...
    @property
    def octets(self) -> int: ...
    @property
    def oldest_secs(self) -> float: ...


class Reasons:
    """How often each of a few reasons came up."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, reason: str, count: int = 1) -> None:
        """Count `reason`, a short constant word."""
        counts = self.counts
        if reason not in counts and len(counts) >= REASONS_MAX:
            reason = "other"
        counts[reason] = counts.get(reason, 0) + count

    @property
    def total(self) -> int:
        return sum(self.counts.values())


class Latency:
    """A histogram of seconds over LATENCY_BUCKETS_SECS; `counts` has one more, for whatever is slower."""

    __slots__ = ("counts", "sum_secs")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BUCKETS_SECS) + 1)
        self.sum_secs = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """`count` messages took `seconds`: called once per settled batch."""
        self.counts[bisect_left(LATENCY_BUCKETS_SECS, seconds)] += count
        self.sum_secs += seconds * count

    def quantile(self, share: float) -> float | None:
        """The bound (seconds) of the bucket that holds the `share` (0 to 1) of all; None: nothing observed.

        What is slower than the last bucket is reported as the last bound.
        """
        wanted = share * sum(self.counts)
        if not wanted:
            return None
        passed = 0
        for count, bound in zip(self.counts, LATENCY_BUCKETS_SECS, strict=False):
            passed += count
            if passed >= wanted:
                return bound
        return LATENCY_BUCKETS_SECS[-1]


class _Open:
    """One open connection, as it is counted."""

    __slots__ = ("frames", "octets", "version")

    def __init__(self, frames: FrameCounts, octets: OctetCounts, version: str) -> None:
        self.frames = frames
        self.octets = octets
        self.version = version


FrameKey = tuple[str, str, str]
"""Version, direction (`in` or `out`), frame."""


class EndpointStats:
    """What listeners and links have in common.

    `frame_names` names the indices of machines that count in lists; an unnamed index is passed over.
    `opened`, `spoke` and `closed` follow a connection; the key is the protocol machine itself.
    """

    def __init__(self, name: str, protocol: str, frame_names: Sequence[str] = ()) -> None:
        self.name = name
        self.protocol = protocol
        self.messages_in = 0
        self.messages_out = 0
        self.accepted_messages = 0
        self.latency = Latency()
        self.protocol_errors = Reasons()
        self._refused_messages: dict[tuple[str, str], int] = {}
        self._frame_names = frame_names
        self._open: dict[int, _Open] = {}
        self._frames: dict[FrameKey, int] = {}
        self._octets_in = 0
        self._octets_out = 0

    def opened(self, frames: FrameCounts, octets: OctetCounts) -> None:
        """A connection stands; its version is not known yet."""
        self._open[id(frames)] = _Open(frames, octets, UNKNOWN_VERSION)

    def spoke(self, frames: FrameCounts, version: str) -> None:
        """The connection's handshake said which version (a word of a bounded set) it speaks."""
        self._open[id(frames)].version = version

    def closed(self, frames: FrameCounts) -> None:
        """The connection has ended: keep its sums. A repeated call is ignored."""
        ended = self._open.pop(id(frames), None)
        if ended is not None:
            self._octets_in += ended.octets.octets_in
            self._octets_out += ended.octets.octets_out
            self._add_frames(self._frames, ended)

    def refuse(self, outcome: Outcome, count: int = 1) -> None:
        """`count` messages from this endpoint were answered with an outcome that is not ACCEPTED."""
        key = (outcome.verdict.name.lower(), outcome.reason.value)
        self._refused_messages[key] = self._refused_messages.get(key, 0) + count

    def answered(self, count: int, refused: Mapping[int, Outcome] | None, seconds: float) -> None:
        """A batch of `count` messages from this endpoint was settled, `seconds` after its first was read."""
        self.latency.observe(seconds, count)
        if refused:
            count -= len(refused)
            for outcome in refused.values():
                self.refuse(outcome)
        self.accepted_messages += count

    @property
    def connections(self) -> int:
        """Open now."""
        return len(self._open)

    @property
    def refused_messages(self) -> int:
        return sum(self._refused_messages.values())

    def settled(self) -> Iterator[tuple[str, str, int]]:
        """Outcome, reason and count of all messages that came in here and have been answered."""
        yield "accepted", "none", self.accepted_messages
        for (verdict, reason), count in self._refused_messages.items():
            yield verdict, reason, count

    def octets(self) -> tuple[int, int]:
        """Octets in and out, of all connections ever."""
        now = self._open.values()
        octets_in = self._octets_in + sum(one.octets.octets_in for one in now)
        return octets_in, self._octets_out + sum(one.octets.octets_out for one in now)

    def frames(self) -> dict[FrameKey, int]:
        """Frames by version, direction and kind, of all connections ever."""
        sums = dict(self._frames)
        for one in self._open.values():
            self._add_frames(sums, one)
        return sums

    def _add_frames(self, sums: dict[FrameKey, int], one: _Open) -> None:
        for direction, counts in (("in", one.frames.received), ("out", one.frames.sent)):
            named = (
                counts.items()
                if isinstance(counts, Mapping)
                else zip(self._frame_names, counts, strict=False)
            )
            for frame, count in named:
                if count and frame:
                    key = (one.version, direction, frame)
                    sums[key] = sums.get(key, 0) + count


class ListenerStats(EndpointStats):
    """One listener's counters. `refused` are connections that were turned away, by reason."""

    def __init__(self, name: str, protocol: str, frame_names: Sequence[str] = ()) -> None:
        super().__init__(name, protocol, frame_names)
        self.accepted = 0
        self.refused = Reasons()
        self.duplicates = 0  # QoS 2 messages that a client sent again, and that were taken only once


class LinkStats(EndpointStats):
    """One link's counters. `in_flight`: published, not yet confirmed. `failures`: why connections ended.

    `addresses` are `host:port` of all its URLs, `address` that which is tried or in use. `blocked`: the
    broker takes no publishes for now.
    """

    def __init__(self, name: str, protocol: str, frame_names: Sequence[str] = ()) -> None:
        super().__init__(name, protocol, frame_names)
        self.filters_refused = 0  # topic filters that routes need and the broker does not grant now
        self.lessened = Reasons()  # messages that went without all that they had, for want at the broker
        self.duplicates = 0  # QoS 2 messages that the broker sent again, and that were taken only once
        self.up = False
        self.connects = 0
        self.in_flight = 0
        self.failures = Reasons()
        self.addresses: tuple[str, ...] = ()
        self.address = ""
        self.blocked = False

    @property
    def reconnects(self) -> int:
        return max(0, self.connects - 1)
