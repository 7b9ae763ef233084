"""Dead letters over HTTP: what is shown, what is done, and who may."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import trio

from gateway import clock
from gateway.admin import LettersApi
from gateway.broker.dead_letters import DeadLetters
from gateway.broker.dead_letters.redrive import Redriving
from gateway.model.message import Sender
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.properties import Properties, property_set, string
from gateway.model.times import WallTime
from tests.admin import served
from tests.broker.parts import amqp, mqtt, unreadable
from tests.broker.test_dead_letters import Bench
from tests.store.parts import opened

AT = "/api/v1/dead-letters"
REFUSED = Outcome(Verdict.REJECTED, Reason.TARGET_REFUSED, "no")


def serving(
    bench: Bench, *, redrive_secs: float = 5.0, read_secs: float = 5.0
) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    redriving = Redriving(bench.dispatcher, bench.letters)
    return served.serving(
        LettersApi(bench.letters, redriving, lambda: None, redrive_secs=redrive_secs, read_secs=read_secs)
    )


def filled() -> Bench:
    """Three letters: m1 and m2 are of the route `up` (m2 too large to be shown whole), m3 of none."""
    bench = Bench()
    said = property_set(Properties(message_id="7", headers=(("own", string("x")),)))
    sender = Sender("mqtt", "device", "ann", "10.0.0.1:9")
    bench.letters.add([mqtt("in/1", b"one", properties=said, sender=sender)], "up", REFUSED)
    bench.letters.add([amqp(b"\xff" * 2_000, "2", "e")], "up", REFUSED, crossed=True)
    bench.letters.add([mqtt("x", b"three")], "", REFUSED)
    return bench


async def test_the_newest_are_listed() -> None:
    async with serving(filled()) as client:
        found = (await client.get(AT)).json()["items"]
        assert [one["id"] for one in found] == ["m3", "m2", "m1"]
        assert [one["id"] for one in (await client.get(AT, params={"count": 1})).json()["items"]] == ["m3"]
        assert [one["id"] for one in (await client.get(AT, params={"route": "up"})).json()["items"]] == [
            "m2",
            "m1",
        ]
        assert (await client.get(AT, params={"count": "x"})).status_code == 400
    one = found[2]
    time = one.pop("time")
    assert time.endswith("+00:00")
    assert one == {
        "id": "m1",
        "route": "up",
        "reason": "target_refused",
        "text": "no",
        "protocol": "mqtt",
        "address": "in/1",
        "crossed": False,
        "sender": {"endpoint": "mqtt", "client": "device", "user": "ann", "address": "10.0.0.1:9"},
        "body_bytes": 3,
        "body": "one",
    }
    assert (found[1]["address"], found[1]["body_bytes"], len(found[1]["body"])) == ("e:2", 2_000, 1_024)


async def test_one_is_shown_whole() -> None:
    bench = filled()
    bench.letters.add([mqtt(properties=unreadable())], "up", REFUSED)
    async with serving(bench) as client:
        one = (await client.get(f"{AT}/m1")).json()
        assert (one["body"], one["body_encoding"], one["assurance"]) == ("one", "utf-8", 1)
        assert one["properties"]["message_id"] == "7"
        assert "own" in str(one["properties"]["headers"])
        large = (await client.get(f"{AT}/m2")).json()
        assert (large["body_encoding"], len(large["body"])) == ("base64", 2_668)
        assert (await client.get(f"{AT}/m4")).json()["properties"] == {"unreadable": "malformed"}
        answer = await client.get(f"{AT}/m9")
        assert (answer.status_code, answer.json()["detail"]) == (404, "no dead letter m9")


@pytest.mark.parametrize(
    "choice, purged, left",
    [
        ({"ids": ["m1", "m9", "m1"]}, 1, ["m3", "m2"]),
        ({"route": "up"}, 2, ["m3"]),
        ({"route": ""}, 1, ["m2", "m1"]),
        ({"all": True}, 3, []),
    ],
)
async def test_the_chosen_are_purged(choice: dict[str, Any], purged: int, left: list[str]) -> None:
    async with serving(filled()) as client:
        answer = (await client.post(f"{AT}/purge", json=choice)).json()
        assert answer == {"purged": purged, "waiting": [], "unknown": ["m9"] if "ids" in choice else []}
        assert [one["id"] for one in (await client.get(AT)).json()["items"]] == left


async def test_what_is_on_its_way_is_not_purged() -> None:
    bench = filled()
    async with serving(bench, redrive_secs=0.01) as client:
        answer = (await client.post(f"{AT}/redrive", json={"ids": ["m2"]})).json()
        assert answer["waiting"] == ["m2"]
        answer = (await client.post(f"{AT}/purge", json={"all": True})).json()
        assert answer == {"purged": 2, "waiting": ["m2"], "unknown": []}
        assert [one["id"] for one in (await client.get(AT)).json()["items"]] == ["m2"]
        bench.erp.parts.pop().settle(REFUSED)
        answer = (await client.post(f"{AT}/purge", json={"ids": ["m2"]})).json()
        assert answer == {"purged": 1, "waiting": [], "unknown": []}


async def test_what_the_disk_refuses_to_forget_is_not_purged(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = filled()
    full = Outcome(Verdict.RELEASED, Reason.STORE, "no space")
    monkeypatch.setattr(bench.letters, "purge", lambda _, then: then(full, []))
    async with serving(bench) as client:
        answer = await client.post(f"{AT}/purge", json={"all": True})
        assert answer.status_code == 503
        assert answer.json()["detail"] == "the deletion of the dead letters is not on disk yet: no space"


async def test_a_disk_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = filled()
    monkeypatch.setattr(bench.letters, "newest", lambda _count, _then, *, route: None)
    async with serving(bench, read_secs=0.01) as client:
        answer = await client.get(AT)
        assert answer.status_code == 503
        assert answer.json()["detail"] == "the store of dead letters has not responded for 0.01 s"


def stored_bench(folder: Path) -> Bench:
    """Letters 1 to 9 of 1 000 bytes in a store, the even ones of the route `up`; and m1, which is older."""
    with closing(opened(folder)) as store:
        letters = DeadLetters(store=store)
        for number in range(1, 10):
            letters.add([mqtt("in/1", bytes(1_000))], "odd" if number % 2 else "up", REFUSED)
    return Bench(letters=DeadLetters(store=opened(folder)))


async def test_large_letters_are_read_in_small_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.broker.dead_letters.letters.READ_BYTES_MAX", 2_000)
    bench = stored_bench(tmp_path)
    store = bench.letters._store
    assert store is not None
    bench.erp.outcome = ACCEPTED
    read = Mock(wraps=store._database.dead_letters)
    monkeypatch.setattr(store._database, "dead_letters", read)
    store.start(trio.lowlevel.current_trio_token().run_sync_soon)
    with closing(store):
        async with serving(bench) as client:
            for choice, expected in (({}, range(9, 0, -1)), ({"route": "up"}, range(8, 0, -2))):
                found: list[str] = []
                page: dict[str, Any] = {"next": ""}
                while page["next"] is not None:
                    page = (await client.get(AT, params={**choice, "after": page["next"], "count": 5})).json()
                    assert len(page["items"]) <= 2
                    found += [one["id"] for one in page["items"]]
                assert found == [str(id) for id in expected]
            answer = (await client.post(f"{AT}/redrive", json={"ids": ["2", "77", "4", "6", "78"]})).json()
            assert answer == {"redriven": 3, "left": [], "waiting": [], "untried": 0, "unknown": ["77", "78"]}
            assert len(bench.erp.messages) == 3
            reads = read.call_count
            answer = (await client.post(f"{AT}/purge", json={"all": True})).json()
            assert answer == {"purged": 6, "waiting": [], "unknown": []}
            assert read.call_count == reads, "no message is read to delete it"
    assert read.call_count > 9


async def test_letters_that_were_larger_when_they_were_stored_hide_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As is a message that is stored without its properties, because these cannot be encoded."""
    monkeypatch.setattr("gateway.broker.dead_letters.letters.READ_BYTES_MAX", 5_000)
    bench = stored_bench(tmp_path)
    store = bench.letters._store
    assert store is not None
    store._database.connection.execute("UPDATE dead_letters SET octets = 4000")
    with closing(store):
        async with serving(bench) as client:
            page = (await client.get(AT, params={"route": "up"})).json()
            assert ([one["id"] for one in page["items"]], page["next"]) == (["8", "6", "4", "2"], None)


