"""Network of a simulation: connections in memory, and readiness in place of epoll.

The gateway's pollers find a `VirtualSocketLoop` where they look for the socket loop. It has the descriptors
of all connections, and serves pollers and the calls of the store's thread only when the simulation says so. A
connection loses, delays or splits bytes in its `Wire`: reads and writes are partial, a stalled peer neither
reads nor arrives, a half-open one has vanished without a word.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from random import Random
from typing import Any, Final, cast

from gateway.containment import contained
from gateway.ingress.listener import Listener
from gateway.transport.poller import READ, WRITE
from gateway.transport.socket_loop import Ready, SocketPoller

SEND_BUFFER_BYTES: Final = 16_384
SHORT_READ_BYTES_MAX: Final = 40
HOST: Final = "127.0.0.1"  # others may not connect without a password


class Wire:
    """Both directions of one connection."""

    def __init__(self, number: int, random: Random, *, splits: bool) -> None:
        """`splits`: reads and writes are often partial."""
        self.number = number
        self.sent = bytearray()  # by the client, and not read by the gateway yet
        self.written = bytearray()  # by the gateway, and not read by the client yet
        self.stalled = False
        self.is_half_open = False  # the client has vanished, and the gateway does not know
        self.client_has_ended = False
        self.client_is_shut = False  # the client sends nothing more, and still reads
        self.is_reset = False
        self.gateway_has_ended = False
        self._random = random
        self._splits = splits

    def portion(self, count: int) -> int:
        """Return how many of `count` bytes pass at once."""
        if self._splits and count > 1 and self._random.random() < 0.5:
            return self._random.randint(1, min(count, SHORT_READ_BYTES_MAX))
        return count

    @property
    def is_readable(self) -> bool:
        """True if the gateway's socket has something to read, or an end."""
        if self.stalled or self.is_half_open:
            return False
        return bool(self.sent) or self.client_has_ended or self.client_is_shut or self.is_reset

    @property
    def is_writable(self) -> bool:
        """True if the gateway's socket accepts bytes, or an error."""
        return len(self.written) < SEND_BUFFER_BYTES or self.is_reset or self.client_has_ended

    # The client's end.

    def send(self, data: bytes) -> None:
        """Send bytes of the client, which vanish on a connection that has ended."""
        if not (self.client_has_ended or self.is_reset or self.gateway_has_ended):
            self.sent += data

    def receive(self) -> bytes:
        """Return what the client reads now."""
        if self.stalled or self.is_half_open or self.is_reset:
            return b""
        data = bytes(self.written[: self.portion(len(self.written))])
        del self.written[: len(data)]
        return data

    @property
    def has_ended(self) -> bool:
        """True if the client has read the end of the connection."""
        return self.is_reset or (self.gateway_has_ended and not self.written and not self.stalled)

    def end(self) -> None:
        """Close the client's socket; what it has sent arrives."""
        self.client_has_ended = True

    def reset(self) -> None:
        """Break the connection; what is on its way is lost."""
        self.sent.clear()
        self.written.clear()
        self.is_reset = True


class VirtualSocket:
    """A gateway's socket of a wire to one of its clients."""

    def __init__(self, wire: Wire, descriptor: int, free: Callable[[int], None]) -> None:
        self.wire = wire
        self._descriptor = descriptor
        self._free = free

    @property
    def is_readable(self) -> bool:
        """True if there is something to read, or an end."""
        return self.wire.is_readable

    @property
    def is_writable(self) -> bool:
        """True if the socket accepts bytes, or an error."""
        return self.wire.is_writable

    def fileno(self) -> int:
        """Return the virtual descriptor; -1 after `close`."""
        return self._descriptor

    def setblocking(self, flag: bool) -> None:
        """Do nothing."""

    def setsockopt(self, *option: int) -> None:
        """Do nothing."""

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Return bytes, or b"" at the end. Raises BlockingIOError or ConnectionResetError."""
        wire = self.wire
        return self._read(wire.sent, wire.client_has_ended or wire.client_is_shut, size, flags)

    def _read(self, incoming: bytearray, has_ended: bool, size: int, flags: int) -> bytes:
        wire = self.wire
        if wire.is_reset:
            raise ConnectionResetError("reset")
        if wire.stalled or wire.is_half_open or not incoming:
            if has_ended and not wire.is_half_open:
                return b""
            raise BlockingIOError
        data = bytes(incoming[: wire.portion(min(size, len(incoming)))])
        if not flags & socket.MSG_PEEK:
            del incoming[: len(data)]
        return data

    def send(self, data: bytes | memoryview, flags: int = 0) -> int:
        """Accept some of the bytes. Raises BlockingIOError or BrokenPipeError."""
        return self._write(self.wire.written, self.wire.client_has_ended, data)

    def _write(self, outgoing: bytearray, has_ended: bool, data: bytes | memoryview) -> int:
        wire = self.wire
        if wire.is_reset or has_ended:
            raise BrokenPipeError("the peer has closed")
        room = SEND_BUFFER_BYTES - len(outgoing)
        if room <= 0:
            raise BlockingIOError
        accepted = data[: wire.portion(min(room, len(data)))]
        if not wire.is_half_open or outgoing:
            outgoing += accepted
        return len(accepted)

    def sendmsg(self, buffers: Any, *more: Any) -> int:
        """Accept some of the bytes of several buffers."""
        return self.send(b"".join(buffers))

    def shutdown(self, how: int) -> None:
        """End the gateway's direction."""
        self.wire.gateway_has_ended = True

    def close(self) -> None:
        """Close the gateway's end."""
        if self._descriptor >= 0:
            self._end()
            self._free(self._descriptor)
            self._descriptor = -1

    def _end(self) -> None:
        self.wire.gateway_has_ended = True

    def die(self, *, is_reset: bool, dead: Wire) -> None:
        """Leave the wire, because the process has died; what it still does reaches `dead`."""
        self._end()
        if is_reset:
            self.wire.reset()
        self.wire = dead


