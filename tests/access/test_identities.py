"""Who a client is, over sockets and by real clients: each back end in each protocol."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pika
import pytest
import trio
from pydantic import SecretStr

from gateway import clock
from gateway.access import users as users_module
from gateway.access.credentials import Credentials
from gateway.access.tokens import Tokens
from gateway.ingress.logins import Login
from gateway.protocols.amqpfast.events import Closed as FastClosed
from gateway.protocols.mqtt.packets import Auth, Connack, Connect, Disconnect, Suback, Subscription
from gateway.protocols.mqtt.spec import Property, ReasonCode, Version
from gateway.settings import Audit, Settings, User
from gateway.settings.endpoints import ListenerTls
from gateway.settings.identity import CertificatesBackend, HttpBackend, JwtBackend, UsersBackend
from gateway.transport import stream as streams
from tests.access.logins import PROTOCOLS, log_in, pika_parameters, trusting
from tests.access.servers import AUDIENCE, ISSUER, Signer, certificate, jwks, served
from tests.access.test_http_backend import knows
from tests.configured import make_listener
from tests.files import replace_text
from tests.ingress.amqpfast.client import Fast
from tests.ingress.clients import Mqtt, Raw, eventually, stats
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.passwords import hashed
from tests.transport.test_proxy_protocol import binary

ONE, TWO = Signer("one"), Signer("two")
ADDRESSES = bytes((192, 0, 2, 7, 192, 0, 2, 1, 1, 1, 2, 2))
HASH = SecretStr(hashed("right"))
USERS = {"ann": User(password_hash=HASH)}
METHOD, DATA = Property.AUTHENTICATION_METHOD, Property.AUTHENTICATION_DATA
WRONG = {"mqtt": 0x86, "amqp091": 403, "amqpfast": 403}
REFUSED = {"mqtt": 0x87, "amqp091": 403, "amqpfast": 403}
UNAVAILABLE = {"mqtt": 0x88, "amqp091": 403, "amqpfast": 507}
NOBODY = {"mqtt": 0x87, "amqp091": -1, "amqpfast": 403}


def site(*backends: Any, users: dict[str, User] | None = None, **listener: Any) -> Settings:
    """A listener of each protocol, where nobody is let in for being here."""
    given: dict[str, Any] = {"host": LOOPBACK, "port": 0, **listener}
    own: dict[str, dict[str, Any]] = {
        "mqtt": {"anonymous": "never"},
        "amqp091": {},
        "amqpfast": {"anonymous": "never", "negotiation_pause_secs": 0.0},
    }
    return settings_of(
        listeners={name: make_listener(protocol=name, **given, **own[name]) for name in PROTOCOLS},
        users={} if users is None else users,
        guest="never",
        **({"authentication": backends} if backends else {}),
    )


def principals(gateway: Running, protocol: str) -> list[Any]:
    listener = gateway.gateway.listeners[protocol]
    return gateway.ask(lambda: [getattr(one, "principal", None) for one in listener.connections])


@pytest.fixture
def keys(tmp_path: Path) -> JwtBackend:
    path = tmp_path / "keys.json"
    path.write_bytes(jwks(ONE))
    return JwtBackend(
        backend="jwt", keys_file=path, issuer=ISSUER, audience=AUDIENCE, leeway_secs=0.0, roles_claim="roles"
    )


# Passwords

USER_ROWS = [
    ("ann", "right", dict.fromkeys(PROTOCOLS, 0)),
    ("ann", "wrong", WRONG),
    ("bob", "right", WRONG),
    ("ann", "", WRONG),
    ("anonymous", "right", WRONG),
    ("guest", "guest", WRONG),
    (None, "", NOBODY),
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_users_of_the_configuration(protocol: str) -> None:
    with running(site(users=USERS)) as gateway:
        for user, password, expected in USER_ROWS:
            assert log_in(protocol, gateway.port(protocol), user, password) == expected[protocol], user


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_users_of_a_file_that_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    monkeypatch.setattr("gateway.app.rules.CHECK_SECS", 0.02)
    path = tmp_path / "users.yaml"
    row = f"{{password_hash: '{HASH.get_secret_value()}'}}"
    path.write_text(f"bob: {row}\nanonymous: {{receive_messages_per_sec_max: 7}}\n")
    settings = site(UsersBackend(backend="users", file=path), users=USERS)
    with running(settings, but="users and roles not reloaded, previous ones in force") as gateway:
        port = gateway.port(protocol)
        assert [log_in(protocol, port, name, "right") for name in ("ann", "bob", "eve")] == [
            0,
            0,
            WRONG[protocol],
        ]
        replace_text(path, f"eve: {row}\n")
        gateway.until(lambda: "eve" in gateway.gateway.identities.users)
        assert [log_in(protocol, port, name, "right") for name in ("ann", "bob", "eve")] == [
            0,
            WRONG[protocol],
            0,
        ]
        reloads = gateway.gateway.metrics.rule_reloads
        for bad in ("eve: {password_hash: right}\n", "eve: [", f"ann: {row}\n", "eve: {passwd: x}\n", ""):
            before = gateway.ask(lambda: reloads["refused"])
            replace_text(path, bad)
            gateway.until(lambda: reloads["refused"] > before)  # noqa: B023
            assert log_in(protocol, port, "eve", "right") == 0, "the old ones stay"
        path.unlink()
        gateway.until(lambda: reloads["refused"] == 6)
        assert log_in(protocol, port, "eve", "right") == 0


def test_who_is_connected_as_a_user_that_is_gone_has_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.app.rules.CHECK_SECS", 0.02)
    path = tmp_path / "users.yaml"
    row = f"{{password_hash: '{HASH.get_secret_value()}'}}"
    path.write_text(f"bob: {row}\neve: {row}\n")
    settings = site(UsersBackend(backend="users", file=path))
    with running(settings) as gateway, ExitStack() as stack:
        clients = {}
        for name in ("bob", "eve"):
            client = clients[name] = stack.enter_context(Mqtt(gateway.mqtt))
            client.say(Connect(name, Version.V5, True, 0, None, name, b"right", {}))
            assert client.next(Connack).reason == 0
        fast = stack.enter_context(Fast(gateway, user="bob", password="right")).open()
        bob = pika.BlockingConnection(pika_parameters(gateway.amqp, "bob", "right"))
        replace_text(path, f"eve: {row}\n")
        assert clients["bob"].next(Disconnect).reason == ReasonCode.NOT_AUTHORIZED
        assert fast.next(FastClosed).reply_code == 403
        with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as told:
            bob.process_data_events(10)
        assert told.value.reply_code == 320
        assert len(principals(gateway, "mqtt")) == 1


# Certificates


def secured(
    tmp_path: Path, *names: tuple[str, dict[str, str]]
) -> tuple[tuple[Path, Path], list[tuple[Path, Path]], ListenerTls]:
    """A gateway's certificate, those of its clients, and a listener's options that trust all of these."""
    own = certificate(tmp_path, "gateway")
    theirs = [certificate(tmp_path, name, **others) for name, others in names]
    bundle = tmp_path / "clients.pem"
    bundle.write_bytes(b"".join(one[0].read_bytes() for one in theirs))
    tls = ListenerTls(cert_file=own[0], key_file=own[1], client_ca_file=bundle)
    return own, theirs, tls


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_certificates(tmp_path: Path, protocol: str) -> None:
    own, (device, stranger), tls = secured(tmp_path, ("device", {}), ("stranger", {}))
    optional = tls.model_copy(update={"client_certificate": "optional"})
    settings = site(
        UsersBackend(backend="users"),
        CertificatesBackend(backend="certificates", known_only=True),
        users={"ann": User(password_hash=HASH), "device": User(receive_messages_per_sec_max=0)},
        tls=optional,
    )
    with running(settings) as gateway:
        port = gateway.port(protocol)
        rows: list[tuple[tuple[Path, Path] | None, str | None, str, int]] = [
            (device, None, "", 0),
            (stranger, None, "", {"mqtt": 0x86, "amqp091": 403, "amqpfast": 403}[protocol]),
            (None, None, "", {"mqtt": 0x87, "amqp091": 403, "amqpfast": 403}[protocol]),
            (device, "ann", "right", 0),
            (None, "ann", "right", 0),
            (device, "ann", "wrong", WRONG[protocol]),
            (device, "device", "guess", WRONG[protocol]),
        ]
        for shown, user, password, expected in rows:
            said = log_in(protocol, port, user, password, (own[0], shown))
            assert said == expected, (shown, user, password)
        if protocol == "mqtt":
            assert log_in(protocol, port, "device", "", (own[0], device)) == 0
            assert log_in(protocol, port, "ann", "", (own[0], device)) == WRONG[protocol]


@pytest.mark.parametrize(
    "kind, name",
    [
        ("common_name", "device"),
        ("distinguished_name", "CN=device,O=plant"),
        ("dns", "press-7.plant"),
        ("email", "press@plant"),
        ("uri", "urn:plant:press-7"),
        ("ip", "127.0.0.1"),
    ],
)
def test_what_of_a_certificate_is_the_name(tmp_path: Path, kind: Any, name: str) -> None:
    others = {"dns": "press-7.plant", "email": "press@plant", "uri": "urn:plant:press-7"}
    own, (device,), tls = secured(tmp_path, ("device", others))
    settings = site(CertificatesBackend(backend="certificates", name=kind), tls=tls)
    with running(settings) as gateway, external(gateway, own[0], device) as found:
        assert found.name == name
        assert dict(found.fields) == {"cn": "device", "o": "plant", "ip": "127.0.0.1", **others}


@contextmanager
def external(gateway: Running, authority: Path, own: tuple[Path, Path]) -> Iterator[Any]:
    """Who somebody is that has come with this certificate."""
    connection = pika.BlockingConnection(pika_parameters(gateway.amqp, None, "", trusting(authority, own)))
    yield principals(gateway, "amqp091")[0]
    connection.close()


def tlv(kind: int, value: bytes) -> bytes:
    return bytes((kind,)) + len(value).to_bytes(2, "big") + value


def announced(name: bytes, *, client: int = 0x07, verified: int = 0, der: bytes = b"") -> bytes:
    """What a balancer says of a client's TLS."""
    within = tlv(0x21, b"TLSv1.3") + (tlv(0x22, name) if name else b"") + (tlv(0x28, der) if der else b"")
    return tlv(0x20, bytes((client,)) + verified.to_bytes(4, "big") + within)


