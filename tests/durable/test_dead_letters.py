"""Dead letters of a real gateway: there after it was killed, and the command line that deals with them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import paho.mqtt.client as paho
import pika
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from gateway.cli import main
from tests.durable.outboxes.test_outbox import channel, until, url_of
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import GatewayProcess
from tests.interop.pahos import leave
from tests.interop.servers import free_ports
from tests.operator import bearer

MAPPING = """
version: 1
routes:
  - name: strict
    from: {endpoint: amqp091, exchange: amq.topic, binding_key: "in.{name}"}
    to: {endpoint: amqp091, queue: "{name}"}
    on_reject: dead_letter
"""


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    (tmp_path / "mapping.yaml").write_text(MAPPING)
    (http,) = free_ports(1)
    with GatewayProcess(
        tmp_path,
        mappings=[str(tmp_path / "mapping.yaml")],
        http={"host": LOOPBACK, "port": http},
        dead_letters={"forward": {"endpoint": "amqp091", "queue": "copies"}},
        drain_timeout_secs=1,
    ) as started:
        yield started


def publish(gateway: GatewayProcess, name: str, *bodies: str) -> None:
    said = pika.BasicProperties(
        delivery_mode=2, message_id="id-1", content_type="text/plain", headers={"own": 7}
    )
    with channel(url_of(gateway)) as opened:
        for body in bodies:
            opened.basic_publish("amq.topic", f"in.{name}", body.encode(), said)


def drained(gateway: GatewayProcess, queue: str) -> list[tuple[bytes, Any]]:
    found = []
    with channel(url_of(gateway)) as opened:
        while (got := opened.basic_get(queue, auto_ack=True))[0] is not None:
            found.append((got[2], got[1]))
    return found


Ran = Callable[..., tuple[int, str]]


@pytest.fixture
def ran(gateway: GatewayProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ran:
    """`gateway deadletters ...`: exit code, and what it printed."""

    def command(*arguments: str) -> tuple[int, str]:
        url = f"http://{LOOPBACK}:{gateway.ports['http']}"
        monkeypatch.setattr(sys, "argv", ["gateway", "deadletters", *arguments, "--url", url])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out + captured.err

    return command


def listed(gateway: GatewayProcess) -> list[Any]:
    url = f"http://{LOOPBACK}:{gateway.ports['http']}/api/v1/dead-letters"
    with closing(httpx.Client(trust_env=False, headers=bearer(gateway.ports["http"]))) as client:
        found: list[Any] = client.get(url).json()["items"]
        return found


def test_they_survive_are_shown_driven_again_and_purged(gateway: GatewayProcess, ran: Ran) -> None:
    publish(gateway, "later", "one", "two")
    publish(gateway, "never", "three")
    gateway.restart()

    code, text = ran("list", "--json")
    assert code == 0
    letters = json.loads(text)["items"]
    assert [(one["body"], one["route"], one["reason"]) for one in letters] == [
        ("three", "strict", "no_route"),
        ("two", "strict", "no_route"),
        ("one", "strict", "no_route"),
    ]
    three, two, one = (letter["id"] for letter in letters)
    headings, first = (line.split() for line in ran("list")[1].splitlines()[:2])
    assert headings == ["id", "time", "route", "protocol", "address", "body", "bytes", "reason"]
    assert (first[0], first[2:7]) == (three, ["strict", "amqp091", "amq.topic:in.never", "5", "no_route:"])
    assert len(json.loads(ran("list", "-n", "1", "--json")[1])["items"]) == 1

    code, text = ran("show", one, "--json")
    shown = json.loads(text)
    assert (code, shown["body"], shown["durable"]) == (0, "one", True)
    assert shown["properties"]["message_id"] == "id-1"
    assert "own" in str(shown["properties"]["headers"])
    code, text = ran("show", two)
    assert re.search(r"^route: +strict$", text, re.MULTILINE)
    assert text.endswith("\ntwo\n")
    code, text = ran("show", "999")
    assert (code, "404: no dead letter 999" in text) == (1, True)

    code, text = ran("redrive", one)
    assert code == 1
    assert f"{one}: refused by its target: no_route" in text
    with channel(url_of(gateway)) as opened:
        opened.queue_declare("later", durable=True)
    assert ran("redrive", one) == (0, "1 redriven\n")
    code, text = ran("redrive", "--route", "strict", "--json")
    assert code == 1
    assert (json.loads(text)["redriven"], len(json.loads(text)["left"])) == (1, 1)
    gateway.restart()
    got = drained(gateway, "later")
    assert [body for body, _ in got] == [b"one", b"two"]
    assert (got[0][1].message_id, got[0][1].content_type, got[0][1].headers["own"]) == (
        "id-1",
        "text/plain",
        7,
    )

    assert [letter["id"] for letter in listed(gateway)] == [three]
    assert ran("purge", "--all") == (0, "1 purged\n")
    code, text = ran("purge", three)
    assert (code, "no such dead letter" in text) == (1, True)
    assert ran("list") == (0, "no rows found\n")
    gateway.restart()
    assert listed(gateway) == []


def test_copies_go_to_an_address(gateway: GatewayProcess) -> None:
    with channel(url_of(gateway)) as opened:
        opened.queue_declare("copies", durable=True)
    publish(gateway, "nowhere", "one")
    ((body, properties),) = drained(gateway, "copies")
    assert body == b"one"
    assert properties.headers["x-gateway-reason"] == "no_route"
    assert properties.headers["x-gateway-route"] == "strict"
    assert properties.headers["own"] == 7
    assert (properties.message_id, properties.delivery_mode) == ("id-1", 2)
    assert len(listed(gateway)) == 1


def test_a_wrong_use_or_no_gateway_is_told(gateway: GatewayProcess, ran: Ran, tmp_path: Path) -> None:
    assert ran("purge")[0] == 2
    assert ran("redrive", "1", "--all")[0] == 2
    wrong = tmp_path / "token"
    wrong.write_text("x")
    code, text = ran("purge", "--all", "--token-file", str(wrong))
    assert (code, "401: the token is invalid" in text) == (1, True)
    gateway.kill()
    code, text = ran("list")
    assert (code, "not the response of a gateway" in text) == (1, True)


def test_what_no_one_wanted_is_gone_with_the_process(gateway: GatewayProcess) -> None:
    with channel(url_of(gateway)) as opened:
        opened.basic_publish("amq.topic", "elsewhere", b"x")
    until(lambda: len(listed(gateway)) == 1)
    gateway.restart()
    assert listed(gateway) == []


AT_LEAST_ONCE = {
    "x-queue-type": "quorum",
    "x-overflow": "reject-publish",
    "x-dead-letter-exchange": "amq.direct",
    "x-dead-letter-strategy": "at-least-once",
}


def die_by_rejection(opened: Any) -> None:
    """Reject a message whose dead letter no queue accepts."""
    opened.queue_declare("q", durable=True, arguments=AT_LEAST_ONCE)
    opened.basic_publish("", "q", b"order", pika.BasicProperties(delivery_mode=2))
    method, _, _ = opened.basic_get("q")
    opened.basic_reject(method.delivery_tag, requeue=False)


def die_by_expiry(opened: Any) -> None:
    """Let a message expire whose dead letter no queue accepts."""
    opened.queue_declare("q", durable=True, arguments={**AT_LEAST_ONCE, "x-message-ttl": 1})
    opened.basic_publish("", "q", b"order", pika.BasicProperties(delivery_mode=2))


def become_due(opened: Any) -> None:
    """Publish a delayed message that no queue accepts when it is due."""
    arguments = {"x-delayed-type": "direct"}
    opened.exchange_declare("d", "x-delayed-message", durable=True, arguments=arguments)
    opened.basic_publish("d", "k", b"order", pika.BasicProperties(delivery_mode=2, headers={"x-delay": 50}))


@pytest.mark.parametrize("orderly", [False, True], ids=["killed", "stopped"])
@pytest.mark.parametrize("lose", [die_by_rejection, die_by_expiry, become_due])
def test_what_a_queue_had_accepted_and_no_queue_takes_now_is_on_disk(
    gateway: GatewayProcess, lose: Callable[[Any], None], orderly: bool
) -> None:
    with channel(url_of(gateway)) as opened:
        opened.queue_declare("copies", durable=True)
        lose(opened)
        until(lambda: len(listed(gateway)) == 1)
        opened.queue_declare("written", durable=True)  # answered after a commit
    gateway.terminate() if orderly else gateway.kill()
    gateway.start()
    assert [(one["body"], one["route"], one["reason"]) for one in listed(gateway)] == [
        ("order", "", "no_route")
    ]
    assert [body for body, _ in drained(gateway, "copies")] == [b"order"]


TWO_ROUTES = """
version: 1
routes:
  - name: telemetry
    from: {endpoint: mqtt, topic: "plant/{line}"}
    to: {endpoint: amqp091, queue: telemetry}
  - name: alarms
    from: {endpoint: mqtt, topic: "plant/{line}"}
    to: {endpoint: amqp091, queue: alarms}
