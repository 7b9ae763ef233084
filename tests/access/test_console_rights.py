"""Rights over HTTP: tokens end with their users, bodies and hosts are rights, private fields are hidden.

All of it is tried over sockets, of a running gateway whose configuration changes.
"""

from __future__ import annotations

import base64
import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import orjson
import pika
import pytest
from structlog.testing import capture_logs

from gateway.access.console import EVERYTHING, NOTHING, ConsoleRights, console_rights
from gateway.access.console_tokens import ConsoleTokens, Maker
from gateway.access.definitions import read_users
from gateway.access.principal import Principal
from gateway.model.message import Message, Sender
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.properties import Properties, Value, ValueType, property_set, string
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.mqtt.dialect import topic_address
from gateway.protocols.mqtt.spec import PacketType
from gateway.settings import load_settings
from gateway.settings.access import Role
from tests.access.test_doors import amqp
from tests.access.test_reloading import OTHER, RIGHT, document, reloaded, written
from tests.ingress.clients import connect
from tests.interop.gateway_fixture import LOOPBACK, Running, running

ALL_AMQP: Final = {"*": {"configure": ".*", "write": ".*", "read": ".*"}}
METHODS: Final = ("GET", "HEAD")
GOT: Final = {"count": 1, "ackmode": "ack_requeue_true", "encoding": "auto"}
ROLES: Final[dict[str, Any]] = {
    "boss": {"console": "write", "console_bodies": True},
    "writer": {"console": "write"},
    "reader": {"console": "read"},
    "reader of bodies": {"console": "read", "console_bodies": True},
    "of shop": {"console": "write", "console_bodies": True, "console_virtual_hosts": ["shop"]},
    "client": {"amqp091": ALL_AMQP, "mqtt": {"publish": "#", "subscribe": "#"}},
}
LOST: Final = Outcome(Verdict.REJECTED, Reason.TARGET_REFUSED, "no")
MAPPING: Final = """version: 1
routes:
  - name: cards
    from: {endpoint: mqtt, topic: "cards/{id}"}
    to: {endpoint: amqp091, queue: cards}
    private: {body.number: drop, body.name: hash, headers.secret: drop, client: hash}
  - name: copies
    from: {endpoint: mqtt, topic: "cards/#"}
    to: {endpoint: amqp091, queue: copies}
"""
CARD: Final = b'{"number":"4111","name":"Ann","sum":5}'


def of_roles(*roles: str, password: str = RIGHT) -> dict[str, Any]:
    return {"password_hash": password, "roles": list(roles)}


def given(folder: Path, users: dict[str, Any], **more: Any) -> dict[str, Any]:
    found = document(users={**users, "client": of_roles("client")}, roles=ROLES, **more)
    return {
        **found,
        "http": {"host": LOOPBACK, "port": 0, "tokens_path": str(folder / "tokens")},
        "store": {"path": str(folder / "store")},
    }


@contextmanager
def gateway_with(folder: Path, users: dict[str, Any], **more: Any) -> Iterator[Running]:
    path = folder / "gateway.yaml"
    written(path, given(folder, users, **more))
    with running(load_settings(path, {})) as one:
        yield one


class Answered(NamedTuple):
    status: int
    document: Any
    cookie: str


Shown = dict[str, str]


def basic(user: str, password: str = "right") -> Shown:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def bearer(token: str) -> Shown:
    return {"Authorization": f"Bearer {token}"}


def call(
    gateway: Running, shown: Shown, path: str, body: Any = None, method: str = "", prefix: str = "/api/v1/"
) -> Answered:
    connection = http.client.HTTPConnection(LOOPBACK, gateway.gateway.http_port, timeout=20)
    with closing(connection):
        content = None if body is None else json.dumps(body)
        head = {**shown, "Content-Type": "application/json"}
        connection.request(method or ("GET" if body is None else "POST"), prefix + path, content, head)
        response = connection.getresponse()
        data = response.read()
        found = orjson.loads(data) if data and "json" in (response.headers["content-type"] or "") else data
        return Answered(response.status, found, (response.headers["set-cookie"] or "").partition(";")[0])


def make(gateway: Running, shown: Shown, name: str, **more: Any) -> str:
    made = call(gateway, shown, "tokens/make", {"name": name, **more})
    assert made.status == 200, made
    return str(made.document["token"])


@contextmanager
def stream(gateway: Running, shown: Shown, path: str) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(LOOPBACK, gateway.gateway.http_port, timeout=20)
    with closing(connection):
        connection.request("GET", f"/api/v1/{path}", headers=shown)
        with connection.getresponse() as response:
            assert response.status == 200
            yield response


# Tokens and sessions end with their user.


ENDS: Final = {
    "removed": ({}, 401),
    "another password": ({"ann": of_roles("boss", password=OTHER)}, 401),
    "no right any more": ({"ann": of_roles("client")}, 403),
}


