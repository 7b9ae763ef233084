"""A link that proves its password by AUTH packets: to our own listener, and to brokers that prove nothing."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, Final

import pytest
from pydantic import SecretStr, ValidationError

from gateway.access.scram import (
    ITERATIONS_OF_OTHERS_MAX,
    Keys,
    Proof,
    ScramError,
    ScramExchange,
    make_keys,
)
from gateway.protocols.mqtt.packets import Auth
from gateway.protocols.mqtt.server import ServerConnection
from gateway.protocols.mqtt.spec import Property, ReasonCode, Version
from gateway.settings import User
from tests.configured import make_link
from tests.egress.mqtt.remote import World
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of

pytestmark = pytest.mark.interpreted  # the stream is one in memory

METHOD, DATA = Property.AUTHENTICATION_METHOD, Property.AUTHENTICATION_DATA
SCRAM: Final = "SCRAM-SHA-256"
SALT: Final = b"salt of sixteen."


def test_the_example_of_rfc_7677() -> None:
    proof = Proof("user", "pencil", "rOprNGfwEbeRWgbNEkqO")
    assert proof.first == b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
    nonce = b"rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    said = proof.answer(b"r=" + nonce + b",s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096")
    assert said == b"c=biws,r=" + nonce + b",p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    proof.check(b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")


@pytest.mark.parametrize("user", ["ann", "a=b,c", "é", "=2C"])
@pytest.mark.parametrize("password", ["pencil", "I\u00adX", "\u2168", "p,=x", "é" * 200])
def test_both_sides_understand_each_other(user: str, password: str) -> None:
    keys: dict[str, Keys] = {user: make_keys(password, SALT)}
    exchange, proof = ScramExchange(keys.__getitem__, "server"), Proof(user, password, "client")
    proof.check(exchange.answer(proof.answer(exchange.answer(proof.first))))
    assert (exchange.done, exchange.user) == (True, user)


def challenge(
    nonce: str = "client+server", salt: bytes = base64.b64encode(SALT), count: object = 4096
) -> bytes:
    return b"r=%b,s=%b,i=%b" % (nonce.encode(), salt, str(count).encode())


BAD: Final = {
    "nothing": b"",
    "no text": b"\xff",
    "too long": challenge("client" + "x" * 5_000),
    "another nonce": challenge("other"),
    "no nonce of its own": challenge("client"),
    "no salt": b"r=client+server,i=4096",
    "an empty salt": challenge(salt=b""),
    "a salt that is none": challenge(salt=b"*"),
    "few iterations": challenge(count=4_095),
    "more than are worked off": challenge(count=ITERATIONS_OF_OTHERS_MAX + 1),
    "digits without end": challenge(count="9" * 400),
    "digits of another script": challenge(count="٤٠٩٦"),
    "a negative number": challenge(count=-4_096),
    "twice the same": challenge() + b",i=1",
    "an error": b"e=unknown-user",
}


@pytest.mark.parametrize("name", BAD)
def test_what_a_server_must_not_say(name: str) -> None:
    with pytest.raises(ScramError):
        Proof("ann", "pencil", "client").answer(BAD[name])


def test_a_proof_is_given_once_and_nobody_is_believed_before() -> None:
    proof = Proof("ann", "pencil", "client")
    with pytest.raises(ScramError):
        proof.check(b"v=")
    proof.answer(challenge())
    with pytest.raises(ScramError):
        proof.answer(challenge())
    with pytest.raises(ScramError):
        proof.check(b"v=wrong")


def test_a_password_that_cannot_be_one() -> None:
    with pytest.raises(ScramError, match="forbids"):
        Proof("ann", "\u0007", "client").answer(challenge())


# A whole gateway as the broker.


def linked(broker: Running, **more: Any) -> Any:
    given = {"username": "ann", "password": SecretStr("pencil"), "authentication": "scram-sha-256"} | more
    link = make_link(
        url=f"mqtt://{LOOPBACK}:{broker.mqtt}", reconnect_min_secs=0.05, reconnect_max_secs=0.1, **given
    )
    return running(settings_of(links={"far": link}))


def broker(**users: User) -> Any:
    return running(settings_of(users=users or {"ann": User(scram=SecretStr(str(make_keys("pencil", SALT))))}))


def test_it_is_let_in_and_the_password_is_not_said() -> None:
    with broker() as far, linked(far) as near:
        near.until(lambda: near.gateway.links["far"].is_up)
        assert far.ask(lambda: [one.user for one in far.gateway.mqtt.sessions.values()]) == ["ann"]
        (connection,) = far.gateway.listeners["mqtt"].connections
        said = connection.machine.connect
        assert (said.user_name, said.password) == (None, None)


@pytest.mark.parametrize("wrong", [{"password": SecretStr("pen")}, {"username": "eve"}])
def test_a_wrong_password_is_told_and_tried_again(wrong: dict[str, Any]) -> None:
    with broker() as far, linked(far, **wrong) as near:
        link = near.gateway.links["far"]
        near.until(lambda: "not_authorized" in link.down_reason)
        near.until(lambda: link.stats.failures.counts.get("failed", 0) >= 2)
        assert not link.is_up


def test_a_broker_without_it_says_so() -> None:
    with running() as far, linked(far) as near:
        link = near.gateway.links["far"]
        near.until(lambda: "bad_authentication_method" in link.down_reason)
        assert "no enhanced authentication is supported" in link.down_reason


# Brokers that are none, in memory.


def ended(*answers: Callable[[ServerConnection, ScramExchange], None]) -> str:
    """What ended the connection, when the broker says these things behind CONNECT."""
    world = World(username="ann", password=SecretStr("pencil"), authentication="scram-sha-256")
    world.asks = True
    remote = world.connect()
    exchange = ScramExchange(lambda user: make_keys("pencil", SALT), "server")
    for say in answers:
        assert not world.stream.why
        say(remote.machine, exchange)
        world.talk()
    assert world.link.ups == 0
    return world.stream.why


def asks(machine: ServerConnection, exchange: ScramExchange) -> None:
    assert machine.connect is not None
    data = exchange.answer(machine.connect.properties[DATA])
    machine.send_auth(Auth(ReasonCode.CONTINUE_AUTHENTICATION, {METHOD: SCRAM, DATA: data}))


def lets_in(machine: ServerConnection, exchange: ScramExchange) -> None:
    machine.send_connack()


def pretends(machine: ServerConnection, exchange: ScramExchange) -> None:
    machine.send_connack(properties={METHOD: SCRAM, DATA: b"v=" + base64.b64encode(bytes(32))})


def says_nothing(machine: ServerConnection, exchange: ScramExchange) -> None:
    machine.send_auth(Auth(ReasonCode.CONTINUE_AUTHENTICATION, {METHOD: SCRAM}))


def succeeds_too_early(machine: ServerConnection, exchange: ScramExchange) -> None:
    machine.send_auth(Auth(ReasonCode.SUCCESS, {METHOD: SCRAM}))


@pytest.mark.parametrize(
    "answers, why",
    [
        ((lets_in,), "signature is wrong"),
        ((asks, lets_in), "signature is wrong"),
        ((asks, pretends), "signature is wrong"),
        ((says_nothing,), "malformed"),
        ((succeeds_too_early,), "without a request"),
        ((asks, says_nothing), "sent twice"),
    ],
    ids=lambda one: " ".join(say.__name__ for say in one) if isinstance(one, tuple) else "",
)
def test_a_broker_that_does_not_know_the_password(
    answers: tuple[Callable[[ServerConnection, ScramExchange], None], ...], why: str
) -> None:
    assert why in ended(*answers)


def test_it_is_said_in_no_other_version() -> None:
    world = World(username="ann", password=SecretStr("pencil"), authentication="scram-sha-256")
    world.connack_reason = ReasonCode.UNSUPPORTED_PROTOCOL_VERSION
    for _ in range(2):
        remote = world.connect()
        assert remote.connect is not None
        assert (remote.connect.version, remote.connect.password) == (Version.V5, None)
    assert "needs MQTT 5.0" in world.link.downs[0]


@pytest.mark.parametrize(
    "given, complaint",
    [
        ({"url": "mqtt://ann@h", "version": "3.1.1"}, "MQTT 5.0 only"),
        ({"url": "mqtt://h"}, "needs a username"),
        ({"url": "amqp://ann@h"}, "authentication"),
        ({"url": "mqtt://ann@h", "urls": ("mqtt://i",)}, "needs a username"),
    ],
)
def test_where_it_cannot_be(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        make_link(authentication="scram-sha-256", **given)
