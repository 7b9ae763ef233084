"""A replica and the database of its state, which comes and goes."""

from __future__ import annotations

import time

from tests.engine.replicas import PATIENCE_SECS, Replica, replicas
from tests.engine.test_opening_races import UNAVAILABLE, Raw
from tests.interop.servers import PostgreSQL, RabbitMQ


def test_a_replica_is_ready_while_its_database_is_there(rabbitmq: RabbitMQ) -> None:
    """It starts before the database, serves when that has come, and reports when it has gone."""
    with PostgreSQL() as server:
        server.stop()
        one = Replica("one", rabbitmq.url, "database", postgresql={"url": server.url})
        with replicas(one, ready=False):
            gauges, reasons = one.gateway.metrics.sources.gauges, one.gateway.readiness.reasons
            one.until(lambda: any("state: PostgreSQL: " in why for why in reasons()))
            assert one.ask(gauges["gateway_state_up"]) == 0
            server.start()
            one.until_ready()
            assert one.ask(gauges["gateway_state_up"]) == 1
            server.stop(kill=True)
            one.until(lambda: any("state: PostgreSQL: " in why for why in reasons()))
            assert one.ask(gauges["gateway_state_up"]) == 0
            server.start()
            one.until_ready()
            one.until(lambda: not gauges["gateway_state_pending_operations"]())


def test_a_database_that_is_frozen_is_noticed(rabbitmq: RabbitMQ) -> None:
    """It accepts connections and answers nothing: clients are turned away, and the replica stops in time."""
    with PostgreSQL() as server:
        one = Replica("one", rabbitmq.url, "frozen", postgresql={"url": server.url})
        with replicas(one):
            reasons = one.gateway.readiness.reasons
            server.freeze()
            with Raw(one.mqtt, "waits", 5) as client:
                assert client.answer() == UNAVAILABLE[5]
            one.until(lambda: any("state: " in why for why in reasons()))
            server.thaw()
            one.until_ready()
            with Raw(one.mqtt, "waits", 5) as client:
                assert client.answer() == 0
            server.freeze()
            begin = time.monotonic()
            one.stop()
            assert time.monotonic() - begin < PATIENCE_SECS
