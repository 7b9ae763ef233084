"""Logs: one line per event in the chosen form, and floods that stay small."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from gateway.telemetry.logs import KEYS_MAX, Occasionally, configure_logs, logger


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    yield
    root.handlers[:], level = before
    root.setLevel(level)
    structlog.reset_defaults()


def test_json_lines_hold_the_facts_of_ours_and_of_libraries() -> None:
    out = io.StringIO()
    configure_logs("info", "json", out)
    logger("ingress.mqtt").warning("refused", reason="credentials", count=2, body=b"\xff")
    logging.getLogger("hypercorn.error").error("broken %s", "pipe")
    ours, theirs = (json.loads(line) for line in out.getvalue().splitlines())
    assert (ours["event"], ours["reason"], ours["count"]) == ("refused", "credentials", 2)
    assert (ours["level"], ours["logger"]) == ("warning", "ingress.mqtt")
    assert ours["at"].endswith("Z")
    assert (theirs["event"], theirs["level"]) == ("broken pipe", "error")


def test_an_exception_is_one_json_line() -> None:
    out = io.StringIO()
    configure_logs("info", "json", out)
    try:
        raise ValueError("bad")
    except ValueError:
        logger("app").exception("failed")
    (line,) = out.getvalue().splitlines()
    assert "ValueError: bad" in json.loads(line)["exception"]


def test_what_is_below_the_level_is_silent() -> None:
    out = io.StringIO()
    configure_logs("warning", "auto", out)
    logger("app").info("hello")
    logging.getLogger("library").info("hello")
    assert out.getvalue() == ""


def test_the_console_form_is_readable() -> None:
    out = io.StringIO()
    configure_logs("info", "console", out)
    logger("app").info("listening", port=1883)
    assert "listening" in out.getvalue()
    assert "port=1883" in out.getvalue()


def test_each_kind_is_logged_once_per_interval() -> None:
    occasionally = Occasionally(10.0)
    said = [occasionally.skipped("refused", now) for now in (0.0, 1.0, 9.9, 10.0, 11.0, 30.0)]
    assert said == [0, None, None, 2, None, 1]
    assert occasionally.skipped("broken", 30.0) == 0


def test_kinds_are_bounded() -> None:
    occasionally = Occasionally(10.0)
    for number in range(KEYS_MAX):
        assert occasionally.skipped(str(number), 0.0) == 0
    assert [occasionally.skipped(f"more {number}", 0.0) for number in range(2)] == [0, None]
