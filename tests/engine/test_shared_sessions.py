"""Sessions over a database that the test steps by hand: who owns them, what is stored, and who waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, cast

import pytest

from gateway import clock
from gateway.access.principal import Principal
from gateway.broker.mqtt.namespace import ConnectingClient
from gateway.broker.mqtt.records import will_bytes
from gateway.broker.mqtt.session import SessionLimits, SessionTally, SubscriptionOptions
from gateway.engine import sessions as module
from gateway.engine.claims import ClaimedWill
from gateway.engine.client_session import ClientSession
from gateway.engine.consumers import Content
from gateway.engine.membership import Membership
from gateway.engine.pending_clients import OpeningClient, PendingOpen
from gateway.engine.requeue_order import fingerprint_of
from gateway.engine.sessions import (
    AWAY,
    COUNT_SECS,
    DOMAIN,
    NOT_OURS,
    TAKEN_OVER,
    WILL_SECS,
    SharedSessions,
)
from gateway.model.message import Sender
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.model.shares import NO_LIMIT
from gateway.model.times import Monotonic
from gateway.protocols.mqtt.packets import Will
from gateway.state import sessions as rows
from gateway.state.interface import (
    CLAIM_SECS,
    FindSession,
    LeaveSession,
    Notice,
    NoticeSubject,
    OpenedSession,
    OperationOutcome,
    Owner,
    Reply,
    SessionKey,
    SessionView,
    WeighSessions,
    Weight,
)
from tests.engine.local_state import SILENT_SECS, LocalDatabase, LocalState

LIMITS: Final = SessionLimits(1000, 10**6, 100, 1000, 10**6, False, 60.0)
CONTENT: Final[Content] = (b"", b"", b"1")


class Guest:
    """The connection of a client that is not let in yet."""

    def __init__(self) -> None:
        self.stream = self
        self.closed = False
        self.why = ""

    def refuse_unavailable(self, why: str) -> None:
        self.why, self.closed = why, True


class World:
    """One replica: it is its own clients and queues, and notes what these hear."""

    def __init__(self, local: LocalDatabase, name: str) -> None:
        self.store: LocalState = local.store()
        self.membership = Membership(self.store, name, "1", SILENT_SECS)
        self.is_up = self.is_binding = True
        self.is_slow = False
        self.room = NO_LIMIT  # for wills of each user, in bytes
        self.unsettled: list[ClaimedWill] = []
        self.recent_chunks = 64
        self.here: dict[str, ClientSession] = {}
        self.arrivals: list[OpeningClient] = []
        self.found: OpenedSession  # by the last client that was let in
        self.waits = False  # the CONNACK of that client waits for the database
        self.lost: list[str] = []
        self.others: list[str] = []
        self.consumed: list[str] = []
        self.deleted: list[str] = []
        self.wills: list[bytes] = []
        self.ends: dict[ClientSession, Callable[[Sequence[Content]], None]] = {}
        self._soon: list[Callable[[], None]] = []
        self.sessions = SharedSessions(self.store, self.membership, self, "q", self._soon.append)
        self.sessions.clients = self
        self._local = local
        self.run()

    def run(self) -> None:
        """Do all that is due, and what comes of it."""
        self.membership.tick(clock.now())
        self.sessions.tick(clock.now())
        while self._soon or self.store.notices:
            self.step_soon()
            self._local.settle()
            notices, self.store.notices = self.store.notices, []
            for notice in notices:
                self.sessions.handle_notice(notice)
        self._local.settle()

    def step_soon(self) -> None:
        """End a wake-up."""
        soon, self._soon[:] = list(self._soon), []
        for function in soon:
            function()

    # What sessions ask of clients and queues.

    def session_of(self, client: str) -> ClientSession | None:
        return self.here.get(client)

    def connected(self) -> list[ClientSession]:
        return list(self.here.values())

    def is_expected(self, client: str) -> bool:
        return any(one.opening.client == client for one in self.arrivals)

    def handle_new_owner(self, client: str, owner: Owner | None, *, at_once: bool) -> None:
        for arrival in [one for one in self.arrivals if one.opening.client == client]:
            if arrival.owner != owner:
                self.arrivals.remove(arrival)
                self.sessions.abandon_arrival(arrival)
        session = self.here.get(client)
        if session is not None and session.owner != owner and (at_once or not session.is_stopped):
            self.lost.append(client)
            self.leave(client)

    def add_arrival(self, arrival: OpeningClient) -> None:
        self.arrivals.append(arrival)

    def will_room(self, user: str) -> int:
        return self.room - self.sessions.opening_wills.of(user)

    def deny_opening(self, opening: PendingOpen, user: str) -> None:
        self.others.append(user)

    def disconnect_client(self, session: ClientSession, why: str) -> None:
        self.leave(session.client_id)

    def publish_claimed(self, claim: ClaimedWill, publish: Callable[[], None]) -> None:
        publish()
        self.unsettled.append(claim)
        if not self.is_slow:
            self.settle()

    def settle(self) -> None:
        """The cluster has the wills that were published."""
        while self.unsettled:
            claim = self.unsettled.pop()
            self.sessions.settle_will(claim.key, claim.epoch)

    def publish_due_will(self, claim: ClaimedWill, message: bytes) -> None:
        self.wills.append(message)
        self.sessions.settle_will(claim.key, claim.epoch)

    def consume(self, session: ClientSession) -> None:
        self.consumed.append(session.queue)

    def end(self, session: ClientSession, done: Callable[[Sequence[Content]], None]) -> None:
        self.ends[session] = done

    def delete(self, queue: str, done: Callable[[], None] | None = None) -> None:
        self.deleted.append(queue)
        if done is not None:
            done()

    def bind_queue(self, session: ClientSession, key: str) -> None:
        if self.is_binding:
            _, done = session.unbound.pop(key)
            done()

    # What a test does.

    def open(self, client: str, *, clean: bool = False, secs: float = 60.0, **more: Any) -> Guest:
        """A client connects; it is answered by `run`."""
        guest = Guest()
        coming = ConnectingClient(
            client,
            clean,
            secs,
            "here",
            more.get("will"),
            Sender("mqtt", client, more.get("user", "")),
            more.get("only_own", False),
            Principal(more.get("user", "")),
        )
        self.sessions.open(PendingOpen(cast(Any, guest), coming))
        return guest

    def let_in(self, client: str, **more: Any) -> ClientSession:
        """A client connects, and is let in."""
        self.open(client, **more)
        self.run()
        session = self.admit(self.arrivals.pop())
        self.step_soon()
        self._local.settle()  # it is stored that the client is accepted
        return session

    def admit(self, arrival: OpeningClient) -> ClientSession:
        """Let a client in that has arrived."""
        client = arrival.opening.client
        self.found = arrival.found
        session = ClientSession(client, LIMITS, SessionTally(), cast(Any, self), arrival.owner)
        session.expiry_secs = arrival.opening.connecting.expiry_secs
        if arrival.found.queue:
            session.begin(arrival.found.contents, arrival.found.queue, ())
        self.here[client] = session
        self.waits = self.sessions.accept(session, arrival)
        if arrival.found.queue:
            self.sessions.acquire(session, arrival.found)
        return session

    def leave(self, client: str, publish: Callable[[], None] | None = None) -> ClientSession:
        session = self.here.pop(client)
        self.sessions.leave(session, publish)
        return session

    def change(self, session: ClientSession) -> Any:
        return self.sessions.change(session)

    def after_stored(self, session: ClientSession, done: Callable[[Outcome], None]) -> None:
        self.sessions.after_stored(session, done)

    def view(self, client: str) -> SessionView | None:
        found: list[SessionView | None] = []
        self.store.query(FindSession(SessionKey(DOMAIN, client)), lambda reply: found.append(reply.value))
        self._local.settle()
        return found[0]


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of the monotonic clock."""
    seconds = [1_000.0]
    monkeypatch.setattr(clock, "now", lambda: Monotonic(seconds[0]))
    return seconds


