"""Routes of replies: from the endpoint that requests were delivered to, back to the requester's endpoint.

Each route with `answers: direct` has a route `NAME+answers` for the opposite direction, which carries the
messages published to its return addresses. That route has no pattern and no template of its own: the return
address determines both its source and its target.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from gateway.mapping.patterns import Pattern
from gateway.mapping.return_addresses import decode_correlation
from gateway.mapping.routes import AmendingRoute, ResolvedRoute, Route, ShapedRoute, Target
from gateway.mapping.schema import DeliveryGuarantee, From, To
from gateway.mapping.templates import Template, vocabulary
from gateway.model.address import Address
from gateway.model.properties import Properties

ANSWERS: Final = "+answers"  # no route of a mapping file has a name with a plus


def reply_route(request_route: Route) -> Route:
    """Build the route for replies to the requests that `request_route` delivers.

    It leads from the target endpoint of `request_route` back to the source endpoint. It changes only the
    address, and clears the retain flag. If a reply has a reply address of its own, a return address replaces
    it, too.
    """
    source, target = request_route.target, request_route.pattern
    pattern = Pattern(source.dialect, (), source.service)
    update = {
        "name": request_route.name + ANSWERS,
        "source": From.model_construct(endpoint=request_route.target_endpoint),
        "to": To.model_construct(endpoint=request_route.source, retain=False, mandatory=False),
        "delivery": DeliveryGuarantee(),
        "message_id": "keep",
        "deduplicate": None,
        "on_reject": None,
    }
    words = vocabulary(pattern)
    place = Target(target.dialect, Template("", target.dialect, words), None, target.scope)
    rule = request_route.rule.model_copy(update=update)
    made = Route(rule, pattern, place, (), None, request_route.file, request_route.line, request_route.column)
    made.connect_replies(request_route.on_reply_kept, request_route.returns)
    return made


def answer_to(route: Route, requester: Address, hops_max: int, *, coded: bool) -> ResolvedRoute:
    """Return the resolved route for replies to `requester`, the reply address of a request.

    `coded` is True if the program that replies has received the request's correlation in base64: the
    correlation of its replies is then decoded.
    """
    plain = ShapedRoute(route, requester, hops_max, route.shape)
    return CodedAnswer(plain) if coded else plain


class CodedAnswer(AmendingRoute):
    """Resolved route of replies that decodes their correlation from base64.

    A program receives the request's correlation in base64 if it cannot be expressed as text in the program's
    protocol.
    """

    __slots__ = ()

    def amended(self, stated: Properties) -> Properties:
        """Return the properties with the correlation decoded, or unchanged if it is not base64."""
        return replace(stated, correlation=decode_correlation(stated.correlation))
