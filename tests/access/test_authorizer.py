"""A server that is asked what no role says: RabbitMQ's questions, over sockets, to a server of this test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

import pytest
import trio
import trio.testing
from pika.exceptions import ChannelClosedByBroker, ConnectionClosedByBroker, ProbableAccessDeniedError

from gateway.access.authentication import Access
from gateway.access.authorization import Roles
from gateway.access.backends import Credentials, Denial
from gateway.access.http_authorization import AuthorizerRequest, HttpAuthorizerClient
from gateway.access.http_client import BackendHttpClient
from gateway.access.principal import Principal
from gateway.app.access import DefinedUsers
from gateway.app.clients import revoke
from gateway.model.pending import Pending, completed
from gateway.protocols.amqp091 import methods as m091
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.events import Closed, HandleClosed, Opened
from gateway.protocols.amqpfast.sender import Producer
from gateway.protocols.mqtt.packets import Connack, Connect, Disconnect, Will
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode, Version
from gateway.settings import HttpAuthorizer, StoreSettings
from tests.access.test_doors import NOBODY, NOT_AUTHORIZED, OK, PASSWORD, amqp, fast, settings
from tests.ingress.amqp_client import Amqp, MethodReceived
from tests.ingress.amqpfast.client import EMPTY, QUEUE
from tests.ingress.clients import Mqtt, Raw, connect
from tests.interop.gateway_fixture import LOOPBACK, Running, running

Fields = dict[str, str]


class Server:
    """Answers `allow` when `allowed` holds, but for reading the keys in `denied`; records the questions.

    While `gate` is shut it does not answer.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, Fields]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.answer = b""
        self.denied: set[str] = set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                body = self.rfile.read(length).decode()
                if len(body) < length:
                    return  # the gateway has stopped
                fields = {name: texts[0] for name, texts in parse_qs(body, keep_blank_values=True).items()}
                kind = self.path.rpartition("/")[2]
                server.asked.append((kind, fields))
                server.gate.wait(10)
                denied = fields.get("permission") == "read" and fields.get("routing_key") in server.denied
                right = allowed(kind, fields) and not denied
                said = server.answer or (b"allow" if right else b"deny")
                self.send_response(200)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, *_: Any) -> None:
                """Nothing is told."""

        self._server = ThreadingHTTPServer((LOOPBACK, 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self._server.server_address[1]}/auth"

    def stop(self) -> None:
        self.gate.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def allowed(kind: str, fields: Fields) -> bool:
    """What this server thinks right."""
    user = fields["username"]
    if kind == "vhost":
        return user in ("bob", "eve")
    if kind == "topic":
        return fields["routing_key"].startswith(f"{user}.")
    return fields["name"].startswith((user, "amq.topic", "amq.default", "mqtt-subscription-"))


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    try:
        yield one
    finally:
        one.stop()


ROLES: Final[dict[str, Any]] = {"reader": {"mqtt": {"publish": "open/#", "deny_publish": "eve/secret"}}}


def given(server: Server, **more: Any) -> Any:
    urls: dict[str, Any] = {f"{kind}_url": f"{server.url}/{kind}" for kind in ("vhost", "resource", "topic")}
    return settings(
        ROLES, {"bob": (), "eve": ("reader",), "ann": ()}, authorizer=HttpAuthorizer(**urls, **more)
    )


@pytest.fixture
def gateway(server: Server) -> Iterator[Running]:
    with running(given(server)) as one:
        yield one


def test_mqtt_asks_what_no_role_says(gateway: Running, server: Server) -> None:
    refused, told = connect(gateway, "a", user=("ann", PASSWORD.encode()))
    with refused:
        assert told.reason == NOT_AUTHORIZED
    client, told = connect(gateway, "c", user=("eve", PASSWORD.encode()))
    with client:
        assert told.reason == OK
        topics = [b"open/x", b"eve/x", b"bob/x", b"eve/y", b"eve/secret"]
        for packet_id, topic in enumerate(topics, 1):  # in one write: what is asked holds up what follows
            client.machine.publish(topic, b"x", 1, packet_id=packet_id)
        client.flush()
        found = [client.acked(PacketType.PUBACK) for _ in topics]
        reasons = (NOBODY, NOBODY, NOT_AUTHORIZED, NOBODY, NOT_AUTHORIZED)
        assert sorted(found) == list(enumerate(reasons, 1))
        assert client.subscribe("eve/#", 1) == 1
        assert client.subscribe("bob/#", 1) == NOT_AUTHORIZED
        client.publish("eve/x", b"hello", 1, packet_id=9)
        assert client.body() == b"hello"
        client.publish("bob/y", b"x")
        assert client.next(Disconnect).reason == NOT_AUTHORIZED
    topics_asked = {fields["routing_key"]: fields for kind, fields in server.asked if kind == "topic"}
    assert "eve.secret" not in topics_asked  # a role denies that
    assert "open.x" not in topics_asked  # and allows this
    assert topics_asked["eve.x"] == {
        "username": "eve",
        "vhost": "/",
        "resource": "topic",
        "name": "amq.topic",
        "permission": "write",
        "routing_key": "eve.x",
        "variable_map.client_id": "c",
    }
    assert len(server.asked) == len({(kind, *fields.items()) for kind, fields in server.asked})


def test_amqp_asks(gateway: Running, server: Server) -> None:
    with pytest.raises((ProbableAccessDeniedError, ConnectionClosedByBroker)):
        amqp(gateway, "ann")
    with closing(amqp(gateway, "bob")) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("bob.q")
        channel.queue_bind("bob.q", "amq.topic", "bob.#")
        channel.basic_publish("amq.topic", "bob.x", b"one")
        channel.basic_publish("", "bob.q", b"two")
        assert [channel.basic_get("bob.q", auto_ack=True)[2] for _ in range(2)] == [b"one", b"two"]
        for method in (
            lambda one: one.queue_declare("eve.q"),
            lambda one: one.queue_declare(""),  # its name is asked for once
            lambda one: one.basic_publish("amq.topic", "eve.x", b"x"),
            lambda one: one.basic_publish("amq.fanout", "bob.x", b"x"),
        ):
            other = connection.channel()
            other.confirm_delivery()
            with pytest.raises(ChannelClosedByBroker) as refused:
                method(other)
            assert refused.value.reply_code == 403
    assert ("vhost", {"username": "bob", "vhost": "/"}) in server.asked


def test_amqpfast_asks(gateway: Running, server: Server) -> None:
    with fast(gateway, "ann") as client:
        assert client.next(Closed).reply_code == 403
    with fast(gateway, "bob").open() as client:
        mine = client.handle("bob.q", QUEUE)
        client.consume(mine)
        client.put(mine, b"x", confirm=False)
        assert client.bodies(1) == [b"x"]
        large = client.handle("bob.large", QUEUE)
        client.put(large, b"y" * 300_000)
        other = client.ask_handle("eve.q", QUEUE)
        closed = client.next(HandleClosed)
        assert (closed.handle, closed.reply_code) == (other, 403)
        everything = client.handle("bob.", QUEUE)
        client.say(m.HandleConsume(everything, prefetch=1))
        assert client.next(HandleClosed).reply_code == 403  # nobody can be asked about a beginning


def test_who_asks_is_held_and_others_are_not(gateway: Running, server: Server) -> None:
    with fast(gateway, "bob") as other:
        other.next(Opened)
        client, _ = connect(gateway, "c", user=("eve", PASSWORD.encode()))
        with client:
            server.gate.clear()
            before = len(server.asked)
            client.publish("eve/slow", b"x", 1, packet_id=1)
            client.publish("open/x", b"x", 1, packet_id=2)
            gateway.until(lambda: len(server.asked) > before)
            witness, _ = connect(gateway, "w", user=("eve", PASSWORD.encode()))
            with witness:
                witness.publish("open/x", b"x", 1, packet_id=1)
                assert witness.acked(PacketType.PUBACK) == (1, NOBODY)
            server.gate.set()
            assert client.acked(PacketType.PUBACK) == (1, NOBODY)
            assert client.acked(PacketType.PUBACK) == (2, NOBODY)


def test_amqp_methods_behind_a_pending_one_keep_their_order(gateway: Running, server: Server) -> None:
    with Amqp(gateway, user="bob", password=PASSWORD).open() as client:
        server.gate.clear()
        before = len(server.asked)
        client.say(m091.QueueDeclare("bob.q"))
        client.publish("", "bob.q", b"1", b"2")
        client.say(m091.QueueDeclare("bob.q", passive=True), m091.TxSelect())
        client.publish("", "bob.q", b"3")
        client.say(m091.TxCommit(), m091.QueueDeclare("bob.q", passive=True), m091.QueuePurge("bob.q"))
        gateway.until(lambda: len(server.asked) > before)
        server.gate.set()
        assert [client.next(MethodReceived).method for _ in range(6)] == [
            m091.QueueDeclareOk("bob.q", 0, 0),
            m091.QueueDeclareOk("bob.q", 2, 0),
            m091.TxSelectOk(),
            m091.TxCommitOk(),
            m091.QueueDeclareOk("bob.q", 3, 0),
            m091.QueuePurgeOk(3),
        ]


def test_amqpfast_commands_behind_a_pending_one_keep_their_order(gateway: Running, server: Server) -> None:
    names = ("a", "b", "a", "c", "b", "a")
    with fast(gateway, "bob").open() as client:
        handle = client.handle("bob.", QUEUE, consumer=False, browser=False)
        before = len(server.asked)
        server.gate.clear()
        producer = Producer(client.machine, handle, confirm=True)
        bodies = [b"%d" % at * (1 if name == "a" else 200_000) for at, name in enumerate(names)]
        tags = producer.send_many(
            [(name.encode(), EMPTY, body) for name, body in zip(names, bodies, strict=True)]
        )
        client.flush()
        gateway.until(lambda: len(server.asked) > before)
        server.gate.set()
        assert [client.reply()[2] for _ in tags] == tags
        reader = client.handle("bob.a", QUEUE)
        client.consume(reader)
        assert client.bodies(3) == [bodies[0], bodies[2], bodies[5]]


@pytest.mark.parametrize("protocol", ["mqtt", "amqp091", "amqpfast"])
def test_a_client_that_goes_while_its_command_is_pending_is_forgotten(
    gateway: Running, server: Server, protocol: str
) -> None:
    before = len(server.asked)
    if protocol == "mqtt":
        client: Raw = connect(gateway, "c", user=("eve", PASSWORD.encode()))[0]
        server.gate.clear()
        client.publish("eve/x", b"x", 1, packet_id=1)  # type: ignore[attr-defined]
    elif protocol == "amqp091":
        client = Amqp(gateway, user="bob", password=PASSWORD).open()
        server.gate.clear()
        client.say(m091.QueueDeclare("bob.q"), m091.QueueDeclare("bob.r"))
    else:
        client = fast(gateway, "bob").open()
        server.gate.clear()
        client.ask_handle("bob.q", QUEUE)
    gateway.until(lambda: len(server.asked) > before)
    client.sock.close()
    server.gate.set()
    gateway.until(lambda: not gateway.gateway.listeners[protocol].connections)


@pytest.mark.parametrize("protocol", ["mqtt", "amqp091", "amqpfast"])
def test_messages_of_a_lost_client_that_waited_for_an_answer_are_counted(
    gateway: Running, server: Server, protocol: str
) -> None:
    """Nobody can be told of them, and a client does not repeat what has no acknowledgement."""
    before = len(server.asked)
    if protocol == "mqtt":
        client: Any = connect(gateway, "c", user=("eve", PASSWORD.encode()))[0]
        server.gate.clear()
        for body in (b"1", b"2", b"3"):
            client.machine.publish(b"eve/x", body, 0)
        client.flush()  # in one write: what comes later is not read while the first one waits
    elif protocol == "amqp091":
        client = Amqp(gateway, user="bob", password=PASSWORD).open()
        server.gate.clear()
        client.publish("amq.topic", "bob.x", b"1", b"2", b"3")
    else:
        client = fast(gateway, "bob").open()
        handle = client.handle("bob.", QUEUE, consumer=False, browser=False)
        before = len(server.asked)
        server.gate.clear()
        producer = Producer(client.machine, handle, confirm=False)
        producer.send_many([(b"x", EMPTY, body) for body in (b"1", b"2", b"3")])
        client.flush()
    gateway.until(lambda: len(server.asked) > before)
    listeners = gateway.gateway.listeners
    gateway.ask(lambda: revoke(listeners, frozenset({"bob", "eve"})))
    client.sock.close()
    gateway.until(lambda: not listeners[protocol].connections)
    server.gate.set()
    authorizer = gateway.gateway.authorizer
    assert isinstance(authorizer, HttpAuthorizerClient)
    gateway.until(lambda: not authorizer._in_flight)
    stats = listeners[protocol].stats
    assert list(stats.settled_counts()) == [("accepted", "none", 0), ("released", "target_down", 3)]
    assert stats.messages_in == 3


@pytest.mark.parametrize("answer", [b"perhaps", b"", None])
def test_no_answer_is_no(answer: bytes | None) -> None:
    server = Server()
    but = "authorization server not responding, client requests refused"
    try:
        with running(given(server, timeout_secs=0.5), but=but) as gateway:
            client, told = connect(gateway, "c", user=("eve", PASSWORD.encode()))
            with client:
                assert told.reason == OK
                if answer is None:
                    server.gate.clear()
                else:
                    server.answer = answer or b" "
                client.publish("eve/x", b"x", 1, packet_id=1)
                assert client.acked(PacketType.PUBACK) == (1, NOT_AUTHORIZED)
                assert gateway.gateway.authorizer is not None
                assert gateway.gateway.authorizer.failures
    finally:
        server.stop()


def test_answers_are_bounded(server: Server) -> None:
    with running(given(server, cache_entries_max=16)) as gateway:
        client, _ = connect(gateway, "c", user=("eve", PASSWORD.encode()))
        with client:
            for packet_id in range(1, 60):
                client.publish(f"eve/{packet_id}", b"x", 1, packet_id=packet_id)
                assert client.acked(PacketType.PUBACK) == (packet_id, NOBODY)
        assert gateway.gateway.authorizer is not None
        assert gateway.gateway.authorizer.cached_count <= 16


async def test_a_response_larger_than_the_cache_is_cached_until_the_next(server: Server) -> None:
    """Otherwise the check that needs it queries the server again and again, and its client waits for ever."""
    urls: dict[str, Any] = {f"{kind}_url": f"{server.url}/{kind}" for kind in ("vhost", "resource", "topic")}
    questions = HttpAuthorizerClient(HttpAuthorizer(**urls, cache_entries_max=16), BackendHttpClient(1.0))
    for number in range(3):
        question = AuthorizerRequest(
            "topic", (("username", "eve"), ("routing_key", f"{number}" + "é" * 5_000))
        )
        await questions.query(question)
        assert (questions.cached_decision(question), questions.cached_count) == (False, 1)
    await questions.close()


async def test_long_requests_of_one_user_push_out_no_others(server: Server) -> None:
    """A topic may have 64 KiB, and a user who may publish nothing can send ever new ones."""
    urls: dict[str, Any] = {f"{kind}_url": f"{server.url}/{kind}" for kind in ("vhost", "resource", "topic")}
    questions = HttpAuthorizerClient(HttpAuthorizer(**urls, cache_entries_max=100), BackendHttpClient(1.0))

    async def ask(user: str, topic: str) -> AuthorizerRequest:
        question = AuthorizerRequest("topic", (("username", user), ("routing_key", topic)))
        await questions.query(question)
        return question

    bob = await ask("bob", "b")
    for text in ("é" * 10_000, ""):
        for number in range(150):
            await ask("eve", f"{number}{text}")
        assert questions.cached_count <= (4 if text else 100)
        assert bob in questions._answers, "its age does not matter here"
    await questions.close()


def test_a_will_that_waits_for_an_answer_survives_the_end(server: Server, tmp_path: Path) -> None:
    with_store = given(server).model_copy(update={"store": StoreSettings(path=tmp_path / "store")})
    with running(with_store) as gateway:
        will = Will("bob/will", b"last", 1, True)
        client, told = connect(gateway, "c", user=("bob", PASSWORD.encode()), will=will)
        assert told.reason == OK
        authorizer = gateway.gateway.authorizer
        assert isinstance(authorizer, HttpAuthorizerClient)
        gateway.ask(authorizer._answers.clear)
        server.gate.clear()
        asked = len(server.asked)
        client.cut()
        gateway.until(lambda: len(server.asked) > asked)
    server.gate.set()
    with running(with_store) as gateway:
        gateway.until(lambda: "bob/will" in gateway.gateway.mqtt.retained)
        gateway.until(lambda: not gateway.gateway.mqtt._wills)
    with running(with_store) as gateway:
        assert gateway.gateway.mqtt._left_wills == []


def away(gateway: Running, *filters: str) -> Callable[[], Mqtt]:
    """Leave eve's lasting session with these subscriptions; return a function that sends CONNECT for it.

    The authorizer's answers are forgotten in between.
    """
    properties, credentials = {Property.SESSION_EXPIRY_INTERVAL: 600}, ("eve", PASSWORD.encode())
    client, _ = connect(gateway, "away", user=credentials, properties=properties)
    with client:
        for topic_filter in filters:
            assert client.subscribe(topic_filter, 1) == 1
    gateway.until(lambda: gateway.gateway.mqtt.sessions["away"].outlet is None)

    def again() -> Mqtt:
        authorizer = gateway.gateway.authorizer
        assert isinstance(authorizer, HttpAuthorizerClient)
        gateway.ask(authorizer._answers.clear)
        returned = Mqtt(gateway.mqtt)
        returned.say(Connect("away", Version.V5, False, 0, None, *credentials, properties))
        return returned

    return again


def test_a_resumed_session_is_checked_before_its_client_is_in(gateway: Running, server: Server) -> None:
    """What was revoked while the client was away ends, and nothing of it is delivered meanwhile."""
    again = away(gateway, "eve/a", "eve/b", "eve/c")
    server.denied.add("eve.b")
    with again() as client:
        told = client.next(Connack)
        assert (told.reason, told.session_present) == (OK, True)
        assert set(gateway.gateway.mqtt.sessions["away"].subscriptions) == {"eve/a", "eve/c"}
        for topic in ("eve/b", "eve/c"):
            client.publish(topic, topic.encode(), 0)
        assert client.body() == b"eve/c"


def test_a_cache_that_forgets_at_once_does_not_keep_a_session_out(
    gateway: Running, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer pushes out the one before: a client whose filters are asked for again never gets in."""
    remember = HttpAuthorizerClient._remember

    def only_this(
        self: HttpAuthorizerClient, question: AuthorizerRequest, allowed: bool, secs: float
    ) -> None:
        for other in [one for one in self._answers if one.kind == question.kind == "topic"]:
            del self._answers[other]
        remember(self, question, allowed, secs)

    again = away(gateway, "eve/a", "eve/b", "eve/c")
    monkeypatch.setattr(HttpAuthorizerClient, "_remember", only_this)
    with again() as client:
        assert client.next(Connack).session_present
        assert len(gateway.gateway.mqtt.sessions["away"].subscriptions) == 3


def removed(gateway: Running, user: str) -> frozenset[str]:
    """Remove a user as a reload does, and disconnect its clients."""
    running = gateway.gateway
    found, roles = running.identities.candidate(running.settings), running.authorization.roles
    users, hashes = (
        {name: one for name, one in some.items() if name != user} for some in (found.users, found.hashes)
    )
    replaced = running.identities.use(DefinedUsers(users, hashes, found.scram, f"{found.text}#"))
    running.authorization.use(
        Roles(roles.roles, {name: one for name, one in roles.users.items() if name != user}, roles.default)
    )
    assert replaced is not None
    revoke(running.listeners, replaced.removed)
    running.writes.flush()
    return replaced.removed


def test_a_user_removed_while_the_authorizer_is_asked_does_not_come_in(
    gateway: Running, server: Server
) -> None:
    server.gate.clear()
    with Mqtt(gateway.mqtt) as client:
        client.say(Connect("c", Version.V5, True, 0, None, "bob", PASSWORD.encode(), {}))
        gateway.until(lambda: server.asked)
        assert gateway.ask(lambda: removed(gateway, "bob")) == {"bob"}
        server.gate.set()
        assert client.next(Connack).reason == ReasonCode.BAD_USER_NAME_OR_PASSWORD


def test_a_user_removed_between_login_and_open_does_not_come_in(gateway: Running) -> None:
    """An AMQP/Fast client that has TUNE and sends no OPEN yet."""
    with fast(gateway, "bob") as client:
        client.hear()  # START, and no more: TUNE is read after the removal
        listener = gateway.gateway.listeners["amqpfast"]
        gateway.until(lambda: [one for one in listener.connections if one.sender.user == "bob"])
        gateway.ask(lambda: removed(gateway, "bob"))
        assert client.next(Closed).reply_code == 403


def test_a_user_removed_while_its_password_is_hashed_does_not_come_in(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = Access.verify

    async def slow(self: Access, credentials: Credentials) -> Principal | Denial:
        found = await verify(self, credentials)
        removed(gateway, "bob")
        return found

    monkeypatch.setattr(Access, "verify", slow)
    client, told = connect(gateway, "c", user=("bob", PASSWORD.encode()))
    with client:
        assert told.reason == ReasonCode.BAD_USER_NAME_OR_PASSWORD


async def test_a_check_after_a_renewal_waits_for_its_decisions() -> None:
    """Two decisions are pending: the check is repeated after each, and the client goes on meanwhile."""
    pending = [trio.Event(), trio.Event()]
    checks = []

    def check() -> None:
        checks.append(len(pending))
        if pending:
            raise Pending(pending[0])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(completed, check)
        for event in list(pending):
            await trio.testing.wait_all_tasks_blocked()
            del pending[0]
            event.set()
    assert checks == [2, 1, 0]
