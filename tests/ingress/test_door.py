"""The places of a listener: shares, strangers that give way, and how often one may come."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.access.places import LOOPBACK
from gateway.ingress.admission import RATES_MAX, STRANGE_SECS, HolderRate, ListenerConnections
from gateway.settings import Limits

HERE, THERE, ELSEWHERE = LOOPBACK, "192.0.2.7", "192.0.2.8"


def door(connections_max: int = 10, **more: Any) -> ListenerConnections[str]:
    return ListenerConnections(Limits(**more), connections_max)


def test_a_place_has_a_share_and_somebody_else_gets_in() -> None:
    one = door()
    for number in range(9):
        assert one.refusal(THERE, 0.0) == ""
        one.enter(f"t{number}", THERE, 0.0)
        one.set_user(f"t{number}", "ann")
    assert one.refusal(THERE, 0.0) == "connections_per_address_max"
    assert one.refusal(ELSEWHERE, 0.0) == ""
    one.remove("t3")
    one.remove("t3")
    assert one.refusal(THERE, 0.0) == ""


def test_this_machine_has_all_unless_something_else_is_said() -> None:
    free, bound = door(), door(connections_per_address_max=3, connections_per_user_max=2)
    for one in (free, bound):
        for number in range(3):
            one.enter(f"h{number}", HERE, 0.0)
            one.set_user(f"h{number}", "ann")
    assert free.refusal(HERE, 0.0) == ""
    assert free.may_add_connection("ann", HERE)
    assert bound.refusal(HERE, 0.0) == "connections_per_address_max"
    assert not bound.may_add_connection("ann", HERE)
    assert bound.may_add_connection("bob", HERE)


def test_a_user_has_a_share_wherever_he_is() -> None:
    one = door(connections_per_user_max=2)
    for number, place in enumerate((THERE, ELSEWHERE)):
        one.enter(f"{number}", place, 0.0)
        one.set_user(f"{number}", "ann")
        one.set_user(f"{number}", "ann")
    assert not one.may_add_connection("ann", "192.0.2.9")
    assert one.may_add_connection("", "192.0.2.9")
    one.remove("0")
    assert one.may_add_connection("ann", "192.0.2.9")


def test_strangers_never_fill_a_listener() -> None:
    one = door()
    one.enter("client", THERE, 0.0)
    one.set_user("client", "ann")
    for number in range(7):
        one.enter(f"h{number}", HERE, 0.1 * number)
    for number in range(2):
        one.enter(f"t{number}", THERE, 0.0)
    assert one.connection_to_evict(0.5) is None, "a handshake is left in peace for a while"
    assert one.refusal(ELSEWHERE, 0.5) == "connections_max"
    later = 0.05 + STRANGE_SECS
    assert one.refusal(ELSEWHERE, later) == ""
    assert one.connection_to_evict(later) == "h0", "the oldest of the place with most"
    one.remove("h0")
    assert one.connection_to_evict(later) is None


def test_who_has_said_who_it_is_stays() -> None:
    one = door(2)
    for name in ("a", "b"):
        one.enter(name, HERE, 0.0)
        one.set_user(name, "")
    assert one.connection_to_evict(100.0) is None
    assert one.refusal(ELSEWHERE, 100.0) == "connections_max"


@pytest.mark.parametrize("most, taken", [(0.0, 100), (1.0, 1), (5.0, 5), (0.5, 1)])
def test_so_many_may_come_at_once(most: float, taken: int) -> None:
    rate = HolderRate(most)
    assert sum(rate.take(THERE, 7.0) for _ in range(100)) == taken
    assert rate.take(ELSEWHERE, 7.0)


def test_and_so_many_in_a_second() -> None:
    rate = HolderRate(5.0)
    taken = sum(rate.take(THERE, 7.0 + tick / 100) for tick in range(1_000))
    assert 54 <= taken <= 56
    assert sum(rate.take(THERE, 1_000.0) for _ in range(100)) == 5


def test_invented_addresses_fill_no_table() -> None:
    rate = HolderRate(1.0)
    for number in range(RATES_MAX + 50):
        rate.take(str(number), 0.0)
    assert len(rate._tokens) == RATES_MAX
