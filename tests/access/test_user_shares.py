"""What users make grow is counted against their shares: one takes not all of it, and pushes out nobody's.

Each is tried over sockets by a user who wants everything, beside one who wants a little, also after a
restart; and by a single user, who may have all of it.
"""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Final

import pika
import pytest
from pika.exceptions import ChannelClosedByBroker, NackError
from structlog.testing import capture_logs

from gateway.access import console_tokens as module
from gateway.access.console_sessions import ConsoleSessions
from gateway.access.principal import Principal
from gateway.model.message import Message, Sender
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.shares import UserShares
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.mqtt.runs import Acks
from gateway.protocols.mqtt.spec import ReasonCode, Version
from gateway.settings import Http, Limits, StoreSettings
from tests.access.test_doors import PASSWORD, amqp, settings
from tests.configured import make_link
from tests.ingress.amqpfast.client import head
from tests.ingress.amqpfast.large import MIB, Whole, data
from tests.ingress.clients import connect, eventually
from tests.interop.gateway_fixture import LOOPBACK, Running, running

EVERYTHING: Final[dict[str, Any]] = {
    "mqtt": {"publish": "#", "subscribe": "#"},
    "amqp091": {"*": {"configure": ".*", "write": ".*", "read": ".*"}},
    "amqpfast": {"*": {"queues": {"read": "*", "write": "*", "create": "*"}}},
    "console": "read",
}
USERS: Final = {"greedy": ("all",), "modest": ("all",)}
REFUSED: Final = Outcome(Verdict.REJECTED, Reason.TARGET_REFUSED, "no")
LARGE: Final = b"x" * 3 * MIB


@contextmanager
def gateway_at(
    folder: Path,
    users: dict[str, tuple[str, ...]] = USERS,
    given: dict[str, Any] | None = None,
    **limits: Any,
) -> Iterator[Running]:
    """`given` are other settings."""
    those = Limits(**({"user_share": 0.5} | limits))
    http = Http(host=LOOPBACK, port=0)
    store = StoreSettings(path=folder / "store")
    with running(
        settings({"all": EVERYTHING}, users, limits=those, store=store, http=http, **given or {})
    ) as one:
        yield one


def shares(gateway: Running, what: str) -> UserShares:
    return next(one for one in gateway.gateway.quotas.all() if one.resource == what)


def metric(gateway: Running, name: str, what: str) -> float:
    found = {labels: value for sample, labels, value in gateway.gateway.metrics._samples() if sample == name}
    return found[what.replace(" ", "_"),]


# Messages that an exchange delays.


