"""Sessions that are kept, against a model of their client: nothing lost, QoS 2 once, order, ids, crashes."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call, patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway import clock, is_compiled
from gateway.broker import storage
from gateway.broker.mqtt.durable_session import DurableSession
from gateway.broker.mqtt.retained import RetainedTopics
from gateway.broker.mqtt.session import (
    PACKET_IDS,
    Grant,
    OutgoingPublish,
    SessionLimits,
    SubscriptionOptions,
    decode_grant,
)
from gateway.ingress.mqtt.acknowledgements import acknowledged
from gateway.model.message import Message, weight_of
from gateway.model.outcome import ACCEPTED, Reason
from gateway.protocols.mqtt.connection import State
from gateway.protocols.mqtt.dialect import topic_address
from gateway.protocols.mqtt.spec import PacketType, ReasonCode, Version
from gateway.store.store import Store
from tests.broker.parts import Answers, Connection, Space, connected, mqtt, publish
from tests.ingress.clients import eventually
from tests.store.crashes import Crashes
from tests.store.parts import Disk, Opened

MEMORY_MAX = 5
PIECE_MAX = storage.PIECE_MESSAGES_MAX if is_compiled() else 3  # which nobody can change when compiled
LIMITS = SessionLimits(memory_messages_max=MEMORY_MAX)


class Device(Connection):
    """A client that does what QoS 2 asks of it; it keeps its state over everything."""

    def __init__(self, held: set[int], delivered: list[int]) -> None:
        super().__init__()
        self.held = held  # ids of QoS 2 that were received and not released
        self.delivered = delivered
        self.unanswered: list[OutgoingPublish] = []

    def send(self, rows: list[OutgoingPublish]) -> list[OutgoingPublish]:
        for row in rows:
            assert row.packet_id not in {other.packet_id for other in self.unanswered} or not row.qos
            if row.qos:
                self.unanswered.append(row)
            if row.qos < 2 or row.packet_id not in self.held:
                self.delivered.append(int(row.message.body))
            if row.qos == 2:
                self.held.add(row.packet_id)
        return super().send(rows)


class SessionModel(RuleBasedStateMachine):
    """Bodies are numbers. A crash loses what the last wake-up has not flushed."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self._pieces = patch.object(storage, "PIECE_MESSAGES_MAX", PIECE_MAX)
        self._pieces.start()
        self.next = 0
        self.lost: set[int] = set()  # not accepted when the gateway died
        self.qos: dict[int, int] = {}
        self.answers: list[tuple[list[int], Answers]] = []
        self.held: set[int] = set()
        self.delivered: list[int] = []
        self.device: Device | None = None
        self.receive_max = 0
        self.early: list[OutgoingPublish] = []  # unacknowledged on the last connection
        self.released: list[int] = []  # PUBREC was said, PUBREL was not heard
        self.open()
        self.space.open("c", clean=False, expiry_secs=60.0)
        self.space.subscribe(self.session, "#", SubscriptionOptions(2))
        self.attach(1)
        self.detach()
        self.commit()

    def open(self) -> None:
        self.one = Opened(Path(self._folder.name), before=self._restore)

    def _restore(self, store: Store) -> None:
        self.space = Space(LIMITS, store=store)

    @property
    def session(self) -> DurableSession:
        session = self.space.sessions["c"]
        assert isinstance(session, DurableSession)
        return session

    def teardown(self) -> None:
        try:
            self.one.until_idle(self.session)
        finally:
            self.one.store.close()
            self._pieces.stop()
            self._folder.cleanup()

    @property
    def accepted(self) -> set[int]:
        return {
            numbers[receipt]
            for numbers, answers in self.answers
            for receipt, outcome in answers.told
            if outcome is ACCEPTED and isinstance(receipt, int)
        }

    @rule(qos=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=6))
    def publish(self, qos: list[int]) -> None:
        numbers = list(range(self.next, self.next + len(qos)))
        self.next += len(qos)
        self.qos |= dict(zip(numbers, qos, strict=True))
        messages = [mqtt(body=b"%d" % number, qos=self.qos[number]) for number in numbers]
        (sink,) = self.space.sinks(topic_address("a/b"))
        self.answers.append((numbers, publish(sink, messages)))

    @rule(short=st.integers(0, 6))
    def go_round(self, short: int) -> None:
        """So many messages have come and gone that the packet ids begin anew, or nearly."""
        self.session.next += PACKET_IDS - short

    @precondition(lambda self: self.device is None)
    @rule(receive_max=st.integers(1, 9))
    def attach(self, receive_max: int) -> None:
        self.device = Device(self.held, self.delivered)
        self.receive_max = receive_max
        self.session.attach(self.device, receive_max)
        self.released += [one for one in self.device.releases if one not in self.released]

    @precondition(lambda self: self.device is not None)
    @rule()
    def detach(self) -> None:
        assert self.device is not None
        self.early = list({row.packet_id: row for row in self.early + self.device.unanswered}.values())
        self.session.detach()
        self.device = None

    @precondition(lambda self: self.device is not None and self.device.unanswered)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        assert self.device is not None
        row = data.draw(st.sampled_from(self.device.unanswered))
        self.device.unanswered.remove(row)
        self._acknowledge(row)

    def _acknowledge(self, row: OutgoingPublish) -> None:
        self.early = [one for one in self.early if one.packet_id != row.packet_id]
        if row.qos == 1:
            assert self.session.complete_delivery(row.packet_id)
        else:
            assert self.session.handle_pubrec(row.packet_id)
            self.released.append(row.packet_id)
        self.session.pump()

    @precondition(lambda self: self.device is not None and self.early)
    @rule(data=st.data())
    def acknowledge_early(self, data: st.DataObject) -> None:
        """The client acknowledges what it has from the last connection before it is resent."""
        assert self.device is not None
        resent = {row.packet_id for row in self.device.unanswered}
        row = data.draw(st.sampled_from(self.early))
        if row.packet_id not in resent:
            self._acknowledge(row)

    @precondition(lambda self: self.device is not None and self.released)
    @rule()
    def complete(self) -> None:
        """PUBREL, which waits for the commit, and PUBCOMP."""
        self.commit()
        packet_id = self.released.pop(0)
        self.held.discard(packet_id)
        assert self.session.complete_delivery(packet_id)
        self.session.pump()

    @rule()
    def commit(self) -> None:
        assert self.one.commit() is ACCEPTED
        assert set(self.qos) <= self.accepted | self.lost

    @rule()
    def crash(self) -> None:
        self.one.store._calls.clear()
        self.one.store.close()
        self.lost = set(self.qos) - self.accepted
        self.device = None
        self.early.clear()
        self.released.clear()
        self.open()

    @precondition(lambda self: self.device is not None)
    @rule()
    def everything(self) -> None:
        """All that is owed comes to a client that answers, and there is nothing left."""
        device = self.device
        assert device is not None
        session = self.session
        turns = 0
        while len(session) or session.in_flight or session.released:
            turns += 1
            assert turns < 10 * (self.next + 10), "it never ends"
            self.commit()
            while device.unanswered:
                self._acknowledge(device.unanswered.pop(0))
            self.commit()
            while self.released:
                self.held.discard(self.released[0])
                assert session.complete_delivery(self.released.pop(0))
            session.pump()
        assert session._byte_count == 0
        assert self.accepted <= set(self.delivered)
        for qos in (1, 2):
            first = list(dict.fromkeys(one for one in self.delivered if self.qos[one] == qos))
            assert first == sorted(first)

    @invariant()
    def once(self) -> None:
        twice = [one for one in self.delivered if self.qos[one] == 2]
        assert len(twice) == len(set(twice))

    @invariant()
    def no_more_is_in_flight_than_the_client_takes(self) -> None:
        if self.device is not None:
            in_flight = len(self.device.unanswered) + len(self.session.released)
            assert self.session.credit == self.receive_max - in_flight

    @invariant()
    def memory_is_bounded(self) -> None:
        assert len(self.session._waiting or ()) <= 2 * (MEMORY_MAX + 6) + PIECE_MAX

    @invariant()
    def bytes_are_those_of_what_is_held(self) -> None:
        session = self.session
        held = weight_of(message for message, _, _ in session._waiting or ())
        held += weight_of(row.message for row in session.in_flight.values())
        assert session._byte_count == held + (0 if session._aside is None else session._aside.byte_count)


