"""What goes wrong with replicas: one function per fault, each of which also ends what it began."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Final

from tests.chaos.faults import AWAY_SECS
from tests.chaos.proxy import Way
from tests.interop.cluster import start_all, stop_all
from tests.interop.gateway_process import GatewayProcess

if TYPE_CHECKING:
    from tests.chaos.replicas.rig import ReplicaRig

# Half of them shorter, half longer than it takes the others to hold a replica dead (see rig.py).
LONG_SECS: Final = ((0.2, 2.5), (5.0, 8.0))

DIRECTIONS: Final[tuple[Way, ...]] = ("up", "down", "both")
Fault = Callable[["ReplicaRig", Random], None]


def _for_long(chance: Random) -> float:
    return chance.uniform(*chance.choice(LONG_SECS))


def kill_replica(rig: ReplicaRig, chance: Random) -> None:
    """SIGKILL for one, and another one in its place."""
    replica = chance.choice(rig.replicas)
    replica.kill()
    time.sleep(_for_long(chance))
    replica.start()


def freeze_replica(rig: ReplicaRig, chance: Random) -> None:
    """SIGSTOP, and awake again."""
    replica = chance.choice(rig.replicas)
    replica.process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(_for_long(chance))
    finally:
        replica.process.send_signal(signal.SIGCONT)


def kill_worker(rig: ReplicaRig, chance: Random) -> None:
    """SIGKILL for one of the processes of a replica, which starts another one."""
    _signal_worker(chance.choice(rig.replicas), chance, signal.SIGKILL)


def freeze_worker(rig: ReplicaRig, chance: Random) -> None:
    """SIGSTOP for one of them, and awake again, if its supervisor has not killed it."""
    replica = chance.choice(rig.replicas)
    pid = _signal_worker(replica, chance, signal.SIGSTOP)
    time.sleep(_for_long(chance))
    if pid in replica.worker_pids.values():
        _signal(pid, signal.SIGCONT)


def _signal_worker(replica: GatewayProcess, chance: Random, number: signal.Signals) -> int:
    """Signal one of its processes, and return which."""
    pid = chance.choice([pid for _, pid in sorted(replica.worker_pids.items())])
    _signal(pid, number)
    return pid


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has just ended: another fault was there first
        os.kill(pid, number)


def isolate_replica(rig: ReplicaRig, chance: Random) -> None:
    """One cannot connect to the cluster for a while."""
    ways = chance.choice(rig.ways)
    for way in ways:
        way.shut()
    time.sleep(_for_long(chance))
    for way in ways:
        way.open()


def deafen_replica(rig: ReplicaRig, chance: Random) -> None:
    """What one says to the cluster does not arrive, or what it should hear, or both: and nobody is told."""
    ways, direction = chance.choice(rig.ways), chance.choice(DIRECTIONS)
    for way in ways:
        way.stall(direction)
    time.sleep(_for_long(chance))
    for way in ways:
        way.resume()


def roll(rig: ReplicaRig, chance: Random) -> None:
    """One after the other is stopped by SIGTERM and started again, when the one before serves clients."""
    for replica in rig.replicas:
        code = replica.terminate()
        if code:
            rig.notes.append(f"a replica ended with {code} after SIGTERM")
        time.sleep(chance.uniform(*AWAY_SECS))
        replica.start()
        rig.until_serving(replica)


def kill_broker(rig: ReplicaRig, chance: Random) -> None:
    """SIGKILL for all of RabbitMQ, and back."""
    stop_all(rig.nodes, kill=True)
    time.sleep(chance.uniform(*AWAY_SECS))
    start_all(rig.nodes)


def stop_broker(rig: ReplicaRig, chance: Random) -> None:
    """SIGTERM for all of RabbitMQ, and back."""
    stop_all(rig.nodes)
    start_all(rig.nodes)


def kill_node(rig: ReplicaRig, chance: Random) -> None:
    """SIGKILL for one of the nodes, and back; the others go on."""
    node = chance.choice(rig.nodes)
    node.stop(kill=True)
    time.sleep(_for_long(chance))
    node.start()


def stop_node(rig: ReplicaRig, chance: Random) -> None:
    """SIGTERM for one of the nodes, and back."""
    node = chance.choice(rig.nodes)
    node.stop()
    time.sleep(_for_long(chance))
    node.start()


def partition(rig: ReplicaRig, chance: Random) -> None:
    """One of the nodes is cut off from the others, and pauses, being the minority; then they meet again."""
    assert rig.cluster is not None
    node = chance.choice(rig.nodes)
    rig.cluster.cut_off(node)
    time.sleep(_for_long(chance))
    rig.cluster.heal(node)


def cut(rig: ReplicaRig, chance: Random) -> None:
    """The connections of one client end."""
    chance.choice(rig.proxies).cut()


FAULTS: Final[dict[str, Fault]] = {
    "kill-replica": kill_replica,
    "freeze-replica": freeze_replica,
    "kill-worker": kill_worker,
    "freeze-worker": freeze_worker,
    "isolate-replica": isolate_replica,
    "deafen-replica": deafen_replica,
    "roll": roll,
    "kill-broker": kill_broker,
    "stop-broker": stop_broker,
    "kill-node": kill_node,
    "stop-node": stop_node,
    "partition": partition,
    "cut": cut,
}
