"""Like a Service in front of replicas: who connects is let through to one of them, the next time to another.

It knows nothing of how they are. One that listens is connected to; if that is frozen, its client finds out.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

from tests.chaos.proxy import CONNECT_SECS_MAX, Proxy
from tests.interop.gateway_fixture import LOOPBACK


class Balancer(Proxy):
    """A proxy in front of several ports, in turn."""

    def __init__(self, targets: Sequence[int]) -> None:
        self._targets = tuple(targets)
        self._next = 0
        self._turns = threading.Lock()
        super().__init__(self._targets[0])

    def reach(self) -> socket.socket:
        """As Proxy; of those that do not listen the next one is tried."""
        with self._turns:
            first, self._next = self._next, self._next + 1
        for at in range(len(self._targets)):
            try:
                target = self._targets[(first + at) % len(self._targets)]
                return socket.create_connection((LOOPBACK, target), CONNECT_SECS_MAX)
            except OSError:
                continue
        raise ConnectionRefusedError("none of the replicas listens")
