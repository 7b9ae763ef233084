"""The rows: from where to where, with which guarantee, and what goes wrong meanwhile.

`mqtt`, `amqp` and `fast` are clients of the gateway (persistent sessions, durable queues); `rabbitmq`,
`mosquitto` and `other` are remote brokers behind links. A row whose source and target are clients of one
protocol needs no route. Nobody else speaks AMQP/Fast, so there our own client is at the other end, and
`other` is a second gateway.
"""

from __future__ import annotations

from itertools import product
from typing import Final, Literal, NamedTuple

Place = Literal["mqtt", "amqp", "fast", "rabbitmq", "mosquitto", "other"]
Guarantee = Literal["qos1", "qos2", "confirm", "tx"]
Settle = Literal["confirmed", "stored"]

LOCAL: Final[tuple[Place, ...]] = ("mqtt", "amqp", "fast")
PLACES: Final[tuple[Place, ...]] = (*LOCAL, "rabbitmq", "mosquitto", "other")
GUARANTEES: Final[dict[Place, tuple[Guarantee, ...]]] = {
    "mqtt": ("qos1", "qos2"),
    "amqp": ("confirm", "tx"),
    "fast": ("confirm", "tx"),
    "rabbitmq": ("confirm",),
    "mosquitto": ("qos1", "qos2"),
    "other": ("confirm",),
}
REMOTE: Final[frozenset[Place]] = frozenset({"rabbitmq", "mosquitto", "other"})
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
    members: int = 0  # of the shared subscription that receives, of MQTT; 0: it is not shared
    expiring: bool = False  # some messages live for a second

    @property
    def name(self) -> str:
        """What it is called on the command line."""
        manner: str = self.settle
        for other, is_so in (
            ("deduplicated", self.deduplicate),
            ("shared", self.members),
            ("expiring", self.expiring),
        ):
            manner = other if is_so else manner
        return f"{self.source}-{self.target}-{self.guarantee}-{manner}-{'+'.join(self.faults)}"

    @property
    def quiet_secs_max(self) -> float:
        """How long the quiet phase may last."""
        return 30.0

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
        return self.guarantee == "qos2" and self.source == self.target == "mqtt" and not self.members

    @property
    def ordered(self) -> bool:
        """Nothing may be overtaken, but by members of a shared subscription, and what was a dead letter."""
        return not self.members and "redrive" not in self.faults

    @property
    def discards(self) -> bool:
        """Operators, ended sessions or a damaged store may end messages that were accepted, and all those are
        counted."""
        # A message of QoS 2 that is in flight when its session ends is no other member's (MQTT 5: 4.8.2).
        ending = {"leave-member", "delete-member"} if self.guarantee == "qos2" else set()
        return not ({"purge-queue", "delete-queue", "damage-row"} | ending).isdisjoint(self.faults)

    @property
    def full_or_failing(self) -> bool:
        """The store cannot be written for a while."""
        return not {"full-disk", "disk-error"}.isdisjoint(self.faults)

    @property
    def flagged(self) -> bool:
        """What comes twice is marked. Not where a link may repeat what it does not know to have arrived, and
        not of what the disk refused after it was delivered, if its sender's MQTT cannot be told: then it is
        the gateway itself that tries again. Nor of what another member or a dead letter was."""
        return self.ordered and not self.remotes and not (self.source == "mqtt" and self.full_or_failing)


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


# What a transaction can be caught by.
COMMITTING: Final = (
    ("kill-gateway", "cut"),
    ("stop-gateway",),
    ("stall", "half-open"),
    ("full-disk", "kill-gateway"),
)


