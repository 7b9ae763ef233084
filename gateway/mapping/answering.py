"""Routes of answers: from where questions were brought to, back to where they were asked.

A route with `answers: direct` has one behind it, `NAME+answers`, which takes what is published to its return
addresses. No pattern leads into it and no template out of it: the return address says both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from gateway.mapping.patterns import Pattern
from gateway.mapping.return_addresses import restored
from gateway.mapping.routes import AmendingRoute, ResolvedRoute, Route, ShapedRoute, Target
from gateway.mapping.schema import Delivery, From, To
from gateway.mapping.templates import Template, vocabulary
from gateway.model.address import Address
from gateway.model.properties import Properties

ANSWERS: Final = "+answers"  # no route of a mapping file has a name with a plus


def answering(asking: Route) -> Route:
    """The route of the answers to what `asking` brings: it changes nothing but the address, but answers are
    not retained. Answers that want answers get return addresses, too."""
    source, target = asking.target, asking.pattern
    pattern = Pattern(source.dialect, (), source.service)
    update = {
        "name": asking.name + ANSWERS,
        "source": From.model_construct(endpoint=asking.target_endpoint),
        "to": To.model_construct(endpoint=asking.source, retain=False, mandatory=False),
        "delivery": Delivery(),
        "message_id": "keep",
        "deduplicate": None,
        "on_reject": None,
    }
    words = vocabulary(pattern)
    place = Target(target.dialect, Template("", target.dialect, words), None, target.scope)
    rule = asking.rule.model_copy(update=update)
    made = Route(rule, pattern, place, (), None, asking.file, asking.line, asking.column)
    made.join(asking.tell_kept, asking.returns)
    return made


def answer_to(route: Route, requester: Address, hops_max: int, *, coded: bool) -> ResolvedRoute:
    """What becomes of messages at a return address that leads to this one. `coded`: see Return."""
    plain = ShapedRoute(route, requester, hops_max, route.shape)
    return CodedAnswer(plain) if coded else plain


class CodedAnswer(AmendingRoute):
    """A resolved route, behind which the correlation is what the requester said."""

    __slots__ = ()

    def amended(self, stated: Properties) -> Properties:
        return replace(stated, correlation=restored(stated.correlation))
