"""SCRAM-SHA-256 by AUTH packets: as RFC 7677 has it, at CONNECT and again later; who fails, and how."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterator

import pytest
from pydantic import SecretStr

from gateway.access.scram import Keys, ScramError, ScramExchange, make_keys, parse_keys, saslprep
from gateway.protocols.mqtt.packets import Auth, Connack, Connect, Disconnect
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode
from gateway.settings import User
from tests.ingress.clients import Mqtt, connect
from tests.interop.gateway_fixture import Running, running, settings_of
from tests.passwords import hashed

KEYS = make_keys("pencil", b"salt of sixteen.")
METHOD, DATA = Property.AUTHENTICATION_METHOD, Property.AUTHENTICATION_DATA
SCRAM = "SCRAM-SHA-256"


class Prover:
    """The client's side."""

    def __init__(self, user: str = "ann", password: str = "pencil") -> None:
        self.bare = f"n={user},r=half"
        self._password = password
        self.first = f"n,,{self.bare}".encode()

    def final(self, challenge: bytes) -> bytes:
        said = dict(part.split("=", 1) for part in challenge.decode().split(","))
        salted = hashlib.pbkdf2_hmac(
            "sha256", self._password.encode(), base64.b64decode(said["s"]), int(said["i"])
        )
        without = f"c=biws,r={said['r']}"
        self.whole = f"{self.bare},{challenge.decode()},{without}".encode()
        client = hmac.digest(salted, b"Client Key", "sha256")
        signature = hmac.digest(hashlib.sha256(client).digest(), self.whole, "sha256")
        proof = bytes(one ^ other for one, other in zip(client, signature, strict=True))
        self.expected = b"v=" + base64.b64encode(
            hmac.digest(hmac.digest(salted, b"Server Key", "sha256"), self.whole, "sha256")
        )
        return f"{without},p={base64.b64encode(proof).decode()}".encode()


@pytest.fixture
def site() -> Iterator[Running]:
    users = {
        "ann": User(scram=SecretStr(str(KEYS))),
        "bob": User(password_hash=SecretStr(hashed("b")), scram=SecretStr(str(KEYS))),
    }
    with running(settings_of(users=users)) as gateway:
        yield gateway


def authenticated(gateway: Running, prover: Prover, *, late: bool = False) -> tuple[Mqtt, Connack]:
    client = Mqtt(gateway.mqtt)
    first = {} if late else {DATA: prover.first}
    client.say(Connect("c", properties={METHOD: SCRAM, **first}))
    challenge = client.next(Auth)
    if late:
        assert DATA not in challenge.properties
        challenge = answer(client, prover.first)
    assert (challenge.reason, challenge.properties[METHOD]) == (0x18, SCRAM)
    client.machine.send_auth(auth(prover.final(challenge.properties[DATA])))
    client.flush()
    return client, client.next(Connack)


def auth(data: bytes, reason: int = 0x18) -> Auth:
    return Auth(reason, {METHOD: SCRAM, DATA: data})


def answer(client: Mqtt, data: bytes, reason: int = 0x18) -> Auth:
    client.machine.send_auth(auth(data, reason))
    client.flush()
    return client.next(Auth)


@pytest.mark.parametrize("late", [False, True])
def test_who_knows_the_password_is_let_in(site: Running, late: bool) -> None:
    prover = Prover()
    client, connack = authenticated(site, prover, late=late)
    with client:
        assert connack.reason == 0
        assert (connack.properties[METHOD], connack.properties[DATA]) == (SCRAM, prover.expected)
        client.publish("a", b"x", 1, 1)
        assert client.acked(PacketType.PUBACK) == (1, 0x10)
        (session,) = site.gateway.mqtt.sessions.values()
        assert session.outlet is not None


@pytest.mark.parametrize("user, password", [("ann", "wrong"), ("eve", "pencil")])
def test_who_does_not_is_not_and_unknown_users_do_not_stand_out(
    site: Running, user: str, password: str
) -> None:
    client, connack = authenticated(site, Prover(user, password))
    with client:
        assert connack.reason == ReasonCode.NOT_AUTHORIZED
        assert client.closed()
    assert site.gateway.mqtt.sessions == {}


@pytest.mark.parametrize(
    "user, password, reason", [("ann", "pencil", 0), ("ann", "wrong", 0x87), ("bob", "pencil", 0x87)]
)
def test_a_connected_client_may_prove_it_again(site: Running, user: str, password: str, reason: int) -> None:
    client, _ = authenticated(site, Prover())
    with client:
        prover = Prover(user, password)
        challenge = answer(client, prover.first, 0x19)
        client.publish("a", b"goes on", 1, 1)
        assert client.acked(PacketType.PUBACK) == (1, 0x10)
        client.machine.send_auth(auth(prover.final(challenge.properties[DATA])))
        client.flush()
        if reason:
            assert client.next(Disconnect).reason == reason
            assert client.closed()
        else:
            last = client.next(Auth)
            assert (last.reason, last.properties[DATA]) == (0, prover.expected)
            assert client.quiet()


