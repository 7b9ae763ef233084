"""Stored times over a restart: they continue, whatever became of the wall clock meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway import clock, containment
from gateway.model.message import NEVER, Message
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.times import WallTime
from gateway.protocols.mqtt.dialect import topic_address
from gateway.store.database import connect
from gateway.store.repair import repair
from gateway.store.store import Store

HOUR_SECS = 3_600.0


class Clocks:
    """The clocks of a machine: wall clock, seconds since boot, name of the boot."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.wall = 1_800_000_000.0
        self.since_boot = 50_000.0
        self.boot = "first"
        patch.setattr(clock, "utc", lambda: WallTime(self.wall))
        patch.setattr(clock, "since_boot", lambda: self.since_boot)
        patch.setattr(clock, "boot_id", lambda: self.boot)

    def advance(self, seconds: float) -> None:
        self.wall += seconds
        self.since_boot += seconds

    def reboot(self, seconds: float) -> None:
        """Start the machine again after so many seconds."""
        self.wall += seconds
        self.since_boot = 10.0
        self.boot += "'"


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def stored(folder: Path, wall: float) -> None:
    """Store a message, a record and a dead letter that live for an hour, and a message without an end."""
    store = Store(folder, reserve_bytes=0)
    address = topic_address("a")
    message = Message(address, b"x", expires=wall + HOUR_SECS)
    store.append(store.log("queue", "q"), 0, [message, Message(address, b"y")], lambda outcome: None)
    store.put("retained", "a", message)
    store.add_letters([message], "", Outcome(Verdict.REJECTED, Reason.NO_ROUTE, ""))
    store.close()


def left(folder: Path, wall: float) -> set[float]:
    """Return the rest of each life that is stored, in whole seconds."""
    store = Store(folder, reserve_bytes=0)
    found: list[Message] = []
    store.read_from(
        store.log("queue", "q"),
        0,
        lambda read: found.extend(message for _, message, _ in read),
        messages_max=10,
        bytes_max=1_000,
    )
    assert found.pop().expires == NEVER  # it was stored without an end
    found += [value for _, value in store.records("retained") if isinstance(value, Message)]
    store.newest_letters(1, lambda letters: found.extend(letter.message for letter in letters))
    store.close()
    assert len(found) == 3
    return {round(message.expires - wall) for message in found}


CHANGES: dict[str, tuple[Callable[[Clocks], None], int]] = {
    "time passes": (lambda clocks: clocks.advance(600.0), 3_000),
    "time passes, reboot": (lambda clocks: clocks.reboot(600.0), 3_000),
    "set back": (lambda clocks: setattr(clocks, "wall", clocks.wall - 7_200.0), 3_600),
    "set back, reboot": (lambda clocks: clocks.reboot(-7_200.0), 3_600),
    "set to 1970, reboot": (lambda clocks: clocks.reboot(-clocks.wall + 5.0), 3_600),
    "set forward": (lambda clocks: setattr(clocks, "wall", clocks.wall + 7_200.0), 3_600),
    "set a little": (lambda clocks: setattr(clocks, "wall", clocks.wall - 0.4), 3_600),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_stored_grows_older_by_what_has_passed(tmp_path: Path, clocks: Clocks, name: str) -> None:
    change, expected = CHANGES[name]
    stored(tmp_path, clocks.wall)
    change(clocks)
    assert left(tmp_path, clocks.wall) == {expected}
    clocks.advance(60.0)
    assert left(tmp_path, clocks.wall) == {expected - 60}


@pytest.mark.parametrize("step", [-7_200.0, 7_200.0])
def test_what_is_stored_after_a_step_lives_as_long_as_what_was_stored_before(
    tmp_path: Path, clocks: Clocks, step: float
) -> None:
    stored(tmp_path / "a", clocks.wall)
    clocks.wall += step
    store = Store(tmp_path / "a", reserve_bytes=0)
    message = Message(topic_address("b"), b"z", expires=clocks.wall + 100.0)
    store.append(store.log("queue", "r"), 0, [message], lambda outcome: None)
    store.close()
    clocks.wall -= step  # set right again
    store = Store(tmp_path / "a", reserve_bytes=0)
    found: list[Message] = []
    store.read_from(
        *(store.log("queue", "r"), 0, lambda read: found.extend(one for _, one, _ in read)),
        messages_max=10,
        bytes_max=1_000,
    )
    store.close()
    assert round(found[0].expires - clocks.wall) == 100
    assert left(tmp_path / "a", clocks.wall) == {3_600}


def test_a_repaired_store_continues(tmp_path: Path, clocks: Clocks) -> None:
    stored(tmp_path, clocks.wall)
    with_damage = connect(tmp_path)
    with_damage.execute("INSERT INTO things VALUES ('kind', 'key', 1, x'00')")
    with_damage.close()
    clocks.wall -= 7_200.0
    assert not repair(tmp_path)[0].is_intact
    assert left(tmp_path, clocks.wall) == {3_600}


@pytest.mark.parametrize("value", ['"of a newer gateway"', "{", '{"utc": 1.0}'])
def test_a_record_that_cannot_be_read_is_set_aside(tmp_path: Path, clocks: Clocks, value: str) -> None:
    stored(tmp_path, clocks.wall)
    connection = connect(tmp_path)
    connection.execute("UPDATE meta SET value = ? WHERE key = 'time'", (value,))
    connection.close()
    before = containment.counted["startup"]
    assert left(tmp_path, clocks.wall) == {3_600}
    assert containment.counted["startup"] == before + 1


def test_a_time_is_recorded_once_a_second(tmp_path: Path, clocks: Clocks) -> None:
    store = Store(tmp_path, reserve_bytes=0)
    committed = threading.Event()
    connection = connect(tmp_path)

    def recorded() -> str | None:
        row = connection.execute("SELECT value FROM meta WHERE key = 'time'").fetchone()
        return None if row is None else str(row[0])

    assert recorded() is None
    found = []
    store.start(lambda function: function())
    for number in range(3):
        message = Message(topic_address("a"), b"x")
        store.append(store.log("queue", "q"), number, [message], lambda outcome: committed.set())
        store.flush()
        assert committed.wait(60.0)
        committed.clear()
        found.append(recorded())
        clocks.advance(0.6)
    assert found[0] is not None
    assert found[0] == found[1] != found[2]
    connection.close()
    store.close()
