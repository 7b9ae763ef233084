"""Everything that a row of replicas needs: the replicas, a proxy between each of them and the RabbitMQ, and a
balancer for each client.

Replicas give up a cluster that says nothing for two seconds, and let their clients go two seconds later; four
seconds without a word, and others have what was theirs. Names carry a tag, so that rows share a RabbitMQ and
find nothing of one another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from subprocess import TimeoutExpired
from typing import Any, Final, Literal

import yaml

from gateway.protocols.mqtt.packets import Connack, Connect
from gateway.protocols.mqtt.spec import Version
from tests.chaos.balancer import Balancer
from tests.chaos.books import close_books
from tests.chaos.checker import History, Id, Interval
from tests.chaos.gateway_operator import ReplicaOperator
from tests.chaos.proxy import Proxy
from tests.chaos.replicas.faults import FAULTS
from tests.chaos.replicas.rows import ReplicaRow
from tests.chaos.rig import ADDRESSES, LIMITS, PROBES_MAX, PROBES_RATE, complaints
from tests.chaos.workers.amqp import AmqpReceiver, AmqpSender, queue_at
from tests.chaos.workers.beside import Beside
from tests.chaos.workers.common import PROBE, Receiver, Sender, Worker
from tests.chaos.workers.mqtt import MqttReceiver, MqttSender
from tests.ingress.clients import Mqtt
from tests.interop.cluster import RabbitCluster
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import GatewayProcess
from tests.interop.servers import RabbitMQ, free_ports

TIMEOUT_SECS: Final = 2.0
SERVING_SECS_MAX: Final = 20.0
POLL_SECS: Final = 0.05
EXCHANGE: Final = "amq.topic"
OF_WORKERS: Final = ("worker ended", "worker unresponsive")  # what the faults bring about
LINK: Final = {
    "heartbeat_secs": 1,
    "connect_timeout_secs": 2.0,
    "reconnect_min_secs": 0.1,
    "reconnect_max_secs": 0.5,
}


@dataclass
class ReplicaRig:
    """What a row runs on, and what its faults break. `proxies` are the clients' ways, `ways` those of each
    replica to the nodes. With one node there is no `cluster`."""

    row: ReplicaRow
    replicas: list[GatewayProcess]
    nodes: list[RabbitMQ]
    cluster: RabbitCluster | None
    proxies: list[Proxy]
    ways: list[list[Proxy]]
    history: History
    sender: Sender
    prober: Sender
    receiver: Receiver
    beside: Beside
    operator: ReplicaOperator
    excused: list[Interval] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    accounted: set[Id] = field(default_factory=set)  # did not arrive, and are dead letters or counted
    account: str = ""
    # What only rows of a single gateway have.
    discarded: int = 0
    clock_error_secs: float = 0.0

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Who is connected to something."""
        return (self.sender, self.prober, self.receiver, *self.beside.workers)

    @property
    def wills_excused(self) -> list[Interval]:
        """Return none: the database has each will before its client is let in."""
        return []

    def strike(self, fault: str, chance: Random) -> None:
        """Let something go wrong."""
        FAULTS[fault](self, chance)

    def prepare(self, opened: Callable[[Callable[[], bool]], bool]) -> None:
        """Nothing has to be prepared."""

    def mend(self) -> None:
        """Each fault ends what it began."""

    def redriven(self) -> bool:
        """Return True: no row of replicas makes dead letters."""
        return True

    def may_expire(self, ids: set[Id]) -> set[Id]:
        """Return none: no message of replicas has a short life."""
        return set()

    def close_books(self, wanted: set[Id], until: Callable[[Callable[[], bool]], bool]) -> None:
        """Compare what the replicas have counted with what arrived of what was accepted."""
        close_books(self, self.operator, wanted, until)

    def end(self) -> str:
        """The replicas are over: what they complained of is noted, and what they logged returned."""
        for replica in self.replicas:
            replica.kill()
            self.notes += complaints(replica.log, OF_WORKERS if self.row.workers > 1 else ())
        return self.log

    def idle_report(self) -> list[str]:
        """Return what still waits in the replicas, a line each."""
        return [line for replica in self.replicas for line in replica.idle_report()]

    @property
    def log(self) -> str:
        """What they have said until now, the first one last."""
        return "\n".join(replica.log for replica in reversed(self.replicas))

    def until_serving(self, replica: GatewayProcess) -> None:
        """Return when it lets clients in; noted if it does not."""
        deadline = time.monotonic() + SERVING_SECS_MAX
        while time.monotonic() < deadline:
            if _serves(replica.port("mqtt")):
                return
            time.sleep(POLL_SECS)
        self.notes.append("a replica does not let clients in")


