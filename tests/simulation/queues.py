"""Queues of a simulation with arguments: what they are declared with, and where their messages may arrive.

A feature adds one queue, which a client publishes to by its name or by an exchange. Dead letters go to the
queue `spare`, whose own arguments the seed chooses, and from there perhaps to `last`.
"""

from __future__ import annotations

from random import Random
from typing import Any, Final

from tests.simulation.ledger import Destination, Ledger
from tests.simulation.plan import Plan

ADDRESSES: Final = {
    "length": ("short", "/short"),
    "reject": ("strict", "/strict"),
    "priority": ("ranked", "/ranked"),
    "single-active": ("single", "/single"),
    "delay": ("delayed", "later/a"),
    "unique": ("unique", "twice/a"),
}
"""Queue and address of each feature."""
DEAD: Final = ("spare", "last")
ROUTE: Final = (
    "  - {name: unique, from: {endpoint: amqp091, exchange: twice}, to: {endpoint: amqp091, queue: unique},"
    " deduplicate: {window: 10m}}\n"
)
DELAYS_SECS: Final = (0.0, 0.5, 2.0)


def are_dead_marked(plan: Plan) -> bool:
    """Return True if dead letters that arrive again are marked as repeats.

    A dead letter may be delivered before it is on disk. Without that commit its queue sends it there again.
    """
    return not plan.faults & {"crash", "full-disk", "broken-disk"}


def _to(queue: str) -> dict[str, Any]:
    return {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": queue}


class ArgumentQueues:
    """Queues of the features that are on. `destinations` has them by name."""

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        self.destinations: dict[str, Destination] = {}
        self.addresses: dict[str, list[Destination]] = {}
        self.routes = ROUTE if "unique" in plan.features else ""
        self.exchanges: list[dict[str, Any]] = []
        self.bindings: list[dict[str, Any]] = []
        self._arguments: dict[str, dict[str, Any]] = {}
        self._plan = plan
        self._ledger = ledger
        found = [(one, *ADDRESSES[one]) for one in ADDRESSES if one in plan.features]
        if not found:
            return
        self._add_dead()
        for feature, name, address in found:
            self.addresses[address] = [self._add(name, self._arguments_of(feature))]
        if "delay" in plan.features:
            arguments = {"x-delayed-type": "fanout"}
            self.exchanges.append({"name": "later", "type": "x-delayed-message", "arguments": arguments})
            self.bindings.append({"source": "later", "destination": "delayed"})
            self.destinations["delayed"].is_ordered = False
            self.destinations["delayed"].is_marked = are_dead_marked(plan)
        if "unique" in plan.features:
            self.exchanges.append({"name": "twice", "type": "fanout"})
            # A paused route accepts before the id is on disk (docs/reference/guarantees.md).
            self.destinations["unique"].is_deduplicated = not {"crash", "pause"} <= plan.faults
        if "single-active" in plan.features:
            self.destinations["single"].has_one_consumer = True

    @property
    def declared(self) -> list[dict[str, Any]]:
        """Return the queues as the configuration declares them."""
        return [{"name": name, "arguments": one} for name, one in self._arguments.items()]

    def more(self, address: str, random: Random) -> dict[str, Any]:
        """Return further fields of a publication to an address."""
        if address == "/ranked":
            return {"priority": random.choice((0, 1, 1, 3, 9))}
        if address == "later/a":
            return {"delay_secs": random.choice(DELAYS_SECS)}
        return {}

    def _add_dead(self) -> None:
        random = Random(f"spare {self._plan.seed}")
        arguments = random.choice(({}, {"x-max-length": 3}, {"x-message-ttl": 1_000}, {"x-max-priority": 2}))
        self._add("last", {}, is_ordered=False)
        self._add("spare", arguments | _to("last") if arguments else {}, is_ordered=False)
        for name in DEAD:
            self.destinations[name].is_marked = are_dead_marked(self._plan)

    def _add(self, name: str, arguments: dict[str, Any], *, is_ordered: bool = True) -> Destination:
        one = self._ledger.destination(name, is_ordered=is_ordered, is_marked=True)
        one.exists = True
        target = arguments.get("x-dead-letter-routing-key")
        one.fallbacks = (self.destinations[target],) if target else ()
        self.destinations[name] = one
        self._arguments[name] = arguments
        return one

    def _arguments_of(self, feature: str) -> dict[str, Any]:
        random = Random(f"{feature} {self._plan.seed}")
        match feature:
            case "length":
                overflow = random.choice(("drop-head", "reject-publish", "reject-publish-dlx"))
                limit = random.choice(({"x-max-length": 4}, {"x-max-length": 1}, {"x-max-length-bytes": 700}))
                ttl = random.choice(({}, {"x-message-ttl": 700}))
                return {"x-overflow": overflow, **limit, **ttl, **_to("spare")}
            case "reject":
                quorum = {"x-queue-type": "quorum", "x-delivery-limit": random.choice((1, 3))}
                safe = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
                return random.choice(({}, quorum, quorum | safe)) | _to("spare")
            case "priority":
                length = random.choice(({}, {"x-max-length": 4, **_to("spare")}))
                return {"x-max-priority": random.choice((1, 5)), **length}
            case "single-active":
                return {"x-single-active-consumer": True, **random.choice(({}, _to("spare")))}
        return {}
