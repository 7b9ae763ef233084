"""Counters of the message path: plain integers, read only when metrics are scraped.

A batch of messages or a connection adds once for all its messages. The protocol machines count frames
(`received` and `sent`: a list of integers indexed by a small number, or a dictionary by name), and the
streams count bytes. Once the version of a connection is known, its machine counts in the lists that the
endpoint shares among all connections of that version. So nothing has to be summed up, and a thousand
connections use the same few integers.
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
    """State machine of a connection that counts the frames which it has received and sent, by kind.

    The counts are a list (indexed by the number of the frame) or a dict (by its name).
    """

    received: Any
    sent: Any


class RouteCounts(Protocol):
    """Counters of a route, with the names of its source and target endpoints."""

    @property
    def name(self) -> str:
        """Name of the route."""

    @property
    def source(self) -> str:
        """Name of the endpoint whose messages the route delivers."""

    @property
    def target_endpoint(self) -> str:
        """Name of the endpoint to which the route delivers messages."""

    @property
    def matched(self) -> int:
        """Number of messages that crossed the route: it matched them and did not refuse them."""

    @property
    def delivered(self) -> int:
        """Number of messages that the target accepted."""

    @property
    def failed(self) -> int:
        """Number of messages that the route or its target refused."""

    @property
    def retried(self) -> int:
        """Number of repeated attempts to deliver messages to the target."""

    @property
    def dropped(self) -> int:
        """Number of messages that the route's outbox dropped."""

    @property
    def unparsable(self) -> int:
        """Number of messages whose body is not JSON although the route's condition `when` needs JSON."""

    @property
    def undecided(self) -> int:
        """Number of messages for which `when` has no value, for example because a field is missing."""

    @property
    def reply_kept(self) -> int:
        """Number of property sets whose reply address was left unchanged because it could not be translated.

        Several messages may share one property set.
        """

    @property
    def lost(self) -> Mapping[str, int]:
        """Number of properties that the target's protocol cannot express, by name of the property."""

    @property
    def in_flight(self) -> int:
        """Number of messages that the route has passed to the target and that are not settled yet."""

    @property
    def duplicates(self) -> int:
        """Number of messages that the route did not deliver, because each repeats an earlier one."""


class OutboxCounts(Protocol):
    """Counters of an outbox, the durable queue in which messages of a route wait for a link.

    A counter is None while its value is unknown.
    """

    @property
    def link(self) -> str:
        """Name of the link that sends the outbox's messages."""

    @property
    def route(self) -> str:
        """Name of the route whose messages are in the outbox."""

    @property
    def messages(self) -> int | None:
        """Number of messages in the outbox.

        If replicas share the outbox, these are the messages in its queue on the RabbitMQ cluster.
        """

    @property
    def messages_bytes(self) -> int | None:
        """Total size of the messages in the outbox, in bytes."""

    @property
    def oldest_secs(self) -> float | None:
        """Approximate age of the oldest message in the outbox, in seconds."""


class LastError(NamedTuple):
    """Latest error: its text, and its time in wall-clock seconds."""

    text: str
    utc: float


class Reasons:
    """Numbers of events by reason, and the latest reason with its time.

    At most REASONS_MAX reasons are distinguished; events with further reasons are counted as `other`.
    """

    __slots__ = ("counts", "last")

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.last: LastError | None = None

    def add(self, reason: str, count: int = 1) -> None:
        """Count `count` events with this reason, which must be one of a few constant words."""
        counts = self.counts
        if reason not in counts and len(counts) >= REASONS_MAX:
            reason = "other"
        counts[reason] = counts.get(reason, 0) + count
        self.last = LastError(reason, clock.wall())

    @property
    def total(self) -> int:
        """Number of events with any reason."""
        return sum(self.counts.values())


class Exemplar(NamedTuple):
    """Traced message that is an example for one bucket of a histogram: identifiers of its trace and span.

    `seconds` is the measured duration, `utc` the time of the measurement in wall-clock seconds.
    """

    trace_id: str
    span_id: str
    seconds: float
    utc: float


