"""How much of an outbox's limits is used, as operators see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from gateway.settings import Http, StoreSettings
from tests.configured import make_link
from tests.interop.gateway_fixture import LOOPBACK, running, settings_of
from tests.interop.servers import free_ports
from tests.operator import bearer

MAPPING = """version: 1
routes:
  - name: kept
    from: {endpoint: mqtt, topic: "far/#"}
    to: {endpoint: erp, queue: far}
    settle: stored
    outbox: {messages_max: 5, age_secs_max: 90.5}
"""


def test_an_outbox_says_what_waits_and_how_much_may(tmp_path: Path) -> None:
    (tmp_path / "mapping.yaml").write_text(MAPPING)
    (nobody,) = free_ports(1)
    settings = settings_of(
        http=Http(host=LOOPBACK, port=0),
        store=StoreSettings(path=tmp_path / "data"),
        mappings=(str(tmp_path / "mapping.yaml"),),
        links={"erp": make_link(url=f"amqp://{LOOPBACK}:{nobody}")},
    )
    with running(settings) as gateway:
        port = gateway.gateway.http_port
        client = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
        client.connect(LOOPBACK, gateway.mqtt)
        client.loop_start()
        for number in range(3):
            client.publish("far/x", b"%d" % number, 1).wait_for_publish(10)
        with httpx.Client(base_url=f"http://{LOOPBACK}:{port}/api/v1", trust_env=False) as http:
            http.headers.update(bearer(port))
            rows = http.get("/limits", params={"count": 1000}).json()["items"]
            found: dict[str, Any] = {
                row["name"]: (row["used"], row["limit"]) for row in rows if row["of"] == "route kept"
            }
            (outbox,) = http.get("/outboxes").json()["items"]
            (same,) = http.get("/status").json()["outboxes"]
        client.disconnect()
        client.loop_stop()
    assert found["outbox.messages_max"] == (3, 5)
    assert found["outbox.age_secs_max"][1] == 91
    assert found["outbox.bytes_max"] == (outbox["waiting_bytes"], 1 << 30)
    assert (outbox["waiting"], outbox["messages_max"], outbox["policy"]) == (3, 5, "reject")
    assert (outbox["problem"], outbox["age_secs_max"]) == ("the link is down", 90.5)
    assert same.keys() == outbox.keys()
