"""`gateway bench`, of all three protocols, and against brokers that nobody here wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pika
import pytest

from gateway.cli.exits import Exit
from tests.cli.conftest import Run
from tests.interop.gateway_fixture import LOOPBACK, Running, running
from tests.interop.servers import Mosquitto

LOAD = ("--count", "300", "--size", "20", "--in-flight", "50")


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running() as started:
        yield started


def measured(run: Run, url: str, *words: str) -> dict[str, object]:
    ran = run("bench", url, *LOAD, *words, "--json")
    assert (ran.code, ran.err) == (Exit.OK, ""), ran.out
    found: dict[str, object] = json.loads(ran.out)
    return found


@pytest.mark.parametrize("receive", [False, True])
def test_every_protocol_is_measured(run: Run, gateway: Running, receive: bool) -> None:
    with pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as connection:
        channel = connection.channel()
        queue = f"bench-{receive}"
        channel.queue_declare(queue)
        channel.queue_declare("sink")
        channel.queue_bind("sink", "amq.topic", "a.b")
        also = ("--receive",) if receive else ()
        for url, words in (
            (f"mqtt://{LOOPBACK}:{gateway.mqtt}", ("--topic", "a/b")),
            (gateway.amqp_url, ("--queue", queue)),
            (gateway.amqp_url, ("--exchange", "amq.topic", "--routing-key", "a.b")),
            (
                f"amqpfast://{LOOPBACK}:{gateway.port('amqpfast')}",
                ("--service", "queue", "--destination", "q"),
            ),
        ):
            found = measured(run, url, *words, *also)
            assert (found["sent"], found["refused"], found["lost"]) == (300, 0, 0), (url, words, found)
            assert found["received"] == (300 if receive else None)
            shares = found["latency_secs"]
            assert isinstance(shares, dict)
            assert 0 < shares["p50"] <= shares["p99"] <= shares["p100"]


def test_a_broker_of_others_is_measured(run: Run, mosquitto: Mosquitto) -> None:
    ran = run("bench", mosquitto.url, *LOAD, "--topic", "bench", "--receive", "--rate", "3000")
    assert ran.code == Exit.OK
    assert ran.out.splitlines()[0].startswith("sent      300 in ")
    assert ran.out.splitlines()[2].startswith("until received, in ms: p50 ")


def test_what_is_refused_is_counted(run: Run, gateway: Running) -> None:
    ran = run("bench", gateway.amqp_url, *LOAD, "--queue", "not-there")
    assert ran.code == Exit.FAILED
    assert "refused   300: NO_ROUTE (312)" in ran.out
    assert run("bench", "amqp://127.0.0.1:1", *LOAD, "--queue", "a").code == Exit.FAILED
    for wrong in (("--size", "7"), ("--qos", "3"), ("--count", "0")):
        assert run("bench", gateway.amqp_url, "--queue", "a", *wrong).code == Exit.USAGE
    assert run("bench", gateway.amqp_url).code == Exit.USAGE
