"""What a replica has in hand when it is killed: others have it within moments, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from tests.ingress.amqpfast.client import PERSISTENT, Fast, fresh
from tests.interop.gateway_process import GatewayProcess
from tests.interop.servers import LOOPBACK, RabbitMQ, free_ports

COUNT: Final = 500
Two = tuple[GatewayProcess, GatewayProcess]


@pytest.fixture(params=["classic", "quorum"])
def two(rabbitmq: RabbitMQ, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Two]:
    def door(name: str) -> GatewayProcess:
        mqtt, fast = free_ports(2)
        return GatewayProcess(
            tmp_path / name,
            replica=name,
            listeners={
                "mqtt": {"protocol": "mqtt", "host": LOOPBACK, "port": mqtt},
                "amqpfast": {
                    "protocol": "amqpfast",
                    "host": LOOPBACK,
                    "port": fast,
                    "negotiation_pause_secs": 0.0,
                },
            },
            store={"enabled": False},
            broker={
                "engine": "rabbitmq",
                "urls": [rabbitmq.url],
                "namespace": f"killed-{tmp_path.name}"[:60],
                "queue_type": request.param,
            },
        )

    with door("one") as one, door("other") as other:
        yield one, other


def test_what_it_had_in_flight_comes_back(two: Two) -> None:
    with Fast(two[0], "named").open() as client, Fast(two[1]).open() as other:
        client.consume(client.handle("q"), prefetch=100)
        other.put(other.handle("q"), *[b"%d" % at for at in range(100)], head=PERSISTENT)
        client.rows(100)
        client.ack(40)
        other.consume(other.handle("q"), prefetch=100)
        two[0].kill()
        rows = []
        while {int(row[4]) for row in rows} < set(range(40, 100)):
            rows += other.rows(1)
        assert len(rows) <= 100  # what it was acknowledged last it may not have passed on
        assert not any(fresh(row) for row in rows)
        with Fast(two[1], "named").open() as again:  # the name is free
            again.leave()


def test_what_it_has_confirmed_is_not_lost(two: Two) -> None:
    """It is killed while a client sends as fast as it may; a subscriber and a consumer are at the other."""
    with Fast(two[0]).open() as sender, Fast(two[1], "d").open() as receiver:
        receiver.consume(receiver.handle("q"), prefetch=10_000)
        out = sender.handle("q")
        confirmed: list[int] = []
        with suppress(OSError, AssertionError):
            for at in range(COUNT):
                sender.put(out, b"%d" % at, head=PERSISTENT)
                confirmed.append(at)
                if at == COUNT // 2:
                    two[0].kill()
        assert len(confirmed) > COUNT // 2
        bodies = [int(row[4]) for row in receiver.rows(len(confirmed))]
        assert set(confirmed) <= set(bodies)
        assert sorted(set(bodies)) == bodies, "in order"
