"""AMQP/Fast clients of two gateways over one RabbitMQ, which may be at either."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pika
import pytest
from pydantic import SecretStr

from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.events import HandleClosed
from gateway.settings import User
from gateway.settings.access import Role
from tests.chaos.proxy import Proxy
from tests.engine.replicas import Client, Replica, replicas
from tests.ingress.amqpfast.client import PERSISTENT, QUEUE, TOPIC, Fast, fresh, head
from tests.ingress.amqpfast.large import MIB, Whole, octets
from tests.ingress.clients import eventually
from tests.interop.servers import RabbitMQ
from tests.passwords import hashed

SMALL = {"queue_messages_max": 5, "message_bytes_max": 100_000}
WORDS = ("read", "write", "create")
numbers = itertools.count()
Pair = tuple[Replica, Replica]


@pytest.fixture(scope="module", params=["classic", "quorum"])
def two(rabbitmq: RabbitMQ, request: pytest.FixtureRequest) -> Iterator[Pair]:
    names = (f"{request.param}-one", f"{request.param}-other")
    one, other = (
        Replica(name, rabbitmq.url, f"fast-{request.param}", queue_type=request.param, fast={})
        for name in names
    )
    with replicas(one, other):
        yield one, other


@pytest.fixture
def name() -> str:
    """A destination of this test's own."""
    return f"tests.{next(numbers)}"


# --- queues


def test_what_one_takes_the_other_delivers(two: Pair, name: str) -> None:
    """With its head octet for octet, in order."""
    said = head(persistent=True, priority=0, identifier="id", headers={"n": -7, "s": "ü"})
    with Fast(two[0]).open() as sender, Fast(two[1]).open() as receiver:
        sender.put(sender.handle(name), *[b"%d" % at for at in range(50)], head=said)
        receiver.consume(receiver.handle(name))
        rows = receiver.rows(50)
        assert [row[4] for row in rows] == [b"%d" % at for at in range(50)]
        assert all(fresh(row) and row[3] == said and row[5] == name.encode() for row in rows)
        receiver.ack(50)
        sender.consume(sender.handle(name))
        assert sender.quiet(), "they are gone for good"


def test_consumers_of_both_share_a_queue_within_their_windows(two: Pair, name: str) -> None:
    with Fast(two[0]).open() as one, Fast(two[1]).open() as other:
        one.consume(one.handle(name), prefetch=3)
        other.consume(other.handle(name), prefetch=2)
        one.put(one.handle(name), *[b"%d" % at for at in range(10)])
        first, second = one.rows(3), other.rows(2)
        assert one.quiet()
        assert other.quiet()
        one.ack(first[0][1])
        third = one.rows(1)
        bodies = [row[4] for row in (*first, *second, *third)]
        assert len(set(bodies)) == 6


def test_what_a_client_has_not_acknowledged_the_other_replica_gets(two: Pair, name: str) -> None:
    with Fast(two[1]).open() as other:
        with Fast(two[0]).open() as one:
            one.put(one.handle(name), b"1", b"2", b"3", head=PERSISTENT)
            one.consume(one.handle(name))
            one.rows(3)
            one.ack(1)
            other.consume(other.handle(name))
            assert other.quiet()
            one.cut()
        rows = other.rows(2)
        assert [(row[4], fresh(row)) for row in sorted(rows, key=lambda row: row[4])] == [
            (b"2", False),
            (b"3", False),
        ]


def test_what_one_cannot_use_another_gets(two: Pair, name: str) -> None:
    with Fast(two[0]).open() as one, Fast(two[1]).open() as other:
        handle = one.handle(name)
        one.put(handle, b"x")
        one.consume(handle)
        (row,) = one.rows(1)
        other.consume(other.handle(name))
        one.say(m.HandleFlow(handle, 0, True))
        assert one.ask(m.HandleUnget(handle, 0, row[1]))[3] == 200
        assert [(row[4], fresh(row)) for row in other.rows(1)] == [(b"x", False)]


