"""A stream: partial writes, congestion, holding, ending, and faults of the socket."""

from __future__ import annotations

import pytest

from gateway.model.message import Sender
from gateway.model.spooled_bodies import Piece, join_pieces
from gateway.telemetry.stats import ListenerStats
from gateway.transport.stream import (
    BACKLOG_BYTES_HIGH,
    LAYERED_BYTES,
    LAYERED_MAX,
    Bytes,
    Stream,
    WriteSet,
)
from tests.transport.ends import FakeSocket, Speaker, Watch


class Bench:
    """A stream between a fake socket and an owner."""

    def __init__(
        self, *takes: int | OSError, reads: tuple[bytes | OSError, ...] = (), backlog_max: int = 1 << 30
    ) -> None:
        self.sock = FakeSocket(*takes, reads=reads)
        self.watch = Watch()
        self.writes = WriteSet()
        self.owner = Speaker()
        self.stream = Stream(self.sock, "peer", self.watch, self.writes, backlog_max=backlog_max)
        self.stream.owner = self.owner
        self.counts = Bytes()
        self.stream.count_with(self.counts)

    def say(self, data: bytes) -> None:
        self.owner.out += data
        self.stream.mark_for_flush()
        self.writes.flush()


def test_what_the_peer_says_is_written_once_per_wake_up() -> None:
    bench = Bench()
    bench.owner.out = b"one"
    bench.stream.mark_for_flush()
    bench.stream.mark_for_flush()
    bench.owner.out += b" two"
    bench.writes.flush()
    bench.writes.flush()
    assert bench.sock.written == b"one two"
    assert bench.counts.bytes_out == 7
    assert bench.watch.seen == []


def test_what_the_socket_does_not_take_waits_for_it_in_order() -> None:
    bench = Bench(3, 0, 2)
    bench.say(b"abcdef")
    assert bench.watch.seen == [(True, True)]
    bench.say(b"ghi")
    assert bench.sock.written == b"abc"
    bench.stream.writable()
    assert bench.sock.written == b"abc"
    bench.stream.writable()
    assert bench.sock.written == b"abcde"
    bench.stream.writable()
    assert bench.sock.written == b"abcdefghi"
    assert bench.watch.seen[-1] == (True, False)
    assert bench.stream.queued == 0


def test_a_congested_stream_tells_its_peer_when_it_has_drained() -> None:
    bench = Bench(1)
    bench.stream.queued = BACKLOG_BYTES_HIGH - 1
    before = bench.stream.congested
    bench.stream.queued += 1
    assert (before, bench.stream.congested) == (False, True)
    bench.say(b"xyz")
    assert bench.stream.queued == 2
    assert bench.owner.drains == 0
    bench.stream.writable()
    assert bench.owner.drains == 1
    bench.stream.writable()
    assert bench.owner.drains == 1


def test_congestion_that_one_write_cures_is_told_too() -> None:
    bench = Bench()
    bench.stream.queued = BACKLOG_BYTES_HIGH
    assert bench.stream.congested
    bench.say(b"all of it")
    assert bench.stream.writing
    bench.stream.writable()
    assert (bench.owner.drains, bench.stream.writing) == (1, False)


def test_reading_stops_until_every_hold_is_released() -> None:
    bench = Bench()
    bench.stream.hold()
    bench.stream.hold()
    bench.stream.release()
    assert bench.watch.seen == [(False, False)]
    bench.stream.release()
    assert bench.watch.seen == [(False, False), (True, False)]


def test_what_is_postponed_while_suspended_comes_when_all_have_resumed() -> None:
    bench = Bench(reads=(b"later",))
    bench.stream.suspend()
    bench.stream.suspend()
    bench.stream.postpone(["command"])
    bench.stream.resume()
    assert (bench.stream.is_suspended, bench.stream.reading) == (True, False)
    bench.stream.resume()
    assert (bench.stream.is_suspended, bench.stream.reading) == (False, True)
    bench.stream.read(1.0)
    assert bench.owner.heard == b"", "the postponed command has a turn of its own"
    assert bench.stream.postponed() == ["command"]
    bench.stream.read(2.0)
    assert bench.owner.heard == b"later"


def test_back_pressure_does_not_end_with_a_suspension() -> None:
    bench = Bench()
    bench.stream.hold()
    bench.stream.suspend()
    bench.stream.resume()
    assert (bench.stream.is_suspended, bench.stream.reading) == (False, False)
    bench.stream.release()
    assert bench.stream.reading


def test_a_release_after_the_end_reads_nothing() -> None:
    bench = Bench(0)
    bench.stream.hold()
    bench.owner.out = b"bye"
    bench.stream.end("over")
    bench.stream.release()
    assert not bench.stream.reading


def test_bytes_reach_the_peer() -> None:
    bench = Bench(reads=(b"hello", b"world"))
    assert [bench.stream.read(1.0), bench.stream.read(1.0), bench.stream.read(1.0)] == [5, 5, 0]
    assert bench.owner.heard == b"helloworld"
    assert bench.counts.bytes_in == 10


@pytest.mark.parametrize(
    "read, reason", [(b"", "closed by the peer"), (ConnectionResetError(104, "reset"), "read failed: reset")]
)
def test_the_end_of_the_socket_is_told_once(read: bytes | OSError, reason: str) -> None:
    bench = Bench(reads=(read,))
    bench.stream.read(1.0)
    bench.stream.abort("again")
    bench.stream.end("again")
    assert bench.owner.reasons == [reason]
    assert bench.sock.is_closed
    assert bench.watch.forgotten == 1
    bench.say(b"nobody hears this")
    assert bench.sock.written == b""


