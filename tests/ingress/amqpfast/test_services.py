"""Queues, topics and peers over the wire: what each service does with messages (3.5)."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gateway import clock
from gateway.ingress.amqpfast.connection import FastConnection
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.codec import decode_head_properties, decode_message_list
from gateway.protocols.amqpfast.events import Fragment, NotifyRow
from gateway.protocols.amqpfast.sender import Transfer
from gateway.protocols.amqpfast.spec import DELIVERED, REDELIVERED
from gateway.transport.stream import Stream
from tests.broker.parts import newest
from tests.ingress.amqpfast.client import EMPTY, PEER, QUEUE, TOPIC, Fast, fresh, head
from tests.ingress.clients import eventually
from tests.interop.gateway_fixture import Running


def numbers(rows: list[NotifyRow]) -> list[int]:
    return [row[1] for row in rows]


# --- queues


def test_each_message_goes_to_one_consumer(gateway: Running) -> None:
    with Fast(gateway).open() as one, Fast(gateway).open() as other:
        mine, theirs = one.handle("q"), other.handle("q")
        one.consume(mine)
        other.consume(theirs)
        one.put(mine, *[b"%d" % number for number in range(10)])
        first, second = one.bodies(5), other.bodies(5)
        assert sorted(first + second) == [b"%d" % number for number in range(10)]
        assert one.quiet()
        assert other.quiet()


def test_notify_carries_the_full_name_and_the_head_byte_for_byte(gateway: Running) -> None:
    said = head(
        persistent=True, priority=4, identifier="id-1", mime_type="text/plain", headers={"n": -7, "s": "x"}
    )
    with Fast(gateway).open() as client:
        handle = client.handle("alt.")
        client.consume(client.handle("alt.pets"))
        client.put(handle, b"meow", name="pets", head=said)
        (row,) = client.rows(1)
        assert fresh(row)
        assert row[3:] == (said, b"meow", b"alt.pets")


def test_the_window_is_prefetch_and_an_ack_covers_all_handles_of_the_channel(gateway: Running) -> None:
    with Fast(gateway).open() as client:
        one, other = client.handle("q1"), client.handle("q2")
        client.put(one, *[b"a"] * 4)
        client.put(other, *[b"b"] * 4)
        client.consume(one, prefetch=2)
        client.consume(other, prefetch=2)
        assert numbers(client.rows(4)) == [1, 2, 3, 4]
        assert client.quiet()
        client.ack(3)
        assert [row[4] for row in client.rows(3)] == [b"a", b"a", b"b"]
        assert client.quiet()
        client.ack(1_000_000)
        assert client.bodies(1) == [b"b"]


def test_an_ack_covers_only_what_was_outstanding_when_it_was_read(gateway: Running) -> None:
    with Fast(gateway).open() as client:
        handle = client.handle("q")
        client.put(handle, b"1", b"2", b"3")
        client.consume(handle, prefetch=1)
        client.rows(1)
        client.say(m.ChannelAck(1, 0, 100), m.ChannelAck(1, 0, 100), m.ChannelAck(1, 0, 100))
        assert client.bodies(1) == [b"2"]
        assert client.quiet()


def test_prefetch_0_is_1_and_unreliable_has_no_window(gateway: Running) -> None:
    with Fast(gateway).open() as client:
        handle = client.handle("q")
        client.put(handle, *[b"x"] * 5)
        client.consume(handle, prefetch=0)
        client.rows(1)
        assert client.quiet()
        other = client.handle("r")
        client.put(other, *[b"y"] * 50)
        client.consume(other, prefetch=1, unreliable=True)
        assert client.bodies(50) == [b"y"] * 50
        client.ack(60)  # harmless
    queues = gateway.gateway.fast_hosts["/"].queues
    eventually(lambda: gateway.ask(lambda: (len(queues["q"]), len(queues["r"]))) == (4, 0))


def test_unacknowledged_messages_return_in_their_order_when_the_client_is_gone(gateway: Running) -> None:
    with Fast(gateway).open() as client:
        handle = client.handle("q")
        client.put(handle, b"1", b"2", b"3", b"4")
        client.consume(handle, prefetch=3)
        client.rows(3)
        client.ack(1)
        client.cut()
    with Fast(gateway).open() as client:
        client.consume(client.handle("q"))
        rows = client.rows(3)
        assert [(row[4], fresh(row)) for row in rows] == [(b"2", False), (b"3", False), (b"4", False)]


def test_a_closed_handle_leaves_its_messages_to_the_channel(gateway: Running) -> None:
    with Fast(gateway).open() as client:
        handle = client.handle("q")
        client.put(handle, b"1", b"2")
        client.consume(handle, prefetch=1)
        client.rows(1)
        client.machine.close_handle(handle)
        client.ack(1)
        again = client.handle("q")
        client.consume(again)
        (row,) = client.rows(1)
        assert (row[4], row[2]) == (b"2", DELIVERED)


def test_higher_priority_first_and_lower_ones_when_these_are_gone(gateway: Running) -> None:
    with Fast(gateway).open() as client:
        handle = client.handle("q")
        for priority, body in ((0, b"a"), (9, b"b"), (4, b"c"), (200, b"d"), (0, b"e")):
            client.put(handle, body, head=head(priority=priority))
        client.consume(handle)
        rows = client.rows(5)
        assert [row[4] for row in rows] == [b"b", b"d", b"c", b"a", b"e"]
        written = [decode_head_properties(row[3]).priority for row in rows]
        assert written == [9, 9, 4, 0, 0], "more than 9 is not passed on"


def test_expired_messages_are_dropped(gateway: Running) -> None:
    with Fast(gateway).open() as client:
        handle = client.handle("q")
        client.put(handle, b"old", head=head(expiration=int(time.time()) - 5))
        client.put(handle, b"new", head=head(expiration=int(time.time()) + 500))
        client.put(handle, b"ever")
        client.consume(handle)
        assert client.bodies(2) == [b"new", b"ever"]


@pytest.mark.parametrize("jump_secs", [7_200, -7_200])
def test_expiration_goes_by_the_clock_of_the_clients(
    gateway: Running, monkeypatch: pytest.MonkeyPatch, jump_secs: int
) -> None:
    """A message has an absolute time, which the gateway's own clock does not show after a jump."""
    monkeypatch.setattr(clock, "unix_time", lambda: time.time() + jump_secs)
    now = int(clock.unix_time())
    with Fast(gateway).open() as client:
        handle = client.handle("q")
        client.put(handle, b"old", head=head(expiration=now - 5))
        client.put(handle, b"new", head=head(expiration=now + 500))
        wanted = f"EXPIRATION > {now + 490} AND EXPIRATION < {now + 510}"
        client.consume(handle, selector=wanted.encode())
        (row,) = client.rows(1)
        assert (row[4], decode_head_properties(row[3]).expiration) == (b"new", now + 500)


