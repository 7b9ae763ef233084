"""What routes call private does not reach the journal: by no row of the message, and however it went."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.broker.dead_letters import DeadLetters
from gateway.broker.journal import JournalRecorder, OpenBatches, RecordingDispatcher
from gateway.broker.redaction import Redactor
from gateway.errors import MappingError
from gateway.mapping import parse
from gateway.mapping.linter import unkeyed_routes
from gateway.mapping.router import Router
from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED
from gateway.model.properties import Properties, Value, ValueType, property_set, string
from gateway.model.spooled_bodies import Spooled, WithheldBody
from gateway.model.times import Monotonic
from gateway.protocols.amqp091.translate import content_properties
from gateway.protocols.mqtt.dialect import topic_address
from gateway.store.journal.mappings import VERSIONS_MAX, store_mappings, versions
from gateway.store.journal.reader import JournalReader
from tests.broker.parts import Answers
from tests.store.journal.samples import whole, writer
from tests.store.journal.test_crossings import Link, Nowhere

KEY = b"sixteen characters and more"
ENDPOINTS = {"mqtt": "mqtt", "erp": "amqp091", "other": "amqp091"}
NO_ROUTES = """
version: 1
routes:
"""
MACHINES = """
  - name: machines
    from: {endpoint: mqtt, topic: "plant/{rest...}"}
    to: {endpoint: erp, exchange: "", routing_key: "{rest...}"}
