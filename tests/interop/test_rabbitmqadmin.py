"""`rabbitmqadmin`, as Debian ships it with RabbitMQ, against the gateway's HTTP port; and the fields of
RabbitMQ's own answers, which those of the gateway have, too."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote

import httpx
import pika
import pytest
from pydantic import SecretStr

from gateway.access.console_tokens import left_tokens
from gateway.settings import AmqpPermissions, Http, Role, User
from tests.conftest import missing
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.passwords import hashed

PASSWORD: Final = "right"


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    every = {"/": AmqpPermissions(configure=".*", write=".*", read=".*")}
    settings = settings_of(
        http=Http(host=LOOPBACK, port=0),
        users={"ann": User(password_hash=SecretStr(hashed(PASSWORD)), roles=("boss",))},
        roles={"boss": Role(console="write", amqp091=every), "guest": Role(amqp091=every)},
        default_roles={"guest": ("guest",)},
    )
    with running(settings) as started:
        yield started


@pytest.fixture(scope="module")
def filled(gateway: Running) -> Iterator[Running]:
    connection = pika.BlockingConnection(pika.URLParameters(gateway.idle_amqp_url))
    channel = connection.channel()
    channel.queue_declare("orders", durable=True, arguments={"x-max-length": 7})
    channel.queue_declare("a/b %", auto_delete=True)
    channel.exchange_declare("readings", "topic", durable=True)
    channel.queue_bind("orders", "readings", "eu.#")
    channel.confirm_delivery()
    for number in range(3):
        channel.basic_publish("", "orders", str(number).encode())
    yield gateway
    connection.close()


def admin(
    gateway: Running, *arguments: str, expect: int = 0, user: str = "ann", password: str = PASSWORD
) -> str:
    program = shutil.which("rabbitmqadmin")
    if program is None:
        missing("rabbitmqadmin is not installed")
        return ""
    at = ["--host", LOOPBACK, "--port", str(gateway.gateway.http_port), "-u", user, "-p", password]
    done = subprocess.run(
        [sys.executable, program, *at, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def listed(gateway: Running, kind: str, *columns: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(admin(gateway, "-f", "raw_json", "list", kind, *columns))
    return found


def test_what_it_lists(filled: Running) -> None:
    table = admin(filled, "list", "queues", "name", "messages")
    assert "| orders | 3        |" in table
    assert {one["name"] for one in listed(filled, "queues")} == {"orders", "a/b %"}
    assert {"amq.topic", "readings"} <= {one["name"] for one in listed(filled, "exchanges")}
    bindings = [(one["source"], one["destination"], one["routing_key"]) for one in listed(filled, "bindings")]
    assert ("readings", "orders", "eu.#") in bindings
    assert ("", "orders", "orders") in bindings
    (connection,) = listed(filled, "connections")
    assert (connection["user"], connection["channels"], connection["vhost"]) == ("guest", 1, "/")
    assert [one["name"] for one in listed(filled, "vhosts")] == ["/"]
    assert [(one["name"], one["tags"]) for one in listed(filled, "users")] == [("ann", ["administrator"])]
    assert listed(filled, "permissions")[0]["configure"] == ".*"
    for kind in ("nodes", "channels", "consumers", "policies", "parameters"):
        listed(filled, kind)
    overview = admin(filled, "show", "overview")
    assert "rabbitmq_version" in overview


def test_what_it_does(filled: Running) -> None:
    admin(filled, "purge", "queue", "name=orders")
    assert {one["name"]: one["messages"] for one in listed(filled, "queues")}["orders"] == 0
    admin(filled, "delete", "queue", "name=a/b %")
    assert [one["name"] for one in listed(filled, "queues")] == ["orders"]
    assert "Not found" in admin(filled, "delete", "queue", "name=none", expect=1)


def test_exchanges_and_bindings_are_deleted(gateway: Running) -> None:
    with pika.BlockingConnection(pika.URLParameters(gateway.idle_amqp_url)) as connection:
        channel = connection.channel()
        channel.queue_declare("leaving", durable=True)
        for name in ("going", "a/b %"):
            channel.exchange_declare(name, "topic", durable=True)
            channel.queue_bind("leaving", name, "eu.#")
            channel.exchange_bind(name, "amq.topic", "")
        keyed = ("source=going", "destination_type=queue", "destination=leaving", "properties_key=eu.%23")
        admin(gateway, "delete", "binding", *keyed)
        assert "Not found" in admin(gateway, "delete", "binding", *keyed, expect=1)
        of_exchange = (
            "source=amq.topic",
            "destination_type=exchange",
            "destination=going",
            "properties_key=~",
        )
        admin(gateway, "delete", "binding", *of_exchange)
        left = [(one["source"], one["destination"]) for one in listed(gateway, "bindings")]
        assert ("going", "leaving") not in left
        assert ("amq.topic", "going") not in left
        assert ("a/b %", "leaving") in left
        for name in ("going", "a/b %"):
            admin(gateway, "delete", "exchange", f"name={name}")
            assert "Not found" in admin(gateway, "delete", "exchange", f"name={name}", expect=1)
        assert "Access refused" in admin(gateway, "delete", "exchange", "name=amq.topic", expect=1)
        admin(gateway, "delete", "queue", "name=leaving")


@pytest.mark.parametrize(
    "arguments",
    [
        ("declare", "user", "name=u", "password=p", "tags="),
        ("declare", "vhost", "name=v"),
        ("declare", "permission", "vhost=/", "user=ann", "configure=.*", "write=.*", "read=.*"),
        ("declare", "policy", "name=p", "pattern=.*", 'definition={"max-length":1}'),
        ("declare", "parameter", "component=c", "name=n", "value=1"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_what_it_cannot_do_is_answered(gateway: Running, arguments: tuple[str, ...]) -> None:
    assert "Change everything else in its configuration" in admin(gateway, *arguments, expect=1)


def test_all_versions_are_one(gateway: Running) -> None:
    """What the listener announces, which clients and tools go by."""
    with pika.BlockingConnection(pika.URLParameters(gateway.idle_amqp_url)) as connection:
        announced = connection._impl.server_properties["version"]
    with httpx.Client(
        base_url=f"http://{LOOPBACK}:{gateway.gateway.http_port}", auth=("ann", PASSWORD)
    ) as http:
        overview = http.get("/api/overview").json()
        definitions = http.get("/api/definitions").json()
    assert {overview["rabbitmq_version"], overview["management_version"]} == {announced}
    assert {definitions["rabbitmq_version"], definitions["rabbit_version"]} == {announced}


def test_an_export_is_taken_by_the_gateway(filled: Running, tmp_path: Any) -> None:
    """Without what ends with the broker, and bindings from it or to it."""
    file = tmp_path / "definitions.json"
    with pika.BlockingConnection(pika.URLParameters(filled.idle_amqp_url)) as connection:
        channel = connection.channel()
        channel.exchange_declare("passing", durable=False)
        channel.exchange_bind("readings", "passing", "x")
        channel.queue_bind("orders", "passing", "x")
        admin(filled, "export", str(file))
        channel.exchange_delete("passing")
    said = json.loads(file.read_text())
    assert [one["name"] for one in said["queues"]] == ["orders"]
    assert [one["name"] for one in said["exchanges"]] == ["readings"]
    assert [one["routing_key"] for one in said["bindings"]] == ["eu.#"]
    with running(settings_of(declare={"definitions": str(file)})) as other:
        assert other.gateway.host.queues["orders"].options.length_max == 7
        assert other.gateway.host.exchanges["readings"].kind == "topic"


def test_a_token_is_a_password_too(filled: Running) -> None:
    (left,) = left_tokens(filled.gateway.http_port)[:1]
    token = left.read_text().strip()
    assert "orders" in admin(filled, "list", "queues", user="command line", password=token)
    assert "Access refused" in admin(filled, "list", "queues", user="somebody", password=token, expect=1)
    assert "Access refused" in admin(filled, "list", "queues", password="wrong", expect=1)
    assert "Access refused" in admin(filled, "list", "queues", user="guest", password="guest", expect=1)


PATHS: Final = {
    "overview": {"object_totals", "queue_totals", "node", "exchange_types", "listeners"},
    "queues": {"name", "vhost", "durable", "auto_delete", "exclusive", "arguments", "type", "state", "node"},
    "exchanges": {"name", "vhost", "type", "durable", "auto_delete", "internal", "arguments"},
    "bindings": {"source", "vhost", "destination", "destination_type", "routing_key", "properties_key"},
    "vhosts": {"name", "tracing"},
    "nodes": {"name", "type", "running"},
    "whoami": {"name", "tags"},
    "aliveness-test/%2F": {"status"},
}


def test_fields_paths_and_pages(filled: Running) -> None:
    at = f"http://{LOOPBACK}:{filled.gateway.http_port}/api"
    with httpx.Client(base_url=at, auth=("ann", PASSWORD), trust_env=False) as client:
        for path, fields in PATHS.items():
            found = client.get(f"{at}/{path}").json()
            row = found[0] if isinstance(found, list) else found
            assert fields <= row.keys(), path
        host = quote("/", safe="")
        assert client.get(f"{at}/queues/{host}/orders").json()["arguments"] == {"x-max-length": 7}
        assert len(client.get(f"{at}/queues/{host}/orders/bindings").json()) == 2
        for path in ("queues/none", f"queues/{host}/none", "nothing", "aliveness-test/none", ""):
            answer = client.get(f"{at}/{path}")
            assert (answer.status_code, answer.json()["reason"]) == (404, "Not Found"), path
        page = client.get(
            f"{at}/exchanges", params={"page": 2, "page_size": 3, "columns": "name,type"}
        ).json()
        assert (page["page_count"], page["item_count"], page["total_count"]) == (3, 3, 7)
        assert page["items"][0].keys() == {"name", "type"}
        odd = client.get(
            f"{at}/queues/{host}/orders", params={"columns": "name,name.x.y,arguments.x-max-length"}
        )
        assert odd.json() == {"name": "orders", "arguments": {"x-max-length": 7}}
        assert client.get(f"{at}/exchanges", params={"name": "topic"}).json()[0]["name"] == "amq.topic"
        for wrong, why in (
            ({"page": "0"}, "page is 1 to 1, not 0: there are 7 rows"),
            ({"page": "9"}, "page is 1 to 1, not 9: there are 7 rows"),
            ({"page": "x"}, "page is a number, not 'x'"),
            ({"page": "-1"}, "page is a number, not '-1'"),
            ({"page": "\u0665"}, "page is a number, not '\u0665'"),
            ({"page": "1", "page_size": "x"}, "page_size is a number, not 'x'"),
            ({"page": "1", "page_size": "501"}, "page_size is 1 to 500, not 501"),
            ({"page": "1", "page_size": "0"}, "page_size is 1 to 500, not 0"),
            ({"sort": "name", "sort_reverse": "x"}, "sort_reverse is true or false, not 'x'"),
            (
                {"name": "(", "use_regex": "true"},
                "name is no regular expression, or one that takes too long: '('",
            ),
            (
                {"name": "(.{99}){9999}", "use_regex": "true"},
                "name is no regular expression, or one that takes too long: '(.{99}){9999}'",
            ),
            ({"name": "a", "use_regex": "1"}, "use_regex is true or false, not '1'"),
        ):
            answer = client.get(f"{at}/exchanges", params=wrong)
            told = {"error": "bad_request", "reason": why}
            assert (answer.status_code, answer.json()) == (400, told), wrong


def asking(gateway: Running) -> httpx.Client:
    at = f"http://{LOOPBACK}:{gateway.gateway.http_port}/api/"
    return httpx.Client(base_url=at, auth=("ann", PASSWORD), trust_env=False)


def test_an_order_and_expressions(filled: Running) -> None:
    with asking(filled) as client:

        def names(**query: str) -> list[str]:
            found: list[dict[str, Any]] = client.get("exchanges", params=query).json()
            return [one["name"] for one in found]

        every = names()
        assert names(sort="name", sort_reverse="true") == sorted(every, reverse=True)
        assert names(sort="name") == names(sort="name", sort_reverse="false") == sorted(every)
        assert names(sort="no.such.field") == every
        assert names(name="^amq\\.(t|f)", use_regex="true", sort="name") == ["amq.fanout", "amq.topic"]
        assert names(name="(a+)+$", use_regex="true") == []
        assert names(name="amq.*", use_regex="false") == []
        queues = client.get("queues", params={"sort": "messages", "sort_reverse": "true"}).json()
        counts = [one["messages"] for one in queues]
        assert counts == sorted(counts, reverse=True)
        within = client.get("queues", params={"sort": "arguments.x-max-length"}).json()
        assert within[-1]["name"] == "orders"


def test_every_path_is_one_or_none(filled: Running) -> None:
    """What RabbitMQ has behind a path is answered, or there is nothing; never something else."""
    with asking(filled) as client:
        (connection,) = client.get("connections").json()
        node, name = client.get("overview").json()["node"], quote(connection["name"], safe="")
        assert client.get("nodes").json()[0]["mem_used"] > 1_000_000
        for path, (word, wanted) in {
            f"nodes/{node}": ("name", node),
            "vhosts/%2F": ("name", "/"),
            "queues/%2F/orders": ("name", "orders"),
            "exchanges/%2F/amq.default": ("name", ""),
            "exchanges/%2F/readings": ("name", "readings"),
            f"connections/{name}": ("name", connection["name"]),
            "users/ann": ("tags", ["administrator"]),
            "permissions/%2F/ann": ("configure", ".*"),
            "bindings/%2F/e/readings/q/orders/eu.%23": ("properties_key", "eu.%23"),
            "bindings/%2F/e/amq.default/q/orders/orders": ("source", ""),
            "health/checks/alarms": ("status", "ok"),
            f"health/checks/port-listener/{filled.amqp}": ("status", "ok"),
            "healthchecks/node": ("status", "ok"),
            "cluster-name": ("name", node),
        }.items():
            answer = client.get(path)
            assert (answer.status_code, answer.json()[word]) == (200, wanted), path
        for path, count in {
            "bindings/%2F/e/readings/q/orders": 1,
            "bindings/%2F/e/readings/e/amq.topic": 0,
            "exchanges/%2F/readings/bindings/source": 1,
            "exchanges/%2F/readings/bindings/destination": 0,
            "exchanges/%2F/amq.default/bindings/source": len(client.get("queues").json()),
            "vhosts/%2F/connections": 1,
            "vhosts/%2F/permissions": 1,
            "users/ann/permissions": 1,
            "users/ann/topic-permissions": 0,
            "policies": 0,
            "policies/%2F": 0,
        }.items():
            answer = client.get(path)
            assert (answer.status_code, len(answer.json())) == (200, count), path
        nothing = """overview/x whoami/x nodes/x nodes/x/memory vhosts/x vhosts/%2F/nope vhosts/x/connections
            queues/%2F/orders/nope queues/%2F/work queues/x queues/%2F/orders/bindings/x policies/%2F/x
            exchanges/%2F/none exchanges/%2F/readings/nope exchanges/%2F/readings/bindings channels/x
            bindings/%2F/x bindings/%2F/e/none/q/orders bindings/%2F/e/readings/q/none bindings/x
            bindings/%2F/e/readings/q/orders/other bindings/%2F/e/readings/x/orders bindings/%2F/e/readings
            connections/none connections/none/channels consumers/x users/none users/none/permissions
            users/ann/nope permissions/%2F permissions/%2F/none permissions/x/ann definitions/x nothing
            aliveness-test healthchecks/node/x health/checks/nope queues//orders"""
        for path in nothing.split():
            answer = client.get(path)
            assert (answer.status_code, answer.json()["reason"]) == (404, "Not Found"), path
        closed = client.get("health/checks/port-listener/1")
        assert (closed.status_code, "port 1" in closed.text) == (503, True)
        assert client.delete("vhosts/%2F").status_code == 404
