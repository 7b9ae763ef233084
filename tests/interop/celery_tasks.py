"""A Celery application for test_celery.py: worker and caller share it; GATEWAY_TEST_BROKER is its broker."""

from __future__ import annotations

import os

from celery import Celery

app = Celery("gateway_test", broker=os.environ["GATEWAY_TEST_BROKER"], backend="rpc://")
app.conf.update(worker_prefetch_multiplier=1, task_acks_late=True, broker_connection_retry_on_startup=False)


@app.task
def add(one: int, other: int) -> int:
    """The usual first task."""
    return one + other
