"""A program of one protocol asks, one of another answers, each as it always does, with the default mapping.

The first table has the six directions, with every way in which a requester can wait for its answer; what
follows is off the beaten path, and what somebody may try who means ill.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pika
import pytest
import structlog
from pika.exceptions import ChannelClosedByBroker, UnroutableError

from gateway.access.rights import AllRights, Decision
from gateway.mapping.reply_routes import ANSWERS
from gateway.model.address import Address
from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.protocols import DIALECTS
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.spec import ReplyCode
from gateway.protocols.mqtt.dialect import topic_address
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode, Version
from gateway.settings import StoreSettings
from tests.broker.parts import newest
from tests.clients.asking import (
    REQUESTERS,
    RESPONDERS,
    FastParty,
    Heard,
    MqttParty,
    amqp_direct_requester,
    amqp_requester,
    amqp_responder,
    fast_queue_requester,
    fast_queue_responder,
    mqtt_requester,
    mqtt_responder,
    said,
)
from tests.clients.peers import PATIENCE_SECS, Paho
from tests.ingress.amqpfast.client import QUEUE, TOPIC, Fast
from tests.ingress.clients import connect
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of

Party = Callable[[Running], Any]

PAIRS = [
    pytest.param(requester, responder, id=f"{requester.__name__}-{responder.__name__}")
    for asking, requesters in REQUESTERS.items()
    for answering, responders in RESPONDERS.items()
    if asking != answering
    for requester in requesters
    for responder in responders
]
LASTING: Final = {Property.SESSION_EXPIRY_INTERVAL: 600}
NO_TEXT: Final = b"\x00\xff\xfe order \x80"


def lost(gateway: Running, listener: str) -> dict[str, int]:
    return gateway.ask(lambda: dict(gateway.gateway.listeners[listener].stats.answers_lost.counts))


def kept(gateway: Running) -> int:
    return gateway.ask(lambda: sum(route.reply_kept for route in gateway.gateway.dispatcher.router.routes))


@pytest.mark.parametrize("requester, responder", PAIRS)
def test_an_answer_comes_home(gateway: Running, requester: Party, responder: Party) -> None:
    with requester(gateway) as asks, responder(gateway) as answers:
        for number in range(3):
            asks.ask(b"how many? %d" % number, b"order-%d" % number)
            question = answers.question()
            assert (question.body, question.correlation) == (b"how many? %d" % number, b"order-%d" % number)
            answers.say(question, b"%d" % number)
            answer = asks.answer()
            assert (answer.body, answer.correlation) == (b"%d" % number, b"order-%d" % number)
    assert kept(gateway) == 0


@pytest.mark.parametrize(
    "requester, responder",
    [pair for pair in PAIRS if "amqp_" not in str(pair.id).split("-")[0]],
)
@pytest.mark.parametrize("correlation", [NO_TEXT, b"\xff" * 180, b"AAAA", "é".encode() * 100])
def test_a_correlation_that_is_no_text(
    gateway: Running, requester: Party, responder: Party, correlation: bytes
) -> None:
    with requester(gateway) as asks, responder(gateway) as answers:
        asks.ask(b"?", correlation)
        answers.say(answers.question(), b"!")
        assert asks.answer().correlation == correlation


@pytest.mark.parametrize("responder", [*RESPONDERS["amqp091"], *RESPONDERS["amqpfast"]])
@pytest.mark.parametrize(
    "topic",
    [
        "v1.2/a:b/50%/%2E",
        "/",
        "//",
        "é/日本/🦉",
        "a b/\t/&*",
        "amq.rabbitmq.reply-to",
        "mqtt:reply/x",
        "$mine/x",
        "x" * 180,
        "a/" * 24,
    ],
)
def test_odd_reply_topics(gateway: Running, responder: Party, topic: str) -> None:
    with mqtt_requester(gateway, topic) as asks, responder(gateway) as answers:
        asks.ask(b"?", b"c")
        answers.say(answers.question(), b"!")
        assert asks.answer() == Heard(None, b"c", b"!")


@pytest.mark.parametrize("topic", ["x" * 255, "r/" * 120, "level/" * 119 + "200"])
def test_a_reply_topic_that_is_too_long_is_kept_and_told_of(gateway: Running, topic: str) -> None:
    with (
        structlog.testing.capture_logs() as lines,
        mqtt_requester(gateway, topic) as asks,
        amqp_responder(gateway) as amqp,
        fast_queue_responder(gateway) as fast,
    ):
        asks.ask(b"?", b"c")
        assert fast.question().reply_to == topic
        assert amqp.question().reply_to == (topic if len(topic) < 256 else None)  # else in a header
        assert kept(gateway) == 2
    told = {one["route"]: one for one in lines if one["event"].startswith("reply address not translatable")}
    assert sorted(told) == ["mqtt-to-amqp091", "mqtt-to-amqpfast"]
    assert told["mqtt-to-amqp091"]["client"] == "asks"
    assert "bytes, at most 255 are allowed" in told["mqtt-to-amqp091"]["why"]


def test_answers_are_answered(gateway: Running) -> None:
    """Both sides say in each message where the next one is wanted."""
    with mqtt_requester(gateway) as asks, amqp_responder(gateway) as answers:
        asks.ask(b"1", b"c")
        question = answers.question()
        properties = pika.BasicProperties(reply_to="questions", correlation_id="d")
        answers.channel.basic_publish("", question.reply_to, b"2", properties, mandatory=True)
        back = asks.answer()
        assert (back.body, back.correlation) == (b"2", b"d")
        assert back.reply_to is not None
        asks.client.publish(
            back.reply_to, b"3", 1, properties=said(ResponseTopic="reply/rr", CorrelationData=NO_TEXT)
        )
        again = answers.question()
        assert (again.body, again.reply_to is not None) == (b"3", True)
        answers.say(again, b"4")
        assert asks.answer() == Heard(None, NO_TEXT, b"4")


def test_an_answer_said_twice_comes_twice(gateway: Running) -> None:
    with amqp_direct_requester(gateway) as asks, mqtt_responder(gateway) as answers:
        asks.ask(b"?", b"c")
        question = answers.question()
        answers.say(question, b"1")
        answers.say(question, b"2")
        assert [asks.answer().body, asks.answer().body] == [b"1", b"2"]


def test_a_responder_that_answers_with_the_properties_of_the_question(gateway: Running) -> None:
    """All of them: so the answer says that it wants an answer where it goes."""
    with mqtt_requester(gateway) as asks, amqp_responder(gateway) as answers:
        answers.channel.basic_cancel(answers.channel.consumer_tags[0])
        asks.ask(b"?", NO_TEXT)
        method, properties, _ = answers.channel.basic_get("questions", auto_ack=True)
        assert method is not None
        answers.channel.basic_publish("", properties.reply_to, b"!", properties, mandatory=True)
        assert asks.answer() == Heard("reply/rr", NO_TEXT, b"!")


def test_listeners_of_one_protocol_share_what_they_ask_and_answer() -> None:
    """Questions come in at the second listeners, and answers, too."""
    first = settings_of().listeners
    settings = settings_of(listeners=first | {f"{name}-2": one for name, one in first.items()})
    with (
        running(settings) as gateway,
        connect(gateway, "asks", listener="mqtt-2")[0] as asks,
        pika.BlockingConnection(
            pika.URLParameters(f"amqp://guest:guest@{LOOPBACK}:{gateway.port('amqp091-2')}/%2F")
        ) as connection,
    ):
        asks.subscribe("reply/rr", 1)
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("questions")
        channel.queue_bind("questions", "amq.topic", "ask.#")
        asks.publish("ask/it", b"?", 1, 1, properties=bytes([8, 0, 8]) + b"reply/rr")
        asks.acked(PacketType.PUBACK)
        method, properties, _ = channel.basic_get("questions", auto_ack=True)
        assert method is not None
        assert "-mqtt-2:" in properties.reply_to
        channel.basic_publish("", properties.reply_to, b"!", mandatory=True)
        assert asks.body() == b"!"


def test_a_question_that_is_passed_on_is_answered_where_it_came_from(gateway: Running) -> None:
    """From MQTT to AMQP, and by a program there to a topic that crosses back, and to AMQP/Fast."""
    with (
        mqtt_requester(gateway) as asks,
        amqp_responder(gateway) as passes_on,
        Paho(gateway, "5.0", "other") as other,
        Fast(gateway, "f").open() as fast,
    ):
        other.subscribe("passed/#", 1)
        fast.consume(fast.handle("passed.", TOPIC))
        asks.ask(b"?", NO_TEXT)
        question = passes_on.question()
        assert question.correlation is not None
        properties = pika.BasicProperties(
            reply_to=question.reply_to, correlation_id=question.correlation.decode()
        )
        passes_on.channel.basic_publish("amq.topic", "passed.on", b"?", properties)
        assert MqttParty(other).question() == Heard("reply/rr", NO_TEXT, b"?")
        answers = FastParty(fast, QUEUE)
        answers.say(answers.question(), b"!")
        assert asks.answer() == Heard(None, NO_TEXT, b"!")


# Whoever asked is gone.


@pytest.mark.parametrize("version, code", [(Version.V5, 0x10), (Version.V311, 0)])
def test_mqtt_hears_that_nobody_takes_an_answer(gateway: Running, version: Version, code: int) -> None:
    with mqtt_responder(gateway) as answers:
        for requester in (*REQUESTERS["amqp091"], *REQUESTERS["amqpfast"]):
            with requester(gateway) as asks:
                asks.ask(b"?", b"c")
                there = answers.question().reply_to
                assert there is not None
            if requester is amqp_requester:
                with pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as connection:
                    connection.channel().queue_delete("answers.here")
            client, _ = connect(gateway, "late", version=version)
            with client:
                client.publish(there, b"!", 1, 1)
                assert client.acked(PacketType.PUBACK) == (1, code)
                client.publish(there, b"!", 2, 2)
                assert client.acked(PacketType.PUBREC) == (2, code)
                client.ack(PacketType.PUBREL, 2)
                assert client.acked(PacketType.PUBCOMP) == (2, 0)
                client.publish(there, b"!", 0)
                client.ping()
    assert lost(gateway, "mqtt") == {"gone": 15}


def test_amqp_hears_that_nobody_takes_an_answer(gateway: Running) -> None:
    with structlog.testing.capture_logs() as lines, amqp_responder(gateway) as answers:
        with mqtt_requester(gateway) as asks:
            asks.ask(b"?", b"c")
            question = answers.question()
        with pytest.raises(UnroutableError):
            answers.say(question, b"!")
        answers.say(question, b"!", mandatory=False)  # is acknowledged all the same
        assert lost(gateway, "amqp091") == {"gone": 2}
    told = [one for one in lines if one["event"] == "response undeliverable"]
    assert [(one["listener"], one["reason"], one["log_level"]) for one in told] == [
        ("amqp091", "gone", "warning")
    ] * 2
    assert (told[0]["requester"], told[0]["reply_to"]) == ("mqtt", "reply/rr")
    assert told[0]["remote"].startswith(LOOPBACK)


@pytest.mark.parametrize("service", [QUEUE, TOPIC])
def test_amqpfast_hears_that_nobody_takes_an_answer(gateway: Running, service: int) -> None:
    with fast_queue_responder(gateway) as answers:
        with mqtt_requester(gateway) as asks:
            asks.ask(b"?", b"c")
            there = answers.question().reply_to
        client = answers.client
        handle = client.handle(there, service)
        client.put(handle, b"!", confirm=False)
        assert client.handle_closed() == (handle, ReplyCode.DESTINATION_NOT_FOUND)
        assert lost(gateway, "amqpfast") == {"gone": 1}
        assert gateway.ask(lambda: [*gateway.gateway.fast_hosts["/"].queues]) == []


def test_an_answer_waits_for_a_client_that_is_away(gateway: Running) -> None:
    """A requester that comes back to its session gets it then."""
    with amqp_responder(gateway) as answers:
        away, _ = connect(gateway, "away", clean=False, properties=LASTING)
        with away:
            away.subscribe("reply/away", 1)
            properties = bytes([8, 0, 10]) + b"reply/away"
            away.publish("ask/it", b"?", 1, 1, properties=properties)
            away.acked(PacketType.PUBACK)
        question = answers.question()
        answers.say(question, b"!")
        back, _ = connect(gateway, "away", clean=False, properties=LASTING)
        with back:
            assert back.body() == b"!"


def test_an_answer_that_became_a_dead_letter_is_sent_again(gateway: Running) -> None:
    with amqp_requester(gateway) as asks, mqtt_responder(gateway) as answers:
        asks.ask(b"?", b"c")
        address = topic_address(str(answers.question().reply_to))
        told: queue.Queue[Outcome] = queue.Queue()

        def redrive() -> None:
            core = gateway.gateway.core
            message = Message(address, b"!", assurance=1, sender=Sender("mqtt", "answers"))
            refused = Outcome(Verdict.REJECTED, Reason.QUOTA, "the queue is full")
            core.dead_letters.add([message], "amqp091-to-mqtt" + ANSWERS, refused)
            core.redriving.redrive(newest(core.dead_letters), lambda _, outcome: told.put(outcome))
            gateway.gateway.writes.flush()

        gateway.ask(redrive)
        assert told.get(timeout=PATIENCE_SECS) is ACCEPTED
        assert asks.answer().body == b"!"


def test_within_a_transaction(gateway: Running) -> None:
    with mqtt_requester(gateway) as asks, amqp_responder(gateway) as answers:
        asks.ask(b"?", b"c")
        question = answers.question()
        channel = answers.connection.channel()
        channel.tx_select()
        channel.basic_publish("", question.reply_to, b"!")
        channel.tx_commit()
        assert asks.answer().body == b"!"
    with mqtt_requester(gateway) as asks, fast_queue_responder(gateway) as fast:
        asks.ask(b"?", b"c")
        there = fast.question().reply_to
        client = fast.client
        number = client.channel(transacted=True)
        client.put(client.handle(there, QUEUE, channel=number), b"!!")
        assert client.ask(m.ChannelCommit(number), number)[3] == 200
        assert asks.answer().body == b"!!"


def test_a_client_of_mqtt_3_has_no_reply_address(gateway: Running) -> None:
    with Paho(gateway, "3.1.1") as old, amqp_responder(gateway) as answers:
        old.publish("ask/it", b"?", 1)
        assert answers.question() == Heard(None, None, b"?")


# Who means ill.


def test_made_up_return_addresses_lead_nowhere(gateway: Running) -> None:
    with amqp_requester(gateway) as asks, mqtt_responder(gateway) as answers, amqp_responder(gateway) as own:
        asks.ask(b"?", b"c")
        there = answers.question().reply_to
        assert there is not None
        own.question()
        made_up = [
            there[:-1],
            there + "x",
            there.replace("answers", "Answers"),
            "$gateway/reply/",
            "$gateway/reply/x",
            "$gateway/reply/" + "A" * 16 + "-amqp091:questions",
        ]
        for name in made_up:
            assert answers.client.publish(name, b"!", 1) == 0x10
        assert lost(gateway, "mqtt") == {"unknown": len(made_up)}
        rest = there.removeprefix("$gateway/reply/").replace("%2E", ".")
        with pytest.raises(UnroutableError):  # nothing crosses from AMQP to AMQP
            own.channel.basic_publish("", "amq.reply-to." + rest, b"!", mandatory=True)
        assert lost(gateway, "amqp091") == {"no_route": 1}
        answers.say(Heard(there, b"c", b""), b"!")
        assert asks.answer().body == b"!"
        assert asks.heard == []


@pytest.mark.parametrize("topic", ["$SYS/broker/uptime", "$SYS/x", "$share/g/x", "a/" * 64 + "a"])
def test_a_reply_topic_that_nobody_may_publish_to(gateway: Running, topic: str) -> None:
    with Paho(gateway, "5.0", "spy") as spy, amqp_responder(gateway) as answers:
        spy.subscribe("$SYS/#", 0)
        spy.client.publish("ask/it", b"?", 1, properties=said(ResponseTopic=topic))
        question = answers.question()
        with pytest.raises(UnroutableError):
            answers.say(question, b"evil")
        while not spy.messages.empty():
            assert spy.messages.get().payload != b"evil"


def test_a_forged_reply_address_is_not_made_good(gateway: Running) -> None:
    """A client that writes a return address itself gets none of ours for it."""
    with Paho(gateway, "5.0", "asks") as asks, amqp_responder(gateway) as answers:
        forged = "$gateway/reply/" + "A" * 16 + "-amqp091:questions"
        asks.publish("ask/it", b"?", 1, properties=said(ResponseTopic=forged))
        question = answers.question()
        assert question.reply_to == forged
        assert kept(gateway) >= 1
        with pytest.raises(UnroutableError):
            answers.say(question, b"evil")
    with amqp_requester(gateway) as amqp, mqtt_responder(gateway) as mqtt:
        for name in ("a/#", "+", "#", "a" * 255, "", "$SYS/x"):
            amqp.reply_to = name
            amqp.ask(b"?", b"c")
            question = mqtt.question()
            assert question.reply_to is None or not {"+", "#"} & set(question.reply_to)
            if question.reply_to is not None:
                assert mqtt.client.publish(question.reply_to, b"!", 1) == ReasonCode.NO_MATCHING_SUBSCRIBERS


def test_the_names_belong_to_the_gateway(gateway: Running) -> None:
    with (
        pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as connection,
        pytest.raises(ChannelClosedByBroker),
    ):
        connection.channel().queue_declare("amq.reply-to.x")
    with Fast(gateway, "f").open() as fast:
        for service in (QUEUE, TOPIC):
            handle = fast.handle("tmp-reply-x", service)
            fast.say(m.HandleConsume(handle, prefetch=1))
            assert fast.handle_closed() == (handle, ReplyCode.ACCESS_REFUSED)
            handle = fast.ask_handle("tmp-reply-x", service, temporary=True)
            assert fast.handle_closed() == (handle, ReplyCode.ACCESS_REFUSED)


def test_answers_are_for_nobody_else(gateway: Running) -> None:
    with Paho(gateway, "5.0", "spy") as spy:
        spy.subscribe("#", 1)
        spy.subscribe("$gateway/#", 1)
        with amqp_requester(gateway) as asks, mqtt_responder(gateway) as answers:
            asks.ask(b"?", b"c")
            assert spy.message().payload == b"?"
            answers.say(answers.question(), b"!")
            assert asks.answer().body == b"!"
        spy.publish("last", b"last", 1)
        assert spy.message().payload == b"last"


def test_an_answer_asks_for_the_right_to_publish_where_it_leads(gateway: Running) -> None:
    asked: list[tuple[str, Address]] = []

    def only_at_home(rights: AllRights, address: Address, host: str = "/") -> Decision:
        asked.append((address.protocol, address))
        return Decision(address.name not in ("reply/rr", "answers.here"), "elsewhere")

    with ExitStack() as stack:
        mqtt = stack.enter_context(mqtt_requester(gateway))
        amqp = stack.enter_context(amqp_requester(gateway))
        by_mqtt = stack.enter_context(mqtt_responder(gateway))
        by_amqp = stack.enter_context(amqp_responder(gateway))
        by_fast = stack.enter_context(fast_queue_responder(gateway))
        mqtt.ask(b"?", b"c")
        to_amqp, to_fast, _ = by_amqp.question(), by_fast.question(), by_mqtt.question()
        amqp.ask(b"?", b"c")
        to_mqtt = by_mqtt.question()
        with patch.object(AllRights, "publish", only_at_home):
            client, _ = connect(gateway, "raw")
            with client:
                assert to_mqtt.reply_to is not None
                client.publish(to_mqtt.reply_to, b"evil", 1, 1)
                assert client.acked(PacketType.PUBACK) == (1, ReasonCode.NOT_AUTHORIZED)
            with pytest.raises(ChannelClosedByBroker) as refused:
                by_amqp.say(to_amqp, b"evil")
            assert refused.value.reply_code == 403
            handle = by_fast.client.handle(to_fast.reply_to)
            by_fast.client.put(handle, b"evil", confirm=False)
            assert by_fast.client.handle_closed() == (handle, ReplyCode.ACCESS_REFUSED)
        assert ("mqtt", DIALECTS["mqtt"].address("", "reply/rr")) in asked
        assert ("amqp091", DIALECTS["amqp091"].address("", "answers.here")) in asked
        mqtt.client.publish("reply/rr", b"last", 1)
        assert mqtt.answer().body == b"last"
        assert amqp.heard == []


def test_an_answer_comes_home_after_a_restart(tmp_path: Path) -> None:
    settings = settings_of(store=StoreSettings(path=tmp_path))
    with running(settings) as gateway, amqp_responder(gateway) as answers, mqtt_requester(gateway) as asks:
        asks.ask(b"?", b"c")
        question = answers.question()
    with running(settings) as gateway, mqtt_requester(gateway) as asks:
        with pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.basic_publish("", str(question.reply_to), b"!", mandatory=True)
        assert asks.answer().body == b"!"


def test_a_mapping_of_ones_own_decides(tmp_path: Path) -> None:
    """Without `answers: direct` no return address is made, and those that were made lead nowhere."""
    text = (Path(__file__).parents[2] / "mappings" / "identity.yaml").read_text()
    mapping = tmp_path / "own.yaml"
    mapping.write_text(text)
    with (
        running(settings_of(mappings=(str(mapping),))) as gateway,
        mqtt_requester(gateway) as asks,
        amqp_responder(gateway) as answers,
    ):
        asks.ask(b"?", b"c")
        before = answers.question()
        answers.say(before, b"!")
        assert asks.answer().body == b"!"
        mapping.write_text(text.replace("    answers: direct\n", ""))
        gateway.until(lambda: gateway.gateway.metrics.mapping_reloads["taken"] == 1)
        asks.ask(b"?", b"c")
        assert answers.question().reply_to == "reply/rr"
        with pytest.raises(UnroutableError):
            answers.say(before, b"!")
        assert lost(gateway, "amqp091") == {"no_route": 1}


def test_a_temporary_queue_hears_what_a_topic_of_its_name_does_not(gateway: Running) -> None:
    with fast_queue_requester(gateway) as asks, mqtt_responder(gateway) as answers:
        asks.ask(b"?", b"c")
        answers.say(answers.question(), b"!")
        assert asks.answer().body == b"!"
        answers.client.publish(asks.reply_to, b"not for the queue", 1)
        assert asks.client.quiet()
