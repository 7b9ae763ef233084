"""`settle: stored`: what was accepted while the broker was away arrives, in order, whoever was killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import httpx
import paho.mqtt.client as paho
import pika
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from pika.adapters.blocking_connection import BlockingChannel

from tests.chaos.proxy import Proxy
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import GatewayProcess
from tests.interop.pahos import leave
from tests.interop.servers import Mosquitto, RabbitMQ, free_ports
from tests.operator import bearer

PATIENCE_SECS: Final = 60.0
PERSISTENT: Final = pika.BasicProperties(delivery_mode=2, message_id="kept", headers={"n": 1})
ROUTE: Final = """
version: 1
routes:
  - name: {name}
    from: {{endpoint: amqp091, exchange: amq.topic, binding_key: "out.{{queue_name...}}"}}
    to: {{endpoint: erp, queue: "{{queue_name}}"}}
    settle: {settle}{more}
"""


def route(name: str = "out", settle: str = "stored", more: str = "") -> str:
    return ROUTE.format(name=name, settle=settle, more=more)


def gateway_to(rabbitmq: RabbitMQ, folder: Path, mapping: str | None = None, **link: Any) -> GatewayProcess:
    """A gateway with HTTP and the link `erp`; its mapping stands in `folder`/mapping.yaml."""
    folder.mkdir(exist_ok=True)
    (folder / "mapping.yaml").write_text(route() if mapping is None else mapping)
    (http,) = free_ports(1)
    return GatewayProcess(
        folder,
        links={"erp": {"url": rabbitmq.url, "reconnect_min_secs": 0.1, "reconnect_max_secs": 0.5} | link},
        mappings=[str(folder / "mapping.yaml")],
        http={"host": LOOPBACK, "port": http},
        drain_timeout_secs=1,
    )


def nowhere() -> str:
    """The URL of a broker that is not there."""
    return f"amqp://{LOOPBACK}:{free_ports(1)[0]}"


@contextmanager
def channel(url: str) -> Iterator[BlockingChannel]:
    connection = pika.BlockingConnection(pika.URLParameters(url))
    try:
        opened = connection.channel()
        opened.confirm_delivery()
        yield opened
    finally:
        with suppress(pika.exceptions.AMQPError):  # the broker may have been killed meanwhile
            connection.close()


def url_of(gateway: GatewayProcess) -> str:
    return f"amqp://guest:guest@{LOOPBACK}:{gateway.ports['amqp091']}/%2F"


def publish(
    gateway: GatewayProcess, queue: str, *numbers: int, properties: pika.BasicProperties = PERSISTENT
) -> None:
    """Publish each, and return when each was confirmed."""
    with channel(url_of(gateway)) as opened:
        for number in numbers:
            opened.basic_publish("amq.topic", f"out.{queue}", str(number).encode(), properties)


def fetch(rabbitmq: RabbitMQ, queue: str, count: int) -> list[int]:
    """`count` messages of a queue of the remote broker."""
    found: list[int] = []
    with channel(rabbitmq.url) as opened:
        deadline = time.monotonic() + PATIENCE_SECS
        while len(found) < count:
            assert time.monotonic() < deadline, f"only {len(found)} of {count} came"
            method, _, body = opened.basic_get(queue, auto_ack=True)
            if method is None:
                time.sleep(0.02)
            else:
                found.append(int(body))
        assert opened.basic_get(queue)[0] is None
    return found


@contextmanager
def subscriber(mosquitto: Mosquitto, topic: str) -> Iterator[list[int]]:
    """What a client of the remote MQTT broker hears, as numbers."""
    heard: list[int] = []
    subscribed = threading.Event()
    client = paho.Client(CallbackAPIVersion.VERSION2)
    client.on_message = lambda client, data, message: heard.append(int(message.payload))
    client.on_subscribe = lambda *told: subscribed.set()
    client.connect(LOOPBACK, mosquitto.port)
    client.subscribe(topic, 1)
    client.loop_start()
    try:
        assert subscribed.wait(PATIENCE_SECS)
        yield heard
    finally:
        leave(client)


def declare(rabbitmq: RabbitMQ, queue: str, **arguments: Any) -> None:
    with channel(rabbitmq.url) as opened:
        opened.queue_delete(queue)
        opened.queue_declare(queue, durable=True, arguments=arguments)


def status(gateway: GatewayProcess) -> dict[str, Any]:
    document: dict[str, Any] = httpx.get(
        f"http://{LOOPBACK}:{gateway.ports['http']}/api/v1/status",
        trust_env=False,
        headers=bearer(gateway.ports["http"]),
    ).json()
    return document


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECS
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


@pytest.fixture
def gateway(rabbitmq: RabbitMQ, tmp_path: Path) -> Iterator[GatewayProcess]:
    with gateway_to(rabbitmq, tmp_path) as started:
        yield started


def once(numbers: list[int]) -> list[int]:
    """Without repeats: what was on its way when somebody was killed comes again."""
    return list(dict.fromkeys(numbers))


def test_accepted_while_the_broker_is_away_and_both_are_killed(
    gateway: GatewayProcess, rabbitmq: RabbitMQ
) -> None:
    declare(rabbitmq, "outbox.a")
    rabbitmq.save()
    publish(gateway, "outbox.a", *range(20))
    rabbitmq.stop(kill=True)
    try:
        publish(gateway, "outbox.a", *range(20, 220))
        gateway.restart()
        publish(gateway, "outbox.a", *range(220, 250))
        (outbox,) = status(gateway)["outboxes"]
        assert (outbox["link"], outbox["route"], outbox["problem"]) == ("erp", "out", "the link is down")
        assert outbox["messages"] >= 230
        gateway.kill()
    finally:
        rabbitmq.start()
    gateway.start()
    publish(gateway, "outbox.a", *range(250, 260))
    until(lambda: not status(gateway)["outboxes"][0]["messages"])
    with channel(rabbitmq.url) as opened:
        count = opened.queue_declare("outbox.a", passive=True).method.message_count
        _, properties, body = opened.basic_get("outbox.a", auto_ack=True)
    assert body == b"0"
    assert (properties.message_id, properties.delivery_mode) == ("kept", 2)
    assert properties.headers["n"] == 1
    assert once([0, *fetch(rabbitmq, "outbox.a", count - 1)]) == list(range(260))


def test_a_message_keeps_the_id_that_it_was_given(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    """Ids begin with chance of each life of the process: three are of the first life, though the second sent
    them."""
    plain = pika.BasicProperties(delivery_mode=2)
    with gateway_to(rabbitmq, tmp_path, route(more="\n    message_id: add"), url=nowhere()) as gateway:
        declare(rabbitmq, "outbox.ids")
        publish(gateway, "outbox.ids", *range(3), properties=plain)
        gateway.configuration["links"]["erp"]["url"] = rabbitmq.url
        gateway.restart()
        publish(gateway, "outbox.ids", 3, properties=plain)
        publish(gateway, "outbox.ids", 4)
        until(lambda: not status(gateway)["outboxes"][0]["messages"])
    with channel(rabbitmq.url) as opened:
        found = [opened.basic_get("outbox.ids", auto_ack=True)[1].message_id for _ in range(5)]
    lives = [id.partition("-")[0] for id in found]
    assert len(set(found)) == 5
    assert (len(set(lives[:3])), lives[4]) == (1, "kept")
    assert lives[3] not in lives[:3]


def test_a_full_outbox_nacks_what_is_new(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    with gateway_to(rabbitmq, tmp_path, url=nowhere(), outbox={"messages_max": 5}) as gateway:
        publish(gateway, "outbox.c", *range(5))
        with pytest.raises(pika.exceptions.NackError):
            publish(gateway, "outbox.c", 5)
        gateway.restart()
        with pytest.raises(pika.exceptions.NackError):
            publish(gateway, "outbox.c", 5)


def test_a_poison_message_blocks_nobody_and_can_be_driven_again(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    declare(rabbitmq, "outbox.d")
    with channel(rabbitmq.url) as opened:
        opened.queue_delete("outbox.later")
    mapping = route(more="\n    attempts_max: 2")
    with gateway_to(rabbitmq, tmp_path, mapping) as gateway:
        publish(gateway, "outbox.later", 13)
        publish(gateway, "outbox.d", 1, 2, 3)
        assert fetch(rabbitmq, "outbox.d", 3) == [1, 2, 3]
        api = f"http://{LOOPBACK}:{gateway.ports['http']}/api/v1/dead-letters"
        asks = httpx.Client(trust_env=False, headers=bearer(gateway.ports["http"]))
        until(lambda: asks.get(api).json()["items"])
        (letter,) = asks.get(api).json()["items"]
        asks.close()
        assert (letter["route"], letter["reason"], letter["body"]) == ("out", "no_route", "13")
        gateway.restart()
        declare(rabbitmq, "outbox.later")
        headers = bearer(gateway.ports["http"])
        answer = httpx.post(f"{api}/redrive", json={"all": True}, trust_env=False, headers=headers).json()
        assert answer["redriven"] == 1
        assert fetch(rabbitmq, "outbox.later", 1) == [13]
        assert httpx.get(api, trust_env=False, headers=headers).json()["items"] == []


def test_an_outbox_without_its_route_waits_for_it(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    declare(rabbitmq, "outbox.e")
    with gateway_to(rabbitmq, tmp_path, url=nowhere()) as gateway:
        publish(gateway, "outbox.e", 1, 2)
        (tmp_path / "mapping.yaml").write_text(route(name="other"))
        gateway.configuration["links"]["erp"]["url"] = rabbitmq.url
        gateway.restart()
        until(lambda: status(gateway)["endpoints"][-1]["up"])
        found = {one["route"]: one for one in status(gateway)["outboxes"]}
        assert (found["out"]["messages"], found["out"]["problem"]) == (2, "route 'out' is in no mapping")
        assert "outbox lost its route" in gateway.log
        (tmp_path / "mapping.yaml").write_text(route())
        assert fetch(rabbitmq, "outbox.e", 2) == [1, 2]


def link_is(gateway: GatewayProcess, *, up: bool) -> bool:
    return bool(status(gateway)["endpoints"][-1]["up"] is up)


@pytest.mark.parametrize("protocol", ["amqp", "mqtt"])
def test_what_is_stored_holds_up_no_end(
    rabbitmq: RabbitMQ, mosquitto: Mosquitto, tmp_path: Path, protocol: str
) -> None:
    """The broker vanishes with messages on their way: they stay in the outbox, so nothing is waited for."""
    declare(rabbitmq, "outbox.f")
    broker = {"amqp": rabbitmq, "mqtt": mosquitto}[protocol]
    target = {"amqp": route(), "mqtt": route().replace('queue: "{queue_name}"', 'topic: "{queue_name...}"')}
    with Proxy(broker.port) as proxy:
        url = broker.url.replace(f":{broker.port}", f":{proxy.port}")
        with gateway_to(rabbitmq, tmp_path, target[protocol], url=url) as gateway:
            gateway.configuration["drain_timeout_secs"] = 10 * PATIENCE_SECS
            gateway.restart()
            until(lambda: link_is(gateway, up=True))
            proxy.stall()
            publish(gateway, "outbox.f", *range(10))
            until(lambda: status(gateway)["outboxes"][0]["in_flight"] == 10)
            proxy.close()
            until(lambda: link_is(gateway, up=False))
            assert gateway.terminate() == 0
            assert "drain_timeout_secs" not in gateway.log
            gateway.configuration["links"]["erp"]["url"] = broker.url
            gateway.start()
            until(lambda: not status(gateway)["outboxes"][0]["messages"])


def test_a_message_waits_for_an_mqtt_broker(mosquitto: Mosquitto, rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    mapping = route().replace('queue: "{queue_name}"', 'topic: "{queue_name...}"')
    with gateway_to(rabbitmq, tmp_path, mapping, url=nowhere().replace("amqp", "mqtt")) as gateway:
        publish(gateway, "from.outbox", *range(100))
        gateway.configuration["links"]["erp"]["url"] = mosquitto.url
        with subscriber(mosquitto, "from/outbox") as heard:
            gateway.restart()
            until(lambda: len(heard) >= 100)
        assert heard == list(range(100))
        until(lambda: not status(gateway)["outboxes"][0]["messages"])
