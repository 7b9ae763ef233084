"""Failed logins: what is counted, what is refused, and that the tables stay small."""

from __future__ import annotations

import pytest

from gateway.access import failures as failures_module
from gateway.access.failures import Failures
from gateway.settings import LoginSettings

THERE, ELSEWHERE = "192.0.2.7:1", "192.0.2.8:1"


class Clock:
    """Stands still unless told."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_a_pair_is_refused_for_a_while_and_no_other() -> None:
    clock = Clock()
    failures = Failures(LoginSettings(failures_max=2, failure_window_secs=10.0, refused_secs=30.0), clock)
    failures.count_failure(THERE, "ann")
    assert not failures.is_refused(THERE, "ann")
    failures.count_failure("192.0.2.7:9999", "ann")
    assert failures.is_refused(THERE, "ann")
    assert not failures.is_refused(THERE, "bob")
    assert not failures.is_refused(ELSEWHERE, "ann")
    clock.now += 29.9
    assert failures.is_refused(THERE, "ann")
    clock.now += 0.1
    assert not failures.is_refused(THERE, "ann")


def test_failures_of_another_window_do_not_count() -> None:
    clock = Clock()
    failures = Failures(LoginSettings(failures_max=2, failure_window_secs=10.0), clock)
    for _ in range(20):
        failures.count_failure(THERE, "ann")
        clock.now += 10.0
    assert not failures.is_refused(THERE, "ann")


def test_a_place_is_refused_but_not_to_who_was_right_there() -> None:
    clock = Clock()
    failures = Failures(LoginSettings(address_failures_max=5), clock)
    failures.succeeded(THERE, "ann")
    for number in range(5):
        failures.count_failure(THERE, f"name {number}")
    assert failures.is_refused(THERE, "bob")
    assert not failures.is_refused(THERE, "ann")
    assert not failures.is_refused(ELSEWHERE, "bob")
    failures.count_failure(THERE, "ann")
    assert failures.is_refused(THERE, "ann"), "a guess at the name takes its trust"


def test_addresses_of_one_network_are_one_place() -> None:
    failures = Failures(LoginSettings(failures_max=3), Clock())
    for number in range(3):
        failures.count_failure(f"[2001:db8:0:1::{number:x}]:5", "ann")
    assert failures.is_refused("2001:db8:0:1:ffff::1:5", "ann")
    assert not failures.is_refused("2001:db8:0:2::1:5", "ann")


def test_nothing_is_refused_when_nothing_is_to_be() -> None:
    failures = Failures(LoginSettings(failures_max=0, address_failures_max=0, delay_secs=0.0), Clock())
    for _ in range(1_000):
        failures.count_failure(THERE, "ann")
    assert not failures.is_refused(THERE, "ann")
    assert failures.delay_secs(THERE, "ann") == 0.0


def test_invented_names_and_places_fill_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures_module, "KEYS_MAX", 50)
    failures = Failures(LoginSettings(), Clock())
    for number in range(500):
        failures.count_failure(f"2001:db8:{number:x}::1:5", f"name {number}" * 1_000)
        failures.succeeded(f"2001:db9:{number:x}::1:5", f"name {number}")
    tables = (failures._pairs, failures._places, failures._users, failures._right)
    assert [len(table) for table in tables] == [50] * 4
    assert all(len(name) <= 64 for name in failures._users._tallies)  # type: ignore[arg-type]


def test_who_breaks_negotiations_is_blocked_unless_somebody_was_right_there() -> None:
    clock = Clock()
    failures = Failures(LoginSettings(negotiation_failures_max=3, refused_secs=30.0), clock)
    for _ in range(2):
        failures.broke_negotiation(THERE)
    assert not failures.blocks(THERE)
    failures.broke_negotiation("192.0.2.7:9")
    assert failures.blocks(THERE)
    assert not failures.blocks(ELSEWHERE)
    assert not failures.is_refused(THERE, "ann"), "in other protocols nothing was broken"
    failures.succeeded(THERE, "ann")
    assert not failures.blocks(THERE)
    failures.count_failure(THERE, "ann")
    assert failures.blocks(THERE)
    clock.now += 30.0
    assert not failures.blocks(THERE)


def test_negotiations_are_not_counted_on_this_machine_or_without_a_limit() -> None:
    failures = Failures(LoginSettings(negotiation_failures_max=1))
    failures.broke_negotiation("127.0.0.1:1")
    assert not failures.blocks("127.0.0.1:1")
    failures = Failures(LoginSettings(negotiation_failures_max=0))
    for _ in range(100):
        failures.broke_negotiation(THERE)
    assert not failures.blocks(THERE)
