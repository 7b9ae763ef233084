"""Each command with each right of the table in docs/guides/permissions.md: allowed with it, refused without.

Every pair is tried over sockets by two users. One has the role `full`; the other has that role without the
right in question, and nothing else is different. Where a command needs another one before it, for which the
same right is asked, the other user loses the right between the two. What needs a longer story names the test
that tells it.
"""

from __future__ import annotations

import ast
import base64
import http.client
import itertools
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import Any, Final, NamedTuple

import pika
import pytest
import trio
from pika.exceptions import ChannelClosedByBroker, ConnectionClosedByBroker, ProbableAccessDeniedError
from pydantic import SecretStr

from gateway.app.access import roles_of
from gateway.model.message import Message, Sender
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.events import (
    ChannelClosed,
    Closed,
    CommandReceived,
    HandleClosed,
    Opened,
    Ready,
    Replies,
)
from gateway.protocols.mqtt.dialect import topic_address
from gateway.protocols.mqtt.packets import Disconnect, Suback, Subscription, Will
from gateway.protocols.mqtt.runs import Acks
from gateway.protocols.mqtt.spec import Property
from gateway.settings import Http, User
from gateway.settings.access import Role
from gateway.settings.amqpfast import OutOfBand
from tests.ingress.amqpfast.client import EMPTY, PEER, QUEUE, TOPIC, Fast
from tests.ingress.amqpfast.large import Whole
from tests.ingress.clients import connect
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.passwords import hashed

PAGE: Final = Path(__file__).parents[2] / "docs" / "guides" / "permissions.md"
PASSWORD: Final = "right"
FULL: Final[dict[str, Any]] = {
    "client_id": "*",
    "mqtt": {"publish": "#", "subscribe": "#"},
    "amqp091": {"/": {"configure": ".*", "write": ".*", "read": ".*"}},
    "amqpfast": {
        "/": {
            "queues": {"read": "*", "write": "*", "create": "*"},
            "topics": {"read": "*", "write": "*", "create": "*"},
            "peers": "*",
            "out_of_band": True,
        }
    },
    "console": "write",
    "console_bodies": True,
}
OWN_KEYS: Final = {"write": ".*", "read": "^own$"}
ROUTES: Final = """version: 1
routes:
  - {name: a, role: crosser, from: {endpoint: mqtt, topic: r}, to: {endpoint: mqtt, topic: copied}}
  - name: b
    role: crosser
    from: {endpoint: amqp091, exchange: amq.direct, binding_key: r}
    to: {endpoint: mqtt, topic: copied}
  - name: c
    role: crosser
    from: {endpoint: amqpfast, service: topic, destination: r}
    to: {endpoint: mqtt, topic: copied}
"""
LARGE: Final = b"x" * 70_000
SECRET: Final = b"what only some may see"
PEEK: Final = {"protocol": "amqpfast", "virtual_host": "/", "queue": "seen", "count": 1}
WITHHELD: Final = 1  # in place of the code of a refusal
numbers = itertools.count()

Act = Callable[[Running, str], int]


def fresh(what: str) -> str:
    """A name that nothing has yet."""
    return f"{what}{next(numbers)}"


# What is done; each returns 0, or the code of the refusal.


def mqtt_connect(gateway: Running, user: str, **more: Any) -> int:
    client, told = connect(gateway, fresh("c"), user=(user, PASSWORD.encode()), **more)
    with client:
        return int(told.reason)


def leaves_will(topic: str = "w", qos: int = 1, *, retain: bool = False) -> Act:
    will = Will(topic, b"x", qos, retain, {Property.WILL_DELAY_INTERVAL: 1_000})
    return lambda gateway, user: mqtt_connect(gateway, user, will=will)