@pytest.mark.parametrize("users, code", ENDS.values(), ids=ENDS)
def test_what_a_user_has_made_ends_with_it(users: dict[str, Any], code: int, tmp_path: Path) -> None:
    before = {"ann": of_roles("boss"), "bob": of_roles("boss")}
    with gateway_with(tmp_path, before) as gateway:
        first = make(gateway, basic("ann"), "first", console="write", bodies=True)
        second = make(gateway, bearer(first), "second", console="read")
        bobs = make(gateway, basic("bob"), "bobs", console="write")
        session = {"Cookie": call(gateway, {}, "login", {"user": "ann", "password": "right"}).cookie}
        by_token = {"Cookie": call(gateway, {}, "login", {"token": first}).cookie}
        shown = (bearer(first), bearer(second), session, by_token)
        assert [call(gateway, one, "status").status for one in shown] == [200] * 4
        listed = {
            row["name"]: row["user"] for row in call(gateway, bearer(bobs), "tokens").document["tokens"]
        }
        assert listed == {"administrator": None, "first": "ann", "second": "ann", "bobs": "bob"}
        with (
            stream(gateway, bearer(first), "events") as events,
            stream(gateway, session, "tap") as tap,
            stream(gateway, basic("ann"), "events") as own,
        ):
            after = given(tmp_path, {**users, "bob": before["bob"]})
            reloaded(gateway, "taken", lambda: written(tmp_path / "gateway.yaml", after))
            for open_one in (events, tap, own):
                open_one.read()  # to its end
        assert {call(gateway, one, "status").status for one in shown} == {code}
        assert call(gateway, {}, "login", {"token": first}).status == code
        assert call(gateway, bearer(bobs), "status").status == 200


@pytest.mark.parametrize("password, code", [(RIGHT, 200), (OTHER, 401)], ids=["same", "another"])
def test_a_token_knows_its_user_after_a_restart(password: str, code: int, tmp_path: Path) -> None:
    with gateway_with(tmp_path, {"ann": of_roles("boss")}) as gateway:
        token = make(gateway, basic("ann"), "one")
        assert call(gateway, bearer(token), "status").status == 200
    with gateway_with(tmp_path, {"ann": of_roles("boss", password=password)}) as gateway:
        assert call(gateway, bearer(token), "status").status == code


def test_a_token_may_no_more_than_its_user(tmp_path: Path) -> None:
    """Who has lost `write`, or bodies, has no token left that has them."""
    with gateway_with(tmp_path, {"ann": of_roles("boss")}) as gateway:
        token = make(gateway, basic("ann"), "one", console="write")
        assert call(gateway, bearer(token), "tokens/revoke", {"name": "x"}).status == 200
        after = given(tmp_path, {"ann": of_roles("reader")})
        reloaded(gateway, "taken", lambda: written(tmp_path / "gateway.yaml", after))
        assert call(gateway, bearer(token), "status").status == 200
        assert call(gateway, bearer(token), "tokens/revoke", {"name": "x"}).status == 403


@pytest.mark.parametrize("way", ["bearer", "basic", "session"])
def test_the_name_of_a_token_is_nobodys_identity(way: str, tmp_path: Path) -> None:
    """What is done by a token of ann that has bob's name is done by ann, and counts in her shares."""
    users = {"ann": of_roles("boss"), "bob": of_roles("boss")}
    with gateway_with(tmp_path, users) as gateway, capture_logs() as lines:
        token = make(gateway, basic("ann"), "bob", console="write")
        begun = call(gateway, {}, "login", {"token": token})
        shown = {
            "bearer": bearer(token),
            "basic": basic("bob", token),
            "session": {"Cookie": begun.cookie, "X-CSRF-Token": begun.document["csrf"]},
        }[way]
        asked = {"endpoint": "mqtt", "topic": "t", "body": "x", "retain": True, "qos": 1}
        assert call(gateway, shown, "publish", asked).status == 200
        assert call(gateway, shown, "session").document["user"] == "ann"
        quotas = gateway.gateway.quotas
        for of in (quotas.retained, quotas.console):
            assert gateway.ask(lambda: (of.count_of("ann"), of.count_of("bob"))) == (1, 0)  # noqa: B023
        with stream(gateway, shown, "events"):
            gateway.until(lambda: quotas.streams.count_of("ann") == 1)
        assert call(gateway, shown, "tokens/make", {"name": "next"}).status == 200
        rows = call(gateway, shown, "tokens").document["tokens"]
        assert {(row["user"], row["by"]) for row in rows if row["name"] == "next"} == {("ann", "ann")}
        by_token = [line for line in lines if line.get("audit") == "administered"]
        assert {line["user"] for line in by_token} == {"ann"}
        assert way == "session" or by_token[-1]["credential"] == "token bob"


def test_tokens_of_an_older_gateway_are_read(tmp_path: Path) -> None:
    tokens = ConsoleTokens(tmp_path)
    text = tokens.make("new", "read", by="ann", maker=Maker("ann", "users", ("a",), "s"))
    content = orjson.loads((tmp_path / "tokens.json").read_bytes())
    for row in content["tokens"]:
        if row["name"] != "new":
            del row["bodies"], row["maker"]
    (tmp_path / "tokens.json").write_bytes(orjson.dumps(content))
    again = ConsoleTokens(tmp_path)
    found = again.find(text)
    assert found is not None
    assert found.maker == Maker("ann", "users", ("a",), "s")
    assert {one.name: one.maker is None for one in again.all()} == {"administrator": True, "new": False}


# Bodies.


def lose(gateway: Running, body: bytes, *, topic: str = "t", route: str = "") -> None:
    letter = Message(topic_address(topic), body, sender=Sender("mqtt", "c 7", "ann", "here"))
    gateway.ask(lambda: gateway.gateway.dead_letters.add([letter], route, LOST))