@pytest.fixture
def local(tmp_path: Path, passed: list[float]) -> LocalDatabase:
    return LocalDatabase(tmp_path)


@pytest.fixture
def two(local: LocalDatabase) -> tuple[World, World]:
    return World(local, "one"), World(local, "other")


def test_what_changes_is_stored_and_found_elsewhere(two: tuple[World, World]) -> None:
    one, other = two
    session = one.let_in("c")
    told: list[Outcome] = []
    session.change().subscriptions["a/b"] = b"options"
    one.sessions.after_stored(session, told.append)
    assert not told
    one.run()
    assert told == [ACCEPTED]
    assert not one.sessions.pending
    one.leave("c")
    one.ends.pop(session)([])
    one.run()
    again = other.let_in("c")
    assert other.consumed == [again.queue] == one.consumed
    assert other.found.contents.subscriptions == {"a/b": b"options"}


def test_one_change_is_on_its_way_at_a_time_and_each_waits_for_its_own(two: tuple[World, World]) -> None:
    one, _ = two
    session = one.let_in("c")
    told: list[int] = []
    session.change().subscriptions["1"] = b""
    one.sessions.after_stored(session, lambda outcome: told.append(1))
    one.sessions.flush()
    one.sessions.after_stored(session, lambda outcome: told.append(2))
    session.change().subscriptions["2"] = b""
    one.sessions.after_stored(session, lambda outcome: told.append(3))
    one.sessions.flush()
    assert one.store.step()
    assert told == [1, 2]
    one.run()
    assert told == [1, 2, 3]


def test_what_the_database_was_away_for_is_stored_in_its_order(two: tuple[World, World]) -> None:
    one, other = two
    session = one.let_in("c")
    told: list[Outcome] = []
    one.store.is_away = True
    session.change().subscriptions["a"] = b"1"
    one.sessions.after_stored(session, told.append)
    one.run()
    session.change().subscriptions["a"] = b"2"
    one.run()
    one.leave("c")
    one.run()
    assert not told
    one.store.is_away = False
    for _ in range(4):
        one.run()
    assert told == [ACCEPTED]
    one.ends.pop(session)([])
    one.run()
    other.open("c")
    other.run()
    assert other.arrivals[0].found.contents.subscriptions == {"a": b"2"}


def test_a_session_moves_with_what_its_queue_was_given_back(two: tuple[World, World]) -> None:
    one, other = two
    before = one.let_in("c")
    after = other.let_in("c")
    assert not other.consumed, "the owner before still consumes it"
    one.run()  # it has the notice
    assert one.lost == ["c"]
    one.ends.pop(before)([CONTENT])
    one.run()
    other.run()
    assert other.consumed == [after.queue] == [before.queue]
    assert after.fingerprints([]) == (fingerprint_of(CONTENT),)


def test_a_notice_that_is_lost_costs_a_second(two: tuple[World, World], passed: list[float]) -> None:
    one, other = two
    before = one.let_in("c")
    other.let_in("c")
    one.store.notices.clear()
    passed[0] += 1.0
    one.run()
    assert one.lost == ["c"]
    one.ends.pop(before)([])
    one.run()
    other.store.notices.clear()
    passed[0] += 1.0
    other.run()
    passed[0] += 5.0
    other.run()
    assert other.consumed == [before.queue]


@pytest.mark.parametrize("is_held", [True, False])
def test_what_a_client_has_unsubscribed_from_is_unbound_when_it_leaves(
    two: tuple[World, World], is_held: bool
) -> None:
    """Its queue is still that of the replica before, so it could not be unbound."""
    one, other = two
    owed: list[tuple[str, int, str, set[str]]] = []
    other.sessions.on_keys_to_unbind = lambda absent, keys: owed.append(
        (absent.key.client, absent.epoch, absent.queue, keys)
    )
    options = SubscriptionOptions(1)
    before = one.let_in("c")
    for topic_filter in ("a/b", "kept"):
        before.subscriptions[topic_filter] = options
        before.subscribed(topic_filter, options, None)
    one.run()
    after = other.let_in("c")
    assert other.sessions.is_waiting(after)
    after.subscriptions["a/b"] = options
    del after.subscriptions["a/b"]
    other.is_binding = is_held
    after.subscribed("a/b", None, options)
    other.leave("c")
    other.run()
    assert owed == ([] if is_held else [("c", after.owner.epoch, before.queue, {"a.b"})])


