"""The counters of a gateway at work are what they count, and each that is not is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pika
import pytest

from gateway.broker.mqtt.namespace import MqttNamespace
from gateway.broker.mqtt.session import Session
from gateway.broker.queue import Queue
from gateway.ingress.amqp091.channel import AmqpChannel
from gateway.ingress.delivery_limit import Outstanding
from gateway.model.shares import UserShares
from gateway.protocols.mqtt.spec import Property
from gateway.settings import StoreSettings
from gateway.store.store import Store as OpenStore
from tests.counters import drift_report
from tests.idle import objects_of
from tests.ingress.clients import connect
from tests.interop.gateway_fixture import Running, running, settings_of

Tamper = Callable[[list[Any]], object]


def _first(objects: list[Any], kind: type, fits: Callable[[Any], bool] = lambda one: True) -> Any:
    return next(one for one in objects if isinstance(one, kind) and fits(one))


def _add(name: str, kind: type, fits: Callable[[Any], bool] = lambda one: True) -> Tamper:
    def tamper(objects: list[Any]) -> None:
        one = _first(objects, kind, fits)
        setattr(one, name, getattr(one, name) + 1)

    return tamper


def _jobs(queue: Any) -> bool:
    return bool(queue.name == "jobs")


def _tamper_subscribed(objects: list[Any]) -> None:
    space = _first(objects, MqttNamespace)
    space._subscribed[next(iter(space._subscribed))] += 1


TAMPERS: Final[dict[str, Tamper]] = {
    "bytes of queue 'jobs'": _add("byte_count", Queue, _jobs),
    "handed out of queue 'jobs'": _add("unacknowledged", Queue, _jobs),
    "sent on channel 1": _add("outstanding", AmqpChannel),
    "bytes that a connection holds": _add("byte_count", Outstanding),
    "bytes of session 'away'": _add("_byte_count", Session),
    "subscriptions by user": _tamper_subscribed,
    "steps of topic filters": lambda objects: _first(objects, MqttNamespace).steps.add("ann", 1),
    "number of": _add("count", UserShares),
    "messages that the disk has not got": lambda objects: _add("pending", type(_figures(objects)))(
        [_figures(objects)]
    ),
}


def _figures(objects: list[Any]) -> Any:
    return _first(objects, OpenStore).figures


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Running]:
    """With messages that wait and messages that were handed out, of a queue and of a session."""
    with running(settings_of(store=StoreSettings(path=tmp_path)), unrepaired=True) as one:
        kept = {Property.SESSION_EXPIRY_INTERVAL: 100}
        client, _ = connect(one, "away", clean=False, properties=kept)
        with client:
            assert client.subscribe("$share/g/a/+", 1) == 1
        connection = pika.BlockingConnection(pika.URLParameters(one.amqp_url))
        with closing(connection):
            channel = connection.channel()
            channel.confirm_delivery()
            channel.basic_qos(prefetch_count=2)
            channel.queue_declare("jobs", durable=True)
            channel.queue_bind("jobs", "amq.topic", "a.b")
            for _ in range(5):
                channel.basic_publish("amq.topic", "a.b", b"x")
            taken: list[int] = []
            channel.basic_consume("jobs", lambda _, method, *rest: taken.append(method.delivery_tag))
            while len(taken) < 2:
                connection.process_data_events(1)
            channel.basic_ack(taken[0])
            while len(taken) < 3:
                connection.process_data_events(1)
            yield one


@pytest.mark.parametrize("line", TAMPERS)
def test_a_counter_that_drifts_is_reported(gateway: Running, line: str) -> None:
    def look() -> list[str]:
        return drift_report(objects_of(gateway.gateway))

    assert gateway.ask(look) == []
    gateway.ask(lambda: TAMPERS[line](list(objects_of(gateway.gateway))))
    found = gateway.ask(look)
    assert len(found) == 1
    assert found[0].startswith(line)
