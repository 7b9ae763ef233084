"""Members of a shared subscription, which together are the receiver of a row.

Each has a session of its own. A member can lose its connection, stay away and come back to its session, or to
a new one, and its session can be deleted: what it was owed is then another member's.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Final

from gateway.protocols.mqtt.spec import Version
from tests.chaos.checker import Carried, History
from tests.chaos.workers.common import Receiver
from tests.chaos.workers.mqtt import Device, MqttReceiver, opened

NAME: Final = "chaos"


class Member(MqttReceiver):
    """One member of a group."""

    def __init__(
        self, name: str, port: int, group: Group, *, prefix: str, qos: int, version: Version
    ) -> None:
        super().__init__(name, port, group.history, prefix=prefix, qos=qos, version=version, group=NAME)
        self._group = group
        self._member_version = version
        self._device: Device | None = None
        self._present = threading.Event()
        self._present.set()
        self._clean = self._may_be_new = False

    def converse(self) -> None:
        """One connection, unless it is away."""
        if not self._present.is_set():
            return
        clean, self._clean = self._clean, False
        device, connack = opened(self, self._member_version, clean=clean, may_be_new=self._may_be_new)
        self._device = device
        try:
            if not self._present.is_set():
                self.cut()  # it was to leave meanwhile
            self.receive(device, connack)
        finally:
            self._device = None

    def note(self, body: bytes, address: str, repeat: bool, carried: Carried | None) -> None:
        """A message came, for the group."""
        self._group.note(body, address, repeat, carried)

    def dawdle(self) -> None:
        """Read nothing for as long as the group was told, if no other member does."""
        self.slow_secs, self._group.slow_secs = self._group.slow_secs, 0.0
        super().dawdle()

    def cut(self) -> None:
        """Lose the connection."""
        device = self._device
        if device is not None:
            with suppress(OSError):  # it is lost already
                device.sock.shutdown(socket.SHUT_RDWR)

    def leave(self, *, clean: bool) -> None:
        """Lose the connection and stay away until `come_back`, with `clean` to a new session."""
        self._clean = clean
        self._present.clear()
        self.cut()

    def come_back(self) -> None:
        """Connect again."""
        self._present.set()

    def forgotten(self) -> None:
        """Its session is about to be deleted, so that it finds none from now on."""
        self._may_be_new = True


class Group(Receiver):
    """All members; what one of them receives the group has."""

    def __init__(
        self, name: str, port: int, history: History, count: int, *, prefix: str, qos: int, version: Version
    ) -> None:
        super().__init__(name, port, history)
        self.members = [
            Member(f"{name}-{at}", port, self, prefix=prefix, qos=qos, version=version) for at in range(count)
        ]

    def run(self) -> None:
        """Run until all members are subscribed; they go on by themselves."""
        for member in self.members:
            member.start()
        for member in self.members:
            member.ready.wait()
        self.ready.set()
        self._stopped.wait()

    def stop(self) -> None:
        """End all members, and wait until they have."""
        for member in self.members:
            member.ready.set()
            member.stop()
        super().stop()

    def check(self) -> None:
        """Raise what ended a member, if anything did that should not; collect what they noted."""
        super().check()
        for member in self.members:
            member.check()
            self.notes += member.notes