def published(gateway: Running, topic: str, body: bytes) -> None:
    client, _ = connect(gateway, "c 7", user=("client", b"right"))
    with client:
        client.publish(topic, body, qos=1, packet_id=1)
        client.acked(PacketType.PUBACK)


def next_message(events: http.client.HTTPResponse) -> dict[str, Any]:
    while not (line := events.readline()).startswith(b'data: {"route"'):
        assert line
    found: dict[str, Any] = orjson.loads(line[6:])["message"]
    return found


BODIES: Final = [("boss", True), ("writer", False), ("reader", False), ("reader of bodies", True)]


@pytest.mark.parametrize("role, sees", BODIES)
def test_bodies_are_a_right_of_their_own(role: str, sees: bool, tmp_path: Path) -> None:
    with gateway_with(tmp_path, {"ann": of_roles(role)}) as gateway:
        lose(gateway, b"a secret")
        gateway.until(lambda: len(gateway.gateway.dead_letters) == 1)
        shown = basic("ann")
        row = call(gateway, shown, "dead-letters").document["items"][0]
        whole = call(gateway, shown, f"dead-letters/{row['id']}").document
        assert (row["body"], whole["body"]) == (("a secret", "a secret") if sees else ("", ""))
        assert whole["body_encoding"] == ("utf-8" if sees else "withheld")
        assert row["body_bytes"] == whole["body_bytes"] == 8
        with stream(gateway, shown, "tap") as tap:
            gateway.until(lambda: len(gateway.gateway.dispatcher.taps.open) == 1)
            client, _ = connect(gateway, "reads", user=("client", b"right"))
            with client:
                client.subscribe("t", 1)
                published(gateway, "t", b"a secret")
                found = next_message(tap)
            assert (found["body"], found["body_bytes"]) == ("a secret" if sees else "", 8)
        with closing(amqp(gateway, "client")) as connection:
            connection.channel().queue_declare("q")
            connection.channel().basic_publish("", "q", b"a secret")
        asked = {"protocol": "amqp091", "virtual_host": "/", "queue": "q", "count": 1}
        peeked = call(gateway, shown, "queues/peek", asked)
        if ROLES[role]["console"] == "write":
            assert peeked.document["shown"][0]["body"] == ("a secret" if sees else "")
        else:
            assert peeked.status == 403


def test_a_token_shows_bodies_if_it_was_made_so(tmp_path: Path) -> None:
    with gateway_with(tmp_path, {"ann": of_roles("boss"), "bob": of_roles("writer")}) as gateway:
        lose(gateway, b"a secret")
        gateway.until(lambda: len(gateway.gateway.dead_letters) == 1)
        tokens = {
            make(gateway, basic("ann"), "a"): False,
            make(gateway, basic("ann"), "b", bodies=True): True,
            make(gateway, basic("ann"), "c", console="write"): True,
            make(gateway, basic("bob"), "d", console="write", bodies=True): False,
        }
        for token, sees in tokens.items():
            row = call(gateway, bearer(token), "dead-letters").document["items"][0]
            assert bool(row["body"]) is sees


def test_rows_of_the_journal_have_no_bodies_without_the_right(tmp_path: Path) -> None:
    journal = {"enabled": True, "path": str(tmp_path / "journal"), "all": True}
    users = {"ann": of_roles("boss"), "bob": of_roles("reader")}
    with gateway_with(tmp_path, users, journal=journal) as gateway:
        client, _ = connect(gateway, "reads", user=("client", b"right"))
        with client:
            client.subscribe("t", 1)
            published(gateway, "t", b"a secret")
        assert gateway.gateway.journaling is not None
        writer = gateway.gateway.journaling.writer
        gateway.until(lambda: writer.rows > 0 and writer.backlog == 0)
        assert set(call_journal(gateway, "ann")) == {"a secret"}
        assert set(call_journal(gateway, "bob")) == {""}


def call_journal(gateway: Running, user: str) -> list[str]:
    return [row["body"] for row in call(gateway, basic(user), "journal").document["items"]]


# Private fields.


@pytest.mark.parametrize(
    "route, topic", [("cards", "cards/7"), ("copies", "cards/7"), ("", "cards/7"), ("gone", "cards/7")]
)
def test_private_fields_are_hidden_in_dead_letters(route: str, topic: str, tmp_path: Path) -> None:
    mapping = tmp_path / "routes.yaml"
    mapping.write_text(MAPPING)
    with gateway_with(tmp_path, {"ann": of_roles("boss")}, mappings=[str(mapping)]) as gateway:
        lose(gateway, CARD, topic="cards/7", route=route)
        gateway.until(lambda: len(gateway.gateway.dead_letters) == 1)
        row = call(gateway, basic("ann"), "dead-letters").document["items"][0]
        whole = call(gateway, basic("ann"), f"dead-letters/{row['id']}").document
        for found in (row, whole):
            body = orjson.loads(found["body"])
            assert body.keys() == {"name", "sum"}
            assert body["name"] != "Ann"
            assert found["sender"]["client"] not in ("", "c 7")


