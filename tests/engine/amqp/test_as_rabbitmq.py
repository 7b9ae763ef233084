"""The scripts of the oracle, through a gateway with the cluster behind it: what a client sees is what the
server says, but for a list of exceptions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from tests.engine.replicas import Replica, replicas
from tests.interop.oracle.scripts import run, run_all
from tests.interop.oracle.suite import DIFFERENT, DIFFERENT_TEXTS, SCRIPTS, without_texts
from tests.interop.oracle.wire import Log
from tests.interop.servers import RabbitMQ

Logs = dict[str, Log]
KEYLESS: Final = "who dead-letters to the default exchange has to say with which key"
EXCEPTIONS: Final = {
    "a dead letter with copies": KEYLESS,
    "a quorum queue with x-dead-letter-exchange ''": KEYLESS,
    "a queue with x-dead-letter-exchange ''": KEYLESS,
}


@pytest.fixture(scope="module")
def theirs(rabbitmq: RabbitMQ) -> Logs:
    return run_all(rabbitmq.port)


@pytest.fixture(scope="module")
def replica(rabbitmq: RabbitMQ) -> Iterator[Replica]:
    one = Replica("oracle", rabbitmq.url, "oracle", queue_type="classic", amqp={})
    with replicas(one):
        yield one


@pytest.fixture(scope="module")
def ours(replica: Replica) -> Logs:
    return run_all(replica.amqp)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_client_sees_what_the_server_says(
    name: str, ours: Logs, theirs: Logs, rabbitmq: RabbitMQ, replica: Replica
) -> None:
    if name in EXCEPTIONS:
        assert ours[name] != theirs[name], "no difference any more"
        return
    alike = without_texts if name in DIFFERENT_TEXTS else Log
    different = DIFFERENT.get(name)
    if different is not None and ours[name] == different.said:
        return  # the gateway has said so itself, as without a cluster
    if alike(ours[name]) != alike(theirs[name]):
        # Clocks of a tenth of a second may have gone wrong in the crowd: both are asked once more, alone.
        assert alike(run(name, replica.amqp)) == alike(run(name, rabbitmq.port))
