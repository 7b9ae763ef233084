"""Nobody has everything: limits of an address and of a user, over sockets, in each protocol's words."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any, Final

import pytest
import structlog
from pydantic import SecretStr

from gateway.access import users as access_module
from gateway.app.descriptors import descriptors_for_clients, divided_descriptors, raise_descriptors
from gateway.containment import counted
from gateway.ingress.amqpfast.connection import CACHED_ENTRY_BYTES
from gateway.model.properties import string
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.events import ChannelClosed, Closed
from gateway.protocols.amqpfast import commands as f
from gateway.protocols.amqpfast.events import ChannelClosed as FastChannelClosed
from gateway.protocols.mqtt.packets import Subscription
from gateway.protocols.mqtt.spec import Property, ReasonCode, Version
from gateway.settings import Limits, Settings, StoreSettings, User
from gateway.telemetry.logs import WHOLE_MAX, Limiter
from gateway.transport.rate import ConnectionRate
from tests.configured import make_listener
from tests.ingress.amqp_client import Amqp
from tests.ingress.amqpfast.client import QUEUE, TOPIC, Fast
from tests.ingress.clients import Mqtt, Raw, connect, eventually, stats
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.passwords import hashed

CONNECT = b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x00\x00\x01c"


def listeners(limits: Limits | None = None, **more: Any) -> Settings:
    """All protocols, where guest and nobody may come from anywhere, and a balancer says who comes."""
    names = ("mqtt", "amqp091", "amqpfast")
    nobody = {name: {} if name == "amqp091" else {"anonymous": "always"} for name in names}
    made = {
        name: make_listener(
            protocol=name,
            host=LOOPBACK,
            port=0,
            proxy_protocol="required",
            proxy_protocol_from=("127.0.0.0/8",),
            **nobody[name],
        )
        for name in names
    }
    return settings_of(listeners=made, guest="always", limits=limits, **more)


@pytest.fixture
def _from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    come_from(monkeypatch, "192.0.2.7")


def come_from(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(Raw, "lead", f"PROXY TCP4 {address} {address} 5000 1883\r\n".encode())


@pytest.mark.parametrize("protocol", ["mqtt", "amqp091", "amqpfast"])
def test_one_address_does_not_take_every_place(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    with running(listeners(Limits(connections_per_address_max=2))) as gateway:
        come_from(monkeypatch, "192.0.2.7")
        with Raw(gateway.port(protocol)), Raw(gateway.port(protocol)):
            eventually(lambda: stats(gateway, protocol).connections == 2)
            with Raw(gateway.port(protocol)) as third:
                assert third.rest() == b""
            assert stats(gateway, protocol).refused.counts == {"connections_per_address_max": 1}
            come_from(monkeypatch, "192.0.2.8")
            with Raw(gateway.port(protocol)):
                eventually(lambda: stats(gateway, protocol).connections == 3)


@pytest.mark.usefixtures("_from_there")
def test_one_user_does_not_take_every_place() -> None:
    with running(listeners(Limits(connections_per_user_max=1))) as gateway:
        with connect(gateway, "a")[0], connect(gateway, "other", user=("guest", b"guest"))[0]:
            client, connack = connect(gateway, "b")
            client.cut()
            assert connack.reason == ReasonCode.QUOTA_EXCEEDED
            client, connack = connect(gateway, "b", version=Version.V311)
            client.cut()
            assert connack.reason == ReasonCode.SERVER_UNAVAILABLE
            client, connack = connect(gateway, "a", user=("guest", b"guest"))  # of another user
            client.cut()
            assert connack.reason == ReasonCode.QUOTA_EXCEEDED
            client, connack = connect(gateway, "a")  # in the place of its own connection
            client.cut()
            assert connack.reason == 0
        with Amqp(gateway).open(), Amqp(gateway) as second:
            assert second.next(Closed).reply_code == 530
        with Fast(gateway).open(), Fast(gateway) as second:
            assert second.closed() == 506
        for protocol in ("amqp091", "amqpfast"):
            assert stats(gateway, protocol).refused.counts == {"connections_per_user_max": 1}


def test_so_many_connects_in_a_second_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(listeners(Limits(connects_per_second_max=0.001))) as gateway:
        come_from(monkeypatch, "192.0.2.7")
        with connect(gateway)[0], Raw(gateway.mqtt) as second:
            assert second.rest() == b""
        come_from(monkeypatch, "192.0.2.8")
        with connect(gateway)[0]:
            pass
        assert stats(gateway).refused.counts == {"connects_per_second_max": 1}


def test_silence_gives_way_to_who_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.ingress.admission.STRANGE_SECS", 0.0)
    with running(settings_of(limits=Limits(connections_max=5))) as gateway:
        silent = [Raw(gateway.mqtt) for _ in range(5)]
        eventually(lambda: stats(gateway).connections == 5)
        with connect(gateway)[0] as client:
            assert client.quiet()
            assert silent[0].rest() == b""
            assert stats(gateway).refused.counts == {"gave_way": 1}
        for one in silent:
            one.cut()


# Sessions.


def lasting(gateway: Running, name: str, secs: int, user: str = "") -> None:
    """A session that stays for so long, and whose client has gone."""
    properties = {Property.SESSION_EXPIRY_INTERVAL: secs}
    said = (user, user.encode()) if user else None
    client, connack = connect(gateway, name, clean=False, properties=properties, user=said)
    assert connack.reason == 0
    client.cut()
    gateway.until(lambda: gateway.gateway.mqtt.sessions[name].outlet is None)


def names(gateway: Running) -> set[str]:
    return gateway.ask(lambda: set(gateway.gateway.mqtt.sessions))


def test_a_full_table_loses_what_would_expire_first_of_whoever_has_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running(listeners(Limits(sessions_max=6))) as gateway:
        come_from(monkeypatch, "192.0.2.8")
        lasting(gateway, "mine", 60)
        come_from(monkeypatch, "192.0.2.7")
        for number in range(20):
            lasting(gateway, f"eve{number}", 600_000 - number)
        assert len(names(gateway)) == 6
        assert "mine" in names(gateway), "though it is the one to expire first"
        assert "eve19" in names(gateway)
        come_from(monkeypatch, "192.0.2.9")
        with connect(gateway, "new")[0]:
            assert {"new", "mine"} <= names(gateway)
        assert gateway.gateway.mqtt.evicted == 16
        assert b"gateway_sessions_evicted_total 16" in gateway.gateway.metrics.exposition("")[0]


def test_after_a_restart_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = listeners(Limits(sessions_max=5), store=StoreSettings(path=tmp_path / "data"))
    with running(settings) as gateway:
        come_from(monkeypatch, "192.0.2.8")
        lasting(gateway, "mine", 60)
        come_from(monkeypatch, "192.0.2.7")
        for number in range(4):
            lasting(gateway, f"eve{number}", 600_000)
    with running(settings) as gateway:
        assert names(gateway) == {"mine", "eve0", "eve1", "eve2", "eve3"}
        come_from(monkeypatch, "192.0.2.9")
        with connect(gateway, "new")[0]:
            assert names(gateway) == {"mine", "new", "eve1", "eve2", "eve3"}


@pytest.mark.usefixtures("_from_there")
def test_by_policy_nobody_has_to_go() -> None:
    with running(listeners(Limits(sessions_max=2, sessions_policy="refuse"))) as gateway:
        lasting(gateway, "a", 600)
        lasting(gateway, "b", 600)
        client, connack = connect(gateway, "c")
        client.cut()
        assert connack.reason == ReasonCode.QUOTA_EXCEEDED
        assert connack.properties[Property.REASON_STRING] == "limits.sessions_max is reached"


@pytest.mark.parametrize("limit", ["sessions_per_address_max", "sessions_per_user_max"])
def test_a_share_of_sessions_is_refused_or_taken_from_ones_own(
    monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    with running(listeners(Limits(**{limit: 2}))) as gateway:
        come_from(monkeypatch, "192.0.2.8")
        lasting(gateway, "other", 5, user="guest")
        come_from(monkeypatch, "192.0.2.7")
        lasting(gateway, "a", 600)
        lasting(gateway, "b", 300)
        lasting(gateway, "c", 900)
        assert names(gateway) == {"other", "a", "c"}
        with connect(gateway, "a")[0], connect(gateway, "c")[0]:
            client, connack = connect(gateway, "d")
            client.cut()
            assert connack.reason == ReasonCode.QUOTA_EXCEEDED
            assert connack.properties[Property.REASON_STRING] == f"limits.{limit} is reached"


@pytest.mark.usefixtures("_from_there")
def test_subscriptions_of_all_sessions_of_a_user() -> None:
    with running(listeners(Limits(subscriptions_per_user_max=3, subscriptions_total_max=4))) as gateway:
        with connect(gateway, "a")[0] as a, connect(gateway, "b")[0] as b:
            assert [a.subscribe(one) for one in ("x", "y", "x", "$share/g/z")] == [0, 0, 0, 0]
            assert b.subscribe("x") == ReasonCode.QUOTA_EXCEEDED
            with connect(gateway, "c", user=("guest", b"guest"))[0] as c:
                assert [c.subscribe(one) for one in ("x", "y")] == [0, ReasonCode.QUOTA_EXCEEDED]
        gateway.until(lambda: not gateway.gateway.mqtt.sessions)
        assert gateway.ask(lambda: gateway.gateway.mqtt._subscribed) == {}


# Queues.


@pytest.fixture
def two_users(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Guest, and ann, whose password is right."""
    monkeypatch.setattr(access_module, "_matches", lambda stored, password: stored == "any")
    monkeypatch.setattr("gateway.app.access.is_hash", lambda text: True)
    return {"users": {"ann": User(password_hash=SecretStr("any"))}}