class LinkSocket(VirtualSocket):
    """A gateway's socket of a wire to a remote gateway, at which it is a client."""

    @property
    def is_readable(self) -> bool:
        """True if there is something to read, or an end."""
        wire = self.wire
        if wire.stalled or wire.is_half_open:
            return False
        return bool(wire.written) or wire.gateway_has_ended or wire.is_reset

    @property
    def is_writable(self) -> bool:
        """True if the socket accepts bytes, or an error."""
        wire = self.wire
        return len(wire.sent) < SEND_BUFFER_BYTES or wire.is_reset or wire.gateway_has_ended

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Return bytes, or b"" at the end. Raises BlockingIOError or ConnectionResetError."""
        return self._read(self.wire.written, self.wire.gateway_has_ended, size, flags)

    def send(self, data: bytes | memoryview, flags: int = 0) -> int:
        """Accept some of the bytes. Raises BlockingIOError or BrokenPipeError."""
        if self.wire.gateway_has_ended and not self.wire.is_reset:
            return len(data)  # nobody reads them
        return self._write(self.wire.sent, False, data)

    def shutdown(self, how: int) -> None:
        """End the gateway's direction."""
        self.wire.client_is_shut = True

    def _end(self) -> None:
        self.wire.client_has_ended = True


class VirtualSocketLoop:
    """Sockets and calls of threads, with the interface of the socket loop and of its epoll object."""

    def __init__(self, random: Random, *, splits: bool) -> None:
        self.users = 1
        self.owners: dict[int, SocketPoller] = {}
        self.calls: list[Callable[[], None]] = []
        self.epoll = self
        self._random = random
        self._splits = splits
        self._events: dict[int, int] = {}
        self._sockets: dict[int, VirtualSocket] = {}
        self._working: dict[SocketPoller, None] = {}
        self._wires = 0

    # What the gateway uses.

    def fileno(self) -> int:
        """Return no descriptor."""
        return -1

    def register(self, descriptor: int, events: int) -> None:
        """Watch a descriptor."""
        self._events[descriptor] = events

    modify = register

    def unregister(self, descriptor: int) -> None:
        """Watch a descriptor no longer."""
        del self._events[descriptor]

    def forget(self, poller: SocketPoller) -> None:
        """Serve a poller no longer."""
        self._working.pop(poller, None)
        self.owners = {number: owner for number, owner in self.owners.items() if owner is not poller}

    def call_soon(self, function: Callable[[], None]) -> None:
        """Queue a call of the store's thread."""
        self.calls.append(function)

    def run_calls(self) -> None:
        """Run what the store's thread has handed over."""
        calls, self.calls = self.calls, []
        for call in calls:
            try:
                call()
            except Exception as error:
                contained("store", error)

    # What the simulation uses.

    def connect(self, listener: Listener) -> Wire:
        """Open a connection to a listener. A listener that does not accept closes it at once."""
        self._wires += 1
        wire = Wire(self._wires, self._random, splits=self._splits)
        end = self._add(VirtualSocket, wire)
        if listener.open:
            listener._add(cast(socket.socket, end), HOST, 10_000 + self._wires)
        else:
            end.close()
        return wire

    def link(self, wire: Wire) -> socket.socket:
        """Return this gateway's socket of a wire to a remote gateway."""
        return cast(socket.socket, self._add(LinkSocket, wire))

    def _add(self, kind: type[VirtualSocket], wire: Wire) -> VirtualSocket:
        descriptor = next(number for number in range(len(self._sockets) + 1) if number not in self._sockets)
        end = self._sockets[descriptor] = kind(wire, descriptor, self._free)
        return end

    @property
    def links(self) -> list[Wire]:
        """Return the wires to remote gateways."""
        return [end.wire for end in self._sockets.values() if isinstance(end, LinkSocket)]

    def _free(self, descriptor: int) -> None:
        del self._sockets[descriptor]

    @property
    def is_ready(self) -> bool:
        """True if a poller has something to do."""
        return bool(self._working) or any(map(self._ready_events, self._events))

    def _ready_events(self, descriptor: int) -> int:
        end = self._sockets[descriptor]
        ready = (READ if end.is_readable else 0) | (WRITE if end.is_writable else 0)
        return ready & self._events[descriptor]

    def serve(self, now: float) -> None:
        """Give each poller one turn."""
        due: dict[SocketPoller, Ready] = {poller: [] for poller in self._working}
        self._working.clear()
        for descriptor in list(self._events):
            if events := self._ready_events(descriptor):
                due.setdefault(self.owners[descriptor], []).append((descriptor, events))
        for poller, ready in due.items():
            self._random.shuffle(ready)
            poller.turn(now, ready)
            if poller.has_work:
                self._working[poller] = None

    def repair(self) -> None:
        """Deliver what stalls, and break connections whose clients have vanished."""
        for end in self._sockets.values():
            end.wire.stalled = False
            if end.wire.is_half_open:
                end.wire.is_half_open = False
                end.wire.reset()

    def crash(self) -> None:
        """Take all connections from a process that has died. What it has written may still arrive."""
        for end in self._sockets.values():
            end.die(is_reset=self._random.random() < 0.5, dead=Wire(0, self._random, splits=False))
        self.calls.clear()
