"""What a connection does whose protocol has nothing of its own to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gateway.broker.memory import Memory
from gateway.ingress.client import CloseReason, InFlight, IngressClient
from gateway.model.message import Sender

pytestmark = pytest.mark.interpreted


class Ends:
    """A stream, as far as it is ended."""

    why = ""

    def end(self, why: str) -> None:
        self.why = why


class Plain(IngressClient):
    """What a protocol has to write, and no more."""

    def __init__(self) -> None:
        self.stream: Any = Ends()
        self.sender = Sender("plain")
        self.received: dict[str, int] = {}
        self.sent: dict[str, int] = {}
        self.farewells: list[CloseReason] = []

    def receive(self, data: bytes, now: float) -> None: ...

    def data_to_send(self) -> bytes:
        return b""

    def resume_writing(self) -> None: ...

    def connection_lost(self, reason: str) -> None: ...

    @property
    def frames(self) -> Plain:
        return self

    @property
    def idle(self) -> bool:
        return True

    def in_flight(self) -> InFlight:
        return InFlight()

    def hold(self) -> Callable[[], None] | None:
        return None

    def shut_down(self, farewell: CloseReason) -> None:
        self.farewells.append(farewell)


def test_what_it_does_not_say_it_does_not_have() -> None:
    one = Plain()
    one.tick(1.0)
    one.blocked("the disk is full")
    one.notify_memory(True)
    assert (one.virtual_host, one.channel_count, one.has_will) == ("", 0, False)
    assert (one.begun_bytes, one.outstanding_bytes) == (0, 0)
    assert (one.stream.why, one.farewells) == ("", [])


def test_it_goes_where_nobody_knows_what_it_holds_by_the_old_rules() -> None:
    one = Plain()
    one.rules_changed()
    assert one.farewells == [CloseReason.RULES_CHANGED]


def test_who_has_begun_much_is_let_go_while_memory_is_short() -> None:
    class Begun(Plain):
        @property
        def begun_bytes(self) -> int:
            return 1_000_000

    used = 2_000
    quiet, much = Plain(), Begun()
    memory = Memory(1_000, lambda: used, connections=lambda: [quiet, much])
    memory.measure()
    memory.tick(0.0)
    memory.tick(20.0)
    assert (quiet.stream.why, much.stream.why) == ("", "the gateway is low on memory")
