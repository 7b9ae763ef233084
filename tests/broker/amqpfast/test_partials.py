"""Interrupted transfers: what is in memory of each while it waits for its sender."""

from __future__ import annotations

import sys

from gateway.broker.amqpfast.partials import Partials
from gateway.broker.spool import Spool
from gateway.model.shares import UserShares


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
