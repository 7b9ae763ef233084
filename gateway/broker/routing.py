"""Routing entries: what the address of a published message determines.

There are as many entries as addresses, and a fleet of devices has more of these than any cache holds. An
entry is therefore small and fast to build: what is the same for all addresses that lead to the same
recipients by the same routes is in their common `RoutingPlan`, which is computed once. The dispatcher builds
both.
"""

from __future__ import annotations

from typing import Final, Literal, Protocol

from mypy_extensions import mypyc_attr

from gateway.mapping.return_addresses import Return
from gateway.mapping.routes import ResolvedRoute, Route
from gateway.model.address import Address
from gateway.model.batch import Recipient, Sink
from gateway.model.message import Message
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.spooled_bodies import Spooled

TOO_LARGE = Outcome(
    Verdict.REJECTED,
    Reason.TOO_LARGE,
    "the message exceeds limits.message_bytes_max, which applies to routes",
)

Lost = Literal["gone", "unknown", "no_route"]
"""Reason why a reply reaches no requester.

`gone`: the requester no longer waits. `unknown`: the return address was never created, or by an earlier run
of this gateway. `no_route`: in the current mapping no direct route leads from the requester to the responder.
"""


class Namespace(Protocol):
    """Destination of an endpoint's messages: a namespace of the embedded broker, or a link."""

    def sinks(self, address: Address) -> tuple[Sink, ...] | None:
        """Return the destinations (sinks) for an address, or None if they depend on the message."""

    def choose(self, message: Message) -> tuple[Sink, ...]:
        """Return the destinations (sinks) of one message; used if its address does not determine them."""

    # Optional: `has_no_receivers(scope: str) -> bool`, True if no address in the scope has a sink or a
    # retained message; `confirms_later: bool`, True if a remote broker has to confirm what the sinks get.

    @property
    def retained(self) -> Sink | None:
        """Destination that stores retained messages.

        None if the namespace has no retained messages, or if the remote broker does it.
        """


@mypyc_attr(allow_interpreted_subclasses=True)
class OneSink:
    """Namespace with one destination (sink) for all addresses: a link, or a stage in front of a route's end.

    It retains no messages; a namespace behind it may.
    """

    def __init__(self, sink: Sink) -> None:
        self._sinks: tuple[Sink, ...] = (sink,)

    def sinks(self, address: Address) -> tuple[Sink, ...]:
        """Return the one destination, for any address."""
        return self._sinks

    def choose(self, message: Message) -> tuple[Sink, ...]:
        """Return the one destination, for any message."""
        return self._sinks

    @property
    def retained(self) -> None:
        """Destination of retained messages: None, because the namespace has no retained messages."""


class Branch:
    """Route that messages of an address take, with the recipients at its end.

    `recipients` is None if they depend on the message and not only on its address.
    """

    __slots__ = ("idle", "mandatory", "namespace", "recipients", "route")

    def __init__(self, route: Route, namespace: Namespace, recipients: tuple[Recipient, ...] | None) -> None:
        self.route = route
        self.namespace = namespace
        self.recipients = recipients
        self.mandatory = is_mandatory(route)
        # No client could receive what crosses here, unless the route itself retains it.
        self.idle = recipients == () and not self.mandatory and route.retain is not True


class RoutingPlan:
    """Routing that addresses with the same recipients and routes have in common.

    The frequent case of a single recipient (`only_recipient`) is prepared so that publishing needs no loop.
    Routes without receivers (`idle`), such as those of identity.yaml to a protocol without clients, create no
    message.
    """

    __slots__ = (
        "bare",
        "branch_at",
        "branches",
        "bursts",
        "hops_max",
        "idle",
        "idle_hops_max",
        "idle_routes",
        "namespace",
        "only_recipient",
        "plain",
        "recipients",
        "resolved_routes",
        "route",
    )

    def __init__(
        self,
        namespace: Namespace | None,
        recipients: tuple[Recipient, ...] | None,
        branches: tuple[Branch, ...] = (),
        resolved_routes: tuple[ResolvedRoute, ...] = (),
    ) -> None:
        """Prepare a plan.

        `namespace` and `recipients` are those of the endpoint itself; `recipients` is None if they depend on
        the message. `resolved_routes` has one route for each branch, for any of the addresses.
        """
        self.namespace = namespace  # None: what a link receives only takes routes
        self.recipients = recipients  # in its own namespace; None if they depend on the message
        self.branches = branches
        pairs = zip(resolved_routes, branches, strict=True)
        everywhere = all(resolved is branch.route.unsubscribed for resolved, branch in pairs)
        # None if each address has its own.
        self.resolved_routes = resolved_routes if everywhere else None
        idle = [at for at, branch in enumerate(branches) if branch.idle]
        self.idle = tuple(idle)
        self.idle_routes = tuple([branches[at].route for at in idle])
        self.idle_hops_max = min([resolved_routes[at].bare_hops_max for at in idle], default=0)
        self.only_recipient: Recipient | None = None
        self.branch_at = 0  # index of the one branch that is taken, if `route` is not None
        self.route: Route | None = None  # route of that branch
        self.plain = False  # that route changes nothing but the address, besides counting a hop
        self.bare = False  # the same, but only for messages without a reply address
        self.hops_max = 0
        busy = [at for at, branch in enumerate(branches) if not branch.idle]
        if recipients is not None and len(recipients) == 1 and not busy:
            self.only_recipient = recipients[0]
        elif recipients == () and len(busy) == 1:
            ends = branches[busy[0]].recipients
            if ends is not None and len(ends) == 1:
                self.branch_at = busy[0]
                self.only_recipient = ends[0]
                self.route = branches[self.branch_at].route
                resolved = resolved_routes[self.branch_at]
                if resolved.bare_plain:
                    self.plain = True
                    self.bare = not resolved.plain
                    self.hops_max = resolved.bare_hops_max
        # Messages that differ only in their bodies may go together.
        self.bursts = self.only_recipient is not None and (self.route is None or self.plain)


