"""The folder of large bodies, and the queues that need them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.broker.amqpfast.hosts import FastHosts
from gateway.broker.bodies import SpooledBodies
from gateway.broker.spool import SPOOLED_BYTES_MIN, Spool, SpoolFull
from gateway.errors import StoreError
from gateway.model.batch import Batch, Recipient
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Reason
from gateway.model.spooled_bodies import Spooled
from gateway.protocols.amqpfast.dialect import fast_address
from gateway.settings import Limits
from gateway.settings.amqpfast import FastVirtualHost
from gateway.store.store import Store
from tests.broker.amqpfast.test_virtual_host import Changes, Publisher
from tests.store.parts import Disk, Opened

BODY = os.urandom(SPOOLED_BYTES_MIN)


def spool(folder: Path | None, bytes_max: int = 1 << 30) -> Spool:
    return Spool(folder, bytes_max=bytes_max, memory_bytes_max=1 << 24, memory_total_max=1 << 24)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spool"


def test_a_file_is_there_as_long_as_somebody_has_it(folder: Path) -> None:
    one = spool(folder)
    file = one.draft()
    file.write(BODY[:1000])
    file.write(BODY[1000:])
    body = file.body()
    assert isinstance(body, Spooled)
    assert len(body) == one.used_bytes == len(BODY)
    assert body.read(10, 5) == BODY[10:15]
    assert body.data() == BODY
    assert one.open_stored(file.name, len(BODY)) is file
    del file
    one.delete_unreferenced()
    assert len(list(folder.iterdir())) == 1
    del body
    one.delete_unreferenced()
    assert list(folder.iterdir()) == []
    assert one.used_bytes == 0


def test_a_small_body_is_in_memory(folder: Path) -> None:
    file = spool(folder).draft()
    file.write(b"small")
    assert type(file.body()) is bytes
    assert file.body() == b"small"


def test_what_is_stored_is_there_again_and_nothing_else(folder: Path) -> None:
    one = spool(folder)
    files = [one.draft(), one.draft(), one.draft()]
    for file in files:
        file.write(BODY)
    names = [file.name for file in files]
    one.close()
    files.clear()
    other = spool(folder)
    body = other.stored_body(names[1], len(BODY))
    other.sweep()
    assert [path.name for path in folder.iterdir()] == [names[1]]
    assert other.used_bytes == len(BODY)
    assert body.data() == BODY
    for name, size in ((names[0], len(BODY)), (names[1] + "x", 1)):
        with pytest.raises(StoreError, match="cannot be opened: No such file or directory"):
            other.open_stored(name, size)


def test_a_file_of_another_size_is_no_body(folder: Path) -> None:
    one = spool(folder)
    file = one.draft()
    file.write(b"short")
    name = file.name
    file.preserve()
    del file
    with pytest.raises(StoreError, match="has 5 bytes, not 6"):
        one.open_stored(name, 6)
    assert (folder / name).exists()


def test_limits(folder: Path) -> None:
    one = spool(folder, bytes_max=1_500)
    file = one.draft()
    file.write(bytes(1_000))
    with pytest.raises(SpoolFull, match="spool_bytes_max"):
        file.write(bytes(501))
    file.write(bytes(500))
    assert one.reserve(1 << 24)
    assert not one.reserve(SPOOLED_BYTES_MIN)
    assert one.reserve(SPOOLED_BYTES_MIN - 1)  # too small for a file
    one.release_reservation(1 << 24)
    assert one.reserve(SPOOLED_BYTES_MIN)


def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    one = spool(folder)
    file = one.draft()
    folder.rmdir()
    with pytest.raises(SpoolFull, match="cannot be written"):
        file.write(b"x")
    assert file.size == one.used_bytes == 0


def test_without_a_store_it_is_of_this_process_alone() -> None:
    one = spool(None)
    file = one.draft()
    file.write(b"x")
    place = one.folder
    one.close()
    assert not place.exists()


# What durable queues have there.


def send(host: Host, *, durable: bool = True) -> Publisher:
    file = host.bodies.spool.draft()
    file.write(BODY)
    publisher = Publisher()
    batch = Batch(publisher, 0.0)  # type: ignore[arg-type]
    address = fast_address("queue", "q")
    recipient = Recipient(host.hosts["/"].sinks(address)[0])
    batch.add_only("x", recipient, Message(address, file.body(), durable=durable))
    batch.send()
    return publisher


class Host:
    """A store with its thread, and the virtual hosts on it."""

    def __init__(self, folder: Path, disk: Disk | None = None) -> None:
        self.opened = Opened(folder, before=self._make, factory=(disk or Disk()).factory())

    def _make(self, store: Store) -> None:
        self.bodies = SpooledBodies(Limits(), store)
        self.hosts = FastHosts({"/": FastVirtualHost()}, Changes(), Limits(), store, self.bodies)


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def host(tmp_path: Path, disk: Disk) -> Iterator[Host]:
    made = Host(tmp_path, disk)
    with made.opened:
        yield made


def files(host: Host) -> int:
    spool = host.bodies.spool
    spool.delete_unreferenced()
    return len(list(spool.folder.iterdir()))


@pytest.mark.parametrize("end", ["purge", "delete"])
@pytest.mark.parametrize("taken", [False, True])
def test_a_queue_lets_go_when_the_disk_knows(host: Host, disk: Disk, end: str, taken: bool) -> None:
    hosts, opened = host.hosts, host.opened
    send(host)
    send(host)
    queue = hosts["/"].queues["q"]
    opened.commit()
    found = queue.take() if taken else None
    disk.gate.clear()
    if end == "purge":
        queue.purge()
    else:
        queue.delete()
    opened.store.flush()
    assert files(host) == 2
    disk.gate.set()
    opened.commit()
    assert files(host) == taken
    if found is not None:
        position, message, _ = found
        assert isinstance(message.body, Spooled)
        assert message.body.data() == BODY
        queue.acknowledged([position])
        del found, message
        opened.commit()
        assert files(host) == 0


def test_what_the_disk_does_not_take_leaves_no_file(host: Host, disk: Disk) -> None:
    opened = host.opened
    opened.commit()
    disk.fault = "disk I/O error"
    publisher = send(host)
    opened.commit()
    outcome = publisher.outcomes["x"]
    assert outcome is not None
    assert outcome.reason is Reason.STORE
    assert files(host) == 0
    assert not opened.store.healthy
    refused = [send(host) for _ in range(2)]
    opened.commit()
    assert all(publisher.outcomes["x"] is not ACCEPTED for publisher in refused)
    assert files(host) == 0


def test_what_the_disk_may_still_have_keeps_its_file(host: Host, disk: Disk) -> None:
    opened, hosts = host.opened, host.hosts
    send(host)
    opened.commit()
    disk.fault = "disk I/O error"
    hosts["/"].queues["q"].purge()
    opened.commit()
    assert files(host) == 1
    disk.fault = ""
    opened.until(lambda: files(host) == 0)


def test_a_file_that_is_used_again_before_it_is_deleted_stays(tmp_path: Path) -> None:
    spool = Spool(tmp_path, bytes_max=1 << 30, memory_bytes_max=0, memory_total_max=0)
    file = spool.draft()
    file.write(b"body")
    name = file.name
    del file
    again = spool.open_stored(name)
    spool.delete_unreferenced()
    assert again.read(0, 4) == b"body"
    del again
    spool.delete_unreferenced()
    assert not (tmp_path / name).exists()
    assert spool.used_bytes == 0
