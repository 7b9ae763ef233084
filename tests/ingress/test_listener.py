"""A listener's own ports."""

from __future__ import annotations

import socket

import trio

from gateway.app import Gateway
from gateway.settings import Settings
from tests.interop.servers import LOOPBACK


async def test_a_gateway_that_is_cancelled_without_a_drain_leaves_no_port_open() -> None:
    settings = Settings.model_validate(
        {
            "listeners": {"mqtt": {"protocol": "mqtt", "host": LOOPBACK, "port": 0}},
            "store": {"enabled": False},
            "http": {"enabled": False},
        }
    )
    gateway = Gateway(settings)
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: gateway.run(task_status=task_status, signals=False))
        port = gateway.listeners["mqtt"].port
        nursery.cancel_scope.cancel()
    with socket.create_server((LOOPBACK, port)) as ours:
        assert ours.getsockname()[1] == port