@pytest.mark.parametrize("then", ["returns", "subscribes again", "is killed and returns"])
def test_a_key_that_was_not_unbound_is_unbound_when_the_client_returns(
    two: tuple[World, World], local: LocalDatabase, passed: list[float], then: str
) -> None:
    one, other = two
    options = SubscriptionOptions(1)
    before = one.let_in("c")
    before.subscriptions["a/b"] = options
    before.subscribed("a/b", options, None)
    one.run()
    one.is_binding = False
    del before.subscriptions["a/b"]
    before.subscribed("a/b", None, options)
    one.run()
    if then == "is killed and returns":
        pass_time((other,), local, passed, int(SILENT_SECS) + 2)
    else:
        one.leave("c")
        one.run()
    after = other.let_in("c")
    assert other.found.present
    assert {key: on for key, (on, _) in after.unbound.items()} == {"a.b": False}
    if then == "subscribes again":
        after.subscriptions["a/b"] = options
        after.subscribed("a/b", options, None)
    else:
        other.bind_queue(after, "a.b")
    assert not after.unbound
    other.run()
    assert rows_of(local, "SELECT key FROM unbinding") == []
    assert other.let_in("c").subscriptions == {}
    assert other.found.contents.unbindings == set()
    assert bool(other.found.contents.subscriptions) is (then == "subscribes again")


def test_nobody_waits_long_for_an_owner_that_is_lost(
    two: tuple[World, World], passed: list[float], local: LocalDatabase
) -> None:
    one, other = two
    before = one.let_in("c")
    other.let_in("c")
    passed[0] += 1.5
    other.run()
    assert not other.consumed, "the owner before lives, as far as is known"
    passed[0] += 3.0
    local.utc += 4.5  # since its last heartbeat
    other.run()
    assert other.consumed == [before.queue]


def test_who_was_lost_changes_nothing_any_more(two: tuple[World, World]) -> None:
    one, other = two
    before = one.let_in("c")
    other.let_in("c")
    one.store.notices.clear()
    told: list[Outcome] = []
    before.change().subscriptions["a"] = b""
    one.sessions.after_stored(before, told.append)
    one.run()
    assert len(told) == 1
    assert told[0] is not ACCEPTED
    assert one.lost == ["c"]


def test_the_later_of_two_connections_gets_the_session(two: tuple[World, World]) -> None:
    one, _ = two
    first, second = one.open("c"), one.open("c")
    one.run()
    assert first.why == TAKEN_OVER
    assert [arrival.opening.connection for arrival in one.arrivals] == [second]
    view = one.view("c")
    assert view is not None
    assert view.holder in (None, view.owner)


@pytest.mark.parametrize("present", [True, False])
@pytest.mark.parametrize("how", ["is_away", "is_deaf"])
def test_a_client_is_turned_away_while_the_database_is_away(
    two: tuple[World, World], how: str, present: bool
) -> None:
    """What was committed though nobody heard of it is undone: a new session ends, an earlier one goes on."""
    one, _ = two
    if present:
        session = one.let_in("c")
        one.leave("c")
        one.ends.pop(session)([])
        one.run()
    setattr(one.store, how, True)
    guest = one.open("c")
    one.run()
    assert guest.why == AWAY
    assert not one.arrivals
    setattr(one.store, how, False)
    for _ in range(3):
        one.run()
    view = one.view("c")
    assert (view is not None) is present, "the next CONNACK must not name a session that nobody was let into"
    assert view is None or not view.connected


def test_who_leaves_while_it_waits_releases_nothing(two: tuple[World, World]) -> None:
    one, other = two
    before = one.let_in("c")
    other.let_in("c")
    other.leave("c")
    other.run()
    view = one.view("c")
    assert view is not None
    assert view.holder == before.owner
    one.run()
    one.ends.pop(before)([CONTENT])
    one.run()
    assert other.let_in("c").fingerprints([]) == (fingerprint_of(CONTENT),)


@pytest.mark.parametrize("present", [True, False])
def test_a_client_that_goes_before_it_is_let_in_leaves_what_was_there(
    two: tuple[World, World], present: bool
) -> None:
    one, other = two
    if present:
        session = one.let_in("c")
        one.leave("c")
        one.ends.pop(session)([])
        one.run()
    count = other.sessions.count = int(present)
    other.open("c")
    other.run()
    other.sessions.abandon_arrival(other.arrivals.pop())
    other.run()
    assert other.sessions.count == count, "others are refused at sessions_max"
    view = one.view("c")
    assert (view is not None and not view.connected and view.holder is None) is present
    assert len(other.deleted) == (not present)


@pytest.mark.parametrize("secs", [0.0, 60.0])
def test_a_session_counts_once_however_often_its_client_connects(
    two: tuple[World, World], secs: float
) -> None:
    """Each connection takes the session of the one before, of which only the last is accepted."""
    one, _ = two
    one.sessions.count = 0
    for _ in range(3):
        one.open("c", secs=secs)
    one.run()
    one.open("c", secs=secs)
    one.run()
    assert (one.sessions.count, len(one.arrivals)) == (1, 1)
    one.sessions.abandon_arrival(one.arrivals.pop())
    one.run()
    assert one.sessions.count == (one.view("c") is not None)


@pytest.mark.parametrize("secs", [0.0, 60.0])
def test_a_session_whose_client_was_not_accepted_counts_for_nobody(
    two: tuple[World, World], passed: list[float], secs: float
) -> None:
    """Or a client that is refused for its user's share would be accepted by the next replica."""
    one, other = two
    one.open("c", secs=secs, user="alice")
    one.run()
    assert one.arrivals
    passed[0] += COUNT_SECS
    other.run()
    assert other.sessions.elsewhere.of("alice").sessions == 0
    other.sessions.elsewhere.change("alice", Weight(0, 1), 1)  # another session of hers
    other.open("c", secs=secs, user="alice")
    other.run()
    (arrival,) = other.arrivals
    assert arrival.found.earlier is not None
    assert (arrival.found.present, arrival.found.earlier.is_accepted) == (False, False)
    assert other.sessions.elsewhere.of("alice").sessions == 1
    other.sessions.abandon_arrival(other.arrivals.pop())
    other.run()
    one.run()
    assert one.view("c") is None
    assert (one.sessions.pending, other.sessions.pending) == (0, 0)


