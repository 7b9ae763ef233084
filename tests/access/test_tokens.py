"""Tokens: which of them are believed, and what they say."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from gateway.access import keys as keys_module
from gateway.access import tokens as tokens_module
from gateway.access.backends import Denial
from gateway.access.credentials import Credentials
from gateway.access.http_client import BackendHttpClient
from gateway.access.keys import KeysFile, KeysUrl, parse_jwks, parse_keys
from gateway.access.principal import Principal
from gateway.access.tokens import TOKEN_BYTES_MAX, Tokens
from gateway.errors import ConfigurationError
from gateway.settings.identity import JwtBackend
from tests.access.servers import AUDIENCE, ISSUER, Served, Signer, jwks, served

ONE, TWO, CURVE = Signer("one"), Signer("two"), Signer("curve", "ES256")
NAMELESS = Signer(None)
STRANGER = Signer("one")
SECRET = "a secret of thirty-two bytes or more"


def said(token: str | bytes, user: str = "whoever") -> Credentials:
    return Credentials(user, token if isinstance(token, bytes) else token.encode(), "192.0.2.7:1")


def tokens(tmp_path: Path, *signers: Signer, **options: Any) -> Tokens:
    """The back end with these keys in a file."""
    path = tmp_path / "keys.json"
    path.write_bytes(jwks(*(signers or (ONE, CURVE))))
    given = JwtBackend(backend="jwt", keys_file=path, **({"issuer": ISSUER, "audience": AUDIENCE} | options))
    return Tokens(given, KeysFile(path, symmetric=False))


def forged(**head: Any) -> str:
    """A token with this head and no signature."""
    parts = [json.dumps(part).encode() for part in ({"typ": "JWT", **head}, {"sub": "x", "exp": 9e9})]
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts) + "."


def with_public_key_as_secret() -> str:
    """The oldest trick: a public key used as the secret of HS256."""
    claims = {"sub": "x", "exp": time.time() + 60, "iss": ISSUER, "aud": AUDIENCE}
    head = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"one"}').rstrip(b"=")
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=")
    signature = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256).sign(
        head + b"." + body, ONE.pem()
    )
    return b".".join((head, body, base64.urlsafe_b64encode(signature).rstrip(b"="))).decode()


def rows() -> dict[str, tuple[str | bytes, object]]:
    """Made when they are needed: they last a minute."""
    return {
        "right": (ONE.token(), "device"),
        "right, another kind of key": (CURVE.token(), "device"),
        "a name that is odd": (ONE.token("p/+# \u00e9"), "p/+# \u00e9"),
        "expired": (ONE.token(secs=-60), Denial.EXPIRED),
        "expired, within the leeway": (ONE.token(secs=-5), "device"),
        "not yet": (ONE.token(nbf=time.time() + 60), Denial.WRONG),
        "without an end": (ONE.token(secs=None), Denial.WRONG),
        "an end that is no number": (ONE.token(exp="tomorrow"), Denial.WRONG),
        "an end beyond all time": (ONE.token(exp=10**400), Denial.WRONG),
        "another issuer": (ONE.token(iss="https://elsewhere"), Denial.WRONG),
        "for others": (ONE.token(aud="others"), Denial.WRONG),
        "for several": (ONE.token(aud=["others", AUDIENCE]), "device"),
        "without a name": (ONE.token(None), Denial.WRONG),
        "an empty name": (ONE.token(""), Denial.WRONG),
        "a name that is none": (ONE.token(None, sub=["x"]), Denial.WRONG),
        "a name that moves the cursor": (ONE.token("a\nb"), Denial.WRONG),
        "a long name": (ONE.token("x" * 257), Denial.WRONG),
        "signed by a stranger": (STRANGER.token(), Denial.WRONG),
        "a key that is not known": (TWO.token(), Denial.WRONG),
        "no signature": (forged(alg="none"), Denial.WRONG),
        "no algorithm": (forged(), Denial.WRONG),
        "an algorithm that is none": (forged(alg=["RS256"]), Denial.WRONG),
        "a key's name that is none": (forged(alg="RS256", kid={"a": 1}), Denial.WRONG),
        "the public key as a secret": (with_public_key_as_secret(), Denial.WRONG),
        "another algorithm than the key's": (
            jwt.encode({"sub": "x"}, ONE.key, algorithm="PS256", headers={"kid": "one"}),
            Denial.WRONG,
        ),
        "cut": (ONE.token()[:-9], Denial.WRONG),
        "a password": ("right", Denial.WRONG),
        "two points": ("ey..", Denial.WRONG),
        "nothing": ("", Denial.WRONG),
        "larger than any": (ONE.token(more="x" * TOKEN_BYTES_MAX), Denial.WRONG),
        "no text": (b"ey\xff.\xfe.\xfd", Denial.WRONG),
    }


@pytest.mark.parametrize("row", list(rows()))
def test_which_tokens_are_believed(tmp_path: Path, row: str) -> None:
    token, expected = rows()[row]
    found = tokens(tmp_path).authenticate_nowait(said(token))
    assert (found.name if isinstance(found, Principal) else found) == expected


def test_what_a_token_says(tmp_path: Path) -> None:
    backend = tokens(
        tmp_path,
        user_claim="profile.name",
        roles_claim="realm_access.roles",
        scope_prefix="gw.",
        fields={"tenant": "https://example.com/tenant", "line": "line", "odd": "odd", "flag": "flag"},
    )
    end = time.time() + 60
    token = ONE.token(
        exp=end,
        profile={"name": "ann"},
        realm_access={"roles": ["a", 7, "b", ""]},
        scope="gw.read:*/* write:x/y gw.configure:v/n",
        line=7,
        odd=["x"],
        flag=True,
        **{"https://example.com/tenant": "acme"},
    )
    found = backend.authenticate_nowait(said(token))
    assert isinstance(found, Principal)
    assert (found.name, found.roles, found.backend) == ("ann", ("a", "b"), "jwt")
    assert found.scopes == ("read:*/*", "configure:v/n")
    assert found.fields == {"tenant": "acme", "line": "7"}
    assert found.expires == pytest.approx(end + 10.0, abs=0.01)


def test_scopes_may_be_a_list_and_there_is_a_most(tmp_path: Path) -> None:
    found = tokens(tmp_path).authenticate_nowait(said(ONE.token(scope=["read:a/b"] * 1000)))
    assert isinstance(found, Principal)
    assert len(found.scopes) == 256


def test_a_key_without_a_name_is_tried(tmp_path: Path) -> None:
    backend = tokens(tmp_path, Signer(None), NAMELESS, ONE)
    assert isinstance(backend.authenticate_nowait(said(NAMELESS.token())), Principal)
    assert isinstance(backend.authenticate_nowait(said(ONE.token())), Principal)
    assert backend.authenticate_nowait(said(Signer(None).token())) is Denial.WRONG


def test_of_many_keys_a_few_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "TRIED_MAX", 1)
    backend = tokens(tmp_path, ONE, NAMELESS)
    assert backend.authenticate_nowait(said(NAMELESS.token())) is Denial.WRONG
    assert isinstance(backend.authenticate_nowait(said(ONE.token())), Principal)


@pytest.mark.parametrize(
    "text, symmetric",
    [(ONE.pem(), False), (jwks(ONE), False), (SECRET.encode() + b"\n", True)],
    ids=["PEM", "JWKS", "secret"],
)
def test_keys_of_a_file(tmp_path: Path, text: bytes, symmetric: bool) -> None:
    path = tmp_path / "keys"
    path.write_bytes(text)
    algorithms = ("HS256",) if symmetric else ("RS256",)
    backend = Tokens(
        JwtBackend(backend="jwt", keys_file=path, algorithms=algorithms), KeysFile(path, symmetric=symmetric)
    )
    claims = {"sub": "device", "exp": time.time() + 60}
    token = jwt.encode(claims, SECRET, algorithm="HS256") if symmetric else ONE.token()
    assert isinstance(backend.authenticate_nowait(said(token)), Principal)
    assert backend.authenticate_nowait(said(TWO.token())) is Denial.WRONG


@pytest.mark.parametrize(
    "text, symmetric, reason",
    [
        (b"short", True, "32 bytes"),
        (b"-----BEGIN PRIVATE KEY-----\n", False, "private key"),
        (b"-----BEGIN CERTIFICATE-----\n", False, "."),
        (b"{}", False, "no list `keys`"),
        (b"[1]", False, "no list `keys`"),
        (b'{"keys": []}', False, "no usable key"),
        (b'{"keys": [1, {"kty": "oct", "k": "AAAA"}, {"kty": "what"}, {}]}', False, "no usable key"),
        (json.dumps({"keys": [ONE.jwk(use="enc")]}).encode(), False, "no usable key"),
        (b"\xff\xfe", False, "."),
    ],
    ids=range(9),
)
def test_keys_that_cannot_be_used(text: bytes, symmetric: bool, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_keys(text, symmetric=symmetric)


def test_there_is_a_most_of_keys() -> None:
    document = json.dumps({"keys": [ONE.jwk(kid=str(number)) for number in range(200)]})
    assert len(parse_jwks(document.encode())) == keys_module.KEYS_MAX


def test_a_file_of_keys_is_read_again_and_a_bad_one_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(jwks(ONE))
    keys = KeysFile(path, symmetric=False)
    backend = Tokens(JwtBackend(backend="jwt", keys_file=path), keys)
    path.write_bytes(jwks(TWO, CURVE))
    keys.reload_if_settled()
    keys.reload_if_settled()  # nobody is writing to it any more
    assert backend.authenticate_nowait(said(ONE.token())) is Denial.WRONG
    assert isinstance(backend.authenticate_nowait(said(TWO.token())), Principal)
    with capture_logs() as lines:
        path.write_bytes(b"nothing")
        keys.reload_if_settled()
        keys.reload_if_settled()
        path.unlink()
        keys.reload_if_settled()
        keys.reload_if_settled()
    assert [line["log_level"] for line in lines] == ["error", "error"]
    assert isinstance(backend.authenticate_nowait(said(TWO.token())), Principal)
    with pytest.raises(ConfigurationError):
        KeysFile(path, symmetric=False)


class Fetching:
    """The back end with the keys of a server, and a clock that is moved by hand."""

    def __init__(self, server: Served, nursery: trio.Nursery, **options: float) -> None:
        self.now = 1_000.0
        self.keys = KeysUrl(
            server.url,
            BackendHttpClient(0.5),
            refresh_secs=options.get("refresh_secs", 300.0),
            kept_secs=options.get("kept_secs", 3600.0),
            clock=lambda: self.now,
        )
        self.backend = Tokens(JwtBackend(backend="jwt", keys_url=server.url), self.keys)
        nursery.start_soon(self.keys.run)

    async def ask(self, token: str) -> object:
        """Who it is, or why not."""
        found = self.backend.authenticate_nowait(said(token)) or await self.backend.authenticate(said(token))
        return found.name if isinstance(found, Principal) else found


async def test_keys_that_change_are_fetched_when_a_token_names_one_that_is_not_known() -> None:
    with served() as server:
        server.body = jwks(ONE)
        async with trio.open_nursery() as nursery:
            one = Fetching(server, nursery)
            assert await one.ask(ONE.token()) == "device"
            server.body = jwks(TWO)
            assert await one.ask(TWO.token()) is Denial.WRONG, "it has only just been asked"
            one.now += keys_module.AGAIN_SECS
            assert await one.ask(TWO.token()) == "device"
            assert await one.ask(ONE.token()) is Denial.WRONG, "it was taken back"
            before = len(server.asked)
            for number in range(50):
                assert await one.ask(Signer.token(_named(f"invented {number}"))) is Denial.WRONG
            assert len(server.asked) == before, "strangers do not make us ask"
            nursery.cancel_scope.cancel()


def _named(kid: str) -> Signer:
    found = object.__new__(Signer)
    found.kid, found.algorithm, found.key = kid, "RS256", TWO.key
    return found


async def test_keys_serve_on_while_their_server_is_away_and_not_for_ever() -> None:
    with served() as server:
        server.body = jwks(ONE)
        async with trio.open_nursery() as nursery:
            one = Fetching(server, nursery, kept_secs=600.0)
            assert await one.ask(ONE.token()) == "device"
            with capture_logs() as lines:
                server.status = 500
                one.now += keys_module.AGAIN_SECS
                assert await one.ask(TWO.token()) is Denial.WRONG
                assert await one.ask(ONE.token()) == "device"
                server.status, server.body = 200, b"<html>"
                one.now += 800.0
                assert await one.ask(TWO.token()) is Denial.WRONG
                assert await one.ask(ONE.token()) == "device"
                one.now += 200.0
                assert await one.ask(ONE.token()) is Denial.UNAVAILABLE
            assert {line["log_level"] for line in lines} == {"error"}
            assert one.keys.failures == 3
            server.body = jwks(ONE)
            one.now += keys_module.AGAIN_SECS
            assert await one.ask(ONE.token()) == "device"
            nursery.cancel_scope.cancel()


async def test_the_first_logins_wait_for_the_keys_and_ask_once() -> None:
    with served() as server:
        server.body = jwks(ONE)
        server.gate.clear()
        found: list[object] = []
        async with trio.open_nursery() as nursery:
            one = Fetching(server, nursery)

            async def log_in() -> None:
                found.append(await one.ask(ONE.token()))

            async with trio.open_nursery() as many:
                for _ in range(20):
                    many.start_soon(log_in)
                await trio.testing.wait_all_tasks_blocked()
                assert found == []
                server.gate.set()
            assert found == ["device"] * 20
            assert len(server.asked) == 1
            nursery.cancel_scope.cancel()


async def test_a_server_that_says_nothing_costs_its_time_and_no_more() -> None:
    with served() as server, capture_logs() as lines:
        server.gate.clear()
        async with trio.open_nursery() as nursery:
            one = Fetching(server, nursery)
            assert await one.ask(ONE.token()) is Denial.UNAVAILABLE
            nursery.cancel_scope.cancel()
    assert "no response within 0.5 s" in lines[0]["error"]


async def test_an_answer_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.access.http_client.ANSWER_BYTES_MAX", 100)
    with served() as server, capture_logs() as lines:
        server.body = b"x" * 101
        async with trio.open_nursery() as nursery:
            one = Fetching(server, nursery)
            assert await one.ask(ONE.token()) is Denial.UNAVAILABLE
            nursery.cancel_scope.cancel()
    assert "longer than 100 bytes" in lines[0]["error"]


@pytest.mark.parametrize(
    "options, reason",
    [
        ({}, "set exactly one of keys_file and keys_url"),
        ({"keys_file": Path("a"), "keys_url": "https://a"}, "set exactly one of keys_file and keys_url"),
        ({"keys_url": "ftp://a"}, "begin with https"),
        ({"keys_url": "https://"}, "begin with https"),
        ({"keys_url": "https://a", "algorithms": ("HS256",)}, "cannot be fetched"),
        ({"keys_file": Path("a"), "algorithms": ("HS256", "RS256")}, "cannot be combined"),
        ({"keys_file": Path("a"), "algorithms": ("none",)}, "algorithms"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        JwtBackend(backend="jwt", **options)