class Latency:
    """Histogram of durations in seconds. The upper bounds of its buckets are LATENCY_BUCKETS_SECS.

    `counts` has one more bucket, for larger values. `exemplars` has the latest traced message in each bucket,
    by the index of the bucket.
    """

    __slots__ = ("counts", "exemplars", "sum_secs")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BUCKETS_SECS) + 1)
        self.sum_secs = 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, seconds: float, count: int = 1) -> None:
        """Count `count` messages that each took `seconds` seconds."""
        self.counts[bisect_left(LATENCY_BUCKETS_SECS, seconds)] += count
        self.sum_secs += seconds * count

    def exemplify(self, exemplar: Exemplar) -> None:
        """Make a traced message the exemplar of the bucket for its duration."""
        self.exemplars[bisect_left(LATENCY_BUCKETS_SECS, exemplar.seconds)] = exemplar

    def quantile(self, share: float) -> float | None:
        """Return the upper bound, in seconds, of the bucket in which the quantile `share` (0 to 1) is.

        Return None if the histogram is empty. If the quantile is in the bucket for larger values, return the
        largest bound.
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
    """Total numbers of frames of all connections that use one protocol version."""

    __slots__ = ("received", "sent")

    def __init__(self, frames: FrameCounts) -> None:
        """Share the counters of the first connection: they become those of all connections."""
        self.received = frames.received
        self.sent = frames.sent

    def join(self, frames: FrameCounts) -> None:
        """Add the counts of another connection, which from now on increments the common counters itself."""
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

    `frame_names` has the names of frames by number, for state machines that count frames in lists; a number
    without a name is skipped. In calls of `add_connection`, `set_version` and `remove_connection`, the state
    machine stands for its connection. The streams of all connections increment `bytes_in` and `bytes_out`.
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
        """Latest error of the endpoint, or None if there was none. The error may have been resolved since."""
        return max(filter(None, self._last_errors()), key=lambda one: one.utc, default=None)

    def _last_errors(self) -> Iterable[LastError | None]:
        return (self.protocol_errors.last,)

    def add_connection(self, frames: FrameCounts) -> None:
        """Count a new connection, whose protocol version is not known yet."""
        self._open[id(frames)] = frames

    def set_version(self, frames: FrameCounts, version: str) -> None:
        """Set the protocol version of a connection, after its handshake.

        `version` must be one of a few constant words, because it becomes a label of metrics.
        """
        self._open[id(frames)] = None
        self._join(frames, version)

    def remove_connection(self, frames: FrameCounts) -> None:
        """Stop counting a connection as open. Further calls for this connection have no effect."""
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
        """Count `count` messages from this endpoint that were refused with `outcome`."""
        key = (outcome.verdict.name.lower(), outcome.reason.value)
        self._refused_messages[key] = self._refused_messages.get(key, 0) + count

    def count_refused_unpublished(self, outcome: Outcome, count: int) -> None:
        """Count `count` messages that this endpoint received and refused before publishing them."""
        self.messages_in += count
        self.refuse(outcome, count)

    def count_unreceived(self, seconds: float) -> None:
        """Count a message from this endpoint that was accepted although it had no recipient.

        `seconds` is the time from reading the message to its settlement.
        """
        self.unwanted_messages += 1
        self.latency.observe(seconds, 1)

    def count_settled(self, count: int, refused: Mapping[int, Outcome] | None, seconds: float) -> None:
        """Count a batch of `count` messages from this endpoint that have been settled.

        `refused` has the outcomes of those messages that were not accepted, or is None. `seconds` is the time
        since the first message was read.
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

    def settled_counts(self) -> Iterator[tuple[str, str, int]]:
        """Yield (outcome, reason, number) for the settled messages from this endpoint."""
        yield "accepted", "none", self.accepted_messages
        if self.unwanted_messages:
            yield "accepted", Reason.NO_TAKER.value, self.unwanted_messages
        for (verdict, reason), count in self._refused_messages.items():
            yield verdict, reason, count

    def frames(self) -> dict[FrameKey, int]:
        """Return the numbers of frames of all open and closed connections, by version, direction, frame."""
        sums: dict[FrameKey, int] = {}
        for version, known in self._frames.items():
            self._add_frames(sums, version, known)
        for frames in self._open.values():
            if frames is not None:
                self._add_frames(sums, UNKNOWN_VERSION, frames)
        return sums

    def frame_totals(self) -> tuple[int, int]:
        """Return the number of received frames, and the number of sent frames.

        Frames of an open connection are included only after its protocol version is known.
        """
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

    `refused` counts refused connections by reason, `logins` logins by outcome, and `denied` forbidden
    requests of clients by action. `answers_lost` counts messages to return addresses that could not be
    delivered, by reason.
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
    """Counters and state of one link.

    `in_flight` is the number of messages that are published but not confirmed. `failures` counts ended
    connections by reason. `addresses` are the addresses in all URLs of the link (host:port), and `address` is
    the one to which it is connected or connecting. `blocked` is True while the broker accepts no publishes.
    `is_elected` is True if this replica is elected to consume over the link, and None if there is no
    election.
    """

    def __init__(
        self, name: str, protocol: str, frame_names: Sequence[str] = (), addresses: tuple[str, ...] = ()
    ) -> None:
        super().__init__(name, protocol, frame_names)
        self.failed: LastError | None = None  # why the previous connection ended or failed
        self.missing_objects: dict[
            str, str
        ] = {}  # objects that routes need and the broker lacks, with the reason
        self.restored = Reasons()  # objects that the broker had lost and has again, by kind
        self.filters_refused = 0  # topic filters that routes need and the broker refuses now
        self.degraded = Reasons()  # messages reduced because the broker lacks a capability
        self.duplicates = 0  # QoS 2 messages that the broker resent, accepted only once
        self.up = False
        self.connects = 0
        self.in_flight = 0
        self.failures = Reasons()
        self.addresses = addresses
        self.address = ""
        self.blocked = False
        self.required = False
        self.is_elected: bool | None = None

    def _last_errors(self) -> Iterable[LastError | None]:
        return self.failed, self.protocol_errors.last

    @property
    def reconnects(self) -> int:
        """Number of connections after the first one."""
        return max(0, self.connects - 1)