def test_other_messages_are_shown_as_they_are(tmp_path: Path) -> None:
    mapping = tmp_path / "routes.yaml"
    mapping.write_text(MAPPING)
    with gateway_with(tmp_path, {"ann": of_roles("boss")}, mappings=[str(mapping)]) as gateway:
        lose(gateway, CARD, topic="other")
        gateway.until(lambda: len(gateway.gateway.dead_letters) == 1)
        row = call(gateway, basic("ann"), "dead-letters").document["items"][0]
        assert orjson.loads(row["body"]) == orjson.loads(CARD)
        mapping.write_text(MAPPING.replace("cards/", "other/").replace("other/#", "+"))
        call(gateway, basic("ann"), "mappings/reload", {})
        lose(gateway, CARD, topic="other/1")
        gateway.until(lambda: len(gateway.gateway.dead_letters) == 2)
        row = call(gateway, basic("ann"), "dead-letters").document["items"][0]
        assert "number" not in row["body"]


def test_private_fields_are_hidden_from_who_watches_or_peeks(tmp_path: Path) -> None:
    mapping = tmp_path / "routes.yaml"
    mapping.write_text(MAPPING)
    with gateway_with(tmp_path, {"ann": of_roles("boss")}, mappings=[str(mapping)]) as gateway:
        with closing(amqp(gateway, "client")) as connection:
            for queue in ("cards", "copies"):
                connection.channel().queue_declare(queue)
        with stream(gateway, basic("ann"), "tap?route=copies") as tap:
            gateway.until(lambda: len(gateway.gateway.dispatcher.taps.open) == 1)
            published(gateway, "cards/7", CARD)
            found = next_message(tap)
        assert "4111" not in found["body"]
        assert "sum" in found["body"]
        for queue in ("cards", "copies"):
            asked = {"protocol": "amqp091", "virtual_host": "/", "queue": queue, "count": 1}
            found = call(gateway, basic("ann"), "queues/peek", asked).document["shown"][0]
            assert "4111" not in found["body"]


PRIVATE_EXCHANGE: Final = """version: 1
routes:
  - name: cards
    from: {endpoint: amqp091, exchange: first, binding_key: "cards.#"}
    to: {endpoint: mqtt, topic: "cards/seen"}
    private: {body.number: drop}
  - name: others
    from: {endpoint: amqp091, exchange: "", binding_key: "dead"}
    to: {endpoint: mqtt, topic: "dead/seen"}
"""


@pytest.mark.parametrize("way", ["died", "died twice", "delayed", "alternate exchange"])
def test_private_fields_are_hidden_wherever_a_message_has_gone(way: str, tmp_path: Path) -> None:
    """Each way ends in the queue `dead`; a message that was published to that queue is shown."""
    mapping = tmp_path / "routes.yaml"
    mapping.write_text(PRIVATE_EXCHANGE)
    with (
        gateway_with(tmp_path, {"ann": of_roles("boss", "client")}, mappings=[str(mapping)]) as gateway,
        closing(amqp(gateway, "client")) as connection,
    ):
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("dead")
        kind, arguments, source = "topic", {}, "work"
        if way == "delayed":
            kind, arguments = "x-delayed-message", {"x-delayed-type": "topic"}
            source = "dead"
        elif way == "alternate exchange":
            channel.exchange_declare("other", "fanout")
            channel.queue_bind("dead", "other")
            arguments = {"alternate-exchange": "other"}
        channel.exchange_declare("first", kind, arguments=arguments)
        if way != "alternate exchange":
            dying = {"x-dead-letter-exchange": "", "x-message-ttl": 0}
            last = dying | {"x-dead-letter-routing-key": "dead"}
            if way == "died twice":
                channel.queue_declare("again", arguments=last)
                last = dying | {"x-dead-letter-routing-key": "again"}
            channel.queue_declare("work", arguments=last)
            channel.queue_bind(source, "first", "cards.#")
        asked = {"protocol": "amqp091", "virtual_host": "/", "queue": "dead", "count": 1}
        for shown in (False, True):
            if shown:
                channel.basic_publish("", "dead", CARD)
            else:
                headers = {"x-delay": 1} if way == "delayed" else {}
                channel.basic_publish("first", "cards.1", CARD, pika.BasicProperties(headers=headers))
            gateway.until(lambda: len(gateway.gateway.hosts["/"].queues["dead"]) == 1)
            found = call(gateway, basic("ann"), "queues/peek", asked).document["shown"][0]
            assert ("4111" in found["body"]) is shown
            got = {"count": 1, "ackmode": "ack_requeue_false", "encoding": "auto"}
            found = call(gateway, basic("ann"), "queues/%2F/dead/get", got, prefix="/api/").document[0]
            assert ("4111" in found["payload"]) is shown


@pytest.mark.parametrize("route", ["others", "gone", ""])
def test_private_fields_are_hidden_in_what_died_before_it_took_a_route(route: str, tmp_path: Path) -> None:
    mapping = tmp_path / "routes.yaml"
    mapping.write_text(PRIVATE_EXCHANGE)
    death = Value(ValueType.ARRAY, (Value(ValueType.TABLE, (("queue", string("work")),)),))
    said = property_set(Properties(headers=(("x-death", death),)))
    message = Message(amqp_address("", "dead"), CARD, said, sender=Sender("amqp091"))
    with gateway_with(tmp_path, {"ann": of_roles("boss")}, mappings=[str(mapping)]) as gateway:
        gateway.ask(lambda: gateway.gateway.dead_letters.add([message], route, LOST))
        gateway.until(lambda: len(gateway.gateway.dead_letters) == 1)
        row = call(gateway, basic("ann"), "dead-letters").document["items"][0]
        assert "4111" not in row["body"]


