"""Scripts of quorum queues, and of arguments that nobody knows."""

from __future__ import annotations

from typing import Any

from gateway.model.properties import Value, ValueType
from gateway.protocols.amqp091 import methods as m
from tests.interop.oracle.declaring import exchange, queue
from tests.interop.oracle.scripts import SCRIPTS, script
from tests.interop.oracle.wire import Wire, table

WAY, KEY = "x-dead-letter-exchange", "x-dead-letter-routing-key"
QUORUM: dict[str, Any] = {"x-queue-type": "quorum"}


def quorum(name: str, arguments: dict[str, Any] | None = None, **more: bool) -> m.QueueDeclare:
    return queue(name, QUORUM | (arguments or {}), **({"durable": True} | more))


def anew(a: Wire, name: str, arguments: dict[str, Any] | None = None) -> Wire:
    """A new quorum queue, for one outlives the script that has declared it."""
    before = len(a.log)
    a.call(m.QueueDelete(name))
    del a.log[before:]
    return a.call(quorum(name, arguments))


def declared(name: str, *declares: m.QueueDeclare) -> None:
    """Enter a script that declares queues; a channel that is closed is opened again."""

    def play(a: Wire) -> None:
        before = len(a.log)
        for one in {declare.queue for declare in declares}:
            a.call(m.QueueDelete(one))
        del a.log[before:]
        for declare in declares:
            a.call(declare)
            if a.log[-1].name == "channel.close":
                a.channel(1)

    SCRIPTS[name] = (play, True)


declared(
    "a queue with an argument nobody knows",
    queue("ea", {"x-fancy": 1}),
    queue("ea"),
    queue("ea", {"x-fancy": 2}),
)
declared("a quorum queue", quorum("eb"), quorum("eb"), quorum("eb", passive=True))
declared("a quorum queue declared as a classic one", quorum("ec"), queue("ec", durable=True))
declared("a classic queue declared as a quorum queue", queue("ed", durable=True), quorum("ed"))
declared("a quorum queue that is not durable", quorum("ee", durable=False))
declared("a quorum queue that is exclusive", quorum("ef", exclusive=True))
declared("a quorum queue that deletes itself", quorum("eg", auto_delete=True))
declared("a quorum queue of the server's name", quorum(""))
for at, (argument, value) in enumerate(
    (
        ("x-max-priority", 5),
        ("x-message-ttl", 60_000),
        ("x-expires", 60_000),
        ("x-max-length", 10),
        ("x-max-length-bytes", 1_000),
        ("x-overflow", "drop-head"),
        ("x-overflow", "reject-publish"),
        ("x-overflow", "reject-publish-dlx"),
        ("x-queue-mode", "lazy"),
        ("x-queue-version", 2),
        ("x-queue-master-locator", "min-masters"),
        ("x-queue-leader-locator", "balanced"),
        ("x-queue-leader-locator", "fancy"),
        ("x-delivery-limit", 3),
        ("x-delivery-limit", 0),
        ("x-delivery-limit", -1),
        ("x-delivery-limit", "3"),
        ("x-dead-letter-strategy", "at-most-once"),
        ("x-dead-letter-strategy", "at-least-once"),
        ("x-dead-letter-strategy", "fancy"),
        ("x-dead-letter-strategy", 1),
        ("x-quorum-initial-group-size", 3),
        ("x-quorum-initial-group-size", 0),
        ("x-initial-cluster-size", 3),
        ("x-single-active-consumer", True),
        ("x-max-in-memory-length", 3),
        ("x-max-in-memory-length", -3),
        ("x-max-in-memory-bytes", 3),
        ("x-max-age", "1D"),
        ("x-stream-max-segment-size-bytes", 1_000),
        ("x-fancy", 1),
        (WAY, ""),
        (KEY, "k"),
    )
):
    declared(f"a quorum queue with {argument} {value!r}", quorum(f"eh{at}", {argument: value}))
    declared(f"a queue with {argument} {value!r}", queue(f"ei{at}", {argument: value}))
