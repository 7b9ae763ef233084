"""Links and the command line in MQTT before 3.1.1: level 2 (`mqipdp`) and 3.1, in both byte orders.

No server of level 2 is left, so the other side is our own listener, and a socket that writes down what is
said.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from gateway.cli import broker_trials
from gateway.cli.messages import app
from gateway.clients import wire
from gateway.protocols.mqtt.spec import PacketType
from tests.configured import make_link, make_listener
from tests.ingress.clients import connect
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of

ORDERS: Final = [("mqipdp", "auto"), ("mqipdp", "big"), ("3.1", "auto"), ("3.1", "little")]
MAPPING: Final = """
version: 1
routes:
  - {name: out, from: {endpoint: mqtt, topic: "up/{rest...}"}, to: {endpoint: old, topic: "up/{rest...}"}}
  - {name: in, from: {endpoint: old, topic: "down/{rest...}"}, to: {endpoint: mqtt, topic: "down/{rest...}"}}
"""


def server(byte_order: str) -> Any:
    listener = make_listener(protocol="mqtt", host=LOOPBACK, port=0, byte_order=byte_order)
    return running(settings_of(listeners={"mqtt": listener}))


def link(port: int, **given: Any) -> Any:
    quick = {"reconnect_min_secs": 0.05, "reconnect_max_secs": 0.1}
    return make_link(url=f"mqtt://{LOOPBACK}:{port}", client_id="old", **quick, **given)


@contextmanager
def linked(old: Running, folder: Path, **given: Any) -> Iterator[Running]:
    mapping = folder / "routes.yaml"
    mapping.write_text(MAPPING)
    settings = settings_of(links={"old": link(old.mqtt, **given)}, mappings=(str(mapping),))
    with running(settings) as gateway:
        filters = gateway.gateway.links["old"].session.filters  # type: ignore[attr-defined]
        gateway.until(lambda: gateway.gateway.links["old"].is_up and bool(filters.granted))
        yield gateway


@pytest.mark.parametrize("version, byte_order", ORDERS)
@pytest.mark.parametrize("qos", [1, 2])
def test_a_link_speaks_it_in_both_directions(tmp_path: Path, version: str, byte_order: str, qos: int) -> None:
    """More than 255 messages, so that both bytes of an identifier count; and a reconnect in between."""
    with (
        server(byte_order) as old,
        linked(old, tmp_path, version=version, byte_order=byte_order, qos=qos) as gateway,
        connect(old, "there")[0] as there,
        connect(gateway, "here")[0] as here,
    ):
        there.subscribe("up/#", qos)
        here.subscribe("down/#", qos)
        for publisher, topic, taker in ((here, "up/a", there), (there, "down/a", here)):
            for number in range(1, 301):
                publisher.publish(topic, b"%d" % number, qos, number)
            assert [taker.body() for _ in range(300)] == [b"%d" % number for number in range(1, 301)]
            gateway.ask(lambda: gateway.gateway.links["old"].session._connection.stream.abort("test"))  # type: ignore[attr-defined]
            gateway.until(lambda: gateway.gateway.links["old"].is_up)


class Recorder:
    """A server that lets one client in and notes what it says."""

    def __init__(self) -> None:
        self._listening = socket.create_server((LOOPBACK, 0))
        self.port = self._listening.getsockname()[1]
        self.said = b""
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listening.accept()
        with connection, self._listening:
            connection.settimeout(10)
            while True:
                data = connection.recv(4096)
                if not data:
                    return
                self.said += data
                if data[0] >> 4 == PacketType.CONNECT:
                    connection.sendall(bytes.fromhex("20020000"))
                elif data[0] >> 4 == PacketType.PUBLISH:
                    connection.sendall(b"\x40\x02" + data[6:8])  # the identifier as it came

    def ended(self) -> bytes:
        self._thread.join(20)
        return self.said


@pytest.mark.parametrize(
    "version, order, level, keep_alive, packet_id",
    [
        ("mqipdp", "auto", "0006 4d5149706470 02", "1e00", "0100"),
        ("mqipdp", "big", "0006 4d5149706470 02", "001e", "0001"),
        ("3.1", "auto", "0006 4d5149736470 03", "001e", "0001"),
        ("3.1", "little", "0006 4d5149736470 03", "1e00", "0100"),
        ("3.1.1", "auto", "0004 4d515454 04", "001e", "0001"),
    ],
)
def test_what_the_command_line_says(
    version: str, order: str, level: str, keep_alive: str, packet_id: str
) -> None:
    recorder = Recorder()
    url = f"mqtt://{LOOPBACK}:{recorder.port}"
    options = ["--mqtt-version", version, "--byte-order", order]
    found = CliRunner().invoke(app, ["publish", url, "--topic", "ab", "-m", "x", *options])
    assert found.exit_code == 0, found.output
    said = recorder.ended()
    words = bytes.fromhex(level.replace(" ", ""))
    assert said[2:].startswith(words)
    assert said[2 + len(words) + 1 :].startswith(bytes.fromhex(keep_alive))
    publish = b"\x32\x07\x00\x02ab" + bytes.fromhex(packet_id) + b"x"
    assert publish in said


@pytest.mark.parametrize("version, byte_order", ORDERS)
def test_the_command_line_publishes_and_subscribes(version: str, byte_order: str) -> None:
    with server(byte_order) as old, connect(old, "there")[0] as there:
        url = f"mqtt://{LOOPBACK}:{old.mqtt}"
        options = ["--mqtt-version", version, "--byte-order", byte_order]
        there.publish("kept/a", b"retained", 1, 1, retain=True)
        there.acked(PacketType.PUBACK)
        subscribed = ["subscribe", url, "--topic", "kept/#", "--count", "1", "--qos", "2", *options]
        found = CliRunner().invoke(app, subscribed)
        assert (found.exit_code, found.output.strip()) == (0, "kept/a retained")
        there.subscribe("up/#", 2)
        for qos in ("0", "1", "2"):
            sent = ["publish", url, "--topic", "up/a", "-m", qos, "--qos", qos, *options]
            assert CliRunner().invoke(app, sent).exit_code == 0
            assert there.body() == qos.encode()


@pytest.mark.parametrize(
    "arguments, told",
    [
        (
            ["mqtt://a.invalid", "--topic", "a", "--byte-order", "little"],
            "needs --mqtt-version 3.1 or",
        ),
        (["amqp://a.invalid", "--queue", "q", "--mqtt-version", "3.1"], "are only for MQTT brokers"),
        (
            ["amqpfast://a.invalid", "--destination", "q", "--mqtt-version", "3.1"],
            "are only for MQTT brokers",
        ),
        (["mqtt://a.invalid", "--topic", "a", "--mqtt-version", "3.2"], "3.2"),
    ],
)
def test_options_that_do_not_go_together(arguments: list[str], told: str) -> None:
    found = CliRunner().invoke(app, ["publish", "-m", "x", *arguments])
    assert found.exit_code == 2
    assert told in " ".join(found.output.split())


def test_a_name_has_no_place_before_3_1() -> None:
    arguments = ["mqtt://ann:secret@a.invalid", "--topic", "a", "-m", "x", "--mqtt-version", "mqipdp"]
    found = CliRunner().invoke(app, ["publish", *arguments])
    assert found.exit_code != 0
    assert "no user name" in f"{found.output} {found.exception}"


@pytest.mark.parametrize(
    "given, told",
    [
        ({"byte_order": "little"}, "byte_order is for brokers of MQTT 3.1 and before"),
        ({"byte_order": "little", "version": "3.1.1"}, "byte_order is for brokers of MQTT 3.1 and before"),
        ({"version": "mqipdp", "username": "ann"}, "no user name and no password"),
        ({"version": "mqipdp", "bridge": True}, "bridge is for MQTT 3.1 and 3.1.1"),
        ({"version": "mqipdp", "share": "g"}, "share needs MQTT 3.1.1 or later"),
    ],
)
def test_options_of_a_link_that_do_not_go_together(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        link(1883, **given)


def test_the_trial_of_a_link_speaks_its_version() -> None:
    recorder = Recorder()
    access = broker_trials._access(link(recorder.port, version="3.1", byte_order="little"), 0)
    wire.connect(access).close()
    assert recorder.ended()[2:].startswith(b"\0\6MQIsdp\3\2\x1e\0")
