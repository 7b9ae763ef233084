"""kombu and Celery against the AMQP listener: a worker in a process of its own, tasks and their results."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.interop.gateway_fixture import Running, running

ROOT: Final = Path(__file__).resolve().parents[2]
PATIENCE_SECS: Final = 30.0


@pytest.fixture
def gateway() -> Iterator[Running]:
    with running() as one:
        yield one


def test_kombu(gateway: Running) -> None:
    kombu: Any = importlib.import_module("kombu")  # it exports its names too late for a type checker
    exchange = kombu.Exchange("media", "direct", durable=True)
    queue = kombu.Queue("video", exchange, routing_key="video")
    heard: list[Any] = []

    def take(body: Any, message: Any) -> None:
        heard.append((body, message.headers["n"]))
        message.ack()

    with kombu.Connection(gateway.amqp_url) as connection:
        producer = connection.Producer(serializer="json")
        for number in range(5):
            producer.publish(
                {"name": f"{number}.avi"}, exchange=exchange, routing_key="video", declare=[queue],
                headers={"n": number}, retry=False,
            )  # fmt: skip
        with connection.Consumer(queue, callbacks=[take]):
            while len(heard) < 5:
                connection.drain_events(timeout=PATIENCE_SECS)
    assert heard == [({"name": f"{number}.avi"}, number) for number in range(5)]


@pytest.fixture
def worker(gateway: Running, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Celery worker with one process, ready for tasks."""
    log = tmp_path / "worker.log"
    command = [sys.executable, "-W", "ignore", "-m", "celery", "-A", "tests.interop.celery_task", "worker"]
    command += ["--pool", "solo", "--loglevel", "INFO", "--without-heartbeat", "--hostname", "test@localhost"]
    environment = os.environ | {"BROKER_URL": gateway.amqp_url, "PYTHONPATH": str(ROOT), "C_FORCE_ROOT": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    host = gateway.gateway.host
    try:
        gateway.until(lambda: "tasks" in host.queues and bool(host.queues["tasks"].consumers), PATIENCE_SECS)
        yield process
    except AssertionError as error:
        raise AssertionError(log.read_text()[-3_000:]) from error
    finally:
        process.kill()  # politely it takes until the next turn of its event loop, up to five seconds
        process.wait(PATIENCE_SECS)


def test_a_celery_task_and_its_result(
    gateway: Running, worker: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whatever Celery's own code warns of as it is imported
        from tests.interop.celery_task import add, app

    app.conf.broker_url = gateway.amqp_url
    results = [add.delay(number, 10) for number in range(5)]
    assert [result.get(timeout=PATIENCE_SECS) for result in results] == [10, 11, 12, 13, 14]
    assert worker.poll() is None
    app.close()