def declare(client: Amqp, name: str, **more: Any) -> None:
    client.call(m.QueueDeclare(name, **more), m.QueueDeclareOk)


def test_queues_of_one_user_and_after_a_restart(two_users: dict[str, Any], tmp_path: Path) -> None:
    settings = settings_of(
        limits=Limits(queues_per_user_max=2), store=StoreSettings(path=tmp_path / "data"), **two_users
    )
    for round_number in range(2):
        with running(settings) as gateway:
            with Amqp(gateway).open() as guest:
                declare(guest, "a", durable=True)
                declare(guest, "b", durable=True)
                guest.say(m.QueueDeclare("c"))
                closed = guest.next(Closed)
                assert closed.reply_code == 506
                assert "limits.queues_per_user_max (2)" in closed.text
            with Amqp(gateway, user="ann", password="right").open() as ann:
                declare(ann, f"d{round_number}")
    with running(settings) as gateway, Amqp(gateway).open() as guest:
        guest.call(m.QueueDelete("a"), m.QueueDeleteOk)
        declare(guest, "c")


def test_fast_destinations_of_one_user_and_after_a_restart(two_users: dict[str, Any], tmp_path: Path) -> None:
    settings = settings_of(
        limits=Limits(queues_per_user_max=2), store=StoreSettings(path=tmp_path / "data"), **two_users
    )
    for _ in range(2):
        with running(settings) as gateway:
            for service in (QUEUE, TOPIC):
                with Fast(gateway).open() as guest:
                    for name in ("a", "b"):
                        guest.handle(name, service)
                    guest.ask_handle("c", service)
                    assert guest.channel_closed() == (1, 506)
            with Fast(gateway, user="ann", password="right").open() as ann:
                ann.handle("mine", QUEUE)


