"""A broker at the end of a URL, spoken to in turn: say, wait for the answer, go on. For the command line
only.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeVar

from gateway.errors import LinkError
from gateway.settings import Target

READ_OCTETS: Final = 65_536
Event = TypeVar("Event")


class Machine(Protocol):
    """A client's side of a protocol."""

    def receive_data(self, data: bytes, now: float) -> Sequence[Any]:
        """Events."""

    def data_to_send(self) -> bytes:
        """Octets."""


class Wire:
    """A connected socket, and the protocol machine that speaks over it."""

    def __init__(self, target: Target, machine: Machine, timeout_secs: float, ca_file: str | None) -> None:
        """Raises LinkError when the broker cannot be reached."""
        self.machine = machine
        self.timeout_secs = timeout_secs
        try:
            sock = socket.create_connection((target.host, target.port), timeout=timeout_secs)
            if target.tls:
                context = ssl.create_default_context(cafile=ca_file)
                sock = context.wrap_socket(sock, server_hostname=target.host)
        except OSError as error:
            raise LinkError(f"{target.host}:{target.port}: {error}") from error
        self._sock = sock
        self._place = f"{target.host}:{target.port}"

    def flush(self) -> None:
        """Write what the machine has to say."""
        data = self.machine.data_to_send()
        if data:
            self._sock.sendall(data)

    def events(self, seconds: float | None = None, tick: Callable[[], None] | None = None) -> Iterator[Any]:
        """Events as they come, until `seconds` have passed (None: for ever); `tick` runs once a second."""
        end = None if seconds is None else time.monotonic() + seconds
        while end is None or time.monotonic() < end:
            self.flush()
            self._sock.settimeout(1.0 if end is None else min(1.0, max(0.001, end - time.monotonic())))
            try:
                data = self._sock.recv(READ_OCTETS)
            except TimeoutError:
                if tick is not None:
                    tick()
                continue
            except OSError as error:
                raise LinkError(f"{self._place}: {error}") from error
            if not data:
                raise LinkError(f"{self._place} closed the connection")
            yield from self.machine.receive_data(data, time.monotonic())
            while getattr(self.machine, "pending", False):
                yield from self.machine.receive_data(b"", time.monotonic())

    def wait(self, wanted: type[Event]) -> Event:
        """The next event of that type; others are passed over. Raises LinkError when it does not come in
        time.
        """
        for event in self.events(self.timeout_secs):
            if isinstance(event, wanted):
                return event
        raise LinkError(f"{self._place}: no {wanted.__name__} within {self.timeout_secs} s")

    def close(self) -> None:
        """Say what is left and go."""
        self.flush()
        self._sock.close()
