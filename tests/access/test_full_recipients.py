"""A recipient that is full, among others that are not: whom it may hold, and what it loses alone.

While roles exist, only what the operator declared and what belongs to a role with `hold` makes publishers
wait or has their messages refused. Publishers are MQTT 5, MQTT 3.1.1 and AMQP 0-9-1 clients; a healthy
subscriber beside the full recipient gets every message once, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Final

import pika
import pytest
from pika.exceptions import NackError
from structlog.testing import capture_logs

from gateway.access.authorization import Roles
from gateway.protocols.mqtt.spec import PacketType, Property, Version
from gateway.settings import Limits
from tests.access.test_doors import PASSWORD, amqp, settings
from tests.ingress.amqpfast.client import TOPIC, Fast
from tests.ingress.clients import Mqtt, connect, eventually
from tests.interop.gateway_fixture import Running, running

MESSAGES: Final = 40
FULL: Final = 10  # messages that a queue or session holds
QUOTA: Final = 0x97
LIMITS: Final = Limits(queue_messages_max=FULL, queue_memory_messages_max=FULL, session_delay_secs=0)
READ: Final[dict[str, Any]] = {
    "mqtt": {"subscribe": "plant/#"},
    "amqp091": {"/": {"configure": "^own", "write": "^own", "read": "^(own|amq\\.topic$)"}},
    "amqpfast": {"/": {"topics": {"read": "plant.*", "create": "plant.*"}}},
}
PUBLISH: Final[dict[str, Any]] = {
    "mqtt": {"publish": "plant/#", "subscribe": "plant/#"},
    "amqp091": {"/": {"write": ".*", "read": ".*", "configure": ".*"}},
}
USERS: Final = {"reader": ("reader",), "writer": ("writer",), "healthy": ("writer",)}
Full = Callable[[Running, ExitStack], None]


@contextmanager
def gateway_with(*, hold: bool = False, roles: bool = True, **more: Any) -> Iterator[Running]:
    """A gateway whose reader's role has `hold` or not, or one without roles."""
    given = {"reader": READ | {"hold": hold}, "writer": PUBLISH} if roles else {}
    users = USERS if roles else dict.fromkeys(USERS, ())
    with running(settings(given, users, limits=LIMITS, **more)) as one:
        yield one


def rejecting_queue(gateway: Running, stack: ExitStack, **arguments: Any) -> None:
    """The reader's queue that holds one message and refuses others."""
    channel = stack.enter_context(closing(amqp(gateway, "reader"))).channel()
    given = {"x-max-length": 1, "x-overflow": "reject-publish"} | arguments
    channel.queue_declare("own", arguments=given)
    channel.queue_bind("own", "amq.topic", "plant.#")


def plain_queue(gateway: Running, stack: ExitStack) -> None:
    """The reader's queue that nobody consumes."""
    channel = stack.enter_context(closing(amqp(gateway, "reader"))).channel()
    channel.queue_declare("own")
    channel.queue_bind("own", "amq.topic", "plant.#")


def silent_session(gateway: Running, stack: ExitStack) -> None:
    """The reader's MQTT session, which acknowledges nothing."""
    client, _ = connect(
        gateway, "silent", user=("reader", PASSWORD.encode()), properties={Property.RECEIVE_MAXIMUM: 1}
    )
    stack.enter_context(client)
    assert client.subscribe("plant/#", 1) == 1


def durable_topic(gateway: Running, stack: ExitStack) -> None:
    """The reader's durable AMQP/Fast subscription, whose consumer acknowledges nothing."""
    client = stack.enter_context(Fast(gateway, "silent", user="reader", password=PASSWORD)).open()
    handle = client.handle("plant.a", TOPIC, producer=False, browser=False)
    client.consume(handle, identifier="kept", prefetch=1)


def passing_topic(gateway: Running, stack: ExitStack) -> None:
    """The same for one that ends with its connection."""
    client = stack.enter_context(Fast(gateway, "silent", user="reader", password=PASSWORD)).open()
    handle = client.handle("plant.a", TOPIC, producer=False, browser=False)
    client.consume(handle, prefetch=1)


def healthy(gateway: Running, stack: ExitStack) -> Mqtt:
    client, _ = connect(gateway, "healthy", user=("healthy", PASSWORD.encode()))
    stack.enter_context(client)
    assert client.subscribe("plant/#", 1) == 1
    return client


def publish_by_mqtt(gateway: Running, version: Version) -> list[int]:
    """Publish the messages one by one; return the reason codes, in order."""
    client, _ = connect(gateway, "writer", version=version, user=("writer", PASSWORD.encode()))
    reasons = []
    with client:
        for number in range(1, MESSAGES + 1):
            client.publish("plant/a", str(number).encode(), 1, number)
            packet_id, reason = client.acked(PacketType.PUBACK)
            assert packet_id == number
            reasons.append(reason)
    return reasons


