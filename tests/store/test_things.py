"""Values and dead letters are there after a restart, and can be deleted by key, by prefix and by id."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.model.message import MESSAGE_BYTES, Message
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.store.letters import StoredDeadLetter
from gateway.store.store import Store
from tests.store.parts import TOPIC, Opened, messages, opened


def test_values_survive(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put("kind", "b", b"old")
    store.put("kind", "b", b"new")
    store.put("kind", b"b", b"bytes")
    store.put("kind", "a", Message(TOPIC, b"retained", retain=True))
    store.put("kind", "c", b"gone")
    store.put("other", "", b"")
    store.delete("kind", "c")
    store.delete("kind", "never was")
    store.close()
    again = opened(tmp_path)
    (first, message), *rest = again.records("kind")
    assert first == "a"
    assert isinstance(message, Message)
    assert (message.address, message.body, message.retain) == (TOPIC, b"retained", True)
    assert rest == [("b", b"new"), (b"b", b"bytes")]
    assert list(again.records("other")) == [("", b"")]
    assert list(again.records("none")) == []
    again.delete("kind", "b")
    again.close()
    third = opened(tmp_path)
    assert [key for key, _ in third.records("kind")] == ["a", b"b"]
    third.close()


TEXT_KEYS = ["a", "ab", "ab\U0010ffff", "ab\U0010ffffz", "ac", "b", "\ud7ff", "\ud7ffx", "\ue000"]
KEYS: list[str | bytes] = [*TEXT_KEYS, b"a", b"ab", b"\xff", b"\xff\xffz"]
PREFIXES = ["", b"", "a", "ab", "ab\U0010ffff", "\ud7ff", b"a", b"\xff", b"\xff\xff", "zz", "\U0010ffff"]


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "waiting"])
@pytest.mark.parametrize("prefix", PREFIXES, ids=repr)
def test_values_are_deleted_by_prefix(tmp_path: Path, prefix: str | bytes, stored: bool) -> None:
    store = opened(tmp_path)
    for key in KEYS:
        store.put("kind", key, b"")
        store.put("other", key, b"")
    if stored:
        store.close()
        store = opened(tmp_path)
    store.delete_all("kind", prefix)
    store.put("kind", "later", b"")
    store.close()
    again = opened(tmp_path)
    gone = {
        key for key in KEYS
        if not prefix or (type(key) is type(prefix) and key.startswith(prefix))  # type: ignore[arg-type]
    }  # fmt: skip
    assert {key for key, _ in again.records("kind")} == {*KEYS, "later"} - gone
    assert {key for key, _ in again.records("other")} == set(KEYS)
    again.close()


def test_a_key_that_is_no_text_is_the_callers_error(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for call in (
        lambda: store.put("kind", "\ud800", b""),
        lambda: store.delete("kind", "\ud800"),
        lambda: store.delete_all("kind", "\ud800"),
        lambda: store.log("queue", "\ud800"),
    ):
        with pytest.raises(UnicodeEncodeError):
            call()
    store.close()


REFUSED = Outcome(Verdict.REJECTED, Reason.NO_ROUTE, "nobody \ud800")


LETTERS_BYTES = 100 + 5 * MESSAGE_BYTES


def letters(store: Store, bodies: str) -> None:
    found: list[list[StoredDeadLetter]] = []
    store.newest_letters(100, found.append)
    assert "".join(letter.message.body.decode() for letter in found[0]) == bodies


def test_dead_letters(tmp_path: Path) -> None:
    store = opened(tmp_path, letters_max=5, letters_bytes_max=LETTERS_BYTES)
    store.add_letters(messages(b"a", b"b"), "route", REFUSED)
    store.add_letters(messages(b"c"), "", REFUSED)
    store.close()
    store = opened(tmp_path, letters_max=5, letters_bytes_max=LETTERS_BYTES)
    letters(store, "cba")
    found: list[list[StoredDeadLetter]] = []
    store.find_letters([2, 9, 1], found.append)
    two, one = found[0]
    assert (two.id, two.route, two.message.body) == (2, "route", b"b")
    assert one.outcome == (Verdict.REJECTED, Reason.NO_ROUTE, "nobody ?")
    store.newest_letters(1, found.append, before=3)
    assert [letter.id for letter in found[1]] == [2]
    store.add_letters(messages(b"d", b"e", b"f"), "route", REFUSED)
    store.delete_letters([4])
    store.delete_letters([4, 77])
    store.close()
    store = opened(tmp_path, letters_max=5, letters_bytes_max=LETTERS_BYTES)
    letters(store, "fecb")
    assert (store.letters_count, store.letters_bytes) == (4, 4 * (1 + MESSAGE_BYTES))
    store.add_letters(messages(b"x" * (97 + MESSAGE_BYTES)), "route", REFUSED)
    store.close()
    store = opened(tmp_path, letters_max=5, letters_bytes_max=LETTERS_BYTES)
    letters(store, "x" * (97 + MESSAGE_BYTES) + "fec")
    store.add_letters(messages(b"y"), "route", REFUSED)
    store.delete_letters()
    store.close()
    store = opened(tmp_path, letters_max=5, letters_bytes_max=LETTERS_BYTES)
    letters(store, "")
    store.close()


def test_letters_can_be_listed_while_the_thread_runs(tmp_path: Path) -> None:
    with Opened(tmp_path) as one:
        found: list[list[StoredDeadLetter]] = []
        one.store.add_letters(messages(b"a"), "route", REFUSED)
        one.store.newest_letters(10, found.append)
        one.store.flush()
        one.loop.run_until(lambda: found)
        assert len(found[0]) == 1
