"""kombu and Celery, unchanged, with the gateway as their broker."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kombu
import pytest

from tests.interop.gateway_fixture import Running, running

REPOSITORY = Path(__file__).resolve().parents[2]
CALL = """
from tests.interop.celery_tasks import add
results = [add.delay(number, 1) for number in range(20)]
print([result.get(timeout=30) for result in results])
"""


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running() as started:
        yield started


def test_kombu_round_trip(gateway: Running) -> None:
    with kombu.Connection(gateway.amqp_url) as connection:
        exchange = kombu.Exchange("kombu", "direct", durable=True)
        queue = kombu.Queue("kombu", exchange, routing_key="k")
        producer = connection.Producer(serializer="json")
        producer.publish({"n": 1}, exchange=exchange, routing_key="k", declare=[queue], retry=True)
        got: list[object] = []

        def take(body: object, message: kombu.Message) -> None:
            got.append(body)
            message.ack()

        with connection.Consumer(queue, callbacks=[take]):
            connection.drain_events(timeout=10)
        assert got == [{"n": 1}]


def test_a_celery_task_runs_and_answers(gateway: Running) -> None:
    env = os.environ | {"GATEWAY_TEST_BROKER": gateway.amqp_url, "PYTHONPATH": str(REPOSITORY)}
    arguments = ["-A", "tests.interop.celery_tasks", "worker", "--pool", "solo", "-l", "warning"]
    worker = subprocess.Popen(
        [sys.executable, "-m", "celery", *arguments],
        cwd=REPOSITORY,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        caller = subprocess.run(
            [sys.executable, "-c", CALL], cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=90
        )
        assert caller.returncode == 0, caller.stderr
        assert caller.stdout.strip() == str([number + 1 for number in range(20)])
    finally:
        worker.terminate()
        said, _ = worker.communicate(timeout=30)
    assert "Traceback" not in said, said