def publishes(topic: str = "t", qos: int = 1, *, retain: bool = False) -> Act:
    def act(gateway: Running, user: str) -> int:
        client, _ = connect(gateway, fresh("c"), user=(user, PASSWORD.encode()))
        with client:
            client.publish(topic, qos=qos, packet_id=1, retain=retain)
            found = client.next((Acks, Disconnect))  # type: ignore[arg-type]
            code = int(found.reason if isinstance(found, Disconnect) else found.rows[0][1])
            return 0 if code == 0x10 else code

    return act


def subscribes(topic_filter: str = "t/#") -> Act:
    def act(gateway: Running, user: str) -> int:
        client, _ = connect(gateway, fresh("c"), user=(user, PASSWORD.encode()))
        with client:
            client.machine.subscribe(1, [Subscription(topic_filter, 1)], {})
            client.flush()
            found = client.next((Suback, Disconnect))  # type: ignore[arg-type]
            code = int(found.reason if isinstance(found, Disconnect) else found.reasons[0])
            return 0 if code == 1 else code

    return act


def amqp(gateway: Running, user: str) -> pika.BlockingConnection:
    credentials = pika.PlainCredentials(user, PASSWORD)
    return pika.BlockingConnection(
        pika.ConnectionParameters(LOOPBACK, gateway.amqp, "/", credentials, connection_attempts=1)
    )


def on_channel(act: Callable[[Any], object], before: Callable[[Any], object] = lambda _: None) -> Act:
    """`before` is done by who may do everything."""

    def run(gateway: Running, user: str) -> int:
        with closing(amqp(gateway, "full")) as first:
            before(first.channel())
            try:
                connection = amqp(gateway, user)
            except (ProbableAccessDeniedError, ConnectionClosedByBroker) as error:
                return 530 if "530" in str(error) else -1
            with closing(connection):
                channel = connection.channel()
                channel.confirm_delivery()
                try:
                    act(channel)
                except ChannelClosedByBroker as error:
                    return int(error.reply_code)
                return 0

    return run


def declared(name: str) -> Callable[[Any], object]:
    return lambda channel: channel.queue_declare(name)


def bound(channel: Any) -> None:
    channel.queue_declare("q")
    channel.exchange_declare("fan", "fanout")
    channel.queue_bind("q", "amq.topic", "k")


def code_of(client: Fast) -> int:
    """The code of what comes next; 0 of a reply or a command."""
    found: Any = client.next(
        (Replies, CommandReceived, Ready, HandleClosed, ChannelClosed, Closed)  # type: ignore[arg-type]
    )
    if isinstance(found, Replies):
        code = int(found.rows[0][3])
        return 0 if code == 200 else code
    return int(getattr(found, "reply_code", 0))


def told(client: Whole, command: Any) -> int:
    """Say a command, and return the code of its reply; 0: it is done."""
    if hasattr(command, "tag"):  # QUERY is answered by INDEX
        command.tag = client.machine.new_tag(1)
    client.say(command)
    return code_of(client)


def on_fast(act: Callable[[Whole], int], *, client_name: str = "") -> Act:
    """`act` on a channel that is open."""
    return on_fast_with(lambda client, _: act(client), client_name=client_name)


def on_fast_with(act: Callable[[Whole, Callable[[], bool]], int], *, client_name: str = "") -> Act:
    """`act` on a channel that is open, and with what takes the right in question from the user."""

    def run(gateway: Running, user: str) -> int:
        name = client_name and fresh(client_name)
        with Whole(gateway, name, user=user, password=PASSWORD) as client:
            opened: Any = client.next((Opened, Closed))  # type: ignore[arg-type]
            if isinstance(opened, Closed):
                return opened.reply_code
            client.channel(restartable=True)
            return act(client, lambda: take_right(gateway, user))

    return run


def take_right(gateway: Running, user: str) -> bool:
    """Put rules into force by which a user of LOSING has its lesser role. Return False for the user `full`,
    who loses nothing."""
    if user == "full":
        return False
    assert user in LOSING
    roles = (user, *without(CASES[int(user.removeprefix("less-"))].less)[1])
    given = gateway._settings
    users = given.users | {user: given.users[user].model_copy(update={"roles": roles})}
    rules = roles_of(given.model_copy(update={"users": users}))
    trio.from_thread.run(gateway.gateway.rules.use, rules, trio_token=gateway._token)
    return True