@pytest.mark.parametrize("secs", [0.0, 10.0, 600.0])
@pytest.mark.parametrize("how", ["is refused", "is taken over", "dies"])
def test_an_earlier_session_goes_on_by_its_own_expiry_until_its_client_is_accepted(
    two: tuple[World, World], local: LocalDatabase, passed: list[float], secs: float, how: str
) -> None:
    """The refused client would have its session for `secs`."""
    one, other = two
    session = other.let_in("c")
    session.change().subscriptions["a"] = b""
    other.run()
    other.leave("c")
    other.ends.pop(session)([])
    other.run()
    one.open("c", secs=secs)
    one.run()
    if how == "is taken over":
        other.let_in("c")
        assert other.found.present
        return
    if how == "is refused":
        one.sessions.abandon_arrival(one.arrivals.pop())
        one.run()
    else:
        pass_time((other,), local, passed, int(SILENT_SECS) + 2)
    pass_time((other,), local, passed, 30)
    view = other.view("c")
    assert view is not None
    assert not view.connected
    pass_time((other,), local, passed, 40)
    assert other.view("c") is None


@pytest.mark.parametrize("secs", [0.0, 10.0])
def test_connack_waits_for_another_expiry_of_a_session_that_goes_on(
    two: tuple[World, World], local: LocalDatabase, passed: list[float], secs: float
) -> None:
    one, other = two
    session = other.let_in("c")
    other.leave("c")
    other.ends.pop(session)([])
    other.run()
    one.open("c", secs=secs)
    one.run()
    (arrival,) = one.arrivals
    one.admit(arrival)
    assert one.waits
    one.step_soon()
    local.settle()
    pass_time((other,), local, passed, int(SILENT_SECS) + 22)
    assert other.view("c") is None


def test_a_session_of_another_user_is_refused(two: tuple[World, World]) -> None:
    one, other = two
    one.let_in("c", user="alice")
    other.open("c", user="bob", only_own=True)
    other.run()
    one.run()
    assert other.others == ["alice"]
    assert not other.arrivals
    assert not one.lost


def test_a_client_that_is_refused_takes_no_place_of_one_whose_session_is_being_opened(
    two: tuple[World, World],
) -> None:
    one, _ = two
    alice = one.open("c", user="alice", only_own=True)
    bob = one.open("c", user="bob", only_own=True)
    one.run()
    assert (alice.why, bob.why, one.others) == ("", "", ["alice"])
    session = one.admit(one.arrivals.pop())
    one.run()
    view = one.view("c")
    assert view is not None
    assert (view.connected, view.owner) == (True, session.owner)
    assert not one.sessions.pending


def test_a_client_gets_its_session_after_another_user_was_refused_it(two: tuple[World, World]) -> None:
    one, _ = two
    session = one.let_in("c", user="bob")
    one.leave("c")
    one.ends.pop(session)([])
    one.run()
    one.open("c", user="alice", only_own=True)
    bob = one.open("c", user="bob", only_own=True)
    one.run()
    assert one.others == ["bob"]
    assert [arrival.opening.connection for arrival in one.arrivals] == [bob]
    assert one.arrivals[0].found.present


@pytest.mark.parametrize("last", ["alice", "bob"])
def test_of_many_that_open_one_session_all_are_answered(two: tuple[World, World], last: str) -> None:
    one, _ = two
    users = ["alice", "bob", "alice", "carol", last]
    guests = [one.open("c", user=user, only_own=True) for user in users]
    one.run()
    whys = [guest.why for guest in guests]
    assert [arrival.opening.connecting.sender.user for arrival in one.arrivals] == ["alice"]
    third, fourth = (TAKEN_OVER, "") if last == "alice" else ("", TAKEN_OVER)
    assert whys == [TAKEN_OVER, TAKEN_OVER, third, fourth, ""]
    assert one.others == ["alice"]
    assert not one.sessions.pending


@pytest.mark.parametrize("how", ["is_away", "is_deaf"])
def test_who_waits_for_the_opening_of_another_user_is_told_that_the_database_is_away(
    two: tuple[World, World], how: str
) -> None:
    one, _ = two
    setattr(one.store, how, True)
    alice, bob = (one.open("c", user=user, only_own=True) for user in ("alice", "bob"))
    one.run()
    assert (alice.why, bob.why) == (AWAY, AWAY)
    setattr(one.store, how, False)
    for _ in range(3):
        one.run()
    view = one.view("c")
    assert view is None or not view.connected


def test_who_goes_while_it_waits_for_another_opening_opens_nothing(two: tuple[World, World]) -> None:
    one, _ = two
    session = one.let_in("c", user="bob")
    one.leave("c")
    one.ends.pop(session)([])
    one.run()
    one.open("c", user="alice", only_own=True)
    bob = one.open("c", user="bob", only_own=True)
    bob.closed = True
    one.run()
    assert (one.others, one.arrivals) == (["bob"], [])
    assert not one.sessions.pending


@pytest.mark.parametrize("present", [True, False])
def test_a_session_whose_later_opening_fails_is_left(two: tuple[World, World], present: bool) -> None:
    """The earlier client was turned away when the later one came."""
    one, _ = two
    if present:
        session = one.let_in("c")
        one.leave("c")
        one.ends.pop(session)([])
        one.run()
    first, second = one.open("c"), one.open("c")
    assert one.store.step()
    _, done = one.store._waiting.pop(0)
    done(Reply(OperationOutcome.REFUSED))
    one.run()
    assert (first.why, second.why) == (TAKEN_OVER, AWAY)
    view = one.view("c")
    assert (view is not None and not view.connected and view.holder is None) is present
    assert len(one.deleted) == (not present)


WILL: Final = Will("w", b"gone")


