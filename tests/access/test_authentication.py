"""Who may connect."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from gateway.access import users as access_module
from gateway.access.authentication import Access
from gateway.access.backends import Denial
from gateway.access.credentials import Credentials
from gateway.access.places import LOOPBACK, is_loopback, place_of
from gateway.access.principal import Principal
from gateway.access.users import hash_password
from gateway.settings import LoginSettings

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
        assert (access.anonymous_principal(remote, policy) is not None) is allowed
        assert (access.verify_nowait(Credentials("guest", b"guest", remote)) is not None) is allowed
        assert access.verify_nowait(Credentials("guest", b"wrong", remote)) is None


async def test_a_password_is_verified_and_then_remembered() -> None:
    access = Access({"ann": HASH})
    assert access.verify_nowait(Credentials("ann", b"right", HERE)) is None
    assert await access.verify(Credentials("ann", b"wrong", HERE)) is Denial.WRONG
    verified = await access.verify(Credentials("ann", b"right", HERE))
    assert isinstance(verified, Principal)
    assert verified.name == "ann"
    assert access.verify_nowait(Credentials("ann", b"right", THERE)) is verified
    assert access.verify_nowait(Credentials("ann", b"wrong", HERE)) is None


async def test_many_at_once_with_one_password_cost_what_few_do(monkeypatch: pytest.MonkeyPatch) -> None:
    work: list[bytes] = []
    matches = access_module._matches
    monkeypatch.setattr(access_module, "_matches", lambda *said: work.append(said[1]) or matches(*said))
    access = Access({"ann": HASH})
    found: list[bool] = []

    async def log_in(password: bytes) -> None:
        found.append(isinstance(await access.verify(Credentials("ann", password, HERE)), Principal))

    async with trio.open_nursery() as nursery:
        for number in range(200):
            nursery.start_soon(log_in, b"wrong" if number % 100 == 50 else b"right")
    assert (found.count(True), found.count(False)) == (198, 2)
    assert (work.count(b"wrong"), work.count(b"right")) == (1, 1)


async def test_unknown_users_and_broken_hashes_are_refused() -> None:
    access = Access({"broken": "no hash at all"})
    assert await access.verify(Credentials("nobody", b"right", HERE)) is Denial.WRONG
    assert await access.verify(Credentials("broken", b"right", HERE)) is Denial.WRONG


async def test_a_guest_with_a_password_of_its_own_is_a_user_like_others() -> None:
    access = Access({"guest": HASH})
    assert access.verify_nowait(Credentials("guest", b"guest", HERE)) is None
    assert isinstance(await access.verify(Credentials("guest", b"right", HERE)), Principal)


@pytest.mark.parametrize(
    "remote, place",
    [
        (HERE, LOOPBACK),
        ("::1:80", LOOPBACK),
        ("[::1]:80", LOOPBACK),
        ("::ffff:127.0.0.1:80", LOOPBACK),
        (THERE, "192.0.2.7"),
        ("::ffff:192.0.2.7:80", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6:80", "2001:db8:1:2::/64"),
        ("[2001:db8:1:2::1]:80", "2001:db8:1:2::/64"),
        ("fe80::1%eth0:80", "fe80::/64"),
        ("somewhere:80", "somewhere"),
    ],
)
def test_what_one_owner_can_choose_freely_is_one_place(remote: str, place: str) -> None:
    assert place_of(remote) == place


class Hashing:
    """Stands in for argon2: counts what it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[bytes] = []
        monkeypatch.setattr(access_module, "_matches", self)

    def __call__(self, stored: str, password: bytes) -> bool:
        self.asked.append(password)
        return stored == HASH and password == b"right"