TestSessionModel = pytest.mark.needs("time")(SessionModel.TestCase)
TestSessionModel.settings = settings(max_examples=40, stateful_step_count=25)


@pytest.mark.parametrize(
    "options, retained",
    [
        ([SubscriptionOptions(0)], False),
        ([SubscriptionOptions(1)], True),
        ([SubscriptionOptions(2, retain_as_published=True)], False),
        ([SubscriptionOptions(1, identifier=1), SubscriptionOptions(2, identifier=268_435_455)], True),
    ],
)
def test_a_grant_is_stored_and_read(options: list[SubscriptionOptions], retained: bool) -> None:
    session = Space().session("c")
    grant = Grant(session, options, retained=retained)
    read = decode_grant(session, grant.encode())
    assert (read, read.retained) == (grant, retained)


class World:
    """A namespace on a store, and what the disk is told to do."""

    def __init__(self, folder: Path, *, crashes: Crashes | None = None, **limits: Any) -> None:
        """Notes in `crashes` what each commit leaves."""
        self.disk = Disk()
        self.limits = SessionLimits(**limits)
        factory = self.disk.factory()
        if crashes is not None:
            factory = crashes.factory(factory)
        self.one = Opened(folder, before=self._restore, factory=factory)

    def _restore(self, store: Store) -> None:
        self.space = Space(self.limits, store=store, retained=RetainedTopics(store=store))

    def session(self, client: str = "c", *filters: str, qos: int = 1) -> DurableSession:
        session = self.space.session(client, *filters, qos=qos)
        assert isinstance(session, DurableSession)
        return session

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End; if the disk works and nothing has failed, nothing waits any more."""
        self.one.end(kind is None, self.space, partial(self.space.expire, 0.0))

    def fail(self) -> None:
        self.disk.fault = "disk is full"


def several(count: int, qos: int = 1) -> list[Message]:
    return [mqtt(body=b"%d" % number, qos=qos) for number in range(count)]


def sends(world: World, outlet: Connection, count: int) -> None:
    """Wait until the client has been sent so many messages."""

    def has_sent() -> bool:
        world.one.store.flush()
        return len(outlet.rows) >= count

    world.one.loop.run_until(has_sent)


def test_what_a_client_acknowledges_before_it_is_resent_is_not_resent(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        session = world.session("c", "#", qos=2)
        outlet = connected(session)
        world.space.give(*several(2), *several(3, qos=2))
        sends(world, outlet, 5)
        session.detach()
        outlet = connected(session, receive_maximum=1)
        assert session.complete_delivery(2)
        assert session.handle_pubrec(4)
        session.pump()
        assert [packet_id for *_, packet_id, _ in outlet.said] == [1]
        for packet_id in (1, 4, 3, 5):
            session.complete_delivery(packet_id)
            session.pump()
        assert [packet_id for *_, packet_id, _ in outlet.said] == [1, 3, 5]
        assert (session.in_flight, session.credit) == ({}, 1)


@pytest.mark.interpreted
def test_a_pubrec_before_its_message_is_resent_releases_nothing(tmp_path: Path) -> None:
    """The client would take the message for a new one."""
    with World(tmp_path) as world:
        session = world.session(qos=2)
        outlet = connected(session, 1)
        publish(Grant(session, [SubscriptionOptions(qos=2)]), several(2, qos=2))
        world.one.until(lambda: outlet.rows)
        (packet_id,) = [row.packet_id for row in outlet.rows]
        session.detach()
    with World(tmp_path) as world:
        session = world.space.sessions["c"]
        machine = Mock(version=Version.V5, state=State.OPEN)
        outlet = connected(session, 1)
        assert outlet.rows == [], "it is being read"
        for known_id in (packet_id, packet_id + 1):
            acknowledged(session, machine, None, PacketType.PUBREC, [(known_id, 0)])
        unknown = ReasonCode.PACKET_IDENTIFIER_NOT_FOUND
        assert machine.send_ack.call_args_list == [call(PacketType.PUBREL, packet_id + 1, unknown)]
        world.one.until(lambda: outlet.rows)
        assert [(row.packet_id, row.dup) for row in outlet.rows] == [(packet_id, True)]
        acknowledged(session, machine, None, PacketType.PUBREC, [(packet_id, 0)])
        assert machine.send_ack.call_args == call(PacketType.PUBREL, packet_id, ReasonCode.SUCCESS)
        acknowledged(session, machine, None, PacketType.PUBCOMP, [(packet_id, 0)])
        world.one.until(lambda: len(outlet.rows) == 2)
        session.complete_delivery(packet_id + 1)


@pytest.mark.parametrize("where", ["away", "here"])
def test_the_id_of_a_sent_message_that_expires_while_the_gateway_is_down_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The client may have it, and would take the next message with this id for a repeat."""
    expires = clock.utc() + 100
    with World(tmp_path) as world:
        session = world.session(qos=2)
        outlet = connected(session, 1)
        messages = [mqtt(body=b"%d" % number, qos=2, expires=expires) for number in range(4)]
        publish(Grant(session, [SubscriptionOptions(qos=2)]), messages)
        world.one.until(lambda: outlet.rows)
        session.detach()
    with World(tmp_path) as world:
        monkeypatch.setattr("gateway.clock.utc", lambda: expires + 1)
        session = world.space.sessions["c"]
        if where == "away":
            session.drop_expired()
            world.one.until(lambda: not len(session))
            assert world.one.commit() is ACCEPTED
            assert list(world.one.store._database.records("released"))
        outlet = connected(session, 2)
        world.one.until(lambda: outlet.releases and not len(session))
        assert (outlet.releases, outlet.rows, session.credit) == ([1], [], 1)
        assert world.space.tally.expired == 4
        assert session.complete_delivery(1)
        assert session.credit == 2
    with World(tmp_path) as world:
        assert not world.space.sessions["c"].released


