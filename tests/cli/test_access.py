"""`gateway access explain`, and what `gateway check` says of roles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.cli.exits import Exit
from tests.cli.conftest import Run

KEYS = "SCRAM-SHA-256$4096:AAAAAAAAAAAAAAAAAAAAAA==$" + ":".join(
    ["AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="] * 2
)
CONFIGURATION = f"""
roles:
  device:
    client_id: "{{user}}-*"
    mqtt: {{publish: ["plant/{{user}}/#", "plant/{{user}}/x"], subscribe: "a/#", deny_subscribe: "#"}}
  unused:
    amqp091: {{"/": {{read: "^{{client_id}}"}}, other: {{read: ".*"}}}}
  shop:
    amqp091:
      "/":
        write: "^Shop[.]Contracts:OrderCreated$|^amq[.]default$"
        read: "^(a:b|50%)$"
        topics: {{"Shop.Contracts:OrderCreated": {{write: "^new"}}}}
users:
  shop: {{scram: "{KEYS}", roles: shop}}
  ann: {{scram: "{KEYS}", roles: device}}
  bob: {{scram: "{KEYS}"}}
"""


def configuration(folder: Path, text: str = CONFIGURATION, mapping: str = "") -> str:
    path = folder / "gateway.yaml"
    path.write_text(text)
    if mapping:
        (folder / "mapping.yaml").write_text(mapping)
        path.write_text(f"mappings: ['{folder}/mapping.yaml']\n{text}")
    return str(path)


@pytest.mark.parametrize(
    "question, code, said",
    [
        (
            ("ann", "publish", "mqtt", "plant/ann/1"),
            Exit.OK,
            "yes: roles.device.mqtt.publish: plant/{user}/#",
        ),
        (("ann", "publish", "mqtt", "plant/bob/1"), Exit.FAILED, "no: no rule permits it"),
        (("ann", "subscribe", "mqtt", "a/b"), Exit.FAILED, "no: roles.device.mqtt.deny_subscribe: #"),
        (("ann", "connect", "mqtt", "ann-7"), Exit.OK, "yes: roles.device.client_id: {user}-*"),
        (("ann", "connect", "amqp091", "/"), Exit.FAILED, "no: no rule permits it"),
        (("eve", "read", "amqp091", "q", "--scope", "read:*/q"), Exit.OK, "yes: scope read:*/q.read"),
        (("eve", "publish", "amqp091", "e:k", "--scope", "write:*/e/k*"), Exit.OK, "yes: scope write"),
        (("eve", "write", "amqpfast", "queue:q", "--scope", "write:*/q"), Exit.OK, "yes: scope write:*/q"),
        (
            ("shop", "write", "amqp091", "Shop.Contracts%3AOrderCreated"),
            Exit.OK,
            "yes: roles.shop.amqp091./.write",
        ),
        (
            ("shop", "write", "amqp091", "Shop.Contracts%3AOrderCreated:new.1"),
            Exit.OK,
            "yes: roles.shop.amqp091./.write",
        ),
        (("shop", "write", "amqp091", "Shop.Contracts%3AOrderCreated:old"), Exit.FAILED, "no: no rule"),
        (("shop", "publish", "amqp091", "Shop.Contracts%3AOrderCreated:new.1"), Exit.OK, "yes: roles.shop"),
        (("shop", "write", "amqp091", "Shop.Contracts:OrderCreated"), Exit.FAILED, "no: no rule"),
        (("shop", "read", "amqp091", "a%3Ab"), Exit.OK, "yes: roles.shop.amqp091./.read"),
        (("shop", "read", "amqp091", "a:b"), Exit.FAILED, "no: no rule"),
        (("shop", "read", "amqp091", "50%25"), Exit.OK, "yes: roles.shop.amqp091./.read"),
        (("shop", "write", "amqp091", ":a:b"), Exit.OK, "yes: roles.shop.amqp091./.write"),
        (("shop", "write", "amqp091", ""), Exit.OK, "yes: roles.shop.amqp091./.write"),
        (("eve", "read", "amqp091", "q", "--role", "unused"), Exit.FAILED, "roles: unused"),
        (("ann", "fly", "mqtt", "x"), 2, "mqtt has no action 'fly'"),
        (("ann", "publish", "smtp", "x"), 2, "not a protocol with rules"),
    ],
)
def test_a_question_is_answered(
    tmp_path: Path, run: Run, question: tuple[str, ...], code: int, said: str
) -> None:
    ran = run("access", "explain", *question, "--config", configuration(tmp_path))
    assert ran.code == code
    assert said in " ".join((ran.out + ran.err).replace("│", " ").split())


def test_an_answer_for_programs(tmp_path: Path, run: Run) -> None:
    asked = ("access", "explain", "ann", "publish", "mqtt", "plant/ann", "--json")
    told = json.loads(run(*asked, "--config", configuration(tmp_path)).out)
    assert told == {"allowed": True, "rule": "roles.device.mqtt.publish: plant/{user}/#", "roles": ["device"]}


ROUTES = """version: 1
routes:
  - {name: fed, from: {endpoint: mqtt, topic: "plant/+/{rest...}"}, to: {endpoint: amqp091, exchange: x}}
  - {name: unfed, from: {endpoint: mqtt, topic: "office/#"}, to: {endpoint: amqp091, exchange: x}}
  - {name: asked, role: boss, from: {endpoint: mqtt, topic: "plant/#"}, to: {endpoint: amqp091, exchange: x}}
  - {name: keys, from: {endpoint: amqp091, exchange: x}, to: {endpoint: mqtt, topic: x}}
  - {name: fast, from: {endpoint: amqpfast, service: topic, destination: x}, to: {endpoint: mqtt, topic: x}}
"""


def test_what_is_unwise_in_roles_is_said(tmp_path: Path, run: Run) -> None:
    ran = run("check", "--config", configuration(tmp_path, mapping=ROUTES))
    assert ran.code == Exit.OK
    for said in (
        "warning: users.bob: the user has no role, so every request is denied. Add a role",
        "note: roles.unused: no configured user has this role",
        "note: default_roles.anonymous: no role",
        "warning: roles.device.mqtt.subscribe: 'a/#' never applies",
        "note: roles.device.mqtt.publish: 'plant/{user}/x' is redundant",
        "warning: roles.unused.amqp091.other: no listener serves this virtual host",
        "warning: roles.unused.amqp091./: AMQP clients have no client identifier",
        "warning: route 'unfed': no role permits clients to publish to the route's source address",
        "warning: route 'asked': unknown role 'boss', so no client may publish to the route",
        "warning: route 'keys': no role permits",
        "warning: route 'fast': no role permits",
    ):
        assert said in ran.out
    assert "route 'fed': no role" not in ran.out
    assert "mapping.yaml:4:6: warning: route 'unfed'" in ran.out


def test_users_without_any_role_are_told_of_loudly(tmp_path: Path, run: Run) -> None:
    text = f"users: {{ann: {{scram: '{KEYS}'}}}}\n"
    said = "warning: roles: users are configured but no roles, so EVERY CONNECTED CLIENT MAY DO EVERYTHING"
    assert said in run("check", "--config", configuration(tmp_path, text)).out
    assert "EVERY CONNECTED" not in run("check", "--config", configuration(tmp_path)).out
    assert "EVERY CONNECTED" not in run("check").out
