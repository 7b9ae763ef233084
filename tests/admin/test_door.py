"""The console's door: who gets in by what, what a session may, and that no address opens anything."""

from __future__ import annotations

import json
import os
import ssl
import stat
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import trio
from structlog.testing import capture_logs

from gateway import clock
from gateway.access import console_tokens
from gateway.access.authentication import Access
from gateway.access.console import NOTHING, ConsoleRights, console_rights
from gateway.access.console_sessions import LINK_SECS, LINKS_MAX, ConsoleSessions
from gateway.access.console_tokens import (
    EXPIRED_SECS,
    TOKENS_MAX,
    ConsoleTokens,
    Maker,
    TokenRefused,
    leave_token,
    left_tokens,
)
from gateway.access.keys import KeysFile
from gateway.access.principal import Principal
from gateway.access.tokens import Tokens
from gateway.admin import AdminState, Admission, ClientsApi, Readiness, serve
from gateway.admin.admission import target_of
from gateway.errors import ConfigurationError
from gateway.model.shares import UserShares
from gateway.settings import Http, HttpTls, LoginSettings
from gateway.settings.access import Role
from gateway.settings.identity import JwtBackend
from gateway.settings.tree import HealthSettings
from tests.access.servers import Signer, certificate, jwks
from tests.passwords import hashed
from tests.telemetry.samples import metrics_with_traffic

LOOPBACK = "127.0.0.1"
HASH = hashed("right")
SIGNER = Signer("one")
ROLES = {
    "operator": Role(console="write"),
    "viewer": Role(console="read"),
    "device": Role(console="none"),
}
RIGHTS = {"ann": "write", "vera": "read", "press": "none"}
Json = dict[str, str]


def three() -> UserShares:
    return UserShares("console sessions", count_max=3)


class Scene:
    """A console with users, tokens and a key."""

    def __init__(self, tmp_path: Path, *, scrape: Path | None = None, token_file: Path | None = None) -> None:
        keys = tmp_path / "keys.json"
        keys.write_bytes(jwks(SIGNER))
        self.access = Access(
            dict.fromkeys(RIGHTS, HASH), logins=LoginSettings(delay_secs=0.0, failures_max=5)
        )
        jwt = JwtBackend(backend="jwt", keys_file=keys, roles_claim="roles")
        self.access.backends = [self.access.users, Tokens(jwt, KeysFile(keys, symmetric=False))]
        self.tokens = ConsoleTokens()
        self.sessions = ConsoleSessions(three(), idle_secs=100.0, longest_secs=1_000.0)
        self.admission = Admission(
            self.tokens, self.sessions, access=self.access, rights_of=self.rights_of, token_file=token_file
        )
        clients = ClientsApi(list, lambda: None)
        self.state = AdminState(
            metrics_with_traffic(), Readiness(), self.admission, (clients,), scrape_token_file=scrape
        )

    @staticmethod
    def rights_of(principal: Principal) -> ConsoleRights:
        own = {"ann": ("operator",), "vera": ("viewer",), "press": ("device",)}.get(principal.name, ())
        return console_rights(Principal(principal.name, roles=(*own, *principal.roles)), ROLES)

    @asynccontextmanager
    async def serving(self, http: Http | None = None, **client: Any) -> AsyncIterator[httpx.AsyncClient]:
        given = http or Http(host=LOOPBACK, port=0)
        async with trio.open_nursery() as nursery:
            port = await nursery.start(serve, given, self.state)
            scheme = "http" if given.tls is None else "https"
            url = f"{scheme}://{LOOPBACK}:{port}"
            async with httpx.AsyncClient(base_url=url, trust_env=False, **client) as opened:
                yield opened
            nursery.cancel_scope.cancel()


def bearing(token: str) -> Json:
    return {"Authorization": f"Bearer {token}"}


async def log_in(client: httpx.AsyncClient, **said: str) -> httpx.Response:
    return await client.post("/api/v1/login", json=said)


