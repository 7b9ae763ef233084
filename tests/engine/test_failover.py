"""The primary of the replicas' database is killed, and its standby promoted: replicas go on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.replicas import Client, Replica, lasting, replicas
from tests.interop.servers import PostgreSQLPair, RabbitMQ


@pytest.mark.parametrize("version", [4, 5])
def test_clients_find_their_sessions_after_a_failover(rabbitmq: RabbitMQ, version: int) -> None:
    """What was acknowledged before is there, at the other replica as well: subscriptions, what is owed, and
    retained messages. What is published while no database is there is delivered."""
    with PostgreSQLPair() as pair:
        given: dict[str, Any] = {"postgresql": {"url": pair.url}}
        two = [Replica(name, rabbitmq.url, f"failover-{version}", **given) for name in ("one", "other")]
        one, other = two
        with replicas(*two):
            away = lasting(one.mqtt, "away", version=version)
            assert away.subscribe("f/+", qos=2)
            away.leave()
            with lasting(one.mqtt, "here", version=version) as here:
                here.subscribe("f/+", qos=1)
                with Client(other.mqtt, "publisher", version=version) as publisher:
                    publisher.publish("f/kept", b"1", retain=True)
                    publisher.publish("f/a", b"2", qos=1)
                    here.until(lambda: here.has_more_than(1))
                    pair.lose_primary()
                    publisher.publish("f/a", b"3", qos=1)
                    here.until(lambda: here.has_more_than(2))
                    one.until(lambda: any("state: " in why for why in one.gateway.readiness.reasons()))
                    pair.promote()
                    for replica in two:
                        replica.until_ready()
                    publisher.publish("f/kept", b"4", retain=True)
                    here.until(lambda: here.has_more_than(3))
            with lasting(other.mqtt, "away", version=version) as away:
                assert away.present
                away.until(lambda: away.has_more_than(3))
                assert [body for _, body in away.told] == [b"1", b"2", b"3", b"4"]
            with lasting(other.mqtt, "here", version=version) as here:
                assert here.present
                assert len(here.subscribe("f/+", qos=1)) == 1
                here.until(lambda: ("f/kept", b"4") in here.told)
