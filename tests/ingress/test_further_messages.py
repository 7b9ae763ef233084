"""What each further message of a batch costs, in calls: it may not walk the way of the first one again."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final

import pytest

import gateway
from tests.ingress.amqp_client import NOTHING, Amqp
from tests.ingress.clients import Mqtt, connect
from tests.interop.gateway_fixture import Running, running

pytestmark = pytest.mark.interpreted

CALLS_MAX: Final = 8
FEW: Final = 3
MANY: Final = 23
ROUNDS: Final = 3
HERE: Final = str(Path(gateway.__file__).parent)
LEAST: Final = (MANY - FEW) // 2  # calls in a round that are of each message, and not of the clock
HEADERS: Final = b"\x20\0\0\0\0\x08\x01kS\0\0\0\x01v"
"""A content header with one header, `k`."""


def calls_of(gateway: Running, count: int, publish: Callable[[int], None], reader: Mqtt) -> Counter[str]:
    """The calls that the gateway makes for a batch of messages, by function."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HERE):
            calls[f"{code.co_filename} {code.co_qualname}"] += 1

    gateway.ask(lambda: sys.setprofile(note))
    publish(count)
    for _ in range(count):
        reader.row()
    gateway.ask(lambda: sys.setprofile(None))
    return calls


@pytest.mark.parametrize("properties", [NOTHING, HEADERS], ids=["no properties", "a header"])
def test_amqp_to_mqtt(properties: bytes) -> None:
    with running() as gateway, connect(gateway, "reader")[0] as reader, Amqp(gateway).open() as writer:
        assert gateway.ask(threading.get_ident) != threading.get_ident(), "only the gateway is looked at"
        reader.subscribe("#", 1)

        def publish(count: int) -> None:
            writer.publish("amq.topic", "a.b", *[b"x"] * count, properties=properties)

        publish(1)
        reader.row()
        few = [calls_of(gateway, FEW, publish, reader) for _ in range(ROUNDS)]
        many = [calls_of(gateway, MANY, publish, reader) for _ in range(ROUNDS)]
    each = {
        name: more / (MANY - FEW)
        for name in many[0]
        if (more := min(one[name] for one in many) - min(one[name] for one in few)) >= LEAST
    }
    assert sum(each.values()) <= CALLS_MAX, each
