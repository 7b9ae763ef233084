"""Scripts of consuming: credit, acknowledging, priorities of consumers and messages, direct replies."""

from __future__ import annotations

from gateway.protocols.amqp091 import methods as m
from tests.interop.oracle.declaring import queue
from tests.interop.oracle.scripts import script
from tests.interop.oracle.wire import Wire, table

REPLY = "amq.rabbitmq.reply-to"


def filled(a: Wire, name: str, count: int, **arguments: object) -> Wire:
    said = {key.replace("_", "-"): value for key, value in arguments.items()}
    return a.call(queue(name, said, exclusive=True)).publish("", name, *[b"%d" % at for at in range(count)])


def eaten(a: Wire, count: int) -> Wire:
    """Hear and acknowledge `count` deliveries; which queue has its turn is up to the broker's luck."""
    before = len(a.log)
    tags: list[int] = []
    while len(tags) < count:
        a.hear()
        if a.log[-1].name == "basic.deliver":
            tags.append(a.last("delivery_tag"))
            a.say(m.BasicAck(tags[-1]))
    a.log[before:] = sorted(
        heard._replace(said=(heard.said[0], *heard.said[2:])) if heard.name == "basic.deliver" else heard
        for heard in a.log[before:]
    )
    return a


@script
def prefetch_of_a_consumer(a: Wire) -> None:
    filled(a, "s1", 5).call(m.BasicQos(0, 2), m.BasicConsume("s1", "c")).hear(2).silence()
    a.say(m.BasicAck(1)).hear().say(m.BasicAck(3, True)).hear(2)


@script
def prefetch_of_a_channel(a: Wire) -> None:
    filled(a, "s2", 5).call(m.BasicQos(0, 3, True), m.BasicConsume("s2", "c")).hear(3).silence()
    a.call(m.BasicConsume("s2", "d")).silence().say(m.BasicAck(2, True)).hear(2).silence()


@script
def prefetch_of_a_channel_serves_all_of_its_queues(a: Wire) -> None:
    names = ("ba", "bb", "bc")
    for name in names:
        filled(a, name, 5)
    a.call(m.BasicQos(0, 2, True)).say(*[m.BasicConsume(name, name) for name in names])
    eaten(a, 15).silence()


@script
def prefetch_of_a_channel_over_consumers_of_one_queue(a: Wire) -> None:
    filled(a, "bd", 0).call(m.BasicQos(0, 1, True), m.BasicConsume("bd", "c"), m.BasicConsume("bd", "d"))
    a.publish("", "bd", b"1", b"2", b"3").hear().silence().say(m.BasicAck(1)).hear().silence()


@script
def prefetch_of_a_channel_holds_those_who_do_not_acknowledge(a: Wire) -> None:
    filled(a, "be", 1).call(m.BasicQos(0, 1, True), m.BasicConsume("be", "c")).hear()
    filled(a, "bf", 3).call(m.BasicConsume("bf", "d", no_ack=True)).silence().say(m.BasicAck(1)).hear(3)
    a.publish("", "bf", b"x").hear()


@script
def prefetch_of_a_channel_does_not_count_what_was_got(a: Wire) -> None:
    filled(a, "bg", 3).call(m.BasicQos(0, 1, True), m.BasicGet("bg"), m.BasicConsume("bg", "c")).hear()
    a.silence().say(m.BasicAck(1)).silence().say(m.BasicAck(2)).hear()


@script
def prefetch_of_a_channel_in_a_transaction(a: Wire) -> None:
    filled(a, "bh", 1).call(m.TxSelect(), m.BasicQos(0, 1, True), m.BasicConsume("bh", "c")).hear()
    filled(a, "bi", 1).call(m.TxCommit(), m.BasicConsume("bi", "d")).say(m.BasicAck(1)).silence()
    a.call(m.TxRollback()).silence().say(m.BasicAck(1)).silence().say(m.TxCommit()).hear(2)
    a.log[-2:] = sorted(a.log[-2:])


@script
def prefetch_of_a_channel_is_raised(a: Wire) -> None:
    filled(a, "bj", 1).call(m.BasicQos(0, 1, True), m.BasicConsume("bj", "c")).hear()
    filled(a, "bk", 3).call(m.BasicConsume("bk", "d")).silence().say(m.BasicQos(0, 3, True)).hear(3).silence()


@script
def prefetch_of_a_channel_outlives_a_cancelled_consumer(a: Wire) -> None:
    filled(a, "bl", 2).call(m.BasicQos(0, 1, True), m.BasicConsume("bl", "c")).hear()
    filled(a, "bm", 1).call(m.BasicConsume("bm", "d"), m.BasicCancel("c")).silence()
    a.say(m.BasicAck(1)).hear().silence()