# Descriptors.


def test_the_last_descriptors_are_for_others_than_clients() -> None:
    with running() as gateway:
        with Raw(gateway.mqtt) as first:
            eventually(lambda: stats(gateway).connections == 1)
            gateway.ask(lambda: setattr(gateway.gateway.listeners["mqtt"], "descriptors_max", 0))
            with Raw(gateway.mqtt) as second:
                assert second.rest() == b""
            first.send(CONNECT)
            assert first.sock.recv(4) == b"\x20\x02\x00\x00"
        assert stats(gateway).refused.counts == {"descriptors": 1}


def test_the_soft_limit_is_raised_and_a_part_is_reserved() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = min(before[0], 512)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
        assert descriptors_for_clients(100) == soft - 100
        assert descriptors_for_clients(1_000_000) == soft - soft // 4
        raise_descriptors()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(before[1], 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_operator_hears_that_not_all_will_fit() -> None:
    with running(settings_of(limits=Limits(connections_max=1 << 30))) as gateway:
        with structlog.testing.capture_logs() as lines:
            most = divided_descriptors(gateway.gateway.settings)
        assert [line["connections_max"] for line in lines] == [1 << 30]
        assert 0 < most <= 1 << 20
        assert {listener.descriptors_max for listener in gateway.gateway.listeners.values()} == {most}


# Logs.


@pytest.mark.parametrize("protocol", ["mqtt", "amqp091", "amqpfast"])
def test_six_hundred_connections_with_garbage_write_a_few_lines(
    monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    written: list[str] = []
    limiter = Limiter()

    def write(_: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
        written.append(limiter(None, method, event)["event"])
        raise structlog.DropEvent

    monkeypatch.setattr("gateway.telemetry.logs.limiter", limiter)
    with running(settings_of(limits=Limits(connections_max=2_000))) as gateway:
        structlog.configure(processors=[write])
        for _ in range(600):
            with Raw(gateway.port(protocol)) as raw:
                raw.send(b"\xff\x00garbage\x1b[2J" * 3)
        eventually(lambda: stats(gateway, protocol).accepted == 600)
        eventually(lambda: stats(gateway, protocol).connections == 0)
    ours = [one for one in written if one.startswith(("client ", "connection "))]
    assert len(ours) <= WHOLE_MAX + 1
    assert ours.count(ours[0]) == WHOLE_MAX + 1, "the last one says how many more"


def test_lines_that_cannot_be_written_cost_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*, now: bool = False) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("gateway.app.gateway.log_omitted_lines", broken)
    monkeypatch.setattr("gateway.app.gateway.LIMITED_SECS", 0.01)
    before = counted["timer"]
    with running(but="internal error, contained") as gateway:
        eventually(lambda: counted["timer"] > before + 1)
        with connect(gateway)[0] as client:
            assert client.quiet()


# Rates.

HASH: Final = SecretStr(hashed("right"))
SLOW: Final = User(password_hash=HASH, receive_bytes_per_sec_max=50, receive_messages_per_sec_max=2)
FAST: Final = User(password_hash=HASH, receive_messages_per_sec_max=0)
USUAL: Final = User(password_hash=HASH)


def numbers(rate: ConnectionRate) -> tuple[int, int]:
    return rate.bytes_per_sec, rate.messages_per_sec


def enter(gateway: Running, protocol: str, user: str) -> Raw:
    """A client that has said who it is, and has been answered."""
    if protocol == "mqtt":
        return connect(gateway, user, user=(user, b"right"))[0]
    if protocol == "amqp091":
        return Amqp(gateway, user=user, password="right").open()
    return Fast(gateway, user=user, password="right").open()


@pytest.mark.parametrize("protocol", ["mqtt", "amqp091", "amqpfast"])
@pytest.mark.parametrize(
    ("listener", "expected"),
    [
        ((0, 0), {"slow": (50, 2), "fast": None, "usual": None}),
        ((70_000, 0), {"slow": (50, 2), "fast": (70_000, 0), "usual": (70_000, 0)}),
        ((0, 9), {"slow": (50, 2), "fast": None, "usual": (0, 9)}),
        ((70_000, 9), {"slow": (50, 2), "fast": (70_000, 0), "usual": (70_000, 9)}),
    ],
)
def test_a_users_rates_take_the_place_of_the_listeners(
    protocol: str, listener: tuple[int, int], expected: dict[str, tuple[int, int] | None]
) -> None:
    byte_count, messages = listener
    limits = Limits(receive_bytes_per_sec_max=byte_count, receive_messages_per_sec_max=messages)
    users = {"slow": SLOW, "fast": FAST, "usual": USUAL}
    with running(settings_of(users=users, limits=limits)) as gateway:

        def rates() -> dict[str, tuple[int, int] | None]:
            found = gateway.gateway.listeners[protocol].connections
            return {
                one.sender.user: None if (rate := one.stream.rate) is None else numbers(rate) for one in found
            }

        with (
            enter(gateway, protocol, "slow"),
            enter(gateway, protocol, "fast"),
            enter(gateway, protocol, "usual"),
        ):
            assert gateway.ask(rates) == expected


def send_many(client: Raw) -> None:
    """A hundred messages in one write, without an answer."""
    if isinstance(client, Mqtt):
        client.send(b"\x30\6\0\1t\0hi" * 100)
    elif isinstance(client, Amqp):
        client.publish("", "nowhere", *[b"hi"] * 100)
    elif isinstance(client, Fast):
        client.put(client.handle("t", TOPIC), *[b"hi"] * 100, confirm=False)


@pytest.mark.parametrize("protocol", ["mqtt", "amqp091", "amqpfast"])
def test_who_is_too_fast_for_its_user_is_not_read_and_another_user_is(protocol: str) -> None:
    users = {"slow": User(password_hash=HASH, receive_messages_per_sec_max=1), "usual": USUAL}
    with running(settings_of(users=users)) as gateway:

        def read() -> dict[str, bool]:
            found = gateway.gateway.listeners[protocol].connections
            return {one.sender.user: one.stream.listening for one in found}

        with enter(gateway, protocol, "slow") as slow, enter(gateway, protocol, "usual") as usual:
            for client in (usual, slow):
                send_many(client)
            eventually(lambda: stats(gateway, protocol).messages_in == 200)
            eventually(lambda: gateway.ask(read) == {"slow": False, "usual": True})


# Memory.


def test_a_users_share_of_the_memory_stops_its_publishers_and_nobody_elses() -> None:
    users = {"eve": USUAL, "ann": USUAL}
    with running(settings_of(users=users, store=StoreSettings(enabled=False))) as gateway:

        def reading() -> dict[str, bool]:
            found = gateway.gateway.listeners["amqp091"].connections
            return {one.sender.user: not one.waiting.on for one in found}

        def use(part: float) -> None:
            memory = gateway.gateway.memory
            memory.watermark = 4_000_000
            memory._resident = lambda: int(part * memory.watermark)
            memory._trim = None

        gateway.ask(lambda: use(0.8))
        with (
            Amqp(gateway, user="eve", password="right").open() as eve,
            Amqp(gateway, user="ann", password="right").open() as ann,
        ):
            for client, queue in ((eve, "e"), (ann, "a")):
                declare(client, queue)
            ann.publish("", "a", bytes(500_000))
            eve.publish("", "e", *[bytes(100_000)] * 11)
            shares = gateway.gateway.memory_shares
            eventually(lambda: gateway.ask(lambda: shares.owners_over_share) == {("user", "eve")})
            eve.publish("", "e", b"one")
            ann.publish("", "a", b"one")
            eventually(lambda: gateway.ask(reading) == {"eve": False, "ann": True})
            gateway.ask(lambda: use(0.5))
            eventually(lambda: gateway.ask(reading) == {"eve": True, "ann": True})
            assert not shares.owners_over_share


def test_what_is_held_in_memory_is_somebodys_in_every_protocol() -> None:
    users = {"ann": USUAL, "bob": USUAL, "eve": USUAL}
    with running(settings_of(users=users)) as gateway:

        def held() -> dict[str, int]:
            found: dict[str, int] = {}
            for _, byte_count, user, _ in gateway.gateway._claims():
                found[user] = found.get(user, 0) + byte_count // 100_000
            return {user: count for user, count in found.items() if count}

        lasting(gateway, "away", 60)
        with (
            connect(gateway, "ann", user=("ann", b"right"))[0] as mqtt,
            Amqp(gateway, user="bob", password="right").open() as amqp,
            Fast(gateway, user="eve", password="right").open() as fast,
        ):
            mqtt.subscribe("big", qos=1)
            mqtt.publish("big", bytes(100_000), qos=1, packet_id=7)
            declare(amqp, "b")
            amqp.publish("", "b", *[bytes(100_000)] * 2)
            fast.put(fast.handle("f", QUEUE), *[bytes(100_000)] * 3)
            eventually(lambda: gateway.ask(held) == {"ann": 1, "bob": 2, "eve": 3})
            amqp.call(m.BasicConsume("b"), m.BasicConsumeOk)
            amqp.delivered(2)
            assert gateway.ask(held) == {"ann": 1, "bob": 2, "eve": 3}, "it has not been acknowledged"
        eventually(lambda: "bob" in gateway.ask(held))


# What waits of held clients.

HELD: Final = """\
version: 1
routes:
  - name: in
    from: {endpoint: mqtt, topic: "full"}
    to: {endpoint: amqp091, exchange: "", routing_key: q}
"""


def fill(client: Any, *bodies: bytes) -> None:
    """Publish to the queue that is full, without waiting for what becomes of it."""
    if isinstance(client, Mqtt):
        for packet_id, body in enumerate(bodies, 1):
            client.publish("full", body, qos=1, packet_id=packet_id)
    elif isinstance(client, Amqp):
        client.publish("", "q", *bodies)
    else:
        client.put(1, *bodies, confirm=False)


def declare_full(gateway: Running, protocol: str, client: Any) -> None:
    """Make a queue of somebody else, and fill it until it holds the client."""
    with Amqp(gateway, user="ann", password="right").open() as ann:
        declare(ann, "q")
    if isinstance(client, Fast):
        assert client.handle("q") == 1

    def depth() -> int:
        gateway_ = gateway.gateway
        return len((gateway_.fast_hosts["/"] if protocol == "amqpfast" else gateway_.host).queues["q"])

    for count, total in ((10, 10), (1, 11)):
        fill(client, *[b"x"] * count)
        eventually(lambda: gateway.ask(depth) == total)  # noqa: B023


def drain(gateway: Running, protocol: str, count: int) -> None:
    if protocol == "amqpfast":
        with Fast(gateway, user="ann", password="right").open() as ann:
            handle = ann.handle("q")
            ann.consume(handle, prefetch=100)
            rows = ann.rows(count)
            ann.ack(rows[-1][1])
    else:
        with Amqp(gateway, user="ann", password="right").open() as ann:
            ann.call(m.BasicConsume("q", no_ack=True), m.BasicConsumeOk)
            ann.delivered(count)


@pytest.mark.parametrize("protocol", ["mqtt", "amqp091", "amqpfast"])
@pytest.mark.parametrize("end", ["memory", "room"])
def test_what_waits_of_a_held_client_is_in_its_share(protocol: str, end: str, tmp_path: Path) -> None:
    """Beyond its share nothing more is read of it, long before as much waits as may; another user's client
    at the same queue is read on. It ends when memory is free again, or the queue."""
    (tmp_path / "m.yaml").write_text(HELD)
    limits = Limits(queue_messages_max=10)
    users = {"eve": USUAL, "ann": USUAL}
    given = settings_of(users=users, limits=limits, mappings=(str(tmp_path / "m.yaml"),))
    with (
        running(given) as gateway,
        enter(gateway, protocol, "eve") as eve,
        enter(gateway, protocol, "ann"),
    ):

        def read() -> dict[str, bool]:
            found = gateway.gateway.listeners[protocol].connections
            return {one.sender.user: one.stream.reading for one in found}

        def claimed() -> int:
            return sum([byte_count for _, byte_count, user, _ in gateway.gateway._claims() if user == "eve"])

        def use(part: float) -> None:
            memory = gateway.gateway.memory
            memory.watermark = 400_000
            memory._resident = lambda: int(part * memory.watermark)
            memory._trim = None

        declare_full(gateway, protocol, eve)
        fill(eve, bytes(100_000), bytes(50_000))
        eventually(lambda: gateway.ask(claimed) > 150_000)
        assert gateway.ask(read) == {"eve": True, "ann": True}
        gateway.ask(lambda: use(0.8))
        eventually(lambda: gateway.ask(read) == {"eve": False, "ann": True})
        assert gateway.ask(lambda: gateway.gateway.memory_shares.owners_over_share) == {("user", "eve")}
        if end == "memory":
            gateway.ask(lambda: use(0.5))
            eventually(lambda: gateway.ask(read) == {"eve": True, "ann": True})
            fill(eve, b"more")
        drain(gateway, protocol, 14 if end == "memory" else 13)
        eventually(lambda: gateway.ask(read) == {"eve": True, "ann": True})
        eventually(lambda: gateway.ask(claimed) <= CACHED_ENTRY_BYTES)


def test_commands_that_wait_weigh_what_they_carry(tmp_path: Path) -> None:
    """Filters and arguments wait behind publishes, and count with their content."""
    (tmp_path / "m.yaml").write_text(HELD)
    limits = Limits(queue_messages_max=10)
    given = settings_of(
        users={"eve": USUAL, "ann": USUAL}, limits=limits, mappings=(str(tmp_path / "m.yaml"),)
    )
    with running(given) as gateway:

        def weight(protocol: str) -> int:
            return sum([one.waiting.byte_count for one in gateway.gateway.listeners[protocol].connections])

        with enter(gateway, "mqtt", "eve") as mqtt, enter(gateway, "amqp091", "eve") as amqp:
            declare_full(gateway, "mqtt", mqtt)
            fill(mqtt, b"x")
            mqtt.machine.subscribe(9, [Subscription("f" * 4_000)])
            mqtt.flush()
            eventually(lambda: gateway.ask(lambda: weight("mqtt")) > 4_000)
            fill(amqp, b"x")
            listener = gateway.gateway.listeners["amqp091"]
            eventually(
                lambda: gateway.ask(lambda: [one.waiting.on for one in listener.connections] == [True])
            )
            fill(amqp, b"x")
            amqp.machine.send_method(
                1, m.QueueBind("q", "amq.headers", "", arguments=(("a", string("v" * 4_000)),))
            )
            amqp.flush()
            eventually(lambda: gateway.ask(lambda: weight("amqp091")) > 4_000)


# Transactions that are not committed.


def begin(gateway: Running, protocol: str, user: str, size: int) -> Any:
    """A client with a message of this size in an open transaction."""
    if protocol == "amqpfast":
        fast = Fast(gateway, user=user, password="right").open(transacted=True)
        fast.put(fast.handle(f"{user}.q"), bytes(size))
        return fast
    amqp = Amqp(gateway, user=user, password="right").open()
    declare(amqp, f"{user}.q")
    amqp.call(m.TxSelect(), m.TxSelectOk)
    amqp.publish("", f"{user}.q", bytes(size))
    return amqp


def add(client: Any, user: str) -> None:
    if isinstance(client, Fast):
        client.put(1, b"more", confirm=False)
    else:
        client.publish("", f"{user}.q", b"more")


def commit(client: Any) -> None:
    """Commit, and wait for the reply."""
    if isinstance(client, Fast):
        client.ask(f.ChannelCommit(1, client.machine.new_tag(1)))
    else:
        client.call(m.TxCommit(), m.TxCommitOk)


def depth(gateway: Running, protocol: str, queue: str) -> int:
    found = gateway.gateway
    return len((found.fast_hosts["/"] if protocol == "amqpfast" else found.host).queues[queue])


def test_what_is_cached_for_a_client_is_in_the_share_of_its_user() -> None:
    given = settings_of(users={"eve": USUAL}, store=StoreSettings(enabled=False))
    with running(given) as gateway, begin(gateway, "amqpfast", "eve", 10) as eve:
        commit(eve)
        found = gateway.gateway
        (connection,) = found.listeners["amqpfast"].connections
        (handle,) = connection.handles.values()

        def cached() -> int:
            return connection.cached_bytes

        def claimed() -> int:
            return sum([byte_count for _, byte_count, user, _ in found._claims() if user == "eve"])

        eventually(lambda: gateway.ask(cached) == CACHED_ENTRY_BYTES)
        before = gateway.ask(claimed)

        def fill() -> None:
            (entries,) = handle.entries.values()
            handle.entries.update({b"%d" % at: entries for at in range(1_000)})
            found.memory.watermark = 2_000_000
            found.memory._resident = lambda: int(0.8 * found.memory.watermark)
            found.memory._trim = None
            assert claimed() == before + 1_000 * CACHED_ENTRY_BYTES

        gateway.ask(fill)
        eventually(lambda: not gateway.ask(cached))
        eventually(lambda: not gateway.ask(lambda: found.memory_shares.owners_over_share))


@pytest.mark.parametrize("protocol", ["amqp091", "amqpfast"])
@pytest.mark.parametrize("end", ["refused", "committed", "lost"])
def test_an_open_transaction_is_in_the_share_of_its_user(protocol: str, end: str) -> None:
    """Beyond the share it may be committed, and more in it closes the channel; that of others goes on."""
    given = settings_of(users={"eve": USUAL, "ann": USUAL}, store=StoreSettings(enabled=False))
    with (
        running(given) as gateway,
        begin(gateway, protocol, "eve", 250_000) as eve,
        begin(gateway, protocol, "ann", 10_000) as ann,
    ):

        def claimed() -> int:
            return sum([byte_count for _, byte_count, user, _ in gateway.gateway._claims() if user == "eve"])

        memory, shares = gateway.gateway.memory, gateway.gateway.memory_shares

        def short() -> None:
            memory.watermark = 400_000
            memory._resident = lambda: int(0.8 * memory.watermark)
            memory._trim = None

        eventually(lambda: gateway.ask(claimed) > 250_000)
        gateway.ask(short)
        eventually(lambda: gateway.ask(lambda: shares.owners_over_share) == {("user", "eve")})
        if end == "refused":
            add(eve, "eve")
            closed = eve.next(FastChannelClosed if protocol == "amqpfast" else ChannelClosed)
            assert closed.reply_code == (506 if protocol == "amqpfast" else 406)
            assert "memory_per_user_share" in closed.text
            eventually(lambda: gateway.ask(lambda: depth(gateway, protocol, "eve.q")) == 0)
        elif end == "committed":
            commit(eve)
            eventually(lambda: gateway.ask(lambda: depth(gateway, protocol, "eve.q")) == 1)
            return
        else:
            eve.cut()
        eventually(lambda: gateway.ask(claimed) == 0)
        eventually(lambda: not gateway.ask(lambda: shares.owners_over_share))
        add(ann, "ann")
        commit(ann)
        eventually(lambda: gateway.ask(lambda: depth(gateway, protocol, "ann.q")) == 2)