# What is not a combination of any way with any guarantee: ways, and the faults of each of them.
Ways = tuple[tuple[Place, Place, Guarantee], ...]
Faults = tuple[tuple[str, ...], ...]
WAYS: Final[Ways] = (
    ("mqtt", "amqp", "qos1"),
    ("amqp", "mqtt", "confirm"),
    ("fast", "fast", "tx"),
    ("mqtt", "mqtt", "qos2"),
)
SPECIAL: Final[tuple[tuple[Ways, Faults], ...]] = (
    (
        WAYS,
        (
            ("freeze-gateway",),
            ("freeze-gateway", "cut"),
            ("freeze-gateway", "kill-gateway"),
            ("slow-disk",),
            ("slow-disk", "kill-gateway"),
            ("disk-error",),
            ("disk-error", "kill-gateway"),
            ("disk-error", "slow-disk", "cut"),
            ("clock-days",),
            ("clock-days", "kill-gateway"),
            ("clock-days", "stop-gateway"),
        ),
    ),
    (
        (
            ("mqtt", "amqp", "qos1"),
            ("mqtt", "amqp", "qos2"),
            ("amqp", "mqtt", "confirm"),
            ("amqp", "fast", "tx"),
            ("mqtt", "rabbitmq", "qos1"),
            ("rabbitmq", "mqtt", "confirm"),
        ),
        (
            ("pause-route", "resume-route", "reload", "kill-gateway"),
            ("pause-route", "resume-route", "reload", "stop-gateway"),
            ("pause-route", "resume-route", "reload", "cut"),
        ),
    ),
    (
        (("mqtt", "amqp", "qos1"), ("amqp", "fast", "confirm")),
        (("pause-route", "resume-route", "full-disk"), ("pause-route", "reload", "disk-error")),
    ),
    (
        (("mqtt", "mqtt", "qos1"), ("amqp", "mqtt", "confirm")),
        (("delete-session", "kill-gateway"), ("delete-session", "full-disk", "cut")),
    ),
    (
        (("mqtt", "amqp", "qos1"), ("fast", "amqp", "confirm")),
        (
            ("purge-queue", "kill-gateway"),
            ("purge-queue", "full-disk", "cut"),
            ("delete-queue", "redrive", "kill-gateway"),
            ("delete-queue", "redrive", "cut"),
            ("delete-queue", "redrive", "full-disk"),
        ),
    ),
    (
        (
            ("mqtt", "mqtt", "qos1"),
            ("amqp", "amqp", "confirm"),
            ("fast", "fast", "confirm"),
            ("mqtt", "amqp", "qos2"),
        ),
        (("damage-row",), ("damage-row", "cut")),
    ),
)
SHARED: Final[tuple[tuple[Ways, Faults], ...]] = (
    (
        (("mqtt", "mqtt", "qos1"), ("amqp", "mqtt", "confirm")),
        (
            ("full-disk", "cut-member"),
            ("full-disk", "cut-member", "kill-gateway"),
            ("leave-member", "cut-member"),
            ("leave-member", "full-disk"),
            ("delete-member", "kill-gateway"),
            ("delete-member", "full-disk", "cut"),
        ),
    ),
    (
        (("mqtt", "mqtt", "qos2"),),
        (
            ("full-disk", "cut-member"),
            ("full-disk", "cut-member", "kill-gateway"),
            ("leave-member", "cut-member"),
            ("delete-member", "full-disk"),
        ),
    ),
)


# Nothing restarts the gateway here: it would count what it drops from 0.
EXPIRING: Final[tuple[Ways, Faults]] = (
    (*WAYS[:3], ("mqtt", "mqtt", "qos1"), ("amqp", "amqp", "confirm")),
    (
        ("stall", "slow-consumer"),
        ("slow-consumer", "cut"),
        ("full-disk", "cut"),
        ("freeze-gateway", "slow-consumer"),
        ("slow-disk", "stall"),
    ),
)
PAUSED_EXPIRING: Final[tuple[Ways, Faults]] = (
    WAYS[:2],
    (("pause-route", "resume-route", "cut"), ("pause-route", "resume-route", "full-disk")),
)


def special_rows() -> list[Row]:
    """Rows of faults that make sense on some ways only."""
    rows = [
        Row(source, target, guarantee, "confirmed", faults, expiring=True)
        for ways, fault_sets in (EXPIRING, PAUSED_EXPIRING)
        for (source, target, guarantee), faults in product(ways, fault_sets)
    ]
    for members, table in ((0, SPECIAL), (3, SHARED)):
        for ways, fault_sets in table:
            for (source, target, guarantee), faults in product(ways, fault_sets):
                settle: Settle = "stored" if target in REMOTE else "confirmed"
                rows.append(Row(source, target, guarantee, settle, faults, members=members))
    return rows


