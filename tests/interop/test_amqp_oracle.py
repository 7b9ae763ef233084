"""The same script runs against RabbitMQ and against our listener, and must see the same methods in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.gateway_fixture import Running, running
from tests.interop.oracle.scripts import run, run_all
from tests.interop.oracle.suite import DIFFERENT, DIFFERENT_TEXTS, SCRIPTS, WITH_CLOCKS, without_texts
from tests.interop.oracle.table import count_line, errors_table, methods_table
from tests.interop.oracle.wire import Log
from tests.interop.servers import RabbitMQ

PAGE = Path(__file__).resolve().parents[2] / "docs" / "conformance" / "amqp-0-9-1.md"
Logs = dict[str, Log]


@pytest.fixture(scope="module")
def theirs(rabbitmq: RabbitMQ) -> Logs:
    return run_all(rabbitmq.port)


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running() as started:
        yield started


@pytest.fixture(scope="module")
def ours(gateway: Running) -> Logs:
    return run_all(gateway.amqp)


@pytest.mark.parametrize("name", SCRIPTS)
def test_both_say_the_same(name: str, ours: Logs, theirs: Logs, rabbitmq: RabbitMQ, gateway: Running) -> None:
    different = DIFFERENT.get(name)
    if different is not None:
        assert ours[name] == different.said, different.why
        assert theirs[name] != different.said, "no difference any more"
        return
    alike = without_texts if name in DIFFERENT_TEXTS else Log
    if alike(ours[name]) != alike(theirs[name]):
        # RabbitMQ is asked once more, alone, and so are we if a clock may have gone wrong: what differs now
        # and then is seen otherwise.
        said = run(name, gateway.amqp) if name in WITH_CLOCKS else ours[name]
        assert alike(said) == alike(run(name, rabbitmq.port))


def test_the_page_has_the_tables(ours: Logs) -> None:
    """`python -m tests.interop.oracle.table` prints them."""
    page = PAGE.read_text().splitlines()
    wanted = [*methods_table(ours), *errors_table(ours)]
    assert [line for line in wanted if line not in page] == []
    assert count_line(ours) in " ".join(page)


def test_scripts_with_clocks_are_there() -> None:
    assert set(SCRIPTS) >= WITH_CLOCKS


def test_the_texts_that_differ_do(ours: Logs, theirs: Logs) -> None:
    for name in DIFFERENT_TEXTS:
        assert ours[name] != theirs[name], name
