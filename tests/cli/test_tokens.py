"""`gateway tokens`, and where the command line finds a token of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.access.console_tokens import left_tokens
from gateway.cli.exits import Exit
from gateway.cli.welcome import welcome
from gateway.settings import Http, StoreSettings
from tests.cli.conftest import Run
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Running]:
    http = Http(host=LOOPBACK, port=0)
    with running(settings_of(http=http, store=StoreSettings(path=tmp_path / "data"))) as started:
        yield started


def url(gateway: Running) -> str:
    return f"http://{LOOPBACK}:{gateway.gateway.http_port}"


def test_a_token_is_made_used_listed_and_revoked(run: Run, gateway: Running, tmp_path: Path) -> None:
    at = ("--url", url(gateway))
    made = run("tokens", "make", "ci", "--days", "2", *at)
    assert made.code == 0
    file = tmp_path / "token"
    file.write_text(made.out)
    listed = run("tokens", "list", *at)
    assert [line.split()[:2] for line in listed.out.splitlines()[1:]] == [
        ["administrator", "write"],
        ["ci", "read"],
    ]
    assert made.out.strip() not in listed.out
    mine = ("--token-file", str(file), *at)
    assert run("clients", "list", *mine).code == 0
    refused = run("tokens", "make", "other", "--write", *mine)
    assert (refused.code, "403" in refused.err) == (Exit.FAILED, True)
    again = run("tokens", "make", "ci", *at)
    assert (again.code, "a token with the name" in again.err) == (Exit.FAILED, True)
    unnamed = run("tokens", "make", "", *at)
    assert (unnamed.code, "a token's name has" in unnamed.err) == (Exit.USAGE, True)
    assert run("tokens", "revoke", "ci", *at).out == "1 revoked\n"
    assert run("tokens", "revoke", "ci", *at).code == Exit.FAILED
    gone = run("clients", "list", *mine)
    assert (gone.code, "401" in gone.err) == (Exit.FAILED, True)


def test_what_the_first_start_has_written_is_found_by_the_configuration(
    run: Run, gateway: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = ("--url", url(gateway))
    for left in left_tokens(gateway.gateway.http_port):
        left.unlink()
    monkeypatch.setenv("GATEWAY_HTTP__PORT", str(gateway.gateway.http_port))
    monkeypatch.setenv("GATEWAY_STORE__PATH", str(tmp_path / "elsewhere"))
    nothing = run("clients", "list", *at)
    assert (nothing.code, "authentication required" in nothing.err) == (Exit.FAILED, True)
    monkeypatch.setenv("GATEWAY_STORE__PATH", str(tmp_path / "data"))
    assert run("clients", "list", *at).code == 0
    monkeypatch.setenv("GATEWAY_HTTP__PORT", "8080")
    assert run("clients", "list", *at).code == Exit.FAILED, "it is shown to its own gateway alone"


@pytest.mark.parametrize(
    "arguments",
    [
        ("clients", "list", "--token-file", "FOLDER/nope"),
        ("tap", "--token-file", "FOLDER/nope"),
        ("store", "check", "--store", "FOLDER/nope"),
        ("store", "repair", "--store", "FOLDER/nope"),
        ("journal", "export", "--folder", "FOLDER", "--parquet", "FOLDER/out", "--columns", "time,nope"),
        ("journal", "tail", "--folder", "FOLDER/nope"),
        ("tokens", "make", "", "--url", "URL"),
        ("retained", "delete", "--topic", "a/#/b", "--url", "URL"),
    ],
    ids=" ".join,
)
def test_wrong_arguments_end_with_their_exit_code(
    run: Run, gateway: Running, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    given = [one.replace("FOLDER", str(tmp_path)).replace("URL", url(gateway)) for one in arguments]
    assert run(*given).code == Exit.USAGE


def test_localhost_is_where_nobody_else_can_listen(run: Run, gateway: Running) -> None:
    from gateway.cli.api_client import _loopback_url

    port = gateway.gateway.http_port
    assert _loopback_url(f"http://localhost:{port}/x") == f"http://{LOOPBACK}:{port}/x"
    for other in (f"https://localhost:{port}", f"http://gateway.example:{port}", "http://localhost:1"):
        assert _loopback_url(other) == other
    assert run("clients", "list", "--url", f"http://localhost:{port}").code == 0


def test_the_command_lines_token_ends_with_the_process(gateway: Running) -> None:
    port = gateway.gateway.http_port
    (left,) = left_tokens(port)
    gateway.stop()
    assert not left.exists()


def test_a_token_is_shown_to_no_gateway_elsewhere(run: Run, gateway: Running) -> None:
    from gateway.cli.api_client import _credentials
    from gateway.cli.contexts import Context

    assert list(_credentials(f"http://192.0.2.1:{gateway.gateway.http_port}", None, Context())) == [""]
    assert len(list(_credentials(url(gateway), None, Context()))) > 1


def test_the_link_of_the_welcome_logs_in_once(gateway: Running) -> None:
    said = gateway.ask(lambda: welcome(gateway.gateway, with_link=True))
    code = said.partition("login#code=")[2].split()[0]
    with httpx.Client(base_url=url(gateway), trust_env=False) as client:
        assert client.get("/api/v1/status").status_code == 401
        assert client.post("/api/v1/login", json={"code": code}).status_code == 200
        assert client.get("/api/v1/status").status_code == 200
        assert client.post("/api/v1/login", json={"code": code}).status_code == 401
    assert "code=" not in gateway.ask(lambda: welcome(gateway.gateway)), "a log is no place for it"
