"""Libraries for MQTT, each in a program of its own that Mosquitto and the gateway must answer alike.

Between the two there is a wire that is cut where a program wants it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.chaos.proxy import Proxy
from tests.clients.programs import java, program, said
from tests.interop.gateway_fixture import Running
from tests.interop.servers import Mosquitto


def lines(command: Sequence[str | Path], port: int) -> list[str]:
    with Proxy(port) as wire:
        return said([*command, str(wire.port)], wire.cut)


# 0x10 is a server's to say or not (5: 3.4.2.1, 3.5.2.1): Mosquitto says it in PUBACK only.
NOBODY: Final = {"nobody hears SUCCESS": "nobody hears NO_MATCHING_SUBSCRIBERS"}
NOTHING: Final[Mapping[str, str]] = {}


def on_both(
    command: Sequence[str | Path], gateway: Running, mosquitto: Mosquitto, but: Mapping[str, str] = NOTHING
) -> None:
    """The same lines, `but` for those of Mosquitto's for which the gateway has others."""
    try:
        theirs = lines(command, mosquitto.port)
    except AssertionError:  # on a busy machine it was seen to send nothing more to a client that had room
        theirs = lines(command, mosquitto.port)
    assert but.keys() <= set(theirs), "no difference any more"
    assert lines(command, gateway.mqtt) == [but.get(line, line) for line in theirs]


def test_hivemq(gateway: Running, mosquitto: Mosquitto) -> None:
    """MQTT 5: QoS, properties, aliases, retain handling, wills, shares, requests, flow control, sessions."""
    on_both(java("HiveMq"), gateway, mosquitto, NOBODY)


def test_paho_for_java(gateway: Running, mosquitto: Mosquitto) -> None:
    """MQTT 5: what HiveMQ's does, with subscription identifiers, and what comes again unacknowledged."""
    on_both(java("Paho"), gateway, mosquitto)


def test_autopaho(gateway: Running, mosquitto: Mosquitto) -> None:
    """MQTT 5: properties, will, requests, and a queue whose messages arrive once though the wires are cut."""
    on_both([program("autopaho") / "main"], gateway, mosquitto)


def test_rumqttc(gateway: Running, mosquitto: Mosquitto) -> None:
    """MQTT 3.1.1: QoS, retained messages, a will, and nothing lost though the wires are cut."""
    on_both([program("rumqttc") / "main"], gateway, mosquitto)
