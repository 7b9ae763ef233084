"""Deduplicating routes of two replicas over a real cluster: an id crosses once, wherever it comes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.chaos.proxy import Proxy
from tests.engine.replicas import PATIENCE_SECS, Client
from tests.engine.test_elections import Door, numbers, until
from tests.interop.servers import LOOPBACK, Mosquitto, RabbitMQ

ROUTES = """
version: 1
routes:
  - name: once
    from: {endpoint: mqtt, topic: "away/NAME/{rest...}"}
    to: {endpoint: far, topic: "there/NAME/{rest...}"}
    deduplicate: {by: message_id, window: 10m}
"""


class Replica(Door):
    """One that publishes to `far`."""

    def __init__(self, folder: Path, name: str, cluster: str, far: str, replica: str) -> None:
        super().__init__(folder, name, cluster, far, ROUTES, replica)
        waits = {"reconnect_min_secs": 0.1, "reconnect_max_secs": 0.3}
        self.configuration["links"] = {"far": {"url": far, **waits}}

    def until_ready(self) -> None:
        until(lambda: self.asked("/readyz") == (200, "ready\n"))
        until(lambda: self.sample("gateway_link_up", endpoint="far"))


class Sender:
    """Publishes numbers by their ids until each is accepted."""

    def __init__(self, client: Client, topic: str) -> None:
        self.client = client
        self.topic = topic
        self.refused = 0
        self._answers: dict[int, int] = {}
        self._changed = threading.Condition()
        client.paho.on_publish = self._answered

    def _answered(self, _: Any, __: Any, mid: int, reason: Any, ___: Any) -> None:
        with self._changed:
            self._answers[mid] = reason.value
            self._changed.notify_all()

    def send(self, number: int) -> None:
        said = Properties(PacketTypes.PUBLISH)
        said.UserProperty = ("amqp-message-id", f"id-{number}")
        while True:
            info = self.client.paho.publish(self.topic, b"%d" % number, qos=1, properties=said)
            with self._changed:
                assert self._changed.wait_for(lambda mid=info.mid: mid in self._answers, PATIENCE_SECS)
            if self._answers.pop(info.mid) < 0x80:
                return
            self.refused += 1


@contextmanager
def pair(
    folder: Path, name: str, rabbitmq: RabbitMQ, mosquitto: Mosquitto
) -> Iterator[tuple[Replica, Replica, Proxy]]:
    """Two replicas that reach the far broker by a proxy."""
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(mosquitto.port))
        far = f"mqtt://{LOOPBACK}:{proxy.port}"
        one, other = (
            stack.enter_context(Replica(folder, name, rabbitmq.url, far, replica))
            for replica in ("one", "other")
        )
        one.until_ready()
        other.until_ready()
        yield one, other, proxy


def test_the_same_ids_at_two_replicas_cross_once(
    rabbitmq: RabbitMQ, mosquitto: Mosquitto, tmp_path: Path
) -> None:
    """In the same moment, and again when one of them has been lost, and at one that begins later."""
    with (
        pair(tmp_path, "once", rabbitmq, mosquitto) as (one, other, _),
        Client(mosquitto.port, "once-far") as far,
        Client(one.port("mqtt"), "once-a") as a,
        Client(other.port("mqtt"), "once-b") as b,
    ):
        far.subscribe("there/once/#", qos=1)
        senders = [Sender(client, "away/once/x") for client in (a, b)]
        together = threading.Barrier(2)

        def work(sender: Sender) -> None:
            for number in range(100):
                together.wait(PATIENCE_SECS)
                sender.send(number)

        threads = [threading.Thread(target=work, args=(sender,)) for sender in senders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: len(far.messages) >= 100)
        one.kill()
        with Replica(tmp_path, "once", rabbitmq.url, f"mqtt://{LOOPBACK}:{mosquitto.port}", "new") as new:
            new.until_ready()
            with Client(new.port("mqtt"), "once-c") as c:
                for sender in (senders[1], Sender(c, "away/once/x")):
                    for number in range(100):
                        sender.send(number)
                senders[1].send(100)  # which comes behind all that could have come
                far.until(lambda: 100 in numbers(far))
        assert Counter(numbers(far)) == dict.fromkeys(range(101), 1)


def test_what_a_killed_replica_had_on_its_way_crosses_elsewhere(
    rabbitmq: RabbitMQ, mosquitto: Mosquitto, tmp_path: Path
) -> None:
    """When it is not heard of any more; until then nobody is told that it was accepted."""
    with (
        pair(tmp_path, "open", rabbitmq, mosquitto) as (one, other, proxy),
        Client(mosquitto.port, "open-far") as far,
        Client(one.port("mqtt"), "open-a") as a,
        Client(other.port("mqtt"), "open-b") as b,
    ):
        far.subscribe("there/open/#", qos=1)
        proxy.stall("up")
        said = Properties(PacketTypes.PUBLISH)
        said.UserProperty = ("amqp-message-id", "id-0")
        a.paho.publish("away/open/x", b"0", qos=1, properties=said)
        until(lambda: one.sample("gateway_link_in_flight", endpoint="far"))
        one.kill()
        proxy.cut()
        proxy.open()
        until(lambda: other.sample("gateway_link_up", endpoint="far"))
        sender = Sender(b, "away/open/x")
        sender.send(0)
        assert sender.refused
        far.until(lambda: far.messages)
        assert numbers(far) == [0]
