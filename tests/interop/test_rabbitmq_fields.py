"""The fields of RabbitMQ's management, as one answers that runs beside it: the gateway has them, too, but for
those that the reference says it has not."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final

import httpx
import pika
import pytest
from pydantic import SecretStr

from gateway.settings import AmqpPermissions, Declare, Http, Role, User
from tests.conftest import missing
from tests.interop.gateway_fixture import LOOPBACK, running, settings_of
from tests.interop.servers import PeerMissingError, RabbitMQ
from tests.passwords import hashed

REFERENCE: Final = Path(__file__).parents[2] / "docs" / "reference" / "http.md"
POLICY: Final = {"vhost": "/", "name": "short", "pattern": "no", "definition": {"max-length": 5}}
ALTERNATE: Final = {
    "vhost": "/",
    "name": "alternate",
    "pattern": "^readings",
    "apply-to": "exchanges",
    "definition": {"alternate-exchange": "amq.fanout"},
}
LEFT_OUT: Final[dict[str, str]] = {
    "overview": """churn_rates disable_stats enable_queue_totals release_series_support_status erlang_version
        sample_retention_policies statistics_db_event_queue erlang_full_version""",
    "nodes": """applications auth_mechanisms config_files db_dir enabled_plugins log_files net_ticktime
        proc_total proc_used run_queue context_switches gc_bytes_reclaimed gc_num metrics_gc_queue_length
        ra_open_file_metrics mnesia_disk_tx_count mnesia_ram_tx_count io_read_avg_time io_read_bytes
        io_read_count io_reopen_count io_seek_avg_time io_seek_count io_sync_avg_time io_sync_count
        io_write_avg_time io_write_bytes io_write_count msg_store_read_count msg_store_write_count
        queue_index_read_count queue_index_write_count channel_closed channel_created connection_closed
        connection_created queue_created queue_declared queue_deleted disk_free_limit disk_free""",
    "vhosts/%2F": "message_stats recv_oct send_oct",
    "queues/%2F/orders": """backing_queue_status garbage_collection reductions recoverable_slaves deliveries
        consumer_capacity consumer_utilisation incoming head_message_timestamp message_bytes_paged_out
        message_bytes_persistent message_bytes_unacknowledged messages_paged_out messages_persistent
        messages_ram messages_ready_ram messages_unacknowledged_ram idle_since""",
    "exchanges": "message_stats user_who_performed_action",
    "exchanges/%2F/readings": "incoming outgoing user_who_performed_action",
    "bindings": "",
    "consumers": "",
    "connections": """garbage_collection reductions recv_oct send_oct recv_cnt send_cnt send_pend
        auth_mechanism peer_cert_issuer peer_cert_subject peer_cert_validity ssl_cipher ssl_hash
        ssl_key_exchange ssl_protocol""",
    "users": "password_hash hashing_algorithm",
    "permissions": "",
    "permissions/%2F/guest": "",
    "policies": "",
    "definitions": "",
    "definitions/%2F": "",
    "queues?page=1": "",
    "whoami": "",
    "cluster-name": "",
}
"""By path, what RabbitMQ has and the gateway has not; with a name its rate (`_details`), too."""


@pytest.mark.parametrize("names", LEFT_OUT.values(), ids=LEFT_OUT)
def test_the_reference_says_what_is_left_out(names: str) -> None:
    told = REFERENCE.read_text()
    assert [name for name in names.split() if f"`{name}`" not in told] == []


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a RabbitMQ answers, and what the gateway does, with the same in each."""
    folder = tmp_path_factory.mktemp("fields")
    try:
        rabbit = RabbitMQ(folder / "rabbit", management=True)
    except PeerMissingError as error:
        missing(str(error))
    with rabbit:
        rabbit.control("set_policy", POLICY["name"], POLICY["pattern"], json.dumps(POLICY["definition"]))
        alternate = json.dumps(ALTERNATE["definition"])
        rabbit.control("set_policy", "--apply-to", "exchanges", "alternate", "^readings", alternate)
        theirs = answers(f"http://{LOOPBACK}:{rabbit.management_port}/api/", rabbit.url)
    file = folder / "definitions.json"
    file.write_text(json.dumps({"queues": [], "policies": [ALTERNATE, POLICY]}))
    every = {"/": AmqpPermissions(configure=".*", write=".*", read=".*")}
    settings = settings_of(
        http=Http(host=LOOPBACK, port=0),
        users={"guest": User(password_hash=SecretStr(hashed("guest")), roles=("boss",))},
        roles={"boss": Role(console="write", amqp091=every)},
        declare=Declare(definitions=(file,), policies=True),
    )
    with running(settings) as started:
        ours = answers(f"http://{LOOPBACK}:{started.gateway.http_port}/api/", started.amqp_url)
        ours["port"] = started.amqp
    return theirs, ours