ANNOUNCED = {
    "verified": (announced(b"device"), 0),
    "in an earlier connection of its session": (announced(b"device", client=0x05), 0),
    "not verified": (announced(b"device", verified=20), 0x87),
    "none shown": (announced(b"device", client=0x01), 0x87),
    "none, over TLS": (announced(b""), 0x87),
    "a stranger": (announced(b"stranger"), 0x86),
    "nothing of TLS": (b"", 0x87),
    "too short": (tlv(0x20, b"\x07"), None),
    "twice": (announced(b"device") + announced(b"ann"), None),
    "no certificate at all": (announced(b"device", der=b"no certificate"), 0x87),
}


@pytest.mark.parametrize("tlvs, expected", ANNOUNCED.values(), ids=ANNOUNCED)
def test_what_a_balancer_says_of_certificates(
    monkeypatch: pytest.MonkeyPatch, tlvs: bytes, expected: int | None
) -> None:
    settings = site(
        CertificatesBackend(backend="certificates", known_only=True),
        UsersBackend(backend="users"),
        users={"device": User(receive_messages_per_sec_max=0)},
        proxy_protocol="required",
        proxy_protocol_from=("127.0.0.0/8",),
    )
    monkeypatch.setattr(Raw, "lead", binary(0x21, 0x11, ADDRESSES + tlvs))
    with running(settings) as gateway, Mqtt(gateway.mqtt) as client:
        client.say(Connect("c"))
        if expected is None:
            assert client.closed()
            assert stats(gateway).protocol_errors.counts == {"proxy_protocol": 1}
        else:
            assert client.next(Connack).reason == expected


