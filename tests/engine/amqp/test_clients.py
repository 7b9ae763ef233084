"""The tests of clients that people use, with the cluster behind the gateway.

They look for queues of the same names, so what each has declared is deleted when it is over. What is done
otherwise stands in EXCEPTIONS with its reason; everything else must pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

import pika
import pytest

from gateway.engine import judging
from gateway.engine.judging import ClientJudge
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.relaying import Relayed
from tests.clients import test_amqp_clients, test_amqp_features
from tests.engine.replicas import Replica, replicas
from tests.interop import test_celery
from tests.interop.servers import RabbitMQ

MODULES: Final = (test_amqp_clients, test_amqp_features, test_celery)
EXCEPTIONS: Final = {
    "amqp_clients_pika_is_nacked_for_a_key_that_is_no_topic": "the cluster takes it, and no device gets it",
}


@pytest.fixture(scope="module")
def door(rabbitmq: RabbitMQ) -> Iterator[Replica]:
    one = Replica("clients", rabbitmq.url, "clients", queue_type="classic", amqp={})
    with replicas(one):
        yield one


@pytest.fixture
def gateway(
    request: pytest.FixtureRequest, door: Replica, rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Replica]:
    """The replica; queues and exchanges that pass it go with the test."""
    whole = request.node.name.removeprefix("test_")
    if (why := EXCEPTIONS.get(whole) or EXCEPTIONS.get(whole.partition("[")[0])) is not None:
        pytest.skip(why)
    queues: set[str] = set()
    exchanges: set[str] = set()

    def watched(action: Any, names: set[str], word: str) -> Any:
        def act(judge: ClientJudge, channel: Relayed, method: m.Method) -> None:
            if not getattr(method, "exclusive", False):  # it goes with its connection, which may end later
                names.add(getattr(method, word))
            action(judge, channel, method)

        return act

    for kind, names, word in ((m.QueueDeclare, queues, "queue"), (m.ExchangeDeclare, exchanges, "exchange")):
        monkeypatch.setitem(judging.ACTIONS, kind, watched(judging.ACTIONS[kind], names, word))
    yield door
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
        channel = connection.channel()
        for name in queues - {""}:
            channel.queue_delete(name)
        for name in exchanges:
            if not name.startswith("amq."):
                channel.exchange_delete(name)


def _tests_of(module: ModuleType) -> Iterator[tuple[str, Any]]:
    room = module.__name__.rpartition("test_")[2]
    for name, found in vars(module).items():
        if name.startswith("test_") and callable(found):
            yield f"test_{room}_{name.removeprefix('test_')}", found


globals().update({name: found for module in MODULES for name, found in _tests_of(module)})
connection, channel = test_amqp_clients.connection, test_amqp_clients.channel


def test_exceptions_are_tests() -> None:
    known = {name.removeprefix("test_") for module in MODULES for name, _ in _tests_of(module)}
    assert {name.partition("[")[0] for name in EXCEPTIONS} <= known
