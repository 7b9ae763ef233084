"""What a newcomer does first: a clone that runs, and a bridge with TLS and users as its guide says.

The tutorials' and the README's commands run in tests/docs/test_commands.py, the bridge of the Compose file in
test_compose.py, and the sidecar of the manifest in tests/interop/test_sidecar_rollout.py.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import paho.mqtt.client as paho
import pika
import pytest
import yaml
from paho.mqtt.enums import CallbackAPIVersion

from tests.docs.pages import PAGES
from tests.interop.gateway_process import ANNOUNCED, GatewayProcess, environment
from tests.interop.servers import Mosquitto, RabbitMQ, free_ports, program
from tests.interop.test_tls import make_certificate
from tests.ship.versions import ROOT

LOOPBACK: Final = "127.0.0.1"
PATIENCE_SECS: Final = 30.0
PASSWORD: Final = "s3cret-of-the-bridge"
ONLY_BEFORE_RELEASE: Final = pytest.mark.skipif(
    "RELEASE_CHECK" not in os.environ, reason="takes a minute: make release-check runs it"
)
GUIDE: Final = PAGES[ROOT / "docs/guides/bridge-two-brokers.md"]


def blocks(kind: str) -> list[str]:
    return [text for language, text in GUIDE.blocks if language == kind]


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Return a folder with cert.pem and key.pem of both brokers; the certificate is its own authority."""
    folder = tmp_path / "certificate"
    folder.mkdir()
    make_certificate(folder, "brokers")
    for file in folder.iterdir():
        file.chmod(0o644)
    return folder


@pytest.fixture
def plant(tmp_path: Path, certificate: Path) -> Iterator[tuple[Mosquitto, int]]:
    """Start a Mosquitto with a TLS port, the guide's user and its access list; devices are anonymous."""
    folder = tmp_path / "mosquitto"
    folder.mkdir()
    users, rules = folder / "users", folder / "rules"
    subprocess.run((program("mosquitto_passwd"), "-b", "-c", users, "gateway", PASSWORD), check=True)
    (allowed,) = blocks("text")
    rules.write_text(f"topic readwrite #\n\n{allowed}")
    (port,) = free_ports(1)
    lines = (
        f"password_file {users}",
        f"acl_file {rules}",
        f"listener {port} {LOOPBACK}",
        f"certfile {certificate / 'cert.pem'}",
        f"keyfile {certificate / 'key.pem'}",
    )
    with Mosquitto(folder, lines) as broker:
        yield broker, port


@pytest.fixture
def erp(tmp_path: Path, certificate: Path) -> Iterator[tuple[RabbitMQ, int]]:
    """Start a RabbitMQ with a TLS port, and the user and permissions that the guide's commands make."""
    (port,) = free_ports(1)
    lines = (
        f"listeners.ssl.1 = {LOOPBACK}:{port}",
        f"ssl_options.cacertfile = {certificate / 'cert.pem'}",
        f"ssl_options.certfile = {certificate / 'cert.pem'}",
        f"ssl_options.keyfile = {certificate / 'key.pem'}",
    )
    with RabbitMQ(tmp_path / "rabbitmq", lines=lines) as broker:
        for line in "".join(blocks("console")).splitlines():
            if line.startswith("$ rabbitmqctl "):
                broker.control(*shlex.split(line.replace("PASSWORD", PASSWORD))[2:])
        yield broker, port


def configuration_of(folder: Path, certificate: Path, mqtts: int, amqps: int) -> dict[str, Any]:
    """Return the guide's configuration with TLS and users, with hosts, ports and paths of this test."""
    _, mapping, text = blocks("yaml")
    (folder / "plant.yaml").write_text(mapping)
    (folder / "secret").write_text(PASSWORD)
    for name, value in (
        ("@mosquitto.example", f"@{LOOPBACK}:{mqtts}"),
        ("@rabbit.example", f"@{LOOPBACK}:{amqps}"),
        ("/run/secrets/plant", str(folder / "secret")),
        ("/run/secrets/erp", str(folder / "secret")),
        ("/etc/gateway/ca.pem", str(certificate / "cert.pem")),
        ("[plant.yaml]", f"[{folder / 'plant.yaml'}]"),
    ):
        assert name in text
        text = text.replace(name, value)
    found: dict[str, Any] = yaml.safe_load(text)
    return found


