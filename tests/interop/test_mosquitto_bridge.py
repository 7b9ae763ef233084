"""A real Mosquitto that connects to the gateway as a bridge, configured as its manual page begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import missing
from tests.interop.gateway_fixture import LOOPBACK, Running, running
from tests.interop.servers import Mosquitto, PeerMissingError
from tests.interop.test_mqtt_link import Subscriber, publish

STATE: Final = "$SYS/broker/connection/+/state"
VERSIONS: Final = {"3.1": "mqttv31", "3.1.1": "mqttv311", "5.0": "mqttv50"}
BOTH: Final = ("topic # both 2",)
ONE_WAY: Final = ("topic plant/up/# out 2", "topic plant/down/# in 2", "try_private false")


@contextmanager
def bridged(folder: Path, gateway: Running, version: str, *lines: str) -> Iterator[Mosquitto]:
    """A Mosquitto whose bridge to the gateway says that it is up."""
    own = (
        "connection up",
        f"address {LOOPBACK}:{gateway.mqtt}",
        f"bridge_protocol_version {VERSIONS[version]}",
        *(lines or BOTH),
    )
    try:
        broker = Mosquitto(folder, own)
    except PeerMissingError as error:
        missing(str(error))
    with Subscriber(gateway.mqtt, STATE) as states, broker:
        said = states.next()
        assert said.payload == b"1"
        yield broker


@pytest.mark.parametrize(
    "version, lines",
    [*[(version, BOTH) for version in VERSIONS], ("3.1", ONE_WAY), ("3.1.1", ONE_WAY)],
    ids=lambda one: one if isinstance(one, str) else "as it is" if one is BOTH else "not in private",
)
def test_both_directions(tmp_path: Path, version: str, lines: tuple[str, ...]) -> None:
    """Without the bridge flag MQTT 3.x cannot say no-local, and one topic in both directions goes round."""
    with (
        running() as gateway,
        bridged(tmp_path, gateway, version, *lines) as broker,
        Subscriber(gateway.mqtt, "plant/#") as here,
        Subscriber(broker.port, "plant/#") as there,
    ):
        for qos in (0, 1, 2):
            publish(broker.port, f"plant/up/{qos}", b"up", qos)
            publish(gateway.mqtt, f"plant/down/{qos}", b"down", qos)
        for subscriber in (here, there):
            found = sorted(
                (message.topic, message.payload, message.qos)
                for message in (subscriber.next() for _ in range(6))
            )
            ways = ("down", "up")
            assert found == [(f"plant/{way}/{qos}", way.encode(), qos) for way in ways for qos in (0, 1, 2)]
            assert subscriber.quiet(), "nothing comes back"


@pytest.mark.parametrize("version", VERSIONS)
def test_retained_state_in_both_directions(tmp_path: Path, version: str) -> None:
    with running() as gateway:
        publish(gateway.mqtt, "plant/before", b"here", 1, "-r")
        with bridged(tmp_path, gateway, version) as broker:
            publish(broker.port, "plant/live", b"there", 1, "-r")
            publish(gateway.mqtt, "plant/later", b"here, later", 1, "-r")
            for port in (gateway.mqtt, broker.port):
                for topic, body in (("before", b"here"), ("live", b"there"), ("later", b"here, later")):
                    with Subscriber(port, f"plant/{topic}") as subscriber:
                        assert subscriber.next().payload == body, "perhaps it was still under way"
                    with Subscriber(port, f"plant/{topic}") as subscriber:
                        said = subscriber.next()
                        assert (said.payload, said.retain) == (body, True)


def test_its_state_is_told_when_it_dies(tmp_path: Path) -> None:
    with running() as gateway, bridged(tmp_path, gateway, "3.1.1") as broker:
        with Subscriber(gateway.mqtt, STATE) as states:
            said = states.next()
            assert (said.payload, said.retain) == (b"1", True)
            broker.stop(kill=True)
            assert states.next().payload == b"0"
        with Subscriber(gateway.mqtt, STATE) as states:
            said = states.next()
            assert (said.payload, said.retain) == (b"0", True)
