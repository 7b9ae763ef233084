"""Counters of the message path: plain integers, read only when metrics are scraped.

A batch, a turn or a connection adds once for all its messages. The protocol machines count frames (`received`
and `sent`: a list of integers indexed by a small number, or a dictionary by name), and the streams count
bytes. Once the version of a connection is known, its machine counts in the lists that the endpoint shares
among all connections of that version. So nothing has to be summed up, and a thousand connections use the same
few integers.
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
REASONS_MAX: Final = 32  # a reason is a metric label: further ones are counted as `other`
UNKNOWN_VERSION: Final = "unknown"


class FrameCounts(Protocol):
    """Protocol machine that counts frames by kind, in `list[int]` or `dict[str, int]`."""

    received: Any
    sent: Any


class RouteCounts(Protocol):
    """Counters of a route. `source` and `target_endpoint` are names of endpoints."""

    @property
    def name(self) -> str:
        """Name of the route."""

    @property
    def source(self) -> str:
        """Name of the endpoint that the route takes messages from."""

    @property
    def target_endpoint(self) -> str:
        """Name of the endpoint that the route sends messages to."""

    @property
    def matched(self) -> int:
        """Number of messages that crossed the route."""

    @property
    def delivered(self) -> int:
        """Number of messages that the target accepted."""

    @property
    def failed(self) -> int:
        """Number of messages that the route or its target refused."""

    @property
    def retried(self) -> int:
        """Number of attempts to deliver a message another time."""

    @property
    def dropped(self) -> int:
        """Number of messages that an outbox of the route dropped."""

    @property
    def unparsable(self) -> int:
        """Number of messages whose body was no JSON although the route's `when` needs it."""

    @property
    def undecided(self) -> int:
        """Number of messages for which the route's `when` had no value."""

    @property
    def reply_kept(self) -> int:
        """Number of property sets whose reply address could not be translated."""

    @property
    def lost(self) -> Mapping[str, int]:
        """Counts of properties that the target's protocol cannot express, by name."""

    @property
    def in_flight(self) -> int:
        """Number of messages of the route without an outcome yet."""

    @property
    def duplicates(self) -> int:
        """Number of repeats of earlier messages that the route did not pass on."""


class OutboxCounts(Protocol):
    """Counters of an outbox.

    `link` is the name of an endpoint, `route` that of a route; None means unknown.
    """

    @property
    def link(self) -> str:
        """Name of the link that the outbox waits for."""

    @property
    def route(self) -> str:
        """Name of the route that fills the outbox."""

    @property
    def messages(self) -> int | None:
        """Number of messages in the outbox; of a shared one, those on the cluster."""

    @property
    def messages_bytes(self) -> int | None:
        """Size of the outbox's messages in bytes."""

    @property
    def oldest_secs(self) -> float | None:
        """Approximate age of the oldest message in seconds."""


class LastError(NamedTuple):
    """Text of the latest error and its time (UTC seconds)."""

    text: str
    utc: float


class Reasons:
    """Counts of a limited number of reasons, and the latest one."""

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
        self.last = LastError(reason, clock.wall())

    @property
    def total(self) -> int:
        """Sum of the counts of all reasons."""
        return sum(self.counts.values())


class Exemplar(NamedTuple):
    """Measured message and the span with its details; `utc` is in seconds."""

    trace_id: str
    span_id: str
    seconds: float
    utc: float