# Virtual hosts.


@contextmanager
def with_two_hosts(folder: Path) -> Iterator[Running]:
    listeners = document()["listeners"]
    listeners["amqp091"]["virtual_hosts"] = ["/", "shop"]
    with gateway_with(
        folder,
        {"ann": of_roles("of shop"), "bob": of_roles("boss"), "carl": of_roles("of shop", "client")},
        listeners=listeners,
    ) as one:
        for host in ("/", "shop"):
            with closing(amqp(one, "client", host)) as connection:
                channel = connection.channel()
                channel.queue_declare("q", durable=True)
                channel.exchange_declare("e", "fanout", durable=True)
                channel.queue_bind("q", "e")
                channel.basic_publish("", "q", b"x")
        yield one


@contextmanager
def consuming(gateway: Running) -> Iterator[None]:
    """A consumer in each of the two virtual hosts."""
    with ExitStack() as stack:
        for host in ("/", "shop"):
            connection = stack.enter_context(closing(amqp(gateway, "client", host)))
            channel = connection.channel()
            channel.queue_declare("consumed", auto_delete=True)
            channel.basic_consume("consumed", lambda *_: None)
        yield


ROWS: Final = ("queues", "exchanges", "bindings")


def hosts_in(rows: list[dict[str, Any]], word: str) -> set[str]:
    return {row[word] for row in rows}


def test_who_sees_a_virtual_host_sees_nothing_else(tmp_path: Path) -> None:
    with with_two_hosts(tmp_path) as gateway, closing(amqp(gateway, "client")) as held:
        ann, bob = basic("ann"), basic("bob")
        for path in ROWS:
            rows = call(gateway, ann, path).document["items"]
            assert hosts_in(rows, "virtual_host") == {"shop"}
            assert hosts_in(call(gateway, bob, path).document["items"], "virtual_host") == {"/", "shop"}
            assert call(gateway, ann, f"{path}?virtual_host={quote('/', safe='')}").document["items"] == []
            of_rabbit = call(gateway, ann, path, prefix="/api/").document
            assert hosts_in(of_rabbit, "vhost") == {"shop"}
            assert call(gateway, ann, f"{path}/%2F", prefix="/api/").status == 404
            assert hosts_in(call(gateway, ann, f"{path}/shop", prefix="/api/").document, "vhost") == {"shop"}
        with consuming(gateway):
            for user, hosts in ((ann, {"shop"}), (bob, {"/", "shop"})):
                rows = call(gateway, user, "consumers").document["items"]
                assert hosts_in(rows, "virtual_host") == hosts
        gateway.until(lambda: "consumed" not in gateway.gateway.hosts["shop"].queues)
        assert call(gateway, ann, "connections").document["items"] == []
        assert call(gateway, ann, "connections", prefix="/api/").document == []
        assert hosts_in(call(gateway, ann, "vhosts", prefix="/api/").document, "name") == {"shop"}
        overview = call(gateway, ann, "overview", prefix="/api/").document
        assert overview["object_totals"]["queues"] == 1
        assert overview["object_totals"]["connections"] == 0
        definitions = call(gateway, ann, "definitions", prefix="/api/").document
        assert (definitions["users"], len(definitions["queues"])) == ([], 1)
        for path in ("nodes", "users", "permissions", "users/bob", "vhosts/shop/permissions"):
            assert call(gateway, ann, path, prefix="/api/").status == 403
        for path in (
            "status",
            "events",
            "tap",
            "dead-letters",
            "retained",
            "sessions",
            "journal",
            "tokens",
            "users",
            "roles",
            "routes",
            "endpoints",
            "limits",
            "mappings",
            "outboxes",
            "rates",
        ):
            assert call(gateway, ann, path).status == 403, path
        assert call(gateway, ann, "metrics/detailed", prefix="/").status == 403
        assert call(gateway, ann, "session").status == 200
        assert held.is_open


OF_ALL_HOSTS: Final[dict[str, Any]] = {
    "publish": {"endpoint": "mqtt", "topic": "t"},
    "drain": {},
    "tokens/make": {"name": "n"},
    "dead-letters/redrive": {"all": True},
    "dead-letters/purge": {"all": True},
    "retained/remove": {"all": True},
    "mappings/reload": {},
}


