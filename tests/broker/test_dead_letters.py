"""Dead letters: kept with their reason within limits, safe before a source is told, copied, tried again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from errno import EMFILE
from pathlib import Path
from typing import Any

import pytest
import structlog

from gateway.broker.dead_letters import DeadLetters, Letter
from gateway.broker.dead_letters.forwarder import Forwarding
from gateway.broker.dead_letters.letters import BODY_LOST, LETTERS_FULL, PROPERTIES_LOST, with_loss
from gateway.broker.dead_letters.redrive import Redriving
from gateway.broker.dispatcher import Dispatcher, DispatcherServices
from gateway.broker.journal import JournalRecorder, OpenBatches, RecordingDispatcher
from gateway.broker.shares import UserQuotas
from gateway.mapping import parse
from gateway.mapping.router import Router
from gateway.model.batch import SubBatch
from gateway.model.message import MESSAGE_BYTES, Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.properties import Properties, property_set, string
from gateway.model.shares import UserShares
from gateway.model.spooled_bodies import Spooled
from gateway.model.times import Monotonic, WallTime
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.mqtt.dialect import topic_address
from gateway.settings import Limits
from gateway.store.journal.writer import JournalWriter
from tests.broker.parts import Answers, amqp, mqtt, newest, unreadable
from tests.store.journal.samples import rows_of, writer
from tests.store.parts import Disk, Opened

LOST = Outcome(Verdict.REJECTED, Reason.NO_ROUTE, "nobody")
REFUSED = Outcome(Verdict.REJECTED, Reason.TARGET_REFUSED, "no")
DOWN = Outcome(Verdict.RELEASED, Reason.TARGET_DOWN)


def bodies(letters: list[Letter]) -> list[bytes]:
    return [letter.message.body for letter in letters]


# In memory.


def test_the_newest_are_kept_and_all_are_counted() -> None:
    letters = DeadLetters(messages_max=3)
    for number in range(5):
        letters.add([amqp(b"%d" % number)], "route", LOST)
    assert (len(letters), letters.byte_count) == (3, 3 * (1 + MESSAGE_BYTES))
    assert bodies(newest(letters, 2)) == [b"4", b"3"]
    assert letters.counted == {("route", "no_route"): 5}
    assert letters.evicted_count == 2


def test_they_are_bounded_in_bytes() -> None:
    letters = DeadLetters(bytes_max=10 + MESSAGE_BYTES)
    letters.add([amqp(b"x" * 6), amqp(b"y" * 6)], "", LOST)
    assert bodies(newest(letters)) == [b"y" * 6]
    assert letters.evicted_count == 0  # nobody had wanted it


def test_the_log_hears_of_those_that_made_room() -> None:
    quotas = UserQuotas(Limits(dead_letters_max=1))
    letters = DeadLetters(messages_max=1, shares=quotas.letters)
    letters.add([amqp(b"1"), amqp(b"2"), amqp(b"3")], "route", REFUSED)
    with structlog.testing.capture_logs() as lines:
        for _ in range(2):
            quotas.tick()
    assert [(line["event"], line["resource"], line["entries"]) for line in lines] == [
        ("user quota evicted entries", "dead letters", 2)
    ]


def sent_by(user: str, count: int) -> list[Message]:
    return [mqtt(body=b"%d" % number, sender=Sender("in", user=user)) for number in range(count)]


@pytest.mark.parametrize("was_accepted", [False, True])
def test_without_a_queue_it_is_a_loss_only_if_one_had_accepted_it(tmp_path: Path, was_accepted: bool) -> None:
    with Opened(tmp_path) as one:
        letters = DeadLetters(store=one.store)
        letters.add([amqp(b"x")], "", LOST, was_accepted=was_accepted)
        one.commit()
        assert (one.store.letters_count, letters.unwanted_count) == ((1, 0) if was_accepted else (0, 1))
    alone = DeadLetters()
    alone.add([amqp(b"x")], "", LOST, was_accepted=was_accepted)
    assert (len(alone), alone.unwanted_count) == (1, 0 if was_accepted else 1)


def users_of(letters: list[Letter]) -> Counter[str]:
    return Counter(letter.message.sender.user for letter in letters)


def test_a_user_pushes_out_its_own_letters_alone() -> None:
    letters = DeadLetters(messages_max=6)
    letters.add(sent_by("greedy", 6), "r", REFUSED)
    letters.add(sent_by("modest", 3), "r", REFUSED)
    assert users_of(newest(letters)) == {"greedy": 3, "modest": 3}
    letters.add(sent_by("greedy", 9), "r", REFUSED)
    assert users_of(newest(letters)) == {"greedy": 3, "modest": 3}
    assert bodies(newest(letters, 3)) == [b"8", b"7", b"6"], "the newest of its own stay"


def test_letters_have_their_users_after_a_restart_too(tmp_path: Path) -> None:
    with Opened(tmp_path, letters_max=6) as one:
        letters = DeadLetters(store=one.store)
        letters.add(sent_by("modest", 2), "r", REFUSED)
        letters.add(sent_by("greedy", 4), "r", REFUSED)
        one.commit()
    with Opened(tmp_path, letters_max=6) as one:
        letters = DeadLetters(store=one.store)
        letters.add(sent_by("greedy", 9), "r", REFUSED)
        one.commit()
        found = read(one, lambda then: letters.newest(9, then))
        assert users_of(found) == {"greedy": 4, "modest": 2}


@pytest.mark.parametrize("stored", [False, True])
def test_beyond_its_share_a_user_keeps_its_messages_at_their_source(tmp_path: Path, stored: bool) -> None:
    shares = UserShares("dead letters", count_max=10, user_share=0.5)
    with ExitStack() as stack:
        opened = stack.enter_context(Opened(tmp_path, letter_shares=shares))
        letters = DeadLetters(store=opened.store if stored else None, messages_max=10, shares=shares)
        told: list[Outcome] = []
        for user, count in (("greedy", 5), ("greedy", 1), ("modest", 5), ("modest", 1), ("other", 1)):
            letters.add(sent_by(user, count), "r", REFUSED, full=told.append)
            opened.commit()
        assert len(told) == 3, "greedy's, modest's, and then nobody has room"
        assert letters.refused == 3


def test_they_are_found_by_id_and_by_route_and_deleted() -> None:
    letters = DeadLetters()
    for route in ("a", "b", "a"):
        letters.add([amqp(route.encode())], route, REFUSED)
    assert [letter.route for letter in newest(letters, route="a")] == ["a", "a"]
    ids: list[str] = []
    letters.ids("a", ids.extend)
    found: list[Letter] = []
    letters.find([*ids, "m99", "7"], found.extend)
    assert [letter.id for letter in found] == ids
    letters.delete([ids[0], "m99", "7"])
    assert [letter.route for letter in newest(letters)] == ["a", "b"]
    assert letters.byte_count == 2 * (1 + MESSAGE_BYTES)


# In the store.


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Opened]:
    with Opened(tmp_path) as one:
        yield one


def read(one: Opened, ask: Callable[[Callable[[Any], None]], None]) -> Any:
    found: list[Any] = []
    ask(found.append)
    one.loop.run_until(lambda: found)
    return found[0]


class BusyFile:
    """A file that cannot be opened `failures` times."""

    name = "busy"

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def read(self, at: int, count: int) -> bytes:
        self.failures -= 1
        if self.failures >= 0:
            raise OSError(EMFILE, "Too many open files")
        return b"body"


@pytest.mark.parametrize("stops", [False, True])
def test_a_letter_waits_for_a_body_that_cannot_be_read_now(stops: bool) -> None:
    letters = DeadLetters()
    body = Spooled(BusyFile(2), 4)  # type: ignore[arg-type]
    told: list[bool] = []
    letters.add([mqtt("in/1", b"1"), mqtt("in/1").with_body(body)], "r", REFUSED, lambda: told.append(True))
    assert (len(letters), told) == (1, [])
    letters.tick()
    assert (len(letters), told) == (1, [])
    if stops:
        body.file.failures = 1  # type: ignore[attr-defined]
        letters.stop()
    else:
        letters.tick()
    assert told == [True]
    assert [letter.message.body for letter in newest(letters)] == [b"" if stops else b"body", b"1"]


def test_a_source_is_told_when_its_letter_is_on_disk(stored: Opened) -> None:
    letters = DeadLetters(store=stored.store)
    told: list[str] = []
    letters.add([amqp(b"1")], "route", REFUSED, lambda: told.append("safe"))
    assert told == []
    stored.commit()
    assert told == ["safe"]


def test_what_nobody_wanted_is_in_memory_only(stored: Opened) -> None:
    letters = DeadLetters(store=stored.store)
    told: list[str] = []
    letters.add([mqtt(body=b"1")], "", LOST, lambda: told.append("safe"))
    letters.add([mqtt(body=b"2")], "", REFUSED)
    letters.add([mqtt(body=b"3")], "route", LOST, crossed=True)
    assert told == ["safe"]
    stored.commit()
    assert (stored.store.letters_count, len(letters), letters.unwanted_count) == (2, 3, 1)
    found: list[Letter] = read(stored, lambda then: letters.newest(9, then))
    assert [(letter.message.body, letter.route, letter.crossed) for letter in found] == [
        (b"3", "route", True),
        (b"2", "", False),
        (b"1", "", False),
    ]
    assert [letter.id[0] for letter in found] == ["2", "1", "m"]
    again = read(stored, lambda then: letters.find(["m1", "2", "5"], then))
    assert bodies(again) == [b"1", b"3"]
    assert read(stored, lambda then: letters.delete(["m1", "1"], then)) is ACCEPTED
    assert bodies(read(stored, lambda then: letters.newest(9, then))) == [b"3"]
    assert read(stored, lambda then: letters.delete(["m1"], then)) is ACCEPTED
    assert letters.unwanted_count == 0


def test_those_that_nobody_wanted_are_known_from_the_others() -> None:
    letters = DeadLetters(messages_max=3)
    for route, outcome in (("", LOST), ("", REFUSED), ("route", LOST), ("", LOST)):
        letters.add([mqtt(body=b"1")], route, outcome)
    assert (len(letters), letters.unwanted_count) == (4, 2)
    letters.add([mqtt(body=b"1")] * 3, "", LOST)
    assert (len(letters), letters.unwanted_count) == (5, 3), "they push out none that somebody wanted"


def test_stored_ones_that_made_room_are_counted(tmp_path: Path) -> None:
    with Opened(tmp_path, letters_max=2) as one:
        letters = DeadLetters(store=one.store)
        letters.add([amqp(b"%d" % number) for number in range(5)], "route", REFUSED)
        one.commit()
        assert letters.evicted_count == 3
        assert bodies(read(one, lambda then: letters.newest(9, then))) == [b"4", b"3"]


def test_many_are_read_in_pages(stored: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.broker.dead_letters.letters.PAGE_LETTERS", 3)
    letters = DeadLetters(store=stored.store)
    for number in range(20):
        letters.add([amqp(b"%d" % number)], "even" if number % 2 == 0 else "odd", REFUSED)
    stored.commit()
    assert len(read(stored, lambda then: letters.ids(None, then))) == 20
    assert read(stored, lambda then: letters.ids("odd", then)) == [str(id) for id in range(2, 21, 2)]
    found = read(stored, lambda then: letters.newest(4, then, route="even"))
    assert bodies(found) == [b"18", b"16", b"14", b"12"]


def test_a_source_waits_until_a_full_disk_has_room_again(tmp_path: Path) -> None:
    disk = Disk()
    with Opened(tmp_path, factory=disk.factory()) as one:
        letters = DeadLetters(store=one.store)
        told: list[str] = []
        disk.fault = "disk is full"
        letters.add([amqp(b"1")], "route", REFUSED, lambda: told.append("safe"))
        one.commit()
        one.until_healthy(False)
        letters.tick()
        one.commit()
        assert told == []
        disk.fault = ""
        one.until_healthy(True)
        letters.tick()
        one.commit()
        assert told == ["safe"]
        assert one.store.letters_count == 1


# Copies.


class Shelf:
    """An endpoint whose only sink keeps what it is sent, and settles it as it is told to."""

    def __init__(self, outcome: Outcome | None = ACCEPTED) -> None:
        self.outcome = outcome
        self.parts: list[SubBatch] = []
        self.there = True

    def sinks(self, address: object) -> tuple[Shelf, ...]:
        return (self,) if self.there else ()

    def choose(self, message: Message) -> tuple[Shelf, ...]:
        raise AssertionError("the address decides")

    @property
    def retained(self) -> None:
        """Nothing is."""

    def publish(self, part: SubBatch) -> None:
        self.parts.append(part)
        if self.outcome is not None:
            part.settle(self.outcome)

    @property
    def messages(self) -> list[Message]:
        return [message for part in self.parts for message in part.messages]


TO = amqp_address("", "dead")


def forwarding(shelf: Shelf) -> tuple[Forwarding, DeadLetters]:
    made = Forwarding({"erp": shelf}, "erp", TO)
    return made, DeadLetters(forward=made.forward)


def test_a_copy_says_why() -> None:
    shelf = Shelf()
    made, letters = forwarding(shelf)
    said = property_set(Properties(message_id="7", headers=(("own", string("kept")),)))
    letters.add([mqtt("a/b", b"x", 0, properties=said, retain=True)], "route", REFUSED)
    (copy,) = shelf.messages
    assert (copy.address, copy.body, copy.assurance, copy.durable, copy.retain) == (TO, b"x", 1, True, False)
    headers = {name: value.value for name, value in copy.properties.headers}
    time = headers.pop("x-gateway-time")
    assert time.endswith("+00:00")
    assert headers == {
        "own": "kept",
        "x-gateway-reason": "target_refused",
        "x-gateway-route": "route",
        "x-gateway-text": "no",
    }
    assert copy.properties.message_id == "7"
    assert made.counted == {"accepted": 1, "refused": 0}


def test_a_copy_that_comes_back_is_not_copied_again() -> None:
    shelf = Shelf()
    made, letters = forwarding(shelf)
    letters.add([mqtt()], "route", REFUSED)
    letters.add(shelf.messages, "other", REFUSED)
    assert len(shelf.messages) == 1
    assert made.counted["looped"] == 1
    assert len(letters) == 2


@pytest.mark.parametrize("outcome", [REFUSED, DOWN])
def test_a_copy_that_is_refused_is_no_dead_letter(outcome: Outcome) -> None:
    shelf = Shelf(outcome)
    made, letters = forwarding(shelf)
    letters.add([mqtt(), mqtt()], "route", REFUSED)
    assert (len(letters), made.counted["refused"]) == (2, 2)


def test_what_nobody_wanted_is_not_copied() -> None:
    shelf = Shelf()
    _, letters = forwarding(shelf)
    letters.add([mqtt()], "", LOST)
    assert shelf.messages == []


def test_an_absent_address_or_endpoint_is_counted() -> None:
    shelf = Shelf()
    shelf.there = False
    made, letters = forwarding(shelf)
    letters.add([mqtt()], "route", REFUSED)
    nowhere = Forwarding({}, "gone", TO)
    nowhere.forward([mqtt()], "route", REFUSED, WallTime(0.0))
    assert (made.counted["absent"], nowhere.counted["absent"]) == (1, 1)


def test_properties_that_cannot_be_read_do_not_stop_a_copy() -> None:
    shelf = Shelf()
    _, letters = forwarding(shelf)
    letters.add([mqtt(properties=unreadable())], "route", REFUSED)
    assert len(shelf.messages) == 1


# Again.

ROUTES = """
version: 1
routes:
  - {name: up, from: {endpoint: mqtt, topic: "in/{x}"}, to: {endpoint: erp, exchange: e, routing_key: "{x}"},
     on_reject: dead_letter, deduplicate: {window: 1h}}
  - {name: side, from: {endpoint: mqtt, topic: "in/{x}"}, to: {endpoint: mqtt, topic: "copy/{x}"}}
