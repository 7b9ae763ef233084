"""`gateway status`, `routes` and `links` against a gateway with a link that is up and one that is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.cli.exits import Exit
from gateway.settings import Http
from tests.cli.conftest import Run
from tests.configured import make_link
from tests.ingress.clients import eventually
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of

MAPPING = """version: 1
routes:
  - {name: far, from: {endpoint: mqtt, topic: "far/#"}, to: {endpoint: erp, queue: far}}
  - {name: near, from: {endpoint: mqtt, topic: "near/#"}, to: {endpoint: amqp091, queue: near}}
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("routes")
    (folder / "mapping.yaml").write_text(MAPPING)
    with running() as broker:
        links = {"erp": make_link(url=broker.amqp_url), "lost": make_link(url=f"amqp://{LOOPBACK}:1")}
        settings = settings_of(
            http=Http(host=LOOPBACK, port=0), mappings=(str(folder / "mapping.yaml"),), links=links
        )
        with running(settings) as started:
            yield started


@pytest.fixture
def operate(run: Run, gateway: Running, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("GATEWAY_URL", f"http://{LOOPBACK}:{gateway.gateway.http_port}")
    return run


def cells(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_a_route_is_paused_and_resumed(operate: Run) -> None:
    assert [row[:4] for row in cells(operate("routes", "list").out)[1:]] == [
        ["far", "mqtt", "erp", "running"],
        ["near", "mqtt", "amqp091", "running"],
    ]
    assert operate("routes", "pause", "far").out == "far paused\n"
    assert cells(operate("routes", "list", "--name", "f*").out)[1][3:6] == ["paused,", "0", "held"]
    assert json.loads(operate("routes", "resume", "far", "--json").out) == {"name": "far", "paused": False}
    ran = operate("routes", "pause", "nothing")
    assert (ran.code, ran.out) == (Exit.FAILED, "")
    assert "no route 'nothing'" in ran.err


def test_a_link_is_paused_and_resumed(operate: Run) -> None:
    eventually(lambda: cells(operate("links", "list", "--name", "erp").out)[1][-1] == "up")
    assert "DOWN: " in operate("links", "list", "--name", "lost").out
    assert "mqtt" not in operate("links", "list").out, "listeners are no links"
    assert operate("links", "pause", "erp").out == "erp paused\n"
    assert cells(operate("links", "list", "--name", "erp").out)[1][-1] == "paused"
    assert operate("links", "resume", "erp").out == "erp resumed\n"
    assert operate("links", "resume", "mqtt").code == Exit.FAILED


def test_the_state_is_a_few_lines(operate: Run) -> None:
    eventually(lambda: "1 of 2 up" in operate("status").out)
    ran = operate("status")
    assert ran.code == Exit.OK, "a link that is not required is no reason"
    said = dict(line.split(":", 1) for line in ran.out.splitlines())
    assert said["state"].strip() == "ready"
    assert said["down"].strip() == "lost"
    assert said["routes"].strip() == "2"
    eventually(lambda: "GatewayOptionalLinkDown lost since " in operate("status").out)
    assert "docs/guides/runbook.md#gatewayoptionallinkdown" in operate("status").out
    assert json.loads(operate("status", "--json").out)["ready"]


def test_a_gateway_that_does_not_answer(run: Run, tmp_path: Path) -> None:
    ran = run("status", "--url", f"http://{LOOPBACK}:1")
    assert ran.code == Exit.FAILED
    assert "not the response of a gateway" in ran.err