def test_flow_stops_a_handle_and_its_messages_go_to_others(gateway: Running) -> None:
    with Fast(gateway).open() as one, Fast(gateway).open() as other:
        mine, theirs = one.handle("q"), other.handle("q")
        one.consume(mine)
        other.consume(theirs)
        assert one.ask(m.HandleFlow(mine, 0, True))[3] == 200
        other.put(theirs, b"1", b"2", b"3")
        assert other.bodies(3) == [b"1", b"2", b"3"]
        assert other.ask(m.HandleFlow(theirs, 0, True))[3] == 200
        other.put(theirs, b"4")
        assert one.ask(m.HandleFlow(mine, 0, False))[3] == 200
        assert one.bodies(1) == [b"4"]


def test_unget_prefers_another_consumer(gateway: Running) -> None:
    with Fast(gateway).open() as one, Fast(gateway).open() as other:
        mine, theirs = one.handle("q"), other.handle("q")
        one.consume(mine)
        one.put(mine, b"1", b"2", b"3")
        one.rows(3)
        other.consume(theirs)
        assert one.ask(m.HandleUnget(mine, 0, 2))[3] == 200
        (row,) = other.rows(1)
        assert (row[4], row[2]) == (b"2", DELIVERED | REDELIVERED)
        one.ack(3)
        other.leave()
        (row,) = one.rows(1)  # nobody else is left
        assert (row[4], row[1]) == (b"2", 4)
        assert one.ask(m.HandleUnget(mine, 0, 4))[3] == 200
        assert one.rows(1)[0][1] == 5


