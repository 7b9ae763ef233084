"""Figures in pages are those of the benchmarks' page, which has each measured figure once."""

from __future__ import annotations

import re
from typing import Final

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT
from tests.interop.oracle.scripts import SCRIPTS
from tests.interop.oracle.suite import DIFFERENT

BENCHMARKS: Final = PAGES[DOCS / "benchmarks.md"].text
NUMBER: Final = re.compile(r"\d[\d ]*(?:\.\d+)?")
IDLE: Final = "of 5 000 idle MQTT connections"
README: Final = (
    ("MQTT QoS 1 from 20 connections to AMQP with acks", "A: MQTT QoS 1, 20 connections"),
    ("AMQP with confirms from 20 connections to MQTT QoS 1", "E: AMQP confirms, 20 connections"),
    ("MQTT QoS 1 to a durable AMQP queue, acks", "D: MQTT QoS 1, 20 connections"),
    ("latency at 10 000 messages/s, MQTT to AMQP, p50", "10 000 messages/s, p50"),
    ("memory of an idle MQTT connection", IDLE),
)
"""Rows of the README's table, and the rows of the benchmarks that they repeat."""
SENTENCES: Final = (
    ("docs/guides/kubernetes.md", "a quiet MQTT client # KiB more", IDLE),
    ("docs/guides/many-replicas.md", "some # KiB with a subscription", "memory of a clean subscriber"),
    ("docs/guides/many-replicas.md", "1 000 000 × # KiB", "memory of a clean subscriber"),
    ("docs/guides/many-replicas.md", "opens # durable sessions a second", "persistent sessions opened"),
    ("docs/guides/many-replicas.md", "needs # KiB for each", "RabbitMQ's memory for each"),
    ("docs/reference/limits.md", "a file descriptor and at least # KiB", IDLE),
)
"""Texts of other pages, with `#` for the first figure of the row."""


def cells(text: str, begin: str) -> list[str]:
    """Return the cells of the only table row whose first cell begins so, without that cell."""
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {begin}")]
    return row.split("|")[2:]


def figure(cell: str) -> str:
    found = NUMBER.search(cell)
    assert found is not None, cell
    return found[0].strip()


def is_rounded(cited: str, measured: str) -> bool:
    """Return True if `cited` is the measured figure, rounded to the cited decimals."""
    decimals = len(cited.partition(".")[2])
    return f"{float(measured.replace(' ', '')):.{decimals}f}" == cited.replace(" ", "")


@pytest.mark.parametrize("row, of", README)
def test_the_readme_repeats_the_benchmarks(row: str, of: str) -> None:
    cited = cells(PAGES[ROOT / "README.md"].text, row)[:2]
    measured = cells(BENCHMARKS, of)[:2]
    for ours, theirs in zip(cited, measured, strict=True):
        assert is_rounded(figure(ours), figure(theirs)), (ours, theirs)


@pytest.mark.parametrize("page, text, row", SENTENCES)
def test_a_page_repeats_the_benchmarks(page: str, text: str, row: str) -> None:
    pattern = re.escape(text).replace(r"\#", r"(\d[\d.]*)")
    cited = re.findall(pattern, " ".join(PAGES[ROOT / page].text.split()))
    assert len(cited) == 1, text
    assert is_rounded(cited[0], figure(cells(BENCHMARKS, row)[0]))


@pytest.mark.parametrize("page", ["README.md", "docs/conformance/index.md", "docs/conformance/amqp-0-9-1.md"])
def test_scripts_that_agree_are_counted(page: str) -> None:
    agreeing = f"{len(SCRIPTS) - len(DIFFERENT)} of {len(SCRIPTS)} scripts"
    assert agreeing in PAGES[ROOT / page].text
