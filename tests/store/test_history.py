"""Any history of appends, settlements, drops and values leaves what a model of it has."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.store.index import Log
from gateway.store.store import Store
from tests.store.parts import Opened, accepted, content, messages, opened


class Model:
    """The same as lists and dictionaries."""

    def __init__(self) -> None:
        self.logs: dict[str, dict[int, bytes]] = {}
        self.next: dict[str, int] = {}
        self.things: dict[str, bytes] = {}


def act(store: Store, model: Model, rng: random.Random) -> None:
    name = rng.choice("pqr")
    chance = rng.random()
    log: Log = store.log("queue", name)
    held = model.logs.setdefault(name, {})
    if chance < 0.35:
        first = model.next.get(name, 0) + rng.choice([0, 0, 0, 5])
        filled = rng.choice([0, 0, 100, 30_000])  # of 3 and more the last are too large for the database
        bodies = [b"%d" % rng.randrange(1000) + bytes(filled) for _ in range(rng.choice([1, 3, 40, 1200]))]
        store.append(log, first, messages(*bodies), accepted)
        held.update(enumerate(bodies, first))
        model.next[name] = first + len(bodies)
    elif chance < 0.8 and held:
        positions = sorted(held)
        some = rng.choice(
            [positions[: rng.randrange(len(positions) + 1)], rng.sample(positions, len(positions) // 3)]
        )
        store.settle(log, some)
        for position in some:
            del held[position]
    elif chance < 0.82:
        store.drop(log)
        del model.logs[name]
        model.next.pop(name, None)
    elif chance < 0.95:
        key = rng.choice(["a", "ab", "b"])
        value = b"%d" % rng.randrange(1000)
        store.put("kind", key, value)
        model.things[key] = value
    else:
        prefix = rng.choice(["a", "b", ""])
        store.delete_all("kind", prefix)
        model.things = {key: value for key, value in model.things.items() if not key.startswith(prefix)}


@pytest.mark.needs("time")
@given(st.integers(0, 2**32))
@settings(max_examples=25)
def test_any_history_leaves_what_it_should(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("store")
    model = Model()
    for _ in range(3):
        with Opened(folder) as one:
            for _ in range(rng.randrange(40)):
                act(one.store, model, rng)
                if rng.random() < 0.5:
                    one.store.flush()
                if rng.random() < 0.1:
                    one.commit()
        again = opened(folder)
        assert {log.name: dict(content(again, log)) for log in again.logs()} == model.logs
        assert all(content(again, log) == sorted(content(again, log)) for log in again.logs())
        assert dict(again.records("kind")) == model.things
        again.close()
