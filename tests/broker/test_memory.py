"""The watermark: readings in, publishers that wait out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gateway.broker.memory import BEGUN_BYTES_MAX, BEGUN_SECS, LOW, RISE, SCARCE, TRIM_SECS, TURNS, Memory

MARK = 1_000


class Reading:
    """What the system says; how often it was asked, and told to trim."""

    def __init__(self) -> None:
        self.byte_count = 0
        self.asked = 0
        self.trimmed = 0
        self.gives_back = 0
        self.heard: list[bool] = []
        self.memory = Memory(MARK, self.read, trim=self.trim, changed=self.heard.append)

    def read(self) -> int:
        self.asked += 1
        return self.byte_count

    def trim(self) -> None:
        self.trimmed += 1
        self.byte_count -= self.gives_back

    def at(self, byte_count: float) -> Memory:
        self.byte_count = int(byte_count)
        self.memory.measure()
        return self.memory


class Client:
    """A connection that publishes; `consumes`: it must not be stopped."""

    def __init__(self, *, consumes: bool = False, begun_bytes: int = 0) -> None:
        self.consumes = consumes
        self.begun_bytes = begun_bytes
        self.gone = False
        self.holds = 0
        self.told: list[bool] = []

    def hold(self) -> Callable[[], None] | None:
        if self.consumes:
            return None
        self.holds += 1
        return self.release

    def release(self) -> None:
        self.holds -= 1

    def notify_memory(self, short: bool) -> None:
        self.told.append(short)

    def close_for_memory(self) -> None:
        self.gone = True


def test_it_is_short_above_the_mark_and_until_well_below_it() -> None:
    reading = Reading()
    steps = [MARK, MARK + 1, MARK, MARK * LOW, MARK * LOW - 1, MARK, MARK + 1]
    assert [reading.at(byte_count).short for byte_count in steps] == [
        False,
        True,
        True,
        True,
        False,
        False,
        True,
    ]
    assert reading.heard == [True, False, True]


def test_it_is_scarce_above_the_second_mark_only() -> None:
    reading = Reading()
    assert [
        reading.at(byte_count).is_scarce for byte_count in (MARK + 1, MARK * SCARCE, MARK * SCARCE + 1, MARK)
    ] == [
        *(False, False),
        *(True, False),
    ]


def test_a_publisher_is_stopped_once_told_once_and_goes_on() -> None:
    reading, client, other = Reading(), Client(), Client()
    memory = reading.at(MARK + 1)
    assert memory.admit(client, 3)
    assert memory.admit(client, 1)  # what had been read of it already
    assert (client.holds, client.told, other.told) == (1, [True], [])
    reading.at(MARK * SCARCE + 1)
    assert memory.admit(client, 1)
    reading.at(0)
    assert (client.holds, client.told, other.told) == (0, [True, False], [])
    reading.at(MARK + 1)
    assert (client.holds, client.told) == (0, [True, False])  # it has not published again


def test_whoever_must_not_be_stopped_goes_on_and_is_refused_when_it_is_scarce() -> None:
    reading, client = Reading(), Client(consumes=True)
    memory = reading.at(MARK + 1)
    assert memory.admit(client, 2)
    reading.at(MARK * SCARCE + 1)
    assert [memory.admit(client, 2), memory.admit(client, 5)] == [False, False]
    assert (memory.refused, client.told) == (7, [True])
    client.consumes = False  # it has cancelled its consumer: now it can be
    assert memory.admit(client, 1)
    reading.at(0)
    assert (client.holds, client.told) == (0, [True, False])


def test_a_publisher_that_has_gone_is_forgotten() -> None:
    reading, client = Reading(), Client()
    reading.at(MARK + 1).admit(client, 1)
    reading.memory.forget(client)
    reading.memory.forget(client)
    reading.at(0)
    assert (client.holds, client.told) == (1, [True])


def test_one_that_fails_keeps_nobody_else_waiting() -> None:
    class Broken(Client):
        def release(self) -> None:
            raise RuntimeError

    reading, client = Reading(), Client()
    reading.at(MARK + 1).admit(Broken(), 1)
    reading.memory.admit(client, 1)
    reading.at(0)
    assert client.holds == 0


def test_it_is_read_in_some_wake_ups_and_at_every_tick() -> None:
    reading = Reading()
    for _ in range(3 * TURNS):
        reading.memory.count_turn()
    assert reading.asked == 3
    reading.memory.tick(0.0)
    assert reading.asked == 4


def test_the_allocator_is_asked_only_while_memory_is_short_and_less_often_when_that_is_of_no_use() -> None:
    reading = Reading()
    memory = reading.memory
    memory.tick(100.0)
    reading.byte_count = MARK + 1
    asked = []
    for quarter in range(4 * 40):
        before = reading.trimmed
        memory.tick(101.0 + quarter / 4)
        if reading.trimmed > before:
            asked.append(quarter / 4)
    # The first tick found it short; after each vain attempt the wait is doubled, up to a limit.
    assert asked == [0.25, *(2.25 + 4 * number for number in range(10))]
    reading.gives_back = MARK // 2
    reading.byte_count = 2 * MARK
    memory.tick(200.0)
    reading.byte_count = 2 * MARK
    memory.tick(200.0 + TRIM_SECS)
    assert reading.trimmed == len(asked) + 2
    reading.byte_count = 0
    memory.tick(300.0)
    reading.byte_count = 0
    memory.tick(310.0)
    assert reading.trimmed == len(asked) + 3  # what was read last was still above the mark


@pytest.mark.parametrize("short", [False, True])
def test_what_is_shown(short: bool) -> None:
    reading = Reading()
    reading.at(MARK + 1 if short else MARK - 1)
    gauges = {name: read() for name, read in reading.memory.gauges().items()}
    assert gauges == {
        "gateway_memory_blocked": short,
        "gateway_memory_bytes": reading.byte_count,
        "gateway_memory_limit_bytes": MARK,
    }


def test_whoever_has_begun_much_is_a_publisher_and_is_let_go_when_memory_stays_short() -> None:
    reading = Reading()
    little, much = Client(begun_bytes=BEGUN_BYTES_MAX), Client(begun_bytes=BEGUN_BYTES_MAX + 1)
    finishes = Client(begun_bytes=BEGUN_BYTES_MAX + 1)
    reading.memory.connections = lambda: [little, much, finishes]
    reading.byte_count = MARK + 1
    reading.memory.tick(100.0)
    assert [one.holds for one in (little, much, finishes)] == [0, 1, 1]
    finishes.begun_bytes = 0
    reading.memory.tick(100.0 + BEGUN_SECS - 0.1)
    assert [one.gone for one in (little, much, finishes)] == [False] * 3
    reading.memory.tick(100.0 + BEGUN_SECS)
    assert [one.gone for one in (little, much, finishes)] == [False, True, False]
    reading.at(0)
    other = Client(begun_bytes=BEGUN_BYTES_MAX + 1)
    reading.memory.connections = lambda: [other]
    reading.byte_count = MARK + 1
    reading.memory.tick(200.0)
    assert (other.holds, other.gone) == (1, False)  # its time begins anew


def test_it_is_let_go_at_once_when_it_must_not_be_stopped_and_memory_is_scarce() -> None:
    reading, client = Reading(), Client(consumes=True, begun_bytes=BEGUN_BYTES_MAX + 1)
    reading.memory.connections = lambda: [client]
    reading.at(MARK + 1)
    assert not client.gone
    reading.at(MARK * SCARCE + 1)
    assert client.gone


def test_those_that_have_begun_are_looked_for_as_memory_rises() -> None:
    reading, client = Reading(), Client()
    reading.memory.connections = lambda: [client]
    reading.at(MARK + 1)
    client.begun_bytes = BEGUN_BYTES_MAX + 1
    reading.at(MARK + 2)
    assert client.holds == 0
    reading.at(MARK * 1.1)
    assert client.holds == 1


def test_it_says_that_memory_rises_once_for_each_step() -> None:
    reading = Reading()
    step = int(MARK * RISE) + 1
    risen: list[int] = []
    reading.memory.set_rise_callback(lambda: risen.append(reading.byte_count))
    for byte_count in (step, step + 1, 2 * step, 10 * step, step, step + 1, 2 * step):
        reading.at(byte_count)
    assert risen == [step, 2 * step, 10 * step, 2 * step]