NOWHERE: Final = RoutingPlan(None, ())


class RoutingEntry:
    """Routing of messages with one address: its plan, and its resolved routes.

    `target` is the address to which the only route leads, if this route changes nothing else (`plan.plain`),
    otherwise None. `resolved_routes` has one route for each branch of the plan, in the same order.
    """

    __slots__ = ("address", "plan", "resolved_routes", "target")

    def __init__(
        self, address: Address, plan: RoutingPlan, resolved_routes: tuple[ResolvedRoute, ...] = ()
    ) -> None:
        self.address = address
        self.plan = plan
        self.resolved_routes = resolved_routes
        self.target = resolved_routes[plan.branch_at].target if plan.plain else None

    def with_namespace(self, namespace: Namespace | None) -> RoutingEntry:
        """Return an entry with the same routes, for which `namespace` chooses the sinks of each message."""
        plan = RoutingPlan(namespace, None, self.plan.branches, self.resolved_routes)
        return RoutingEntry(self.address, plan, self.resolved_routes)

    def only_routes(self, names: frozenset[str]) -> RoutingEntry:
        """Return an entry with only the routes of these names, and no recipients in a namespace."""
        chosen = [
            (branch, resolved)
            for branch, resolved in zip(self.plan.branches, self.resolved_routes, strict=True)
            if branch.route.name in names
        ]
        resolved_routes = tuple([resolved for _, resolved in chosen])
        plan = RoutingPlan(None, (), tuple([branch for branch, _ in chosen]), resolved_routes)
        return RoutingEntry(self.address, plan, plan.resolved_routes or resolved_routes)

    def for_large_body(self, bytes_max: int, *, retained: bool) -> RoutingEntry:
        """Return the entry for a message whose body may be on disk.

        Recipients behind a route get the body in memory, or refuse the message if it has more than
        `bytes_max` bytes. `retained` is True if the message has the retain flag.
        """
        plan = self.plan
        resolved_routes = tuple(
            [
                resolved if branch.idle and not retained else LargeRoute(resolved, bytes_max)
                for resolved, branch in zip(self.resolved_routes, plan.branches, strict=True)
            ]
        )
        everybody = RoutingPlan(plan.namespace, plan.recipients, plan.branches, resolved_routes)
        everybody.only_recipient = None  # no shortcut, which only knows addresses
        return RoutingEntry(self.address, everybody, resolved_routes)


class AnswerEntry(RoutingEntry):
    """Routing entry of a return address, with one branch that leads to the requester.

    If no requester is reached, `requester` may be None, and `lost` has the reason.
    """

    __slots__ = ("lost", "requester")

    def __init__(
        self,
        address: Address,
        lost: Lost,
        requester: Return | None,
        plan: RoutingPlan = NOWHERE,
        resolved_routes: tuple[ResolvedRoute, ...] = (),
    ) -> None:
        super().__init__(address, plan, resolved_routes)
        self.lost = lost
        self.requester = requester


class LargeRoute(ResolvedRoute):
    """Resolved route for messages whose body may be on disk or too large for the route's target."""

    __slots__ = ("_bytes_max", "_inner")

    def __init__(self, inner: ResolvedRoute, bytes_max: int) -> None:
        super().__init__(inner.route, inner.target)
        self._inner = inner
        self._bytes_max = bytes_max

    def cross(self, message: Message) -> Message | Outcome | None:
        """Return the message as the inner route builds it, with its body in memory, or an outcome or None.

        The outcome is TOO_LARGE if the body has more than `bytes_max` bytes. If the body cannot be read from
        disk, it is one after which the source retries. Otherwise it, or None, is the inner route's own
        result.
        """
        crossed = self._inner.cross(message)
        if type(crossed) is not Message:
            return crossed
        if len(crossed.body) > self._bytes_max:
            self.route.failed += 1
            return TOO_LARGE
        if isinstance(crossed.body, Spooled):
            try:
                return crossed.with_body(crossed.body.data())
            except OSError as error:
                self.route.failed += 1
                return Outcome(Verdict.RELEASED, Reason.STORE, f"the spool cannot be read: {error}")
        return crossed


def is_mandatory(route: Route) -> bool:
    """Return True if a message without a recipient at the route's end is refused.

    Not every protocol can require a queue: a topic without subscribers is no error in MQTT.
    """
    return route.mandatory and "mandatory" in route.target.dialect.target_options