"""


def test_redriving_sends_through_the_branch_that_failed_and_counts_what_was_accepted(
    tmp_path: Path, gateway: GatewayProcess, ran: Ran
) -> None:
    """Of a client of MQTT 3.1.1, which cannot be told that one of two routes failed; over a restart."""
    (tmp_path / "mapping.yaml").write_text(TWO_ROUTES)
    gateway.restart()
    with channel(url_of(gateway)) as opened:
        opened.queue_declare("telemetry", durable=True)
    device = paho.Client(CallbackAPIVersion.VERSION2, "device", protocol=paho.MQTTv311)
    device.connect(LOOPBACK, gateway.ports["mqtt"])
    device.loop_start()
    for number in range(50):
        device.publish("plant/1", b"%d" % number, 1).wait_for_publish(20)
    leave(device)
    wanted = [b"%d" % number for number in range(50)]
    until(lambda: len(listed(gateway)) == 50)
    gateway.restart()
    assert {letter["route"] for letter in listed(gateway)} == {"alarms"}
    assert ran("redrive", "--route", "telemetry") == (0, "0 redriven\n")
    code, text = ran("redrive", "--route", "alarms")
    assert (code, text.splitlines()[0]) == (1, "0 redriven, 50 not")
    with channel(url_of(gateway)) as opened:
        opened.queue_declare("alarms", durable=True)
    assert ran("redrive", "--all") == (0, "50 redriven\n")
    assert listed(gateway) == []
    assert sorted(body for body, _ in drained(gateway, "alarms")) == sorted(wanted)
    assert [body for body, _ in drained(gateway, "telemetry")] == wanted, "none of them came twice"


def test_a_letter_of_a_route_that_was_renamed_stays_and_says_why(
    tmp_path: Path, gateway: GatewayProcess, ran: Ran
) -> None:
    publish(gateway, "never", "one")
    until(lambda: len(listed(gateway)) == 1)
    (tmp_path / "mapping.yaml").write_text(MAPPING.replace("strict", "renamed"))
    gateway.restart()
    code, text = ran("redrive", "--all")
    assert (code, text.splitlines()[0]) == (1, "0 redriven, 1 not")
    assert "route 'strict' is in no mapping" in text
    assert [letter["route"] for letter in listed(gateway)] == ["strict"]
