"""What one seed chooses: features, faults, clients and limits. Each is on in some seeds and off in others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Final

FEATURES: Final = (
    "sessions",
    "shared",
    "route",
    "deduplicate",
    "queue",
    "ttl",
    "transactions",
    "get",
    "expiry",
    "tight",
    "mqtt311",
    "slow",
    "paged",
    "wills",
    "retained",
    "fast",
    "length",
    "reject",
    "priority",
    "single-active",
    "delay",
    "unique",
    "large",
    "late-wills",
    "cleared",
    "fast-transactions",
    "browse",
    "rights",
    "link-mqtt",
    "link-amqp",
    "link-fast",
    "link-back",
    "outbox",
)
LINKS: Final = frozenset({"link-mqtt", "link-amqp", "link-fast"})
OF_LINKS: Final = frozenset({"link-back", "outbox"})  # features that need a link
OF_FAST: Final = frozenset({"fast-transactions", "browse"})
FAULTS: Final = (
    "crash",
    "stop",
    "cut",
    "half-open",
    "stall",
    "full-disk",
    "broken-disk",
    "slow-disk",
    "clock",
    "pause",
    "reload",
    "purge",
    "delete-session",
    "redrive",
    "split",
    "away",
)
FAR_FAULTS: Final = (
    "far-crash",
    "far-stop",
    "far-full-disk",
    "far-slow-disk",
    "link-cut",
    "link-half-open",
    "link-stall",
    "unreachable",
    "link-pause",
)
STEPS: Final = 400


@dataclass(frozen=True)
class Plan:
    """A simulation that can be repeated: the seed chooses actions, the other fields what they are chosen
    from."""

    seed: int
    steps: int
    features: frozenset[str]
    faults: frozenset[str]

    @classmethod
    def of_seed(cls, seed: int, steps: int = STEPS) -> Plan:
        """Return the plan of a seed. A further feature or fault does not change the others.

        A second gateway is slow: some seeds have links.
        """
        random = Random(f"plan {seed}")
        some, more = random.choice((0.3, 0.5, 0.8)), random.choice((0.1, 0.3, 0.6))
        features = frozenset(one for one in FEATURES if Random(f"{one} {seed}").random() < some)
        if Random(f"links {seed}").random() < 0.6:
            features -= LINKS
        if not features & LINKS:
            features -= OF_LINKS
        if "cleared" in features:
            features |= {"retained"}
        if features & OF_FAST:
            features |= {"fast"}
        known = FAULTS + FAR_FAULTS if features & LINKS else FAULTS
        faults = frozenset(one for one in known if Random(f"{one} {seed}").random() < more)
        return cls(seed, steps, features or frozenset({"sessions"}), faults)

    def smaller(self) -> list[Plan]:
        """Return plans with a part of this one: fewer steps first, then one feature or fault less."""
        found = [replace(self, steps=max(self.steps * part // 8, 1)) for part in (2, 4, 6, 7)]
        found += [replace(self, faults=self.faults - {one}) for one in sorted(self.faults)]
        found += [replace(self, features=self.features - {one}) for one in sorted(self.features)]
        return [one for one in found if one.features and one != self]

    def command(self) -> str:
        """Return the command that repeats this plan."""
        words = [f"SEED={self.seed}", f"STEPS={self.steps}"]
        given = Plan.of_seed(self.seed, self.steps)
        without = sorted((given.features - self.features) | (given.faults - self.faults))
        if without:
            words.append(f"WITHOUT={','.join(without)}")
        return f"make simulate {' '.join(words)}"

    def without(self, names: frozenset[str]) -> Plan:
        """Return this plan without some features and faults."""
        return replace(self, features=self.features - names, faults=self.faults - names)
