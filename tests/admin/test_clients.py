"""ConnectedClient clients over HTTP: who is shown, who is sent off, and who may ask."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from gateway.admin import ClientsApi, ConnectedClient
from gateway.admin.models import ConnectionRow
from tests.admin.served import serving

AT = "/api/v1/connections"
ROWS = (
    ("mqtt", "mqtt", "ann", "a", "10.0.0.1:1"),
    ("mqtt", "mqtt", "bob", "b", "10.0.0.1:2"),
    ("amqp091", "amqp091", "ann", "b", "10.0.0.2:1"),
    ("mqtt", "mqtt", "", "", "10.0.0.3:1"),
)


class Scene:
    """Four clients; `dismissed` are their addresses as they are sent off."""

    def __init__(self) -> None:
        self.dismissed: list[str] = []
        self.flushes = 0

    def connected(self) -> list[ConnectedClient]:
        return [ConnectedClient(*row, lambda address=row[4]: self.dismissed.append(address)) for row in ROWS]

    def flush(self) -> None:
        self.flushes += 1

    def serving(self) -> AbstractAsyncContextManager[httpx.AsyncClient]:
        return serving(ClientsApi(self.connected, self.flush))


@pytest.mark.parametrize(
    "query, connected, shown",
    [
        ({}, 4, ["10.0.0.1:1", "10.0.0.1:2", "10.0.0.2:1", "10.0.0.3:1"]),
        ({"count": "1"}, 4, ["10.0.0.1:1"]),
        ({"client": "ann"}, 2, ["10.0.0.1:1", "10.0.0.2:1"]),
        ({"sort": "client"}, 4, ["10.0.0.3:1", "10.0.0.1:1", "10.0.0.2:1", "10.0.0.1:2"]),
        ({"sort": "endpoint", "count": "2"}, 4, ["10.0.0.2:1", "10.0.0.1:1"]),
        ({"client": "ann", "endpoint": "mqtt"}, 1, ["10.0.0.1:1"]),
        ({"user": "b"}, 2, ["10.0.0.1:2", "10.0.0.2:1"]),
        ({"address": "10.0.0.9:9"}, 0, []),
    ],
)
async def test_who_is_connected(query: dict[str, str], connected: int, shown: list[str]) -> None:
    async with Scene().serving() as client:
        found = (await client.get(AT, params=query)).json()
        assert found["total"] == connected
        assert [one["address"] for one in found["items"]] == shown
        for one in found["items"]:
            assert set(one) == ConnectionRow.model_fields.keys()


@pytest.mark.parametrize("query", [{"count": "x"}, {"name": "ann"}])
async def test_a_question_that_is_none(query: dict[str, str]) -> None:
    async with Scene().serving() as client:
        assert (await client.get(AT, params=query)).status_code == 400


@pytest.mark.parametrize(
    "choice, dismissed",
    [
        ({"client": "ann"}, ["10.0.0.1:1", "10.0.0.2:1"]),
        ({"client": "ann", "endpoint": "amqp091"}, ["10.0.0.2:1"]),
        ({"user": "b", "client": "bob"}, ["10.0.0.1:2"]),
        ({"address": "10.0.0.3:1"}, ["10.0.0.3:1"]),
        ({"client": "eve"}, []),
    ],
)
async def test_the_chosen_are_disconnected(choice: dict[str, str], dismissed: list[str]) -> None:
    scene = Scene()
    async with scene.serving() as client:
        answer = await client.post(f"{AT}/disconnect", json=choice)
        assert answer.json() == {"disconnected": len(dismissed)}
    assert scene.dismissed == dismissed
    assert scene.flushes == 1


@pytest.mark.parametrize(
    "choice", [{}, [], {"endpoint": "mqtt"}, {"client": ""}, {"client": 1}, {"client": "ann", "all": True}]
)
async def test_a_choice_that_is_none(choice: Any) -> None:
    scene = Scene()
    async with scene.serving() as client:
        assert (await client.post(f"{AT}/disconnect", json=choice)).status_code == 400
    assert scene.dismissed == []


async def test_whoever_is_not_admitted_is_told_nothing() -> None:
    scene = Scene()
    stranger = {"Authorization": "Bearer wrong"}
    async with scene.serving() as client:
        assert (await client.get(AT, headers=stranger)).status_code == 401
        answer = await client.post(f"{AT}/disconnect", json={"client": "ann"}, headers=stranger)
        assert answer.status_code == 401
        assert (await client.get(f"{AT}/disconnect")).status_code == 405
    assert scene.dismissed == []