def publish_by_amqp(gateway: Running, exchange: str = "amq.topic", key: str = "plant.a") -> list[int]:
    """Publish with confirms; return 0 for each `basic.ack`, QUOTA for each `basic.nack`."""
    with closing(amqp(gateway, "writer")) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        reasons = []
        for number in range(1, MESSAGES + 1):
            try:
                channel.basic_publish(exchange, key, str(number).encode())
                reasons.append(0)
            except NackError:
                reasons.append(QUOTA)
        return reasons


PUBLISHERS: Final[dict[str, Callable[[Running], list[int]]]] = {
    "mqtt 5": lambda gateway: publish_by_mqtt(gateway, Version.V5),
    "mqtt 3.1.1": lambda gateway: publish_by_mqtt(gateway, Version.V311),
    "amqp": publish_by_amqp,
}


def bodies(client: Mqtt, count: int) -> list[int]:
    """Acknowledge so many messages; return what they hold."""
    found = []
    for _ in range(count):
        _, _, packet_id, _, body = client.row()
        client.ack(PacketType.PUBACK, packet_id)
        found.append(int(body))
    return found


@pytest.mark.parametrize("publisher", PUBLISHERS)
@pytest.mark.parametrize("full", [rejecting_queue, plain_queue, silent_session, durable_topic, passing_topic])
def test_a_full_recipient_without_the_right_loses_its_own_copy_alone(full: Full, publisher: str) -> None:
    with gateway_with() as gateway, ExitStack() as stack:
        full(gateway, stack)
        subscriber = healthy(gateway, stack)
        assert PUBLISHERS[publisher](gateway) == [0] * MESSAGES
        assert bodies(subscriber, MESSAGES) == list(range(1, MESSAGES + 1))
        assert subscriber.quiet()
        dropped = gateway.gateway._dropped()
        assert dropped["queue_overflow"] + dropped["queue_full"] > 0


@pytest.mark.parametrize("overflow", ["reject-publish", "reject-publish-dlx"])
def test_what_a_full_queue_loses_is_dead_lettered_where_it_says_so(overflow: str) -> None:
    with gateway_with() as gateway, ExitStack() as stack:
        channel = stack.enter_context(closing(amqp(gateway, "writer"))).channel()
        channel.exchange_declare("own.dead", "fanout")
        channel.queue_declare("own.letters", arguments={"x-max-length": MESSAGES})
        channel.queue_bind("own.letters", "own.dead")
        rejecting_queue(gateway, stack, **{"x-overflow": overflow, "x-dead-letter-exchange": "own.dead"})
        assert publish_by_mqtt(gateway, Version.V5) == [0] * MESSAGES
        found: list[int] = []
        eventually(lambda: channel.queue_declare("own.letters", passive=True).method.message_count >= FULL)
        while len(found) < MESSAGES - 1:
            method, properties, body = channel.basic_get("own.letters", auto_ack=True)
            if method is None:
                break
            found.append(int(body))
            assert properties.headers["x-death"][0]["reason"] == "maxlen"
        # The queue for dead letters is full with FULL messages, and its owner has no `hold` either.
        assert found == list(range(2, 2 + len(found)))
        assert len(found) >= FULL


@pytest.mark.parametrize("right", ["no roles", "hold"])
def test_a_full_queue_with_the_right_refuses(right: str) -> None:
    with gateway_with(hold=True, roles=right == "hold") as gateway, ExitStack() as stack:
        rejecting_queue(gateway, stack)
        assert publish_by_mqtt(gateway, Version.V5) == [0] + [QUOTA] * (MESSAGES - 1)
        assert publish_by_amqp(gateway) == [QUOTA] * MESSAGES


@pytest.mark.parametrize("qos", [1, 2])
def test_a_message_is_repeated_only_to_who_has_not_accepted_it(qos: int) -> None:
    """An MQTT 3.1.1 client cannot hear that a queue is full, so its message is tried again until that has
    room. The subscriber beside the queue gets it once."""
    with gateway_with(roles=False) as gateway, ExitStack() as stack:
        rejecting_queue(gateway, stack)
        subscriber = healthy(gateway, stack)
        channel = stack.enter_context(closing(amqp(gateway, "writer"))).channel()
        channel.basic_publish("amq.topic", "plant.b", b"0", pika.BasicProperties(delivery_mode=2))
        assert bodies(subscriber, 1) == [0]
        client, _ = connect(gateway, "writer", version=Version.V311, user=("writer", PASSWORD.encode()))
        stack.enter_context(client)
        client.publish("plant/a", b"1", qos, 1)
        gateway.until(lambda: sum(route.retried for route in gateway.gateway.dispatcher.router.routes) > 1)
        assert channel.basic_get("own", auto_ack=True)[2] == b"0"
        assert client.acked(PacketType.PUBACK if qos == 1 else PacketType.PUBREC)[0] == 1
        assert channel.basic_get("own", auto_ack=True)[2] == b"1"
        assert bodies(subscriber, 1) == [1]
        assert subscriber.quiet()


def test_whoever_names_the_queue_hears_that_it_is_full() -> None:
    with gateway_with() as gateway, ExitStack() as stack:
        rejecting_queue(gateway, stack)
        assert publish_by_amqp(gateway, "", "own") == [0] + [QUOTA] * (MESSAGES - 1)


