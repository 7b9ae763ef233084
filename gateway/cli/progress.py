"""Progress bar on standard error, shown after a second if that is a terminal, else not at all."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

AFTER_SECS: Final = 1.0  # work that takes less time shows no bar


class Bar:
    """Progress bar on the terminal.

    `total` is the amount of work, or None if it is unknown.
    """

    def __init__(self, text: str, total: float | None) -> None:
        self._text = text
        self._total = total
        self._done = 0.0
        self._lock = threading.Lock()
        self._ended = False
        self._drawn: tuple[Progress, TaskID] | None = None

    def update(self, done: float) -> None:
        """Set the amount of work done, in the unit of `total`."""
        with self._lock:
            self._done = done
            if self._drawn is not None:
                progress, task = self._drawn
                progress.update(task, completed=done)

    def start(self) -> None:
        """Draw the bar, and redraw it at each update. Do nothing after `end`."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with self._lock:
            if self._ended:
                return
            progress = Progress(*columns, console=Console(stderr=True), transient=True)
            task = progress.add_task(self._text, total=self._total)
            progress.update(task, completed=self._done)
            self._drawn = progress, task
            progress.start()

    def end(self) -> None:
        """Remove the bar from the terminal, and show it no more."""
        with self._lock:
            self._ended = True
            if self._drawn is not None:
                self._drawn[0].stop()


@contextmanager
def progress_bar(text: str, total: float | None = None) -> Iterator[Bar]:
    """Context manager that shows a progress bar while its block runs.

    The bar appears after AFTER_SECS, and only if standard error is a terminal. The block must end the bar
    before it prints anything.
    """
    bar = Bar(text, total)
    if not sys.stderr.isatty():
        yield bar
        return
    timer = threading.Timer(AFTER_SECS, bar.start)
    timer.daemon = True
    if AFTER_SECS:
        timer.start()
    else:
        bar.start()
    try:
        yield bar
    finally:
        timer.cancel()
        bar.end()
