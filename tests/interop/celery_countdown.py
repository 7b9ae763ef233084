"""Send tasks that are all due after the same time to the worker at BROKER_URL; print how long they took.

A process of its own, for Celery keeps its connections to a broker as long as its process lives.
"""

from __future__ import annotations

import sys
import time

from tests.interop.celery_task import add

TASKS = 20


def main(countdown: float, patience: float) -> None:
    begun = time.monotonic()
    results = [add.apply_async((number, 1), countdown=countdown) for number in range(TASKS)]
    found = [result.get(timeout=patience) for result in results]
    assert found == [*range(1, TASKS + 1)], found
    print(time.monotonic() - begun)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
