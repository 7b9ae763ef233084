"""Two versions of the gateway over one cluster, as during an update.

The later one of the first test stores more of a subscription and of a will than this one knows. The earlier
ones of the second are real: the code of the commit before, and of one whose database schema was older.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import pytest

from tests.engine.replicas import Client, Replica, lasting, replicas
from tests.interop.gateway_process import GatewayProcess
from tests.interop.servers import LOOPBACK, RabbitMQ, free_ports
from tests.ship.earlier import BEFORE_SCHEMA_7, PREVIOUS, package_of, run_code_of

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


def _process(folder: Path, name: str, cluster: str, namespace: str) -> GatewayProcess:
    """Return a replica that is a process of its own, so that it may have other code."""
    (port,) = free_ports(1)
    return GatewayProcess(
        folder / name,
        replica=name,
        listeners={"mqtt": {"protocol": "mqtt", "host": LOOPBACK, "port": port}},
        broker={
            "engine": "rabbitmq",
            "urls": [cluster],
            "namespace": namespace,
            "queue_type": "classic",
            "engine_timeout_secs": 2.0,
        },
    )


def test_a_later_version_does_no_harm(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    later = _process(tmp_path, "later", rabbitmq.url, NAMESPACE)
    later.program = (sys.executable, "-c", LATER)
    now = Replica("now", rabbitmq.url, NAMESPACE, queue_type="classic", engine_timeout_secs=2.0)
    with replicas(now), later:
        _until_serving(later)
        _go_to_and_fro(now, later)
        assert now.stored("subscription", "guest 1", "options")[0][0].endswith(b"more")
        assert later.terminate() == 0
        assert not [line for line in later.log.splitlines() if '"level":"error"' in line]


@pytest.mark.parametrize("commit", [BEFORE_SCHEMA_7, PREVIOUS])
def test_an_earlier_commit_runs_beside_this_one(commit: str, rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    """Clients go to and fro, and after a rollback the earlier code starts with the changed schema."""
    namespace = f"skew{commit[:4]}".replace("~", "").lower()
    earlier = _process(tmp_path, "earlier", rabbitmq.url, namespace)
    package = package_of(commit, tmp_path / "package")
    run_code_of(earlier, package)
    now = Replica("now", rabbitmq.url, namespace, queue_type="classic", engine_timeout_secs=2.0)
    with earlier:
        _until_serving(earlier)
        assert f"code of {package}/gateway" in earlier.log
        with replicas(now):
            _go_to_and_fro(now, earlier)
            assert earlier.terminate() == 0
            earlier.start()
            _until_serving(earlier)
            with lasting(earlier.port("mqtt"), "guest 1") as client:
                assert client.present
        assert earlier.terminate() == 0
        assert not [line for line in earlier.log.splitlines() if '"level":"error"' in line]


def _go_to_and_fro(now: Replica, other: GatewayProcess) -> None:
    """Let clients go to and fro between two replicas. They get all that they are owed."""
    port = other.port("mqtt")
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
        _lose_with_will(publisher, port)
    for place in (now.mqtt, port):
        with Client(place, "late") as late:
            late.subscribe("versions/+/+", qos=1)
            late.until(lambda one=late: len(one.messages) >= 4)
            assert dict(late.told)["versions/1/1"] == b"19"


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