def test_a_prefix_means_all_that_begin_with_it(gateway: Running) -> None:
    with Fast(gateway).open() as client:
        for name in ("alt.rec.pets", "alt.rec.pets.cats", "other"):
            client.handle(name)
        everywhere = client.handle("alt.rec.")
        client.put(everywhere, b"all")
        client.put(everywhere, b"one", name="pets")
        client.consume(client.handle("alt.rec"), prefetch=10)
        rows = client.rows(3)
        assert sorted((row[5], row[4]) for row in rows) == [
            (b"alt.rec.pets", b"all"),
            (b"alt.rec.pets", b"one"),
            (b"alt.rec.pets.cats", b"all"),
        ]
        whole = client.handle("")
        client.put(whole, b"really all")
        client.consume(client.handle("other"))
        assert [row[5] for row in client.rows(3)].count(b"other") == 1


def test_the_handle_fills_in_mime_type_and_encoding(gateway: Running) -> None:
    with Fast(gateway).open() as client:
        handle = client.handle("q", mime_type="text/csv", encoding="gzip")
        client.put(handle, b"1")
        client.put(handle, b"2", head=head(mime_type="text/html"))
        client.consume(handle)
        heads = [row[3] for row in client.rows(2)]
        assert heads == [
            head(mime_type="text/csv", encoding="gzip"),
            head(mime_type="text/html", encoding="gzip"),
        ]


def test_a_large_body_comes_and_goes_in_fragments_also_between_those_of_another_channel(
    gateway: Running,
) -> None:
    body, other_body = bytes(range(256)) * 2_000, b"z" * 300_000
    with Fast(gateway, frame_max=4_096).open() as client:
        second = client.channel()
        one, other = client.handle("q"), client.handle("q", channel=second)
        pieces = [
            (Transfer(client.machine, one, EMPTY, len(body)), body),
            (Transfer(client.machine, other, EMPTY, len(other_body)), other_body),
        ]
        sent = [0, 0]
        while sent != [len(body), len(other_body)]:
            for at, (transfer, whole) in enumerate(pieces):
                piece = whole[sent[at] : sent[at] + transfer.capacity]
                if piece:
                    sent[at] += len(piece)
                    transfer.write(piece, last=sent[at] == len(whole))
        client.flush()
        client.consume(one)
        found = {1: b"", 2: b""}
        while sum(map(len, found.values())) < len(body) + len(other_body):
            part = client.next(Fragment)
            found[part.number] += part.data
        assert sorted(found.values()) == sorted([body, other_body])


@pytest.mark.parametrize("unreliable", [False, True])
@pytest.mark.parametrize("byte_count", [0, 100_000])
def test_a_head_larger_than_a_clients_frames_waits_for_others(
    gateway: Running, unreliable: bool, byte_count: int
) -> None:
    wide, body = head(headers={"wide": "v" * 3_000}), b"x" * byte_count
    with Fast(gateway).open() as client, Fast(gateway, frame_max=1_024).open() as small:
        client.put(client.handle("q"), b"1" + body, head=wide)
        client.put(client.handle("q"), b"2")
        handle = small.handle("q")
        small.consume(handle, unreliable=unreliable)
        assert [row[4] for row in small.rows(1)] == [b"2"], "it passes"
        assert gateway.ask(lambda: newest(gateway.gateway.dead_letters)) == []
        other = client.handle("q")
        client.consume(other, unreliable=unreliable)
        assert [row[4][:1] for row in client.rows(1)] == [b"1"]


def test_a_head_larger_than_a_subscribers_frames_is_a_dead_letter(gateway: Running) -> None:
    """Nobody else has its subscription."""
    wide = head(headers={"wide": "v" * 3_000})
    with Fast(gateway).open() as client, Fast(gateway, frame_max=1_024).open() as small:
        handle = small.handle("t", TOPIC)
        small.consume(handle)
        client.put(client.handle("t", TOPIC), b"1", head=wide)
        client.put(client.handle("t", TOPIC), b"2")
        assert [row[4] for row in small.rows(1)] == [b"2"]
        (letter,) = gateway.ask(lambda: newest(gateway.gateway.dead_letters))
        assert letter.message.body == b"1"


# --- temporary destinations


