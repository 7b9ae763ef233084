"""Retained messages in the database: who waits for whom, limits, walks, and a database that is away."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from gateway import clock
from gateway.app.retained import SharedMessages
from gateway.broker.mqtt.retained import RETAINED_FULL
from gateway.broker.mqtt.session import Grant, Session, SessionLimits, SessionTally, SubscriptionOptions
from gateway.broker.mqtt.system import SYS
from gateway.broker.shares import UserQuotas
from gateway.containment import counted
from gateway.egress.confirms import WAITING_FULL, WAITING_USER_FULL
from gateway.engine.envelope import Number, encode
from gateway.engine.retain_queue import RetainQueue
from gateway.engine.retained import (
    AWAY,
    LATE,
    REFUSED,
    RetainedPublication,
    SharedRetained,
    decode_retained,
    encode_retained,
)
from gateway.engine.retained_reads import IN_FLIGHT_MAX
from gateway.engine.walks import PAGE_BYTES, SentRetained, SharedWalk
from gateway.model.batch import Batch, Recipient, SubBatch
from gateway.model.message import NEVER, Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome, Verdict
from gateway.model.shares import UserShares
from gateway.model.times import Monotonic
from gateway.protocols.mqtt.dialect import topic_address
from gateway.settings import Limits
from gateway.state.interface import CLEARED_SECS, ListReplicas, MatchRetained, Retain, Retained
from gateway.state.interface import REFUSED as REJECTS
from tests.engine.local_state import LocalDatabase

LIFE = b"12345678"


class Outlet:
    """A client that takes everything."""

    congested = False

    def send(self, rows: list[Any]) -> list[Any]:
        return []


def sent(
    body: bytes,
    topic: str = "t",
    *,
    endpoint: str = "mqtt",
    client: str = "c",
    user: str = "u",
    retain: bool = True,
    qos: int = 1,
    expires: float = NEVER,
) -> Message:
    sender = Sender(endpoint, client, user)
    address = topic_address(topic)
    return Message(address, body, assurance=qos, retain=retain, expires=expires, sender=sender)


def stored(message: Message, number: Number | None = None) -> bytes:
    return encode_retained(encode(message, 0.0, number=number), bytes(message.body)) if message.body else b""


class Replica:
    """One replica: what it has published, and what became of each message."""

    def __init__(
        self,
        local: LocalDatabase,
        *,
        count_max: int = 100,
        bytes_max: int = 1_000_000,
        share: float = 1.0,
        waiting_max: int = 1_000,
    ) -> None:
        self.local = local
        self.state = local.store()
        quota = UserShares("retained", count_max=count_max, bytes_max=bytes_max, user_share=share)
        self.retained = SharedRetained(self.state, quota)
        self.published: list[bytes] = []
        self.outcomes: dict[bytes, Outcome] = {}
        self.waiting = RetainQueue(
            self.retained, self._send, self._alone, messages_max=waiting_max, bytes_max=1_000_000
        )
        self.tick()

    def _send(self, part: SubBatch, positions: Sequence[int]) -> None:
        self.published += [bytes(part.messages[at].body) for at in positions]
        part.settle_at(positions)

    def _alone(self, message: Message) -> SubBatch:
        batch = Batch(self, Monotonic(0.0))
        part = SubBatch(batch, Recipient(self))
        part.messages.append(message)
        part.slots.append(batch.open(None, 1))
        return part

    def publish(self, part: SubBatch) -> None:
        raise AssertionError

    def settle(self, receipts: list[Any], refused: dict[int, Outcome] | None, received: Monotonic) -> None:
        for at, receipt in enumerate(receipts):
            if receipt is not None:
                self.outcomes[receipt] = (refused or {}).get(at, ACCEPTED)

    def hold(self, senders: object) -> list[Any]:
        return []

    def add(self, *messages: Message, epoch: int = 0) -> None:
        """Publish, as one part, in sessions of this epoch."""
        batch = Batch(self, Monotonic(0.0))
        part = SubBatch(batch, Recipient(self))
        for message in messages:
            part.messages.append(message)
            part.slots.append(batch.open(bytes(message.body), 1))
        for at, message in enumerate(messages):
            if message.retain or self.waiting.has(message):
                given = RetainedPublication(message, stored(message), message.sender.client, epoch)
                self.waiting.add(part, at, given if message.retain else None)
            else:
                self._send(part, [at])

    def tick(self, secs: float = 1_000.0) -> None:
        """Time passes, by the clock of the loop."""
        self.retained.run(Monotonic(trio.current_time() + secs))
        self.waiting.run()
        self.local.settle()

    def there(self, topic_filter: str = "#") -> dict[str, bytes]:
        """What is in the database."""
        found: list[Retained] = []
        self.state.query(MatchRetained(topic_filter), lambda reply: found.extend(reply.value or ()))
        self.local.settle()
        decoded = [decode_retained(one) for one in found]
        return {one.message.address.name: one.message.body for one in decoded if one is not None}


@pytest.fixture
async def local(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> LocalDatabase:
    return LocalDatabase(tmp_path)


# Order.


async def test_a_message_is_published_when_it_is_in_the_database(local: LocalDatabase) -> None:
    one = Replica(local)
    one.add(sent(b"1"))
    assert (one.published, one.outcomes, len(one.waiting)) == ([], {}, 1)
    local.settle()
    assert (one.published, one.outcomes, len(one.waiting)) == ([b"1"], {b"1": ACCEPTED}, 0)
    assert one.there() == {"t": b"1"}


async def test_who_waits_for_whom(local: LocalDatabase) -> None:
    """The same client's messages, and those of the same topic that are retained. Nobody else."""
    one = Replica(local)
    one.add(
        sent(b"first", "t"),
        sent(b"behind", "x", retain=False),
        sent(b"plain", "t", client="other", retain=False),
        sent(b"same topic", "t", client="third"),
        sent(b"another topic", "z", client="other"),
        sent(b"behind it", "q", client="other", retain=False),
        sent(b"of an endpoint", "t", endpoint="link", retain=False),
    )
    assert one.published == [b"plain", b"of an endpoint"]
    assert one.state.step()  # the first topic is committed
    assert one.published[2:] == [b"first", b"behind"]
    local.settle()
    assert sorted(one.published[4:]) == [b"another topic", b"behind it", b"same topic"]
    assert one.published.index(b"another topic") < one.published.index(b"behind it")
    assert len(one.waiting) == 0


