"""What whoever establishes an identity says of its rights: roles and scopes of tokens, users of a file."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import orjson
import pika
import pytest
from pika.exceptions import ChannelClosedByBroker, ConnectionClosedByBroker, ProbableAccessDeniedError

from gateway.access.definitions import read_users
from gateway.access.rabbit_passwords import imported_hash, is_rabbit_hash, matches
from gateway.errors import ConfigurationError
from gateway.model.outcome import Outcome
from gateway.protocols.mqtt.packets import Auth, Connack, Connect, Disconnect, Will
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode, Version
from gateway.settings import StoreSettings
from gateway.settings.access import DefaultRoles, Role
from gateway.settings.identity import JwtBackend, UsersBackend
from tests.access.servers import AUDIENCE, ISSUER, Signer, jwks
from tests.access.test_doors import HASH, NOBODY, NOT_AUTHORIZED, OK, PASSWORD
from tests.files import replace_text
from tests.ingress.clients import Mqtt, connect
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of

ONE: Final = Signer("one")
ROLES: Final = {
    "reader": Role.model_validate({"mqtt": {"subscribe": "#"}}),
    "writer": Role.model_validate({"mqtt": {"publish": "a/{tenant}/#"}}),
}


@pytest.fixture
def keys(tmp_path: Path) -> JwtBackend:
    path = tmp_path / "keys.json"
    path.write_bytes(jwks(ONE))
    return JwtBackend(
        backend="jwt",
        keys_file=path,
        issuer=ISSUER,
        audience=AUDIENCE,
        leeway_secs=0.0,
        roles_claim="roles",
        fields={"tenant": "tenant"},
    )


def token_client(gateway: Running, token: str, will: Will | None = None) -> tuple[Mqtt, Connack]:
    client = Mqtt(gateway.mqtt)
    shown: dict[Property, Any] = {
        Property.AUTHENTICATION_METHOD: "OAUTH2-JWT",
        Property.AUTHENTICATION_DATA: token.encode(),
    }
    client.say(Connect("c", Version.V5, True, 0, will, None, None, shown))
    return client, client.next(Connack)


def renew(client: Mqtt, token: str) -> None:
    properties: dict[Property, Any] = {
        Property.AUTHENTICATION_METHOD: "OAUTH2-JWT",
        Property.AUTHENTICATION_DATA: token.encode(),
    }
    client.machine.send_auth(Auth(ReasonCode.REAUTHENTICATE, properties))
    client.flush()


def told(client: Mqtt, topic: str) -> int:
    client.publish(topic, qos=1, packet_id=1)
    return client.acked(PacketType.PUBACK)[1]


def test_roles_and_claims_of_a_token(keys: JwtBackend) -> None:
    with running(settings_of(authentication=(keys,), roles=ROLES)) as gateway:
        refused, connack = token_client(gateway, ONE.token())
        with refused:
            assert connack.reason == NOT_AUTHORIZED
        client, connack = token_client(gateway, ONE.token(roles=["writer", "unknown"], tenant="t1"))
        with client:
            assert connack.reason == OK
            assert [told(client, one) for one in ("a/t1/x", "a/t2/x")] == [NOBODY, NOT_AUTHORIZED]
            assert client.subscribe("a/#") == NOT_AUTHORIZED
            renew(client, ONE.token(roles=["reader", "writer"], tenant="t2", secs=500))
            assert client.next(Auth).reason == 0
            assert [told(client, one) for one in ("a/t1/x", "a/t2/x")] == [NOT_AUTHORIZED, NOBODY]
            assert client.subscribe("a/#") == 0
            renew(client, ONE.token(roles=["writer"], tenant="t2", secs=600))
            assert client.next(Disconnect).reason == NOT_AUTHORIZED


@pytest.mark.parametrize("renewed", [False, True])
def test_a_will_is_stored_with_roles_and_claims_of_the_latest_token(
    keys: JwtBackend, tmp_path: Path, renewed: bool
) -> None:
    """The process ends while the client is connected; the next one publishes the will, or does not."""
    given = settings_of(authentication=(keys,), roles=ROLES, store=StoreSettings(path=tmp_path / "store"))
    with running(given) as gateway:
        token = ONE.token(roles=["writer"], tenant="t1")
        client, connack = token_client(gateway, token, Will("a/t1/will", b"!", 1, True, {}))
        assert connack.reason == OK
        if renewed:
            renew(client, ONE.token(roles=["writer"], tenant="t2", secs=500))
            assert client.next(Auth).reason == 0
        store = gateway.gateway.store
        assert store is not None
        copied = tmp_path / "copy"
        done: list[Outcome] = []
        gateway.ask(lambda: store.after_commit(done.append))
        gateway.until(lambda: bool(done))
        shutil.copytree(tmp_path / "store", copied)  # as a process that is killed leaves it
        client.cut()
    killed = given.model_copy(update={"store": StoreSettings(path=copied)})
    with running(killed, unrepaired=True) as gateway:
        mqtt = gateway.gateway.mqtt
        gateway.until(lambda: not mqtt._left_wills)
        gateway.ask(lambda: [mqtt._publish_will(one) for one in list(mqtt._wills)])
        assert gateway.ask(lambda: "a/t1/will" in mqtt.retained) != renewed


def test_scopes_of_a_token_in_mqtt_and_amqp(keys: JwtBackend) -> None:
    """They limit whoever brings them, also where there is no role."""
    scope = "openid write:*/amq.topic/plant.* read:%2F/mine configure:%2F/mine"
    with running(settings_of(authentication=(keys,))) as gateway:
        client, connack = token_client(gateway, ONE.token(scope=scope))
        with client:
            assert connack.reason == OK
            assert [told(client, one) for one in ("plant/x", "office/x")] == [NOBODY, NOT_AUTHORIZED]
        client, _ = token_client(gateway, ONE.token())
        with client:
            assert told(client, "office/x") == NOBODY
        credentials = pika.PlainCredentials("whoever", ONE.token(scope=scope))
        parameters = pika.ConnectionParameters(LOOPBACK, gateway.amqp, "/", credentials)
        with closing(pika.BlockingConnection(parameters)) as connection:
            channel = connection.channel()
            channel.queue_declare("mine")
            channel.basic_get("mine")
            with pytest.raises(ChannelClosedByBroker) as refused:
                channel.queue_declare("yours")
            assert refused.value.reply_code == 403


def test_roles_in_a_file_of_users_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.app.rules.CHECK_SECS", 0.02)
    path = tmp_path / "users.yaml"

    def write(roles: str, anonymous: str) -> None:
        replace_text(
            path, f"bob: {{password_hash: '{HASH}', roles: {roles}}}\nanonymous: {{roles: {anonymous}}}\n"
        )

    write("reader", "reader")
    backend = UsersBackend(backend="users", file=path)
    with running(settings_of(authentication=(backend,), roles=ROLES)) as gateway:
        bob, _ = connect(gateway, "b", user=("bob", PASSWORD.encode()))
        nobody, connack = connect(gateway, "n")
        with bob, nobody:
            assert connack.reason == OK
            assert bob.subscribe("x/#") == 0
            assert nobody.subscribe("x/#") == 0
            write("writer", "reader")
            assert bob.next(Disconnect).reason == NOT_AUTHORIZED
            assert nobody.quiet()
            write("writer", "[]")
            assert nobody.next(Disconnect).reason == NOT_AUTHORIZED


# Exports of RabbitMQ

SALTED: Final = "kI3GCqW5JLMJa4iX1lo7X4D6XbYqlLgxIs30+P6tENUV2POR"  # of RabbitMQ's documentation: test12


def test_a_hash_of_rabbitmq() -> None:
    text = imported_hash(SALTED, "rabbit_password_hashing_sha256")
    assert is_rabbit_hash(text)
    assert matches(text, b"test12")
    assert not matches(text, b"test13")
    assert not matches(text, b"")
    assert imported_hash("", "rabbit_password_hashing_sha256") == ""
    for bad in ("rabbitmq-sha256$x", "rabbitmq-crc$" + SALTED, "rabbitmq-sha256$AAAA", "$argon2id$", ""):
        assert not is_rabbit_hash(bad)


def exported(folder: Path, **content: Any) -> Path:
    file = folder / "definitions.json"
    file.write_bytes(orjson.dumps(content))
    return file


def test_what_an_export_says_of_users(tmp_path: Path) -> None:
    file = exported(
        tmp_path,
        users=[
            {"name": "ann", "password_hash": "", "tags": ["administrator"]},
            {"name": "bob", "password_hash": "", "tags": "monitoring,other"},
            {"name": "guest", "password_hash": _hash_of("guest"), "tags": ""},
            {"name": "anonymous", "password_hash": ""},
        ],
        permissions=[{"user": "ann", "vhost": "v", "configure": "c", "write": "", "read": ".*"}],
        topic_permissions=[{"user": "ann", "vhost": "v", "exchange": "t", "write": "w", "read": "r"}],
        vhosts=[{"name": "/"}, {"name": "v"}],
    )
    found = read_users(file)
    assert found.hosts == ("/", "v")
    assert found.hashes == {"ann": "", "bob": "", "anonymous": ""}  # guest is the configuration's business
    assert found.users == {name: (f"rabbitmq:{name}",) for name in ("ann", "bob", "guest")}
    assert [found.roles[f"rabbitmq:{name}"].console for name in ("ann", "bob", "guest")] == [
        "write",
        "read",
        "none",
    ]
    assert found.roles["rabbitmq:ann"].amqp091["v"].topics["t"].write == "w"


def _hash_of(password: str) -> str:
    salt = b"salt"
    return base64.b64encode(salt + hashlib.sha256(salt + password.encode()).digest()).decode()


@pytest.mark.parametrize(
    "content",
    [
        {"users": [{}]},
        {"users": [{"name": "x", "password_hash": "?"}]},
        {"users": {"x": 1}},
        {"permissions": [{"user": "x"}]},
        {
            "users": [{"name": "x"}],
            "permissions": [{"user": "x", "vhost": "/", "configure": "(", "write": "", "read": ""}],
        },
    ],
)
def test_an_export_that_cannot_be_read(tmp_path: Path, content: Any) -> None:
    with pytest.raises(ConfigurationError, match="do not have the form of a RabbitMQ export"):
        read_users(exported(tmp_path, **content))
    (tmp_path / "bad.json").write_text(json.dumps(content)[:-2])
    with pytest.raises(ConfigurationError, match="not JSON"):
        read_users(tmp_path / "bad.json")


def test_default_roles_are_for_whoever_has_none() -> None:
    given = settings_of(roles=ROLES, default_roles=DefaultRoles(guest=("reader",)))
    with running(given) as gateway:
        guest, connack = connect(gateway, "g", user=("guest", b"guest"))
        with guest:
            assert connack.reason == OK
            assert guest.subscribe("x") == 0
        nobody, connack = connect(gateway, "n")
        with nobody:
            assert connack.reason == NOT_AUTHORIZED
        with pytest.raises((ProbableAccessDeniedError, ConnectionClosedByBroker)):
            pika.BlockingConnection(pika.URLParameters(gateway.amqp_url))
