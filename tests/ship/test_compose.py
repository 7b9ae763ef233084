"""The bridge of the Compose file, with its own configuration, between a local Mosquitto and a local RabbitMQ.

There is no Docker here. The names of its services become local addresses; everything else is as it stands.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import httpx
import paho.mqtt.client as paho
import pika
import pytest
import yaml
from paho.mqtt.enums import CallbackAPIVersion

from tests.deploy.programs import DEPLOY
from tests.interop.gateway_process import GatewayProcess
from tests.interop.servers import Mosquitto, RabbitMQ, free_ports

FOLDER = DEPLOY / "compose"
LOOPBACK = "127.0.0.1"
PATIENCE_SECS = 20.0


def local_configuration(folder: Path, mosquitto: Mosquitto, rabbitmq: RabbitMQ) -> dict[str, Any]:
    mapping = folder / "bridge.yaml"
    mapping.write_text((FOLDER / "bridge.yaml").read_text())
    text = (FOLDER / "gateway.yaml").read_text()
    for name, value in (
        ("mqtt://mosquitto:1883", f"mqtt://{LOOPBACK}:{mosquitto.port}"),
        ("amqp://gateway@rabbitmq:5672/%2F", f"amqp://guest:guest@{LOOPBACK}:{rabbitmq.port}/%2F"),
        ("/etc/gateway/bridge.yaml", str(mapping)),
    ):
        assert name in text
        text = text.replace(name, value)
    found: dict[str, Any] = yaml.safe_load(text)
    return found


@pytest.fixture
def port(tmp_path: Path, mosquitto: Mosquitto, rabbitmq: RabbitMQ) -> Any:
    (http,) = free_ports(1)
    configuration = local_configuration(tmp_path, mosquitto, rabbitmq)
    with GatewayProcess(tmp_path, **configuration, http={"host": LOOPBACK, "port": http}) as gateway:
        yield gateway.port("http")


def scraped(port: int) -> str:
    return httpx.get(f"http://{LOOPBACK}:{port}/metrics", trust_env=False).text


def until_up(port: int) -> None:
    end = time.monotonic() + PATIENCE_SECS
    while len(re.findall(r"^gateway_link_up{.*} 1\.0$", scraped(port), re.MULTILINE)) < 2:
        assert time.monotonic() < end, "both links have not connected"
        time.sleep(0.05)


def test_telemetry_reaches_rabbitmq_and_commands_reach_mosquitto(
    port: int, mosquitto: Mosquitto, rabbitmq: RabbitMQ
) -> None:
    until_up(port)
    seen: list[tuple[str, bytes]] = []
    client = paho.Client(CallbackAPIVersion.VERSION2)
    client.on_message = lambda _client, _data, message: seen.append((message.topic, bytes(message.payload)))
    client.connect(LOOPBACK, mosquitto.port)
    client.subscribe("plant/+/command", 1)
    client.loop_start()
    url = pika.URLParameters(f"amqp://guest:guest@{LOOPBACK}:{rabbitmq.port}/%2F")
    with pika.BlockingConnection(url) as connection:
        channel = connection.channel()
        client.publish("plant/l1/press/telemetry/temp", "21.5", qos=1).wait_for_publish(PATIENCE_SECS)
        end = time.monotonic() + PATIENCE_SECS
        while (found := channel.basic_get("telemetry", auto_ack=True))[0] is None:
            assert time.monotonic() < end, "the message is not in the queue that the guide names"
            time.sleep(0.05)
        assert found[2] == b"21.5"
        channel.basic_publish("", "commands", b"stop")
        while not seen:
            assert time.monotonic() < end
            time.sleep(0.05)
    client.disconnect()
    client.loop_stop()
    assert seen == [("plant/commands/command", b"stop")]
