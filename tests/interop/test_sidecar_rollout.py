"""The sidecar of the manifest is rolled out under load, and nothing that the plant's broker took is lost.

What Kubernetes does with its StatefulSet is done here: the process ends, and another one begins with the same
name, configuration and volume. A publisher goes on all the time; the application comes late, and is cut off
when the sidecar goes.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self
from urllib.request import Request, urlopen

import paho.mqtt.client as paho
import pika
import pika.exceptions
import pytest
import yaml
from paho.mqtt.enums import CallbackAPIVersion

from tests.conftest import missing
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import ROOT, GatewayProcess
from tests.interop.pahos import leave
from tests.interop.servers import Mosquitto, PeerMissingError, free_ports
from tests.operator import bearer

WAIT_SECS: Final = 60.0
POLL_SECS: Final = 0.05
MANIFEST: Final = ROOT / "deploy" / "kubernetes" / "sidecar.yaml"
SOME: Final = 200  # messages that the broker has acknowledged in each phase, at least


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECS
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(POLL_SECS)


class Plant:
    """Publishes numbers with QoS 1, one after the other, and knows which the broker has acknowledged."""

    def __init__(self, port: int) -> None:
        self.acknowledged: list[int] = []
        self._client = paho.Client(CallbackAPIVersion.VERSION2, client_id="machine")
        self._client.connect(LOOPBACK, port)
        self._client.loop_start()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._publish_all, name="plant")

    def publish(self, topic: str, body: str) -> bool:
        """Whether it is acknowledged."""
        said = self._client.publish(topic, body, qos=1)
        said.wait_for_publish(WAIT_SECS)
        return said.is_published()

    def _publish_all(self) -> None:
        number = 0
        while not self._ending.is_set():
            if self.publish("plant/line1/press", str(number)):
                self.acknowledged.append(number)
            number += 1

    def go_on(self) -> None:
        """Return when it has published some more."""
        wanted = len(self.acknowledged) + SOME
        until(lambda: len(self.acknowledged) >= wanted, "the plant's broker acknowledges")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Publish no more; return when the last one is acknowledged."""
        self._ending.set()
        self._thread.join(WAIT_SECS)

    def __exit__(self, *_: object) -> None:
        self.stop()
        leave(self._client)


class Application:
    """Consumes its queue, and connects again whenever the sidecar has gone."""

    def __init__(self, port: int) -> None:
        self.received: set[int] = set()
        self._port = port
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="application")

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self._consume()
            except (pika.exceptions.AMQPError, OSError):
                self._ending.wait(POLL_SECS)

    def _consume(self) -> None:
        with pika.BlockingConnection(pika.ConnectionParameters(LOOPBACK, self._port)) as connection:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=50)
            channel.queue_declare("orders", durable=True)
            channel.queue_bind("orders", "amq.topic", "plant.#")
            for method, _, body in channel.consume("orders", inactivity_timeout=POLL_SECS):
                if method is not None:
                    if body.isdigit():
                        self.received.add(int(body))
                    channel.basic_ack(method.delivery_tag)
                if self._ending.is_set():
                    return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(WAIT_SECS)


def sidecar(folder: Path, broker: Mosquitto) -> GatewayProcess:
    """The gateway as the manifest configures it, with ports and folders of this machine."""
    (held,) = (one for one in yaml.safe_load_all(MANIFEST.read_text()) if one["kind"] == "ConfigMap")
    folder.mkdir()
    (folder / "plant.yaml").write_text(held["data"]["plant.yaml"])
    given: dict[str, Any] = yaml.safe_load(held["data"]["gateway.yaml"])
    given["replica"] = "orders-0"
    given["listeners"]["amqp091"]["port"] = free_ports(1)[0]
    given["links"]["plant"] |= {"url": broker.url, "reconnect_min_secs": 0.1, "reconnect_max_secs": 0.5}
    given["mappings"] = [str(folder / "plant.yaml")]
    given["http"] = {"host": LOOPBACK, "port": 0}
    given["log"] = {**given.get("log", {}), "format": "auto"}  # with the banner, which names the ports
    return GatewayProcess(folder, **given)


def asked(gateway: GatewayProcess, path: str) -> Any:
    port = gateway.port("http")
    asks = Request(f"http://{LOOPBACK}:{port}{path}", headers=bearer(port))
    with urlopen(asks, timeout=WAIT_SECS) as answer:
        return json.load(answer)


@pytest.mark.parametrize("end", ["terminate", "kill"])
def test_a_rolled_out_sidecar_loses_nothing(tmp_path: Path, end: str) -> None:
    try:
        broker = Mosquitto(tmp_path / "broker", ("max_queued_messages 0",))
    except PeerMissingError as error:
        missing(str(error))
    with broker, sidecar(tmp_path / "sidecar", broker) as gateway:
        plant = Plant(broker.port)

        def subscribed() -> bool:
            assert plant.publish("plant/warm", "warm")
            (queue,) = asked(gateway, "/api/v1/queues")["items"]
            return bool(queue["messages"])

        until(subscribed, "the link has subscribed, and the queue is there")

        def roll() -> None:
            code = getattr(gateway, end)()
            assert code in (0, None)
            plant.go_on()
            gateway.start()
            plant.go_on()

        with plant:
            plant.go_on()
            roll()
            with Application(gateway.port("amqp091")) as application:
                until(lambda: len(application.received) > SOME, "the application receives")
                roll()
                roll()
                plant.stop()
                acknowledged = set(plant.acknowledged)
                until(lambda: acknowledged <= application.received, "all of it has arrived")
        assert asked(gateway, "/api/v1/dead-letters")["items"] == []
        assert "reject" not in gateway.log
