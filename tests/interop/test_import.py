"""`gateway import`: what people have becomes a configuration that `gateway check` finds nothing wrong with,
and that does what the broker did."""

from __future__ import annotations

import json
import stat
import threading
from pathlib import Path
from typing import Any

import paho.mqtt.client as mqtt
import pika
import yaml
from paho.mqtt.enums import CallbackAPIVersion

from gateway.cli.exits import Exit
from gateway.settings import load_settings
from tests.cli.conftest import Run, run
from tests.interop.gateway_fixture import LOOPBACK, running
from tests.interop.servers import Mosquitto, RabbitMQ, free_ports

__all__ = ["run"]

ACL = """topic read $SYS/#
user ann
topic write plant/+/t
topic deny plant/secret/t
pattern readwrite own/%u/%c/#
"""


def connected(port: int, name: str, topic_filter: str) -> tuple[mqtt.Client, list[str]]:
    """A client, and the topics of what it receives."""
    heard: list[str] = []
    ready = threading.Event()
    client = mqtt.Client(CallbackAPIVersion.VERSION2, name)
    client.on_message = lambda _c, _u, message: heard.append(message.topic)
    client.on_subscribe = lambda *_: ready.set()
    client.connect(LOOPBACK, port)
    client.subscribe(topic_filter, 1)
    client.loop_start()
    assert ready.wait(20)
    return client, heard


def test_mosquitto_with_a_bridge(run: Run, tmp_path: Path) -> None:
    port, other = free_ports(2)
    (tmp_path / "acl").write_text(ACL)
    (tmp_path / "passwords").write_text("ann:$7$101$abc$def\n")
    with Mosquitto(tmp_path / "far") as far:
        lines = f"""# ours
per_listener_settings false
max_inflight_messages 50
max_packet_size 100000
persistence false
log_dest none
listener {port} {LOOPBACK}
allow_anonymous true
connection far away
address {LOOPBACK}:{far.port}
remote_clientid bridge-1
topic up/# out 1
topic line/+/t in 1 "" remote/
topic "" both 1 exact exact
"""
        conf = tmp_path / "mosquitto.conf"
        conf.write_text(lines)
        bridge = lines[lines.index("connection") :].splitlines()
        with Mosquitto(tmp_path / "same", bridge):
            pass  # it is what Mosquitto takes
        ran = run("import", "mosquitto", str(conf), "--to", str(tmp_path / "made"))
        assert (ran.code, ran.err) == (Exit.OK, "")
        made = tmp_path / "made" / "gateway.yaml"
        assert stat.S_IMODE(made.stat().st_mode) == 0o600
        checked = run("check", "-c", str(made))
        assert (checked.code, ": error: " in checked.out) == (Exit.OK, False), checked.out
        assert "already" in run("import", "mosquitto", str(conf), "--to", str(tmp_path / "made")).err
        settings = load_settings(made, {"GATEWAY_HTTP__ENABLED": "false"})
        assert (settings.limits.inflight_max, settings.store.enabled) == (50, False)
        assert settings.links["far-away"].qos == 1
        with running(settings) as gateway:
            assert gateway.port("mqtt") == port
            gateway.until(lambda: all(link.is_up for link in gateway.gateway.links.values()))
            there, heard_there = connected(far.port, "there", "#")
            here, heard_here = connected(port, "here", "#")
            here.publish("up/a/b", "1", 1).wait_for_publish(10)
            here.publish("other", "1", 1).wait_for_publish(10)
            gateway.until(lambda: "up/a/b" in heard_there)
            there.publish("remote/line/7/t", "2", 1).wait_for_publish(10)
            there.publish("exact", "3", 1).wait_for_publish(10)
            gateway.until(lambda: {"line/7/t", "exact"} <= set(heard_here))
            assert "other" not in heard_there
            for one in (there, here):
                one.disconnect()
                one.loop_stop()
    conf.write_text(
        f"listener {port}\nprotocol websockets\nlistener {other}\nacl_file {tmp_path}/acl\n"
        f"password_file {tmp_path}/passwords\nauth_plugin x.so\nconnection b\ntopic # both\n"
    )
    ran = run("import", "mosquitto", str(conf), "--to", str(tmp_path / "made"), "--force")
    assert ran.code == Exit.FAILED
    for said in (
        f"{conf}:6:1: warning: auth_plugin is not supported and was not imported (untaken)",
        f"{conf}:7:1: error: connection b: no address is set (invalid)",
        (
            f"{conf}:5:1: warning: user ann: Mosquitto's password hash cannot be"
            f" imported; set users.ann.password_hash"
        ),
        f"{tmp_path}/acl:2:1: note: user ann needs the role 'ann'; add it to users.ann.roles (role)",
        f"{conf}:1:1: note: WebSocket is served only at the path /mqtt (otherwise)",
    ):
        assert said in ran.out, ran.out
    document = yaml.safe_load(made.read_text())
    assert document["roles"] == {
        "anonymous": {"mqtt": {"subscribe": ["$SYS/#"]}},
        "ann": {
            "mqtt": {
                "publish": ["plant/+/t"],
                "deny_publish": ["plant/secret/t"],
                "deny_subscribe": ["plant/secret/t"],
            }
        },
        "everybody": {
            "mqtt": {"publish": ["own/{user}/{client_id}/#"], "subscribe": ["own/{user}/{client_id}/#"]}
        },
    }
    assert [one["anonymous"] for one in document["listeners"].values()] == ["never", "never"]
    assert run("check", "-c", str(made)).code == Exit.OK


