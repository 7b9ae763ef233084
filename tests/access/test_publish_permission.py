"""One decision for all ways to publish: what a client may not publish there and then reaches nobody.

ann hears `cmd/#`, which bob may not publish. Bob asks with the response topic `cmd/door`, and so owns a
return address that leads there.
"""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final

import pika
import pytest
from pika.exceptions import ChannelClosedByBroker

from gateway.access.http_authorization import HttpAuthorizerClient
from gateway.app.access import roles_of
from gateway.mapping.reply_routes import ANSWERS
from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.events import Opened
from gateway.protocols.mqtt.properties import encode_list
from gateway.protocols.mqtt.spec import PacketType, Property, Version
from gateway.settings import Http
from tests.access.received import received
from tests.access.test_authorizer import Server, given, server
from tests.access.test_doors import OPEN, ORDERS, PASSWORD, amqp, change, crossing, fast, settings
from tests.broker.parts import newest
from tests.clients.asking import FastParty
from tests.ingress.amqpfast.client import QUEUE, TOPIC, Fast
from tests.ingress.amqpfast.large import MIB, Whole
from tests.ingress.clients import Mqtt, connect
from tests.interop.gateway_fixture import Running, running

__all__ = ["server"]

AMQP: Final = {"/": {"configure": ".*", "write": ".*", "read": ".*"}}
FAST: Final = {
    "/": {word: {"write": "*", "read": "*", "create": "*"} for word in ("queues", "topics")},
}

heard = partial(received, user="ann", root="cmd")


def rules(publish: list[str], **more: Any) -> dict[str, Any]:
    """Roles of bob, who may publish these topics, and of ann."""
    bob = {"mqtt": {"publish": ["ask/#", *publish]}, "amqp091": AMQP, "amqpfast": FAST, "console": "write"}
    return {
        "bob": bob | {"console_virtual_hosts": ["/"]} | more,
        "ann": {"mqtt": {"publish": "#", "subscribe": "#"}, "amqp091": AMQP},
    }


def of(publish: list[str], **more: Any) -> Any:
    return settings(
        rules(publish, **more), {"ann": ("ann",), "bob": ("bob",)}, http=Http(enabled=True, port=0)
    )


def ask(gateway: Running) -> None:
    """Bob asks, with a response topic to which he may not publish."""
    raw = encode_list({Property.RESPONSE_TOPIC: "cmd/door"}, PacketType.PUBLISH)
    client, _ = connect(gateway, "asks", user=("bob", PASSWORD.encode()))
    with client:
        client.publish("ask/it", b"?", 1, 1, properties=raw)
        assert client.acked(PacketType.PUBACK) == (1, 0)


def amqp_return_address(gateway: Running, channel: Any) -> str:
    channel.queue_declare("asked")
    channel.queue_bind("asked", "amq.topic", "ask.#")
    ask(gateway)
    found = channel.basic_get("asked", auto_ack=True)[1].reply_to
    assert found.startswith("amq.reply-to.")
    return str(found)


def fast_return_address(gateway: Running, client: Fast) -> str:
    client.next(Opened)
    client.channel()
    client.consume(client.handle("ask.", TOPIC))
    ask(gateway)
    found = FastParty(client, QUEUE).question().reply_to
    assert found is not None
    return found