CLOSED = [
    ("GET", "/api/v1/status"),
    ("GET", "/api/v1/connections"),
    ("POST", "/api/v1/connections/disconnect"),
    ("GET", "/api/v1/session"),
    ("POST", "/api/v1/logout"),
    ("GET", "/api/v1/tokens"),
    ("POST", "/api/v1/tokens/make"),
    ("POST", "/api/v1/tokens/revoke"),
]
STRANGERS = [
    {},
    {"Host": "localhost"},
    {"X-Forwarded-For": LOOPBACK},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer wrong"},
    {"Authorization": "Basic YW5uOndyb25n"},
    {"Authorization": "Bearer s\u00e9cret".encode("latin-1")},
    {"Cookie": "gateway_session=wrong"},
    {"Cookie": "gateway_session="},
]


@pytest.mark.parametrize("headers", STRANGERS, ids=str)
async def test_no_address_opens_anything(tmp_path: Path, headers: dict[str, Any]) -> None:
    async with Scene(tmp_path).serving() as client:
        for method, path in CLOSED:
            answer = await client.request(method, path, headers=headers, json={})
            assert (answer.status_code, path) == (401, path)
            assert answer.json()["detail"]
        for path in ("/livez", "/readyz", "/metrics", "/login"):
            assert (await client.get(path, headers=headers)).status_code == 200
        page = await client.get("/", headers=headers)
        assert (page.status_code, page.headers["location"]) == (303, "login")


async def test_every_route_below_api_is_closed(tmp_path: Path) -> None:
    """Also one that will be added: whatever is not named here answers 401."""
    from gateway.admin.server import application

    scene = Scene(tmp_path)
    paths = {(method, route.path) for route in application(scene.state).routes for method in route.methods}  # type: ignore[attr-defined]
    open_to_all = {"/metrics", "/login", "/api/v1/login", "/", "/console/{name:path}"}
    open_to_all |= {name + end for name in ("/livez", "/readyz", "/health") for end in ("", "/")}
    async with scene.serving() as client:
        for method, path in sorted(paths):
            if path not in open_to_all and method != "HEAD":
                answer = await client.request(method, path.replace("{id}", "1"), json={})
                assert (answer.status_code, path) == (401, path)


@pytest.mark.parametrize("user", RIGHTS)
async def test_what_users_may(tmp_path: Path, user: str) -> None:
    right = RIGHTS[user]
    async with Scene(tmp_path).serving() as client:
        answer = await log_in(client, user=user, password="right")
        if right == "none":
            assert answer.status_code == 403
            assert "set-cookie" not in answer.headers
            return
        assert (answer.status_code, answer.json()["right"]) == (200, right)
        cookie = answer.headers["set-cookie"].lower()
        assert all(word in cookie for word in ("httponly", "samesite=strict", "path=/"))
        assert (await client.get("/")).status_code == 200
        assert (await client.get("/api/v1/status")).status_code == 200
        session = (await client.get("/api/v1/session")).json()
        assert (session["user"], session["right"]) == (user, right)
        shown = {"X-CSRF-Token": session["csrf"]}
        allowed = 200 if right == "write" else 403
        disconnect = "/api/v1/connections/disconnect"
        assert (await client.post(disconnect, json={"user": "x"}, headers=shown)).status_code == allowed
        for forged in ({}, {"X-CSRF-Token": ""}, {"X-CSRF-Token": "wrong"}):
            assert (await client.post(disconnect, json={"user": "x"}, headers=forged)).status_code == 403
        assert (await client.post("/api/v1/logout")).status_code == 403
        assert (await client.post("/api/v1/logout", headers=shown)).status_code == 200
        assert (await client.get("/api/v1/status")).status_code == 401


@pytest.mark.parametrize(
    "said",
    [
        {"user": "ann", "password": "wrong"},
        {"user": "nobody", "password": "right"},
        {"user": "", "password": "right"},
        {"user": "guest", "password": "guest"},
        {"token": "wrong"},
        {"token": "expired"},
        {"code": "wrong"},
    ],
    ids=str,
)
async def test_logins_that_are_refused(tmp_path: Path, said: Json) -> None:
    if said.get("token") == "expired":
        said = {"token": SIGNER.token("ann", secs=-60)}
    async with Scene(tmp_path).serving() as client:
        answer = await log_in(client, **said)
        assert answer.status_code == 401
        assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "content, kind, code",
    [
        (b'{"user": "ann", "password": "right"}', "text/plain", 415),
        (b"user=ann&password=right", "application/x-www-form-urlencoded", 415),
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b'{"user": "ann"}', "application/json", 400),
        (b'{"user": "ann", "password": 7}', "application/json", 400),
        (b'{"token": "' + b"x" * 20_000 + b'"}', "application/json", 400),
    ],
)
async def test_a_login_that_is_none(tmp_path: Path, content: bytes, kind: str, code: int) -> None:
    async with Scene(tmp_path).serving() as client:
        answer = await client.post("/api/v1/login", content=content, headers={"Content-Type": kind})
        assert answer.status_code == code


