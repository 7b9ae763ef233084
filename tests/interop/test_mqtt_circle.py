"""A circle with a Mosquitto in it, joined by links of MQTT 3.1.1: gateway, broker, gateway, and back."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from gateway.broker.mqtt.echoes import QUICK_MAX
from gateway.protocols.mqtt.spec import PacketType, Version
from gateway.settings import LinkSettings
from tests.configured import make_link
from tests.ingress.clients import connect
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.interop.servers import Mosquitto

MANY: Final = 100
MAPPING: Final = """
version: 1
routes:
  - {name: round, from: {endpoint: FROM, topic: "r/{rest...}"}, to: {endpoint: TO, topic: "r/{rest...}"}}
"""


def old_link(port: int, client_id: str) -> LinkSettings:
    return make_link(
        url=f"mqtt://{LOOPBACK}:{port}", version="3.1.1", client_id=client_id, reconnect_min_secs=0.1
    )


def refusals(gateway: Running) -> int:
    return sum(route.failed for route in gateway.gateway.dispatcher.router.routes)


@pytest.mark.parametrize("qos", [0, 1])
def test_a_broker_in_between_confirms_at_once_and_the_circle_ends_all_the_same(
    mosquitto: Mosquitto, tmp_path: Path, qos: int
) -> None:
    up, on = tmp_path / "up.yaml", tmp_path / "on.yaml"
    up.write_text(MAPPING.replace("FROM", "mqtt").replace("TO", "broker"))
    on.write_text(MAPPING.replace("FROM", "broker").replace("TO", "first"))
    there = old_link(mosquitto.port, f"{tmp_path.name} first")
    with running(settings_of(links={"broker": there}, mappings=(str(up),))) as first:
        links = {
            "broker": old_link(mosquitto.port, f"{tmp_path.name} second"),
            "first": old_link(first.mqtt, "second"),
        }
        with running(settings_of(links=links, mappings=(str(on),))) as second:
            first.until(lambda: first.gateway.links["broker"].is_up)
            granted = second.gateway.links["broker"].session.filters  # type: ignore[attr-defined]
            second.until(lambda: second.gateway.links["first"].is_up and bool(granted.granted))
            with connect(first, "device", version=Version.V311)[0] as device:
                came = [0]
                for number in range(MANY):
                    device.publish("r/a", b"%d" % number, qos, qos and number + 1)
                    if qos:
                        assert device.acked(PacketType.PUBACK) == (number + 1, 0)
                    first.until(lambda number=number: refusals(first) > number)
                    came.append(first.ask(lambda: first.gateway.listeners["mqtt"].stats.messages_in))
                device.ping()
            rounds = [after - before - 1 for before, after in pairwise(came)]
            proof = rounds.index(QUICK_MAX)  # one before it ends sooner if it overtakes its acknowledgement
            assert max(rounds) == QUICK_MAX
            assert rounds[proof + 1 :] == [1] * (MANY - proof - 1)
