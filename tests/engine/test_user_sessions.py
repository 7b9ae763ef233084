"""Shares of users in the sessions and subscriptions of all replicas, those of absent clients included."""

from __future__ import annotations

from typing import Any, Final

import paho.mqtt.client as paho
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from gateway.engine import namespace
from gateway.engine import sessions as module
from gateway.settings.access import Role
from tests.engine.replicas import Client, Replica, lasting, replicas
from tests.interop.servers import RabbitMQ

QUOTA: Final = 0x97
UNAVAILABLE: Final = 0x88  # as paho names the code 3 of MQTT 3.1.1
SESSIONS_MAX: Final = 3
SUBSCRIPTIONS_MAX: Final = 4
LIMITS: Final = {
    "sessions_per_user_max": SESSIONS_MAX,
    "subscriptions_per_user_max": SUBSCRIPTIONS_MAX,
}
EXCEEDED: Final = ["Quota exceeded"]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas read every quarter of a second what the others have."""
    monkeypatch.setattr(module, "COUNT_SECS", 0.25)


def fill(replica: Replica, count: int = SESSIONS_MAX) -> None:
    for at in range(count):
        with lasting(replica.mqtt, f"away-{at}") as client:
            assert client.welcome == "Success"


def refused(replica: Replica, name: str, **more: Any) -> int:
    """The reason with which a new client is refused."""
    with lasting(replica.mqtt, name, **more) as client:
        assert client.welcome is not None
        return int(client.welcome.value)


def sessions_elsewhere(replica: Replica, count: int) -> None:
    replica.until(lambda: replica.engine.sessions.elsewhere.of("").sessions == count)


def test_absent_sessions_count_at_every_replica(rabbitmq: RabbitMQ) -> None:
    one, other = (Replica(name, rabbitmq.url, "usercount", limits=LIMITS) for name in ("one", "other"))
    with replicas(one, other):
        fill(one)
        assert refused(one, "more") == QUOTA
        sessions_elsewhere(other, SESSIONS_MAX)
        assert refused(other, "more") == QUOTA
        assert refused(other, "more", version=paho.MQTTv311) == UNAVAILABLE
        for at in range(SESSIONS_MAX):  # what is there may be resumed, here too, and be replaced
            with lasting(other.mqtt, f"away-{at}") as client:
                assert client.present
        with Client(one.mqtt, "away-0", clean=True) as client:
            assert client.welcome == "Success"
        sessions_elsewhere(one, SESSIONS_MAX - 1)
        assert refused(one, "more") == 0
        assert not one.stored("session", "away-0")


@pytest.mark.parametrize("secs", [0, 300])
def test_a_refused_client_is_refused_by_each_replica(
    rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch, secs: int
) -> None:
    """Also while the session that was opened for it is in the database; then none is left."""
    one, other = (Replica(name, rabbitmq.url, "useralternates", limits=LIMITS) for name in ("one", "other"))
    with replicas(one, other):
        fill(one)
        for replica in (one, other):  # a count that was read while a session was opened may lack it
            sessions_elsewhere(replica, SESSIONS_MAX)
        with monkeypatch.context() as patch:
            patch.setattr(module.SharedSessions, "abandon_arrival", lambda *_: None)
            for replica in (one, other, other, one):
                assert refused(replica, "more", secs=secs) == QUOTA
            assert one.stored("session", "more")
        for replica in (one, other):
            assert refused(replica, "more", secs=secs) == QUOTA
        with lasting(other.mqtt, "away-0") as client:
            assert client.present
        one.until(lambda: not one.stored("session", "more"))


def test_absent_sessions_count_after_a_restart(rabbitmq: RabbitMQ) -> None:
    one = Replica("one", rabbitmq.url, "userrestart", limits=LIMITS)
    with replicas(one):
        fill(one)
    other = Replica("one", rabbitmq.url, "userrestart", limits=LIMITS)
    with replicas(other):
        sessions_elsewhere(other, SESSIONS_MAX)
        assert refused(other, "more") == QUOTA


def test_absent_subscriptions_count_at_every_replica(rabbitmq: RabbitMQ) -> None:
    one, other = (Replica(name, rabbitmq.url, "usersubs", limits=LIMITS) for name in ("one", "other"))
    with replicas(one, other):
        with lasting(one.mqtt, "away") as client:
            for at in range(SUBSCRIPTIONS_MAX - 1):
                assert client.subscribe(f"t/{at}", qos=1) == ["Granted QoS 1"]
            assert client.subscribe("$share/g/t", qos=1) == ["Granted QoS 1"]
        with lasting(one.mqtt, "more") as client:
            assert client.subscribe("u", qos=1) == EXCEEDED
        sessions_elsewhere(other, 2)
        with lasting(other.mqtt, "others") as client:
            assert client.subscribe("u", qos=1) == EXCEEDED
            assert client.subscribe("$share/g/u", qos=1) == EXCEEDED
        with lasting(other.mqtt, "away") as client:  # it takes its subscriptions along
            assert client.present
            assert client.subscribe("t/0", qos=0) == ["Granted QoS 0"]
            client.paho.unsubscribe("t/0")
            other.until(lambda: len(other.stored("subscription", "away")) == SUBSCRIPTIONS_MAX - 1)
            assert client.subscribe("u", qos=1) == ["Granted QoS 1"]
            assert client.subscribe("v", qos=1) == EXCEEDED


def test_absent_subscriptions_count_in_bytes(rabbitmq: RabbitMQ) -> None:
    limits = {"definitions_bytes_max": 20_000, "definitions_per_user_share": 0.5}
    one, other = (Replica(name, rabbitmq.url, "userbytes", limits=limits) for name in ("one", "other"))
    long = "x" * 1_000  # two thousand bytes: it is in memory and in the database
    with replicas(one, other):
        with lasting(one.mqtt, "away") as client:
            for at in range(4):
                assert client.subscribe(f"{long}{at}", qos=1) == ["Granted QoS 1"]
            assert client.subscribe(f"{long}5", qos=1) == EXCEEDED
        other.until(lambda: other.engine.sessions.elsewhere.of("").subscriptions == 4)
        with lasting(other.mqtt, "others") as client:
            assert client.subscribe("short", qos=1) == ["Granted QoS 1"]
            assert client.subscribe(f"{long}6", qos=1) == EXCEEDED


def test_wills_count_in_bytes_at_every_replica(rabbitmq: RabbitMQ) -> None:
    """Those of connected clients and delayed ones; the will of a client that moves is replaced."""
    limits = {"definitions_bytes_max": 40_000, "definitions_per_user_share": 0.5}
    one, other = (Replica(name, rabbitmq.url, "userwills", limits=limits) for name in ("one", "other"))
    delay = Properties(PacketTypes.WILLMESSAGE)
    delay.WillDelayInterval = 600
    large: dict[str, Any] = {"will": "w" * 5_000, "will_properties": delay}  # more than half of the share

    def bytes_elsewhere(replica: Replica) -> int:
        return replica.engine.sessions.elsewhere.of("").byte_count

    with replicas(one, other):
        with lasting(one.mqtt, "a", **large) as client:
            assert client.welcome == "Success"
            assert refused(one, "b", **large) == QUOTA
            other.until(lambda: bytes_elsewhere(other) > 10_000)
            assert refused(other, "b", **large) == QUOTA
            assert refused(other, "c") == 0
            with lasting(other.mqtt, "a", **large) as moved:
                assert moved.welcome == "Success"
                one.until(lambda: bytes_elsewhere(one) > 10_000)
                assert refused(one, "b", **large) == QUOTA
                moved.vanish()
            other.until(lambda: bytes_elsewhere(other) > 10_000)  # its will is delayed
            assert refused(other, "b", **large) == QUOTA
        with lasting(one.mqtt, "a", **large):
            pass  # it takes back its will
        one.until(lambda: bytes_elsewhere(one) < 10_000)
        assert refused(one, "b", **large) == 0
        one.until(lambda: one.gateway.mqtt.definition_shares.total == 0)


def test_a_will_that_another_replica_has_published_makes_room_at_once(
    rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client returns before the replica has read again what the others have."""
    limits = {"definitions_bytes_max": 40_000, "definitions_per_user_share": 0.5}
    one, other = (Replica(name, rabbitmq.url, "userpublished", limits=limits) for name in ("one", "other"))
    large = {"will": "w" * 5_000}  # more than half of the share
    with replicas(one, other):
        client = lasting(one.mqtt, "a", **large)
        elsewhere = other.engine.sessions.elsewhere
        other.until(lambda: elsewhere.of("").byte_count > 10_000)
        stop_counting(monkeypatch, other)
        client.vanish()
        one.until(lambda: not one.stored("will", "a"))
        assert elsewhere.of("").byte_count > 10_000
        with lasting(other.mqtt, "a", **large) as again:
            assert again.welcome == "Success"
            assert refused(other, "b", **large) == QUOTA


