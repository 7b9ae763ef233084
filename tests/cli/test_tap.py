"""`gateway tap` against a gateway that carries messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pika
import pytest

from gateway.cli.exits import Exit
from gateway.cli.tap_output import text_of
from gateway.settings import Http
from tests.cli.conftest import Run
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running(settings_of(http=Http(host=LOOPBACK, port=0))) as started:
        yield started


def test_messages_are_shown_as_they_pass(run: Run, gateway: Running) -> None:
    url = f"http://{LOOPBACK}:{gateway.gateway.http_port}"
    taps = gateway.gateway.dispatcher.taps
    connection = pika.BlockingConnection(pika.URLParameters(gateway.amqp_url))
    channel = connection.channel()
    for name in ("watched.1", "other"):
        channel.queue_declare(name)

    def publish() -> None:
        gateway.until(lambda: bool(taps.open))
        for name, body in (("other", b"0"), ("watched.1", b"1"), ("watched.1", b"\xff")):
            channel.basic_publish("", name, body)
        connection.close()

    asked = ("--name", "watched.*", "--endpoint", "amqp091", "--count", "2", "--json", "--url", url)
    with ThreadPoolExecutor(1) as pool:
        published = pool.submit(publish)
        told = run("tap", *asked)
        published.result(20)
    assert told.code == 0, told.err
    first, second = [json.loads(line) for line in told.out.splitlines()]
    assert (first["message"]["body"], first["outcome"], first["route"]) == ("1", "accepted", "")
    assert second["message"]["body_encoding"] == "base64"
    assert text_of(first).splitlines()[1] == "    1"
    assert "(no route, from guest, accepted)" in text_of(first)
    assert text_of(second).endswith("(base64) /w==")
    gateway.until(lambda: not taps.open)


@pytest.mark.parametrize("word", ["route", "endpoint"])
def test_what_there_is_none_of_is_not_waited_for(run: Run, gateway: Running, word: str) -> None:
    url = f"http://{LOOPBACK}:{gateway.gateway.http_port}"
    told = run("tap", f"--{word}", "nosuch", "--url", url)
    assert (told.code, f"unknown {word} 'nosuch'" in told.err) == (Exit.FAILED, True)


def test_a_name_that_a_terminal_would_obey_is_shown_harmlessly() -> None:
    sender = {"client": "evil\x1b[31m", "user": "", "endpoint": "", "address": ""}
    message = {
        "address": "a\nb",
        "sender": sender,
        "body": "x\x07",
        "body_encoding": "utf-8",
        "body_bytes": 5_000,
    }
    told = text_of({"message": message, "route": "r", "endpoint": "m", "outcome": "rejected", "text": "no"})
    assert told == "a\\nb  (r, from evil\\x1b[31m, rejected no)\n    x\\x07 ..."


@pytest.mark.parametrize("url, code", [("nonsense", Exit.USAGE), ("http://127.0.0.1:1", Exit.FAILED)])
def test_where_there_is_no_gateway_that_is_said(run: Run, url: str, code: int) -> None:
    assert run("tap", "--url", url).code == code
