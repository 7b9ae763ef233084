"""A conversation that is passed on: what goes through as it is, what is judged, how a channel is lost."""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from typing import Any

import pytest

from gateway.errors import RemoteProtocolError
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import (
    BasicProperties,
    decode_method,
    encode_basic_properties,
    encode_content_frames,
    encode_frame,
    encode_method_frame,
)
from gateway.protocols.amqp091.relaying import JUDGED_MAX, Refusal, Relayed, ToClient, ToServer
from gateway.protocols.amqp091.spec import FRAME_HEADER, HEARTBEAT_FRAME

FRAME_MAX = 4_096
PLAIN = encode_basic_properties(BasicProperties(delivery_mode=2))
FORGED = encode_basic_properties(BasicProperties(user_id="somebody"))


class Judge:
    """Refuses what is called `own`, and does not know about `later` until it is told."""

    def __init__(self) -> None:
        self.seen: list[m.Method] = []
        self.known: set[bytes] = set()
        self.learned: list[bytes] = []
        self.undecided = True

    def remember(self, publish: bytes) -> None:
        self.learned.append(publish)

    def knows(self, publish: bytes) -> bool:
        return publish in self.known

    def allows(self, channel: Relayed, method: m.Method) -> bool:
        names = [getattr(method, word, "") for word in ("queue", "exchange", "routing_key")]
        if "later" in names and self.undecided:
            return False
        if "own" in names:
            raise RemoteProtocolError("ACCESS_REFUSED - no", reason=403, class_id=method.index >> 16)
        self.seen.append(method)
        return True

    def content(self, channel: Relayed, publish: bytes, raw: bytes) -> bytes | None:
        if b"later" in publish and self.undecided:
            return None
        return PLAIN if raw == FORGED else raw


class Both:
    """Both directions, with channels 1 and 2 open."""

    def __init__(self, **more: Any) -> None:
        self.judge = Judge()
        given: dict[str, Any] = {
            "frame_max": FRAME_MAX,
            "channel_max": 10,
            "message_bytes_max": 100_000,
            "properties_max": 10,
            "properties_bytes_max": 1_000,
        }
        self.received: defaultdict[str, int] = defaultdict(int)
        self.sent: defaultdict[str, int] = defaultdict(int)
        self.up = ToServer(self.judge, self.received, **given | more)
        self.down = ToClient(self.up.channels, self.sent, frame_max=FRAME_MAX)
        for number in (1, 2):
            assert self.say(frame(number, m.ChannelOpen())) == frame(number, m.ChannelOpen())

    def say(self, data: bytes) -> bytes:
        """What the server hears of it."""
        self.up.receive_data(data)
        return b"".join(self.up.taken())

    def hear(self, data: bytes) -> bytes:
        """What the client hears of it."""
        return b"".join(self.down.receive_data(data))

    def refused(self) -> Refusal:
        assert self.up.refusal is not None
        return self.up.refusal


def frame(channel: int, method: m.Method) -> bytes:
    return encode_method_frame(channel, method)


def content(channel: int, method: m.Method, body: bytes, raw: bytes = PLAIN) -> list[bytes]:
    """The frames of a message."""
    frames = encode_content_frames(channel, raw, body, FRAME_MAX)
    return [frame(channel, method), *[bytes(one) for one in frames if isinstance(one, bytes)]]


def publish(channel: int = 1, key: str = "k", body: bytes = b"body", raw: bytes = PLAIN) -> bytes:
    return b"".join(content(channel, m.BasicPublish("", key), body, raw))


CONVERSATION = (
    publish(body=b"x" * 10_000)
    + frame(2, m.QueueDeclare("q"))
    + HEARTBEAT_FRAME
    + publish(2, body=b"")
    + frame(1, m.BasicAck(1, True))
    + publish(raw=FORGED)
    + HEARTBEAT_FRAME
)
PASSED = CONVERSATION.replace(HEARTBEAT_FRAME, b"").replace(
    content(1, m.BasicPublish("", "k"), b"body", FORGED)[1], content(1, m.BasicPublish("", "k"), b"body")[1]
)


@pytest.mark.parametrize("step", [1, 2, 7, 100, 4_000, len(CONVERSATION)])
def test_how_octets_are_split_changes_nothing(step: int) -> None:
    both = Both()
    heard = b"".join(both.say(CONVERSATION[at : at + step]) for at in range(0, len(CONVERSATION), step))
    assert heard == PASSED
    assert both.up.messages == 3
    assert both.received == {
        "channel.open": 2, "basic.publish": 3, "header": 3, "body": 4, "heartbeat": 2, "basic.ack": 1,
        "queue.declare": 1,
    }  # fmt: skip
    assert [type(one) for one in both.judge.seen] == [
        m.BasicPublish, m.QueueDeclare, m.BasicPublish, m.BasicPublish,
    ]  # fmt: skip