def waits(answers: Answers) -> bool:
    return not answers.told


def test_a_part_is_accepted_when_it_is_on_disk_whatever_it_mixes(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        session = world.session("me", "#")
        outlet = connected(session)
        (grant,) = world.space.sinks(topic_address("a/b"))
        answers = publish(grant, [mqtt(), mqtt(qos=0), mqtt()])
        assert [receipt for receipt, _ in answers.told] == [1]
        assert [(qos, packet_id) for _, qos, packet_id, _ in outlet.said] == [(1, 1), (0, 0), (1, 2)]
        assert world.one.commit() is ACCEPTED
        assert sorted(receipt for receipt, _ in answers.told if isinstance(receipt, int)) == [0, 1, 2]


@pytest.mark.parametrize("attached", [True, False])
def test_what_the_disk_does_not_take_is_refused_and_owed_no_longer(tmp_path: Path, attached: bool) -> None:
    with World(tmp_path) as world:
        session = world.session("c", "#", qos=2)
        outlet = connected(session, receive_maximum=1)
        assert world.one.commit() is ACCEPTED
        if not attached:
            session.detach()
        (grant,) = world.space.sinks(topic_address("a/b"))
        world.fail()
        answers = publish(grant, several(3, qos=2))
        assert world.one.commit() is not ACCEPTED
        assert [outcome.reason for outcome in answers.outcomes] == [Reason.STORE] * 3
        assert (len(session), session._byte_count, outlet.rows) == (0, 0, [])
        world.disk.fault = ""
        world.one.until_healthy(True)
        publish(grant, several(1, qos=2))
        assert world.one.commit() is ACCEPTED
        if not attached:
            outlet = connected(session)
            world.one.store.flush()
            world.one.loop.run_until(lambda: outlet.rows)
        assert [(body, qos) for body, qos, _, _ in outlet.said] == [(b"0", 2)]


def test_nothing_is_sent_behind_a_message_that_the_disk_has_just_refused(tmp_path: Path) -> None:
    """It comes again, and what came behind it is refused, too, when that is heard of."""
    with World(tmp_path) as world:
        session = world.session("c", "#")
        outlet = connected(session, receive_maximum=1)
        assert world.one.commit() is ACCEPTED
        (grant,) = world.space.sinks(topic_address("a/b"))
        world.disk.waiting.clear()
        world.disk.gate.clear()
        first = publish(grant, several(2))
        world.one.store.flush()
        assert world.disk.waiting.wait(10.0)
        behind = publish(grant, [mqtt(body=b"2")])
        world.one.store.flush()
        world.fail()
        world.disk.gate.set()
        while not (first.told and behind.told):
            calls = world.one.loop.calls
            world.one.loop.run_until(lambda calls=calls: world.one.loop.calls > calls)  # type: ignore[misc]
            world.one.store.flush()
            session.credit = 5
            session.pump()
        assert {one.reason for one in (*first.outcomes, *behind.outcomes)} == {Reason.STORE}
        assert [body for body, *_ in outlet.said] == [b"0"]
        world.disk.fault = ""
        world.one.until_healthy(True)


def test_qos_2_is_sent_when_it_is_stored_and_nothing_passes_it(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        outlet = connected(world.session("c", "#", qos=2))
        (grant,) = world.space.sinks(topic_address("a/b"))
        publish(grant, [mqtt(body=b"1"), mqtt(body=b"2", qos=2), mqtt(body=b"3")])
        assert [body for body, *_ in outlet.said] == [b"1"]
        assert world.one.commit() is ACCEPTED
        assert [body for body, *_ in outlet.said] == [b"1", b"2", b"3"]


def test_packet_ids_go_round(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        session = world.session("c", "#")
        session.next = session._safe = PACKET_IDS - 1
        outlet = connected(session)
        (grant,) = world.space.sinks(topic_address("a/b"))
        publish(grant, several(3))
        assert [packet_id for _, _, packet_id, _ in outlet.said] == [PACKET_IDS, 1, 2]


@pytest.mark.parametrize("qos", [1, 2])
def test_a_message_that_is_never_acknowledged_stops_nobody(tmp_path: Path, qos: int) -> None:
    """The next lap passes its packet id by, and what was sent keeps its id over a crash."""
    with World(tmp_path) as world:
        session = world.session("c", "#", qos=2)
        outlet = connected(session)
        (grant,) = world.space.sinks(topic_address("a/b"))
        publish(grant, several(1, qos=qos))
        assert world.one.commit() is ACCEPTED
        session.next += PACKET_IDS - 2
        publish(grant, several(4, qos=qos))
        assert world.one.commit() is ACCEPTED
        sends(world, outlet, 5)
        assert [packet_id for _, _, packet_id, _ in outlet.said] == [1, PACKET_IDS, PACKET_IDS - 1, 2, 3]
        assert session.complete_delivery(PACKET_IDS) if qos == 1 else session.handle_pubrec(PACKET_IDS)
        session.pump()
        assert world.one.commit() is ACCEPTED
    with World(tmp_path) as world:  # as after a crash: nothing was said of the client's leaving
        session = world.session("c")
        outlet = connected(session)
        sends(world, outlet, 4)
        again = [(body, packet_id, dup) for body, _, packet_id, dup in outlet.said]
        assert again == [
            (b"0", 1, True),
            (b"1", PACKET_IDS - 1, True),
            (b"2", 2, True),
            (b"3", 3, True),
        ]
        assert outlet.releases == ([] if qos == 1 else [PACKET_IDS])
        (grant,) = world.space.sinks(topic_address("a/b"))
        session.next += PACKET_IDS - 6  # the next are those of PUBREL, of the record, and of the first
        publish(grant, several(4, qos=qos))
        assert world.one.commit() is ACCEPTED
        sends(world, outlet, 8)
        in_use = [*session.in_flight, *session.released]
        assert len(set(in_use)) == len(in_use)
        for row in outlet.rows:
            assert (
                session.complete_delivery(row.packet_id)
                if row.qos == 1
                else session.handle_pubrec(row.packet_id)
            )
        assert world.one.commit() is ACCEPTED
        assert list(world.one.store._database.records("renumbered")) == []


def test_a_packet_id_that_the_disk_refuses_is_recorded_when_it_works_again(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        session = world.session("c", "#")
        outlet = connected(session, receive_maximum=1)
        (grant,) = world.space.sinks(topic_address("a/b"))
        publish(grant, several(1))
        session.next += PACKET_IDS - 1
        publish(grant, several(3))
        assert world.one.commit() is ACCEPTED
        world.fail()
        session.credit = 10
        session.pump()
        world.one.store.flush()
        world.one.until_healthy(False)
        session.has_stalled(0.0)
        world.one.store.flush()
        assert [body for body, *_ in outlet.said] == [b"0"]
        world.disk.fault = ""
        world.one.until_healthy(True)
        session.has_stalled(1.0)
        sends(world, outlet, 4)
        assert [packet_id for _, _, packet_id, _ in outlet.said] == [1, PACKET_IDS, 2, 3]


def test_a_session_that_ends_leaves_no_packet_ids(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        session = world.session("c", "#")
        outlet = connected(session)
        (grant,) = world.space.sinks(topic_address("a/b"))
        publish(grant, several(1))
        session.next += PACKET_IDS - 1
        publish(grant, several(1))
        assert world.one.commit() is ACCEPTED
        sends(world, outlet, 2)
        session.detach()
        world.space.discard(session)
        session = world.session("c", "#")
        outlet = connected(session)
        publish(world.space.sinks(topic_address("a/b"))[0], several(2))
        assert world.one.commit() is ACCEPTED
        assert [packet_id for _, _, packet_id, _ in outlet.said] == [1, 2]
        assert list(world.one.store._database.records("renumbered")) == []


def test_what_expires_is_not_stored_any_longer(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        session = world.session("c", "#")
        (grant,) = world.space.sinks(topic_address("a/b"))
        publish(grant, [mqtt(expires=1.0) for _ in range(3)])
        assert world.one.commit() is ACCEPTED
        outlet = connected(session)
        world.one.store.flush()
        world.one.loop.run_until(lambda: not len(session))
        assert world.one.commit() is ACCEPTED
        assert outlet.rows == []
        assert world.space.tally.expired == 3
    with World(tmp_path) as world:
        assert len(world.space.sessions["c"]) == 0


def test_a_full_session_drops_the_newest_accepts_and_counts_them(tmp_path: Path) -> None:
    with World(tmp_path, messages_max=3) as world:
        session = world.session("c", "#")
        (grant,) = world.space.sinks(topic_address("a/b"))
        answers = publish(grant, several(5))
        assert world.one.commit() is ACCEPTED
        assert answers.outcomes == [ACCEPTED] * 5
        assert (len(session), world.space.tally.queue_full) == (3, 2)


def test_a_client_that_waits_for_the_disk_has_not_stalled(tmp_path: Path) -> None:
    with World(tmp_path, messages_max=4, stall_secs=10) as world:
        session = world.session("c", "#", qos=2)
        connected(session, receive_maximum=1)
        (grant,) = world.space.sinks(topic_address("a/b"))
        publish(grant, several(4, qos=2))
        assert publish(grant, several(2, qos=2)).held
        assert [session.has_stalled(now) for now in (0.0, 20.0, 40.0)] == [False] * 3
        assert world.one.commit() is ACCEPTED  # and one of them is sent
        assert [session.has_stalled(now) for now in (50.0, 59.0, 60.0)] == [False, False, True]


def test_a_client_that_is_away_holds_no_messages_in_memory(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        session = world.session("c", "#")
        (grant,) = world.space.sinks(topic_address("a/b"))
        publish(grant, several(100))
        assert world.one.commit() is ACCEPTED
        assert (len(session), len(session._waiting or ())) == (100, 0)
        outlet = connected(session, receive_maximum=10)
        world.one.store.flush()
        world.one.loop.run_until(lambda: outlet.rows)
        session.detach()
        assert len(session) == 90
        again = connected(session, receive_maximum=200)
        world.one.store.flush()
        world.one.loop.run_until(lambda: len(again.rows) == 100)
        assert [(int(body), dup) for body, _, _, dup in again.said] == [(n, n < 10) for n in range(100)]


# Packet ids of QoS 2 that came in.


@pytest.mark.ids_alone
@pytest.mark.parametrize("here", [True, False])
def test_an_id_is_stored_with_its_message_or_when_all_targets_have_it(tmp_path: Path, here: bool) -> None:
    with World(tmp_path) as world:
        session = world.session()
        outlet = connected(session)
        assert session.received_ids.add(5)
        assert not session.received_ids.add(5)
        if here:
            session.received_ids.record_local_delivery(5)
        assert world.one.commit() is ACCEPTED
        assert session.received_ids.accept(5) is here
        assert session.received_ids.is_accepted(5) is here
        assert world.one.commit() is ACCEPTED
        assert outlet.receipts == ([] if here else [5])
        assert session.received_ids.is_accepted(5)
    with World(tmp_path) as world:
        session = world.session()
        assert session.received_ids.is_accepted(5)
        assert session.received_ids.release(5)
        assert not session.received_ids.release(5)
        assert world.one.commit() is ACCEPTED
    with World(tmp_path) as world:
        assert world.session().received_ids.add(5)


def test_the_id_of_a_message_that_only_memory_has_is_in_memory_only(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        ids = world.session().received_ids
        ids.add(5)
        assert ids.accept(5, stored=False), "PUBREC waits for nothing"
        ids.record_local_delivery(5)
        assert world.one.commit() is ACCEPTED
        assert ids.is_accepted(5)
    with World(tmp_path) as world:
        assert 5 not in world.session().received_ids


@pytest.mark.ids_alone
@pytest.mark.parametrize("how", ["forget", "doubt"])
@pytest.mark.parametrize("at_once", [False, True])
def test_an_id_whose_message_was_refused_is_not_on_disk(tmp_path: Path, how: str, at_once: bool) -> None:
    """A full queue refuses at once, a full disk later."""
    with World(tmp_path) as world:
        session = world.session()
        connected(session)
        session.received_ids.add(5)
        if not at_once:
            session.received_ids.record_local_delivery(5)
        if how == "forget":
            session.received_ids.forget(5, refusal_sent=True)
        else:
            session.received_ids.mark_refused(5)
        if at_once:
            session.received_ids.record_local_delivery(5)
        assert world.one.commit() is ACCEPTED
        assert (5 in session.received_ids) is (how == "doubt")
    with World(tmp_path) as world:
        assert 5 not in world.session().received_ids


def test_an_id_that_the_disk_did_not_take_is_known_as_long_as_we_live(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        session = world.session()
        outlet = connected(session)
        assert world.one.commit() is ACCEPTED
        world.fail()
        session.received_ids.add(5)
        assert not session.received_ids.accept(5)
        assert world.one.commit() is not ACCEPTED
        assert outlet.receipts == [5]
        assert not session.received_ids.add(5)
        world.disk.fault = ""
        world.one.until_healthy(True)
    with World(tmp_path) as world:
        assert 5 not in world.session().received_ids


# Retained messages.


@pytest.mark.parametrize("qos, at_once", [(0, True), (1, False), (2, False)])
def test_who_retains_a_message_waits_for_the_disk_if_it_counts(
    tmp_path: Path, qos: int, at_once: bool
) -> None:
    with World(tmp_path) as world:
        answers = publish(world.space.retained, [mqtt(qos=qos, retain=True)])
        assert waits(answers) is not at_once
        assert world.one.commit() is ACCEPTED
        assert answers.outcomes == [ACCEPTED]
    with World(tmp_path) as world:
        assert "a/b" in world.space.retained


def test_retained_messages_are_bounded_after_a_restart_too(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        for topic in ("a", "b", "c"):
            world.space.retained.set_retained(mqtt(topic, retain=True))
        world.space.retained.set_retained(mqtt("a", b"", retain=True))
        world.space.retained.set_retained(mqtt("d", retain=True, expires=1.0))
    found: list[RetainedTopics] = []
    with Opened(tmp_path, before=lambda store: found.append(RetainedTopics(messages_max=1, store=store))):
        assert (len(found[0]), found[0].refused) == (1, 1)
        assert "b" in found[0]


def test_a_restrained_session_leaves_what_comes_on_disk_and_sends_it_in_order(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        session = world.session("c", "#")
        outlet = connected(session, receive_maximum=1)
        (grant,) = world.space.sinks(topic_address("a/b"))
        publish(grant, several(3))
        held = session.in_memory
        session.restrain(True)
        assert not publish(grant, several(5)).held
        assert (len(session), session.in_memory) == (7, held)
        session.restrain(False)
        publish(grant, several(2))  # behind the others
        assert session.in_memory == held
        assert world.one.commit() is ACCEPTED
        for packet_id in range(1, 11):
            world.one.store.flush()
            world.one.loop.run_until(lambda: session.in_flight)
            assert list(session.in_flight) == [packet_id]
            session.complete_delivery(packet_id)
            session.pump()
        assert [row.message.body for row in outlet.rows] == [
            one.body for count in (3, 5, 2) for one in several(count)
        ]
        assert session.in_memory == 0


def test_a_released_id_is_on_disk_with_the_settlement_of_its_message(tmp_path: Path) -> None:
    """Also where the disk fails and works again while the client says PUBREC: the message would come again
    after a crash, under another id."""
    crashes = Crashes()
    with World(tmp_path, crashes=crashes) as world:
        session = world.session("c", "#", qos=2)
        outlet = connected(session)
        (grant,) = world.space.sinks(topic_address("a/b"))
        publish(grant, several(1, qos=2))
        sends(world, outlet, 1)
        world.fail()
        publish(grant, [mqtt(body=b"refused", qos=1)])
        world.one.store.flush()
        world.one.loop.run_until(lambda: world.one.store.gate.shut)
        assert session.handle_pubrec(1)
        session.pump()
        world.one.store.flush()
        commits = len(crashes.states)
        world.disk.fault = ""
        eventually(lambda: len(crashes.states) > commits)
        assert crashes.last.bodies == frozenset()
        world.one.until_healthy(True)
        session.complete_delivery(1)


@pytest.mark.parametrize("memory_messages_max", [0, 100])
def test_publishers_go_on_when_the_disk_refuses_what_made_a_session_full(
    tmp_path: Path, memory_messages_max: int
) -> None:
    """In memory, and on disk alone."""
    with World(tmp_path, messages_max=2, memory_messages_max=memory_messages_max) as world:
        session = world.session("c", "#", qos=2)
        connected(session)
        assert world.one.commit() is ACCEPTED
        (grant,) = world.space.sinks(topic_address("a/b"))
        world.fail()
        publish(grant, several(2, qos=2))
        source = publish(grant, several(1, qos=2))
        assert (len(source.held), source.released) == (1, 0)
        assert world.one.commit() is not ACCEPTED
        assert (len(session), source.released) == (0, 1)
        world.disk.fault = ""
        world.one.until_healthy(True)