declared("a stream", queue("ej", {"x-queue-type": "stream"}, durable=True))
declared("a queue type that is no text", queue("el", {"x-queue-type": 1}, durable=True))
declared(
    "a quorum queue with another delivery limit",
    quorum("em", {"x-delivery-limit": 2}),
    quorum("em", {"x-delivery-limit": 3}),
    quorum("em"),
)
declared(
    "all arguments of at-least-once",
    quorum(
        "en", {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish", WAY: "amq.direct"}
    ),
)


@script
def an_exchange_with_an_argument_nobody_knows(a: Wire) -> None:
    a.call(exchange("eo", arguments={"x-fancy": 1}), exchange("eo"), exchange("eo", arguments={"x-fancy": 2}))
    a.call(m.ExchangeDelete("eo"))


@script
def a_quorum_queue_counts_deliveries(a: Wire) -> None:
    anew(a, "fa").call(m.ConfirmSelect()).publish("", "fa", b"x", delivery_mode=2, headers={"a": 1}).hear()
    for tag in (1, 2, 3):
        a.call(m.BasicGet("fa")).say(m.BasicReject(tag, True)).silence()
    a.call(m.BasicGet("fa"))


@script
def a_quorum_queue_counts_what_a_consumer_gives_back(a: Wire) -> None:
    anew(a, "fb").call(m.ConfirmSelect()).publish("", "fb", b"x").hear()
    b = a.another().call(m.BasicConsume("fb", "c")).hear()
    b.call(m.BasicCancel("c")).say(m.BasicRecover(True)).hear().silence()
    a.call(m.BasicGet("fb")).say(m.BasicNack(1, False, True)).silence()
    b.call(m.BasicGet("fb")).call(m.ChannelClose(200, "", 0, 0))
    a.silence().call(m.BasicGet("fb"))


@script
def a_quorum_queue_with_a_delivery_limit(a: Wire) -> None:
    a.call(queue("fc", exclusive=True))
    anew(a, "fd", {"x-delivery-limit": 2, WAY: "", KEY: "fc"}).call(m.ConfirmSelect())
    a.publish("", "fd", b"x").hear().call(m.BasicConsume("fd", "c")).hear()
    for tag in (1, 2, 3):
        a.say(m.BasicReject(tag, True))
        if tag < 3:
            a.hear()
    a.silence().call(m.BasicGet("fc", True), quorum("fd", passive=True))


@script
def a_quorum_queue_with_a_delivery_limit_of_nothing(a: Wire) -> None:
    anew(a, "fe", {"x-delivery-limit": 0}).call(m.ConfirmSelect()).publish("", "fe", b"x").hear()
    a.call(m.BasicGet("fe")).say(m.BasicReject(1, True)).silence().call(m.BasicGet("fe"))


@script
def a_quorum_queue_rejects_into_dead_letters(a: Wire) -> None:
    a.call(queue("ff", exclusive=True))
    anew(a, "fg", {WAY: "", KEY: "ff"}).call(m.ConfirmSelect()).publish("", "fg", b"x").hear()
    a.call(m.BasicGet("fg")).say(m.BasicReject(1, True)).silence()
    a.call(m.BasicGet("fg")).say(m.BasicReject(2, False)).silence().call(m.BasicGet("ff", True))


@script
def a_quorum_queue_and_a_prefetch_for_the_channel(a: Wire) -> None:
    anew(a, "fh").call(m.BasicQos(0, 1, True), m.BasicConsume("fh", "c")).hear()


@script
def a_quorum_queue_and_an_exclusive_consumer(a: Wire) -> None:
    anew(a, "fi").call(m.BasicConsume("fi", "c", exclusive=True), m.BasicConsume("fi", "d"))


@script
def a_quorum_queue_and_priorities(a: Wire) -> None:
    anew(a, "fj").call(m.ConfirmSelect()).publish("", "fj", b"1", priority=1).hear()
    a.publish("", "fj", b"9", priority=9).hear().call(m.BasicGet("fj", True), m.BasicGet("fj", True))
    a.call(m.BasicConsume("fj", "low")).call(m.BasicConsume("fj", "high", arguments=table({"x-priority": 5})))
    a.publish("", "fj", b"x").hear(2)
    a.log[-2:] = sorted(a.log[-2:])


@script
def a_quorum_queue_keeps_what_is_not_persistent(a: Wire) -> None:
    anew(a, "fk").call(m.ConfirmSelect()).publish("", "fk", b"x", delivery_mode=1).hear()
    a.call(m.BasicGet("fk", True))


@script
def a_quorum_queue_with_a_greatest_length(a: Wire) -> None:
    anew(a, "fl", {"x-max-length": 1}).call(m.ConfirmSelect())
    a.publish("", "fl", b"1").hear().publish("", "fl", b"2").hear().silence()
    a.call(quorum("fl", passive=True), m.BasicGet("fl", True), m.BasicGet("fl", True))


@script
def a_quorum_queue_purged_and_deleted(a: Wire) -> None:
    anew(a, "fm").call(m.ConfirmSelect()).publish("", "fm", b"1", b"2").confirms(2)
    a.call(m.QueuePurge("fm"), m.BasicGet("fm")).publish("", "fm", b"3").hear()
    a.silence().call(m.QueueDelete("fm", if_empty=True)).channel(1).call(m.QueueDelete("fm"))


@script
def a_count_of_deliveries_that_the_sender_claims(a: Wire) -> None:
    anew(a, "fn", {"x-delivery-limit": 2}).call(m.ConfirmSelect())
    a.publish("", "fn", b"x", headers={"x-delivery-count": Value(ValueType.INT64, 7)}).hear()
    a.call(m.BasicGet("fn")).say(m.BasicReject(1, True)).silence().call(m.BasicGet("fn"))


@script
def a_quorum_queue_in_a_transaction(a: Wire) -> None:
    anew(a, "fo").call(m.TxSelect()).publish("", "fo", b"x").call(m.TxCommit()).silence()
    a.call(m.BasicGet("fo")).say(m.BasicReject(1, True)).call(m.TxCommit()).silence().call(m.BasicGet("fo"))


declared(
    "a classic queue by its type, or without",
    queue("ep", {"x-queue-type": "classic"}, auto_delete=True),
    queue("ep", auto_delete=True),
)
declared(
    "a classic queue without its type, or by it",
    queue("eq", auto_delete=True),
    queue("eq", {"x-queue-type": "classic"}, auto_delete=True),
)


@script
def a_count_of_deliveries_that_the_sender_claims_to_a_consumer(a: Wire) -> None:
    anew(a, "fp").call(m.ConfirmSelect())
    a.publish("", "fp", b"x", headers={"x-delivery-count": Value(ValueType.INT64, 7), "z": 1}).hear()
    a.call(m.BasicConsume("fp", "c")).hear().say(m.BasicReject(1, True)).hear()


@script
def a_quorum_queue_deleted_if_unused(a: Wire) -> None:
    anew(a, "fq").call(m.QueueDelete("fq", if_unused=True)).hear()


@script
def a_quorum_queue_whose_messages_expire(a: Wire) -> None:
    a.call(queue("fr", exclusive=True))
    anew(a, "fs", {WAY: "", KEY: "fr", "x-message-ttl": 100}).call(m.ConfirmSelect())
    a.publish("", "fs", b"x").hear().call(m.BasicGet("fs")).say(m.BasicReject(1, True)).silence().silence()
    a.call(m.BasicGet("fr", True))


@script
def a_quorum_queue_and_a_consumer_that_vanishes(a: Wire) -> None:
    anew(a, "fu").call(m.ConfirmSelect()).publish("", "fu", b"x").hear()
    a.another().call(m.BasicConsume("fu", "c")).hear().cut()
    a.silence().call(m.BasicGet("fu", True))
