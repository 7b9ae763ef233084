"""MQTT source of one listener: published messages become batches, and their outcomes acknowledgements.

The messages of a pass of the event loop form one batch. A receipt is (connection, packet identifier, QoS,
message, entry), which suffices to acknowledge the message, or to publish a refused message again for a client
whose MQTT version cannot report a refusal. The source also publishes wills, sends retained messages and
expires sessions. Packets of a client are processed by its connection.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import structlog
import trio

from gateway import clock
from gateway.access.principal import Principal
from gateway.access.rights import Rights
from gateway.broker.dispatcher import UNROUTED
from gateway.broker.mqtt.namespace import OVERDUE, MqttNamespace
from gateway.broker.mqtt.received_ids import ReceivedIds
from gateway.broker.mqtt.session import Session
from gateway.broker.publish_permission import PublishRefused, permitted_entry
from gateway.broker.routing import NOWHERE, AnswerEntry, RoutingEntry
from gateway.containment import contained
from gateway.errors import RemoteProtocolError
from gateway.ingress.clients import IngressClients
from gateway.ingress.mqtt.listener_client import MqttListenerClient, Receipt
from gateway.ingress.mqtt.publish_checks import NOT_ALLOWED, ServerCapabilities, topic_refusal
from gateway.ingress.mqtt.routing_table import DeniedEntry, RoutingTable
from gateway.ingress.services import Services
from gateway.ingress.source import ListenerSource
from gateway.model.address import Address
from gateway.model.batch import Batch
from gateway.model.delivery_mode import DURABLE_AT_QOS
from gateway.model.dialect import NameRefused
from gateway.model.message import NEVER, Message, Sender
from gateway.model.outcome import FINAL, Outcome, Reason, Verdict
from gateway.model.pending import Pending
from gateway.model.times import Monotonic
from gateway.protocols.mqtt.data_types import Bounds
from gateway.protocols.mqtt.dialect import MQTT, topic_address
from gateway.protocols.mqtt.packets import Connect, Will
from gateway.protocols.mqtt.properties import encode_list
from gateway.protocols.mqtt.reason_codes import CONNECT_REFUSED, WILL_QOS_REFUSED, WILL_RETAIN_REFUSED
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode, Version, reason_name
from gateway.protocols.mqtt.translate import publish_essentials
from gateway.settings import MqttListener
from gateway.transport.stream import Stream

log = structlog.get_logger(limited=True)

# Time for a DISCONNECT to arrive: bytes delayed by Nagle's algorithm wait 40 ms, or 200 ms on some systems.
GRACE_SECS: Final = 0.25
UNREAD_SECS: Final = 0.05  # between two checks if clients have read the retained messages sent to them
WILL_RETRY_SECS_MIN: Final = 1.0
WILL_RETRY_SECS_MAX: Final = 10.0
WILL_DOUBLINGS_MAX: Final = 6


class MqttIngress(ListenerSource):
    """MQTT side of one listener: collects what its clients publish into batches, and reports the outcomes."""

    def __init__(self, name: str, services: Services, ingress_clients: IngressClients) -> None:
        super().__init__(name, services, ingress_clients)
        limits = self.limits
        self._namespace = services.mqtt
        self.body_max = limits.message_bytes_max  # faster to read than an attribute of a settings model
        self.unsettled_max = limits.inflight_max
        self.bounds = Bounds(limits.properties_max, limits.properties_bytes_max, limits.filters_max)
        options = services.settings.listeners[name]
        assert isinstance(options, MqttListener)
        self.options = options
        self.anonymous = options.anonymous
        self.byte_order = options.byte_order
        self.entries = RoutingTable(name, self.dispatcher, self.namespace, limits.cache_entries_max)
        self._sessions_awaiting_retained: dict[Session, None] = {}
        # Of QoS 2 messages with local targets only: packet id, and slot in the batch.
        self.local_ids: list[tuple[ReceivedIds, int, int]] = []
        self._handing_on = False
        self._sending = False
        self._discarding = False
        self.namespace.begin(self.now())
        self.namespace.system.add(self.stats)
        self._take_over_restored(name)
        self.namespace.take_over_restored = partial(self._take_over_restored, None)

    @property
    def namespace(self) -> MqttNamespace:
        """Namespace of all topics."""
        return self._namespace

    def requester(self, reply_to: str) -> Address | None:
        """Return the address of the response topic `reply_to`, or None if no client may publish to it."""
        try:
            address = MQTT.address("", reply_to)
        except NameRefused:
            return None
        return None if topic_refusal(reply_to, self.limits.topic_levels_max) else address

    # Interface to the listener.

    def end_turn(self) -> None:
        """Route the batch. Record the packet identifiers of its QoS 2 messages with local targets only."""
        local_ids, self.local_ids = self.local_ids, []
        batch = self.batch
        before, self._handing_on = self._handing_on, True
        postponed = self.dispatcher.postponed_count()
        try:
            super().end_turn()
        finally:
            self._handing_on = before
        if self.dispatcher.postponed_count() != postponed:
            return  # then an identifier is stored when all targets have accepted its message
        refused = set(batch.unaccepted_slots) if local_ids else set()
        for ids, packet_id, slot in local_ids:
            if slot not in refused:
                ids.record_local_delivery(packet_id)

    def tick(self, now: float) -> None:
        """Process the timers of sessions and wills, and update the $SYS topics.

        Expired sessions are discarded, due wills are published, and wills of removed listeners are scheduled.
        `now` is in loop-clock seconds.
        """
        super().tick(now)
        self._take_over_restored(None)  # wills of listeners that no longer exist
        if self.namespace.expire(now) and not self._discarding:
            self._discarding = True
            self.tasks.start_soon(self._expire_more, now)
        self.namespace.system.tick(now, self.options.sys_interval_secs)

    async def _expire_more(self, now: float) -> None:
        """Discard the remaining expired sessions in portions, between which other tasks run."""
        more = True
        while more:
            await trio.lowlevel.checkpoint()
            more = self.namespace.expire_more(now)
            self.flush()
        self._discarding = False

    def _take_over_restored(self, endpoint: str | None) -> None:
        """Schedule the wills of clients that were connected to an earlier process.

        `endpoint` is the listener's name, or None for wills of listeners that no longer exist.
        """
        for will, sender, principal, left_secs, key in self.namespace.pop_unpublished_wills(endpoint):
            at = self.now() + left_secs if left_secs > 0 else OVERDUE
            publish = partial(self.publish_will, will, sender, principal)
            self.namespace.delay_will(key or sender.client, at, publish)

    # Interface to batches.

    def settle(
        self,
        receipts: list[Receipt | SentWill | None],
        refused: dict[int, Outcome] | None,
        received: Monotonic,
    ) -> None:
        """Report the outcome of each message to the connection, or to the will, in its receipt.

        `refused` maps indexes in `receipts` to outcomes; None means that all were accepted. `received` is the
        loop-clock time of the batch, for the latency statistics.
        """
        for at, receipt in enumerate(receipts):
            if receipt is None:
                continue
            if isinstance(receipt, SentWill):
                receipt.process_outcome(None if refused is None else refused.get(at))
            elif refused is not None and at in refused:
                receipt[0].handle_refusal(receipt, refused[at])
            else:
                receipt[0].acknowledge(receipt[1], receipt[2])
        self.stats.count_settled(len(receipts), refused, self.now() - received)

    # Interface to connections.

    def forget_entries(self) -> None:
        """Remove all cached routing entries."""
        self.entries.forget()

    @property
    def accepted_in_memory(self) -> bool:
        """True while an acceptance means only that the targets have the message in memory, not on disk.

        This is so while a batch is being sent, and while the dispatcher delivers messages later than their
        batch.
        """
        return self._handing_on or self.dispatcher.accepts_in_memory()

    @staticmethod
    def new_client_id() -> str:
        """Return an identifier for a client that sent none."""
        return f"auto-{secrets.token_hex(8)}"

    def handle_unrouted(self, entry: RoutingEntry, message: Message, receipt: Receipt | None) -> None:
        """Acknowledge, refuse or drop a message that no subscription and no route matches.

        Without a match the acknowledgement of MQTT 5 has reason code 0x10 (5: 3.4.2.1). A message to a
        forbidden or invalid topic has an entry without targets. MQTT 5 refuses it in the acknowledgement.
        Older versions can only acknowledge it or end the connection (3: [MQTT-3.3.5-2]); a message whose
        topic can never be accepted then becomes a dead letter. Raises RemoteProtocolError to end the
        connection.
        """
        refusal = None
        if isinstance(entry, DeniedEntry):
            self._not_allowed(entry, message, receipt)
            return
        if entry.plan.namespace is None:
            if isinstance(entry, AnswerEntry):
                self.answer_lost(entry, message)
            else:
                refusal = topic_refusal(entry.address.name, self.limits.topic_levels_max)
        if refusal is not None:
            self.refuse(entry, message, refusal)
            if receipt is not None and (receipt[0].machine.version is Version.V5 or refusal.reason in FINAL):
                receipt[0].handle_refusal(receipt, refusal)
                return
            self.log_refused_message(message, refusal)
        else:
            if not entry.plan.branches:
                self.dead_letters.add([message], "", UNROUTED)
            self.record_unreceived(entry, message)
        if receipt is not None:
            receipt[0].acknowledge(receipt[1], receipt[2], has_target=refusal is not None)

    def _not_allowed(self, entry: DeniedEntry, message: Message, receipt: Receipt | None) -> None:
        """Refuse a message that its client may not publish: MQTT 5 acknowledges QoS 1 and 2 with 0x87.

        Otherwise raises RemoteProtocolError to end the connection, as RabbitMQ does (3: [MQTT-3.3.5-2]).
        """
        self.record_denial(message.sender, "publish", message.address.name, entry.rule)
        self.refuse(entry, message, NOT_ALLOWED)
        if receipt is not None and receipt[0].machine.version is Version.V5:
            receipt[0].handle_refusal(receipt, NOT_ALLOWED)
            return
        text = f"not allowed to publish to {message.address.name!r}"
        raise RemoteProtocolError(text, reason=ReasonCode.NOT_AUTHORIZED)

    def permitted_entry(self, rights: Rights, address: Address) -> RoutingEntry:
        """Return the routing entry for a message from a client with these rights.

        A topic to which no client may publish has an entry without targets. Raises PublishRefused if the
        rights do not permit the message, and Pending if the decision is pending.
        """
        return permitted_entry(self.dispatcher, rights, address, self._find)

    def _find(self, address: Address) -> RoutingEntry:
        """Return the routing entry of a topic, whatever the client's rights.

        A topic to which no client may publish has an entry without targets.
        """
        if topic_refusal(address.name, self.limits.topic_levels_max) is not None:
            return RoutingEntry(address, NOWHERE)
        return self.entries.find(address)

    @property
    def capabilities_for_all(self) -> ServerCapabilities:
        """Highest QoS and retain availability of the listener, without the limits of a client's rights."""
        return ServerCapabilities(
            min(int(self.options.qos_max), self.namespace.capabilities.qos_max), self.options.retain
        )

    def capabilities_for(self, rights: Rights) -> ServerCapabilities:
        """Return the highest QoS and the retain availability for a client with these rights."""
        offer = self.capabilities_for_all
        if rights.unlimited:
            return offer
        return ServerCapabilities(
            min(offer.qos_max, rights.mqtt.qos_max), offer.retain and rights.mqtt.retain
        )

    def expiry_secs_max(self, rights: Rights) -> int:
        """Return the maximum session expiry, in seconds, of a client with these rights."""
        own = None if rights.unlimited else rights.mqtt.session_expiry_secs_max
        most = self.limits.session_expiry_secs_max
        return most if own is None else min(own, most)

    def publish_again(self, receipt: Receipt, rights: Rights) -> None:
        """Publish the refused message `receipt` again, to the routes that have not accepted it.

        If the client may not publish to the topic any more, the message becomes a dead letter, because this
        client cannot be notified. Raises Pending, before anything is done, if the permission decision is
        pending.
        """
        connection, packet_id, qos, message, entry = receipt
        try:
            entry = self.permitted_entry(rights, entry.address)
        except PublishRefused as refused:
            self.record_denial(message.sender, "publish", message.address.name, str(refused))
            self.refuse(entry, message, NOT_ALLOWED)
            then = partial(connection.acknowledge, packet_id, qos)
            self.store_dead_letter(message, NOT_ALLOWED, then, partial(connection.handle_refusal, receipt))
            return
        entry = connection.remaining_entry(packet_id, entry)
        if qos == 2:
            connection.note_local_delivery(packet_id, entry)
        for branch in entry.plan.branches:
            branch.route.retried += 1
        if not self.dispatcher.publish(self.begun_batch(), entry, message, receipt):
            self.handle_unrouted(entry, message, receipt)

    def send_due_retained(self, session: Session) -> None:
        """Send a portion of the retained messages that match a session's new subscriptions.

        A task sends the rest as fast as the client reads.
        """
        session.queue_retained()
        if session.has_retained_to_queue:
            self._sessions_awaiting_retained[session] = None
            if not self._sending:
                self._sending = True
                self.tasks.start_soon(self._send_retained)

    async def _send_retained(self) -> None:
        """Send portions of retained messages to each session in turn.

        Other tasks run between two portions.
        """
        while self._sessions_awaiting_retained:
            moved = False
            for session in list(self._sessions_awaiting_retained):
                if session.has_retained_to_queue and session.outlet is not None:
                    moved |= self._send_retained_portion(session)
                    await trio.lowlevel.checkpoint()
                else:
                    self._sessions_awaiting_retained.pop(session, None)
            self.ingress_clients.flush()
            if not moved:
                await trio.sleep(UNREAD_SECS)
        self._sending = False

    def _send_retained_portion(self, session: Session) -> bool:
        """Send a portion of the retained messages that a session is still to receive.

        Return True if there was a portion, or if the rest was dropped because of an error.
        """
        try:
            if not session.queue_retained():
                return False
        except Exception as error:
            contained("delivery", error, client=session.client_id)
            session.walks.clear()
        self.ingress_clients.flush()
        return True

    def take_over(self, client_id: str) -> None:
        """Disconnect the connection that uses this client identifier, if any."""
        session = self.namespace.sessions.get(client_id)
        outlet: object = None if session is None else session.outlet
        if isinstance(outlet, MqttListenerClient):
            try:
                outlet.handle_takeover()
            except Exception as error:  # concerns the old connection, not the new one
                outlet.stream.fail(error)

    async def call_after_grace(self, stream: Stream, then: Callable[[], None]) -> None:
        """Call `then` after GRACE_SECS seconds.

        The client of `stream` has moved to another replica; packets that it sent to this replica before may
        still arrive in that time.
        """
        await trio.sleep(GRACE_SECS)
        try:
            then()
        except Exception as error:  # concerns this connection only
            stream.fail(error)
        self.flush()

    def admit(
        self, connection: MqttListenerClient, principal: Principal, rights: Rights, client_id: str
    ) -> None:
        """Register an authenticated client, and count its login as accepted."""
        self.register_admission(
            connection, principal, rights, client_id, connection.machine.version.name.lower()
        )
        self.logins.count_accepted()

    def disconnect_client(self, connection: MqttListenerClient, reason: ReasonCode) -> None:
        """Send DISCONNECT with this reason code and close the connection; log and count the event."""
        word = reason_name(reason)
        self.stats.protocol_errors.add(word)
        log.warning(
            "client disconnected by MQTT listener",
            listener=self.name,
            client=connection.sender.client,
            reason=word,
        )
        connection.machine.send_disconnect(reason)
        connection.stream.end(word)

    def log_refused_message(self, message: Message, outcome: Outcome) -> None:
        """Log that a client's message was refused."""
        log.warning(
            "message refused",
            listener=self.name,
            client=message.sender.client,
            topic=message.address.name,
            reason=outcome.reason.value,
            why=outcome.text,
        )

    def log_refused_subscription(self, client: str, topic_filter: str, reason: ReasonCode) -> None:
        """Log that a client's subscription was refused."""
        log.warning(
            "subscription refused",
            listener=self.name,
            client=client,
            filter=topic_filter,
            reason=reason_name(reason),
        )

    def log_refused_connect(self, packet: Connect, remote: str, reason: ReasonCode, why: str) -> None:
        """Log that a client's CONNECT was refused."""
        log.warning(
            "client refused by MQTT listener",
            listener=self.name,
            client=packet.client_id,
            user=self.logins.access.loggable(packet.user_name or ""),
            remote=remote,
            error=f"{reason_name(reason)}: {why}" if why else reason_name(reason),
        )

    def new_batch(self) -> Batch:
        """Return an empty batch, whose outcomes are reported to this object.

        The batch also has functions for rejected messages: a route stores a dead letter if the client cannot
        be notified, and another attempt reaches only the routes that have not accepted the message.
        """
        batch = super().new_batch()
        batch.cannot_notify = self._cannot_notify_source
        batch.returned = self._record_remaining_routes
        return batch

    @staticmethod
    def _record_remaining_routes(receipt: Receipt | SentWill | None, routes: frozenset[str]) -> None:
        """Record the routes (by name) that still have to accept a message when it is published again."""
        if receipt is not None and not isinstance(receipt, SentWill):
            receipt[0].record_remaining_routes(receipt[1], routes)

    def _cannot_notify_source(
        self, receipt: Receipt | SentWill | None, retries: bool, outcome: Outcome
    ) -> bool:
        """Return True if the client cannot be notified that a route rejected its message.

        The route then stores a dead letter. `retries` is True if the route has `on_reject: retry`. The
        function is a `CannotNotify` of gateway.model.batch.
        """
        if receipt is None:
            return False
        if isinstance(receipt, SentWill):
            untold = outcome.reason in FINAL or not retries
            message = receipt.message
        else:
            untold = receipt[0].cannot_notify(retries, outcome)
            message = receipt[3]
        if untold:
            self.log_refused_message(message, outcome)
        return untold

    def store_dead_letter(
        self,
        message: Message,
        outcome: Outcome,
        then: Callable[[], None],
        full: Callable[[Outcome], None],
    ) -> None:
        """Store a refused message as a dead letter, because its client cannot be notified.

        `then` is called when the dead letter is stored, or `full` with the outcome if there is no capacity
        for it.
        """
        self.dead_letters.add([message], "", outcome, then, full=full)

    def drop_forbidden(self, session: Session, rights: Rights, sender: Sender) -> bool:
        """End the subscriptions that the rights do not allow. Return True if there were any.

        Raises Pending, before any subscription is ended, if the decision on one of them is pending.
        """
        forbidden = {
            topic_filter: decision.rule
            for topic_filter, options in session.subscriptions.items()
            if not (decision := rights.mqtt_subscribe(topic_filter, options.qos)).allowed
        }
        self.end_subscriptions(session, forbidden, sender)
        return bool(forbidden)

    def end_subscriptions(self, session: Session, forbidden: Mapping[str, str], sender: Sender) -> None:
        """End a session's subscriptions to forbidden topic filters.

        `forbidden` has the rule that denies each filter.
        """
        for topic_filter, rule in forbidden.items():
            self.record_denial(sender, "subscribe", topic_filter, rule)
            self.namespace.unsubscribe(session, topic_filter)

    def leave_will(
        self, session: Session, will: Will | None, sender: Sender, principal: Principal | None
    ) -> None:
        """Publish the will of a lost connection; if `will` is None, delete the will's stored record.

        The will is published now, or when its delay is over or the session ends (5: 3.1.2.5).
        """
        client_id = session.client_id
        if will is None:
            self.namespace.forget_will(client_id)
            return
        publish = partial(self.publish_will, will, sender, principal or Principal(sender.user))
        delay = will.properties.get(Property.WILL_DELAY_INTERVAL, 0)
        if self.namespace.claims_wills or (delay and session.persistent):
            self.namespace.delay_will(client_id, self.now() + delay, publish)
        else:
            publish()
            self.namespace.forget_will(client_id)

    def will_entry(self, will: Will, rights: Rights, sender: Sender) -> RoutingEntry:
        """Return the routing entry of a will, for the checks at CONNECT and before it is published.

        Raises WillDenied, after logging it, if a client with these rights may not have the will, and Pending
        if the decision is pending.
        """
        reason, text, rule = CONNECT_REFUSED[Reason.NOT_AUTHORIZED], "", ""
        if not rights.unlimited:
            grant = rights.mqtt
            if will.qos > grant.qos_max:
                reason, text, rule = WILL_QOS_REFUSED, "the will's QoS exceeds qos_max", "mqtt.qos_max"
            elif will.retain and not grant.retain:
                reason, text, rule = (
                    WILL_RETAIN_REFUSED,
                    "retained messages are not supported by this listener",
                    "mqtt.retain",
                )
            elif not grant.will:
                text, rule = "wills are not permitted", "mqtt.will: wills are not permitted"
        if not rule:
            try:
                return self.permitted_entry(rights, topic_address(will.topic))
            except PublishRefused as refused:
                text, rule = "not allowed to publish to the will's topic", str(refused)
        self.record_denial(sender, "will", will.topic, rule)
        raise WillDenied(reason, text)

    def publish_will(self, will: Will, sender: Sender, principal: Principal, refusals: int = 0) -> None:
        """Publish a will refused `refusals` times before. Its message expiry starts now (5: 3.1.3.2.4).

        Permissions are checked as if the client sent CONNECT with this will now, because the rules may have
        changed. A will that is not allowed, or whose user was removed, is dropped. The caller deletes the
        will's stored record afterwards. A new record is stored until the will is settled, if its message is
        not written in this pass of the event loop (for example because its route is paused), if the store
        refuses the message, or if the permission check is pending.
        """
        if self.access.is_removed(principal):
            self.record_denial(sender, "will", will.topic, "the user was removed")
            return
        try:
            entry = self.will_entry(will, self.rights_of(principal, sender.client), sender)
        except WillDenied:
            return
        except Pending as pending:
            key = self.namespace.new_will_key(sender.client)
            self.namespace.store_will(key, will, sender, principal)
            self.tasks.start_soon(self._publish_will_later, pending, will, sender, principal, key)
            return
        will_properties: dict[Property, Any] = {
            key: value for key, value in will.properties.items() if key is not Property.WILL_DELAY_INTERVAL
        }
        parsed = publish_essentials(encode_list(will_properties, PacketType.PUBLISH))
        expires = NEVER if parsed.expiry is None else clock.utc() + parsed.expiry
        message = Message(
            entry.address,
            will.body,
            parsed,
            will.qos,
            DURABLE_AT_QOS[will.qos],
            will.retain,
            expires,
            0,
            sender,
        )
        sent = SentWill(self, will, message, principal, refusals)
        if self.namespace.claims_wills or not self.delivers_locally(entry):
            sent.persist()
        slot = len(self.batch)
        try:
            accepted = self.dispatcher.publish(self.begun_batch(), entry, message, sent)
        except RemoteProtocolError:  # it can never be published, not even after a restart
            sent.process_outcome(None)
            raise
        if not accepted:
            self.handle_unrouted(entry, message, None)
            sent.process_outcome(None)
        postponed, batch = self.dispatcher.postponed_count(), self.batch
        self.end_turn()
        if self.dispatcher.postponed_count() != postponed or slot in batch.unaccepted_slots:
            sent.persist()
        else:
            sent.persist_if_refused()

    async def _publish_will_later(
        self, pending: Pending, will: Will, sender: Sender, principal: Principal, key: str
    ) -> None:
        """Publish a will when its pending check is complete, and delete its stored record by its `key`."""
        await pending.awaited.wait()
        self.namespace.publish_stored_will(key, partial(self.publish_will, will, sender, principal))
        self.flush()

    def report(self, remote: str, error: RemoteProtocolError) -> None:
        """Log a client's protocol error."""
        log.warning("client violated MQTT protocol", listener=self.name, remote=remote, error=str(error))