def _serves(port: int) -> bool:
    try:
        with Mqtt(port) as client:
            client.say(Connect("readiness", Version.V5, True, 0))
            return client.next(Connack).reason == 0
    except OSError:
        return False


def replica_of(
    folder: Path, name: str, nodes: list[int], namespace: str, row: ReplicaRow, far: Proxy | None
) -> GatewayProcess:
    """A replica, not yet started, of the nodes at these ports, with a link to what is `far`. Every second one
    keeps what it has read of the log."""
    (port,) = free_ports(1)
    listeners: dict[str, Any] = {"mqtt": {"protocol": "mqtt", "host": LOOPBACK, "port": port}}
    more: dict[str, Any] = {}
    if far is not None:
        mapping = folder / f"{name}.yaml"
        mapping.write_text(yaml.safe_dump({"version": 1, "routes": [_route(row, namespace)]}))
        more["mappings"] = [str(mapping)]
        more["links"] = {
            "far": {
                "url": f"amqp://guest:guest@{LOOPBACK}:{far.port}/%2F",
                "elected": row.source == "elected",
                "single_active_consumer": row.source == "elected",
                "outbox": {"shared": row.target == "outbox"},
                **LINK,
            }
        }
    kept = {"path": str(folder / name / "data")} if name.endswith("0") else {"enabled": False}
    return GatewayProcess(
        folder / name,
        replica=name,
        workers=row.workers,
        listeners=listeners,
        broker={
            "engine": "rabbitmq",
            "urls": [f"amqp://guest:guest@{LOOPBACK}:{node}/%2F" for node in nodes],
            "namespace": namespace,
            "queue_type": row.queue_type,
            **LINK,
            "engine_timeout_secs": TIMEOUT_SECS,
        },
        store=kept,
        limits=LIMITS,
        drain_timeout_secs=2.0,
        http={"host": LOOPBACK, "port": 0},
        **more,
    )


def _queued(nodes: list[RabbitMQ], tag: str) -> list[str]:
    """Return the queues of a row in the RabbitMQ that have messages, a line each. Streams keep theirs."""
    try:
        rows = nodes[0].control("list_queues", "--no-table-headers", "name", "type", "messages")
    except TimeoutExpired:
        return ["RabbitMQ does not list its queues"]
    queues = [line.split() for line in rows.splitlines()]
    return [
        f"RabbitMQ's queue {name!r}: messages {count}"
        for name, kind, count in queues
        if name.startswith(tag) and kind != "rabbit_stream_queue" and count != "0"
    ]


def _route(row: ReplicaRow, tag: str) -> dict[str, Any]:
    if row.source == "elected":
        source = {"endpoint": "far", "queue": f"{tag}.in"}
        return {
            "name": "route",
            "from": source,
            "to": {"endpoint": "mqtt", "topic": f"{tag}/{{routing_key...}}", "qos": 1},
        }
    more: dict[str, Any] = {"settle": "stored"}
    if row.deduplicate:
        more = {"deduplicate": {"by": "message_id", "window": "10m"}}
    return {
        "name": "route",
        "from": {"endpoint": "mqtt", "topic": f"{tag}/{{rest...}}"},
        "to": {"endpoint": "far", "exchange": f"{tag}.far", "routing_key": f"{tag}.{{rest...}}"},
        **more,
    }


