"""Buffer of a live source: messages received from the broker that Spark has not committed.

One thread owns the connection: it reads while the buffer has capacity, acknowledges committed messages, and
reconnects when the connection fails. A message can be acknowledged only on the connection that delivered it.
So when a connection is replaced, messages that Spark has not planned are dropped, because they are
redelivered; planned ones stay. Each message has the number of its connection, its *life*. Capacity counts
messages until they are acknowledged, which bounds the memory of the process.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final, NamedTuple

from gateway.clients.wire import Client, ReceivedMessage
from gateway.errors import GatewayError, LinkError
from gateway.pipeline.live.columns import LiveMessage

TURN_SECS: Final = 0.05  # Longest delay of an acknowledgement while nothing arrives.
GATHER_SECS: Final = 0.1  # A batch is extended while messages keep arriving within this time.
RETRY_SECS_MIN: Final = 0.2
RETRY_SECS_MAX: Final = 5.0
SECOND: Final = 1_000_000


class BufferLimits(NamedTuple):
    """Limits of a receiver: number and bytes of buffered messages, and seconds without a connection."""

    messages_max: int
    bytes_max: int
    away_secs_max: float


class _HeldRow(NamedTuple):
    life: int
    arrival: ReceivedMessage
    row: LiveMessage


class Receiver:
    """Thread that receives and buffers messages from a broker; `connect` opens its connections.

    Messages are numbered from 0 in order of arrival.
    """

    def __init__(self, connect: Callable[[], Client], limits: BufferLimits) -> None:
        self._connect = connect
        self._limits = limits
        self._lock = threading.Lock()
        self._rows: deque[_HeldRow] = deque()
        self._first = 0  # Number of the first buffered message.
        self._planned = 0  # Spark has planned the messages before this number.
        self._byte_count = 0
        self._life = 0
        self._answers: deque[ReceivedMessage] = deque()  # Messages of this life to acknowledge.
        self._failure: Exception | None = None
        self._connected_at: float | None = None  # None without a connection.
        self._came = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="live source", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the connection; the broker redelivers unacknowledged messages to another consumer."""
        self._closing = True
        self._thread.join(RETRY_SECS_MAX)

    # Methods for Spark.

    def latest(self, above: int, most: int | None) -> int:
        """Return the number after that of the newest buffered message, at most `above` + `most`.

        `most` None means no limit. The messages before the returned number then count as planned, and stay
        buffered until they are committed. Raises the error that prevents a connection.
        """
        with self._lock:
            self._check()
            end = self._first + len(self._rows)
            if most is not None:
                end = min(end, above + most)
            self._planned = max(self._planned, end)
            return max(end, above)

    def wait(self, above: int, seconds: float) -> None:
        """Wait until messages with the number `above` or higher have arrived, and no more follow at once.

        Return also if no message has arrived for `seconds` seconds. While there is no connection, wait for
        one. Raises the error that prevents a connection once the broker was unreachable for too long.
        """
        last = time.monotonic()
        while True:
            self._came.clear()
            with self._lock:
                self._check()
                some = self._first + len(self._rows) > above
                connected_at = self._connected_at
            if some:
                patience = GATHER_SECS
            elif connected_at is None:
                patience = TURN_SECS
            else:
                patience = max(last, connected_at) + seconds - time.monotonic()
            if patience > 0 and self._came.wait(patience):
                last = time.monotonic()
            elif some or connected_at is not None:
                return

    def rows(self, start: int, end: int) -> list[LiveMessage]:
        """Return the uncommitted messages with numbers from `start` up to, not including, `end`."""
        with self._lock:
            first = self._first
            return [held.row for held in islice(self._rows, max(start - first, 0), max(end - first, 0))]

    def commit(self, end: int) -> None:
        """Acknowledge all messages before number `end`, and remove them from the buffer."""
        with self._lock:
            while self._rows and self._first < end:
                oldest = self._rows.popleft()
                self._first += 1
                self._byte_count -= oldest.row.message.body.__len__()
                if oldest.life == self._life:
                    self._answers.append(oldest.arrival)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # Methods of the thread.

    def _run(self) -> None:
        """Connect, receive messages and reconnect, until the receiver is closed; this is the thread's code.

        If the broker is unreachable for too long, the error is stored, and other methods then raise it.
        """
        good = time.monotonic()
        wait = RETRY_SECS_MIN
        while not self._closing:
            client: Client | None = None
            try:
                client = self._connect()
                good, wait = time.monotonic(), RETRY_SECS_MIN
                with self._lock:
                    self._connected_at = good
                self._receive(client)
                client.close()
                return
            except LinkError as error:
                self._begin_connection()
                if client is not None:
                    client.close_abruptly()
                    good = time.monotonic()
                if time.monotonic() - good >= self._limits.away_secs_max:
                    self._fail(error)
                    return
            except (GatewayError, OSError) as error:
                if client is not None:
                    client.close_abruptly()
                self._fail(error)
                return
            time.sleep(wait)
            wait = min(wait * 2, RETRY_SECS_MAX)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._failure = error
        self._came.set()

    def _begin_connection(self) -> None:
        """Prepare for a new connection: drop the buffered messages that Spark has not planned yet.

        The broker redelivers these messages. Messages from the old connection can no longer be acknowledged.
        """
        with self._lock:
            self._connected_at = None
            self._life += 1
            self._answers.clear()
            while self._first + len(self._rows) > self._planned:
                self._byte_count -= len(self._rows.pop().row.message.body)

    def _receive(self, client: Client) -> None:
        """Acknowledge committed messages and buffer new ones, until the receiver is closed.

        Reading pauses while the buffer is full.
        """
        while not self._closing:
            with self._lock:
                answers, self._answers = list(self._answers), deque()
                full = (
                    len(self._rows) >= self._limits.messages_max or self._byte_count >= self._limits.bytes_max
                )
            client.acknowledge(answers)
            if full:
                client.pause_reading(TURN_SECS)
                continue
            arrivals = client.arrivals(TURN_SECS)
            if arrivals:
                now = int(time.time() * SECOND)
                with self._lock:
                    for arrival in arrivals:
                        row = LiveMessage(arrival.message, now, arrival.redelivered)
                        self._rows.append(_HeldRow(self._life, arrival, row))
                        self._byte_count += len(arrival.message.body)
                self._came.set()