async def test_memory_is_not_listed_before_newer_letters_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.broker.dead_letters.letters.READ_BYTES_MAX", 2_000)
    bench = stored_bench(tmp_path)
    assert bench.letters._store is not None
    with monkeypatch.context() as patch:
        patch.setattr(clock, "utc", lambda: WallTime(1.0))
        bench.letters.add([mqtt("x")], "", Outcome(Verdict.REJECTED, Reason.NO_ROUTE, "nobody"))
    with closing(bench.letters._store):
        async with serving(bench) as client:
            page = (await client.get(AT)).json()
            assert ([one["id"] for one in page["items"]], page["next"]) == (["9", "8"], "8")
            page = (await client.get(AT, params={"after": "1"})).json()
            assert ([one["id"] for one in page["items"]], page["next"]) == (["m1"], None)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[",
        b"[]",
        b"{}",
        b'{"ids": [1]}',
        b'{"ids": "m1"}',
        b'{"all": false}',
        b'{"route": 1}',
        b'{"ids": [], "all": true}',
        b'{"everything": true}',
    ],
    ids=lambda body: body[:30].decode(),
)
@pytest.mark.parametrize("what", ["purge", "redrive"])
async def test_a_choice_that_is_none_does_nothing(what: str, body: bytes) -> None:
    async with serving(filled()) as client:
        assert (await client.post(f"{AT}/{what}", content=body)).status_code == 400
        assert len((await client.get(AT)).json()["items"]) == 3


async def test_the_accepted_are_gone_and_the_others_say_why() -> None:
    bench = filled()
    bench.erp.outcome = ACCEPTED
    async with serving(bench) as client:
        answer = (await client.post(f"{AT}/redrive", json={"ids": ["m1", "m2", "m3", "m9"]})).json()
        (left,) = answer.pop("left")
        assert answer == {"redriven": 2, "waiting": [], "untried": 0, "unknown": ["m9"]}
        assert (left["id"], left["reason"]) == ("m3", "no_route")
        assert [one["id"] for one in (await client.get(AT)).json()["items"]] == ["m3"]
    assert [message.body[:3] for message in bench.erp.messages] == [b"one", b"\xff\xff\xff"]


async def test_what_takes_too_long_is_told_and_taken_off_the_list_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.admin.dead_letters.REDRIVEN_AT_ONCE", 1)
    bench = filled()
    async with serving(bench, redrive_secs=0.01) as client:
        answer = (await client.post(f"{AT}/redrive", json={"route": "up"})).json()
        assert answer == {"redriven": 0, "left": [], "waiting": ["m1"], "untried": 1, "unknown": []}
        assert len((await client.get(AT)).json()["items"]) == 3
        bench.erp.parts[0].settle(ACCEPTED)
        assert [one["id"] for one in (await client.get(AT)).json()["items"]] == ["m3", "m2"]
