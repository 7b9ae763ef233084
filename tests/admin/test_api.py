"""The interface below /api/v1, of a gateway that has something of everything: its description is right, and
all that it answers is as it is described."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx
import jsonschema
import paho.mqtt.client as mqtt
import pika
import pytest
import trio
from openapi_spec_validator import validate

from gateway.access.users import hash_password
from gateway.admin import ProcessApi
from gateway.app.operating import process_of
from gateway.mapping.loading import parse
from gateway.mapping.router import Router
from gateway.model.message import Message, Sender
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.protocols.mqtt.dialect import topic_address
from gateway.settings import AmqpPermissions, Http, MqttRules, Role, Store, User
from gateway.settings.journal import Journal
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.operator import bearer

V1: Final = "/api/v1"
MAPPING: Final = """version: 1
routes:
  - name: up
    from: {endpoint: mqtt, topic: "up/{rest...}"}
    to: {endpoint: amqp091, exchange: "", routing_key: "work"}
"""
MORE: Final = (
    MAPPING.replace('"work"', '"elsewhere"')
    + """  - name: more
    from: {endpoint: mqtt, topic: x}
    to: {endpoint: amqp091, queue: x}
"""
)
FILLED: Final = ("connections", "sessions", "retained", "queues", "exchanges", "bindings", "dead-letters")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("api")


@pytest.fixture(scope="module")
def gateway(folder: Path) -> Iterator[Running]:
    (folder / "mapping.yaml").write_text(MAPPING)
    settings = settings_of(
        http=Http(host=LOOPBACK, port=0),
        store=Store(path=folder / "data"),
        journal=Journal(enabled=True),
        mappings=(str(folder / "mapping.yaml"),),
        users={"ann": User(password_hash=hash_password("right"), roles=("boss",))},
        roles={
            "boss": Role(console="write", mqtt=MqttRules(publish=("#",), subscribe=("#",))),
            "all": Role(amqp091={"/": AmqpPermissions(configure=".*", write=".*", read=".*")}),
        },
        default_roles={"guest": ("all",), "anonymous": ("boss",)},
    )
    with running(settings, but="mappings not reloaded, the old ones stay in force") as started:
        yield started


@pytest.fixture(scope="module")
def client(gateway: Running) -> Iterator[httpx.Client]:
    at = f"http://{LOOPBACK}:{gateway.gateway.http_port}"
    headers = bearer(gateway.gateway.http_port)
    with httpx.Client(base_url=at, trust_env=False, headers=headers, timeout=30.0) as made:
        yield made


@pytest.fixture(scope="module")
def filled(gateway: Running, client: httpx.Client) -> Iterator[httpx.Client]:
    """Clients, queues, messages, a dead letter."""
    connection = pika.BlockingConnection(pika.URLParameters(gateway.amqp_url))
    channel = connection.channel()
    channel.queue_declare("work", durable=True, arguments={"x-max-length": 100})
    channel.exchange_declare("readings", "topic", durable=True)
    channel.queue_bind("work", "readings", "a.#")
    channel.confirm_delivery()
    properties = pika.BasicProperties(
        content_type="text/plain", headers={"a": 1, "b": b"\xff"}, delivery_mode=2
    )
    channel.basic_publish("", "work", b"first", properties)
    channel.basic_publish("", "work", b"\xff\xfe", properties)
    subscriber = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, "a/b", protocol=mqtt.MQTTv5)
    subscriber.connect(LOOPBACK, gateway.mqtt)
    subscriber.loop_start()
    subscriber.subscribe("x/+", 1)
    subscriber.publish("x/kept", b"kept", 1, retain=True).wait_for_publish(10)
    subscriber.publish("up/t", b"21.5", 1).wait_for_publish(10)
    gateway.until(lambda: len(gateway.gateway.mqtt.retained) == 1)
    lost = Message(topic_address("lost/t"), b"lost", sender=Sender("mqtt", "c1", "ann"))
    outcome = Outcome(Verdict.REJECTED, Reason.NO_ROUTE, "nobody")
    gateway.ask(lambda: gateway.gateway.dead_letters.add([lost], "up", outcome))
    sent = client.post(f"{V1}/publish", json={"endpoint": "amqp091", "exchange": "", "routing_key": "none"})
    assert sent.json()["outcome"] == "rejected"
    yield client
    subscriber.disconnect()
    subscriber.loop_stop()
    connection.close()


@pytest.fixture(scope="module")
def described(client: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"{V1}/openapi.json").json()
    return found


def checked(described: dict[str, Any], path: str, method: str, answer: httpx.Response) -> Any:
    """The answer, which is as it is described."""
    responses = described["paths"][path][method]["responses"]
    content = responses[str(answer.status_code)]["content"]
    kind = answer.headers["content-type"]
    schema = {**content[kind]["schema"], "components": described["components"]}
    jsonschema.Draft202012Validator(schema).validate(answer.json())
    return answer.json()


def test_the_description_is_one(described: dict[str, Any], client: httpx.Client) -> None:
    validate(described)
    tag = client.get(f"{V1}/openapi.json").headers["etag"]
    again = client.get(f"{V1}/openapi.json", headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")
    names = [one["operationId"] for path in described["paths"].values() for one in path.values()]
    assert len(set(names)) == len(names)


def test_everything_that_is_read_is_as_it_is_described(
    filled: httpx.Client, described: dict[str, Any]
) -> None:
    read = 0
    for path, methods in described["paths"].items():
        if "get" not in methods or "{" in path:
            continue
        answer = filled.get(path)
        assert answer.status_code == 200, (path, answer.text)
        found = checked(described, path, "get", answer)
        read += 1
        name = path.removeprefix(f"{V1}/")
        if isinstance(found, dict) and "items" in found and name in FILLED:
            assert found["items"], path
        if "total" in (found if isinstance(found, dict) else {}):
            assert found["total"] >= len(found["items"])
            page = checked(described, path, "get", filled.get(path, params={"count": 1}))
            assert len(page["items"]) == min(found["total"], 1)
            assert (page["next"] is None) is (found["total"] <= 1)
            if page["next"] is not None:
                rest = filled.get(path, params={"after": page["next"]}).json()
                assert len(rest["items"]) == found["total"] - 1, path
        for wrong in ({"count": "x"}, {"no_such": "1"}):
            if "parameters" in methods["get"]:
                failed = filled.get(path, params=wrong)
                assert checked(described, path, "get", failed)["status"] == 400, (path, wrong)
    assert read >= 18


def test_one_of_a_kind_is_shown(filled: httpx.Client, described: dict[str, Any]) -> None:
    path = f"{V1}/sessions/{{client}}"
    session = checked(described, path, "get", filled.get(f"{V1}/sessions/a/b"))
    assert session["filters"][0]["filter"] == "x/+"
    assert checked(described, path, "get", filled.get(f"{V1}/sessions/nobody"))["status"] == 404
    (letter,) = filled.get(f"{V1}/dead-letters").json()["items"][:1]
    path = f"{V1}/dead-letters/{{id}}"
    assert (
        checked(described, path, "get", filled.get(f"{V1}/dead-letters/{letter['id']}"))["id"] == letter["id"]
    )


def test_rows_say_what_there_is(filled: httpx.Client) -> None:
    def rows(kind: str, **query: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = filled.get(f"{V1}/{kind}", params=query).json()["items"]
        return found

    (queue,) = rows("queues", protocol="amqp091", queue="work")
    assert (queue["messages"], queue["durable"]) == (3, True)
    assert rows("bindings", destination="work")[0]["key"] == "a.#"
    assert rows("exchanges", name="read*")[0]["type"] == "topic"
    endpoints = {one["name"]: one for one in rows("endpoints")}
    assert all(one["up"] for one in endpoints.values())
    assert endpoints["mqtt"]["messages_in"] >= 2
    (route,) = rows("routes")
    assert (route["matched"], route["delivered"], route["line"]) == (1, 1, 3)
    amqp = [one for one in rows("connections") if one["protocol"] == "amqp091"]
    assert [(one["virtual_host"], one["channels"], one["user"]) for one in amqp] == [("/", 1, "guest")]
    assert [(one["name"], one["roles"]) for one in rows("users")] == [("ann", ["boss"])]
    assert {one["name"]: one["console"] for one in rows("roles")} == {"boss": "write", "all": "none"}
    limits = {(one["name"], one["of"]): one["used"] for one in rows("limits")}
    assert limits["connections_max", "mqtt"] == 1
    assert limits["retained_messages_max", ""] == 1
    assert limits["queues_max", "amqp091 /"] == 1


def test_the_journals_newest_rows_are_shown(filled: httpx.Client, gateway: Running) -> None:
    found: list[dict[str, Any]] = []

    def there() -> bool:
        gateway.gateway.writes.flush()
        return True

    gateway.until(there)
    for _ in range(100):
        found = filled.get(f"{V1}/journal", params={"route": "up", "count": "5"}).json()["items"]
        if found:
            break
        gateway.until(there)
    assert [(one["route"], one["outcome"], one["body"]) for one in found] == [("up", "accepted", "21.5")]


def test_a_queue_is_looked_into_and_keeps_its_messages(
    filled: httpx.Client, described: dict[str, Any]
) -> None:
    path = f"{V1}/queues/peek"
    asked = {"protocol": "amqp091", "queue": "work", "count": 2}
    for _ in range(2):
        found = checked(described, path, "post", filled.post(path, json=asked))
        assert found["messages"] == 3
        first, second = found["shown"]
        assert (first["body"], first["content_type"], first["headers"]["a"]) == ("first", "text/plain", 1)
        assert (second["body_encoding"], base64.b64decode(second["body"])) == ("base64", b"\xff\xfe")
    absent = filled.post(path, json=asked | {"queue": "none"})
    assert checked(described, path, "post", absent)["detail"].startswith("there is no queue 'none'")
    for wrong in ({}, {"protocol": "amqp091"}, asked | {"count": "2"}, asked | {"more": 1}, []):
        assert checked(described, path, "post", filled.post(path, json=wrong))["status"] == 400, wrong


def test_a_message_is_published(filled: httpx.Client, described: dict[str, Any]) -> None:
    path = f"{V1}/publish"
    asked = {"endpoint": "mqtt", "topic": "up/now", "body": "hot", "qos": 1, "headers": {"a": "b"}}
    assert checked(described, path, "post", filled.post(path, json=asked))["outcome"] == "accepted"
    peek = {"protocol": "amqp091", "queue": "work", "count": 10}
    last = filled.post(f"{V1}/queues/peek", json=peek).json()["shown"][-1]
    assert (last["body"], last["headers"], last["sender"]["user"]) == ("hot", {"a": "b"}, "command line")
    for wrong, why in (
        ({"endpoint": "none", "topic": "a"}, "endpoint: 'none' is none"),
        ({"endpoint": "mqtt", "queue": "a"}, "speaks mqtt"),
        ({"endpoint": "mqtt"}, "speaks mqtt"),
        ({"endpoint": "mqtt", "topic": "a/#"}, ""),
        ({"endpoint": "amqp091", "queue": "a", "qos": 2}, "qos: amqp091 has no 2"),
        ({"endpoint": "mqtt", "topic": "a", "body": "!", "body_encoding": "base64"}, "body: "),
    ):
        failed = checked(described, path, "post", filled.post(path, json=wrong))
        assert (failed["status"], why in failed["detail"]) == (400, True), failed


def test_a_mapping_is_tried_and_taken(filled: httpx.Client, described: dict[str, Any], folder: Path) -> None:
    path, file = f"{V1}/mappings/dry-run", folder / "mapping.yaml"

    def tried() -> Any:
        return checked(described, path, "post", filled.post(path))

    assert tried() == {"good": True, "faults": [], "added": [], "removed": [], "changed": []}
    file.write_text(MORE.replace("to:", "too:"))
    failed = tried()
    assert (failed["good"], failed["faults"][0]["file"]) == (False, str(file))
    assert len(failed["faults"]) > 1
    reload = f"{V1}/mappings/reload"
    refused = checked(described, reload, "post", filled.post(reload))
    assert (refused["taken"], refused["routes"]) == (False, 1)
    assert str(file) in refused["why"]
    file.write_text(MAPPING)
    assert checked(described, reload, "post", filled.post(reload)) == {"taken": True, "why": "", "routes": 1}


def test_a_dry_run_says_what_would_change(gateway: Running) -> None:
    """Of files that are in force at once, for the gateway watches its own."""
    process, endpoints = process_of(gateway.gateway), gateway.gateway.settings.endpoints()

    def changes(text: str) -> Any:
        tried = replace(process, candidate=lambda: Router([parse(text)], endpoints))
        return json.loads(trio.run(ProcessApi(tried).dry_run, None).body)

    nothing = {"good": True, "faults": [], "added": [], "removed": [], "changed": []}
    assert changes(MAPPING) == nothing
    assert changes(MORE) == nothing | {"added": ["more"], "changed": ["up"]}
    assert changes(MORE.replace("name: up", "name: other")) == nothing | {
        "added": ["more", "other"],
        "removed": ["up"],
    }


def test_names_and_passwords_are_taken_as_well(gateway: Running) -> None:
    at = f"http://{LOOPBACK}:{gateway.gateway.http_port}{V1}/session"
    for user, password, code in (("ann", "right", 200), ("ann", "wrong", 401), ("", "right", 401)):
        answer = httpx.get(at, auth=(user, password), trust_env=False)
        assert answer.status_code == code, (user, password)
        assert "Basic" not in answer.headers.get("www-authenticate", ""), "a browser would ask"
    for shown in ("Basic ?", "Basic YQ==", "Basic /w=="):
        assert httpx.get(at, headers={"Authorization": shown}, trust_env=False).status_code == 401


def test_whoever_may_not_is_told_in_the_same_form(client: httpx.Client, described: dict[str, Any]) -> None:
    for path, methods in described["paths"].items():
        for method in methods:
            if path.endswith(("/login", "/logout")):
                continue
            at = re.sub(r"\{[^}]*\}", "x", path)
            answer = client.request(method, at, headers={"Authorization": "Bearer wrong"})
            assert checked(described, path, method, answer)["status"] == 401, path
    none = client.get(f"{V1}/nothing")
    assert (none.status_code, none.headers["content-type"]) == (404, "application/problem+json")
    other = client.put(f"{V1}/queues")
    assert (other.status_code, json.loads(other.content)["title"]) == (405, "Method Not Allowed")


def test_an_operator_has_it_stop(tmp_path: Path) -> None:
    with running(settings_of(http=Http(host=LOOPBACK, port=0), store=Store(path=tmp_path))) as started:
        port = started.gateway.http_port
        at = f"http://{LOOPBACK}:{port}{V1}/drain"
        assert httpx.post(at, headers=bearer(port), trust_env=False).json() == {"draining": True}
        started.stop()
