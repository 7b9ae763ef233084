"""Scripts of messages that leave a queue otherwise: expired, rejected, too many; and where they go then."""

from __future__ import annotations

from gateway.protocols.amqp091 import methods as m
from tests.interop.oracle.declaring import exchange, queue
from tests.interop.oracle.scripts import script
from tests.interop.oracle.wire import Wire

WAY = "x-dead-letter-exchange"
KEY = "x-dead-letter-routing-key"
CONFIRM = m.ConfirmSelect()


def grave(a: Wire, name: str) -> Wire:
    """A queue where dead letters go, and a consumer that tells them."""
    return a.call(queue(name, exclusive=True), m.BasicConsume(name, name, no_ack=True))


@script
def a_message_expires_in_its_queue(a: Wire) -> None:
    a.call(queue("w1", {"x-message-ttl": 100}, exclusive=True), CONFIRM).publish("", "w1", b"x").hear()
    a.call(queue("w1", passive=True)).silence().call(queue("w1", passive=True), m.BasicGet("w1", True))


@script
def a_message_expires_by_itself(a: Wire) -> None:
    a.call(queue("w2", exclusive=True), CONFIRM)
    a.publish("", "w2", b"x", expiration="100").publish("", "w2", b"y").confirms(2).call(
        queue("w2", passive=True)
    ).silence().call(queue("w2", passive=True), m.BasicGet("w2", True))


@script
def a_message_behind_another_expires_at_the_head(a: Wire) -> None:
    a.call(queue("w3", exclusive=True), CONFIRM)
    a.publish("", "w3", b"x").publish("", "w3", b"y", expiration="50").confirms(2).silence().call(
        queue("w3", passive=True), m.BasicGet("w3", True), m.BasicGet("w3", True)
    )


@script
def a_message_without_time_goes_to_a_consumer_that_waits(a: Wire) -> None:
    a.call(queue("w4", {"x-message-ttl": 0}, exclusive=True)).publish("", "w4", b"lost")
    a.call(queue("w4", passive=True), m.BasicConsume("w4", "c")).publish("", "w4", b"x").hear()
    a.publish("", "w4", b"y", expiration="0").hear()


@script
def a_message_taken_from_a_queue_with_time_says_nothing_of_it(a: Wire) -> None:
    a.call(queue("w5", {"x-message-ttl": 60_000}, exclusive=True)).publish("", "w5", b"x", headers={"a": 1})
    a.call(m.BasicGet("w5", True))


@script
def an_expired_message_becomes_a_dead_letter(a: Wire) -> None:
    grave(a, "w6").call(queue("w7", {WAY: "", KEY: "w6", "x-message-ttl": 50}, exclusive=True))
    a.publish("", "w7", b"x", headers={"z": 1, "a": 2}, content_type="t").hear()


@script
def a_message_that_expires_by_itself_becomes_a_dead_letter(a: Wire) -> None:
    grave(a, "w8").call(queue("w9", {WAY: "", KEY: "w8"}, exclusive=True)).publish(
        "", "w9", b"x", expiration="50"
    ).hear()


@script
def a_rejected_message_becomes_a_dead_letter(a: Wire) -> None:
    grave(a, "x1").call(queue("x2", {WAY: "", KEY: "x1"}, exclusive=True)).publish("", "x2", b"1", b"2", b"3")
    a.call(m.BasicGet("x2"), m.BasicGet("x2"), m.BasicGet("x2"))
    a.say(m.BasicReject(1, False)).hear().say(m.BasicNack(3, True, False)).hear(2).call(
        queue("x2", passive=True)
    )


@script
def a_dead_letter_keeps_its_key(a: Wire) -> None:
    a.call(
        exchange("x3", "topic", auto_delete=True),
        queue("x4", exclusive=True),
        m.QueueBind("x4", "x3", "x5.#"),
    )
    a.call(queue("x5", {WAY: "x3"}, exclusive=True), m.QueueBind("x5", "amq.topic", "x5.k"))
    a.publish("amq.topic", "x5.k", b"x").call(m.BasicGet("x5")).say(m.BasicReject(1, False)).fetch("x4", True)


@script
def a_dead_letter_with_copies(a: Wire) -> None:
    grave(a, "x6").call(queue("x7", exclusive=True), queue("x8", {WAY: ""}, exclusive=True))
    a.call(m.QueueBind("x8", "amq.direct", "x6")).publish(
        "amq.direct", "x6", b"x", headers={"CC": ["x7", "no"]}
    )
    a.call(m.BasicGet("x8")).say(m.BasicReject(1, False)).hear().call(m.BasicGet("x7", True))


