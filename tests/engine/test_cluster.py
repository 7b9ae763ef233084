"""A cluster of three nodes, of which one is lost: that at which everything was declared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import paho.mqtt.client as paho
import pytest

from tests.conftest import started
from tests.engine.replicas import Client, Replica, lasting, replicas
from tests.interop.cluster import RabbitCluster

ELECTED_SECS: Final = 60.0  # RabbitMQ itself sends again, after ten seconds, what a lost leader had


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitCluster]:
    yield from started(lambda: RabbitCluster(tmp_path_factory.mktemp("cluster")))


def test_without_a_node_clients_go_on_and_replicas_begin(cluster: RabbitCluster) -> None:
    """Nothing that a replica needs is at one node alone."""
    urls = tuple(node.url for node in cluster.nodes)
    staying = Replica("staying", urls, "cluster", reconnect_max_secs=0.5)
    with (
        replicas(staying),
        Client(staying.mqtt, "p", version=paho.MQTTv311) as publisher,  # who is not told of refusals
        lasting(staying.mqtt, "here") as here,
    ):
        here.subscribe("cluster/#", qos=1)
        with lasting(staying.mqtt, "away") as away:
            away.subscribe("cluster/#", qos=2)
        cluster.nodes[0].stop(kill=True)
        info = publisher.paho.publish("cluster/a", b"x", qos=2, retain=True)
        info.wait_for_publish(ELECTED_SECS)
        assert info.is_published(), staying.engine.unavailable_reason
        beginning = Replica("beginning", urls, "cluster", reconnect_max_secs=0.5)
        with replicas(beginning), lasting(beginning.mqtt, "away") as away:
            assert away.present
            away.until(lambda: away.messages)
            with Client(beginning.mqtt, "new") as new:
                new.subscribe("cluster/+", qos=1)
                new.until(lambda: new.messages)
                assert new.messages[0].retain
        here.until(lambda: here.messages)
        assert not here.ended
        cluster.nodes[0].start()


def test_a_queue_of_a_lost_node_that_is_to_be_deleted_costs_no_connection(cluster: RabbitCluster) -> None:
    """A classic one: its session begins anew at a replica that is connected to another node."""
    lost, *others = (node.url for node in cluster.nodes)
    given: dict[str, Any] = {"reconnect_max_secs": 0.5, "queue_type": "classic"}
    staying = Replica("staying", tuple(others), "classic", **given)
    with replicas(staying):
        there = Replica("there", lost, "classic", **given)
        with replicas(there), lasting(there.mqtt, "anew") as client:
            client.subscribe("classic/#", qos=1)
        connection = staying.ask(lambda: staying.engine._connection)
        cluster.nodes[0].stop(kill=True)
        with Client(staying.mqtt, "anew", clean=True) as client, Client(staying.mqtt, "other") as other:
            client.subscribe("classic/#", qos=1)
            other.publish("classic/x", b"x")
            client.until(lambda: client.messages)
            assert staying.ask(lambda: staying.engine._connection) is connection
        cluster.nodes[0].start()
