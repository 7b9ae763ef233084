"""The last hour of queues and clients, which is stored for the pages of single objects."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from gateway.admin import ClientsApi, ConnectedClient, object_history
from gateway.admin.object_history import STEP_SECS, ObjectHistory
from tests.admin.served import serving


class Bag:
    """Three objects with a level and a count each."""

    def __init__(self) -> None:
        self.numbers = {"a": (3, 600), "b": (0, 0)}
        self.dropped: list[str] = []
        self.now = 0.0
        self.history: ObjectHistory[str] = ObjectHistory(
            lambda: list(self.numbers),
            lambda name: name,
            lambda name: self.numbers[name],
            levels=("ready",),
            counts=("in",),
            dropped=self.dropped.append,
        )

    async def step(self) -> None:
        """Read all objects, STEP_SECS after the time before."""
        self.now += STEP_SECS
        await self.history.step(self.now)

    def values(self, name: str) -> Any:
        shown = self.history.shown(name)
        return None if shown is None else shown["values"]


async def test_levels_are_stored_and_counts_become_rates() -> None:
    bag = Bag()
    await bag.step()
    assert bag.values("a") is None, "one reading has no rate"
    bag.numbers |= {"a": (5, 660), "c": (1, 1)}
    await bag.step()
    bag.numbers["a"] = (0, 30)
    await bag.step()
    assert bag.values("a") == {"ready": [5.0, 0.0], "in": [60 / STEP_SECS, 30 / STEP_SECS]}
    assert bag.values("b") == {"ready": [0.0, 0.0], "in": [0.0, 0.0]}
    assert bag.values("c") == {"ready": [1.0], "in": [0.0]}


async def test_an_object_that_is_gone_is_forgotten() -> None:
    bag = Bag()
    await bag.step()
    await bag.step()
    del bag.numbers["a"]
    await bag.step()
    assert (bag.values("a"), bag.dropped) == (None, ["a"])
    bag.numbers["a"] = (9, 9)
    await bag.step()
    await bag.step()
    assert bag.values("a") == {"ready": [9.0], "in": [0.0]}


async def test_an_hour_and_so_many_objects_are_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_history, "STEPS", 3)
    monkeypatch.setattr(object_history, "OBJECTS_MAX", 1)
    bag = Bag()
    for number in range(6):
        bag.numbers["a"] = (number, 0)
        await bag.step()
    assert bag.values("a")["ready"] == [3.0, 4.0, 5.0]
    assert bag.values("b") is None
    del bag.numbers["a"]
    for _ in range(3):
        await bag.step()
    assert bag.values("b") is not None, "there is room again"


class Streamed:
    """What counts the bytes of one client: as a stream does, while it is watched."""

    def __init__(self) -> None:
        self.read = self.written = self.watchers = 0

    def watch(self) -> Streamed:
        self.watchers += 1
        return self

    def unwatch(self, _: Streamed) -> None:
        self.watchers -= 1


async def test_bytes_of_a_client_are_counted_until_it_is_gone() -> None:
    first: Any = Streamed()
    present = [
        ConnectedClient("mqtt", "mqtt", "ann", "a", "10.0.0.1:1", lambda: None, stream=first, opened_at=1.0)
    ]
    api, times = ClientsApi(lambda: list(present), lambda: None), count(0, STEP_SECS)
    async with serving(api) as client:

        async def history(**words: str) -> Any:
            (row,) = (await client.get("/api/v1/connections", params=words)).json()["items"]
            return row["history"]

        await api.history.step(next(times))
        assert await history(history="true") is None
        first.read, first.written = 30 * STEP_SECS, 60 * STEP_SECS
        await api.history.step(next(times))
        assert await history() is None
        found = await history(history="true")
        assert found["step_secs"] == STEP_SECS
        assert (found["values"]["bytes_in"], found["values"]["bytes_out"]) == ([30.0], [60.0])
        assert first.watchers == 1
        second: Any = Streamed()
        present[0] = present[0]._replace(stream=second, opened_at=2.0)
        await api.history.step(next(times))
        assert await history(history="true") is None, "another connection from the same port"
        assert (first.watchers, second.watchers) == (0, 1)