async def test_what_comes_meanwhile_goes_as_one_and_is_published_in_order(local: LocalDatabase) -> None:
    one = Replica(local)
    submitted: list[Any] = []
    submit = one.state.submit
    one.state.submit = lambda operation, done: (submitted.append(operation), submit(operation, done))  # type: ignore
    bodies = [b"%d" % at for at in range(50)]
    one.add(*[sent(body, client=f"c{int(body) % 3}") for body in bodies])
    local.settle()
    assert one.published == bodies
    assert one.there() == {"t": b"49"}
    assert len(submitted) == 2


async def test_a_clear_between_messages(local: LocalDatabase) -> None:
    one = Replica(local)
    one.add(sent(b"1"), sent(b""))
    local.settle()
    assert (one.published, one.there()) == ([b"1", b""], {})
    one.add(sent(b""), sent(b"2"))
    local.settle()
    assert (one.published[2:], one.there()) == ([b"", b"2"], {"t": b"2"})
    assert len(one.retained) == 1


async def test_a_user_has_no_more_than_its_share_of_what_waits(local: LocalDatabase) -> None:
    one = Replica(local, waiting_max=4)
    quotas = UserQuotas(Limits(user_share=0.5))
    one.waiting.share_among(quotas)
    one.add(*(sent(b"%d" % at, f"t/{at}") for at in range(3)))
    one.add(sent(b"of another", "t", client="d", user="v"))
    assert one.outcomes == {b"2": WAITING_USER_FULL}
    assert quotas.waiting.refused == 1
    local.settle()
    one.add(sent(b"3"))
    local.settle()
    assert sorted(one.published) == [b"0", b"1", b"3", b"of another"]


async def test_more_than_may_wait_is_released(local: LocalDatabase) -> None:
    one = Replica(local, waiting_max=2)
    one.add(sent(b"1"), sent(b"2"), sent(b"3"), sent(b"4", retain=False))
    assert one.outcomes == {b"3": WAITING_FULL, b"4": WAITING_FULL}
    local.settle()
    assert one.published == [b"1", b"2"]


# A database that is away.