def _fault_sets(remotes: set[Place], guarantee: Guarantee) -> list[tuple[str, ...]]:
    own: list[tuple[str, ...]] = []
    for remote in sorted(remotes):
        own += [(f"kill-{remote}",), (f"stop-{remote}",), (f"stop-{remote}", "kill-gateway")]
    if "mosquitto" in remotes:
        own.append(("crash-mosquitto", "kill-gateway"))
    # A killed Mosquitto is thrown back to what it last saved: under packet identifiers that its peers have
    # not released it then sends other messages, which QoS 2 has them take for repeats. No setting of its
    # saves after each change of state (`autosave_on_changes` counts queued messages, not acknowledgements),
    # so with QoS 2 it is killed right behind a save, with nobody connected.
    if guarantee == "qos2":
        own = [faults for faults in own if "kill-mosquitto" not in faults]
    return [*(COMMITTING if guarantee == "tx" else EVERYWHERE), *own]


def matrix() -> list[Row]:
    """Every row."""
    rows = []
    for source, target in product(PLACES, PLACES):
        settles = SETTLES if target in REMOTE else SETTLES[:1]
        guarantees = GUARANTEES[source]
        if "other" in (source, target):  # links to brokers of all kinds meet the same guarantees elsewhere
            if {source, target} & {"rabbitmq", "mosquitto"}:
                continue
            guarantees = guarantees[:1]
        for guarantee, settle in product(guarantees, settles):
            for faults in _fault_sets({source, target} & REMOTE, guarantee):
                # What a killed Mosquitto may lose by itself should not be most of what was sent.
                times = 1 if "kill-mosquitto" in faults else 2
                rows.append(Row(source, target, guarantee, settle, faults, times))
    for source, target in product(LOCAL, LOCAL):
        for faults in REPEATING:
            made = Row(source, target, GUARANTEES[source][0], "confirmed", faults)
            rows.append(made._replace(deduplicate=True))
    return [*rows, *special_rows()]


# What `make test` runs: one row for each place, guarantee and kind of fault, as short as they can be.
SHORT: Final = (
    Row("amqp", "fast", "tx", "confirmed", ("kill-gateway", "cut"), 2, 3_000, 4.0),
    Row("fast", "amqp", "confirm", "confirmed", ("full-disk", "half-open"), 1, 3_000, 4.0),
    Row("fast", "fast", "tx", "confirmed", ("kill-gateway",), 1, 3_000, 4.0),
    Row("mqtt", "amqp", "qos1", "confirmed", ("kill-gateway", "clock"), 2, 3_000, 4.0),
    Row("mqtt", "mqtt", "qos2", "confirmed", ("kill-gateway", "cut-all"), 2, 3_000, 4.0),
    Row("amqp", "mqtt", "confirm", "confirmed", ("stop-gateway", "stall"), 1, 3_000, 4.0),
    Row("amqp", "mqtt", "confirm", "confirmed", ("kill-gateway", "cut"), 1, 3_000, 4.0, deduplicate=True),
    Row("mqtt", "rabbitmq", "qos2", "stored", ("kill-rabbitmq", "kill-gateway"), 1, 3_000, 4.0),
    Row("mosquitto", "amqp", "qos2", "confirmed", ("crash-mosquitto", "kill-gateway"), 1, 3_000, 4.0),
    Row("rabbitmq", "mosquitto", "confirm", "stored", ("cut", "full-disk", "kill-gateway"), 1, 3_000, 4.0),
    Row("mqtt", "mqtt", "qos1", "confirmed", ("full-disk", "cut-member"), 1, 3_000, 4.0, members=3),
    Row("mqtt", "amqp", "qos2", "confirmed", ("pause-route", "reload", "kill-gateway"), 1, 3_000, 4.0),
    Row("fast", "amqp", "confirm", "confirmed", ("disk-error", "freeze-gateway"), 1, 3_000, 4.0),
    Row("amqp", "mqtt", "confirm", "confirmed", ("delete-session", "kill-gateway"), 1, 3_000, 4.0),
    Row("mqtt", "amqp", "qos1", "confirmed", ("damage-row", "cut"), 1, 3_000, 4.0),
    Row("mqtt", "mqtt", "qos2", "confirmed", ("clock-days", "slow-disk"), 1, 3_000, 4.0),
)
