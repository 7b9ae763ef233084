"""HTTP over a real socket: what Kubernetes, Prometheus and a browser are told."""

from __future__ import annotations

import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from types import SimpleNamespace

import httpx
import pytest
import trio

from gateway.admin import AdminState, Readiness, serve
from gateway.admin.dead_letters import shown
from gateway.admin.status import status
from gateway.broker.dead_letters import Letter
from gateway.broker.outbox.outbox import OutboxState
from gateway.errors import ConfigurationError
from gateway.model.outcome import ACCEPTED
from gateway.settings import Http
from gateway.store.writer import Figures
from tests.broker.parts import mqtt
from tests.operator import admitting
from tests.telemetry.samples import metrics_with_traffic

LOOPBACK = "127.0.0.1"


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[httpx.AsyncClient, Readiness]]:
    readiness = Readiness()
    admission, headers = admitting()
    state = AdminState(metrics_with_traffic(), readiness, admission)
    async with trio.open_nursery() as nursery:
        port = await nursery.start(serve, Http(host=LOOPBACK, port=0), state)
        url = f"http://{LOOPBACK}:{port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, headers=headers) as client:
            yield client, readiness
        nursery.cancel_scope.cancel()


async def test_a_process_is_alive_before_it_is_ready() -> None:
    async with serving() as (client, readiness):
        readiness.require("listener mqtt")
        readiness.require("link erp")
        assert (await client.get("/livez")).status_code == 200
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.text) == (
            503,
            "link erp: not started\nlistener mqtt: not started\n",
        )
        readiness.met("listener mqtt")
        readiness.lost("link erp", "connection refused")
        assert (await client.get("/readyz")).text == "link erp: connection refused\n"
        readiness.met("link erp")
        assert (await client.get("/readyz")).status_code == 200
        readiness.drain()
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.text) == (503, "draining\n")


async def test_what_is_known_elsewhere_is_asked_each_time() -> None:
    why = ""
    async with serving() as (client, readiness):
        readiness.watch("store", lambda: why)
        assert (await client.get("/readyz")).status_code == 200
        why = "database or disk is full"
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.text) == (503, "store: database or disk is full\n")
        assert (await client.get("/livez")).status_code == 200
        why = ""
        assert (await client.get("/readyz")).text == "ready\n"


async def test_what_is_not_served_is_counted() -> None:
    async with serving() as (client, _):
        assert (await client.get("/" + "x" * 20_000)).status_code == 431
        text = (await client.get("/metrics")).text
        assert 'gateway_http_refused_total{reason="head_bytes"} 1.0\n' in text
        assert "gateway_http_connections 1.0\n" in text


async def test_metrics_are_prometheus_text() -> None:
    async with serving() as (client, _):
        answer = await client.get("/metrics")
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert 'gateway_link_up{endpoint="erp",protocol="amqp091"} 1.0\n' in answer.text


async def test_status_tells_endpoints_routes_and_frames() -> None:
    async with serving() as (client, readiness):
        readiness.require("link erp")
        document = (await client.get("/api/v1/status")).json()
    assert (document["version"], document["ready"], document["not_ready"]) == (
        "1.2.3",
        False,
        ["link erp: not started"],
    )
    mqtt, erp = document["endpoints"]
    assert (mqtt["kind"], mqtt["connections"], mqtt["messages_in"], mqtt["bytes_in"]) == (
        "listener",
        1,
        5,
        100,
    )
    assert mqtt["latency_secs"] == {"p50": 0.001, "p99": 0.001}
    assert {"version": "5.0", "direction": "in", "frame": "publish", "count": 5} in mqtt["frames"]
    assert (erp["kind"], erp["up"], erp["reconnects"], erp["failures"]) == ("link", True, 2, {"refused": 2})
    (route,) = document["routes"]
    assert (route["source"], route["target"], route["matched"], route["delivered"]) == ("mqtt", "erp", 10, 7)
    assert document["broker"] == {"gateway_queues": 3}


async def test_the_page_needs_nothing_from_elsewhere() -> None:
    async with serving() as (client, _):
        answer = await client.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    addresses = set(re.findall(r"https?://[^\"' )]+", answer.text))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a namespace, which nothing fetches"
    assert "innerHTML" not in answer.text, "names come from users and are never markup"


def test_the_page_reads_only_what_status_says() -> None:
    journal = SimpleNamespace(rows=0, octets=0, dropped=0, errors=0, backlog=0, healthy=True)
    metrics = metrics_with_traffic(store=Figures(), journal=journal)
    document = status(metrics, [], 5.0, 2.0) | {"outboxes": [OutboxState._fields]}
    page = files("gateway.admin").joinpath("page.html").read_text()
    assert document["uptime_secs"] == 3.0
    for key in set(re.findall(r"\bnow\.([a-z_]+)", page)):
        assert key in document
    for key in set(re.findall(r"\broute\.([a-z_]+)", page)):
        assert key in document["routes"][0]
    letter = shown(Letter("1", mqtt(), "up", ACCEPTED, 0.0, False))
    for name, known in (
        ("one", set().union(*document["endpoints"])),
        ("box", document["outboxes"][0]),
        ("letter", letter),
        ("store", document["disks"]["store"]),
        ("journal", document["disks"]["journal"]),
    ):
        found = set(re.findall(rf"\b{name}\.([a-z_]+)", page))
        assert found, name
        for key in found:
            assert key in known, name


@pytest.mark.parametrize("method, path, code", [("GET", "/nothing", 404), ("POST", "/livez", 405)])
async def test_other_requests_are_refused(method: str, path: str, code: int) -> None:
    async with serving() as (client, _):
        assert (await client.request(method, path)).status_code == code


async def test_a_taken_port_is_explained() -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        state = AdminState(metrics_with_traffic(), Readiness(), admitting()[0])
        expected = f"http: cannot listen on {LOOPBACK}:{port}: Address already in use$"
        with pytest.raises(ConfigurationError, match=expected):
            await serve(Http(host=LOOPBACK, port=port), state)
