"""`gateway publish` and `gateway subscribe` at an AMQP/Fast server."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.cli.amqpfast import commands
from gateway.cli.amqpfast.commands import ProgressLine
from gateway.settings import ListenerSettings
from gateway.settings.amqpfast import FastVirtualHost, PeerService
from tests.cli.conftest import Run
from tests.configured import make_listener
from tests.ingress.amqpfast.client import Fast
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.interop.gateway_process import GatewayProcess


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running() as started:
        yield started


def url(gateway: Running | GatewayProcess, path: str = "/") -> str:
    return f"amqpfast://guest:guest@{LOOPBACK}:{gateway.port('amqpfast')}{path}"


def at(name: str, service: str = "queue") -> tuple[str, ...]:
    return ("--service", service, "--destination", name)


def subscribed(run: Run, gateway: Running | GatewayProcess, name: str, *more: str) -> list[str]:
    ran = run("subscribe", url(gateway), *at(name), *more, "--seconds", "20")
    assert ran.code == 0, ran.err
    return ran.out.splitlines()


def test_a_message_with_what_it_says(run: Run, gateway: Running) -> None:
    said = ("-m", "21.5", "--header", "unit=C", "--content-type", "text/plain", "--qos", "1")
    assert run("publish", url(gateway), *at("q"), *said) == (0, "", "")
    (line,) = subscribed(run, gateway, "q", "--count", "1", "--json")
    found = json.loads(line)
    assert (found["service"], found["destination"], found["body"]) == ("queue", "q", "21.5")
    assert (found["durable"], found["content_type"], found["headers"]) == (
        True,
        "text/plain",
        [["unit", "C"]],
    )


def test_lines_in_transactions(run: Run, gateway: Running) -> None:
    lines = "".join(f"{number}\n" for number in range(7))
    assert run("publish", url(gateway), *at("t"), "--transaction", "3", "-m", lines).code == 0
    found = subscribed(run, gateway, "t", "--transaction", "2", "--count", "5")
    assert found == [f"queue t {number}" for number in range(5)]
    assert subscribed(run, gateway, "t", "--count", "2") == ["queue t 5", "queue t 6"]


@pytest.mark.parametrize("size, taken", [(4, 9), (9, 4), (1, 3), (107, 20), (150, 160)])
def test_what_a_transaction_had_no_use_for_is_still_there(
    run: Run, gateway: Running, size: int, taken: int
) -> None:
    name = f"t{size}.{taken}"
    lines = "".join(f"{number}\n" for number in range(taken + 15))
    assert run("publish", url(gateway), *at(name), "--transaction", "50", "-m", lines).code == 0
    found = subscribed(run, gateway, name, "--transaction", str(size), "--count", str(taken))
    assert found == [f"queue {name} {number}" for number in range(taken)]
    rest = subscribed(run, gateway, name, "--count", "15")
    assert sorted(rest) == sorted(f"queue {name} {number}" for number in range(taken, taken + 15))


def test_browsing_takes_nothing(run: Run, gateway: Running) -> None:
    for body in ("1", "2"):
        run("publish", url(gateway), *at("b"), "-m", body)
    for _ in range(2):
        assert subscribed(run, gateway, "b", "--browse") == ["queue b 1", "queue b 2"]
    assert subscribed(run, gateway, "b", "--browse", "--count", "1") == ["queue b 1"]
    assert subscribed(run, gateway, "b", "--count", "2") == ["queue b 1", "queue b 2"]


def test_a_file_of_any_size(run: Run, gateway: Running, tmp_path: Path) -> None:
    body = os.urandom(5_000_000)
    file = tmp_path / "large.bin"
    file.write_bytes(body)
    ran = run("publish", url(gateway), *at("f"), "--file", str(file))
    assert (ran.code, ran.err) == (0, "large.bin: 5.0 MB sent\n")
    (line,) = subscribed(run, gateway, "f", "--count", "1", "--save", str(tmp_path))
    saved = Path(line.removeprefix("queue f "))
    assert saved.parent == tmp_path
    assert saved.read_bytes() == body


def test_an_upload_goes_on_after_the_server_was_killed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = os.urandom(12_000_000)
    file = tmp_path / "large.bin"
    file.write_bytes(body)
    with GatewayProcess(tmp_path / "gateway") as gateway:
        killed: list[int] = []
        show = ProgressLine.show

        def kill_at_half(line: ProgressLine, done: int, size: int) -> None:
            show(line, done, size)
            if done > size // 2 and not killed:
                killed.append(done)
                gateway.restart()

        monkeypatch.setattr(ProgressLine, "show", kill_at_half)
        ran = run("publish", url(gateway), *at("f"), "--file", str(file), "--timeout", "30")
        assert ran.code == 0, ran.err
        assert killed
        assert "reconnecting" in ran.err
        assert "of them before" in ran.err
        (line,) = subscribed(run, gateway, "f", "--count", "1", "--save", str(tmp_path))
        assert Path(line.removeprefix("queue f ")).read_bytes() == body


def test_a_peer_answers(run: Run, gateway: Running, tmp_path: Path) -> None:
    assert run("publish", url(gateway), *at("echo", "peer"), "-m", "hello") == (0, "peer echo hello\n", "")
    file = tmp_path / "body"
    file.write_bytes(b"from a file")
    ran = run("publish", url(gateway), *at("echo", "peer"), "--file", str(file))
    assert ran == (0, "peer echo from a file\n", "")


def test_bytes_go_through_a_peer(run: Run, gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        socket.create_server((LOOPBACK, 0)) as server,
        running(settings_of(listeners={"amqpfast": tunnel_to(server.getsockname()[1])})) as near,
    ):

        def answer() -> None:
            accepted, _ = server.accept()
            with accepted:
                asked = b""
                while len(asked) < 100_000:
                    asked += accepted.recv(65_536)
                accepted.sendall(b"heard " + asked[-3:])

        answering = threading.Thread(target=answer)
        answering.start()
        read, write = os.pipe()
        monkeypatch.setattr(commands, "STDIN", read)
        writing = threading.Thread(target=lambda: (os.write(write, bytes(99_997) + b"end"), os.close(write)))
        writing.start()
        ran = run("subscribe", url(near), *at("far", "peer"), "--seconds", "20")
        assert (ran.code, ran.out) == (0, "heard end")
        answering.join()
        writing.join()
        ran = run("subscribe", url(near), *at("nobody", "peer"), "--seconds", "20")
        assert "(404)" in ran.err
        os.close(read)


def tunnel_to(port: int) -> ListenerSettings:
    hosts = {"/": FastVirtualHost(peers={"far": PeerService(kind="tcp", host=LOOPBACK, port=port)})}
    return make_listener(protocol="amqpfast", host=LOOPBACK, port=0, virtual_hosts=hosts)


def test_what_is_refused_is_told(run: Run, gateway: Running) -> None:
    ran = run("publish", url(gateway), *at("nobody", "peer"), "-m", "x")
    assert ran.code == 1
    assert ran.err.startswith("not accepted: no peer 'nobody' (404)")
    assert "(402)" in run("publish", url(gateway, "/nowhere"), *at("q"), "-m", "x").err
    nobody = run("publish", f"amqpfast://{LOOPBACK}:1", *at("q"), "-m", "x")
    assert nobody == (1, "", f"{LOOPBACK}:1: Connection refused\n")
    assert "--destination" in run("publish", url(gateway), "-m", "x").err
    assert (
        "service must be one of queue, topic, peer"
        in run("publish", url(gateway), *at("q", "quue"), "-m", "x").err
    )
    assert "no such file: /absent" in run("publish", url(gateway), *at("q"), "--ca-file", "/absent").err


def test_the_wrong_port_is_told_in_one_line(run: Run, gateway: Running, tmp_path: Path) -> None:
    place = f"{LOOPBACK}:{gateway.port('amqp091')}"
    told = (1, "", f"{place}: this server uses AMQP 0-9-1, not AMQP/Fast\n")
    assert run("publish", f"amqpfast://{place}", *at("q"), "-m", "x") == told
    assert run("subscribe", f"amqpfast://{place}", *at("q"), "--count", "1") == told
    file = tmp_path / "body"
    file.write_bytes(b"x")
    assert run("publish", f"amqpfast://{place}", *at("q"), "--file", str(file)) == told


def test_count_is_not_reached_in_time(run: Run, gateway: Running) -> None:
    ran = run("subscribe", url(gateway), *at("empty"), "--count", "1", "--seconds", "0.2")
    assert (ran.code, ran.out) == (1, "")


def test_the_user_may_interrupt(run: Run, gateway: Running) -> None:
    def interrupt() -> None:
        with Fast(gateway).open() as client:
            handle = client.handle("i")
            client.put(handle, b"1")
            while client.index(handle) != ([], 0):
                pass
        signal.raise_signal(signal.SIGINT)

    with_thread = threading.Thread(target=interrupt)
    with_thread.start()
    ran = run("subscribe", url(gateway), *at("i"), "--count", "2", "--seconds", "20")
    with_thread.join()
    assert (ran.code, ran.out) == (0, "queue i 1\n")


def test_a_link_is_no_finding_of_a_check(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"
    mapping = tmp_path / "mapping.yaml"
    mapping.write_text(
        """