@script
def a_dead_letter_with_a_key_of_its_own_loses_its_copies(a: Wire) -> None:
    grave(a, "x9").call(queue("y1", {WAY: "", KEY: "x9"}, exclusive=True))
    a.publish("", "y1", b"x", headers={"CC": ["none"]}).call(m.BasicGet("y1")).say(
        m.BasicReject(1, False)
    ).hear()


@script
def a_dead_letter_whose_exchange_is_not_there(a: Wire) -> None:
    a.call(queue("y2", {WAY: "none"}, exclusive=True)).publish("", "y2", b"x")
    a.call(m.BasicGet("y2")).say(m.BasicReject(1, False)).call(queue("y2", passive=True))


@script
def dying_again_and_again(a: Wire) -> None:
    grave(a, "y3")
    a.call(
        queue("y4", {WAY: "", KEY: "y5"}, exclusive=True),
        queue("y5", {WAY: "", KEY: "y4", "x-message-ttl": 30}, exclusive=True),
    )
    a.call(m.BasicConsume("y4", "c")).publish("", "y4", b"x", headers={"k": "v"})
    for tag in (1, 2, 3):
        a.hear().say(m.BasicReject(tag, False))
    a.hear()


@script
def a_circle_without_a_rejection_is_cut(a: Wire) -> None:
    a.call(queue("y6", {WAY: "", KEY: "y7", "x-message-ttl": 30}, exclusive=True))
    a.call(queue("y7", {WAY: "", KEY: "y6", "x-message-ttl": 30}, exclusive=True)).publish(
        "", "y6", b"x"
    ).silence()
    a.call(queue("y6", passive=True), queue("y7", passive=True))


@script
def a_message_rejected_into_its_own_queue(a: Wire) -> None:
    a.call(queue("y8", {WAY: "", KEY: "y8"}, exclusive=True), m.BasicConsume("y8", "c")).publish(
        "", "y8", b"x"
    )
    a.hear().say(m.BasicReject(1, False)).hear().say(m.BasicReject(2, False)).hear()


@script
def the_oldest_go_from_a_full_queue(a: Wire) -> None:
    a.call(queue("y9", {"x-max-length": 2}, exclusive=True), CONFIRM).publish(
        "", "y9", b"1", b"2", b"3", b"4"
    ).confirms(4)
    a.call(queue("y9", passive=True), m.BasicGet("y9", True), m.BasicGet("y9", True), m.BasicGet("y9", True))


@script
def the_oldest_go_from_a_queue_full_of_bytes(a: Wire) -> None:
    a.call(queue("z1", {"x-max-length-bytes": 10}, exclusive=True), CONFIRM)
    a.publish("", "z1", b"123456", b"abcdef", b"ABCD").confirms(3)
    a.call(m.BasicGet("z1", True), m.BasicGet("z1", True), m.BasicGet("z1", True))


@script
def the_oldest_become_dead_letters(a: Wire) -> None:
    grave(a, "z2").call(queue("z3", {"x-max-length": 1, WAY: "", KEY: "z2"}, exclusive=True))
    a.publish("", "z3", b"1").publish("", "z3", b"2").hear()


@script
def a_queue_of_no_length(a: Wire) -> None:
    a.call(queue("z4", {"x-max-length": 0}, exclusive=True)).publish("", "z4", b"1").call(
        queue("z4", passive=True)
    )
    a.call(m.BasicConsume("z4", "c")).publish("", "z4", b"2").hear()


@script
def what_is_unacknowledged_does_not_count(a: Wire) -> None:
    a.call(queue("z5", {"x-max-length": 1}, exclusive=True)).publish("", "z5", b"1").call(m.BasicGet("z5"))
    a.publish("", "z5", b"2").counted("z5", 1).say(m.BasicReject(1, True))
    a.counted("z5", 1).call(m.BasicGet("z5", True))


@script
def a_full_queue_refuses_what_comes(a: Wire) -> None:
    a.call(queue("z6", {"x-max-length": 2, "x-overflow": "reject-publish"}, exclusive=True), CONFIRM)
    a.publish("", "z6", b"1", b"2", b"3", b"4").confirms(4).call(m.BasicGet("z6", True)).publish(
        "", "z6", b"5"
    ).hear()
    a.call(m.QueuePurge("z6"))


@script
def a_queue_full_of_bytes_refuses_what_comes(a: Wire) -> None:
    a.call(queue("z7", {"x-max-length-bytes": 5, "x-overflow": "reject-publish"}, exclusive=True), CONFIRM)
    a.publish("", "z7", b"1234", b"56", b"7", b"8").confirms(4).call(m.QueuePurge("z7"))


