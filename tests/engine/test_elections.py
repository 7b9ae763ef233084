"""Links that one replica alone consumes over: one at any time, another when that is gone."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pika
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gateway.errors import ConfigurationError
from gateway.settings import load_settings
from tests.chaos.proxy import Proxy
from tests.engine.replicas import PATIENCE_SECS, Client, lasting
from tests.interop.gateway_process import GatewayProcess
from tests.interop.servers import LOOPBACK, Mosquitto, RabbitMQ, free_ports
from tests.interop.state_database import NO_CLUSTER, state_server

TOKEN = "a secret of eighteen or more characters"
ROUTES = """
version: 1
routes:
  - name: in
    from: {endpoint: far, topic: "NAME/{rest...}"}
    to: {endpoint: mqtt, topic: "here/NAME/{rest...}"}
  - name: out
    from: {endpoint: mqtt, topic: "away/NAME/{rest...}"}
    to: {endpoint: far, topic: "there/NAME/{rest...}"}
"""
QUEUE_ROUTES = """
version: 1
routes:
  - name: in
    from: {endpoint: far, queue: "NAME"}
    to: {endpoint: mqtt, topic: "here/NAME"}
"""


class Door(GatewayProcess):
    """A replica with the elected link `far`."""

    def __init__(self, folder: Path, name: str, cluster: str, far: str, routes: str, replica: str) -> None:
        mqtt, http = free_ports(2)
        mapping = folder / f"{replica}.yaml"
        mapping.write_text(routes.replace("NAME", name))
        token = folder / f"{replica}.token"
        token.write_text(TOKEN)
        super().__init__(
            folder / replica,
            replica=f"{name}-{replica}",
            listeners={"mqtt": {"protocol": "mqtt", "host": LOOPBACK, "port": mqtt}},
            links={"far": {"url": far, "elected": True, "required": True, "reconnect_max_secs": 0.5}},
            mappings=[str(mapping)],
            http={"host": LOOPBACK, "port": http, "token_file": str(token)},
            broker={
                "engine": "rabbitmq",
                "urls": [cluster],
                "namespace": name,
                "reconnect_max_secs": 0.5,
                "engine_timeout_secs": 4.0,
            },
        )

    def asked(self, path: str) -> tuple[int, str]:
        at = f"http://{LOOPBACK}:{self.configuration['http']['port']}{path}"
        try:
            request = Request(at, headers={"Authorization": f"Bearer {TOKEN}"})
            with urlopen(request, timeout=PATIENCE_SECS) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()

    def told(self, path: str, what: dict[str, Any]) -> str:
        """The answer to something that is to be done."""
        at = f"http://{LOOPBACK}:{self.configuration['http']['port']}{path}"
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        request = Request(at, json.dumps(what).encode(), headers)
        with urlopen(request, timeout=2 * PATIENCE_SECS) as answer:
            return str(answer.read().decode())

    def sample(self, name: str, **labels: str) -> float:
        found = [
            one.value
            for family in text_string_to_metric_families(self.asked("/metrics")[1])
            for one in family.samples
            if one.name == name and labels.items() <= one.labels.items()
        ]
        assert found, (name, labels)
        return sum(found)

    @property
    def leads(self) -> bool:
        return bool(self.sample("gateway_link_leader"))

    @property
    def consumes(self) -> bool:
        return self.leads and bool(self.sample("gateway_link_up", endpoint="far (in)"))


def until(condition: Callable[..., object], patience: float = PATIENCE_SECS) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)


@contextmanager
def doors(*given: Door) -> Iterator[tuple[Door, Door]]:
    """Both run, and one of them is elected: it comes first."""
    with ExitStack() as stack:
        for one in given:
            stack.enter_context(one)
        for one in given:
            until(lambda door=one: door.asked("/readyz") == (200, "ready\n"))
        until(lambda: any(one.consumes for one in given))
        first, second = sorted(given, key=lambda one: not one.leads)
        yield first, second


class Publishing:
    """Publishes the numbers from 0 on to a broker, one after the other, until it is left."""

    def __init__(self, publish: Callable[[bytes], Any]) -> None:
        self._publish = publish
        self._over = threading.Event()
        self.count = 0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.wait(0.005):
            self._publish(b"%d" % self.count)
            self.count += 1

    def __enter__(self) -> Publishing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def numbers(client: Client) -> list[int]:
    return [int(message.payload) for message in list(client.messages)]


def moved(first: Door, second: Door, lose: Callable[[], None], mosquitto: Mosquitto, name: str) -> float:
    """Messages flow, the one that has the link is lost, and they flow on. Returns the seconds in between.
    None is lost, and none came twice before."""
    with (
        Client(mosquitto.port, f"{name}-source") as source,
        lasting(second.port("mqtt"), f"{name}-sink") as sink,
    ):
        sink.subscribe(f"here/{name}/#", qos=1)
        with Publishing(lambda body: source.publish(f"{name}/x", body, qos=1)) as publishing:
            sink.until(lambda: len(sink.messages) >= 100)
            before = numbers(sink)
            assert before == list(range(before[0], before[0] + len(before)))  # in order, each once
            # Mosquitto sends no more than 20 that have not been acknowledged: so all of those have been.
            sink.until(lambda: len(sink.messages) > len(before) + 20)
            lost_at = time.monotonic()
            lose()
            until(lambda: second.consumes)
            at = publishing.count
            sink.until(lambda: numbers(sink)[-1] > at)
            took = time.monotonic() - lost_at
        sink.until(lambda: publishing.count - 1 in numbers(sink))
        assert set(range(before[0], publishing.count)) == set(numbers(sink))
        times = Counter(numbers(sink))
        assert all(times[number] == 1 for number in before)
        print(f"{name}: {took:.1f} s, {sum(times.values()) - len(times)} came again")
    return took


def pair(folder: Path, name: str, cluster: str, far: str, routes: str = ROUTES) -> tuple[Door, Door]:
    one, other = (Door(folder, name, cluster, far, routes, replica) for replica in ("one", "other"))
    return one, other


def test_one_alone_consumes_and_all_publish(rabbitmq: RabbitMQ, mosquitto: Mosquitto, tmp_path: Path) -> None:
    """Who stands by is ready, and says why it does not consume."""
    name = "alone"
    with (
        doors(*pair(tmp_path, name, rabbitmq.url, mosquitto.url)) as (first, second),
        Client(mosquitto.port, "far") as far,
        Client(first.port("mqtt"), "near") as near,
        Client(second.port("mqtt"), "also near") as also,
    ):
        far.subscribe("there/alone/#", qos=1)
        near.subscribe("here/alone/#", qos=1)
        for at in range(50):
            far.publish("alone/x", b"%d" % at)
        near.until(lambda: len(near.messages) >= 50)
        near.publish("away/alone/a", b"1")
        also.publish("away/alone/b", b"2")
        far.until(lambda: len(far.messages) == 2)
        assert numbers(near) == list(range(50))
        assert not second.leads
        assert second.asked("/readyz") == (200, "ready\n")
        assert "another replica consumes over the link" in second.asked("/api/v1/endpoints")[1]
        assert "another replica consumes over the link" not in first.asked("/api/v1/endpoints")[1]
        assert second.sample("gateway_link_up", endpoint="far") == 1
        assert second.sample("gateway_link_up", endpoint="far (in)") == 0


def test_it_moves_when_its_owner_is_killed(rabbitmq: RabbitMQ, mosquitto: Mosquitto, tmp_path: Path) -> None:
    with doors(*pair(tmp_path, "killed", rabbitmq.url, mosquitto.url)) as (first, second):
        moved(first, second, first.kill, mosquitto, "killed")


def test_it_moves_when_its_owner_is_frozen(rabbitmq: RabbitMQ, mosquitto: Mosquitto, tmp_path: Path) -> None:
    """When it wakes up it stands by."""
    with doors(*pair(tmp_path, "frozen", rabbitmq.url, mosquitto.url)) as (first, second):
        try:
            moved(first, second, lambda: first.process.send_signal(signal.SIGSTOP), mosquitto, "frozen")
        finally:
            first.process.send_signal(signal.SIGCONT)
        until(lambda: not first.leads)
        assert second.leads


def test_it_moves_when_its_owner_is_cut_off(rabbitmq: RabbitMQ, mosquitto: Mosquitto, tmp_path: Path) -> None:
    """It reaches the far broker and the cluster still, but not the database, and stops by itself."""
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(state_server().port)) for _ in range(2)]
        given = pair(tmp_path, "cut", rabbitmq.url, mosquitto.url)
        for door, proxy in zip(given, proxies, strict=True):
            url = f"postgresql://postgres@{LOOPBACK}:{proxy.port}/postgres"
            door.configuration["broker"]["postgresql"] = {"url": url}
        first, second = stack.enter_context(doors(*given))
        proxy = proxies[given.index(first)]
        moved(first, second, proxy.stall, mosquitto, "cut")
        until(lambda: not first.leads)
        why = (
            "link far (in): the database is unreachable, so no replica can be elected to"
            " consume over the link"
        )
        until(lambda: why in first.asked("/readyz")[1])
        proxy.shut()
        proxy.open()
        until(lambda: first.asked("/readyz") == (200, "ready\n"), 3 * PATIENCE_SECS)
        assert second.leads


def test_it_moves_when_its_owner_loses_the_cluster(
    rabbitmq: RabbitMQ, mosquitto: Mosquitto, tmp_path: Path
) -> None:
    """What it consumed would get no further, though its lease is renewed."""
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(rabbitmq.port)) for _ in range(2)]
        given = [
            Door(
                tmp_path, "lost", f"amqp://guest:guest@{LOOPBACK}:{proxy.port}/", mosquitto.url, ROUTES, name
            )
            for name, proxy in zip(("one", "other"), proxies, strict=True)
        ]
        for door in given:
            door.configuration["links"]["far"]["elected_timeout_secs"] = 2.0
        first, second = stack.enter_context(doors(*given))
        moved(first, second, proxies[given.index(first)].shut, mosquitto, "lost")
        assert not first.leads


def test_it_moves_when_its_owner_does_not_reach_the_broker(
    rabbitmq: RabbitMQ, mosquitto: Mosquitto, tmp_path: Path
) -> None:
    """And comes round to whoever does; not while an operator has paused it."""
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(mosquitto.port)) for _ in range(2)]
        given = [
            Door(tmp_path, "unreached", rabbitmq.url, f"mqtt://{LOOPBACK}:{proxy.port}", ROUTES, name)
            for name, proxy in zip(("one", "other"), proxies, strict=True)
        ]
        for door in given:
            door.configuration["links"]["far"]["elected_timeout_secs"] = 2.0
        first, second = stack.enter_context(doors(*given))
        proxy = proxies[given.index(first)]

        def lose() -> None:
            proxy.shut()

        moved(first, second, lose, mosquitto, "unreached")
        assert not first.leads
        other = proxies[given.index(second)]
        other.shut()  # now none reaches it
        until(lambda: first.leads)
        until(lambda: second.leads)
        proxy.open()
        until(lambda: first.consumes)


def test_an_owner_that_is_paused_or_alone_stays(
    rabbitmq: RabbitMQ, mosquitto: Mosquitto, tmp_path: Path
) -> None:
    with Proxy(mosquitto.port) as proxy:
        name, far = "stays", f"mqtt://{LOOPBACK}:{proxy.port}"
        given = pair(tmp_path, name, rabbitmq.url, far)
        for door in given:
            door.configuration["links"]["far"]["elected_timeout_secs"] = 0.5
        with doors(*given) as (first, second):
            first.told("/api/v1/links/pause", {"name": "far"})
            until(lambda: not first.consumes)
            seen: list[bool] = []
            until(lambda: seen.append(first.leads) or len(seen) > 30)
            assert all(seen)
            assert not second.leads
            first.told("/api/v1/links/resume", {"name": "far"})
            until(lambda: first.consumes)
            second.kill()
            proxy.shut()
            gave_up = "link not connected at this replica"
            until(lambda: first.log.count(gave_up) >= 2)
            proxy.open()
            until(lambda: first.consumes)


def test_an_orderly_stop_hands_it_over(rabbitmq: RabbitMQ, mosquitto: Mosquitto, tmp_path: Path) -> None:
    with doors(*pair(tmp_path, "stopped", rabbitmq.url, mosquitto.url)) as (first, second):
        assert first.terminate() == 0
        until(lambda: second.consumes)


def test_a_queue_is_consumed_in_order_by_one(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    """And by nobody else, though the queue would divide its messages."""
    name = "ordered"
    with (
        doors(*pair(tmp_path, name, rabbitmq.url, rabbitmq.url, QUEUE_ROUTES)) as (first, second),
        lasting(second.port("mqtt"), "ordered-sink") as sink,
        pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection,
    ):
        sink.subscribe("here/ordered", qos=1)
        channel = connection.channel()
        for at in range(100):
            channel.basic_publish("", name, b"%d" % at)
        sink.until(lambda: len(sink.messages) == 100)
        assert numbers(sink) == list(range(100))
        first.kill()
        until(lambda: second.consumes)
        for at in range(100, 200):
            channel.basic_publish("", name, b"%d" % at)
        sink.until(lambda: 199 in numbers(sink))
        assert list(dict.fromkeys(numbers(sink))) == list(range(200))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "links.far.elected: needs broker.engine"),
        (
            {
                "broker": NO_CLUSTER,
                "listeners": {"mqtt": {"protocol": "mqtt"}},
            },
            "links.far.client_id: must contain {replica} with elected",
        ),
    ],
)
def test_what_an_election_needs(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    file = tmp_path / "gateway.yaml"
    far = {"url": "mqtt://far", "elected": True, "client_id": "we"}
    file.write_text(yaml.safe_dump({"links": {"far": far}} | more))
    with pytest.raises(ConfigurationError) as raised:
        load_settings(file, {})
    assert said in str(raised.value)
