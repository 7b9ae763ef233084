"""Rights that end while a client of replicas is away: its subscriptions end, and its queue gets no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import paho.mqtt.client as paho
import pytest
import trio
from pydantic import SecretStr

from gateway import containment
from gateway.access.authorization import Roles
from gateway.broker.mqtt.session import SubscriptionOptions
from gateway.engine.absent_sessions import AbsentReview
from gateway.engine.stored_values import encode_options
from gateway.protocols.mqtt.spec import Property
from gateway.settings import User
from gateway.settings.access import Role
from gateway.state.database import OperationStatement
from gateway.state.interface import (
    AbsentSession,
    ChangeSession,
    FindAbsent,
    LeaveSession,
    OpenedSession,
    OpenSession,
    Reply,
    SessionKey,
    StateStore,
)
from tests.chaos.proxy import Proxy
from tests.engine.local_state import LocalDatabase, joined
from tests.engine.replicas import Client, Replica, lasting, replicas
from tests.ingress.clients import connect
from tests.interop.servers import RabbitMQ
from tests.passwords import hashed

ALL: Final = Role.model_validate({"mqtt": {"publish": "#", "subscribe": "#"}})
OWN: Final = Role.model_validate({"mqtt": {"publish": "#", "subscribe": "own/#"}})
FILTERS: Final = ("secret/#", "secret/both", "own/#", "$share/g/secret/x", "$share/g/own")
LEFT: Final = [("$share/g/own",), ("own/#",)]


def replica(name: str, url: str, namespace: str, *, role: Role = ALL) -> Replica:
    given: dict[str, Any] = {
        "roles": {"all": role, "boss": ALL},
        "users": {"boss": User(password_hash=SecretStr(hashed("right")), roles=("boss",))},
        "default_roles": {"anonymous": ("all",)},
    }
    return Replica(name, url, namespace, settings=given)


def take_the_right(one: Replica) -> None:
    """Put rules into force by which anonymous clients may read `own` alone, as a reload does."""
    roles = one.gateway.authorization.roles
    changed = Roles({**roles.roles, "all": OWN}, roles.users, roles.default)
    one.await_(lambda: one.gateway.rules.use(changed))


def until_reviewed(one: Replica) -> None:
    review = one.gateway.rules.absent
    assert review is not None
    one.until(lambda: not review.is_running, 30)


def stored(one: Replica, client: str) -> list[tuple[Any, ...]]:
    return sorted(one.stored("subscription", client, "filter"))


def subscribed(one: Replica, client: str, **more: Any) -> None:
    """A client subscribes, and is away."""
    with lasting(one.mqtt, client, **more) as away:
        for topic_filter in FILTERS:
            away.subscribe(topic_filter, qos=1)
    one.until(lambda: one.stored("session", client, "connected") == [(0,)])


def publish(one: Replica) -> None:
    with Client(one.mqtt, "feeds") as feeding:
        for topic in ("secret/a", "secret/both", "own/a"):
            feeding.publish(topic, b"1")


@pytest.mark.parametrize("version", [paho.MQTTv5, paho.MQTTv311])
def test_the_subscriptions_of_an_absent_client_end(rabbitmq: RabbitMQ, version: int) -> None:
    namespace = f"absent{int(version)}"
    one, other = (replica(name, rabbitmq.url, namespace) for name in ("one", "other"))
    with replicas(one, other):
        subscribed(one, "away", version=version)
        boss, _ = connect(
            one, "boss", user=("boss", b"right"), properties={Property.SESSION_EXPIRY_INTERVAL: 300}
        )
        with boss:
            assert boss.subscribe("secret/#", 1) == 1
        take_the_right(other)
        other.until(lambda: stored(other, "away") == LEFT, 30)
        until_reviewed(other)
        publish(one)
        with lasting(one.mqtt, "away", version=version) as client:  # this replica's rules are the old ones
            assert client.present
            client.until(lambda: client.messages)
            assert client.told == [("own/a", b"1")]
            client.subscribe("secret/#", qos=1)
            publish(one)
            client.until(lambda: ("own/a", b"1") in client.told[1:])
            assert ("secret/a", b"1") in client.told
        assert stored(one, "boss") == [("secret/#",)]


def test_a_client_that_returns_is_judged_by_the_rules_in_force(rabbitmq: RabbitMQ) -> None:
    """The review has not come to it, as the database was away."""
    one = replica("one", rabbitmq.url, "absentback")
    with replicas(one):
        subscribed(one, "away")
    publishing = replica("one", rabbitmq.url, "absentback")
    with replicas(publishing):
        publish(publishing)
    other = replica("one", rabbitmq.url, "absentback", role=OWN)
    with replicas(other):
        with lasting(other.mqtt, "away") as client:
            assert client.present
            client.until(lambda: client.messages)
            assert client.told == [("own/a", b"1")]
        assert stored(other, "away") == LEFT


def test_a_replica_that_starts_with_fewer_rights_ends_subscriptions(rabbitmq: RabbitMQ) -> None:
    one = replica("one", rabbitmq.url, "absentstart")
    with replicas(one):
        subscribed(one, "away")
        other = replica("other", rabbitmq.url, "absentstart", role=OWN)
        with replicas(other):
            other.until(lambda: stored(other, "away") == LEFT, 30)


def test_a_review_waits_for_the_cluster(rabbitmq: RabbitMQ) -> None:
    """While the replica's connection to the cluster is down nothing is unbound, and it is made up for."""
    with Proxy(rabbitmq.port) as proxy:
        url = rabbitmq.url.replace(str(rabbitmq.port), str(proxy.port))
        one = replica("one", rabbitmq.url, "absentdown")
        other = replica("other", url, "absentdown")
        with replicas(one, other):
            subscribed(one, "away")
            proxy.shut()
            proxy.cut()
            other.until(lambda: not other.engine.is_up)
            take_the_right(other)
            assert len(stored(other, "away")) == len(FILTERS)
            proxy.open()
            other.until(lambda: stored(other, "away") == LEFT, 30)
            until_reviewed(other)
            publish(one)
            with lasting(one.mqtt, "away") as client:
                client.until(lambda: client.messages)
                assert client.told == [("own/a", b"1")]