@script
def a_full_queue_makes_dead_letters_of_what_comes(a: Wire) -> None:
    grave(a, "z8")
    said = {"x-max-length": 1, "x-overflow": "reject-publish-dlx", WAY: "", KEY: "z8"}
    a.channel(2).call(queue("z9", said, exclusive=True), CONFIRM, channel=2)
    a.publish("", "z9", b"1", channel=2).hear().publish("", "z9", b"2", channel=2)
    a.hear(2)
    a.log[-2:] = sorted(a.log[-2:])


@script
def one_of_two_queues_refuses(a: Wire) -> None:
    a.call(
        queue("aa", {"x-max-length": 0, "x-overflow": "reject-publish"}, exclusive=True),
        queue("ab", exclusive=True),
    )
    a.call(m.QueueBind("aa", "amq.direct", "aa"), m.QueueBind("ab", "amq.direct", "aa"), CONFIRM)
    a.publish("amq.direct", "aa", b"x").hear().call(queue("ab", passive=True))


@script
def the_highest_priority_goes_from_a_full_queue(a: Wire) -> None:
    a.call(queue("ac", {"x-max-length": 2, "x-max-priority": 9}, exclusive=True), CONFIRM)
    for body, priority in ((b"1", 1), (b"5", 5), (b"3", 3)):
        a.publish("", "ac", body, priority=priority).hear()
    a.call(m.BasicGet("ac", True), m.BasicGet("ac", True))


@script
def purging_makes_no_dead_letters(a: Wire) -> None:
    grave(a, "ad").call(queue("ae", {WAY: "", KEY: "ad"}, exclusive=True)).publish("", "ae", b"x", b"y")
    a.call(m.QueuePurge("ae")).publish("", "ae", b"z").call(m.QueueDelete("ae")).silence()


@script
def dead_letters_are_routed_to_every_queue(a: Wire) -> None:
    a.call(exchange("af", "fanout", auto_delete=True))
    for name in ("ag", "ah"):
        a.call(queue(name, exclusive=True), m.QueueBind(name, "af"))
    a.call(queue("ai", {WAY: "af"}, exclusive=True)).publish("", "ai", b"x", delivery_mode=2, priority=3)
    a.call(m.BasicGet("ai")).say(m.BasicReject(1, False)).fetch("ag", True).fetch("ah", True)


def past(*deaths: dict[str, object]) -> dict[str, object]:
    """A history of deaths as other brokers have written it."""
    return {"x-death": list(deaths)}


@script
def a_history_without_counts(a: Wire) -> None:
    grave(a, "al").call(queue("am", {WAY: "", KEY: "al"}, exclusive=True))
    deaths = [
        {"reason": "rejected", "queue": name, "exchange": "e"} for name in ("am", "p", "am", "q", "p", "p")
    ]
    a.publish("", "am", b"x", headers=past(*deaths)).call(m.BasicGet("am")).say(
        m.BasicReject(1, False)
    ).hear()


@script
def a_history_with_and_without_counts(a: Wire) -> None:
    grave(a, "an").call(queue("ao", {WAY: "", KEY: "an"}, exclusive=True))
    deaths = [
        {"count": 7, "reason": "expired", "queue": "p"},
        {"reason": "expired", "queue": "p"},
        {"count": 3, "reason": "maxlen", "queue": "p"},
        {"reason": "rejected", "queue": "ao", "note": "older"},
        {"count": 5, "reason": "rejected", "queue": "ao"},
    ]
    a.publish("", "ao", b"x", headers=past(*deaths)).call(m.BasicGet("ao")).say(
        m.BasicReject(1, False)
    ).hear()


@script
def a_history_of_three_queues(a: Wire) -> None:
    a.call(
        queue("ar", {WAY: "", KEY: "as"}, exclusive=True),
        queue("as", {WAY: "", KEY: "at"}, exclusive=True),
        queue("at", {WAY: "", KEY: "ar"}, exclusive=True),
    ).publish("", "ar", b"x")
    for tag, name in enumerate(("ar", "as", "at", "ar", "as", "at"), 1):
        a.fetch(name).say(m.BasicReject(tag, False))
    a.fetch("ar")


@script
def a_history_of_one_death_without_a_count(a: Wire) -> None:
    grave(a, "ap").call(queue("aq", {WAY: "", KEY: "ap"}, exclusive=True))
    a.publish("", "aq", b"x", headers=past({"reason": "rejected", "queue": "aq"}))
    a.call(m.BasicGet("aq")).say(m.BasicReject(1, False)).hear()


@script
def a_history_that_is_no_history(a: Wire) -> None:
    grave(a, "aj").call(queue("ak", {WAY: "", KEY: "aj"}, exclusive=True))
    a.publish("", "ak", b"x", headers={"x-death": "no"}).call(m.BasicGet("ak")).say(
        m.BasicReject(1, False)
    ).hear()
