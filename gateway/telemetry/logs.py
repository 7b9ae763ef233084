"""Configuration of the log: one event per line with its facts as keys, for people or as JSON.

Events that peers can cause at will (a refused login, a malformed packet) go to a logger bound with
`limited=True`. Of each kind of event, which is its text, the first ones of a minute are written in full. The
others are counted, and one line at the end of the minute reports their number.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, ClassVar, Final, Literal, TextIO

import orjson
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from gateway import clock as clocks
from gateway.containment import set_error_logger

LogFormat = Literal["auto", "console", "json"]
KINDS_MAX: Final = 256  # kinds of limited events, distinguished by text; texts are constants
WHOLE_MAX: Final = 10  # full lines of one kind per minute
INTERVAL_SECS: Final = 60.0
OTHERS: Final = "other events"
NO_REASON: Final = "no reason was given"
FACT_MAX: Final = 200  # maximum characters of a fact in a limited event


class Limiter:
    """Structlog processor that limits the number of log events of each kind in one minute.

    The first WHOLE_MAX events of a kind are logged; further events are only counted. The kind is the event's
    text. For an event with a route it also includes the names of the route and of the reason; clients cannot
    choose these. Only events with `limited=True` are limited.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or clocks.monotonic
        self._kinds: dict[str, _Kind] = {}

    def __call__(self, _: WrappedLogger, method: str, event: EventDict) -> EventDict:
        """Return the event if it may be written. Raises DropEvent if it is only counted."""
        if not event.pop("limited", False):
            return event
        text = str(event.get("event"))
        if "route" in event:
            text = f"{text}: {event['route']}, {event.get('reason', '')}"
        kind = self._kinds.get(text)
        if kind is None:
            if len(self._kinds) >= KINDS_MAX:
                text = OTHERS
            kind = self._kinds.setdefault(text, _Kind(method, self._clock()))
        if kind.passed < WHOLE_MAX:
            kind.passed += 1
            return {key: _legible(value) for key, value in event.items()}
        kind.more += 1
        raise structlog.DropEvent

    def take_due(self, *, everything: bool = False) -> list[tuple[str, str, int]]:
        """Return the number of events of each kind that were only counted, and reset these numbers.

        Each element is a tuple of log method, text and number. Kinds whose minute is not over are included
        only with `everything`.
        """
        now = self._clock()
        over = {
            text: kind
            for text, kind in self._kinds.items()
            if everything or now - kind.started_at >= INTERVAL_SECS
        }
        for text in over:
            del self._kinds[text]
        return [(kind.method, text, kind.more) for text, kind in over.items() if kind.more]


def _legible(value: Any) -> Any:
    """Return a value of a log event, which a peer may have chosen, in a form that is safe for the log.

    Text is cut to FACT_MAX characters, and characters that are not printable are escaped.
    """
    if not isinstance(value, str):
        return value
    text = value[:FACT_MAX]
    if not text.isprintable():
        text = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
    return text if len(value) <= FACT_MAX else f"{text}..."


def _explained(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Replace an empty field `why` of a log event: a peer or library gave no reason."""
    if event.get("why") == "":
        event["why"] = NO_REASON
    return event


class _Kind:
    """Numbers of log events of one kind in one minute: `passed` were logged, `more` were only counted."""

    __slots__ = ("method", "more", "passed", "started_at")

    def __init__(self, method: str, started_at: float) -> None:
        self.method = method
        self.started_at = started_at
        self.passed = 0
        self.more = 0


limiter: Final = Limiter()


def log_omitted_lines(*, now: bool = False) -> None:
    """Log how many events of each kind were only counted, in minutes that are over.

    Call this periodically, and at the end of the process with `now`, to include the present minute.
    """
    log = structlog.get_logger()
    for method, text, more in limiter.take_due(everything=now):
        getattr(log, method)(text, more=more, in_secs=round(INTERVAL_SECS))


def _log_contained(where: str, error: BaseException, facts: dict[str, Any]) -> None:
    structlog.get_logger().error(
        "internal error, contained", where=where, exc_info=error, error=repr(error)[:500], **facts
    )


set_error_logger(_log_contained)


def configure_logs(
    level: str, form: LogFormat, stream: TextIO | None = None, *, worker: int | None = None
) -> None:
    """Send all logs, including those of libraries, to `stream`, or to standard error if it is None.

    `level` is the lowest level that is written, such as `info`. `worker` is the number of this worker
    process, which each line then includes.
    """
    facts: dict[str, Any] = {} if worker is None else {"worker": worker}
    out = sys.stderr if stream is None else stream
    chosen = form if form != "auto" else "console" if out.isatty() else "json"
    number = logging.getLevelNamesMapping()[level.upper()]
    before: list[Processor] = [
        limiter,
        _explained,
        lambda _, __, event: {**event, **facts},
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="timestamp"),
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
    logging.getLogger("watchfiles").setLevel(max(number, logging.WARNING))  # one line per file event
    _Direct.stream = out if chosen == "json" and number <= logging.INFO else None
    _Direct.facts = facts


class _Direct:
    """Stream to which `write_json` writes, and the facts that it adds to each line.

    `stream` is None if the log is not JSON, or if its level is above `info`.
    """

    stream: TextIO | None = None
    facts: ClassVar[dict[str, Any]] = {}


def write_json(line: dict[str, Any]) -> bool:
    """Write `line` to a JSON log as an event of level `info`, without structlog's processors.

    This takes 10 % of the time that the processors need. Return False and write nothing if the log is not
    JSON, or if its processors have been replaced.
    """
    out = _Direct.stream
    if out is None or structlog.get_config()["processors"][0] is not limiter:
        return False
    try:
        out.write(orjson.dumps(line | _Direct.facts, default=str).decode() + "\n")
        out.flush()
    except (OSError, ValueError):  # as in the standard library: a failed log must not stop the gateway
        return True
    return True


def _rendering(form: str, out: TextIO) -> list[Processor]:
    if form == "console":
        return [structlog.dev.ConsoleRenderer(colors=out.isatty())]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_json)]


def _json(event: Any, **_: Any) -> str:
    return orjson.dumps(event, default=str).decode()
