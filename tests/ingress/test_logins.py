"""Logins cost the same in all three protocols: who goes leaves the queue, who guesses is refused."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import trio
import trio.testing
from pydantic import SecretStr

from gateway.access import users as access_module
from gateway.access.authentication import Access
from gateway.access.credentials import Credentials
from gateway.access.users import VERIFIERS_MAX
from gateway.containment import counted
from gateway.ingress.logins import Logins as PendingLogins
from gateway.protocols.amqp091.events import Closed
from gateway.protocols.amqpfast.codec import encode_command as frame
from gateway.protocols.amqpfast.commands import ConnectionOpen, ConnectionResponse
from gateway.protocols.mqtt.packets import Auth, Connack, Connect
from gateway.protocols.mqtt.spec import Property, ReasonCode, Version
from gateway.settings import Limits, LoginSettings, Settings, User
from gateway.telemetry.stats import ListenerStats
from gateway.transport.stream import Stream, WriteSet
from tests.configured import make_listener
from tests.ingress.amqp_client import Amqp
from tests.ingress.amqpfast.client import Fast
from tests.ingress.clients import Mqtt, Raw, connect, eventually, stats
from tests.ingress.mqtt.test_scram import DATA, KEYS, METHOD, SCRAM, Prover, auth
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of

PROTOCOLS: Final = ("mqtt", "amqp091", "amqpfast")
ANN: Final = User(password_hash=SecretStr("as good as any"), scram=SecretStr(str(KEYS)))


class Hashing:
    """Stands in for argon2: waits for `gate`, and takes the password `right`."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, stored: str, password: bytes) -> bool:
        self.asked.append(password)
        assert self.gate.wait(30)
        return stored == "as good as any" and password == b"right"


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hashing]:
    one = Hashing()
    monkeypatch.setattr(access_module, "_matches", one)
    monkeypatch.setattr("gateway.app.access.is_hash", lambda text: True)
    yield one
    one.gate.set()


def site(*, proxied: bool = False, logins: LoginSettings | None = None, **limits: Any) -> Settings:
    """A listener of each protocol; `proxied`: a balancer says who comes."""
    more: dict[str, Any] = (
        {"proxy_protocol": "required", "proxy_protocol_from": ("127.0.0.0/8",)} if proxied else {}
    )
    listeners = {
        name: make_listener(protocol=name, host=LOOPBACK, port=0, **more) for name in ("mqtt", "amqp091")
    }
    listeners["amqpfast"] = make_listener(
        protocol="amqpfast", host=LOOPBACK, port=0, negotiation_pause_secs=0.0, **more
    )
    users = {"ann": ANN, "bob": ANN}
    return settings_of(
        listeners=listeners,
        users=users,
        logins=logins or LoginSettings(delay_secs=0.0),
        limits=Limits(**limits),
    )