def test_a_will_is_published_by_whoever_claims_it(two: tuple[World, World], local: LocalDatabase) -> None:
    one, _ = two
    published: list[str] = []
    one.let_in("c", will=WILL)
    one.leave("c", lambda: published.append("c"))
    one.run()
    assert published == ["c"]
    local.utc += 60.0
    one.run()
    assert not one.wills


@pytest.mark.parametrize("what", ["room", "no room", "a later connection", "closed", "away"])
def test_a_will_that_seems_too_large_waits_for_a_new_count(
    two: tuple[World, World], local: LocalDatabase, passed: list[float], what: str
) -> None:
    """Another replica may have published the will of the client's last connection since the last count."""
    one, _ = two
    pass_time(two, local, passed, int(COUNT_SECS))
    one.room = 0
    guest = one.open("c", will=WILL)
    later = one.open("c", user="other", only_own=True) if what == "closed" else guest
    one.run()
    assert (one.arrivals, one.others, one.sessions.pending) == ([], [], 2 if what == "closed" else 1)
    one.room = 0 if what == "no room" else will_bytes(WILL)
    if what == "a later connection":
        later = one.open("c", will=WILL)
        one.run()
        assert guest.why == TAKEN_OVER
    guest.closed |= what == "closed"
    one.store.is_away = what == "away"
    pass_time(two, local, passed, 3)
    if what == "no room":
        assert one.others == [""]
    elif what == "away":
        assert guest.why == AWAY
    else:
        assert [one.opening.connection for one in one.arrivals] == [later]
    assert not one.sessions._openings
    assert one.sessions.opening_wills.total == (what in ("room", "a later connection")) * will_bytes(WILL)


@pytest.mark.parametrize("accepted", [True, False])
def test_clients_that_connect_at_once_have_room_for_their_wills_together(
    two: tuple[World, World], local: LocalDatabase, passed: list[float], accepted: bool
) -> None:
    one, _ = two
    one.room = 3 * will_bytes(WILL) // 2
    one.open("a", will=WILL)
    one.open("b", will=WILL)
    one.run()
    (arrival,) = one.arrivals
    if accepted:
        one.admit(one.arrivals.pop())
        one.room -= will_bytes(WILL)
    else:
        one.sessions.abandon_arrival(one.arrivals.pop())
    pass_time(two, local, passed, 3)
    assert [one.opening.client for one in one.arrivals] == ([] if accepted else ["b"])
    assert one.others == ([""] if accepted else [])
    for arrival in one.arrivals:
        one.sessions.abandon_arrival(arrival)
    assert not one.sessions.opening_wills.total


@pytest.mark.parametrize("how", ["settled", "late", "lost"])
@pytest.mark.parametrize("secs", [0.0, 60.0])
def test_a_client_that_comes_back_elsewhere_waits_for_its_will(
    two: tuple[World, World], passed: list[float], how: str, secs: float
) -> None:
    """What it publishes, such as that it is there, would come before the will, such as that it is lost."""
    one, other = two
    published: list[str] = []
    session = one.let_in("c", will=WILL, secs=secs)
    one.run()
    one.is_slow = True
    one.leave("c", lambda: published.append("c"))
    if secs:
        one.ends.pop(session)([])
    one.run()
    assert published == ["c"]
    guest = other.open("c")
    for _ in range(2):
        other.run()
        (arrival,) = other.arrivals
        assert not arrival.opening._answered.is_set()
    if how == "settled":
        one.settle()
        one.run()
    elif how == "late":
        passed[0] += WILL_SECS
    else:
        other.store.is_away = True
    other.run()
    other.store.is_away = False
    other.run()
    assert arrival.opening._answered.is_set()
    assert not guest.why


def test_a_will_of_a_client_that_came_back_elsewhere_is_published_once(
    two: tuple[World, World], local: LocalDatabase, passed: list[float]
) -> None:
    """By the new owner, before the client can publish anything."""
    one, other = two
    published: list[str] = []
    one.let_in("c", will=WILL)
    one.run()
    other.open("c")
    other.run()
    assert len(other.wills) == 1
    one.leave("c", lambda: published.append("c"))
    one.run()
    assert not published, "another owner has the session"
    pass_time(two, local, passed, 30)
    assert len(one.wills + other.wills) == 1


def pass_time(worlds: tuple[World, ...], local: LocalDatabase, passed: list[float], secs: int) -> None:
    """Let seconds pass for all, who do what is due."""
    for world in worlds:
        if world.sessions.run_due_work not in world.membership.on_claimed_work:
            world.membership.on_claimed_work.append(world.sessions.run_due_work)
    for _ in range(secs):
        passed[0] += 1.0
        local.utc += 1.0
        for world in worlds:
            world.run()


def test_a_will_whose_publisher_is_down_is_published_by_another(
    two: tuple[World, World], local: LocalDatabase, passed: list[float]
) -> None:
    one, other = two
    one.let_in("c", will=WILL)
    one.run()
    other.is_up = False
    other.open("c")
    other.run()
    assert not other.wills
    pass_time(two, local, passed, 25)
    assert len(one.wills) == 1


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("first", ["one", "other"])
def test_a_will_that_could_not_be_settled_for_long_is_published_once(
    two: tuple[World, World], local: LocalDatabase, passed: list[float], first: str, returns: bool
) -> None:
    """Its claim has run out when the database is back, whichever replica reaches it first."""
    one, other = two
    published: list[str] = []
    one.let_in("c", will=WILL, secs=0.0)
    pass_time(two, local, passed, 15)
    one.is_slow = True
    one.leave("c", lambda: published.append("c"))
    one.run()
    for world in two:
        world.store.is_away = True
    one.settle()  # the cluster has it
    pass_time(two, local, passed, int(CLAIM_SECS) + 5)
    for world in two:
        world.store.is_away = False
    if returns:
        other.open("c", secs=0.0)
    pass_time(two if first == "one" else (other, one), local, passed, 60)
    assert (published, one.wills, other.wills) == (["c"], [], [])