@pytest.mark.interpreted
def test_a_client_whose_will_was_refused_has_no_session_yet(
    rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next connection needs capacity, also before this replica has forgotten the refused one."""
    limits = LIMITS | {"definitions_bytes_max": 20_000}
    one = Replica("one", rabbitmq.url, "userrefused", limits=limits)
    with replicas(one):
        fill(one)
        monkeypatch.setattr(namespace.EngineNamespace, "sweep", lambda *_: None)
        assert refused(one, "more", will="w" * 20_000) == QUOTA
        assert "more" in one.gateway.mqtt._refused  # type: ignore[attr-defined]
        assert refused(one, "more") == QUOTA


def stop_counting(monkeypatch: pytest.MonkeyPatch, replica: Replica) -> None:
    """The replica does not read any more what the others have, but for clients that wait for that."""
    monkeypatch.setattr(module, "COUNT_SECS", 3600.0)
    sessions = replica.engine.sessions
    replica.until(lambda: sessions._count_at - sessions._superseded_at > 1800 and not sessions._is_counting)


def test_a_session_that_has_ended_elsewhere_makes_room_at_once(
    rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client, which may have one session, returns to another replica."""
    role = Role.model_validate({"mqtt": {"subscribe": "#"}, "sessions_max": 1})
    settings = {"roles": {"all": role}, "default_roles": {"anonymous": ("all",)}}
    one, other = (Replica(name, rabbitmq.url, "userended", settings=settings) for name in ("one", "other"))
    with replicas(one, other):
        with Client(one.mqtt, "a"):
            sessions_elsewhere(other, 1)
            stop_counting(monkeypatch, other)
        one.until(lambda: not one.stored("session", "a"))
        with Client(other.mqtt, "a") as client:
            assert client.welcome == "Success"
            assert refused(other, "b") == QUOTA


def test_subscriptions_that_have_ended_elsewhere_make_room_at_once(
    rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their client ends its session, and subscribes at another replica."""
    one, other = (Replica(name, rabbitmq.url, "userendedsubs", limits=LIMITS) for name in ("one", "other"))
    with replicas(one, other):
        with lasting(one.mqtt, "a") as client:
            for at in range(SUBSCRIPTIONS_MAX):
                assert client.subscribe(f"t/{at}", qos=1) == ["Granted QoS 1"]
            other.until(lambda: other.engine.sessions.elsewhere.subscriptions == SUBSCRIPTIONS_MAX)
            stop_counting(monkeypatch, other)
            ends = Properties(PacketTypes.DISCONNECT)
            ends.SessionExpiryInterval = 0
            client.paho.disconnect(properties=ends)
            one.until(lambda: not one.stored("session", "a"))
        with lasting(other.mqtt, "a") as client:
            for at in range(SUBSCRIPTIONS_MAX):
                assert client.subscribe(f"t/{at}", qos=1) == ["Granted QoS 1"]
            assert client.subscribe("u", qos=1) == EXCEEDED


def test_a_role_limits_absent_sessions_and_resumes_them(rabbitmq: RabbitMQ) -> None:
    role = Role.model_validate({"mqtt": {"subscribe": "#"}, "sessions_max": 1})
    settings = {"roles": {"all": role}, "default_roles": {"anonymous": ("all",)}}
    one, other = (Replica(name, rabbitmq.url, "userroles", settings=settings) for name in ("one", "other"))
    with replicas(one, other):
        fill(one, 1)
        assert refused(one, "more") == QUOTA
        sessions_elsewhere(other, 1)
        assert refused(other, "more") == QUOTA
        with lasting(other.mqtt, "away-0") as client:
            assert client.present


def test_queues_of_shared_subscriptions_count_until_they_are_deleted(
    rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespace, "GRACE_SECS", 3600.0)
    monkeypatch.setattr(namespace, "SHARED_FILTERS_MAX", 2)  # they are read page by page
    one = Replica("one", rabbitmq.url, "usershares", limits=LIMITS)
    with replicas(one), Client(one.mqtt, "churns") as client:
        for at in range(SUBSCRIPTIONS_MAX):
            assert client.subscribe(f"$share/g/{at}", qos=1) == ["Granted QoS 1"]
            client.paho.unsubscribe(f"$share/g/{at}")
        assert client.subscribe("$share/g/more", qos=1) == EXCEEDED
        with lasting(one.mqtt, "away") as other:  # those that count already count once
            for at in range(SUBSCRIPTIONS_MAX):
                assert other.subscribe(f"$share/g/{at}", qos=1) == ["Granted QoS 1"]
            assert client.subscribe("$share/g/more", qos=1) == EXCEEDED
            other.paho.unsubscribe("$share/g/0")
            assert client.subscribe("$share/g/more", qos=1) == EXCEEDED
        monkeypatch.setattr(namespace, "GRACE_SECS", 0.0)
        one.until(lambda: not one.gateway.mqtt._unused_of)  # type: ignore[attr-defined]
        assert client.subscribe("$share/g/more", qos=1) == ["Granted QoS 1"]
