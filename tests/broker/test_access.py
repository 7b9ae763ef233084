"""Who may connect."""

from __future__ import annotations

import pytest
import trio

from gateway.broker import access as access_module
from gateway.broker.access import Access, hash_password, is_loopback

HERE, THERE = "127.0.0.1:4711", "192.0.2.7:4711"
HASH = hash_password("right")


@pytest.mark.parametrize(
    "remote, here",
    [
        (HERE, True),
        ("127.9.9.9:1", True),
        ("::1:80", True),
        ("[::1]:80", True),
        ("::ffff:127.0.0.1:80", True),
        (THERE, False),
        ("2001:db8::1:80", False),
        ("::ffff:192.0.2.7:80", False),
        ("localhost:80", False),
        ("", False),
    ],
)
def test_what_is_loopback(remote: str, here: bool) -> None:
    assert is_loopback(remote) is here


@pytest.mark.parametrize(
    "policy, from_here, from_there",
    [("loopback", True, False), ("always", True, True), ("never", False, False)],
)
def test_anonymous_and_guest_by_policy(policy: str, from_here: bool, from_there: bool) -> None:
    access = Access({}, guest=policy)
    for remote, allowed in ((HERE, from_here), (THERE, from_there)):
        assert (access.anonymous(remote, policy) is not None) is allowed
        assert (access.known("guest", b"guest", remote) is not None) is allowed
        assert access.known("guest", b"wrong", remote) is None


async def test_a_password_is_verified_and_then_remembered() -> None:
    access = Access({"ann": HASH})
    assert access.known("ann", b"right", HERE) is None
    assert await access.verify("ann", b"wrong") is None
    verified = await access.verify("ann", b"right")
    assert verified is not None
    assert verified.name == "ann"
    assert access.known("ann", b"right", THERE) is verified
    assert access.known("ann", b"wrong", HERE) is None


async def test_many_at_once_with_one_password_cost_what_few_do(monkeypatch: pytest.MonkeyPatch) -> None:
    work: list[bytes] = []
    matches = access_module._matches
    monkeypatch.setattr(access_module, "_matches", lambda *said: work.append(said[1]) or matches(*said))
    access = Access({"ann": HASH})
    found: list[bool] = []

    async def log_in(password: bytes) -> None:
        found.append(await access.verify("ann", password) is not None)

    async with trio.open_nursery() as nursery:
        for number in range(200):
            nursery.start_soon(log_in, b"wrong" if number % 100 == 50 else b"right")
    assert (found.count(True), found.count(False)) == (198, 2)
    assert work.count(b"wrong") == 2
    assert work.count(b"right") <= access_module.VERIFIERS_MAX


async def test_unknown_users_and_broken_hashes_are_refused() -> None:
    access = Access({"broken": "no hash at all"})
    assert await access.verify("nobody", b"right") is None
    assert await access.verify("broken", b"right") is None


async def test_a_guest_with_a_password_of_its_own_is_a_user_like_others() -> None:
    access = Access({"guest": HASH})
    assert access.known("guest", b"guest", HERE) is None
    assert await access.verify("guest", b"right") is not None
