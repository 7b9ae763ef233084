"""Scripts of publishing: routing, returns, confirms, transactions, properties that are checked."""

from __future__ import annotations

from gateway.protocols.amqp091 import methods as m
from tests.interop.oracle.declaring import exchange, queue
from tests.interop.oracle.scripts import script
from tests.interop.oracle.wire import HEADER, Wire, frame, table

CONFIRM = m.ConfirmSelect()


@script
def publishing_to_an_exchange_that_is_not_there(a: Wire) -> None:
    a.publish("none", "k", b"x").hear()


@script
def publishing_to_an_internal_exchange(a: Wire) -> None:
    a.call(exchange("p1", internal=True, auto_delete=True)).publish("p1", "k", b"x").hear()


@script
def publishing_immediately(a: Wire) -> None:
    a.publish("", "q", b"x", immediate=True).hear(2)


@script
def a_mandatory_message_that_nothing_takes(a: Wire) -> None:
    a.publish("", "none", b"x", mandatory=True, content_type="t", headers={"a": 1}).hear()


@script
def a_mandatory_message_is_returned_before_its_confirm(a: Wire) -> None:
    a.call(CONFIRM).publish("amq.direct", "none", b"x", mandatory=True).hear(2)


@script
def a_message_that_nothing_takes_is_confirmed(a: Wire) -> None:
    a.call(CONFIRM).publish("amq.direct", "none", b"x").hear()


@script
def confirms_of_many_messages(a: Wire) -> None:
    a.call(queue("p2", exclusive=True), CONFIRM).publish("", "p2", *[b"x"] * 20).confirms(20)
    a.call(CONFIRM).publish("", "p2", b"x").hear()


@script
def confirms_are_counted_from_the_selection(a: Wire) -> None:
    a.call(queue("p3", exclusive=True)).publish("", "p3", b"x").call(CONFIRM).publish("", "p3", b"x").hear()


@script
def confirms_on_two_channels_count_for_themselves(a: Wire) -> None:
    a.channel(2).call(queue("p4", exclusive=True), CONFIRM).call(CONFIRM, channel=2)
    a.publish("", "p4", b"x").hear().publish("", "p4", b"x", channel=2).hear()


@script
def a_user_id_that_is_ours(a: Wire) -> None:
    a.call(queue("p5", exclusive=True)).publish("", "p5", b"x", user_id="guest").call(m.BasicGet("p5", True))


@script
def a_user_id_that_is_not_ours(a: Wire) -> None:
    a.publish("amq.direct", "k", b"x", user_id="ann").hear()


@script
def an_expiration_that_is_no_number(a: Wire) -> None:
    a.publish("amq.direct", "k", b"x", expiration="soon").hear()


@script
def a_negative_expiration(a: Wire) -> None:
    a.publish("amq.direct", "k", b"x", expiration="-1").hear()


@script
def an_expiration_with_something_behind_it(a: Wire) -> None:
    a.publish("amq.direct", "k", b"x", expiration="60000ms").hear()


@script
def an_expiration_beyond_all_bounds(a: Wire) -> None:
    a.publish("amq.direct", "k", b"x", expiration="99999999999999").hear()


@script
def an_empty_expiration(a: Wire) -> None:
    a.publish("amq.direct", "k", b"x", expiration="").hear()


@script
def every_property_arrives(a: Wire) -> None:
    a.call(queue("p6", exclusive=True))
    a.publish(
        "",
        "p6",
        b"body",
        content_type="t/p",
        content_encoding="e",
        headers={"a": 1, "b": {"c": ["d", None, 1.5]}},
        delivery_mode=2,
        priority=7,
        correlation_id=b"c",
        reply_to="r",
        expiration="60000",
        message_id="m",
        timestamp=9,
        type="t",
        user_id="guest",
        app_id="app",
        cluster_id="cluster",
    )
    a.call(m.BasicGet("p6", True))


@script
def a_direct_exchange(a: Wire) -> None:
    a.call(queue("p7", exclusive=True), queue("p8", exclusive=True))
    a.call(m.QueueBind("p7", "amq.direct", "p7.k"), m.QueueBind("p8", "amq.direct", "p7.k"))
    a.publish("amq.direct", "p7.k", b"1").publish("amq.direct", "p7.other", b"2")
    a.call(m.BasicGet("p7", True), m.BasicGet("p8", True), m.BasicGet("p7", True))


