"""Routes and links paused over HTTP: nothing crosses until they go on, and a restart does not change that."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import paho.mqtt.client as mqtt
import pika
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from gateway.settings import Http, Settings, StoreSettings
from tests.configured import make_link
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.operator import bearer

V1: Final = "/api/v1"
MAPPING: Final = """version: 1
routes:
  - {name: near, from: {endpoint: mqtt, topic: "near/#"}, to: {endpoint: amqp091, queue: near}}
  - {name: far, from: {endpoint: mqtt, topic: "far/#"}, to: {endpoint: erp, queue: far}}
"""


NEAR: Final = """version: 1
routes:
  - {name: near, from: {endpoint: mqtt, topic: "near/#"}, to: {endpoint: amqp091, queue: near}}
  - {name: also, from: {endpoint: mqtt, topic: "near/#"}, to: {endpoint: amqp091, queue: near}}
"""


@pytest.fixture(scope="module")
def broker() -> Iterator[Running]:
    """The remote one, with a queue."""
    with running() as started:
        connection = pika.BlockingConnection(pika.URLParameters(started.idle_amqp_url))
        connection.channel().queue_declare("far")
        yield started
        connection.close()


@pytest.fixture(scope="module")
def settings(broker: Running, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("pausing")
    (folder / "mapping.yaml").write_text(MAPPING)
    return settings_of(
        http=Http(host=LOOPBACK, port=0),
        store=StoreSettings(path=folder / "data"),
        mappings=(str(folder / "mapping.yaml"),),
        links={"erp": make_link(url=broker.amqp_url, reconnect_min_secs=0.05)},
    )


class Scene:
    """A gateway, whoever asks it over HTTP, and who publishes."""

    def __init__(self, gateway: Running) -> None:
        self.gateway = gateway
        port = gateway.gateway.http_port
        self.http = httpx.Client(
            base_url=f"http://{LOOPBACK}:{port}{V1}", trust_env=False, headers=bearer(port)
        )
        self.client = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
        self.client.connect(LOOPBACK, gateway.mqtt)
        self.client.loop_start()

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()
        self.http.close()

    def act(self, what: str, name: str) -> httpx.Response:
        return self.http.post(f"/{what}", json={"name": name})

    def row(self, kind: str, name: str) -> dict[str, object]:
        rows = self.http.get(f"/{kind}").json()["items"]
        return next(row for row in rows if row["name"] == name)

    def metrics(self) -> str:
        return self.http.get(f"http://{LOOPBACK}:{self.gateway.gateway.http_port}/metrics").text

    def link_is(self, up: bool) -> None:
        self.gateway.until(lambda: self.gateway.gateway.links["erp"].is_up is up)


def depth(running: Running, queue: str) -> int:
    return running.ask(lambda: len(running.gateway.host.queues[queue]))


def test_what_went_wrong_last_is_told_when_it_is_well_again(settings: Settings, broker: Running) -> None:
    with running(settings, but="link disconnected") as gateway:
        scene = Scene(gateway)
        scene.link_is(True)
        link = scene.row("endpoints", "erp")
        assert (link["last_error"], link["last_error_at"]) == ("", None)
        connects = gateway.ask(lambda: gateway.gateway.links["erp"].stats.connects)

        def cut() -> None:
            links = [one for one in broker.gateway.listeners["amqp091"].connections if one.sender.client]
            assert links, "programs of the test say no name"
            for one in links:
                one.stream.abort("cut by the test")

        broker.ask(cut)
        gateway.until(lambda: gateway.gateway.links["erp"].stats.connects > connects)
        scene.link_is(True)
        link = scene.row("endpoints", "erp")
        assert (link["up"], link["why"]) == (True, "")
        assert "closed" in str(link["last_error"]), link
        assert str(link["last_error_at"]) >= "2020"
        with socket.create_connection((LOOPBACK, gateway.mqtt)) as stranger:
            stranger.sendall(b"\x00\x00")
            assert stranger.recv(1) == b""
        listener = scene.row("endpoints", "mqtt")
        assert listener["last_error"] in listener["errors"], listener
        assert listener["last_error_at"] is not None
        scene.close()


def test_pauses_of_routes_and_links(settings: Settings, broker: Running) -> None:
    with running(settings) as gateway:
        scene = Scene(gateway)
        with pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as connection:
            connection.channel().queue_declare("near", durable=True)
        scene.link_is(True)
        assert scene.act("routes/pause", "near").json() == {"name": "near", "paused": True}
        assert scene.act("links/pause", "erp").json() == {"name": "erp", "paused": True}
        scene.link_is(False)
        near, far = scene.client.publish("near/t", b"1", 1), scene.client.publish("far/t", b"1", 1)
        gateway.until(lambda: gateway.gateway.core.pauses.waiting_by_route() == {"near": 1})
        row = scene.row("routes", "near")
        assert (row["paused"], row["held"], row["delivered"]) == (True, 1, 0)
        link = scene.row("endpoints", "erp")
        assert (link["paused"], link["up"], link["why"]) == (True, False, "an operator has paused the link")
        told = scene.metrics()
        assert 'gateway_route_paused{route="near"} 1.0' in told
        assert 'gateway_route_held{route="near"} 1.0' in told
        assert 'gateway_link_paused{endpoint="erp"} 1.0' in told
        assert not near.is_published()
        assert scene.act("routes/resume", "near").json() == {"name": "near", "paused": False}
        near.wait_for_publish(10)
        assert depth(gateway, "near") == 1
        assert not far.is_published()
        assert scene.act("links/resume", "erp").json() == {"name": "erp", "paused": False}
        far.wait_for_publish(10)
        assert depth(broker, "far") == 1
        row = scene.row("routes", "far")
        assert (row["delivered"], row["in_flight"]) == (1, 0)
        assert row["p99_secs"] is not None
        assert "gateway_route_paused{" not in scene.metrics()
        for what, name in (("routes/pause", "none"), ("links/pause", "mqtt")):
            assert scene.act(what, name).status_code == 404
        scene.act("routes/pause", "near")
        scene.act("links/pause", "erp")
        scene.close()
    with running(settings) as gateway:
        scene = Scene(gateway)
        assert scene.row("routes", "near")["paused"] is True
        assert scene.row("endpoints", "erp")["paused"] is True
        peeked = scene.http.post("/queues/peek", json={"protocol": "amqp091", "queue": "near"}).json()
        assert [one["body"] for one in peeked["shown"]] == ["1"], "it is on disk alone"
        waiting = scene.client.publish("near/t", b"2", 1)
        scene.act("routes/resume", "near")
        scene.act("links/resume", "erp")
        waiting.wait_for_publish(10)
        scene.link_is(True)
        assert depth(gateway, "near") == 2
        scene.close()


def test_a_gateway_that_stops_waits_for_no_route_that_is_paused(settings: Settings, tmp_path: Path) -> None:
    """Its senders have what it holds: they were told nothing, and say it again."""
    file = tmp_path / "near.yaml"
    file.write_text(NEAR)
    other = {"store": StoreSettings(path=tmp_path), "links": {}, "mappings": (str(file),)}
    more = settings.model_copy(update={"drain_timeout_secs": 60.0, **other})
    with running(more) as gateway:
        scene = Scene(gateway)
        with pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as connection:
            connection.channel().queue_declare("near", durable=True)
        scene.act("routes/pause", "near")
        scene.act("routes/pause", "also")
        client = scene.client
        client.publish("near/t", b"0", 0)
        waiting = [client.publish("near/t", b"%d" % number, 1) for number in range(3)]
        gateway.until(lambda: gateway.gateway.core.pauses.waiting_by_route() == {"also": 4, "near": 4})
        assert gateway.ask(gateway.gateway.core.pauses.waiting_by_sender).total() == 4
        began = time.monotonic()
        gateway.stop()
        assert time.monotonic() - began < 30, "it has not waited for drain_timeout_secs"
        assert not any(one.is_published() for one in waiting)
        scene.close()
