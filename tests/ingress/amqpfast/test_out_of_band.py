"""Bodies as files in a shared folder (3.3.2, 3.5.3.1; section 7 of the notes)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.ingress.amqpfast.incoming_transfers import IncomingTransfer, IncomingTransfers
from gateway.ingress.amqpfast.shared_folder import PRUNED_MIN, SharedFolder, negotiated_folder
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.events import Fragment
from gateway.protocols.amqpfast.sender import Transfer
from gateway.protocols.amqpfast.spec import DELIVERED, OUT_OF_BAND
from gateway.settings import Limits
from gateway.settings.amqpfast import OutOfBand
from tests.configured import make_listener
from tests.ingress.amqpfast.client import EMPTY, PERSISTENT, Fast
from tests.ingress.amqpfast.large import MIB, Whole, data
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of

BODY = data(3 * MIB)
SMALL = data(5_000)
LIMITS = Limits(fast_memory_bytes_max=MIB, fast_message_bytes_max=4 * MIB)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "shared"
    made.mkdir()
    return made


@pytest.fixture
def gateway(folder: Path) -> Iterator[Running]:
    fast = make_listener(protocol="amqpfast", host=LOOPBACK, port=0, out_of_band=OutOfBand(folder=folder))
    with running(settings_of(limits=LIMITS, listeners={"amqpfast": fast})) as started:
        yield started


@pytest.fixture
def client(gateway: Running, folder: Path) -> Iterator[Whole]:
    with Whole(gateway).open(out_of_band=f"file:{folder}") as made:
        yield made


def framed(body: bytes, head: bytes = EMPTY, size: int | None = None) -> bytes:
    return (len(body) if size is None else size).to_bytes(4, "big") + head + body


def tell(client: Fast, handle: int, *sizes: int, name: str = "") -> int:
    """SEND for fragments that are files."""
    transfer = Transfer(client.machine, handle, b"", 0, name=name.encode(), out_of_band=True)
    tag = client.machine.new_tag(1)
    for at, size in enumerate(sizes, 1):
        last = at == len(sizes)
        transfer.announce_bytes(size, last=last, tag=tag if last else 0)
    client.flush()
    return tag


def test_names_of_messages_that_the_client_has_removed_are_dropped(folder: Path) -> None:
    shared = SharedFolder(folder)
    (folder / "other").write_bytes(b"")
    for number in range(5 * PRUNED_MIN):
        shared.put(number, b"h", b"b")
        if number % 10:
            (folder / f"{number}.notify").unlink()
    assert len(shared._put) <= PRUNED_MIN
    shared.close()
    assert os.listdir(folder) == ["other"]


def test_a_file_that_a_killed_process_has_left_is_replaced(client: Whole, folder: Path) -> None:
    """Its number is that of the next channel's first message, which would never arrive otherwise."""
    (folder / "1.notify").write_bytes(b"left by a killed process")
    handle = client.handle("q")
    client.put_large(handle, BODY, PERSISTENT)
    client.consume(handle)
    assert client.large()[1] == 1
    assert (folder / "1.notify").read_bytes() == framed(BODY, PERSISTENT)


def test_listeners_may_share_a_folder_but_channels_may_not(tmp_path: Path) -> None:
    """Channels in one folder would replace each other's files: the names begin with the same numbers."""
    shared, link = tmp_path / "shared", tmp_path / "link"
    (shared / "own").mkdir(parents=True)
    link.symlink_to(shared)
    listeners = {
        name: make_listener(protocol="amqpfast", host=LOOPBACK, port=0, out_of_band=OutOfBand(folder=folder))
        for name, folder in [("one", shared), ("nested", shared / "own"), ("link", link)]
    }
    with (
        running(settings_of(limits=LIMITS, listeners=listeners)) as gateway,
        Whole(gateway, listener="one").open(out_of_band=f"file:{shared}/own") as first,
    ):
        for listener, path in [("one", shared), ("nested", shared), ("link", link)]:
            with Whole(gateway, listener=listener).open() as other:
                number = other.machine.open_channel(out_of_band=f"file:{path}/own")
                other.flush()
                assert other.channel_closed() == (number, 506)
        first.leave()
        with Whole(gateway, listener="link").open(out_of_band=f"file:{link}/own"):
            pass