def test_who_changes_a_virtual_host_changes_nothing_else(tmp_path: Path) -> None:
    with with_two_hosts(tmp_path) as gateway, closing(amqp(gateway, "client")) as held:
        ann = basic("ann")
        asked = {"protocol": "amqp091", "virtual_host": "/", "queue": "q", "count": 1}
        assert call(gateway, ann, "queues/peek", asked).status == 404
        assert call(gateway, ann, "queues/peek", {**asked, "virtual_host": "shop"}).status == 200
        assert call(gateway, ann, "queues/purge", {"all": True}).document == {"purged": 1, "messages": 1}
        assert (
            call(gateway, ann, "queues/remove", {"queue": "q", "virtual_host": "/"}).document["removed"] == 0
        )
        assert call(gateway, ann, "connections/disconnect", {"user": "client"}).document["disconnected"] == 0
        carl = basic("carl")
        for caller in (ann, carl):
            assert call(gateway, caller, "queues/%2F/q", method="DELETE", prefix="/api/").status == 404
        # RabbitMQ's paths ask for the rights of AMQP, too.
        assert call(gateway, ann, "queues/shop/q", method="DELETE", prefix="/api/").status == 401
        assert call(gateway, carl, "queues/shop/q", method="DELETE", prefix="/api/").status == 204
        for path, body in (
            ("publish", {"endpoint": "mqtt", "topic": "t"}),
            ("drain", {}),
            ("tokens/make", {"name": "n"}),
            ("dead-letters/redrive", {"all": True}),
            ("dead-letters/purge", {"all": True}),
            ("retained/remove", {"all": True}),
            ("mappings/reload", {}),
        ):
            assert call(gateway, ann, path, body).status == 403, path
        hosts = gateway.gateway.hosts
        assert ("q" in hosts["/"].queues, "q" in hosts["shop"].queues) == (True, False)
        held.process_data_events()
        assert held.is_open


TAGS: Final = [
    ("management", ("read", frozenset({"shop"}), False)),
    ("policymaker", ("read", frozenset({"shop"}), False)),
    ("monitoring", ("read", None, False)),
    ("monitoring,management", ("read", None, False)),
    ("administrator", ("write", None, True)),
    ("", ("none", None, False)),
]


@pytest.mark.parametrize("tags, wanted", TAGS)
def test_users_of_rabbitmq_see_what_they_see_there(
    tags: str, wanted: tuple[Any, ...], tmp_path: Path
) -> None:
    content = {
        "users": [{"name": "eve", "password_hash": "", "tags": tags}],
        "permissions": [{"user": "eve", "vhost": "shop", "configure": "", "write": "", "read": ".*"}],
    }
    (tmp_path / "definitions.json").write_bytes(orjson.dumps(content))
    found = read_users(tmp_path / "definitions.json")
    rights = console_rights(Principal("eve", roles=("rabbitmq:eve",)), found.roles)
    assert (rights.right, rights.read_hosts, rights.bodies) == wanted


def test_rights_of_several_roles_are_joined() -> None:
    def joined(*roles: dict[str, Any]) -> ConsoleRights:
        known = {str(number): Role.model_validate(role) for number, role in enumerate(roles)}
        return console_rights(Principal("a", roles=tuple(known)), known)

    read, write = {"console": "read"}, {"console": "write", "console_virtual_hosts": ["a"]}
    assert joined(read, write) == ConsoleRights("write", False, None, frozenset("a"))
    assert joined(write, {**write, "console_virtual_hosts": "b"}).write_hosts == frozenset("ab")
    assert joined({"console_bodies": True}) == NOTHING
    assert EVERYTHING.intersection(joined(read, write)) == joined(read, write)
    elsewhere = joined({**write, "console_bodies": True}, {"console": "write"})
    assert [elsewhere.shows_bodies(host) for host in ("a", "b", None)] == [True, False, False]
    assert not elsewhere.intersection(
        joined({**read, "console_bodies": True, "console_virtual_hosts": ["b"]})
    ).body_hosts
    assert joined({**read, "console_bodies": True}, write).shows_bodies(None)
    assert (
        joined(write).intersection(joined({**write, "console_virtual_hosts": ["b"]})).write_hosts
        == frozenset()
    )


def test_a_reader_cannot_require_endless_work_of_a_list(tmp_path: Path) -> None:
    with with_two_hosts(tmp_path) as gateway:
        with closing(amqp(gateway, "client", "shop")) as connection:
            connection.channel().queue_declare("a" * 240, durable=True)
        slow = quote("(a?){1000}" * 20 + "b")
        many = ",".join(f"c{number}" for number in range(101))
        for query in (f"use_regex=true&name={slow}", f"columns={many}", f"sort={'a.' * 5_000}"):
            found = call(gateway, basic("ann"), f"queues/shop?{query}", prefix="/api/")
            assert (found.status, found.document["error"]) == (400, "bad_request"), found


@pytest.mark.parametrize("path", ["queues", "queues/shop/q", "nodes", "queues/%2F/q", "none"])
def test_head_has_the_status_of_get(path: str, tmp_path: Path) -> None:
    with with_two_hosts(tmp_path) as gateway:
        for user in ("ann", "bob", "carl", "client"):
            answers = [call(gateway, basic(user), path, method=way, prefix="/api/") for way in METHODS]
            assert answers[0].status == answers[1].status != 500, user
            assert answers[1].document == b""


@pytest.mark.parametrize("depth", [30, 33, 63, 65, 500, 800])
def test_values_that_are_nested_too_deeply_are_an_error_of_the_request(depth: int, tmp_path: Path) -> None:
    lists: Any = "x"
    tables: Any = "x"
    for _ in range(depth):
        lists, tables = [lists], {"a": tables}
    with with_two_hosts(tmp_path) as gateway:
        for value in (lists, tables):
            message: dict[str, Any] = {"routing_key": "q", "payload": "x", "payload_encoding": "string"}
            message["properties"] = {"headers": {"a": value}}
            calls = (
                ("exchanges/shop/amq.default/publish", message, "POST"),
                ("queues/shop/new", {"arguments": {"a": value}}, "PUT"),
                ("exchanges/shop/new", {"arguments": {"a": value}}, "PUT"),
                ("bindings/shop/e/e/q/q", {"arguments": {"a": value}}, "POST"),
            )
            for path, body, way in calls:
                found = call(gateway, basic("carl"), path, body, way, prefix="/api/")
                codes = (200, 201, 204) if depth < 32 else (200, 201, 204, 400) if depth < 64 else (400,)
                assert found.status in codes, (path, found)