def test_a_temporary_queue_is_named_owned_and_ends_with_its_channel(gateway: Running) -> None:
    with Fast(gateway, "owner").open() as owner, Fast(gateway, "guest").open() as guest:
        handle = owner.ask_handle("", temporary=True)
        created = owner.command(m.HandleCreated)
        assert created.dest_name.startswith("tmp-")
        assert owner.reply()[3] == 200
        theirs = guest.handle(created.dest_name)
        guest.put(theirs, b"answer")
        guest.say(m.HandleConsume(theirs, 0, 1))
        assert guest.handle_closed() == (theirs, 403)
        owner.consume(handle)
        assert owner.rows(1)[0][5] == created.dest_name.encode()
        owner.machine.close_channel(1)
        owner.flush()
        hosts = gateway.gateway.fast_hosts
        eventually(lambda: gateway.ask(lambda: created.dest_name not in hosts["/"].queues))


def test_a_named_temporary_is_emptied_when_its_owner_opens_it_again(gateway: Running) -> None:
    with Fast(gateway, "owner").open() as owner, Fast(gateway, "guest").open() as guest:
        handle = owner.ask_handle("mine", temporary=True)
        assert owner.command(m.HandleCreated).dest_name == "mine"
        owner.reply()
        owner.put(handle, b"old")
        again = owner.ask_handle("mine", temporary=True)
        owner.reply()
        owner.consume(again)
        assert owner.quiet()
        theirs = guest.ask_handle("mine", temporary=True)
        assert guest.handle_closed() == (theirs, 403)


def test_a_temporary_topic(gateway: Running) -> None:
    with Fast(gateway, "owner").open() as owner, Fast(gateway, "guest").open() as guest:
        handle = owner.ask_handle("news", TOPIC, temporary=True)
        owner.command(m.HandleCreated)
        owner.reply()
        owner.consume(handle)
        guest.put(guest.handle("news", TOPIC), b"x")
        assert owner.bodies(1) == [b"x"]
        owner.say(m.HandleConsume(handle, 0, 1, identifier="d"))
        assert owner.handle_closed() == (handle, 507)


# --- topics


def test_each_subscription_gets_a_copy(gateway: Running) -> None:
    with Fast(gateway).open() as one, Fast(gateway).open() as other:
        mine, theirs = one.handle("t", TOPIC), other.handle("t", TOPIC)
        one.put(mine, b"nobody hears it")
        one.consume(mine)
        one.consume(mine)
        other.consume(theirs)
        one.put(mine, b"x")
        assert one.bodies(2) == [b"x", b"x"]
        assert other.bodies(1) == [b"x"]


def test_no_local_and_prefixes_that_cover_topics_to_come(gateway: Running) -> None:
    with Fast(gateway).open() as one, Fast(gateway).open() as other:
        everything = one.handle("plant.", TOPIC)
        one.consume(everything, no_local=True)
        one.put(one.handle("plant.l1.t", TOPIC), b"mine")
        other.put(other.handle("plant.l2.t", TOPIC), b"theirs")
        other.put(other.handle("planted", TOPIC), b"no")
        (row,) = one.rows(1)
        assert row[4:] == (b"theirs", b"plant.l2.t")
        assert one.quiet()


def test_a_temporary_subscription_ends_with_its_handle(gateway: Running) -> None:
    with Fast(gateway).open() as client:
        handle = client.handle("t", TOPIC)
        client.consume(handle)
        client.machine.close_handle(handle)
        client.flush()
        again = client.handle("t", TOPIC)
        client.put(again, b"x")
        client.consume(again)
        assert client.quiet()
    assert gateway.ask(lambda: len(gateway.gateway.fast_hosts["/"].subscriptions)) <= 1


def test_a_durable_subscription_waits_and_is_drained(gateway: Running) -> None:
    with Fast(gateway, "d").open() as client:
        client.consume(client.handle("t", TOPIC), identifier="sub")
        client.leave()
    with Fast(gateway).open() as other:
        other.put(other.handle("t", TOPIC), b"1", b"2")
    with Fast(gateway, "d").open() as client:
        handle = client.handle("t", TOPIC)
        client.consume(handle, identifier="sub")
        assert client.bodies(2) == [b"1", b"2"]
        second = client.handle("t", TOPIC)
        client.say(m.HandleConsume(second, 0, 1, identifier="sub"))
        assert client.handle_closed() == (second, 507)
        assert client.ask(m.HandleCancel(handle, 0, "", "sub"))[3] == 200
        client.put(handle, b"3")
        client.consume(handle, identifier="sub")
        assert client.quiet()


