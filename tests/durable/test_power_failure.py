"""What was acknowledged is there after the machine has lost its power, and nothing is damaged."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pika
import pytest

from tests.chaos.disk_errors import CompilerError
from tests.durable.power import PowerFailingGateway
from tests.durable.scenes import SCENES, play
from tests.durable.test_amqp_large import DURABLE, opened
from tests.durable.test_mqtt import LIMITS
from tests.durable.test_mqtt_chaos import exchange
from tests.ingress.amqpfast.client import PERSISTENT
from tests.ingress.amqpfast.large import MIB, Whole, data

BODIES: Final = [data(20 * MIB, number) for number in range(4)]  # each is a file of the spool


@contextmanager
def power_failing(folder: Path, **more: Any) -> Iterator[PowerFailingGateway]:
    """Run a gateway; its seed is random, or is given by the environment variable SEED."""
    seed = int(os.environ.get("SEED", random.randrange(2**32)))
    print("seed", seed)
    try:
        with PowerFailingGateway(folder, seed, **more) as gateway:
            yield gateway
            print(*gateway.failures, sep="\n")
            assert "internal error" not in gateway.log
    except CompilerError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exception | None]:
    with power_failing(tmp_path_factory.mktemp("gateway"), limits=LIMITS) as gateway:
        return play(gateway)


@pytest.mark.parametrize("name", SCENES)
def test_sessions(name: str, outcomes: dict[str, Exception | None]) -> None:
    error = outcomes[name]
    if error is not None:
        raise error


def test_qos_2(tmp_path: Path) -> None:
    with power_failing(tmp_path) as gateway:
        exchange(gateway, kills=3)


def test_bodies_in_files(tmp_path: Path) -> None:
    with power_failing(tmp_path, limits={"fast_memory_bytes_max": MIB}) as gateway:
        for number, body in enumerate(BODIES):
            if number % 2:
                connection, channel = opened(gateway)
                channel.basic_publish("", "q", body, DURABLE)
                gateway.kill()
                with pytest.raises(pika.exceptions.AMQPError):
                    connection.process_data_events(time_limit=60)
            else:
                with Whole(gateway).open() as client:
                    client.put_large(client.handle("fast"), body, PERSISTENT)
                    gateway.kill()
            gateway.start()
        with Whole(gateway).open() as client:
            client.consume(client.handle("fast"))
            assert [client.large()[4] for _ in BODIES[::2]] == BODIES[::2]
        connection, channel = opened(gateway)
        assert [channel.basic_get("q", auto_ack=True)[2] for _ in BODIES[1::2]] == BODIES[1::2]
        connection.close()
