"""Workers: processes that share the listeners' ports, and the one that has started them."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import trio
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gateway.app import workers
from gateway.app.workers import Supervisor
from gateway.settings import load_settings
from tests.engine.replicas import PATIENCE_SECS, Client, lasting
from tests.interop.gateway_process import GatewayProcess
from tests.interop.servers import LOOPBACK, Mosquitto, RabbitMQ, free_ports
from tests.interop.state_database import with_state
from tests.needs import needed

NAMESPACE = "workers"
CLIENTS_MAX = 64  # of so many, both of two workers have some, but once in ten billion billion times


def with_workers(folder: Path, url: str, **more: Any) -> GatewayProcess:
    (mqtt,) = free_ports(1)
    configuration: dict[str, Any] = {
        "workers": 2,
        "replica": folder.name,
        "listeners": {"mqtt": {"protocol": "mqtt", "host": LOOPBACK, "port": mqtt}},
        "http": {"host": LOOPBACK, "port": 0},
        "broker": {
            "engine": "rabbitmq",
            "urls": [url],
            "namespace": NAMESPACE,
            "engine_timeout_secs": 4.0,
            "reconnect_max_secs": 0.5,
        },
    }
    return GatewayProcess(folder, **(configuration | more))


def asked(gateway: GatewayProcess, path: str) -> tuple[int, str]:
    lines = [json.loads(line) for line in gateway.log.splitlines()]
    (port,) = (line["http"] for line in lines if line["event"] == "started" and "workers" in line)
    try:
        with urlopen(f"http://{LOOPBACK}:{port}{path}", timeout=PATIENCE_SECS) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def sample(gateway: GatewayProcess, name: str, **labels: str) -> float:
    """The sum of the samples with these labels."""
    code, page = asked(gateway, "/metrics")
    assert code == 200, page
    return sum(
        one.value
        for family in text_string_to_metric_families(page)
        for one in family.samples
        if one.name == name and labels.items() <= one.labels.items()
    )


def connected(gateway: GatewayProcess, worker: int) -> float:
    return sample(gateway, "gateway_connections", endpoint="mqtt", worker=str(worker))


def until(condition: Callable[..., object], patience: float = PATIENCE_SECS) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)


def until_ready(gateway: GatewayProcess) -> None:
    until(lambda: asked(gateway, "/readyz") == (200, "ready\n"))


@contextmanager
def clients_at_both(gateway: GatewayProcess, prefix: str) -> Iterator[list[Client]]:
    """Clients, of which each worker has one at least. Returns when all are connected."""
    with ExitStack() as stack:
        clients: list[Client] = []
        while len(clients) < 2 or not (connected(gateway, 1) and connected(gateway, 2)):
            assert len(clients) < CLIENTS_MAX, "one worker gets none"
            client = Client(gateway.port("mqtt"), f"{prefix}{len(clients)}")
            clients.append(stack.enter_context(client))
        yield clients


def ended(pid: int) -> bool:
    """A process that is not there, or waits to be reaped by whoever is there instead of its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_workers_share_a_port_and_a_world(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    """Whoever connects, and wherever: what one publishes the others get, once. One page has the metrics of
    all."""
    with with_workers(tmp_path / "world", rabbitmq.url) as gateway:
        until_ready(gateway)
        with clients_at_both(gateway, "w") as clients:
            for client in clients:
                client.subscribe("workers/world", qos=1)
            for at, client in enumerate(clients):
                client.publish("workers/world", b"%d" % at)
            for client in clients:
                client.until(lambda one=client: len(one.messages) == len(clients))
                assert sorted(int(body) for _, body in client.told) == list(range(len(clients)))
            assert connected(gateway, 1) + connected(gateway, 2) == len(clients)
        code, page = asked(gateway, "/api/v1/status")
        assert code == 404
        assert "each worker has its own console and API" in page
        assert asked(gateway, "/livez") == (200, "alive\n")
        assert sample(gateway, "gateway_worker_up") == 2
        assert (tmp_path / "world/data/worker-1/gateway.db").is_file()
        assert (tmp_path / "world/data/worker-2/gateway.db").is_file()


def test_a_worker_that_dies_is_started_again(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    """Clients of the other one notice nothing, and its own find their sessions."""
    with with_workers(tmp_path / "dies", rabbitmq.url) as gateway:
        until_ready(gateway)
        with lasting(gateway.port("mqtt"), "owner") as owner:
            owner.subscribe("workers/dies", qos=1)
            (killed,) = (one for one in (1, 2) if connected(gateway, one))
            pid = gateway.worker_pids[killed]
            os.kill(pid, signal.SIGKILL)
            owner.until(lambda: owner.ended)
        until(
            lambda: sample(gateway, "gateway_worker_restarts_total", worker=str(killed), reason="died") == 1
        )
        until(lambda: sample(gateway, "gateway_worker_up") == 2)
        until_ready(gateway)
        assert gateway.worker_pids[killed] != pid
        with lasting(gateway.port("mqtt"), "owner") as again, clients_at_both(gateway, "d") as clients:
            assert again.present
            clients[0].publish("workers/dies", b"x")
            again.until(lambda: again.told == [("workers/dies", b"x")])
    assert "worker ended, restarting" in gateway.log


def test_one_reload_and_one_drain(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    with with_workers(tmp_path / "drain", rabbitmq.url) as gateway:
        until_ready(gateway)
        gateway.process.send_signal(signal.SIGHUP)
        for worker in "12":
            until(
                lambda number=worker: sample(
                    gateway, "gateway_mapping_reloads_total", worker=number, outcome="taken"
                )
            )
        pids = gateway.worker_pids.values()
        assert len(pids) == 2
        with clients_at_both(gateway, "s") as clients:
            for pid in pids:  # as systemd does, which sends it to all processes of a service
                os.kill(pid, signal.SIGTERM)
            assert gateway.terminate() == 0
            for client in clients:
                client.until(lambda one=client: one.ended)
                assert client.ended[0].value == 0x8B
        assert all(map(ended, pids))
        lines = [json.loads(line) for line in gateway.log.splitlines()]
        assert {line.get("worker") for line in lines if line["event"] == "stopped"} == {None, 1, 2}
        assert ", killed" not in gateway.log


def test_workers_whose_supervisor_is_gone_leave(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    with with_workers(tmp_path / "gone", rabbitmq.url) as gateway:
        until_ready(gateway)
        pids = gateway.worker_pids.values()
        gateway.kill()
        until(lambda: all(map(ended, pids)))


def test_workers_of_the_embedded_broker_take_all_to_a_link(mosquitto: Mosquitto, tmp_path: Path) -> None:
    """Nobody can subscribe there, so nobody misses what came in at another worker."""
    mapping = tmp_path / "mapping.yaml"
    source = {"endpoint": "mqtt", "topic": "oneway/{x}"}
    target = {"endpoint": "far", "topic": "there/oneway/{x}"}
    mapping.write_text(
        yaml.safe_dump({"version": 1, "routes": [{"name": "up", "from": source, "to": target}]})
    )
    (port,) = free_ports(1)
    listener = {"protocol": "mqtt", "host": LOOPBACK, "port": port, "retain": False, "qos_max": 1}
    gateway = with_workers(
        tmp_path / "oneway",
        "",
        broker={"engine": "embedded"},
        listeners={"mqtt": listener | {"anonymous": "always"}},
        links={"far": {"url": mosquitto.url, "required": True}},
        mappings=[str(mapping)],
        roles={"device": {"mqtt": {"publish": "#"}}},
        default_roles={"anonymous": "device"},
    )
    with gateway, Client(mosquitto.port, "oneway-far") as far:
        until_ready(gateway)
        far.subscribe("there/oneway/#", qos=1)
        with clients_at_both(gateway, "o") as clients:
            for at, client in enumerate(clients):
                client.publish("oneway/x", b"%d" % at)
            far.until(lambda: len(far.messages) == len(clients))
            assert sorted(int(body) for _, body in far.told) == list(range(len(clients)))
            assert clients[0].subscribe("oneway/#") == ["Not authorized"]


def test_what_cannot_be_used_is_told_once(tmp_path: Path) -> None:
    """As with one process, and the program ends with the code of a wrong configuration."""
    (tmp_path / "wrong.yaml").write_text("routes: [{}]\n")
    gateway = with_workers(tmp_path, "amqp://localhost:1", mappings=[str(tmp_path / "wrong.yaml")])
    with pytest.raises(AssertionError, match="did not start"):
        gateway.start()
    assert gateway.log.count("needs 'version'") == 1


def test_a_worker_that_cannot_begin_ends_all(tmp_path: Path) -> None:
    """Its folder is a file. What it says is all there is to say."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "worker-2").write_text("")
    gateway = with_workers(tmp_path, "amqp://localhost:1")
    with pytest.raises(AssertionError, match=r"worker-2(.|\n)*error: worker 2 did not start"):
        gateway.start()


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        listener = {"protocol": "mqtt", "host": LOOPBACK, "port": port}
        gateway = with_workers(tmp_path, "amqp://localhost:1", listeners={"mqtt": listener})
        with pytest.raises(AssertionError, match=f"listeners.mqtt: cannot listen on {LOOPBACK}:{port}"):
            gateway.start()


@needed("processes")
class Supervised:
    """A supervisor in a thread of the test."""

    def __init__(self, file: Path) -> None:
        self.supervisor = Supervisor(load_settings(file, {}))
        self.token: trio.lowlevel.TrioToken
        self.started = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._main,))

    async def _main(self) -> None:
        self.token = trio.lowlevel.current_trio_token()
        await self.supervisor.run(lambda _: self.started.set(), signals=False)

    def __enter__(self) -> Supervisor:
        self._thread.start()
        assert self.started.wait(PATIENCE_SECS)
        return self.supervisor

    def __exit__(self, *_: object) -> None:
        self.token.run_sync_soon(self.supervisor.stop)
        self._thread.join(PATIENCE_SECS)
        assert not self._thread.is_alive()


def test_a_worker_that_does_not_answer_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/readyz says so at once, for the kernel still gives it connections."""
    monkeypatch.setattr(workers, "ANSWER_SECS", 0.5)
    monkeypatch.setattr(workers, "REQUEST_SECS", 0.1)
    monkeypatch.setattr(workers, "SILENT_MAX", 3)
    given = with_workers(tmp_path, "amqp://localhost:1", http={"enabled": False}).configuration
    given["broker"] = with_state(given["broker"])
    file = tmp_path / "gateway.yaml"
    file.write_text(yaml.safe_dump(given))
    with Supervised(file) as supervisor:
        frozen, other = supervisor.workers
        frozen.signal(signal.SIGSTOP)
        until(lambda: "worker 1: not responding" in supervisor.reasons())
        until(lambda: frozen.restarts["silent"] == 1)
        until(lambda: frozen.is_up and frozen.reasons != ["not responding"])
        assert not other.restarts