def test_contents_of_several_channels_may_be_interleaved() -> None:
    both = Both()
    first = content(1, m.BasicPublish("", "one"), b"1" * 8_000)
    other = content(2, m.BasicPublish("", "two"), b"2" * 8_000)
    order = [first[0], other[0], other[1], first[1], other[2], first[2], first[3], other[3]]
    assert both.say(b"".join(order)) == b"".join(
        [other[0], other[1], first[0], first[1], other[2], first[2], first[3], other[3]]
    )


def test_a_publish_waits_for_its_header_alone() -> None:
    both = Both()
    method, *others = content(1, m.BasicPublish("", "k"), b"body")
    assert both.say(method) == b""
    assert both.say(frame(2, m.QueueDeclare("q"))) == frame(2, m.QueueDeclare("q"))
    assert both.say(b"".join(others)) == method + b"".join(others)


def test_what_is_known_is_not_decoded() -> None:
    both = Both()
    both.say(publish(2))
    assert both.judge.learned == [content(1, m.BasicPublish("", "k"), b"")[0][11:-1]]
    both.judge.seen.clear()
    both.judge.known.add(content(1, m.BasicPublish("", "k"), b"")[0][11:-1])
    assert both.say(publish()) == publish()
    assert both.judge.seen == []


@pytest.mark.parametrize("step", [1, 30, 100, 100_000])
def test_runs_of_messages_are_seen_as_each_alone(step: int) -> None:
    """Those that differ in nothing but their bodies are looked at together."""
    both = Both()
    run = b"".join(publish(body=b"%03d" % number) for number in range(50))
    between = publish(2) * 2 + HEARTBEAT_FRAME + publish(2, body=b"") + frame(2, m.BasicAck(1, False)) * 3
    forged = publish(body=b"abc", raw=FORGED)
    whole = run + between + run + forged * 2 + run + publish(body=b"abcd") + run
    known = content(1, m.BasicPublish("", "k"), b"")[0][11:-1]
    both.judge.known.add(known)
    heard = b"".join(both.say(whole[at : at + step]) for at in range(0, len(whole), step))
    header, passed = (content(1, m.BasicPublish("", "k"), b"abc", raw)[1] for raw in (FORGED, PLAIN))
    assert heard == whole.replace(HEARTBEAT_FRAME, b"").replace(header, passed)
    assert (both.received["basic.publish"], both.up.messages) == (206, 206)
    assert (both.received["body"], both.received["basic.ack"]) == (205, 3)
    both.judge.known.clear()
    both.say(run)
    assert len(both.judge.seen) == 50, "what is not known any more is decided anew"


def test_a_heartbeat_within_a_message_is_no_part_of_it() -> None:
    both = Both()
    method, header, body = content(1, m.BasicPublish("", "k"), b"body")
    odd = method + header + HEARTBEAT_FRAME + body
    assert both.say(odd * 3 + publish() * 3) == publish() * 6
    assert (both.up.messages, both.received["heartbeat"]) == (6, 3)


def test_acknowledgements_on_channels_that_are_not_open_are_faults() -> None:
    both = Both()
    good = frame(1, m.BasicAck(1, False)) * 3
    with pytest.raises(RemoteProtocolError) as broken:
        both.say(good + frame(7, m.BasicAck(1, False)))
    assert (broken.value.reason, b"".join(both.up.taken())) == (504, good)


@pytest.mark.parametrize("step", [1, 30, 100, 100_000])
def test_runs_of_deliveries_pass_whole(step: int) -> None:
    both = Both()

    def delivery(tag: int, body: bytes = b"body", channel: int = 1) -> bytes:
        return b"".join(content(channel, m.BasicDeliver("c", tag, tag % 2 == 0, "", "k"), body))

    run = b"".join(delivery(tag) for tag in range(40))
    whole = (
        run
        + delivery(1, b"")
        + delivery(2, b"x" * 9_000)
        + HEARTBEAT_FRAME
        + run
        + delivery(3, channel=2)
        + run
    )
    heard = b"".join(both.hear(whole[at : at + step]) for at in range(0, len(whole), step))
    assert heard == whole.replace(HEARTBEAT_FRAME, b"")
    assert (both.down.messages, both.sent["basic.deliver"], both.sent["header"]) == (123, 123, 123)
    assert both.sent["body"] == 121 + 3