def test_bodies_are_shown_only_where_the_role_that_shows_them_applies(tmp_path: Path) -> None:
    listeners = document()["listeners"]
    listeners["amqp091"]["virtual_hosts"] = ["/", "shop"]
    users = {"ann": of_roles("of shop", "writer", "client"), "bob": of_roles("of shop", "client")}
    with gateway_with(tmp_path, users, listeners=listeners) as gateway:
        for host in ("/", "shop"):
            with closing(amqp(gateway, "client", host)) as connection:
                channel = connection.channel()
                channel.queue_declare("q", durable=True)
                channel.basic_publish("", "q", b"x")
        for host, wanted in (("/", ""), ("shop", "x")):
            asked = {"protocol": "amqp091", "virtual_host": host, "queue": "q", "count": 1}
            shown = call(gateway, basic("ann"), "queues/peek", asked).document["shown"]
            assert [row["body"] for row in shown] == [wanted], host
            path = f"queues/{quote(host, safe='')}/q/get"
            got = call(gateway, basic("ann"), path, GOT, prefix="/api/")
            assert got.status == (200 if wanted else 401), got
        client, _ = connect(gateway, "reads", user=("client", b"right"))
        with client, stream(gateway, basic("ann"), "tap") as tap:
            gateway.until(lambda: len(gateway.gateway.dispatcher.taps.open) == 1)
            client.subscribe("t", 1)
            published(gateway, "t", b"a secret")
            assert next_message(tap)["body"] == ""
        assert call(gateway, basic("bob"), "tap").status == 403


@pytest.mark.parametrize("roles", [("of shop",), ("client",), ("reader",)])
def test_an_open_stream_has_the_rights_that_its_user_has_now(roles: tuple[str, ...], tmp_path: Path) -> None:
    with gateway_with(tmp_path, {"ann": of_roles("reader of bodies")}) as gateway:
        client, _ = connect(gateway, "reads", user=("client", b"right"))
        with (
            client,
            stream(gateway, basic("ann"), "tap") as tap,
            stream(gateway, basic("ann"), "events") as state,
        ):
            gateway.until(lambda: len(gateway.gateway.dispatcher.taps.open) == 1)
            client.subscribe("t", 1)
            published(gateway, "t", b"shown")
            assert next_message(tap)["body"] == "shown"
            path = tmp_path / "gateway.yaml"
            users = {"ann": of_roles(*roles)}
            reloaded(gateway, "taken", lambda: written(path, given(tmp_path, users)))
            published(gateway, "t", b"a secret")
            if roles == ("reader",):
                found = next_message(tap)
                assert (found["body"], found["body_encoding"]) == ("", "withheld")
            else:
                assert b"a secret" not in tap.read()
                state.read()
                gateway.until(lambda: not gateway.gateway.dispatcher.taps.open)


PRIVATE_OF_AMQP: Final = """version: 1
routes:
  - name: cards
    from: {endpoint: amqp091, exchange: amq.topic, binding_key: "cards.#"}
    to: {endpoint: mqtt, topic: "cards/seen"}
    private: {%s}
"""
LARGE: Final = b'{"number":"4111","x":"' + b"y" * (17 << 20) + b'"}'
QUORUM: Final = {"x-queue-type": "quorum", "x-delivery-limit": 2}


@contextmanager
def with_private(folder: Path, rule: str, body: bytes) -> Iterator[Running]:
    mapping = folder / "routes.yaml"
    mapping.write_text(PRIVATE_OF_AMQP % rule)
    with gateway_with(folder, {"ann": of_roles("boss", "client")}, mappings=[str(mapping)]) as gateway:
        with closing(amqp(gateway, "client")) as connection:
            channel = connection.channel()
            channel.queue_declare("work", durable=True, arguments=QUORUM)
            channel.queue_bind("work", "amq.topic", "cards.#")
            channel.confirm_delivery()
            channel.basic_publish("amq.topic", "cards.1", body)
        yield gateway


def got(gateway: Running, **more: Any) -> Answered:
    return call(gateway, basic("ann"), "queues/%2F/work/get", {**GOT, **more}, prefix="/api/")


@pytest.mark.parametrize("body", [b"no json", LARGE], ids=["no json", "on disk"])
@pytest.mark.parametrize("rule", ["body: drop", "body: hash", "body: {truncate: 4}", "body.number: drop"])
def test_get_shows_no_private_body(rule: str, body: bytes, tmp_path: Path) -> None:
    with with_private(tmp_path, rule, body) as gateway:
        found = got(gateway, truncate=40)
        (row,) = found.document
        assert found.status == 200
        assert b"4111" not in orjson.dumps(row)
        if len(body) > 100 or rule in ("body: drop", "body.number: drop"):
            assert (row["payload"], row["payload_encoding"], row["payload_bytes"]) == (
                "",
                "withheld",
                len(body),
            )


