"""Replicas with no more rights on the cluster than the guide gives them: all of it works."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from tests.chaos.proxy import Proxy
from tests.engine.replicas import Client, Replica, lasting, replicas
from tests.engine.test_common_ids import Sender
from tests.engine.test_elections import Door, numbers, until
from tests.interop.servers import LOOPBACK, Mosquitto, RabbitMQ

PAGE: Final = Path(__file__).parents[2] / "docs" / "guides" / "replicas.md"
NAME: Final = "plant"  # as on the page
PASSWORD: Final = "its-own"
ROUTES: Final = """
version: 1
routes:
  - name: in
    from: {endpoint: bridge, topic: "in/{rest...}"}
    to: {endpoint: mqtt, topic: "here/{rest...}"}
  - name: out
    from: {endpoint: mqtt, topic: "out/{rest...}"}
    to: {endpoint: far, topic: "there/{rest...}"}
    settle: stored
  - name: once
    from: {endpoint: mqtt, topic: "once/{rest...}"}
    to: {endpoint: bridge, topic: "there/once/{rest...}"}
    deduplicate: {by: message_id, window: 10m}
  - name: letters
    from: {endpoint: mqtt, topic: "letters/{rest...}"}
    to: {endpoint: nowhere, exchange: "nowhere", routing_key: "{rest...}"}
    on_reject: dead_letter
"""


@pytest.fixture(scope="module")
def url(rabbitmq: RabbitMQ) -> Iterator[str]:
    """The cluster's, with the user that the page makes."""
    commands = re.findall(r"^\$ rabbitmqctl (\w+ .*gateway.*)$", PAGE.read_text(), re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["add_user", "set_permissions"]
    for command in commands:
        rabbitmq.control(*(PASSWORD if word == "PASSWORD" else word for word in shlex.split(command)))
    yield rabbitmq.url.replace("guest:guest", f"gateway:{PASSWORD}")
    rabbitmq.control("delete_user", "gateway")


def test_topics_and_sessions(url: str) -> None:
    one, other = (Replica(name, url, NAME, engine_timeout_secs=4.0) for name in ("one", "other"))
    with replicas(one, other), Client(one.mqtt, "feeds") as feeding:
        feeding.publish("topics/kept", b"kept", retain=True)
        feeding.publish("topics/gone", b"gone", retain=True)
        feeding.publish("topics/gone", b"", retain=True)
        with lasting(one.mqtt, "away") as client:
            client.subscribe("topics/owed", qos=2)
        for at in range(5):
            feeding.publish("topics/owed", b"%d" % at, qos=2)
        with lasting(other.mqtt, "away") as client, Client(other.mqtt, "member") as member:
            assert client.present
            client.until(lambda: len(client.messages) == 5)
            member.subscribe("$share/group/topics/shared", qos=1)
            client.subscribe("topics/kept", qos=1)
            client.until(lambda: client.has_more_than(5))
            feeding.publish("topics/shared", b"shared")
            member.until(lambda: member.messages)
            with lasting(one.mqtt, "away") as again:
                client.until(lambda: client.ended)
                assert again.present
        with Client(one.mqtt, "dies", will="topics/will") as dies:
            feeding.subscribe("topics/will", qos=1)
            dies.vanish()
            feeding.until(lambda: feeding.messages)


class Apart(Door):
    """One with a link that is elected, one with shared outboxes, and one whose broker refuses."""

    def __init__(
        self, folder: Path, cluster: str, rabbitmq: RabbitMQ, far: int, near: int, name: str
    ) -> None:
        super().__init__(folder, NAME, cluster, "", ROUTES, name)
        waits = {"reconnect_min_secs": 0.1, "reconnect_max_secs": 0.3}
        outbox = {"shared": True, "messages_max": 100, "policy": "dead_letter"}
        self.configuration["links"] = {
            "far": {"url": f"mqtt://{LOOPBACK}:{far}", "outbox": outbox, **waits},
            "bridge": {"url": f"mqtt://{LOOPBACK}:{near}", "elected": True, **waits},
            "nowhere": {"url": rabbitmq.url, **waits},
        }

    def until_ready(self) -> None:
        until(lambda: self.asked("/readyz") == (200, "ready\n"))
        for link in ("far", "far (outbox)", "nowhere", "bridge"):
            until(lambda link=link: self.sample("gateway_link_up", endpoint=link))


def test_outboxes_letters_ids_and_elections(
    url: str, rabbitmq: RabbitMQ, mosquitto: Mosquitto, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(mosquitto.port))
        one, other = (
            stack.enter_context(Apart(tmp_path, url, rabbitmq, proxy.port, mosquitto.port, name))
            for name in ("one", "other")
        )
        for door in (one, other):
            door.until_ready()
        until(lambda: one.leads != other.leads)
        far = stack.enter_context(Client(mosquitto.port, "rights-far"))
        far.subscribe("there/#", qos=1)
        near = stack.enter_context(Client(one.port("mqtt"), "rights-near"))
        near.subscribe("here/#", qos=1)
        far.publish("in/x", b"7")  # the elected link brings it, once
        near.until(lambda: near.messages)
        proxy.shut()
        for door in (one, other):
            until(lambda door=door: not door.sample("gateway_link_up", endpoint="far"))
        for at in range(110):
            near.publish("out/x", b"%d" % at)
        until(lambda: one.sample("gateway_dead_letters") == 10)  # for which the outbox had no room
        proxy.open()
        far.until(lambda: len(far.messages) == 100)
        assert numbers(far) == list(range(10, 110))
        for client in (near, stack.enter_context(Client(other.port("mqtt"), "rights-too"))):
            Sender(client, "once/x").send(1_000)
            client.paho.on_publish = None
        far.until(lambda: far.has_more_than(100))
        near.publish("letters/x", b"refused")
        for door in (one, other):
            until(lambda door=door: door.sample("gateway_dead_letters") == 11)
        leader, heir = (one, other) if one.leads else (other, one)
        leader.kill()
        until(lambda: heir.leads)
        assert numbers(far).count(1_000) == 1
        assert "ACCESS_REFUSED" not in one.log + other.log


ATTEMPTS: Final[dict[str, Callable[[BlockingChannel], object]]] = {
    "publish by the default exchange": lambda channel: channel.basic_publish("", "payroll", b"x"),
    "read": lambda channel: channel.basic_get("payroll"),
    "bind": lambda channel: channel.queue_bind("payroll", "amq.topic", "#"),
    "declare": lambda channel: channel.queue_declare("mine"),
}


@pytest.mark.parametrize("how", ATTEMPTS)
def test_the_user_reaches_nothing_else(url: str, rabbitmq: RabbitMQ, how: str) -> None:
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
        channel = connection.channel()
        channel.queue_declare("payroll")
        with pika.BlockingConnection(pika.URLParameters(url)) as limited:
            found = limited.channel()
            found.confirm_delivery()
            with pytest.raises(pika.exceptions.ChannelClosedByBroker) as refused:
                ATTEMPTS[how](found)
            assert refused.value.reply_code == 403
        channel.queue_delete("payroll")