def test_a_sender_who_may_only_write_does_not_block_an_exchange_that_delays(tmp_path: Path) -> None:
    """Each sender has its share, also after a restart, and its messages count as its own memory."""

    def delays(user: str, count: int, delay_ms: int = 300_000_000_000) -> int:
        """Return how many of the user's messages are accepted."""
        accepted = 0
        with closing(amqp(gateway, user)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            said = pika.BasicProperties(headers={"x-delay": delay_ms}, delivery_mode=2)
            for _ in range(count):
                try:
                    channel.basic_publish("later", "", b"x", said)
                except NackError:
                    continue
                accepted += 1
        return accepted

    def claimed() -> dict[str, int]:
        claims = gateway.ask(lambda: list(gateway.gateway._claims()))
        return {user: byte_count for _, byte_count, user, _ in claims if byte_count}

    limits: dict[str, Any] = {"queue_messages_max": 20}
    with gateway_at(tmp_path, **limits) as gateway:
        with closing(amqp(gateway, "modest")) as connection:
            channel = connection.channel()
            arguments = {"x-delayed-type": "fanout"}
            channel.exchange_declare("later", "x-delayed-message", durable=True, arguments=arguments)
        assert delays("greedy", 50) == 10
        assert delays("modest", 4) == 4
    with gateway_at(tmp_path, **limits) as gateway:
        eventually(lambda: claimed().keys() == {"greedy", "modest"})  # the stored messages are read
        assert delays("greedy", 5) == 0
        assert delays("modest", 50) == 6


# Retained messages.


def retains(gateway: Running, user: str, topics: list[str], body: bytes = b"x") -> list[int]:
    """Publish a retained message to each topic; return the reason codes."""
    client, _ = connect(gateway, user, user=(user, PASSWORD.encode()))
    codes = []
    with client:
        for number, topic in enumerate(topics, 1):
            client.publish(topic, body, qos=1, packet_id=number, retain=True)
            codes.append(int(client.next(Acks).rows[0][1]))
    return [0 if code == ReasonCode.NO_MATCHING_SUBSCRIBERS else code for code in codes]


FULL: Final = int(ReasonCode.QUOTA_EXCEEDED)


def test_one_user_retains_no_more_than_its_share(tmp_path: Path) -> None:
    mine = [f"g/{number}" for number in range(6)]
    with gateway_at(tmp_path, retained_messages_max=10 + 14) as gateway:  # 14 are of $SYS
        of = shares(gateway, "retained messages")
        of.user_count_max = 5
        assert retains(gateway, "greedy", mine) == [0] * 5 + [FULL]
        assert retains(gateway, "greedy", mine[:5]) == [0] * 5, "each again"
        assert retains(gateway, "modest", ["m/0", mine[0]]) == [0, 0], "the last one is modest's now"
        assert retains(gateway, "greedy", mine[5:]) == [0]
        assert retains(gateway, "greedy", ["g/x"]) == [FULL]
        assert retains(gateway, "greedy", [mine[1]], b"") == [0]
        assert retains(gateway, "greedy", ["g/x"]) == [0]
        assert (of.count_of("greedy"), of.count_of("modest")) == (5, 2)
        assert metric(gateway, "gateway_share_refused", "retained messages") == of.refused == 2
    with gateway_at(tmp_path, retained_messages_max=24) as gateway:
        of = shares(gateway, "retained messages")
        of.user_count_max = 5
        assert (of.count_of("greedy"), of.count_of("modest")) == (5, 2)
        assert retains(gateway, "greedy", ["g/y"]) == [FULL]
        assert retains(gateway, "modest", ["m/1"]) == [0]


def test_retained_bytes_are_counted_too(tmp_path: Path) -> None:
    with gateway_at(tmp_path, retained_bytes_max=20_000) as gateway:
        assert retains(gateway, "greedy", ["a", "b"], b"x" * 6_000) == [0, FULL]
        assert retains(gateway, "modest", ["c"], b"x" * 6_000) == [0]
        assert retains(gateway, "greedy", ["a"], b"x" * 9_000) == [0], "in place of the smaller one"


def test_what_was_accepted_stays_when_a_second_user_comes(tmp_path: Path) -> None:
    """A single user has everything. With a second one it gets nothing more, and keeps what it has."""
    topics = [f"g/{number}" for number in range(8)]
    with gateway_at(tmp_path, {"greedy": ("all",)}, retained_bytes_max=10_000) as gateway:
        assert retains(gateway, "greedy", topics, b"x" * 500) == [0] * 8
    with gateway_at(tmp_path, retained_bytes_max=10_000) as gateway:
        assert shares(gateway, "retained messages").count_of("greedy") == 8
        assert retains(gateway, "greedy", ["g/x"], b"x" * 500) == [FULL]
        assert retains(gateway, "modest", ["m"], b"x" * 500) == [0]


def test_an_older_client_is_not_told_and_the_log_is(tmp_path: Path) -> None:
    with gateway_at(tmp_path, retained_bytes_max=2_000) as gateway, capture_logs() as lines:
        client, _ = connect(gateway, "c", user=("greedy", PASSWORD.encode()), version=Version.V311)
        with client:
            for number in range(1, 6):
                client.publish(f"t/{number}", b"x" * 300, packet_id=number, retain=True)
            gateway.until(lambda: shares(gateway, "retained messages").refused)
            gateway.until(lambda: any(line["event"] == "user quota reached" for line in list(lines)))
        told = next(line for line in lines if line["event"] == "user quota reached")
        assert (told["user"], told["resource"]) == ("greedy", "retained messages")
        assert "limits.user_share" in told["limit"]


# Bodies on disk.


def sends_large(gateway: Running, user: str, queue: str, count: int) -> None:
    """Raises ChannelClosedByBroker."""
    with closing(amqp(gateway, user)) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True)
        channel.confirm_delivery()
        for _ in range(count):
            channel.basic_publish("", queue, LARGE, pika.BasicProperties(delivery_mode=2))


