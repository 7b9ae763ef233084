"""Transfers that can be broken off and resumed, both ways (3.3.2.2, 3.5.13, 3.5.14; 7 of the notes)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from gateway.broker.spool import SpoolFile
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.codec import encode_command
from gateway.protocols.amqpfast.events import Prepared
from gateway.protocols.amqpfast.spec import DELIVERED, RECOVERY
from gateway.settings import Limits, StoreSettings, User
from tests.ingress.amqpfast.client import EMPTY, PEER, QUEUE, TOPIC, Fast, head
from tests.ingress.amqpfast.large import MIB, SMALL_MEMORY, Whole, data, sha1
from tests.interop.gateway_fixture import Running, running, settings_of
from tests.passwords import hashed
from tests.protocols.amqpfast.test_closing import kinds

BODY = data(3 * MIB)
SMALL = data(5_000)


@pytest.fixture
def gateway() -> Iterator[Running]:
    """One for each test: what an earlier one has acknowledged may still be on its way out of the spool."""
    with running(settings_of(limits=SMALL_MEMORY)) as started:
        yield started


@pytest.fixture
def client(gateway: Running) -> Iterator[Whole]:
    with Whole(gateway, "c").open(restartable=True) as made:
        yield made


def partials(gateway: Running) -> int:
    return gateway.ask(lambda: len(gateway.gateway.fast_hosts.partials))


def break_off(gateway: Running, at: int, said: bytes = EMPTY, client_name: str = "c") -> None:
    """Send the first `at` bytes of BODY, and lose the connection."""
    spool = gateway.gateway.bodies.spool
    before = gateway.ask(lambda: spool.used_bytes)
    with Whole(gateway, client_name).open(restartable=True) as client:
        handle = client.handle("q")
        assert client.prepare(handle, BODY, said) == 0
        client.resume(handle, BODY, 0, stop=at)
        gateway.until(lambda: spool.used_bytes == before + at)
        client.leave()


def finish(client: Whole, handle: int, body: bytes, at: int, name: str = "") -> None:
    tag = client.machine.new_tag(1)
    client.resume(handle, body, at, tag, name=name)
    assert client.reply()[1:4] == (handle, tag, 200)


USERS = {name: User(password_hash=SecretStr(hashed("right"))) for name in ("ann", "bob")}


@pytest.mark.parametrize("restarted", [False, True])
def test_nobody_resumes_what_another_user_has_begun(tmp_path: Path, restarted: bool) -> None:
    """Whoever did would read the other's bytes: neither on its queue nor on its own, with the client-name of
    the other or without one, before or after a restart."""
    given = settings_of(limits=SMALL_MEMORY, users=USERS, store=StoreSettings(path=tmp_path))
    said = head(identifier="file-1")
    with ExitStack() as first:
        gateway = first.enter_context(running(given))
        spool = gateway.gateway.bodies.spool
        client = first.enter_context(Whole(gateway, "c", user="ann", password="right").open(restartable=True))
        handle = client.handle("q")
        assert client.prepare(handle, BODY, said) == 0
        client.resume(handle, BODY, 0, stop=MIB)
        gateway.until(lambda: spool.used_bytes == MIB)
        client.leave()
        if restarted:
            first.close()
            gateway = first.enter_context(running(given))
        for name, queue in (("c", "own"), ("c", "q"), ("", "own")):
            with Whole(gateway, name, user="bob", password="right").open(restartable=True) as other:
                assert other.prepare(other.handle(queue), BODY, said) == 0
                other.leave()
        with Whole(gateway, "c", user="ann", password="right").open(restartable=True) as again:
            handle = again.handle("q")
            assert again.prepare(handle, BODY, said) == MIB
            finish(again, handle, BODY, MIB)


@pytest.mark.parametrize("digest", [b"", sha1(BODY), bytes.fromhex(sha1(BODY).decode()), sha1(BODY).upper()])
@pytest.mark.parametrize("first", [0, 1_000])
def test_a_new_message(client: Whole, gateway: Running, first: int, digest: bytes) -> None:
    handle = client.handle("q")
    assert client.prepare(handle, BODY, first=first, content_hash=digest) == first
    finish(client, handle, BODY, first)
    assert partials(gateway) == 0
    with Whole(gateway).open() as other:
        other.consume(other.handle("q"))
        assert other.large()[3:] == (EMPTY, BODY, b"q")
        other.ack(1)


def test_it_goes_on_exactly_where_it_broke_off(client: Whole, gateway: Running) -> None:
    client.leave()
    said = head(identifier="file-1")
    break_off(gateway, 1_234_567, said)
    with Whole(gateway, "c").open(restartable=True) as again:
        handle = again.handle()
        assert again.prepare(handle, BODY, said, first=1_000, content_hash=sha1(BODY)) == 1_234_567
        finish(again, handle, BODY, 1_234_567, "q")
        again.consume(again.handle("q", channel=again.channel()), 2)
        assert again.large()[3:] == (said, BODY, b"q")
        again.ack(1, 2)
    assert partials(gateway) == 0


IDENTITY = [
    ("another head", "c", head(identifier="2"), BODY),
    ("another client", "d", EMPTY, BODY),
    ("another size", "c", EMPTY, BODY[:-1]),
]


@pytest.mark.parametrize("what, name, said, body", IDENTITY, ids=[row[0] for row in IDENTITY])
def test_another_message_is_new(what: str, name: str, said: bytes, body: bytes) -> None:
    with running(settings_of(limits=SMALL_MEMORY)) as gateway:
        break_off(gateway, MIB)
        with Whole(gateway, name).open(restartable=True) as client:
            assert client.prepare(client.handle("q"), body, said) == 0
            client.leave()
        with Whole(gateway, "c").open(restartable=True) as client:
            assert client.prepare(client.handle("q"), BODY) == MIB


def test_prepare_may_bring_more_than_is_there() -> None:
    with running(settings_of(limits=SMALL_MEMORY)) as gateway:
        break_off(gateway, 1_000)
        with Whole(gateway, "c").open(restartable=True) as client:
            assert client.prepare(client.handle("q"), BODY, first=3_000) == 3_000


def test_all_of_it_is_there_already(client: Whole, gateway: Running) -> None:
    handle = client.handle("q")
    assert client.prepare(handle, SMALL, first=len(SMALL)) == len(SMALL)
    finish(client, handle, SMALL, len(SMALL))
    client.consume(client.handle("q", channel=client.channel()), 2)
    assert client.bodies(1) == [SMALL]
    client.ack(1, 2)


@pytest.mark.parametrize("at", [0, 1_000])
def test_a_hash_that_does_not_fit_costs_the_handle_and_the_data(
    client: Whole, gateway: Running, at: int
) -> None:
    handle = client.handle("q")
    assert client.prepare(handle, BODY, first=at, content_hash=sha1(BODY[1:])) == at
    client.resume(handle, BODY, at, client.machine.new_tag(1))
    assert client.handle_closed() == (handle, 542)
    handle = client.handle("q")
    assert client.prepare(handle, BODY, content_hash=sha1(BODY)) == 0


@pytest.mark.interpreted
def test_a_transfer_that_the_disk_fails_at_its_end_can_be_resumed(
    client: Whole, gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = client.handle("q")
    assert client.prepare(handle, BODY, content_hash=sha1(BODY)) == 0
    with monkeypatch.context() as failing:
        failing.setattr(SpoolFile, "digest", lambda _: os.stat("/nowhere"))
        client.resume(handle, BODY, 0, client.machine.new_tag(1))
        assert client.channel_closed()[1] == 506
    second = client.channel(restartable=True)
    handle = client.handle("q", channel=second)
    assert client.prepare(handle, BODY, content_hash=sha1(BODY)) == len(BODY)
    tag = client.machine.new_tag(second)
    client.resume(handle, BODY, len(BODY), tag)
    assert client.reply()[1:4] == (handle, tag, 200)
    assert partials(gateway) == 0


def test_what_was_refused_is_not_sent_twice(client: Whole, gateway: Running) -> None:
    handle = client.handle("q")
    assert client.prepare(handle, BODY) == 0
    client.resume(handle, BODY, 0, client.machine.new_tag(1), name="/")
    assert client.handle_closed() == (handle, 502)
    handle = client.handle("q")
    assert client.prepare(handle, BODY) == len(BODY)
    finish(client, handle, BODY, len(BODY))
    with Whole(gateway).open() as other:
        other.consume(other.handle("q"))
        assert other.large()[4] == BODY
        other.ack(1)


def test_it_may_begin_anew_after_ready(client: Whole, gateway: Running) -> None:
    handle = client.handle("q")
    assert client.prepare(handle, BODY, first=1_000) == 1_000
    client.put_large(handle, BODY)
    assert partials(gateway) == 0
    assert client.prepare(handle, BODY) == 0
    client.put(handle, b"another")
    client.machine.close_handle(handle)
    client.flush()
    with Whole(gateway).open() as other:
        other.consume(other.handle("q"))
        assert other.large()[4] == BODY
        assert other.bodies(1) == [b"another"]
        other.ack(2)


def test_the_same_message_twice_at_once(client: Whole, gateway: Running) -> None:
    second = client.channel(restartable=True)
    one, other = client.handle("q"), client.handle("q", channel=second)
    assert client.prepare(one, BODY, first=500) == 500
    assert client.prepare(other, BODY) == 0
    tag = client.machine.new_tag(second)
    client.resume(other, BODY, 0, tag)
    assert client.reply()[1:4] == (other, tag, 200)
    finish(client, one, BODY, 500)
    client.consume(client.handle("q", channel=client.channel()), 3)
    assert [client.large()[4] for _ in range(2)] == [BODY, BODY]
    client.ack(2, 3)


def test_a_client_without_a_name_is_nobody_tomorrow(gateway: Running) -> None:
    with Whole(gateway).open(restartable=True) as client:
        handle = client.handle("q")
        assert client.prepare(handle, BODY, first=1_000) == 1_000
        client.machine.close_handle(handle)
        client.flush()
        assert client.prepare(client.handle("q"), BODY) == 1_000
        client.leave()
    gateway.until(lambda: not len(gateway.gateway.fast_hosts.partials))


FAULTS = [
    ("no restartable channel", False, b"", 503),
    ("a content-hash that is none", True, b"abc", 502),
    ("a content-hash that is no hexadecimal", True, b"x" * 40, 502),
]


@pytest.mark.parametrize("what, restartable, digest, code", FAULTS, ids=[row[0] for row in FAULTS])
def test_faults(gateway: Running, what: str, restartable: bool, digest: bytes, code: int) -> None:
    with Whole(gateway).open(restartable=restartable) as client:
        handle = client.handle("q")
        if restartable:
            client.machine.prepare(handle, EMPTY, len(BODY), b"", digest)
            client.flush()
            assert client.handle_closed() == (handle, code)
        else:
            client.machine._handles[handle].channel.restartable = True
            client.machine.prepare(handle, EMPTY, len(BODY))
            client.flush()
            assert client.channel_closed() == (1, code)


def test_recovery_without_ready(gateway: Running) -> None:
    with Whole(gateway).open(restartable=True) as client:
        handle = client.handle("q")
        client.resume(handle, BODY, 0)
        assert client.handle_closed() == (handle, 503)


FORGOTTEN = [
    ("too many", {"fast_partials_max": 1}),
    ("too much", {"fast_partial_bytes_max": MIB + 1_000}),
    ("too old", {"fast_partial_age_secs": 0.3}),
]


@pytest.mark.parametrize("what, limits", FORGOTTEN, ids=[row[0] for row in FORGOTTEN])
def test_what_nobody_resumes_is_forgotten(what: str, limits: dict[str, Any]) -> None:
    with running(settings_of(limits=Limits(fast_memory_bytes_max=MIB, **limits))) as gateway:
        spool = gateway.gateway.bodies.spool
        break_off(gateway, MIB, head(identifier="1"))
        left = 0
        if what != "too old":
            left = 2_000
            break_off(gateway, left, head(identifier="2"))
        gateway.until(lambda: spool.used_bytes == left)
        with Whole(gateway, "c").open(restartable=True) as client:
            assert client.prepare(client.handle("q"), BODY, head(identifier="1")) == 0
            assert client.prepare(client.handle("q"), BODY, head(identifier="2")) == left


def test_a_transaction_that_is_rolled_back_may_be_resumed(gateway: Running) -> None:
    with Whole(gateway, "t").open(restartable=True, transacted=True) as client:
        handle = client.handle("q")
        assert client.prepare(handle, BODY) == 0
        finish(client, handle, BODY, 0)
        assert client.ask(m.ChannelRollback(1))[3] == 200
        assert client.prepare(handle, BODY) == len(BODY)
        finish(client, handle, BODY, len(BODY))
        assert client.ask(m.ChannelCommit(1))[3] == 200
        assert partials(gateway) == 0
        client.consume(client.handle("q", channel=client.channel()), 2)
        assert client.large()[4] == BODY
        client.ack(1, 2)


# From the gateway to a client, which asked for it by opening the channel so.


@pytest.mark.parametrize("held", [0, 2_000_000, len(BODY)])
def test_the_gateway_prepares_and_goes_on_where_the_client_is(gateway: Running, held: int) -> None:
    said = head(identifier="f")
    with Whole(gateway).open() as producer, Whole(gateway).open(restartable=True) as client:
        producer.put_large(producer.handle("q"), BODY, said)
        producer.put(producer.handle("q"), b"behind it")
        client.consume(client.handle("q"))
        row = client.large(ready=held)
        assert row[1:] == (1, DELIVERED | RECOVERY, said, BODY[held:], b"q")
        assert client.bodies(1) == [b"behind it"]
        client.ack(2)


HASHES = {
    "lower case": (sha1(BODY), sha1(BODY)),
    "upper case": (sha1(BODY).upper(), sha1(BODY)),
    "raw bytes": (bytes.fromhex(sha1(BODY).decode()), sha1(BODY)),
    "none": (b"", b""),
}


@pytest.mark.parametrize("said, heard", HASHES.values(), ids=HASHES)
def test_the_gateway_prepares_with_the_content_hash_that_it_has_checked(
    gateway: Running, said: bytes, heard: bytes
) -> None:
    with (
        Whole(gateway).open(restartable=True) as producer,
        Whole(gateway).open(restartable=True) as client,
    ):
        handle = producer.handle("q")
        at = producer.prepare(handle, BODY, content_hash=said)
        producer.resume(handle, BODY, at, tag := producer.machine.new_tag(1))
        assert producer.reply()[1:4] == (handle, tag, 200)
        client.consume(client.handle("q"))
        prepared = client.next(Prepared)
        assert prepared.content_hash == heard
        client.machine.ready(prepared.handle, len(BODY))
        client.flush()
        assert client.large()[4] == b""
        client.ack(1)


def test_what_was_prepared_and_never_sent_goes_to_another(gateway: Running) -> None:
    with Whole(gateway).open() as producer, Whole(gateway).open(restartable=True) as client:
        producer.put_large(producer.handle("q"), BODY)
        handle = client.handle("q")
        client.consume(handle)
        assert client.next(Prepared).body_size == len(BODY)
        client.machine.close_handle(handle)
        client.flush()
        producer.consume(producer.handle("q"))
        assert producer.large()[4] == BODY
        producer.ack(1)


def test_a_handle_may_be_closed_behind_its_ready(gateway: Running) -> None:
    with Whole(gateway).open() as producer, Whole(gateway).open(restartable=True) as client:
        source = producer.handle("q")
        producer.put_large(source, BODY)
        handle, other = client.handle("q"), client.handle("other")
        client.consume(handle)
        prepared = client.next(Prepared)
        client.machine.ready(prepared.handle, 0)
        client.machine.close_handle(handle)
        client.flush()
        client.put(other, b"the channel goes on")
        producer.consume(source)
        assert producer.large()[4] == BODY
        producer.ack(1)


def answers_to(client: Fast, *commands: m.Command, before: bytes = b"") -> list[str]:
    """Names of the commands that follow these, sent in one write, up to the reply of a new channel.

    `before` is sent before them.
    """
    client.send(before + b"".join([encode_command(one) for one in (*commands, m.ChannelOpen(9, 99))]))
    received = b""
    while "channel.reply" not in (found := kinds(received)):
        received += client.sock.recv(65_536)
    return found


@pytest.mark.parametrize("is_prepared", [True, False])
def test_a_closed_handle_sends_nothing_under_its_reused_number(gateway: Running, is_prepared: bool) -> None:
    body = BODY if is_prepared else SMALL
    with Whole(gateway).open() as producer, Whole(gateway).open(restartable=True) as client:
        source, handle = producer.handle("q"), client.handle("q")
        if is_prepared:
            client.consume(handle)
            producer.put_large(source, body)
            client.next(Prepared)
            last: m.Command = m.HandleReady(handle)
        else:
            producer.put(source, body)
            last = m.HandleConsume(handle, prefetch=1)
        tag = 7 if is_prepared else 0  # a reply that is due would hold what CONSUME delivers
        again = m.HandleOpen(1, handle, QUEUE, tag, producer=True, dest_name="other")
        found = answers_to(client, last, m.HandleClose(handle), again)
        assert found == ["handle.close", *["handle.reply"][:tag], "channel.reply"]
        producer.consume(source)
        assert (producer.large()[4] if is_prepared else producer.bodies(1)[0]) == body
        producer.ack(1)


def test_a_refusal_does_not_close_the_next_handle_of_that_number(gateway: Running) -> None:
    with Fast(gateway).open() as client:
        handle = client.handle("t", TOPIC)
        refused = m.HandleCancel(handle, 6, identifier="unknown")
        again = m.HandleOpen(1, handle, QUEUE, 7, producer=True, dest_name="q")
        assert answers_to(client, refused, m.HandleClose(handle), again) == [
            "handle.close",
            "handle.reply",
            "channel.reply",
        ]


def test_a_peer_begins_no_stream_under_the_reused_number_of_its_handle(gateway: Running) -> None:
    with Fast(gateway).open() as client:
        handle = client.handle("echo", PEER)
        fragment = bytes(4) + EMPTY + b"one"
        send = encode_command(m.HandleSend(handle, 0, len(fragment), partial=True, streaming=True))
        again = m.HandleOpen(1, handle, PEER, 7, producer=True, dest_name="echo")
        found = answers_to(client, m.HandleClose(handle), again, before=send + fragment)
        assert found == ["handle.close", "handle.reply", "channel.reply"]


def test_small_messages_are_not_prepared(gateway: Running) -> None:
    with Fast(gateway).open(restartable=True) as client:
        handle = client.handle("q")
        client.put(handle, SMALL)
        client.consume(handle)
        assert client.bodies(1) == [SMALL]
        client.ack(1)


def test_ready_for_nothing_costs_the_connection(gateway: Running) -> None:
    with Fast(gateway).open(restartable=True) as client:
        handle = client.handle("q")
        client.send(bytes((0, 8, 44)) + handle.to_bytes(2, "big") + bytes(4) + b"\xce")
        assert client.closed() == 503


def test_metrics_tell_of_the_spool_and_of_transfers(gateway: Running) -> None:
    def told() -> dict[str, float]:
        found = gateway.gateway.metrics.broker()
        return {name: value for name, value in found.items() if "spool" in name or "partial" in name}

    none = gateway.ask(told)
    break_off(gateway, 2_000)
    with Whole(gateway, "other").open() as client:
        client.write(client.transfer(client.handle("q"), SMALL), SMALL[:10], last=False)
        gateway.until(lambda: gateway.gateway.bodies.spool.reserved_bytes > 0)
        assert gateway.ask(told) == {
            "gateway_spool_bytes": 2_000,
            "gateway_spool_files": 1,
            "gateway_spool_held_bytes": len(SMALL),
            "gateway_partial_transfers": 1,
            "gateway_partial_transfers_bytes": 2_000,
        }
    assert set(none.values()) == {0}