class Latency:
    """Histogram of seconds over LATENCY_BUCKETS_SECS.

    `counts` has one more bucket for larger values. `exemplars` has the latest traced message of each bucket,
    by bucket number.
    """

    __slots__ = ("counts", "exemplars", "sum_secs")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BUCKETS_SECS) + 1)
        self.sum_secs = 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, seconds: float, count: int = 1) -> None:
        """Count `count` messages that took `seconds`. Called once per settled batch."""
        self.counts[bisect_left(LATENCY_BUCKETS_SECS, seconds)] += count
        self.sum_secs += seconds * count

    def exemplify(self, exemplar: Exemplar) -> None:
        """Set the exemplar of the bucket to which its seconds belong."""
        self.exemplars[bisect_left(LATENCY_BUCKETS_SECS, exemplar.seconds)] = exemplar

    def quantile(self, share: float) -> float | None:
        """Return the bound (seconds) of the bucket that holds the quantile `share` (0 to 1).

        Return None if nothing has been observed. Values beyond the last bucket are reported as the last
        bound.
        """
        target = share * sum(self.counts)
        if not target:
            return None
        passed = 0
        for count, bound in zip(self.counts, LATENCY_BUCKETS_SECS, strict=False):
            passed += count
            if passed >= target:
                return bound
        return LATENCY_BUCKETS_SECS[-1]


class _FrameCounts:
    """Frame counts of all connections of one version."""

    __slots__ = ("received", "sent")

    def __init__(self, frames: FrameCounts) -> None:
        """Use the counts of the first connection as the shared ones."""
        self.received = frames.received
        self.sent = frames.sent

    def join(self, frames: FrameCounts) -> None:
        """Add the counts of another connection, which counts in the shared ones from then on."""
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
"""Version, direction (`in` or `out`) and frame."""


