"""Names, destinations and subscriptions of a virtual host, without a wire."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.broker.amqpfast.destinations import FastQueue, Interest
from gateway.broker.amqpfast.hosts import FastHosts
from gateway.broker.amqpfast.selection import selection
from gateway.broker.amqpfast.virtual_host import FastHost, FastRefused
from gateway.broker.bodies import SpooledBodies
from gateway.errors import ConfigurationError
from gateway.model.batch import Batch, Recipient
from gateway.model.message import Message, Sender
from gateway.model.outcome import Outcome, Reason
from gateway.model.shares import UserShares
from gateway.protocols.amqpfast.dialect import fast_address
from gateway.protocols.amqpfast.spec import ReplyCode
from gateway.settings import Limits
from gateway.settings.amqpfast import DestinationNames, FastVirtualHost
from gateway.store.store import Store


class Changes:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


class Publisher:
    """A source that remembers the outcomes."""

    def __init__(self) -> None:
        self.outcomes: dict[object, Outcome | None] = {}

    def settle(self, receipts: list[object], refused: dict[int, Outcome] | None, received: float) -> None:
        for at, receipt in enumerate(receipts):
            self.outcomes[receipt] = refused.get(at) if refused else None

    def hold(self, senders: set[Sender]) -> list[object]:
        return []


def publish(host: FastHost, *messages: Message) -> Publisher:
    """Send the messages to wherever the host says, in one batch."""
    source = Publisher()
    batch = Batch(source, 0.0)  # type: ignore[arg-type]
    recipients: dict[object, Recipient] = {}
    for at, message in enumerate(messages):
        sinks = host.sinks(message.address)
        batch.add(at, [(recipients.setdefault(sink, Recipient(sink)), message) for sink in sinks])
    batch.send()
    return source


def topic(name: str, body: bytes = b"x", sender: Sender | None = None) -> Message:
    return Message(fast_address("topic", name), body, sender=sender or Sender("e"))


NAMES = ["alt.rec.pets", "alt.rec.pets.cats", "alt.rec.pets.dogs", "other"]
FOUND = [
    ("alt.rec.pets", True, ["alt.rec.pets"]),
    ("alt.rec.pets", False, ["alt.rec.pets"]),
    ("alt.rec.", True, NAMES[:3]),
    ("alt.rec.pets.", True, NAMES[1:3]),
    ("alt.rec.pe", True, NAMES[:3]),
    ("", True, NAMES),
    ("alt.rec.", False, None),
    ("alt.rec.petsx", True, None),
    ("Other", True, None),
]


@pytest.mark.parametrize("name, whole, found", FOUND)
@pytest.mark.parametrize("service", ["queue", "topic"])
def test_names(service: str, name: str, whole: bool, found: list[str] | None) -> None:
    host = FastHost("/", Changes(), queues=NAMES, topics=NAMES, auto_create=False)
    if found is None:
        with pytest.raises(FastRefused) as refused:
            host.find(service, name, whole=whole)
        assert refused.value.code == 404
    else:
        assert [one.name for one in host.find(service, name, whole=whole)] == found


def test_what_is_created_and_what_is_not() -> None:
    changed = Changes()
    host = FastHost("/", changed)
    host.check_open("queue", "")
    host.check_open("topic", "plant.")
    assert not host.queues
    assert not host.topics
    host.check_open("queue", "a.b")
    assert list(host.queues) == ["a.b"]
    assert changed.count == 1
    host.find("queue", "a.", whole=True)
    host.find("queue", "c", whole=False)
    assert list(host.queues) == ["a.b", "c"]
    for name, code in (("d/e", 502), ("d" * 256, 502), ("", 404), ("d.", 404)):
        with pytest.raises(FastRefused) as refused:
            host.find("queue", name, whole=False)
        assert refused.value.code == code
    with pytest.raises(FastRefused):
        host.find("queue", "new", whole=True, creates=False)
    assert host.find("queue", "tmp/1", whole=False, slashes=True)


def test_limits() -> None:
    host = FastHost("/", Changes(), limits=Limits(queues_max=1, topics_max=1))
    for service in ("queue", "topic"):
        host.find(service, "a", whole=False)
        with pytest.raises(FastRefused) as refused:
            host.find(service, "b", whole=False)
        assert refused.value.code == 506


def test_a_subscription_is_replaced_only_if_the_new_one_is_within_the_limits() -> None:
    shares = UserShares("definitions", bytes_max=1_000, bytes_option="definitions_bytes_max")
    host = FastHost(
        "/", Changes(), limits=Limits(sessions_max=1, sessions_per_user_max=1), definition_shares=shares
    )
    host.subscribe(Interest("t", prefix=False, selector=b"a"), ("c", "i"), "ann")
    publish(host, topic("t"))
    with pytest.raises(FastRefused) as refused:
        host.subscribe(Interest("t", prefix=False, selector=b"b" * 500), ("c", "i"), "ann")
    assert refused.value.code == 506
    assert len(host.durable["c", "i"]) == 1
    before = shares.of("ann")
    found = host.subscribe(Interest("t", prefix=False, selector=b"b"), ("c", "i"), "ann")
    assert host.durable == {("c", "i"): found}
    assert shares.of("ann") == before


def test_a_route_to_a_queue_that_may_not_be_made_is_refused_and_one_that_may_is_made() -> None:
    message = Message(fast_address("queue", "new"), b"x")
    closed = FastHost("/", Changes(), queues=["q"], auto_create=False)
    outcome = publish(closed, message).outcomes[0]
    assert outcome is not None
    assert outcome.reason is Reason.NO_ROUTE
    host = FastHost("/", Changes())
    assert publish(host, message).outcomes == {0: None}
    assert len(host.queues["new"]) == 1


def test_subscriptions_take_what_they_are_for() -> None:
    host = FastHost("/", Changes(), topics=["a.x", "a.y", "b"])
    local = Sender("me")
    exact = host.subscribe(Interest("a.x", prefix=False))
    prefix = host.subscribe(Interest("a.", prefix=True))
    odd = host.subscribe(Interest("", prefix=True, selects=lambda message: message.body in (b"1", b"3")))
    deaf = host.subscribe(Interest("a.x", prefix=False, no_local=True))
    deaf.local = local
    source = publish(
        host,
        topic("a.x", b"1", local),
        topic("a.y", b"2"),
        topic("b", b"3"),
        topic("a.x", b"4"),
        topic("a.z", b"5"),
    )
    assert source.outcomes == dict.fromkeys(range(5))
    assert [message.body for _, message in exact.browse()] == [b"1", b"4"]
    assert [message.body for _, message in prefix.browse()] == [b"1", b"2", b"4", b"5"]
    assert [message.body for _, message in odd.browse()] == [b"1", b"3"]
    assert [message.body for _, message in deaf.browse()] == [b"4"]
    for one in (exact, prefix, odd, deaf):
        host.unsubscribe(one)
    assert host.subscriptions == []
    assert host.sinks(fast_address("topic", "a.x")) == ()


def test_temporaries() -> None:
    host = FastHost("/", Changes(), queues=["q"])
    channel = object()
    made = host.create_temporary("queue", "", "me", channel)
    assert made.name.startswith("tmp-")
    assert isinstance(made, FastQueue)
    named = host.create_temporary("queue", "mine", "me", channel)
    assert host.create_temporary("queue", "mine", "me", object()) is named
    for name in ("q", "mine"):
        with pytest.raises(FastRefused) as refused:
            host.create_temporary("queue", name, "you", channel)
        assert refused.value.code == 403
    host.delete_temporary_destinations(channel)
    assert set(host.queues) == {"q", "mine"}


def test_a_stored_selector_that_is_refused_now_ends_nothing(tmp_path: Path) -> None:
    """It selects nothing; another one takes its place."""
    given = {"/": FastVirtualHost(auto_create=True)}
    store = Store(tmp_path)
    host = FastHosts(given, Changes(), Limits(), store, SpooledBodies(Limits(), store))["/"]
    host.find("topic", "t", whole=False)
    deep = b"(" * 1_000 + b"a" + b")" * 1_000
    host.subscribe(Interest("t", prefix=False, selector=deep), ("me", "bad"))
    host.subscribe(Interest("t", prefix=False, selector=b"n = 1"), ("me", "good"))
    store.close()
    store = Store(tmp_path)
    host = FastHosts(given, Changes(), Limits(), store, SpooledBodies(Limits(), store))["/"]
    assert set(host.durable) == {("me", "bad"), ("me", "good")}
    selects = host.durable["me", "bad"].interest.selects
    assert selects is not None
    assert selects(Message(fast_address("topic", "t"), b"")) is False
    assert host.subscribe(Interest("t", prefix=False), ("me", "bad")).interest.selects is None
    store.close()


def test_a_declared_destination_for_which_clients_have_left_no_room_is_told(tmp_path: Path) -> None:
    store = Store(tmp_path)
    host = FastHosts({"/": FastVirtualHost()}, Changes(), Limits(), store, SpooledBodies(Limits(), store))[
        "/"
    ]
    for name in ("a", "b"):
        host.find("queue", name, whole=False)
    store.close()
    given = {"/": FastVirtualHost(destinations=DestinationNames(queues=("c",)), auto_create=True)}
    store = Store(tmp_path)
    with pytest.raises(ConfigurationError, match=r"'/': destinations: limits\.queues_max \(2\) is reached"):
        FastHosts(given, Changes(), Limits(queues_max=2), store, SpooledBodies(Limits(), store))
    store.close()


def test_what_the_store_has_is_there_again(tmp_path: Path) -> None:
    given = {"/": FastVirtualHost(destinations=DestinationNames(queues=("declared",)), auto_create=True)}
    for round_ in range(2):
        store = Store(tmp_path)
        host = FastHosts(given, Changes(), Limits(), store, SpooledBodies(Limits(), store))["/"]
        if not round_:
            host.find("queue", "made", whole=False)
            host.find("topic", "t", whole=False)
            host.create_temporary("queue", "gone", "me", object())
            interest = Interest(
                "t",
                prefix=False,
                selector=b"n = 1",
                mime_type="",
                selects=selection("", b"n = 1"),
                no_local=True,
            )
            host.subscribe(interest, ("me", "sub"))
            host.unsubscribe(host.subscribe(Interest("t", prefix=False), ("me", "other")))
        else:
            assert set(host.queues) == {"declared", "made"}
            assert set(host.topics) == {"t"}
            (found,) = host.durable.values()
            assert found.interest == interest
            assert found.interest.selects is not None
            assert found.storage is not None
            with pytest.raises(FastRefused, match="subscribes to 't'") as refused:
                host.subscribe(Interest("other", prefix=False), ("me", "sub"))
            assert refused.value.code == ReplyCode.TEMPORARILY_FORBIDDEN
            assert host.subscribe(interest, ("me", "sub")) is found
        store.close()
    given = {"/": FastVirtualHost(auto_create=False)}
    store = Store(tmp_path)
    host = FastHosts(given, Changes(), Limits(), store, SpooledBodies(Limits(), store))["/"]
    assert (list(host.queues), list(host.topics)) == ([], [])
    store.close()