@pytest.mark.parametrize("name", ["other", "t.", "", "t.u"])
def test_an_identifier_belongs_to_the_destination_it_was_first_used_for(gateway: Running, name: str) -> None:
    """3.5.4, 3.5.5: neither CONSUME nor CANCEL of another one touches it or what waits in it."""
    with Fast(gateway, "d").open() as client:
        client.consume(client.handle("t", TOPIC), identifier="sub")
        client.leave()
    with Fast(gateway).open() as other:
        other.put(other.handle("t", TOPIC), b"kept")
    with Fast(gateway, "d").open() as client:
        client.handle("t.u", TOPIC)
        for command, code in (
            (m.HandleConsume(0, prefetch=1, identifier="sub"), 507),
            (m.HandleConsume(0, prefetch=1, identifier="sub", selector=b"n > 1"), 507),
            (m.HandleCancel(0, identifier="sub"), 404),
        ):
            command.handle_id = handle = client.handle(name, TOPIC)
            client.say(command)
            assert client.handle_closed() == (handle, code)
        handle = client.handle("", TOPIC)
        client.consume(handle, dest_name="t", identifier="sub")
        assert client.bodies(1) == [b"kept"]
        assert client.ask(m.HandleCancel(handle, 0, "t", "sub"))[3] == 200
        client.consume(client.handle("other", TOPIC), identifier="sub")
        client.put(handle, b"new", name="other")
        assert client.bodies(1) == [b"new"]


def test_another_selector_makes_another_durable_subscription(gateway: Running) -> None:
    with Fast(gateway, "d").open() as client:
        handle = client.handle("t", TOPIC)
        client.consume(handle, identifier="sub")
        client.put(handle, b"old")
        client.rows(1)
        client.leave()
    with Fast(gateway, "d").open() as client:
        handle = client.handle("t", TOPIC)
        client.consume(handle, identifier="sub", selector=b"n > 1")
        client.put(handle, b"1", head=head(headers={"n": 1}))
        client.put(handle, b"2", head=head(headers={"n": 2}))
        assert client.bodies(1) == [b"2"]
        assert client.quiet()


# --- selectors, queries


SELECTORS = [
    ("Application/JMS", b"kind = 'a'", [b"1", b"3"]),
    ("", b"weight BETWEEN 2 AND 3", [b"2", b"3"]),
    ("application/jms", b"PRIORITY > 4 OR kind LIKE '_b'", [b"2", b"4"]),
    ("application/cel", b"headers.weight > 2", [b"3", b"4"]),
]


@pytest.mark.parametrize("mime_type, selector, wanted", SELECTORS)
@pytest.mark.parametrize("service", [QUEUE, TOPIC])
def test_selectors(
    gateway: Running, service: int, mime_type: str, selector: bytes, wanted: list[bytes]
) -> None:
    with Fast(gateway).open() as client:
        handle = client.handle("s", service)
        client.consume(handle, selector=selector, mime_type=mime_type)
        for number, kind in enumerate(("a", "bb", "a", "c"), 1):
            body = b"%d" % number
            said = head(priority=5 if number == 4 else 0, headers={"kind": kind, "weight": number})
            client.put(handle, body, head=said)
            if body in wanted:  # heard before the next one, which may be more urgent
                assert client.bodies(1) == [body]
        assert client.quiet()
        if service == QUEUE:
            client.consume(client.handle("s"))
            assert len(client.bodies(4 - len(wanted))) == 4 - len(wanted)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """Let slow work have one step in a turn; the streams that were suspended then, one for each time."""
    found: list[Stream] = []
    suspend = Stream.suspend

    def noting(stream: Stream) -> None:
        found.append(stream)
        suspend(stream)

    monkeypatch.setattr("gateway.transport.stream.SLOW_WORK_SECS", 0.0)
    monkeypatch.setattr(Stream, "suspend", noting)
    return found


