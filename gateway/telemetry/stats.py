"""The counters that the message path adds to: plain integers, read only when metrics are scraped.

A batch, a turn or a connection adds once for all its messages. Frames are counted by the protocol machines
themselves (`received` and `sent`: a list of integers indexed by a small number, or a dictionary by name),
octets by the streams. Once the version of a connection is known, its machine counts into the lists that an
endpoint has for all connections of that version: nothing has to be summed up, and a thousand connections
touch the same few integers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from gateway import clock
from gateway.model.outcome import Outcome, Reason

LATENCY_BUCKETS_SECS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
REASONS_MAX: Final = 32  # a reason is a label: whatever else a peer may provoke is counted as `other`
UNKNOWN_VERSION: Final = "unknown"


class FrameCounts(Protocol):
    """A protocol machine, as it is counted: frames by kind, `list[int]` or `dict[str, int]`."""

    received: Any
    sent: Any


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
    def lost(self) -> Mapping[str, int]: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def duplicates(self) -> int: ...


class OutboxCounts(Protocol):
    """An outbox, as it is counted. `link` is an endpoint's name, `route` a route's; None is not known."""

    @property
    def link(self) -> str: ...
    @property
    def route(self) -> str: ...
    @property
    def messages(self) -> int | None: ...
    @property
    def octets(self) -> int | None: ...
    @property
    def oldest_secs(self) -> float | None: ...


class LastError(NamedTuple):
    """What went wrong last, in words, and when (UTC seconds)."""

    text: str
    utc: float


class Reasons:
    """How often each of a few reasons came up, and which one did last."""

    __slots__ = ("counts", "last")

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.last: LastError | None = None

    def add(self, reason: str, count: int = 1) -> None:
        """Count `reason`, a short constant word."""
        counts = self.counts
        if reason not in counts and len(counts) >= REASONS_MAX:
            reason = "other"
        counts[reason] = counts.get(reason, 0) + count
        self.last = LastError(reason, clock.utc())

    @property
    def total(self) -> int:
        return sum(self.counts.values())


class Exemplar(NamedTuple):
    """One that has been measured, and the span that says more of it; `utc` in seconds."""

    trace_id: str
    span_id: str
    seconds: float
    utc: float


class Latency:
    """A histogram of seconds over LATENCY_BUCKETS_SECS; `counts` has one more, for whatever is slower.
    `exemplars`: the newest of each bucket, by its place, of messages that are traced."""

    __slots__ = ("counts", "exemplars", "sum_secs")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BUCKETS_SECS) + 1)
        self.sum_secs = 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, seconds: float, count: int = 1) -> None:
        """`count` messages took `seconds`: called once per settled batch."""
        self.counts[bisect_left(LATENCY_BUCKETS_SECS, seconds)] += count
        self.sum_secs += seconds * count

    def exemplify(self, exemplar: Exemplar) -> None:
        """Show this one for its bucket."""
        self.exemplars[bisect_left(LATENCY_BUCKETS_SECS, exemplar.seconds)] = exemplar

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


class _Frames:
    """The counts of all connections of one version."""

    __slots__ = ("received", "sent")

    def __init__(self, frames: FrameCounts) -> None:
        """Those of the first become everybody's."""
        self.received = frames.received
        self.sent = frames.sent

    def join(self, frames: FrameCounts) -> None:
        """Add another connection's, which counts here from now on."""
        _add(self.received, frames.received)
        _add(self.sent, frames.sent)
        frames.received, frames.sent = self.received, self.sent


def _add(sums: list[int] | MutableMapping[str, int], counts: Sequence[int] | Mapping[str, int]) -> None:
    if isinstance(counts, Mapping):
        assert isinstance(sums, MutableMapping)
        for name, count in counts.items():
            sums[name] = sums.get(name, 0) + count
    else:
        assert isinstance(sums, list)
        for kind, count in enumerate(counts):
            sums[kind] += count


FrameKey = tuple[str, str, str]
"""Version, direction (`in` or `out`), frame."""


