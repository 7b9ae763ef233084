"""What tests need is found out: else `make check` starts what is not there, or leaves out too much."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import call

import pytest

from tests.interop import servers
from tests.interop.gateway_fixture import Running, running
from tests.interop.servers import Mosquitto, RabbitMQ
from tests.needs import ALONE, declared, needed, needs_of, refuse_alone, refuse_programs


def names_a_type(rabbitmq: RabbitMQ) -> RabbitMQ:
    return rabbitmq


def starts_it() -> object:
    return Starts.made()


def starts_it_within() -> object:
    return [one() for one in (lambda: starts_it(),)]


def over_a_module() -> object:
    return servers.RabbitMQ


@contextmanager
def as_a_context() -> Iterator[Running]:
    with running() as one:
        yield one


def runs_a_program() -> object:
    return subprocess.run


def compares_calls() -> object:
    return call(starts_it)


class Starts:
    @classmethod
    def made(cls) -> object:
        return Mosquitto


class Inherits(Starts):
    pass


@pytest.mark.parametrize(
    "functions, expected",
    [
        ([names_a_type], set()),
        ([starts_it], {"Mosquitto"}),
        ([starts_it_within], {"Mosquitto"}),
        ([over_a_module], {"RabbitMQ"}),
        ([as_a_context], {"a gateway"}),
        ([runs_a_program], {"processes"}),
        ([Inherits], {"Mosquitto"}),
        ([compares_calls], {"Mosquitto"}),
        ([names_a_type, starts_it, runs_a_program], {"Mosquitto", "processes"}),
        ([needed("patience")(lambda: None)], {"patience"}),
    ],
)
def test_what_is_reached_is_needed(functions: list[object], expected: set[str]) -> None:
    found = declared(*functions)  # type: ignore[arg-type]
    assert found - {"programs", "processes"} == expected - {"processes"}  # by which brokers are started
    assert ("processes" in found) is bool(expected - {"a gateway", "patience"})


def test_a_test_that_does_not_say_what_it_needs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALONE, raising=False)
    refuse_alone("openssl")
    monkeypatch.setenv(ALONE, "1")
    with pytest.raises(AssertionError, match="openssl is needed, and nothing"):
        servers.program("openssl")
    with pytest.raises(AssertionError, match="java is needed, and nothing"):
        refuse_programs("subprocess.Popen", ("java", ["java", "-version"], None, None))
    refuse_programs("open", ("java", "r", 0))


def test_what_each_test_needs_is_found(request: pytest.FixtureRequest) -> None:
    """Of all tests of this run: `make check` asks so, and a run of all tests does not."""
    for item in request.session.items:
        needs_of(item)
