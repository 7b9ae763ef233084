"""Two gateways that links of MQTT 3.x join both ways: what one sends comes back once, and goes no further."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from gateway.broker.mqtt import echoes
from gateway.broker.mqtt.echoes import QUICK_MAX
from gateway.protocols.mqtt.runs import Acks, Publishes
from gateway.protocols.mqtt.spec import PacketType, Version
from gateway.settings import StoreSettings
from tests.configured import make_link, make_listener
from tests.ingress.clients import PATIENCE_SECS, Mqtt, connect
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.interop.servers import free_ports

BURST: Final = 900  # as many as a listener reads of one client before it has answered
MANY: Final = 100
OUT: Final = "version: 1\nroutes:\n  - {name: out, from: {endpoint: mqtt, topic: 't/{rest...}'}, "
CONFIRMED: Final = OUT + "to: {endpoint: far, topic: 't/{rest...}'}}\n"
STORED: Final = OUT + "to: {endpoint: far, topic: 't/{rest...}'}, settle: stored}\n"


@contextmanager
def joined(folder: Path, version: str, *mappings: str) -> Iterator[tuple[Running, Running]]:
    """Two gateways; each has a link to the other, and one mapping."""
    ports = free_ports(2)

    def settings(at: int) -> Any:
        mapping = folder / f"{at}.yaml"
        mapping.write_text(mappings[at])
        link = make_link(
            url=f"mqtt://{LOOPBACK}:{ports[1 - at]}",
            version=version,
            client_id=f"gateway {at}",
            reconnect_min_secs=0.05,
            reconnect_max_secs=0.1,
        )
        return settings_of(
            listeners={"mqtt": make_listener(protocol="mqtt", host=LOOPBACK, port=ports[at])},
            links={"far": link},
            mappings=(str(mapping),),
            store=StoreSettings(path=folder / f"store {at}"),
        )

    with running(settings(0)) as one, running(settings(1)) as two:
        for gateway in (one, two):
            gateway.until(lambda gateway=gateway: gateway.gateway.links["far"].is_up)
        yield one, two


def passed(gateways: tuple[Running, Running]) -> list[int]:
    """How many messages each listener has read."""
    return [one.ask(lambda one=one: one.gateway.listeners["mqtt"].stats.messages_in) for one in gateways]


def acknowledged(client: Mqtt, qos: int, count: int) -> None:
    """Wait for the last acknowledgement of each message."""
    while count:
        acks = client.next(Acks)
        if acks.kind is PacketType.PUBREC:
            client.machine.acknowledge(PacketType.PUBREL, [packet_id for packet_id, _ in acks.rows])
            client.flush()
        else:
            count -= len(acks.rows)


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("version", ["3.1.1", "3.1"])
def test_what_the_other_has_to_confirm_goes_round_once(tmp_path: Path, version: str, qos: int) -> None:
    with joined(tmp_path, version, CONFIRMED, CONFIRMED) as both:
        with connect(both[0], "device", version=Version.V311)[0] as device:
            for number in range(1, BURST + 1):
                device.machine.publish(b"t/a", b"%d" % (number // 2), qos, packet_id=number)
            device.flush()
            acknowledged(device, qos, BURST)
        # There, and back from where the same text came from two senders: the device, and the other gateway.
        assert passed(both) == [2 * BURST, BURST]
        for gateway in both:
            gateway.until(lambda gateway=gateway: gateway.gateway.links["far"].session.idle)


@pytest.mark.parametrize(
    "mappings, qos",
    [
        pytest.param((CONFIRMED, CONFIRMED), 0, id="QoS 0"),
        pytest.param((CONFIRMED, STORED), 1, id="the other confirms at once"),
        pytest.param((STORED, STORED), 1, id="both confirm at once"),
    ],
)
def test_what_nobody_has_to_confirm_goes_round_until_the_other_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mappings: tuple[str, str], qos: int
) -> None:
    monkeypatch.setattr(echoes, "QUICK_SECS", PATIENCE_SECS)  # however busy the machine is
    with (
        joined(tmp_path, "3.1.1", *mappings) as both,
        connect(both[0], "device", version=Version.V311)[0] as device,
    ):
        rounds, known = passed(both), False
        for number in range(MANY):
            device.publish("t/a", b"%d" % number, qos, qos and number + 1)
            both[0].until(lambda number=number: refusals(both) > number)
            before, rounds = rounds, passed(both)
            there_and_back = [before[0] + 2, before[1] + 1]
            more = [now - then for now, then in zip(rounds, there_and_back, strict=True)]
            assert 0 <= min(more) <= max(more) < QUICK_MAX
            assert not (known and any(more)), "who has proved to be the other end brings nothing back"
            known = known or more[0] == QUICK_MAX - 1  # or it was noticed before, by what is not confirmed
        if qos:
            acknowledged(device, qos, MANY)


def refusals(gateways: tuple[Running, Running]) -> int:
    """How many messages routes would not take."""
    return sum(route.failed for one in gateways for route in one.gateway.dispatcher.router.routes)


def test_what_clients_say_beside_the_circle_crosses(tmp_path: Path) -> None:
    with (
        joined(tmp_path, "3.1.1", CONFIRMED, CONFIRMED) as both,
        connect(both[0], "one")[0] as one,
        connect(both[1], "two")[0] as two,
    ):
        for client in (one, two):
            client.subscribe("t/#", 0)
        for number in range(50):
            for client in (one, two):
                client.publish("t/state", b"%d" % number, 1, 1)
                acknowledged(client, 1, 1)
        for client in (one, two):
            client.ping()
            heard = [row[4] for event in client.heard for row in event.rows]
            heard += [row[4] for event in client.events(Publishes) for row in event.rows]
            for number in range(50):
                assert heard.count(b"%d" % number) == 3, "its own, the echo of that, and the other's"
