"""Contexts: the gateway that a command calls, and the credentials that it sends there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from gateway.cli.contexts import Context, read_context
from gateway.cli.exits import Exit
from gateway.errors import ConfigurationError
from gateway.settings import load_settings
from gateway.settings.sources import CLIENT_VARIABLES
from tests.cli.conftest import Run


class Server(HTTPServer):
    """Answers every request with an empty page, and notes the credentials."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        self.server.seen.append(self.headers["Authorization"])
        body = b'{"items": [], "total": 0, "next": null}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_variables_name_the_gateway_and_the_token(
    run: Run, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY_URL", server.url)
    monkeypatch.setenv("GATEWAY_TOKEN", "secret")
    assert run("routes", "list").out == "no rows found\n"
    assert server.seen == ["Bearer secret"]


def test_a_file_has_a_user_and_a_password_beside_it(
    run: Run, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "password", "hush\n")
    file = written(tmp_path / "ctx.yaml", f"url: {server.url}\nuser: ann\npassword_file: password\n")
    monkeypatch.setenv("GATEWAY_CONTEXT", str(file))
    run("links", "list")
    assert server.seen == ["Basic YW5uOmh1c2g="]


def test_options_come_before_variables_before_the_file(
    run: Run, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / "ctx.yaml", "url: http://127.0.0.1:1\ntoken: of-the-file\n")
    token = written(tmp_path / "token", "of-the-option")
    monkeypatch.setenv("GATEWAY_CONTEXT", str(file))
    monkeypatch.setenv("GATEWAY_URL", server.url)
    run("routes", "list", "--token-file", str(token))
    run("routes", "list", "--url", server.url)
    assert server.seen[0] == "Bearer of-the-option"
    assert server.seen[1] != "Bearer of-the-file", "it is for its own URL only"


def test_an_option_for_another_gateway_gets_no_credentials_of_the_file(
    run: Run, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / "ctx.yaml", "url: http://127.0.0.1:1\ntoken: secret\n")
    monkeypatch.setenv("GATEWAY_CONTEXT", str(file))
    run("routes", "list", "--url", server.url)
    assert "Bearer secret" not in server.seen


@pytest.mark.parametrize(
    "text, reason",
    [
        ("url: http://a\ntokenfile: x\n", ":2:1: tokenfile: unknown key; did you mean 'token_file'?"),
        ("url: 5\n", ":1:1: url: must be a text"),
        ("- a\n", ":1: a context must be a table of keys, such as `url: http://host:8080`"),
    ],
)
def test_a_faulty_file_is_said(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    file = written(tmp_path / "ctx.yaml", text)
    monkeypatch.setenv("GATEWAY_CONTEXT", str(file))
    ran = run("routes", "list")
    assert ran.code == Exit.CONFIGURATION
    assert reason.partition(": ")[2] in ran.err
    with pytest.raises(ConfigurationError) as caught:
        read_context()
    assert str(caught.value) == f"{file}{reason}"


def test_a_client_certificate_that_cannot_be_read_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_CERT_FILE", "/absent.pem")
    ran = run("routes", "list", "--url", "https://127.0.0.1:1")
    assert (ran.code, ran.err) == (
        Exit.CONFIGURATION,
        "error: /absent.pem: No such file or directory (invalid)\n",
    )


@pytest.mark.parametrize("url", ["http://h:port", "http://h:70000", "https://", "http://[h", "http://u:p@h"])
def test_an_address_that_leads_nowhere_is_a_wrong_argument(run: Run, url: str) -> None:
    ran = run("status", "--url", url)
    assert ran.code == Exit.USAGE
    assert "Invalid value for '--url': must " in ran.err


def test_the_gateway_itself_ignores_the_variables() -> None:
    assert {one.removeprefix("GATEWAY_").lower() for one in CLIENT_VARIABLES} == set(Context._fields)
    load_settings(None, dict.fromkeys((*CLIENT_VARIABLES, "GATEWAY_CONTEXT"), "x"))
