"""Where an error that nobody foresaw ends.

Nothing that a peer sent may cost more than itself. So a guard stands around each thing that may be lost alone
(a delivery, a message, a connection, a turn of a task that serves others): it catches `Exception`, says
`contained(...)`, gives up that one thing, and goes on with the next. Every error is counted by the guard that
met it. One that has not been seen before is told with its stack; the same again is not, for whoever provoked
it can do so as often as he likes.

What can be foreseen (octets that are malformed, a limit) is no business of this module: it has an outcome and
a metric of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final, Literal

# What is given up, and so the label of the metric.
Where = Literal[
    "connection",  # one connection: what was read from it, or is written to it, or its tick
    "delivery",  # one message at one receiver
    "message",  # one message on its way in: routed, filtered, stored
    "batch",  # what gathered in one turn
    "timer",  # one alarm, or one round of what is done by the clock
    "startup",  # one stored thing that could not be made again
    "link",  # one connection to a remote broker
    "http",  # one request
    "reload",  # one attempt to take changed files
    "journal",  # rows of the journal
    "store",  # one thing to be done after a commit
]
KINDS_MAX: Final = 1_000  # errors that are told apart by type and place; there are never that many

counted: Counter[str] = Counter()
"""Contained errors by guard, since the process began."""

_told: set[tuple[str, type[BaseException], str]] = set()
_tell: Callable[[str, BaseException, dict[str, Any]], None] | None = None


def contained(where: Where, error: BaseException, **facts: Any) -> None:
    """An error ends here. `facts` are for the log: whose connection, which message."""
    counted[where] += 1
    kind = (where, type(error), _place(error))
    if kind in _told:
        return
    if len(_told) < KINDS_MAX:
        _told.add(kind)
    if _tell is not None:
        _tell(where, error, facts)


def tell_with(tell: Callable[[str, BaseException, dict[str, Any]], None]) -> None:
    """Have `tell(where, error, facts)` write what is told."""
    global _tell
    _tell = tell


def forget() -> None:
    """Nothing has been told yet; for tests."""
    _told.clear()


def _place(error: BaseException) -> str:
    """The innermost file and line. A RecursionError is raised anywhere: its type has to do."""
    trace = error.__traceback__
    if trace is None or isinstance(error, RecursionError):
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
