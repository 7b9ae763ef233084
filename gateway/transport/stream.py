"""Stream over one connected socket, read by a poller and written once per pass of the event loop.

A stream never awaits. When the pass ends, the output of its owner is collected and written with one `send`.
Bytes that the socket does not accept are buffered until the poller reports that it is writable. Large output
comes in pieces, which are not copied (backlog.py). A filter (TLS, WebSocket) may sit between the socket and
the owner; it works on bytes only.

One read may contain more work than should be done without serving other streams (thousands of tiny packets).
An owner then stops when its time slice is used up, stores the rest and calls `request_turn`: the rest is
continued before anything more is read. It is not continued while the socket has not accepted the output so
far (a megabyte of it; links continue regardless).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from gateway import clock
from gateway.containment import contained
from gateway.model.spooled_bodies import Piece, join_pieces
from gateway.transport.backlog import Backlog
from gateway.transport.filter import Ending, Filter
from gateway.transport.proxy_protocol import Secured
from gateway.transport.rate import ConnectionRate

READ_BYTES: Final = 65_536
LARGE_READ_BYTES: Final = 262_144  # for large messages; this much of small ones would not fit a core's cache
LARGE_BYTES_MIN: Final = 2_048
QUICK_ACK: Final[int] = getattr(socket, "TCP_QUICKACK", 0)  # exists on Linux
# Bytes. A stream with this much unsent is congested: its owner gets no new deliveries until it has drained.
BACKLOG_BYTES_HIGH: Final = 1_048_576
STRIKES_MAX: Final = 8
SLOW_WORK_SECS: Final = 0.01  # time limit per turn for uncommon, slow work: a new address takes 0.1 ms
LAYERED_BYTES: Final = 262_144  # bytes of large output that pass a layer at a time
LAYERED_MAX: Final = 8  # such portions per turn: TLS takes a millisecond for each
BACKLOG_BYTES_MAX: Final = 64 * 1024 * 1024


class StreamOwner(Protocol):
    """Interface of a protocol connection to its stream: receives read bytes, and provides bytes to write."""

    def receive(self, data: bytes, now: float) -> None:
        """Process the bytes `data`. `now` is in loop-clock seconds.

        `data` is b"" after a call of `Stream.request_turn`: then continue with data left from the last call.
        An exception ends only this connection.
        """

    def data_to_send(self) -> bytes | list[Piece]:
        """Return everything to be written now, as a list of pieces if it is large.

        The stream calls this method when a pass of the event loop ends.
        """

    def resume_writing(self) -> None:
        """Resume deliveries, because the stream is no longer congested."""

    def connection_lost(self, reason: str) -> None:
        """Release what belongs to the connection, which has ended for `reason`, a text. Called once."""


class StreamPoller(Protocol):
    """Interface of the poller that a stream uses."""

    def watch(self, stream: Stream) -> None:
        """Update the socket's registration after a change of `stream.reading`, `writing` or `unread`."""

    def forget(self, stream: Stream) -> None:
        """Stop watching the stream, which is about to close its socket."""

    def abort_unread(self, stream: Stream) -> None:
        """Abort the ended stream unless its peer reads the remaining output in time."""

    def abort_unclosed(self, stream: Stream) -> None:
        """Abort the stream, which has written all its output, unless its peer closes in time."""

    def pause(self, stream: Stream, seconds: float) -> None:
        """Stop reading from the stream for `seconds` seconds."""


class ByteCounts(Protocol):
    """Counters for the bytes read and written by all streams of one endpoint (listener or link).

    Counters for each stream would be slower, because those of many connections do not fit the CPU cache.
    """

    bytes_in: int
    bytes_out: int


class Bytes:
    """Counters for one stream's bytes until its endpoint is known."""

    __slots__ = ("bytes_in", "bytes_out")

    def __init__(self) -> None:
        self.bytes_in = 0
        self.bytes_out = 0