async def test_guesses_end_after_a_few_and_cost_no_hash_then(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    hashing = Hashing(monkeypatch)
    access = Access({"ann": HASH}, logins=LoginSettings(failures_max=3, delay_secs=0.0))
    said = [await access.verify(Credentials("ann", b"guess %d" % number, THERE)) for number in range(6)]
    assert said == [Denial.WRONG] * 3 + [Denial.REFUSED] * 3
    assert len(hashing.asked) == 3
    assert await access.verify(Credentials("ann", b"right", THERE)) is Denial.REFUSED
    assert access.verify_nowait(Credentials("ann", b"right", THERE)) is None
    elsewhere = await access.verify(Credentials("ann", b"right", "192.0.2.8:1"))
    assert isinstance(elsewhere, Principal), "a locked name locks nobody out who is somewhere else"
    assert access.verify_nowait(Credentials("ann", b"right", THERE)) is None, (
        "a remembered password is not to be guessed for free"
    )


async def test_guesses_at_once_are_no_more_than_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    hashing = Hashing(monkeypatch)
    access = Access({"ann": HASH}, logins=LoginSettings(failures_max=3, delay_secs=0.0))
    said: list[object] = []

    async def guess(number: int) -> None:
        said.append(await access.verify(Credentials("ann", b"guess %d" % number, THERE)))

    async with trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(guess, number)
    assert len(hashing.asked) < 3 + access_module.VERIFIERS_MAX
    assert said.count(Denial.REFUSED) == 100 - len(hashing.asked)


async def test_this_machine_is_never_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Hashing(monkeypatch)
    access = Access({"ann": HASH}, logins=LoginSettings(failures_max=1))
    for number in range(20):
        assert await access.verify(Credentials("ann", b"guess %d" % number, HERE)) is Denial.WRONG
    assert isinstance(await access.verify(Credentials("ann", b"right", HERE)), Principal)


async def test_a_wrong_password_that_is_said_again_costs_no_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    hashing = Hashing(monkeypatch)
    access = Access({"ann": HASH})
    for _ in range(50):
        assert await access.verify(Credentials("ann", b"old", HERE)) is Denial.WRONG
    assert await access.verify(Credentials("bob", b"old", HERE)) is Denial.WRONG
    assert hashing.asked == [b"old", b"old"], "one for each name"


async def test_failures_delay_and_who_was_right_before_is_not_delayed(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    Hashing(monkeypatch)
    access = Access({"ann": HASH}, logins=LoginSettings(delay_secs=1.0))
    home = "198.51.100.1:5"
    assert isinstance(await access.verify(Credentials("ann", b"right", home)), Principal)
    took = []
    for number in range(6):
        before = trio.current_time()
        await access.verify(Credentials("ann", b"guess %d" % number, THERE))
        took.append(round(trio.current_time() - before))
    assert took == [0, 1, 2, 3, 4, 4]
    for remote, secs in ((home, 0), ("203.0.113.1:5", 4)):
        before = trio.current_time()
        assert isinstance(await access.verify(Credentials("ann", b"right", remote)), Principal)
        assert round(trio.current_time() - before) == secs


async def test_who_goes_while_he_waits_leaves_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    hashing = Hashing(monkeypatch)
    access = Access({"ann": HASH}, logins=LoginSettings(delay_secs=0.0, waiting_max=500))
    async with trio.open_nursery() as nursery:
        for number in range(access_module.VERIFIERS_MAX):
            await access.users._turns.acquire("elsewhere", str(number))
        for number in range(200):
            nursery.start_soon(access.verify, Credentials("ann", b"guess %d" % number, HERE))
        await trio.testing.wait_all_tasks_blocked()
        assert access.users._turns.waiting == 200
        nursery.cancel_scope.cancel()
    for _ in range(access_module.VERIFIERS_MAX):
        access.users._turns.release()
    assert isinstance(await access.verify(Credentials("ann", b"right", HERE)), Principal)
    assert hashing.asked == [b"right"]


async def test_a_queue_that_is_full_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    Hashing(monkeypatch)
    access = Access({"ann": HASH}, logins=LoginSettings(waiting_max=1))
    said: list[object] = []

    async def guess(number: int) -> None:
        said.append(await access.verify(Credentials("ann", b"guess %d" % number, HERE)))

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(guess, number)
    assert said.count(Denial.BUSY) == 10 - access_module.VERIFIERS_MAX - 1


async def test_of_many_with_one_password_the_one_that_is_hashed_may_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashing = Hashing(monkeypatch)
    access = Access({"ann": HASH}, logins=LoginSettings(waiting_max=2))
    for number in range(access_module.VERIFIERS_MAX):
        await access.users._turns.acquire("elsewhere", str(number))
    scopes = [trio.CancelScope() for _ in range(20)]
    said: list[object] = []

    async def log_in(scope: trio.CancelScope) -> None:
        with scope:
            said.append(await access.verify(Credentials("ann", b"right", HERE)))

    async with trio.open_nursery() as nursery:
        for scope in scopes:
            nursery.start_soon(log_in, scope)
        await trio.testing.wait_all_tasks_blocked()
        assert access.users._turns.waiting == 1
        for scope in scopes[:5]:
            scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
        for _ in range(access_module.VERIFIERS_MAX):
            access.users._turns.release()
    assert len(said) >= 15
    assert all(isinstance(one, Principal) for one in said)
    assert hashing.asked == [b"right"]
    assert access.users._in_flight == {}