def opens(service: int, name: Callable[[], str] = lambda: "there") -> Act:
    def act(client: Whole) -> int:
        client.ask_handle(name(), service)
        return code_of(client)

    return on_fast(act)


def says(
    command: Callable[[int, str], Any], service: int = TOPIC, *, new: bool = False, client: str = ""
) -> Act:
    """Say a command on a handle for every name, about a destination that is there, or is not."""

    def act(one: Whole) -> int:
        number = one.handle("", service)
        return told(one, command(number, fresh("new") if new else "there"))

    return on_fast(act, client_name=client)


def sends(service: int, *, new: bool = False, name: str = "there") -> Act:
    def act(client: Whole) -> int:
        number = client.handle("", service)
        client.put(number, b"x", name=fresh("new") if new else name, confirm=False)
        client.machine.open_channel()  # whose reply comes behind a refusal
        client.flush()
        return code_of(client)

    return on_fast(act)


def prepares(client: Whole, lose: Callable[[], bool]) -> int:
    number = client.handle("there", QUEUE)
    lose()
    client.machine.prepare(number, EMPTY, len(LARGE), b"", b"")
    client.flush()
    return code_of(client)


def completes(client: Whole) -> int:
    number = client.handle("there", QUEUE)
    assert client.prepare(number, LARGE) == 0
    client.resume(number, LARGE, 0, client.machine.new_tag(1))
    return code_of(client)


def consumes(number: int, name: str) -> m.HandleConsume:
    return m.HandleConsume(number, dest_name=name, prefetch=1)


def queries(number: int, name: str) -> m.HandleQuery:
    return m.HandleQuery(number, 0, dest_name=name)


def browses(client: Whole, lose: Callable[[], bool]) -> int:
    number = client.handle("", QUEUE)
    assert told(client, m.HandleQuery(number, 0, dest_name="there")) == 0
    lose()
    return told(client, m.HandleBrowse(number, 0, 1))


def cancels(client: Whole, lose: Callable[[], bool]) -> int:
    number = client.handle("", TOPIC)
    assert told(client, m.HandleConsume(number, dest_name="there", prefetch=1, identifier="d")) == 0
    again = client.handle("", TOPIC)  # the first one is closed when the right is lost, for it consumes
    if lose():
        assert client.handle_closed() == (number, 403)
    return told(client, m.HandleCancel(again, 0, "there", "d"))


def opens_folder(gateway: Running, user: str) -> int:
    with Fast(gateway, user=user, password=PASSWORD) as client:
        client.next(Opened)
        folder = gateway._settings.listeners["amqpfast"].out_of_band.folder
        client.machine.open_channel(out_of_band=f"file:{folder}/{user}")
        client.flush()
        return code_of(client)


def asks(path: str, body: dict[str, Any] | None = None, shows: bytes = b"") -> Act:
    """Return the code of a refusal; WITHHELD if the answer does not have what it `shows`."""

    def act(gateway: Running, user: str) -> int:
        secret = base64.b64encode(f"{user}:{PASSWORD}".encode()).decode()
        url = f"http://{LOOPBACK}:{gateway.gateway.http_port}/api/v1/{path}"
        data = None if body is None else json.dumps(body).encode()
        head = {"Authorization": f"Basic {secret}", "Content-Type": "application/json"}
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, head)) as answer:
                return 0 if not shows or shows in answer.read() else WITHHELD
        except urllib.error.HTTPError as error:
            return error.code if error.code in (401, 403) or body == PEEK else 0

    return act