REFUSED = [
    frame(1, m.QueueDeclare("own")),
    publish(key="own"),
    publish(body=b"x" * 100_001),
    publish(raw=encode_basic_properties(BasicProperties(type="t" * 255, reply_to="t" * 255,
        app_id="t" * 255, content_type="t" * 255))),
]  # fmt: skip


@pytest.mark.parametrize("step", [1, 50, 1_000_000])
@pytest.mark.parametrize("said", REFUSED)
def test_what_is_refused_costs_its_channel(said: bytes, step: int) -> None:
    """The server closes the channel; what it has said on it before comes first, and then the reason."""
    both = Both()
    before, behind = publish(), publish(2)
    whole = before + said + publish() + behind
    heard = b""
    for at in range(0, len(whole), step):
        heard += both.say(whole[at : at + step])
    assert heard == before
    assert both.down.refuse(both.refused()) == frame(1, m.ChannelClose(200, "", 0, 0))
    delivery = b"".join(content(1, m.BasicDeliver("c", 1, False, "", "k"), b"late"))
    answer = both.hear(delivery + frame(1, m.ChannelCloseOk()))
    assert answer.startswith(delivery)
    closed = decode_method(answer[len(delivery) + 7 : -1])
    assert isinstance(closed, m.ChannelClose)
    assert closed.reply_code in (403, 406)
    assert both.down.refused is None
    both.up.refusal = None
    assert both.say(b"") == behind
    assert both.say(frame(1, m.ChannelCloseOk())) == b""
    assert 1 not in both.up.channels
    assert both.say(frame(1, m.ChannelOpen()) + publish()) == frame(1, m.ChannelOpen()) + publish()


def test_server_and_gateway_close_a_channel_at_once() -> None:
    both = Both()
    both.say(frame(1, m.QueueDeclare("own")))
    both.down.refuse(both.refused())
    assert both.hear(frame(1, m.ChannelClose(404, "not here", 0, 0))) == b""
    assert both.down.answers == [frame(1, m.ChannelCloseOk())]
    assert both.hear(frame(1, m.ChannelCloseOk())) != b""
    both.up.refusal = None
    assert both.say(frame(1, m.ChannelCloseOk())) == b""
    assert list(both.up.channels) == [2]


def test_client_and_gateway_close_a_channel_at_once() -> None:
    both = Both()
    both.say(frame(1, m.QueueDeclare("own")))
    both.down.refuse(both.refused())
    both.hear(frame(1, m.ChannelCloseOk()))
    both.up.refusal = None
    assert both.say(frame(1, m.ChannelClose(200, "bye", 0, 0))) == b""
    assert both.up.answers == [frame(1, m.ChannelCloseOk())]
    assert both.say(frame(1, m.ChannelCloseOk())) == b""
    assert list(both.up.channels) == [2]


def test_client_and_server_close_a_channel_at_once() -> None:
    both = Both()
    bye = frame(1, m.ChannelClose(200, "bye", 0, 0))
    assert both.say(bye) == bye
    assert both.hear(bye) == bye
    assert both.say(frame(1, m.ChannelCloseOk())) == frame(1, m.ChannelCloseOk())
    assert 1 in both.up.channels
    both.hear(frame(1, m.ChannelCloseOk()))
    assert 1 not in both.up.channels


def test_content_for_a_channel_that_the_server_has_closed_is_dropped() -> None:
    both = Both()
    method, header, body = content(1, m.BasicPublish("", "k"), b"body")
    assert both.say(method + header) == method + header
    both.hear(frame(1, m.ChannelClose(404, "", 0, 0)))
    assert both.say(body + publish() + frame(1, m.ChannelCloseOk())) == frame(1, m.ChannelCloseOk())
    assert both.up.messages == 1


@pytest.mark.parametrize("said", [frame(1, m.QueueDeclare("later")), publish(key="later"),
    publish(key="later", raw=FORGED)])  # fmt: skip
@pytest.mark.parametrize("step", [1, 1_000])
def test_what_is_not_known_yet_is_asked_again(said: bytes, step: int) -> None:
    both = Both()
    whole = publish() + said + publish()
    heard = b""
    for at in range(0, len(whole), step):
        heard += both.say(whole[at : at + step])
    assert both.up.undecided
    assert heard == publish()
    both.judge.undecided = False
    decided = both.say(b"")
    assert FORGED not in decided
    assert FORGED in said or decided == said + publish()
    assert not both.up.undecided
    assert both.up.messages == whole.count(m.BasicPublish.index.to_bytes(4, "big"))