version: 1
routes:
  - name: out
    from: {endpoint: mqtt, topic: "a/{rest...}"}
    to: {endpoint: far, service: queue, destination: "{rest}"}
    settle: stored
"""
    )
    config.write_text(f"links: {{far: {{url: 'amqpfast://far/vhost'}}}}\nmappings: ['{mapping}']\n")
    ran = run("check", "--config", str(config))
    assert ran.code == 0, ran.err
    assert ": error: " not in ran.out


def test_selectors(run: Run, gateway: Running) -> None:
    for size in range(4):
        run("publish", url(gateway), *at("s"), "-m", f"{size}", "--header", f"size={size}")
    chosen = ("--selector", "size = '2' OR size = '3'")
    assert subscribed(run, gateway, "s", "--browse", *chosen) == ["queue s 2", "queue s 3"]
    cel = ("--selector", "headers.size == '3'", "--selector-type", "application/cel")
    assert subscribed(run, gateway, "s", "--browse", *cel) == ["queue s 3"]
    assert subscribed(run, gateway, "s", "--count", "2", *chosen) == ["queue s 2", "queue s 3"]
    assert subscribed(run, gateway, "s", "--browse") == ["queue s 0", "queue s 1"]
    one = ("--transaction", "1", "--count", "1", "--selector", "size = '1'")
    assert subscribed(run, gateway, "s", *one) == ["queue s 1"]
    refused = run("subscribe", url(gateway), *at("s"), "--selector", "size = ")
    assert refused.code != 0
    assert "selector" in refused.err


def test_unreliable(run: Run, gateway: Running) -> None:
    """What was sent is gone, shown or not."""
    lines = "".join(f"{number}\n" for number in range(20))
    assert run("publish", url(gateway), *at("u"), "--transaction", "20", "-m", lines).code == 0
    found = subscribed(run, gateway, "u", "--unreliable", "--count", "3")
    assert found == [f"queue u {number}" for number in range(3)]
    assert subscribed(run, gateway, "u", "--browse") == []


@pytest.mark.parametrize(
    "service, more",
    [
        ("peer", ("--selector", "a = 1")),
        ("peer", ("--unreliable",)),
        ("peer", ("--browse",)),
        ("peer", ("--transaction", "2")),
        ("peer", ("--save", ".")),
        ("queue", ("--unreliable", "--browse")),
        ("queue", ("--unreliable", "--transaction", "2")),
        ("queue", ("--browse", "--transaction", "2")),
    ],
)
def test_options_that_do_not_go_together(
    run: Run, gateway: Running, service: str, more: tuple[str, ...]
) -> None:
    assert run("subscribe", url(gateway), *at("echo", service), "--seconds", "5", *more).code == 2


@pytest.mark.parametrize(
    "more", [("--selector", "a = 1"), ("--browse",), ("--transaction", "2"), ("--save", ".")]
)
def test_some_options_are_for_amqpfast_alone(run: Run, gateway: Running, more: tuple[str, ...]) -> None:
    other = f"mqtt://{LOOPBACK}:{gateway.port('mqtt')}"
    assert run("subscribe", other, "--topic", "t", "--seconds", "5", *more).code == 2


def test_publish_ignores_no_option(run: Run, gateway: Running, tmp_path: Path) -> None:
    file = tmp_path / "body"
    file.write_bytes(b"x")
    ran = run("publish", url(gateway), *at("ignored"), "-m", "y", "--file", str(file))
    assert (ran.code, "--message cannot be combined with --file" in ran.err) == (2, True)
    other = f"mqtt://{LOOPBACK}:{gateway.port('mqtt')}"
    assert run("publish", other, "--topic", "t", "--file", str(tmp_path)).code == 2, "a folder has no body"
    ran = run("publish", other, "--topic", "t", "-m", "x", "--transaction", "2")
    assert (ran.code, "--transaction is for AMQP/Fast" in ran.err) == (2, True)