def watches(gateway: Running, user: str) -> int:
    """Open the stream of messages that pass, and close it."""
    connection = http.client.HTTPConnection(LOOPBACK, gateway.gateway.http_port, timeout=20)
    secret = base64.b64encode(f"{user}:{PASSWORD}".encode()).decode()
    with closing(connection):
        connection.request("GET", "/api/v1/tap", headers={"Authorization": f"Basic {secret}"})
        with connection.getresponse() as response:
            status = response.status
    gateway.until(lambda: not gateway.gateway.dispatcher.taps.open)
    return 0 if status == 200 else status


# What is taken away: a path in the role, and what stands there then. "role": the route's.

Less = tuple[str, Any]
A = "amqp091 /"
Q, T = "amqpfast / queues", "amqpfast / topics"
KEYS: Final[Less] = (f"{A} topics", {"amq.topic": {"write": "^own$", "read": "^own$"}})
NO_READ, NO_WRITE, NO_CONFIGURE = ((f"{A} {word}", "^other$") for word in ("read", "write", "configure"))


class Case(NamedTuple):
    command: str
    right: str
    less: Less
    act: Act
    code: int


def everywhere(word: str, given: Any) -> Less:
    """The same of queues and topics."""
    part = deepcopy(FULL["amqpfast"]["/"])
    for service in ("queues", "topics"):
        part[service][word] = given
    return ("amqpfast /", part)