@ONLY_BEFORE_RELEASE
def test_the_bridge_of_the_guide_with_tls_and_users(
    tmp_path: Path, certificate: Path, plant: tuple[Mosquitto, int], erp: tuple[RabbitMQ, int]
) -> None:
    mosquitto, mqtts = plant
    rabbitmq, amqps = erp
    configuration = configuration_of(tmp_path, certificate, mqtts, amqps)
    http = {"host": LOOPBACK, "port": free_ports(1)[0]}
    with GatewayProcess(tmp_path, **configuration, http=http) as gateway:
        said = gateway.command("check", "--connect", "-c", "gateway.yaml")
        assert "checked 0 listeners, 2 links, 1 mapping file: 0 errors" in said, said
        seen: list[tuple[str, bytes]] = []
        device = paho.Client(CallbackAPIVersion.VERSION2)
        device.on_message = lambda _client, _data, message: seen.append(
            (message.topic, bytes(message.payload))
        )
        device.connect(LOOPBACK, mosquitto.port)
        device.subscribe("plant/+/+/command", 1)
        device.loop_start()
        with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
            channel = connection.channel()
            end = time.monotonic() + PATIENCE_SECS
            while gateway.log.count("link connected") < 2:
                assert time.monotonic() < end, gateway.log
                time.sleep(0.05)
            channel.queue_declare("erp-telemetry", durable=True)
            channel.queue_bind("erp-telemetry", "telemetry", "#")
            channel.queue_bind("commands", "amq.topic", "l1.#")
            topic = "plant/l1/press.7/telemetry/temp/max"
            device.publish(topic, "21.5", qos=1).wait_for_publish(PATIENCE_SECS)
            while (found := channel.basic_get("erp-telemetry", auto_ack=True))[0] is None:
                assert time.monotonic() < end, gateway.log
                time.sleep(0.05)
            assert (found[0].routing_key, found[2]) == ("l1.press%2E7.temp.max", b"21.5")
            channel.basic_publish("amq.topic", "l1.press%2E7", b"stop")
            while not seen:
                assert time.monotonic() < end, gateway.log
                time.sleep(0.05)
        device.disconnect()
        device.loop_stop()
        assert seen == [("plant/l1/press.7/command", b"stop")]
        assert PASSWORD not in gateway.log


@ONLY_BEFORE_RELEASE
@pytest.mark.timeout(1200)
def test_a_clone_runs_and_carries_the_first_message(tmp_path: Path) -> None:
    """Follow the README: clone, `make run`, and publish and subscribe with Mosquitto's clients."""
    clone = tmp_path / "clone"
    subprocess.run(("git", "clone", "-q", ROOT, clone), check=True)
    ports = dict(zip(("MQTT", "AMQP091", "AMQPFAST"), free_ports(3), strict=True))
    variables = {f"GATEWAY_LISTENERS__{name}__PORT": str(port) for name, port in ports.items()}
    variables["GATEWAY_HTTP__PORT"] = str(free_ports(1)[0])
    with (tmp_path / "log").open("wb") as log:
        running = subprocess.Popen(
            ("make", "run"),
            cwd=clone,
            env=environment() | variables,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            process_group=0,
        )
    try:
        assert running.stdout is not None
        for line in running.stdout:
            if ANNOUNCED.search(line.rstrip()):
                break
        else:
            raise AssertionError((tmp_path / "log").read_text())
        at = ("-h", LOOPBACK, "-p", str(ports["MQTT"]), "-q", "1", "-t", "plant/line1/temperature")
        publish = (program("mosquitto_pub"), *at, "-r", "-m", "21.5")  # retained: it may come first
        subprocess.run(publish, check=True, timeout=PATIENCE_SECS)
        subscribe = (program("mosquitto_sub"), *at, "-C", "1", "-v")
        said = subprocess.run(subscribe, check=True, timeout=PATIENCE_SECS, capture_output=True, text=True)
        assert said.stdout == "plant/line1/temperature 21.5\n"
        version = subprocess.run((clone / ".venv/bin/gateway", "version"), capture_output=True, text=True)
        assert version.stdout.startswith("gateway "), version
    finally:
        os.killpg(running.pid, signal.SIGTERM)
        running.wait(PATIENCE_SECS)
        if running.stdout is not None:
            running.stdout.close()
