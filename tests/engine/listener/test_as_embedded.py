"""The tests of the embedded broker's MQTT listener, with the engine behind it.

Each has a namespace of its own. What the engine does otherwise stands in EXCEPTIONS, which the guide tells in
`docs/guides/replicas.md`; a test that has ceased to be one fails, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any, Final

import pytest

from gateway.settings import Settings
from gateway.settings.engine import RabbitEngine
from tests.ingress import test_mqtt
from tests.ingress.mqtt import (
    test_bad_clients,
    test_bursts,
    test_nobody,
    test_offered,
    test_refused,
    test_scram,
    test_shared,
    test_statements,
    test_stopping,
    test_system,
    test_wills,
)
from tests.interop.gateway_fixture import Running, no_errors_logged, quickened, settings_of
from tests.interop.servers import RabbitMQ

MODULES: Final = (
    test_mqtt,
    test_bad_clients,
    test_bursts,
    test_nobody,
    test_offered,
    test_refused,
    test_scram,
    test_shared,
    test_statements,
    test_stopping,
    test_system,
    test_wills,
)
EXCEPTIONS: Final[dict[str, str]] = {}
PATIENCE_SECS: Final = 15.0
numbers = itertools.count()


def on_engine(settings: Settings, rabbitmq: RabbitMQ) -> Settings:
    """The same with its MQTT listeners alone, over the broker."""
    engine = RabbitEngine(
        engine="rabbitmq",
        urls=(rabbitmq.url,),
        namespace=f"as-embedded-{next(numbers)}",
        queue_type="classic",
    )
    mqtt = {name: one for name, one in settings.listeners.items() if one.protocol == "mqtt"}
    return settings.model_copy(update={"broker": engine, "listeners": mqtt})


@pytest.fixture(autouse=True)
def running(monkeypatch: pytest.MonkeyPatch, rabbitmq: RabbitMQ) -> Any:
    """What the tests start gateways with."""

    @contextmanager
    def run(settings: Settings | None = None, *, but: str = "") -> Iterator[Running]:
        with no_errors_logged(but=but), quickened():
            one = Running(on_engine(settings or settings_of(), rabbitmq))
            one.start()
            try:
                one.until(lambda: not one.gateway.readiness.reasons(), PATIENCE_SECS)
                yield one
            finally:
                one.stop()

    for module in MODULES:
        if hasattr(module, "running"):
            monkeypatch.setattr(module, "running", run)
    return run


@pytest.fixture
def gateway(running: Any) -> Iterator[Running]:
    """A replica of a namespace of its own."""
    begun: AbstractContextManager[Running] = running()
    with begun as one:
        yield one


def _tests_of(module: ModuleType) -> Iterator[tuple[str, Any]]:
    room = module.__name__.rpartition("test_")[2]
    for name, found in vars(module).items():
        if name.startswith("test_") and callable(found):
            yield f"test_{room}_{name.removeprefix('test_')}", found


globals().update(
    {
        name: pytest.mark.xfail(reason=EXCEPTIONS[name], strict=True)(found) if name in EXCEPTIONS else found
        for module in MODULES
        for name, found in _tests_of(module)
    }
)
mapped, site = test_bursts.mapped, test_scram.site