def test_who_is_stopped_leaves_the_rest_to_others(two: Pair, name: str) -> None:
    with Fast(two[0]).open() as one, Fast(two[1]).open() as other:
        handle = one.handle(name)
        one.consume(handle)
        assert one.ask(m.HandleFlow(handle, 0, True))[3] == 200
        one.put(handle, b"1", b"2")
        other.consume(other.handle(name))
        assert other.bodies(2) == [b"1", b"2"]
        other.ack(2)
        other.leave()
        assert one.ask(m.HandleFlow(handle, 0, False))[3] == 200
        one.put(handle, b"3")
        assert one.bodies(1) == [b"3"]


def test_a_window_that_closes_and_opens_loses_nothing(two: Pair, name: str) -> None:
    """Consumers that come and go: the queue is consumed anew each time, and each message comes once."""
    with Fast(two[0]).open() as sender, Fast(two[1]).open() as receiver:
        out = sender.handle(name)
        bodies: list[bytes] = []
        for turn in range(10):
            handle = receiver.handle(name)
            receiver.consume(handle, prefetch=turn + 1)
            sender.put(out, b"%d" % turn, b"%d'" % turn)
            for _ in range(2):
                (row,) = receiver.rows(1)
                bodies.append(row[4])
                receiver.ack(row[1])
            receiver.machine.close_handle(handle)
            receiver.flush()
        assert sorted(bodies) == sorted(b for at in range(10) for b in (b"%d" % at, b"%d'" % at))


# --- topics


def test_topics_reach_subscribers_of_both(two: Pair, name: str) -> None:
    with Fast(two[0]).open() as one, Fast(two[1]).open() as other:
        mine, theirs = one.handle(f"{name}.a", TOPIC), other.handle(f"{name}.", TOPIC)
        one.consume(mine)
        other.consume(theirs)
        one.put(mine, b"1")
        other.put(other.handle(f"{name}.a", TOPIC), b"2")
        other.put(other.handle(f"{name}.b.c", TOPIC), b"3")
        assert one.bodies(2) == [b"1", b"2"]
        rows = other.rows(3)
        assert [(row[4], row[5]) for row in rows] == [
            (b"1", f"{name}.a".encode()),
            (b"2", f"{name}.a".encode()),
            (b"3", f"{name}.b.c".encode()),
        ]


@pytest.mark.parametrize("topic, others", [("a.*", ["a.b", "a.*.c"]), ("*", ["b"]), ("a..b", ["a.b"])])
def test_names_are_plain_texts(two: Pair, name: str, topic: str, others: list[str]) -> None:
    """What is a wildcard to the cluster is none."""
    with Fast(two[0]).open() as one, Fast(two[1]).open() as other:
        one.consume(one.handle(f"{name}.{topic}", TOPIC))
        for wrong in others:
            other.put(other.handle(f"{name}.{wrong}", TOPIC), b"no")
        other.put(other.handle(f"{name}.{topic}", TOPIC), b"yes")
        assert one.bodies(1) == [b"yes"]


def test_a_name_is_the_same_at_all_replicas(two: Pair, name: str) -> None:
    """One that others begin with is no beginning, wherever they are known; `name.` is."""
    with Fast(two[0]).open() as one, Fast(two[1]).open() as other:
        for service in (QUEUE, TOPIC):
            one.consume(one.handle(name, service))
            other.put(other.handle(f"{name}.more", service), b"to another")
            other.put(other.handle(name, service), b"x")
            assert one.bodies(1) == [b"x"]
        other.consume(other.handle(f"{name}."))
        assert other.bodies(1) == [b"to another"]


def test_no_local_is_for_one_connection(two: Pair, name: str) -> None:
    with Fast(two[0]).open() as one, Fast(two[1]).open() as other:
        handle = one.handle(name, TOPIC)
        one.consume(handle, no_local=True)
        one.put(handle, b"mine")
        other.put(other.handle(name, TOPIC), b"theirs")
        assert one.bodies(1) == [b"theirs"]
        assert one.quiet()


