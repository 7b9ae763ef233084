"""The guide to backups, step by step: a backup under load, a check, a restored gateway, an upgrade."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.events import Confirms
from tests.ingress.amqp_client import Amqp
from tests.interop.gateway_process import GatewayProcess

PERSISTENT = b"\x10\x00\x02"
SIZES = (10, 100_000, 300, 2_000_000)  # in the database, in gateway.heap, and in a file
LIMITS = {"message_bytes_max": 1_048_576}
FIRST_MAX = 40  # bodies before the backup
PROMPT_SECS = 2.5  # half of SQLite's own patience with a lock: nothing waited for the backup


def body(number: int) -> bytes:
    return (b"%09d" % number).ljust(SIZES[number % len(SIZES)], b".")


class Load:
    """A publisher that waits for each confirm, and a queue that is emptied as fast as it fills."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self.acknowledged = 0
        self.slowest = 0.0
        self.failure: BaseException | None = None
        self._ended = threading.Event()
        self._gateway = gateway
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with Amqp(self._gateway).open() as client:
                client.call(m.QueueDeclare("kept", durable=True), m.QueueDeclareOk)
                client.call(m.QueueDeclare("passing", durable=True), m.QueueDeclareOk)
                client.call(m.ConfirmSelect(), m.ConfirmSelectOk)
                while not self._ended.is_set():
                    self._publish(client, "kept", body(self.acknowledged))
                    self.acknowledged += 1
                    self._publish(client, "passing", b"p" * 150_000)
                    client.call(m.QueuePurge("passing"), m.QueuePurgeOk)
        except BaseException as error:
            self.failure = error

    def _publish(self, client: Amqp, queue: str, data: bytes) -> None:
        began = time.monotonic()
        client.publish("", queue, data, properties=PERSISTENT)
        client.next(Confirms)
        self.slowest = max(self.slowest, time.monotonic() - began)

    def reach(self, count: int) -> None:
        """Wait until so many messages are acknowledged."""
        while self.acknowledged < count and self.failure is None:
            time.sleep(0.01)
        assert self.failure is None

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        assert self.failure is None


def received(gateway: GatewayProcess, at_least: int) -> list[bytes]:
    with Amqp(gateway).open() as client:
        ready = client.call(m.QueueDeclare("kept", durable=True), m.QueueDeclareOk)
        assert isinstance(ready, m.QueueDeclareOk)
        assert ready.message_count >= at_least
        client.call(m.BasicConsume("kept", consumer_tag="c"), m.BasicConsumeOk)
        try:
            bodies: list[bytes] = []
            while len(bodies) < ready.message_count:
                for delivery in client.delivered(1):
                    bodies.append(bytes(delivery[-1]))
                    client.say(m.BasicAck(delivery[2]))  # a client may have 128 MiB unacknowledged
            return bodies
        except ConnectionError as error:
            raise AssertionError(f"{error}: {gateway.log}") from error


def test_everything_acknowledged_before_the_backup_is_in_the_restored_store(tmp_path: Path) -> None:
    copies = []
    with GatewayProcess(tmp_path / "first", limits=LIMITS) as gateway:
        load = Load(gateway)
        for number in range(2):
            load.reach(load.acknowledged + FIRST_MAX)
            before, load.slowest = load.acknowledged, 0.0
            copy = tmp_path / f"backup-{number}"
            said = gateway.command("store", "backup", "--to", str(copy), "--config", "gateway.yaml")
            assert "copied the store" in said, said
            assert load.slowest < PROMPT_SECS
            assert any((copy / "spool").iterdir())
            copies.append((copy, before, load.acknowledged))
        load.end()
        gateway.kill()
        for copy, before, after in copies:
            assert "intact: " in gateway.command("store", "check", "--store", str(copy))
            said = gateway.command("store", "restore", "--from", str(copy), "--config", "gateway.yaml")
            assert "contains a store (gateway.db" in said
            second = tmp_path / f"restored-{copy.name}"
            said = gateway.command("store", "restore", "--from", str(copy), "--store", str(second / "data"))
            assert "restored the backup" in said, said
            with GatewayProcess(second, limits=LIMITS) as restored:
                bodies = received(restored, before)
                assert before <= len(bodies) <= after + 1
                assert bodies == [body(one) for one in range(len(bodies))]