def test_consumers_are_known_by_their_queues() -> None:
    channel = Relayed(1)
    down = ToClient({1: channel}, defaultdict(int), frame_max=FRAME_MAX)
    channel.consumers["mine"] = "a"
    channel.unnamed.append("b")
    down.receive_data(frame(1, m.BasicConsumeOk("mine")) + frame(1, m.BasicConsumeOk("amq.ctag-1")))
    assert channel.consumers == {"mine": "a", "amq.ctag-1": "b"}
    down.receive_data(frame(1, m.BasicCancel("mine")))
    assert channel.consuming == ["b"]


def test_one_turn_decodes_so_much() -> None:
    both = Both()
    many = frame(1, m.QueueDeclare("q")) * (JUDGED_MAX + 5)
    assert both.say(many) == frame(1, m.QueueDeclare("q")) * JUDGED_MAX
    assert both.up.unread
    assert both.say(b"") == frame(1, m.QueueDeclare("q")) * 5
    assert not both.up.unread


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (b"\x05\0\0\0\0\0\0\xce", 501),
        (b"\x08\0\1\0\0\0\0\xce", 505),
        (encode_frame(FRAME_HEADER, 1, b"\0" * 14), 505),
        (encode_frame(FRAME_HEADER, 7, b"\0" * 14), 504),
        (encode_frame(3, 1, b"x"), 505),
        (encode_frame(1, 1, b"x"), 501),
        (b"\1\0\1\0\0\xff\xff", 501),
        (frame(1, m.TxSelect())[:-1] + b"\0", 501),
        (frame(7, m.TxSelect()), 504),
        (frame(1, m.ChannelOpen()), 504),
        (frame(1, m.BasicGetEmpty()), 503),
        (encode_frame(1, 1, b"\0\x3c\0\xff"), 501),
        (frame(1, m.ChannelCloseOk()), 503),
        (frame(0, m.ConnectionOpen()), 504),
        (content(1, m.BasicPublish(), b"body")[0] + frame(1, m.TxSelect()), 505),
        (content(1, m.BasicPublish(), b"body")[0] * 2, 505),
        (b"".join(content(1, m.BasicPublish(), b"body")[:2]) + frame(1, m.TxSelect()), 505),
        (b"".join(content(1, m.BasicPublish(), b"body")[:2]) + encode_frame(3, 1, b"12345"), 505),
        (b"".join(frame(number, m.ChannelOpen()) for number in range(3, 12)), 530),
    ],
)
def test_broken_rules_end_the_connection(said: bytes, code: int) -> None:
    both = Both()
    with pytest.raises(RemoteProtocolError) as broken:
        both.say(publish() + said + b"\0")
    assert broken.value.reason == code
    assert b"".join(both.up.taken()).startswith(publish())


@pytest.mark.parametrize("octets", range(1, 9))
def test_a_frame_that_is_too_large_is_not_waited_for(octets: int) -> None:
    """However little of it came first."""
    both = Both()
    head = b"\3\0\1\xff\0\0\0" + b"x" * 20
    for take in (both.say, both.hear):
        with pytest.raises(RemoteProtocolError, match="exceeds frame-max"):
            [take(part) for part in (head[:octets], head[octets:])]


def test_goodbyes_are_passed_and_noticed() -> None:
    both = Both()
    bye, done = frame(0, m.ConnectionClose(200, "", 0, 0)), frame(0, m.ConnectionCloseOk())
    assert both.say(bye) == bye
    assert both.up.closing
    assert both.hear(done + b"behind") == done
    assert both.down.closed


def test_a_new_secret_is_the_gateways() -> None:
    both = Both()
    assert both.say(frame(0, m.ConnectionUpdateSecret(b"new", "old")) + publish()) == publish()
    assert [one.new_secret for one in both.up.secrets] == [b"new"]


@pytest.mark.parametrize("seed", range(300))
def test_whatever_is_wrong_is_a_fault_of_who_said_it(seed: int) -> None:
    """Octets that were changed, left out or put in."""
    chance = random.Random(seed)
    both = Both()
    server = b"".join(content(1, m.BasicDeliver("c", 1, False, "", "k"), b"body")) * 3
    server += frame(1, m.BasicConsumeOk("c")) + frame(2, m.ChannelClose(404, "", 0, 0)) + HEARTBEAT_FRAME
    for said, take in ((CONVERSATION + publish() * 5, both.say), (server, both.hear)):
        broken = bytearray(said)
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(broken))
            broken[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
        with contextlib.suppress(RemoteProtocolError):
            while broken:
                step = chance.randrange(1, 2_000)
                take(bytes(broken[:step]))
                del broken[:step]
        assert both.up._rest is None or both.up._rest.octets <= FRAME_MAX + 2_000
