"""Fixtures for all tests: the real brokers, each started once per run and only when a test asks for it.

A missing program skips the test; under CI=true, where everything is meant to be installed, it fails it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from tests.interop.servers import Mosquitto, PeerMissingError, RabbitMQ
from tests.needs import ALONE, needs_of

Peer = TypeVar("Peer", Mosquitto, RabbitMQ)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("markexpr") == "not needs":
        os.environ[ALONE] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before the markers choose."""
    for item in items:
        for what in sorted(needs_of(item)):
            item.add_marker(pytest.mark.needs(what))


def missing(reason: str) -> None:
    """Skip the test that needs a missing program, or fail it under CI=true."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def started(make: Callable[[], Peer]) -> Iterator[Peer]:
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
    """A real RabbitMQ. A test that stops it must start it again."""
    yield from started(lambda: RabbitMQ(tmp_path_factory.mktemp("rabbitmq")))


@pytest.fixture(scope="session")
def rabbitmq_with_mqtt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQ]:
    """A real RabbitMQ with its own MQTT plugin, to compare with."""
    yield from started(lambda: RabbitMQ(tmp_path_factory.mktemp("rabbitmq-mqtt"), mqtt=True))
