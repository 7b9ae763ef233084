"""Scripts of exchanges, queues and bindings: declaring, finding fault with a declaration, deleting."""

from __future__ import annotations

from typing import Any

from gateway.protocols.amqp091 import methods as m
from tests.interop.oracle.scripts import SCRIPTS, script
from tests.interop.oracle.wire import Wire, table

Calls = tuple[m.Method, ...]


def queue(name: str, arguments: dict[str, Any] | None = None, **more: bool) -> m.QueueDeclare:
    return m.QueueDeclare(name, arguments=table(arguments or {}), **more)


def exchange(
    name: str, kind: str = "direct", arguments: dict[str, Any] | None = None, **more: bool
) -> m.ExchangeDeclare:
    return m.ExchangeDeclare(name, kind, arguments=table(arguments or {}), **more)


# What is said on one channel; each method has one answer.
CALLS: dict[str, Calls] = {
    "a queue declared again as it is": (queue("d1"), queue("d1"), m.QueueDelete("d1")),
    "a queue redeclared durable": (queue("d2", exclusive=True), queue("d2", exclusive=True, durable=True)),
    "a queue redeclared auto-delete": (
        queue("d3", exclusive=True),
        queue("d3", exclusive=True, auto_delete=True),
    ),
    "a queue redeclared exclusive": (
        queue("d4", auto_delete=True),
        queue("d4", exclusive=True, auto_delete=True),
    ),
    "a queue redeclared without its argument": (
        queue("d5", {"x-message-ttl": 9_000}, exclusive=True),
        queue("d5", exclusive=True),
    ),
    "a queue redeclared with another argument": (
        queue("d6", {"x-max-length": 9}, exclusive=True),
        queue("d6", {"x-max-length": 10}, exclusive=True),
    ),
    "a queue redeclared with an argument of another width": (
        queue("d7", {"x-max-length": 9}, exclusive=True),
        queue("d7", {"x-max-length": 9}, exclusive=True),
    ),
    "a queue whose name is reserved": (queue("amq.mine"),),
    "a queue that is not there, passively": (queue("none", passive=True),),
    "a queue with a name of the server": (queue("", exclusive=True), m.QueueBind("", "amq.direct", "k")),
    "the last queue by an empty name": (queue("d8", exclusive=True), m.QueuePurge(""), m.BasicGet("")),
    "no last queue for an empty name": (m.QueuePurge(""),),
    "no last queue for a consumer": (m.BasicConsume(""),),
    "no last queue for a binding": (m.QueueBind("", "amq.direct", "k"),),
    "purging a queue that is not there": (m.QueuePurge("none"),),
    "deleting a queue that is not there": (m.QueueDelete("none"),),
    "deleting a queue that has consumers": (
        queue("d9", auto_delete=True),
        m.BasicConsume("d9", "c"),
        m.QueueDelete("d9", if_unused=True),
    ),
    "a negative time to live": (queue("e1", {"x-message-ttl": -1}),),
    "a time to live that is a string": (queue("e2", {"x-message-ttl": "9"}),),
    "a time to live of no time": (queue("e3", {"x-message-ttl": 0}, exclusive=True),),
    "an expiry of no time": (queue("e4", {"x-expires": 0}),),
    "an expiry that is a string": (queue("e5", {"x-expires": "9"}),),
    "a negative greatest length": (queue("e6", {"x-max-length": -1}),),
    "a greatest length that is a string": (queue("e7", {"x-max-length": "9"}),),
    "a negative greatest size": (queue("e8", {"x-max-length-bytes": -1}),),
    "an unknown overflow": (queue("e9", {"x-overflow": "explode"}),),
    "an overflow that is a number": (queue("f1", {"x-overflow": 1}),),
    "a dead letter key without its exchange": (queue("f2", {"x-dead-letter-routing-key": "k"}),),
    "a dead letter exchange that is a number": (queue("f3", {"x-dead-letter-exchange": 1}),),
    "a dead letter exchange that is not there": (
        queue("f4", {"x-dead-letter-exchange": "none"}, exclusive=True),
    ),
    "a greatest priority beyond 255": (queue("f5", {"x-max-priority": 256}),),
    "a negative greatest priority": (queue("f6", {"x-max-priority": -1}),),
    "a greatest priority that is a string": (queue("f7", {"x-max-priority": "9"}),),
    "a greatest priority of nothing": (queue("f8", {"x-max-priority": 0}, exclusive=True),),
    "a single active consumer that is a number": (queue("f9", {"x-single-active-consumer": 1}),),
    "an unknown type of queue": (queue("g1", {"x-queue-type": "fancy"}),),
    "a classic queue by its type": (queue("g2", {"x-queue-type": "classic"}, exclusive=True),),
    "a lazy queue": (queue("g3", {"x-queue-mode": "lazy"}, exclusive=True),),
    "an unknown mode of queue": (queue("g4", {"x-queue-mode": "fancy"}),),
    "a queue of the second version": (queue("g5", {"x-queue-version": 2}, exclusive=True),),
    "all arguments of a queue": (
        queue(
            "g6",
            {
                "x-message-ttl": 60_000,
                "x-expires": 60_000,
                "x-max-length": 10,
                "x-max-length-bytes": 10_000,
                "x-overflow": "reject-publish",
                "x-dead-letter-exchange": "",
                "x-dead-letter-routing-key": "g7",
                "x-max-priority": 5,
                "x-single-active-consumer": True,
            },
            exclusive=True,
        ),
    ),
    "an exchange declared again as it is": (exchange("h1"), exchange("h1"), m.ExchangeDelete("h1")),
    "an exchange of another type": (exchange("h2"), exchange("h2", "fanout")),
    "an exchange redeclared durable": (exchange("h3"), exchange("h3", durable=True)),
    "an exchange redeclared auto-delete": (exchange("h4"), exchange("h4", auto_delete=True)),
    "an exchange redeclared internal": (exchange("h5"), exchange("h5", internal=True)),
    "an exchange redeclared with an alternate": (
        exchange("h6"),
        exchange("h6", arguments={"alternate-exchange": "x"}),
    ),
    "an alternate exchange that is a number": (exchange("h7", arguments={"alternate-exchange": 1}),),
    "an exchange that is not there, passively": (exchange("none", passive=True),),
    "a reserved exchange, passively": (exchange("amq.direct", passive=True),),
    "an exchange whose name is reserved": (exchange("amq.mine"),),
    "an exchange of the broker's declared as it is": (exchange("amq.topic", "topic", durable=True),),
    "an exchange of the broker's declared otherwise": (exchange("amq.topic", "fanout", durable=True),),
    "the default exchange, declared": (exchange(""),),
    "the default exchange, passively": (exchange("", passive=True),),
    "the default exchange, deleted": (m.ExchangeDelete(""),),
    "an exchange of the broker's, deleted": (m.ExchangeDelete("amq.direct"),),
    "an exchange that is not there, deleted": (m.ExchangeDelete("none"),),
    "an exchange in use, deleted if unused": (
        exchange("i1"),
        queue("i2", exclusive=True),
        m.QueueBind("i2", "i1", "k"),
        m.ExchangeDelete("i1", if_unused=True),
    ),
    "an exchange that hashes a property that it cannot": (
        exchange("k1", "x-consistent-hash", {"hash-property": "app_id"}),
    ),
    "an exchange that hashes two things": (
        exchange("k2", "x-consistent-hash", {"hash-property": "message_id", "hash-header": "a"}),
    ),
    "an exchange that hashes, declared again otherwise": (
        exchange("k3", "x-consistent-hash", {"hash-header": "a"}),
        exchange("k3", "x-consistent-hash", {"hash-header": "b"}),
        m.ExchangeDelete("k3"),
    ),
    "a weight that is a word": (
        exchange("k4", "x-consistent-hash", auto_delete=True),
        queue("k5", exclusive=True),
        m.QueueBind("k5", "k4", "heavy"),
    ),
    "a weight of nothing": (
        exchange("k6", "x-consistent-hash", auto_delete=True),
        queue("k7", exclusive=True),
        m.QueueBind("k7", "k6", "0"),
    ),
    "a negative weight": (
        exchange("k8", "x-consistent-hash", auto_delete=True),
        queue("k9", exclusive=True),
        m.QueueBind("k9", "k8", "-1"),
    ),
    "binding a queue that is not there": (m.QueueBind("none", "amq.direct", "k"),),
    "binding to an exchange that is not there": (queue("i3", exclusive=True), m.QueueBind("i3", "none", "k")),
    "binding to the default exchange": (queue("i4", exclusive=True), m.QueueBind("i4", "", "k")),
    "unbinding from the default exchange": (queue("i5", exclusive=True), m.QueueUnbind("i5", "", "i5")),
    "unbinding what is not bound": (queue("i6", exclusive=True), m.QueueUnbind("i6", "amq.direct", "k")),
    "unbinding a queue that is not there": (m.QueueUnbind("none", "amq.direct", "k"),),
    "unbinding from an exchange that is not there": (
        queue("i7", exclusive=True),
        m.QueueUnbind("i7", "none", "k"),
    ),
    "binding exchanges": (
        exchange("i8", auto_delete=True),
        m.ExchangeBind("i8", "amq.direct", "k"),
        m.ExchangeUnbind("i8", "amq.direct", "k"),
        m.ExchangeDelete("i8"),
    ),
    "binding an exchange that is not there": (m.ExchangeBind("none", "amq.direct", "k"),),
    "binding to an exchange that is not there, as an exchange": (m.ExchangeBind("amq.direct", "none", "k"),),
    "binding the default exchange": (m.ExchangeBind("", "amq.direct", "k"),),
    "unbinding an exchange that is not there": (m.ExchangeUnbind("none", "amq.direct", "k"),),
    "a headers binding with an unknown match": (
        queue("j1", exclusive=True),
        m.QueueBind("j1", "amq.headers", "", arguments=table({"x-match": "some"})),
    ),
    "a headers binding whose match is a number": (
        queue("j2", exclusive=True),
        m.QueueBind("j2", "amq.headers", "", arguments=table({"x-match": 1})),
    ),
    "a headers binding with the extension": (
        queue("j3", exclusive=True),
        m.QueueBind("j3", "amq.headers", "", arguments=table({"x-match": "any-with-x", "x-a": 1})),
    ),
    "a line end in a queue's name": (
        queue("\rd\nd1\r\n", exclusive=True),
        queue("dd1", passive=True),
        queue("\ndd1", passive=True),
        m.QueueBind("dd1\n", "amq.\ndirect", "k\n"),
        m.QueueUnbind("dd1\n", "amq.\ndirect", "k\n"),
        m.QueueDelete("\ndd1"),
        queue("dd1", passive=True),
    ),
    "a line end in the name of a queue to get from": (queue("dd2", exclusive=True), m.BasicGet("dd2\n")),
    "a line end in the name of a queue to consume from": (
        queue("dd3", exclusive=True),
        m.BasicConsume("dd3\n", "c"),
    ),
    "a line end in an exchange's name": (
        exchange("\rd\nd4\r\n"),
        exchange("dd4", passive=True),
        exchange("dd\n4", passive=True),
        m.ExchangeBind("dd4\n", "amq.direct\r", "k"),
        m.ExchangeUnbind("dd4\n", "amq.direct\r", "k"),
        m.ExchangeDelete("d\rd4"),
        exchange("dd4", passive=True),
    ),
    "a line end in the name of a queue to purge": (queue("dd5", exclusive=True), m.QueuePurge("dd5\n")),
    "a queue whose name is nothing but a line end": (
        queue("\n", exclusive=True),
        m.QueueBind("", "amq.direct", "k"),
    ),
    "a reserved name in spite of a line end": (queue("\namq.mine", exclusive=True),),
    "a queue name of 255 bytes": (queue("n" * 255, exclusive=True),),
}
# As CALLS, with two things to hear of the last method: the close of the connection, and its end.
LAST_CALLS: dict[str, Calls] = {
    "an unknown type of exchange": (exchange("k1", "fancy"),),
}


