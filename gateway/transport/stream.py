"""One connected socket: octets in from a poller, octets out once per wake-up.

A stream never awaits. What its owner wants to say is collected when the wake-up ends, written with one
`send`, and the rest, if the socket would not take it, is kept until the poller says that it is writable.
What is large comes in pieces instead, which are not copied (backlog.py).
A filter (TLS, WebSocket) may stand between the socket and the owner; it is pure bytes too.

One read may hold more work than one turn should take (thousands of tiny packets). So an owner stops when
it has done its share, keeps the rest, and says `again`: the rest has its turns before anything more is read,
and has none while the socket does not take what came of it so far (a megabyte of it; links go on).
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Any, Final, NamedTuple, Protocol

from gateway.containment import contained
from gateway.model.spooled import Piece, joined
from gateway.transport.backlog import Backlog
from gateway.transport.proxy_protocol import Secured
from gateway.transport.rate import Rate

READ_OCTETS: Final = 65_536
LARGE_READ_OCTETS: Final = 262_144  # of large messages: more of small ones would not fit a core's cache
LARGE_OCTETS_MIN: Final = 2_048
QUICK_ACK: Final[int] = getattr(socket, "TCP_QUICKACK", 0)  # Linux has it
# A stream with this much unsent is congested: its owner gets no new deliveries until it has drained.
BACKLOG_OCTETS_HIGH: Final = 1_048_576
STRIKES_MAX: Final = 8
DEAR_SECS: Final = 0.01  # of one turn, for what is not the common case: a new address takes 0.1 ms
LAYERED_OCTETS: Final = 262_144  # of what is large pass a layer at a time
LAYERED_MAX: Final = 8  # times in a turn: TLS takes a millisecond for each
BACKLOG_OCTETS_MAX: Final = 64 * 1024 * 1024


class StreamOwner(Protocol):
    """What a stream feeds: one protocol connection."""

    def receive(self, data: bytes, now: float) -> None:
        """Octets arrived; or none, after `Stream.again`. Whatever goes wrong in there ends this connection
        only.
        """

    def data_to_send(self) -> bytes | list[Piece]:
        """Everything to be written now; called when a wake-up ends. In pieces when they are large."""

    def drained(self) -> None:
        """A congested stream has written what it held: deliveries may go on."""

    def lost(self, reason: str) -> None:
        """The socket is gone; called once."""


class Ending(NamedTuple):
    """Why no more octets come through a layer. `broke` and `refused` are short words to count it by: a rule
    of the layer was broken, or the client was turned away; neither: the other side said goodbye.
    """

    text: str
    broke: str = ""
    refused: str = ""


class Filter(Protocol):
    """Turns the socket's octets into the peer's and back (TLS, WebSocket)."""

    @property
    def ended(self) -> Ending | None:
        """Set once nothing more will be received; what `send` still gives is to be written."""

    @property
    def unread(self) -> bool:
        """True: `receive` with b"" would give more, which is for another turn."""

    @property
    def certificate(self) -> bytes:
        """The peer's certificate (DER), which has been verified; b"": none has been shown."""

    def receive(self, data: bytes) -> bytes:
        """Octets for the peer, up to whatever sets `ended`."""

    def send(self, data: bytes) -> bytes:
        """Octets for the socket, including what the layer itself has to say (pass b"" to collect that)."""

    def finish(self) -> bytes:
        """The layer's farewell."""


class Watcher(Protocol):
    """The poller, as a stream sees it."""

    def watch(self, stream: Stream) -> None:
        """`stream.reading` or `stream.writing` changed."""

    def forget(self, stream: Stream) -> None:
        """The stream is about to close its socket."""

    def leave(self, stream: Stream) -> None:
        """The stream has ended: `abort` it when its peer does not read what is left for long."""

    def linger(self, stream: Stream) -> None:
        """The stream has written all and said so; `abort` it when its peer does not close in time."""

    def pause(self, stream: Stream, seconds: float) -> None:
        """`hold` the stream for so long."""


class OctetCounts(Protocol):
    """Who counts the octets of streams, one for all of an endpoint: to count them on each would cost every
    read and write the integers of its own connection, out of memory that a thousand others have used since.
    """

    octets_in: int
    octets_out: int


