"""A database that was restored from a backup, or has lost what replicas know: both sides agree again."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from gateway.engine import sessions
from tests.engine.replicas import TAKEN_OVER, Client, Replica, lasting, replicas
from tests.engine.test_elections import until
from tests.engine.test_session_queues import is_there, queue_of
from tests.interop.servers import RabbitMQ
from tests.interop.state_database import state_server

NAMESPACE = "restored"


@pytest.fixture
def one(rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replica]:
    monkeypatch.setattr(sessions, "STRAY_SECS", 0.5)
    found = Replica("one", rabbitmq.url, NAMESPACE)
    with replicas(found):
        yield found


def execute(statement: str) -> None:
    """Change the state behind the replicas' backs; then end their connections, as a restore does."""
    with psycopg.connect(state_server().url, autocommit=True) as connection:
        connection.execute(f"SET search_path = {NAMESPACE}".encode())
        connection.execute(statement.encode())
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name LIKE %s AND pid <> pg_backend_pid()",
            [f"{NAMESPACE} %"],
        )


def test_a_client_that_is_not_in_it_connects_again_and_its_queue_goes(
    one: Replica, rabbitmq: RabbitMQ
) -> None:
    with lasting(one.mqtt, "lost") as client, lasting(one.mqtt, "kept") as kept:
        client.subscribe("r/1", qos=1)
        kept.subscribe("r/2", qos=1)
        queue = queue_of(one, "lost")
        execute("DELETE FROM session WHERE client = 'lost'")
        client.until(lambda: client.ended)
        assert client.ended[0].value == TAKEN_OVER
        until(lambda: not is_there(rabbitmq, queue))
        with lasting(one.mqtt, "lost") as again:
            assert not again.present
        with Client(one.mqtt, "publisher") as publisher:
            publisher.publish("r/2", b"x")
        kept.until(lambda: kept.told == [("r/2", b"x")])
        assert not kept.ended


def test_a_session_that_is_connected_for_nobody_is_left(one: Replica) -> None:
    with lasting(one.mqtt, "here") as client:
        client.subscribe("r/3", qos=1)
        execute(
            "INSERT INTO session SELECT domain, 'nobody', epoch, owner, connected, login, place, 'q', expiry,"
            " expires_at, reap_at, holder, holder_epoch, given_back FROM session WHERE client = 'here'"
        )
        until(lambda: one.stored("session", "nobody", "connected") == [(0,)])
        assert one.stored("session", "here", "connected") == [(1,)]
        assert not client.ended
