"""Two gateways joined by an AMQP/Fast link: what crosses, in which shape, and what a restart costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import paho.mqtt.client as paho
import pytest
import trio
from paho.mqtt.enums import CallbackAPIVersion

from gateway.egress.amqpfast.client import connect
from gateway.protocols.amqpfast.codec import decode_head_properties
from gateway.protocols.amqpfast.events import Fragment
from gateway.settings import ListenerTls, StoreSettings
from gateway.settings.endpoints import LinkTls
from tests.configured import make_link, make_listener
from tests.ingress.amqpfast.client import TOPIC, Fast, head
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.interop.gateway_process import GatewayProcess
from tests.interop.pahos import leave
from tests.interop.test_tls import make_certificate

PATIENCE_SECS: Final = 30.0
LATER: Final = 4_000_000_000
MAPPING: Final = """
version: 1
routes:
  - name: up
    from: {endpoint: amqpfast, service: topic, destination: "up.{rest...}"}
    to: {endpoint: far, service: queue, destination: "{rest}"}
  - name: devices
    from: {endpoint: mqtt, topic: "out/{rest...}"}
    to: {endpoint: far, service: topic, destination: "plant.{rest}"}
  - name: commands
    from: {endpoint: far, service: queue, destination: commands}
    to: {endpoint: amqpfast, service: queue, destination: "local.commands"}
  - name: plant
    from: {endpoint: far, service: topic, destination: "plant.{rest...}"}
    to: {endpoint: mqtt, topic: "plant/{rest...}"}