class StreamCounters:
    """Counters for one stream's bytes while an operator watches it; all bytes are also added to `counts`.

    `counts` are the counters of the endpoint. A stream that is not watched uses these directly, at no extra
    cost.
    """

    __slots__ = ("counts", "read", "watchers", "written")

    def __init__(self, counts: ByteCounts) -> None:
        self.counts = counts
        self.read = 0
        self.written = 0
        self.watchers = 0

    @property
    def name(self) -> str:
        """Name of the endpoint, or "" if it is not known."""
        return getattr(self.counts, "name", "")

    @property
    def bytes_in(self) -> int:
        """Bytes read from all streams of the endpoint."""
        return self.counts.bytes_in

    @bytes_in.setter
    def bytes_in(self, byte_count: int) -> None:
        self.read += byte_count - self.counts.bytes_in
        self.counts.bytes_in = byte_count

    @property
    def bytes_out(self) -> int:
        """Bytes written to all streams of the endpoint."""
        return self.counts.bytes_out

    @bytes_out.setter
    def bytes_out(self, byte_count: int) -> None:
        self.written += byte_count - self.counts.bytes_out
        self.counts.bytes_out = byte_count


class WriteSet:
    """Set of the streams whose output is written at the end of the present pass of the event loop.

    The process has one such set.
    """

    __slots__ = ("_marked", "_wake_up_ends", "took_long")

    def __init__(
        self,
        wake_up_ends: Sequence[Callable[[], None]] = (),
        took_long: Callable[[Stream, float], None] | None = None,
    ) -> None:
        """Create an empty set.

        The functions `wake_up_ends` are called at the beginning of each flush. `took_long` is called with a
        stream that took too long to process its data, and with the time that it took in seconds.
        """
        self._marked: list[Stream] = []
        self._wake_up_ends = wake_up_ends
        self.took_long = took_long

    def add(self, stream: Stream) -> None:
        """Add `stream` to the streams whose output the next flush writes."""
        if not stream.marked:
            stream.marked = True
            self._marked.append(stream)

    def flush(self) -> None:
        """Write the output of all streams in the set, and empty the set.

        Streams that are added during the call are also written.
        """
        for function in self._wake_up_ends:
            try:
                function()
            except Exception as error:
                contained("store", error)
        while self._marked:
            marked, self._marked = self._marked, []
            for stream in marked:
                stream.marked = False
                try:
                    stream.flush()
                except Exception as error:
                    stream.fail(error)


LayerEnded = Callable[["Stream", Ending], None]