def test_topics_are_joined_with_those_of_mqtt(two: Pair, name: str) -> None:
    """By the routes that there are by default, whichever replica a client is at."""
    topic = name.replace(".", "/")
    with (
        Fast(two[0]).open() as fast,
        Client(two[1].mqtt, "subscriber") as subscriber,
        Client(two[1].mqtt, "publisher") as publisher,
    ):
        subscriber.subscribe(topic, qos=1)
        handle = fast.handle(name, TOPIC)
        fast.consume(handle)
        publisher.publish(topic, b"from mqtt")
        assert fast.bodies(1) == [b"from mqtt"]
        fast.put(handle, b"from fast", head=PERSISTENT)
        subscriber.until(lambda: len(subscriber.messages) == 2)
        assert [body for _, body in subscriber.told] == [b"from mqtt", b"from fast"]


# --- durable subscriptions, and names of clients


def test_a_durable_subscription_is_resumed_at_another_replica(two: Pair, name: str) -> None:
    with Fast(two[0], f"d-{name}").open() as client:
        client.consume(client.handle(name, TOPIC), identifier="sub")
        with Fast(two[1]).open() as other:
            other.put(other.handle(name, TOPIC), b"1", b"2", head=PERSISTENT)
        assert client.bodies(2) == [b"1", b"2"]
        client.ack(1)
        client.leave()
    with Fast(two[0]).open() as other:
        other.put(other.handle(name, TOPIC), b"3", head=PERSISTENT)
    with Fast(two[1], f"d-{name}").open() as client:
        handle = client.handle(name, TOPIC)
        client.consume(handle, identifier="sub")
        assert sorted(client.bodies(2)) == [b"2", b"3"]
        client.ack(2)
        assert client.ask(m.HandleCancel(handle, 0, "", "sub"))[3] == 200
        client.consume(client.handle(name, TOPIC), identifier="sub")
        assert client.quiet()


def test_a_subscription_is_cancelled_where_it_was_not_made(two: Pair, name: str) -> None:
    with Fast(two[0], f"c-{name}").open() as client:
        client.consume(client.handle(name, TOPIC), identifier="sub")
        client.leave()
    with Fast(two[1], f"c-{name}").open() as client:
        handle = client.handle(name, TOPIC)
        client.put(handle, b"it waits")
        assert client.ask(m.HandleCancel(handle, 0, "", "sub"))[3] == 200
        client.say(m.HandleCancel(handle, 0, "", "sub"))
        assert client.handle_closed() == (handle, 404)
        client.consume(client.handle(name, TOPIC), identifier="sub")
        assert client.quiet()


def test_a_subscription_is_cancelled_by_its_user_alone(rabbitmq: RabbitMQ, name: str) -> None:
    """Also where it was not made, and where nothing is known but that there is one."""
    everything = Role.model_validate({"amqpfast": {"*": {"topics": dict.fromkeys(WORDS, "*")}}})
    users = {one: User(password_hash=SecretStr(hashed("right")), roles=("all",)) for one in ("ann", "bob")}
    given = {"roles": {"all": everything}, "users": users}
    one, other = (
        Replica(f"cancel-{at}", rabbitmq.url, "fast-cancel", fast={}, settings=given) for at in range(2)
    )
    with replicas(one, other):
        with Fast(one, f"c-{name}", user="ann", password="right").open() as client:
            client.consume(client.handle(name, TOPIC), identifier="sub")
            client.leave()
        for where in (one, other):
            with Fast(where, f"c-{name}", user="bob", password="right").open() as client:
                client.say(m.HandleCancel(client.handle(name, TOPIC), 0, "", "sub"))
                assert client.next(HandleClosed).reply_code == 403
                client.leave()
        with Fast(other, f"c-{name}", user="ann", password="right").open() as client:
            handle = client.handle(name, TOPIC)
            assert client.ask(m.HandleCancel(handle, 0, "", "sub"))[3] == 200
            client.say(m.HandleCancel(handle, 0, "", "sub"))
            assert client.handle_closed() == (handle, 404)