@script
def prefetch_of_a_channel_whose_consumers_have_priorities(a: Wire) -> None:
    filled(a, "bn", 1).call(m.BasicQos(0, 1, True), m.BasicConsume("bn", "c")).hear()
    filled(a, "bo", 2).call(m.BasicConsume("bo", "low"))
    a.call(m.BasicConsume("bo", "high", arguments=table({"x-priority": 9}))).silence()
    a.say(m.BasicAck(1)).hear().say(m.BasicAck(2)).hear()


@script
def prefetch_of_a_channel_when_what_was_rejected_returns(a: Wire) -> None:
    filled(a, "bp", 1).call(m.BasicQos(0, 1, True), m.BasicConsume("bp", "c")).hear()
    filled(a, "bq", 1).call(m.BasicConsume("bq", "d"), m.BasicCancel("c"))
    a.say(m.BasicReject(1, True)).hear().call(m.BasicGet("bp"))


@script
def prefetch_of_a_channel_when_the_queue_is_deleted(a: Wire) -> None:
    filled(a, "br", 1).call(m.BasicQos(0, 1, True), m.BasicConsume("br", "c")).hear()
    filled(a, "bs", 1).call(m.BasicConsume("bs", "d"), m.BasicCancel("c"), m.QueueDelete("br")).silence()
    a.say(m.BasicAck(1)).hear()


@script
def prefetch_of_bytes(a: Wire) -> None:
    a.call(m.BasicQos(10, 0)).hear()


@script
def no_prefetch_again(a: Wire) -> None:
    filled(a, "s3", 5).call(m.BasicQos(0, 1, True), m.BasicConsume("s3", "c")).hear().silence()
    a.say(m.BasicQos(0, 0, True)).hear(5)


@script
def consuming_without_acknowledging(a: Wire) -> None:
    filled(a, "s4", 3).call(m.BasicConsume("s4", "c", no_ack=True)).hear(3).call(queue("s4", passive=True))
    a.say(m.BasicAck(1)).hear()


@script
def a_consumer_tag_of_the_server(a: Wire) -> None:
    a.call(queue("s5", exclusive=True), m.BasicConsume("s5"))


@script
def a_consumer_tag_in_use(a: Wire) -> None:
    a.call(queue("s6", exclusive=True), m.BasicConsume("s6", "c"), m.BasicConsume("s6", "c")).hear()


@script
def a_consumer_of_a_queue_that_is_not_there(a: Wire) -> None:
    a.call(m.BasicConsume("none"))


@script
def a_consumer_with_an_argument_nobody_knows(a: Wire) -> None:
    a.call(queue("s7", exclusive=True), m.BasicConsume("s7", "c", arguments=table({"x-fancy": 1})))


@script
def an_exclusive_consumer_keeps_others_away(a: Wire) -> None:
    a.call(queue("s8", auto_delete=True), m.BasicConsume("s8", "c", exclusive=True))
    b = a.another().call(m.BasicConsume("s8", "d"))
    b.channel(1).call(m.BasicGet("s8"))
    a.call(m.BasicCancel("c"))


@script
def an_exclusive_consumer_after_others(a: Wire) -> None:
    a.call(queue("s9", exclusive=True), m.BasicConsume("s9", "c"), m.BasicConsume("s9", "d", exclusive=True))


@script
def an_exclusive_consumer_that_left(a: Wire) -> None:
    a.call(
        queue("t1", exclusive=True),
        m.BasicConsume("t1", "c", exclusive=True),
        m.BasicCancel("c"),
        m.BasicConsume("t1", "d"),
    )


@script
def cancelling_a_consumer_that_is_not_there(a: Wire) -> None:
    a.call(m.BasicCancel("none"))


@script
def cancelling_keeps_what_was_delivered(a: Wire) -> None:
    filled(a, "t2", 2).call(m.BasicConsume("t2", "c")).hear(2).call(
        m.BasicCancel("c"), queue("t2", passive=True)
    )
    a.say(m.BasicReject(1, True)).counted("t2", 1).call(m.BasicGet("t2", True)).say(m.BasicAck(2)).silence()


@script
def consumers_take_turns(a: Wire) -> None:
    a.call(queue("t3", exclusive=True), m.BasicConsume("t3", "c"), m.BasicConsume("t3", "d"))
    for body in (b"1", b"2", b"3", b"4"):
        a.publish("", "t3", body).hear()


@script
def what_is_published_by_the_consumer_itself_arrives(a: Wire) -> None:
    a.call(queue("t4", exclusive=True), m.BasicConsume("t4", "c", no_local=True)).publish(
        "", "t4", b"x"
    ).hear()


