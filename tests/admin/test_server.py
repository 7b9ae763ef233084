"""HTTP over a real socket: what Kubernetes, Prometheus and a browser are told."""

from __future__ import annotations

import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files

import httpx
import pytest
import trio

from gateway.admin import AdminState, Readiness, serve
from gateway.admin.status import status
from gateway.errors import ConfigurationError
from gateway.settings import Http
from tests.telemetry.samples import metrics_with_traffic

LOOPBACK = "127.0.0.1"


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[httpx.AsyncClient, Readiness]]:
    readiness = Readiness()
    state = AdminState(metrics_with_traffic(), readiness)
    async with trio.open_nursery() as nursery:
        port = await nursery.start(serve, Http(host=LOOPBACK, port=0), state)
        async with httpx.AsyncClient(base_url=f"http://{LOOPBACK}:{port}", trust_env=False) as client:
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


async def test_metrics_are_prometheus_text() -> None:
    async with serving() as (client, _):
        answer = await client.get("/metrics")
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert 'gateway_link_up{endpoint="erp",protocol="amqp091"} 1.0\n' in answer.text


async def test_status_tells_endpoints_routes_and_frames() -> None:
    async with serving() as (client, readiness):
        readiness.require("link erp")
        document = (await client.get("/api/status")).json()
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
    document = status(metrics_with_traffic(), [], 5.0, 2.0)
    page = files("gateway.admin").joinpath("page.html").read_text()
    assert document["uptime_secs"] == 3.0
    for key in set(re.findall(r"\bnow\.([a-z_]+)", page)):
        assert key in document
    for key in set(re.findall(r"\broute\.([a-z_]+)", page)):
        assert key in document["routes"][0]
    known = set().union(*document["endpoints"])
    for key in set(re.findall(r"\bone\.([a-z_]+)", page)):
        assert key in known


@pytest.mark.parametrize("method, path, code", [("GET", "/nothing", 404), ("POST", "/livez", 405)])
async def test_other_requests_are_refused(method: str, path: str, code: int) -> None:
    async with serving() as (client, _):
        assert (await client.request(method, path)).status_code == code


async def test_a_taken_port_is_explained() -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        state = AdminState(metrics_with_traffic(), Readiness())
        with pytest.raises(ConfigurationError, match=f"http: cannot listen on {LOOPBACK}:{port}"):
            await serve(Http(host=LOOPBACK, port=port), state)