@script
def a_topic_exchange(a: Wire) -> None:
    patterns = ("p9.*.c", "p9.#", "#.c", "p9", "*.b.#.c")
    for number, pattern in enumerate(patterns):
        a.call(queue(f"p9{number}", exclusive=True), m.QueueBind(f"p9{number}", "amq.topic", pattern))
    for key in ("p9.b.c", "p9", "p9.c", "p9.b.b.c", "b.c", "p9..c"):
        a.publish("amq.topic", key, key.encode())
    for number in range(len(patterns)):
        for _ in range(5):
            a.call(m.BasicGet(f"p9{number}", True))


@script
def a_queue_bound_twice_gets_one_copy(a: Wire) -> None:
    a.call(
        queue("q1", exclusive=True),
        m.QueueBind("q1", "amq.topic", "q1.#"),
        m.QueueBind("q1", "amq.topic", "#.q1"),
    )
    a.publish("amq.topic", "q1.q1", b"x").call(m.BasicGet("q1", True), m.BasicGet("q1", True))


@script
def a_headers_exchange(a: Wire) -> None:
    rows = (
        {"x-match": "all", "q2": 1, "b": "two"},
        {"x-match": "any", "q2": 1, "b": "two"},
        {"x-match": "any", "q2": None},
        {"x-match": "any", "x-q2": 1},
        {"x-match": "any-with-x", "x-q2": 1},
        {"x-match": "all-with-x", "x-q2": 1, "q2": 1},
    )
    for number, row in enumerate(rows):
        a.call(queue(f"q2{number}", exclusive=True))
        a.call(m.QueueBind(f"q2{number}", "amq.headers", "", arguments=table(row)))
    sent = (
        {"q2": 1, "b": "two"},
        {"q2": 1},
        {"q2": 2},
        {"x-q2": 1},
        {"x-q2": 1, "q2": 1},
        {"b": "three"},
        {"q2": "1"},
    )
    for at, headers in enumerate(sent):
        a.publish("amq.headers", "", str(at).encode(), headers=headers)
    for number in range(len(rows)):
        a.call(m.QueuePurge(f"q2{number}"))


@script
def exchanges_bound_in_a_circle(a: Wire) -> None:
    a.call(exchange("q3", "fanout", auto_delete=True), exchange("q4", "fanout", auto_delete=True))
    a.call(queue("q5", exclusive=True), m.ExchangeBind("q3", "q4"), m.ExchangeBind("q4", "q3"))
    a.call(m.QueueBind("q5", "q4"), m.QueueBind("q5", "q3")).publish("q3", "", b"x")
    a.call(m.BasicGet("q5", True), m.BasicGet("q5", True), m.ExchangeDelete("q3"), m.ExchangeDelete("q4"))


@script
def an_alternate_exchange(a: Wire) -> None:
    a.call(exchange("q6", "fanout"), exchange("q7", arguments={"alternate-exchange": "q6"}))
    a.call(
        queue("q8", exclusive=True),
        m.QueueBind("q8", "q6"),
        queue("q9", exclusive=True),
        m.QueueBind("q9", "q7", "k"),
    )
    a.publish("q7", "k", b"1").publish("q7", "other", b"2", mandatory=True)
    a.call(m.BasicGet("q9", True), m.BasicGet("q8", True), m.BasicGet("q8", True))
    a.call(m.ExchangeDelete("q6")).publish("q7", "other", b"3", mandatory=True).hear()
    a.call(m.ExchangeDelete("q7"))


@script
def a_message_with_copies(a: Wire) -> None:
    for name in ("r1", "r2", "r3"):
        a.call(queue(name, exclusive=True))
    a.publish("", "r1", b"x", headers={"CC": ["r2", "r1"], "BCC": ["r3"], "a": 1})
    a.call(m.BasicGet("r1", True), m.BasicGet("r2", True), m.BasicGet("r3", True), m.BasicGet("r1", True))


@script
def a_mandatory_message_whose_copy_arrives(a: Wire) -> None:
    a.call(queue("r4", exclusive=True), CONFIRM).publish(
        "", "none", b"x", mandatory=True, headers={"CC": ["r4"]}
    ).hear()
    a.call(m.BasicGet("r4", True))


@script
def copies_that_are_no_list(a: Wire) -> None:
    a.publish("", "none", b"x", headers={"CC": "r5"}).hear()


@script
def copies_that_are_no_texts(a: Wire) -> None:
    a.call(queue("r6", exclusive=True)).publish("", "r6", b"x", headers={"CC": [1]}).silence()