def test_a_write_that_fails_ends_the_stream() -> None:
    bench = Bench(BrokenPipeError(32, "broken"))
    bench.say(b"x")
    assert bench.owner.reasons == ["write failed: broken"]
    assert bench.stream.closed


def test_an_end_writes_the_last_words_however_slowly_and_waits_for_the_peers_own_end() -> None:
    bench = Bench(2, 0, reads=(b"unread", b""))
    bench.owner.out = b"farewell"
    bench.stream.end("over")
    assert bench.owner.reasons == ["over"]
    bench.owner.out = b"too late"
    bench.writes.flush()
    bench.stream.writable()
    before = bench.sock.ended
    bench.stream.writable()
    assert bench.sock.written == b"farewell"
    assert (before, bench.sock.ended) == (False, True)
    assert bench.watch.leaving == [bench.stream]
    assert bench.watch.lingering == [bench.stream]
    assert bench.stream.reading
    assert bench.stream.read(2.0) == 6
    assert bench.owner.heard == b""
    assert bench.watch.forgotten == 0
    bench.stream.read(2.0)
    assert bench.watch.forgotten == 1
    assert bench.owner.reasons == ["over"]


def test_a_peer_that_closes_first_reads_no_end_behind_the_last_words() -> None:
    bench = Bench(2, 0, reads=(b"unread", b""))
    bench.owner.out = b"farewell"
    bench.stream.end("over", peer_closes=True)
    bench.writes.flush()
    bench.stream.writable()
    bench.stream.writable()
    assert (bench.sock.written, bench.sock.ended) == (b"farewell", False)
    assert bench.watch.lingering == [bench.stream]
    assert bench.stream.read(2.0) == 6
    bench.stream.read(2.0)
    assert bench.watch.forgotten == 1


def test_a_peer_that_lets_too_much_wait_is_cut_off() -> None:
    bench = Bench(1, backlog_max=10)
    bench.say(b"x" * 8)
    bench.say(b"x" * 3)
    assert not bench.stream.closed
    bench.say(b"x")
    assert bench.owner.reasons == ["the peer does not read what is sent"]


def test_a_write_that_marks_other_streams_writes_them_too() -> None:
    first, second = Bench(BrokenPipeError(32, "broken")), Bench()

    def tell(reason: str) -> None:
        second.owner.out = b"the first is gone"
        second.stream.mark_for_flush()

    first.owner.connection_lost = tell  # type: ignore[method-assign]
    second.stream._writes = first.writes
    first.say(b"x")
    assert second.sock.written == b"the first is gone"


def test_a_peer_that_leaves_half_of_what_may_wait_is_not_read_until_it_has_taken_most() -> None:
    bench = Bench(10, 20, 30, backlog_max=100)
    bench.say(bytes(70))
    assert (bench.stream.reading, bench.stream.backlogged) == (True, True)
    bench.say(b"x")
    assert not bench.stream.reading
    bench.stream.writable()  # 41 are left
    assert not bench.stream.reading
    bench.stream.writable()
    assert bench.stream.reading


def test_the_stream_names_its_endpoint_and_its_client() -> None:
    bench = Bench()
    assert (bench.stream.endpoint, bench.stream.client) == ("", "")
    stats = ListenerStats("plant", "mqtt")
    bench.stream.count_with(stats)
    bench.owner.sender = Sender("plant", "sensor")  # type: ignore[attr-defined]
    assert (bench.stream.endpoint, bench.stream.client) == ("plant", "sensor")


class Marking:
    """A layer whose words are those of its peer, with a mark before each part."""

    ended = None
    unread = False

    def receive(self, data: bytes) -> bytes:
        return data

    def send(self, data: bytes) -> bytes:
        return b"|" + data if data else b""

    def finish(self) -> bytes:
        return b"."


class InPieces(Speaker):
    """Says a list of pieces."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__()
        self.pieces = pieces

    def data_to_send(self) -> bytes | list[Piece]:
        pieces, self.pieces = self.pieces, []
        return pieces or super().data_to_send()


@pytest.mark.parametrize("takes", [(), (5, 0, 100_000, 7)])
def test_what_is_large_passes_a_layer_as_the_socket_takes_it(takes: tuple[int, ...]) -> None:
    """In order with what is said meanwhile; it is not all read at once, nor in one turn."""
    bench = Bench(*takes)
    parts: list[Piece] = [bytes([at % 256]) * LAYERED_BYTES for at in range(3 * LAYERED_MAX)]
    bench.owner = bench.stream.owner = InPieces(parts.copy())
    bench.stream.layer = Marking()
    bench.stream.mark_for_flush()
    bench.writes.flush()
    assert 0 < bench.stream.queued <= len(parts) * LAYERED_BYTES
    assert len(bench.sock.written) <= LAYERED_MAX * (LAYERED_BYTES + 1)
    bench.say(b"behind")
    turns = 0
    while bench.stream.writing:
        assert bench.stream.backlogged
        bench.stream.writable()
        turns += 1
    assert turns >= 2
    assert bench.sock.written.replace(b"|", b"") == join_pieces(parts).replace(b"|", b"") + b"behind"
    assert bench.stream.queued == 0
    bench.stream.end("over")
    bench.writes.flush()
    assert bench.sock.written.endswith(b"behind.")