def _calls(calls: Calls, more: int) -> Any:
    def play(a: Wire) -> None:
        a.call(*calls)
        a.hear(more)

    return play


SCRIPTS.update({name: (_calls(calls, 0), True) for name, calls in CALLS.items()})
SCRIPTS.update({name: (_calls(calls, 1), True) for name, calls in LAST_CALLS.items()})


@script
def what_is_declared_without_waiting_is_not_answered(a: Wire) -> None:
    a.say(queue("l1", exclusive=True, no_wait=True), m.QueueBind("l1", "amq.fanout", "", no_wait=True))
    a.say(m.ExchangeDeclare("l2", "fanout", no_wait=True), m.ExchangeDelete("l2", no_wait=True))
    a.say(m.QueuePurge("l1", no_wait=True)).call(queue("l1", passive=True)).say(
        m.QueueDelete("l1", no_wait=True)
    )
    a.call(queue("l1", passive=True))


@script
def a_line_end_in_the_name_of_an_exchange_to_publish_to(a: Wire) -> None:
    a.publish("amq.direct\n", "k", b"x", mandatory=True).hear()


@script
def an_exclusive_queue_of_another_connection(a: Wire) -> None:
    a.call(queue("m1", exclusive=True))
    b = a.another()
    b.call(queue("m1", passive=True)).channel(1)
    b.call(queue("m1", exclusive=True)).channel(1)
    b.call(m.BasicConsume("m1")).channel(1)
    b.call(m.BasicGet("m1")).channel(1)
    b.call(m.QueuePurge("m1")).channel(1)
    b.call(m.QueueBind("m1", "amq.direct", "k")).channel(1)
    b.call(m.QueueDelete("m1"))