class EndpointStats:
    """What listeners and links have in common.

    `frame_names` names the indices of machines that count in lists; an unnamed index is passed over.
    `opened`, `spoke` and `closed` follow a connection; the key is the protocol machine itself. `octets_in`
    and `octets_out` are added to by the streams of all connections.
    """

    def __init__(self, name: str, protocol: str, frame_names: Sequence[str] = ()) -> None:
        self.name = name
        self.protocol = protocol
        self.messages_in = 0
        self.messages_out = 0
        self.accepted_messages = 0
        self.unwanted_messages = 0
        self.latency = Latency()
        self.protocol_errors = Reasons()
        self._refused_messages: dict[tuple[str, str], int] = {}
        self.octets_in = 0
        self.octets_out = 0
        self._frame_names = frame_names
        self._open: dict[int, FrameCounts | None] = {}  # None: its version is known
        self._frames: dict[str, _Frames] = {}  # by version

    @property
    def last_error(self) -> LastError | None:
        """What went wrong last, be it well since or not."""
        return max(filter(None, self._last_errors()), key=lambda one: one.utc, default=None)

    def _last_errors(self) -> Iterable[LastError | None]:
        return (self.protocol_errors.last,)

    def opened(self, frames: FrameCounts) -> None:
        """A connection stands; its version is not known yet."""
        self._open[id(frames)] = frames

    def spoke(self, frames: FrameCounts, version: str) -> None:
        """The connection's handshake said which version (a word of a bounded set) it speaks."""
        self._open[id(frames)] = None
        self._join(frames, version)

    def closed(self, frames: FrameCounts) -> None:
        """The connection has ended. A repeated call is ignored."""
        silent = self._open.pop(id(frames), None) is not None
        if silent and (frames.received or frames.sent):
            self._join(frames, UNKNOWN_VERSION)

    def _join(self, frames: FrameCounts, version: str) -> None:
        known = self._frames.get(version)
        if known is None:
            self._frames[version] = _Frames(frames)
        else:
            known.join(frames)

    def refuse(self, outcome: Outcome, count: int = 1) -> None:
        """`count` messages from this endpoint were answered with an outcome that is not ACCEPTED."""
        key = (outcome.verdict.name.lower(), outcome.reason.value)
        self._refused_messages[key] = self._refused_messages.get(key, 0) + count

    def nobody_wanted(self, seconds: float) -> None:
        """A message from this endpoint was taken, `seconds` after it was read, for nobody."""
        self.unwanted_messages += 1
        self.latency.observe(seconds, 1)

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

    def settled(self) -> Iterator[tuple[str, str, int]]:
        """Outcome, reason and count of all messages that came in here and have been answered."""
        yield "accepted", "none", self.accepted_messages
        if self.unwanted_messages:
            yield "accepted", Reason.NO_ROUTE.value, self.unwanted_messages
        for (verdict, reason), count in self._refused_messages.items():
            yield verdict, reason, count

    def frames(self) -> dict[FrameKey, int]:
        """Frames by version, direction and kind, of all connections ever."""
        sums: dict[FrameKey, int] = {}
        for version, known in self._frames.items():
            self._add_frames(sums, version, known)
        for frames in self._open.values():
            if frames is not None:
                self._add_frames(sums, UNKNOWN_VERSION, frames)
        return sums

    def _add_frames(self, sums: dict[FrameKey, int], version: str, frames: FrameCounts) -> None:
        for direction, counts in (("in", frames.received), ("out", frames.sent)):
            named = (
                counts.items()
                if isinstance(counts, Mapping)
                else zip(self._frame_names, counts, strict=False)
            )
            for frame, count in named:
                if count and frame:
                    key = (version, direction, frame)
                    sums[key] = sums.get(key, 0) + count


class ListenerStats(EndpointStats):
    """One listener's counters. `refused` are connections that were turned away, by reason; `logins` are by
    what came of them; `answers_lost` are messages to return addresses that nobody takes, by reason; `denied`
    is what clients may not do, by action.
    """

    def __init__(self, name: str, protocol: str, frame_names: Sequence[str] = ()) -> None:
        super().__init__(name, protocol, frame_names)
        self.accepted = 0
        self.refused = Reasons()
        self.logins = Reasons()
        self.held = 0  # times that a connection was not read, for what it published had no room
        self.answers_lost = Reasons()
        self.denied = Reasons()
        self.duplicates = 0  # QoS 2 messages that a client sent again, and that were taken only once

    def _last_errors(self) -> Iterable[LastError | None]:
        return self.protocol_errors.last, self.refused.last


class LinkStats(EndpointStats):
    """One link's counters. `in_flight`: published, not yet confirmed. `failures`: why connections ended.

    `addresses` are `host:port` of all its URLs, `address` that which is tried or in use. `blocked`: the
    broker takes no publishes for now. `leads`: this replica was elected to consume over it; None: there are
    no elections.
    """

    def __init__(
        self, name: str, protocol: str, frame_names: Sequence[str] = (), addresses: tuple[str, ...] = ()
    ) -> None:
        super().__init__(name, protocol, frame_names)
        self.failed: LastError | None = None  # why the connection before this one ended, or there was none
        self.lacking: dict[str, str] = {}  # what routes need and the broker does not have now, and why
        self.restored = Reasons()  # what the broker had lost, and has again, by kind
        self.filters_refused = 0  # topic filters that routes need and the broker does not grant now
        self.lessened = Reasons()  # messages that went without all that they had, for want at the broker
        self.duplicates = 0  # QoS 2 messages that the broker sent again, and that were taken only once
        self.up = False
        self.connects = 0
        self.in_flight = 0
        self.failures = Reasons()
        self.addresses = addresses
        self.address = ""
        self.blocked = False
        self.leads: bool | None = None

    def _last_errors(self) -> Iterable[LastError | None]:
        return self.failed, self.protocol_errors.last

    @property
    def reconnects(self) -> int:
        return max(0, self.connects - 1)