def test_a_balancer_may_send_the_certificate_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pem, _ = certificate(tmp_path, "device", uri="urn:plant:7")
    der = ssl.PEM_cert_to_DER_cert(pem.read_text())
    settings = site(
        CertificatesBackend(backend="certificates", name="uri"),
        proxy_protocol="required",
        proxy_protocol_from=("127.0.0.0/8",),
    )
    settings = settings.model_copy(update={"audit": Audit(path=tmp_path / "audit.jsonl")})
    body = ADDRESSES + announced(b"another", der=der)
    monkeypatch.setattr(Raw, "lead", binary(0x21, 0x11, body))
    with running(settings) as gateway, Mqtt(gateway.mqtt) as client:
        client.say(Connect("c"))
        assert client.next(Connack).reason == 0
        assert principals(gateway, "mqtt")[0].name == "urn:plant:7"
    came, went = (json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines())
    assert (came["audit"], came["backend"], came["user"]) == ("connected", "certificates", "urn:plant:7")
    assert (went["audit"], came["remote"], went["remote"]) == (
        "disconnected",
        "192.0.2.7:257",
        "192.0.2.7:257",
    )


def test_nobody_else_can_announce_a_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = site(
        CertificatesBackend(backend="certificates"),
        proxy_protocol="required",
        proxy_protocol_from=("192.0.2.0/24",),
    )
    body = ADDRESSES + announced(b"device")
    monkeypatch.setattr(Raw, "lead", binary(0x21, 0x11, body))
    with running(settings) as gateway:
        for protocol in PROTOCOLS:
            with Raw(gateway.port(protocol)) as client:
                assert client.rest() == b""
            assert stats(gateway, protocol).refused.counts == {"proxy_protocol_from": 1}


