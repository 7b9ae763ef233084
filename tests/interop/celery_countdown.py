"""Send tasks that are all due after the same time to the worker at BROKER_URL; with a patience, print how
long they took.

A process of its own, for Celery keeps its connections to a broker as long as its process lives.
"""

from __future__ import annotations

import sys
import time

from tests.interop.celery_task import add


def main(tasks: int, countdown: float, patience: float = 0.0) -> None:
    begun = time.monotonic()
    results = [add.apply_async((number, 1), countdown=countdown) for number in range(tasks)]
    if not patience:
        return
    found = [result.get(timeout=patience) for result in results]
    assert found == [*range(1, tasks + 1)], found
    print(time.monotonic() - begun)


if __name__ == "__main__":
    main(int(sys.argv[1]), *map(float, sys.argv[2:]))
