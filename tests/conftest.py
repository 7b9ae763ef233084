"""Fixtures for all tests: the real brokers, each started once per run and only when a test asks for it.

A missing program skips the test; under CI=true, where everything is meant to be installed, it fails it.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest
import structlog
from hypothesis import HealthCheck, settings

from gateway import is_compiled
from gateway.telemetry import audit, logs
from tests.interop.java import quicken_spark
from tests.interop.servers import Mosquitto, PeerMissingError, PostgreSQL, RabbitMQ
from tests.needs import ALONE, folder_of, needs_of, refuse_programs
from tests.sockets import created_sockets, record_sockets
from tests.store.durability import watched

DESCRIPTORS_MAX: Final = 500
SHOWN_MAX: Final = 10
ROOT: Final = Path(__file__).resolve().parent.parent
# Begun first, in this order: the whole run would wait for them at its end.
LONGEST: Final = tuple(
    ROOT / "tests" / one
    for one in (
        "ship/test_image.py",
        "pipeline/test_cluster.py",
        "engine/listener/test_as_embedded.py",
        "chaos/test_chaos.py",
        "pipeline/test_tables.py",
    )
)
Broker = TypeVar("Broker", Mosquitto, RabbitMQ, PostgreSQL)


# No example fails for the time that it took: a machine may be busy.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("brief", parent=settings.get_profile("patient"), max_examples=20)
settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is collected: nothing of it is garbage, and each worker would look for some
    if subprocess.run([sys.executable, "deploy/compile.py", "--check"], cwd=ROOT, check=False).returncode:
        pytest.exit("tests of stale extensions would say nothing", 2)
    quicken_spark()
    record_sockets()
    if config.getoption("markexpr") == "not needs":
        os.environ[ALONE] = "1"
        settings.load_profile("brief")  # `make check`; all examples are for `make test`


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make check` leaves out folders in which every test needs something."""
    left_out = config.getoption("markexpr") == "not needs" and folder_of(collection_path) is not None
    return True if left_out else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before the markers choose. Where no marker chooses, what tests need is found in tests/house alone."""
    chosen = bool(config.getoption("markexpr"))
    for item in items:
        for what in sorted(needs_of(item)) if chosen else ():
            item.add_marker(pytest.mark.needs(what))
        if is_compiled() and item.get_closest_marker("interpreted"):
            item.add_marker(pytest.mark.skip("a class of the test has the place of a compiled one"))
    items[:] = spread(items)


def spread(items: list[pytest.Item]) -> list[pytest.Item]:
    """Files of tests that need Spark, which works, evenly among the others, which wait for programs: all
    processes that share the tests would else work at one time, and wait at another.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    works = [file for file in files if file.is_relative_to(ROOT / "tests" / "pipeline")]
    waits = [file for file in files if file not in set(works)]
    places = [(at / len(part), file) for part in (works, waits) for at, file in enumerate(part)]
    in_order = [file for _, file in sorted(places)]
    in_order.sort(key=lambda file: LONGEST.index(file) if file in LONGEST else len(LONGEST))
    return [item for file in in_order for item in files[file]]


def pytest_collection_finish() -> None:
    """What was collected stays: no collection of garbage looks at it again."""
    gc.collect()
    gc.freeze()
    gc.enable()
    if ALONE in os.environ:  # not sooner: pytest-xdist starts its workers
        sys.addaudithook(refuse_programs)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say where each unclosed socket was created."""
    report = yield
    if report.failed and (created := created_sockets(report.longreprtext)):
        report.sections.append(("unclosed sockets", created))
    return report


class PatchesInterpreted(pytest.MonkeyPatch):  # type: ignore[misc] # final, and made by our fixture alone
    """Skips a test that would replace what is compiled: compiled code does not look there again."""

    def setattr(self, target: Any, *more: Any, **options: Any) -> None:
        if is_compiled_place(target):
            pytest.skip("it replaces something that is compiled")
        super().setattr(target, *more, **options)


def is_compiled_place(target: Any) -> bool:
    """Whether a module, class, object or dotted name belongs to an extension of ours."""
    if isinstance(target, str):
        found = next((sys.modules[name] for name in _shorter(target) if name in sys.modules), None)
    elif isinstance(target, types.ModuleType):
        found = target
    else:
        kind = target if isinstance(target, type) else type(target)
        found = sys.modules.get(kind.__module__)
    name, file = getattr(found, "__name__", ""), getattr(found, "__file__", None) or ""
    return name.startswith("gateway.") and file.endswith(".so")


def _shorter(dotted: str) -> Iterator[str]:
    while dotted:
        yield dotted
        dotted = dotted.rpartition(".")[0]


if is_compiled():

    @pytest.fixture
    def monkeypatch() -> Iterator[pytest.MonkeyPatch]:
        patching = PatchesInterpreted()
        yield patching
        patching.undo()


@pytest.fixture(autouse=True)
def stores_keep_their_word(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a store accepts is on disk, and no id is there without its message (tests/store/durability.py)."""
    alone = request.node.get_closest_marker("ids_alone") is not None
    with watched(ids_alone=alone) as faults:
        yield
    assert not faults, "\n".join(faults[:SHOWN_MAX])


@pytest.fixture(scope="module", autouse=True)
def descriptors_are_closed() -> Iterator[None]:
    """Clients that wait by `select` see no descriptor above 1 023, as if nothing came: what leaks would
    show in another test, much later. A socket that is collected unclosed fails the next test.
    """
    yield
    gc.collect()
    found: Counter[str] = Counter()
    for one in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # closed meanwhile
            found[re.sub("[0-9]+", "N", os.readlink(one))] += 1
    assert found.total() < DESCRIPTORS_MAX, found.most_common(5)


@pytest.fixture(scope="module", autouse=True)
def logs_are_as_they_were() -> Iterator[None]:
    """A command or a gateway of a test in this process may have turned them to another stream, or off."""
    root = logging.getLogger()
    configured, level, handlers = structlog.get_config(), root.level, root.handlers[:]
    stream, trail = logs._Direct.stream, audit.trail()
    yield
    audit.configure_audit()  # what has a file of its own closes that
    audit._Current.trail = trail
    logs._Direct.stream = stream
    structlog.configure(**configured)
    root.setLevel(level)
    root.handlers[:] = handlers


def missing(reason: str) -> None:
    """Skip the test that needs a missing program, or fail it under CI=true."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def started(make: Callable[[], Broker]) -> Iterator[Broker]:
    try:
        broker = make()
    except PeerMissingError as error:
        missing(str(error))
        raise
    with broker:
        yield broker


@pytest.fixture(scope="session")
def mosquitto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mosquitto]:
    """A real Mosquitto. A test that stops it must start it again."""
    yield from started(lambda: Mosquitto(tmp_path_factory.mktemp("mosquitto")))


@pytest.fixture(scope="session")
def rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQ]:
    """A real RabbitMQ, with its own MQTT plugin. A test that stops it must start it again."""
    yield from started(lambda: RabbitMQ(tmp_path_factory.mktemp("rabbitmq"), mqtt=True))


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """A real PostgreSQL. A test that stops it must start it again."""
    yield from started(PostgreSQL)