# Tokens


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tokens_as_passwords(keys: JwtBackend, protocol: str) -> None:
    with running(site(keys, UsersBackend(backend="users"), users=USERS)) as gateway:
        port = gateway.port(protocol)
        rows = [
            ("whoever", ONE.token(), 0),
            ("ann", ONE.token(), 0),
            ("ann", "right", 0),
            ("ann", ONE.token(secs=-5), REFUSED[protocol]),
            ("ann", TWO.token(), WRONG[protocol]),
            ("whoever", ONE.token(aud="others"), WRONG[protocol]),
            ("whoever", "right", WRONG[protocol]),
        ]
        for user, password, expected in rows:
            assert log_in(protocol, port, user, password) == expected, (user, password)
        assert stats(gateway, protocol).logins.counts["expired"] == 1
        if protocol != "amqpfast":  # whose handshake has frames of 4096 bytes (RFC 006, 3.2.3)
            assert log_in(protocol, port, "ann", ONE.token(more="x" * 6_000)) == 0
        if protocol == "mqtt":
            assert log_in(protocol, port, "", ONE.token()) == 0
            assert log_in(protocol, port, "", ONE.token(secs=-5)) == REFUSED[protocol]
            assert log_in(protocol, port, "", "right") == NOBODY[protocol]


def test_a_token_costs_no_hash(keys: JwtBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []
    monkeypatch.setattr(users_module, "_matches", lambda stored, password: asked.append(password))
    with running(site(UsersBackend(backend="users"), keys, users=USERS)) as gateway:
        assert log_in("mqtt", gateway.mqtt, "whoever", ONE.token()) == 0
        assert asked == []
        assert log_in("mqtt", gateway.mqtt, "whoever", "guess") == WRONG["mqtt"]
        assert asked == [b"guess"], "an unknown name costs what a known one does"


def shown(client: Mqtt, token: str | None, user: str | None = None) -> None:
    properties: dict[Property, Any] = {METHOD: "OAUTH2-JWT"}
    if token is not None:
        properties[DATA] = token.encode()
    client.say(Connect("c", Version.V5, True, 0, None, user, None, properties))


def again(client: Mqtt, token: str) -> None:
    properties = {METHOD: "OAUTH2-JWT", DATA: token.encode()}
    client.machine.send_auth(Auth(ReasonCode.REAUTHENTICATE, properties))
    client.flush()


def test_a_token_in_auth_packets(keys: JwtBackend) -> None:
    with running(site(keys)) as gateway:
        with Mqtt(gateway.mqtt) as client:
            shown(client, ONE.token(roles=["a"]))
            connack = client.next(Connack)
            assert (connack.reason, connack.properties[METHOD]) == (0, "OAUTH2-JWT")
            assert principals(gateway, "mqtt")[0].roles == ("a",)
            again(client, ONE.token(roles=["b"], secs=500))
            answer = client.next(Auth)
            assert (answer.reason, answer.properties[METHOD]) == (0, "OAUTH2-JWT")
            assert principals(gateway, "mqtt")[0].roles == ("b",)
            again(client, ONE.token("another"))
            assert client.next(Disconnect).reason == ReasonCode.NOT_AUTHORIZED
        with Mqtt(gateway.mqtt) as client:
            shown(client, None)
            asked = client.next(Auth)
            assert (asked.reason, asked.properties) == (
                ReasonCode.CONTINUE_AUTHENTICATION,
                {METHOD: "OAUTH2-JWT"},
            )
            properties = {METHOD: "OAUTH2-JWT", DATA: ONE.token().encode()}
            client.machine.send_auth(Auth(ReasonCode.CONTINUE_AUTHENTICATION, properties))
            client.flush()
            assert client.next(Connack).reason == 0
        for token in (TWO.token(), ONE.token(secs=-5), "right"):
            with Mqtt(gateway.mqtt) as client:
                shown(client, token)
                assert client.next(Connack).reason == ReasonCode.NOT_AUTHORIZED
        with Mqtt(gateway.mqtt) as client:
            client.say(Connect("c", properties={METHOD: "SCRAM-SHA-256"}))
            connack = client.next(Connack)
            assert connack.reason == ReasonCode.BAD_AUTHENTICATION_METHOD
            assert "OAUTH2-JWT" in connack.properties[Property.REASON_STRING]


@pytest.mark.interpreted
def test_what_is_sent_behind_a_renewal_is_processed_when_its_key_is_there(
    keys: JwtBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SUBSCRIBE of many turns, while the token's key is being fetched."""
    monkeypatch.setattr(streams, "SLOW_WORK_SECS", 0.0)
    judged, fetched = Tokens.authenticate_nowait, trio.Event()
    token = ONE.token(secs=500)

    def without_key(tokens: Tokens, credentials: Credentials) -> Any:
        late = credentials.password == token.encode() and not fetched.is_set()
        return None if late else judged(tokens, credentials)

    async def with_key(tokens: Tokens, credentials: Credentials) -> Any:
        await fetched.wait()
        return judged(tokens, credentials)

    monkeypatch.setattr(Tokens, "authenticate_nowait", without_key)
    monkeypatch.setattr(Tokens, "authenticate", with_key)
    with running(site(keys)) as gateway, Mqtt(gateway.mqtt) as client:
        shown(client, ONE.token())
        assert client.next(Connack).reason == 0
        properties = {METHOD: "OAUTH2-JWT", DATA: token.encode()}
        client.machine.send_auth(Auth(ReasonCode.REAUTHENTICATE, properties))
        client.machine.subscribe(1, [Subscription(f"a/{at}") for at in range(9)])
        client.flush()
        (connection,) = gateway.gateway.listeners["mqtt"].connections
        stream = connection.stream
        gateway.until(lambda: isinstance(stream.owner, Login) and not (stream.reading and stream.unread))
        gateway.ask(fetched.set)
        assert client.next(Auth).reason == 0
        assert len(client.next(Suback).reasons) == 9
        client.publish("a/8", b"x")
        assert client.body() == b"x"


def test_a_password_in_auth_packets_is_no_token(keys: JwtBackend) -> None:
    settings = site(UsersBackend(backend="users"), keys, users=USERS)
    with running(settings) as gateway, Mqtt(gateway.mqtt) as client:
        shown(client, "right", "ann")
        assert client.next(Connack).reason == ReasonCode.NOT_AUTHORIZED


def test_tokens_that_end_while_connected(keys: JwtBackend) -> None:
    """Nobody waits for luck: the tokens that end do so in seconds, the one that is renewed in an hour."""
    with running(site(keys)) as gateway, ExitStack() as stack:
        ends = ONE.token(secs=3)
        shows = stack.enter_context(Mqtt(gateway.mqtt))
        shown(shows, ends)
        assert shows.next(Connack).reason == 0
        says = stack.enter_context(Mqtt(gateway.mqtt))
        says.say(Connect("d", Version.V5, True, 0, None, "x", ends.encode(), {}))
        assert says.next(Connack).reason == 0
        fast = stack.enter_context(Fast(gateway, user="x", password=ends)).open()
        renews = pika.BlockingConnection(pika_parameters(gateway.amqp, "x", ends))
        stays = pika.BlockingConnection(pika_parameters(gateway.amqp, "x", ends))
        channel = renews.channel()
        renews.update_secret(ONE.token(secs=3600), "it ends")
        again(shows, ONE.token(secs=3600))
        assert shows.next(Auth).reason == 0
        assert says.next(Disconnect).reason == ReasonCode.NOT_AUTHORIZED
        assert fast.next(FastClosed).reply_code == 403
        with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as told:
            stays.process_data_events(10)
        assert told.value.reply_code == 320
        assert "expired" in told.value.reply_text
        channel.queue_declare("", exclusive=True)
        renews.close()
        assert len(principals(gateway, "mqtt")) == 1
        assert stats(gateway).logins.counts["expired_while_connected"] == 1


def test_tokens_end_by_the_wall_clock(keys: JwtBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway whose clock was set right by two hours does not let clients stay for two hours more."""
    with running(site(keys)) as gateway, Mqtt(gateway.mqtt) as client:
        shown(client, ONE.token(secs=3_600))
        assert client.next(Connack).reason == 0
        monkeypatch.setattr(clock, "unix_time", lambda: time.time() + 7_200)
        assert client.next(Disconnect).reason == ReasonCode.NOT_AUTHORIZED
        assert stats(gateway).logins.counts["expired_while_connected"] == 1


def test_a_secret_that_is_refused(keys: JwtBackend) -> None:
    with running(site(keys, UsersBackend(backend="users"), users=USERS)) as gateway:
        for token in (ONE.token("another"), TWO.token(), ONE.token(secs=-5), "right"):
            connection = pika.BlockingConnection(pika_parameters(gateway.amqp, "x", ONE.token()))
            with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as told:
                connection.update_secret(token, "why not")
            assert told.value.reply_code == 530
        connection = pika.BlockingConnection(pika_parameters(gateway.amqp, "ann", "right"))
        connection.update_secret("whatever", "a password does not expire")
        connection.channel()
        connection.close()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_keys_of_a_server_that_rotates_and_goes_away(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    monkeypatch.setattr("gateway.access.keys.AGAIN_SECS", 0.0)
    with served() as server:
        server.body = jwks(ONE)
        options = JwtBackend(backend="jwt", keys_url=server.url, timeout_secs=0.5)
        options = options.model_copy(update={"keys_refresh_secs": 3600.0})
        with running(site(options), but="token keys not fetched") as gateway:
            port = gateway.port(protocol)
            assert log_in(protocol, port, "x", ONE.token()) == 0
            server.body = jwks(ONE, TWO)
            assert log_in(protocol, port, "x", TWO.token()) == 0
            server.body = jwks(TWO)
            assert log_in(protocol, port, "x", Signer("three").token()) == WRONG[protocol]
            assert log_in(protocol, port, "x", ONE.token()) == WRONG[protocol]
            server.stop()
            assert log_in(protocol, port, "x", TWO.token()) == 0, "its keys serve on"
            assert log_in(protocol, port, "x", Signer("four").token()) == WRONG[protocol]


# A server that knows the users


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_http_server_up_slow_and_down(protocol: str) -> None:
    with served() as server:
        server.answer = knows
        options = HttpBackend(backend="http", user_url=server.url, timeout_secs=0.4, cache_secs=0.0)
        settings = site(UsersBackend(backend="users"), options, users={"bob": User(password_hash=HASH)})
        with running(settings, but="authentication server not responding, logins refused") as gateway:
            port = gateway.port(protocol)
            assert log_in(protocol, port, "ann", "right", client_id="press") == 0
            assert server.asked[-1].get("client_id") == ("press" if protocol == "mqtt" else None)
            assert log_in(protocol, port, "ann", "wrong") == WRONG[protocol]
            assert log_in(protocol, port, "bob", "right") == 0
            server.gate.clear()
            assert log_in(protocol, port, "ann", "right") == UNAVAILABLE[protocol]
            assert log_in(protocol, port, "bob", "right") == 0, "who is known elsewhere gets in"
            server.stop()
            assert log_in(protocol, port, "eve", "right") == UNAVAILABLE[protocol]
            counts = gateway.ask(lambda: dict(gateway.gateway.access.counts))
            assert counts["http", "unavailable"] == 2
            assert gateway.ask(gateway.gateway.identities.failures) == {"http": 2}


# The audit log


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_who_came_was_refused_and_went_is_told(tmp_path: Path, keys: JwtBackend, protocol: str) -> None:
    token, old = ONE.token(), ONE.token(secs=-5)
    path = tmp_path / "audit.jsonl"
    settings = site(keys, UsersBackend(backend="users"), users=USERS)
    with running(settings.model_copy(update={"audit": Audit(path=path)})) as gateway:
        port = gateway.port(protocol)
        for user, password in (("ann", "right"), ("ann", "guess-7"), ("whoever", token), (token, old)):
            log_in(protocol, port, user, password)
        eventually(lambda: stats(gateway, protocol).connections == 0)
    said = path.read_text()
    told = [json.loads(line) for line in said.splitlines()]
    assert [(line["user"], line["backend"]) for line in told if line["audit"] == "connected"] == [
        ("ann", "users"),
        ("device", "jwt"),
    ]
    assert [(line["user"][:8], line["reason"]) for line in told if line["audit"] == "refused"] == [
        ("ann", "wrong"),
        ("unknown ", "expired"),
    ]
    assert [line["user"] for line in told if line["audit"] == "disconnected"] == ["ann", "device"]
    assert all(secret not in said for secret in ("right", "guess-7", token, old))
    assert all(line["remote"].startswith(LOOPBACK) and line["endpoint"] == protocol for line in told)