def test_a_file_that_is_written_while_its_channel_is_closed_is_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, fdopen = SharedFolder(folder), os.fdopen

    def closing(*args: Any) -> Any:
        shared.close()
        return fdopen(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", closing)
        shared.put(1, b"h", b"b")
    shared.put(2, b"h", b"b")  # begun before the end, and created after it
    assert os.listdir(folder) == []


@pytest.mark.parametrize("body", [b"", SMALL, BODY], ids=["empty", "small", "large"])
@pytest.mark.parametrize("said", [EMPTY, PERSISTENT], ids=["transient", "persistent"])
def test_a_message_is_a_file(client: Whole, gateway: Running, folder: Path, body: bytes, said: bytes) -> None:
    handle = client.handle()
    file = folder / f"{handle}-1.send"
    file.write_bytes(framed(body, said))
    tag = tell(client, handle, file.stat().st_size, name="q")
    client.say(m.HandleFlow(handle))  # what is behind it is done behind it
    assert client.reply()[1:4] == (handle, tag, 200)
    assert not file.exists()
    with Whole(gateway).open() as other:
        other.consume(other.handle("q"))
        row = other.large() if len(body) > MIB else other.rows(1)[0]
        assert row[3:] == (said, body, b"q")


def test_several_fragments_and_messages(client: Whole, gateway: Running, folder: Path) -> None:
    handle = client.handle("q")
    whole = framed(BODY)
    pieces = [whole[:MIB], whole[MIB : 2 * MIB], whole[2 * MIB :], framed(SMALL)]
    for number, piece in enumerate(pieces, 1):
        (folder / f"{handle}-{number}.send").write_bytes(piece)
    tags = [tell(client, handle, *map(len, pieces[:3])), tell(client, handle, len(pieces[3]))]
    assert [client.reply()[2] for _ in tags] == tags
    assert list(folder.iterdir()) == []
    with Whole(gateway).open() as other:
        other.consume(other.handle("q"))
        assert other.large()[4] == BODY
        assert other.bodies(1) == [SMALL]


@pytest.mark.interpreted  # methods are replaced
def test_memory_is_released_once_if_the_client_is_disconnected_while_a_fragment_is_read(
    gateway: Running, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = gateway.gateway.bodies.spool
    connections: list[Any] = []
    reading, may_read, passed_on = threading.Event(), threading.Event(), threading.Event()
    read, beside, pread = IncomingTransfers._read, IncomingTransfers._run_in_thread, os.pread

    def noted_read(self: Any, handle: Any, event: Fragment, descriptor: int) -> IncomingTransfer:
        if not event.first:
            connections.append(self._connection)
        return read(self, handle, event, descriptor)

    def slow_pread(descriptor: int, count: int, at: int) -> bytes:
        if connections:
            reading.set()
            assert may_read.wait(10)
        return pread(descriptor, count, at)

    def noted(self: Any, handle: Any, work: Any, then: Callable[[Any], None], *failed: Any) -> None:
        def after(found: Any) -> None:
            then(found)
            if may_read.is_set():
                passed_on.set()

        beside(self, handle, work, after, *failed)

    monkeypatch.setattr(IncomingTransfers, "_read", noted_read)
    monkeypatch.setattr("gateway.ingress.amqpfast.incoming_transfers.os.pread", slow_pread)
    monkeypatch.setattr(IncomingTransfers, "_run_in_thread", noted)
    whole = framed(SMALL)
    with Whole(gateway).open(out_of_band=f"file:{folder}") as client:
        handle = client.handle("q")
        pieces = [whole[:3_000], whole[3_000:]]
        for number, piece in enumerate(pieces, 1):
            (folder / f"{handle}-{number}.send").write_bytes(piece)
        tell(client, handle, *map(len, pieces))
        assert reading.wait(10)
        assert spool.reserved_bytes == len(SMALL)
        gateway.ask(lambda: connections[0].stream.abort("by an operator"))
        gateway.until(lambda: spool.reserved_bytes == 0)
        may_read.set()
        assert passed_on.wait(10)
    assert spool.reserved_bytes == 0


def test_a_large_delivery_is_a_file_and_small_ones_are_not(client: Whole, folder: Path) -> None:
    handle = client.handle("q")
    client.put_large(handle, BODY, PERSISTENT)
    client.put(handle, SMALL)
    client.consume(handle)
    row = client.large()
    whole = framed(BODY, PERSISTENT)
    assert (row[1], row[4], row[5]) == (1, b"", b"q")
    assert (folder / "1.notify").read_bytes() == whole
    assert client.bodies(1) == [SMALL]
    client.ack(2)
    client.machine.close_channel(1)
    client.flush()
    client.channel()
    assert list(folder.iterdir()) == []


def test_what_its_notify_says(client: Whole, folder: Path) -> None:
    handle = client.handle("q")
    client.put_large(handle, BODY)
    client.consume(handle)
    part = client.part()
    assert part.bits & (OUT_OF_BAND | DELIVERED) == OUT_OF_BAND | DELIVERED
    assert part.size == len(framed(BODY))


BAD_FILES = [
    ("none", None, 542),
    ("too short", framed(SMALL)[:-1], 542),
    ("a body that is too short", framed(SMALL, size=6_000), 542),
    ("a body that is too long", framed(SMALL, size=4_000), 542),
    ("no head", b"abc", 542),
    ("too large", framed(SMALL, size=4 * MIB + 1), 311),
]


@pytest.mark.parametrize("what, bytes_, code", BAD_FILES, ids=[row[0] for row in BAD_FILES])
def test_bad_files(client: Whole, folder: Path, what: str, bytes_: bytes | None, code: int) -> None:
    handle = client.handle("q")
    if bytes_ is not None:
        (folder / f"{handle}-1.send").write_bytes(bytes_)
    size = len(framed(SMALL)) if bytes_ is None or what == "too short" else len(bytes_)
    tell(client, handle, size)
    if code == 311:
        assert client.channel_closed() == (1, code)
    else:
        assert client.handle_closed() == (handle, code)


@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "pipe", "folder"])
def test_nothing_but_a_file_of_its_own_is_read(
    client: Whole, folder: Path, tmp_path: Path, kind: str
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(framed(SMALL))
    handle = client.handle("q")
    path = folder / f"{handle}-1.send"
    if kind == "symbolic link":
        path.symlink_to(secret)
    elif kind == "hard link":
        path.hardlink_to(secret)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    tell(client, handle, secret.stat().st_size)
    assert client.handle_closed() == (handle, 542)
    assert secret.exists()


def test_a_file_that_stands_in_the_way_is_not_written_through(
    client: Whole, folder: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    (folder / "1.notify").symlink_to(secret)
    handle = client.handle("q")
    client.put_large(handle, BODY)
    client.consume(handle)
    assert client.channel_closed() == (1, 506)
    assert secret.read_bytes() == b"secret"


AGREED = [
    ("file:/shared", "/shared"),
    ("/shared", "/shared"),
    ("file:/shared/orders-1", "/shared/orders-1"),
    ("file:/shared/a.b", "/shared/a.b"),
    ("file:/shared/", None),
    ("file:/shared/..", None),
    ("file:/shared/.", None),
    ("file:/shared/.hidden", None),
    ("file:/shared/a/b", None),
    ("file:/shared/../etc", None),
    ("file:/shared//a", None),
    ("file:/sharedness", None),
    ("file:/", None),
    ("file:", None),
    ("file:shared", None),
    ("file://shared", None),
    ("shm:/shared", None),
    ("file:/shared/a\n", None),
]


@pytest.mark.parametrize("text, path", AGREED)
def test_what_is_agreed_on(text: str, path: str | None) -> None:
    assert negotiated_folder(text, Path("/shared")) == (None if path is None else Path(path))


REFUSED = [("shm:1", 540), ("file:/etc", 540), ("file:{}/..", 540), ("file:{}/missing", 506)]


@pytest.mark.parametrize("text, code", REFUSED)
def test_any_other_costs_the_channel(gateway: Running, folder: Path, text: str, code: int) -> None:
    with Whole(gateway).open() as client:
        number = client.machine.open_channel(out_of_band=text.format(folder))
        client.flush()
        assert client.channel_closed() == (number, code)


def test_a_folder_has_one_channel_and_each_client_may_have_its_own(
    client: Whole, gateway: Running, folder: Path
) -> None:
    (folder / "mine").mkdir()
    with Whole(gateway).open(out_of_band=f"file:{folder}/mine") as other:
        number = other.machine.open_channel(out_of_band=f"file:{folder}")
        other.flush()
        assert other.channel_closed() == (number, 506)
        client.leave()
        other.channel(out_of_band=f"file:{folder}")


def test_a_folder_that_is_a_link_is_not_entered(gateway: Running, folder: Path, tmp_path: Path) -> None:
    (folder / "link").symlink_to(tmp_path)
    with Whole(gateway).open() as client:
        number = client.machine.open_channel(out_of_band=f"file:{folder}/link")
        client.flush()
        assert client.channel_closed() == (number, 506)


def test_without_an_agreement_the_flag_costs_the_handle(gateway: Running) -> None:
    with Whole(gateway).open() as client:
        handle = client.handle("q")
        tell(client, handle, 100)
        assert client.handle_closed() == (handle, 540)


def test_recovery_is_not_for_files(gateway: Running, folder: Path) -> None:
    with Whole(gateway).open(out_of_band=f"file:{folder}", restartable=True) as client:
        handle = client.handle("q")
        assert client.prepare(handle, SMALL) == 0
        transfer = Transfer(client.machine, handle, EMPTY, len(SMALL), resumed=True, out_of_band=True)
        transfer.announce_bytes(len(SMALL), last=True)
        client.flush()
        assert client.handle_closed() == (handle, 540)


def test_it_is_off_unless_configured() -> None:
    with running() as gateway, Whole(gateway).open() as client:
        number = client.machine.open_channel(out_of_band="file:/tmp")
        client.flush()
        assert client.channel_closed() == (number, 540)