@script
def rejected_messages_return_to_their_places(a: Wire) -> None:
    filled(a, "t5", 4).call(m.BasicGet("t5"), m.BasicGet("t5"), m.BasicGet("t5"))
    a.say(m.BasicReject(2, True), m.BasicNack(1, requeue=True))
    a.call(m.BasicGet("t5"), m.BasicGet("t5"), m.BasicGet("t5"), m.BasicGet("t5"))


@script
def nack_of_many(a: Wire) -> None:
    filled(a, "t6", 4).call(m.BasicGet("t6"), m.BasicGet("t6"), m.BasicGet("t6"))
    a.say(m.BasicNack(2, True, False)).counted("t6", 1).say(m.BasicNack(0, True, True))
    a.counted("t6", 2).call(m.BasicGet("t6", True))


@script
def recovering(a: Wire) -> None:
    filled(a, "t7", 2).call(m.BasicConsume("t7", "c")).hear(2).say(m.BasicRecover(True)).hear(3)
    a.say(m.BasicAck(1)).hear()


@script
def recovering_without_an_answer(a: Wire) -> None:
    filled(a, "t8", 1).call(m.BasicGet("t8")).say(m.BasicRecoverAsync(True)).call(m.BasicGet("t8"))


@script
def recovering_to_the_same_consumer(a: Wire) -> None:
    filled(a, "t9", 1).call(m.BasicGet("t9")).call(m.BasicRecover(False)).hear()


@script
def acknowledging_an_unknown_tag(a: Wire) -> None:
    a.say(m.BasicAck(1)).hear()


@script
def acknowledging_a_tag_twice(a: Wire) -> None:
    filled(a, "u1", 1).call(m.BasicGet("u1")).say(m.BasicAck(1), m.BasicAck(1)).hear()


@script
def acknowledging_all_of_nothing(a: Wire) -> None:
    a.say(m.BasicAck(0, True)).call(queue("", exclusive=True))


@script
def acknowledging_tag_zero(a: Wire) -> None:
    a.say(m.BasicAck(0)).hear()


@script
def acknowledging_many_up_to_an_unknown_tag(a: Wire) -> None:
    filled(a, "u2", 1).call(m.BasicGet("u2")).say(m.BasicAck(9, True)).hear()


@script
def rejecting_an_unknown_tag(a: Wire) -> None:
    a.say(m.BasicReject(1)).hear()


@script
def nack_of_an_unknown_tag(a: Wire) -> None:
    a.say(m.BasicNack(1)).hear()


@script
def nack_of_many_up_to_an_unknown_tag(a: Wire) -> None:
    a.say(m.BasicNack(1, True)).hear()


@script
def tags_count_over_a_channel(a: Wire) -> None:
    filled(a, "u3", 2).channel(2).call(m.BasicGet("u3")).call(m.BasicGet("u3"), channel=2)
    a.say(m.BasicAck(2), channel=2).hear()


@script
def deliveries_return_when_their_channel_closes(a: Wire) -> None:
    filled(a, "u4", 3).channel(2).call(m.BasicConsume("u4", "c"), channel=2).hear(3)
    a.call(m.ChannelClose(200, "", 0, 0), channel=2).call(
        m.BasicGet("u4"), m.BasicGet("u4"), m.BasicGet("u4")
    )


@script
def getting_from_a_queue_that_is_not_there(a: Wire) -> None:
    a.call(m.BasicGet("none"))


@script
def getting_nothing(a: Wire) -> None:
    a.call(queue("u5", exclusive=True), m.BasicGet("u5"))


@script
def a_consumer_of_higher_priority_goes_first(a: Wire) -> None:
    a.call(queue("u6", exclusive=True), m.BasicConsume("u6", "low"), m.BasicQos(0, 2))
    a.call(m.BasicConsume("u6", "high", arguments=table({"x-priority": 5}))).publish("", "u6", b"1").hear()
    a.publish("", "u6", b"2").hear().publish("", "u6", b"3").hear().say(m.BasicAck(1)).publish(
        "", "u6", b"4"
    ).hear()


@script
def consumers_of_one_priority_take_turns(a: Wire) -> None:
    a.call(queue("u7", exclusive=True), m.BasicConsume("u7", "low", arguments=table({"x-priority": -1})))
    a.call(m.BasicConsume("u7", "c"), m.BasicConsume("u7", "d"))
    for body in (b"1", b"2", b"3"):
        a.publish("", "u7", body).hear()


@script
def a_priority_of_a_consumer_that_is_no_number(a: Wire) -> None:
    a.call(queue("u8", exclusive=True), m.BasicConsume("u8", "c", arguments=table({"x-priority": "high"})))