"""


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """The remote gateway."""
    with GatewayProcess(tmp_path_factory.mktemp("far")) as started:
        yield started


@contextmanager
def gateway_to(
    far: GatewayProcess, folder: Path, user: str = "guest:guest", *, mapping: str = MAPPING, **link: Any
) -> Iterator[Running]:
    """A gateway with the link `far`; it need not be up yet."""
    (folder / "mapping.yaml").write_text(mapping)
    given = {"reconnect_min_secs": 0.1, "reconnect_max_secs": 0.3, "client_id": "near"} | link
    url = f"amqpfast://{user}@{LOOPBACK}:{far.port('amqpfast')}/"
    settings = settings_of(
        links={"far": make_link(url=url, **given)},
        mappings=[str(folder / "mapping.yaml")],
        store=StoreSettings(path=folder / "data"),
        drain_timeout_secs=5.0,
    )
    with running(settings) as near:
        yield near


def up(near: Running) -> None:
    near.until(lambda: near.gateway.links["far"].is_up, PATIENCE_SECS)


@pytest.fixture
def near(far: GatewayProcess, tmp_path: Path) -> Iterator[Running]:
    with gateway_to(far, tmp_path) as started:
        up(started)
        yield started


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECS
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


class Device:
    """An MQTT client that notes what it hears and what was acknowledged."""

    def __init__(self, near: Running, lasting: str = "") -> None:
        """`lasting`: the client identifier of a session that stays."""
        self.heard: list[tuple[str, int, bytes]] = []
        self.acked: list[int] = []
        self.subscribed = False
        self._client = paho.Client(CallbackAPIVersion.VERSION2, lasting, clean_session=not lasting)
        self._client.on_message = self._on_message
        self._client.on_publish = lambda client, data, mid, *_: self.acked.append(mid)
        self._client.on_subscribe = self._on_subscribe
        self._client.connect(LOOPBACK, near.mqtt)
        self._client.loop_start()

    def _on_message(self, client: object, data: object, message: paho.MQTTMessage) -> None:
        self.heard.append((message.topic, message.qos, bytes(message.payload)))

    def _on_subscribe(self, *_: object) -> None:
        self.subscribed = True

    def __enter__(self) -> Device:
        self._client.subscribe("#", 1)
        until(lambda: self.subscribed)
        return self

    def __exit__(self, *_: object) -> None:
        leave(self._client)

    def publish(self, topic: str, body: bytes, qos: int = 1) -> None:
        """Return when it was acknowledged."""
        mid = self._client.publish(topic, body, qos).mid
        until(lambda: mid in self.acked)


def test_a_message_crosses_with_all_that_it_says(near: Running, far: GatewayProcess) -> None:
    said = head(
        persistent=True,
        priority=7,
        expiration=LATER,
        mime_type="text/plain",
        identifier="id-1",
        headers={"unit": "C", "n": -3},
    )
    with Fast(near).open() as local, Fast(far).open() as remote:
        local.put(local.handle("up.crossing", TOPIC), b"body", head=said)
        remote.consume(remote.handle("crossing"))
        (row,) = remote.rows(1)
        there = decode_head_properties(row[3])
        here = decode_head_properties(said)
        assert row[4] == b"body"
        assert (there.persistent, there.priority, there.expiration) == (True, 7, LATER)
        assert (there.mime_type, there.identifier) == ("text/plain", "id-1")
        assert set(here.headers) < set(there.headers)
        assert dict(there.headers)["HOPS"].value == 1


def test_a_message_comes_in_with_all_that_it_says(near: Running, far: GatewayProcess) -> None:
    said = head(persistent=True, priority=3, expiration=LATER, identifier="id-2", headers={"a": "b"})
    with Fast(near).open() as local, Fast(far).open() as remote:
        remote.put(remote.handle("commands"), b"do", head=said)
        local.consume(local.handle("local.commands"))
        (row,) = local.rows(1)
        found = decode_head_properties(row[3])
        assert (row[4], found.persistent, found.priority, found.expiration, found.identifier) == (
            b"do",
            True,
            3,
            LATER,
            "id-2",
        )
        assert dict(found.headers)["a"].value == "b"
        assert remote.index(remote.handle("commands")) == ([], 0)


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_qos_and_persistence_say_the_same(near: Running, far: GatewayProcess, qos: int) -> None:
    with Device(near) as device, Fast(far).open() as remote:
        remote.consume(remote.handle("plant.", TOPIC))
        device.publish("out/qos", b"x", qos)
        (row,) = remote.rows(1)
        assert (row[4], row[5]) == (b"x", b"plant.qos")
        assert decode_head_properties(row[3]).persistent is (qos > 0)
        assert device.heard == [("out/qos", min(qos, 1), b"x")]  # what we sent there does not come back


@pytest.mark.parametrize("persistent", [False, True])
def test_persistence_and_qos_say_the_same(near: Running, far: GatewayProcess, persistent: bool) -> None:
    with Device(near) as device, Fast(far).open() as remote:
        remote.put(remote.handle("plant.l1.t", TOPIC), b"21", head=head(persistent=persistent))
        until(lambda: device.heard)
        assert device.heard == [("plant/l1/t", int(persistent), b"21")]


def test_a_large_body_crosses_in_both_directions(near: Running, far: GatewayProcess) -> None:
    body = bytes(range(256)) * 20_000  # 5 MB: alone, restartable
    with Fast(near).open() as local, Fast(far).open() as remote:
        handle = local.handle("up.large", TOPIC)
        local.put(handle, b"before", body, b"after")
        remote.put(remote.handle("commands"), body)
        local.consume(local.handle("local.commands"))
        assert joined(local) == body
        consumer = remote.handle("large")
        remote.consume(consumer, prefetch=1)
        assert remote.bodies(1) == [b"before"]
        remote.ack(1)
        assert joined(remote) == body
        remote.ack(2)
        assert remote.bodies(1) == [b"after"]


def joined(client: Fast) -> bytes:
    """The next message, which comes in fragments."""
    parts = []
    while True:
        fragment = client.next(Fragment)
        parts.append(fragment.data)
        if fragment.last:
            return b"".join(parts)


def test_what_happens_while_the_remote_is_away_is_caught_up(
    near: Running, far: GatewayProcess, tmp_path: Path
) -> None:
    with Fast(near).open() as local:
        handle = local.handle("up.away", TOPIC)
        local.put(handle, b"0", head=head(persistent=True))
        far.kill()
        near.until(lambda: not near.gateway.links["far"].is_up, PATIENCE_SECS)
        tags = local.put(handle, b"1", b"2", head=head(persistent=True), confirm=False)
        assert tags == [0, 0]
        far.start()
        up(near)
        local.put(handle, b"3", head=head(persistent=True))
    with Fast(far).open() as remote:
        remote.consume(remote.handle("away"))
        assert remote.bodies(4) == [b"0", b"1", b"2", b"3"]


def test_a_durable_subscription_misses_nothing_while_the_link_is_away(
    far: GatewayProcess, tmp_path: Path
) -> None:
    # The device's session waits for what the link brings before the device is there again.
    with gateway_to(far, tmp_path, client_id="sleeper") as first, Device(first, "device"):
        up(first)
    with Fast(far).open() as remote:
        remote.put(remote.handle("plant.asleep", TOPIC), b"1", b"2", head=head(persistent=True))
    with ExitStack() as stack:
        second = stack.enter_context(gateway_to(far, tmp_path, client_id="sleeper"))
        up(second)
        device = stack.enter_context(Device(second, "device"))
        until(lambda: len(device.heard) == 2)
        assert [body for _, _, body in device.heard] == [b"1", b"2"]


def test_over_tls_both_ways(tmp_path: Path) -> None:
    make_certificate(tmp_path, "far")
    tls = ListenerTls(cert_file=tmp_path / "cert.pem", key_file=tmp_path / "key.pem")
    listeners = {"secure": make_listener(protocol="amqpfast", host=LOOPBACK, port=0, tls=tls)}
    with running(settings_of(listeners=listeners)) as remote:
        url = f"amqpfasts://guest:guest@{LOOPBACK}:{remote.port('secure')}/"
        (tmp_path / "mapping.yaml").write_text(MAPPING)
        link = make_link(url=url, tls=LinkTls(ca_file=tmp_path / "cert.pem"))
        near_settings = settings_of(links={"far": link}, mappings=[str(tmp_path / "mapping.yaml")])
        with running(near_settings) as near, Fast(near).open() as local:
            up(near)
            local.put(local.handle("up.q", TOPIC), b"hidden")

        async def receive() -> bytes:
            async with connect(url, ca_file=str(tmp_path / "cert.pem")) as client:
                consumer = await (await client.channel()).consume("queue", "q")
                return (await anext(consumer)).message.body

        assert trio.run(receive) == b"hidden"


def test_who_is_not_let_in_stays_outside_and_says_why(far: GatewayProcess, tmp_path: Path) -> None:
    with gateway_to(far, tmp_path, user="guest:wrong") as one:
        one.until(lambda: "403" in one.gateway.links["far"].down_reason, PATIENCE_SECS)
        assert not one.gateway.links["far"].is_up