@script
def a_transaction(a: Wire) -> None:
    a.call(m.TxSelect(), queue("r7", exclusive=True)).publish("", "r7", b"1", b"2")
    a.call(m.BasicGet("r7"), m.TxCommit(), m.BasicGet("r7")).say(m.BasicAck(1)).call(
        queue("r7", passive=True)
    )
    a.publish("", "r7", b"3").call(m.TxRollback(), queue("r7", passive=True), m.BasicGet("r7"))
    a.say(m.BasicAck(1, True)).call(m.TxCommit(), m.TxSelect()).call(m.BasicGet("r7"))
    a.say(m.BasicNack(2, requeue=True)).call(
        queue("r7", passive=True), m.TxCommit(), queue("r7", passive=True)
    )


@script
def a_mandatory_message_in_a_transaction(a: Wire) -> None:
    a.call(m.TxSelect()).publish("", "none", b"x", mandatory=True).silence().say(m.TxCommit()).hear(2)


@script
def an_unknown_exchange_in_a_transaction(a: Wire) -> None:
    a.call(m.TxSelect()).publish("none", "k", b"x").hear()


@script
def an_unknown_tag_in_a_transaction(a: Wire) -> None:
    a.call(m.TxSelect()).say(m.BasicAck(7)).hear()


@script
def a_channel_closed_within_a_transaction(a: Wire) -> None:
    a.call(queue("r8", exclusive=True), m.TxSelect()).publish("", "r8", b"x")
    a.call(m.ChannelClose(200, "", 0, 0), m.ChannelOpen(), queue("r8", passive=True))


@script
def a_queue_that_refuses_within_a_transaction(a: Wire) -> None:
    a.call(queue("r9", {"x-max-length": 1, "x-overflow": "reject-publish"}, exclusive=True), m.TxSelect())
    a.publish("", "r9", b"1", b"2").call(m.TxCommit())


@script
def committing_without_a_transaction(a: Wire) -> None:
    a.call(m.TxCommit())


@script
def rolling_back_without_a_transaction(a: Wire) -> None:
    a.call(m.TxRollback())


@script
def a_transaction_where_confirms_were_selected(a: Wire) -> None:
    a.call(CONFIRM, m.TxSelect())


@script
def copies_over_a_binding_of_exchanges(a: Wire) -> None:
    for name, kind in (("ca", "direct"), ("cb", "topic"), ("cc", "direct")):
        a.call(exchange(name, kind, auto_delete=True))
    a.call(m.ExchangeBind("cb", "ca", "k"), m.ExchangeBind("cc", "cb", "k.#"))
    for name, source, key in (("cd", "cb", "other"), ("ce", "cc", "third"), ("cf", "ca", "fourth")):
        a.call(queue(name, exclusive=True), m.QueueBind(name, source, key))
    a.publish("ca", "k", b"x", headers={"CC": ["other"], "BCC": ["third"]})
    a.call(*[m.BasicGet(name, True) for name in ("cd", "ce", "cf")])


@script
def copies_and_an_alternate_exchange(a: Wire) -> None:
    a.call(exchange("cg", "fanout", auto_delete=True), queue("ch", exclusive=True), m.QueueBind("ch", "cg"))
    a.call(exchange("ci", "direct", {"alternate-exchange": "cg"}, auto_delete=True))
    a.call(queue("cj", exclusive=True), m.QueueBind("cj", "ci", "k"))
    a.publish("ci", "none", b"1", headers={"CC": ["k"]}).publish("ci", "k", b"2", headers={"CC": ["none"]})
    a.publish("ci", "none", b"3", headers={"CC": ["neither"]})
    a.call(*[m.BasicGet(name, True) for name in ("ch", "ch", "cj", "cj", "cj")])


@script
def confirms_where_a_transaction_was_selected(a: Wire) -> None:
    a.call(m.TxSelect(), CONFIRM)


@script
def properties_that_cannot_be_read(a: Wire) -> None:
    a.say(m.BasicPublish("amq.headers", "q")).data(
        frame(HEADER, 1, b"\x00\x3c\x00\x00" + bytes(8) + b"\x80\x00\x09x")
    ).hear(2)


@script
def a_transaction_and_a_binding_made_meanwhile(a: Wire) -> None:
    a.call(queue("da", exclusive=True), m.TxSelect()).publish("amq.direct", "da", b"x", mandatory=True)
    a.call(m.QueueBind("da", "amq.direct", "da")).say(m.TxCommit()).hear(2).call(m.BasicGet("da", True))