SPOOL: Final[dict[str, Any]] = {"message_bytes_max": MIB, "spool_bytes_max": 16 * MIB}


def test_one_user_spools_no_more_than_its_share(tmp_path: Path) -> None:
    with gateway_at(tmp_path, **SPOOL) as gateway:
        with pytest.raises(ChannelClosedByBroker, match=r"limits\.user_share") as refused:
            sends_large(gateway, "greedy", "g", 3)
        assert refused.value.reply_code == 406
        sends_large(gateway, "modest", "m", 2)
        assert gateway.gateway.bodies.spool.used_bytes == 12 * MIB
        assert shares(gateway, "spooled bodies").last_user == "greedy"
    with gateway_at(tmp_path, **SPOOL) as gateway:
        assert gateway.gateway.bodies.spool.used_bytes == 12 * MIB
        with pytest.raises(ChannelClosedByBroker, match="user_share"):
            sends_large(gateway, "greedy", "g", 1)
        with closing(amqp(gateway, "greedy")) as connection:
            connection.channel().queue_purge("g")
        gateway.until(lambda: gateway.gateway.bodies.spool.used_bytes == 6 * MIB)
        sends_large(gateway, "greedy", "g", 2)


def test_a_single_user_may_spool_everything(tmp_path: Path) -> None:
    with gateway_at(tmp_path, {"greedy": ("all",)}, **SPOOL) as gateway:
        sends_large(gateway, "greedy", "g", 5)


BODY: Final = data(3 * MIB)


def breaks_off(gateway: Running, user: str, identifier: str, size: int = MIB) -> None:
    """Announce a message, send `size` bytes of it, and lose the connection."""
    partials = gateway.gateway.fast_hosts.partials
    with Whole(gateway, "c", user=user, password=PASSWORD).open(restartable=True) as client:
        handle = client.handle("q")
        assert client.prepare(handle, BODY, head(identifier=identifier)) == 0
        client.resume(handle, BODY, 0, stop=size)
        gateway.until(lambda: any(one.busy and one.file.size == size for one in partials))
        client.leave()
    gateway.until(lambda: not any(one.busy for one in partials))


def has_of(gateway: Running, user: str, identifier: str) -> int:
    """Return how many bytes the gateway has of an announced message."""
    with Whole(gateway, "c", user=user, password=PASSWORD).open(restartable=True) as client:
        found = client.prepare(client.handle("q"), BODY, head(identifier=identifier))
        client.leave()
    return found


@pytest.mark.parametrize("limit", [{"fast_partials_max": 4}, {"fast_partial_bytes_max": 4 * MIB + 1}])
def test_transfers_of_others_are_not_forgotten(limit: dict[str, int], tmp_path: Path) -> None:
    given: dict[str, Any] = {"fast_memory_bytes_max": MIB, **limit}
    with gateway_at(tmp_path, **given) as gateway:
        breaks_off(gateway, "modest", "m")
        for number in range(6):
            breaks_off(gateway, "greedy", str(number))
        assert has_of(gateway, "modest", "m") == MIB
        assert metric(gateway, "gateway_share_evicted", "broken-off transfers") == 3
    with gateway_at(tmp_path, **given) as gateway:  # greedy has three of four now
        breaks_off(gateway, "modest", "n")
        assert has_of(gateway, "modest", "m") == has_of(gateway, "modest", "n") == MIB
        assert has_of(gateway, "greedy", "5") == MIB
        assert has_of(gateway, "greedy", "3") == 0