@pytest.mark.parametrize("how", ["leaves", "returns"])
def test_a_will_that_a_frozen_replica_has_claimed_is_published_once(
    two: tuple[World, World], local: LocalDatabase, passed: list[float], how: str
) -> None:
    """When the replica learns of its claim, another one may have claimed and published the will."""
    one, other = two
    published: list[str] = []
    one.let_in("c", will=WILL)
    one.run()
    if how == "leaves":
        one.leave("c", lambda: published.append("c"))
    else:
        one.open("c", clean=True)
    hear = one.store.take()  # the database commits what the replica does not hear of yet
    pass_time((other,), local, passed, int(CLAIM_SECS) + 1)
    hear()
    one.run()
    assert (published, one.wills, len(other.wills)) == ([], [], 1)


@pytest.mark.parametrize("where", ["here", "elsewhere", "here, before the first is answered"])
def test_the_will_of_a_client_that_was_never_let_in_is_void(
    two: tuple[World, World], local: LocalDatabase, passed: list[float], where: str
) -> None:
    """It has lost the race for its identifier."""
    one, other = two
    one.open("c", will=WILL)
    if where != "here, before the first is answered":
        one.run()
        assert one.arrivals
    winner = other if where == "elsewhere" else one
    winner.open("c")
    winner.run()
    pass_time(two, local, passed, 30)
    assert not one.wills + other.wills


def test_the_will_of_a_client_without_connack_is_void(
    two: tuple[World, World], local: LocalDatabase, passed: list[float]
) -> None:
    one, other = two
    one.open("c", will=WILL)
    one.run()
    one.admit(one.arrivals.pop())  # its replica is lost before it could store that
    other.open("c")
    other.run()
    pass_time((other,), local, passed, 30)
    assert not other.wills


def lose_reply(one: World, **more: Any) -> Guest:
    """A client connects, and is refused: the database commits that, and its reply is lost."""
    one.store.is_deaf = True
    guest = one.open("c", will=WILL, **more)
    assert one.store.step()
    one.store.is_deaf = False
    assert guest.why == AWAY
    return guest


@pytest.mark.parametrize("where", ["here", "elsewhere", "at an earlier version"])
def test_the_will_of_a_refused_client_is_void_when_it_is_accepted_later(
    two: tuple[World, World], local: LocalDatabase, passed: list[float], where: str
) -> None:
    one, other = two
    lose_reply(one)
    winner = one if where == "here" else other
    wills = rows_of(local, "SELECT * FROM will")
    winner.open("c", will=WILL)
    assert other.store.step() or winner is one
    if (
        where == "at an earlier version"
    ):  # which leaves the will for two seconds, and has no names of openings
        for will in wills:
            execute(
                local,
                "INSERT INTO will (domain, client, epoch, message, delay, due_at, claimed, served)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (*will[:5], local.utc + 2.0, 0, 0),
            )
        execute(local, "UPDATE session SET opening = ''")
    pass_time(two, local, passed, 1)
    session = winner.admit(winner.arrivals.pop())
    pass_time(two, local, passed, 30)
    assert winner.here["c"] is session
    view = one.view("c")
    assert view is not None
    assert view.owner == session.owner
    assert view.connected
    assert not one.wills + other.wills
    published: list[str] = []
    winner.leave("c", lambda: published.append("c"))
    winner.run()
    assert published == ["c"]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_session_that_still_leaves_is_not_that_of_a_refused_client(
    two: tuple[World, World], local: LocalDatabase, passed: list[float], is_first: bool
) -> None:
    """Its client is lost while the database is away, and is refused when it connects again.

    `is_first`: what its refusal submits is committed before the end of the earlier connection.
    """
    one, other = two
    published: list[str] = []
    session = one.let_in("c", will=WILL)
    one.run()
    one.store.is_away = True
    one.leave("c", lambda: published.append("c"))
    one.ends.pop(session)([])
    guest = one.open("c", clean=True, secs=0.0)
    while not guest.why:
        assert one.store.step()
    one.store.is_away = not is_first
    while one.store.step():
        pass
    one.store.is_away = False
    pass_time(two, local, passed, 30)
    assert (published, one.wills, other.wills) == (["c"], [], [])
    assert not one.deleted + other.deleted
    view = one.view("c")
    assert view is not None
    assert (view.connected, view.queue) == (False, session.queue)


