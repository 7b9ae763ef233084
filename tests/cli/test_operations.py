"""Commands that are derived from the table of operations: what they request, print and return."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from docs import generate
from gateway import operations
from gateway.admin import models
from gateway.cli import clients, queues, retained, sessions
from gateway.cli import operations as derived
from gateway.cli.exits import Exit
from gateway.operations import every_operation
from tests.cli.conftest import Run

DONE = {
    "redriven": 1,
    "left": [],
    "waiting": [],
    "unknown": [],
    "untried": 0,
    "removed": 1,
    "purged": 1,
    "disconnected": 1,
    "messages": 0,
    "in_use": 0,
    "leaving": 0,
    "items": [],
    "total": 0,
    "next": None,
}


class Gateway:
    """What is requested, and a response that fits every command."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.response: dict[str, Any] = dict(DONE)

    def ask(self, _url: str, _token_file: object, path: str, choice: Any = None) -> dict[str, Any]:
        self.requests.append((path.removeprefix(operations.PREFIX), choice))
        return self.response


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Gateway:
    made = Gateway()
    monkeypatch.setattr(derived, "call_gateway", made.ask)
    return made


@pytest.mark.parametrize(
    "line, path, choice",
    [
        ("sessions list", "/sessions?count=100", None),
        ("sessions list --not-in-use -n 5", "/sessions?in_use=false&count=5", None),
        (
            "sessions list --in-use --exact --after %",
            "/sessions?in_use=true&exact=true&after=%25&count=100",
            None,
        ),
        ("queues list --not-empty --sort messages", "/queues?empty=false&sort=messages&count=100", None),
        ("queues list --idle-longer-than 2m", "/queues?idle_longer_than=120.0&sort=name&count=100", None),
        ("clients list --user ann", "/connections?user=ann&sort=address&count=100", None),
        (
            "clients disconnect --user u --endpoint e",
            "/connections/disconnect",
            {"user": "u", "endpoint": "e"},
        ),
        ("sessions delete --client *", "/sessions/remove", {"client": "*"}),
        ("sessions delete --all --yes --in-use", "/sessions/remove", {"in_use": True, "all": True}),
        ("queues delete --not-empty --exact", "/queues/remove", {"empty": False, "exact": True}),
        ("queues delete --virtual-host /", "/queues/remove", {"virtual_host": "/"}),
        ("queues purge --protocol amqp091", "/queues/purge", {"protocol": "amqp091"}),
        ("queues purge --idle-longer-than 90", "/queues/purge", {"idle_longer_than": 90.0}),
        ("retained delete --topic a/+ --user u", "/retained/remove", {"topic": "a/+", "user": "u"}),
        ("deadletters redrive a b", "/dead-letters/redrive", {"ids": ["a", "b"]}),
        ("deadletters purge --all", "/dead-letters/purge", {"all": True}),
        ("deadletters purge --route r", "/dead-letters/purge", {"route": "r"}),
        ("retained delete --client=", "/retained/remove", {"client": ""}),
    ],
)
def test_a_command_requests_what_was_chosen(
    run: Run, gateway: Gateway, line: str, path: str, choice: Any
) -> None:
    ran = run(*line.split())
    assert (ran.code, ran.err) == (Exit.OK, "")
    assert gateway.requests == [(path, choice)]


@pytest.mark.parametrize(
    "line",
    [
        "sessions delete",
        "sessions delete --in-use",
        "sessions delete --all",
        "sessions delete --client a --all --yes",
        "queues delete --exact",
        "queues delete --kind exchange",
        "queues delete --protocol mqtt",
        "queues purge --empty",
        "queues purge --idle-longer-than soon",
        "clients disconnect",
        "clients disconnect --endpoint e",
        "clients list --after a",
        "retained delete --yes",
        "deadletters purge",
        "deadletters redrive a --all",
    ],
)
def test_a_choice_that_is_none_is_a_wrong_argument(run: Run, gateway: Gateway, line: str) -> None:
    assert run(*line.split()).code == Exit.USAGE
    assert gateway.requests == []


@pytest.mark.parametrize(
    "line, word",
    [
        ("sessions delete --client a", "removed"),
        ("queues delete --queue a", "removed"),
        ("queues purge --queue a", "purged"),
        ("retained delete --topic a", "removed"),
        ("clients disconnect --user a", "disconnected"),
    ],
)
def test_nothing_that_was_done_is_a_failure(run: Run, gateway: Gateway, line: str, word: str) -> None:
    gateway.response[word] = 0
    for form in ((), ("--json",)):
        ran = run(*line.split(), *form)
        assert (ran.code, "0" in ran.out) == (Exit.FAILED, True)


def test_short_pages_of_dead_letters_are_joined(
    run: Run, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [{"total": 9, "items": [{"id": id}], "next": id} for id in ("9", "8", "7")]
    urls: list[str] = []

    def ask(_url: str, _token_file: object, url: str) -> object:
        urls.append(url)
        return pages[len(urls) - 1]

    monkeypatch.setattr("gateway.cli.deadletters.call_gateway", ask)
    ran = run("deadletters", "list", "--limit", "3", "--json")
    assert orjson.loads(ran.out) == {
        "total": 9,
        "items": [{"id": "9"}, {"id": "8"}, {"id": "7"}],
        "next": "7",
    }
    assert [url.partition("?")[2] for url in urls] == ["count=3", "count=2&after=9", "count=1&after=8"]


def test_dead_letters_that_are_on_their_way_are_named_by_a_purge(run: Run, gateway: Gateway) -> None:
    gateway.response["waiting"] = ["m2"]
    ran = run("deadletters", "purge", "--all")
    assert (ran.code, ran.out) == (Exit.FAILED, "1 purged, 1 not\n")
    assert ran.err == "m2: being redriven, not accepted yet\n"


@pytest.mark.parametrize("command", ["sessions", "queues", "retained", "clients"])
def test_the_end_of_a_list_is_told(run: Run, gateway: Gateway, command: str) -> None:
    assert run(command, "list").out == "no rows found\n"
    gateway.response["total"] = 3
    assert run(command, "list").out == "no more rows\n"


@pytest.mark.parametrize(
    "columns, row",
    [
        (queues.columns, models.QueueRow),
        (sessions.columns, models.SessionRow),
        (retained.columns, models.RetainedRow),
        (clients.columns, models.ConnectionRow),
    ],
)
def test_columns_are_of_the_row_that_openapi_describes(
    columns: derived.Columns, row: type[models.Model]
) -> None:
    one = dict.fromkeys(row.model_fields)
    for cell in columns.values():
        cell(one)


def test_every_row_of_the_table_is_served() -> None:
    rows = every_operation()
    table = {(one.url.replace(":path}", "}"), one.method) for one in rows if one is not operations.STATUS}
    assert table == {(path, method) for path, method, _ in generate._operations()}
    assert len(rows) == len(table) + 1, "no row is there twice"
