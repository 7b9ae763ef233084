"""What Spark says when a job fails, as one line for a person.

A failure in a Python worker arrives as the worker's traceback inside Java's; the line that matters is the
last of the first. What a job of ours raised there is said in its own words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from gateway.errors import PipelineError

OURS: Final = re.compile(r"^(?:gateway\.[\w.]+Error): (.+)$", re.MULTILINE)


@contextmanager
def plainly() -> Iterator[None]:
    """Raises PipelineError for what Spark raises in the block."""
    try:
        yield
    except Py4JJavaError as error:
        raise PipelineError(plain(str(error.java_exception))) from error
    except PySparkException as error:
        raise PipelineError(plain(str(error))) from error


def plain(text: str) -> str:
    """The line that matters in Spark's `text`."""
    ours = OURS.findall(text)
    if ours:
        return str(ours[-1])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"Spark: {lines[0] if lines else 'it did not say why'}"