SHOVELS: list[dict[str, Any]] = [
    {
        "component": "shovel",
        "name": "orders out",
        "value": {
            "src-uri": "amqp://",
            "src-exchange": "orders",
            "src-exchange-key": "eu.#",
            "dest-uri": ["amqp://u:p@far:5673/prod", "amqp://u:p@farther/prod"],
            "dest-queue": "orders",
        },
    },
    {
        "component": "shovel",
        "name": "in",
        "value": {"src-uri": "amqp://far", "src-queue": "q", "dest-uri": "amqp:///%2F", "dest-exchange": "e"},
    },
    {
        "component": "shovel",
        "name": "one",
        "value": {"src-protocol": "amqp10", "src-uri": "amqp://far", "dest-uri": "amqp://"},
    },
    {"component": "federation-upstream", "name": "plant", "value": {"uri": "amqps://plant/?cacertfile=x"}},
    {"component": "operator_policy", "name": "limit", "value": {}},
]


def definitions_of_its_own(rabbitmq: RabbitMQ, exported: Path) -> dict[str, Any]:
    """What the broker exports of a virtual host that no other test knows, as if it had no other."""
    rabbitmq.control("add_vhost", "imported")
    rabbitmq.control("set_permissions", "--vhost", "imported", "guest", ".*", ".*", ".*")
    rabbitmq.control(
        "set_policy", "--vhost", "imported", "long", "^o", '{"max-length": 9}', "--apply-to", "queues"
    )
    url = rabbitmq.url.removesuffix("%2F") + "imported"
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.exchange_declare(
            "fed.b", "headers", durable=True, arguments={"alternate-exchange": "amq.fanout"}
        )
        channel.exchange_declare("orders", "topic", durable=True)
        channel.queue_declare("orders", durable=True, arguments={"x-queue-type": "quorum"})
        channel.queue_declare(
            "o.old", durable=True, arguments={"x-max-priority": 3, "x-dead-letter-exchange": ""}
        )
        channel.queue_bind("orders", "orders", "eu.#")
        channel.queue_bind("o.old", "fed.b", arguments={"x-match": "any", "n": 1})
        channel.exchange_bind("orders", "amq.topic", "plant.*")
    rabbitmq.control("export_definitions", str(exported))
    rabbitmq.control("delete_vhost", "imported")
    said: dict[str, Any] = json.loads(exported.read_text())
    for rows in ("queues", "exchanges", "bindings", "policies", "permissions"):
        said[rows] = [one | {"vhost": "/"} for one in said[rows] if one["vhost"] == "imported"]
        assert said[rows], rows
    return said | {"vhosts": [{"name": "/"}], "topic_permissions": [], "parameters": []}


