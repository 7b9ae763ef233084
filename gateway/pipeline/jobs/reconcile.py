"""Job `reconcile`: compare accepted messages with delivered, dead-lettered and waiting ones.

The result lists each message that is missing or duplicated. Only messages accepted in a period are checked,
but their outcome is searched up to the end of the rows, since a message may leave an outbox long after it was
stored. There are two checks. For an *outbox*, each message has a row when it was stored and another when it
left; a message with only the first row waits, or is lost. For a *consumer*, its own record is compared
message by message. A message is identified by its id, or without an id by its body; messages with the same
body are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.sql import functions as F
from pyspark.sql.window import Window

from gateway.model.outcome import Reason
from gateway.pipeline.tolerance import Tolerance
from gateway.store.journal.columns import WAS_BURIED, WAS_DELIVERED, WAS_DROPPED, WAS_STORED

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

CONFIRMED: Final = "confirmed"
RELEASED: Final = "released"
REJECTED: Final = "rejected"
LOST: Final = "lost"
REPEATED: Final = "repeated"
WAITING: Final = "waiting"
UNKNOWN: Final = "unknown"
DOUBLE: Final = "double"
NO_TAKER: Final = Reason.NO_TAKER.value
FAULTS: Final = (LOST, REPEATED, UNKNOWN, DOUBLE)
BY_ID: Final = "id "  # Prefix of the key of a message with an id.
NAMED_MAX: Final = 100_000  # Messages that a report names; further ones are counted.

ROW: Final = ("shard", "sequence")
MESSAGE: Final = ("shard", "source_endpoint", "received", "slot")
COLUMNS: Final = (
    *(*MESSAGE, "sequence", "route", "target_endpoint", "target_address", "outcome", "reason"),
    *("reason_text", "message_id", "body_size", "body"),
)


class FaultyMessage(NamedTuple):
    """Message that is missing, repeated or unknown.

    `what` is the kind of fault, and `times` the number of missing or surplus copies.
    """

    what: str
    route: str
    address: str
    shard: str
    sequence: int
    message_id: str | None
    times: int


@dataclass
class Account:
    """Result of a reconciliation.

    `phases` has the number of rows by route and phase (the step that a row records, such as stored or
    delivered). `totals` has the number of messages by finding (such as lost). `faulty_messages` has at most
    NAMED_MAX of the messages with a finding.
    """

    phases: dict[tuple[str, str], int] = field(default_factory=dict)
    faulty_messages: list[FaultyMessage] = field(default_factory=list)
    totals: dict[str, int] = field(default_factory=dict)

    @property
    def balanced(self) -> bool:
        """True if no message is lost, repeated or unknown, and no row is duplicated; messages may wait."""
        return not self.faults

    @property
    def faults(self) -> int:
        """Number of lost, repeated and unknown messages, and of duplicated rows."""
        return sum(self.totals.get(what, 0) for what in FAULTS)

    @property
    def accepted_count(self) -> int:
        """Number of accepted messages."""
        return sum(rows for (_, phase), rows in self.phases.items() if phase in (CONFIRMED, WAS_STORED))

    def is_within(self, tolerance: Tolerance) -> bool:
        """Return True if the number of faults, relative to the accepted messages, is within `tolerance`."""
        return tolerance.allows(self.faults, self.accepted_count)

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "balanced": self.balanced,
            "phases": [
                {"route": route, "phase": phase, "rows": rows}
                for (route, phase), rows in sorted(self.phases.items())
            ],
            "totals": self.totals,
            "messages": [one._asdict() for one in self.faulty_messages],
        }


def reconcile(
    rows: DataFrame,
    received: DataFrame | None = None,
    *,
    waiting: Mapping[str, int] | None = None,
    still: int = 0,
    end: datetime | None = None,
    counted_at: datetime | None = None,
    earlier: Callable[[], DataFrame] | None = None,
) -> Account:
    """Compare the accepted messages in `rows`, which have the journal's columns, with their outcomes.

    `received` is a consumer's record of the messages that it got, with `message_id` or `body`; `still` is the
    number of messages that wait for that consumer. `waiting` has the number of messages that each route's
    outbox contained at the time `counted_at` (None: now). If more messages than these have not left the
    outbox, the rest is lost; without `waiting` all count as waiting. Messages accepted at `end` or later are
    not checked. `earlier` returns rows older than `rows`; it is called only if a delivered message may be a
    copy of an older one with the same body.
    """
    phase_rows = rows.select(*COLUMNS).withColumns({"phase": _phase(), "key": _key()}).drop("body").persist()
    try:
        account = Account()
        within = phase_rows if end is None else phase_rows.where(F.col("received") < F.lit(end))
        for row in within.groupBy("route", "phase").count().collect():
            account.phases[row["route"], row["phase"]] = row["count"]
        _add_double_rows(phase_rows, account)
        if any(phase in (WAS_STORED, WAS_DELIVERED) for _, phase in account.phases):
            _add_waiting_messages(phase_rows, account, waiting, end, counted_at)
            _add_repeated_messages(phase_rows, account, end, earlier)
        if received is not None:
            _compare_with_consumer(phase_rows, received, account, still, end)
        return account
    finally:
        phase_rows.unpersist()


def missing_count(rows: DataFrame, begin: datetime | None, end: datetime | None) -> int:
    """Return how many rows of the journal are missing in `rows`, which are all rows of an archive.

    A gap in the numbers counts if it is between rows received from `begin` up to, not including, `end`; None
    means no bound. If a shard's first rows are no longer in the archive, gaps on its oldest day do not count,
    because the missing rows may belong to the day before.
    """
    shards = Window.partitionBy("shard")
    in_order = shards.orderBy("sequence")
    gaps = rows.select(
        "received",
        (F.col("sequence") - F.lag("sequence").over(in_order) - 1).alias("missing"),
        F.lag("received").over(in_order).alias("before"),
        F.min("sequence").over(shards).alias("first"),
        F.to_date(F.min("received").over(shards)).alias("oldest"),
    ).where("missing > 0 and (first = 0 or to_date(before) > oldest)")
    if begin is not None:
        gaps = gaps.where(F.greatest("before", "received") >= F.lit(begin))
    if end is not None:
        gaps = gaps.where(F.least("before", "received") < F.lit(end))
    return int(gaps.agg(F.coalesce(F.sum("missing"), F.lit(0))).first()[0])  # type: ignore[index]


def _phase() -> Column:
    """Return the column `phase`: the step of a message that the row records, such as stored or delivered."""
    text = F.col("reason_text")
    accepted = F.col("outcome") == "accepted"
    return (
        F.when(accepted & (text == WAS_DELIVERED), WAS_DELIVERED)
        .when(accepted & (text == WAS_STORED), WAS_STORED)
        .when(accepted & (F.col("reason") == NO_TAKER), NO_TAKER)
        .when(accepted, CONFIRMED)
        .when(text.rlike(f"^{WAS_BURIED}(:|$)"), WAS_BURIED)
        .when(text.rlike(f"^{WAS_DROPPED}(:|$)"), WAS_DROPPED)
        .otherwise(F.col("outcome"))
    )


def _key() -> Column:
    """Return a column that tells which message a row belongs to.

    Its value is the message id, or else a hash of the body, or else the size of the body.
    """
    return F.coalesce(
        F.concat(F.lit(BY_ID), F.col("message_id")),
        F.concat(F.lit("body "), F.sha2(F.col("body"), 256)),
        F.concat(F.lit("size "), F.col("body_size").cast("string")),
    )


def _add_double_rows(phase_rows: DataFrame, account: Account) -> None:
    """Add each row that occurs more than once to `account`, as a fault.

    Each row number of a shard belongs to one row, so duplicates mean that the journal contains copied files.
    """
    again = phase_rows.groupBy(*ROW).agg(F.count("*").alias("rows")).where("rows > 1").persist()
    try:
        if not again.isEmpty():
            for row in phase_rows.join(again, [*ROW]).dropDuplicates([*ROW]).orderBy(*ROW).toLocalIterator():
                _name(account, DOUBLE, row, row["rows"] - 1)
    finally:
        again.unpersist()


WAY: Final = ("route", "target_endpoint", "target_address", "key")
OF_OUTBOXES: Final = (WAS_STORED, WAS_DELIVERED, WAS_BURIED, WAS_DROPPED)


def _boxes(rows: DataFrame, *more: Column) -> DataFrame:
    is_stored = F.col("phase") == WAS_STORED
    return (
        rows.where(F.col("phase").isin(*OF_OUTBOXES))
        .groupBy(*WAY)
        .agg(
            F.count(F.when(is_stored, 1)).alias("stored"),
            F.count(F.when(~is_stored, 1)).alias("left"),
            *more,
        )
    )


def _add_waiting_messages(
    phase_rows: DataFrame,
    account: Account,
    waiting: Mapping[str, int] | None,
    end: datetime | None,
    counted_at: datetime | None,
) -> None:
    """Find the messages that were stored in an outbox and have not left it, and add them to `account`.

    They count as waiting or lost. The parameters are those of `reconcile`; `phase_rows` are its rows with a
    phase (the step that a row records).
    """
    boxes = _boxes(phase_rows)
    short = boxes.where("stored > left").withColumn("missing", F.col("stored") - F.col("left"))
    # Of equal messages the newest still wait, because an outbox delivers in order.
    order = Window.partitionBy(*WAY).orderBy(F.desc("received"), F.desc("sequence"))
    open_ = (
        phase_rows.where(F.col("phase") == WAS_STORED)
        .join(short.select(*WAY, "missing"), [*WAY])
        .withColumn("place", F.row_number().over(order))
        .where("place <= missing")
        .orderBy(F.desc("received"), F.desc("sequence"))
        .select("received", "route", "target_address", "shard", "sequence", "message_id")
    )
    if counted_at is not None:
        open_ = open_.where(F.col("received") < F.lit(counted_at))  # Later messages were not counted.
    judged = F.lit(True) if end is None else F.col("received") < F.lit(end)
    may_wait = None if waiting is None else dict(waiting)
    for row in open_.withColumn("judged", judged).toLocalIterator():
        fault = WAITING
        if may_wait is not None:
            remaining = may_wait.get(row["route"], 0)
            may_wait[row["route"]] = remaining - 1
            fault = WAITING if remaining > 0 else LOST
        if row["judged"]:
            _name(account, fault, row, 1)


def _add_repeated_messages(
    phase_rows: DataFrame, account: Account, end: datetime | None, earlier: Callable[[], DataFrame] | None
) -> None:
    """Find the messages that left an outbox more often than they were stored, and add them to `account`.

    The parameters are those of `reconcile`; `phase_rows` are its rows with a phase (the step that a row
    records).
    """
    first = F.min(F.when(F.col("phase") == WAS_STORED, F.col("received"))).alias("first")
    boxes = _boxes(phase_rows, first)
    if end is not None:
        boxes = boxes.where(F.col("first") < F.lit(end))
    again = (
        phase_rows.where(F.col("phase") == WAS_DELIVERED)
        .groupBy(*WAY)
        .agg(*_sample(), F.count("*").alias("delivered"))
        .join(boxes.select(*WAY, "stored"), [*WAY])
        .where("delivered > stored and stored > 0")
        .withColumn("times", F.col("delivered") - F.col("stored"))
    )
    alike = again.where(~F.col("key").startswith(BY_ID))
    if earlier is not None and not alike.isEmpty():
        # They may have been stored earlier, with others of the same body.
        rows = earlier().select(*COLUMNS).withColumns({"phase": _phase(), "key": _key()})
        waited = F.greatest(F.col("stored") - F.col("left"), F.lit(0)).alias("waited")
        before = _boxes(rows.join(F.broadcast(alike.select(*WAY)), [*WAY], "left_semi")).select(*WAY, waited)
        times = F.col("times") - F.coalesce(F.col("waited"), F.lit(0))
        again = again.join(before, [*WAY], "left").withColumn("times", times).where("times > 0")
    for row in again.toLocalIterator():
        _name(account, REPEATED, row, row["times"])


def _sample() -> list[Column]:
    return [
        F.min("shard").alias("shard"),
        F.min("sequence").alias("sequence"),
        F.first("message_id").alias("message_id"),
    ]


def _compare_with_consumer(
    phase_rows: DataFrame, received: DataFrame, account: Account, still: int, end: datetime | None
) -> None:
    """Compare the accepted messages with a consumer's record, and add the differences to `account`.

    The parameters are those of `reconcile`; `phase_rows` are its rows with a phase (the step that a row
    records).
    """
    accepted = phase_rows.where(F.col("phase").isin(CONFIRMED, WAS_STORED))
    each = accepted.dropDuplicates([*MESSAGE, "route", "target_address"])
    expected = each.groupBy("key").agg(
        F.count("*").alias("accepted"),
        F.count(F.when(F.lit(False) if end is None else F.col("received") >= F.lit(end), 1)).alias("later"),
        *(F.first(name).alias(name) for name in ("route", "target_address", "message_id")),
        F.max("shard").alias("shard"),
        F.max("sequence").alias("sequence"),
    )
    has = set(received.columns)
    for name, kind in (("message_id", "string"), ("body", "binary")):
        if name not in has:
            received = received.withColumn(name, F.lit(None).cast(kind))
    if "body_size" not in has:
        received = received.withColumn("body_size", F.length("body"))
    got = received.withColumn("key", _key()).groupBy("key").agg(F.count("*").alias("got"))
    both = (
        expected.join(got, "key", "full_outer")
        .fillna(0, ["accepted", "got", "later"])
        .where("accepted <> got")
        .orderBy(F.desc("sequence"))
    )
    still_waiting = still
    for row in both.toLocalIterator():
        missing = row["accepted"] - row["got"]
        if not row["accepted"]:
            account.totals[UNKNOWN] = account.totals.get(UNKNOWN, 0) + row["got"]
            if len(account.faulty_messages) < NAMED_MAX:
                account.faulty_messages.append(FaultyMessage(UNKNOWN, "", "", "", -1, row["key"], row["got"]))
        elif missing > 0:
            missing = max(0, missing - row["later"])  # The newest ones, which are not judged.
            waits = min(still_waiting, missing)
            still_waiting -= waits
            if waits:
                _name(account, WAITING, row, waits)
            if missing > waits:
                _name(account, LOST, row, missing - waits)
        else:
            _name(account, REPEATED, row, -missing)


def _name(account: Account, fault: str, row: Any, times: int) -> None:
    account.totals[fault] = account.totals.get(fault, 0) + times
    if len(account.faulty_messages) < NAMED_MAX:
        account.faulty_messages.append(
            FaultyMessage(
                *(fault, row["route"], row["target_address"] or "", row["shard"], row["sequence"]),
                *(row["message_id"], times),
            )
        )
