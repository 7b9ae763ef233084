"""Senders and receivers: threads that come back after whatever happens to their connection.

A sender makes messages at a steady rate, so many for each of its addresses; it sends again what was not
acknowledged, in its order and before anything new. A receiver notes a message and then acknowledges it. What
they meet on the way is `ConnectionError`, or any other OSError: they connect again. Anything else, such as a
peer that breaks its protocol, ends them and is told by `check`.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from gateway.model.properties import Properties
from tests.chaos.checker import MARK, Carried, History, Id, carried_by, id_of, stranger

POLL_SECS: Final = 0.01
AGAIN_SECS: Final = 0.05
REFUSED_SECS: Final = 0.1  # who was refused waits before it tries again
BEAT_SECS: Final = 0.4
# Who hears nothing for so long, although it asks, has lost its connection.
SILENCE_SECS_MAX: Final = 3.0
WINDOW: Final = 50
PROBE: Final = "probe"
BYTES: Final = 65_536


class At(NamedTuple):
    """A port in the place of a gateway."""

    number: int

    def port(self, listener: str) -> int:
        """The port, whatever listens there."""
        return self.number


def carried_in(properties: Properties, life_secs: float | None) -> Carried:
    """Return what a received message carries, of the properties that the checker compares."""
    marks = [str(value.value) for name, value in properties.headers if name == MARK]
    mark = ",".join(marks) if marks else None
    return Carried(properties.message_id, properties.content_type, mark, life_secs)


def readable(sock: socket.socket) -> bytes:
    """What has arrived, waiting a moment for it; b"" for nothing. Raises ConnectionError at the end."""
    if not select.select([sock], [], [], POLL_SECS)[0]:
        return b""
    data = sock.recv(BYTES)
    if not data:
        raise ConnectionError("the peer has closed the connection")
    return data


class Worker(threading.Thread):
    """A thread that keeps one connection after the other."""

    def __init__(self, name: str, port: int) -> None:
        super().__init__(name=name, daemon=True)
        self.port = port
        self.connects = 0
        self.notes: list[str] = []  # what must not have happened
        self.error: BaseException | None = None
        self.why = ""  # the last connection ended
        self._stopped = threading.Event()
        self._heard = 0.0
        self._beat = 0.0

    def run(self) -> None:
        """Connect until told to stop."""
        try:
            while not self._stopped.is_set():
                try:
                    self.converse()
                except OSError as error:
                    self.why = f"{type(error).__name__}: {error}"
                self._stopped.wait(AGAIN_SECS)
        except BaseException as error:
            self.error = error

    def converse(self) -> None:
        """One connection, from its beginning to its end."""
        raise NotImplementedError

    def stop(self) -> None:
        """Leave, and wait until it has."""
        self._stopped.set()
        self.join()

    def check(self) -> None:
        """Raise what ended it, if anything did that should not."""
        if self.error is not None:
            raise self.error

    @property
    def going(self) -> bool:
        """It has not been told to stop."""
        return not self._stopped.is_set()

    def connected(self) -> None:
        """The handshake is over."""
        self.connects += 1
        self._heard = self._beat = time.monotonic()

    def alive(self, heard: bool) -> bool:
        """Whether a sign of life is due. Raises ConnectionError when the peer has given none."""
        now = time.monotonic()
        if heard:
            self._heard = now
        elif now - self._heard > SILENCE_SECS_MAX:
            raise ConnectionError("the peer is silent")
        if now - self._beat < BEAT_SECS:
            return False
        self._beat = now
        return True


class Sender(Worker):
    """Makes messages; `unacked` are those that it still has to get rid of, in order."""

    def __init__(
        self, name: str, port: int, history: History, *, addresses: Iterable[str], count: int, rate: float
    ) -> None:
        super().__init__(name, port)
        self.history = history
        self.unacked: dict[Id, None] = {}
        self.again: deque[Id] = deque()  # refused: to be sent again
        self.expiring = False  # some messages soon expire
        self._addresses = tuple(addresses)
        self._count = count
        self._rate = rate
        self._made = 0
        self._began = time.monotonic()
        self._closing = False
        self._again_at = 0.0

    def start(self) -> None:
        """The rate counts from here."""
        self._began = time.monotonic()
        super().start()

    def finish(self) -> None:
        """Make no more; what is unacknowledged is still seen through."""
        self._closing = True

    @property
    def done(self) -> bool:
        """All that should be made was, and was acknowledged."""
        return (self._closing or self._made >= self._count) and not self.unacked

    def due(self, room: int) -> list[Id]:
        """What to send now, at most `room` messages: those that were refused, then new ones."""
        found: list[Id] = []
        if self.again and time.monotonic() >= self._again_at:
            found = [self.again.popleft() for _ in range(min(room, len(self.again)))]
        if self._closing:
            return found
        until = min(self._count, int((time.monotonic() - self._began) * self._rate) + 1)
        for number in range(self._made, min(until, self._made + room - len(found))):
            line, at = divmod(number, len(self._addresses))
            id = Id(self.name, self._addresses[at], line)
            self.unacked[id] = None
            found.append(id)
            self._made += 1
        return found

    def noted(self, id: Id, *, bare: bool = False) -> Carried:
        """Note that a message is sent now, and return its properties; `bare`: it is sent without them."""
        carried = carried_by(id, expiring=self.expiring)
        self.history.sent(id, None if bare else carried)
        return carried

    def told(self, id: Id, accepted: bool) -> None:
        """The peer has answered for a message."""
        if accepted:
            self.history.acked(id)
            del self.unacked[id]
        else:
            self.history.refused(id)
            self.again.append(id)
            self._again_at = time.monotonic() + REFUSED_SECS


class Receiver(Worker):
    """Notes messages. `slow_secs` is how long it does not read from then on, once."""

    def __init__(self, name: str, port: int, history: History) -> None:
        super().__init__(name, port)
        self.history = history
        self.ready = threading.Event()  # it is subscribed
        self.probed = threading.Event()  # a probe came
        self.heard: set[Id] = set()
        self.last_at = 0.0
        self.slow_secs = 0.0

    def note(self, body: bytes, address: str, repeat: bool, carried: Carried | None) -> None:
        """A message came; `carried` is None if its protocol has no properties."""
        id = id_of(body) or stranger(body)
        if id.source == PROBE:
            self.probed.set()
            return
        self.history.received(id, address, repeat, carried)
        self.heard.add(id)
        self.last_at = time.monotonic()

    def dawdle(self) -> None:
        """Read nothing for as long as was said."""
        if self.slow_secs:
            slow_secs, self.slow_secs = self.slow_secs, 0.0
            self._stopped.wait(slow_secs)
