"""A wire that can be cut: a small TCP proxy on a free loopback port, with a thread for each direction.

What it does to one connection or to all: `cut` closes both ends at once. `stall` stops forwarding, one way or
both, without closing: bytes pile up in the socket buffers until the writer cannot write, as behind a router
that died, and an end that closes is not told on (half-open). `delay` forwards each piece later. A cut drops
what was under way, so each end has seen a prefix of what the other has written, as with TCP itself.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from typing import Final, Literal, Self

from tests.interop.gateway_fixture import LOOPBACK

Way = Literal["up", "down", "both"]
"""`up` is from who connected to who listens."""

PIECE_BYTES: Final = 65_536
CONNECT_SECS_MAX: Final = 5.0


class Wire:
    """One connection through the proxy."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.delay_secs = 0.0
        self._ends = (near, far)
        self._flows = {"up": threading.Event(), "down": threading.Event()}
        self._over = threading.Event()
        for flow in self._flows.values():
            flow.set()
        for way, source, target in (("up", near, far), ("down", far, near)):
            threading.Thread(target=self._forward, args=(way, source, target), daemon=True).start()

    @property
    def over(self) -> bool:
        """Both ends are closed."""
        return self._over.is_set()

    def stall(self, way: Way) -> None:
        """Forward nothing more, and tell nobody."""
        for name in _ways(way):
            self._flows[name].clear()

    def resume(self) -> None:
        """Forward again, what has piled up first."""
        for flow in self._flows.values():
            flow.set()

    def cut(self) -> None:
        """Close both ends; what was under way is gone."""
        self._over.set()
        self.resume()
        for end in self._ends:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # that end is closed already

    def _forward(self, way: str, source: socket.socket, target: socket.socket) -> None:
        flow = self._flows[way]
        try:
            while data := source.recv(PIECE_BYTES):
                if self.delay_secs:
                    time.sleep(self.delay_secs)
                flow.wait()
                if self._over.is_set():
                    break
                target.sendall(data)
            flow.wait()
        except OSError:
            pass  # an end is gone, so the other has to go as well
        self.cut()
        source.close()


def _ways(way: Way) -> Iterable[str]:
    return ("up", "down") if way == "both" else (way,)


class Proxy:
    """Listens on `port` and connects whoever comes to `target`, a port on the loopback interface."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.delay_secs = 0.0  # of connections that are to come
        self._shut = False  # nobody is let through
        self._stalled: Way | None = None  # way in which new connections are stalled, too
        self._wires: list[Wire] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cut every connection and let nobody through any more; a second time does nothing."""
        if self._thread.is_alive():
            self._listener.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self._listener.close()
        self.cut()

    def wires(self) -> list[Wire]:
        """The connections that are open, the oldest first."""
        with self._lock:
            self._wires = [wire for wire in self._wires if not wire.over]
            return list(self._wires)

    def cut(self) -> None:
        """Cut every connection; new ones are let through."""
        for wire in self.wires():
            wire.cut()

    def shut(self) -> None:
        """Cut every connection, and let nobody through until `open`."""
        with self._lock:
            self._shut = True
        self.cut()

    def open(self) -> None:
        """Let new connections through again."""
        self._shut = False

    def stall(self, way: Way = "both", *, new: bool = False) -> None:
        """Stall every connection. Connections made later are forwarded, or with `new` stalled as well."""
        with self._lock:
            self._stalled = way if new else None
        for wire in self.wires():
            wire.stall(way)

    def resume(self) -> None:
        """Let every connection flow again."""
        with self._lock:
            self._stalled = None
        for wire in self.wires():
            wire.resume()

    def delay(self, seconds: float) -> None:
        """Hold back each piece for so long, of every connection and of new ones; 0 ends it."""
        self.delay_secs = seconds
        for wire in self.wires():
            wire.delay_secs = seconds

    def reach(self) -> socket.socket:
        """A connection to the other side. Raises OSError when there is nobody."""
        return socket.create_connection((LOOPBACK, self.target), CONNECT_SECS_MAX)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # the proxy is being closed
            try:
                far = self.reach()
            except OSError:
                near.close()  # whoever should listen does not: it looks as if the peer had gone away
                continue
            for end in (near, far):
                end.settimeout(None)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                if self._shut:
                    near.close()
                    far.close()
                    continue
                wire = Wire(near, far)
                wire.delay_secs = self.delay_secs
                if self._stalled is not None:
                    wire.stall(self._stalled)
                self._wires.append(wire)
