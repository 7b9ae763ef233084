"""Logs: one line per event in the chosen form, and floods that stay small."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from gateway.access.backends import Denial
from gateway.containment import contained, counted, forget
from gateway.telemetry.logs import INTERVAL_SECS, KINDS_MAX, WHOLE_MAX, Limiter, configure_logs


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
    structlog.get_logger("ingress.mqtt").warning("refused", reason="credentials", count=2, body=b"\xff")
    logging.getLogger("library.error").error("broken %s", "pipe")
    ours, theirs = (json.loads(line) for line in out.getvalue().splitlines())
    assert (ours["event"], ours["reason"], ours["count"]) == ("refused", "credentials", 2)
    assert (ours["level"], ours["logger"]) == ("warning", "ingress.mqtt")
    assert ours["timestamp"].endswith("Z")
    assert (theirs["event"], theirs["level"]) == ("broken pipe", "error")


def test_a_reason_that_a_peer_left_empty_is_said_to_be_missing() -> None:
    out = io.StringIO()
    configure_logs("info", "json", out)
    structlog.get_logger().warning("broker object unusable, retrying", why="")
    structlog.get_logger().warning("broker object unusable, retrying", why="closed")
    told = [json.loads(line)["why"] for line in out.getvalue().splitlines()]
    assert told == ["no reason was given", "closed"]


def test_reasons_of_refused_logins_are_sentences() -> None:
    assert all(" " in denial.text for denial in Denial)


def test_an_exception_is_one_json_line() -> None:
    out = io.StringIO()
    configure_logs("info", "json", out)
    try:
        raise ValueError("bad")
    except ValueError:
        structlog.get_logger("app").exception("failed")
    (line,) = out.getvalue().splitlines()
    assert "ValueError: bad" in json.loads(line)["exception"]


def test_what_is_below_the_level_is_silent() -> None:
    out = io.StringIO()
    configure_logs("warning", "auto", out)
    structlog.get_logger("app").info("hello")
    logging.getLogger("library").info("hello")
    assert out.getvalue() == ""


def test_the_console_form_is_readable() -> None:
    out = io.StringIO()
    configure_logs("info", "console", out)
    structlog.get_logger("app").info("listening", port=1883)
    assert "listening" in out.getvalue()
    assert "port=1883" in out.getvalue()


def limited_by(limiter: Limiter, text: str, count: int) -> int:
    """How many of `count` events pass."""
    passed = 0
    for _ in range(count):
        try:
            limiter(None, "warning", {"event": text, "limited": True})
        except structlog.DropEvent:
            continue
        passed += 1
    return passed


def test_of_each_kind_the_first_of_a_minute_pass_and_the_others_are_counted() -> None:
    now = [0.0]
    limiter = Limiter(lambda: now[0])
    assert limited_by(limiter, "refused", 600) == WHOLE_MAX
    assert limited_by(limiter, "broken", 1) == 1
    now[0] = INTERVAL_SECS - 0.1
    assert limiter.take_due() == []
    now[0] = INTERVAL_SECS
    assert limiter.take_due() == [("warning", "refused", 600 - WHOLE_MAX)]
    assert limited_by(limiter, "refused", 600) == WHOLE_MAX


def test_kinds_are_bounded() -> None:
    limiter = Limiter(lambda: 0.0)
    for number in range(KINDS_MAX):
        assert limited_by(limiter, str(number), 1) == 1
    assert sum(limited_by(limiter, f"more {number}", 1) for number in range(100)) == WHOLE_MAX


def test_what_nobody_limits_passes_without_a_trace_of_the_limiter() -> None:
    out = io.StringIO()
    configure_logs("info", "json", out)
    log = structlog.get_logger(limited=True)
    log.warning("a peer did it", remote="127.0.0.1:1")
    for _ in range(100):
        structlog.get_logger().info("we did it")
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert len(lines) == 101
    assert "limited" not in lines[0]


def test_a_contained_error_is_told_once_with_its_stack_and_counted_each_time() -> None:
    out = io.StringIO()
    configure_logs("info", "json", out)
    forget()
    before = counted["delivery"]
    for _ in range(3):
        try:
            raise ValueError("odd")
        except ValueError as error:
            contained("delivery", error, remote="127.0.0.1:1")
    (line,) = [json.loads(line) for line in out.getvalue().splitlines()]
    assert counted["delivery"] - before == 3
    assert (line["where"], line["remote"]) == ("delivery", "127.0.0.1:1")
    assert "ValueError: odd" in line["exception"]


def test_what_a_peer_chose_is_short_and_moves_no_cursor() -> None:
    out = io.StringIO()
    configure_logs("info", "json", out)
    structlog.get_logger(limited=True).warning("odd", client="\x1b[2J\r\n\ud800é" + "x" * 1_000, count=3)
    structlog.get_logger().info("ours", path="x" * 1_000)
    odd, ours = (json.loads(line) for line in out.getvalue().splitlines())
    assert odd["client"].startswith("\\x1b[2J\\r\\n\\ud800é")
    assert len(odd["client"]) < 250
    assert odd["client"].endswith("...")
    assert odd["count"] == 3
    assert len(ours["path"]) == 1_000


def test_the_last_line_of_a_flood_comes_when_the_gateway_ends() -> None:
    limiter = Limiter(lambda: 0.0)
    limited_by(limiter, "refused", 600)
    assert limiter.take_due() == []
    assert limiter.take_due(everything=True) == [("warning", "refused", 600 - WHOLE_MAX)]
