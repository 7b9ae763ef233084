"""What users define is counted in bytes: nobody's names and arguments take the memory of others.

The attacks are those that were seen to fill it: bindings with many arguments, long topic filters, long client
identifiers, arguments of queues, selectors. Each is refused in its protocol's words, and the user beside is
served, also after a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from pika import BasicProperties, BlockingConnection, ConnectionParameters, PlainCredentials
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker, ConnectionClosedByBroker, ProbableAccessDeniedError
from structlog.testing import capture_logs

from gateway.broker.amqp091.consistent_hash import DESTINATION_STEPS
from gateway.broker.amqp091.virtual_host import DELETED_AT_ONCE
from gateway.broker.matching_steps import EXCHANGE_STEPS
from gateway.broker.shares import CHANNEL_BYTES, HANDLE_BYTES, IDENTIFIER_BYTES
from gateway.model.shares import UserShares
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.events import ChannelClosed, CommandReceived, HandleClosed, Opened, Replies
from gateway.protocols.mqtt.packets import Disconnect, Will
from gateway.protocols.mqtt.properties import encode_list
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode, Version
from gateway.settings import Limits, StoreSettings
from tests.access.test_doors import PASSWORD, amqp, settings
from tests.ingress.amqpfast.client import TOPIC, Fast
from tests.ingress.clients import Mqtt, connect
from tests.interop.gateway_fixture import LOOPBACK, Running, running

TOTAL: Final = 40_000
SHARE: Final = TOTAL // 2
EVERYTHING: Final[dict[str, Any]] = {
    "mqtt": {"publish": "#", "subscribe": "#"},
    "amqp091": {"*": {"configure": ".*", "write": ".*", "read": ".*"}},
    "amqpfast": {"*": {"topics": {"read": "*", "write": "*", "create": "*"}}},
}
USERS: Final = {"greedy": ("all",), "modest": ("all",)}
LONG: Final = "x" * 200


@contextmanager
def gateway_at(folder: Path, **limits: Any) -> Iterator[Running]:
    given = Limits(**({"definitions_bytes_max": TOTAL} | limits))
    store = StoreSettings(path=folder / "store")
    with running(settings({"all": EVERYTHING}, USERS, limits=given, store=store)) as one:
        yield one


def client_of(gateway: Running, user: str, client_id: str, **more: Any) -> tuple[Mqtt, int]:
    client, connack = connect(gateway, client_id, user=(user, PASSWORD.encode()), **more)
    return client, connack.reason


def shares(gateway: Running) -> UserShares:
    return gateway.gateway.quotas.definitions


Define = Callable[[BlockingChannel, int], object]


def until_refused(gateway: Running, user: str, define: Define, why: str) -> int:
    """Define more and more until that is refused for this reason; return how many there are."""
    connection = amqp(gateway, user)
    channel = connection.channel()
    channel.queue_declare(user, durable=True)
    made: list[int] = []

    def define_all() -> None:
        for number in range(1_000):
            define(channel, number)
            made.append(number)

    with pytest.raises(ConnectionClosedByBroker, match=why) as refused:
        define_all()
    assert refused.value.reply_code == 506
    return len(made)


def refused_queues(gateway: Running, user: str) -> int:
    arguments = {"x-dead-letter-exchange": "amq.fanout", "x-dead-letter-routing-key": LONG}

    def define(channel: BlockingChannel, number: int) -> None:
        channel.queue_declare(f"{user}.{number:03}.{LONG}", durable=True, arguments=arguments)

    return until_refused(gateway, user, define, "definitions_per_user_share")


def refused_bindings(gateway: Running, user: str) -> int:
    def define(channel: BlockingChannel, number: int) -> None:
        arguments = {f"h{number}.{at}": LONG for at in range(10)}
        channel.queue_bind(user, "amq.headers", str(number), arguments)

    return until_refused(gateway, user, define, "definitions_per_user_share")


def refused_filters(gateway: Running, user: str) -> int:
    client, reason = client_of(gateway, user, user, properties={Property.SESSION_EXPIRY_INTERVAL: 600})
    with client:
        assert reason == 0
        for number in range(1_000):
            if client.subscribe(f"{number}/{LONG}", 1) == ReasonCode.QUOTA_EXCEEDED:
                return number
    raise AssertionError("nothing was refused")


def refused_sessions(gateway: Running, user: str) -> int:
    for number in range(1_000):
        client, reason = client_of(
            gateway, user, f"{user}{number:03}{LONG}", properties={Property.SESSION_EXPIRY_INTERVAL: 600}
        )
        client.cut()
        if reason == ReasonCode.QUOTA_EXCEEDED:
            return number
    raise AssertionError("nothing was refused")


def refused_selectors(gateway: Running, user: str) -> int:
    with Fast(gateway, user, user=user, password=PASSWORD).open() as client:
        for number in range(1_000):
            handle = client.handle("t", TOPIC, producer=False, browser=False)
            selector = f"a = '{LONG * 4}'".encode()
            tag = client.machine.new_tag(1)
            client.say(m.HandleConsume(handle, tag, 1, identifier=f"s{number}", selector=selector))
            answer = client.next((Replies, ChannelClosed))  # type: ignore[arg-type]
            if isinstance(answer, ChannelClosed):
                assert answer.reply_code == 506
                return number
    raise AssertionError("nothing was refused")


def refused_wills(gateway: Running, user: str) -> int:
    """Leave delayed wills, each in another session, until one is refused."""
    will = Will("a/b", LONG.encode() * 10, properties={Property.WILL_DELAY_INTERVAL: 600})
    for number in range(100):
        expiry = {Property.SESSION_EXPIRY_INTERVAL: 600}
        client, reason = client_of(gateway, user, f"{user}{number}", properties=expiry, will=will)
        client.cut()
        if reason == ReasonCode.QUOTA_EXCEEDED:
            return number
    raise AssertionError("nothing was refused")


ATTACKS: Final = (
    *(refused_queues, refused_bindings, refused_filters, refused_sessions),
    *(refused_selectors, refused_wills),
)


@pytest.mark.parametrize("attack", ATTACKS)
def test_one_user_takes_no_more_than_its_share(attack: Any, tmp_path: Path) -> None:
    with gateway_at(tmp_path) as gateway:
        assert attack(gateway, "greedy") > 0
        taken = shares(gateway).of("greedy")
        assert SHARE * 3 // 4 < taken <= SHARE
        assert refused_filters(gateway, "modest") > 0, "others have theirs"
    with gateway_at(tmp_path) as gateway:  # what outlives the process is counted again
        assert shares(gateway).of("greedy") == taken
        assert shares(gateway).of("modest") > 0


def test_what_is_deleted_is_no_longer_counted(tmp_path: Path) -> None:
    with gateway_at(tmp_path) as gateway:
        before = shares(gateway).total
        with closing(amqp(gateway, "greedy")) as connection:
            channel = connection.channel()
            channel.exchange_declare("e", "headers", arguments={"alternate-exchange": "amq.fanout"})
            channel.exchange_declare("f", "topic")
            channel.exchange_bind("f", "e", arguments={"a": {"nested": ["x", "y"]}})
            channel.queue_declare("q", arguments={"x-max-length": 3})
            channel.queue_bind("q", "e", "k", {"a": 1, "b": LONG})
            channel.queue_bind("q", "f", "one")
            channel.queue_unbind("q", "f", "one")
            assert shares(gateway).of("greedy") > 0
            channel.exchange_delete("e")
            channel.exchange_delete("f")
            channel.queue_delete("q")
        client, _ = client_of(gateway, "greedy", "c", properties={Property.SESSION_EXPIRY_INTERVAL: 600})
        with client:
            client.subscribe("a/b", 1)
            client.subscribe("$share/g/a/b", 1)
        client, _ = client_of(gateway, "greedy", "c")
        with client:
            assert gateway.ask(lambda: shares(gateway).of("greedy")) > 0
        gateway.until(lambda: "c" not in gateway.gateway.mqtt.sessions)
        assert (shares(gateway).total, shares(gateway).of("greedy")) == (before, 0)


def test_a_will_counts_once_until_it_is_void(tmp_path: Path) -> None:
    expiry = {Property.SESSION_EXPIRY_INTERVAL: 600}
    with gateway_at(tmp_path) as gateway:
        client, _ = client_of(gateway, "greedy", "c", properties=expiry)
        client.cut()
        before = shares(gateway).of("greedy")
        large = Will("a/b", LONG.encode() * 30, properties={Property.WILL_DELAY_INTERVAL: 600})
        for _ in range(3):  # it does not exceed the share with its predecessor
            client, reason = client_of(gateway, "greedy", "c", clean=False, properties=expiry, will=large)
            assert reason == 0
            assert gateway.ask(lambda: shares(gateway).of("greedy")) > before + 12_000
            client.cut()
        client, _ = client_of(gateway, "greedy", "c", clean=False, properties=expiry)
        with client:
            assert gateway.ask(lambda: shares(gateway).of("greedy")) == before
        client, _ = client_of(gateway, "greedy", "c", clean=False, will=Will("a/b", b"x"))
        client.cut()  # its will is published at once
        gateway.until(lambda: shares(gateway).of("greedy") == 0)


def test_a_session_that_changes_hands_is_in_the_share_of_its_new_user(tmp_path: Path) -> None:
    given = settings({}, dict.fromkeys(USERS, ()), store=StoreSettings(path=tmp_path / "store"))
    with running(given) as gateway:
        client, _ = client_of(gateway, "greedy", "c", properties={Property.SESSION_EXPIRY_INTERVAL: 600})
        with client:
            client.subscribe("a/b", 1)
        client, _ = client_of(gateway, "modest", "c", clean=False)
        with client:
            assert shares(gateway).of("greedy") == 0
            assert shares(gateway).of("modest") > 0


@pytest.mark.parametrize("version, refusal", [(Version.V5, 0x8F), (Version.V311, 0x80)])
def test_a_topic_filter_has_a_length(version: Version, refusal: int, tmp_path: Path) -> None:
    with gateway_at(tmp_path, topic_filter_bytes_max=100, definitions_bytes_max=0) as gateway:
        client, _ = client_of(gateway, "greedy", "c", version=version)
        with client:
            assert client.subscribe("é" * 50, 1) == 1
            assert client.subscribe("é" * 50 + "x", 1) == refusal


@pytest.mark.parametrize("version, refusal", [(Version.V5, 0x85), (Version.V311, 0x85)])
def test_a_client_identifier_has_a_length(version: Version, refusal: int, tmp_path: Path) -> None:
    with gateway_at(tmp_path, client_id_bytes_max=100) as gateway:
        for client_id, reason in (("é" * 50, 0), ("é" * 50 + "x", refusal)):
            client, answer = client_of(gateway, "greedy", client_id, version=version)
            with client:
                assert answer == reason


def test_there_are_so_many_arguments(tmp_path: Path) -> None:
    with gateway_at(tmp_path, arguments_max=16) as gateway, closing(amqp(gateway, "greedy")) as connection:
        many = {"x-match": "all", "a": {"b": 1}, **{f"h{at}": at for at in range(13)}}
        channel = connection.channel()
        channel.queue_declare("q")
        channel.queue_bind("q", "amq.headers", "", many)
        with pytest.raises(ChannelClosedByBroker) as refused:
            channel.queue_bind("q", "amq.headers", "", many | {"one": 1})
        assert (refused.value.reply_code, "arguments_max" in refused.value.reply_text) == (406, True)


def test_one_user_takes_not_all_exchanges(tmp_path: Path) -> None:
    with gateway_at(tmp_path, exchanges_per_user_max=3) as gateway:
        for user in USERS:

            def define(channel: BlockingChannel, number: int, user: str = user) -> None:
                channel.exchange_declare(f"{user}{number}", "fanout")

            assert until_refused(gateway, user, define, "exchanges_per_user_max") == 3


def test_one_user_takes_not_all_bindings(tmp_path: Path) -> None:
    with gateway_at(tmp_path, bindings_per_user_max=3) as gateway:
        for user in USERS:

            def define(channel: BlockingChannel, number: int, user: str = user) -> None:
                channel.queue_bind(user, "amq.topic", str(number))

            assert until_refused(gateway, user, define, "bindings_per_user_max") == 3


# Whoever binds is charged, whoever owns what is bound.


def until_full(channel: BlockingChannel, bind: Callable[[int], object]) -> int:
    """Bind until that is refused; return how many bindings there are."""
    made: list[int] = []

    def bind_all() -> None:
        for number in range(1_000):
            bind(number)
            made.append(number)

    with pytest.raises(ConnectionClosedByBroker) as refused:
        bind_all()
    assert refused.value.reply_code == 506
    return len(made)


@pytest.mark.parametrize("kind", ["queue", "exchange"])
def test_bindings_to_what_another_user_owns_are_in_the_share_of_who_binds(kind: str, tmp_path: Path) -> None:
    """Also after a restart, until they go: each by itself, with their source, or with what is bound."""

    def bound(channel: BlockingChannel, number: int) -> None:
        arguments = {"a": LONG}
        if kind == "queue":
            channel.queue_bind("m", "e", f"{number}", arguments)
        else:
            channel.exchange_bind("me", "e", f"{number}", arguments)

    with (
        gateway_at(tmp_path, bindings_per_user_max=12) as gateway,
        closing(amqp(gateway, "modest")) as connection,
    ):
        modest = connection.channel()
        modest.queue_declare("m", durable=True)
        modest.exchange_declare("me", "fanout", durable=True)
        modest.exchange_declare("e", "topic", durable=True)
        mine = gateway.ask(lambda: shares(gateway).of("modest"))
        greedy = amqp(gateway, "greedy").channel()
        assert until_full(greedy, lambda number: bound(greedy, number)) == 12
        assert gateway.ask(lambda: shares(gateway).of("modest")) == mine
        bound(modest, 100)
        modest.queue_bind("m", "e", "another")
    with gateway_at(tmp_path, bindings_per_user_max=12) as gateway:
        of = shares(gateway)
        assert of.of("greedy") > 12 * len(LONG)
        greedy = amqp(gateway, "greedy").channel()
        assert until_full(greedy, lambda number: bound(greedy, number + 20)) == 0
        with closing(amqp(gateway, "modest")) as connection:
            modest = connection.channel()
            bound(modest, 101)
            before = gateway.ask(lambda: (of.of("greedy"), of.of("modest")))
            if kind == "queue":
                modest.queue_unbind("m", "e", "0", {"a": LONG})
            else:
                modest.exchange_unbind("me", "e", "0", {"a": LONG})
            after = gateway.ask(lambda: (of.of("greedy"), of.of("modest")))
            assert (after[0] < before[0], after[1]) == (True, before[1])
            if kind == "queue":
                modest.queue_delete("m")
            else:
                modest.exchange_delete("e")
            assert gateway.ask(lambda: of.of("greedy")) == 0
        with closing(amqp(gateway, "greedy")) as connection:
            channel = connection.channel()
            channel.queue_declare("g")
            channel.queue_bind("g", "amq.topic", "again")


def test_steps_of_matching_are_those_of_who_binds(tmp_path: Path) -> None:
    with gateway_at(tmp_path, matching_steps_per_user_max=1_000, definitions_bytes_max=0) as gateway:
        steps = gateway.gateway.host.steps
        with closing(amqp(gateway, "modest")) as connection:
            modest = connection.channel()
            modest.queue_declare("m")
            greedy = amqp(gateway, "greedy").channel()
            pattern = "#.{}.*.#.*.#"
            until_full(greedy, lambda number: greedy.queue_bind("m", "amq.topic", pattern.format(number)))
            assert gateway.ask(lambda: (steps.of("modest"), steps.of("greedy") > 0)) == (0, True)
            modest.queue_bind("m", "amq.topic", pattern.format("mine"))
            modest.queue_bind("m", "amq.topic", pattern.format("0"))  # is there
            modest.queue_unbind("m", "amq.topic", pattern.format("mine"))
            assert gateway.ask(lambda: steps.of("modest")) == 0
            modest.queue_delete("m")
            gateway.until(lambda: steps.of("greedy") == 0)


def test_steps_of_a_hash_exchange_are_those_of_who_binds_first(tmp_path: Path) -> None:
    with (
        gateway_at(tmp_path) as gateway,
        closing(amqp(gateway, "modest")) as connection,
        closing(amqp(gateway, "greedy")) as other,
    ):
        steps = gateway.gateway.host.steps
        modest = connection.channel()
        modest.queue_declare("m")
        modest.exchange_declare("h", "x-consistent-hash")
        other.channel().queue_bind("m", "h", "1")
        modest.queue_bind("m", "h", "2")
        assert gateway.ask(lambda: (steps.of("greedy"), steps.of("modest"))) == (DESTINATION_STEPS, 0)
        modest.queue_unbind("m", "h", "1")
        modest.queue_unbind("m", "h", "2")
        assert gateway.ask(lambda: steps.of("greedy")) == 0


def test_steps_of_exchanges_bound_to_each_other_are_those_of_who_binds(tmp_path: Path) -> None:
    """Each message may visit all of them."""
    limits = {"matching_steps_per_user_max": 1_000, "definitions_bytes_max": 0}
    with gateway_at(tmp_path, **limits) as gateway:
        steps = gateway.gateway.host.steps
        channel = amqp(gateway, "greedy").channel()
        names = [f"e{number}" for number in range(9)]
        for name in names:
            channel.exchange_declare(name, "fanout")
        pairs = [(one, other) for one in names for other in names if one != other]
        until_full(channel, lambda number: channel.exchange_bind(*pairs[number]))
        charged = gateway.ask(lambda: steps.of("greedy"))
        assert 1_000 - EXCHANGE_STEPS < charged <= 1_000
        with closing(amqp(gateway, "greedy")) as connection:
            again = connection.channel()
            again.exchange_bind(*pairs[0], routing_key="another")  # leads there already
            assert gateway.ask(lambda: steps.of("greedy")) == charged
            for name in names:
                again.exchange_delete(name)
        gateway.until(lambda: steps.of("greedy") == 0)


def test_an_owner_of_many_exclusive_queues_that_goes_takes_all_with_it(tmp_path: Path) -> None:
    with gateway_at(tmp_path) as gateway:
        count = 2 * DELETED_AT_ONCE + 1
        connection = amqp(gateway, "greedy")
        channel = connection.channel()
        for number in range(count):
            channel.queue_declare(f"own {number}", exclusive=True)
        connection.close()
        gateway.until(lambda: not gateway.gateway.host.queues)


# What routes bring into being.

ROUTE: Final = """\
version: 1
routes:
  - name: in
    from: {endpoint: mqtt, topic: "in/{x}"}
    to: {endpoint: amqpfast, service: queue, destination: "{x}"}
