"""The gateway as a process: signals, draining, mapping files that change while it runs."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.errors import ConfigurationError
from gateway.protocols.mqtt.packets import Disconnect
from gateway.protocols.mqtt.spec import PacketType, ReasonCode
from gateway.settings import Http, Limits, Settings, StoreSettings
from tests.configured import make_link
from tests.ingress.amqp_client import Amqp
from tests.ingress.clients import connect
from tests.interop.gateway_fixture import LOOPBACK, Running, gateway_here, running, settings_of
from tests.interop.gateway_process import PATIENCE_SECS, GatewayProcess
from tests.interop.servers import free_ports

COPY = """version: 1
routes:
  - name: {name}
    from: {{endpoint: mqtt, topic: "{source}/{{rest...}}"}}
    to: {{endpoint: mqtt, topic: "{target}/{{rest...}}"}}
"""
BAD = """version: 1
routes:
  - name: bad
    from: {endpoint: nowhere, topic: a}
    to: {endpoint: mqtt, topic: b}
"""


class Process(GatewayProcess):
    """A gateway whose mapping file changes."""

    def __init__(self, folder: Path) -> None:
        self.mapping = folder / "mapping.yaml"
        self.mapping.write_text(COPY.format(name="copy", source="in", target="out"))
        super().__init__(folder, mappings=[str(self.mapping)])


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    with Process(tmp_path) as made:
        yield made


def copied_to(process: Process) -> bytes:
    """Publish at `in/x`; the topic of the first message that comes back from elsewhere than there."""
    with connect(process, "prober")[0] as client:
        client.subscribe("+/x")
        client.publish("in/x")
        while True:
            topic = client.row()[1]
            if topic != b"in/x":
                return topic


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_says_goodbye_and_exits_with_0(process: Process, number: signal.Signals) -> None:
    with connect(process)[0] as client:
        client.subscribe("#", 1)
        client.publish("in/x", b"x", 1, 1)
        assert client.acked(PacketType.PUBACK) == (1, 0)
        process.process.send_signal(number)
        assert client.next(Disconnect).reason == ReasonCode.SERVER_SHUTTING_DOWN
        assert client.closed()
    assert process.process.wait(PATIENCE_SECS) == 0, process.log


@pytest.mark.parametrize("signalled", [True, False], ids=["SIGHUP", "a change on disk"])
def test_mappings_are_read_again(process: Process, signalled: bool) -> None:
    assert copied_to(process) == b"out/x"
    for text, target in ((BAD, b"out/x"), (COPY.format(name="copy", source="in", target="new"), b"new/x")):
        before = process.log.count("mappings")
        replacement = process.mapping.with_suffix(".new")
        replacement.write_text(text)
        replacement.rename(process.mapping)
        if signalled:
            process.process.send_signal(signal.SIGHUP)
        wait_for_line(process, before)
        assert copied_to(process) == target
    assert re.search(r"mapping.yaml:4.*unknown endpoint", process.log)


def wait_for_line(process: Process, before: int) -> None:
    """Until the log says something new about mappings."""
    pause = threading.Event()
    for _ in range(1_000):
        if process.log.count("mappings") > before:
            return
        pause.wait(0.02)
    raise AssertionError(process.log)


def test_a_bad_mapping_leaves_the_old_one_in_force_and_is_counted(tmp_path: Path) -> None:
    mapping = tmp_path / "m.yaml"
    mapping.write_text(COPY.format(name="copy", source="in", target="out"))
    settings = settings_of(mappings=(str(mapping),))
    with running(settings, but="mappings not reloaded, previous ones in force") as gateway:
        mapping.write_text(BAD)
        gateway.until(lambda: gateway.gateway.metrics.mapping_reloads["refused"] > 0)
        with connect(gateway)[0] as client:
            client.subscribe("out/x")
            client.publish("in/x", b"still")
            assert client.body() == b"still"


async def test_a_gateway_starts_and_stops_in_the_loop_of_its_caller() -> None:
    async with gateway_here() as gateway:
        assert all(listener.open for listener in gateway.listeners.values())
    assert not any(listener.open for listener in gateway.listeners.values())


def test_clients_of_both_protocols_are_told_that_the_gateway_stops() -> None:
    with running() as gateway:
        client, amqp = connect(gateway)[0], Amqp(gateway).open()
        gateway.stop()
        with client, amqp:
            assert client.next(Disconnect).reason == ReasonCode.SERVER_SHUTTING_DOWN
            assert b"CONNECTION_FORCED" in amqp.rest()


def test_draining_waits_no_longer_than_it_may_for_what_is_in_flight(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    mapping = tmp_path / "m.yaml"
    mapping.write_text(
        "version: 1\nroutes:\n  - name: out\n    from: {endpoint: mqtt, topic: 'out/#'}\n"
        "    to: {endpoint: plant, topic: '{topic...}', qos: 1}\n"
    )
    settings = settings_of(
        mappings=(str(mapping),),
        links={"plant": make_link(url=f"mqtt://{LOOPBACK}:{port}")},
        drain_timeout_secs=0.2,
    )
    with running(settings) as gateway, connect(gateway)[0] as client:
        client.publish("out/x", b"x", 1, 1)
        client.publish("elsewhere", b"x", 1, 2)
        assert client.acked(PacketType.PUBACK) == (2, 0x10)
        gateway.stop()
        assert client.next(Disconnect).reason == ReasonCode.SERVER_SHUTTING_DOWN


def test_a_port_that_is_taken_is_an_error_of_the_configuration() -> None:
    with running() as gateway:
        taken = settings_of()
        taken = Settings(
            listeners={"mqtt": taken.listeners["mqtt"].model_copy(update={"port": gateway.mqtt})},
            http=Http(enabled=False),
            store=StoreSettings(enabled=False),
            limits=Limits(),
        )
        other = Running(taken)
        with pytest.raises(BaseExceptionGroup) as error:
            other.start()
        assert error.group_contains(ConfigurationError, match="listeners.mqtt: cannot listen on")
