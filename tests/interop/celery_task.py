"""A Celery application for the tests; its broker comes from the environment, its results go back by AMQP."""

from __future__ import annotations

import os

from celery import Celery

app = Celery("celery_task", broker=os.environ.get("BROKER_URL", "memory://"), backend="rpc://")
app.conf.update(
    task_acks_late=True,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=False,
    broker_connection_timeout=5,
    task_default_queue="tasks",
)


@app.task  # type: ignore[untyped-decorator]
def add(one: int, other: int) -> int:
    """The sum."""
    return one + other
