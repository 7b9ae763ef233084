"""What was accepted against what arrived, on a real journal: nothing missing, then one thing at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

pytest.importorskip("pyspark")

from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.pipeline.jobs.reconcile import COLUMNS, Account, reconcile
from gateway.pipeline.traffic.loading import Span, traffic
from gateway.store.journal.columns import WAS_DELIVERED
from tests.cli.conftest import Run
from tests.interop.gateway_fixture import LOOPBACK
from tests.pipeline.jobs.conftest import HOT, READINGS, ROWS, STORED, WAITING, Recorded, reading
from tests.pipeline.journals import UP, Journal, message

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEAD: Final = Outcome(Verdict.REJECTED, Reason.TOO_LARGE, "dead letter: larger than it takes")


def account(
    spark: SparkSession,
    folder: str | Path,
    got: list[bytes] | None = None,
    where: str | None = None,
    **also: int,
) -> Account:
    rows = traffic(spark, str(folder), COLUMNS, Span(where=where))
    received = None
    if got is not None:
        received = spark.createDataFrame([(body,) for body in got], "body binary")
    waiting = None if "far" not in also else {"far": also.pop("far")}
    return reconcile(rows, received, waiting=waiting, **also)


def test_a_real_gateway_has_lost_nothing(spark: SparkSession, recorded: Recorded) -> None:
    """What its outbox still holds waits; what nobody asked waits, too; what it does not hold is lost."""
    made = account(spark, recorded.journal, far=WAITING)
    assert made.phases == {
        ("up", "confirmed"): 2 * READINGS,
        ("hot", "confirmed"): len(HOT),
        ("long", "rejected"): 1,
        ("far", "stored"): STORED + WAITING,
        ("far", "delivered"): STORED,
    }
    assert (made.balanced, made.totals) == (True, {"waiting": WAITING})
    made = account(spark, recorded.journal, far=WAITING - 1)
    assert made.totals == {"waiting": WAITING - 1, "lost": 1}
    (lost,) = [one for one in made.named if one.what == "lost"]
    assert (lost.route, lost.address) == ("far", ":far")


ARRIVED: Final = [reading(number).body for number in range(READINGS)]


@pytest.mark.parametrize(
    "got, totals",
    [
        (ARRIVED, {}),
        (ARRIVED[1:-1], {"lost": 2}),  # one of the two is one of nine that are alike
        ([*ARRIVED, ARRIVED[30], b"who?"], {"repeated": 1, "unknown": 1}),
    ],
)
def test_a_consumers_record(
    spark: SparkSession, recorded: Recorded, got: list[bytes], totals: dict[str, int]
) -> None:
    """Two queues had each message, the consumer drinks from one: so each is expected once."""
    made = account(spark, recorded.journal, got, where="route = 'up'")
    assert made.totals == totals
    assert {one.what for one in made.named} == set(totals)


def test_what_left_an_outbox_in_another_way(spark: SparkSession, tmp_path: Path) -> None:
    """Of messages 0 and 3, which are alike, three were delivered: one confirm had not been heard."""
    journal = Journal(tmp_path)
    for number in range(5):
        journal.writer.record(UP, [message(number)], Outcome(Verdict.ACCEPTED, text="stored"), 0.0)
    delivered = Outcome(Verdict.ACCEPTED, text="delivered")
    journal.writer.record(UP, [message(0), message(3), message(0)], delivered, 0.0)
    journal.writer.record(UP, [message(1)], DEAD, 0.0)
    journal.writer.record(UP, [message(2)], Outcome(Verdict.REJECTED, Reason.QUOTA, "dropped: too many"), 0.0)
    journal.writer.record(UP, [message(9)], ACCEPTED, 0.0)
    journal.close()
    made = account(spark, tmp_path)
    assert {phase: rows for (_, phase), rows in made.phases.items()} == {
        "stored": 5,
        "delivered": 3,
        "dead letter": 1,
        "dropped": 1,
        "confirmed": 1,
    }
    assert made.totals == {"repeated": 1, "waiting": 1}


def test_the_command(spark: SparkSession, recorded: Recorded, run: Run, tmp_path: Path) -> None:
    asked = ("pipeline", "reconcile", "--journal", recorded.journal)
    done = run(*asked)
    assert (done.code, "3 waiting" in done.out) == (0, True), done.err
    got = tmp_path / "got"
    spark.createDataFrame([(body,) for body in ARRIVED[:-2]], "body binary").write.parquet(str(got))
    done = run(*asked, "--received", str(got), "--where", "route = 'up'", "--still", "1", "--json")
    assert done.code == 1
    said = json.loads(done.out)
    assert said["totals"] == {"waiting": 1, "lost": 1}
    assert said["rows_missing"] == 0
    (lost,) = [one for one in said["messages"] if one["what"] == "lost"]
    assert lost["route"] == "up"


def test_the_command_asks_the_gateway(spark: SparkSession, recorded: Recorded, run: Run) -> None:
    """With one delivery left out there is one message more than the outbox has; only who asks sees it."""
    asked = ("pipeline", "reconcile", "--journal", recorded.journal)
    url = ("--url", f"http://{LOOPBACK}:{recorded.gateway.port('http')}")
    done = run(*asked, *url)
    assert (done.code, "3 waiting" in done.out) == (0, True), done.err
    delivered = [row["sequence"] for row in recorded.rows(ROWS) if row["reason_text"] == WAS_DELIVERED]
    but_one = ("--where", f"sequence <> {delivered[0]}", "--json")
    done = run(*asked, *but_one)
    assert (done.code, json.loads(done.out)["totals"]) == (0, {"waiting": WAITING + 1})
    done = run(*asked, *but_one, *url)
    assert (done.code, json.loads(done.out)["totals"]) == (1, {"waiting": WAITING, "lost": 1})