class WillDenied(Exception):
    """Exception for a will that its client may not have: the reason code of CONNACK, and the text."""

    def __init__(self, reason: ReasonCode, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class SentWill:
    """Receipt for the outcome of a published will, whose stored record remains until the message is settled.

    A will that is refused for now is published again, after a delay that doubles with each refusal. One that
    is permanently refused, or that exceeds its user's part of the limit for these wills, becomes a dead
    letter.
    """

    __slots__ = (
        "_ingress",
        "_is_accepted",
        "_is_stored",
        "_principal",
        "_refusals",
        "_will",
        "key",
        "message",
    )

    def __init__(
        self,
        ingress: MqttIngress,
        will: Will,
        message: Message,
        principal: Principal,
        refusals: int,
    ) -> None:
        self._ingress = ingress
        self._refusals = refusals
        self._will = will
        self.message = message
        self._principal = principal
        self.key = ""  # of the record
        self._is_accepted = False
        self._is_stored = False

    def persist(self) -> None:
        """Store a record of the will, unless there is one already or the will was accepted.

        If this process ends before the will is settled, the next one publishes it again.
        """
        if self._is_stored or self._is_accepted:
            return
        namespace, sender = self._ingress.namespace, self.message.sender
        self._is_stored = True
        self.key = self.key or namespace.new_will_key(sender.client)
        namespace.store_will(self.key, self._will, sender, self._principal)

    def persist_if_refused(self) -> None:
        """Have the store write a record of the will if it cannot write the will's message.

        Do nothing if there is a record already or the will was accepted. Without the record, the will would
        be lost if this process ended before it processed that refusal.
        """
        if self._is_stored or self._is_accepted:
            return
        namespace, sender = self._ingress.namespace, self.message.sender
        self.key = namespace.new_will_key(sender.client)
        namespace.store_will_if_refused(self.key, self._will, sender, self._principal)

    def process_outcome(self, outcome: Outcome | None) -> None:
        """Delete the record of an accepted will (`outcome` None), or process its refusal.

        A refused will is published again or becomes a dead letter.
        """
        if outcome is None:
            self._forget()
            return
        ingress, message = self._ingress, self.message
        ingress.log_refused_message(message, outcome)
        if outcome.verdict is Verdict.REJECTED:
            ingress.store_dead_letter(message, outcome, self._forget, self.process_outcome)
            return
        shares = ingress.namespace.will_shares
        if shares.refuse_if_full(message.sender.user, message.byte_count):
            ingress.dead_letters.add([message], "", outcome, self._forget)
            return
        self.persist()
        shares.add(message.sender.user, message.byte_count)
        wait = min(WILL_RETRY_SECS_MIN * (1 << self._refusals), WILL_RETRY_SECS_MAX)
        ingress.namespace.delay_will(
            self.key, OVERDUE, self._publish_again, self._release_share, retry_at=ingress.now() + wait
        )

    def _publish_again(self) -> None:
        self._release_share()
        refusals = min(self._refusals + 1, WILL_DOUBLINGS_MAX)
        self._ingress.publish_will(self._will, self.message.sender, self._principal, refusals)

    def _release_share(self) -> None:
        """Subtract the will from its user's part of the limit for waiting wills: it waits no longer."""
        message = self.message
        self._ingress.namespace.will_shares.remove(message.sender.user, message.byte_count)

    def _forget(self) -> None:
        self._is_accepted = True
        if self.key:
            self._ingress.namespace.forget_will(self.key)
