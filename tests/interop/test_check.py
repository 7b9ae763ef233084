"""`gateway check --connect`: what real brokers say before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gateway.cli.exits import Exit
from gateway.settings import DefaultRoles, MqttRules, Role
from tests.cli.conftest import Run, run
from tests.interop.gateway_fixture import LOOPBACK, running, settings_of
from tests.interop.servers import Mosquitto, RabbitMQ, free_ports

__all__ = ["run"]

ROUTES = """version: 1
routes:
  - name: up
    from: {endpoint: plant, topic: 'plant/#'}
    to: {endpoint: erp, exchange: readings, routing_key: x}
  - name: more
    from: {endpoint: plant, topic: 'secret/#'}
    to: {endpoint: erp, exchange: amq.fanout, routing_key: x}
  - name: down
    from: {endpoint: erp, queue: orders}
    to: {endpoint: mqtt, topic: orders}
"""


def findings(run: Run, folder: Path, links: str) -> tuple[int, dict[str, list[Any]]]:
    (folder / "mapping.yaml").write_text(ROUTES)
    config = folder / "gateway.yaml"
    config.write_text(f"mappings: ['{folder}/mapping.yaml']\nlinks:\n{links}")
    ran = run("check", "--connect", "--json", "-c", str(config))
    told: dict[str, list[Any]] = {}
    for one in json.loads(ran.out)["findings"]:
        told.setdefault(one["code"], []).append((one["severity"], one["line"], one["message"]))
    return ran.code, told


def test_what_brokers_refuse_is_named(run: Run, rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    rabbitmq.control("add_user", "shy", "shy")
    rabbitmq.control("set_permissions", "shy", "", "^amq\\.topic$", ".*")
    own = tmp_path / "mosquitto"
    (nowhere,) = free_ports(1)
    with Mosquitto(own) as mosquitto:
        erp = rabbitmq.url.replace("guest:guest", "shy:shy")
        links = (
            f"  plant: {{urls: ['{mosquitto.url}', 'mqtt://127.0.0.1:{nowhere}'], version: '5.0'}}\n"
            f"  erp: {{url: '{erp}', declare: none}}\n"
        )
        code, told = findings(run, tmp_path, links)
        assert code == Exit.CONFIGURATION
        ((severity, line, text),) = told["unreached"]
        assert (severity, line) == ("error", 3)
        assert text.startswith(f"links.plant: 127.0.0.1:{nowhere}: ")
        refused = sorted(told["forbidden"], key=lambda one: str(one[2]))
        assert [(one[1], one[2].split(": ")[1]) for one in refused] == [
            (4, "publish to the exchange 'amq.fanout'"),
            (4, "the exchange 'readings'"),
            (4, "the queue 'orders'"),
        ]
        assert {one[0] for one in refused} == {"error"}
        assert "ACCESS_REFUSED" in refused[0][2]
        rabbitmq.control("set_permissions", "shy", "", "", "")
        links = f"  plant: {{url: '{mosquitto.url}'}}\n  erp: {{url: '{rabbitmq.url}'}}\n"
        code, told = findings(run, tmp_path, links)
        assert code == Exit.OK
        assert {one[0] for one in told["forbidden"]} == {"note"}, "the link makes what is missing"
        wrong = links.replace("guest:guest", "guest:wrong")
        code, told = findings(run, tmp_path, wrong)
        assert code == Exit.CONFIGURATION
        assert "ACCESS_REFUSED" in told["unreached"][0][2]


def test_a_filter_that_a_broker_refuses_is_named(run: Run, tmp_path: Path) -> None:
    roles = {"device": Role(mqtt=MqttRules(subscribe=("plant/#",)))}
    settings = settings_of(roles=roles, default_roles=DefaultRoles(anonymous=("device",)))
    with running(settings) as gateway:
        link = f"  plant: {{url: 'mqtt://{LOOPBACK}:{gateway.port('mqtt')}'}}"
        mapping = "version: 1\nroutes:\n" + "".join(
            f"  - name: {name}\n    from: {{endpoint: plant, topic: '{name}/#'}}\n"
            "    to: {endpoint: mqtt, topic: x}\n"
            for name in ("plant", "secret")
        )
        (tmp_path / "mapping.yaml").write_text(mapping)
        config = tmp_path / "gateway.yaml"
        config.write_text(f"mappings: ['{tmp_path}/mapping.yaml']\nlinks:\n{link}\n")
        ran = run("check", "--connect", "-c", str(config))
    refused = "links.plant: subscribe to 'secret/#': the server refused the subscription to secret/#"
    assert ran.code == Exit.CONFIGURATION
    assert f"{config}:3:3: error: {refused}: not authorized (0x87) (forbidden)" in ran.out
    assert "'plant/#'" not in ran.out
