"""What listeners of all protocols have in common: they are sources of batches, and connections ask them.

A protocol's ingress is a ListenerSource with its own way to connect clients and to answer them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Final

import structlog
import trio
from mypy_extensions import mypyc_attr

from gateway import clock
from gateway.access.principal import Principal
from gateway.access.rights import Decision, Rights
from gateway.broker.routing import NOWHERE, AnswerEntry, Namespace, RoutingEntry
from gateway.ingress.guest import Farewell, Guest
from gateway.ingress.guests import Entrance, Guests
from gateway.ingress.logins import Logins
from gateway.ingress.services import Services
from gateway.model.address import Address
from gateway.model.batch import Batch
from gateway.model.message import Message, Sender
from gateway.model.outcome import NO_TAKER, Outcome, Reason, Verdict
from gateway.model.pending import Awaited
from gateway.model.times import Monotonic
from gateway.protocols import show
from gateway.telemetry.audit import audit
from gateway.transport.stream import Stream

EXPIRED: Final = "expired_while_connected"
UNWANTED_SECS: Final = 60.0  # between two lines about messages that nobody wanted

log = structlog.get_logger(limited=True)


class RouteRefused(Exception):
    """A route takes what is published to an address from a role that the publisher does not have. The text
    is the rule."""


@mypyc_attr(allow_interpreted_subclasses=True)
class ListenerSource:
    """One protocol on one listener, and the source of its batches."""

    def __init__(self, name: str, services: Services, guests: Guests) -> None:
        self.name = name
        self.limits = services.settings.limits_of(name)
        self.dispatcher = services.dispatcher
        self.access = services.access
        self.authorization = services.authorization
        self.store = services.store
        self.guests = guests
        self.stats = guests.stats
        self.dead_letters = services.dead_letters
        self.tasks = services.tasks
        self.spool = services.bodies.spool
        self.batch = self.new_batch()
        self.logins = Logins(services.access, guests.stats, services.tasks, self.flush)
        self._entered: dict[Guest, Entrance] = {}  # clients that were let in
        self._expiring: dict[Guest, float] = {}  # those whose identity ends, and when (seconds of 1970)
        self._unwanted: Message | None = None  # the last that nobody wanted, until it is told
        self._tell_unwanted_at = 0.0
        self._counted: dict[Guest, str] = {}  # whose roles limit its connections

    @property
    @abstractmethod
    def namespace(self) -> Namespace:
        """Where what its clients publish can end, and where routes lead that end at this listener."""

    def requester(self, reply_to: str) -> Address | None:
        """The address at which a client takes answers that has said this reply address. None: nothing may be
        published there, or answers do not come to this protocol's clients from others."""
        return None

    def forget_entries(self) -> None:
        """Memory is short: what has been worked out of addresses goes, and is worked out again."""

    # What the listener asks.

    @abstractmethod
    def connect(self, stream: Stream, now: float) -> Guest:
        """A client has connected: its owner. `now` is when it was accepted."""

    def new_batch(self) -> Batch:
        """Return an empty batch of this source."""
        return self.dispatcher.batch(self, self.now())

    def turn_done(self) -> None:
        """Send the batch that has gathered on its way."""
        batch = self.batch
        if len(batch):
            self.batch = self.new_batch()
            batch.send()

    def tick(self, now: float) -> None:
        """Do what is due by the clock, beside its connections."""
        if self._expiring:
            self._expire(clock.utc())
        if self.spool.dead:  # removing a large file takes its time
            self.tasks.start_soon(trio.to_thread.run_sync, self.spool.bury)
        if self._unwanted is not None and now >= self._tell_unwanted_at:
            self._tell_unwanted_at = now + UNWANTED_SECS
            self._tell_unwanted(self._unwanted)
            self._unwanted = None

    def _tell_unwanted(self, message: Message) -> None:
        """There may be a hundred thousand a second: one stands for all since the last line."""
        log.info(
            "messages without recipient discarded",
            listener=self.name,
            messages=self.stats.unwanted_messages,
            client=message.sender.client,
            address=show(message.address),
        )

    # What batches ask.

    @abstractmethod
    def settle(self, receipts: list[Any], refused: dict[int, Outcome] | None, received: Monotonic) -> None:
        """Each receipt's client hears what became of its message; see gateway.model.batch.Source."""

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """A queue or session is full: its publishers wait until it calls what is returned."""
        return self.guests.hold(senders)

    # What connections ask.

    def disk_healthy(self) -> bool:
        """The store, if any, takes messages."""
        return self.dispatcher.disk_healthy()

    def ends_here(self, entry: RoutingEntry) -> bool:
        """Return True if every target of this address has a message in the wake-up that brings it."""
        return all(self.dispatcher.ends_here(branch.route) for branch in entry.plan.branches)

    def begun_batch(self) -> Batch:
        """The batch, for something to be published: what waited before its first message counts for
        nothing."""
        batch = self.batch
        if not batch.receipts:
            batch.received = self.now()
        return batch

    def nobody_wanted(self, entry: RoutingEntry, message: Message) -> None:
        """No subscription, queue or route took it: count it as accepted."""
        self.stats.nobody_wanted(self.now() - self.batch.received)
        self._unwanted = message
        self.dispatcher.record_unrouted(entry, message, NO_TAKER, self.batch.received)

    def refuse(self, entry: RoutingEntry, message: Message, outcome: Outcome) -> None:
        """Count and record a message that is refused before it has a target; its client is still to be
        told."""
        self.stats.refuse(outcome)
        self.dispatcher.record_unrouted(entry, message, outcome, self.begun_batch().received)

    def record_refused(self, message: Message, reason: Reason, text: str) -> None:
        """Record a message for which its client's channel or handle is closed, before it has an entry."""
        outcome = Outcome(Verdict.REJECTED, reason, text)
        nowhere = RoutingEntry(message.address, NOWHERE)
        self.dispatcher.record_unrouted(nowhere, message, outcome, self.begun_batch().received)

    @staticmethod
    def now() -> Monotonic:
        """The event loop's clock."""
        return clock.now()

    def flush(self) -> None:
        """Write what was encoded outside a wake-up."""
        self.turn_done()
        self.guests.flush()

    def place_refusal(self, rights: Rights, user: str, remote: str) -> str:
        """The limit that keeps another connection of that user out; "" when none does."""
        if self.authorization.full(rights, user):
            return "connections_max of the user's roles"
        return "" if self.guests.may_be(user, remote) else "limits.connections_per_user_max"

    def let_in(
        self, connection: Guest, principal: Principal, rights: Rights, client: str, version: str
    ) -> str:
        """The client has said who it is; the limit that keeps it out, "": it is in."""
        limit = self.place_refusal(rights, principal.name, connection.stream.remote)
        if limit:
            self.stats.refused.add("connections_per_user_max")
            self.logins.turned_away(
                connection.stream, principal.name, "connections_per_user_max", client, proved=True
            )
        else:
            self.entered(connection, principal, rights, client, version)
        return limit

    def entered(
        self, connection: Guest, principal: Principal, rights: Rights, client: str, version: str
    ) -> None:
        """The client has said who it is, and has a place. `client` is what it calls itself."""
        if not rights.unlimited:
            self._counted[connection] = principal.name
            self.authorization.enters(principal.name)
        self.guests.named(connection, principal.name, rights)
        self._entered[connection] = Entrance(self.now(), version)
        self._lasts(connection, principal)
        audit(
            "connected",
            endpoint=self.name,
            user=principal.name,
            client=client,
            remote=connection.stream.remote,
            backend=principal.backend,
            version=version,
            roles=list(rights.roles),
            expires=principal.expires,
        )

    def renewed(self, connection: Guest, principal: Principal) -> None:
        """The client has proved anew that it is the same user."""
        self._lasts(connection, principal)
        audit(
            "renewed",
            endpoint=self.name,
            user=principal.name,
            client=connection.sender.client,
            remote=connection.stream.remote,
            backend=principal.backend,
            expires=principal.expires,
        )

    def _lasts(self, connection: Guest, principal: Principal) -> None:
        if principal.expires is None:
            self._expiring.pop(connection, None)
        else:
            self._expiring[connection] = principal.expires

    def _expire(self, utc: float) -> None:
        """Who has not proved anew in time has to go."""
        for connection in [one for one, expires in self._expiring.items() if expires <= utc]:
            del self._expiring[connection]
            self.stats.logins.add(EXPIRED)
            try:
                connection.shut_down(Farewell.EXPIRED)
            except Exception as error:
                connection.stream.fail(error)

    def hurry(self, connection: Guest, interval: float) -> None:
        """The client expects to hear from us every `interval` seconds."""
        self.guests.hurry(connection, interval)

    def forget(self, connection: Guest, reason: str = "") -> None:
        """A connection has ended, for this reason."""
        user = self._counted.pop(connection, None)
        if user is not None:
            self.authorization.leaves(user)
        self.guests.forget(connection)
        self._expiring.pop(connection, None)
        if (entered := self._entered.pop(connection, None)) is not None:
            audit(
                "disconnected",
                endpoint=self.name,
                user=connection.sender.user,
                client=connection.sender.client,
                remote=connection.stream.remote,
                reason=reason,
                secs=round(self.now() - entered.since, 3),
            )

    def entrance(self, connection: Guest) -> Entrance | None:
        """When a client was let in; None: it has not said who it is."""
        return self._entered.get(connection)

    def rights_of(self, principal: Principal, client_id: str = "") -> Rights:
        """What a client may do, as the rules are now."""
        return self.authorization.rights_of(principal, client_id)

    def may_publish(self, rights: Rights, address: Address, host: str = "/") -> Decision:
        """Whether a client may; to a return address only who may publish where it leads."""
        there = self.dispatcher.answered_at(address)
        if there is None:
            return rights.publish(address, host)
        namespace = self.dispatcher.namespaces.get(there[0])
        return rights.publish(there[1], getattr(namespace, "name", host))

    @staticmethod
    def route(rights: Rights, address: Address, find: Callable[[Address], RoutingEntry]) -> RoutingEntry:
        """Return where a message of a client with these rights leads, by the entry that `find` returns.

        Whatever a client publishes, a will and a repeated message too, gets its entry here and nowhere else.
        Raises RouteRefused if a route asks for a role that the client does not have.
        """
        entry = find(address)
        for branch in entry.plan.branches:
            role = branch.route.rule.role
            if role is not None and role not in rights.roles:
                raise RouteRefused(f"route {branch.route.name} takes it from role {role}")
        return entry

    def suspend(self, stream: Stream, awaited: Awaited, then: Callable[[], None] | None = None) -> None:
        """Suspend a client's commands until what one of them needs is known. The connection postpones that
        one and those behind it; or `then` completes it, also if the client has gone meanwhile."""

        async def task() -> None:
            try:
                await awaited.wait()
                if then is not None:
                    then()
            except Exception as error:
                stream.fail(error)
            finally:
                stream.resume()
            self.flush()

        stream.suspend()
        self.tasks.start_soon(task)

    def denied(self, sender: Sender, action: str, target: str, rule: str) -> None:
        """A client may not do what it has asked for: count it, and say so in the audit log."""
        self.stats.denied.add(action)
        audit(
            "denied",
            endpoint=self.name,
            user=sender.user,
            client=sender.client,
            remote=sender.address,
            action=action,
            target=target,
            rule=rule,
        )

    def answer_lost(self, entry: AnswerEntry, message: Message) -> None:
        """Nobody takes an answer. The log hears whom it was for, and not the return address: who has one may
        answer."""
        self.stats.answers_lost.add(entry.lost)
        asked = entry.requester
        log.warning(
            "response undeliverable",
            listener=self.name,
            client=message.sender.client,
            remote=message.sender.address,
            requester=None if asked is None else asked.endpoint,
            reply_to=None if asked is None else asked.text,
            reason=entry.lost,
        )

    def passed_over(self, sender: Sender, queue: str) -> None:
        """Log that a client cannot be given a message, which waits for others."""
        log.warning(
            "message exceeds consumer's frame size",
            listener=self.name,
            client=sender.client,
            queue=queue,
        )

    def undeliverable(self, message: Message, outcome: Outcome) -> None:
        """A delivery that the protocol cannot say is a dead letter."""
        self.dead_letters.add([message], "", outcome)