@script
def a_single_active_consumer(a: Wire) -> None:
    a.call(
        queue("u9", {"x-single-active-consumer": True}, exclusive=True),
        m.BasicConsume("u9", "c"),
        m.BasicConsume("u9", "d"),
    )
    a.publish("", "u9", b"1").hear().publish("", "u9", b"2").hear().say(m.BasicAck(2, True))
    a.call(m.BasicCancel("c")).publish("", "u9", b"3").hear().call(queue("u9", passive=True))


@script
def a_single_active_consumer_that_dies(a: Wire) -> None:
    a.call(queue("v1", {"x-single-active-consumer": True}, auto_delete=True))
    b = a.another().call(m.BasicConsume("v1", "c"))
    a.call(m.BasicConsume("v1", "d")).publish("", "v1", b"1")
    b.hear().cut()
    a.hear()


@script
def an_exclusive_consumer_where_one_is_active(a: Wire) -> None:
    a.call(
        queue("v2", {"x-single-active-consumer": True}, exclusive=True),
        m.BasicConsume("v2", "c", exclusive=True),
    )


@script
def getting_where_one_consumer_is_active(a: Wire) -> None:
    filled(a, "v3", 1, x_single_active_consumer=True).call(m.BasicGet("v3", True))


@script
def higher_priorities_come_first(a: Wire) -> None:
    a.call(queue("v4", {"x-max-priority": 5}, exclusive=True))
    for body, priority in ((b"0", None), (b"5", 5), (b"9", 9), (b"1", 1), (b"5'", 5), (b"0'", 0)):
        a.publish("", "v4", body, priority=priority)
    for _ in range(7):
        a.call(m.BasicGet("v4", True))


@script
def what_returns_keeps_its_priority(a: Wire) -> None:
    a.call(queue("v5", {"x-max-priority": 5}, exclusive=True)).publish("", "v5", b"1", priority=1)
    a.publish("", "v5", b"2", priority=1).call(m.BasicGet("v5")).publish("", "v5", b"3", priority=3)
    a.say(m.BasicReject(1, True)).call(m.BasicGet("v5", True), m.BasicGet("v5", True), m.BasicGet("v5", True))


@script
def a_direct_reply(a: Wire) -> None:
    a.call(queue("v6", auto_delete=True), m.BasicConsume(REPLY, "r", no_ack=True))
    a.publish("", "v6", b"ask", reply_to=REPLY, correlation_id=b"1")
    b = a.another().call(m.BasicGet("v6", True))
    to = b.last("reply_to")
    b.call(queue(to, passive=True)).publish("", to, b"answer", mandatory=True, correlation_id=b"1")
    a.hear().call(m.BasicCancel("r"))
    b.call(queue(to, passive=True))


@script
def a_direct_reply_to_nobody(a: Wire) -> None:
    a.call(m.BasicConsume(REPLY, "r", no_ack=True), m.BasicCancel("r"))
    a.publish("", REPLY + ".g1h2AAhyZXBseV9hbWVx", b"x", mandatory=True).hear()


@script
def a_direct_reply_to_one_that_left(a: Wire) -> None:
    a.call(queue("v7", auto_delete=True))
    b = a.another().call(m.BasicConsume(REPLY, "r", no_ack=True)).publish("", "v7", b"ask", reply_to=REPLY)
    b.call(m.ChannelClose(200, "", 0, 0))
    a.call(m.BasicGet("v7", True))
    a.publish("", a.last("reply_to"), b"answer", mandatory=True).hear()


@script
def direct_replies_acknowledged(a: Wire) -> None:
    a.call(m.BasicConsume(REPLY, "r"))


@script
def direct_replies_consumed_twice(a: Wire) -> None:
    a.call(m.BasicConsume(REPLY, "r", no_ack=True), m.BasicConsume(REPLY, "s", no_ack=True))


@script
def a_request_without_a_consumer_of_its_reply(a: Wire) -> None:
    a.publish("amq.direct", "k", b"x", reply_to=REPLY).hear()


@script
def direct_replies_without_a_tag(a: Wire) -> None:
    a.call(m.BasicConsume(REPLY, no_ack=True))


@script
def getting_from_direct_replies(a: Wire) -> None:
    a.call(m.BasicGet(REPLY, True))


@script
def declaring_direct_replies(a: Wire) -> None:
    a.call(queue(REPLY, passive=True), queue(REPLY))


@script
def deleting_direct_replies(a: Wire) -> None:
    a.call(m.QueueDelete(REPLY)).call(m.QueuePurge(REPLY))


@script
def a_body_larger_than_a_frame(a: Wire) -> None:
    a.call(queue("v8", exclusive=True), m.BasicConsume("v8", "c", no_ack=True)).publish(
        "", "v8", bytes(300_000)
    ).hear()