@script
def an_exclusive_queue_goes_with_its_connection(a: Wire) -> None:
    b = a.another()
    b.call(queue("m2", exclusive=True)).call(m.ConnectionClose(200, "", 0, 0), channel=0)
    a.call(queue("m2", passive=True))


@script
def an_auto_delete_queue_goes_with_its_last_consumer(a: Wire) -> None:
    a.call(queue("m3", auto_delete=True), m.BasicConsume("m3", "c"), m.BasicConsume("m3", "d"))
    a.call(m.BasicCancel("c"), queue("m3", passive=True), m.BasicCancel("d"), queue("m3", passive=True))


@script
def an_auto_delete_exchange_goes_with_its_last_binding(a: Wire) -> None:
    a.call(exchange("m4", auto_delete=True), queue("m5", exclusive=True), m.QueueBind("m5", "m4", "k"))
    a.call(m.QueueUnbind("m5", "m4", "k"), exchange("m4", passive=True))


@script
def an_auto_delete_exchange_goes_with_its_last_queue(a: Wire) -> None:
    a.call(exchange("m6", auto_delete=True), queue("m7"), m.QueueBind("m7", "m6", "k"), m.QueueDelete("m7"))
    a.call(exchange("m6", passive=True))


@script
def an_unused_exchange_is_deleted(a: Wire) -> None:
    a.call(exchange("m8"), m.ExchangeDelete("m8", if_unused=True), exchange("m8", passive=True))


