"""Base of the listeners' protocol sides: the source of batches, and the services that connections use.

Each protocol subclasses `ListenerSource` with its own way to create connections and to report outcomes. The
base class collects published messages in batches, authorises clients, finds routing entries, registers
admissions and expirations, and writes the audit log.
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
from gateway.access.rights import Rights
from gateway.broker.routing import NOWHERE, AnswerEntry, Namespace, RoutingEntry
from gateway.ingress.client import CloseReason, IngressClient
from gateway.ingress.clients import ClientAdmission, IngressClients
from gateway.ingress.logins import Logins
from gateway.ingress.services import Services
from gateway.model.address import Address
from gateway.model.batch import Batch
from gateway.model.message import Message, Sender
from gateway.model.outcome import NO_TAKER, Outcome, Reason, Verdict
from gateway.model.pending import RESULTS_MAX, Awaited, Pending, completed
from gateway.model.times import Monotonic
from gateway.protocols import show
from gateway.telemetry.audit import audit
from gateway.transport.stream import Stream

EXPIRED: Final = "expired_while_connected"
UNWANTED_SECS: Final = 60.0  # between two log lines about messages without recipient

log = structlog.get_logger(limited=True)


@mypyc_attr(allow_interpreted_subclasses=True)
class ListenerSource:
    """Base class for the protocol side of a listener.

    It collects the messages that clients publish into batches, gets the outcomes, and registers when clients
    are admitted and when they leave.
    """

    def __init__(self, name: str, services: Services, ingress_clients: IngressClients) -> None:
        self.name = name
        self.limits = services.settings.limits_of(name)
        self.dispatcher = services.dispatcher
        self.access = services.access
        self.authorization = services.authorization
        self.store = services.store
        self.ingress_clients = ingress_clients
        self.stats = ingress_clients.stats
        self.dead_letters = services.dead_letters
        self.tasks = services.tasks
        self.spool = services.bodies.spool
        self.opened = services.opened
        self.batch = self.new_batch()
        self.logins = Logins(services.access, ingress_clients.stats, services.tasks, self.flush)
        self._entered: dict[IngressClient, ClientAdmission] = {}  # admitted clients
        self._expiring: dict[IngressClient, float] = {}  # expiry of credentials, in Unix seconds
        self._unwanted: Message | None = None  # the last one without recipient, until it is logged
        self._log_unwanted_at = 0.0
        self._counted: dict[
            IngressClient, str
        ] = {}  # user names of clients whose roles may limit their connections

    @property
    @abstractmethod
    def namespace(self) -> Namespace:
        """Namespace in which clients publish, and to which routes to this listener lead."""

    def requester(self, reply_to: str) -> Address | None:
        """Return the address to which responses for a client of this listener are published.

        `reply_to` is the reply address in the client's request. Return None if nothing may be published to
        it, or if clients of this protocol get no responses from clients of other protocols.
        """
        return None

    def forget_entries(self) -> None:
        """Drop cached routing entries, because memory is short."""

    # Interface to the listener.

    @abstractmethod
    def connect(self, stream: Stream, now: float) -> IngressClient:
        """Return the object that owns the stream of a new client, accepted at `now` (loop-clock seconds)."""

    def new_batch(self) -> Batch:
        """Return an empty batch, whose outcomes are reported to this object."""
        return self.dispatcher.batch(self, self.now())

    def end_turn(self) -> None:
        """Route the batch of messages that clients have published in this pass of the event loop."""
        batch = self.batch
        if len(batch):
            self.batch = self.new_batch()
            batch.send()

    def tick(self, now: float) -> None:
        """Process the timers of the listener that do not belong to a connection.

        `now` is in loop-clock seconds.
        """
        if self._expiring:
            self._expire(clock.unix_time())
        if self.spool.unreferenced_names:  # removing a large file takes its time
            self.tasks.start_soon(trio.to_thread.run_sync, self.spool.delete_unreferenced)
        if self._unwanted is not None and now >= self._log_unwanted_at:
            self._log_unwanted_at = now + UNWANTED_SECS
            self._log_unwanted(self._unwanted)
            self._unwanted = None

    def _log_unwanted(self, message: Message) -> None:
        """Log the latest message without recipient, with the number of such messages since the start."""
        log.info(
            "messages without recipient discarded",
            listener=self.name,
            messages_since_start=self.stats.unwanted_messages,
            last_client=message.sender.client,
            last_address=show(message.address),
        )

    # Interface to batches.

    @abstractmethod
    def settle(self, receipts: list[Any], refused: dict[int, Outcome] | None, received: Monotonic) -> None:
        """Report the outcome of each message to its client.

        `receipts` identify the messages for the protocol. `refused` maps indexes in `receipts` to outcomes;
        None means that all were accepted. `received` is the loop-clock time of the batch.
        """

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """Hold the publishes of the clients `senders`, because a queue or session is full.

        Return functions that let the clients continue.
        """
        return self.ingress_clients.hold(senders)

    # Interface to connections.

    def disk_healthy(self) -> bool:
        """Return True if the store accepts messages, or if there is no store."""
        return self.dispatcher.disk_healthy()

    def delivers_locally(self, entry: RoutingEntry) -> bool:
        """Return True if all targets of the entry get a message in the event-loop pass that receives it."""
        return all(self.dispatcher.delivers_locally(branch.route) for branch in entry.plan.branches)

    def begun_batch(self) -> Batch:
        """Return the current batch, to which a message will be added.

        If it is empty, its time of receipt is set, from which the latency is measured.
        """
        batch = self.batch
        if not batch.receipts:
            batch.received = self.now()
        return batch

    def record_unreceived(self, entry: RoutingEntry, message: Message) -> None:
        """Count a message that has no recipient, and record it in the journal as accepted."""
        self.stats.count_unreceived(self.now() - self.batch.received)
        self._unwanted = message
        self.dispatcher.record_unrouted(entry, message, NO_TAKER, self.batch.received)

    def refuse(self, entry: RoutingEntry, message: Message, outcome: Outcome) -> None:
        """Count a message that is refused before it is routed, and record it in the journal.

        The caller notifies the client.
        """
        self.stats.refuse(outcome)
        self.dispatcher.record_unrouted(entry, message, outcome, self.begun_batch().received)

    def record_refused(self, message: Message, reason: Reason, text: str) -> None:
        """Record in the journal that a message without routing entry was refused; `text` explains the reason.

        The caller closes the channel or handle of the message.
        """
        outcome = Outcome(Verdict.REJECTED, reason, text)
        nowhere = RoutingEntry(message.address, NOWHERE)
        self.dispatcher.record_unrouted(nowhere, message, outcome, self.begun_batch().received)

    @staticmethod
    def now() -> Monotonic:
        """Return the loop clock's time in seconds."""
        return clock.now()

    def flush(self) -> None:
        """Send the batch, and write the output that was encoded outside a pass of the event loop."""
        self.end_turn()
        self.ingress_clients.flush()

    def place_refusal(self, rights: Rights, user: str, remote: str) -> str:
        """Return the name of the limit that prevents another connection of the user; "" if there is none.

        `remote` is the client's network address.
        """
        if self.authorization.is_at_connections_max(rights, user):
            return "connections_max of the user's roles"
        return (
            "" if self.ingress_clients.may_add_connection(user, remote) else "limits.connections_per_user_max"
        )

    def admit_client(
        self, connection: IngressClient, principal: Principal, rights: Rights, client: str, version: str
    ) -> str:
        """Register the admission of an authenticated client, unless a limit of connections prevents it.

        Return "", or the name of that limit; the refusal is then in the audit log. `client` is the client's
        name or identifier, `version` its protocol version.
        """
        limit = self.place_refusal(rights, principal.name, connection.stream.remote)
        if limit:
            self.stats.refused.add("connections_per_user_max")
            self.logins.audit_refusal(
                connection.stream, principal.name, "connections_per_user_max", client, proved=True
            )
        else:
            self.register_admission(connection, principal, rights, client, version)
        return limit

    def register_admission(
        self, connection: IngressClient, principal: Principal, rights: Rights, client: str, version: str
    ) -> None:
        """Register the admission of an authenticated client.

        `client` is its name or identifier, `version` its protocol version.
        """
        if not rights.unlimited:
            self._counted[connection] = principal.name
            self.authorization.add_connection(principal.name)
        self.ingress_clients.set_user(connection, principal.name, rights)
        self._entered[connection] = ClientAdmission(self.now(), version)
        self._set_expiry(connection, principal)
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

    def register_renewal(self, connection: IngressClient, principal: Principal) -> None:
        """Record that a connected client has authenticated again as the same user, also in the audit log."""
        self._set_expiry(connection, principal)
        audit(
            "renewed",
            endpoint=self.name,
            user=principal.name,
            client=connection.sender.client,
            remote=connection.stream.remote,
            backend=principal.backend,
            expires=principal.expires,
        )

    def _set_expiry(self, connection: IngressClient, principal: Principal) -> None:
        """Record when the client's credentials expire; without an expiry, forget an earlier one."""
        if principal.expires is None:
            self._expiring.pop(connection, None)
        else:
            self._expiring[connection] = principal.expires

    def _expire(self, utc: float) -> None:
        """Disconnect clients whose credentials have expired; `utc` is in Unix seconds."""
        for connection in [one for one, expires in self._expiring.items() if expires <= utc]:
            del self._expiring[connection]
            self.stats.logins.add(EXPIRED)
            try:
                connection.shut_down(CloseReason.EXPIRED)
            except Exception as error:
                connection.stream.fail(error)

    def tick_faster(self, connection: IngressClient, interval: float) -> None:
        """Call the connection's `tick` more often, if the client expects bytes every `interval` seconds."""
        self.ingress_clients.tick_faster(connection, interval)

    def forget(self, connection: IngressClient, reason: str = "") -> None:
        """Remove a connection that has ended for `reason`."""
        user = self._counted.pop(connection, None)
        if user is not None:
            self.authorization.remove_connection(user)
        self.ingress_clients.forget(connection)
        self._expiring.pop(connection, None)
        if (entered := self._entered.pop(connection, None)) is not None:
            audit(
                "disconnected",
                endpoint=self.name,
                user=connection.sender.user,
                client=connection.sender.client,
                remote=connection.stream.remote,
                reason=reason,
                secs=round(self.now() - entered.admitted_at, 3),
            )

    def admission_of(self, connection: IngressClient) -> ClientAdmission | None:
        """Return the time and protocol version of a client's admission, or None before its admission."""
        return self._entered.get(connection)

    def rights_of(self, principal: Principal, client_id: str = "") -> Rights:
        """Return the rights of the user `principal`, with this client identifier, under the current rules."""
        return self.authorization.rights_of(principal, client_id)

    def suspend(self, stream: Stream, awaited: Awaited, then: Callable[[], None] | None = None) -> None:
        """Stop processing a client's commands until the result `awaited`, which one of them needs, is known.

        The client's connection has to postpone this command and the later ones, and then gets them again. If
        `then` is given, it is called when the result is available to complete the command, also if the client
        has disconnected meanwhile.
        """

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

    def recheck(self, connection: IngressClient) -> None:
        """End the subscriptions and consumers of a client that its changed rights no longer permit.

        An MQTT client that had a forbidden subscription is disconnected. While a permission decision is
        pending, the client continues; after the decision the check is repeated.
        """

        async def task() -> None:
            try:
                if not await completed(check):
                    log.error(
                        "client's rights not checked again after token renewal, too many decisions needed",
                        decisions=RESULTS_MAX,
                    )
            except Exception as error:
                connection.stream.fail(error)
            self.flush()

        def check() -> None:
            if not connection.stream.closed:
                connection.rules_changed()

        try:
            check()
        except Pending:
            self.tasks.start_soon(task)

    def record_denial(self, sender: Sender, action: str, target: str, rule: str) -> None:
        """Count an action that a client may not perform, and write it to the audit log.

        `target` is the topic, queue or other object of the action, `rule` the rule that denies it.
        """
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
        """Count and log a response that cannot be delivered to its return address.

        The log names the requester but not the return address, because anyone who knows this address may send
        responses to it.
        """
        self.stats.answers_lost.add(entry.lost)
        requester = entry.requester
        log.warning(
            "response undeliverable",
            listener=self.name,
            client=message.sender.client,
            remote=message.sender.address,
            requester=None if requester is None else requester.endpoint,
            reply_to=None if requester is None else requester.text,
            reason=entry.lost,
        )

    def log_oversized(self, sender: Sender, queue: str) -> None:
        """Log that a message exceeds the client's frame size and stays in its queue for other consumers."""
        log.warning(
            "message exceeds consumer's frame size, left in queue",
            listener=self.name,
            client=sender.client,
            queue=queue,
        )

    def undeliverable(self, message: Message, outcome: Outcome) -> None:
        """Turn a delivery that the protocol cannot encode into a dead letter."""
        self.dead_letters.add([message], "", outcome)