@pytest.mark.parametrize("again", [{"selector": b"n > 1"}, {"no_local": True}])
def test_one_that_is_for_something_else_is_made_anew(two: Pair, name: str, again: dict[str, object]) -> None:
    with Fast(two[0], f"e-{name}").open() as client:
        client.consume(client.handle(name, TOPIC), identifier="sub")
        client.leave()
    with Fast(two[1], f"e-{name}").open() as client, Fast(two[0]).open() as other:
        client.put(client.handle(name, TOPIC), b"for what it was", head=head(headers={"n": 9}))
        client.consume(client.handle(name, TOPIC), identifier="sub", **again)
        other.put(other.handle(name, TOPIC), b"for what it is", head=head(headers={"n": 2}))
        assert client.bodies(1) == [b"for what it is"]
        assert client.quiet()


def test_a_name_has_one_client_at_all_replicas(two: Pair, name: str) -> None:
    with Fast(two[0], name).open() as first:
        second = Fast(two[1], name)
        assert second.closed() == 320
        second.sock.close()
        first.leave()
    with Fast(two[1], name).open() as third:
        third.leave()


# --- temporary destinations


def test_a_temporary_queue_is_answered_from_elsewhere_and_consumed_by_its_owner(two: Pair, name: str) -> None:
    with Fast(two[0]).open() as owner, Fast(two[1]).open() as other:
        handle = owner.ask_handle("", temporary=True)
        made = owner.command(m.HandleCreated).dest_name
        assert owner.reply()[3] == 200
        theirs = other.handle(made)
        other.put(theirs, b"answer")
        other.say(m.HandleConsume(theirs, 0, 1))
        assert other.handle_closed() == (theirs, 403)
        owner.consume(handle)
        assert owner.rows(1)[0][4:] == (b"answer", made.encode())

        assert other.ask_handle("tmp-that-never-was")
        event = other.next(HandleClosed)
        assert event.reply_code == 404, event


def test_a_named_one_is_its_clients_wherever_that_is(two: Pair, name: str) -> None:
    with Fast(two[0], f"o-{name}").open() as owner:
        handle = owner.ask_handle(name, temporary=True)
        assert owner.command(m.HandleCreated).dest_name == name
        assert owner.reply()[3] == 200
        with Fast(two[1]).open() as other:
            theirs = other.ask_handle(name, temporary=True)
            assert other.handle_closed() == (theirs, 403)
            sending = other.handle(name)
            other.put(sending, b"x")
            other.say(m.HandleConsume(sending, 0, 1))
            assert other.handle_closed() == (sending, 403)
        owner.consume(handle)
        assert owner.bodies(1) == [b"x"]


# --- transactions


def test_what_is_committed_at_one_is_at_the_other(two: Pair, name: str) -> None:
    with Fast(two[0]).open(transacted=True) as client, Fast(two[1]).open() as other:
        asked, answers = client.handle(f"{name}.in"), client.handle(f"{name}.out")
        other.put(other.handle(f"{name}.in"), b"1", b"2")
        other.consume(other.handle(f"{name}.out"))
        client.consume(asked, prefetch=1)
        client.rows(1)
        client.put(answers, b"1 is done")
        assert other.quiet()
        assert client.ask(m.ChannelCommit(1))[3] == 200
        assert other.bodies(1) == [b"1 is done"]
        client.rows(1)
        client.ack(2)
        client.put(answers, b"never")
        client.leave()
        again = other.handle(f"{name}.in")
        other.consume(again)
        assert [(row[4], fresh(row)) for row in other.rows(1)] == [(b"2", False)]
        assert other.quiet()


def test_who_acknowledges_within_a_transaction_gets_more(two: Pair, name: str) -> None:
    with Fast(two[0]).open(transacted=True) as client, Fast(two[1]).open() as other:
        other.put(other.handle(name), *[b"%d" % at for at in range(100)])
        client.consume(client.handle(name), prefetch=1)
        for at in range(100):
            (row,) = client.rows(1)
            assert row[4] == b"%d" % at
            client.ack(row[1])
        assert client.ask(m.ChannelRollback(1))[3] == 200
        (row,) = client.rows(1)
        assert not fresh(row)


# --- large messages


