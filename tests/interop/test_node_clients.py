"""MQTT.js and amqplib (Node), unchanged, against the listeners: each sends what the other receives."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import missing
from tests.interop.gateway_fixture import Running, running

MODULES = Path(__file__).resolve().parents[2] / ".node" / "node_modules"

MQTT_TO_AMQP = """
const mqtt = require('mqtt'), amqp = require('amqplib');
(async () => {
  const connection = await amqp.connect(process.env.AMQP);
  const channel = await connection.createChannel();
  const { queue } = await channel.assertQueue('', { exclusive: true });
  await channel.bindQueue(queue, 'amq.topic', 'node.#');
  const client = await mqtt.connectAsync(process.env.MQTT, { protocolVersion: +process.env.LEVEL });
  const got = [];
  await new Promise(async (resolve) => {
    await channel.consume(queue, (message) => {
      got.push([message.fields.routingKey, message.content.toString(), message.properties.deliveryMode]);
      channel.ack(message);
      if (got.length === 3) resolve();
    });
    for (const qos of [0, 1, 2]) await client.publishAsync('node/a.b/q' + qos, 'body' + qos, { qos });
  });
  await client.endAsync(); await connection.close();
  console.log(JSON.stringify(got));
})().catch((error) => { console.error(error); process.exit(1); });
"""

AMQP_TO_MQTT = """
const mqtt = require('mqtt'), amqp = require('amqplib');
(async () => {
  const client = await mqtt.connectAsync(process.env.MQTT, { protocolVersion: +process.env.LEVEL });
  await client.subscribeAsync('node/+/x', { qos: 2 });
  const got = [];
  const all = new Promise((resolve) => client.on('message', (topic, body, packet) => {
    got.push([topic, body.toString(), packet.qos]);
    if (got.length === 2) resolve();
  }));
  const connection = await amqp.connect(process.env.AMQP);
  const channel = await connection.createConfirmChannel();
  channel.publish('amq.topic', 'node.a%2Eb.x', Buffer.from('one'), { persistent: true });
  channel.publish('amq.topic', 'node.c.x', Buffer.from('two'));
  await channel.waitForConfirms();
  let code = 0;
  const other = await connection.createChannel();
  other.on('error', (error) => { code = error.code; });
  await other.checkQueue('nobody').catch(() => {});
  await all;
  await client.endAsync(); await connection.close();
  console.log(JSON.stringify([got, code]));
})().catch((error) => { console.error(error); process.exit(1); });
"""


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    if shutil.which("node") is None or not (MODULES / "mqtt").is_dir() or not (MODULES / "amqplib").is_dir():
        missing("Node with mqtt and amqplib is not installed: tests/interop/peers.sh")
    with running() as started:
        yield started


def node(script: str, gateway: Running, level: int) -> object:
    """What the script printed as JSON. `level` is the MQTT protocol level."""
    env = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "NODE_PATH": str(MODULES),
        "AMQP": gateway.amqp_url,
        "MQTT": f"mqtt://127.0.0.1:{gateway.mqtt}",
        "LEVEL": str(level),
    }
    done = subprocess.run(["node", "-e", script], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("level", [4, 5])
def test_mqtt_js_publishes_and_amqplib_consumes(gateway: Running, level: int) -> None:
    assert node(MQTT_TO_AMQP, gateway, level) == [
        ["node.a%2Eb.q0", "body0", 1],
        ["node.a%2Eb.q1", "body1", 2],
        ["node.a%2Eb.q2", "body2", 2],
    ]


@pytest.mark.parametrize("level", [4, 5])
def test_amqplib_publishes_and_mqtt_js_receives(gateway: Running, level: int) -> None:
    got, code = node(AMQP_TO_MQTT, gateway, level)  # type: ignore[misc]
    assert sorted(got) == [["node/a.b/x", "one", 1], ["node/c/x", "two", 1]]
    assert code == 404
