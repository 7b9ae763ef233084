"""What an operator removes with the command line is gone when that says so, also after a kill."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from gateway.protocols.mqtt.packets import Disconnect
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode
from tests.cli.conftest import Run
from tests.ingress.amqpfast.client import PERSISTENT as FAST_PERSISTENT
from tests.ingress.amqpfast.client import TOPIC, Fast
from tests.ingress.clients import Raw, connect
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import PROGRAM, ROOT, GatewayProcess, environment
from tests.interop.servers import free_ports
from tests.operator import bearer

HEADINGS = ["client", "user", "idle", "ends in", "subscriptions", "waiting", "in flight"]
STAYS = {Property.SESSION_EXPIRY_INTERVAL: 600}


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    (port,) = free_ports(1)
    http = {"host": LOOPBACK, "port": port}
    with GatewayProcess(tmp_path, http=http) as started:
        yield started


class Operator:
    """Calls the command line, whose entry point runs in this process."""

    def __init__(self, run: Run, gateway: GatewayProcess) -> None:
        self._run = run
        self._url = f"http://{LOOPBACK}:{gateway.port('http')}"

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """What is printed."""
        ran = self._run(*arguments, "--url", self._url)
        assert ran.code == code, ran
        return ran.out

    def listed(self, what: str, word: str) -> list[str]:
        """That word of all that there are."""
        return [one[word] for one in json.loads(self(what, "list", "--json"))["items"]]


@pytest.fixture
def operator(run: Run, gateway: GatewayProcess) -> Operator:
    return Operator(run, gateway)


def abandon(gateway: GatewayProcess, client: str) -> None:
    """A session that stays, with a subscription."""
    with connect(gateway, client, properties=STAYS)[0] as left:
        left.subscribe("a/#", qos=1)


def test_abandoned_sessions_are_removed(gateway: GatewayProcess, operator: Operator) -> None:
    for number in range(5):
        abandon(gateway, f"eve-{number}")
    with connect(gateway, "plant", properties=STAYS)[0] as plant:
        lines = operator("sessions", "list", "--client", "eve-*", "--not-in-use").splitlines()
        assert re.split("  +", lines[0]) == HEADINGS
        assert [line.split()[:2] for line in lines[1:]] == [[f"eve-{number}", "-"] for number in range(5)]
        assert operator("sessions", "delete", "--client", "*", "--idle-longer-than", "1d", code=1)
        assert operator("sessions", "delete", "--client", "eve-*") == "5 deleted\n"
        gateway.restart()
        assert operator.listed("sessions", "client") == ["plant"]
        plant.cut()
    again, connack = connect(gateway, "plant", clean=False, properties=STAYS)
    with again:
        assert connack.session_present
        operator("sessions", "delete", "--all", code=2)
        operator("sessions", "delete", "--all", "--yes", code=1)
        assert operator("sessions", "delete", "--all", "--yes", "--in-use") == "1 deleted\n"
        assert again.next(Disconnect).reason == ReasonCode.ADMINISTRATIVE_ACTION
    gateway.restart()
    assert operator.listed("sessions", "client") == []


def test_queues_of_both_protocols_and_subscriptions(gateway: GatewayProcess, operator: Operator) -> None:
    parameters = pika.ConnectionParameters(LOOPBACK, gateway.port("amqp091"))
    with closing(pika.BlockingConnection(parameters)) as connection:
        check_queues(gateway, operator, connection.channel())
    gateway.restart()
    found = json.loads(operator("queues", "list", "--json"))
    assert [(one["queue"], one["messages"]) for one in found["items"]] == [("orders", 0)]


def check_queues(gateway: GatewayProcess, operator: Operator, channel: BlockingChannel) -> None:
    channel.confirm_delivery()
    for name in ("junk 1", "junk 2", "orders"):
        channel.queue_declare(name, durable=True)
        channel.basic_publish("", name, b"m", pika.BasicProperties(delivery_mode=2))
    channel.queue_declare("mine", exclusive=True)
    with Fast(gateway, "d").open() as fast:
        fast.put(fast.handle("junk.fast"), b"1", head=FAST_PERSISTENT)
        fast.consume(fast.handle("plant.", TOPIC), identifier="sub")
    assert operator.listed("queues", "queue") == ["junk 1", "junk 2", "mine", "orders", "junk.fast", "d/sub"]
    page = json.loads(operator("queues", "list", "-n", "2", "--json"))
    rest = json.loads(operator("queues", "list", "--after", page["next"], "--json"))
    assert [one["queue"] for one in page["items"] + rest["items"]] == operator.listed("queues", "queue")
    lines = operator("queues", "list", "--queue", "junk.*").splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["amqpfast", "/", "queue", "junk.fast", "1", "268", "0", "0", "durable", "-"]
    ]
    assert operator("queues", "delete", "--queue", "junk*") == "3 deleted, with 3 messages\n"
    assert operator("queues", "purge", "--queue", "orders") == "1 purged of 1 messages\n"
    operator("queues", "delete", "--queue", "mine", "--in-use", code=1)
    assert channel.queue_declare("mine", passive=True).method.message_count == 0
    assert operator("queues", "delete", "--kind", "subscription", "--all", "--yes", code=2) == ""
    assert operator("queues", "delete", "--kind", "subscription") == "1 deleted, with 0 messages\n"


def test_names_with_a_star_are_meant_exactly_where_that_is_said(
    gateway: GatewayProcess, operator: Operator
) -> None:
    for client in ("*", "press-7"):
        abandon(gateway, client)
    parameters = pika.ConnectionParameters(LOOPBACK, gateway.port("amqp091"))
    with closing(pika.BlockingConnection(parameters)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for name in ("job*", "job1", "*"):
            channel.queue_declare(name, durable=True)
            channel.basic_publish("", name, b"m", pika.BasicProperties(delivery_mode=2))
    with connect(gateway, "eve*")[0] as client, connect(gateway, "eve")[0] as other:
        for publisher, topic in ((client, "a"), (other, "b")):
            publisher.publish(topic, b"body", 1, 1, retain=True)
            publisher.acked(PacketType.PUBACK)
    lines = operator("sessions", "list", "--client", "*", "--exact").splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["*"]
    assert operator("sessions", "delete", "--client", "*", "--exact") == "1 deleted\n"
    assert operator.listed("sessions", "client") == ["press-7"]
    assert operator("queues", "purge", "--queue", "job*", "--exact") == "1 purged of 1 messages\n"
    assert operator("queues", "delete", "--queue", "*", "--exact") == "1 deleted, with 1 messages\n"
    assert operator("queues", "delete", "--queue", "job*", "--exact") == "1 deleted, with 0 messages\n"
    assert operator.listed("queues", "queue") == ["job1"]
    assert operator("retained", "delete", "--client", "eve*", "--exact") == "1 deleted\n"
    operator("retained", "delete", "--topic", "#", "--exact", code=1)
    assert operator.listed("retained", "topic") == ["b"]
    operator("sessions", "delete", "--exact", code=2)


@pytest.mark.parametrize("topic", ["keep/#/typo", "keep/#typo", "keep/a+", "#/", ""])
def test_a_filter_that_is_none_removes_nothing(
    gateway: GatewayProcess, operator: Operator, topic: str
) -> None:
    with connect(gateway, "eve")[0] as client:
        client.publish("keep/a", b"body", 1, 1, retain=True)
        client.acked(PacketType.PUBACK)
    for command in ("list", "remove"):
        operator("retained", command, "--topic", topic, code=2)
    assert operator.listed("retained", "topic") == ["keep/a"]


def test_retained_topics(gateway: GatewayProcess, operator: Operator) -> None:
    with connect(gateway, "eve")[0] as client:
        for number, topic in enumerate(("junk/1", "junk/2/x", "plant/a", "größe/ü"), 1):
            client.publish(topic, b"body", 1, number, retain=True)
            client.acked(PacketType.PUBACK)
    assert operator.listed("retained", "topic") == ["größe/ü", "junk/1", "junk/2/x", "plant/a"]
    found = operator("retained", "list", "--topic", "+/ü").splitlines()[1]
    assert found.split() == ["größe/ü", "4", "1", "eve", "-", "-"]
    assert operator("retained", "delete", "--topic", "junk/#", "--client", "e*") == "2 deleted\n"
    operator("retained", "delete", "--topic", "junk/#", code=1)
    gateway.restart()
    assert operator.listed("retained", "topic") == ["größe/ü", "plant/a"]
    assert operator("retained", "delete", "--all", "--yes") == "2 deleted\n"


def test_the_program_itself(gateway: GatewayProcess) -> None:
    abandon(gateway, "eve")
    url = f"http://{LOOPBACK}:{gateway.port('http')}"
    ran = subprocess.run(
        (*PROGRAM, "sessions", "delete", "--client", "e*", "--url", url),
        env=environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "1 deleted\n", "")


def test_a_program_without_a_library(gateway: GatewayProcess) -> None:
    """As curl would: one request over a socket."""
    abandon(gateway, "eve")
    body = b'{"client": "e*"}'
    shown = f"Authorization: {bearer(gateway.port('http'))['Authorization']}\r\n"
    with Raw(gateway.port("http")) as raw:
        head = f"POST /api/v1/sessions/remove HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        raw.send(f"{head}{shown}Connection: close\r\n\r\n".encode() + body)
        said = raw.rest()
        assert said.startswith(b"HTTP/1.1 200 ")
        assert said.endswith(b'{"removed":1,"in_use":0,"leaving":0}')
    with Raw(gateway.port("http")) as raw:
        head = "GET /api/v1/sessions?in_use=false HTTP/1.1\r\nHost: elsewhere\r\n"
        raw.send(f"{head}{shown}Connection: close\r\n\r\n".encode())
        assert raw.rest().endswith(b'{"total":0,"items":[],"next":null}')
    with Raw(gateway.port("http")) as raw:
        raw.send(b"GET /api/v1/queues HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert raw.rest().startswith(b"HTTP/1.1 401 ")
