"""`gateway clients`: what an operator sees, and what clients of each protocol hear."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from gateway.cli.exits import Exit
from gateway.protocols.amqp091.events import Closed
from gateway.protocols.mqtt.packets import Disconnect, Will
from gateway.protocols.mqtt.spec import Property, ReasonCode, Version
from gateway.settings import Http
from tests.cli.conftest import Run
from tests.ingress.amqp_client import Amqp
from tests.ingress.amqpfast.client import Fast
from tests.ingress.clients import Raw, connect, eventually
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running(settings_of(http=Http(host=LOOPBACK, port=0))) as started:
        yield started


def at(gateway: Running) -> tuple[str, str]:
    return "--url", f"http://{LOOPBACK}:{gateway.gateway.http_port}"


def test_they_are_listed(run: Run, gateway: Running) -> None:
    with connect(gateway, "device")[0] as client, connect(gateway, "other")[0]:
        host, port = client.sock.getsockname()
        ran = run("clients", "list", *at(gateway), "--client", "device")
        assert [line.split() for line in ran.out.splitlines()] == [
            ["endpoint", "protocol", "address", "client", "user"],
            ["mqtt", "mqtt", f"{host}:{port}", "device", "-"],
        ]
        assert run("clients", "list", *at(gateway), "-n", "1").out.splitlines()[2:] == ["and 1 more"]
        found = json.loads(run("clients", "list", *at(gateway), "--endpoint", "mqtt", "--json").out)
        assert [one["client"] for one in found["items"]] == ["device", "other"]
    assert run("clients", "list", *at(gateway), "--user", "nobody").out == "no rows found\n"


def test_who_floods_is_first(run: Run, gateway: Running) -> None:
    with connect(gateway, "calm")[0], connect(gateway, "floods")[0] as client:
        ended = threading.Event()

        def flood() -> None:
            while not ended.wait(0.01):
                client.publish("a", b"x" * 1_000)

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            found = run("clients", "list", *at(gateway), "--sort", "bytes_in", "--limit", "1")
        finally:
            ended.set()
            thread.join()
        headings, first, more = found.out.splitlines()
    assert headings.split() == ["endpoint", "protocol", "address", "client", "user", "bytes_in", "bytes_out"]
    assert first.split()[3] == "floods"
    assert float(first.split()[5]) > 1_000.0
    assert more == "and 1 more"


def test_an_mqtt_5_client_hears_0x98_and_leaves_its_will_and_its_session(run: Run, gateway: Running) -> None:
    said = {Property.SESSION_EXPIRY_INTERVAL: 600}
    with connect(gateway, "reader")[0] as reader:
        reader.subscribe("wills/#")
        with connect(gateway, "device", will=Will("wills/d", b"gone"), properties=said)[0] as client:
            ran = run("clients", "disconnect", *at(gateway), "--client", "device")
            assert (ran.code, ran.out) == (Exit.OK, "1 disconnected\n")
            assert client.next(Disconnect).reason == ReasonCode.ADMINISTRATIVE_ACTION
            assert client.closed()
        assert reader.body() == b"gone"
        again, connack = connect(gateway, "device", clean=False)
        with again:
            assert connack.session_present


def test_clients_of_older_versions_and_silent_ones_see_the_connection_end(run: Run, gateway: Running) -> None:
    with connect(gateway, "old", version=Version.V311)[0] as client:
        run("clients", "disconnect", *at(gateway), "--client", "old")
        assert client.rest() == b""
    with Raw(gateway.mqtt) as silent:
        listener = gateway.gateway.listeners["mqtt"]
        eventually(lambda: len(listener.connections) == 1)
        host, port = silent.sock.getsockname()
        assert run("clients", "disconnect", *at(gateway), "--address", f"{host}:{port}").code == Exit.OK
        assert silent.rest() == b""


def test_an_amqp_client_hears_320(run: Run, gateway: Running) -> None:
    with Amqp(gateway).open() as client:
        choice = ("--user", "guest", "--endpoint", "amqp091")
        assert run("clients", "disconnect", *at(gateway), *choice, "--json").out == '{"disconnected":1}\n'
        closed = client.next(Closed)
        assert (closed.reply_code, closed.text.split(" - ")[1]) == (
            320,
            "an operator disconnected this client",
        )


def test_an_amqp_fast_client_hears_507(run: Run, gateway: Running) -> None:
    with Fast(gateway, "billing").open() as client:
        assert run("clients", "disconnect", *at(gateway), "--client", "billing").code == Exit.OK
        assert client.closed() == 507


def test_nobody_is_a_failure_and_no_choice_a_usage_error(run: Run, gateway: Running) -> None:
    ran = run("clients", "disconnect", *at(gateway), "--client", "nobody")
    assert (ran.code, ran.out) == (Exit.FAILED, "0 disconnected\n")
    assert run("clients", "disconnect", *at(gateway)).code == Exit.USAGE
