"""The rows of replicas over a RabbitMQ of one node or three: from where to where, with which guarantee, and
what goes wrong.

`mqtt` are clients of the replicas with persistent sessions: each connects to any of them. `amqp` are programs
at the RabbitMQ itself. From `elected` comes what one of the replicas alone consumes over a link; to `outbox`
goes what waits for a link on the cluster, and to `once` what a route sends there that deduplicates.
"""

from __future__ import annotations

from itertools import product
from typing import Final, Literal, NamedTuple

Place = Literal["mqtt", "amqp", "elected", "outbox", "once"]
Guarantee = Literal["qos1", "qos2", "confirm"]
QueueType = Literal["classic", "quorum"]


class ReplicaRow(NamedTuple):
    """One run. `times` is how often each fault strikes within `seconds`; then comes the quiet phase."""

    source: Place
    target: Place
    guarantee: Guarantee
    queue_type: QueueType
    faults: tuple[str, ...]
    replicas: int = 2
    times: int = 2
    messages: int = 3_000
    seconds: float = 10.0
    nodes: int = 1
    workers: int = 1  # processes of each replica

    @property
    def name(self) -> str:
        """What it is called on the command line."""
        way = f"{self.source}-{self.target}-{self.guarantee}"
        kind = "workers" if self.workers > 1 else "replicas" if self.nodes == 1 else "cluster"
        return f"{kind}-{way}-{self.queue_type}-{'+'.join(self.faults)}"

    @property
    def remotes(self) -> set[str]:
        """What it needs."""
        return {"rabbitmq" if self.nodes == 1 else "cluster"}

    @property
    def quiet_secs_max(self) -> float:
        """How long the quiet phase may last: three nodes that share two cores take their time."""
        return 30.0 if self.nodes == 1 else 90.0

    @property
    def once(self) -> bool:
        """Nothing may come twice: QoS 2 among clients of the replicas."""
        return self.guarantee == "qos2" and self.target == "mqtt"

    @property
    def ordered(self) -> bool:
        """Nothing may be overtaken."""
        return True

    @property
    def flagged(self) -> bool:
        """A replica may publish again what it does not know to have arrived, unmarked."""
        return False

    @property
    def discards(self) -> bool:
        """No operator ends messages."""
        return False

    @property
    def expiring(self) -> bool:
        """No message has a short life."""
        return False

    @property
    def deduplicate(self) -> bool:
        """Sent again is not come again."""
        return self.target == "once"

    @property
    def linked(self) -> bool:
        """Replicas have a link to the RabbitMQ, and a route."""
        return self.source == "elected" or self.target in ("outbox", "once")


WAYS: Final[tuple[tuple[Place, Place, Guarantee], ...]] = (
    ("mqtt", "mqtt", "qos1"),
    ("mqtt", "mqtt", "qos2"),
    ("mqtt", "amqp", "qos1"),
    ("mqtt", "amqp", "qos2"),
    ("amqp", "mqtt", "confirm"),
)
FAULTS: Final[tuple[tuple[str, ...], ...]] = (
    ("kill-replica",),
    ("freeze-replica",),
    ("isolate-replica",),
    ("deafen-replica",),
    ("roll",),
    ("kill-broker",),
    ("stop-broker",),
    ("kill-replica", "cut"),
    ("freeze-replica", "kill-replica"),
    ("isolate-replica", "roll"),
    ("roll", "cut"),
)


LINKED: Final[tuple[tuple[Place, Place, Guarantee], ...]] = (
    ("elected", "mqtt", "confirm"),
    ("mqtt", "outbox", "qos1"),
)
# A replica that is killed or frozen may not have said what the target had of it.
ORDERLY: Final[tuple[tuple[str, ...], ...]] = (("cut",), ("roll",), ("roll", "cut"))
CLUSTER_FAULTS: Final[tuple[tuple[str, ...], ...]] = (
    ("kill-node",),
    ("stop-node",),
    ("partition",),
    ("stop-broker",),
    ("kill-broker",),
    ("kill-node", "kill-replica"),
    ("partition", "freeze-replica"),
    ("stop-node", "roll"),
    ("isolate-replica",),
)


WORKERS: Final[tuple[tuple[Place, Place, Guarantee], ...]] = (
    ("mqtt", "mqtt", "qos1"),
    ("mqtt", "mqtt", "qos2"),
)
WORKER_FAULTS: Final[tuple[tuple[str, ...], ...]] = (
    ("kill-worker",),
    ("freeze-worker",),
    ("kill-worker", "cut"),
    ("freeze-worker", "kill-replica"),
    ("kill-worker", "kill-broker"),
    ("roll",),
)


def replica_rows() -> list[ReplicaRow]:
    """Every row: over one node, and three replicas over three nodes."""
    types: tuple[QueueType, ...] = ("classic", "quorum")
    one = [ReplicaRow(*way, queue_type, faults) for way, faults, queue_type in product(WAYS, FAULTS, types)]
    three = [
        ReplicaRow(*way, "quorum", faults, 3, 1 if len(faults) > 1 else 2, 4_000, 20.0, 3)
        for way, faults in product(WAYS, CLUSTER_FAULTS)
    ]
    linked = [ReplicaRow(*way, "quorum", faults) for way, faults in product(LINKED, FAULTS)]
    workers = [
        ReplicaRow(*way, "quorum", faults, workers=2) for way, faults in product(WORKERS, WORKER_FAULTS)
    ]
    once = [ReplicaRow("mqtt", "once", "qos1", "quorum", faults) for faults in ORDERLY]
    return [*one, *linked, *workers, *once, *three]


# What `make test` runs.
REPLICAS_SHORT: Final = (
    ReplicaRow(
        "mqtt", "mqtt", "qos2", "classic", ("roll", "kill-replica"), times=1, messages=2_000, seconds=6.0
    ),
    ReplicaRow(
        "amqp", "mqtt", "confirm", "quorum", ("freeze-replica", "cut"), times=1, messages=2_000, seconds=6.0
    ),
)