class Cluster:
    """It notes what is bound and unbound; `returns` is called before the first change is confirmed."""

    is_up = True

    def __init__(self, returns: Callable[[], None] = lambda: None) -> None:
        self.changes: list[tuple[str, str, bool]] = []
        self._returns = returns

    def set_binding(self, queue: str, key: str, bound: bool, done: Callable[[], None]) -> None:
        if not self.changes:
            self._returns()
        self.changes.append((queue, key, bound))
        done()


def absent(local: LocalDatabase, state: StateStore, *clients: str) -> None:
    """Store sessions whose clients are away, with two subscriptions each."""
    options = encode_options(SubscriptionOptions(1))
    for client in clients:
        key = SessionKey("mqtt", client)
        found: list[Reply[OpenedSession]] = []
        state.submit(OpenSession(key, "one", "", "", False, 60.0, f"queue-{client}"), found.append)
        local.settle()
        assert found[0].value is not None
        epoch = found[0].value.epoch
        subscriptions = {"x/y": options, "own": options}
        state.submit(ChangeSession(key, epoch, subscriptions), lambda reply: None)
        state.submit(LeaveSession(key, epoch, 60.0, True), lambda reply: None)
        local.settle()


async def reviewed(local: LocalDatabase, review: AbsentReview) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(review.run)
        review.begin()
        while review.is_running:
            local.settle()
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


async def test_a_client_that_returns_during_the_unbinding_keeps_what_it_binds(tmp_path: Path) -> None:
    """It may have subscribed again, with a filter that is allowed and needs the same binding."""
    local = LocalDatabase(tmp_path)
    state, _ = joined(local, "one")
    absent(local, state, "a")

    def returns() -> None:
        state.submit(
            OpenSession(SessionKey("mqtt", "a"), "one", "", "", False, 60.0, "queue-a"), lambda reply: None
        )
        local.settle()

    cluster = Cluster(returns)
    await reviewed(local, AbsentReview(state, cluster, lambda user, client, given: ["x/y"]))
    assert cluster.changes == [("queue-a", "x.y", False), ("queue-a", "x.y", True)]


async def test_a_key_is_stored_until_it_is_unbound(tmp_path: Path) -> None:
    """Or the queue would be bound to it until its session ends, if the process is killed before."""
    local = LocalDatabase(tmp_path)
    state, _ = joined(local, "one")
    absent(local, state, "a")

    def keys() -> list[tuple[str]]:
        (rows,) = local.database.run([OperationStatement("SELECT key FROM unbinding")])
        return rows  # type: ignore[return-value]

    found = list[list[tuple[str]]]()
    cluster = Cluster(lambda: found.append(keys()))
    await reviewed(local, AbsentReview(state, cluster, lambda user, client, given: ["x/y"]))
    assert cluster.changes == [("queue-a", "x.y", False)]
    assert (found, keys()) == ([[("x.y",)]], [])


@pytest.mark.parametrize("is_back", [False, True])
async def test_what_a_client_has_left_bound_is_unbound(tmp_path: Path, is_back: bool) -> None:
    """Unless it has returned: then its next replica binds what it subscribes to."""
    local = LocalDatabase(tmp_path)
    state, _ = joined(local, "one")
    absent(local, state, "a")
    pages: list[Reply[list[AbsentSession]]] = []
    state.query(FindAbsent(SessionKey("", ""), 10), pages.append)
    local.settle()
    assert pages[0].value is not None
    if is_back:
        opening = OpenSession(SessionKey("mqtt", "a"), "two", "", "", False, 60.0, "queue-a")
        state.submit(opening, lambda reply: None)
        local.settle()
    cluster = Cluster()
    review = AbsentReview(state, cluster, lambda user, client, given: [])
    state.is_away = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(review.run)
        review.unbind_later(pages[0].value[0], {"z"})
        while not state._waiting:
            await trio.lowlevel.checkpoint()
        local.settle()
        state.is_away = False
        with trio.fail_after(30):
            for _ in range(2 - is_back):  # queries of the session
                while not state._waiting:
                    await trio.sleep(0.01)
                local.settle()
            while not is_back and not cluster.changes:
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert cluster.changes == ([] if is_back else [("queue-a", "z", False)])


async def test_a_review_goes_on_behind_a_session_that_cannot_be_judged(tmp_path: Path) -> None:
    local = LocalDatabase(tmp_path)
    state, _ = joined(local, "one")
    absent(local, state, "a", "b", "c")

    def judge(user: str, client: str, given: Mapping[str, SubscriptionOptions]) -> list[str]:
        if client == "b":
            raise ValueError
        return [name for name in given if name != "own"]

    cluster = Cluster()
    before = containment.counted["reload"]
    await reviewed(local, AbsentReview(state, cluster, judge))
    assert cluster.changes == [("queue-a", "x.y", False), ("queue-c", "x.y", False)]
    assert containment.counted["reload"] == before + 1
