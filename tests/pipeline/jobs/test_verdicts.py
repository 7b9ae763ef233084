"""Two answers compared: each row says what a change of the mapping is called."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")

from gateway.mapping.loader import parse
from gateway.mapping.reply_routes import ANSWERS
from gateway.pipeline.traffic.fate_counts import NO_LANE, WHITHER, Texts, _Recipients
from gateway.pipeline.traffic.fates import CandidateMapping, Fate, decode_fates, encode_fates, show_fate
from gateway.pipeline.traffic.verdicts import DeliveryVerdict, compare
from gateway.protocols.amqp091.dialect import amqp_address

A = Fate("a", "erp", "x:1", 1, True, False)
B = Fate("b", "erp", "x:2", 1, True, False)
C = Fate("c", "plant", "t/1", 1, True, False)
NO = Fate("a", "erp", None, 0, False, False, "name_invalid")

ROWS = [
    ("nothing", [], [], []),
    ("as before", [A], [A], ["same"]),
    ("another route, the same place", [A], [A._replace(route="z")], ["same"]),
    ("another key", [A], [A._replace(address="x:9")], ["elsewhere"]),
    ("another route, another key", [A], [B], ["elsewhere"]),
    ("another endpoint", [A], [C], ["dropped", "new"]),
    ("the route moved to another endpoint", [A], [C._replace(route="a")], ["elsewhere"]),
    ("no route", [A], [], ["dropped"]),
    ("a new one beside it", [A], [A, C], ["same", "new"]),
    ("less assurance", [A], [A._replace(assurance=0)], ["weaker"]),
    ("less durable", [A], [A._replace(durable=False, assurance=2)], ["weaker"]),
    ("more assurance", [A], [A._replace(assurance=2)], ["stronger"]),
    ("retained", [A], [A._replace(retain=True)], ["changed"]),
    ("refused now", [A], [NO], ["refused"]),
    ("refused before, too", [NO], [NO], []),
    ("refused before, crosses now", [NO], [A], ["new"]),
    ("refused where nothing was", [], [NO], ["refused"]),
    ("two for two", [A, B], [B, C], ["same", "dropped", "new"]),
]


@pytest.mark.parametrize("before, after, verdicts", [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_verdicts(before: list[Fate], after: list[Fate], verdicts: list[str]) -> None:
    found = [change.verdict.value for change in compare(before, after)]
    order = [verdict.value for verdict in DeliveryVerdict]
    assert sorted(found, key=order.index) == sorted(verdicts, key=order.index)


def test_fates_are_text_and_back() -> None:
    fates = (A, NO, C)
    assert decode_fates(encode_fates(fates)) == fates
    assert show_fate(NO) == "refused by a (name_invalid)"
    assert show_fate(A) == "erp x:1 by a (QoS 1, durable)"


def test_answers_are_passed_over() -> None:
    """They went to who asked, and no mapping says who that was."""
    text = """
version: 1
routes:
  - name: all
    from: {endpoint: amqp, exchange: "", binding_key: "{x...}"}
    to: {endpoint: mqtt, topic: "{x...}"}
"""
    candidate = CandidateMapping([parse(text, "m.yaml")], {"m.yaml": text}, {})
    assert len(candidate.resolve("amqp", amqp_address("", "amq.reply-to"), "")) == 1
    assert candidate.resolve("amqp", amqp_address("", "amq.reply-to.x"), "all" + ANSWERS) == ()
    row = dict.fromkeys(WHITHER, None) | {"route": "all" + ANSWERS, "target_endpoint": "mqtt"}
    assert _Recipients(Texts())._number(row) == NO_LANE