NO_CONSOLE, READS = ("console", "none"), ("console", "read")
NO_BODIES, OF_OTHERS = ("console_bodies", False), ("console_virtual_hosts", ["other"])
ALT: Final = {"alternate-exchange": "amq.topic"}
DEAD: Final = {"x-dead-letter-exchange": "amq.topic", "x-dead-letter-routing-key": "k"}
NOWHERE: Final = ("amqpfast /", {"queues": {"read": "other"}, "topics": {"read": "other"}})
CASES: Final = [
    Case("CONNECT", "any", ("mqtt", None), mqtt_connect, 0x87),
    Case("CONNECT", "client_id", ("client_id", "nobody"), mqtt_connect, 0x85),
    Case("WILL", "publish", ("mqtt publish", "other"), leaves_will(), 0x87),
    Case("WILL", "deny_publish", ("mqtt deny_publish", "w"), leaves_will(), 0x87),
    Case("WILL", "will", ("mqtt will", False), leaves_will(), 0x87),
    Case("WILL", "qos_max", ("mqtt qos_max", 0), leaves_will(), 0x9B),
    Case("WILL", "retain", ("mqtt retain", False), leaves_will(retain=True), 0x9A),
    Case("WILL", "role", ("role", None), leaves_will("r"), 0x87),
    Case("PUBLISH", "publish", ("mqtt publish", "other"), publishes(), 0x87),
    Case("PUBLISH", "deny_publish", ("mqtt deny_publish", "t"), publishes(), 0x87),
    Case("PUBLISH", "qos_max", ("mqtt qos_max", 0), publishes(), 0x9B),
    Case("PUBLISH", "retain", ("mqtt retain", False), publishes(retain=True), 0x9A),
    Case("PUBLISH", "role", ("role", None), publishes("r"), 0x87),
    Case("SUBSCRIBE", "subscribe", ("mqtt subscribe", "other"), subscribes(), 0x87),
    Case("SUBSCRIBE", "deny_subscribe", ("mqtt deny_subscribe", "t/x"), subscribes(), 0x87),
    Case("SUBSCRIBE", "shared", ("mqtt shared", False), subscribes("$share/g/t"), 0x87),
    Case("connection.open", "any", ("amqp091", None), on_channel(lambda one: None), 530),
    Case(
        "exchange.declare",
        "configure",
        NO_CONFIGURE,
        on_channel(lambda one: one.exchange_declare(fresh("x"))),
        403,
    ),
    *(
        Case(
            "exchange.declare",
            right,
            less,
            on_channel(lambda one: one.exchange_declare(fresh("x"), arguments=ALT)),
            403,
        )
        for right, less in (("read", NO_READ), ("write", NO_WRITE), ("topics", KEYS))
    ),
    Case(
        "queue.declare", "configure", NO_CONFIGURE, on_channel(lambda one: one.queue_declare(fresh("q"))), 403
    ),
    *(
        Case(
            "queue.declare",
            right,
            less,
            on_channel(lambda one: one.queue_declare(fresh("q"), arguments=DEAD)),
            403,
        )
        for right, less in (("read", NO_READ), ("write", NO_WRITE), ("topics", KEYS))
    ),
    Case(
        "exchange.delete", "configure", NO_CONFIGURE, on_channel(lambda one: one.exchange_delete("no")), 403
    ),
    Case("queue.delete", "configure", NO_CONFIGURE, on_channel(lambda one: one.queue_delete("no")), 403),
    *(
        Case(f"queue.{verb}", right, less, on_channel(act, bound), 403)
        for verb, act in (
            ("bind", lambda one: one.queue_bind("q", "amq.topic", "k")),
            ("unbind", lambda one: one.queue_unbind("q", "amq.topic", "k")),
        )
        for right, less in (("read", NO_READ), ("write", NO_WRITE), ("topics", KEYS))
    ),
    *(
        Case(f"exchange.{verb}", right, less, on_channel(act, bound), 403)
        for verb, out, into in (
            (
                "bind",
                lambda one: one.exchange_bind("fan", "amq.topic", "k"),
                lambda one: one.exchange_bind("amq.topic", "fan"),
            ),
            (
                "unbind",
                lambda one: one.exchange_unbind("fan", "amq.topic", "k"),
                lambda one: one.exchange_unbind("amq.topic", "fan"),
            ),
        )
        for right, less, act in (
            ("read", NO_READ, out),
            ("write", NO_WRITE, out),
            ("topics", KEYS, out),
            ("topics", KEYS, into),
        )
    ),
    Case(
        "basic.publish",
        "write",
        NO_WRITE,
        on_channel(lambda one: one.basic_publish("amq.topic", "k", b"x")),
        403,
    ),
    Case(
        "basic.publish",
        "topics",
        KEYS,
        on_channel(lambda one: one.basic_publish("amq.topic", "k", b"x")),
        403,
    ),
    Case(
        "basic.publish",
        "topics",
        KEYS,
        on_channel(
            lambda one: one.basic_publish(
                "amq.topic", "own", b"x", pika.BasicProperties(headers={"CC": ["k"]})
            )
        ),
        403,
    ),
    Case(
        "basic.publish",
        "role",
        ("role", None),
        on_channel(lambda one: one.basic_publish("amq.direct", "r", b"x")),
        403,
    ),
    Case("basic.consume", "read", NO_READ, on_channel(lambda one: one.basic_consume("q", print), bound), 403),
    Case("basic.get", "read", NO_READ, on_channel(lambda one: one.basic_get("q"), bound), 403),
    Case("queue.purge", "read", NO_READ, on_channel(lambda one: one.queue_purge("q"), bound), 403),
    Case("CONNECTION OPEN", "any", ("amqpfast", None), on_fast(lambda one: 0), 403),
    Case(
        "CONNECTION OPEN", "client_id", ("client_id", "nobody"), on_fast(lambda one: 0, client_name="n"), 403
    ),
    Case("HANDLE OPEN", "any", NOWHERE, opens(QUEUE), 403),
    Case("HANDLE OPEN", "any", NOWHERE, opens(TOPIC), 403),
    Case("HANDLE OPEN", "create", everywhere("create", "other"), opens(QUEUE, lambda: fresh("new")), 403),
    Case("HANDLE OPEN", "create", everywhere("create", "other"), opens(TOPIC, lambda: fresh("new")), 403),
    Case("HANDLE OPEN", "peers", ("amqpfast / peers", "other"), opens(PEER, lambda: "echo"), 403),
    Case("HANDLE SEND", "write", everywhere("write", "other"), sends(QUEUE), 403),
    Case("HANDLE SEND", "write", everywhere("write", "other"), sends(TOPIC), 403),
    Case("HANDLE SEND", "create", everywhere("create", "other"), sends(QUEUE, new=True), 403),
    Case("HANDLE SEND", "create", everywhere("create", "other"), sends(TOPIC, new=True), 403),
    Case("HANDLE SEND", "role", ("role", None), sends(TOPIC, name="r"), 403),
    Case("HANDLE PREPARE", "any", NOWHERE, on_fast_with(prepares), 403),
    Case("HANDLE PREPARE", "write", everywhere("write", "other"), on_fast(completes), 403),
    *(
        Case(
            "HANDLE CONSUME",
            right,
            everywhere(right, "other"),
            says(consumes, service, new=right == "create"),
            403,
        )
        for service in (QUEUE, TOPIC)
        for right in ("read", "create")
    ),
    Case("HANDLE CANCEL", "read", everywhere("read", "other"), on_fast_with(cancels, client_name="d"), 403),
    Case(
        "HANDLE QUERY",
        "browse",
        everywhere("read", "other"),
        says(queries, QUEUE),
        403,
    ),
    Case("HANDLE BROWSE", "browse", everywhere("read", "other"), on_fast_with(browses), 403),
    Case("CHANNEL OPEN", "out_of_band", ("amqpfast / out_of_band", False), opens_folder, 403),
    Case("GET", "console", NO_CONSOLE, asks("status"), 403),
    Case("GET", "console_virtual_hosts", OF_OTHERS, asks("status"), 403),
    Case("POST", "console", READS, asks("mappings/dry-run", {}), 403),
    Case("POST", "console_virtual_hosts", OF_OTHERS, asks("mappings/dry-run", {}), 403),
    Case("GET dead-letters", "console", NO_CONSOLE, asks("dead-letters"), 403),
    Case("GET dead-letters", "console_virtual_hosts", OF_OTHERS, asks("dead-letters"), 403),
    Case("GET dead-letters", "console_bodies", NO_BODIES, asks("dead-letters", shows=SECRET), WITHHELD),
    *(
        Case(f"POST dead-letters/{word}", right, less, asks(f"dead-letters/{word}", {"ids": ["m0"]}), 403)
        for word in ("redrive", "purge")
        for right, less in (("console", READS), ("console_virtual_hosts", OF_OTHERS))
    ),
    *(
        Case(f"GET {word}", right, less, act, 403)
        for word, act in (("tap", watches), ("journal", asks("journal")))
        for right, less in (("console", NO_CONSOLE), ("console_virtual_hosts", OF_OTHERS))
    ),
    Case("POST queues/peek", "console", READS, asks("queues/peek", PEEK), 403),
    Case("POST queues/peek", "console_virtual_hosts", OF_OTHERS, asks("queues/peek", PEEK), 404),
    Case("POST queues/peek", "console_bodies", NO_BODIES, asks("queues/peek", PEEK, SECRET), WITHHELD),
]
ELSEWHERE: Final = {
    ("GET tap", "console_bodies"): "test_console_rights.py::test_bodies_are_a_right_of_their_own",
    ("GET journal", "console_bodies"): (
        "test_console_rights.py::test_rows_of_the_journal_have_no_bodies_without_the_right"
    ),
    ("CONNECT", "session"): "test_doors.py::test_a_session_is_its_users",
    ("HANDLE CONSUME", "user"): "test_doors.py::test_a_durable_subscription_is_cancelled_by_its_user_alone",
    ("HANDLE CANCEL", "user"): "test_doors.py::test_a_durable_subscription_is_cancelled_by_its_user_alone",
    ("tx.commit", "role"): (
        "test_doors.py::test_a_transaction_is_not_committed_into_a_route_that_came_to_ask_for_a_role"
    ),
    ("tx.commit", "write"): (
        "test_publish_permission.py::test_a_commit_survives_its_exchange_but_not_the_right_to_it"
    ),
    ("tx.commit", "topics"): "test_publish_permission.py::test_a_copy_whose_key_was_revoked_is_not_committed",
    ("CHANNEL COMMIT", "write"): (
        "test_publish_permission.py::test_a_commit_of_amqpfast_needs_the_right_at_that_moment"
    ),
    ("CHANNEL COMMIT", "role"): (
        "test_doors.py::test_a_transaction_is_not_committed_into_a_route_that_came_to_ask_for_a_role"
    ),
}
"""What takes more than two users to show, and the test that does."""


