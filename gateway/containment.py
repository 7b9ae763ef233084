"""Containment of unexpected errors: each costs only the item that was being processed.

Nothing that a peer sends may cost more than itself. So a guard surrounds each item that may be lost alone (a
delivery, a message, a connection, a turn of a task that serves others): it catches `Exception`, calls
`contained(...)`, abandons that one item, and continues with the next. Every error is counted by the guard
that caught it. A new kind of error is logged with its stack; repetitions are not, because a peer that
provokes an error can do so arbitrarily often.

Expected errors (malformed bytes, a limit) are not handled here: they have outcomes and metrics of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final, Literal

# The abandoned item, which is the label of the metric.
Where = Literal[
    "connection",  # one connection: its input, its output, or its timer
    "delivery",  # one message for one receiver
    "message",  # one message on its way in: routed, filtered, stored
    "batch",  # the messages of one pass of the event loop
    "timer",  # one alarm, or one round of periodic work
    "startup",  # one stored object that could not be restored
    "link",  # one connection to a remote broker
    "http",  # one request
    "reload",  # one attempt to reload changed files
    "journal",  # rows of the journal
    "store",  # one action after a commit
]
KINDS_MAX: Final = 1_000  # logged kinds of errors, by type and place; a limit that is never reached

counted: Counter[str] = Counter()
"""Number of contained errors by guard, since the start of the process."""

_reported: set[tuple[str, type[BaseException], str]] = set()
_log_error: Callable[[str, BaseException, dict[str, Any]], None] | None = None


def contained(where: Where, error: BaseException, **facts: Any) -> None:
    """Count an error that was caught where the process must go on, and log an error of a new kind.

    `where` is the name of the place in the code that caught it. An error is of a new kind if no error of this
    type, raised at the same line and caught at the same place, was logged before. `facts` are fields for the
    log, such as the name of the connection.
    """
    counted[where] += 1
    kind = (where, type(error), _place(error))
    if kind in _reported:
        return
    if len(_reported) < KINDS_MAX:
        _reported.add(kind)
    if _log_error is not None:
        _log_error(where, error, facts)


def set_error_logger(tell: Callable[[str, BaseException, dict[str, Any]], None]) -> None:
    """Set the function that logs contained errors; it is called as `tell(where, error, facts)`."""
    global _log_error
    _log_error = tell


def forget() -> None:
    """Make errors of all kinds be logged again. Only tests call this."""
    _reported.clear()


def _place(error: BaseException) -> str:
    """Return the source file and line that raised an error, as `FILE:LINE`.

    Return "" for a RecursionError, which may be raised at any line, so that its type alone identifies it.
    """
    trace = error.__traceback__
    if trace is None or isinstance(error, RecursionError):
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
