"""Two versions of the gateway over one cluster, as during an update: the later one says more on the log, and
has records that this one does not know."""

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
from gateway.engine import connection, records, table

encode = records.encode_record
written = 0

def encode_later(record):
    global written
    written += 1
    said = json.loads(encode(record))
    said["version"] = 2
    said["record"]["since_2"] = {"what": [1, 2]}
    if isinstance(record, records.Mark) and written % 2:
        said["record"]["kind"] = "mark_of_2"  # this version does not know it, the later one does
        later[json.dumps(said).encode()] = record
    return json.dumps(said).encode()

later = {}
decode = records.decode_record
connection.encode_record = table.encode_record = encode_later
from gateway.engine import session
session.decode_record = lambda body: later.pop(body, None) or decode(body)
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
        now.until(lambda: now.engine.records["passed_over"] > 0)
        for place in (now.mqtt, port):
            with Client(place, "late") as late:
                late.subscribe("versions/+/+", qos=1)
                late.until(lambda one=late: len(one.messages) >= 4)
                assert dict(late.told)["versions/1/1"] == b"19"
        assert later.terminate() == 0
        assert not [line for line in later.log.splitlines() if '"level":"error"' in line]


def _until_serving(later: GatewayProcess) -> None:
    welcome = None
    while welcome is None or welcome.is_failure:
        with Client(later.port("mqtt"), "probe") as probe:
            welcome = probe.welcome