LOSING: Final = frozenset(
    f"less-{at}"
    for at, case in enumerate(CASES)
    if (case.command, case.right)
    in {("HANDLE PREPARE", "any"), ("HANDLE BROWSE", "browse"), ("HANDLE CANCEL", "read")}
)
"""Users who begin with the role `full`."""


def without(less: Less) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The role `full` without something, and the other roles of its user."""
    role = deepcopy(FULL)
    path, given = less
    if path == "role":
        return role, ()
    *steps, last = path.split()
    part = role
    for step in steps:
        part = part[step]
    if given is None:
        del part[last]
    else:
        part[last] = given
    return role, ("crosser",)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("shared")
    mapping = tmp_path_factory.mktemp("routes") / "routes.yaml"
    mapping.write_text(ROUTES)
    secret = SecretStr(hashed(PASSWORD))
    roles, users = {"full": FULL, "crosser": {}}, {"full": ("full", "crosser")}
    for at, case in enumerate(CASES):
        roles[f"less-{at}"], others = without(case.less)
        users[f"less-{at}"] = ("full", "crosser") if f"less-{at}" in LOSING else (f"less-{at}", *others)
    for name in users:
        (folder / name).mkdir()
    listeners = settings_of().listeners
    fast = listeners["amqpfast"].model_copy(update={"out_of_band": OutOfBand(folder=folder)})
    given = settings_of(
        listeners={**listeners, "amqpfast": fast},
        http=Http(host=LOOPBACK, port=0),
        mappings=(str(mapping),),
        roles={name: Role.model_validate(role) for name, role in roles.items()},
        users={name: User(password_hash=secret, roles=has) for name, has in users.items()},
    )
    with running(given) as one:
        with Fast(one, user="full", password=PASSWORD).open() as client:
            client.put(client.handle("there"), b"x")
            client.put(client.handle("seen"), SECRET)
            client.handle("there", TOPIC)
            client.leave()
        letter = Message(topic_address("t"), SECRET, sender=Sender("mqtt"))
        lost = Outcome(Verdict.REJECTED, Reason.TARGET_REFUSED, "no")
        one.ask(lambda: one.gateway.dead_letters.add([letter], "", lost))
        yield one


@pytest.mark.parametrize("at", range(len(CASES)), ids=[f"{one.command}-{one.right}" for one in CASES])
def test_with_the_right_and_without(gateway: Running, at: int) -> None:
    case = CASES[at]
    assert case.act(gateway, "full") == 0
    assert case.act(gateway, f"less-{at}") == case.code


def rows() -> Iterator[tuple[list[str], list[str]]]:
    """The table: commands, and rights."""
    text = PAGE.read_text(encoding="utf-8").partition("## What is checked")[2].partition("\n## ")[0]
    for line in text.splitlines():
        if line.startswith("| `"):
            command, right, *_ = line.strip("| ").split(" | ")
            yield re.findall(r"`([^`]+)`", command), re.findall(r"`([a-z_]+)`", right)


def test_each_cell_of_the_table_is_tried() -> None:
    told = {pair for commands, rights in rows() for pair in itertools.product(commands, rights)}
    told -= {("basic.publish", word) for word in ("CC", "BCC")}
    assert {(one.command, one.right) for one in CASES} | ELSEWHERE.keys() == told


@pytest.mark.parametrize("named", sorted(set(ELSEWHERE.values())))
def test_what_is_told_elsewhere_is_there(named: str) -> None:
    file, _, name = named.partition("::")
    tree = ast.parse((Path(__file__).parent / file).read_text(encoding="utf-8"))
    assert name in {one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