def post(gateway: Running, key: str, body: str) -> bytes:
    """Publish by RabbitMQ's HTTP API as bob; the response."""
    url = f"http://127.0.0.1:{gateway.gateway.http_port}/api/exchanges/%2F/amq.default/publish"
    fields = {"routing_key": key, "payload": body, "payload_encoding": "string", "properties": {}}
    token = base64.b64encode(f"bob:{PASSWORD}".encode()).decode()
    headers = {"Authorization": f"Basic {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(fields).encode(), headers)
    try:
        with urllib.request.urlopen(request) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        return error.read()


def test_rabbitmqs_http_api_publishes_to_no_return_address_beyond_the_rights() -> None:
    with running(of([])) as gateway, closing(amqp(gateway, "bob")) as connection, heard(gateway) as told:
        address = amqp_return_address(gateway, connection.channel())
        assert b"ACCESS_REFUSED - access to return address" in post(gateway, address, "no")
        change(gateway, of(["cmd/#"]))
        assert post(gateway, address, "yes") == b'{"routed":true}'
    assert told == [b"yes"]


def redriven(gateway: Running) -> list[Outcome]:
    """Redrive all dead letters; their outcomes."""
    told: list[Outcome] = []
    core = gateway.gateway.core
    gateway.ask(lambda: core.redriving.redrive(newest(core.dead_letters), lambda _, one: told.append(one)))
    gateway.until(lambda: bool(told))
    return told


@pytest.mark.parametrize("route", ["", "mqtt-to-amqp091", "amqp091-to-mqtt" + ANSWERS])
def test_a_return_address_gets_only_replies_that_were_refused_behind_it(route: str) -> None:
    """A user chooses where its queue's dead letters go, and a return address is one of the names."""
    refused = Outcome(Verdict.REJECTED, Reason.QUOTA, "the queue is full")
    with running(of([])) as gateway, closing(amqp(gateway, "bob")) as connection, heard(gateway) as told:
        address = amqp_address("", amqp_return_address(gateway, connection.channel()))
        message = Message(address, b"!", sender=Sender("amqp091", "", "bob"))
        gateway.ask(lambda: gateway.gateway.dead_letters.add([message], route, refused))
        (outcome,) = redriven(gateway)
        assert (outcome is ACCEPTED) == route.endswith(ANSWERS)
    assert told == ([b"!"] if route.endswith(ANSWERS) else [])


def test_a_reply_in_the_form_of_its_requester_reaches_the_requester_alone() -> None:
    """The requester's queue has the name of a topic that another client has subscribed to."""
    refused = Outcome(Verdict.REJECTED, Reason.INTERNAL, "an internal error")
    route = "amqp091-to-mqtt" + ANSWERS
    with running(of([])) as gateway, closing(amqp(gateway, "bob")) as connection, heard(gateway) as told:
        channel = connection.channel()
        channel.queue_declare("cmd/door")
        message = Message(amqp_address("", "cmd/door"), b"private", sender=Sender("mqtt", "", "ann"))
        letters = gateway.gateway.dead_letters
        gateway.ask(lambda: letters.add([message], route, refused, crossed=True))
        assert redriven(gateway) == [ACCEPTED]
        assert channel.basic_get("cmd/door", auto_ack=True)[2] == b"private"
    assert told == []


def test_a_dead_letter_of_a_users_queue_does_not_reach_a_requester() -> None:
    with running(of([])) as gateway, closing(amqp(gateway, "bob")) as connection, heard(gateway) as told:
        channel = connection.channel()
        arguments = {
            "x-queue-type": "quorum",
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": amqp_return_address(gateway, channel),
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }
        channel.queue_declare("mine", durable=True, arguments=arguments)
        channel.basic_publish("", "mine", b"forged")
        got, _, _ = next(channel.consume("mine"))
        channel.basic_nack(got.delivery_tag, requeue=False)
        gateway.until(lambda: sum(gateway.gateway.dead_letters.counted.values()) == 1)
        (outcome,) = redriven(gateway)
        assert "return address" in outcome.text
        assert gateway.ask(lambda: len(gateway.gateway.dead_letters)) == 1
    assert told == []


def test_the_right_to_send_ends_for_messages_in_fragments_too() -> None:
    wide, narrow = (
        of([], amqpfast={"/": {"queues": {"write": write, "create": "*"}}}) for write in ("q", "r")
    )
    with running(wide) as gateway, Whole(gateway, user="bob", password=PASSWORD).open() as client:
        handle = client.handle("q")
        client.put(handle, b"small")
        change(gateway, narrow)
        client.write(client.transfer(handle, bytes(2 * MIB)), bytes(2 * MIB))
        assert client.handle_closed() == (handle, 403)
        assert gateway.ask(lambda: len(gateway.gateway.fast_hosts["/"].queues["q"])) == 1


# Transactions


def topics(key: str) -> dict[str, Any]:
    """Rights of AMQP in which these keys of `amq.topic` may be published."""
    return {"amqp091": {"/": AMQP["/"] | {"topics": {"amq.topic": {"write": key, "read": ".*"}}}}}


@pytest.mark.parametrize("when", ["recheck", "commit"])
@pytest.mark.parametrize("header", ["CC", "BCC"])
def test_a_copy_whose_key_was_revoked_is_not_committed(header: str, when: str) -> None:
    """The check of a commit does not depend on that of the connection, which comes in its turn."""
    with running(of([], **topics("^(a|secret)$"))) as gateway, closing(amqp(gateway, "ann")) as other:
        reader = other.channel()
        reader.queue_declare("q")
        reader.queue_bind("q", "amq.topic", "#")
        with closing(amqp(gateway, "bob")) as connection:
            channels = [connection.channel() for _ in range(2)]
            for channel, copies in zip(channels, (["secret"], ["a"]), strict=True):
                channel.tx_select()
                properties = pika.BasicProperties(headers={header: copies})
                channel.basic_publish("amq.topic", "a", copies[0].encode(), properties)
                channel.queue_declare("q", passive=True)
            narrower = of([], **topics("^a$"))
            if when == "recheck":
                change(gateway, narrower)
            else:
                gateway.ask(lambda: gateway.gateway.rules._replace(roles_of(narrower)))
            with pytest.raises(ChannelClosedByBroker) as refused:
                channels[0].tx_commit()
            assert refused.value.reply_code == (403 if when == "recheck" else 406)
            channels[1].tx_commit()
        assert reader.basic_get("q", auto_ack=True)[2] == b"a"
        assert reader.basic_get("q", auto_ack=True)[2] is None


def test_a_commit_survives_its_exchange_but_not_the_right_to_it() -> None:
    with running(of([])) as gateway, closing(amqp(gateway, "ann")) as other:
        reader = other.channel()
        reader.exchange_declare("ex", "fanout")
        reader.queue_declare("q")
        reader.queue_bind("q", "ex")
        with closing(amqp(gateway, "bob")) as connection:
            channel = connection.channel()
            channel.tx_select()
            channel.basic_publish("ex", "", b"routed before")
            channel.queue_declare("q", passive=True)
            reader.exchange_delete("ex")
            channel.tx_commit()
            assert reader.basic_get("q", auto_ack=True)[2] == b"routed before"
            reader.exchange_declare("ex", "fanout")
            reader.queue_bind("q", "ex")
            channel.basic_publish("ex", "", b"not any more")
            channel.queue_declare("q", passive=True)
            less = {"amqp091": {"/": AMQP["/"] | {"write": "^q$"}}}
            gateway.ask(lambda: gateway.gateway.rules._replace(roles_of(of([], **less))))
            with pytest.raises(ChannelClosedByBroker) as refused:
                channel.tx_commit()
            assert refused.value.reply_code == 406
            assert reader.basic_get("q", auto_ack=True)[2] is None


def test_a_commit_of_amqpfast_needs_the_right_at_that_moment() -> None:
    less = {"amqpfast": {"/": FAST["/"] | {"queues": {"write": "other", "read": "*", "create": "*"}}}}
    with running(of([])) as gateway, fast(gateway, "bob") as client:
        client.next(Opened)
        client.channel()
        channel = client.channel(transacted=True)
        client.put(client.handle("there", channel=channel), b"!")
        gateway.ask(lambda: gateway.gateway.rules._replace(roles_of(of([], **less))))
        client.say(m.ChannelCommit(channel, 0))
        assert client.channel_closed() == (channel, 403)
        assert gateway.ask(lambda: len(gateway.gateway.fast_hosts["/"].queues["there"])) == 0


def test_a_binding_outlives_the_right_that_made_it_but_its_queue_can_be_closed() -> None:
    """As in RabbitMQ: what the page of permissions says of definitions."""
    narrower = {"read": "^q$", "write": ".*", "configure": ".*"}
    with running(of([])) as gateway, closing(amqp(gateway, "ann")) as other:
        sender = other.channel()
        sender.confirm_delivery()
        with closing(amqp(gateway, "bob")) as connection:
            channel = connection.channel()
            channel.queue_declare("q")
            channel.queue_bind("q", "amq.topic", "secret")
            change(gateway, of([], amqp091={"/": narrower}))
            sender.basic_publish("amq.topic", "secret", b"1")
            assert channel.basic_get("q", auto_ack=True)[2] == b"1"
            with pytest.raises(ChannelClosedByBroker) as refused:
                channel.queue_bind("q", "amq.topic", "more")
            assert refused.value.reply_code == 403
            channel = connection.channel()
            channel.basic_consume("q", lambda *_: None)
            change(gateway, of([], amqp091={"/": narrower | {"read": "^other$"}}))
            with pytest.raises(ChannelClosedByBroker) as refused:
                channel.queue_declare("q", passive=True)
            assert refused.value.reply_code == 403


@pytest.mark.parametrize("right", [True, False])
def test_a_copied_answer_in_a_transaction_needs_its_right_at_the_commit(right: bool) -> None:
    """With CC, a return address and a queue together: all of it or nothing."""
    with (
        running(of(["cmd/#"])) as gateway,
        heard(gateway) as told,
        closing(amqp(gateway, "bob")) as connection,
    ):
        channel = connection.channel()
        address = amqp_return_address(gateway, channel)
        channel.tx_select()
        channel.basic_publish("", address, b"!", pika.BasicProperties(headers={"CC": ["asked"]}))
        channel.queue_declare("asked", passive=True)
        change(gateway, of(["cmd/door" if right else "cmd/window"]))
        if right:
            channel.tx_commit()
        else:
            with pytest.raises(ChannelClosedByBroker) as refused:
                channel.tx_commit()
            assert refused.value.reply_code == 403
        copy = connection.channel().basic_get("asked", auto_ack=True)[2]
        assert copy == (b"!" if right else None)
    assert told == ([b"!"] if right else [])


@pytest.mark.parametrize("right", [True, False])
def test_an_answer_in_a_transaction_of_amqpfast_needs_the_right_where_it_leads(right: bool) -> None:
    """Its name is that of no destination, for which there could be a right."""
    narrow = {"/": {"queues": {"write": "mine", "create": "mine"}, "topics": FAST["/"]["topics"]}}
    before, after = ["cmd/#"], ["cmd/door" if right else "cmd/window"]
    with (
        running(of(before, amqpfast=narrow)) as gateway,
        heard(gateway) as told,
        fast(gateway, "bob") as client,
    ):
        address = fast_return_address(gateway, client)
        channel = client.channel(transacted=True)
        client.put(client.handle(address, channel=channel, consumer=False, browser=False), b"!")
        change(gateway, of(after, amqpfast=narrow))
        if right:
            assert client.ask(m.ChannelCommit(channel), channel)[3] == 200
        else:
            assert client.channel_closed() == (channel, 403)
    assert told == ([b"!"] if right else [])


# Repeats


def repeating(gateway: Running, channel: Any, topic: str) -> Mqtt:
    """Bob's client of MQTT 3.1.1, whose message at `topic` the route repeats, because its queue is full."""
    channel.queue_declare("q", arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    channel.queue_bind("q", "amq.topic", "#")
    channel.basic_publish("amq.topic", "x", b"full")
    gateway.until(lambda: len(gateway.gateway.hosts["/"].queues["q"]) == 1)
    client, _ = connect(gateway, "repeats", user=("bob", PASSWORD.encode()), version=Version.V311)
    client.publish(topic, b"again", qos=1, packet_id=1)
    (route,) = gateway.gateway.dispatcher.router.routes
    gateway.until(lambda: route.retried > 0)
    return client


@pytest.mark.parametrize("role", [True, False])
@pytest.mark.parametrize("right", ["publish", "deny_publish", ""])
def test_a_repeat_needs_every_right_of_the_first_attempt(tmp_path: Path, right: str, role: bool) -> None:
    """A reload of rules between two attempts, and of routes: rights and roles of the moment decide."""
    opened = crossing(tmp_path, OPEN)
    everything = {"mqtt": {"publish": "#", "subscribe": "#"}, "amqp091": AMQP, "hold": True}
    narrower: dict[str, Any] = {"publish": {"publish": "ask/#"}, "": everything["mqtt"]}
    narrower["deny_publish"] = {"publish": "#", "deny_publish": "orders/#"}
    with running(opened) as gateway, closing(amqp(gateway, "bob")) as connection:
        channel = connection.channel()
        with repeating(gateway, channel, "orders/x") as client:
            change(gateway, settings({"erp": everything | {"mqtt": narrower[right]}}, {"bob": ("erp",)}))
            if role:
                crossing(tmp_path, ORDERS)
                assert gateway.await_(gateway.gateway.reload_mappings)
            assert channel.basic_get("q", auto_ack=True)[2] == b"full"
            assert client.acked(PacketType.PUBACK) == (1, 0)
        assert channel.basic_get("q", auto_ack=True)[2] == (None if right else b"again")
        assert gateway.ask(lambda: len(gateway.gateway.dead_letters)) == bool(right)


@pytest.mark.parametrize("answer", [b"allow", b"deny"])
def test_a_repeat_waits_for_the_authorizer(server: Server, tmp_path: Path, answer: bytes) -> None:
    mapping = tmp_path / "routes.yaml"
    mapping.write_text(OPEN.replace("orders/", "bob/"))
    authorizer = given(server).authorizer
    holder = {"holder": {"hold": True}}
    with_authorizer = settings(holder, {"bob": ("holder",)}, authorizer=authorizer, mappings=(str(mapping),))
    server.answer = b"allow"
    with running(with_authorizer) as gateway, closing(amqp(gateway, "bob")) as connection:
        channel = connection.channel()
        with repeating(gateway, channel, "bob/x") as client:
            server.gate.clear()
            server.answer = answer
            asked = len(server.asked)

            def forget() -> None:
                assert isinstance(gateway.gateway.authorizer, HttpAuthorizerClient)
                gateway.gateway.authorizer._answers.clear()
                gateway.gateway.hosts["/"].queues["q"].purge()

            gateway.ask(forget)
            gateway.until(lambda: len(server.asked) > asked)
            assert gateway.ask(lambda: len(gateway.gateway.hosts["/"].queues["q"])) == 0
            server.gate.set()
            assert client.acked(PacketType.PUBACK) == (1, 0)
        assert gateway.ask(lambda: len(gateway.gateway.hosts["/"].queues["q"])) == (answer == b"allow")
        assert gateway.ask(lambda: len(gateway.gateway.dead_letters)) == (answer == b"deny")


@pytest.mark.parametrize("answer", [b"allow", b"deny"])
def test_a_commit_waits_for_the_authorizer(server: Server, answer: bytes) -> None:
    """It is begun when everything is known, so that nothing is committed twice, or in part."""
    with running(given(server)) as gateway, closing(amqp(gateway, "bob")) as connection:
        channel = connection.channel()
        channel.queue_declare("bob")
        channel.basic_publish("", "bob", b"first")
        channel.tx_select()
        (got, _, _) = channel.basic_get("bob")
        channel.basic_ack(got.delivery_tag)
        channel.basic_publish("", "bob", b"second")
        channel.queue_declare("bob", passive=True)
        server.answer = answer

        def forget() -> None:
            assert isinstance(gateway.gateway.authorizer, HttpAuthorizerClient)
            gateway.gateway.authorizer._answers.clear()
            gateway.gateway.dispatcher.invalidate()

        asked = len(server.asked)
        gateway.ask(forget)
        if answer == b"allow":
            channel.tx_commit()
        else:
            with pytest.raises(ChannelClosedByBroker) as refused:
                channel.tx_commit()
            assert refused.value.reply_code == 406
        assert len(server.asked) > asked
        left = gateway.gateway.hosts["/"].queues["bob"]
        gateway.until(lambda: len(left) == 1)
        server.answer = b"allow"
        gateway.ask(forget)
        body = connection.channel().basic_get("bob", auto_ack=True)[2]
        assert body == (b"second" if answer == b"allow" else b"first")