def test_a_large_message_beyond_the_share_costs_its_channel(tmp_path: Path) -> None:
    with gateway_at(tmp_path, fast_memory_bytes_max=MIB, spool_bytes_max=8 * MIB) as gateway:
        for user in USERS:
            with Whole(gateway, user=user, password=PASSWORD).open() as client:
                handle = client.handle("q")
                client.put_large(handle, BODY)
                client.write(client.transfer(handle, BODY), BODY, client.machine.new_tag(1))
                assert client.channel_closed() == (1, 506)


# Places of event streams, and sessions of the console.


@contextmanager
def streams(gateway: Running, user: str, path: str = "events") -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(LOOPBACK, gateway.gateway.http_port, timeout=20)
    secret = base64.b64encode(f"{user}:{PASSWORD}".encode()).decode()
    with closing(connection):
        connection.request("GET", f"/api/v1/{path}", headers={"Authorization": f"Basic {secret}"})
        with connection.getresponse() as response:
            yield response


@pytest.mark.parametrize("path, most", [("events", 10), ("tap", 2)])
def test_one_user_takes_not_all_places_of_streams(path: str, most: int, tmp_path: Path) -> None:
    with gateway_at(tmp_path) as gateway, ExitStack() as opened:
        for _ in range(most):
            assert opened.enter_context(streams(gateway, "greedy", path)).status == 200
        with streams(gateway, "greedy", path) as refused:
            assert refused.status == 429
            assert b"limits.user_share" in refused.read()
        with streams(gateway, "modest", path) as other:
            assert other.status == 200
        gateway.until(lambda: shares(gateway, "event streams").count_of("modest") == 0)


def test_a_single_user_may_have_all_places_of_streams(tmp_path: Path) -> None:
    with gateway_at(tmp_path, {"greedy": ("all",)}) as gateway, ExitStack() as opened:
        for _ in range(5):
            assert opened.enter_context(streams(gateway, "greedy", "tap")).status == 200
        assert opened.enter_context(streams(gateway, "greedy", "tap")).status == 503


def test_nobody_ends_the_sessions_of_another_at_the_console() -> None:
    sessions = ConsoleSessions(UserShares("console sessions", count_max=4), idle_secs=9.0, longest_secs=9.0)
    modest, _ = sessions.begin(Principal("modest"))
    greedy = [sessions.begin(Principal("greedy"))[0] for _ in range(6)]
    assert sessions.find(modest) is not None
    assert [sessions.find(one) is not None for one in greedy] == [False] * 3 + [True] * 3


def make_token(gateway: Running, user: str, name: str) -> int:
    """Create a token with the user's password; return the status of the response."""
    connection = http.client.HTTPConnection(LOOPBACK, gateway.gateway.http_port, timeout=20)
    secret = base64.b64encode(f"{user}:{PASSWORD}".encode()).decode()
    headers = {"Authorization": f"Basic {secret}", "Content-Type": "application/json"}
    with closing(connection):
        connection.request("POST", "/api/v1/tokens/make", json.dumps({"name": name}), headers)
        with connection.getresponse() as response:
            assert response.read()
            return response.status


