"""Heartbeats come in time although the listener looks once a second: half an interval after our last word."""

from __future__ import annotations

import time

import pytest

from gateway.ingress import listener
from gateway.protocols.amqp091.spec import HEARTBEAT_FRAME
from gateway.protocols.amqpfast.lifetime import PING
from gateway.settings import Limits
from tests.ingress.amqp_client import Amqp
from tests.ingress.amqpfast.client import Fast
from tests.interop.gateway_fixture import running, settings_of

INTERVAL_SECS = 1
BEATS = 5


@pytest.mark.parametrize("protocol", ["amqp091", "amqpfast"])
def test_they_come_within_an_interval(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, beat = {"amqp091": (Amqp, HEARTBEAT_FRAME), "amqpfast": (Fast, PING)}[protocol]
    limits = Limits(heartbeat_secs=INTERVAL_SECS)
    with running(settings_of(limits=limits)) as gateway:
        monkeypatch.setattr(listener, "TICK_SECS", 1.0)
        with kind(gateway, heartbeat=INTERVAL_SECS).open() as client:
            heard = time.monotonic()
            gaps: list[float] = []
            while len(gaps) < BEATS:
                data = client.sock.recv(1_000)
                gaps.append(time.monotonic() - heard)
                heard += gaps[-1]
                assert data == beat
                client.send(beat)
    assert max(gaps[1:]) < INTERVAL_SECS, gaps  # the first tick may be a whole one
