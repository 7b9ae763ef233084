"""Scripts of values and combinations that few clients send."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from gateway.model.properties import Value, ValueType
from gateway.protocols.amqp091 import methods as m
from tests.interop.oracle.declaring import exchange, queue
from tests.interop.oracle.dying import KEY, WAY
from tests.interop.oracle.quorum import anew, quorum
from tests.interop.oracle.scripts import bare, script
from tests.interop.oracle.wire import Wire, table

SINGLE = {"x-single-active-consumer": True}
TEN_YEARS_MS = 315_360_000_000


@script
def blind_copies_of_a_dead_letter(a: Wire) -> None:
    a.call(*[queue(name, exclusive=True) for name in ("ga1", "ga2", "ga3")])
    a.call(exchange("ga", "direct"), queue("ga4", {WAY: "ga"}, exclusive=True))
    a.call(*[m.QueueBind(name, "ga", name) for name in ("ga1", "ga2", "ga3")])
    a.call(m.ConfirmSelect())
    a.publish("", "ga4", b"x", headers={"CC": ["ga2"], "BCC": ["ga3"], "a": 1}).hear()
    a.call(m.BasicGet("ga4")).say(m.BasicReject(1, False))
    a.fetch("ga1").fetch("ga2").fetch("ga3").call(m.ExchangeDelete("ga"))


@script
def blind_copies_alone_of_a_dead_letter_that_expires(a: Wire) -> None:
    a.call(queue("gb1", exclusive=True), exchange("gb", "topic"))
    a.call(queue("gb2", {WAY: "gb", "x-message-ttl": 0}, exclusive=True), m.QueueBind("gb1", "gb", "b.*"))
    a.publish("", "gb2", b"x", headers={"BCC": ["b.c"]}).fetch("gb1").call(m.ExchangeDelete("gb"))


@script
def blind_copies_of_a_dead_letter_with_a_key_of_its_own(a: Wire) -> None:
    a.call(queue("gc1", exclusive=True), queue("gc2", exclusive=True))
    a.call(queue("gc3", {WAY: "", KEY: "gc1"}, exclusive=True), m.ConfirmSelect())
    a.publish("", "gc3", b"x", headers={"BCC": ["gc2"]}).hear().call(m.BasicGet("gc2"), m.BasicGet("gc3"))
    a.say(m.BasicReject(2, False)).fetch("gc1").call(m.BasicGet("gc2", True))


@script
def an_empty_routing_key_to_a_topic_exchange(a: Wire) -> None:
    a.call(*[queue(f"gd{at}", exclusive=True) for at in range(6)], exchange("gd", "topic"), m.ConfirmSelect())
    for at, key in enumerate(("#", "*", "", "#.#", "*.#", "#.*")):
        a.call(m.QueueBind(f"gd{at}", "gd", key))
    a.publish("gd", "", b"x").hear().call(*[m.BasicGet(f"gd{at}", True) for at in range(6)])
    a.publish("gd", ".", b"y").hear().call(*[m.BasicGet(f"gd{at}", True) for at in range(6)])
    a.call(m.QueueUnbind("gd2", "gd", "")).publish("gd", "", b"z").hear()
    a.call(*[m.BasicGet(f"gd{at}", True) for at in range(3)], m.ExchangeDelete("gd"))


@script
def an_empty_routing_key_to_the_topic_exchange_of_all(a: Wire) -> None:
    a.call(queue("ge", exclusive=True), m.QueueBind("ge", "amq.topic", "#.#"), m.ConfirmSelect())
    a.publish("amq.topic", "", b"x", mandatory=True).hear().call(m.BasicGet("ge", True))
    a.call(m.QueueUnbind("ge", "amq.topic", "#.#")).publish("amq.topic", "", b"y").hear()


@script
def expirations_with_a_sign(a: Wire) -> None:
    a.call(queue("gf", exclusive=True), m.ConfirmSelect())
    for text in ("+50000", "-0", "+0"):
        a.publish("", "gf", b"x", expiration=text).hear()
    a.silence().call(m.BasicGet("gf", True))
    for text in ("+", "-", "+-5", "++5", "5+"):
        a.publish("", "gf", b"x", expiration=text).hear().channel(1).call(m.ConfirmSelect())


@script
def times_of_years(a: Wire) -> None:
    for name, span in (("x-message-ttl", TEN_YEARS_MS), ("x-expires", TEN_YEARS_MS)):
        a.call(queue("gg", {name: span}, exclusive=True), m.QueueDelete("gg"))
        a.call(queue("gg", {name: span + 1}, exclusive=True)).channel(1)
    a.call(queue("gg", exclusive=True), m.ConfirmSelect())
    a.publish("", "gg", b"x", expiration=str(TEN_YEARS_MS)).hear().call(m.BasicGet("gg", True))
    a.publish("", "gg", b"x", expiration=str(TEN_YEARS_MS + 1)).hear()


@script
def unbinding_what_was_never_bound(a: Wire) -> None:
    a.call(queue("gh", exclusive=True), exchange("gh1", "fanout"))
    a.call(m.QueueUnbind("gh", "amq.direct", "never"), m.ExchangeUnbind("gh1", "amq.direct", "never"))
    a.call(m.QueueUnbind("none", "amq.direct", "never"), m.QueueUnbind("gh", "none", "never"))
    a.call(m.ExchangeUnbind("none", "amq.direct", "never"), m.ExchangeDelete("gh1"))


@script
def a_get_from_a_quorum_queue_with_a_single_active_consumer(a: Wire) -> None:
    anew(a, "gi", SINGLE).call(m.BasicGet("gi")).channel(1).call(queue("gi1", SINGLE, exclusive=True))
    a.call(m.BasicGet("gi1")).call(m.BasicConsume("gi", "c"), m.BasicGet("gi"))


@script
def a_quorum_queue_that_the_server_names(a: Wire) -> None:
    a.call(quorum("")).channel(1).call(quorum("amq.gj")).channel(1)


@script
def consuming_with_arguments_of_other_queues(a: Wire) -> None:
    anew(a, "gk").call(queue("gk1", exclusive=True))
    values: tuple[Any, ...] = ("first", 1, True)
    for name in ("x-stream-offset", "x-cancel-on-ha-failover", "x-fancy"):
        for queue_name in ("gk", "gk1"):
            for at, value in enumerate(values):
                tag = f"{name} {at}"
                a.call(m.BasicConsume(queue_name, tag, arguments=table({name: value})))
                if a.log[-1].name == "channel.close":
                    a.channel(1)
                else:
                    a.call(m.BasicCancel(tag))


TYPED = {
    "yes": True,
    "no": False,
    "one": 1,
    "zero": 0,
    "long": Value(ValueType.INT64, 1),
    "small": Value(ValueType.INT8, 1),
    "float": 1.0,
    "single": Value(ValueType.FLOAT, 1.0),
    "time": Value(ValueType.TIMESTAMP, 1),
    "decimal": Value(ValueType.DECIMAL, Decimal(1)),
    "text": "1",
    "bytes": Value(ValueType.BYTES, b"1"),
    "list": [1],
    "texts": ["1"],
    "more texts": ["0", "1"],
    "table": {"a": 1},
    "two entries": {"b": 1, "a": 2},
}


def headers_of_types(a: Wire, match: str) -> None:
    a.call(exchange("gl" + match, "headers"), m.ConfirmSelect())
    for name, value in TYPED.items():
        a.call(queue(name := f"gl {match} {name}", exclusive=True))
        a.call(m.QueueBind(name, "gl" + match, "", arguments=table({"x-match": match, "h": value})))
    for said in TYPED.values():
        a.publish("gl" + match, "", b"x", headers={"h": said}).hear()
        for name in TYPED:
            a.call(m.BasicGet(f"gl {match} {name}", True))
    a.call(m.ExchangeDelete("gl" + match))


@script
def headers_are_equal_within_their_type(a: Wire) -> None:
    headers_of_types(a, "all")


@script
def any_header_is_equal_within_its_type(a: Wire) -> None:
    headers_of_types(a, "any")


@bare
def a_large_start_ok(a: Wire) -> None:
    a.header().say(
        m.ConnectionStartOk(table({"a": "x" * 5_000}), "PLAIN", b"\0guest\0guest", "en_US"), channel=0
    )
    a.hear()


@bare
def a_start_ok_as_large_as_may_be(a: Wire) -> None:
    room = 4_096 - 4 - 4 - 2 - 5 - 6 - 16 - 6
    a.header().say(
        m.ConnectionStartOk(table({"a": "x" * room}), "PLAIN", b"\0guest\0guest", "en_US"), channel=0
    ).hear()
