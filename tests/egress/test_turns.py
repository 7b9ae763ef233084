"""Which URL a link tries next, and how long it waits."""

from __future__ import annotations

import socket
from typing import Any, Final
from unittest.mock import MagicMock

import pytest
import trio
import trio.testing

from gateway.egress.link import Link, LinkStatus, UrlOrder
from gateway.telemetry.stats import LinkStats
from gateway.transport.stream import WriteSet
from tests.configured import make_link

FAILED, HELD = False, True

# URLs, what happens to each connection, what follows: (URL number, seconds).
ROWS: Final = [
    ("one: waits double up to the longest", 1, [FAILED] * 5, [(0, 1), (0, 2), (0, 4), (0, 5), (0, 5)]),
    (
        "one: a connection that held begins anew",
        1,
        [FAILED, FAILED, HELD, FAILED],
        [(0, 1), (0, 2), (0, 1), (0, 2)],
    ),
    (
        "three: a wait for each round",
        3,
        [FAILED] * 7,
        [(1, 0), (2, 0), (0, 1), (1, 0), (2, 0), (0, 2), (1, 0)],
    ),
    ("three: from one that held to the next", 3, [FAILED, HELD, FAILED], [(1, 0), (2, 1), (0, 0)]),
    (
        "two: a round after one that held is whole",
        2,
        [HELD, FAILED, FAILED, FAILED],
        [(1, 1), (0, 0), (1, 2), (0, 0)],
    ),
]


@pytest.mark.parametrize("name, count, ends, expected", ROWS, ids=[row[0] for row in ROWS])
def test_turns(name: str, count: int, ends: list[bool], expected: list[tuple[int, float]]) -> None:
    turns = UrlOrder(count, 1.0, 5.0, lambda: 1.0)
    assert turns.at == 0
    found = []
    for held in ends:
        wait = turns.advance(held)
        found.append((turns.at, wait))
    assert found == expected


def test_waits_are_jittered_down_to_half() -> None:
    assert UrlOrder(1, 2.0, 5.0, lambda: 0.0).advance(FAILED) == 1.0
    assert 1.0 <= UrlOrder(1, 2.0, 5.0).advance(FAILED) <= 2.0


@pytest.mark.interpreted
async def test_a_link_that_stops_while_it_connects_uses_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The broker would deliver messages to it, and the gateway wait for its end."""
    session = MagicMock()
    status = LinkStatus("far", LinkStats("far", "mqtt"))
    link = Link(status, make_link(url="mqtt://broker"), session, WriteSet())

    async def open_socket(*_: Any) -> socket.socket:
        link.shut_down()
        return socket.socket()

    monkeypatch.setattr("gateway.egress.link.open_socket", open_socket)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert link.stats.failures.counts == {"failed": 1}
    assert session.connect.mock_calls == []