class EndpointStats:
    """Counters that listeners and links have in common.

    `frame_names` names the indices of machines that count in lists; an unnamed index is skipped. `opened`,
    `spoke` and `closed` follow a connection; the key is the protocol machine itself. The streams of all
    connections add to `bytes_in` and `bytes_out` (bytes).
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
        self.bytes_in = 0
        self.bytes_out = 0
        self._frame_names = frame_names
        self._open: dict[int, FrameCounts | None] = {}  # None: its version is known
        self._frames: dict[str, _FrameCounts] = {}  # by version

    @property
    def last_error(self) -> LastError | None:
        """Latest error, even if it has been resolved since; None if there was none."""
        return max(filter(None, self._last_errors()), key=lambda one: one.utc, default=None)

    def _last_errors(self) -> Iterable[LastError | None]:
        return (self.protocol_errors.last,)

    def opened(self, frames: FrameCounts) -> None:
        """Add an open connection whose version is not known yet."""
        self._open[id(frames)] = frames

    def spoke(self, frames: FrameCounts, version: str) -> None:
        """Set the version (a word of a bounded set) of a connection after its handshake."""
        self._open[id(frames)] = None
        self._join(frames, version)

    def closed(self, frames: FrameCounts) -> None:
        """Remove a connection that has ended. A repeated call is ignored."""
        silent = self._open.pop(id(frames), None) is not None
        if silent and (frames.received or frames.sent):
            self._join(frames, UNKNOWN_VERSION)

    def _join(self, frames: FrameCounts, version: str) -> None:
        existing = self._frames.get(version)
        if existing is None:
            self._frames[version] = _FrameCounts(frames)
        else:
            existing.join(frames)

    def refuse(self, outcome: Outcome, count: int = 1) -> None:
        """Count `count` messages from this endpoint whose outcome is not ACCEPTED."""
        key = (outcome.verdict.name.lower(), outcome.reason.value)
        self._refused_messages[key] = self._refused_messages.get(key, 0) + count

    def drop(self, outcome: Outcome, count: int) -> None:
        """Count `count` messages that this endpoint received and did not publish."""
        self.messages_in += count
        self.refuse(outcome, count)

    def nobody_wanted(self, seconds: float) -> None:
        """Count a message from this endpoint that was accepted without a recipient.

        `seconds` is the time since the message was read.
        """
        self.unwanted_messages += 1
        self.latency.observe(seconds, 1)

    def answered(self, count: int, refused: Mapping[int, Outcome] | None, seconds: float) -> None:
        """Count a settled batch of `count` messages from this endpoint.

        `refused` has the outcomes of the refused ones, and `seconds` is the time since the first message was
        read.
        """
        self.latency.observe(seconds, count)
        if refused:
            count -= len(refused)
            for outcome in refused.values():
                self.refuse(outcome)
        self.accepted_messages += count

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._open)

    def settled(self) -> Iterator[tuple[str, str, int]]:
        """Yield outcome, reason and count of all settled messages from this endpoint.

        A settled message has been acknowledged or refused.
        """
        yield "accepted", "none", self.accepted_messages
        if self.unwanted_messages:
            yield "accepted", Reason.NO_TAKER.value, self.unwanted_messages
        for (verdict, reason), count in self._refused_messages.items():
            yield verdict, reason, count

    def frames(self) -> dict[FrameKey, int]:
        """Return the frames of all connections so far by version, direction and kind."""
        sums: dict[FrameKey, int] = {}
        for version, known in self._frames.items():
            self._add_frames(sums, version, known)
        for frames in self._open.values():
            if frames is not None:
                self._add_frames(sums, UNKNOWN_VERSION, frames)
        return sums

    def frame_totals(self) -> tuple[int, int]:
        """Return the frames received and sent by connections whose version is known."""
        received = sent = 0
        for frames in self._frames.values():
            received += self._sum(frames.received)
            sent += self._sum(frames.sent)
        return received, sent

    def _sum(self, counts: Sequence[int] | Mapping[str, int]) -> int:
        if isinstance(counts, Mapping):
            return sum(counts.values())
        return sum([count for name, count in zip(self._frame_names, counts, strict=False) if name])

    def _add_frames(self, sums: dict[FrameKey, int], version: str, frames: FrameCounts) -> None:
        for direction, counts in (("in", frames.received), ("out", frames.sent)):
            named_counts = (
                counts.items()
                if isinstance(counts, Mapping)
                else zip(self._frame_names, counts, strict=False)
            )
            for frame, count in named_counts:
                if count and frame:
                    key = (version, direction, frame)
                    sums[key] = sums.get(key, 0) + count


class ListenerStats(EndpointStats):
    """Counters of one listener.

    `refused` counts refused connections by reason, `logins` logins by outcome, `answers_lost` messages to
    return addresses without a recipient by reason, and `denied` forbidden requests of clients by action.
    """

    def __init__(self, name: str, protocol: str, frame_names: Sequence[str] = ()) -> None:
        super().__init__(name, protocol, frame_names)
        self.accepted = 0
        self.refused = Reasons()
        self.logins = Reasons()
        self.pause_count = 0  # times that reading from a connection stopped for lack of capacity
        self.answers_lost = Reasons()
        self.denied = Reasons()
        self.duplicates = 0  # QoS 2 messages that a client resent, accepted only once

    def _last_errors(self) -> Iterable[LastError | None]:
        return self.protocol_errors.last, self.refused.last


class LinkStats(EndpointStats):
    """Counters of one link.

    `in_flight` counts messages published and not yet confirmed, `failures` connections by the reason why they
    ended. `addresses` are `host:port` of all its URLs, `address` the one that is tried or in use. `blocked`
    is True while the broker accepts no publishes. `leads` is True if this replica was elected to consume over
    the link; None means that there are no elections.
    """

    def __init__(
        self, name: str, protocol: str, frame_names: Sequence[str] = (), addresses: tuple[str, ...] = ()
    ) -> None:
        super().__init__(name, protocol, frame_names)
        self.failed: LastError | None = None  # why the previous connection ended or failed
        self.lacking: dict[str, str] = {}  # objects that routes need and the broker lacks, with the reason
        self.restored = Reasons()  # objects that the broker had lost and has again, by kind
        self.filters_refused = 0  # topic filters that routes need and the broker refuses now
        self.lessened = Reasons()  # messages reduced because the broker lacks a capability
        self.duplicates = 0  # QoS 2 messages that the broker resent, accepted only once
        self.up = False
        self.connects = 0
        self.in_flight = 0
        self.failures = Reasons()
        self.addresses = addresses
        self.address = ""
        self.blocked = False
        self.required = False
        self.leads: bool | None = None

    def _last_errors(self) -> Iterable[LastError | None]:
        return self.failed, self.protocol_errors.last

    @property
    def reconnects(self) -> int:
        """Number of connections after the first one."""
        return max(0, self.connects - 1)