def answers(at: str, url: str) -> dict[str, Any]:
    """What is answered to each path, of a list its first row; a queue, a consumer and a binding are there."""
    with (
        httpx.Client(base_url=at, auth=("guest", "guest"), trust_env=False) as client,
        pika.BlockingConnection(pika.URLParameters(url)) as connection,
    ):
        channel = connection.channel()
        channel.queue_declare("orders", durable=True, arguments={"x-max-length": 7})
        channel.exchange_declare("readings", "topic", durable=True)
        channel.queue_bind("orders", "readings", "eu.#")
        channel.basic_publish("", "orders", b"1")
        channel.basic_consume("orders", lambda *_: None, consumer_tag="taken")
        for _ in range(150):
            connection.process_data_events(0.2)
            if counted(client):
                break
        found: dict[str, Any] = {}
        for path in LEFT_OUT:
            document = client.get(path).raise_for_status().json()
            found[path] = document[0] if isinstance(document, list) else document
        return found


def counted(client: httpx.Client) -> bool:
    """RabbitMQ has begun to answer, and has counted: it does so every five seconds."""
    try:
        queues, nodes = client.get("queues").json(), client.get("nodes").json()
        there = bool(client.get("connections").json() and client.get("consumers").json())
    except (httpx.HTTPError, ValueError):
        return False
    return there and bool(queues) and "messages" in queues[0] and "uptime" in nodes[0]


def test_both_name_the_policy_of_an_exchange(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    assert [one["exchanges/%2F/readings"]["policy"] for one in both] == ["alternate"] * 2


def base(name: str) -> str:
    return name.removesuffix("_details")


@pytest.mark.parametrize("path", LEFT_OUT)
def test_the_fields_are_those_of_a_rabbitmq(both: tuple[dict[str, Any], dict[str, Any]], path: str) -> None:
    theirs, ours = both[0][path], both[1][path]
    names = set(LEFT_OUT[path].split())
    known = names | ours.keys()
    assert {one for one in theirs if one not in known and base(one) not in known} == set()
    assert names - {"idle_since", "disk_free"} <= theirs.keys(), "it has no such field"
    assert names.isdisjoint(ours), "that is here"


def test_what_they_say_is_the_same(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    theirs, ours = both
    connection, other = ours["connections"], theirs["connections"]
    assert connection["protocol"] == other["protocol"] == "AMQP 0-9-1"
    for one in (connection, other):
        assert abs(one["connected_at"] / 1_000 - time.time()) < 300
    assert (connection["ssl"], connection["port"], connection["host"]) == (False, ours["port"], LOOPBACK)
    assert connection["client_properties"]["product"] == other["client_properties"]["product"]
    consumer = ours["consumers"]
    for word in ("consumer_tag", "ack_required", "exclusive", "active", "activity_status", "queue"):
        assert consumer[word] == theirs["consumers"][word], word
    assert consumer["channel_details"].keys() == theirs["consumers"]["channel_details"].keys()
    assert ours["policies"] == theirs["policies"]
    assert ours["bindings"].keys() == theirs["bindings"].keys()
    listener = next(one for one in ours["overview"]["listeners"] if one["protocol"] == "amqp")
    assert listener["port"] == ours["port"]
    assert theirs["overview"]["listeners"][0].keys() <= listener.keys()
    assert ours["queues/%2F/orders"]["consumer_details"][0]["consumer_tag"] == "taken"
