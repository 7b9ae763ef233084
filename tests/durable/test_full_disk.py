"""A disk that is full: refusals in each protocol's own words, consumers that go on, and a way back."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pika
import pytest

from gateway.protocols.mqtt.spec import PacketType, ReasonCode, Version
from tests.durable.test_amqp import PERSISTENT, TRANSIENT, channel
from tests.ingress.clients import connect
from tests.interop.gateway_process import GatewayProcess

DISK_BYTES: Final = 16 * 1024 * 1024
BODY: Final = b"x" * 65_536
FILLING_MAX: Final = 1_000


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of DISK_BYTES."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def gateway(tmp_path: Path, small: Path) -> Iterator[GatewayProcess]:
    with GatewayProcess(tmp_path, store={"path": str(small / "data"), "probe_secs": 0.05}) as started:
        yield started


def filled(opened: pika.adapters.blocking_connection.BlockingChannel) -> int:
    """Publish until the disk is full; how many messages it has taken."""
    for taken in range(FILLING_MAX):
        try:
            opened.basic_publish("", "q", BODY, PERSISTENT)
        except pika.exceptions.NackError:
            return taken
    raise AssertionError("the disk never filled")


def test_amqp_publishers_are_told_consumers_go_on_and_it_ends(gateway: GatewayProcess) -> None:
    blocked: list[str] = []
    with channel(gateway) as opened, channel(gateway, confirm=False) as transient:
        opened.connection.add_on_connection_blocked_callback(
            lambda _, frame: blocked.append(frame.method.reason)
        )
        opened.connection.add_on_connection_unblocked_callback(lambda _, __: blocked.append(""))
        opened.queue_declare("q", durable=True)
        taken = filled(opened)
        assert taken > 10
        while not blocked:
            opened.connection.process_data_events(0.05)
        assert "full" in blocked[0]
        with pytest.raises(pika.exceptions.NackError):
            opened.basic_publish("", "q", BODY, PERSISTENT)
        transient.queue_declare("passing", exclusive=True)
        transient.basic_publish("", "passing", b"goes on", TRANSIENT)
        assert transient.basic_get("passing", auto_ack=True)[2] == b"goes on"
        for _ in range(taken):
            method, _, body = opened.basic_get("q")
            assert body == BODY
            opened.basic_ack(method.delivery_tag)
        while blocked[-1]:
            opened.connection.process_data_events(0.05)
        opened.basic_publish("", "q", BODY, PERSISTENT)
        assert opened.queue_declare("q", durable=True, passive=True).method.message_count == 1


def test_nothing_confirmed_is_lost_to_a_full_disk_and_a_kill(gateway: GatewayProcess) -> None:
    with channel(gateway) as opened:
        opened.queue_declare("q", durable=True)
        taken = filled(opened)
        gateway.restart()
    with channel(gateway) as opened:
        assert opened.queue_declare("q", durable=True, passive=True).method.message_count == taken


def test_mqtt_5_hears_quota_exceeded(gateway: GatewayProcess) -> None:
    with channel(gateway) as opened:
        opened.queue_declare("q", durable=True)
        opened.queue_bind("q", "amq.topic", "full.#")
        filled(opened)
        with connect(gateway, "device", version=Version.V5)[0] as client:
            client.publish("full/x", BODY, 1, 1)
            assert client.acked(PacketType.PUBACK) == (1, ReasonCode.QUOTA_EXCEEDED)
            client.publish("elsewhere", BODY, 1, 2)
            assert client.acked(PacketType.PUBACK) == (2, 0x10), "nobody is there"


def test_what_is_refused_for_the_disk_is_delivered_to_nobody(gateway: GatewayProcess, small: Path) -> None:
    """But for what was on its way when the disk filled up."""
    with channel(gateway) as opened, channel(gateway) as consuming:
        opened.queue_declare("seen", durable=True)
        with (small / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
            while True:
                ballast.write(b"x" * 4_096)
        found: list[int] = []
        consuming.basic_consume("seen", lambda *given: found.append(int(given[3].split()[0])))
        consuming.connection.process_data_events(0.05)
        refused = []
        for number in range(50):
            try:
                opened.basic_publish("", "seen", b"%d " % number + BODY, PERSISTENT)
            except pika.exceptions.NackError:
                refused.append(number)
            consuming.connection.process_data_events(0)
        consuming.connection.process_data_events(0.2)
        assert len(refused) > 10
        assert set(refused[1:]) & set(found) == set()