async def test_a_database_that_is_away_is_waited_for(local: LocalDatabase) -> None:
    """For some time. A later message is not undone by an earlier one that is submitted again."""
    one, two = Replica(local), Replica(local)
    one.state.is_away = True
    one.add(sent(b"1"), sent(b"behind", "x", retain=False))
    local.settle()
    one.add(sent(b"2"))
    assert one.outcomes == {}
    one.tick()
    assert one.outcomes == {}
    two.add(sent(b"of another", "other"))
    one.state.is_away = False
    one.tick()
    assert one.published == [b"1", b"behind", b"2"]
    assert one.there() == {"t": b"2", "other": b"of another"}


async def test_who_has_waited_for_too_long_is_refused(local: LocalDatabase) -> None:
    one = Replica(local)
    one.state.is_away = True
    one.add(sent(b"1"), sent(b"behind", "x", retain=False))
    await trio.sleep(8)
    one.add(sent(b"2"))
    one.tick()
    assert one.outcomes == {}
    await trio.sleep(3)
    one.tick()
    assert one.outcomes == {b"1": AWAY, b"behind": ACCEPTED}
    assert AWAY.verdict is Verdict.RELEASED
    assert one.published == [b"behind"]
    await trio.sleep(10)
    one.tick()
    assert one.outcomes[b"2"] == AWAY
    one.state.is_away = False
    one.tick()
    one.add(sent(b"3"))
    local.settle()
    assert (one.published, one.there(), len(one.waiting)) == ([b"behind", b"3"], {"t": b"3"}, 0)


async def test_what_the_database_rejects_costs_one_message(local: LocalDatabase) -> None:
    one = Replica(local)
    submit = one.state.submit

    def reject(operation: Any, done: Any) -> None:
        if operation.topic == "bad":
            operation = ListReplicas()
            one.state.query(operation, lambda reply: done(REJECTS))
        else:
            submit(operation, done)

    one.state.submit = reject  # type: ignore[method-assign]
    one.add(sent(b"1", "bad"), sent(b"2", "good"))
    local.settle()
    assert one.outcomes == {b"1": REFUSED, b"2": ACCEPTED}
    assert (one.published, one.retained.quota.count) == ([b"2"], 1)


# Limits.

WEIGHT = sent(b"x").byte_count


def refused(replica: Replica) -> list[bytes]:
    return [body for body, outcome in replica.outcomes.items() if outcome is RETAINED_FULL]


async def test_a_topic_beyond_the_limit_is_refused_and_published(local: LocalDatabase) -> None:
    one = Replica(local, count_max=2)
    one.add(*[sent(b"%d" % at, f"t/{at}") for at in range(4)])
    local.settle()
    one.tick()
    assert refused(one) == [b"2", b"3"]
    assert one.published == [b"0", b"1", b"2", b"3"]
    assert one.there() == {"t/0": b"0", "t/1": b"1"}
    assert one.retained.refused == 2
    assert one.retained.quota.refused == 2
    one.add(sent(b"new", "t/0"), sent(b"", "t/1"), sent(b"5", "t/5"))
    one.tick()
    assert one.there() == {"t/0": b"new", "t/5": b"5"}


async def test_of_several_of_one_topic_those_are_retained_that_fit(local: LocalDatabase) -> None:
    one = Replica(local, bytes_max=WEIGHT + 50)
    one.add(sent(b"first"), sent(b"a"), sent(b"b"), sent(bytes(100)))
    local.settle()
    one.tick()
    assert refused(one) == [bytes(100)]
    assert one.published == [b"first", b"a", b"b", bytes(100)]
    assert one.there() == {"t": b"b"}
    assert one.retained.quota.total == WEIGHT


async def test_one_user_has_a_share(local: LocalDatabase) -> None:
    one, two = (Replica(local, count_max=4, share=0.5) for _ in range(2))
    one.add(*[sent(b"%d" % at, f"t/{at}", user="greedy") for at in range(3)])
    local.settle()
    one.tick()
    assert refused(one) == [b"2"]
    assert "user_share" in one.retained.quota.last_limit
    two.tick()
    two.add(sent(b"more", "t/3", user="greedy"), sent(b"little", "t/4", user="modest"))
    two.tick()
    assert refused(two) == [b"more"]
    two.add(sent(b"over", "t/0", user="modest"))  # in place of somebody else's
    two.tick()
    one.tick()
    assert refused(two) == [b"more"]
    one.add(sent(b"again", "t/5", user="greedy"))
    one.tick()
    one.tick()  # what is on its way when the figures are read may count twice
    assert refused(one) == [b"2"]
    weights = {user: one.retained.quota.count_of(user) for user in ("greedy", "modest")}
    assert weights == {"greedy": 2, "modest": 2}


