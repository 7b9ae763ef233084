"""Dead letters of two replicas over a real cluster: any of them lists, redrives and purges what one has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import orjson
import pika

from tests.chaos.proxy import Proxy
from tests.engine.replicas import PATIENCE_SECS, Client
from tests.engine.test_elections import Door, until
from tests.interop.servers import PostgreSQL, RabbitMQ

ROUTES = """
version: 1
routes:
  - name: out
    from: {endpoint: mqtt, topic: "away/NAME/{rest...}"}
    to: {endpoint: far, exchange: "NAME-far", routing_key: "{rest...}"}
    on_reject: dead_letter
"""
LETTERS = "/api/v1/dead-letters"


class Replica(Door):
    """One that publishes to `far`, which takes what some queue is bound for."""

    def __init__(self, folder: Path, name: str, cluster: str, far: str, replica: str) -> None:
        super().__init__(folder, name, cluster, far, ROUTES, replica)
        self.configuration["links"] = {
            "far": {"url": far, "reconnect_min_secs": 0.1, "reconnect_max_secs": 0.3}
        }

    def letters(self) -> list[dict[str, Any]]:
        """The newest first."""
        found: list[dict[str, Any]] = orjson.loads(self.asked(LETTERS)[1])["items"]
        return found

    def does(self, what: str, **chosen: Any) -> dict[str, Any]:
        """`redrive` or `purge` some letters."""
        found: dict[str, Any] = orjson.loads(self.told(f"{LETTERS}/{what}", chosen))
        return found


@contextmanager
def pair(folder: Path, name: str, rabbitmq: RabbitMQ) -> Iterator[tuple[Replica, Replica, Proxy]]:
    """Two replicas that reach the far broker by a proxy."""
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(rabbitmq.port))
        far = rabbitmq.url.replace(str(rabbitmq.port), str(proxy.port))
        one, other = (
            stack.enter_context(Replica(folder, name, rabbitmq.url, far, replica))
            for replica in ("one", "other")
        )
        for door in (one, other):
            until(lambda door=door: door.asked("/readyz") == (200, "ready\n"))
            until(lambda door=door: door.sample("gateway_link_up", endpoint="far"))
        yield one, other, proxy


class Bound:
    """A queue that the far broker's exchange leads to."""

    def __init__(self, rabbitmq: RabbitMQ, name: str) -> None:
        self.connection = pika.BlockingConnection(pika.URLParameters(rabbitmq.url))
        self.channel = self.connection.channel()
        self.queue = f"{name}-there"
        self.channel.queue_declare(self.queue)
        self.channel.queue_bind(self.queue, f"{name}-far", "#")
        self.bodies: list[bytes] = []

    def read(self) -> list[bytes]:
        """All that has come until now."""
        while (found := self.channel.basic_get(self.queue, auto_ack=True))[0] is not None:
            self.bodies.append(found[2])
        return self.bodies

    def __enter__(self) -> Bound:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()


def test_any_replica_lists_redrives_and_purges(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    """Also what a replica has kept that is lost with its disk, and one that begins later."""
    with pair(tmp_path, "letters", rabbitmq) as (one, other, _), Client(one.port("mqtt"), "near") as near:
        for at in range(4):
            near.publish(f"away/letters/{at}", b"%d" % at)  # acknowledged: the database has the letter
        one.kill()
        until(lambda: [letter["body"] for letter in other.letters()] == ["3", "2", "1", "0"])
        until(lambda: other.sample("gateway_dead_letters") == 4)
        first, second, third, _ = (letter["id"] for letter in reversed(other.letters()))
        assert other.does("purge", ids=[first, "none"]) == {"purged": 1, "waiting": [], "unknown": ["none"]}
        with Replica(tmp_path, "letters", rabbitmq.url, rabbitmq.url, "third") as new:
            until(lambda: new.asked("/readyz") == (200, "ready\n"))
            assert [letter["id"] for letter in new.letters()][::-1][:2] == [second, third]
            left = new.does("redrive", ids=[second])["left"]
            assert [row["reason"] for row in left] == ["no_route"]
            assert len(new.letters()) == 3  # what is refused again stays
            with Bound(rabbitmq, "letters") as bound:
                assert new.does("redrive", ids=[second])["redriven"] == 1
                until(lambda: len(other.letters()) == 2)
                assert other.does("redrive", route="out")["redriven"] == 2
                assert sorted(bound.read()) == [b"1", b"2", b"3"]
                until(lambda: not new.letters())
                assert new.asked(f"{LETTERS}/{second}")[0] == 404


def test_a_replica_that_is_killed_as_it_redrives_loses_nothing(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    """Nobody else redrives what it has on its way; when its claim has run out the next one does."""
    with (
        pair(tmp_path, "dying", rabbitmq) as (one, other, proxy),
        Client(one.port("mqtt"), "dying-near") as near,
    ):
        for at in range(3):
            near.publish(f"away/dying/{at}", b"%d" % at)
        until(lambda: len(other.letters()) == 3)
        with Bound(rabbitmq, "dying") as bound:
            proxy.stall("up")  # nothing gets to the far broker
            ids = [letter["id"] for letter in one.letters()]
            assert one.does("redrive", all=True)["waiting"]
            left = other.does("redrive", all=True)["left"]
            assert [row["text"] for row in left] == [
                "another replica redrives the dead letter, or has redriven it"
            ] * 3
            one.kill()
            proxy.cut()
            proxy.open()
            until(lambda: other.sample("gateway_link_up", endpoint="far"))
            assert [letter["id"] for letter in other.letters()] == ids

            def redriven() -> bool:
                other.does("redrive", all=True)
                return not other.letters()

            until(redriven, patience=60)
            assert sorted(bound.read()) == [b"0", b"1", b"2"]


def test_while_the_database_is_away_a_letter_is_not_accepted(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    """Its source is told when the database has it; until then it sends again."""
    with ExitStack() as stack:
        server = stack.enter_context(PostgreSQL())
        one = Replica(tmp_path, "away", rabbitmq.url, rabbitmq.url, "one")
        one.configuration["broker"]["postgresql"] = {"url": server.url}
        stack.enter_context(one)
        until(lambda: one.asked("/readyz") == (200, "ready\n"))
        until(lambda: one.sample("gateway_link_up", endpoint="far"))
        near = stack.enter_context(Client(one.port("mqtt"), "away-near"))
        server.stop(kill=True)
        info = near.paho.publish("away/away/1", b"1", qos=1)
        until(lambda: 'reason="no_route",route="out"' in one.asked("/metrics")[1])
        until(lambda: not one.sample("gateway_state_up"))
        assert not info.is_published()
        server.start()
        info.wait_for_publish(PATIENCE_SECS)
        assert info.is_published()
        assert [letter["body"] for letter in one.letters()] == ["1"]
