"""The rows: from where to where, with which guarantee, and what goes wrong meanwhile.

`mqtt` and `amqp` are clients of the gateway (persistent sessions, durable queues); `rabbitmq` and `mosquitto`
are remote brokers behind links. A row whose source and target are clients of one protocol needs no route.
"""

from __future__ import annotations

from itertools import product
from typing import Final, Literal, NamedTuple

Place = Literal["mqtt", "amqp", "rabbitmq", "mosquitto"]
Guarantee = Literal["qos1", "qos2", "confirm"]
Settle = Literal["confirmed", "stored"]

PLACES: Final[tuple[Place, ...]] = ("mqtt", "amqp", "rabbitmq", "mosquitto")
LOCAL: Final[tuple[Place, ...]] = ("mqtt", "amqp")
REMOTE: Final[frozenset[Place]] = frozenset({"rabbitmq", "mosquitto"})
SETTLES: Final[tuple[Settle, ...]] = ("confirmed", "stored")


class Row(NamedTuple):
    """One run. `times` is how often each fault strikes within `seconds`; then comes the quiet phase."""

    source: Place
    target: Place
    guarantee: Guarantee
    settle: Settle
    faults: tuple[str, ...]
    times: int = 2
    messages: int = 5_000
    seconds: float = 6.0
    deduplicate: bool = False

    @property
    def name(self) -> str:
        """What it is called on the command line."""
        manner = "deduplicated" if self.deduplicate else self.settle
        return f"{self.source}-{self.target}-{self.guarantee}-{manner}-{'+'.join(self.faults)}"

    @property
    def remotes(self) -> set[Place]:
        """The remote brokers that it needs."""
        return {self.source, self.target} & REMOTE

    @property
    def direct(self) -> bool:
        """No route is between the source and the target."""
        return self.source == self.target and not self.remotes and not self.deduplicate

    @property
    def once(self) -> bool:
        """Nothing may come twice: QoS 2 within the gateway."""
        return self.guarantee == "qos2" and self.source == self.target == "mqtt"

    @property
    def flagged(self) -> bool:
        """What comes twice is marked: a link may repeat what it does not know to have arrived."""
        return not self.remotes


EVERYWHERE: Final = (
    ("kill-gateway",),
    ("stop-gateway",),
    ("kill-gateway", "cut"),
    ("cut", "cut-all"),
    ("stall", "half-open"),
    ("delay", "slow-consumer", "cut"),
    ("full-disk",),
    ("full-disk", "kill-gateway"),
    ("clock", "kill-gateway"),
)
# What makes a sender send again.
REPEATING: Final = (
    ("kill-gateway", "cut"),
    ("stop-gateway", "cut-all"),
    ("stall", "half-open", "kill-gateway"),
    ("full-disk", "cut"),
)


def _fault_sets(remotes: set[Place]) -> list[tuple[str, ...]]:
    own: list[tuple[str, ...]] = []
    for remote in sorted(remotes):
        own += [(f"kill-{remote}",), (f"stop-{remote}",), (f"stop-{remote}", "kill-gateway")]
    return [*EVERYWHERE, *own]


def matrix() -> list[Row]:
    """Every row."""
    rows = []
    for source, target in product(PLACES, PLACES):
        guarantees: tuple[Guarantee, ...] = (
            ("qos1", "qos2") if source in ("mqtt", "mosquitto") else ("confirm",)
        )
        settles = SETTLES if target in REMOTE else SETTLES[:1]
        for guarantee, settle in product(guarantees, settles):
            for faults in _fault_sets({source, target} & REMOTE):
                # A killed Mosquitto is thrown back to what it saved: under packet identifiers that its peers
                # have not released it then sends other messages, which QoS 2 has them take for repeats.
                if "kill-mosquitto" in faults and guarantee == "qos2":
                    continue
                # And what it may lose by itself should not be most of what was sent.
                times = 1 if "kill-mosquitto" in faults else 2
                rows.append(Row(source, target, guarantee, settle, faults, times))
    for source, target in product(LOCAL, LOCAL):
        for faults in REPEATING:
            made = Row(source, target, "qos1" if source == "mqtt" else "confirm", "confirmed", faults)
            rows.append(made._replace(deduplicate=True))
    return rows


# What `make test` runs: one row for each place, guarantee and kind of fault, as short as they can be.
SHORT: Final = (
    Row("amqp", "amqp", "confirm", "confirmed", ("kill-gateway", "cut"), 2, 3_000, 4.0),
    Row("amqp", "amqp", "confirm", "confirmed", ("full-disk", "half-open"), 1, 3_000, 4.0),
    Row("mqtt", "amqp", "qos1", "confirmed", ("kill-gateway", "clock"), 2, 3_000, 4.0),
    Row("mqtt", "mqtt", "qos2", "confirmed", ("kill-gateway", "cut-all"), 2, 3_000, 4.0),
    Row("amqp", "mqtt", "confirm", "confirmed", ("stop-gateway", "stall"), 1, 3_000, 4.0),
    Row("amqp", "mqtt", "confirm", "confirmed", ("kill-gateway", "cut"), 1, 3_000, 4.0, deduplicate=True),
    Row("mqtt", "rabbitmq", "qos2", "stored", ("kill-rabbitmq", "kill-gateway"), 1, 3_000, 4.0),
    Row("mosquitto", "amqp", "qos1", "confirmed", ("stop-mosquitto", "kill-gateway"), 1, 3_000, 4.0),
    Row("rabbitmq", "mosquitto", "confirm", "confirmed", ("cut", "delay", "kill-gateway"), 1, 3_000, 4.0),
)
