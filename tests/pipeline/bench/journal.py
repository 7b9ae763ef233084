"""A journal for measuring, as a busy gateway would write it.

Each message has an id and a trace of its own, five headers, and a JSON body of 88 to 2 000 bytes.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Final

from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED
from gateway.model.properties import Properties, PropertySet, property_set, string
from gateway.model.times import Monotonic
from gateway.pipeline.journal.options import options_of
from gateway.pipeline.journal.source import JournalTable
from gateway.protocols import DIALECTS
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.mqtt.dialect import topic_address
from gateway.protocols.mqtt.translate import encode_properties
from gateway.store.journal.column_buffers import RowLabels
from gateway.store.journal.reader import JournalReader
from gateway.store.journal.writer import JournalOptions, JournalWriter
from tests.pipeline.journals import SETS

LINES: Final = 50
LOG: Final = (
    b"valve 3 opened, flow 12.5 l/min; valve 4 closed after 118 ms; filter ok; next check in 41 h. " * 30
)
PART: Final = 20  # messages of one wake-up that take one recipient
UP: Final = RowLabels("telemetry", "7f3a", "erp", "amqp091")
HOME: Final = RowLabels("", "", "mqtt", "mqtt")
START: Final = 1_700_000_000.0
SECONDS: Final = 7_200.0  # that the messages are spread over


BODY_MIN: Final = 88
BODY_MAX: Final = 2_000
BODY_STEP: Final = 37  # with that many bytes more or less all sizes occur, small ones beside large ones
SHARE: Final = 8  # one of so many bodies is longer than 400 bytes


def properties(number: int, line: int) -> PropertySet:
    """What message `number` says of itself, as an MQTT client encodes it: no two are equal."""
    headers = (
        ("unit", string("bar")),
        ("line", string(f"line{line:02d}")),
        ("firmware", string("4.11.2")),
        ("schema", string("press-7")),
        ("traceparent", string(f"00-{number * 0x9E3779B97F4A7C15 & (1 << 128) - 1:032x}-{number:016x}-01")),
    )
    stated = Properties(
        content_type="application/json", message_id=f"{line:02d}-{number:026x}", headers=headers
    )
    message = Message(topic_address("t"), b"", property_set(stated), hops=1)
    return DIALECTS["mqtt"].property_set(encode_properties(message, START))


def body(number: int, line: int) -> bytes:
    """JSON of BODY_MIN to BODY_MAX bytes; most are short."""
    most = BODY_MAX if number % SHARE == 0 else 400
    size = BODY_MIN + number * BODY_STEP % (most - BODY_MIN + 1)
    head = b'{"line":"line%02d","seq":%9d,"temperature":%5.2f,"pressure":%6.1f,"log":"' % (
        line,
        number,
        20 + number % 20 / 7,
        1000 + number % 20,
    )
    return head + (LOG[number % 97 :] + LOG)[: size - len(head) - 2] + b'"}'


def made(folder: Path, rows: int, shards: int = 2) -> Path:
    """Write it: half crossed, half stayed at home."""
    for shard in range(shards):
        now = [START]
        writer = JournalWriter(
            folder,
            shard,
            JournalOptions(backlog_bytes_max=1 << 40),
            clock=lambda now=now: now[0],  # type: ignore[misc]
            utc=lambda now=now: now[0],  # type: ignore[misc]
        )
        senders = [Sender("mqtt", f"press-{line}", "plant", f"10.0.0.{line}:40123") for line in range(LINES)]
        wires = [topic_address(f"plant/line{line}/press/temperature") for line in range(LINES)]
        keys = [amqp_address("telemetry", f"line{line}.press.temperature") for line in range(LINES)]
        step = SECONDS * shards / rows
        for first in range(0, rows // shards, PART):
            line = first // PART % LINES
            received = START + first * step
            now[0] = received + 0.001 + first % 7 * 0.003
            sources = [
                Message(
                    wires[line],
                    body(number, line),
                    properties(number * shards + shard, line),
                    assurance=1,
                    sender=senders[line],
                )
                for number in range(first, first + PART)
            ]
            if line % 2:
                targets = [
                    Message(
                        keys[line],
                        one.body,
                        one.property_set,
                        assurance=1,
                        durable=True,
                        sender=senders[line],
                    )
                    for one in sources
                ]
                writer.record(UP, targets, ACCEPTED, Monotonic(received), sources)
            else:
                writer.record(HOME, sources, ACCEPTED, Monotonic(received))
            while writer.backlog > 500_000:
                time.sleep(0.01)
        writer.close(60)
    return folder


QUIET_SECS: Final = 0.1  # between two messages of a gateway that has little to do
DAY_ROWS: Final = 100_000  # written as a hundred at a time
DAY_SECS: Final = 86_400.0
DAY_COUNTS: Final = (1, 90)


def quiet(folder: Path, count: float) -> Path:
    """Ten messages a second for so many days, when the hours of the last segment are over."""
    rows = int(count * DAY_SECS / QUIET_SECS)
    return _slow(folder, rows, together=2, step=QUIET_SECS, options=JournalOptions())


def days(folder: Path, count: int) -> Path:
    """So many days of devices that report every minute and a half, in segments as they are by default."""
    return _slow(folder, count * DAY_ROWS, together=100, step=DAY_SECS / DAY_ROWS, options=JournalOptions())


def rows_of(folder: Path) -> int:
    """How many rows a journal has."""
    reader = JournalReader(folder)
    return sum(reader.extent(shard).rows for shard in reader.shards())


def planning_secs(folder: Path, times: int = 5) -> float:
    """What it takes to plan a read of it, with nothing known before: the median."""
    spent = []
    for _ in range(times):
        begun = time.perf_counter()
        JournalTable(options_of({"path": str(folder)}, stream=False), ("received",)).partitions()
        spent.append(time.perf_counter() - begun)
    return median(spent)


def _slow(folder: Path, rows: int, *, together: int, step: float, options: JournalOptions) -> Path:
    """Blocks of so many rows, one every `step` seconds, which the writer merges."""
    now = [START]

    def clock() -> float:
        return now[0]

    options = replace(options, flush_interval_secs=3_600.0)
    writer = JournalWriter(folder, 0, options, clock=clock, utc=clock)  # type: ignore[arg-type]
    address, sender = (
        topic_address("plant/line1/press/temperature"),
        Sender("mqtt", "press", "plant", "10.0.0.1:1"),
    )
    for first in range(0, rows, together):
        for number in range(first, first + together):
            now[0] += step
            body = b'{"line":"line01","seq":%9d,"temperature":20.00,"state":"running"}' % number
            message = Message(address, body, SETS[number % 3], assurance=1, sender=sender)
            writer.record(HOME, [message], ACCEPTED, now[0] - 0.01)  # type: ignore[arg-type]
        with writer._lock:
            writer._flush()
        if first % (250 * together) == 0:
            writer._wake.set()
            while writer.backlog:
                time.sleep(0.001)
    now[0] += 7_200.0
    writer.close(60)
    return folder