"""


def arrive(gateway: Running, names: list[str]) -> int:
    """Publish to a queue of each name, by way of the route; return how many are accepted."""
    client, _ = client_of(gateway, "greedy", "c")
    with client:
        codes = []
        for packet_id, name in enumerate(names, 1):
            client.publish(f"in/{name}", b"x", qos=1, packet_id=packet_id)
            codes.append(client.acked(PacketType.PUBACK)[1])
    return codes.count(0)


@pytest.mark.parametrize("limit", ["number", "bytes"])
def test_queues_that_routes_make_have_a_share_and_leave_room(limit: str, tmp_path: Path) -> None:
    """Also after a restart; they hold their publishers as those of the configuration do."""
    (tmp_path / "m.yaml").write_text(ROUTE)
    limits: dict[str, Any] = {"queues_max": 10} if limit == "number" else {"definitions_bytes_max": 6_000}
    most = 9 if limit == "number" else 3_000 // (2 * 100)
    store = StoreSettings(path=tmp_path / "store")
    roles = {"all": EVERYTHING | {"amqpfast": {"*": {"queues": {"read": "*", "write": "*", "create": "*"}}}}}
    given = settings(roles, USERS, limits=Limits(**limits), store=store, mappings=(str(tmp_path / "m.yaml"),))
    names = [f"q{number:099}" for number in range(most + 5)]
    for round_number in range(2):
        with running(given) as gateway, capture_logs() as lines:
            host = gateway.gateway.fast_hosts["/"]
            accepted = arrive(gateway, names)
            assert accepted == most
            assert gateway.ask(lambda: len(host.queues)) == most + round_number  # noqa: B023
            made = gateway.ask(lambda: host.queues[names[0]])  # noqa: B023
            assert (made.owning_user, made.may_hold) == (None, True)
            assert "queue for route not created" in {line["event"] for line in lines}
            with Fast(gateway, user="modest", password=PASSWORD).open() as client:
                client.put(client.handle("mine"), b"x")
            assert gateway.ask(lambda: host.queues["mine"].owning_user) == "modest"  # noqa: B023


# What connections open.


def opened(gateway: Running) -> UserShares:
    return gateway.gateway.quotas.opened


def opens_channels(gateway: Running, user: str) -> tuple[int, int]:
    """Open channels until that is refused; return how many, and the code."""
    connection = amqp(gateway, user)
    made: list[BlockingChannel] = []
    with pytest.raises(ConnectionClosedByBroker, match="definitions_per_user_share") as refused:
        made += [connection.channel() for _ in range(100)]
    return opened(gateway).refused, int(refused.value.reply_code)


def opens_handles(gateway: Running, user: str) -> tuple[int, int]:
    with Fast(gateway, user=user, password=PASSWORD).open() as client:
        for number in range(100):
            client.ask_handle("t", TOPIC)
            answer = client.next((Replies, ChannelClosed, HandleClosed))  # type: ignore[arg-type]
            if not isinstance(answer, Replies):
                return number, int(answer.reply_code)
    raise AssertionError("nothing was refused")


def opens_fast_channels(gateway: Running, user: str) -> tuple[int, int]:
    with Fast(gateway, user=user, password=PASSWORD) as client:
        client.next(Opened)
        for number in range(100):
            client.machine.open_channel()
            client.flush()
            answer = client.next((Replies, ChannelClosed))  # type: ignore[arg-type]
            if not isinstance(answer, Replies):
                return number, int(answer.reply_code)
    raise AssertionError("nothing was refused")


def lists_messages(gateway: Running, user: str) -> tuple[int, int]:
    """List the same messages on one handle after the other: each gives them identifiers."""
    with Fast(gateway, user=user, password=PASSWORD).open() as client:
        for number in range(10):
            handle = client.handle("t", TOPIC)
            client.consume(handle)
            assert client.ask(m.HandleFlow(handle, 0, True))[3] == 200
            client.put(handle, *[b"x"] * 10)
            client.say(m.HandleQuery(handle))
            answer = client.next((CommandReceived, ChannelClosed))  # type: ignore[arg-type]
            if not isinstance(answer, CommandReceived):
                return number, int(answer.reply_code)
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize("attack", [opens_channels, opens_handles, opens_fast_channels, lists_messages])
def test_one_user_opens_no_more_than_its_share(attack: Any, tmp_path: Path) -> None:
    """Thousands of channels and handles on each of its connections filled the memory of all."""
    with gateway_at(tmp_path) as gateway, closing(amqp(gateway, "greedy")) as first:
        channel = first.channel()
        count, code = attack(gateway, "greedy")
        assert (count > 0, code) == (True, 506)
        with closing(amqp(gateway, "modest")) as connection:
            connection.channel()
        gateway.until(lambda: opened(gateway).total == CHANNEL_BYTES)  # its end gives all of it back
        channel.close()
        gateway.until(lambda: opened(gateway).total == 0)
        first.channel()
    assert opened(gateway).total == 0


def test_large_client_properties_count_while_their_connection_is_open(tmp_path: Path) -> None:
    def connected(user: str) -> BlockingConnection:
        parameters = ConnectionParameters(
            LOOPBACK,
            gateway.amqp,
            credentials=PlainCredentials(user, PASSWORD),
            client_properties={f"p{at}": LONG for at in range(20)},
        )
        return BlockingConnection(parameters)

    with gateway_at(tmp_path) as gateway:
        connections: list[BlockingConnection] = []
        with pytest.raises(ProbableAccessDeniedError, match=r"\(506\).*definitions_per_user_share"):
            connections += (connected("greedy") for _ in range(20))
        assert connections
        assert SHARE // 2 < gateway.ask(lambda: opened(gateway).of("greedy")) <= SHARE
        connected("modest").close()
        for one in connections:
            one.close()
        gateway.until(lambda: opened(gateway).total == 0)
        with closing(amqp(gateway, "greedy")):
            assert gateway.ask(lambda: opened(gateway).total) == 0, "usual properties are not counted"


def test_the_name_of_an_amqp_connection_has_a_length(tmp_path: Path) -> None:
    """It is stored with every run of the client's messages, whose limits count their own bytes only."""
    with gateway_at(tmp_path, client_id_bytes_max=100, definitions_bytes_max=0) as gateway:
        parameters = ConnectionParameters(
            LOOPBACK,
            gateway.amqp,
            credentials=PlainCredentials("greedy", PASSWORD),
            client_properties={"connection_name": LONG * 100},
        )
        with closing(BlockingConnection(parameters)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.queue_declare("q", durable=True)
            channel.basic_publish("", "q", b"x", BasicProperties(delivery_mode=2))
            (found,) = gateway.ask(lambda: [*gateway.gateway.hosts["/"].queues["q"].browse()])
            assert found[1].sender.client == LONG[:100]


def test_what_is_closed_is_no_longer_counted(tmp_path: Path) -> None:
    with gateway_at(tmp_path) as gateway, Fast(gateway, user="greedy", password=PASSWORD).open() as client:
        before = opened(gateway).of("greedy")
        for _ in range(100):
            handle = client.handle("t", TOPIC)
            assert opened(gateway).of("greedy") == before + HANDLE_BYTES + 2
            client.machine.close_handle(handle)
            client.flush()
            gateway.until(lambda: opened(gateway).of("greedy") == before)


def test_messages_that_a_query_lists_are_counted_once_while_their_handle_is_open(tmp_path: Path) -> None:
    with gateway_at(tmp_path) as gateway, Fast(gateway, user="greedy", password=PASSWORD).open() as client:
        before = opened(gateway).of("greedy")
        handle = client.handle("t", TOPIC)
        client.consume(handle)
        assert client.ask(m.HandleFlow(handle, 0, True))[3] == 200
        client.put(handle, *[b"x"] * 10)
        for _ in range(3):
            assert client.index(handle)[0] == list(range(1, 11))
            assert opened(gateway).of("greedy") == before + HANDLE_BYTES + 2 + 10 * IDENTIFIER_BYTES
        client.machine.close_handle(handle)
        client.flush()
        gateway.until(lambda: opened(gateway).of("greedy") == before)


def test_topics_of_aliases_have_a_length(tmp_path: Path) -> None:
    with gateway_at(tmp_path) as gateway:
        client, _ = client_of(gateway, "greedy", "c")
        with client:
            for alias in range(1, 64):
                client.publish("x" * 1_000, qos=1, packet_id=alias, properties=aliased(alias))
                assert client.acked(PacketType.PUBACK)[0] == alias
            for alias in range(1, 64):  # in place of another
                client.publish("y" * 1_040, qos=1, packet_id=alias, properties=aliased(alias))
                assert client.acked(PacketType.PUBACK)[0] == alias
            client.publish("z" * 17, qos=1, packet_id=1, properties=aliased(64))
            assert client.next(Disconnect).reason == ReasonCode.QUOTA_EXCEEDED


def aliased(alias: int) -> bytes:
    return encode_list({Property.TOPIC_ALIAS: alias}, PacketType.PUBLISH)