class Stream:
    """Non-blocking socket with its backlog of output, its layer (TLS, WebSocket) and its owner."""

    __slots__ = (
        "_backlog",
        "_before_layer",
        "_counts",
        "_full",
        "_holds",
        "_layer_ended",
        "_lingering",
        "_output_holds",
        "_peer_closes",
        "_postponed",
        "_suspensions",
        "_watcher",
        "_writes",
        "awaits_resume",
        "backlog_max",
        "closed",
        "ending",
        "layer",
        "marked",
        "owner",
        "pending_error",
        "queued",
        "rate",
        "read_bytes",
        "reading",
        "remote",
        "secured",
        "slow_work_deadline",
        "sock",
        "stalls",
        "strikes",
        "unread",
        "writing",
    )

    def __init__(
        self,
        sock: socket.socket,
        remote: str,
        watcher: StreamPoller,
        writes: WriteSet,
        layer: Filter | None = None,
        *,
        layer_ended: LayerEnded | None = None,
        rate: ConnectionRate | None = None,
        backlog_max: int = BACKLOG_BYTES_MAX,
        stalls: bool = True,
    ) -> None:
        """Create a stream that is not polled yet: call `begin`, or the `watch` of its poller.

        `watcher` is the poller; `writes` collects the streams that have output to write. `layer_ended` is
        called with the stream and the reason when a layer has ended. `rate` limits reading; None means no
        limit. If the peer leaves more than `backlog_max` bytes of output (in memory) unread, it is
        disconnected; above half of that, the stream stops reading. If `stalls` is True, received data is not
        processed while the socket does not accept the present output. Where a link connects two gateways,
        `stalls` must be False on one side: otherwise both could wait for each other.
        """
        self.sock = sock
        self.layer = layer
        self.backlog_max = backlog_max
        self.stalls = stalls
        self.remote = remote
        self.secured: Secured | None = None  # the client's TLS data as a load balancer reports it
        self.owner: StreamOwner | None = None
        self.reading = True
        self.read_bytes = READ_BYTES  # bytes per read; set by `expect`
        self.unread = False  # data of the last read is not fully processed
        self.strikes = STRIKES_MAX  # for long turns; a new stream has them all. Set by the poller
        self.rate = rate
        self.writing = False
        self.marked = False
        self.awaits_resume = False  # deliveries are withheld because the stream was congested
        self.closed = False
        self.pending_error: Exception | None = None  # error with which it fails when this wake-up ends
        self.ending = False
        self._postponed: list[Any] | None = None
        self._suspensions = 0
        self.slow_work_deadline = (
            0.0  # `perf_counter` time limit for slow work in this turn; 0: none done yet
        )
        self.queued = 0  # bytes that the owner has encoded since the last flush, and the backlog
        self._counts: ByteCounts = Bytes()
        self._layer_ended = layer_ended
        self._watcher = watcher
        self._writes = writes
        self._backlog: Backlog | None = None
        self._before_layer: Backlog | None = None  # large output that has not passed the layer yet
        self._full = False  # more than half of `backlog_max` waits, so reading is held
        self._holds = 0
        self._output_holds = 0
        self._lingering = False
        self._peer_closes = False  # let the peer close the socket first, if it does so in time

    @property
    def congested(self) -> bool:
        """True if so much output is waiting that nothing more may be delivered to the peer.

        Reading True has a side effect, like `request_resume`: the owner's `resume_writing` is called when
        deliveries may continue.
        """
        if self.queued < BACKLOG_BYTES_HIGH:
            return False
        self.request_resume()
        return True

    def request_resume(self) -> None:
        """Record that deliveries are withheld, so that the owner's `resume_writing` is called later.

        The call is made once the socket accepts bytes.
        """
        if not self.awaits_resume:
            self.awaits_resume = True
            self.mark_for_flush()

    @property
    def backlogged(self) -> bool:
        """True if output is waiting because the socket has not accepted it."""
        return self._backlog is not None or self._before_layer is not None

    @property
    def listening(self) -> bool:
        """True if all bytes of the peer are read and processed promptly.

        If False, some bytes may be unread, so that a missing heartbeat does not prove that the peer is dead.
        """
        return self.reading and not self.unread

    @property
    def endpoint(self) -> str:
        """Name of the listener or link of this stream; "" until it is known."""
        return getattr(self._counts, "name", "")

    @property
    def client(self) -> str:
        """Client identifier from the protocol; "" if there is none."""
        return getattr(getattr(self.owner, "sender", None), "client", "")

    @property
    def is_output_blocked(self) -> bool:
        """True if so much output is waiting that received data is not processed either."""
        return self.stalls and self._backlog is not None and self._backlog.byte_count >= BACKLOG_BYTES_HIGH

    def count_with(self, counts: ByteCounts) -> None:
        """Count this stream's bytes in `counts` from now on, and add the bytes counted so far to it."""
        before, self._counts = self._counts, counts
        counts.bytes_in += before.bytes_in
        counts.bytes_out += before.bytes_out

    def watch(self) -> StreamCounters:
        """Count this stream's bytes separately until `unwatch`, and return the counters."""
        counts = self._counts
        if not isinstance(counts, StreamCounters):
            counts = self._counts = StreamCounters(counts)
        counts.watchers += 1
        return counts

    def unwatch(self, watched: StreamCounters) -> None:
        """Undo one `watch`; after the last one, this stream's bytes are no longer counted separately."""
        watched.watchers -= 1
        if not watched.watchers and self._counts is watched:
            self._counts = watched.counts

    def mark_for_flush(self) -> None:
        """Make the next flush of the write set collect and write the owner's output."""
        if not self.marked:
            self._writes.add(self)

    def request_turn(self) -> None:
        """Make the stream call the owner's `receive` with b"" before it reads again.

        The owner or the layer calls this method if it has not processed all received data.
        """
        if not self.unread and not self.closed and not self.ending:
            self.unread = True
            self._watcher.watch(self)

    def postpone(self, events: list[Any]) -> None:
        """Store decoded `events`. The owner gets them from `postponed` when its `receive` is called next."""
        self._postponed = events
        self.request_turn()

    def postponed(self) -> list[Any] | None:
        """Remove and return the events that `postpone` has stored, or None if there are none.

        The owner calls this method in `receive`. If there are events, `receive` was called with b"", because
        nothing is read before they are processed.
        """
        events, self._postponed = self._postponed, None
        return events

    def is_turn_spent(self) -> bool:
        """Return True if slow work has used up this stream's time slice of SLOW_WORK_SECS.

        The remaining work then has to wait. The owner calls this method before each piece of slow work, such
        as the first use of an address. The first call after a read returns False and starts the time slice.
        """
        now = clock.perf_counter()
        if not self.slow_work_deadline:
            self.slow_work_deadline = now + SLOW_WORK_SECS
            return False
        return now >= self.slow_work_deadline

    def expect(self, byte_count: int) -> None:
        """Set the read size according to the size in bytes of the message that is arriving; 0 if unknown."""
        self.read_bytes = LARGE_READ_BYTES if byte_count >= LARGE_BYTES_MIN else READ_BYTES

    def hold(self) -> None:
        """Stop reading until `release` has been called as often as `hold`; TCP then slows the peer down."""
        self._holds += 1
        if self._holds == 1 and not self.closed:
            self.reading = False
            self._watcher.watch(self)

    def release(self) -> None:
        """Undo one `hold`."""
        self._holds -= 1
        if self._holds == 0 and not self.closed and not self.ending:
            self.reading = True
            self._watcher.watch(self)

    def suspend(self) -> None:
        """Stop reading until `resume` has been called as often as `suspend`.

        Meanwhile the owner stores the events that it has decoded with `postpone`, because a command of the
        peer is pending and later commands must follow it.
        """
        self._suspensions += 1
        self.hold()

    def resume(self) -> None:
        """Undo one `suspend`; after the last one, the owner processes the postponed events."""
        self._suspensions -= 1
        self.release()

    @property
    def is_suspended(self) -> bool:
        """True while `suspend` has been called more often than `resume`."""
        return self._suspensions > 0

    def hold_output(self) -> None:
        """Write nothing until `release_output` has been called as often as `hold_output`.

        Used while the owner's next output depends on a pending result.
        """
        self._output_holds += 1

    def release_output(self) -> None:
        """Undo one `hold_output`."""
        self._output_holds -= 1
        if not self._output_holds:
            self.mark_for_flush()

    def read(self, now: float) -> int:
        """Process the data left from the last read or, if there is none, read once from the socket.

        Received bytes are passed to the owner. Return the number of bytes read from the socket now. `now` is
        in loop-clock seconds.
        """
        self.slow_work_deadline = 0.0
        if self.unread:
            self._process_unread(now)
            return 0
        try:
            data = self.sock.recv(self.read_bytes)
        except BlockingIOError:
            return 0
        except OSError as error:
            self.abort(f"read failed: {error.strerror or error}")
            return 0
        if not data:
            self.abort("closed by the peer")
            return 0
        size = len(data)
        self._counts.bytes_in += size
        if self._lingering:
            return size
        if self.layer is not None:
            self.feed(data, now, self.layer)
        elif self.owner is not None:
            self.owner.receive(data, now)
        if self.rate is not None and (wait := self.rate.charge(size, now)) and not self.closed:
            self._watcher.pause(self, wait)
        return size

    def read_remaining(self, now: float) -> None:
        """Read and process what the peer has already sent, such as a DISCONNECT, before the stream is ended.

        If the peer sends small packets, it holds back all but the first (Nagle's algorithm) until that one is
        acknowledged, which the kernel delays by some 40 ms. This method therefore reads, forces the
        acknowledgement and reads once more. `now` is in loop-clock seconds.
        """
        self._read_once(now)
        if QUICK_ACK and not self.closed:
            with suppress(OSError):  # the socket may be other than TCP
                self.sock.setsockopt(socket.IPPROTO_TCP, QUICK_ACK, 1)
            self._read_once(now)

    def _read_once(self, now: float) -> None:
        if self.reading and not self.closed and not self.ending:
            self.read(now)

    def _process_unread(self, now: float) -> None:
        """Process the data left from the last read: first what the owner has, then what the layer has."""
        self.unread = False
        if self.owner is not None:
            self.owner.receive(b"", now)
        if not self.unread and self.layer is not None and self.layer.unread:
            self.feed(b"", now, self.layer)
        if self.rate is not None and (wait := self.rate.charge(0, now)) and not self.closed:
            self._watcher.pause(self, wait)
        if not self.unread and not self.closed:
            self._watcher.watch(self)

    def feed(self, data: bytes, now: float, layer: Filter | None) -> None:
        """Pass received bytes to the owner, after `layer` (None: no layer) has decoded them.

        If the layer has ended, end the stream. `now` is in loop-clock seconds.
        """
        if layer is not None:
            data = layer.receive(data)
            self.mark_for_flush()  # the layer may have to respond
        if data and self.owner is not None:
            self.owner.receive(data, now)
        if layer is not None and layer.ended is not None and not (self.ending or self.closed):
            if self._layer_ended is not None:
                self._layer_ended(self, layer.ended)
            self.end(layer.ended.text)
        elif layer is not None and layer.unread:
            self.request_turn()

    def begin(self) -> None:
        """Register the socket with the poller, and write the owner's first output.

        The owner must have been set.
        """
        self._watcher.watch(self)
        self.mark_for_flush()

    def move(
        self, watcher: StreamPoller, *, layer_ended: LayerEnded, rate: ConnectionRate | None, backlog_max: int
    ) -> None:
        """Move this stream to the poller of another listener (`watcher`), with that listener's settings."""
        self._watcher.forget(self)
        self._watcher = watcher
        self._layer_ended = layer_ended
        self.rate = rate
        self.backlog_max = backlog_max
        watcher.watch(self)

    def flush(self) -> None:
        """Write the owner's output as far as the socket accepts it, and store the rest in the backlog."""
        if self.pending_error is not None and not self.closed:
            self.fail(self.pending_error)
        if self.closed or self._lingering or self._output_holds:
            return
        data = self.owner.data_to_send() if self.owner is not None else b""
        if self.layer is not None:
            data = self._filter_output(self.layer, data)
        if self._backlog is not None:
            if data:
                self._backlog.add([data] if isinstance(data, bytes) else data)
            backlog_bytes = self._unwritten_bytes()
            if backlog_bytes > self.backlog_max:
                self.abort("the peer does not read what is sent")
                return
            if not self._full and backlog_bytes > self.backlog_max // 2:
                self._full = True
                self.hold()
        elif data and not (self._write(data) if isinstance(data, bytes) else self._write_pieces(data)):
            return
        if self._before_layer is not None and self._backlog is None and not self._write_layered():
            return
        backlogged = self.backlogged
        self.queued = self._unwritten() if backlogged else 0
        if self.ending and not backlogged:
            self._shut()
        elif backlogged is not self.writing or (self.awaits_resume and not self.writing):
            self.writing = backlogged or self.awaits_resume
            self._watcher.watch(self)

    def _unwritten(self) -> int:
        """Return the number of bytes of output, in memory or on disk, that are not written yet."""
        return sum(one.byte_count for one in (self._backlog, self._before_layer) if one is not None)

    def _unwritten_bytes(self) -> int:
        """Return the number of bytes of output in memory that are not written yet."""
        return sum(one.memory_bytes for one in (self._backlog, self._before_layer) if one is not None)

    def _filter_output(self, layer: Filter, data: bytes | list[Piece]) -> bytes:
        """Pass `data` through the layer, and return the bytes for the socket.

        Large output is stored instead, and passes the layer in parts, each when the socket has accepted the
        part before. Reading and encrypting all of it at once would take much time and memory.
        """
        if self._before_layer is None and not isinstance(data, bytes):
            self._before_layer = Backlog()
        waiting = self._before_layer
        if waiting is None:
            assert isinstance(data, bytes)
            return layer.send(data)
        if data:
            waiting.add([data] if isinstance(data, bytes) else data)
        return layer.send(b"")

    def _write_layered(self) -> bool:
        """Pass stored large output through the layer and write it, as far as the socket accepts it.

        One call processes at most LAYERED_MAX parts of LAYERED_BYTES bytes. Return False if the stream was
        aborted.
        """
        waiting, layer = self._before_layer, self.layer
        assert waiting is not None
        assert layer is not None
        for _ in range(LAYERED_MAX):
            if not waiting.byte_count or self._backlog is not None:
                break
            try:
                data = join_pieces(waiting.take(LAYERED_BYTES))
            except OSError as error:  # the file is missing or too short
                self.abort(f"write failed: {error.strerror or error}")
                return False
            if not self._write(layer.send(data)):
                return False
        if not waiting.byte_count:
            self._before_layer = None
        return True

    def writable(self) -> None:
        """Write waiting output, because the poller reports that the socket accepts bytes again.

        If everything is written, finish a stream that is ending, or else call the owner's `resume_writing` if
        deliveries are withheld.
        """
        if self.backlogged:
            if self._backlog is not None and not self._write_on(self._backlog):
                return
            if self._before_layer is not None and self._backlog is None and not self._write_layered():
                return
            self.queued = self._unwritten()
            if self._full and self._unwritten_bytes() <= self.backlog_max // 4:
                self._full = False
                self.release()
        if self.backlogged:
            return
        if self.ending:
            self._shut()
            return
        self.writing = False
        self._watcher.watch(self)
        if self.awaits_resume and self.owner is not None:
            self.awaits_resume = False
            self.owner.resume_writing()

    def end(self, reason: str, *, peer_closes: bool = False) -> None:
        """Stop reading, write the remaining output, then close the socket.

        If `peer_closes` is True, wait some seconds for the peer to close first: a client that reads the end
        of the stream together with the last packet may treat the connection as lost.
        """
        if self.ending or self.closed:
            return
        self.ending = True
        self._peer_closes = peer_closes
        self.reading = self.unread = False
        self._watcher.watch(self)
        self._watcher.abort_unread(self)
        self.mark_for_flush()
        self._detach_owner(reason, keep=True)

    def abort(self, reason: str) -> None:
        """Close the socket at once, discarding unwritten output, and report `reason` to the owner."""
        if not self.closed:
            self._close()
            self._detach_owner(reason, keep=False)

    def fail(self, error: Exception) -> None:
        """Report an unexpected error and abort this connection. Other connections are not affected."""
        contained("connection", error, remote=self.remote)
        self.abort("internal error")

    def fail_later(self, error: Exception) -> None:
        """Schedule a call of `fail` with `error` for the end of this pass of the event loop.

        For callers that find the error while they serve other connections. Until then the stream counts as
        congested, so that nothing more is delivered to it.
        """
        if self.pending_error is None:
            self.pending_error = error
        self.queued = max(self.backlog_max, BACKLOG_BYTES_HIGH)
        self.mark_for_flush()

    def _detach_owner(self, reason: str, *, keep: bool) -> None:
        """Report the end of the connection to the owner, and detach the owner from the stream.

        If `keep` is True, the owner's remaining output is still written.
        """
        owner = self.owner
        if owner is None:
            return
        try:
            self.owner = EndedOwner(owner.data_to_send()) if keep else None
            owner.connection_lost(reason)
        except Exception as error:  # the caller may be serving another connection and has to continue
            self.owner = self.owner if isinstance(self.owner, EndedOwner) else None
            contained("connection", error, remote=self.remote)

    def _write(self, data: bytes) -> bool:
        """Write `data` and buffer what the socket does not accept.

        Return False if the stream has been aborted.
        """
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self.abort(f"write failed: {error.strerror or error}")
            return False
        self._counts.bytes_out += sent
        if sent < len(data):
            self._backlog = Backlog()
            self._backlog.add([memoryview(data)[sent:]])
        return True

    def _write_pieces(self, pieces: list[Piece]) -> bool:
        backlog = Backlog()
        backlog.add(pieces)
        return self._write_on(backlog)

    def _write_on(self, backlog: Backlog) -> bool:
        try:
            self._counts.bytes_out += backlog.write(self.sock)
        except OSError as error:
            self.abort(f"write failed: {error.strerror or error}")
            return False
        self._backlog = backlog if backlog.byte_count else None
        return True

    def _shut(self) -> None:
        """Shut down the sending side, then read and discard bytes until the peer closes.

        If the socket were closed with unread bytes of the peer, TCP would reset the connection, and the peer
        could lose the last output. If the peer is to close first (see `end`), the sending side stays open.
        """
        if not self._peer_closes:
            if self.layer is not None and not self._write(self.layer.finish()):
                return
            try:
                self.sock.shutdown(socket.SHUT_WR)
            except OSError:
                self._close()
                return
        self._lingering = True
        self._backlog = None
        self.writing = False
        self.reading = True
        self._watcher.abort_unclosed(self)

    def _close(self) -> None:
        self.closed = True
        self._backlog = self._before_layer = None  # backlogs may hold files open
        self._watcher.forget(self)
        self.sock.close()


class EndedOwner:
    """Owner of a stream whose connection has ended, until the connection's last output is written."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes | list[Piece]) -> None:
        self._data = data

    def receive(self, data: bytes, now: float) -> None:
        """Discard `data`, because the connection has ended."""

    def data_to_send(self) -> bytes | list[Piece]:
        """Return the last output once, then b""."""
        data, self._data = self._data, b""
        return data

    def resume_writing(self) -> None:
        """Do nothing: no deliveries are waiting."""

    def connection_lost(self, reason: str) -> None:
        """Do nothing: the original owner has already been notified."""
