"""What the log says of retained messages: order, records that are written again, positions, restarts."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest

from gateway.engine.retained import EngineRetained
from gateway.model.message import Message
from gateway.store.store import Store
from tests.engine.messages import message_of

NOW_MS = int(time.time() * 1000)


def made(
    store: Store | None = None, published: list[Message] | None = None, most: int = 100
) -> EngineRetained:
    there: list[Message] = [] if published is None else published
    return EngineRetained(
        "ns", there.append, messages_max=most, octets_max=1 << 20, store=store, utc=time.time
    )


def bodies(retained: EngineRetained) -> dict[str, bytes]:
    return {message.address.name: bytes(message.body) for message in retained.messages()}


def say(retained: EngineRetained, body: bytes, offset: int, *, origin: int = -1, topic: str = "a/b") -> bool:
    retained.cursor.position = offset
    return retained.apply(message_of(body, topic, retain=True), offset, origin=origin, written=NOW_MS)


def test_the_last_record_of_a_topic_counts() -> None:
    retained = made()
    say(retained, b"1", 10)
    say(retained, b"2", 11)
    assert bodies(retained) == {"a/b": b"2"}
    say(retained, b"", 12)
    assert not bodies(retained)


def test_what_is_written_again_does_not_undo_what_came_between() -> None:
    retained = made()
    say(retained, b"old", 10)
    say(retained, b"new", 11)
    assert not say(retained, b"old", 12, origin=10)
    assert bodies(retained) == {"a/b": b"new"}
    assert say(retained, b"new", 13, origin=11)
    assert bodies(retained) == {"a/b": b"new"}
    say(retained, b"newest", 14)
    assert bodies(retained) == {"a/b": b"newest"}


def test_a_replica_that_begins_in_the_middle_takes_what_was_written_again() -> None:
    retained = made()
    assert say(retained, b"old", 12, origin=10)
    assert say(retained, b"new", 13, origin=11)
    assert bodies(retained) == {"a/b": b"new"}


def test_what_is_old_is_due_with_its_origin_and_what_has_expired_is_gone() -> None:
    retained = made()
    retained.apply(message_of(b"old", "old", retain=True), 5, origin=3, written=NOW_MS - 80_000_000)
    retained.apply(message_of(b"young", "young", retain=True), 6, origin=-1, written=NOW_MS)
    expired = message_of(b"gone", "gone", retain=True, expires=time.time() - 1)
    retained.apply(expired, 7, origin=-1, written=NOW_MS - 80_000_000)
    due = retained.due(100_000.0, 1 << 30)
    assert [(message.address.name, origin) for message, origin in due] == [("old", 3)]
    assert set(bodies(retained)) == {"old", "young"}


def test_what_has_half_of_the_log_behind_it_is_due() -> None:
    """As clients make it longer by coming and going, or others by retaining."""
    retained = made()
    say(retained, b"1", 10, topic="behind")
    say(retained, b"2", 1_000, topic="ahead")
    retained.records_read, retained.octets_read = 10, 1_000  # a hundred octets each
    assert not retained.due(1e6, 400_000)
    assert [message.address.name for message, _ in retained.due(1e6, 190_000)] == ["behind"]


def test_the_limit_strikes_new_topics_and_counts() -> None:
    retained = made(most=1)
    say(retained, b"1", 1, topic="one")
    say(retained, b"2", 2, topic="two")
    assert bodies(retained) == {"one": b"1"}
    assert retained.refused == 1


def test_an_operator_has_every_replica_forget() -> None:
    published: list[Message] = []
    retained = made(published=published)
    say(retained, b"1", 1)
    message = retained.messages()[0]
    assert retained.forget(message)
    assert bodies(retained) == {"a/b": b"1"}  # until the log says so
    assert [(one.address.name, one.body, one.retain) for one in published] == [("a/b", b"", True)]
    say(retained, b"", 2)
    assert not retained.forget(message)


def test_a_replica_goes_on_where_it_stopped(tmp_path: Path) -> None:
    store = Store(tmp_path)
    retained = made(store)
    say(retained, b"1", 20, topic="one")
    say(retained, b"2", 21, topic="two")
    say(retained, b"", 22, topic="one")
    retained.note()
    store.close()
    store = Store(tmp_path)
    again = made(store)
    assert again.position == 22
    assert bodies(again) == {"two": b"2"}
    assert not say(again, b"old", 23, origin=20, topic="two")  # it knows since when it has the other
    other = EngineRetained("other", [].append, messages_max=9, octets_max=999, store=store, utc=time.time)
    assert (other.position, len(other)) == (-1, 0)
    store.close()


@pytest.mark.parametrize("stored", [False, True])
def test_another_log_begins_with_nothing(tmp_path: Path, stored: bool) -> None:
    store = Store(tmp_path) if stored else None
    retained = made(store)
    say(retained, b"1", 20)
    retained.note()
    retained.begin_anew()
    assert (retained.position, bodies(retained)) == (-1, {})
    say(retained, b"new", 3)
    retained.note()
    assert bodies(retained) == {"a/b": b"new"}
    if store is not None:
        store.close()
        store = Store(tmp_path)
        assert (made(store).position, bodies(made(store))) == (3, {"a/b": b"new"})
        store.close()


def due(retained: EngineRetained) -> list[tuple[bytes, int]]:
    return [(bytes(message.body), origin) for message, origin in retained.due(1e6, 1 << 30)]


def test_an_older_message_that_is_written_again_behind_a_clear_loses() -> None:
    """As that of a replica that was frozen. The clear is written again behind it, once."""
    retained = made()
    say(retained, b"old", 10)
    say(retained, b"", 20)
    assert not due(retained)
    assert not say(retained, b"old", 30, origin=10)
    assert not bodies(retained)
    assert due(retained) == [(b"", 20)]
    assert say(retained, b"", 31, origin=20)
    assert not due(retained)
    assert say(retained, b"new", 40)
    assert bodies(retained) == {"a/b": b"new"}
    assert not say(retained, b"", 41, origin=20)
    assert bodies(retained) == {"a/b": b"new"}


def test_one_that_begins_behind_a_clear_reads_it_again() -> None:
    """The log has forgotten the clear, and not yet what lost against it."""
    retained = made()
    say(retained, b"old", 30, origin=10)
    say(retained, b"", 31, origin=20)
    assert not bodies(retained)
    assert not say(retained, b"old", 32, origin=10)


def test_a_clear_of_what_is_not_known_counts() -> None:
    retained = made()
    say(retained, b"", 20)
    assert not say(retained, b"old", 30, origin=10)


def test_clears_are_remembered_over_a_restart(tmp_path: Path) -> None:
    with closing(Store(tmp_path)) as store:
        retained = made(store)
        say(retained, b"old", 10)
        say(retained, b"", 20)
        retained.note()
    with closing(Store(tmp_path)) as store:
        again = made(store)
        assert not say(again, b"old", 30, origin=10)
        assert not bodies(again)
        again.begin_anew()
        assert say(again, b"old", 30, origin=10)


def test_clears_are_forgotten_with_the_log_and_when_there_are_too_many() -> None:
    retained = made(most=2)
    retained.apply(message_of(b"", "old", retain=True), 5, origin=-1, written=NOW_MS - 80_000_000)
    say(retained, b"", 6, topic="young")
    retained.due(50_000.0, 1 << 30)
    assert list(retained._cleared) == ["young"]
    say(retained, b"", 7, topic="younger")
    say(retained, b"", 8, topic="youngest")
    assert list(retained._cleared) == ["younger", "youngest"]
