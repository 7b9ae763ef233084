"""Rows of the journal for messages without a target: whatever a publisher was answered for has one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from gateway.broker.operator_publish import Publishing
from gateway.model.message import Message, Sender
from gateway.model.outcome import Outcome
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.mqtt.dialect import topic_address
from gateway.protocols.mqtt.packets import Will
from gateway.protocols.mqtt.properties import encode_list
from gateway.protocols.mqtt.spec import PacketType, Property, Version
from gateway.settings.access import DefaultRoles, Role
from gateway.settings.journal import Journal
from gateway.settings.limits import Limits
from gateway.store.journal.reader import Gap, JournalReader, Row
from tests.ingress.amqp_client import Amqp
from tests.ingress.amqpfast.client import TOPIC, Fast
from tests.ingress.clients import connect
from tests.interop.gateway_fixture import Running, running, settings_of

MAPPING: Final = """
version: 1
routes:
  - name: other
    from: {endpoint: mqtt, topic: "other/{x}"}
    to: {endpoint: amqp091, queue: "{x}"}
    when: "body.wanted"
    private: {body.secret: drop}
"""
ACCEPTED: Final = ("accepted", "no_taker")
RETURNED: Final = ("rejected", "no_route")


@pytest.fixture
def mapping(tmp_path: Path) -> str:
    """A route that takes some messages of an address and not others."""
    path = tmp_path / "mapping.yaml"
    path.write_text(MAPPING)
    return str(path)


@pytest.fixture
def recorded(tmp_path: Path, mapping: str) -> Iterator[Running]:
    """A gateway with a journal."""
    settings = settings_of(
        journal=Journal(enabled=True, path=tmp_path / "journal", flush_interval_secs=0.02),
        limits=Limits(message_bytes_max=4_096),
        mappings=(mapping,),
    )
    with running(settings) as one:
        yield one


def rows_of(folder: Path) -> list[Row]:
    return [row for row in JournalReader(folder).rows("0") if not isinstance(row, Gap)]


def rows_once(gateway: Running, folder: Path, count: int) -> list[Row]:
    """The rows, as soon as there are so many."""
    gateway.until(lambda: len(rows_of(folder)) >= count)
    return rows_of(folder)


def outcomes(rows: list[Row]) -> Counter[tuple[str, str]]:
    return Counter((row["outcome"], row["reason"]) for row in rows)


def mqtt(gateway: Running, version: Version) -> None:
    with connect(gateway, "writer", version=version)[0] as writer:
        writer.publish("nobody/0", b"x", 0)
        writer.publish("nobody/1", b"x", 1, 1)
        writer.acked(PacketType.PUBACK)
        writer.publish("nobody/2", b"x", 2, 2)
        writer.acked(PacketType.PUBREC)
        writer.ack(PacketType.PUBREL, 2)
        writer.acked(PacketType.PUBCOMP)
        for number in range(20):  # in one read: a burst
            writer.machine.publish(b"nobody/3", b"%d" % number, 1, packet_id=number + 3)
        writer.flush()
        for _ in range(20):
            writer.acked(PacketType.PUBACK)


def amqp(gateway: Running, *, confirms: bool, transaction: bool) -> None:
    with Amqp(gateway).open() as client:
        if confirms:
            client.call(m.ConfirmSelect(), m.ConfirmSelectOk)
        if transaction:
            client.call(m.TxSelect(), m.TxSelectOk)
        client.publish("amq.topic", "nobody", b"x", b"y")
        client.publish("", "nobody", b"z")
        client.publish("amq.topic", "nobody", b"back", mandatory=True)
        client.publish("", "nobody", b"back", mandatory=True)
        if transaction:
            client.call(m.TxCommit(), m.TxCommitOk)
        client.call(m.QueueDeclare("q"), m.QueueDeclareOk)


def fast(gateway: Running) -> None:
    with Fast(gateway).open() as client:
        handle = client.handle("nobody", TOPIC)
        for confirm in (True, False):
            client.put(handle, b"x", b"y", confirm=confirm)
        client.quiet()


@pytest.mark.parametrize(
    ("publish", "found"),
    [
        (partial(mqtt, version=Version.V5), {ACCEPTED: 23}),
        (partial(mqtt, version=Version.V311), {ACCEPTED: 23}),
        (partial(amqp, confirms=False, transaction=False), {ACCEPTED: 3, RETURNED: 2}),
        (partial(amqp, confirms=True, transaction=False), {ACCEPTED: 3, RETURNED: 2}),
        (partial(amqp, confirms=False, transaction=True), {ACCEPTED: 3, RETURNED: 2}),
        (fast, {ACCEPTED: 4}),
    ],
    ids=["mqtt 5", "mqtt 3.1.1", "amqp", "amqp confirms", "amqp transaction", "amqpfast"],
)
def test_a_message_without_a_target_has_a_row(
    recorded: Running, tmp_path: Path, publish: Callable[[Running], None], found: dict[tuple[str, str], int]
) -> None:
    publish(recorded)
    rows = rows_once(recorded, tmp_path / "journal", sum(found.values()))
    assert outcomes(rows) == found
    assert {(row["route"], row["target_endpoint"], row["target_address"]) for row in rows} == {("", "", None)}
    assert all(row["body"] and row["settled"] >= row["received"] for row in rows)
    messages = Counter((row["source_endpoint"], row["received"], row["slot"]) for row in rows)
    assert set(messages.values()) == {1}, "each is a message of its own"


def test_a_will_without_a_subscriber_has_a_row(recorded: Running, tmp_path: Path) -> None:
    client = connect(recorded, "device", will=Will("last/words", b"gone", 1, False))[0]
    client.sock.close()
    (row,) = rows_once(recorded, tmp_path / "journal", 1)
    assert (row["source_name"], row["client"], row["body"]) == ("last/words", "device", b"gone")
    assert outcomes([row]) == {ACCEPTED: 1}


def test_what_a_condition_leaves_has_a_row_without_what_is_private(recorded: Running, tmp_path: Path) -> None:
    """A route was there for the address, and did not want this message."""
    with connect(recorded, "writer")[0] as writer:
        writer.publish("other/q", b'{"wanted": false, "secret": 7}', 1, 1)
        writer.acked(PacketType.PUBACK)
    (row,) = rows_once(recorded, tmp_path / "journal", 1)
    assert (row["source_name"], *outcomes([row])) == ("other/q", ACCEPTED)
    assert b"secret" not in row["body"]


def test_a_refused_message_has_a_row(recorded: Running, tmp_path: Path) -> None:
    with connect(recorded, "writer", version=Version.V5)[0] as writer:
        writer.machine.peer_packet_bytes_max = 1 << 28  # beyond what is announced
        writer.publish("large", b"x" * 4_100, 1, 1)
        assert writer.acked(PacketType.PUBACK)[1] == 0x97
        properties = encode_list({Property.CONTENT_TYPE: "text/plain"}, PacketType.PUBLISH)
        writer.publish("$SYS/x", b"mine", 1, 2, properties=properties)
        assert writer.acked(PacketType.PUBACK)[1] >= 0x80
    rows = rows_once(recorded, tmp_path / "journal", 2)
    assert outcomes(rows) == {("rejected", "too_large"): 1, ("rejected", "not_authorized"): 1}
    assert [(row["body"], row["body_size"]) for row in rows] == [(None, 4_100), (None, 4)]
    assert not any(row["properties"] and "content_type" in row["properties"] for row in rows)


def test_what_a_route_refuses_for_want_of_a_role_has_a_row_without_content(tmp_path: Path) -> None:
    """Beside a message of the same client that a subscription takes, which is recorded whole."""
    (tmp_path / "m.yaml").write_text(
        "version: 1\nroutes:\n"
        "  - {name: a, role: boss, from: {endpoint: mqtt, topic: up}, to: {endpoint: amqp091, queue: q}}\n"
    )
    publishes = Role.model_validate({"mqtt": {"publish": "#", "subscribe": "#"}})
    settings = settings_of(
        journal=Journal(enabled=True, path=tmp_path / "journal", flush_interval_secs=0.02),
        mappings=(str(tmp_path / "m.yaml"),),
        roles={"boss": Role(), "all": publishes},
        default_roles=DefaultRoles(anonymous=("all",)),
    )
    with running(settings) as gateway, connect(gateway, "writer")[0] as writer:
        writer.subscribe("free")
        writer.publish("up", b"mine", 1, 1)
        assert writer.acked(PacketType.PUBACK) == (1, 0x87)
        writer.publish("free", b"taken", 1, 2)
        assert writer.acked(PacketType.PUBACK) == (2, 0)
        rows = rows_once(gateway, tmp_path / "journal", 2)
    assert {row["outcome"]: (row["body"], row["body_size"]) for row in rows} == {
        "rejected": (None, 4),
        "accepted": (b"taken", 5),
    }


def test_a_message_that_closes_its_channel_or_handle_has_a_row(recorded: Running, tmp_path: Path) -> None:
    with Amqp(recorded).open() as client:
        client.publish("missing", "key", b"lost")
        assert client.refusal().reply_code == 404
    with Fast(recorded).open() as client:
        handle = client.handle("")
        client.put(handle, b"lost", name="bad//name", confirm=False)
        assert client.handle_closed()[0] == handle
    rows = rows_once(recorded, tmp_path / "journal", 2)
    assert outcomes(rows) == {RETURNED: 1, ("rejected", "name_invalid"): 1}
    assert {row["reason"]: row["body"] for row in rows} == {"no_route": b"lost", "name_invalid": None}
    assert {row["source_address"] for row in rows} == {"missing:key", "queue:bad//name"}


def test_what_an_operator_publishes_has_a_row(recorded: Running, tmp_path: Path) -> None:
    told: list[Outcome] = []
    sender = Sender("", "console", "op", "127.0.0.1")
    for endpoint, address in (("mqtt", topic_address("nobody")), ("amqp091", amqp_address("", "nobody"))):
        message = Message(address, b"x", sender=sender._replace(endpoint=endpoint))
        recorded.ask(
            lambda endpoint=endpoint, message=message: Publishing(recorded.gateway.dispatcher).publish(
                endpoint, message, told.append
            )
        )
    assert [one.reason.value for one in told] == ["no_route"] * 2
    rows = rows_once(recorded, tmp_path / "journal", 2)
    assert outcomes(rows) == {RETURNED: 2}
    assert {(row["client"], row["user"]) for row in rows} == {("console", "op")}


def test_taken_and_untaken_messages_of_one_read_are_told_apart(recorded: Running, tmp_path: Path) -> None:
    with connect(recorded, "reader")[0] as reader, connect(recorded, "writer")[0] as writer:
        reader.subscribe("taken")
        for number in range(10):
            for topic in (b"taken", b"nobody"):
                writer.machine.publish(topic, b"%d" % number, 1, packet_id=len(topic) * 100 + number)
        writer.flush()
        for _ in range(20):
            writer.acked(PacketType.PUBACK)
        rows = rows_once(recorded, tmp_path / "journal", 20)
    assert outcomes(rows) == {("accepted", "none"): 10, ACCEPTED: 10}
    assert len({(row["received"], row["slot"]) for row in rows}) == 20


@pytest.mark.parametrize("options", [{"unrouted": False}, {"all": False}])
def test_a_journal_can_leave_them_out(tmp_path: Path, mapping: str, options: dict[str, Any]) -> None:
    folder = tmp_path / "journal"
    journal = Journal(enabled=True, path=folder, flush_interval_secs=0.02, **options)
    with running(settings_of(journal=journal, mappings=(mapping,))) as gateway:
        mqtt(gateway, Version.V5)
        with connect(gateway, "reader")[0] as reader, connect(gateway, "writer")[0] as writer:
            reader.subscribe("taken")
            writer.publish("taken", b"x", 1, 1)
            writer.acked(PacketType.PUBACK)
    found = outcomes(rows_of(folder))
    assert found == ({("accepted", "none"): 1} if options.get("all", True) else {})


def test_rows_that_wait_are_written_when_the_gateway_stops(tmp_path: Path, mapping: str) -> None:
    folder = tmp_path / "journal"
    journal = Journal(enabled=True, path=folder, flush_interval_secs=60.0)
    with running(settings_of(journal=journal, mappings=(mapping,))) as gateway:
        mqtt(gateway, Version.V5)
    assert outcomes(rows_of(folder)) == {ACCEPTED: 23}
