"""Logs: one event per line with its facts as keys; colour for people, JSON for machines.

What peers can provoke at will (a refused login, a broken packet) is logged through an Occasionally, so that a
flood of errors does not become a flood of lines.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Final, Literal, TextIO

import orjson
import structlog
from structlog.typing import FilteringBoundLogger, Processor

LogFormat = Literal["auto", "console", "json"]
KEYS_MAX: Final = 256  # kinds of event that an Occasionally tells apart


def configure_logs(level: str, form: LogFormat, stream: TextIO | None = None) -> None:
    """Send all logs, also those of libraries, to `stream` (standard error). `level` is a name: `info`."""
    out = sys.stderr if stream is None else stream
    chosen = form if form != "auto" else "console" if out.isatty() else "json"
    number = logging.getLevelNamesMapping()[level.upper()]
    before: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
    ]
    structlog.configure(
        processors=[*before, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    writer = logging.StreamHandler(out)
    writer.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=before,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_rendering(chosen, out)],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [writer]
    root.setLevel(number)
    for chatty in ("watchfiles", "gateway.admin.http"):  # one line per file event, a banner of their own
        logging.getLogger(chatty).setLevel(max(number, logging.WARNING))


def _rendering(form: str, out: TextIO) -> list[Processor]:
    if form == "console":
        return [structlog.dev.ConsoleRenderer(colors=out.isatty())]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_json)]


def _json(event: Any, **_: Any) -> str:
    return orjson.dumps(event, default=str).decode()


def logger(name: str) -> FilteringBoundLogger:
    """The logger of a room, such as `ingress.mqtt`."""
    found: FilteringBoundLogger = structlog.get_logger(name)
    return found


class Occasionally:
    """Lets each kind of event through once per `interval_secs`, and counts those in between."""

    __slots__ = ("_interval_secs", "_kinds")

    def __init__(self, interval_secs: float = 10.0) -> None:
        self._interval_secs = interval_secs
        self._kinds: dict[str, tuple[float, int]] = {}

    def skipped(self, kind: str, now: float) -> int | None:
        """None: be silent. Otherwise log it; so many of its kind were not. `now` is monotonic, in seconds."""
        kinds = self._kinds
        if kind not in kinds and len(kinds) >= KEYS_MAX:
            kind = "other"
        last, count = kinds.get(kind, (float("-inf"), 0))
        if now - last < self._interval_secs:
            kinds[kind] = (last, count + 1)
            return None
        kinds[kind] = (now, 0)
        return count