"""
ROUTE = f"""{NO_ROUTES}
  - name: patients
    from: {{endpoint: mqtt, topic: "ward/{{rest...}}"}}
    to: {{endpoint: erp, exchange: "", routing_key: "{{rest...}}"}}
    private: %s
  - name: also
    from: {{endpoint: mqtt, topic: "ward/both/#"}}
    to: {{endpoint: other, exchange: "", routing_key: both}}
{MACHINES}"""
PLAIN = NO_ROUTES + MACHINES
SENDER = Sender("mqtt", "bed-7", "nurse", "10.0.0.7:4000")
BODY = b'{"patient": {"name": "Ada", "id": 7}, "notes": [{"by": "eve", "n": 1}, {"by": "bob"}], "pulse": 71}'
SAID = property_set(
    Properties(
        user_id="nurse",
        correlation=b"\x00\xff",
        message_id="m-1",
        headers=(
            ("who", string("Ada")),
            ("who", Value(ValueType.BYTES, b"\xff")),
            ("ward", Value(ValueType.INT32, 3)),
        ),
    )
)


def router_of(private: dict[str, Any]) -> Router:
    return Router([parse(ROUTE % json.dumps(private), "t.yaml")], ENDPOINTS)


def rows_of(
    folder: Path, private: dict[str, Any], *messages: Message, home: bool = False, burst: bool = False
) -> list[dict[str, Any]]:
    """What the journal has of messages of one address; `home`: somebody in their own world has them, too."""
    router = router_of(private)
    made = writer(folder)
    journaling = JournalRecorder(made, router, all_=True, open_batches=OpenBatches(), hash_key=KEY)
    dispatcher = RecordingDispatcher(router, DeadLetters(), journaling=journaling)
    links = [Link(), Link(), Link()]
    own: Any = links[2] if home else Nowhere()
    dispatcher.namespaces = {"mqtt": own, "erp": links[0], "other": links[1]}
    batch = dispatcher.batch(Answers(), Monotonic(time.monotonic()))
    entry = dispatcher.entry("mqtt", own, messages[0].address)
    some = list(messages)
    if burst:
        assert dispatcher.publish_burst(batch, entry, some, list(range(len(some))))
    else:
        for at, message in enumerate(some):
            assert dispatcher.publish(batch, entry, message, at)
    batch.send()
    for link in links:
        link.settle(halves=True)
    made.close()
    assert not made.failed
    return [whole(row) for row in JournalReader(folder).rows("0")]


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_what_a_new_mapping_says_holds_from_its_first_message_on(
    tmp_path: Path, before: bool, after: bool
) -> None:
    routers = {True: router_of({"body": "drop"}), False: Router([parse(PLAIN, "t.yaml")], ENDPOINTS)}
    made = writer(tmp_path)
    journaling = JournalRecorder(made, routers[before], all_=True, open_batches=OpenBatches(), hash_key=KEY)
    dispatcher = RecordingDispatcher(routers[before], DeadLetters(), journaling=journaling)
    own = Link()
    dispatcher.namespaces = {"mqtt": own, "erp": Link(), "other": Link()}
    for router in (None, routers[after]):
        if router is not None:
            dispatcher.use(router)
        batch = dispatcher.batch(Answers(), Monotonic(time.monotonic()))
        entry = dispatcher.entry("mqtt", own, came().address)
        assert dispatcher.publish(batch, entry, came(), 0)
        batch.send()
        own.settle(halves=False)
    made.close()
    rows = [whole(row) for row in JournalReader(tmp_path).rows("0")]
    assert [row["body"] is None for row in rows if not row["route"]] == [before, after]


def came(body: bytes = BODY, topic: str = "ward/1") -> Message:
    return Message(topic_address(topic), body, SAID, sender=SENDER)


def hashed(data: bytes) -> str:
    return hmac.new(KEY, data, hashlib.sha256).hexdigest()[:32]


FIELDS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "drop": ({"body.patient.name": "drop"}, "patient", {"id": 7}),
    "hash": ({"body.patient.name": "hash"}, "patient", {"name": hashed(b"Ada"), "id": 7}),
    "hash a number": ({"body.patient.id": "hash"}, "patient", {"name": "Ada", "id": hashed(b"7")}),
    "hash all of it": ({"body.patient": "hash"}, "patient", hashed(b'{"name":"Ada","id":7}')),
    "truncate": ({"body.patient.name": {"truncate": 1}}, "patient", {"name": "A", "id": 7}),
    "truncate a number": ({"body.patient.id": {"truncate": 1}}, "patient", {"name": "Ada"}),
    "in lists": ({"body.notes.by": "drop"}, "notes", [{"n": 1}, {}]),
    "any key": ({"body.patient.*": "drop"}, "patient", {}),
    "not there": ({"body.patient.name.first": "drop"}, "patient", {"name": "Ada", "id": 7}),
}


@pytest.mark.parametrize(("private", "name", "left"), FIELDS.values(), ids=FIELDS)
async def test_fields_of_bodies(tmp_path: Path, private: dict[str, Any], name: str, left: Any) -> None:
    (row,) = rows_of(tmp_path, private, came())
    found = json.loads(row["body"])
    assert found[name] == left
    assert found["pulse"] == 71
    assert row["body_size"] == len(row["body"])


UNREADABLE = {
    "no JSON": b"Ada, pulse 71",
    "a text": b'"Ada"',
    "cut off": BODY[:-1],
    "no UTF-8": b'{"patient": "\xff"}',
}


@pytest.mark.parametrize("body", UNREADABLE.values(), ids=UNREADABLE)
async def test_a_body_that_cannot_be_looked_into_is_withheld(tmp_path: Path, body: bytes) -> None:
    (row,) = rows_of(tmp_path, {"body.patient.name": "drop"}, came(body))
    assert (row["body"], row["body_size"]) == (None, len(body))


async def test_bodies_that_are_nested_deeply_cost_no_rows(tmp_path: Path) -> None:
    """Not even those of the messages beside them."""
    private = {"body.a.b": "drop", "body.h": "hash"}
    deep = [
        b'{"a":' + b"[" * 300 + b"]" * 300 + b"}",
        b"[" * 1_000 + b'{"a":{"b":1}}' + b"]" * 1_000,
        b'{"h":' + b"[" * 300 + b"]" * 300 + b"}",
        b"[" * 100_000,
    ]
    shallow = b"[" * 200 + b'{"a":{"b":1,"c":2}}' + b"]" * 200
    assert len(rows_of(tmp_path, private, *map(came, deep), came())) == len(deep) + 1
    redactor = Redactor(private.items(), KEY, 1 << 20)
    for body in (*deep[:2], deep[3]):
        assert redactor(came(body)).body == WithheldBody(len(body))
    assert b"[[" not in redactor(came(deep[2])).body
    assert redactor(came(shallow)).body == shallow.replace(b'"b":1,', b"")


async def test_what_the_journal_leaves_out_is_not_looked_into() -> None:
    redactor = Redactor([("body.patient", "drop")], KEY, len(BODY) - 1)
    assert redactor(came(BODY)).body == WithheldBody(len(BODY))
    assert redactor.withheld == 0, "it would have been left out without any rule"


async def test_whole_bodies(tmp_path: Path) -> None:
    bodies = [
        rows_of(tmp_path / name, {"body": action}, came(b"Ada"))[0]["body"]
        for name, action in (("d", "drop"), ("h", "hash"), ("t", {"truncate": 2}))
    ]
    assert bodies == [None, hashed(b"Ada").encode(), b"Ad"]


async def test_who_sent_it_and_what_it_says_of_itself(tmp_path: Path) -> None:
    private = {
        "client": {"truncate": 3},
        "user": "hash",
        "remote_address": "drop",
        "headers.who": "hash",
        "properties.user_id": "drop",
        "properties.correlation": "hash",
        "properties.message_id": {"truncate": 2},
    }
    (row,) = rows_of(tmp_path, private, came())
    assert (row["client"], row["user"], row["remote_address"]) == ("bed", hashed(b"nurse"), "")
    told = json.loads(row["properties"])
    assert "user_id" not in told
    assert (told["message_id"], row["message_id"]) == ("m-", "m-")
    assert [name for name, *_ in told["headers"]] == ["who", "who", "ward"]
    assert [value for name, _, value in told["headers"]][:2] == [hashed(b"Ada"), hashed(b"\xff")]
    assert row["body"] == BODY


async def test_of_properties_that_cannot_be_read_nothing_is_kept(tmp_path: Path) -> None:
    """The journal has the bytes that came, where no rule looks into them."""
    broken = content_properties(b"\x20\0\0\0\0\x09\6secretS")
    for name, told in (("headers.ward", False), ("body", True)):
        (row,) = rows_of(tmp_path / name, {name: "drop"}, Message(topic_address("ward/1"), BODY, broken))
        assert row["properties"] == '{"malformed":true}'
        data = b"".join(path.read_bytes() for path in (tmp_path / name).rglob("*.gwj"))
        assert (b"secret" in data) == told


@pytest.mark.parametrize(
    ("topic", "home", "burst"),
    [
        ("ward/1", False, False),
        ("ward/1", False, True),
        ("ward/1", True, False),
        ("ward/both/1", False, False),
        ("ward/both/1", True, False),
    ],
)
async def test_no_row_of_a_message_tells_what_one_of_its_routes_must_not(
    tmp_path: Path, topic: str, home: bool, burst: bool
) -> None:
    some = [came(b'{"name": "Ada", "n": %d}' % number, topic) for number in range(5)]
    rows = rows_of(tmp_path, {"body.name": "drop", "client": "drop"}, *some, home=home, burst=burst)
    routes = {"patients"} | ({"also"} if topic.startswith("ward/both") else set()) | ({""} if home else set())
    assert {row["route"] for row in rows} == routes
    assert len(rows) == 5 * len(routes)
    assert {row["client"] for row in rows} == {""}
    assert [sorted(json.loads(row["body"])) for row in rows] == [["n"]] * len(rows)


async def test_other_messages_are_recorded_as_they_are(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, {"body": "drop"}, came(topic="plant/1"))
    assert (row["body"], row["client"]) == (BODY, "bed-7")


async def test_what_leaves_an_outbox_and_what_is_refused_tells_no_more(tmp_path: Path) -> None:
    router = router_of({"body.name": "drop"})
    made = writer(tmp_path)
    journaling = JournalRecorder(made, router, all_=True, open_batches=OpenBatches(), hash_key=KEY)
    route = router.routes[0]
    message = came(b'{"name": "Ada"}')
    journaling.record_left(route, [message], ACCEPTED, Monotonic(time.monotonic()))
    journaling.refuse(route, message, ACCEPTED, Monotonic(time.monotonic()), 0)
    journaling.record_left(
        router.routes[1], [message], ACCEPTED, Monotonic(time.monotonic())
    )  # it may be the same
    assert (journaling.redacted, journaling.withheld_count) == (3, 0)
    journaling.use(router_of({"body.other": "drop"}))
    journaling.record_left(route, [came(b"Ada")], ACCEPTED, Monotonic(time.monotonic()))
    made.close()
    rows = [whole(row) for row in JournalReader(tmp_path).rows("0")]
    assert [row["body"] for row in rows] == [b"{}", b"{}", b"{}", None]
    assert (journaling.redacted, journaling.withheld_count) == (4, 1)


async def test_a_body_on_disk_stays_there(tmp_path: Path) -> None:
    """Only its size is recorded anyway."""

    class File:
        name = "f"

    body = Spooled(File(), 5_000_000)  # type: ignore[arg-type]
    (row,) = rows_of(tmp_path, {"body.name": "drop"}, came(body))
    assert (row["body"], row["body_size"]) == (None, 5_000_000)


WRONG = {
    "what": {"bodies": "drop"},
    "how": {"body": "forget"},
    "no property": {"properties.content_type": "drop"},
    "nothing kept": {"user": {"truncate": 0}},
    "no field": {"body.": "drop"},
}


@pytest.mark.parametrize("private", WRONG.values(), ids=WRONG)
async def test_rules_that_are_none(private: dict[str, Any]) -> None:
    with pytest.raises(MappingError, match="private"):
        router_of(private)


async def test_a_hash_needs_a_key() -> None:
    (fault,) = unkeyed_routes(router_of({"user": "hash"}).routes)
    assert "journal.hash_key" in fault.reason
    assert not unkeyed_routes(router_of({"user": "drop"}).routes)


async def test_the_mapping_of_each_row_is_kept_beside_the_journal(tmp_path: Path) -> None:
    made = writer(tmp_path)
    first, second = router_of({}), router_of({"user": "drop"})
    journaling = JournalRecorder(made, first, all_=True, open_batches=OpenBatches())
    journaling.note_mappings()
    journaling.use(second)
    journaling.use(second)
    made.close()
    found = {one.version: one.path.read_text() for one in versions(tmp_path)}
    assert found == {
        router.versions["t.yaml"]: router.texts[router.versions["t.yaml"]][1] for router in (first, second)
    }
    assert JournalReader(tmp_path).segments() == []


async def test_only_so_many_mappings_are_kept(tmp_path: Path) -> None:
    store_mappings(tmp_path, {f"{number:x}": ("/etc/t.yaml", "") for number in range(VERSIONS_MAX + 3)})
    assert len(versions(tmp_path)) == VERSIONS_MAX
    assert {one.name for one in versions(tmp_path)} == {"t.yaml"}
