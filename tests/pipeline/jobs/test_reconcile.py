"""What was accepted against what arrived, on a real journal: nothing missing, then one thing at a time."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

pytest.importorskip("pyspark")

from gateway.cli.pipeline import reconcile as command
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.times import Monotonic
from gateway.pipeline.archive.manifest import Archive
from gateway.pipeline.jobs import archive
from gateway.pipeline.jobs.reconcile import COLUMNS, Account, reconcile
from gateway.pipeline.stores import place_of
from gateway.pipeline.traffic.loader import RowSelection, traffic
from gateway.store.journal.columns import WAS_DELIVERED
from tests.cli.conftest import Run
from tests.interop.gateway_fixture import LOOPBACK
from tests.pipeline.jobs.conftest import HOT, READINGS, ROWS, STORED, WAITING, Recorded, reading
from tests.pipeline.journals import RETURNED, START, UP, Journal, message, written

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEAD: Final = Outcome(Verdict.REJECTED, Reason.TOO_LARGE, "dead letter: larger than it takes")


def account(
    spark: SparkSession,
    folder: str | Path,
    got: list[bytes] | None = None,
    where: str | None = None,
    **also: Any,
) -> Account:
    rows = traffic(spark, str(folder), COLUMNS, RowSelection(where=where))
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
    (lost,) = [one for one in made.faulty_messages if one.what == "lost"]
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
    assert {one.what for one in made.faulty_messages} == set(totals)


def test_what_left_an_outbox_in_another_way(spark: SparkSession, tmp_path: Path) -> None:
    """Of messages 0 and 3, which are alike, three were delivered: one confirm had not been heard."""
    journal = Journal(tmp_path)
    for number in range(5):
        journal.writer.record(UP, [message(number)], Outcome(Verdict.ACCEPTED, text="stored"), Monotonic(0.0))
    delivered = Outcome(Verdict.ACCEPTED, text="delivered")
    journal.writer.record(UP, [message(0), message(3), message(0)], delivered, Monotonic(0.0))
    journal.writer.record(UP, [message(1)], DEAD, Monotonic(0.0))
    journal.writer.record(
        UP, [message(2)], Outcome(Verdict.REJECTED, Reason.QUOTA, "dropped: too many"), Monotonic(0.0)
    )
    journal.writer.record(UP, [message(9)], ACCEPTED, Monotonic(0.0))
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


def test_what_has_no_target_is_counted_and_no_consumer_is_to_have_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    journal = Journal(tmp_path)
    journal.write(0, 2)
    journal.write_unrouted(2, 3)
    journal.write_unrouted(5, 1, RETURNED)
    journal.close()
    got = spark.createDataFrame([("m-0",), ("m-1",)], "message_id string")
    made = reconcile(traffic(spark, str(tmp_path), COLUMNS, RowSelection()), got)
    assert made.phases == {
        ("", "confirmed"): 1,
        ("up", "confirmed"): 1,
        ("", "no_taker"): 3,
        ("", "rejected"): 1,
    }
    assert (made.totals, made.accepted_count) == ({}, 2)


def test_a_row_that_is_there_twice_is_a_fault(spark: SparkSession, tmp_path: Path) -> None:
    """Whoever has copied the rows has copied one of them three times."""
    written(tmp_path, 10)
    rows = traffic(spark, str(tmp_path), COLUMNS, RowSelection())
    again = rows.where("sequence = 7")
    made = reconcile(rows.union(again).union(again))
    assert (made.balanced, made.totals) == (False, {"double": 2})
    assert [(one.what, one.shard, one.sequence, one.times) for one in made.faulty_messages] == [
        ("double", "0", 7, 2)
    ]


def stored_and_delivered(folder: Path, bodies: list[tuple[bytes, float, float | None]]) -> None:
    """Messages without an id that were stored, and delivered, at these seconds after START."""
    journal = Journal(folder)
    events = [(at, STORED_SO, body) for body, at, _ in bodies]
    events += [(at, DELIVERED_SO, body) for body, _, at in bodies if at is not None]
    for at, outcome, body in sorted(events, key=lambda event: event[0]):
        journal.clock.now = START + at
        journal.writer.record(UP, [nameless(body)], outcome, Monotonic(START + at))
    journal.close()


def nameless(body: bytes) -> Message:
    made = message(0)
    return Message(made.address, body, assurance=1, durable=True, sender=made.sender)


STORED_SO: Final = Outcome(Verdict.ACCEPTED, text="stored")
DELIVERED_SO: Final = Outcome(Verdict.ACCEPTED, text="delivered")


def judged(
    spark: SparkSession, folder: Path, begin: float | None, until: float | None, waiting: int | None = None
) -> dict[str, int]:
    """What is wrong with what was accepted between these seconds after START."""

    def at(second: float | None) -> str | None:
        return None if second is None else datetime.fromtimestamp(START + second, UTC).isoformat()

    made = reconcile(
        traffic(spark, str(folder), COLUMNS, RowSelection(at(begin))),
        waiting=None if waiting is None else {"up": waiting},
        end=None if until is None else datetime.fromtimestamp(START + until, UTC),
        earlier=lambda: traffic(spark, str(folder), COLUMNS, RowSelection(None, at(begin))),
    )
    return made.totals


def test_what_left_after_the_span_has_left(spark: SparkSession, tmp_path: Path) -> None:
    """And what waits now is what came last, which may not be judged at all."""
    stored_and_delivered(
        tmp_path, [(b"a", 1, 20), (b"b", 2, 3), (b"b", 2.5, 14), (b"c", 4, None), (b"d", 12, None)]
    )
    assert judged(spark, tmp_path, None, 10) == {"waiting": 1}
    assert judged(spark, tmp_path, None, 10, waiting=2) == {"waiting": 1}
    assert judged(spark, tmp_path, None, 10, waiting=1) == {"lost": 1}  # d waits
    assert judged(spark, tmp_path, None, None, waiting=1) == {"waiting": 1, "lost": 1}


def test_what_was_stored_before_the_span_may_leave_in_it(spark: SparkSession, tmp_path: Path) -> None:
    """Of messages that are alike, and have no id, those of before are looked for."""
    stored_and_delivered(tmp_path, [(b"on", 1, 12), (b"on", 2, 13), (b"on", 11, 14)])
    assert judged(spark, tmp_path, 10, None) == {}
    journal = Journal(tmp_path, start=START + 15)
    journal.writer.record(UP, [nameless(b"on")], DELIVERED_SO, Monotonic(START + 15))
    journal.close()
    assert judged(spark, tmp_path, 10, None) == {"repeated": 1}


def test_a_consumer_has_what_came_after_the_span(spark: SparkSession, tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for at, body in ((1, b"a"), (2, b"b"), (3, b"b"), (12, b"b"), (13, b"c")):
        journal.writer.record(UP, [nameless(body)], ACCEPTED, Monotonic(START + at))
    journal.close()
    rows = traffic(spark, str(tmp_path), COLUMNS, RowSelection())
    until = datetime.fromtimestamp(START + 10, UTC)
    for got, totals in (
        ([b"a", b"b", b"b", b"b", b"c"], {}),
        ([b"b", b"b"], {"lost": 1}),
        ([b"a", b"b", b"x"], {"lost": 1, "unknown": 1}),
    ):
        received = spark.createDataFrame([(body,) for body in got], "body binary")
        assert reconcile(rows, received, end=until).totals == totals


def test_an_archive_is_what_its_manifest_names(spark: SparkSession, tmp_path: Path) -> None:
    """What was merged stays for a while, and does not count twice."""
    folder, to = tmp_path / "j", str(tmp_path / "a")
    for first in range(0, 80, 10):
        written(folder, 10, first=first)
        archive.run(spark, str(folder), to, file_bytes=1)
    assert archive.run(spark, str(folder), to).merged == 16
    assert command._received(spark, to).count() == 80


def test_rows_missing_in_an_archive_are_told_without_its_journal(
    spark: SparkSession, run: Run, tmp_path: Path
) -> None:
    folder, to = tmp_path / "j", tmp_path / "a"
    for first in (0, 10, 20):
        written(folder, 10, first=first)
        archive.run(spark, str(folder), str(to), file_bytes=1)
    asked = ("pipeline", "reconcile", "--archive", str(to))
    done = run(*asked, "--json")
    assert (done.code, json.loads(done.out)["rows_missing"]) == (0, 0), done.err
    hidden = Archive(place_of(str(to)))
    manifest = hidden.manifest()
    rows = spark.read.parquet(str(to)).where("sequence = 12")
    path = rows.selectExpr("_metadata.file_path as path").collect()[0]["path"]
    (lost,) = [one for one in manifest.files if path.endswith(one.path)]
    hidden.save(manifest.next_version(lost=[lost]))
    done = run(*asked)
    assert (done.code, f"{lost.rows} rows are missing in the archive" in done.out) == (1, True), done.err


def test_outboxes_of_several_gateways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own; a shared one is counted once, with what each has been handed."""
    told = {
        "http://one": [("own", 2, 1, False), ("shared", 7, 3, True)],
        "http://two": [("own", 5, 0, False), ("shared", 6, 1, True)],
    }

    def ask(url: str, token_file: object, path: str) -> dict[str, Any]:
        names = ("route", "messages", "in_flight", "shared")
        return {"outboxes": [dict(zip(names, one, strict=True)) for one in told[url]]}

    monkeypatch.setattr(command, "call_gateway", ask)
    assert command._waiting(told, None) == {"own": 7, "shared": 11}


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
