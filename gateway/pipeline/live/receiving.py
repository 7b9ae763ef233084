"""What a live source has received and Spark has not committed yet.

One thread owns the connection: it reads as long as there is room, answers for what was committed, and
connects again when the connection fails. A broker can only be answered on the connection that brought the
message, so what a new connection brings is a new *life*, and of the old one nothing can be acknowledged any
more: what Spark has not planned by then is dropped, for it comes again; what it has planned stays.

Room is counted until the acknowledgement: that is what the process can be made to hold.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final, NamedTuple

from gateway.clients.wire import Arrival, Client
from gateway.errors import GatewayError, LinkError
from gateway.pipeline.live.columns import Received

TURN_SECS: Final = 0.05  # how soon an acknowledgement is said when nothing comes
GATHER_SECS: Final = 0.1  # a batch that has begun to come is waited for as long as it keeps coming
RETRY_SECS_MIN: Final = 0.2
RETRY_SECS_MAX: Final = 5.0
SECOND: Final = 1_000_000


class Limits(NamedTuple):
    """How much may be held, and for how long (seconds) the broker may be away."""

    messages_max: int
    octets_max: int
    away_secs_max: float


class _Held(NamedTuple):
    life: int
    arrival: Arrival
    row: Received


class Receiver:
    """Receives from what `connect` makes. Messages are numbered from 0 on, as they come."""

    def __init__(self, connect: Callable[[], Client], limits: Limits) -> None:
        self._connect = connect
        self._limits = limits
        self._lock = threading.Lock()
        self._held: deque[_Held] = deque()
        self._first = 0  # the number of the first that is held
        self._planned = 0  # Spark knows of those before it
        self._octets = 0
        self._life = 0
        self._answers: deque[Arrival] = deque()  # of this life
        self._failure: Exception | None = None
        self._connected_at: float | None = None  # None: there is no connection
        self._came = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="live source", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and leave what was not acknowledged to the broker."""
        self._closing = True
        self._thread.join(RETRY_SECS_MAX)

    # Spark's.

    def latest(self, above: int, most: int | None) -> int:
        """The number behind the newest message, at most `most` above `above`. What is before it is planned,
        and will be there until it is committed. Raises what keeps the connection from working."""
        with self._lock:
            self._check()
            end = self._first + len(self._held)
            if most is not None:
                end = min(end, above + most)
            self._planned = max(self._planned, end)
            return max(end, above)

    def wait(self, above: int, seconds: float) -> None:
        """Return when there is more than `above` and no more is coming just now, or when the connection has
        brought nothing for so long. Without a connection nothing is known, so one is waited for. Raises what
        keeps it from working, as soon as the broker has been away for too long."""
        last = time.monotonic()
        while True:
            self._came.clear()
            with self._lock:
                self._check()
                some = self._first + len(self._held) > above
                since = self._connected_at
            if some:
                patience = GATHER_SECS
            elif since is None:
                patience = TURN_SECS
            else:
                patience = max(last, since) + seconds - time.monotonic()
            if patience > 0 and self._came.wait(patience):
                last = time.monotonic()
            elif some or since is not None:
                return

    def rows(self, start: int, end: int) -> list[Received]:
        """The messages from `start` to before `end`; those that were committed are gone."""
        with self._lock:
            first = self._first
            return [held.row for held in islice(self._held, max(start - first, 0), max(end - first, 0))]

    def commit(self, end: int) -> None:
        """Everything before `end` is done with."""
        with self._lock:
            while self._held and self._first < end:
                held = self._held.popleft()
                self._first += 1
                self._octets -= held.row.message.body.__len__()
                if held.life == self._life:
                    self._answers.append(held.arrival)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # The thread's.

    def _run(self) -> None:
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
                self._begin_life()
                if client is not None:
                    client.cut()
                    good = time.monotonic()
                if time.monotonic() - good >= self._limits.away_secs_max:
                    self._fail(error)
                    return
            except (GatewayError, OSError) as error:
                if client is not None:
                    client.cut()
                self._fail(error)
                return
            time.sleep(wait)
            wait = min(wait * 2, RETRY_SECS_MAX)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._failure = error
        self._came.set()

    def _begin_life(self) -> None:
        with self._lock:
            self._connected_at = None
            self._life += 1
            self._answers.clear()
            while self._first + len(self._held) > self._planned:
                self._octets -= len(self._held.pop().row.message.body)

    def _receive(self, client: Client) -> None:
        while not self._closing:
            with self._lock:
                answers, self._answers = list(self._answers), deque()
                full = len(self._held) >= self._limits.messages_max or self._octets >= self._limits.octets_max
            client.acknowledge(answers)
            if full:
                client.rest(TURN_SECS)
                continue
            arrivals = client.arrivals(TURN_SECS)
            if arrivals:
                now = int(time.time() * SECOND)
                with self._lock:
                    for arrival in arrivals:
                        row = Received(arrival.message, now, arrival.redelivered)
                        self._held.append(_Held(self._life, arrival, row))
                        self._octets += len(arrival.message.body)
                self._came.set()