def from_address(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Those who connect from now on come from there."""
    kind = "TCP6" if ":" in address else "TCP4"
    monkeypatch.setattr(Raw, "lead", f"PROXY {kind} {address} {address} 5000 1883\r\n".encode())


def log_in(gateway: Running, protocol: str, user: str, password: str) -> int:
    """What a login is answered with: 0, or the protocol's word for no."""
    if protocol == "mqtt":
        client, connack = connect(gateway, user=(user, password.encode()))
        client.cut()
        return int(connack.reason)
    kind = Amqp if protocol == "amqp091" else Fast
    with kind(gateway, user=user, password=password) as client:
        if password == "right":
            try:
                client.open()
            except Exception:
                return -1
            return 0
        return int(client.next(Closed).reply_code if protocol == "amqp091" else client.closed())


def begin(gateway: Running, protocol: str, password: str) -> Raw:
    """Log in, and wait for no answer."""
    if protocol == "mqtt":
        client = Mqtt(gateway.mqtt)
        client.say(Connect(f"c{password}", Version.V5, True, 0, None, "ann", password.encode(), {}))
        return client
    if protocol == "amqp091":
        amqp = Amqp(gateway, user="ann", password=password)
        amqp.send(amqp.machine.data_to_send())
        _answer(amqp)
        return amqp
    fast = Fast(gateway, user="ann", password=password)
    fast.send(fast.machine.data_to_send())
    _answer(fast)
    return fast


def _answer(client: Any) -> None:
    client.machine.receive_data(client.sock.recv(65_536), 0.0)
    client.send(client.machine.data_to_send())


def waiting(gateway: Running) -> Callable[[int], None]:
    def until(count: int) -> None:
        gateway.until(lambda: gateway.gateway.access.users._turns.waiting == count)

    return until


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_logins_that_were_abandoned_keep_nobody_out(hashing: Hashing, protocol: str) -> None:
    with running(site()) as gateway:
        hashing.gate.clear()
        clients = [begin(gateway, protocol, f"guess {number}") for number in range(40)]
        waiting(gateway)(40 - VERIFIERS_MAX)
        for client in clients:
            client.cut()
        waiting(gateway)(0)
        eventually(lambda: stats(gateway, protocol).connections == 0)
        hashing.gate.set()
        assert log_in(gateway, protocol, "ann", "right") == 0
        assert len(hashing.asked) == VERIFIERS_MAX + 1
        eventually(lambda: stats(gateway, protocol).logins.counts == {"abandoned": 40, "accepted": 1})


def test_who_waits_for_a_hash_keeps_the_time_of_its_handshake(hashing: Hashing) -> None:
    with running(site(connect_timeout_secs=0.3)) as gateway:
        hashing.gate.clear()
        clients = [begin(gateway, "mqtt", f"guess {number}") for number in range(4)]
        for client in clients:
            assert client.rest() == b""
            client.cut()
        waiting(gateway)(0)
        hashing.gate.set()


def test_who_says_all_at_once_and_leaves_is_heard(hashing: Hashing) -> None:
    with running(site()) as gateway:
        listener, _ = connect(gateway, "listener")
        listener.subscribe("a")
        hashing.gate.clear()
        sensor = Mqtt(gateway.mqtt)
        sensor.machine.connect(Connect("sensor", Version.V311, True, 0, None, "ann", b"right", {}), 0.0)
        said = sensor.machine.data_to_send()
        sensor.send(said + b"\x30\x05\x00\x01a21\xe0\x00").cut()
        eventually(lambda: len(hashing.asked) == 1)
        hashing.gate.set()
        assert listener.body() == b"21"
        listener.cut()


def test_what_comes_behind_a_login_waits_for_it(hashing: Hashing) -> None:
    with running(site()) as gateway:
        listener, _ = connect(gateway, "listener")
        listener.subscribe("a")
        hashing.gate.clear()
        with begin(gateway, "mqtt", "right") as sensor:
            eventually(lambda: len(hashing.asked) == 1)
            sensor.send(b"\x30\x06\x00\x01a\x0021")
            gateway.until(lambda: any(not one.stream.reading for one in _connections(gateway)))
            hashing.gate.set()
            assert listener.body() == b"21"
        listener.cut()


def _connections(gateway: Running) -> list[Any]:
    return list(gateway.gateway.listeners["mqtt"].connections)


@pytest.mark.parametrize(
    "protocol, wrong, refused",
    [
        ("mqtt", ReasonCode.BAD_USER_NAME_OR_PASSWORD, ReasonCode.CONNECTION_RATE_EXCEEDED),
        ("amqp091", 403, 403),
        ("amqpfast", 403, 403),
    ],
)
def test_guesses_are_refused_in_every_protocol_and_others_get_in(
    hashing: Hashing, monkeypatch: pytest.MonkeyPatch, protocol: str, wrong: int, refused: int
) -> None:
    with running(site(proxied=True, logins=LoginSettings(failures_max=3, delay_secs=0.0))) as gateway:
        from_address(monkeypatch, "192.0.2.7")
        said = [log_in(gateway, protocol, "ann", f"guess {number}") for number in range(5)]
        assert said == [wrong] * 3 + [refused] * 2
        assert len(hashing.asked) == 3
        for other in PROTOCOLS:
            assert log_in(gateway, other, "ann", "wrong") != 0, "refused in the other protocols, too"
        assert len(hashing.asked) == 3
        assert log_in(gateway, protocol, "bob", "right") == 0
        from_address(monkeypatch, "192.0.2.8")
        assert log_in(gateway, protocol, "ann", "right") == 0
        counts = stats(gateway, protocol).logins.counts
        assert counts == {"wrong": 3, "refused": 3, "accepted": 2}


def test_older_versions_hear_that_the_server_is_unavailable(
    hashing: Hashing, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(site(proxied=True, logins=LoginSettings(failures_max=1, delay_secs=0.0))) as gateway:
        from_address(monkeypatch, "2001:db8::1")
        codes = []
        for number in range(3):
            from_address(monkeypatch, f"2001:db8::{number + 1}")
            client, connack = connect(gateway, user=("ann", b"x%d" % number), version=Version.V311)
            client.cut()
            codes.append(connack.reason)
        assert codes == [
            ReasonCode.BAD_USER_NAME_OR_PASSWORD,
            ReasonCode.SERVER_UNAVAILABLE,
            ReasonCode.SERVER_UNAVAILABLE,
        ]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "probe", [b"GET / HTTP/1.1\r\n\r\n", b"\x80\x01", b"AMQP\x00\x01\x00\x00", b"\0" * 64]
)
def test_probes_of_another_protocol_do_not_count(
    hashing: Hashing, monkeypatch: pytest.MonkeyPatch, protocol: str, probe: bytes
) -> None:
    with running(site(proxied=True, logins=LoginSettings(failures_max=1, address_failures_max=1))) as gateway:
        from_address(monkeypatch, "192.0.2.7")
        for _ in range(12):
            with Raw(gateway.port(protocol)) as raw:
                raw.send(probe)
        eventually(lambda: stats(gateway, protocol).connections == 0)
        assert log_in(gateway, protocol, "ann", "right") == 0


BROKEN: Final = [
    pytest.param(frame(ConnectionResponse("TLS")), id="a mechanism that is not offered"),
    pytest.param(b"\0\x0c\x0b\x05PLAIN\0\x02\x01a\xce", id="a table that is none"),
    pytest.param(b"\0\x03\x0e\x01\xcd", id="a frame that does not end as one"),
    pytest.param(b"\xff\xff\xff\xff\xff\xfe", id="a frame that is too large"),
    pytest.param(frame(ConnectionOpen(1, "/", "c")), id="a command that is not due"),
]


@pytest.mark.parametrize("said", BROKEN)
def test_broken_negotiations_are_counted_and_their_address_is_blocked(
    hashing: Hashing, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    """AMQ RFC 006, 3.2.12."""
    logins = LoginSettings(negotiation_failures_max=3, delay_secs=0.0)
    with running(site(proxied=True, logins=logins)) as gateway:

        def broken(count: int) -> None:
            for _ in range(count):
                with Raw(gateway.port("amqpfast")) as raw:
                    raw.send(b"\x80\x01" + said).rest()

        from_address(monkeypatch, "192.0.2.7")
        broken(2)
        assert log_in(gateway, "amqpfast", "ann", "right") == 0
        from_address(monkeypatch, "192.0.2.8")
        broken(3)
        with Fast(gateway, user="ann", password="any") as client:
            assert client.closed() == 403
        assert hashing.asked == [b"right"], "nobody from there is looked at"
        assert stats(gateway, "amqpfast").logins.counts == {"accepted": 1, "refused": 1}
        assert log_in(gateway, "mqtt", "ann", "right") == 0
        assert log_in(gateway, "amqpfast", "ann", "right") == 0, "ann was right there not long ago"
        from_address(monkeypatch, "192.0.2.7")
        broken(5)
        assert log_in(gateway, "amqpfast", "ann", "right") == 0


def test_guesses_by_scram_are_counted_delayed_and_refused(
    hashing: Hashing, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(site(proxied=True, logins=LoginSettings(failures_max=3, delay_secs=0.01))) as gateway:
        from_address(monkeypatch, "192.0.2.7")
        said = [_prove(gateway, "ann", f"guess {number}") for number in range(5)]
        assert said == [ReasonCode.NOT_AUTHORIZED] * 3 + [ReasonCode.CONNECTION_RATE_EXCEEDED] * 2
        assert log_in(gateway, "mqtt", "ann", "right") == ReasonCode.CONNECTION_RATE_EXCEEDED
        from_address(monkeypatch, "192.0.2.8")
        assert _prove(gateway, "ann", "pencil") == 0


def test_scram_is_answered_one_message_at_a_time(hashing: Hashing, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(site(proxied=True, logins=LoginSettings(delay_secs=0.5))) as gateway:
        from_address(monkeypatch, "192.0.2.7")
        assert _prove(gateway, "ann", "guess") == ReasonCode.NOT_AUTHORIZED
        with Mqtt(gateway.mqtt) as client:
            prover = Prover("ann", "guess")
            client.say(Connect("c", properties={METHOD: SCRAM, DATA: prover.first}))
            challenge = client.next(Auth).properties[DATA]
            for _ in range(20):
                client.machine.send_auth(auth(prover.final(challenge)))
            client.flush()
            assert client.closed()
        assert stats(gateway).protocol_errors.total == 1


def _prove(gateway: Running, user: str, password: str) -> int:
    with Mqtt(gateway.mqtt) as client:
        prover = Prover(user, password)
        client.say(Connect("c", properties={METHOD: SCRAM, DATA: prover.first}))
        challenge = client.next(Auth)
        client.machine.send_auth(auth(prover.final(challenge.properties[Property.AUTHENTICATION_DATA])))
        client.flush()
        return int(client.next(Connack).reason)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_fault_in_a_login_costs_that_connection(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    def broken(stored: str, password: bytes) -> bool:
        if password != b"right":
            raise ValueError("nobody foresaw that")
        return stored == "as good as any"

    monkeypatch.setattr(access_module, "_matches", broken)
    monkeypatch.setattr("gateway.app.access.is_hash", lambda text: True)
    before = counted["connection"]
    with running(site(), but="internal error, contained") as gateway:
        for number in range(4):
            with begin(gateway, protocol, f"guess {number}") as client:
                client.rest()
        assert counted["connection"] == before + 4
        assert log_in(gateway, protocol, "ann", "right") == 0
        waiting(gateway)(0)


class Unwatched:
    """Nobody polls."""

    def watch(self, stream: Stream) -> None: ...

    forget = leave = linger = watch


class Told:
    """An owner that only hears that it is over."""

    why = ""

    def connection_lost(self, reason: str) -> None:
        self.why = reason

    def data_to_send(self) -> bytes:
        return b""


@pytest.mark.parametrize("said", [b"", b"more"])
async def test_who_has_gone_before_his_turn_takes_no_place(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    stream = Stream(ours, "127.0.0.1:5", Unwatched(), WriteSet())
    told = Told()
    stream.owner = told  # type: ignore[assignment]
    theirs.send(said)
    theirs.close()
    access, counts = Access({}), ListenerStats("mqtt", "mqtt")
    for number in range(VERIFIERS_MAX):
        await access.users._turns.acquire("elsewhere", str(number))
    async with trio.open_nursery() as nursery:
        logins = PendingLogins(access, counts, nursery, lambda: None)
        logins.verify(stream, Credentials("ann", b"guess", stream.remote), lambda found: None)
        await trio.testing.wait_all_tasks_blocked()
        assert access.users._turns.waiting == (1 if said else 0)
        assert told.why == ("" if said else "closed by the peer")
        stream.abort("the end")
        await trio.testing.wait_all_tasks_blocked()
        assert access.users._turns.waiting == 0
    assert counts.logins.counts == {"abandoned": 1}
