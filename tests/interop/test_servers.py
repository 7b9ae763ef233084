"""The real brokers that other tests rely on: they answer, survive an outage and leave nothing running."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Final

import pika
import pytest

from tests.interop.servers import LOOPBACK, Mosquitto, RabbitMQ, free_ports, program

ROOT: Final = Path(__file__).resolve().parents[2]
WAIT_SECS = "20"


def mosquitto_round_trip(port: int, body: str) -> str:
    """Publish a retained message with mosquitto_pub, and let mosquitto_sub fetch it."""
    where = ["-h", LOOPBACK, "-p", str(port), "-t", "a/b", "-q", "1"]
    subprocess.run([program("mosquitto_pub"), *where, "-r", "-m", body], check=True, timeout=30)
    fetch = [program("mosquitto_sub"), *where, "-C", "1", "-W", WAIT_SECS]
    return subprocess.run(fetch, check=True, timeout=30, capture_output=True, text=True).stdout.strip()


def queue_length(rabbitmq: RabbitMQ, queue: str) -> int:
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
        declared = connection.channel().queue_declare(queue, durable=True)
        return int(declared.method.message_count)


def test_mosquitto_carries_a_message_and_comes_back_after_an_outage(mosquitto: Mosquitto) -> None:
    assert mosquitto_round_trip(mosquitto.port, "before") == "before"
    mosquitto.stop()
    assert not mosquitto.running
    mosquitto.start()
    assert mosquitto_round_trip(mosquitto.port, "after") == "after"


def test_rabbitmq_keeps_its_messages_and_ports_over_an_outage(rabbitmq: RabbitMQ) -> None:
    port = rabbitmq.port
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
        channel = connection.channel()
        channel.queue_declare("kept", durable=True)
        channel.confirm_delivery()
        channel.basic_publish("", "kept", b"body", pika.BasicProperties(delivery_mode=2))
    rabbitmq.restart()
    assert rabbitmq.port == port
    assert queue_length(rabbitmq, "kept") == 1


def test_rabbitmq_takes_what_amqp_publish_sends(rabbitmq: RabbitMQ) -> None:
    assert queue_length(rabbitmq, "tools") == 0
    command = [program("amqp-publish"), "-u", rabbitmq.url, "-r", "tools", "-b", "body"]
    subprocess.run(command, check=True, timeout=30)
    assert queue_length(rabbitmq, "tools") == 1


def test_a_stopped_broker_leaves_no_process(tmp_path: Path) -> None:
    with Mosquitto(tmp_path) as broker:
        assert broker.running
    found = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _data(path)]
    assert found == []


def _data(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process ended while we looked
        return b""


def test_two_processes_have_ports_of_their_own() -> None:
    """However often each has been given some."""
    told = "from tests.interop.servers import free_ports; print(*free_ports(500), flush=True); input()"
    others = [
        subprocess.Popen((sys.executable, "-c", told), stdin=PIPE, stdout=PIPE, text=True, cwd=ROOT)
        for _ in range(2)
    ]
    try:
        given = [set(map(int, other.stdout.readline().split())) for other in others if other.stdout]
        assert [len(ports) for ports in given] == [500, 500]
        assert given[0].isdisjoint(given[1])
    finally:
        for other in others:
            other.communicate("\n")


@pytest.mark.parametrize("count", [1, 4])
def test_free_ports_differ(count: int) -> None:
    assert len(set(free_ports(count))) == count
