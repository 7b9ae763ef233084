"""Three RabbitMQ nodes on the loopback interface that form a cluster, with a port mapper of their own.

For a node that is cut off the others have another cookie: so no connection between them comes about until
`heal`. The smaller side of a partition pauses.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Self

from tests.interop.servers import PortMapper, RabbitMQ, free_ports
from tests.needs import needed

NODES: Final = 3
COOKIE: Final = "GATEWAYTESTS"
LINES: Final = (
    "cluster_partition_handling = pause_minority",
    "cluster_formation.peer_discovery_backend = classic_config",
    "cluster_formation.randomized_startup_delay_range.min = 0",
    "cluster_formation.randomized_startup_delay_range.max = 1",
)


def start_all(nodes: Sequence[RabbitMQ]) -> None:
    """At once, for a node waits for those that were there when it was stopped."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(lambda node: node.start(), nodes))


def stop_all(nodes: Sequence[RabbitMQ], *, kill: bool = False) -> None:
    """At once."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(lambda node: node.stop(kill), nodes))


@needed("RabbitMQ")
class RabbitCluster:
    """The cluster; `nodes` can be stopped and started by themselves."""

    def __init__(self, folder: Path, nodes: int = NODES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (port,) = free_ports(1)
        self._mapper = PortMapper(folder, port)
        self.nodes = [RabbitMQ(folder / f"node-{at}") for at in range(nodes)]
        known = [
            f"cluster_formation.classic_config.nodes.{at} = {node.node}"
            for at, node in enumerate(self.nodes, 1)
        ]
        for at, node in enumerate(self.nodes):
            node.configure((*LINES, *known), epmd_port=port)
            cookie = folder / f"node-{at}" / ".erlang.cookie"
            cookie.write_text(COOKIE)
            cookie.chmod(0o400)

    def start(self) -> None:
        """All nodes; the first time they find each other."""
        if not self._mapper.running:
            self._mapper.start()
        start_all(self.nodes)

    def stop(self) -> None:
        """All nodes at once."""
        stop_all(self.nodes)

    def cut_off(self, node: RabbitMQ) -> None:
        """It and the others do not find each other any more."""
        self._meet(node, "another")

    def heal(self, node: RabbitMQ) -> None:
        """They do again."""
        self._meet(node, COOKIE)

    def _meet(self, node: RabbitMQ, cookie: str) -> None:
        for other in self.nodes:
            if other is not node and other.running:
                told = f"erlang:set_cookie('{node.node}', '{cookie}'), erlang:disconnect_node('{node.node}')."
                other.control("eval", told)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._mapper.stop()
