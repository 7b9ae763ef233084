"""Clients whose connection is lost before their CONNACK is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.broker.mqtt.namespace import MqttNamespace
from gateway.settings import StoreSettings
from tests.configured import make_listener
from tests.engine.replicas import Client, lasting
from tests.engine.test_opening_races import ENDS, Raw
from tests.interop.gateway_fixture import LOOPBACK, running, settings_of


@pytest.mark.interpreted
@pytest.mark.parametrize("restarts", [False, True])
def test_who_gets_no_connack_leaves_its_session_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    """Although its session was to end with this connection, also after a restart."""
    listeners = {"mqtt": make_listener(protocol="mqtt", host=LOOPBACK, port=0)}
    settings = settings_of(listeners=listeners, store=StoreSettings(path=tmp_path))
    with running(settings) as gateway:
        with lasting(gateway.mqtt, "late") as client:
            client.subscribe("late", qos=1)
        session = gateway.gateway.mqtt.sessions["late"]
        gateway.until(lambda: session.outlet is None)  # its end would wait for ever below
        with monkeypatch.context() as patch:
            patch.setattr(MqttNamespace, "after_recorded", lambda *_: None)
            with Raw(gateway.mqtt, "late", 5, connect=ENDS):
                gateway.until(lambda: session.outlet is not None)
            gateway.until(lambda: session.outlet is None)
        if not restarts:
            assert is_present(gateway.mqtt)
    if restarts:
        with running(settings) as gateway:
            assert is_present(gateway.mqtt)


def is_present(port: int) -> bool:
    """The session of the client goes on."""
    with lasting(port, "late") as client:
        present = client.present
    with Client(port, "late", clean=True):
        return present