def test_a_queue_that_was_not_deleted_is_deleted_by_others(
    two: tuple[World, World], local: LocalDatabase, passed: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    other.membership.on_claimed_work.append(other.sessions.run_due_work)
    session = one.let_in("c")
    monkeypatch.setattr(one, "delete", lambda queue, done=None: None)  # lost before it comes to that
    one.open("c", clean=True)
    one.run()
    passed[0] += rows.CLAIM_SECS + 1.0
    local.utc += rows.CLAIM_SECS + 1.0
    other.run()
    assert other.deleted == [session.queue]
    passed[0] += rows.CLAIM_SECS + 1.0
    local.utc += rows.CLAIM_SECS + 1.0
    other.run()
    assert other.deleted == [session.queue]


def test_all_is_released_before_a_process_ends(two: tuple[World, World]) -> None:
    one, other = two
    session = one.let_in("c")
    done: list[str] = []
    one.sessions.release_all([session], lambda: done.append("released"))
    assert not done
    one.run()
    assert done == ["released"]
    other.let_in("c")
    assert other.consumed == [session.queue]


def test_nothing_more_is_begun_while_the_database_is_away_for_long(
    two: tuple[World, World], passed: list[float]
) -> None:
    one, _ = two
    one.store.is_away = True
    one.run()
    assert not one.sessions.unavailable_reason
    passed[0] += module.AWAY_SECS
    one.run()
    assert one.sessions.unavailable_reason == AWAY
    one.store.is_away = False
    one.run()
    assert not one.sessions.unavailable_reason


def test_nothing_is_accepted_of_a_session_that_was_lost_while_it_leaves(two: tuple[World, World]) -> None:
    one, other = two
    session = one.let_in("c")
    other.let_in("c")
    one.store.notices.clear()
    session.change().subscriptions["a"] = b""
    one.step_soon()
    one.leave("c")
    assert one.store.step()
    assert session.is_stopped
    told: list[Outcome] = []
    one.sessions.after_stored(session, told.append)
    assert told == [NOT_OURS]
    one.run()


def test_what_adds_nothing_is_not_pending(two: tuple[World, World]) -> None:
    one, _ = two
    session = one.let_in("c")
    session.change()
    one.run()
    assert not one.sessions.pending
    told: list[Outcome] = []
    session.change()
    one.sessions.after_stored(session, told.append)
    assert told == [ACCEPTED]
    one.run()
    assert not one.sessions.pending


def test_a_queue_that_the_database_has_as_held_here_is_released(
    two: tuple[World, World], passed: list[float]
) -> None:
    """Though this replica knows of none: it has lost what it knew."""
    one, other = two
    one.let_in("c")
    one.here.clear()
    one.sessions._consumable.clear()
    after = other.let_in("c")
    passed[0] += 1.0
    one.run()
    other.run()
    assert other.consumed == [after.queue]


def execute(local: LocalDatabase, statement: str, values: tuple[object, ...] = ()) -> None:
    """Change the database behind everybody's back, as a restore does."""
    rows_of(local, statement, values)


def rows_of(local: LocalDatabase, statement: str, values: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
    """Return what the database has."""
    assert local.database._connection is not None
    return local.database._connection.execute(statement, values).fetchall()


@pytest.mark.parametrize("how", ["gone", "older"])
def test_a_client_that_a_restored_database_does_not_have_is_lost_with_its_queue(
    two: tuple[World, World], local: LocalDatabase, passed: list[float], how: str
) -> None:
    one, _ = two
    session = one.let_in("c")
    kept = one.let_in("kept")
    if how == "gone":
        execute(local, "DELETE FROM session WHERE client = 'c'")
    else:
        execute(local, "UPDATE session SET epoch = 1, queue = 'before', connected = 0 WHERE client = 'c'")
    one.store.notices.clear()
    pass_time((one,), local, passed, int(module.SWEEP_SECS) + 1)
    assert one.lost == ["c"]
    one.ends.pop(session)([])
    one.run()
    assert one.deleted == [session.queue]
    assert one.here == {"kept": kept}


@pytest.mark.parametrize("is_here", [True, False])
def test_a_queue_is_deleted_by_the_owner_that_consumes_it(two: tuple[World, World], is_here: bool) -> None:
    """RabbitMQ closes the connection of a replica whose consumer begins while the queue is deleted.

    `is_here`: the client is still connected to that owner when it starts clean at the other replica.
    """
    one, other = two
    before = one.let_in("c")
    if not is_here:
        one.leave("c")
        one.run()
    other.let_in("c", clean=True)
    one.run()
    assert not one.deleted + other.deleted
    one.ends.pop(before)([])
    one.run()
    assert (one.deleted, other.deleted) == ([before.queue], [])


@pytest.mark.parametrize("over", [False, True])
def test_who_waits_for_a_queue_leaves_its_deletion_to_the_one_that_consumes_it(
    two: tuple[World, World], local: LocalDatabase, passed: list[float], over: bool
) -> None:
    """The client starts clean at a third replica. An owner that is dead releases nothing."""
    one, other = two
    third = World(local, "third")
    before = one.let_in("c")
    other.let_in("c")
    one.run()
    assert not other.consumed
    third.let_in("c", clean=True, secs=0.0 if over else 60.0)
    if over:
        third.leave("c")
        third.run()
        assert third.view("c") is None
    other.run()
    other.run()
    assert other.lost == ["c"]
    assert not one.deleted + other.deleted
    passed[0] += module.RELEASE_SECS_MAX
    other.run()
    assert other.deleted == [before.queue]


def test_the_queue_of_a_stray_session_is_deleted_when_its_client_started_clean_elsewhere(
    two: tuple[World, World], local: LocalDatabase, passed: list[float]
) -> None:
    """After its owner had asked for its sessions, and before that is left."""
    one, other = two
    before = one.here.pop(one.let_in("c").client_id)
    pass_time(two, local, passed, int(module.SWEEP_SECS) + 1)
    passed[0] += module.STRAY_SECS
    one.sessions.tick(clock.now())
    while not any(isinstance(operation, LeaveSession) for operation, *_ in one.store._waiting):
        assert one.store.step()
    waiting, one.store._waiting = one.store._waiting, []
    other.let_in("c", clean=True)
    one.store._waiting = waiting
    one.run()
    assert one.deleted == [before.queue]


def test_a_stray_session_leaves_its_queue_to_the_owner_that_consumes_it(
    two: tuple[World, World], local: LocalDatabase, passed: list[float]
) -> None:
    """That owner has not requeued all messages yet, and the next one must get them in their order."""
    one, other = two
    before = one.let_in("c")
    other.open("c")
    other.run()
    other.arrivals.clear()  # it was lost
    pass_time(two, local, passed, int(module.SWEEP_SECS + module.STRAY_SECS) + 2)
    view = other.view("c")
    assert view is not None
    assert (view.connected, view.holder) == (False, before.owner)
    after = other.let_in("c")
    assert not other.consumed
    one.ends.pop(before)([CONTENT])
    one.run()
    other.run()
    assert after.fingerprints([]) == (fingerprint_of(CONTENT),)


def test_a_session_that_began_again_is_released_by_its_own_owner(
    two: tuple[World, World], local: LocalDatabase, passed: list[float]
) -> None:
    """Although the owner of the session before still consumes that session's queue."""
    one, other = two
    third = World(local, "third")
    first = one.let_in("c")
    second = other.let_in("c", clean=True)
    other.run()
    assert other.consumed == [second.queue]
    after = third.let_in("c")
    one.run()
    one.ends.pop(first)([])
    one.run()
    other.run()
    third.run()
    assert not third.consumed
    other.ends.pop(second)([CONTENT])
    other.run()
    third.run()
    assert third.consumed == [after.queue] == [second.queue]
    assert after.fingerprints([]) == (fingerprint_of(CONTENT),)
    assert (one.deleted, other.deleted) == ([first.queue], [])


def test_a_session_that_moves_keeps_its_queue(two: tuple[World, World]) -> None:
    one, other = two
    before = one.let_in("c")
    other.let_in("c")
    one.run()
    one.ends.pop(before)([])
    one.run()
    assert not one.deleted


@pytest.mark.parametrize("what", ["nothing", "a change", "a change that is fenced", "a change behind it"])
def test_a_client_that_leaves_is_pending_until_the_database_has_it(
    two: tuple[World, World], what: str
) -> None:
    one, other = two
    session = one.let_in("c")
    if what == "a change that is fenced":
        other.let_in("c")
        one.store.notices.clear()
    if what.startswith("a change") and what != "a change behind it":
        session.change().subscriptions["a"] = b""
        one.step_soon()
    one.leave("c")
    if what == "a change behind it":
        session.change().subscriptions["a"] = b""
        one.step_soon()
    steps = 0
    while one.sessions.pending and steps < 10:
        assert one.store.step()
        steps += 1
    told: list[Outcome] = []
    one.sessions.after_stored(session, told.append)
    assert told == [NOT_OURS if what == "a change that is fenced" else ACCEPTED]
    view = other.view("c")
    assert view is not None
    assert view.connected is (what == "a change that is fenced")
    assert steps == (1 if what == "nothing" else 2)
    one.run()
    assert not one.sessions.pending


@pytest.mark.parametrize("what", ["an outage", "missed notices"])
def test_a_row_that_is_connected_for_nobody_is_left(
    two: tuple[World, World], local: LocalDatabase, passed: list[float], what: str
) -> None:
    one, _ = two
    one.let_in("c")
    one.here.clear()
    pass_time((one,), local, passed, 1)
    if what == "an outage":
        one.store.is_away = True
        one.run()
        one.store.is_away = False
    else:
        one.sessions.handle_notice(Notice(NoticeSubject.MISSED))
    pass_time((one,), local, passed, 2)
    view = one.view("c")
    assert view is not None
    assert view.connected, "it may be about to come"
    pass_time((one,), local, passed, int(module.STRAY_SECS) + 2)
    view = one.view("c")
    assert view is not None
    assert (view.connected, view.holder) == (False, None)


@pytest.mark.parametrize("where", ["arrived", "asked for"])
def test_a_client_that_is_about_to_be_let_in_is_not_left(
    two: tuple[World, World], local: LocalDatabase, passed: list[float], where: str
) -> None:
    one, _ = two
    one.open("c")
    one.run()
    if where == "asked for":
        one.sessions._openings["c"] = one.arrivals.pop().opening
    pass_time((one,), local, passed, 2 * int(module.SWEEP_SECS))
    view = one.view("c")
    assert view is not None
    assert view.connected


def test_all_pages_are_compared(
    two: tuple[World, World], local: LocalDatabase, passed: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    monkeypatch.setattr(module, "OWNED_MAX", 3)
    for number in range(10):
        one.let_in(f"c{number}")
    other.let_in("c4")
    one.store.notices.clear()
    execute(local, "DELETE FROM session WHERE client = 'c8'")
    pass_time((one,), local, passed, int(module.SWEEP_SECS) + 1)
    assert sorted(one.lost) == ["c4", "c8"]
    assert len(one.here) == 8


@pytest.mark.parametrize("how", ["taken", "ended", "ours", "away"])
def test_a_queue_that_is_missing_is_whose_the_database_says(two: tuple[World, World], how: str) -> None:
    one, other = two
    session = one.let_in("c")
    if how == "taken":
        other.open("c", clean=True)
        other.run()
        one.store.notices.clear()
    elif how == "ended":
        one.sessions._state.submit(
            LeaveSession(SessionKey(DOMAIN, "c"), session.owner.epoch, 0.0, True), print
        )
    one.store.is_away = how == "away"
    heard: list[bool] = []
    one.sessions.check_owner(session, heard.append)
    one.run()
    if how == "away":
        assert not heard
        one.store.is_away = False
        one.run()
    assert heard == [how in ("ours", "away")]


def test_a_client_that_comes_again_is_not_taken_for_one_that_was_turned_away(
    two: tuple[World, World],
) -> None:
    """The database may have either of them as connected, and the second one waits to be let in."""
    one, _ = two
    one.store.is_deaf = True
    one.open("c")
    assert one.store.step()
    one.store.is_deaf, one.store.is_away = False, True
    assert one.store.step()  # whether it was opened cannot be looked up now
    one.store.is_away = False
    one.open("c")
    one.run()
    one.run()
    view = one.view("c")
    assert view is not None
    assert view.connected
    assert one.admit(one.arrivals.pop()).owner == view.owner


def test_a_client_that_the_database_has_as_gone_has_to_connect_anew(
    two: tuple[World, World], local: LocalDatabase, passed: list[float]
) -> None:
    """Else its session would expire while it is here."""
    one, _ = two
    one.let_in("c")
    execute(local, "UPDATE session SET connected = 0 WHERE client = 'c'")
    pass_time((one,), local, passed, int(module.SWEEP_SECS) + 1)
    assert one.lost == ["c"]


@pytest.mark.parametrize("released_first", [False, True])
def test_the_queue_of_a_session_that_ends_is_deleted_at_once(
    two: tuple[World, World], released_first: bool
) -> None:
    """Its LeaveSession waits for a change that is being stored, so the queue may be released before."""
    one, _ = two
    session = one.let_in("c")
    session.change().subscriptions["a"] = b""
    one.sessions.flush()
    session.expiry_secs = 0.0
    one.leave("c")
    if released_first:
        one.ends.pop(session)([])
        one.run()
    else:
        one.run()
        assert not one.deleted
        one.ends.pop(session)([])
        one.run()
    assert set(one.deleted) == {session.queue}


def test_sessions_are_counted_twice_in_ten_seconds_however_many_change(
    two: tuple[World, World], passed: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query reads all sessions of the database, and in a busy cluster some always change meanwhile."""
    one, _ = two
    counted: list[float] = []
    query = one.store.query

    def note(asked: Any, done: Any) -> None:
        if isinstance(asked, WeighSessions):
            counted.append(passed[0])
            query(asked, done)
            one.sessions.elsewhere.change(f"user-{len(counted)}", Weight(0, 1), 1)
        else:
            query(asked, done)

    monkeypatch.setattr(one.store, "query", note)
    for _ in range(20):
        passed[0] += 1.0
        one.run()
    assert len(counted) <= 4