async def test_topics_that_were_cleared_are_remembered_within_limits(local: LocalDatabase) -> None:
    """As many of each user as retained messages may be, for a minute. A late message of another is stored."""
    one = Replica(local, count_max=4, share=0.5)

    def is_stored_late(topic: str) -> bool:
        one.add(sent(b"late", topic), epoch=1)
        local.settle()
        return topic in one.there()

    for topic, user in (("a", "u"), ("b", "u"), ("c", "u"), ("d", "v")):
        one.add(sent(b"", topic, user=user), epoch=2)
    local.settle()
    assert [topic for topic in "abcd" if is_stored_late(topic)] == ["c"]
    one.tick(1_000.0 + CLEARED_SECS)
    one.add(sent(b"", "c"), epoch=2)
    local.settle()
    assert not is_stored_late("c")


async def test_others_have_cleared_meanwhile(local: LocalDatabase) -> None:
    """Old figures are read again before anybody is refused."""
    one, two = Replica(local, count_max=2), Replica(local, count_max=2)
    one.add(sent(b"1", "t/1"), sent(b"2", "t/2"))
    local.settle()
    two.tick()
    assert len(two.retained) == 2
    await trio.sleep(5)
    one.add(sent(b"", "t/1"), sent(b"", "t/2"))
    local.settle()
    two.add(sent(b"3", "t/3"))
    local.settle()
    assert two.outcomes == {}
    two.tick(0)
    assert two.outcomes == {b"3": ACCEPTED}
    assert two.there() == {"t/3": b"3"}


async def test_the_database_is_away_when_old_figures_are_read_again(local: LocalDatabase) -> None:
    one, two = Replica(local, count_max=1), Replica(local, count_max=1)
    one.add(sent(b"1", "t/1"))
    local.settle()
    two.tick()
    await trio.sleep(5)
    two.add(sent(b"2", "t/2"))
    local.settle()
    two.state.is_away = True
    two.tick(0)
    await trio.sleep(11)
    two.tick()
    assert two.outcomes == {b"2": AWAY}
    two.state.is_away = False
    two.tick()
    assert (two.there(), two.published) == ({"t/1": b"1"}, [])
    assert two.retained.quota.count == 1


async def test_figures_follow_what_is_done_here_and_elsewhere(local: LocalDatabase) -> None:
    one, two = Replica(local), Replica(local)
    one.add(sent(b"1", "t/1"), sent(b"1", "t/2"), sent(b"1", "t/1"))
    one.add(sent(b"12345", "t/2"))
    local.settle()
    assert (len(one.retained), one.retained.byte_count) == (2, 2 * WEIGHT + 4)
    assert len(two.retained) == 0
    two.tick()
    assert (len(two.retained), two.retained.byte_count) == (2, 2 * WEIGHT + 4)
    two.add(sent(b"", "t/1"), sent(b"", "none"))
    local.settle()
    assert (len(two.retained), two.retained.byte_count) == (1, WEIGHT + 4)
    one.add(sent(b"1", "t/1"))
    one.retained.run(Monotonic(trio.current_time() + 1_000))  # weighed while one is on its way
    local.settle()
    one.tick()
    assert (len(one.retained), one.retained.byte_count) == (2, 2 * WEIGHT + 4)


async def test_what_expires_leaves_room(local: LocalDatabase) -> None:
    one = Replica(local, count_max=1)
    one.add(sent(b"1", "t/1", expires=clock.utc() + 5.0))
    one.tick()
    local.utc += 6.0
    one.add(sent(b"2", "t/2"))
    local.settle()
    await trio.sleep(5)
    one.tick()
    assert one.there() == {"t/2": b"2"}


# Walks.


