"""The sample of sentences for fresh readers has all kinds of them."""

from __future__ import annotations

import re

from tests.house.sample import ROOT, docstrings, events, sentences


def test_every_kind_of_sentence_is_found() -> None:
    assert len(list(docstrings())) > 5_000
    assert len(list(sentences())) > 100
    page = (ROOT / "docs" / "reference" / "log.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (?!event)[a-zA-Z].*\| *$",
        page.split("generated: log-events")[1].split("<!-- end")[0],
        re.MULTILINE,
    )
    assert len(events()) == len(rows) > 100