def _sender(
    row: ReplicaRow, port: int, tag: str, history: History, version: Version, *, probe: bool
) -> Sender:
    common: dict[str, Any] = {
        "addresses": ADDRESSES[:1] if probe else ADDRESSES,
        "count": PROBES_MAX if probe else row.messages,
        "rate": PROBES_RATE if probe else row.messages / row.seconds,
    }
    name = PROBE if probe else "sender"
    if row.source == "amqp":
        return AmqpSender(name, port, history, exchange=EXCHANGE, prefix=f"{tag}.", **common)
    if row.source == "elected":
        queue = queue_at(f"{tag}.in", f"{tag}.in", "#", single=True)
        return AmqpSender(name, port, history, exchange=f"{tag}.in", prefix="", declarations=queue, **common)
    qos = 2 if row.guarantee == "qos2" else 1
    return MqttSender(name, port, history, prefix=tag, qos=qos, version=version, **common)


def _receiver(row: ReplicaRow, port: int, tag: str, history: History, version: Version) -> Receiver:
    if row.target != "mqtt":
        many = row.nodes > 1
        where: tuple[str, Literal["", "topic"]] = (f"{tag}.far", "topic") if row.linked else (EXCHANGE, "")
        name = f"{tag}-out"  # what begins with the namespace is no program's
        queue = queue_at(name, where[0], f"{tag}.#", kind=where[1], single=many, quorum=many)
        common: dict[str, Any] = {"queue": name, "prefix": f"{tag}.", "declarations": queue}
        return AmqpReceiver("receiver", port, history, exclusive=not many, **common)
    qos = 2 if row.guarantee == "qos2" else 1
    return MqttReceiver("receiver", port, history, prefix=tag, qos=qos, version=version)


@contextmanager
def replicas_rigged(
    row: ReplicaRow, folder: Path, chance: Random, rabbitmq: RabbitMQ | RabbitCluster
) -> Iterator[ReplicaRig]:
    """A rig whose replicas run; its sender and receiver wait to be started."""
    tag = f"chaos-{chance.getrandbits(40):x}"
    with ExitStack() as stack:
        folder.mkdir(parents=True, exist_ok=True)
        cluster = rabbitmq if isinstance(rabbitmq, RabbitCluster) else None
        nodes = [rabbitmq] if isinstance(rabbitmq, RabbitMQ) else rabbitmq.nodes
        ways = []
        for at in range(row.replicas):  # each begins at another node
            turned = [*nodes[at % len(nodes) :], *nodes[: at % len(nodes)]]
            ways.append([stack.enter_context(Proxy(node.port)) for node in turned])
        link = stack.enter_context(Proxy(nodes[0].port)) if row.linked else None
        replicas = [
            replica_of(folder, f"replica-{at}", [way.port for way in to], tag, row, link)
            for at, to in enumerate(ways)
        ]

        def leg(place: str) -> Proxy:
            to = [node.port for node in nodes]
            if place == "mqtt":
                to = [one.configuration["listeners"]["mqtt"]["port"] for one in replicas]
            return stack.enter_context(Balancer(to))

        near, far = leg(row.source), leg(row.target)
        history = History()
        versions = (Version.V5, Version.V311)
        version, receiving = chance.choice(versions), chance.choice(versions)
        if row.deduplicate:
            version = Version.V5  # before it a message cannot say its id
        rig = ReplicaRig(
            row,
            replicas,
            nodes,
            cluster,
            [near, far, *([] if link is None else [link])],
            ways,
            history,
            _sender(row, near.port, tag, history, version, probe=False),
            _sender(row, near.port, tag, History(), version, probe=True),
            _receiver(row, far.port, tag, history, receiving),
            Beside(leg("mqtt").port, chance),
            # Workers have a console each, which come and go; the queues of the RabbitMQ are everybody's.
            ReplicaOperator([] if row.workers > 1 else replicas, partial(_queued, nodes, tag)),
        )
        for replica in replicas:
            stack.enter_context(replica)
        for replica in replicas:
            rig.until_serving(replica)
        yield rig
