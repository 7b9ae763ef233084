"""HTTP over a real socket: what Kubernetes, Prometheus and a browser are told."""

from __future__ import annotations

import json
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from types import SimpleNamespace

import httpx
import pytest
import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from gateway.admin import AdminState, Readiness, serve
from gateway.admin.events import EventsApi
from gateway.admin.http import HttpServer
from gateway.admin.models import Model
from gateway.admin.page import ConsoleFiles
from gateway.admin.responses import UnavailableError
from gateway.admin.status import status
from gateway.broker.shares import LISTENERS_MAX
from gateway.errors import ConfigurationError
from gateway.operations import every_operation
from gateway.protocols import DIALECTS
from gateway.settings import Http
from gateway.store.writer import Figures
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
        readiness.mark_met("listener mqtt")
        readiness.mark_unmet("link erp", "connection refused")
        assert (await client.get("/readyz")).text == "link erp: connection refused\n"
        readiness.mark_met("link erp")
        assert (await client.get("/readyz")).status_code == 200
        readiness.drain()
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.text) == (503, "draining\n")


@pytest.mark.parametrize(
    "method, path", [("OPTIONS", "/"), ("GET", "/health"), ("HEAD", "/health/"), ("GET", "/readyz/")]
)
async def test_load_balancers_are_answered_as_they_ask(method: str, path: str) -> None:
    async with serving() as (client, readiness):
        readiness.require("listener mqtt")
        assert (await client.request(method, path)).status_code == 503
        readiness.mark_met("listener mqtt")
        assert (await client.request(method, path)).status_code == 200
        assert (await client.get("/livez/")).status_code == 200
        readiness.drain()
        assert (await client.request(method, path)).status_code == 503
        assert (await client.get("/livez/")).status_code == 200


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


async def test_the_console_needs_nothing_from_elsewhere() -> None:
    root = files("gateway.admin") / "console"
    async with serving() as (client, _):
        page = await client.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        login = await client.get("/login", headers={"Authorization": ""})
        assert login.status_code == 200
        names = [one.name for one in root.iterdir() if one.name.endswith((".js", ".css"))]
        names += [f"vendor/{one.name}" for one in (root / "vendor").iterdir()]
        assert {"app.js", "console.css", "vendor/htm.js", "vendor/LICENSES.txt"} <= set(names)
        for name in names:
            answer = await client.get(f"/console/{name}", headers={"Authorization": ""})
            assert answer.status_code == 200, name
            known = {"If-None-Match": answer.headers["etag"]}
            assert (await client.get(f"/console/{name}", headers=known)).status_code == 304
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            if not name.startswith("vendor/"):
                assert "innerHTML" not in answer.text, "names come from users and are never markup"
                assert "http://" not in answer.text
                assert "https://" not in answer.text
        for text in (page.text, login.text):
            assert "<style" not in text
            assert not re.search(r"<script(?! src)", text)
        for wrong in ("/console/", "/console/none.js", "/console/../server.py", "/console/%2e%2e/server.py"):
            assert (await client.get(wrong)).status_code == 404, wrong


def test_the_console_reads_only_what_status_says() -> None:
    store = Figures()
    journal = SimpleNamespace(rows=0, byte_count=0, dropped=0, errors=0, backlog=0, healthy=True)
    metrics = metrics_with_traffic(store=store, journal=journal)
    document = status(metrics, [], 5.0, 2.0) | {"outboxes": [], "alarms": []}
    assert document["uptime_secs"] == 3.0
    root = files("gateway.admin") / "console"
    text = "".join((root / name).read_text() for name in ("app.js", "overview.js"))
    for key in set(re.findall(r"\bstate\??\.([a-z_]+)", text)):
        assert key in document, key
    for name in ("store", "journal"):
        found = set(re.findall(rf"\b{name}\.([a-z_]+)", text))
        assert found
        assert found <= document["disks"][name].keys()