class Octets:
    """Counts the octets of a stream that is nobody's yet: read, and taken by the socket."""

    __slots__ = ("octets_in", "octets_out")

    def __init__(self) -> None:
        self.octets_in = 0
        self.octets_out = 0


class Watched:
    """Counts the octets of one stream by themselves, and as those of whoever counted them before: it stands
    in between while somebody asks, for nobody else is to pay for it.
    """

    __slots__ = ("counts", "read", "watchers", "written")

    def __init__(self, counts: OctetCounts) -> None:
        self.counts = counts
        self.read = 0
        self.written = 0
        self.watchers = 0

    @property
    def name(self) -> str:
        """The endpoint's."""
        return getattr(self.counts, "name", "")

    @property
    def octets_in(self) -> int:
        """Of all, as the next."""
        return self.counts.octets_in

    @octets_in.setter
    def octets_in(self, octets: int) -> None:
        self.read += octets - self.counts.octets_in
        self.counts.octets_in = octets

    @property
    def octets_out(self) -> int:
        """Written."""
        return self.counts.octets_out

    @octets_out.setter
    def octets_out(self, octets: int) -> None:
        self.written += octets - self.counts.octets_out
        self.counts.octets_out = octets


class WriteSet:
    """The streams that have something to write when this wake-up ends. One for the whole process."""

    __slots__ = ("_marked", "_wake_up_ends", "took_long")

    def __init__(
        self,
        wake_up_ends: Callable[[], None] | None = None,
        took_long: Callable[[Stream, float], None] | None = None,
    ) -> None:
        """`wake_up_ends` is called first at each flush; `took_long` is told whose turn took how many
        seconds."""
        self._marked: list[Stream] = []
        self._wake_up_ends = wake_up_ends
        self.took_long = took_long

    def mark(self, stream: Stream) -> None:
        """Write `stream` at the next flush."""
        if not stream.marked:
            stream.marked = True
            self._marked.append(stream)

    def flush(self) -> None:
        """One write for each marked stream. What writing marks anew (a closing stream) is written too."""
        if self._wake_up_ends is not None:
            try:
                self._wake_up_ends()
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
    """A non-blocking socket, what it could not write yet, and the owner that it feeds."""

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
        "backlog_max",
        "closed",
        "dear_until",
        "doomed",
        "ending",
        "layer",
        "marked",
        "owner",
        "queued",
        "rate",
        "read_octets",
        "reading",
        "remote",
        "secured",
        "sock",
        "stalls",
        "starved",
        "strikes",
        "unread",
        "writing",
    )

    def __init__(
        self,
        sock: socket.socket,
        remote: str,
        watcher: Watcher,
        writes: WriteSet,
        layer: Filter | None = None,
        *,
        layer_ended: LayerEnded | None = None,
        rate: Rate | None = None,
        backlog_max: int = BACKLOG_OCTETS_MAX,
        stalls: bool = True,
    ) -> None:
        """`layer_ended` is told when a layer ends the stream. `rate`: how much is read; None: all that comes.
        `backlog_max`: a peer that lets more than these octets wait in memory is cut off; beyond half of it
        nothing more of what it says is read. `stalls`: of a rest nothing is done while the socket does not
        take what came of it; of two gateways that are joined by a link one must go on.
        """
        self.sock = sock
        self.layer = layer
        self.backlog_max = backlog_max
        self.stalls = stalls
        self.remote = remote
        self.secured: Secured | None = None  # what a balancer says of the client's TLS
        self.owner: StreamOwner | None = None
        self.reading = True
        self.read_octets = READ_OCTETS  # at a time; `expect` says how many
        self.unread = False  # what was read last has not been dealt with to its end
        self.strikes = STRIKES_MAX  # for long turns; a new stream has them all. The poller's business
        self.rate = rate
        self.writing = False
        self.marked = False
        self.starved = False  # deliveries were withheld because the stream was congested
        self.closed = False
        self.doomed: Exception | None = None  # why it fails when this wake-up ends
        self.ending = False
        self._postponed: list[Any] | None = None
        self._suspensions = 0
        self.dear_until = 0.0  # of this turn; 0: it has done nothing dear
        self.queued = 0  # octets that the owner has encoded since the last flush, and the backlog
        self._counts: OctetCounts = Octets()
        self._layer_ended = layer_ended
        self._watcher = watcher
        self._writes = writes
        self._backlog: Backlog | None = None
        self._before_layer: Backlog | None = None  # what is large and waits for its turn to pass the layer
        self._full = False  # more than half of `backlog_max` waits, so this is held
        self._holds = 0
        self._output_holds = 0
        self._lingering = False
        self._peer_closes = False  # the peer is the first to close the socket, if it does so in time

    @property
    def congested(self) -> bool:
        """True: deliver nothing more until `drained`. Asking starves the stream, so that it will be told."""
        if self.queued < BACKLOG_OCTETS_HIGH:
            return False
        self.starve()
        return True

    def starve(self) -> None:
        """Deliveries are withheld: have `drained` called when the socket takes octets."""
        if not self.starved:
            self.starved = True
            self.mark()

    @property
    def backlogged(self) -> bool:
        """True: the socket has not taken all that was written last."""
        return self._backlog is not None or self._before_layer is not None

    @property
    def listening(self) -> bool:
        """False: what the peer has said may wait here or in its socket, so its silence means nothing."""
        return self.reading and not self.unread

    @property
    def endpoint(self) -> str:
        """The name of the listener or link whose octets these are; "" before that is known."""
        return getattr(self._counts, "name", "")

    @property
    def client(self) -> str:
        """The client's name for itself, as far as the protocol knows one."""
        return getattr(getattr(self.owner, "sender", None), "client", "")

    @property
    def clogged(self) -> bool:
        """True: so much is written and not taken that of a rest which is `unread` nothing more is done."""
        return self.stalls and self._backlog is not None and self._backlog.octets >= BACKLOG_OCTETS_HIGH

    def count_with(self, counts: OctetCounts) -> None:
        """Its octets, those of before included, count as `counts`'."""
        before, self._counts = self._counts, counts
        counts.octets_in += before.octets_in
        counts.octets_out += before.octets_out

    def watch(self) -> Watched:
        """Its octets by themselves, until `unwatch`."""
        counts = self._counts
        if not isinstance(counts, Watched):
            counts = self._counts = Watched(counts)
        counts.watchers += 1
        return counts

    def unwatch(self, watched: Watched) -> None:
        """One of those that asked has had enough."""
        watched.watchers -= 1
        if not watched.watchers and self._counts is watched:
            self._counts = watched.counts

    def mark(self) -> None:
        """Collect and write the peer's octets when this wake-up ends."""
        if not self.marked:
            self._writes.mark(self)

    def again(self) -> None:
        """The owner (or the layer) has not done all that was read: give it another turn with b""."""
        if not self.unread and not self.closed and not self.ending:
            self.unread = True
            self._watcher.watch(self)

    def postpone(self, events: list[Any]) -> None:
        """What the owner has decoded and leaves for another turn, in which it asks for it."""
        self._postponed = events
        self.again()

    def postponed(self) -> list[Any] | None:
        """That, once; None if there is none. Nothing is read before it is done, so no octets have come."""
        events, self._postponed = self._postponed, None
        return events

    def spent(self) -> bool:
        """Asked before anything that is dear, as what happens for the first time: True if this turn has done
        enough of that, but never of the first. Then what is left is to be postponed.
        """
        now = perf_counter()
        if not self.dear_until:
            self.dear_until = now + DEAR_SECS
            return False
        return now >= self.dear_until

    def expect(self, octets: int) -> None:
        """So many octets has the message that is coming, some of which has been read; 0: nobody knows."""
        self.read_octets = LARGE_READ_OCTETS if octets >= LARGE_OCTETS_MIN else READ_OCTETS

    def hold(self) -> None:
        """Stop reading until as many `release` calls have come: back-pressure is TCP's."""
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
        """Hold the stream, and have its owner postpone what it has decoded, until as many `resume` calls have
        come: a command of the peer is not done yet, and those behind it keep their order.
        """
        self._suspensions += 1
        self.hold()

    def resume(self) -> None:
        """Undo one `suspend`. The owner gets another turn for what it has postponed."""
        self._suspensions -= 1
        self.release()

    @property
    def is_suspended(self) -> bool:
        """True between `suspend` and `resume`."""
        return self._suspensions > 0

    def hold_output(self) -> None:
        """Write nothing until as many `release_output` calls have come: what the owner says next
        depends on something that is not done yet.
        """
        self._output_holds += 1

    def release_output(self) -> None:
        """Undo one `hold_output`."""
        self._output_holds -= 1
        if not self._output_holds:
            self.mark()

    def read(self, now: float) -> int:
        """Its turn: go on with what is left of the last read, otherwise read once, and feed the peer. Returns
        the octets read.
        """
        self.dear_until = 0.0
        if self.unread:
            self._go_on(now)
            return 0
        try:
            data = self.sock.recv(self.read_octets)
        except BlockingIOError:
            return 0
        except OSError as error:
            self.abort(f"read failed: {error.strerror or error}")
            return 0
        if not data:
            self.abort("closed by the peer")
            return 0
        size = len(data)
        self._counts.octets_in += size
        if self._lingering:
            return size
        if self.layer is not None:
            self.feed(data, now, self.layer)
        elif self.owner is not None:
            self.owner.receive(data, now)
        if self.rate is not None and (wait := self.rate.charge(size, now)) and not self.closed:
            self._watcher.pause(self, wait)
        return size

    def hear_out(self, now: float) -> None:
        """Two turns at once, for somebody else is about to end it, and its peer may have said goodbye. Most
        of a goodbye in small packets waits at the peer (Nagle) until the first of them is acknowledged,
        which takes the kernel some 40 ms unless it is told to: that is done between the two.
        """
        self._hear(now)
        if QUICK_ACK and not self.closed:
            with suppress(OSError):  # it need not be TCP
                self.sock.setsockopt(socket.IPPROTO_TCP, QUICK_ACK, 1)
            self._hear(now)

    def _hear(self, now: float) -> None:
        if self.reading and not self.closed and not self.ending:
            self.read(now)

    def _go_on(self, now: float) -> None:
        """The owner first, for what the layer keeps came later."""
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
        """Give the owner octets that have been read; `layer` is what they still have to pass."""
        if layer is not None:
            data = layer.receive(data)
            self.mark()  # the layer may have to answer
        if data and self.owner is not None:
            self.owner.receive(data, now)
        if layer is not None and layer.ended is not None and not (self.ending or self.closed):
            if self._layer_ended is not None:
                self._layer_ended(self, layer.ended)
            self.end(layer.ended.text)
        elif layer is not None and layer.unread:
            self.again()

    def beside(
        self, sock: socket.socket, remote: str, layer: Filter | None, *, layer_ended: LayerEnded
    ) -> Stream:
        """Another stream, which the same poller reads: what comes here goes on there in the same wake-up. It
        does not `begin` before it has its owner."""
        return Stream(sock, remote, self._watcher, self._writes, layer, layer_ended=layer_ended)

    def begin(self) -> None:
        """It has its owner: read it, and write what that has to say."""
        self._watcher.watch(self)
        self.mark()

    def move(self, watcher: Watcher, *, layer_ended: LayerEnded, rate: Rate | None, backlog_max: int) -> None:
        """Another poller reads it from now on, as another listener has it."""
        self._watcher.forget(self)
        self._watcher = watcher
        self._layer_ended = layer_ended
        self.rate = rate
        self.backlog_max = backlog_max
        watcher.watch(self)

    def flush(self) -> None:
        """Write what the owner has to say."""
        if self.doomed is not None and not self.closed:
            self.fail(self.doomed)
        if self.closed or self._lingering or self._output_holds:
            return
        data = self.owner.data_to_send() if self.owner is not None else b""
        if self.layer is not None:
            data = self._through(self.layer, data)
        if self._backlog is not None:
            if data:
                self._backlog.add([data] if isinstance(data, bytes) else data)
            held = self._held()
            if held > self.backlog_max:
                self.abort("it does not read what it is sent")
                return
            if not self._full and held > self.backlog_max // 2:
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
        elif backlogged is not self.writing or (self.starved and not self.writing):
            self.writing = backlogged or self.starved
            self._watcher.watch(self)

    def _unwritten(self) -> int:
        return sum(one.octets for one in (self._backlog, self._before_layer) if one is not None)

    def _held(self) -> int:
        """Octets of that in memory."""
        return sum(one.held for one in (self._backlog, self._before_layer) if one is not None)

    def _through(self, layer: Filter, data: bytes | list[Piece]) -> bytes:
        """What the layer makes of it. What is large waits: to read and encrypt all of it would take long, and
        memory. It follows as the socket takes what came before.
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
        """Pass on what waits, for one turn, as far as the socket takes it. False: that was the end of the
        stream.
        """
        waiting, layer = self._before_layer, self.layer
        assert waiting is not None
        assert layer is not None
        for _ in range(LAYERED_MAX):
            if not waiting.octets or self._backlog is not None:
                break
            try:
                octets = joined(waiting.take(LAYERED_OCTETS))
            except OSError as error:  # what should be on disk is not
                self.abort(f"write failed: {error.strerror or error}")
                return False
            if not self._write(layer.send(octets)):
                return False
        if not waiting.octets:
            self._before_layer = None
        return True

    def writable(self) -> None:
        """The poller says that the socket takes octets again."""
        if self.backlogged:
            if self._backlog is not None and not self._write_on(self._backlog):
                return
            if self._before_layer is not None and self._backlog is None and not self._write_layered():
                return
            self.queued = self._unwritten()
            if self._full and self._held() <= self.backlog_max // 4:
                self._full = False
                self.release()
        if self.backlogged:
            return
        if self.ending:
            self._shut()
            return
        self.writing = False
        self._watcher.watch(self)
        if self.starved and self.owner is not None:
            self.starved = False
            self.owner.drained()

    def end(self, reason: str, *, peer_closes: bool = False) -> None:
        """Read no more, write what is left, then close. With `peer_closes` the peer closes the socket first,
        or some seconds pass: to clients that read the end of the stream together with the last words the
        connection may be lost.
        """
        if self.ending or self.closed:
            return
        self.ending = True
        self._peer_closes = peer_closes
        self.reading = self.unread = False
        self._watcher.watch(self)
        self._watcher.leave(self)
        self.mark()
        self._lose(reason, keep=True)

    def abort(self, reason: str) -> None:
        """Close now."""
        if not self.closed:
            self._close()
            self._lose(reason, keep=False)

    def fail(self, error: Exception) -> None:
        """An error that nobody foresaw was met on its behalf: that costs this connection, and no other."""
        contained("connection", error, remote=self.remote)
        self.abort("internal error")

    def doom(self, error: Exception) -> None:
        """`fail` when this wake-up ends, for whoever met the error in the midst of the business of others.
        Until then it is congested: nothing more is delivered to it."""
        if self.doomed is None:
            self.doomed = error
        self.queued = max(self.backlog_max, BACKLOG_OCTETS_HIGH)
        self.mark()

    def _lose(self, reason: str, *, keep: bool) -> None:
        owner = self.owner
        if owner is None:
            return
        try:
            self.owner = Farewell(owner.data_to_send()) if keep else None
            owner.lost(reason)
        except Exception as error:  # whoever ends it may be somebody else, and has other things to do
            self.owner = self.owner if isinstance(self.owner, Farewell) else None
            contained("connection", error, remote=self.remote)

    def _write(self, data: bytes) -> bool:
        """False: that was the end of the stream."""
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self.abort(f"write failed: {error.strerror or error}")
            return False
        self._counts.octets_out += sent
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
            self._counts.octets_out += backlog.write(self.sock)
        except OSError as error:
            self.abort(f"write failed: {error.strerror or error}")
            return False
        self._backlog = backlog if backlog.octets else None
        return True

    def _shut(self) -> None:
        """All is written. Closing while octets of the peer wait unread would reset the connection, and could
        take our last words from it: so it is told that we are done, and what it still sends is thrown away.
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
        self._watcher.linger(self)

    def _close(self) -> None:
        self.closed = True
        self._backlog = self._before_layer = None  # they may keep files
        self._watcher.forget(self)
        self.sock.close()


class Farewell:
    """Stands in for an owner that has ended, while its last octets are written."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes | list[Piece]) -> None:
        self._data = data

    def receive(self, data: bytes, now: float) -> None:
        """Nobody listens any more."""

    def data_to_send(self) -> bytes | list[Piece]:
        """The last words, once."""
        data, self._data = self._data, b""
        return data

    def drained(self) -> None:
        """Nothing is waiting."""

    def lost(self, reason: str) -> None:
        """Its predecessor has been told."""
