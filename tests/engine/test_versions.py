"""Two versions of the gateway over one cluster, as during an update: the later one stores more of a
subscription and of a will than this one knows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from tests.engine.replicas import Client, Replica, lasting, replicas
from tests.interop.gateway_process import GatewayProcess
from tests.interop.servers import LOOPBACK, RabbitMQ, free_ports

NAMESPACE: Final = "versions"
LATER: Final = """
import json
from gateway.engine import client_session, sessions
from gateway.engine.stored_values import encode_options, encode_will

client_session.encode_options = lambda options: encode_options(options) + b"more"

def encode_later(coming):
    return json.dumps(json.loads(encode_will(coming)) | {"since_2": [1, 2]}).encode()

sessions.encode_will = encode_later
from gateway.cli import main
main()
"""


def test_a_later_version_does_no_harm(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    """Clients go to and fro between the two, with all that they are owed."""
    (port,) = free_ports(1)
    later = GatewayProcess(
        tmp_path / "later",
        replica="later",
        listeners={"mqtt": {"protocol": "mqtt", "host": LOOPBACK, "port": port}},
        broker={
            "engine": "rabbitmq",
            "urls": [rabbitmq.url],
            "namespace": NAMESPACE,
            "queue_type": "classic",
            "engine_timeout_secs": 2.0,
        },
    )
    later.program = (sys.executable, "-c", LATER)
    now = Replica("now", rabbitmq.url, NAMESPACE, queue_type="classic", engine_timeout_secs=2.0)
    with replicas(now), later:
        _until_serving(later)
        with Client(now.mqtt, "p") as publisher:
            for turn, (here, there) in enumerate([(now.mqtt, port), (port, now.mqtt)]):
                topic, name = f"versions/{turn}", f"guest {turn}"
                with lasting(here, name) as client:
                    client.subscribe(f"{topic}/#", qos=2)
                for at in range(20):
                    publisher.publish(f"{topic}/{at % 2}", b"%d" % at, qos=1 + at % 2, retain=at > 17)
                with lasting(there, name) as client:
                    assert client.present
                    client.until(lambda one=client: len(one.messages) >= 20)
                    assert sorted(int(body) for _, body in client.told) == list(range(20))
                    with lasting(here, name) as again:
                        client.until(lambda one=client: one.ended)
                        assert client.ended[0].value == 0x8E
                        assert again.present
                        publisher.publish(f"{topic}/0", b"20", qos=2)
                        again.until(lambda one=again: one.messages)
                        assert again.told == [(f"{topic}/0", b"20")]
            assert now.stored("subscription", "guest 1", "options")[0][0].endswith(b"more")
            _lose_with_will(publisher, port)
        for place in (now.mqtt, port):
            with Client(place, "late") as late:
                late.subscribe("versions/+/+", qos=1)
                late.until(lambda one=late: len(one.messages) >= 4)
                assert dict(late.told)["versions/1/1"] == b"19"
        assert later.terminate() == 0
        assert not [line for line in later.log.splitlines() if '"level":"error"' in line]


def _lose_with_will(watcher: Client, port: int) -> None:
    """A client of the later version is lost, and its will is published."""
    watcher.subscribe("wills/+", qos=1)
    with lasting(port, "mortal", will="wills/later") as client:
        client.vanish()
        watcher.until(lambda: watcher.told == [("wills/later", b"gone")])


def _until_serving(later: GatewayProcess) -> None:
    welcome = None
    while welcome is None or welcome.is_failure:
        with Client(later.port("mqtt"), "probe") as probe:
            welcome = probe.welcome