def test_the_console_names_only_what_there_is() -> None:
    """Fields of rows, and paths, as the views of the console say them."""
    root = files("gateway.admin") / "console"
    text = "".join(one.read_text() for one in root.iterdir() if one.name.endswith(".js"))
    fields = {name for model in Model.__subclasses__() for name in model.model_fields}
    fields |= {"source_endpoint", "source_name", "target_name", "shard", "sequence", "client", "body_size"}
    fields |= {"target_endpoint", "outcome", "reason", "received", "route", "failing"}
    assert set(re.findall(r"\brow\.([a-z_0-9]+)", text)) <= fields
    paths = set(re.findall(r'(?:get|post)\("([a-z/-]+)"', text)) | set(re.findall(r'path="([a-z/-]+)"', text))
    assert {"queues/peek", "mappings/explain", "routes"} <= paths
    assert paths <= {one.path[1:] for one in every_operation()}
    words = {one.path[1:]: one.words for one in every_operation()}
    filters = re.findall(r'path="([a-z/-]+)"[^>]*?filters=\$\{\[\[(.*?)\]\]\}', text, re.DOTALL)
    assert len(filters) > 5
    for path, chosen in filters:
        assert set(re.findall(r'(?:^|\[)"([a-z_]+)"', chosen)) <= words[path].keys(), path


def test_the_console_offers_the_texts_that_words_may_be() -> None:
    request = Request({"type": "http", "method": "GET", "headers": []})
    script = bytes(ConsoleFiles().file(request, "words.js").body).decode()
    offered = json.loads(script.removeprefix("export const TEXTS = ").rstrip(";\n"))
    assert offered["queues"] == {
        "protocol": ["amqp091", "amqpfast"],
        "kind": ["queue", "subscription"],
        "empty": ["true", "false"],
        "in_use": ["true", "false"],
        "exact": ["true", "false"],
        "sort": ["name", "messages"],
        "history": ["true", "false"],
    }
    assert offered["connections"]["protocol"] == list(DIALECTS)


async def test_the_state_is_told_again_and_again_to_who_may_hear_it() -> None:
    admission, headers = admitting()
    events = EventsApi(admission, lambda: {"at": 1}, each_secs=0.01)
    listen, _ = events.operations()
    app = Starlette(routes=[Route("/events", admission.with_admission_control(listen.serve))])
    listening = socket.create_server((LOOPBACK, 0))
    listening.setblocking(False)
    server = HttpServer(app, Http(host=LOOPBACK, port=0), Counter())
    port = listening.getsockname()[1]
    shown = f"Authorization: {headers['Authorization']}\r\n"

    async def asked(method: str, more: str) -> trio.SocketStream:
        stream = await trio.open_tcp_stream(LOOPBACK, port)
        await stream.send_all(f"{method} /events HTTP/1.1\r\nHost: here\r\n{more}\r\n".encode())
        return stream

    async def read(stream: trio.SocketStream, until: Callable[[bytes], bool]) -> bytes:
        found = b""
        while not until(found):
            data = await stream.receive_some()
            assert data
            found += data
        return found

    async with trio.open_nursery() as nursery:
        await nursery.start(server.run, listening)
        with trio.fail_after(20):
            async with await asked("GET", "") as stream:
                assert b" 401 " in await read(stream, lambda found: b"authentication required" in found)
            async with await asked("HEAD", shown) as stream:
                head = await read(stream, lambda found: found.endswith(b"\r\n\r\n"))
                assert b"text/event-stream" in head
                assert b"etag" not in head.lower()
            async with await asked("GET", shown) as stream:
                await read(stream, lambda found: found.count(b'event: state\ndata: {"at":1}\n\n') >= 2)
                assert events.streams.count == 1
            while events.streams.count:  # it has gone
                await trio.sleep(0.001)
            async with await asked("GET", shown) as stream:
                await read(stream, lambda found: b"data" in found)
                admission.tokens.revoke("a test")
                await read(stream, lambda found: found.endswith(b"0\r\n\r\n"))
            while events.streams.count:  # its place is free again, a moment after the end was sent
                await trio.sleep(0.001)
        nursery.cancel_scope.cancel()


async def test_only_so_many_listen() -> None:
    admission, _ = admitting()
    events = EventsApi(admission, dict)
    events.streams.add("others", 0, LISTENERS_MAX)
    listen, _ = events.operations()
    caller = SimpleNamespace(principal=SimpleNamespace(name="another"))
    with pytest.raises(
        UnavailableError, match="the maximum of 20 open event streams is reached; close one first"
    ):
        await listen.serve(
            Request({"type": "http", "method": "GET", "headers": [], "state": {"caller": caller}})
        )


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