@script
def counts_are_right_at_all_times(a: Wire) -> None:
    a.call(queue("n1", exclusive=True)).publish("", "n1", *[b"x"] * 5)
    a.call(m.BasicGet("n1"), queue("n1", passive=True), m.BasicGet("n1", True), queue("n1", passive=True))
    a.say(m.BasicReject(1, True)).counted("n1", 4).call(m.BasicGet("n1")).call(
        m.QueuePurge("n1"), queue("n1", passive=True)
    )
    a.call(m.QueueDelete("n1"))


@script
def a_queue_with_messages_is_not_deleted_if_empty(a: Wire) -> None:
    a.call(queue("n2", auto_delete=True)).publish("", "n2", b"x").call(m.QueueDelete("n2", if_empty=True))
    a.channel(1).call(m.QueueDelete("n2"))


@script
def a_queue_expires_when_nobody_uses_it(a: Wire) -> None:
    a.call(queue("n3", {"x-expires": 300}), m.BasicConsume("n3", "c")).silence()
    a.silence().call(queue("n3", passive=True), m.BasicCancel("c")).silence().silence().silence()
    a.call(queue("n3", passive=True))


@script
def a_client_is_told_that_its_queue_was_deleted(a: Wire) -> None:
    a.call(queue("n4"), m.BasicConsume("n4", "c"))
    a.another().call(m.QueueDelete("n4"))
    a.hear()


@script
def a_client_that_does_not_understand_it_is_not_told(a: Wire) -> None:
    a.call(queue("n5"))
    b = a.another(capabilities=()).call(m.BasicConsume("n5", "c"))
    a.call(m.QueueDelete("n5"))
    b.silence()
