"""MQTT on a listener: the published messages of a wake-up become one batch, and its outcomes become PUBACKs.

A receipt is (connection, packet id, qos, message, entry): enough to answer the message in its own words, or
to try a refused one again for a client whose version has no word for refusal.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
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
from gateway.broker.routing import AnswerEntry, RoutingEntry
from gateway.containment import contained
from gateway.errors import RemoteProtocolError
from gateway.ingress.guests import Guests
from gateway.ingress.mqtt.guest import MqttGuest, Receipt
from gateway.ingress.mqtt.publish_checks import NOT_ALLOWED, Offer, topic_refusal
from gateway.ingress.mqtt.routing_table import DeniedEntry, RoutingTable
from gateway.ingress.services import Services
from gateway.ingress.source import ListenerSource, RouteRefused
from gateway.model.address import Address
from gateway.model.batch import Batch
from gateway.model.delivery_mode import DURABLE_AT_QOS
from gateway.model.dialect import NameRefused
from gateway.model.message import NEVER, Message, Sender
from gateway.model.outcome import FINAL, Outcome, Verdict
from gateway.model.pending import Pending
from gateway.model.times import Monotonic
from gateway.protocols.mqtt.dialect import MQTT, topic_address
from gateway.protocols.mqtt.octets import Bounds
from gateway.protocols.mqtt.packets import Connect, Will
from gateway.protocols.mqtt.properties import encode_list
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode, Version, reason_name
from gateway.protocols.mqtt.translate import publish_essentials
from gateway.settings import MqttListener
from gateway.transport.stream import Stream

log = structlog.get_logger(limited=True)

# Octets that wait for an acknowledgement of TCP's (Nagle) do so for 40 ms, or 200 on some systems.
GOODBYE_SECS: Final = 0.25
UNREAD_SECS: Final = 0.05  # until it is looked again whether clients have taken what they were sent


class MqttIngress(ListenerSource):
    """The MQTT side of one listener, and the source of its batches."""

    def __init__(self, name: str, services: Services, guests: Guests) -> None:
        super().__init__(name, services, guests)
        limits = self.limits
        self._namespace = services.mqtt
        self.body_max = limits.message_bytes_max  # a model's attributes cost a few times what these do
        self.unsettled_max = limits.inflight_max
        self.bounds = Bounds(limits.properties_max, limits.properties_bytes_max, limits.filters_max)
        given = services.settings.listeners[name]
        assert isinstance(given, MqttListener)
        self.options = given
        self.anonymous = given.anonymous
        self.byte_order = given.byte_order
        self.entries = RoutingTable(name, self.dispatcher, self.namespace, limits.cache_entries_max)
        self._owing: dict[Session, None] = {}  # retained messages
        self.taken: list[tuple[ReceivedIds, int]] = []  # QoS 2 messages of the batch whose targets are here
        self._handing_on = False
        self._sending = False
        self._discarding = False
        self.namespace.begin(self.now())
        self.namespace.system.add(self.stats)
        self._adopt(name)
        self.namespace.adopt = partial(self._adopt, None)

    @property
    def namespace(self) -> MqttNamespace:
        """All topics."""
        return self._namespace

    def requester(self, reply_to: str) -> Address | None:
        """A response topic is one like any other."""
        try:
            address = MQTT.address("", reply_to)
        except NameRefused:
            return None
        return None if topic_refusal(reply_to, self.limits.topic_levels_max) else address

    # What the listener asks.

    def turn_done(self) -> None:
        """Send the batch on its way, then have the ids of QoS 2 messages stored that are being written."""
        taken, self.taken = self.taken, []
        before, self._handing_on = self._handing_on, True
        try:
            super().turn_done()
        finally:
            self._handing_on = before
        for ids, packet_id in taken:
            ids.handed_on(packet_id)

    def tick(self, now: float) -> None:
        """Sessions that have been away for too long end; wills whose delay is over are published."""
        super().tick(now)
        self._adopt(None)  # of listeners that are no more
        if self.namespace.expire(now) and not self._discarding:
            self._discarding = True
            self.tasks.start_soon(self._expire_more, now)
        self.namespace.system.tick(now, self.options.sys_interval_secs)

    async def _expire_more(self, now: float) -> None:
        """Discard the rest of the sessions whose time is over; everybody else is served meanwhile."""
        more = True
        while more:
            await trio.lowlevel.checkpoint()
            more = self.namespace.expire_more(now)
            self.flush()
        self._discarding = False

    def _adopt(self, endpoint: str | None) -> None:
        """Publish in time what clients left that an earlier process has lost."""
        for will, sender, left_secs, key in self.namespace.left_wills(endpoint):
            at = self.now() + left_secs if left_secs > 0 else OVERDUE
            principal = Principal(sender.user) if sender.user in self.authorization.roles.users else None
            publish = partial(self.publish_will, will, sender, principal)
            self.namespace.delay_will(key or sender.client, at, publish)

    # What batches ask: this is their source.

    def settle(
        self,
        receipts: list[Receipt | SentWill | None],
        refused: dict[int, Outcome] | None,
        received: Monotonic,
    ) -> None:
        """Each receipt's client hears what became of its message."""
        for at, receipt in enumerate(receipts):
            if receipt is None:
                continue
            if isinstance(receipt, SentWill):
                receipt.settled(None if refused is None else refused.get(at))
            elif refused is not None and at in refused:
                receipt[0].refused(receipt, refused[at])
            else:
                receipt[0].accepted(receipt[1], receipt[2])
        self.stats.answered(len(receipts), refused, self.now() - received)

    # What connections ask.

    def forget_entries(self) -> None:
        self.entries.forget()

    @property
    def accepted_in_memory(self) -> bool:
        """Whether what a target accepts at this moment is in its memory only: it was given it just now."""
        return self._handing_on or self.dispatcher.pauses.is_releasing()

    @staticmethod
    def new_client_id() -> str:
        """An identifier for a client that brought none."""
        return f"auto-{secrets.token_hex(8)}"

    def unclaimed(self, entry: RoutingEntry, message: Message, receipt: Receipt | None) -> None:
        """No subscription and no route takes the message: that is no error of the client, and MQTT 5 has a
        word for it (0x10, 5: 3.4.2.1).

        What may not be published leads nowhere at all; before MQTT 5 only an acknowledgement, or the end of
        the connection, can answer it (3: [MQTT-3.3.5-2]). What has a topic that can never be taken is kept as
        a dead letter then.
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
                receipt[0].refused(receipt, refusal)
                return
            self.tell_refused(message, refusal)
        else:
            if not entry.plan.branches:
                self.dead_letters.add([message], "", UNROUTED)
            self.nobody_wanted(entry, message)
        if receipt is not None:
            receipt[0].accepted(receipt[1], receipt[2], taken=refusal is not None)

    def _not_allowed(self, entry: DeniedEntry, message: Message, receipt: Receipt | None) -> None:
        """MQTT 5 acknowledges with 0x87; where nothing is acknowledged, and before MQTT 5, only the end of
        the connection says so: raises RemoteProtocolError (3: [MQTT-3.3.5-2], as RabbitMQ does)."""
        self.denied(message.sender, "publish", message.address.name, entry.rule)
        self.refuse(entry, message, NOT_ALLOWED)
        if receipt is not None and receipt[0].machine.version is Version.V5:
            receipt[0].refused(receipt, NOT_ALLOWED)
            return
        text = f"not allowed to publish to {message.address.name!r}"
        raise RemoteProtocolError(text, reason=ReasonCode.NOT_AUTHORIZED)

    def offer_to(self, rights: Rights) -> Offer:
        """What a client with these rights may publish with."""
        qos_max, retain = min(int(self.options.qos_max), self.namespace.offers.qos_max), self.options.retain
        if not rights.unlimited:
            qos_max, retain = min(qos_max, rights.mqtt.qos_max), retain and rights.mqtt.retain
        return Offer(qos_max, retain)

    def expiry_secs_max(self, rights: Rights) -> int:
        """How long a session may outlive its connection."""
        own = None if rights.unlimited else rights.mqtt.session_expiry_secs_max
        most = self.limits.session_expiry_secs_max
        return most if own is None else min(own, most)

    def publish_again(self, receipt: Receipt, rights: Rights) -> None:
        """A message that was refused gets another chance, unless a route now asks for a role that its
        publisher does not have: then it is a dead letter, for this client cannot be told otherwise."""
        connection, packet_id, qos, message, entry = receipt
        try:
            entry = self.route(rights, entry.address, self.entries.find)
        except RouteRefused as error:
            self.denied(message.sender, "publish", message.address.name, str(error))
            self.refuse(entry, message, NOT_ALLOWED)
            then = partial(connection.accepted, packet_id, qos)
            self.bury(message, NOT_ALLOWED, then, partial(connection.refused, receipt))
            return
        entry = connection.left_of(packet_id, entry)
        for branch in entry.plan.branches:
            branch.route.retried += 1
        if not self.dispatcher.publish(self.begun_batch(), entry, message, receipt):
            self.unclaimed(entry, message, receipt)

    def owe_retained(self, session: Session) -> None:
        """The session has subscribed, or its client is back: send it a piece of what it is owed retained.

        The rest follows in turns of their own, as the client takes it.
        """
        session.pull()
        if session.pulls:
            self._owing[session] = None
            if not self._sending:
                self._sending = True
                self.tasks.start_soon(self._send_retained)

    async def _send_retained(self) -> None:
        """A piece for each session in turn; everybody else is served between two of them."""
        while self._owing:
            moved = False
            for session in list(self._owing):
                if session.pulls and session.outlet is not None:
                    moved |= self._pull(session)
                    await trio.lowlevel.checkpoint()
                else:
                    self._owing.pop(session, None)
            self.guests.flush()
            if not moved:
                await trio.sleep(UNREAD_SECS)
        self._sending = False

    def _pull(self, session: Session) -> bool:
        try:
            if not session.pull():
                return False
        except Exception as error:
            contained("delivery", error, client=session.client_id)
            session.owed.clear()
        self.guests.flush()
        return True

    def take_over(self, client_id: str) -> None:
        """A client connects: whoever has its identifier must go."""
        session = self.namespace.sessions.get(client_id)
        outlet: object = None if session is None else session.outlet
        if isinstance(outlet, MqttGuest):
            try:
                outlet.taken_over()
            except Exception as error:  # of the one that goes, not of the one that comes
                outlet.stream.fail(error)

    async def await_goodbye(self, stream: Stream, then: Callable[[], None]) -> None:
        """The client of `stream` is at another replica: it has a moment for what it has said here."""
        await trio.sleep(GOODBYE_SECS)
        try:
            then()
        except Exception as error:  # of this one alone
            stream.fail(error)
        self.flush()

    def admit(self, connection: MqttGuest, principal: Principal, rights: Rights, client_id: str) -> None:
        """The client has said who it is, and has a place."""
        self.entered(connection, principal, rights, client_id, connection.machine.version.name.lower())
        self.logins.accepted()

    def let_go(self, connection: MqttGuest, reason: ReasonCode) -> None:
        """End a connection for what its client does not do, and count it."""
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

    def tell_refused(self, message: Message, outcome: Outcome) -> None:
        """Say in the log that a client's message is not taken."""
        log.warning(
            "message refused",
            listener=self.name,
            client=message.sender.client,
            topic=message.address.name,
            reason=outcome.reason.value,
            why=outcome.text,
        )

    def tell_unsubscribed(self, client: str, topic_filter: str, reason: ReasonCode) -> None:
        """Say in the log that a client does not get a subscription."""
        log.warning(
            "subscription refused",
            listener=self.name,
            client=client,
            filter=topic_filter,
            reason=reason_name(reason),
        )

    def tell_turned_away(self, packet: Connect, remote: str, reason: ReasonCode, why: str) -> None:
        """Say in the log that a client may not connect as it wants to."""
        log.warning(
            "client refused by MQTT listener",
            listener=self.name,
            client=packet.client_id,
            user=self.logins.access.loggable(packet.user_name or ""),
            remote=remote,
            reason=reason_name(reason),
            why=why,
        )

    def new_batch(self) -> Batch:
        """Return an empty batch, whose routes keep what a client cannot be told of."""
        batch = super().new_batch()
        batch.untold = self._is_untold
        batch.undone = self._note_undone
        return batch

    @staticmethod
    def _note_undone(receipt: Receipt | SentWill | None, routes: frozenset[str]) -> None:
        """Have a message that is tried again go to the routes that have not accepted it."""
        if receipt is not None and not isinstance(receipt, SentWill):
            receipt[0].note_undone(receipt[1], routes)

    def _is_untold(self, receipt: Receipt | SentWill | None, retries: bool, outcome: Outcome) -> bool:
        """Return True if a route has to keep what it rejects; see gateway.model.batch.Untold."""
        if receipt is None:
            return False
        if isinstance(receipt, SentWill):
            untold = outcome.reason in FINAL or not retries
            message = receipt.message
        else:
            untold = receipt[0].is_untold(retries, outcome)
            message = receipt[3]
        if untold:
            self.tell_refused(message, outcome)
        return untold

    def bury(
        self,
        message: Message,
        outcome: Outcome,
        then: Callable[[], None],
        full: Callable[[Outcome], None],
    ) -> None:
        """Keep a message that no route took, of a client that cannot be told so."""
        self.dead_letters.add([message], "", outcome, then, full=full)

    def drop_forbidden(
        self, session: Session, rights: Rights, sender: Sender, *, patient: bool = False
    ) -> bool:
        """End the subscriptions that are not allowed; True: there were some. What is not known without asking
        somebody is kept if `patient`; otherwise this raises Pending."""
        found = False
        for topic_filter, options in list(session.subscriptions.items()):
            try:
                decision = rights.mqtt_subscribe(topic_filter, options.qos)
            except Pending:
                if patient:
                    continue
                raise
            if not decision.allowed:
                found = True
                self.denied(sender, "subscribe", topic_filter, decision.rule)
                self.namespace.unsubscribe(session, topic_filter)
        return found

    def leave_will(
        self, session: Session, will: Will | None, sender: Sender, principal: Principal | None
    ) -> None:
        """Publish the will, if there is one: now, or when its delay is over or the session ends
        (5: 3.1.2.5)."""
        client_id = session.client_id
        if will is None:
            self.namespace.forget_will(client_id)
            return
        publish = partial(self.publish_will, will, sender, principal)
        delay = will.properties.get(Property.WILL_DELAY_INTERVAL, 0)
        if self.namespace.claims_wills or (delay and session.persistent):
            self.namespace.delay_will(client_id, self.now() + delay, publish)
        else:
            publish()
            self.namespace.forget_will(client_id)

    def publish_will(self, will: Will, sender: Sender, principal: Principal | None) -> None:
        """Publish a will; its expiry counts from now (5: 3.1.3.2.4). Rules may have changed since it was
        left; of a client that is not known any more (`principal` None) they are not asked again. But no will
        takes a route that asks for a role that its client is not known to have.

        The caller then deletes its record. Where the message is not written in this wake-up, as in front of
        a paused route, it has a record of its own until it is settled.
        """
        rights = self.rights_of(principal or Principal(sender.user), sender.client)
        if principal is not None:
            try:
                decision = self.may_publish(rights, topic_address(will.topic))
            except Pending as pending:
                self.tasks.start_soon(self._publish_will_later, pending, will, sender, principal)
                return
            if not decision.allowed:
                self.denied(sender, "will", will.topic, decision.rule)
                return
        kept: dict[Property, Any] = {
            key: value for key, value in will.properties.items() if key is not Property.WILL_DELAY_INTERVAL
        }
        said = publish_essentials(encode_list(kept, PacketType.PUBLISH))
        expires = NEVER if said.expiry is None else clock.utc() + said.expiry
        message = Message(
            topic_address(will.topic),
            will.body,
            said,
            will.qos,
            DURABLE_AT_QOS[will.qos],
            will.retain,
            expires,
            0,
            sender,
        )
        try:
            entry = self.route(rights, message.address, self.entries.find)
        except RouteRefused as error:
            self.denied(sender, "will", will.topic, str(error))
            return
        sent = SentWill(self, will, message, principal)
        if self.namespace.claims_wills or not self.ends_here(entry):
            sent.keep()
        try:
            taken = self.dispatcher.publish(self.begun_batch(), entry, message, sent)
        except RemoteProtocolError:  # nobody can publish it, after a restart neither
            sent.settled(None)
            raise
        if not taken:
            self.unclaimed(entry, message, None)
            sent.settled(None)
        self.turn_done()

    async def _publish_will_later(
        self, pending: Pending, will: Will, sender: Sender, principal: Principal
    ) -> None:
        await pending.awaited.wait()
        self.publish_will(will, sender, principal)
        self.flush()

    def report(self, remote: str, error: RemoteProtocolError) -> None:
        """Say what a client did wrong."""
        log.warning("client violated MQTT protocol", listener=self.name, remote=remote, error=str(error))


