"""A server that knows the users: what it is asked, and what its answers, or their absence, come to."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from gateway import clock
from gateway.access.backends import Denial
from gateway.access.credentials import Credentials
from gateway.access.http_backend import HttpUsers, read_answer
from gateway.access.http_client import BackendHttpClient, BackendResponseError
from gateway.access.principal import Principal
from gateway.settings.identity import HttpBackend
from tests.access.servers import Served, served

PLACE = "192.0.2.7:1"


def backend(server: Served, **options: Any) -> HttpUsers:
    given = HttpBackend(backend="http", user_url=server.url, **options)
    return HttpUsers(given, BackendHttpClient(given.timeout_secs, connections_max=given.connections_max))


async def ask(backend: HttpUsers, user: str = "ann", password: bytes = b"right", client: str = "") -> object:
    """Who it is, or why not."""
    said = Credentials(user, password, PLACE, client=client)
    found = backend.authenticate_nowait(said) or await backend.authenticate(said)
    return found.name if isinstance(found, Principal) else found


def knows(said: dict[str, str]) -> str:
    """One user, with one password."""
    return "allow" if (said["username"], said["password"]) == ("ann", "right") else "deny"


@pytest.mark.parametrize(
    "body, expected",
    [
        (b"allow", ()),
        (b"ALLOW\n", ()),
        (b"allow administrator  management", ("administrator", "management")),
        (b"deny", Denial.WRONG),
        (b"Deny because of the weather", Denial.WRONG),
        (b"allowed", None),
        (b"", None),
        (b"<html>allow</html>", None),
        (b"\xff\xfe", None),
    ],
)
def test_answers(body: bytes, expected: object) -> None:
    if expected is None:
        with pytest.raises(BackendResponseError):
            read_answer("ann", body)
        return
    found = read_answer("ann", body)
    assert (found.roles if isinstance(found, Principal) else found) == expected


@pytest.mark.parametrize("method", ["get", "post"])
async def test_it_is_asked_in_rabbitmqs_words(method: Literal["get", "post"]) -> None:
    with served() as server:
        server.answer = knows
        one = backend(server, method=method)
        assert await ask(one, client="c&1") == "ann"
        assert await ask(one, password="w\u00f6rd & =".encode()) is Denial.WRONG
        assert await ask(one, "a/b\udcff", b"\xff") is Denial.WRONG
        assert server.methods == [method.upper()] * 3
        assert server.asked == [
            {"username": "ann", "password": "right", "client_id": "c&1"},
            {"username": "ann", "password": "w\u00f6rd & ="},
            {"username": "a/b?", "password": "\ufffd"},
        ]


async def test_an_address_with_a_query_of_its_own_keeps_it() -> None:
    with served() as server:
        server.answer = knows
        given = HttpBackend(backend="http", user_url=f"{server.url}?key=1", method="get")
        assert await ask(HttpUsers(given, BackendHttpClient(1.0))) == "ann"
        assert server.asked == [{"key": "1", "username": "ann", "password": "right"}]


async def test_answers_are_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_000.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    with served() as server:
        server.answer = knows
        one = backend(server, cache_secs=60.0, cache_entries_max=5)
        for _ in range(3):
            assert await ask(one) == "ann"
            assert await ask(one, password=b"wrong") is Denial.WRONG
            assert await ask(one, client="another") == "ann"
        assert len(server.asked) == 3
        now[0] += 6.0
        assert await ask(one, password=b"wrong") is Denial.WRONG
        assert await ask(one) == "ann"
        assert len(server.asked) == 4, "who was denied may be allowed soon"
        now[0] += 54.0
        assert await ask(one) == "ann"
        assert len(server.asked) == 5
        for number in range(20):
            assert await ask(one, password=b"%d" % number) is Denial.WRONG
        assert (len(one._denied), len(one._allowed)) == (5, 2)


async def test_nothing_is_remembered_where_that_is_off() -> None:
    with served() as server:
        server.answer = knows
        one = backend(server, cache_secs=0.0)
        for _ in range(3):
            assert await ask(one) == "ann"
        assert len(server.asked) == 3


async def test_of_many_with_the_same_words_one_asks() -> None:
    with served() as server:
        server.answer = knows
        server.gate.clear()
        one = backend(server)
        found: list[object] = []

        async def log_in(scope: trio.CancelScope) -> None:
            with scope:
                found.append(await ask(one))

        scopes = [trio.CancelScope() for _ in range(20)]
        async with trio.open_nursery() as nursery:
            for scope in scopes:
                nursery.start_soon(log_in, scope)
            await trio.testing.wait_all_tasks_blocked()
            scopes[0].cancel()  # the one that asks: another takes over
            await trio.testing.wait_all_tasks_blocked()
            server.gate.set()
        assert found == ["ann"] * 19
        assert len(server.asked) <= 2


@pytest.mark.parametrize("fault", ["status", "words", "silence", "nobody"])
async def test_without_an_answer_everybody_is_refused_and_it_is_said(fault: str) -> None:
    with served() as server, capture_logs() as lines:
        server.answer = knows
        one = backend(server, timeout_secs=0.3, cache_secs=60.0)
        assert await ask(one) == "ann"
        if fault == "status":
            server.status = 503
        elif fault == "words":
            server.answer = lambda said: "perhaps"
        elif fault == "silence":
            server.gate.clear()
        else:
            server.stop()
        assert await ask(one, "bob") is Denial.UNAVAILABLE
        assert await ask(one) == "ann", "what is remembered holds"
        assert (one.failures, lines[0]["log_level"]) == (1, "error")
        assert "right" not in str(lines)


async def test_it_says_when_it_is_there_again() -> None:
    with served() as server, capture_logs() as lines:
        server.answer = knows
        server.status = 500
        one = backend(server)
        assert await ask(one) is Denial.UNAVAILABLE
        server.status = 200
        assert await ask(one, "bob") is Denial.WRONG
        assert [line["log_level"] for line in lines] == ["error", "info"]


async def test_more_than_may_wait_are_told_so() -> None:
    with served() as server:
        server.answer = knows
        server.gate.clear()
        one = backend(server, connections_max=1, waiting_max=2)
        found: list[object] = []

        async def log_in(number: int) -> None:
            found.append(await ask(one, password=b"%d" % number))

        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(log_in, number)
            await trio.testing.wait_all_tasks_blocked()
            assert found == [Denial.BUSY] * 7
            server.gate.set()
        assert found[7:] == [Denial.WRONG] * 3


async def test_a_login_without_a_name_is_not_asked_about() -> None:
    with served() as server:
        one = backend(server)
        assert one.authenticate_nowait(Credentials("", b"x", PLACE)) is Denial.WRONG
        assert server.asked == []