def test_whoever_names_a_queue_without_a_limit_of_its_own_is_refused_and_not_held() -> None:
    with gateway_with() as gateway, ExitStack() as stack:
        plain_queue(gateway, stack)
        assert publish_by_amqp(gateway, "", "own") == [0] * FULL + [QUOTA] * (MESSAGES - FULL)


@pytest.mark.parametrize("away", [False, True], ids=["silent", "away"])
def test_copies_that_a_session_loses_are_counted_and_logged_once(away: bool) -> None:
    """The client that acknowledges nothing, and the one that is away; again when it had room meanwhile."""
    with gateway_with() as gateway, ExitStack() as stack, capture_logs() as lines:
        properties = {Property.RECEIVE_MAXIMUM: 1, Property.SESSION_EXPIRY_INTERVAL: 600}
        who = ("reader", PASSWORD.encode())
        client, _ = connect(gateway, "silent", user=who, properties=properties)
        assert client.subscribe("plant/#", 1) == 1
        if away:
            client.cut()
            gateway.until(lambda: gateway.gateway.mqtt.sessions["silent"].outlet is None)

        def told() -> list[tuple[str, str]]:
            found = [line for line in list(lines) if line["event"] == "session full, messages dropped"]
            return [(line["client"], line["user"]) for line in found]

        assert publish_by_mqtt(gateway, Version.V5) == [0] * MESSAGES
        lost = metric(gateway)
        assert MESSAGES - FULL - 1 <= lost <= MESSAGES - FULL
        assert told() == [("silent", "reader")]
        if away:
            client, _ = connect(gateway, "silent", user=who, clean=False, properties=properties)
        stack.enter_context(client)
        assert bodies(client, MESSAGES - lost) == list(range(1, MESSAGES - lost + 1))
        assert publish_by_mqtt(gateway, Version.V5) == [0] * MESSAGES
        assert metric(gateway) > lost
        assert told() == [("silent", "reader")] * 2


@pytest.mark.parametrize("full", [rejecting_queue, plain_queue])
def test_copies_that_a_queue_loses_are_logged_once(full: Full) -> None:
    """Nobody consumes it; and again when half of what it holds has been consumed meanwhile."""
    with gateway_with() as gateway, ExitStack() as stack, capture_logs() as lines:
        full(gateway, stack)

        def told() -> list[tuple[str, str]]:
            found = [line for line in list(lines) if line["event"] == "queue full, messages dropped"]
            return [(line["queue"], line["user"]) for line in found]

        assert publish_by_mqtt(gateway, Version.V5) == [0] * MESSAGES
        assert told() == [("own", "reader")]
        channel = stack.enter_context(closing(amqp(gateway, "reader"))).channel()
        while channel.basic_get("own", auto_ack=True)[0] is not None:
            pass
        assert publish_by_mqtt(gateway, Version.V5) == [0] * MESSAGES
        assert told() == [("own", "reader")] * 2


def metric(gateway: Running) -> int:
    """Return what the metric says of messages that full sessions have lost."""
    samples = gateway.ask(lambda: list(gateway.gateway.metrics._samples()))
    return int(
        next(
            value for name, labels, value in samples if (name, labels) == ("gateway_dropped", ("queue_full",))
        )
    )


def take_the_right(gateway: Running) -> None:
    """Put rules into force that differ in `hold` alone, as a reload does."""
    roles = gateway.gateway.authorization.roles
    changed = {name: role.model_copy(update={"hold": False}) for name, role in roles.roles.items()}
    gateway.await_(lambda: gateway.gateway.rules.use(Roles(changed, roles.users, roles.default)))


def test_the_right_is_that_of_the_rules_in_force() -> None:
    """A reload that takes `hold` from a role counts for queues that are there."""
    with gateway_with(hold=True) as gateway, ExitStack() as stack:
        rejecting_queue(gateway, stack)
        assert publish_by_mqtt(gateway, Version.V5)[1:] == [QUOTA] * (MESSAGES - 1)
        take_the_right(gateway)
        assert publish_by_mqtt(gateway, Version.V5) == [0] * MESSAGES


@pytest.mark.parametrize("full", [plain_queue, silent_session, durable_topic])
def test_a_held_publisher_goes_on_when_its_recipient_loses_the_right(full: Full) -> None:
    with gateway_with(hold=True) as gateway, ExitStack() as stack:
        full(gateway, stack)
        client, _ = connect(gateway, "writer", user=("writer", PASSWORD.encode()))
        stack.enter_context(client)
        most = 2 * FULL
        for number in range(1, most):
            client.publish("plant/a", b"x", 1, number)
            assert client.acked(PacketType.PUBACK)[0] == number
            if any(one.waiting.on for one in gateway.gateway.listeners["mqtt"].connections):
                break
        else:
            pytest.fail("the publisher was not held")
        client.publish("plant/a", b"x", 1, most)
        take_the_right(gateway)
        assert client.acked(PacketType.PUBACK)[0] == most
