"""The commands as a user types them, against a gateway that `gateway run` started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

GATEWAY = str(Path(sys.executable).with_name("gateway"))
REPOSITORY = Path(__file__).resolve().parents[2]
MAPPING = """
version: 1
routes:
  - name: up
    from: {endpoint: mqtt, topic: "plant/{rest...}"}
    to: {endpoint: amqp091, exchange: amq.topic, routing_key: "NAME.{rest}", mandatory: false}
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def call(*arguments: str, expect: int = 0, stdin: str = "") -> str:
    done = subprocess.run([GATEWAY, *arguments], capture_output=True, text=True, timeout=30, input=stdin)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout if not expect else done.stdout + done.stderr


class Process:
    """`gateway run` with a mapping file that the test may change."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.mqtt, self.amqp, self.http = free_port(), free_port(), free_port()
        self.mapping = folder / "mapping.yaml"
        self.mapping.write_text(MAPPING.replace("NAME", "first"))
        self.config = folder / "gateway.yaml"
        listeners = {
            "mqtt": {"protocol": "mqtt", "host": "127.0.0.1", "port": self.mqtt},
            "amqp091": {"protocol": "amqp091", "host": "127.0.0.1", "port": self.amqp},
        }
        document = {
            "listeners": listeners,
            "http": {"host": "127.0.0.1", "port": self.http},
            "mappings": [str(self.mapping)],
            "store": {"path": str(folder / "data")},
            **options,
        }
        self.config.write_text(yaml.safe_dump(document))
        self.log = folder / "log"
        self._out = self.log.open("w")
        self.process = subprocess.Popen(
            [GATEWAY, "run", "--config", str(self.config)], stdout=self._out, stderr=subprocess.STDOUT
        )

    def wait_for(self, text: str, seconds: float = 20.0) -> None:
        """Return when the log has `text`."""
        end = time.monotonic() + seconds
        while text not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, f"no {text!r} in {self.log.read_text()}"
            time.sleep(0.02)

    def close(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(20)
        self._out.close()
        return code


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Process]:
    started = Process(tmp_path)
    try:
        started.wait_for("The gateway is running")
        yield started
    finally:
        if started.process.poll() is None:
            started.close()


def test_with_logs_in_json_there_is_nothing_else(tmp_path: Path) -> None:
    started = Process(tmp_path, log={"format": "json"})
    try:
        started.wait_for('"event":"started"')
    finally:
        started.close()
    lines = [json.loads(line) for line in started.log.read_text().splitlines()]
    assert any(line["event"] == "started" for line in lines)


def through(gateway: Process, key: str) -> dict[str, object]:
    """Publish with one command and receive with another; returns the JSON that the latter printed."""
    url = f"amqp://guest:guest@127.0.0.1:{gateway.amqp}"
    arguments = ["subscribe", url, "--exchange", "amq.topic", "--binding-key", key, "--count", "1", "--json"]
    receiver = subprocess.Popen([GATEWAY, *arguments, "--seconds", "20"], stdout=subprocess.PIPE, text=True)
    try:
        metrics = f"http://127.0.0.1:{gateway.http}/metrics"
        end = time.monotonic() + 20
        while "gateway_consumers 1.0" not in fetch(metrics):
            assert time.monotonic() < end
            time.sleep(0.05)
        mqtt = f"mqtt://127.0.0.1:{gateway.mqtt}"
        call("publish", mqtt, "--topic", "plant/line/v1.2", "-m", "21.5", "--header", "unit=C")
        out, _ = receiver.communicate(timeout=25)
    finally:
        receiver.kill()
        receiver.wait()
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


def fetch(url: str) -> str:
    from urllib.request import urlopen

    with urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


def test_a_message_crosses_and_sigterm_drains(gateway: Process) -> None:
    found = through(gateway, "first.#")
    assert found["routing_key"] == "first.line.v1%2E2"
    assert found["body"] == "21.5"
    assert found["qos"] == 1
    assert ["unit", "C"] in found["headers"]  # type: ignore[operator]
    assert fetch(f"http://127.0.0.1:{gateway.http}/readyz") == "ready\n"
    assert gateway.close() == 0
    assert "stopped" in gateway.log.read_text()


def test_a_changed_file_is_taken_and_a_bad_one_is_not(gateway: Process) -> None:
    gateway.mapping.write_text(MAPPING.replace("NAME", "second"))
    gateway.wait_for("mappings reloaded")
    assert through(gateway, "#")["routing_key"] == "second.line.v1%2E2"
    gateway.mapping.write_text(MAPPING.replace("routing_key", "routing_kye"))
    gateway.wait_for("previous ones in force")
    assert f"{gateway.mapping}:6" in gateway.log.read_text()
    assert "routing_key" in gateway.log.read_text()  # the suggestion
    assert through(gateway, "#")["routing_key"] == "second.line.v1%2E2"


def test_sighup_reloads(gateway: Process) -> None:
    os.kill(gateway.process.pid, signal.SIGHUP)
    gateway.wait_for("mappings reloaded")
    gateway.wait_for('"audit":"mapping_changed"')


def test_publish_says_why_it_was_not_accepted(gateway: Process) -> None:
    url = f"amqp://127.0.0.1:{gateway.amqp}"
    assert "NO_ROUTE" in call("publish", url, "--queue", "nobody", "-m", "x", expect=1)
    assert "NOT_FOUND" in call("publish", url, "--exchange", "nobody", "-m", "x", expect=1)


def test_publish_wants_an_address_of_its_protocol() -> None:
    said = call("publish", "amqp://127.0.0.1", "--topic", "a", "-m", "x", expect=2)
    assert "AMQP 0-9-1 needs --queue" in said


def test_publish_without_a_broker_says_so() -> None:
    said = call("publish", f"mqtt://127.0.0.1:{free_port()}", "--topic", "a", "-m", "x", expect=1)
    assert "127.0.0.1" in said
    assert "refused" in said


def test_subscribe_stops_at_its_time(gateway: Process) -> None:
    url = f"mqtt://127.0.0.1:{gateway.mqtt}"
    assert call("subscribe", url, "--topic", "a/#", "--count", "1", "--seconds", "0.2", expect=1) == ""


def test_the_tests_of_the_shipped_mappings_pass() -> None:
    files = sorted(str(path) for path in (REPOSITORY / "mappings").glob("*.yaml"))
    found = json.loads(call("test", "--json", *files))
    assert found["failed"] == 0
    assert found["passed"] >= len(files)


def test_a_failing_mapping_test_is_told(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    case = """
tests:
  - name: wrong on purpose
    publish: {endpoint: mqtt, topic: plant/a}
    expect: [{endpoint: amqp091, routing_key: other}]
"""
    path.write_text(MAPPING + case)
    said = call("test", str(path), expect=1)
    line = MAPPING.count("\n") + 3
    assert f"{path}:{line}:5: error: test 'wrong on purpose': expect[0].routing_key: expected 'other'" in said
    assert "NAME.a" in said


def test_explain_shows_matches_and_misses(gateway: Process) -> None:
    said = call("explain", "mqtt", "--topic", "plant/a", "--config", str(gateway.config), "--json")
    found = json.loads(said)
    assert found["matches"][0]["address"] == "amq.topic:first.a"
    said = call("explain", "mqtt", "--topic", "other", "--config", str(gateway.config))
    assert "- up" in said


def test_explain_refuses_an_unknown_endpoint(gateway: Process) -> None:
    assert "amqp091" in call("explain", "nowhere", "--topic", "a", "--config", str(gateway.config), expect=2)


def test_schema_is_json() -> None:
    assert "routes" in json.loads(call("schema"))["properties"]


def test_a_taken_port_is_an_error_with_its_key(gateway: Process) -> None:
    other = gateway.config.with_name("other.yaml")
    other.write_text(gateway.config.read_text().replace("/data", "/other"))
    said = call("run", "--config", str(other), expect=1)
    assert "cannot listen on" in said
