"""Error messages of failed Spark jobs, shortened to one line.

A failure in a Python worker is reported as the worker's traceback inside Java's, below an unspecific line.
Errors of this package are shown with their own text, all others with the last line of the worker's traceback,
which names the cause.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.logger import PySparkLogger

from gateway.errors import PipelineError

OURS: Final = re.compile(r"^(?:gateway\.[\w.]+Error): (.+)$", re.MULTILINE)
LOGGERS: Final = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
"""Loggers with which pyspark writes refused queries, with tracebacks of some kilobytes."""

TRACEBACK: Final = "Traceback (most recent call last):"
RAISED: Final = re.compile(r"^((?:\w+\.)*[A-Z]\w*(?:: .*)?)$", re.MULTILINE)
JAVA: Final = re.compile(r"^\s+at |^Caused by: |^Driver stacktrace:|^=== Streaming Query ===", re.MULTILINE)


@contextmanager
def convert_spark_errors() -> Iterator[None]:
    """Convert Spark errors raised in the block to PipelineError, with a text of one line.

    Within the block, pyspark does not log the errors as JSON.
    """
    loggers = [PySparkLogger.getLogger(name) for name in LOGGERS]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    except Py4JJavaError as error:
        raise PipelineError(cause_of(str(error.java_exception))) from error
    except PySparkException as error:
        raise PipelineError(cause_of(str(error))) from error
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def show_causes_in_notebook() -> None:
    """Make a notebook print one line with the cause above each traceback of a Spark error.

    Such a traceback has pages of lines of Java. Outside a notebook this function does nothing.
    """
    notebook: Any = sys.modules.get("IPython")
    shell = None if notebook is None else notebook.get_ipython()
    if shell is not None:
        shell.set_custom_exc((Py4JJavaError, PySparkException), _show_cause)


def _show_cause(
    shell: Any, kind: type[BaseException], error: BaseException, trace: Any, tb_offset: int | None = None
) -> None:
    stated = error.java_exception if isinstance(error, Py4JJavaError) else error
    print(cause_of(str(stated)), file=sys.stderr)
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset)


def cause_of(text: str) -> str:
    """Return the cause of a Spark error as one line, extracted from the error's text."""
    ours = OURS.findall(text)
    if ours:
        return str(ours[-1])
    _, found, traceback = text.partition(TRACEBACK)
    if found:
        raised = RAISED.findall(JAVA.split(traceback)[0])
        if raised:
            return f"a Python worker of Spark: {raised[-1]}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"Spark: {lines[0] if lines else 'no reason given'}"
