"""The journal of a gateway that runs: what a row says, and what it costs nobody."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pytest

from gateway.protocols.mqtt.properties import encode_list
from gateway.protocols.mqtt.spec import PacketType, Property
from tests.durable.test_amqp import channel
from tests.ingress.clients import connect
from tests.interop.gateway_process import PROGRAM, ROOT, GatewayProcess

MAPPING = """version: 1
routes:
  - name: up
    from: {endpoint: mqtt, topic: "plant/{line}/{rest...}"}
    to: {endpoint: amqp091, exchange: amq.topic, routing_key: "{line}.{rest}"}
    JOURNAL
  - name: long
    from: {endpoint: mqtt, topic: "long/{rest...}"}
    to: {endpoint: amqp091, exchange: amq.topic, routing_key: "{rest}"}
"""


def journaling(folder: Path, *, route: str = "", **options: Any) -> GatewayProcess:
    mapping = folder / "mapping.yaml"
    mapping.write_text(MAPPING.replace("JOURNAL", route or "escape: percent"))
    journal = {"enabled": True, "flush_interval_secs": 0.01, **options}
    return GatewayProcess(folder, journal=journal, mappings=[str(mapping)])


def rows(gateway: GatewayProcess, count: int) -> list[dict[str, Any]]:
    """`count` rows from the first on, as `gateway journal tail` prints them; waits for them."""
    command = ("journal", "tail", "--config", str(gateway.folder / "gateway.yaml"), "--json", "--start", "0")
    done = subprocess.run(
        (*PROGRAM, *command, "-f", "--count", str(count)),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    with journaling(tmp_path) as started:
        yield started


def test_a_row_says_what_crossed_from_where_to_where_and_what_became_of_it(gateway: GatewayProcess) -> None:
    with channel(gateway) as opened, connect(gateway, "device-7")[0] as client:
        opened.queue_declare("q", durable=True)
        opened.queue_bind("q", "amq.topic", "#")
        client.machine.publish(b"plant/l1/a/b", b"21.5", 1, packet_id=1)
        client.flush()
        assert client.acked(PacketType.PUBACK) == (1, 0)
        client.publish("long/" + "x" * 300, b"too long a key", 1, 2)
        assert client.acked(PacketType.PUBACK)[1] >= 0x80
        opened.basic_publish(
            "", "q", b"own world", pika.BasicProperties(delivery_mode=2, message_id="m-1", headers={"n": 1})
        )
        crossed, refused, own = rows(gateway, 3)
    assert (crossed["source_endpoint"], crossed["source_address"], crossed["client"]) == (
        "mqtt",
        "plant/l1/a/b",
        "device-7",
    )
    assert (crossed["route"], crossed["target_endpoint"], crossed["target_address"]) == (
        "up",
        "amqp091",
        "amq.topic:l1.a.b",
    )
    assert (crossed["outcome"], crossed["assurance"], crossed["durable"]) == ("accepted", 1, True)
    assert len(crossed["mapping_version"]) == 12
    assert crossed["received"] <= crossed["settled"]
    assert (refused["route"], refused["outcome"], refused["target_address"]) == ("long", "rejected", None)
    assert (own["route"], own["source_endpoint"], own["target_endpoint"]) == ("", "amqp091", "amqp091")
    assert own["message_id"] == "m-1"
    assert [row["sequence"] for row in (crossed, refused, own)] == [0, 1, 2]


def test_only_routes_that_ask_for_it(tmp_path: Path) -> None:
    with journaling(tmp_path, route="journal: true", all=False) as gateway:
        with channel(gateway) as opened, connect(gateway)[0] as client:
            opened.queue_declare("q")
            opened.queue_bind("q", "amq.topic", "#")
            client.subscribe("#", 1)
            client.publish("long/x", b"no", 1, 1)
            client.publish("plant/l1/x", b"yes", 1, 2)
            assert client.acked(PacketType.PUBACK) == (1, 0)
            (row,) = rows(gateway, 1)
        assert row["route"] == "up"
        gateway.terminate()
        done = subprocess.run(
            (*PROGRAM, "journal", "stat", "--json", "--config", str(tmp_path / "gateway.yaml")),
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert '"rows":1' in done.stdout.replace(" ", "")


def test_numbers_go_on_after_a_kill(gateway: GatewayProcess) -> None:
    for number in range(2):
        with channel(gateway) as opened, connect(gateway)[0] as client:
            opened.queue_declare("q", durable=True)
            opened.queue_bind("q", "amq.topic", "#")
            client.publish("plant/l1/x", b"%d" % number, 1, 1, properties=b"")
            assert client.acked(PacketType.PUBACK) == (1, 0)
            found = rows(gateway, number + 1)
        gateway.restart()
    assert [row["sequence"] for row in found] == [0, 1]


def test_property_names_are_the_models(gateway: GatewayProcess) -> None:
    raw = encode_list(
        {Property.CONTENT_TYPE: "text/plain", Property.USER_PROPERTY: (("a", "1"), ("a", "2"))},
        PacketType.PUBLISH,
    )
    with connect(gateway)[0] as client:
        client.subscribe("x", 1)
        client.publish("x", b"1", 1, 1, properties=raw)
        assert client.acked(PacketType.PUBACK) == (1, 0)
        (row,) = rows(gateway, 1)
    assert row["properties"]["content_type"] == "text/plain"
    assert row["properties"]["headers"] == [["a", "string", "1"], ["a", "string", "2"]]
