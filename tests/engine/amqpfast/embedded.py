"""The tests of the embedded broker's AMQP/Fast listener, run with the engine behind it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

from gateway.settings import Settings
from gateway.settings.engine import RabbitEngine
from tests.interop.gateway_fixture import Running, no_errors_logged, quickened, settings_of
from tests.interop.servers import RabbitMQ
from tests.interop.state_database import state_database

PROTOCOLS: Final = frozenset(("mqtt", "amqpfast"))
PATIENCE_SECS: Final = 15.0
LEFT_OUT: Final = frozenset(("request", "pytest"))
numbers = itertools.count()


def on_engine(settings: Settings, rabbitmq: RabbitMQ) -> Settings:
    """The same with its listeners of MQTT and AMQP/Fast, over the broker, in a namespace of its own."""
    engine = RabbitEngine(
        engine="rabbitmq",
        urls=(rabbitmq.url,),
        namespace=f"as-embedded-fast-{next(numbers)}",
        queue_type="classic",
        postgresql=state_database(),
    )
    kept = {name: one for name, one in settings.listeners.items() if one.protocol in PROTOCOLS}
    return settings.model_copy(update={"broker": engine, "listeners": kept})


class Embedded:
    """What starts a gateway in place of `running`, when it is called."""

    def __init__(self, rabbitmq: RabbitMQ) -> None:
        self._rabbitmq = rabbitmq

    @contextmanager
    def __call__(self, settings: Settings | None = None, *, but: str = "") -> Iterator[Running]:
        with no_errors_logged(but=but), quickened():
            one = Running(on_engine(settings or settings_of(), self._rabbitmq))
            one.start()
            try:
                one.until(lambda: not one.gateway.readiness.reasons(), PATIENCE_SECS)
                yield one
            finally:
                one.stop()


def taken_from(module: ModuleType) -> dict[str, Any]:
    """Its tests, by names that say where they are from, and its fixtures."""
    room = module.__name__.rpartition("test_")[2]
    found = {}
    for name, one in vars(module).items():
        if name.startswith("test_") and callable(one):
            found[f"test_{room}_{name.removeprefix('test_')}"] = one
        elif hasattr(one, "_fixture_function_marker") or hasattr(one, "_pytestfixturefunction"):
            found[name] = one
    return found


def unknown(exceptions: dict[str, str], names: Any) -> set[str]:
    """Exceptions that are no tests."""
    known = {name.removeprefix("test_") for name in names if name.startswith("test_")}
    return {name.partition("[")[0] for name in exceptions} - known