@script
def a_transaction_and_a_binding_gone_meanwhile(a: Wire) -> None:
    a.call(queue("db", exclusive=True), m.QueueBind("db", "amq.direct", "db"), m.TxSelect())
    a.publish("amq.direct", "db", b"x").call(m.QueueUnbind("db", "amq.direct", "db"), m.TxCommit())
    a.call(m.BasicGet("db", True))


@script
def a_transaction_and_a_queue_gone_meanwhile(a: Wire) -> None:
    a.call(queue("dc", exclusive=True), m.TxSelect()).publish("", "dc", b"x", mandatory=True)
    a.call(m.QueueDelete("dc")).say(m.TxCommit()).hear(2)


@script
def a_transaction_and_a_queue_made_again_meanwhile(a: Wire) -> None:
    a.call(queue("dd", exclusive=True), m.TxSelect()).publish("", "dd", b"x")
    a.call(m.QueueDelete("dd"), queue("dd", exclusive=True), m.TxCommit(), m.BasicGet("dd", True))


@script
def a_transaction_and_an_exchange_gone_meanwhile(a: Wire) -> None:
    a.call(exchange("de", auto_delete=True), queue("df", exclusive=True), m.QueueBind("df", "de", "k"))
    a.call(m.TxSelect()).publish("de", "k", b"x", mandatory=True)
    a.call(m.ExchangeDelete("de")).say(m.TxCommit()).hear().call(m.BasicGet("df", True))


@script
def a_message_in_a_transaction_lives_from_its_commit_on(a: Wire) -> None:
    a.call(queue("dg", exclusive=True), queue("dh", {"x-message-ttl": 200}, exclusive=True), m.TxSelect())
    a.publish("", "dg", b"x", expiration="200").publish("", "dh", b"y").silence().call(m.TxCommit())
    a.call(m.BasicGet("dg", True), m.BasicGet("dh", True)).publish("", "dg", b"z", expiration="0")
    a.call(m.TxCommit()).silence().call(m.BasicGet("dg", True))


@script
def a_transaction_and_a_headers_binding_made_meanwhile(a: Wire) -> None:
    a.call(queue("di", exclusive=True), m.TxSelect()).publish("amq.headers", "", b"1", headers={"n": 1})
    a.call(m.QueueBind("di", "amq.headers", "", arguments=table({"n": 1})))
    a.publish("amq.headers", "", b"2", headers={"n": 1})
    a.call(m.TxCommit(), m.BasicGet("di", True), m.BasicGet("di", True))


@script
def a_transaction_with_copies_and_a_queue_gone_meanwhile(a: Wire) -> None:
    a.call(queue("dj", exclusive=True), queue("dk", exclusive=True), m.TxSelect())
    a.publish("", "dj", b"x", headers={"CC": ["dk", "dl"]}, expiration="5000")
    a.call(m.QueueDelete("dj"), queue("dl", exclusive=True), m.TxCommit())
    a.call(m.BasicGet("dk", True), m.BasicGet("dl", True))


@script
def a_transaction_and_two_queues_one_of_which_is_gone(a: Wire) -> None:
    for name in ("dm", "dn"):
        a.call(queue(name, exclusive=True), m.QueueBind(name, "amq.direct", "dm"))
    a.call(m.TxSelect()).publish("amq.direct", "dm", b"x", mandatory=True)
    a.call(m.QueueDelete("dm"), m.TxCommit(), m.BasicGet("dn", True))


@script
def a_transaction_and_a_queue_made_meanwhile(a: Wire) -> None:
    a.call(m.TxSelect()).publish("", "do", b"x", mandatory=True).call(queue("do", exclusive=True))
    a.call(m.TxCommit(), m.BasicGet("do", True))


@script
def a_consistent_hash_exchange_with_one_queue(a: Wire) -> None:
    a.call(exchange("ha", "x-consistent-hash", auto_delete=True), queue("hb", exclusive=True), CONFIRM)
    a.publish("ha", "1", b"x", mandatory=True).hear(2).call(m.QueueBind("hb", "ha", "10"))
    a.publish("ha", "1", b"x").hear().publish("ha", "2", b"y").hear()
    a.call(m.BasicGet("hb", True), m.BasicGet("hb", True), m.QueueUnbind("hb", "ha", "10"))