def test_rabbitmqs_definitions(run: Run, rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    exported = tmp_path / "definitions.json"
    said = definitions_of_its_own(rabbitmq, exported)
    queues = said["queues"]
    stream = {"name": "log", "vhost": "/", "durable": True, "arguments": {"x-queue-type": "stream"}}
    said["queues"] = [*queues, stream]
    exported.write_text(json.dumps(said))
    ran = run("import", "rabbitmq", str(exported), "--to", str(tmp_path))
    assert (
        "queue 'log' is a stream, which is not supported; the queue and its bindings were not imported"
        in ran.out
    )
    checked = run("check", "-c", str(tmp_path / "gateway.yaml"))
    assert (checked.code, ": error: " in checked.out) == (Exit.OK, False), checked.out
    for path in (*tmp_path.glob("*.yaml"), tmp_path / "imported-definitions.json"):
        path.unlink()
    said["queues"] = queues
    exported.write_text(json.dumps(said))
    ran = run("import", "rabbitmq", str(exported), "--to", str(tmp_path))
    assert (ran.code, f"next step: gateway check -c {tmp_path}/gateway.yaml" in ran.out) == (Exit.OK, True)
    assert not (tmp_path / "mapping.yaml").exists(), "there is nothing to bridge"
    checked = run("check", "-c", str(tmp_path / "gateway.yaml"))
    assert (checked.code, ": error: " in checked.out) == (Exit.OK, False), checked.out
    said["parameters"] = SHOVELS
    said["exchanges"] = [{"name": "fed.a", "vhost": "/", "type": "topic", "durable": True}]
    said["policies"] = [
        {
            "name": "f",
            "vhost": "/",
            "pattern": "^fed",
            "apply-to": "exchanges",
            "definition": {"federation-upstream-set": "all"},
        }
    ]
    exported.write_text(json.dumps(said))
    ran = run("import", "rabbitmq", str(exported), "--to", str(tmp_path), "--force")
    assert ran.code == Exit.OK
    assert "shovel 'one': src-protocol amqp10 is not supported; the shovel was not imported" in ran.out
    assert "parameter operator_policy 'limit' is not supported and was not imported" in ran.out
    checked = run("check", "-c", str(tmp_path / "gateway.yaml"))
    assert (checked.code, ": error: " in checked.out) == (Exit.OK, False), checked.out
    asked = ("-c", str(tmp_path / "gateway.yaml"), "--json")
    found = json.loads(
        run("explain", "amqp091", "--exchange", "orders", "--routing-key", "eu.de", *asked).out
    )["matches"]
    assert [(one["endpoint"], one["address"]) for one in found] == [("orders-out-dest", ":orders")]
    found = json.loads(run("explain", "plant", "--exchange", "fed.a", "--routing-key", "a.b", *asked).out)[
        "matches"
    ]
    assert [(one["endpoint"], one["address"]) for one in found] == [("amqp091", "fed.a:a.b")]
    found = json.loads(run("explain", "in-src", "--queue", "q", *asked).out)["matches"]
    assert [(one["endpoint"], one["address"]) for one in found] == [("amqp091", "e:q")]
    for text in ("[]", "{", '{"parameters": [1, {"component": "shovel", "value": {}}]}'):
        exported.write_text(text)
        assert (
            "Traceback" not in run("import", "rabbitmq", str(exported), "--to", str(tmp_path), "--force").err
        )