def test_messages_that_get_cannot_show_are_neither_lost_nor_counted(tmp_path: Path) -> None:
    with with_private(tmp_path, "user: drop", LARGE) as gateway:
        for mode in ("ack_requeue_true", "ack_requeue_false", "reject_requeue_false", "reject_requeue_true"):
            found = got(gateway, ackmode=mode)
            assert (found.status, found.document["error"]) == (400, "bad_request")
            assert "truncate" in found.document["reason"]
        (row,) = got(gateway, truncate=22).document
        assert (row["payload"], row["payload_bytes"]) == (LARGE[:22].decode(), len(LARGE))
        assert row["properties"]["headers"].get("x-delivery-count", 0) == 0
        assert (
            got(gateway, truncate=22, encoding="base64").document[0]["payload"]
            == base64.b64encode(LARGE[:22]).decode()
        )


def test_get_ends_before_a_response_is_too_large(tmp_path: Path) -> None:
    with with_private(tmp_path, "user: drop", b"first") as gateway:
        with closing(amqp(gateway, "client")) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            for body in (LARGE, b"last"):
                channel.basic_publish("", "work", body)
        found = got(gateway, count=9, ackmode="ack_requeue_false").document
        assert [(row["payload"], row["message_count"]) for row in found] == [("first", 2)]
        found = got(gateway, count=9, truncate=4, ackmode="ack_requeue_false").document
        assert [row["payload"] for row in found] == [LARGE[:4].decode(), "last"]


@contextmanager
def unread(gateway: Running, user: str, path: str, count: int) -> Iterator[list[socket.socket]]:
    """Request a path on several connections whose responses are not read."""
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            one = stack.enter_context(closing(socket.socket()))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            one.connect((LOOPBACK, gateway.gateway.http_port))
            head = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {basic(user)['Authorization']}\r\n\r\n"
            one.sendall(head.encode())
            found.append(one)
        yield found


def test_a_user_who_reads_no_responses_does_not_fill_the_memory(tmp_path: Path) -> None:
    users = {"ann": of_roles("boss"), "bob": of_roles("reader")}
    with gateway_with(tmp_path, users) as gateway:
        with closing(amqp(gateway, "client")) as connection:
            channel = connection.channel()
            for number in range(1_500):
                channel.queue_declare("q" * 240 + str(number), durable=True)
        shares = gateway.gateway.console.admission.unsent.shares
        gateway.ask(lambda: shares.set_limits(4 << 20, 4 << 20))
        assert call(gateway, basic("ann"), "overview", prefix="/api/").status == 200
        secret = make(gateway, basic("ann"), "hers", console="write")
        with unread(gateway, "ann", "/api/queues", 30):
            gateway.until(lambda: shares.refused > 20)
            assert 0 < gateway.ask(lambda: shares.of("ann")) < 8 << 20
            for shown in (basic("ann"), bearer(secret)):
                for path in ("queues", "overview", "v1/status"):
                    found = call(gateway, shown, path, prefix="/api/")
                    assert (found.status, "unsent" in found.document["detail"]) == (429, True), found
                got = call(gateway, shown, "queues/%2F/none/get", GOT, prefix="/api/")
                assert got.status == 429, "nothing is consumed for a response that cannot be sent"
            assert call(gateway, basic("bob"), "queues?page=1&page_size=1", prefix="/api/").status == 200
        gateway.until(lambda: not shares.total)
        assert call(gateway, basic("ann"), "overview", prefix="/api/").status == 200
        assert not gateway.ask(lambda: gateway.gateway.console.admission.unsent._builders)


def test_unread_metrics_count_for_their_user_or_address(tmp_path: Path) -> None:
    """Also those that need no login; and the metrics say that requests were refused."""
    with gateway_with(tmp_path, {"ann": of_roles("boss")}) as gateway:
        with closing(amqp(gateway, "client")) as connection:
            channel = connection.channel()
            for number in range(1_000):
                channel.queue_declare("q" * 240 + str(number), durable=True)
        shares = gateway.gateway.console.admission.unsent.shares
        gateway.ask(lambda: shares.set_limits(1 << 20, 1 << 20))
        with unread(gateway, "ann", "/metrics/detailed?series=queues", 4):
            gateway.until(lambda: shares.refused > 0 and shares.of("ann") > 1 << 20, seconds=60)
            assert call(gateway, basic("ann"), "session").status == 429
            shown = call(gateway, {}, "metrics", prefix="/")
            assert shown.status == 200, "another's unread responses do not count"
            counter = b'gateway_share_refused_total{resource="unsent_responses"} '
            (line,) = [one for one in shown.document.splitlines() if one.startswith(counter)]
            assert float(line.removeprefix(counter)) > 0
        gateway.until(lambda: not shares.total)
        nobody = "\0address loopback"
        gateway.ask(lambda: shares.add(nobody, 2 << 20))
        assert call(gateway, {}, "metrics", prefix="/").status == 429
        assert call(gateway, basic("ann"), "session").status == 200
        gateway.ask(lambda: shares.remove(nobody, 2 << 20))
        assert call(gateway, {}, "metrics", prefix="/").status == 200
