"""The operator of a row's gateway: requests to its HTTP interface, and what its books say at the end.

A message that was acknowledged has four ends: it was delivered, it is a dead letter, it was dropped and
counted, or it is still queued. The operator knows three of them from the gateway itself; the receiver knows
the first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import httpx

from tests.chaos.checker import Id, id_of
from tests.chaos.workers.common import PROBE
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import GatewayProcess
from tests.operator import bearer

PAGE: Final = 1_000
PATIENCE_SECS: Final = 30.0
ROUTE: Final = "route"  # that of the row
LEFT: Final = "chaos-left"  # client of the session that an operator deletes
DROPPED: Final = re.compile(r'^gateway_dropped_total\{reason="(\w+)"\} (\S+)$', re.MULTILINE)
DAMAGED: Final = Id("damaged", "", 0)
# Of the counted reasons those for which the publisher was told that its message is not accepted.
REFUSALS: Final = frozenset({"queue_refused", "retained_full", "memory"})


class Records(Protocol):
    """What one gateway or several replicas say of their messages."""

    def letters(self) -> Counter[Id]: ...

    def dropped(self) -> dict[str, int]: ...

    def queued(self) -> list[str]: ...


class Operator:
    """Requests to one gateway, which runs."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self._gateway = gateway

    def post(self, path: str, **choice: Any) -> dict[str, Any]:
        """Request a change. Return the response's fields; empty if the gateway cannot do it now (503)."""
        response = self._request("POST", f"/api/v1/{path}", body=choice)
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            return {}
        response.raise_for_status()
        found: dict[str, Any] = response.json()
        return found

    def rows(self, path: str) -> list[dict[str, Any]]:
        """Return all rows of a list."""
        found: list[dict[str, Any]] = []
        words: dict[str, Any] = {"count": PAGE}
        while True:
            page = self._request("GET", f"/api/v1/{path}", words=words).raise_for_status().json()
            found += page["items"]
            if page["next"] is None:
                return found
            words["after"] = page["next"]

    def redrive(self) -> bool:
        """Redrive the dead letters of the row's route; return True if none is left."""
        if self._buried():
            self.post("dead-letters/redrive", route=ROUTE)
        return not self._buried()

    def _buried(self) -> list[dict[str, Any]]:
        return [row for row in self.rows("dead-letters") if row["route"] == ROUTE]

    def letters(self) -> Counter[Id]:
        """Return which messages of the row are dead letters, and how many of each. What was damaged has no
        body, and is DAMAGED. What nobody wanted of the others is not the row's."""
        found: Counter[Id] = Counter()
        for row in self.rows("dead-letters"):
            id = id_of(row["body"].encode())
            if row["reason"] == "store" or (id is not None and id.source != PROBE):
                found[id or DAMAGED] += 1
        return found

    def dropped(self) -> dict[str, int]:
        """Return how many accepted messages were dropped since the gateway started, by reason."""
        text = self._request("GET", "/metrics").raise_for_status().text
        counts = {reason: int(float(count)) for reason, count in DROPPED.findall(text)}
        return {reason: count for reason, count in counts.items() if count and reason not in REFUSALS}

    def queued(self) -> list[str]:
        """Return the queues, sessions, outboxes and routes that still have messages, a line each."""
        places = (
            ("queues", "queue", ("messages", "unacknowledged")),
            ("sessions", "client", ("waiting", "in_flight")),
            ("outboxes", "route", ("messages", "in_flight")),
            ("routes", "name", ("held", "in_flight")),
        )
        return [
            f"{path} {row[name]!r}: {field} {row[field]}"
            for path, name, fields in places
            for row in self.rows(path)
            for field in fields
            if row[field]
        ]

    def _request(
        self,
        method: str,
        path: str,
        *,
        words: dict[str, Any] | None = None,
        body: dict[str, Any] | None = None,
    ) -> httpx.Response:
        port = self._gateway.port("http")
        return httpx.request(
            method,
            f"http://{LOOPBACK}:{port}{path}",
            params=words,
            json=body,
            headers=bearer(port),
            timeout=PATIENCE_SECS,
            trust_env=False,
        )


class ReplicaOperator:
    """Requests to all replicas. `beside` returns queues of their RabbitMQ that have messages, a line each."""

    def __init__(self, replicas: Sequence[GatewayProcess], beside: Callable[[], list[str]]) -> None:
        self._operators = [Operator(replica) for replica in replicas]
        self._beside = beside

    def letters(self) -> Counter[Id]:
        """Return which messages of the row are dead letters, of one replica or of all."""
        found: Counter[Id] = Counter()
        for operator in self._operators:
            found |= operator.letters()
        return found

    def dropped(self) -> dict[str, int]:
        """Return how many accepted messages the replicas have dropped since each started, by reason."""
        found: Counter[str] = Counter()
        for operator in self._operators:
            found.update(operator.dropped())
        return dict(found)

    def queued(self) -> list[str]:
        """Return what still has messages, a line each."""
        return [line for operator in self._operators for line in operator.queued()] or self._beside()
