"""Outboxes on the cluster: what becomes a dead letter pushes none out, and stays while there is no room."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gateway.broker.dead_letters import DeadLetters
from gateway.engine.outboxes import FIRST_REASON, OutboxSink, OutboxSource, RemovedMessageSink
from gateway.model.batch import SubBatch
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.properties import Properties, property_set, string
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.store.journal.columns import WAS_BURIED
from gateway.store.messages import MessageReader, encode_message
from tests.broker.parts import Answers, mqtt, newest, publish

REFUSED = Outcome(Verdict.REJECTED, Reason.NAME_INVALID, "no")
QUEUE = amqp_address("gw.direct", "gw.outbox.far.out")


class Boxes:
    """The outboxes of a link that has one route, in a process with a limit on dead letters."""

    def __init__(self, letters_max: int) -> None:
        self.letters = DeadLetters(messages_max=letters_max)
        self.dispatcher = SimpleNamespace(dead_letters=self.letters)
        self.decode = MessageReader().decode_one
        self.namespace = None
        self.refusals: dict[bytes, int] = {}
        self.noted: list[tuple[bytes, str]] = []
        target = SimpleNamespace(dialect=SimpleNamespace(name="mqtt"))
        self.route: Any = SimpleNamespace(
            name="out", failed=0, retried=0, target=target, rule=SimpleNamespace(attempts_max=1)
        )

    def note(self, route: object, messages: list[Message], outcome: Outcome, word: str) -> None:
        self.noted += [(message.body, word) for message in messages]

    @property
    def bodies(self) -> list[bytes]:
        return [letter.message.body for letter in reversed(newest(self.letters))]


def stored(message: Message, reason: str = "") -> Message:
    headers = ((FIRST_REASON, string(reason)),) if reason else ()
    return Message(QUEUE, encode_message(message), property_set(Properties(headers=headers)))


def others(boxes: Boxes) -> None:
    boxes.letters.add([mqtt(body=b"other")], "other", REFUSED)


def keeps_what_has_no_room(boxes: Boxes, answers: Answers) -> None:
    """The first has taken the last place, and the second stays in its queue until there is one."""
    assert boxes.bodies == [b"other", b"1"]
    assert answers.outcomes[0] is ACCEPTED
    assert (answers.outcomes[1].verdict, answers.outcomes[1].reason) == (Verdict.RELEASED, Reason.QUOTA)
    assert (boxes.letters.evicted_count, boxes.letters.refused) == (0, 1)
    assert boxes.noted == [(b"1", WAS_BURIED)]


@pytest.mark.parametrize("why", ["expired", "unfit", "unreadable"])
def test_an_outbox_pushes_no_dead_letter_of_others_out(why: str) -> None:
    boxes = Boxes(2)
    others(boxes)
    if why == "unfit":
        boxes.route.target.dialect.name = "amqp091"
    messages = [stored(mqtt(body=body, expires=1.0)) for body in (b"1", b"2")]
    if why == "unreadable":
        messages = [Message(QUEUE, body) for body in (b"1", b"2")]
        boxes.noted.append((b"1", WAS_BURIED))
    sink: Any = OutboxSink(boxes, boxes.route)  # type: ignore[arg-type]
    answers = publish(sink, messages)
    keeps_what_has_no_room(boxes, answers)
    assert (boxes.route.failed, boxes.route.retried) == (1, 1)


def test_what_the_link_refuses_waits_in_its_queue_for_a_place() -> None:
    boxes = Boxes(2)
    others(boxes)

    class Refusing:
        def publish(self, part: SubBatch) -> None:
            source = OutboxSource(sink, part)
            receipts = list(enumerate([mqtt(body=b"1"), mqtt(body=b"2")]))
            source.settle(receipts, {0: REFUSED, 1: REFUSED}, 0.0)  # type: ignore[arg-type]

    sink = OutboxSink(boxes, boxes.route)  # type: ignore[arg-type]
    answers = publish(Refusing(), [stored(mqtt(body=body)) for body in (b"1", b"2")])
    keeps_what_has_no_room(boxes, answers)
    assert (boxes.route.failed, boxes.route.retried) == (1, 1)


@pytest.mark.parametrize("reason", ["expired", "maxlen"])
def test_what_the_cluster_has_taken_out_of_an_outbox_waits_for_a_place(reason: str) -> None:
    boxes = Boxes(2)
    others(boxes)
    grave: Any = RemovedMessageSink(boxes, "out", boxes.route)  # type: ignore[arg-type]
    answers = publish(grave, [stored(mqtt(body=body), reason) for body in (b"1", b"2")])
    keeps_what_has_no_room(boxes, answers)
