"""mosquitto_pub and mosquitto_sub, amqp-publish, amqp-consume and amqp-get, as Debian ships them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.conftest import missing
from tests.interop.gateway_fixture import Running, running

VERSIONS = ("mqttv31", "mqttv311", "mqttv5")


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    for program in ("mosquitto_pub", "amqp-publish"):
        if shutil.which(program) is None:
            missing(f"{program} is not installed: tests/interop/peers.sh")
    with running() as started:
        yield started


def call(*words: str, stdin: bytes = b"") -> str:
    return subprocess.run(words, check=True, capture_output=True, timeout=20, input=stdin).stdout.decode()


def publish(gateway: Running, topic: str, body: str, *more: str) -> None:
    call("mosquitto_pub", "-p", str(gateway.mqtt), "-t", topic, "-m", body, *more)


class Subscriber:
    """mosquitto_sub, once it has been told that its subscription stands."""

    def __init__(self, gateway: Running, count: int, *words: str) -> None:
        before = gateway.ask(lambda: gateway.gateway.mqtt.subscriptions)
        self.process = subprocess.Popen(
            ["mosquitto_sub", "-p", str(gateway.mqtt), "-C", str(count), "-W", "15", *words],
            stdout=subprocess.PIPE,
            text=True,
        )
        gateway.until(lambda: gateway.gateway.mqtt.subscriptions > before)

    def lines(self) -> list[str]:
        """What it printed, when it has received all."""
        out, _ = self.process.communicate(timeout=20)
        assert self.process.returncode == 0
        return out.splitlines()


@pytest.mark.parametrize("qos", ["0", "1", "2"])
@pytest.mark.parametrize("version", VERSIONS)
def test_publish_and_subscribe(gateway: Running, version: str, qos: str) -> None:
    topic = f"v/{version}/{qos}"
    subscriber = Subscriber(gateway, 1, "-t", f"v/+/{qos}", "-q", qos, "-V", version, "-F", "%t %q %p")
    publish(gateway, topic, "hello", "-q", qos, "-V", version)
    assert subscriber.lines() == [f"{topic} {qos} hello"]


@pytest.mark.parametrize("version", VERSIONS)
def test_retained_for_a_wildcard_and_cleared(gateway: Running, version: str) -> None:
    topic = f"kept/{version}/state"
    publish(gateway, topic, "on", "-r", "-q", "1", "-V", version)
    words = ["-C", "1", "-W", "15", "-t", f"kept/{version}/#", "-V", version, "-F", "%r %p"]
    assert call("mosquitto_sub", "-p", str(gateway.mqtt), *words) == "1 on\n"
    call("mosquitto_pub", "-p", str(gateway.mqtt), "-t", topic, "-r", "-n", "-q", "1")
    assert gateway.ask(lambda: topic in gateway.gateway.mqtt.retained) is False


@pytest.mark.parametrize("version", VERSIONS)
def test_a_will_is_published_when_the_client_dies(gateway: Running, version: str) -> None:
    subscriber = Subscriber(gateway, 1, "-t", f"will/{version}", "-F", "%p")
    words = ["-t", "other", "-V", version, "--will-topic", f"will/{version}", "--will-payload", "gone"]
    dying = Subscriber(gateway, 1, *words)
    dying.process.kill()
    dying.process.communicate(timeout=20)
    assert subscriber.lines() == ["gone"]


def test_mosquitto_pub_to_amqp_consume(gateway: Running) -> None:
    url = f"amqp://guest:guest@127.0.0.1:{gateway.amqp}"
    arguments = ["amqp-consume", "-u", url, "-e", "amq.topic", "-r", "tools.#", "-c", "2", "cat"]
    consumer = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    gateway.until(lambda: any(queue.consumers for queue in gateway.gateway.host.queues.values()))
    publish(gateway, "tools/a", "one,", "-q", "1")
    publish(gateway, "tools/b", "two", "-q", "0")
    out, _ = consumer.communicate(timeout=15)
    assert out == "one,two"


def test_amqp_publish_to_mosquitto_sub_and_get(gateway: Running) -> None:
    url = f"amqp://guest:guest@127.0.0.1:{gateway.amqp}"
    subscriber = Subscriber(gateway, 1, "-t", "back/#", "-q", "1", "-F", "%t %q %p")
    call("amqp-publish", "-u", url, "-e", "amq.topic", "-r", "back.x%2Ey", "-p", "-b", "hello")
    assert subscriber.lines() == ["back/x.y 1 hello"]
    call("amqp-declare-queue", "-u", url, "-q", "tools-queue", "-d")
    call("amqp-publish", "-u", url, "-r", "tools-queue", "-b", "kept")
    assert call("amqp-get", "-u", url, "-q", "tools-queue") == "kept"
    call("amqp-delete-queue", "-u", url, "-q", "tools-queue")