"""


class Bench:
    def __init__(
        self, text: str = ROUTES, journal: JournalWriter | None = None, letters: DeadLetters | None = None
    ) -> None:
        self.erp = Shelf(None)
        self.devices = Shelf()
        self.devices.there = False
        self.letters = DeadLetters() if letters is None else letters
        router = Router([parse(text, "t.yaml")], {"mqtt": "mqtt", "erp": "amqp091"})
        around = DispatcherServices(links={"erp"}, namespaces={"mqtt": self.devices, "erp": self.erp})
        self.dispatcher = Dispatcher(router, self.letters, around)
        if journal is not None:
            noting = JournalRecorder(journal, router, all_=True, open_batches=OpenBatches())
            self.dispatcher = RecordingDispatcher(router, self.letters, around, journaling=noting)
        self.redriving = Redriving(self.dispatcher, self.letters)
        self.told: dict[str, Outcome] = {}

    def publish(self, message: Message) -> Answers:
        source = Answers()
        batch = self.dispatcher.batch(source, Monotonic(0.0))
        entry = self.dispatcher.entry("mqtt", self.devices, message.address)
        assert self.dispatcher.publish(batch, entry, message, 0)
        batch.send()
        return source

    def redrive(self) -> None:
        self.redriving.redrive(newest(self.letters), self.told.__setitem__)


def test_a_letter_that_its_route_had_made_goes_straight_to_the_target() -> None:
    bench = Bench()
    said = property_set(Properties(message_id="7"))
    source = bench.publish(mqtt("in/1", b"x", properties=said))
    bench.erp.parts.pop().settle(REFUSED)
    assert source.outcomes == [ACCEPTED]
    (letter,) = newest(bench.letters)
    assert (letter.crossed, letter.message.address) == (True, amqp_address("e", "1"))
    bench.devices.there = True
    bench.redrive()
    assert bench.told == {}
    (part,) = bench.erp.parts
    assert part.messages == [letter.message], "though its id was accepted on this route"
    assert bench.devices.messages == []
    bench.redrive()
    assert {outcome.verdict for outcome in bench.told.values()} == {Verdict.RELEASED}, (
        "already being redriven"
    )
    part.settle(ACCEPTED)
    assert bench.told == {letter.id: ACCEPTED}
    assert len(bench.letters) == 0


@pytest.mark.parametrize("outcome", [REFUSED, DOWN])
def test_a_letter_that_is_refused_again_stays_the_letter_that_it_was(outcome: Outcome) -> None:
    bench = Bench()
    bench.letters.add([amqp(b"x", "1", "e")], "up", LOST, crossed=True)
    (before,) = newest(bench.letters)
    bench.redrive()
    bench.erp.parts.pop().settle(outcome)
    assert bench.told == {before.id: outcome}
    assert newest(bench.letters) == [before]
    bench.redrive()
    assert len(bench.erp.parts) == 1


def test_a_letter_as_its_source_sent_it_crosses_its_own_route_again() -> None:
    bench = Bench()
    bench.devices.there = True
    bench.letters.add([mqtt("in/1", b"x")], "up", REFUSED)
    bench.redrive()
    assert [message.address for message in bench.erp.messages] == [amqp_address("e", "1")]
    assert bench.devices.messages == [], "the other targets have had it"


def test_a_letter_that_crosses_its_route_again_gets_a_message_id() -> None:
    bench = Bench(ROUTES.replace("deduplicate: {window: 1h}", "message_id: add"))
    said = property_set(Properties(message_id="7"))
    bench.letters.add([mqtt("in/1", b"x"), mqtt("in/1", b"y", properties=said)], "up", REFUSED)
    bench.redrive()
    ids = {message.body: message.properties.message_id for message in bench.erp.messages}
    assert ids[b"x"]
    assert ids[b"y"] == "7"


def test_a_letter_without_a_route_is_published_again() -> None:
    bench = Bench()
    bench.letters.add([mqtt("in/1", sender=Sender("mqtt", "c"))], "", LOST)
    bench.redrive()
    assert [message.address for message in bench.erp.messages] == [amqp_address("e", "1")]


def test_the_journal_hears_of_letters_with_and_without_a_route(tmp_path: Path) -> None:
    journal = writer(tmp_path)
    bench = Bench(journal=journal)
    bench.letters.add([mqtt("in/2", b"published", sender=Sender("mqtt", "c"))], "", LOST)
    bench.letters.add([mqtt("in/1", b"routed")], "up", REFUSED)
    bench.redrive()
    for part in bench.erp.parts:
        part.accept()
    journal.close()
    assert set(bench.told.values()) == {ACCEPTED}
    rows = [(row["source_name"], row["target_name"], row["body"]) for row in rows_of(tmp_path)]
    assert ("in/2", "2", b"published") in rows
    assert all(row["settled"] - row["received"] < 60e6 for row in rows_of(tmp_path)), "it came again just now"


@pytest.mark.parametrize(
    "message, route, crossed, text",
    [
        (mqtt("in/1"), "gone", False, "in no mapping"),
        (mqtt("in/1"), "up", True, "leads to amqp091 now"),
        (amqp(), "up", False, "now has a source of protocol mqtt"),
        (mqtt("elsewhere"), "up", False, "no longer matches the message"),
        (
            mqtt("in/1", sender=Sender("gone")),
            "",
            False,
            "'gone', from which the message came, is not configured",
        ),
        (mqtt("nowhere", sender=Sender("mqtt")), "", False, "no queue or subscription"),
        (Message(topic_address("copy/1"), b""), "side", True, "no queue or subscription"),
        (mqtt("in/" + "x" * 256), "up", False, "255"),
    ],
)
def test_a_letter_that_can_go_nowhere_stays(message: Message, route: str, crossed: bool, text: str) -> None:
    bench = Bench()
    bench.letters.add([message], route, REFUSED, crossed=crossed)
    bench.redrive()
    ((_, outcome),) = bench.told.items()
    assert text in outcome.text
    assert len(bench.letters) == 1


class LostFile:
    """A file of the spool that cannot be read."""

    name = "lost"

    def read(self, at: int, count: int) -> bytes:
        raise OSError("input/output error")


@pytest.mark.parametrize("size", [5_000, 1 << 30])
def test_a_letter_whose_body_was_not_kept_is_not_redriven_after_a_restart_either(
    tmp_path: Path, size: int
) -> None:
    body = Spooled(LostFile(), size)  # type: ignore[arg-type]
    told: list[str] = []
    with Opened(tmp_path) as one:
        letters = DeadLetters(store=one.store)
        sent = [mqtt("in/1", b"whole"), mqtt("in/1").with_body(body)]
        letters.add(sent, "up", REFUSED, lambda: told.append("safe"))
        assert told == []
        one.commit()
        assert told == ["safe"]
    with Opened(tmp_path) as one:
        bench = Bench(letters=DeadLetters(store=one.store))
        bodiless, whole = read(one, lambda then: bench.letters.newest(9, then))
        bench.redriving.redrive([bodiless, whole], bench.told.__setitem__)
        assert bench.told[bodiless.id].text == "the body was not stored"
        assert bodiless.outcome.text == "no; the body was not stored"
        assert [message.body for message in bench.erp.messages] == [b"whole"]
        assert len(bench.letters) == 2


@pytest.mark.parametrize("part", [BODY_LOST, PROPERTIES_LOST])
def test_a_letter_that_lost_a_part_stays(part: str) -> None:
    bench = Bench()
    bench.letters.add([mqtt("in/1")], "", with_loss(part, REFUSED))
    bench.redrive()
    assert [outcome.text for outcome in bench.told.values()] == [part]
    assert (bench.erp.parts, len(bench.letters)) == ([], 1)


def test_a_letter_whose_endpoint_has_gone_stays() -> None:
    bench = Bench()
    bench.letters.add([amqp(b"x", "1", "e")], "up", LOST, crossed=True)
    del bench.dispatcher.namespaces["erp"]
    bench.redrive()
    ((_, outcome),) = bench.told.items()
    assert "'erp' is not configured" in outcome.text


# Several routes.

THREE = """
version: 1
routes:
  - name: telemetry
    from: {endpoint: mqtt, topic: "in/{x}"}
    to: {endpoint: erp, exchange: t, routing_key: "{x}"}
  - name: alarms
    from: {endpoint: mqtt, topic: "in/{x}"}
    to: {endpoint: crm, exchange: a, routing_key: "{x}"}
  - name: audit
    from: {endpoint: mqtt, topic: "in/{x}"}
    to: {endpoint: log, exchange: l, routing_key: "{x}"}