class SentWill:
    """The receipt of a will, whose client is gone: keeps its record until the message is settled.

    A will that is not taken for now is published again when the clock next ticks; one that is refused for
    good is a dead letter.
    """

    __slots__ = ("_ingress", "_key", "_principal", "_will", "message")

    def __init__(
        self,
        ingress: MqttIngress,
        will: Will,
        message: Message,
        principal: Principal | None,
    ) -> None:
        self._ingress = ingress
        self._will = will
        self.message = message
        self._principal = principal
        self._key = ""

    def keep(self) -> None:
        """Record the will, so that it is published again if this process ends before it is settled."""
        namespace, sender = self._ingress.namespace, self.message.sender
        self._key = namespace.new_will_key(sender.client)
        namespace.keep_will(self._key, self._will, sender)

    def settled(self, outcome: Outcome | None) -> None:
        """Forget the record of a will that was accepted (`outcome` None); publish it again, or make it a dead
        letter."""
        if outcome is None:
            self._forget()
            return
        ingress, message = self._ingress, self.message
        ingress.tell_refused(message, outcome)
        if outcome.verdict is Verdict.REJECTED:
            ingress.bury(message, outcome, self._forget, self.settled)
            return
        if not self._key:
            self.keep()
        publish = partial(ingress.publish_will, self._will, message.sender, self._principal)
        ingress.namespace.delay_will(self._key, OVERDUE, publish)

    def _forget(self) -> None:
        if self._key:
            self._ingress.namespace.forget_will(self._key)
