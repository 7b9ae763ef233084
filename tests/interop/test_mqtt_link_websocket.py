"""A link and the command line over WebSocket, plain and within TLS, to a real Mosquitto."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_commands import call
from tests.configured import make_link, make_listener
from tests.interop.gateway_fixture import LOOPBACK, running, settings_of
from tests.interop.servers import Mosquitto, free_ports
from tests.interop.test_mqtt_link import (
    Subscriber,
    channel,
    conversation,
    fetch,
    linked,
    mqtt,
    publish,
    queue_of,
)
from tests.interop.test_tls import make_certificate


class Site:
    """A Mosquitto with MQTT, WebSocket and WebSocket within TLS."""

    def __init__(self, folder: Path) -> None:
        make_certificate(folder, "localhost")
        self.authority = folder / "cert.pem"
        plain, secure = free_ports(2)
        self.urls = {"ws": f"ws://{LOOPBACK}:{plain}", "wss": f"wss://{LOOPBACK}:{secure}/mqtt"}
        self.broker = Mosquitto(
            folder / "mosquitto",
            (
                *(f"listener {plain} {LOOPBACK}", "protocol websockets"),
                *(f"listener {secure} {LOOPBACK}", "protocol websockets"),
                *(f"certfile {self.authority}", f"keyfile {folder / 'key.pem'}"),
            ),
        )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, mosquitto: Mosquitto) -> Iterator[Site]:
    """`mosquitto` only says whether there is one on this machine."""
    one = Site(tmp_path_factory.mktemp("websocket"))
    one.broker.start()
    yield one
    one.broker.stop()


@pytest.mark.parametrize("scheme", ["ws", "wss"])
def test_messages_cross_both_ways_over_websocket(site: Site, tmp_path: Path, scheme: str) -> None:
    port, large = site.broker.port, b"x" * 300_000
    options = {"url": site.urls[scheme], "tls": {"ca_file": site.authority}}
    with linked(port, tmp_path, **options) as gateway, channel(gateway) as amqp:
        with Subscriber(port, "down/#") as subscriber:
            amqp.basic_publish("amq.topic", "down.small", b"\x00\xff", mqtt(k="v"))
            amqp.basic_publish("amq.topic", "down.large", large)
            first, second = subscriber.next(), subscriber.next()
            assert (first.topic, first.payload) == ("down/small", b"\x00\xff")
            assert (second.topic, second.payload) == ("down/large", large)
        queue = queue_of(amqp, "up.#")
        publish(port, "up/small", b"\xff\x00", 2)
        publish(port, "up/large", large, 1)
        assert [body for _, _, body in fetch(amqp, queue, 2)] == [b"\xff\x00", large]
        gateway.until(lambda: conversation(gateway).idle)


def test_a_link_comes_back_over_websocket(site: Site, tmp_path: Path) -> None:
    port = site.broker.port
    with linked(port, tmp_path, url=site.urls["ws"]) as gateway, channel(gateway) as amqp:
        stats = conversation(gateway).stats
        site.broker.stop(kill=True)
        gateway.until(lambda: not stats.up)
        site.broker.start()
        gateway.until(lambda: stats.up)
        with Subscriber(port, "down/#") as subscriber:
            amqp.basic_publish("amq.topic", "down.again", b"here")
            assert subscriber.next().payload == b"here"


def test_a_path_without_websocket_is_named_and_counted() -> None:
    web = make_listener(protocol="mqtt", host=LOOPBACK, port=0, websocket_path="/here")
    with running(settings_of(listeners={"web": web})) as other:
        link = make_link(url=f"ws://{LOOPBACK}:{other.gateway.listeners['web'].port}", reconnect_min_secs=0.1)
        with running(settings_of(links={"plant": link})) as gateway:
            plant = gateway.gateway.links["plant"]
            gateway.until(lambda: "websocket_upgrade" in plant.stats.protocol_errors.counts)
            assert (
                plant.down_reason == "WebSocket: the server responded with status 404 instead of an upgrade"
            )


@pytest.mark.parametrize("scheme", ["ws", "wss"])
def test_the_command_line_publishes_and_subscribes_over_websocket(site: Site, scheme: str) -> None:
    with Subscriber(site.broker.port, "cli/#") as subscriber:
        trust = ("--ca-file", str(site.authority)) if scheme == "wss" else ()
        call("publish", site.urls[scheme], "--topic", "cli/one", "-m", "hello", "--qos", "1", *trust)
        assert subscriber.next().payload == b"hello"


def test_the_command_line_says_that_a_port_speaks_no_websocket() -> None:
    with running() as other:
        place = f"{LOOPBACK}:{other.mqtt}"
        said = call("publish", f"ws://{place}/mqtt", "--topic", "a", "-m", "b", expect=1)
        assert said == f"{place}: the server closed the connection; check that the server supports MQTT\n"
