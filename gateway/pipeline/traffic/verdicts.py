"""Comparison of two routing results, which shows the effect of a changed mapping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from gateway.pipeline.traffic.fates import Fate


class DeliveryVerdict(Enum):
    """Difference between a delivery by the earlier mapping and the delivery by the candidate."""

    SAME = "same"
    STRONGER = "stronger"
    NEW = "new"
    WEAKER = "weaker"
    CHANGED = "changed"
    ELSEWHERE = "elsewhere"
    REFUSED = "refused"
    DROPPED = "dropped"


class DeliveryChange(NamedTuple):
    """Comparison of one delivery by the earlier mapping and by the candidate.

    `before` is None if the candidate's delivery or refusal is new; `after` is None if the candidate does not
    deliver.
    """

    verdict: DeliveryVerdict
    before: Fate | None
    after: Fate | None


def compare(before: Sequence[Fate], after: Sequence[Fate]) -> Iterator[DeliveryChange]:
    """Pair a message's results by the earlier mapping (`before`) with the candidate's (`after`).

    Yield a comparison for each pair, and for each result without a partner. Results are paired by equal
    endpoint and address, then by route, then by endpoint. A delivery without a partner is dropped or new. A
    refusal is yielded only if the route did not refuse the message before.
    """
    old = [fate for fate in before if fate.address is not None]
    new = list(after)
    pairs: list[tuple[Fate, Fate]] = []
    for alike in (_same_place, _same_route, _same_endpoint):
        for fate in list(old):
            partner = next((one for one in new if alike(fate, one)), None)
            if partner is not None:
                old.remove(fate)
                new.remove(partner)
                pairs.append((fate, partner))
    for was, now in pairs:
        yield DeliveryChange(_verdict(was, now), was, now)
    for was in old:
        yield DeliveryChange(DeliveryVerdict.DROPPED, was, None)
    refused = {fate.route for fate in before if fate.address is None}
    for now in new:
        if now.address is not None:
            yield DeliveryChange(DeliveryVerdict.NEW, None, now)
        elif now.route not in refused:
            yield DeliveryChange(DeliveryVerdict.REFUSED, None, now)


def _same_place(one: Fate, other: Fate) -> bool:
    return one.place == other.place


def _same_route(one: Fate, other: Fate) -> bool:
    return one.route == other.route


def _same_endpoint(one: Fate, other: Fate) -> bool:
    return one.endpoint == other.endpoint and other.address is not None


def _verdict(was: Fate, now: Fate) -> DeliveryVerdict:
    if now.address is None:
        return DeliveryVerdict.REFUSED
    if was.place != now.place:
        return DeliveryVerdict.ELSEWHERE
    if now.assurance < was.assurance or (was.durable and not now.durable):
        return DeliveryVerdict.WEAKER
    if now.retain != was.retain:
        return DeliveryVerdict.CHANGED
    if now.assurance > was.assurance or now.durable > was.durable:
        return DeliveryVerdict.STRONGER
    return DeliveryVerdict.SAME
