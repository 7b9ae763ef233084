"""Rates: the same figures from a batch, an archive and a stream, counted by hand here; and the page."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F

from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.model.times import Monotonic
from gateway.pipeline.jobs import archive, rates
from gateway.pipeline.report.chart import chart, number, ticks_of
from gateway.pipeline.report.page import SERIES_MAX, WindowRate, page
from tests.cli.conftest import Run
from tests.pipeline.journals import RETURNED, START, UP, Journal, message, written
from tests.pipeline.streams import finished

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECOND = "1 second"


def expected(count: int) -> dict[tuple[int, str], tuple[int, int, int, int]]:
    """(messages, bytes, frames, rejected) by second and route, of the first `count` messages."""
    found: dict[tuple[int, str], tuple[int, int, int, int]] = {}
    for n in range(count):
        key = int((START * 1_000 + n) // 1_000), "up" if n % 2 else ""
        refused = n % 50 == 49
        frames = 2 + (4 if n % 2 and not refused else 0)  # PUBLISH, PUBACK; publish, header, body, confirm
        before = found.get(key, (0, 0, 0, 0))
        now = (1, len(b'{"n": %d}' % n), frames, int(refused))
        found[key] = (before[0] + now[0], before[1] + now[1], before[2] + now[2], before[3] + now[3])
    return found


def told(rows: list[Any]) -> dict[tuple[int, str], tuple[int, int, int, int]]:
    return {
        (int(row.begin.timestamp()), row.route): (row.messages, row.body_bytes, row.frames, row.rejected)
        for row in rows
    }


def test_what_has_no_target_is_a_way_of_its_own(spark: SparkSession, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.write(0, 2)
    journal.write_unrouted(2, 3)
    journal.write_unrouted(5, 1, RETURNED)
    journal.close()
    shown = tmp_path / "r.html"
    shown.write_text("the page of before")
    with shown.open() as before:  # Who reads it gets all of one page.
        rates.run(spark, str(tmp_path / "j"), window=SECOND, to=str(tmp_path / "r"), report=shown)
        assert before.read() == "the page of before"
    rows = spark.read.parquet(str(tmp_path / "r")).collect()
    assert {(row.route, row.target_protocol): (row.messages, row.rejected) for row in rows} == {
        ("", "mqtt"): (1, 0),
        ("up", "amqp091"): (1, 0),
        ("", ""): (4, 1),
    }
    assert "(mqtt, no recipient)" in shown.read_text()


@pytest.mark.usefixtures("streams")
def test_a_batch_an_archive_and_a_stream_say_the_same(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "j"
    written(folder, 2_500)
    done = rates.run(spark, str(folder), window=SECOND, to=str(tmp_path / "r"), report=tmp_path / "r.html")
    rows = spark.read.parquet(str(tmp_path / "r")).collect()
    assert (done.rows, done.messages) == (6, 2_500)
    assert told(rows) == expected(2_500)
    assert {(row.p50_ms, row.p99_ms, row.max_ms) for row in rows} == {(2.0, 2.0, 2.0)}
    assert {(row.source_protocol, row.target_protocol) for row in rows} == {
        ("mqtt", "mqtt"),
        ("mqtt", "amqp091"),
    }

    archive.run(spark, str(folder), str(tmp_path / "a"))
    again = rates.run(spark, None, window=SECOND, archive=str(tmp_path / "a"), start="2023-11-14T22:13:21Z")
    assert (again.rows, again.messages) == (4, 1_500)

    to = tmp_path / "s"
    for first, windows in ((2_500, 4), (3_001, 6)):
        finished(
            lambda: rates.follow(
                spark,
                str(folder),
                to=str(to),
                window=SECOND,
                available_now=True,
                report=tmp_path / "s.html",
            )
        )
        assert len(told(spark.read.parquet(str(to)).collect())) == windows
        written(folder, 501, first=first)
    # A window that goes on is not told yet; each of the others once, in whichever run it ended.
    streamed = spark.read.parquet(str(to)).collect()
    assert len(streamed) == len(told(streamed)) == 6
    assert told(streamed) == expected(3_000)
    assert "<svg" in (tmp_path / "s.html").read_text()


def test_clients_outboxes_and_what_a_window_holds(spark: SparkSession, tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write(0, 10)
    for text in ("delivered", "dead letter: expired", "dropped: length"):
        journal.writer.record(UP, [message(0)], Outcome(*ACCEPTED[:2], text), Monotonic(journal.clock()))
    large: Message = message(1)
    large.body = bytes(300_000)
    journal.writer.record(UP, [large], Outcome(*ACCEPTED[:2], "stored"), Monotonic(journal.clock()))
    journal.close()
    table = spark.read.format("gateway_journal").load(str(tmp_path))
    by_client = rates.rates(table, "1 hour", clients=True)
    found = by_client.groupBy("client").agg(F.sum("messages").alias("n")).collect()
    assert {row.client: row.n for row in found} == {"press-0": 4, "press-1": 4, "press-2": 3}
    (row,) = by_client.where("body_bytes > 300000").collect()
    assert row.frames == 2 * (2 + 4) + (2 + 6), "two small ones of press-1, and one of three body frames"


def test_the_command(run: Run, spark: SparkSession, journal: Callable[..., Path], tmp_path: Path) -> None:
    folder, report = str(journal(100)), tmp_path / "r.html"
    ran = run("pipeline", "rates", "--journal", folder, "--report", str(report), "--clients")
    assert (ran.code, ran.out) == (0, "100 messages in 6 rows\n")
    text = report.read_text()
    assert "press-1" in text
    assert "<script" not in text
    assert "http" not in text.replace("http-equiv", "")
    taken = tmp_path / "taken"
    taken.mkdir()
    again = run("pipeline", "rates", "--journal", folder, "--to", str(taken))
    assert (again.code, "exists: give" in again.err) == (1, True)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ((), "give --to FOLDER, --report FILE"),
        (("-f",), "give --to"),
        (("-f", "--to", "x", "--since", "y"), "cannot be combined with --archive"),
    ],
)
def test_errors(run: Run, arguments: tuple[str, ...], text: str) -> None:
    ran = run("pipeline", "rates", "--journal", "/nonexistent", *arguments)
    assert (ran.code, text in ran.err) == (2, True)


def rate(begin: float, route: str, messages: int, **also: Any) -> WindowRate:
    given: dict[str, Any] = {
        "client": "",
        "body_bytes": 10,
        "frames": 2,
        "released": 0,
        "rejected": 1,
        "p50_ms": 1.0,
        "p95_ms": 2.0,
    }
    words: dict[str, Any] = {
        "source_protocol": "mqtt",
        "target_protocol": "amqp091",
        "p99_ms": 3.0,
        "max_ms": None,
    }
    return WindowRate(begin=begin, end=begin + 60, route=route, messages=messages, **(given | words | also))


class Tags(HTMLParser):
    """Checks that tags are closed in order, as XML wants; counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag: str, _: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def tags_of(text: str) -> dict[str, int]:
    parser = Tags()
    parser.feed(text)
    assert parser.open == []
    return parser.counts


