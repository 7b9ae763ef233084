"""Large bodies on their way out: pieces of their own, which nobody copies."""

from __future__ import annotations

import pytest

from gateway.model.spooled_bodies import APART_BYTES_MIN, join_pieces
from gateway.protocols.mqtt.connection import State
from gateway.protocols.mqtt.runs import Publishes
from gateway.protocols.mqtt.spec import Version
from tests.protocols.mqtt.machines import client, server, small_client


@pytest.mark.parametrize("version", list(Version))
@pytest.mark.parametrize("size", [APART_BYTES_MIN, 300_000])
def test_a_large_body_is_a_piece_of_its_own_for_all_who_hear_it(version: Version, size: int) -> None:
    body = bytes(size)
    for _ in range(2):
        ours, theirs = server(State.OPEN, version), client(State.OPEN, version)
        ours.publish_many([(0, b"a", 0, b"", b"small"), (2, b"a", 1, b"", body), (0, b"a", 0, b"", b"x")])
        pieces = ours.to_send()
        assert isinstance(pieces, list)
        assert [piece for piece in pieces if piece is body] == [body]
        (event,) = theirs.receive_data(join_pieces(pieces), 0.0)
        assert isinstance(event, Publishes)
        assert [row[4] for row in event.rows] == [b"small", body, b"x"]
        assert ours.to_send() == b""
        ours.publish_many([(0, b"a", 0, b"", b"small")])
        assert isinstance(ours.to_send(), bytes)
        assert ours.state is State.OPEN


def test_what_is_too_large_for_the_peer_is_not_said() -> None:
    ours = small_client(100_000)
    assert ours.publish_many([(0, b"a", 0, b"", bytes(100_000))]) == [0]
    assert ours.to_send() == b""