"""
LINKS = {"erp": "amqp091", "crm": "amqp091", "log": "amqp091"}


class Fan:
    """Three routes to three links, and a source that cannot be told that a route rejects something."""

    def __init__(self, letters: DeadLetters | None = None) -> None:
        self.letters = DeadLetters() if letters is None else letters
        self.targets = {name: Shelf() for name in LINKS}
        self.devices = Shelf()
        self.devices.there = False
        self.dispatcher = Dispatcher(
            self._router(THREE),
            self.letters,
            DispatcherServices(links=set(LINKS), namespaces={"mqtt": self.devices, **self.targets}),
        )
        self.redriving = Redriving(self.dispatcher, self.letters)

    @staticmethod
    def _router(text: str) -> Router:
        return Router([parse(text, "t.yaml")], {"mqtt": "mqtt", **LINKS})

    def use(self, text: str) -> None:
        self.dispatcher.use(self._router(text))

    def publish(self, *bodies: bytes) -> list[Outcome]:
        source = Answers()
        batch = self.dispatcher.batch(source, Monotonic(0.0))
        batch.cannot_notify = lambda receipt, retries, outcome: True
        entry = self.dispatcher.entry("mqtt", self.devices, topic_address("in/1"))
        for body in bodies:
            assert self.dispatcher.publish(batch, entry, mqtt("in/1", body), body)
        batch.send()
        return source.outcomes

    def redrive(self) -> list[Outcome]:
        told: dict[str, Outcome] = {}
        self.redriving.redrive(newest(self.letters), told.__setitem__)
        return list(told.values())

    def received(self) -> dict[str, list[bytes]]:
        """The bodies that each target was sent."""
        return {name: [message.body for message in one.messages] for name, one in self.targets.items()}


def test_each_refusing_branch_makes_its_own_letter_and_is_redriven_alone() -> None:
    fan = Fan()
    fan.targets["crm"].outcome = fan.targets["log"].outcome = REFUSED
    assert fan.publish(b"1", b"2") == [ACCEPTED, ACCEPTED]
    kept = [(letter.route, letter.message.address.scope, letter.crossed) for letter in newest(fan.letters)]
    assert sorted(kept) == [("alarms", "a", True)] * 2 + [("audit", "l", True)] * 2
    fan.targets["crm"].outcome = ACCEPTED
    outcomes = fan.redrive()
    assert sorted(outcome.verdict for outcome in outcomes) == [Verdict.ACCEPTED] * 2 + [Verdict.REJECTED] * 2
    assert fan.received()["erp"] == [b"1", b"2"], "it had accepted them"
    assert sorted(fan.received()["crm"]) == [b"1", b"1", b"2", b"2"]
    assert {letter.route for letter in newest(fan.letters)} == {"audit"}, "the others are where they belong"
    assert len(fan.letters) == 2, "what is refused again stays the letter that it was"


def test_a_branch_that_refuses_for_now_is_not_buried_with_one_that_rejects() -> None:
    fan = Fan()
    fan.targets["crm"].outcome, fan.targets["log"].outcome = DOWN, REFUSED
    assert fan.publish(b"1") == [DOWN], "the source has to keep it"
    assert [letter.route for letter in newest(fan.letters)] == ["audit"]


@pytest.mark.parametrize(
    "change, why",
    [
        (("name: alarms", "name: renamed"), "'alarms' is in no mapping"),
        (("endpoint: crm, exchange: a, routing_key", "endpoint: mqtt, topic"), "leads to mqtt now"),
    ],
)
def test_a_letter_whose_route_has_changed_stays_with_a_reason(change: tuple[str, str], why: str) -> None:
    fan = Fan()
    fan.targets["crm"].outcome = REFUSED
    fan.publish(b"1")
    fan.targets["crm"].outcome = ACCEPTED
    fan.use(THREE.replace(*change))
    (outcome,) = fan.redrive()
    assert why in outcome.text
    assert (outcome.verdict, len(fan.letters)) == (Verdict.REJECTED, 1)
    assert fan.received()["erp"] == [b"1"]


def test_a_letter_that_nobody_wanted_and_a_route_refuses_now_is_not_counted_as_redriven() -> None:
    fan = Fan()
    fan.letters.add([mqtt("in/1", b"x", sender=Sender("mqtt", "c"))], "", LOST)
    fan.targets["crm"].outcome = REFUSED
    assert fan.redrive() == [REFUSED]
    assert [letter.route for letter in newest(fan.letters)] == [""]


def test_when_there_is_no_room_the_source_keeps_its_messages() -> None:
    fan = Fan(DeadLetters(messages_max=3))
    fan.targets["crm"].outcome = REFUSED
    outcomes = fan.publish(b"1", b"2", b"3", b"4", b"5")
    assert outcomes == [ACCEPTED] * 3 + [LETTERS_FULL] * 2
    assert [letter.message.body for letter in newest(fan.letters)] == [b"3", b"2", b"1"]
    assert (fan.letters.evicted_count, fan.letters.refused) == (0, 2)
    fan.letters.delete([newest(fan.letters)[0].id])
    assert fan.publish(b"4") == [ACCEPTED]


def test_when_there_is_no_room_on_disk_the_source_keeps_its_messages(tmp_path: Path) -> None:
    with Opened(tmp_path, letters_max=2) as one:
        letters = DeadLetters(store=one.store)
        told: list[Outcome] = []
        for body in (b"1", b"2", b"3"):
            letters.add([amqp(body)], "route", REFUSED, lambda: told.append(ACCEPTED), full=told.append)
        assert told == [LETTERS_FULL], "though nothing is written yet"
        one.commit()
        assert told == [LETTERS_FULL, ACCEPTED, ACCEPTED]
        assert (one.store.letters_count, letters.evicted_count) == (2, 0)
        assert read(one, lambda then: letters.delete(["1"], then)) is ACCEPTED
        letters.add([amqp(b"3")], "route", REFUSED, full=told.append)
        one.commit()
        assert bodies(read(one, lambda then: letters.newest(9, then))) == [b"3", b"2"]