async def test_guesses_are_counted_also_from_this_machine(tmp_path: Path) -> None:
    async with Scene(tmp_path).serving() as client:
        told = [(await log_in(client, user="ann", password=f"{n}")).json()["detail"] for n in range(7)]
        assert [text.startswith("too many") for text in told] == [False] * 5 + [True] * 2
        assert (await log_in(client, user="ann", password="right")).status_code == 401
        assert (await log_in(client, user="vera", password="right")).status_code == 200


async def test_tokens_are_made_listed_and_revoked(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    root = scene.tokens.make("root", "write", by="test")
    async with scene.serving(headers=bearing(root)) as client:
        made = await client.post("/api/v1/tokens/make", json={"name": "ci", "console": "read", "days": 1})
        text = made.json()["token"]
        ended = await client.post("/api/v1/tokens/make", json={"name": "short", "days": 1e-9})
        listed = (await client.get("/api/v1/tokens")).json()["tokens"]
        assert [(one["name"], one["console"], one["by"]) for one in listed] == [
            ("root", "write", "test"),
            ("ci", "read", "root"),
            ("short", "read", "root"),
        ]
        assert text not in str(listed)
        reads = bearing(text)
        assert (await client.get("/api/v1/status", headers=reads)).status_code == 200
        assert (
            await client.post("/api/v1/tokens/make", json={"name": "x"}, headers=reads)
        ).status_code == 403
        assert (await log_in(client, token=text)).status_code == 401, "it cannot log in"
        assert (await client.get("/api/v1/status", headers=bearing(ended.json()["token"]))).status_code == 401
        for bad in (
            {},
            {"name": ""},
            {"name": "y", "console": "all"},
            {"name": "z", "days": -1},
        ):
            assert (await client.post("/api/v1/tokens/make", json=bad)).status_code == 400
        again = await client.post("/api/v1/tokens/make", json={"name": "ci"})
        assert (again.status_code, "with the name" in again.json()["detail"]) == (409, True)
        assert (await client.post("/api/v1/tokens/revoke", json={"name": "ci"})).json() == {"revoked": 1}
        assert (await client.post("/api/v1/tokens/revoke", json={"name": "ci"})).json() == {"revoked": 0}
        assert (await client.get("/api/v1/status", headers=reads)).status_code == 401
        client.headers.pop("Authorization")
        assert (await log_in(client, token=root)).status_code == 200
        assert (await client.get("/api/v1/status")).status_code == 200
        scene.tokens.revoke("root")
        assert (await client.get("/api/v1/status")).status_code == 401, "what the token began ends with it"


@pytest.mark.parametrize(
    "roles, reads, writes",
    [(["operator"], 200, 200), (["viewer"], 200, 403), (["device"], 403, 403), ([], 403, 403)],
)
async def test_tokens_of_others(tmp_path: Path, roles: list[str], reads: int, writes: int) -> None:
    async with Scene(tmp_path).serving() as client:
        shown = bearing(SIGNER.token("somebody", roles=roles))
        assert (await client.get("/api/v1/status", headers=shown)).status_code == reads
        answer = await client.post("/api/v1/connections/disconnect", json={"user": "x"}, headers=shown)
        assert answer.status_code == writes
        assert (
            await client.get("/api/v1/status", headers=bearing(SIGNER.token(secs=-60)))
        ).status_code == 401


async def test_the_secret_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    scene = Scene(tmp_path, token_file=file)
    async with scene.serving() as client:
        for content, shown, code in (
            (None, "secret", 401),
            ("", "x", 401),
            ("secret\n", "secre", 401),
            ("secret\n", "secret", 200),
            ("other\n", "secret", 401),
        ):
            if content is not None:
                file.write_text(content)
            assert (await client.get("/api/v1/status", headers=bearing(shown))).status_code == code


async def test_a_link_logs_in_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    code = scene.sessions.make_link()
    async with scene.serving() as client:
        assert (await log_in(client, code=code)).json()["right"] == "write"
        assert (await client.get("/api/v1/status")).status_code == 200
        client.cookies.clear()
        assert (await log_in(client, code=code)).status_code == 401


async def test_a_session_ends_with_its_user_and_with_its_rights(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    async with scene.serving() as client:
        await log_in(client, user="ann", password="right")
        assert (await client.get("/api/v1/status")).status_code == 200
        scene.access.users.replace({"vera": HASH}, {})
        assert (await client.get("/api/v1/status")).status_code == 401
        scene.access.users.replace(dict.fromkeys(RIGHTS, HASH), {})
        await log_in(client, user="ann", password="right")
        scene.admission.rights_of = lambda _: NOTHING
        assert (await client.get("/api/v1/status")).status_code == 403


async def test_metrics_may_need_a_token(tmp_path: Path) -> None:
    file = tmp_path / "scrape"
    file.write_text("scraper\n")
    scene = Scene(tmp_path, scrape=file)
    root = scene.tokens.make("root", "read", by="test")
    async with scene.serving() as client:
        codes = [
            (await client.get("/metrics", headers=bearing(one))).status_code for one in ("scraper", root, "x")
        ]
        assert codes == [200, 200, 401]
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/api/v1/status", headers=bearing("scraper"))).status_code == 401


async def test_health_on_a_port_of_its_own_and_tls(tmp_path: Path) -> None:
    own = certificate(tmp_path, "gateway")
    tls = HttpTls(cert_file=own[0], key_file=own[1])
    scene = Scene(tmp_path)
    root = scene.tokens.make("root", "read", by="test")
    http = Http(host=LOOPBACK, port=0, tls=tls, health=HealthSettings(host=LOOPBACK, port=0, tls=tls))
    context = ssl.create_default_context(cafile=own[0])
    async with scene.serving(http, verify=context) as client:
        for path in ("/livez", "/readyz", "/metrics"):
            assert (await client.get(path)).status_code == 404
            there = f"https://{LOOPBACK}:{scene.state.health_port}{path}"
            assert (await client.get(there)).status_code == 200
        there = f"https://{LOOPBACK}:{scene.state.health_port}/api/v1/status"
        assert (await client.get(there, headers=bearing(root))).status_code == 404
        assert (await client.get("/api/v1/status", headers=bearing(root))).status_code == 200
        answer = await log_in(client, user="ann", password="right")
        assert "secure" in answer.headers["set-cookie"].lower()
        async with await trio.open_tcp_stream(LOOPBACK, scene.state.health_port) as stream:
            await stream.send_all(b"GET /livez HTTP/1.1\r\n\r\n")
            with trio.fail_after(10):
                said = b""
                try:
                    async for data in stream:
                        said += data
                except trio.BrokenResourceError:
                    pass
            assert b"200" not in said
        assert (await client.get("/api/v1/status", headers=bearing(root))).status_code == 200


# Sessions and tokens by themselves


def test_sessions_end_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now, wall = [1_000.0], [1_800_000_000.0]
    monkeypatch.setattr(clock, "unix_time", lambda: wall[0])
    sessions = ConsoleSessions(three(), idle_secs=100.0, longest_secs=250.0, clock=lambda: now[0])
    first, _ = sessions.begin(Principal("a"))
    now[0] += 99.0
    assert sessions.find(first) is not None
    now[0] += 99.0
    assert sessions.find(first) is not None
    now[0] += 99.0
    assert sessions.find(first) is None, "it is as old as one may be"
    short, _ = sessions.begin(Principal("b", expires=wall[0] + 5.0))
    idle, _ = sessions.begin(Principal("c"))
    now[0] += 5.0
    wall[0] += 5.0
    assert sessions.find(short) is None
    wall[0] -= 86_400.0
    now[0] += 95.0
    assert sessions.find(idle) is None
    several = [sessions.begin(Principal(str(n)))[0] for n in range(3)]
    assert sessions.find(several[0]) is not None
    sessions.begin(Principal("x"))
    assert [sessions.find(one) is not None for one in several] == [True, False, True]
    assert len(sessions) == 3


def test_links_end_and_are_bounded() -> None:
    now = [1_000.0]
    sessions = ConsoleSessions(three(), idle_secs=1.0, longest_secs=1.0, clock=lambda: now[0])
    old = sessions.make_link()
    now[0] += LINK_SECS
    assert not sessions.use_link(old)
    first = sessions.make_link()
    for _ in range(LINKS_MAX):
        last = sessions.make_link()
    assert (sessions.use_link(first), sessions.use_link(last), sessions.use_link(last)) == (
        False,
        True,
        False,
    )


def test_the_first_start_leaves_a_token_that_nobody_else_may_read(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "console"
    text = _administrators(ConsoleTokens(folder), folder)
    for path in (folder, folder / "tokens.json", folder / "administrator.token"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    assert text not in (folder / "tokens.json").read_text()
    again = ConsoleTokens(folder)
    assert again.find(text) is not None
    ci = again.make("ci", "read", by="me")
    assert again.revoke("administrator")
    (folder / "administrator.token").unlink()
    third = ConsoleTokens(folder)
    assert (third.find(text), third.find(ci) is not None) == (None, True)
    assert not (folder / "administrator.token").exists(), "it is made at the first start alone"


def _administrators(tokens: ConsoleTokens, folder: Path) -> str:
    text = (folder / "administrator.token").read_text().strip()
    found = tokens.find(text)
    assert found is not None
    assert (found.name, found.console) == ("administrator", "write")
    return text


@pytest.mark.parametrize("content", ["", "[]", '{"tokens": [1]}', '{"tokens": [{"name": "x"}]}', "{"])
def test_a_file_of_tokens_that_cannot_be_read_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokens.json").write_text(content)
    with pytest.raises(ConfigurationError, match="tokens cannot be used"):
        ConsoleTokens(tmp_path)


def test_a_token_with_properties_of_a_newer_gateway_is_not_valid_but_stays(tmp_path: Path) -> None:
    """An older gateway starts after a rollback, and grants nothing that it cannot judge."""
    tokens = ConsoleTokens(tmp_path)
    limited, other = (tokens.make(name, "write", by="me") for name in ("limited", "other"))
    file = tmp_path / "tokens.json"
    stored = orjson.loads(file.read_bytes())
    for one in stored["tokens"][1:]:
        one["only"] = ["queues"]
    file.write_bytes(orjson.dumps(stored))
    with capture_logs() as lines:
        older = ConsoleTokens(tmp_path)
    event = "console tokens of a newer gateway not valid here"
    assert [(line["event"], line["tokens"]) for line in lines] == [(event, 2)]
    assert older.find(limited) is None
    assert older.revoke("other")
    assert not older.revoke("other")
    older.make("ci", "read", by="me")
    names = {one["name"]: one.get("only") for one in orjson.loads(file.read_bytes())["tokens"]}
    assert names == {"administrator": None, "ci": None, "limited": ["queues"]}
    assert tokens.find(other) is not None


def test_there_is_a_most_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_tokens, "TOKENS_MAX", 3)
    assert TOKENS_MAX > 3
    tokens = ConsoleTokens()
    for number in range(2):
        tokens.make(str(number), "read", by="me")
    tokens.make("over", "read", by="me", expires=time.time() - EXPIRED_SECS - 1)
    tokens.make("takes its place", "read", by="me")
    with pytest.raises(TokenRefused, match="the maximum of 3"):
        tokens.make("another", "read", by="me")
    for bad in ("", "x" * 101, "a\nb"):
        with pytest.raises(TokenRefused, match="characters"):
            tokens.make(bad, "read", by="me")


def test_a_clock_that_was_ahead_has_deleted_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = ConsoleTokens(tmp_path)
    end = time.time() + 60
    text = tokens.make("ci", "read", by="me", expires=end)
    tokens.make("other", "read", by="another", expires=end, maker=Maker("another", "users", (), ""))
    with monkeypatch.context() as ahead:
        ahead.setattr(clock, "unix_time", lambda: end + 10 * 86_400)
        assert tokens.find(text) is None
        newer = tokens.make("ci", "read", by="me")
        for maker in (None, Maker("another", "users", (), "")):
            with pytest.raises(TokenRefused, match="with the name 'ci'"):
                tokens.make("ci", "read", by="me", maker=maker)
        with pytest.raises(TokenRefused, match="with the name 'other'"):
            tokens.make("other", "read", by="me")
    for those in (tokens, ConsoleTokens(tmp_path)):
        assert those.find(text) is not None
        assert those.find(newer) is not None
    assert tokens.revoke("ci")
    assert tokens.find(text) is None
    assert tokens.find(newer) is None


def test_what_cannot_be_kept_is_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = ConsoleTokens(tmp_path)

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(console_tokens, "write_private_file", full)
    with pytest.raises(OSError, match="No space"):
        tokens.make("ci", "read", by="me")
    with pytest.raises(OSError, match="No space"):
        tokens.revoke("administrator")
    assert [token.name for token in tokens.all()] == ["administrator"]


def test_the_command_lines_token_is_left_where_nobody_else_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(console_tokens.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "run").mkdir(mode=0o700)
    left = leave_token(8080, "secret")
    assert left == tmp_path / "run" / "gateway" / "8080.token"
    assert stat.S_IMODE(left.stat().st_mode) == 0o600
    assert (left_tokens(8080), left_tokens(8081)) == ([left], [])
    left.parent.chmod(0o755)
    assert left_tokens(8080) == [], "others may have put something there"
    with capture_logs():
        other = leave_token(8080, "secret")
    assert other == tmp_path / f"gateway-{os.geteuid()}" / "8080.token"
    other.parent.chmod(0o777)
    assert leave_token(8080, "secret") is None


@pytest.mark.parametrize(
    "choice, told",
    [
        (None, ""),
        ([1], ""),
        ({"client": "a", "in_use": True}, "client=a in_use=True"),
        ({"ids": ["1", "2"]}, "ids=2 items"),
        ({"topic": "a", "body": "secret"}, "topic=a body=6 characters"),
        (
            {"routing_key": "k", "payload": "secret", "properties": {"a": 1}},
            "routing_key=k payload=6 characters properties=1 items",
        ),
        ({str(n): n for n in range(99)}, " ".join(f"{n}={n}" for n in range(10))),
    ],
)
def test_what_the_audit_log_is_told_of_a_choice(choice: Any, told: str) -> None:
    assert target_of(choice) == told


async def test_who_changed_something_stands_in_the_audit_log(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    root = scene.tokens.make("root", "write", by="test")
    code = scene.sessions.make_link()
    with capture_logs() as lines:
        async with scene.serving() as client:
            await client.post("/api/v1/connections/disconnect", json={"user": "eve"}, headers=bearing(root))
            made = await client.post("/api/v1/tokens/make", json={"name": "ci"}, headers=bearing(root))
            await log_in(client, user="ann", password="right")
            await log_in(client, user="ann", password="guess-7")
            await log_in(client, code=code)
            session = (await client.get("/api/v1/session")).json()
            await client.post("/api/v1/logout", headers={"X-CSRF-Token": session["csrf"]})
            await client.get("/api/v1/status", headers=bearing("wrong"))
    told = [line for line in lines if line["event"] == "audit"]
    assert [line["audit"] for line in told] == [
        "administered",
        "administered",
        "logged_in",
        "refused",
        "logged_in",
        "logged_out",
        "refused",
    ]
    first = told[0]
    assert (first["user"], first["credential"], first["action"]) == (
        "root",
        "token root",
        "/api/v1/connections/disconnect",
    )
    assert (first["target"], first["count"], first["status"]) == ("user=eve", 0, 200)
    assert first["remote"].startswith(LOOPBACK)
    secrets = [root, made.json()["token"], "guess-7", code, session["csrf"]]
    text = json.dumps(told, default=str)
    assert [secret for secret in secrets if secret in text] == []


def test_where_nothing_can_be_written_there_is_no_token_for_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nowhere() -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(console_tokens.tempfile, "gettempdir", nowhere)
    assert leave_token(8080, "secret") is None
    assert left_tokens(8080) == []
