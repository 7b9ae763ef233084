"""Large bodies of AMQP 0-9-1 clients, before and after the gateway was killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError

from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import GatewayProcess

MIB: Final = 1_048_576
BODY: Final = os.urandom(20 * MIB)
LARGE_BYTES: Final = 120 * MIB
SPARE_BYTES: Final = 48 * MIB  # what the gateway may have more while such a body goes through it
DURABLE: Final = pika.BasicProperties(delivery_mode=2)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    with GatewayProcess(tmp_path) as made:
        yield made


def opened(gateway: GatewayProcess) -> tuple[pika.BlockingConnection, BlockingChannel]:
    port = gateway.port("amqp091")
    connection = pika.BlockingConnection(pika.ConnectionParameters(LOOPBACK, port, heartbeat=0))
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare("q", durable=True)
    return connection, channel


def spool(gateway: GatewayProcess) -> list[int]:
    """Sizes of the files."""
    return sorted(path.stat().st_size for path in (gateway.folder / "data" / "spool").iterdir())


def peak(gateway: GatewayProcess) -> int:
    """The most bytes of memory that the gateway has had."""
    status = Path(f"/proc/{gateway.process.pid}/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024


@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_what_was_confirmed_survives(gateway: GatewayProcess, way: str) -> None:
    connection, channel = opened(gateway)
    channel.basic_publish("", "q", BODY, DURABLE)
    channel.basic_publish("", "q", BODY[1:])  # transient
    assert spool(gateway) == [len(BODY) - 1, len(BODY)]
    if way == "killed":
        gateway.kill()
    else:
        assert gateway.terminate() == 0
    with suppress(AMQPError):
        connection.close()
    gateway.start()
    assert spool(gateway) == [len(BODY)]
    connection, channel = opened(gateway)
    with connection:
        method, _, body = channel.basic_get("q")
        assert body == BODY
        assert method is not None
        assert method.redelivered is (way == "killed"), "after a planned stop it is known who had what"
        channel.basic_ack(method.delivery_tag)
        channel.queue_declare("other", durable=True)
        # What was said before is on disk when this is confirmed.
        channel.basic_publish("", "other", b"", DURABLE)
    gateway.restart()
    assert spool(gateway) == []


def test_it_is_not_held_in_memory(gateway: GatewayProcess) -> None:
    connection, channel = opened(gateway)
    with connection:
        before = peak(gateway)
        channel.basic_publish("", "q", bytes(LARGE_BYTES), DURABLE)
        _, _, body = channel.basic_get("q", auto_ack=True)
        assert len(body) == LARGE_BYTES
        assert peak(gateway) - before < SPARE_BYTES
