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
import jsonschema_rs
import paho.mqtt.client as mqtt
import pika
import pytest
import trio
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from pydantic import SecretStr

from gateway.admin import MappingsApi
from gateway.app.operations import process_of
from gateway.mapping.loader import parse
from gateway.mapping.router import Router
from gateway.model.message import Message, Sender
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.protocols.mqtt.dialect import topic_address
from gateway.settings import AmqpPermissions, Http, Limits, MqttRules, Role, StoreSettings, User
from gateway.settings.access import Destinations, FastPermissions
from gateway.settings.journal import Journal
from gateway.telemetry.history import History
from tests.ingress.amqpfast.client import Fast
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.operator import bearer
from tests.passwords import hashed

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
FILLED: Final = (
    "transfers",
    "rates",
    "mappings",
    "connections",
    "sessions",
    "retained",
    "queues",
    "exchanges",
    "bindings",
    "dead-letters",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("api")


@pytest.fixture(scope="module")
def gateway(folder: Path) -> Iterator[Running]:
    (folder / "mapping.yaml").write_text(MAPPING)
    settings = settings_of(
        http=Http(host=LOOPBACK, port=0),
        store=StoreSettings(path=folder / "data"),
        journal=Journal(enabled=True),
        mappings=(str(folder / "mapping.yaml"),),
        users={"ann": User(password_hash=SecretStr(hashed("right")), roles=("boss",))},
        roles={
            "boss": Role(console="write", mqtt=MqttRules(publish=("#",), subscribe=("#",))),
            "all": Role(
                amqp091={"/": AmqpPermissions(configure=".*", write=".*", read=".*")},
                amqpfast={"/": FastPermissions(queues=Destinations(create="*", read="*", write="*"))},
            ),
        },
        default_roles={"guest": ("all",), "anonymous": ("boss",)},
    )
    with running(settings, but="mappings not reloaded, previous ones in force") as started:
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
    connection = pika.BlockingConnection(pika.URLParameters(gateway.idle_amqp_url))
    channel = connection.channel()
    channel.queue_declare("work", durable=True, arguments={"x-max-length": 100})
    channel.exchange_declare("readings", "topic", durable=True)
    channel.queue_bind("work", "readings", "a.#")
    channel.confirm_delivery()
    properties = pika.BasicProperties(
        content_type="text/plain",
        headers={"a": 1, "b": b"\xff"},
        delivery_mode=2,
        message_id="m1",
        priority=3,
    )
    channel.basic_publish("", "work", b"first", properties)
    channel.basic_publish("", "work", b"\xff\xfe", properties)
    subscriber = mqtt.Client(CallbackAPIVersion.VERSION2, "a/b", protocol=mqtt.MQTTv5)
    subscriber.connect(LOOPBACK, gateway.mqtt)
    subscriber.loop_start()
    subscriber.subscribe("x/+", 1)
    subscriber.publish("x/kept", b"kept", 1, retain=True).wait_for_publish(10)
    subscriber.publish("up/t", b"21.5", 1).wait_for_publish(10)
    gateway.until(lambda: len(gateway.gateway.mqtt.retained) == 1)
    gateway.ask(lambda: gateway.gateway.fast_hosts.partials.claim("/", "guest", "slow", b"head", 1_000))
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
    content = (responses.get(str(answer.status_code)) or responses["default"])["content"]
    kind = answer.headers["content-type"]
    schema = {**content[kind]["schema"], "components": described["components"]}
    jsonschema_rs.Draft202012Validator(schema).validate(answer.json())
    return answer.json()


def test_the_description_is_one(described: dict[str, Any], client: httpx.Client) -> None:
    from openapi_spec_validator import validate  # two seconds, for each process that only collects tests

    validate(described)
    tag = client.get(f"{V1}/openapi.json").headers["etag"]
    again = client.get(f"{V1}/openapi.json", headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")
    names = [one["operationId"] for path in described["paths"].values() for one in path.values()]
    assert len(set(names)) == len(names)


def test_an_act_on_names_with_a_star_is_exact_where_that_is_said(
    filled: httpx.Client, described: dict[str, Any]
) -> None:
    """Clients choose names: what a page shows is acted on by these words."""
    for path in ("sessions", "queues", "retained"):
        reads = described["paths"][f"{V1}/{path}"]["get"]["parameters"]
        assert "exact" in [one["name"] for one in reads], path
        body = described["paths"][f"{V1}/{path}/remove"]["post"]["requestBody"]
        assert "exact" in body["content"]["application/json"]["schema"]["properties"], path
    for path, word in (
        ("sessions/remove", "client"),
        ("queues/remove", "queue"),
        ("queues/purge", "queue"),
        ("retained/remove", "topic"),
        ("retained/remove", "client"),
    ):
        for name in ("*", "#", "wor*", "a/*", "x/+"):
            found = filled.post(f"{V1}/{path}", json={word: name, "exact": True})
            assert (found.status_code, {*found.json().values()}) == (200, {0}), (path, name, found.text)
    failed = filled.post(f"{V1}/retained/remove", json={"topic": "x/#/kept"})
    assert checked(described, f"{V1}/retained/remove", "post", failed)["detail"].startswith("topic: 'x/#/k")
    failed = filled.get(f"{V1}/retained", params={"topic": "x/#/kept"})
    assert checked(described, f"{V1}/retained", "get", failed)["status"] == 400


def test_everything_that_is_read_is_as_it_is_described(
    filled: httpx.Client, described: dict[str, Any]
) -> None:
    read = 0
    for path, methods in described["paths"].items():
        if "get" not in methods or "{" in path:
            continue
        if "text/event-stream" in methods["get"]["responses"]["200"]["content"]:
            continue  # it has no end
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


def test_the_last_hour_is_shown(filled: httpx.Client, described: dict[str, Any]) -> None:
    asked = {"kind": "listener", "name": "m*", "what": "in"}
    found = checked(described, f"{V1}/rates", "get", filled.get(f"{V1}/rates", params=asked))
    assert [(one["name"], one["what"]) for one in found["items"]] == [("mqtt", "in")]
    everything = filled.get(f"{V1}/rates", params={"count": 1_000}).json()
    assert {one["kind"] for one in everything["items"]} == {"process", "protocol", "listener", "route"}
    assert all(one["now"] >= 0 for one in everything["items"])


def test_what_one_has_already_is_not_sent_again(filled: httpx.Client) -> None:
    first = filled.get(f"{V1}/roles")
    tag = first.headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}'):
        again = filled.get(f"{V1}/roles", headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    other = filled.get(f"{V1}/users", headers={"If-None-Match": tag})
    assert (other.status_code, other.headers["etag"] != tag) == (200, True)
    assert "etag" not in filled.get(f"{V1}/sessions/nobody").headers


def test_time_that_passes_changes_no_tag(
    filled: httpx.Client, gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(History, "tick", lambda *_: None)  # rates of the last seconds do change
    client = mqtt.Client(CallbackAPIVersion.VERSION2, "away", protocol=mqtt.MQTTv5)
    stays = Properties(PacketTypes.CONNECT)
    stays.SessionExpiryInterval = 600
    client.connect(LOOPBACK, gateway.mqtt, properties=stays)
    client.loop_start()
    gateway.until(lambda: "away" in gateway.gateway.mqtt.sessions)
    client.disconnect()
    client.loop_stop()
    gateway.until(lambda: gateway.gateway.mqtt.sessions["away"].outlet is None)
    for path in ("sessions", "queues", "outboxes", "endpoints"):
        first = filled.get(f"{V1}/{path}")
        tag = first.headers["etag"]
        trio.run(trio.sleep, 0.05)
        again = filled.get(f"{V1}/{path}", headers={"If-None-Match": tag})
        assert (again.status_code, again.headers["etag"]) == (304, tag), path
    rows = {one["client"]: one["idle_secs"] for one in filled.get(f"{V1}/sessions").json()["items"]}
    assert rows["away"] > 0.05
    gone = filled.post(f"{V1}/sessions/remove", json={"client": "away"})
    assert gone.json()["removed"] == 1
    changed = filled.get(f"{V1}/sessions", headers={"If-None-Match": first.headers["etag"]})
    assert changed.status_code == 200


def test_a_star_is_any_tag(filled: httpx.Client) -> None:
    assert filled.get(f"{V1}/roles", headers={"If-None-Match": "*"}).status_code == 304
    assert filled.get(f"{V1}/sessions/nobody", headers={"If-None-Match": "*"}).status_code == 404


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
    assert (queue["messages"], queue["durable"], queue["arguments"]) == (3, True, {"x-max-length": 100})
    assert (queue["messages_max"], queue["messages_bytes_max"]) == (100, Limits().queue_bytes_max)
    assert rows("bindings", destination="work")[0]["key"] == "a.#"
    assert rows("exchanges", name="read*")[0]["type"] == "topic"
    assert rows("exchanges", name="read*", exact="true") == []
    assert rows("exchanges", name="readings", exact="true")[0]["durable"]
    endpoints = {one["name"]: one for one in rows("endpoints")}
    assert all(one["up"] for one in endpoints.values())
    assert endpoints["mqtt"]["messages_in"] >= 2
    (route,) = rows("routes")
    assert (route["matched"], route["delivered"], route["line"]) == (1, 1, 3)
    amqp = [one for one in rows("connections") if one["protocol"] == "amqp091"]
    assert [(one["virtual_host"], one["channels"], one["user"]) for one in amqp] == [("/", 1, "guest")]
    assert (amqp[0]["tls"], amqp[0]["channel_max"], amqp[0]["frame_max"]) == (False, 2_047, 131_072)
    assert amqp[0]["client_properties"]["product"] == "Pika Python Client Library"
    assert [(one["name"], one["roles"]) for one in rows("users")] == [("ann", ["boss"])]
    assert {one["name"]: one["console"] for one in rows("roles")} == {"boss": "write", "all": "none"}
    limits = {(one["name"], one["of"]): one["used"] for one in rows("limits")}
    assert limits["connections_max", "mqtt"] == 1
    assert limits["retained_messages_max", ""] == 1
    assert limits["queues_max", "amqp091 /"] == 1
    assert limits["queue_messages_max", "queue work"] == 3
    assert ("store_pending_bytes_max", "") in limits
    assert limits["fast_memory_total_bytes_max", ""] >= 0
    (transfer,) = rows("transfers", virtual_host="/")
    assert (transfer["client"], transfer["body_bytes"], transfer["under_way"]) == ("slow", 1_000, True)
    assert rows("transfers", virtual_host="none") == []
    stats = filled.get("/api/queues/%2F/work").json()["message_stats"]
    assert (stats["publish"], stats["ack"], stats["publish_details"]) == (3, 0, {"rate": 0.0})
    assert filled.get("/api/overview").json()["message_stats"]["publish"] >= 2


def test_the_longest_queues_come_first(filled: httpx.Client) -> None:
    def names(**asked: str) -> tuple[list[tuple[str, int]], str | None]:
        page = filled.get(f"{V1}/queues", params={"sort": "messages", **asked}).json()
        return [(one["queue"], one["messages"]) for one in page["items"]], page["next"]

    every, _ = names()
    counts = [messages for _, messages in every]
    assert counts == sorted(counts, reverse=True)
    first, after = names(count="1")
    assert first == every[:1]
    if after is not None:
        assert names(after=after)[0] == every[1:]


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


def test_consumers_are_listed_with_their_clients(
    gateway: Running, filled: httpx.Client, described: dict[str, Any]
) -> None:
    """Those of both protocols, with messages that they have not acknowledged."""

    def rows(**query: str) -> list[dict[str, Any]]:
        found = checked(described, f"{V1}/consumers", "get", filled.get(f"{V1}/consumers", params=query))
        return found["items"]  # type: ignore[no-any-return]

    connection = pika.BlockingConnection(pika.URLParameters(gateway.idle_amqp_url))
    channel = connection.channel()
    for name in ("c*", "c1"):
        channel.queue_declare(name)
        channel.basic_qos(prefetch_count=5)
        channel.basic_consume(name, lambda *_: None, consumer_tag=f"of {name}")
    for _ in range(3):
        channel.basic_publish("", "c1", b"x")
    connection.process_data_events(0)
    assert rows(queue="none") == []
    (star,) = rows(queue="c*", protocol="amqp091")
    assert (star["tag"], star["prefetch"], star["acknowledges"]) == ("of c*", 5, True)
    gateway.until(lambda: gateway.gateway.hosts["/"].queues["c1"].unacknowledged == 3)
    by_queue = {one["queue"]: one["unacknowledged"] for one in rows(address=star["address"])}
    assert by_queue == {"c*": 0, "c1": 3}
    with Fast(gateway, "press 9").open() as client:
        handle = client.handle("fast")
        client.consume(handle, prefetch=1)
        client.put(handle, b"1", b"2")
        client.rows(1)
        (fast,) = rows(protocol="amqpfast")
        named = (fast["queue"], fast["client"], fast["tag"], fast["prefetch"], fast["unacknowledged"])
        assert named == ("fast", "press 9", str(handle), 1, 1)
        assert len(rows(virtual_host="/")) == 3
        listed = filled.get(f"{V1}/connections", params={"address": fast["address"]}).json()["items"]
        assert [one["client"] for one in listed] == ["press 9"]
        client.ack(1)
    connection.close()
    gateway.until(lambda: not gateway.gateway.fast_hosts["/"].queues["fast"].consumers)
    assert rows() == []


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
        assert first["properties"] == {"message_id": "m1", "priority": 3}
        assert (second["body_encoding"], base64.b64decode(second["body"])) == ("base64", b"\xff\xfe")
    absent = filled.post(path, json=asked | {"queue": "none"})
    assert checked(described, path, "post", absent)["detail"].startswith("no queue 'none'")
    wrongs: tuple[Any, ...] = ({}, {"protocol": "amqp091"}, asked | {"count": "2"}, asked | {"more": 1}, [])
    for wrong in wrongs:
        assert checked(described, path, "post", filled.post(path, json=wrong))["status"] == 400, wrong


def test_a_message_is_published(filled: httpx.Client, described: dict[str, Any]) -> None:
    path = f"{V1}/publish"
    asked = {"endpoint": "mqtt", "topic": "up/now", "body": "hot", "qos": 1, "headers": {"a": "b"}}
    assert checked(described, path, "post", filled.post(path, json=asked))["outcome"] == "accepted"
    peek = {"protocol": "amqp091", "queue": "work", "count": 10}
    last = filled.post(f"{V1}/queues/peek", json=peek).json()["shown"][-1]
    assert (last["body"], last["headers"], last["sender"]["user"]) == ("hot", {"a": "b"}, "command line")
    for wrong, why in (
        ({"endpoint": "none", "topic": "a"}, "endpoint: unknown name 'none'"),
        ({"endpoint": "mqtt", "queue": "a"}, "uses mqtt"),
        ({"endpoint": "mqtt"}, "uses mqtt"),
        ({"endpoint": "mqtt", "topic": "a/#"}, ""),
        ({"endpoint": "amqp091", "queue": "a", "qos": 2}, "qos: amqp091 does not support QoS 2"),
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


def test_a_draft_is_tried_on_a_message_and_changes_nothing(
    filled: httpx.Client, described: dict[str, Any], folder: Path
) -> None:
    path, file = f"{V1}/mappings/explain", str(folder / "mapping.yaml")
    (shown,) = checked(described, f"{V1}/mappings", "get", filled.get(f"{V1}/mappings"))["items"]
    assert (shown["file"], shown["text"]) == (file, MAPPING)
    asked = {"endpoint": "mqtt", "topic": "up/t", "body": "21.5", "qos": 1, "client": "c1"}

    def explained(**more: Any) -> Any:
        return checked(described, path, "post", filled.post(path, json=asked | more))

    (match,) = explained()["matches"]
    assert (match["route"], match["crosses"], match["made"]["routing_key"]) == ("up", True, "work")
    assert explained(topic="down")["misses"][0]["route"] == "up"
    drafted = explained(files={file: MORE})
    assert [one["made"]["routing_key"] for one in drafted["matches"]] == ["elsewhere"]
    assert [one["route"] for one in drafted["misses"]] == ["more"]
    (fault, *_) = explained(files={file: MAPPING.replace("to:", "too:")})["faults"]
    assert (fault["file"], fault["line"]) == (file, 3)
    another = explained(files={"new.yaml": MORE.replace("name: up", "name: also")})
    assert [one["route"] for one in another["matches"]] == ["up", "also"]
    assert explained()["matches"][0]["made"]["routing_key"] == "work", "nothing has changed"
    wrongs: tuple[dict[str, Any], ...] = (
        {"endpoint": "none"},
        {"files": {"a": 1}},
        {"files": []},
        {"topic": "a/#"},
    )
    for wrong in wrongs:
        assert checked(described, path, "post", filled.post(path, json=asked | wrong))["status"] == 400, wrong


def test_pages_of_the_journal_have_every_row_once(filled: httpx.Client, gateway: Running) -> None:
    for number in range(7):
        asked = {"endpoint": "mqtt", "topic": f"up/{number}", "body": f"row {number}"}
        assert filled.post(f"{V1}/publish", json=asked).json()["outcome"] == "accepted"

    def pages(count: int, **more: str) -> list[tuple[str, int]]:
        found, after = [], ""
        while True:
            asked = {"count": str(count), **more} | ({"after": after} if after else {})
            page = filled.get(f"{V1}/journal", params=asked).json()
            found += [(row["shard"], row["sequence"]) for row in page["items"]]
            if page["next"] is None:
                return found
            after = page["next"]

    journaling = gateway.gateway.journaling
    assert journaling is not None
    gateway.until(lambda: not journaling.writer.backlog)  # or the pages are not of the same rows
    everything = pages(1_000, route="up")
    assert len(everything) >= 8
    for count in (1, 3, 8):
        assert pages(count, route="up") == everything
    found = pages(2)
    assert set(found) > set(everything)
    assert len(set(found)) == len(found)
    assert filled.get(f"{V1}/journal", params={"after": "nonsense"}).status_code == 400


def test_rates_of_connections_are_counted_for_who_asks(
    filled: httpx.Client, described: dict[str, Any]
) -> None:
    path = f"{V1}/connections"
    asked = {"protocol": "mqtt", "rates": "true"}
    (row,) = checked(described, path, "get", filled.get(path, params=asked))["items"]
    assert row["bytes_in_per_sec"] >= 0
    assert (row["version"], row["since"] is not None) == ("v5", True)
    (row,) = filled.get(path, params={"protocol": "mqtt"}).json()["items"]
    assert row["bytes_in_per_sec"] is None


def test_a_dry_run_says_what_would_change(gateway: Running) -> None:
    """Of files that are in force at once, for the gateway watches its own."""
    process, endpoints = process_of(gateway.gateway), gateway.gateway.settings.endpoints()

    def changes(text: str) -> Any:
        tried = replace(process, candidate=lambda drafts: Router([parse(text)], endpoints))
        return json.loads(trio.run(MappingsApi(tried).dry_run, None).body)

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
    assert none.json()["detail"].endswith("see /api/v1/openapi.json")


def test_a_path_takes_no_other_methods(client: httpx.Client, described: dict[str, Any]) -> None:
    """RabbitMQ's paths, which are any below /api, take none of them over."""
    by_name = ("/sessions/remove", "/dead-letters/redrive", "/dead-letters/purge")  # one that is called so
    for path, methods in described["paths"].items():
        if "{" in path:
            continue
        for method in {"get", "delete", "put", "post"} - methods.keys():
            if method == "get" and path.endswith(by_name):
                assert client.get(path).status_code == 404
                continue
            answer = client.request(method, path)
            assert answer.status_code == 405, (method, path)
            assert answer.headers["content-type"] == "application/problem+json"
            told = answer.json()["detail"]
            assert told.startswith(f"method {method.upper()} is not allowed; allowed: "), told
            checked(described, path, next(iter(methods)), answer)
    assert client.get("/api/v1").status_code == client.get("/api/v1/").status_code == 404
    assert client.get("/api/v2").json()["reason"] == "Not Found", "that is RabbitMQ's"


def test_what_is_too_large_is_told_in_the_same_form(client: httpx.Client, described: dict[str, Any]) -> None:
    path = f"{V1}/sessions/remove"
    answer = client.post(path, content=b" " * 20_000_000)
    assert checked(described, path, "post", answer)["status"] == 413
    path = f"{V1}/login"
    answer = client.post(path, content=b"{}", headers={"Content-Type": "text/plain"})
    assert checked(described, path, "post", answer)["status"] == 415


def test_what_there_is_none_of_is_no_choice(client: httpx.Client, described: dict[str, Any]) -> None:
    for path, words in {
        "endpoints": {"kind": "zebra"},
        "queues": {"kind": "listener"},
        "queues?": {"protocol": "mqtt"},
        "connections": {"protocol": "zebra"},
        "rates": {"kind": "queue"},
        "rates?": {"what": "zebra"},
    }.items():
        at = f"{V1}/{path.rstrip('?')}"
        told = checked(described, at, "get", client.get(at, params=words))
        assert (told["status"], "must be one of" in told["detail"]) == (400, True), path
    for path, choice in {
        "queues/purge": {"kind": "zebra"},
        "connections/disconnect": {"client": "a", "protocol": "zebra"},
        "drain": {"wait": True},
        "mappings/reload": {"files": {}},
        "mappings/dry-run": [],
    }.items():
        answer = client.post(f"{V1}/{path}", json=choice)
        assert checked(described, f"{V1}/{path}", "post", answer)["status"] == 400, path
    assert client.post(f"{V1}/mappings/dry-run", json={}).status_code == 200
    assert client.post(f"{V1}/mappings/dry-run", content=b"{").status_code == 400


def test_an_operator_has_it_stop(tmp_path: Path) -> None:
    with running(
        settings_of(http=Http(host=LOOPBACK, port=0), store=StoreSettings(path=tmp_path))
    ) as started:
        port = started.gateway.http_port
        at = f"http://{LOOPBACK}:{port}{V1}/drain"
        assert httpx.post(at, headers=bearer(port), trust_env=False).json() == {"draining": True}
        started.stop()