@pytest.mark.interpreted  # each turn looks at one message
@pytest.mark.parametrize(("selector", "count"), [(b"x = 1", 10), (b"", 30)])
@pytest.mark.parametrize("service", [QUEUE, TOPIC])
def test_a_query_is_answered_after_several_turns_and_what_follows_waits(
    gateway: Running, turns: list[Stream], service: int, selector: bytes, count: int
) -> None:
    with Fast(gateway).open() as client, Fast(gateway).open() as other:
        handle = client.handle("q", service)
        if service == TOPIC:
            client.consume(handle)
            assert client.ask(m.HandleFlow(handle, 0, True))[3] == 200
        for number in range(30):
            client.put(handle, b"%d" % number, head=head(headers={"x": number % 3}))
        turns.clear()
        client.say(m.HandleQuery(handle, 0, selector=selector), m.HandleQuery(handle, 0))
        assert other.quiet()
        found = [client.command(m.HandleIndex) for _ in range(2)]
        sizes = [
            sum(last - first + 1 for first, last in decode_message_list(one.message_list)) for one in found
        ]
        assert sizes == [count, 30]
        assert len(turns) >= 60
        client.say(m.HandleQuery(handle, 0, selector=selector))
        client.cut()  # while it is looked for
        assert other.quiet()


@pytest.mark.interpreted  # each turn has time for one query
def test_queries_that_find_nothing_have_a_turn_each(gateway: Running, turns: list[Stream]) -> None:
    with Fast(gateway).open() as client:
        handle = client.handle("q")
        client.say(*[m.HandleQuery(handle, 0)] * 20)
        assert [client.command(m.HandleIndex).message_list for _ in range(20)] == [b""] * 20
        assert len(turns) >= 10


@pytest.mark.interpreted  # each turn has time for one command
def test_messages_are_browsed_in_a_turn_each_if_that_takes_long(
    gateway: Running, turns: list[Stream]
) -> None:
    with Fast(gateway).open() as client:
        handle = client.handle("q")
        client.put(handle, *[b"%d" % number for number in range(20)])
        client.index(handle)
        turns.clear()
        client.say(*[m.HandleBrowse(handle, 0, number) for number in range(1, 21)])
        assert client.bodies(20) == [b"%d" % number for number in range(20)]
        assert len(turns) >= 10


@pytest.mark.interpreted  # each turn looks at one message
@pytest.mark.parametrize("priority", [0, 9])
def test_a_queue_may_change_while_a_query_looks_at_it(
    gateway: Running, turns: list[Stream], priority: int
) -> None:
    with Fast(gateway).open() as client, Fast(gateway).open() as other:
        handle, taking = client.handle("q"), other.handle("q")
        client.put(handle, b"first", head=head(priority=priority))
        client.put(handle, *[b"%d" % number for number in range(199)])
        client.say(m.HandleQuery(handle, 0))
        other.consume(taking, prefetch=100)
        other.rows(100)
        other.put(taking, b"new")
        found = client.command(m.HandleIndex)
        ((first, last),) = decode_message_list(found.message_list)
        assert first == 1
        assert 100 <= last <= 201
        assert turns
        assert client.index(handle)[0][-1] >= last


def test_query_lists_and_browse_looks_without_taking(gateway: Running) -> None:
    with Fast(gateway).open() as client:
        handle = client.handle("q")
        client.put(handle, *[b"%d" % number for number in range(5)])
        client.put(handle, b"high", head=head(priority=9, headers={"x": 1}))
        ids, more = client.index(handle)
        assert (ids, more) == ([1, 2, 3, 4, 5, 6], 0)
        assert client.index(handle, 4)[0] == [5, 6]
        assert client.index(handle, selector=b"x = 1")[0] == [1]
        assert client.ask(m.HandleBrowse(handle, 0, 2))[3] == 200
        (row,) = client.rows(1)
        assert (row[1], row[2], row[4], row[5]) == (2, 0, b"0", b"q")
        client.consume(handle, prefetch=2)
        client.rows(2)
        client.ack(2)
        client.rows(2)
        assert client.ask(m.HandleBrowse(handle, 0, 2))[3] == 310
        client.say(m.HandleBrowse(handle, 0, 2))
        assert client.reply()[2:4] == (0, 310)
        assert client.index(handle)[0] == [5, 6]


def listed(client: Fast, handle: int, **more: Any) -> tuple[list[int], int]:
    """All ids of a QUERY and of those that follow it, and how many INDEX they took."""
    ids: list[int] = []
    above = count = 0
    while count == 0 or above:
        found, above = client.index(handle, above, **more)
        ids += found
        count += 1
    return ids, count


