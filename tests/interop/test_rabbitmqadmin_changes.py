"""What `rabbitmqadmin` declares, binds, publishes and gets: a RabbitMQ and the gateway answer alike, and the
gateway asks for the rights that the same methods of AMQP need."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest
from pydantic import SecretStr

from gateway.settings import AmqpPermissions, Http, Role, User
from tests.conftest import missing
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.interop.servers import PeerMissingError, RabbitMQ
from tests.passwords import hashed

PASSWORD: Final = "right"
USERS: Final = {
    "ann": ("boss", "every"),
    "reader": ("watcher", "every"),
    "bob": ("boss", "some"),
    "cut": ("boss",),
    "blind": ("sightless", "every"),
}


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    some = {"/": AmqpPermissions(configure="^mine", write="^(mine|amq.default)", read="^mine")}
    every = {"/": AmqpPermissions(configure=".*", write=".*", read=".*")}
    settings = settings_of(
        http=Http(host=LOOPBACK, port=0),
        users={
            name: User(password_hash=SecretStr(hashed(PASSWORD)), roles=roles)
            for name, roles in USERS.items()
        },
        roles={
            "boss": Role(console="write", console_bodies=True),
            "sightless": Role(console="write"),
            "watcher": Role(console="read"),
            "every": Role(amqp091=every),
            "some": Role(amqp091=some),
        },
    )
    with running(settings) as started:
        yield started


@pytest.fixture(scope="module")
def rabbit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQ]:
    try:
        server = RabbitMQ(tmp_path_factory.mktemp("rabbit"), management=True)
    except PeerMissingError as error:
        missing(str(error))
        return
    server.start()
    yield server
    server.stop()


class Side:
    """One broker's HTTP port, for rabbitmqadmin and for bare requests."""

    def __init__(self, port: int, user: str, password: str) -> None:
        self._port = port
        self._auth = (user, password)

    def admin(self, *arguments: str) -> tuple[int, str]:
        program = shutil.which("rabbitmqadmin")
        if program is None:
            missing("rabbitmqadmin is not installed")
            return 1, ""
        at = ["--host", LOOPBACK, "--port", str(self._port), "-u", self._auth[0], "-p", self._auth[1]]
        done = subprocess.run(
            [sys.executable, program, *at, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        url = f"http://{LOOPBACK}:{self._port}/api/{path}"
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        found = httpx.request(method, url, content=data, auth=self._auth, timeout=20)
        return found.status_code, found.json() if found.content else None


@pytest.fixture(scope="module")
def ours(gateway: Running) -> Side:
    return Side(gateway.gateway.http_port, "ann", PASSWORD)


@pytest.fixture(scope="module")
def theirs(rabbit: RabbitMQ) -> Side:
    return Side(rabbit.management_port, "guest", "guest")


COMMANDS: Final = [
    "declare queue name=q",
    "declare queue name=q",
    "declare queue name=q durable=false",
    'declare queue name=t auto_delete=true arguments={"x-message-ttl":"soon"}',
    'declare queue name=l durable=false arguments={"x-max-length":2}',
    "declare queue name=amq.mine",
    "declare exchange name=x type=topic",
    "declare exchange name=x type=fanout",
    "declare exchange name=y type=other",
    "declare exchange name=hashing type=x-consistent-hash",
    "declare binding source=x destination=q routing_key=a.#",
    "declare binding source=x destination=none routing_key=a",
    "declare binding source=none destination=q routing_key=a",
    "declare binding source=x destination_type=exchange destination=amq.fanout routing_key=b",
    'declare binding source=amq.headers destination=q arguments={"x-match":"any","n":1}',
    "declare binding source=hashing destination=q routing_key=heavy",
    "publish exchange=x routing_key=a.b payload=one",
    'publish routing_key=q payload=two properties={"delivery_mode":2,"headers":{"n":[1,"t",true]}}',
    "publish routing_key=none payload=lost",
    "publish exchange=none routing_key=a payload=lost",
    "publish routing_key=q payload=//4= payload_encoding=base64",
    "-f raw_json get queue=q",
    "-f raw_json get queue=q count=2 ackmode=ack_requeue_false",
    "-f raw_json get queue=q count=9 ackmode=reject_requeue_true",
    "-f raw_json get queue=q count=9 ackmode=reject_requeue_false encoding=base64",
    "-f raw_json get queue=q count=9",
    "get queue=none",
    "publish routing_key=q payload=left",
    "purge queue name=q",
    "-f raw_json get queue=q",
    "purge queue name=none",
    "delete binding source=x destination_type=queue destination=q properties_key=a.%23",
    "delete exchange name=x",
    "delete exchange name=x",
    "delete exchange name=amq.topic",
    "delete queue name=q",
    "delete queue name=q",
]


def test_both_answer_rabbitmqadmin_alike(ours: Side, theirs: Side) -> None:
    found = {}
    for command in COMMANDS:
        words = command.split(" ")
        found[command] = [_said(side.admin(*words)) for side in (ours, theirs)]
    different = [(command, *both) for command, both in found.items() if both[0] != both[1]]
    assert not different, different


def _said(told: tuple[int, str]) -> Any:
    code, text = told
    if text.startswith("["):
        return code, json.loads(text)
    return code, text.replace("received the value '", "received '")


REQUESTS: Final = [
    ("PUT", "queues/%2F/r", {}),
    ("PUT", "queues/%2F/r", b""),
    ("PUT", "queues/%2F/r", {"durable": "perhaps"}),
    ("PUT", "queues/%2F/r", b"{"),
    ("PUT", "queues/none/r", {}),
    ("PUT", "exchanges/%2F/e", {"type": "direct", "auto_delete": True, "durable": True}),
    ("POST", "bindings/%2F/e/e/q/r", {"routing_key": "k"}),
    ("POST", "exchanges/%2F/e/publish", {"routing_key": "k", "payload": "x", "payload_encoding": "string"}),
    ("POST", "exchanges/%2F/e/publish", {"routing_key": "k", "properties": {}, "payload": "x"}),
    (
        "POST",
        "exchanges/%2F/e/publish",
        {"routing_key": "k", "properties": {}, "payload": "x", "payload_encoding": "string"},
    ),
    (
        "POST",
        "exchanges/%2F/e/publish",
        {"routing_key": "no", "properties": {}, "payload": "x", "payload_encoding": "string"},
    ),
    ("POST", "queues/%2F/r/get", {"count": 5}),
    ("POST", "queues/%2F/r/get", {"count": 5, "ackmode": "ack_requeue_true", "encoding": "fancy"}),
    (
        "POST",
        "queues/%2F/r/get",
        {"count": 5, "ackmode": "ack_requeue_false", "encoding": "auto", "truncate": 0},
    ),
    ("DELETE", "queues/%2F/r?if-empty=true", None),
    ("DELETE", "exchanges/%2F/e", None),
]


def test_both_have_the_same_status_and_rows(ours: Side, theirs: Side) -> None:
    different = []
    for method, path, body in REQUESTS:
        one, other = (side.request(method, path, body) for side in (ours, theirs))
        if one[0] != other[0] or (one[0] == 200 and one != other):
            different.append((method, path, body, one, other))
    assert not different, different


@pytest.mark.parametrize(
    "user, command",
    [
        ("reader", "declare queue name=mine.r"),
        ("reader", "publish routing_key=mine payload=x"),
        ("bob", "declare queue name=other"),
        ("bob", 'declare queue name=mine.d arguments={"x-dead-letter-exchange":"other"}'),
        ("bob", "declare exchange name=other type=topic"),
        ("bob", "declare binding source=other destination=mine"),
        ("bob", "declare binding source=mine.x destination=other"),
        ("bob", "publish exchange=other routing_key=k payload=x"),
        ("bob", "get queue=other"),
        ("bob", "purge queue name=other"),
        ("bob", "delete queue name=other"),
        ("bob", "delete exchange name=other"),
        ("cut", "declare queue name=mine.c"),
        ("cut", "get queue=mine"),
        ("blind", "get queue=mine"),
    ],
)
def test_what_the_rights_do_not_give(gateway: Running, ours: Side, user: str, command: str) -> None:
    for name in ("mine", "other"):
        assert ours.admin("declare", "queue", f"name={name}")[0] == 0
        assert ours.admin("declare", "exchange", f"name={name}", "type=topic")[0] == 0
    ours.admin("declare", "exchange", "name=mine.x", "type=topic")
    side = Side(gateway.gateway.http_port, user, PASSWORD)
    code, told = side.admin(*command.split(" "))
    assert code == 1
    assert "Access refused" in told or "403" in told or "may not" in told
    left = [one["name"] for one in ours.request("GET", "queues")[1]]
    assert {"mine", "other"} <= set(left)
    assert not {"mine.r", "mine.d", "mine.c"} & set(left)


def test_who_may_do_some_does_that(gateway: Running, ours: Side) -> None:
    bob = Side(gateway.gateway.http_port, "bob", PASSWORD)
    for command in (
        "declare queue name=mine.q",
        "declare exchange name=mine.e type=topic",
        "declare binding source=mine.e destination=mine.q routing_key=a.*",
        "publish exchange=mine.e routing_key=a.b payload=x",
        "get queue=mine.q",
        "purge queue name=mine.q",
        "delete queue name=mine.q",
        "delete exchange name=mine.e",
    ):
        code, told = bob.admin(*command.split(" "))
        assert code == 0, (command, told)


def test_an_exchange_that_delays_tells_how_many_wait(ours: Side) -> None:
    for command in (
        'declare exchange name=later type=x-delayed-message arguments={"x-delayed-type":"fanout"}',
        "declare queue name=due",
        "declare binding source=later destination=due",
        'publish exchange=later routing_key=k payload=x properties={"headers":{"x-delay":86400000}}',
        'publish exchange=later routing_key=k payload=y properties={"headers":{"x-delay":-5}}',
    ):
        assert ours.admin(*command.split(" "))[0] == 0, command
    found = ours.request("GET", "exchanges/%2F/later")[1]
    assert (found["messages_delayed"], found["arguments"]) == (1, {"x-delayed-type": "fanout"})
    assert "messages_delayed" not in ours.request("GET", "exchanges/%2F/amq.topic")[1]
    (row,) = json.loads(ours.admin("-f", "raw_json", "get", "queue=due", "count=5")[1])
    assert (row["payload"], row["properties"]) == ("y", {"headers": {"x-delay": -5}})


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_what_is_got_is_settled_as_asked(ours: Side, kind: str) -> None:
    quorum = '"x-queue-type":"quorum",' if kind == "quorum" else ""
    dead = f'arguments={{{quorum}"x-dead-letter-exchange":"","x-dead-letter-routing-key":"{kind}.dead"}}'
    for command in (
        f"declare queue name={kind}.dead",
        f"declare queue name={kind} {dead}",
        *(f"publish routing_key={kind} payload={number}" for number in range(4)),
    ):
        assert ours.admin(*command.split(" "))[0] == 0, command

    def got(count: int, mode: str, name: str = kind) -> list[str]:
        command = f"-f raw_json get queue={name} count={count} ackmode={mode}"
        return [row["payload"] for row in json.loads(ours.admin(*command.split(" "))[1])]

    assert got(9, "ack_requeue_true") == ["0", "1", "2", "3"]
    assert got(2, "reject_requeue_true") == ["0", "1"]
    assert got(1, "ack_requeue_false") == ["0"]
    assert got(1, "reject_requeue_false") == ["1"]
    assert got(9, "ack_requeue_true") == ["2", "3"]
    assert got(9, "ack_requeue_true", f"{kind}.dead") == ["1"]
    assert ours.request("GET", f"queues/%2F/{kind}")[1]["messages_unacknowledged"] == 0


BAD: Final = [
    ({"user_id": "somebody"}, "user_id property set to 'somebody' but authenticated user was 'ann'"),
    ({"reply_to": "amq.rabbitmq.reply-to"}, "fast reply consumer does not exist"),
    ({"headers": {"CC": ["a"]}}, "CC and BCC"),
    ({"expiration": "soon"}, "invalid expiration 'soon'"),
    ({"priority": 256}, "properties.priority"),
    ({"priority": True}, "properties.priority"),
    ({"message_id": "x" * 256}, "properties.message_id"),
    ({"no": "such"}, "properties.no"),
    ([], "properties: an object"),
]


@pytest.mark.parametrize("properties, reason", BAD)
def test_properties_that_are_refused(ours: Side, properties: Any, reason: str) -> None:
    body = {"routing_key": "k", "payload": "x", "payload_encoding": "string", "properties": properties}
    status, told = ours.request("POST", "exchanges/%2F/amq.default/publish", body)
    assert status == 400
    assert reason in told["reason"]
