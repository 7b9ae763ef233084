"""kombu and Celery against the AMQP listener: a worker in a process of its own, tasks and their results."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pika
import pytest
from pika.exceptions import ChannelClosedByBroker

from tests.interop.gateway_fixture import Running, running
from tests.interop.servers import RabbitMQ

ROOT: Final = Path(__file__).resolve().parents[2]
PATIENCE_SECS: Final = 30.0
SENDING_SECS: Final = 120.0  # Celery looks for a lost broker for ever
COUNTDOWN_SECS: Final = 1.0
COUNTDOWN_LONG_SECS: Final = 3_600.0
TASKS: Final = 8  # a turn of Celery's loop calls ten timers, and sleeps for a second behind the tenth
TASKS_MANY: Final = 40


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


@contextmanager
def worker(url: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Celery worker with one process, ready for tasks."""
    log = folder / "worker.log"
    command = [sys.executable, "-W", "ignore", "-m", "celery", "-A", "tests.interop.celery_task", "worker"]
    command += ["--pool", "solo", "--loglevel", "INFO", "--without-heartbeat", "--hostname", "test@localhost"]
    environment = os.environ | {"BROKER_URL": url, "PYTHONPATH": str(ROOT), "C_FORCE_ROOT": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        consumed(url, "tasks")
        yield process
    except AssertionError as error:
        raise AssertionError(log.read_text()[-3_000:]) from error
    finally:
        process.kill()  # politely it takes until the next turn of its event loop, up to five seconds
        process.wait(PATIENCE_SECS)


def consumed(url: str, queue: str) -> None:
    """Return when the queue has a consumer."""
    deadline = time.monotonic() + PATIENCE_SECS
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        while time.monotonic() < deadline:
            try:
                if channel.queue_declare(queue, passive=True).method.consumer_count:
                    return
            except ChannelClosedByBroker:
                channel = connection.channel()
            connection.sleep(0.1)
    raise AssertionError(f"nobody consumes from {queue}")


def sent(url: str, folder: Path, tasks: int, *more: float) -> str:
    """Tasks with a countdown (and a patience), sent by another process; returns what it prints."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.interop.celery_countdown", str(tasks)]
    environment = os.environ | {"BROKER_URL": url, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command + [str(one) for one in more],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=SENDING_SECS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3_000:]
    return done.stdout


def test_celery_tasks_and_their_results(gateway: Running, tmp_path: Path) -> None:
    with worker(gateway.amqp_url, tmp_path) as process:
        assert sent(gateway.amqp_url, tmp_path, TASKS, 0.0, PATIENCE_SECS)
        assert process.poll() is None


def counted_down(url: str, folder: Path) -> float:
    """How long a worker takes for tasks that are all due at once, a second after they were sent."""
    folder.mkdir()
    with worker(url, folder):
        return float(sent(url, folder, TASKS, COUNTDOWN_SECS, PATIENCE_SECS))


def test_tasks_with_a_countdown_come_when_they_are_due(
    gateway: Running, rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    theirs = counted_down(rabbitmq.url, tmp_path / "rabbitmq")
    ours = counted_down(gateway.amqp_url, tmp_path / "gateway")
    assert COUNTDOWN_SECS <= ours < theirs + COUNTDOWN_SECS


@pytest.mark.parametrize("broker", ["rabbitmq", "gateway"])
def test_a_worker_takes_the_tasks_that_are_not_due_yet(
    broker: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """They are more than its prefetch, which it raises for each of them: with `global` or without, whatever
    the announced product is known to want.
    """
    found = request.getfixturevalue(broker)
    url = found.amqp_url if isinstance(found, Running) else found.url
    with worker(url, tmp_path), pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        sent(url, tmp_path, TASKS_MANY, COUNTDOWN_LONG_SECS)
        deadline = time.monotonic() + PATIENCE_SECS
        while left := channel.queue_declare("tasks", passive=True).method.message_count:
            assert time.monotonic() < deadline, left
            connection.sleep(0.05)
        channel.queue_delete("tasks")