class Walker:
    """A walk of a session that has it pull again at once."""

    def __init__(
        self,
        replica: Replica,
        topic_filter: str,
        *,
        qos: int = 1,
        walked: SentRetained | None = None,
        user: str = "",
    ) -> None:
        self.replica = replica
        session = Session("walks", SessionLimits(), SessionTally())
        session.user = user
        grant = Grant(session, [SubscriptionOptions(qos)], retained=True)
        self.pulls = 0
        self.is_wanted = True
        self.walk = SharedWalk(
            replica.retained, topic_filter, grant, walked, lambda walk: self.is_wanted, self._pull
        )

    def _pull(self) -> None:
        self.pulls += 1

    def all(self, most: int = 100) -> list[bytes]:
        found: list[bytes] = []
        while not self.walk.done:
            some = self.walk.next(most)
            assert len(some) <= most
            found += [bytes(message.body) for message in some]
            self.replica.local.settle()
        return found


@pytest.mark.parametrize("count", [0, 1, 7, 10, 20, 23])
async def test_a_walk_hands_out_every_message_once(
    local: LocalDatabase, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr("gateway.engine.walks.PIECE_MESSAGES_MAX", 10)
    one = Replica(local)
    one.add(*[sent(b"%d" % at, f"r/{at:03}") for at in range(count)])
    local.settle()
    walker = Walker(one, "r/+")
    assert walker.all(7) == [b"%d" % at for at in range(count)]
    assert walker.pulls == count // 10 + 1


async def test_a_page_of_large_messages_ends_early(local: LocalDatabase) -> None:
    one = Replica(local)
    bodies = [bytes([at]) * PAGE_BYTES for at in range(3)]
    one.add(*[sent(body, f"r/{at}") for at, body in enumerate(bodies)])
    local.settle()
    walker = Walker(one, "#")
    assert walker.all() == bodies
    assert walker.pulls == 4


async def test_nothing_is_pulled_while_a_page_is_read(local: LocalDatabase) -> None:
    one = Replica(local)
    one.add(sent(b"1"))
    local.settle()
    walker = Walker(one, "t")
    session = walker.walk.grant.session
    session.walks["t"] = walker.walk
    session.outlet = Outlet()  # type: ignore[assignment]
    assert session.has_retained_to_queue
    assert session.queue_retained()
    assert not session.has_retained_to_queue
    assert not session.queue_retained()
    local.settle()
    assert walker.pulls == 1
    assert session.queue_retained()
    assert not session.walks


async def test_a_walk_waits_for_the_database_unless_it_is_given_up(local: LocalDatabase) -> None:
    one = Replica(local)
    one.add(sent(b"1"))
    local.settle()
    walkers = [Walker(one, "t") for _ in range(2)]
    one.state.is_away = True
    for walker in walkers:
        walker.walk.next()
    local.settle()
    walkers[1].is_wanted = False
    one.tick()
    assert [walker.walk.waits for walker in walkers] == [True, True]
    one.state.is_away = False
    one.tick()
    assert walkers[0].all() == [b"1"]
    assert walkers[1].pulls == 0


@pytest.mark.parametrize("new", [b"new", b""])
async def test_a_late_replica_replaces_nothing_newer_of_the_client(local: LocalDatabase, new: bytes) -> None:
    """A replica was frozen, or its database was away: its client has published elsewhere meanwhile."""
    late, other = Replica(local), Replica(local)
    late.add(sent(b"first"), epoch=1)
    late.tick()
    late.state.is_away = True
    late.add(sent(b"old"), sent(b"of another", client="d"), sent(b"older than d's"), epoch=1)
    other.add(sent(new), epoch=2)
    other.tick()
    late.state.is_away = False
    late.tick()
    outcomes = {b"first": ACCEPTED, b"old": LATE, b"of another": ACCEPTED, b"older than d's": LATE}
    assert late.outcomes == outcomes
    assert late.published == [b"first", b"of another"]
    assert Walker(other, "t").all() == [b"of another"]
    late.add(sent(b"late"), epoch=1)
    late.tick()
    assert late.outcomes[b"late"] is ACCEPTED  # what it would replace is not the client's


@pytest.mark.parametrize("newer", [b"newer", b""])
async def test_an_operator_removes_no_message_that_came_after_the_query(
    local: LocalDatabase, newer: bytes
) -> None:
    one, other = Replica(local), Replica(local)
    one.add(sent(b"seen", "a/1"), sent(b"seen too", "a/2"), sent(b"not wanted", "b"))
    one.tick()

    def chosen(message: Message) -> bool:
        if message.address.name == "a/1":
            other.add(sent(newer, "a/1"))
            local.settle()
        return message.address.name.startswith("a/")

    assert await SharedMessages(one.retained, local.settle).remove("#", chosen) == 1
    assert one.there() == {"b": b"not wanted"} | ({"a/1": newer} if newer else {})
    one.tick()
    other.tick()
    assert len(one.retained) == len(other.retained) == len(one.there())


async def test_what_cannot_be_read_costs_one_topic(local: LocalDatabase) -> None:
    one = Replica(local)
    good = stored(sent(b"1"))
    for topic, data in {"a": b"x", "b": b"\x02" + good[1:], "c": good}.items():
        one.state.submit(Retain(topic, data), lambda reply: None)
    local.settle()
    before = counted["message"]
    assert Walker(one, "#").all() == [b"1"]
    assert counted["message"] == before + 2


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_a_topic_that_came_live_is_not_sent_as_retained(local: LocalDatabase, qos: int) -> None:
    """What is in the database by then is the same, older, or comes live as well."""
    one = Replica(local)
    messages = [sent(b"%d" % at, f"r/{at}", qos=2) for at in range(3)]
    for at, message in enumerate(messages):
        operation = Retain(message.address.name, stored(message, (LIFE, at)))
        one.state.submit(operation, lambda reply: None)
    local.settle()
    walked = SentRetained()
    assert walked.is_new(messages[0], (LIFE, 0), qos)  # before it subscribes
    walked.begin("r/#", is_first=True)
    walked.begin("r/2", is_first=True)
    assert walked.is_new(messages[1], (LIFE, 1), qos)
    assert walked.is_new(sent(b"", "r/2", retain=False), None, qos)  # it is not retained
    assert Walker(one, "r/#", qos=qos, walked=walked).all() == [b"0", b"2"]
    assert walked.has_sent == (qos == 2)
    assert walked.is_new(messages[0], (LIFE, 0), qos) == (qos < 2)
    assert walked.is_new(messages[0], (LIFE, 3), qos)
    walked.begin("r/#", is_first=False)  # it subscribes again
    assert Walker(one, "r/#", qos=qos, walked=walked).all() == [b"0", b"1", b"2"]
    walked.begin("r/#", is_first=True)
    assert walked.is_new(sent(b"", "r/2"), None, qos)
    walked.end_all_but(["r/2"])
    assert walked.may_send("r/#", "r/2")
    assert not walked.may_send("r/2", "r/2")


@pytest.mark.parametrize(
    ("message", "number", "qos", "is_new"),
    [
        (sent(b"x", qos=2), (LIFE, 5), 2, False),
        (sent(b"x", qos=2), (LIFE, 5), 1, True),
        (sent(b"older", qos=2), (LIFE, 4), 2, False),
        (sent(b"newer", qos=2), (LIFE, 6), 2, True),
        (sent(b"of another topic", "x", qos=2), (LIFE, 4), 2, True),
        (sent(b"of another client", client="other", qos=2), (LIFE, 4), 2, True),
        (sent(b"of another life", qos=2), (b"abcdefgh", 4), 2, True),
        (sent(b"not retained", retain=False, qos=2), (LIFE, 4), 2, True),
        (sent(b"without a number"), None, 1, True),
    ],
)
def test_what_is_older_than_the_retained_message_does_not_come_behind_it(
    message: Message, number: Number | None, qos: int, is_new: bool
) -> None:
    walked = SentRetained()
    walked.send(sent(b"x", qos=2), (LIFE, 5), is_alone=True)
    assert walked.is_new(message, number, qos) == is_new


@pytest.mark.parametrize(
    ("filters", "is_first", "is_alone"),
    [
        (["r/+"], True, True),
        (["r/+", "x/#"], True, True),
        (["r/+", "r/#"], True, False),  # what is older may be of the other one
        (["r/+"], False, False),  # or of the subscription before
        (["r/+", *[f"x/{at}" for at in range(32)]], True, False),  # nobody looks
    ],
)
def test_what_is_older_comes_for_a_subscription_that_was_there_before(
    filters: list[str], is_first: bool, is_alone: bool
) -> None:
    session = Session("walks", SessionLimits(), SessionTally())
    session.subscriptions = dict.fromkeys(filters, SubscriptionOptions(2))
    walked = SentRetained()
    walked.begin("r/+", is_first=is_first)
    assert walked.is_alone("r/+", "r/a", session) == is_alone
    walked.send(sent(b"x", "r/a", qos=2), (LIFE, 5), is_alone=is_alone)
    assert walked.is_new(sent(b"older", "r/a", qos=2), (LIFE, 4), 2) != is_alone
    assert not walked.is_new(sent(b"x", "r/a", qos=2), (LIFE, 5), 2)


@pytest.mark.parametrize(
    ("ended", "is_alone"), [(["r/#"], False), (["x/#"], True), ([f"x/{at}" for at in range(40)], False)]
)
def test_what_is_older_comes_for_a_subscription_that_has_ended_meanwhile(
    ended: list[str], is_alone: bool
) -> None:
    session = Session("walks", SessionLimits(), SessionTally())
    session.subscriptions = {"r/+": SubscriptionOptions(2), "s": SubscriptionOptions(2)}
    walked = SentRetained()
    walked.end("r/a")  # before the walk
    walked.begin("r/+", is_first=True)
    for topic_filter in ended:
        walked.end(topic_filter)
    assert walked.is_alone("r/+", "r/a", session) == is_alone
    walked.end("s")
    walked.begin("s", is_first=True)  # again
    assert not walked.is_alone("s", "s", session)
    walked.end_all_but([])
    walked.begin("r/+", is_first=True)
    walked.begin("s", is_first=True)
    assert walked.is_alone("r/+", "r/a", session)
    assert walked.is_alone("s", "s", session)


async def test_those_of_the_system_are_this_replica_s_own(local: LocalDatabase) -> None:
    one, two = Replica(local), Replica(local)
    message = sent(b"1", f"{SYS}/broker/connection/b/state")
    part = SubBatch(Batch(one, Monotonic(0.0)), Recipient(one))
    part.messages.append(message)
    part.slots.append(part.batch.open(b"own", 1))
    one.retained.publish(part)
    local.settle()
    assert one.outcomes == {b"own": ACCEPTED}
    assert (one.retained.messages(), two.retained.messages(), one.there("$SYS/#")) == ([message], [], {})


# Users take turns.


async def test_walks_of_one_user_do_not_delay_another_s(local: LocalDatabase) -> None:
    one = Replica(local)
    one.add(*[sent(b"%d" % at, f"t/{at}") for at in range(3)])
    local.settle()
    done: list[str] = []
    walkers = [Walker(one, "#", user="greedy") for _ in range(20)] + [Walker(one, "#", user="modest")]
    for walker in walkers:
        walker.walk.begin(partial(done.append, walker.walk.grant.session.user))
    while "modest" not in done:
        assert one.state.step()
    assert len(done) <= 2 * IN_FLIGHT_MAX
    assert one.retained.reads.waiting_count >= len(walkers) - 3 * IN_FLIGHT_MAX
    local.settle()
    assert done.count("greedy") == 20
    assert one.retained.reads.waiting_count == 0
    assert [len(walker.all()) for walker in walkers] == [3] * 21


async def test_an_abandoned_walk_reads_nothing_more(local: LocalDatabase) -> None:
    """A client that subscribes over and over costs one walk, and its SUBACKs do not wait for the others."""
    one = Replica(local)
    done: list[int] = []
    walkers = [Walker(one, "#") for _ in range(10)]
    for at, walker in enumerate(walkers):
        walker.walk.begin(partial(done.append, at))
    for walker in walkers[:-1]:
        walker.is_wanted = False
    queries = 0
    while one.state.step():
        queries += 1
    assert sorted(done) == list(range(10))
    assert queries <= IN_FLIGHT_MAX + 1


async def test_turns_go_on_when_the_database_is_back(local: LocalDatabase) -> None:
    one = Replica(local)
    one.add(sent(b"1"))
    local.settle()
    walkers = [Walker(one, "#", user=user) for user in ("greedy", "greedy", "greedy", "modest")]
    one.state.is_away = True
    done: list[int] = []
    for at, walker in enumerate(walkers):
        walker.walk.begin(partial(done.append, at))
    one.retained.run(clock.now())
    assert sorted(done) == [0, 1, 2, 3]  # each SUBACK is sent, and its walk goes on later
    local.settle()
    one.state.is_away = False
    one.retained.run(clock.now())
    local.settle()
    assert [walker.all() for walker in walkers] == [[b"1"]] * 4