def test_one_user_makes_not_all_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart, too; one that is revoked leaves its place."""
    monkeypatch.setitem(EVERYTHING, "console", "write")
    monkeypatch.setattr(module, "TOKENS_MAX", 6)  # the administrator has one
    with gateway_at(tmp_path) as gateway:
        assert [make_token(gateway, "greedy", f"g{at}") for at in range(4)] == [200, 200, 200, 429]
    with gateway_at(tmp_path) as gateway:
        assert make_token(gateway, "greedy", "more") == 429
        assert make_token(gateway, "modest", "m0") == 200
        assert metric(gateway, "gateway_share_refused", "console tokens") == 1
        assert gateway.ask(lambda: gateway.gateway.console.admission.tokens.revoke("g0"))
        assert make_token(gateway, "greedy", "more") == 200
        assert [make_token(gateway, "modest", f"m{at}") for at in (1, 2)] == [200, 409]


def test_a_single_user_may_make_all_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EVERYTHING, "console", "write")
    monkeypatch.setattr(module, "TOKENS_MAX", 4)
    with gateway_at(tmp_path, {"greedy": ("all",)}) as gateway:
        assert [make_token(gateway, "greedy", f"g{at}") for at in range(4)] == [200, 200, 200, 409]


# Outboxes.

OUTBOX: Final = """\
version: 1
routes:
  - name: mqtt
    from: {endpoint: mqtt, topic: "out/#"}
    to: {endpoint: far, queue: q}
    settle: stored
    outbox: {messages_max: 4}
  - name: amqp
    from: {endpoint: amqp091, exchange: amq.topic, binding_key: out}
    to: {endpoint: far, queue: q}
    settle: stored
    outbox: {messages_max: 4}
"""


def stores_by_mqtt(gateway: Running, user: str, count: int) -> list[bool]:
    """Publish for the link that is down; return which messages its outbox accepts."""
    client, _ = connect(gateway, user, user=(user, PASSWORD.encode()))
    accepted = []
    with client:
        for number in range(1, count + 1):
            client.publish("out/x", b"x", qos=1, packet_id=number)
            code = client.next(Acks).rows[0][1]
            assert code in {0, ReasonCode.QUOTA_EXCEEDED}
            accepted.append(code == 0)
    return accepted


def stores_by_amqp(gateway: Running, user: str, count: int) -> list[bool]:
    accepted = []
    with closing(amqp(gateway, user)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for _ in range(count):
            try:
                channel.basic_publish("amq.topic", "out", b"x", pika.BasicProperties(delivery_mode=2))
                accepted.append(True)
            except NackError:
                accepted.append(False)
    return accepted


@pytest.mark.parametrize("stores", [stores_by_mqtt, stores_by_amqp])
def test_one_user_fills_no_outbox(stores: Any, tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(OUTBOX)
    more = {"links": {"far": make_link(url="amqp://127.0.0.1:1")}, "mappings": (str(tmp_path / "m.yaml"),)}
    for round_number in range(2):
        with gateway_at(tmp_path, given=more) as gateway:
            if not round_number:
                assert stores(gateway, "greedy", 3) == [True, True, False]
                assert metric(gateway, "gateway_share_refused", "outbox messages") == 1
                assert stores(gateway, "modest", 1) == [True]
            else:
                assert stores(gateway, "greedy", 1) == [False], "what is stored counts again"
                assert stores(gateway, "modest", 2) == [True, False]


# Dead letters.


def test_letters_of_others_stay_over_a_restart(tmp_path: Path) -> None:
    def loses(gateway: Running, user: str, count: int) -> None:
        """Messages whose queue is full: they are dead letters of the gateway."""
        sender = Sender("amqp091", user=user)
        letter = Message(amqp_address("", "q"), b"x", sender=sender)
        gateway.ask(lambda: gateway.gateway.dead_letters.add([letter] * count, "r", REFUSED))

    for round in range(2):
        with gateway_at(tmp_path, dead_letters_max=6) as gateway:
            of = shares(gateway, "dead letters")
            if not round:
                loses(gateway, "modest", 2)
            loses(gateway, "greedy", 20)
            gateway.until(lambda of=of: (of.count_of("greedy"), of.count_of("modest")) == (4, 2))
