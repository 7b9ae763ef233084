"""Wills when the gateway is told to stop: whoever is there to take them gets them, then comes the end."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from gateway.protocols.mqtt.packets import Disconnect, Will
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode, Version
from tests.configured import make_link, make_listener
from tests.ingress.clients import Mqtt, connect
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.interop.gateway_process import GatewayProcess

VERSIONS: Final = (Version.V5, Version.V311, Version.V31)
LATER: Final = {Property.WILL_DELAY_INTERVAL: 600}
LASTING: Final = {Property.SESSION_EXPIRY_INTERVAL: 600}


def heard_at_the_end(gateway: Running, reader: Mqtt) -> list[bytes]:
    """What a client is sent while the gateway stops."""
    gateway.ask(gateway.gateway.stop)
    assert reader.next(Disconnect).reason in (
        ReasonCode.SERVER_SHUTTING_DOWN,
        ReasonCode.USE_ANOTHER_SERVER,
    )
    return [row[4] for event in reader.heard for row in event.rows]


@pytest.mark.parametrize("version", VERSIONS)
def test_it_is_published_to_who_is_still_there(version: Version) -> None:
    with running() as gateway, connect(gateway, "reader")[0] as reader:
        reader.subscribe("#", 0)
        with connect(gateway, version=version, will=Will("gone", b"offline", 1, True))[0]:
            assert heard_at_the_end(gateway, reader) == [b"offline"]


@pytest.mark.parametrize("version, heard", [(Version.V5, []), (Version.V311, [b"offline"])])
def test_not_of_a_client_that_is_told_where_to_go_on(version: Version, heard: list[bytes]) -> None:
    listener = make_listener(protocol="mqtt", host=LOOPBACK, port=0, server_reference="elsewhere:1883")
    with (
        running(settings_of(listeners={"mqtt": listener})) as gateway,
        connect(gateway, "reader")[0] as reader,
    ):
        reader.subscribe("#", 0)
        with connect(gateway, version=version, will=Will("gone", b"offline", 1, True))[0]:
            assert heard_at_the_end(gateway, reader) == heard


@pytest.mark.parametrize("there", [True, False], ids=["connected", "away, and its delay goes on"])
def test_a_delay_ends_with_the_process_that_alone_knows_the_session(there: bool) -> None:
    with running() as gateway, connect(gateway, "reader")[0] as reader:
        reader.subscribe("#", 0)
        will = Will("gone", b"offline", properties=LATER)
        with connect(gateway, "c", clean=False, will=will, properties=LASTING)[0] as client:
            if not there:
                client.cut()
                gateway.until(lambda: gateway.gateway.mqtt.sessions["c"].outlet is None)
            assert heard_at_the_end(gateway, reader) == [b"offline"]


def test_a_planned_stop_leaves_no_state_online(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path) as gateway, ExitStack() as clients:
        for version in VERSIONS:
            will = Will(f"state/{version.name}", b"offline", 1, True)
            client = clients.enter_context(connect(gateway, version.name, version=version, will=will)[0])
            client.publish(will.topic, b"online", 1, 1, retain=True)
            client.acked(PacketType.PUBACK)
        later = Will("state/later", b"offline", 1, True, LATER)
        clients.enter_context(connect(gateway, "later", clean=False, will=later, properties=LASTING)[0])
        client.publish("state/later", b"online", 1, 2, retain=True)
        client.acked(PacketType.PUBACK)
        assert gateway.terminate() == 0
        gateway.start()
        with connect(gateway, "reader")[0] as reader:
            reader.subscribe("state/#")
            found = {(row := reader.row())[1].decode(): row[4] for _ in range(4)}
    online = {"state/later": b"online"}  # its session is on disk, and so is what is left of its delay
    assert found == {f"state/{version.name}": b"offline" for version in VERSIONS} | online


def test_links_take_it_before_they_leave(tmp_path: Path) -> None:
    mapping = tmp_path / "mapping.yaml"
    mapping.write_text(
        "version: 1\n"
        "routes:\n"
        "  - {name: up, from: {endpoint: mqtt, topic: 'state/{rest...}'},"
        " to: {endpoint: far, topic: 'state/{rest...}'}}\n"
    )
    with running() as far, connect(far, "reader")[0] as reader:
        reader.subscribe("state/#", 1)
        links = {"far": make_link(url=f"mqtt://{LOOPBACK}:{far.mqtt}")}
        with running(settings_of(links=links, mappings=(str(mapping),))) as near:
            near.until(lambda: near.gateway.links["far"].is_up)
            client, _ = connect(near, will=Will("state/a", b"offline", 1))
        client.cut()
        assert reader.body() == b"offline"
