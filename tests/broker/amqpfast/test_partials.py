"""Interrupted transfers: what is in memory of each while it waits for its sender."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gateway import clock
from gateway.broker.amqpfast.partials import Partials
from gateway.broker.spool import Spool
from gateway.model.shares import UserShares
from gateway.store.store import Store
from tests.store.parts import opened


def test_an_idle_transfer_holds_no_head() -> None:
    """A head may have 128 KiB, and only the bytes of the body count towards the limits."""
    spool = Spool(None, bytes_max=1 << 20, memory_bytes_max=1 << 20, memory_total_max=1 << 20)
    partials = Partials(spool, None, shares=UserShares("transfers"), age_secs=60.0)
    head = bytes(100_000)
    before = sys.getrefcount(head)
    partials.release(partials.claim("/", "ann", "c", head, 1_000))
    assert (len(partials), sys.getrefcount(head)) == (1, before)
    partials.release(partials.claim("/", "ann", "c", head, 1_000))
    assert len(partials) == 1, "it is recognised by the digest of its head"


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "before, after, size",
    [("one", "one", 400), ("one", "another", 0), ("", "", 0)],
    ids=["same boot", "machine restarted", "not known"],
)
def test_bytes_are_trusted_until_the_machine_restarts(
    before: str, after: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not synced, so after a power failure some may be missing."""

    def transfers() -> tuple[Store, Partials]:
        store = opened(tmp_path)
        spool = Spool(
            tmp_path / "spool", bytes_max=1 << 20, memory_bytes_max=1 << 20, memory_total_max=1 << 20
        )
        return store, Partials(spool, store, shares=UserShares("transfers"), age_secs=60.0)

    monkeypatch.setattr(clock, "boot_id", lambda: before)
    store, partials = transfers()
    transfer = partials.claim("/", "ann", "c", b"head", 1_000)
    transfer.file.write(bytes(400))
    partials.release(transfer)
    transfer.file.preserve()
    store.flush()
    store.close()
    monkeypatch.setattr(clock, "boot_id", lambda: after)
    store, partials = transfers()
    assert partials.claim("/", "ann", "c", b"head", 1_000).file.size == size
    store.close()