def test_a_transfer_goes_on_where_it_was_begun_and_begins_again_elsewhere(two: Pair, name: str) -> None:
    body = octets(2 * MIB)
    with Whole(two[0], f"t-{name}").open(restartable=True) as client:
        handle = client.handle(name)
        assert client.prepare(handle, body) == 0
        client.resume(handle, body, 0, stop=MIB)
        assert client.quiet()
        client.leave()
    with Whole(two[1], f"t-{name}").open(restartable=True) as client:
        assert client.prepare(client.handle(name), body) == 0
        client.leave()
    with Whole(two[0], f"t-{name}").open(restartable=True) as client, Whole(two[1]).open() as other:
        handle = client.handle(name)
        assert client.prepare(handle, body) == MIB
        tag = client.machine.new_tag(1)
        client.resume(handle, body, MIB, tag)
        assert client.reply()[1:4] == (handle, tag, 200)
        other.consume(other.handle(name))
        assert other.large()[4] == body


# --- the cluster


def test_a_connection_to_the_cluster_that_is_lost(rabbitmq: RabbitMQ, name: str) -> None:
    """What was sent is confirmed when there is another, what was not acknowledged comes again, names and
    subscriptions stay."""
    with Proxy(rabbitmq.port) as proxy:
        url = f"amqp://guest:guest@127.0.0.1:{proxy.port}/%2F"
        waits = {"reconnect_min_secs": 0.1, "reconnect_max_secs": 0.3}
        one = Replica("cut", url, "fast-cut", queue_type="classic", fast={}, **waits)
        with replicas(one), Fast(one, "named").open() as client:
            queue, topic = client.handle(name), client.handle(name, TOPIC)
            client.put(queue, b"1", b"2")
            client.consume(queue)
            client.consume(topic, identifier="sub")
            client.rows(2)
            proxy.cut()
            client.put(queue, b"3")
            client.put(topic, b"4")
            rows = client.rows(4)
            assert sorted(row[4] for row in rows) == [b"1", b"2", b"3", b"4"]
            client.ack(max(row[1] for row in rows))
            second = Fast(one, "named")
            assert second.closed() == 320
            second.sock.close()


def test_a_queue_that_is_full_refuses_and_a_subscription_loses_the_oldest(
    rabbitmq: RabbitMQ, name: str
) -> None:
    one = Replica("full", rabbitmq.url, "fast-full", queue_type="classic", fast={}, limits=SMALL)
    with replicas(one), Fast(one).open() as sender:
        handle = sender.handle(name)
        sender.put(handle, *[b"%d" % at for at in range(5)])
        sender.put(handle, b"one too many", confirm=False)
        assert sender.channel_closed() == (1, 506)
        sender.channel()
        with Fast(one, "d").open() as client:
            client.consume(client.handle(name, TOPIC), identifier="sub")
            client.leave()
        sender.put(sender.handle(name, TOPIC, channel=2), *[b"%d" % at for at in range(8)])
        with Fast(one, "d").open() as client:
            client.consume(client.handle(name, TOPIC), identifier="sub")
            assert client.bodies(5) == [b"%d" % at for at in range(3, 8)]
        eventually(lambda: one.ask(lambda: one.gateway.mqtt.tally.queue_full) == 3)


def test_what_is_too_large_for_the_cluster_costs_the_channel(rabbitmq: RabbitMQ, name: str) -> None:
    one = Replica("large", rabbitmq.url, "fast-large", queue_type="classic", fast={}, limits=SMALL)
    with replicas(one), Fast(one).open() as client:
        handle = client.handle(name)
        client.put(handle, b"x" * 200_000, confirm=False)
        assert client.channel_closed() == (1, 311)


def test_what_no_gateway_has_written_is_a_dead_letter(two: Pair, rabbitmq: RabbitMQ, name: str) -> None:
    one = two[0]
    with Fast(one).open() as client:
        handle = client.handle(name)
        queue = one.ask(lambda: one.gateway.fast_hosts["/"].queues[name].cluster.queue)  # type: ignore[attr-defined]
        with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as program:
            program.channel().basic_publish("", queue, b"anything")
        client.put(handle, b"ours")
        client.consume(handle)
        assert client.bodies(1) == [b"ours"]
        client.ack(1)
        eventually(lambda: one.ask(lambda: one.gateway.dead_letters.counted["", "malformed"]) > 0)