def test_the_page_shows_ways_and_hides_nothing() -> None:
    rates_ = [
        rate(60.0 * n, f"route <{way}>", 10 * way + n, client=f"c{n}") for n in range(30) for way in range(12)
    ]
    text = page(rates_, "the journal in /j & more")
    counts = tags_of(text)
    assert (counts["svg"], counts["path"]) == (5, 5 * SERIES_MAX)
    assert counts["tr"] == 2 + 12 + 25
    assert "route &lt;11&gt;" in text
    assert "all others" in text
    assert "and 5 more" in text
    assert "/j &amp; more" in text


def test_the_page_of_nothing() -> None:
    assert "Nothing crossed" in page([], "x")
    assert tags_of(page([rate(0.0, "", 1, p99_ms=None)], "x"))["svg"] == 4


def test_a_line_is_broken_where_nothing_was() -> None:
    text = chart({"a": [(0.0, 1.0), (60.0, 2.0), (300.0, 1.0)]}, 60.0, "u")
    assert text.count("M") == 2
    assert chart({"a": []}, 60.0, "u") == ""


TICKS = [
    (1.0, [0.0, 0.25, 0.5, 0.75, 1.0]),
    (7.0, [0.0, 2.0, 4.0, 6.0, 8.0]),
    (0.03, [0.0, 0.01, 0.02, 0.03]),
    (1234.0, [0.0, 500.0, 1000.0, 1500.0]),
]


@pytest.mark.parametrize("top, ticks", TICKS)
def test_ticks_are_round(top: float, ticks: list[float]) -> None:
    assert ticks_of(top) == pytest.approx(ticks)


@pytest.mark.parametrize("value, text", [(0.0, "0"), (1234.5, "1.23k"), (5e6, "5M"), (0.0421, "0.0421")])
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text
