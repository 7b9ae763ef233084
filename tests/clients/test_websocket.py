"""MQTT over WebSocket with the clients that people use: paho-mqtt and MQTT.js, with and without TLS."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

import pytest

from gateway.settings import ListenerTls
from tests.clients.peers import Paho, node
from tests.configured import make_listener
from tests.ingress.clients import connect, stats
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.transport.test_tls import self_signed


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> ListenerTls:
    certificate, key = self_signed(tmp_path_factory.mktemp("certificate"))
    return ListenerTls(cert_file=certificate, key_file=key)


@pytest.fixture(params=["ws", "wss"])
def gateway(request: pytest.FixtureRequest, tls: ListenerTls) -> Iterator[Running]:
    """WebSocket on the listener `mqtt`, TCP on `tcp`."""
    listeners = {
        "mqtt": make_listener(
            protocol="mqtt",
            host=LOOPBACK,
            port=0,
            websocket_path="/mqtt",
            tls=tls if request.param == "wss" else None,
        ),
        "tcp": make_listener(protocol="mqtt", host=LOOPBACK, port=0),
    }
    with running(settings_of(listeners=listeners)) as one:
        yield one


def trusting(gateway: Running) -> ssl.SSLContext | None:
    """What a client needs for the gateway's certificate, if it has one."""
    given = gateway.gateway.settings.listeners["mqtt"].tls
    return None if given is None else ssl.create_default_context(cafile=given.cert_file)


@pytest.mark.parametrize("version", ["3.1", "3.1.1", "5.0"])
def test_paho(gateway: Running, version: str) -> None:
    with Paho(gateway, version, transport="websockets", tls=trusting(gateway)) as client:
        assert client.subscribe("a/#", 2) == 2
        for qos in (0, 1, 2):
            client.publish(f"a/{qos}", b"body", qos)
            message = client.message()
            assert (message.topic, message.payload, message.qos) == (f"a/{qos}", b"body", qos)
    assert stats(gateway).protocol_errors.counts == {}


@pytest.mark.parametrize("size", [1, 111, 112, 113, 65_521, 65_522, 8 * 1024 * 1024])
def test_bodies_of_any_size_come_and_go(gateway: Running, size: int) -> None:
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)
    with (
        Paho(gateway, "5.0", transport="websockets", tls=trusting(gateway)) as client,
        connect(gateway, "reader", listener="tcp")[0] as reader,
    ):
        reader.subscribe("there", 0)
        client.subscribe("back", 1)
        if size < 100_000:  # paho does not send the rest of a frame that its socket has taken in part
            assert client.publish("there", body, 1) == 0
            assert reader.body() == body
        reader.publish("back", body)
        assert client.message().payload == body


def test_a_goodbye_is_no_fault(gateway: Running) -> None:
    with Paho(gateway, "5.0", transport="websockets", tls=trusting(gateway)):
        pass
    gateway.until(lambda: stats(gateway).connections == 0)
    assert stats(gateway).protocol_errors.counts == {}
    assert stats(gateway).refused.counts == {}


def test_a_client_that_closes_its_websocket_without_a_word_leaves_its_will(gateway: Running) -> None:
    with connect(gateway, "heir", listener="tcp")[0] as heir:
        heir.subscribe("will", 0)
        scheme = "ws" if trusting(gateway) is None else "wss"
        assert node(LEAVING, "mqtt", scheme, str(gateway.mqtt)) == "1001\n"
        assert heir.body() == b"last"


LEAVING = """
const [mqtt, WebSocket] = [require("mqtt"), require("ws")];
let socket;
const client = mqtt.connect(`${process.argv[1]}://127.0.0.1:${process.argv[2]}/mqtt`, {
  createWebsocket: (url, protocols) => {
    socket = new WebSocket(url, protocols, {rejectUnauthorized: false});
    socket.on("close", (code) => { console.log(code); process.exit(0); });
    return socket;
  },
  will: {topic: "will", payload: "last", qos: 0},
});
client.on("connect", () => socket.close(1001));
"""


MQTT_JS = """
const mqtt = require("mqtt");
const [scheme, port, version] = [process.argv[1], process.argv[2], Number(process.argv[3])];
const client = mqtt.connect(`${scheme}://127.0.0.1:${port}/mqtt`, {
  protocolVersion: version, protocolId: version === 3 ? "MQIsdp" : "MQTT", rejectUnauthorized: false,
});
const heard = [];
client.on("message", (topic, body, packet) => {
  heard.push(`${topic} ${packet.qos} ${body.length}`);
  if (heard.length === 3) client.end(false, {}, () => console.log(heard.sort().join("\\n")));
});
client.on("error", (error) => { console.error(error); process.exit(1); });
client.on("connect", async () => {
  await client.subscribeAsync("a/#", {qos: 2});
  for (const qos of [0, 1, 2]) {
    await client.publishAsync(`a/${qos}`, Buffer.alloc(qos === 1 ? 9000000 : 100000), {qos});
  }
});
"""


@pytest.mark.parametrize("version", ["3", "4", "5"])
def test_mqtt_js(gateway: Running, version: str) -> None:
    scheme = "ws" if trusting(gateway) is None else "wss"
    out = node(MQTT_JS, "mqtt", scheme, str(gateway.mqtt), version)
    assert out.splitlines() == ["a/0 0 100000", "a/1 1 9000000", "a/2 2 100000"]
    assert stats(gateway).protocol_errors.counts == {}