@pytest.mark.parametrize("service", [QUEUE, TOPIC])
def test_an_index_keeps_to_the_frame_max_of_its_client(gateway: Running, service: int) -> None:
    """3.2.5: no command exceeds it; what does not fit is listed by the next QUERY (3.5.12)."""
    with Fast(gateway).open() as other, Fast(gateway, frame_max=1_024).open() as client:
        handle = client.handle("q", service)
        if service == TOPIC:
            client.consume(handle)
            assert client.ask(m.HandleFlow(handle, 0, True))[3] == 200
        heads = [head(headers={"x": at % 2}) for at in range(2)]
        sending = other.handle("q", service)
        for at in range(1_000):
            other.put(sending, b"", head=heads[at % 2], confirm=at % 100 == 99)
        assert listed(client, handle) == (list(range(1, 1_001)), 1), "a range is short"
        ids, count = listed(client, handle, selector=b"x = 1")
        assert ids == list(range(2, 1_001, 2))
        assert count == 2
        assert client.ask(m.HandleBrowse(handle, 0, 1_000))[3] == 200


def test_query_of_a_topic_lists_the_handles_own_backlog(gateway: Running) -> None:
    with Fast(gateway).open() as client:
        handle = client.handle("t", TOPIC)
        client.consume(handle)
        assert client.ask(m.HandleFlow(handle, 0, True))[3] == 200
        client.put(handle, b"1", b"2")
        assert client.index(handle) == ([1, 2], 0)
        assert client.ask(m.HandleBrowse(handle, 0, 2))[3] == 200
        assert client.bodies(1) == [b"2"]
        assert client.index(client.handle("t", TOPIC)) == ([], 0)


def test_when_memory_is_short_handles_forget_what_they_have_cached(gateway: Running) -> None:
    listener = gateway.gateway.listeners["amqpfast"]
    with Fast(gateway).open() as client:
        sending, reading = client.handle("alt."), client.handle("alt.pets")
        client.put(sending, b"meow", b"purr", name="pets")
        client.index(reading)
        assert client.ask(m.HandleBrowse(reading, 0, 1))[3] == 200
        client.consume(reading)
        assert client.bodies(3) == [b"meow", b"meow", b"purr"]
        (connection,) = listener.connections
        assert isinstance(connection, FastConnection)
        handles = connection.handles
        (consumer,) = handles[reading].consumers
        notifiers = [handles[reading].browser, consumer._notifier]

        def cached() -> list[int]:
            return [len(handles[sending].entries), *[len(one._prepared) for one in notifiers if one]]

        assert gateway.ask(cached) == [1, 1, 1]
        gateway.ask(listener.forget_entries)
        assert gateway.ask(cached) == [0, 0, 0]
        client.put(sending, b"hiss", name="pets")
        assert client.bodies(1) == [b"hiss"]
        assert client.ask(m.HandleBrowse(reading, 0, 1))[3] == 310, ()


# --- peers


def test_the_peer_echo_answers_on_the_same_handle(gateway: Running) -> None:
    with Fast(gateway).open() as client:
        handle = client.handle("echo", PEER)
        said = head(identifier="x", headers={"n": 1})
        client.put(handle, b"hello", head=said)
        (row,) = client.rows(1)
        assert row == (handle, 1, DELIVERED, said, b"hello", b"echo")
        client.ack(1)
        client.put(handle, b"loud", head=head(priority=200, identifier="x"))
        assert client.rows(1)[0][3] == head(priority=9, identifier="x")


def test_a_stream_is_echoed_fragment_by_fragment(gateway: Running) -> None:
    with Fast(gateway).open() as client:
        handle = client.handle("echo", PEER)
        stream = Transfer(client.machine, handle, EMPTY, 0, streaming=True)
        found = b""
        for piece in (b"one", b"two", b"three" * 1_000):
            stream.write(piece, tag=client.machine.new_tag(1))
            client.flush()
            assert client.reply()[3] == 200
            found += client.next(Fragment).data
        assert found == b"onetwo" + b"three" * 1_000
        client.machine.close_handle(handle)
        client.flush()
        client.put(client.handle("echo", PEER), b"still here")
        assert client.bodies(1) == [b"still here"]