def test_auth_without_a_beginning_is_a_fault(site: Running) -> None:
    client, _ = authenticated(site, Prover())
    with client:
        client.machine.send_auth(auth(b"x"))
        client.flush()
        assert client.next(Disconnect).reason == ReasonCode.PROTOCOL_ERROR


def test_other_methods_and_passwords_of_users_without_one(site: Running) -> None:
    client, connack = connect(site, properties={METHOD: "SCRAM-SHA-1"})
    client.cut()
    assert connack.reason == ReasonCode.BAD_AUTHENTICATION_METHOD
    client, connack = connect(site, user=("ann", b""))
    client.cut()
    assert connack.reason == ReasonCode.BAD_USER_NAME_OR_PASSWORD


def test_who_names_no_method_hears_of_none(site: Running) -> None:
    client, connack = connect(site, user=("bob", b"b"))
    with client:
        client.ping()
        assert METHOD not in connack.properties
        assert client.machine.received[PacketType.AUTH] == 0


# The exchange itself.


def test_the_example_of_the_rfc() -> None:
    """RFC 7677, section 3."""
    keys = make_keys("pencil", base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ=="))
    exchange = ScramExchange(lambda name: keys, "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0")
    challenge = exchange.answer(b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO")
    nonce = b"rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    assert challenge == b"r=" + nonce + b",s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    proof = b"dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    said = exchange.answer(b"c=biws,r=" + nonce + b",p=" + proof)
    assert said == b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
    assert (exchange.user, exchange.done) == ("user", True)


@pytest.mark.parametrize("user, password", [("ẞ\U0001f642", "pencil"), ("ann", "\U0001f511ẞ")])
def test_names_and_passwords_of_later_unicode(user: str, password: str) -> None:
    """Characters that were assigned after Unicode 3.2, whose tables SASLprep has."""
    keys = make_keys(password, b"salt of sixteen.")
    exchange = ScramExchange({user: keys}.__getitem__, "n")
    prover = Prover(user, password)
    assert exchange.answer(prover.final(exchange.answer(prover.first))) == prover.expected
    assert (exchange.user, exchange.done) == (user, True)


@pytest.mark.parametrize("other", ["", "a=a=2Cb"])
def test_an_authorization_identity_is_the_user_itself(other: str) -> None:
    exchange = ScramExchange(lambda name: KEYS, "n")
    assert exchange.answer(f"n,{other},n=a=2Cb,r=half".encode()).startswith(b"r=halfn,")
    assert exchange.user == "a,b"


FIRST = [
    b"p=tls-unique,,n=ann,r=x",
    b"n,a=bob,n=ann,r=x",
    b"n,,n=ann",
    b"n,,r=x,n=ann",
    b"n,,n=ann,r=",
    b"n,,m=1,n=ann,r=x",
    b"n,,n=a=b,r=x",
    b"n,,n=,r=x",
    b"n,,n=ann,n=ann,r=x",
    b"\xff",
    b"",
    b"n,,n=ann,r=" + bytes(5_000),
]


@pytest.mark.parametrize("said", FIRST)
def test_first_messages_that_are_none(said: bytes) -> None:
    with pytest.raises(ScramError):
        ScramExchange(lambda name: KEYS, "n").answer(said)


@pytest.mark.parametrize("said", [b"", b"c=biws,r=x,p=AAAA", b"c=eSws,r=halfn,p=AAAA", b"c=biws,r=halfn,p=!"])
def test_last_messages_that_are_none(said: bytes) -> None:
    exchange = ScramExchange(lambda name: KEYS, "n")
    exchange.answer(b"n,,n=a=2Cb=3D,r=half")
    assert exchange.user == "a,b="
    with pytest.raises(ScramError):
        exchange.answer(said)


def test_keys_as_text() -> None:
    assert parse_keys(str(KEYS)) == KEYS
    for text in ("", "SCRAM-SHA-1$4096:YQ==$YQ==:YQ==", str(KEYS._replace(iterations=1)), str(KEYS)[:-4]):
        with pytest.raises(ValueError, match=r"SCRAM|base64|int|padding|unpack"):
            parse_keys(text)
    assert isinstance(KEYS, Keys)


@pytest.mark.parametrize(
    "text, found",
    [("I\u00adX", "IX"), ("\u00aa", "a"), ("\u2168", "IX"), ("a\u00a0b", "a b"), ("user", "user")],
)
def test_passwords_are_prepared(text: str, found: str) -> None:
    """RFC 4013, section 3."""
    assert saslprep(text) == found


@pytest.mark.parametrize("text", ["\u0007", "\u06271"])
def test_passwords_that_are_forbidden(text: str) -> None:
    with pytest.raises(ValueError, match=r"SASLprep|right-to-left"):
        saslprep(text)
