"""Admission of MQTT clients: authentication, checks of CONNECT, session expiry and the CONNACK.

`AdmittedMqttClient` processes CONNECT and AUTH packets. It verifies the password, token or SCRAM exchange,
checks client identifier, will and limits, opens or resumes the session, and sends the CONNACK or refuses the
client. Publishing and subscribing are in the module `connection`.

While the store is read-only, sessions that would have to be recorded are refused. A session that is on disk
already is resumed, because a client that consumes frees disk space.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from gateway.access.backends import Denial
from gateway.access.places import place_of
from gateway.access.principal import Principal
from gateway.access.rights import Decision, Rights
from gateway.access.scram import METHOD, ScramError
from gateway.access.tokens import Tokens
from gateway.broker.mqtt.namespace import ConnectingClient
from gateway.broker.mqtt.session import Session, SubscriptionOptions
from gateway.ingress.logins import Login
from gateway.ingress.mqtt.authentication import Authentication, TokenAuthentication
from gateway.ingress.mqtt.ingress import MqttIngress, WillDenied
from gateway.ingress.mqtt.listener_client import MqttListenerClient
from gateway.ingress.mqtt.publish_checks import ServerCapabilities, topic_refusal
from gateway.model.message import Sender
from gateway.model.outcome import Reason
from gateway.model.pending import Pending
from gateway.protocols.mqtt.connection import State
from gateway.protocols.mqtt.data_types import is_utf8, violation
from gateway.protocols.mqtt.dialect import MQTT
from gateway.protocols.mqtt.packets import Auth, Connect, Will
from gateway.protocols.mqtt.properties import NO_PROPERTIES
from gateway.protocols.mqtt.reason_codes import (
    CLIENT_ID_REFUSED,
    CONNECT_REFUSED,
    LOGIN_REFUSED,
    METHOD_REFUSED,
    PROOF_REFUSED,
    REAUTHENTICATION_REFUSED,
    WILL_QOS_REFUSED,
    WILL_RETAIN_REFUSED,
)
from gateway.protocols.mqtt.server import ServerConnection
from gateway.protocols.mqtt.spec import Property, ReasonCode, Version
from gateway.settings import Limits, MqttListener
from gateway.transport.stream import Stream

NO_EXPIRY: Final = 0xFFFF_FFFF  # seconds; the session does not expire (5: 3.1.2.11.2)
KEEP_ALIVE_MOST: Final = 65_535
WHY_DENIED: Final = {
    Denial.WRONG: "",
    Denial.EXPIRED: "the token has expired",
    Denial.UNAVAILABLE: "authentication is temporarily unavailable",
    Denial.REFUSED: "too many failed logins",
    Denial.BUSY: "too many logins are waiting",
}


def identifier_refused(packet: Connect) -> bool:
    """Return True if a required client identifier is missing.

    It is optional in MQTT 5, and in 3.1.1 for sessions that end with the connection (3.1.1: 3.1.3.1).
    """
    if packet.client_id or packet.version >= Version.V5:
        return False
    return packet.version < Version.V311 or not packet.clean_start


def expiry_secs(packet: Connect, most: int) -> float:
    """Return for how many seconds the session outlives its connection; `most` is the maximum."""
    if packet.version < Version.V5:
        requested_secs = 0 if packet.clean_start else NO_EXPIRY
    else:
        requested_secs = packet.properties.get(Property.SESSION_EXPIRY_INTERVAL, 0)
    return float(min(requested_secs, most))


def connack_properties(
    packet: Connect,
    assigned: str,
    limits: Limits,
    options: MqttListener,
    offer: ServerCapabilities,
    expiry_max: int,
) -> dict[Property, Any]:
    """Return the CONNACK properties, without those that the protocol machine adds itself (5: 3.2.2.3).

    `assigned` is the client identifier in use, `offer` the highest QoS and the retain availability, and
    `expiry_max` the maximum session expiry in seconds. The result is empty before MQTT 5.
    """
    if packet.version < Version.V5:
        return {}
    properties: dict[Property, Any] = {Property.SHARED_SUBSCRIPTION_AVAILABLE: 1}
    if offer.qos_max < 2:
        properties[Property.MAXIMUM_QOS] = offer.qos_max
    if not offer.retain:
        properties[Property.RETAIN_AVAILABLE] = 0
    if options.response_information and packet.properties.get(Property.REQUEST_RESPONSE_INFORMATION):
        response_information = options.response_information.replace("{client_id}", assigned)
        properties[Property.RESPONSE_INFORMATION] = response_information
    if not packet.client_id:
        properties[Property.ASSIGNED_CLIENT_IDENTIFIER] = assigned
    most = limits.keep_alive_secs_max
    if most < KEEP_ALIVE_MOST and not 0 < packet.keep_alive <= most:
        properties[Property.SERVER_KEEP_ALIVE] = most
    if packet.properties.get(Property.SESSION_EXPIRY_INTERVAL, 0) > expiry_max:
        properties[Property.SESSION_EXPIRY_INTERVAL] = expiry_max
    return properties


class AdmittedMqttClient(MqttListenerClient):
    """Client connection from CONNECT until its session is open; also processes its later AUTH packets."""

    __slots__ = (
        "_decisions",
        "_ingress",
        "authentication",
        "expiry_before",
        "is_closed",
        "principal",
        "session",
        "will",
    )

    def __init__(self, ingress: MqttIngress, stream: Stream, machine: ServerConnection) -> None:
        super().__init__(stream, Sender(ingress.name), machine)
        self.is_closed = False
        self.session: Session | None = None
        # Until the CONNACK is sent: seconds by which the session outlived its last connection; 0 if new.
        self.expiry_before: float | None = None
        self.principal: Principal | None = None
        self.will: Will | None = None
        self.authentication: Authentication | TokenAuthentication | None = None
        self._ingress = ingress
        # Decisions on the subscriptions to be resumed, by filter and QoS, with the generation of the rules.
        self._decisions: tuple[int, dict[tuple[str, int], Decision]] | None = None

    @property
    def has_will(self) -> bool:
        """True if the client's will is published when its connection is lost."""
        return self.will is not None

    @abstractmethod
    def current_rights(self) -> Rights:
        """Return the client's rights under the current rules."""

    @abstractmethod
    def renew_rights(self) -> None:
        """Apply the client's current rights, because it has authenticated again."""

    @abstractmethod
    def open(self, session: Session, receive_max: int) -> None:
        """Attach the session of the admitted client and start its deliveries.

        `receive_max` is the maximum number of unacknowledged messages that the client accepts.
        """

    @abstractmethod
    def wait_for_commit(self, before: int) -> None:
        """Delay the connection's output until all changes of sessions since `before` are on disk.

        `before` is an earlier value of `namespace.change_count`.
        """

    @abstractmethod
    def send_due_retained(self) -> None:
        """Continue to send the retained messages that match the session's new subscriptions."""

    def _connect(self, packet: Connect) -> None:
        """Process CONNECT: admit the client, refuse it, or start to verify its credentials.

        The protocol machine holds back later packets during the verification.
        """
        method = packet.properties.get(Property.AUTHENTICATION_METHOD)
        if method is not None:
            if self.machine.state is State.CLOSED:
                return  # a packet other than AUTH followed: a protocol error, raised next
            access = self._ingress.access
            proves = access.supports_scram and method == METHOD
            if not proves and method not in access.methods:
                offered = [METHOD, *access.methods] if access.supports_scram else access.methods
                text = (
                    f"supported: {', '.join(offered)}"
                    if offered
                    else "no enhanced authentication is supported"
                )
                self._refuse(METHOD_REFUSED, text)
                return
            self.authentication = (
                Authentication(access, packet) if proves else TokenAuthentication(packet, method)
            )
            self._authenticate(packet)
            return
        access = self._ingress.access
        credentials = self._ingress.logins.credentials(
            self.stream, packet.user_name or "", packet.password or b"", client=packet.client_id
        )
        anonymous = access.anonymous_principal(credentials.remote, self._ingress.anonymous)
        if (not credentials.user and not access.recognizes(credentials)) or (
            credentials.user and anonymous is not None and access.ignores_user(credentials.user)
        ):
            self._admit(packet, anonymous, CONNECT_REFUSED[Reason.NOT_AUTHORIZED])
            return
        principal = access.verify_nowait(credentials)
        if principal is not None:
            self._admit(packet, principal, ReasonCode.SUCCESS)
        else:
            self._ingress.logins.verify(
                self.stream,
                credentials,
                partial(self._verified, packet),
                behind=self.machine.has_undecoded,
            )

    def _authenticate(self, packet: Connect | Auth) -> None:
        """Process the next packet of an enhanced authentication.

        After failed logins of the same user or address, the response to a new client is delayed. Raises
        RemoteProtocolError for an AUTH packet that arrives before the response to the previous one.
        """
        machine, stream = self.machine, self.stream
        if machine.state is State.CLOSED:
            return  # a protocol error is raised next, or the client has disconnected
        if isinstance(stream.owner, Login):
            raise violation("AUTH received before the previous AUTH was answered")
        ongoing = self.authentication
        assert ongoing is not None, "the machine lets no AUTH pass without a method in CONNECT"
        if isinstance(ongoing, TokenAuthentication):
            self._verify_token(ongoing, packet)
            return
        delay = (
            self._ingress.access.failures.delay_secs(stream.remote, ongoing.claimed_user)
            if ongoing.claimed_user
            else 0.0
        )
        if delay and machine.state is not State.OPEN:
            then = partial(self._continue_scram, ongoing, packet)
            self._ingress.logins.call_later(stream, delay, then, behind=machine.has_undecoded)
        else:
            self._continue_scram(ongoing, packet)

    def _continue_scram(self, ongoing: Authentication, packet: Connect | Auth) -> None:
        """Process the next SCRAM message of the client: send AUTH, admit the client or refuse it."""
        machine, failures, remote = self.machine, self._ingress.access.failures, self.stream.remote
        refused = bool(ongoing.claimed_user) and failures.is_refused(remote, ongoing.claimed_user)
        try:
            if refused:
                raise ScramError("too many failed logins")
            properties = ongoing.answer(packet)
        except ScramError as error:
            if ongoing.claimed_user and not refused:
                failures.count_failure(remote, ongoing.claimed_user)
            why = Denial.REFUSED if refused else Denial.WRONG
            self._refuse_authentication(ongoing.claimed_user, why, str(error))
            return
        if not ongoing.is_complete:
            machine.send_auth(Auth(ReasonCode.CONTINUE_AUTHENTICATION, properties))
            return
        failures.succeeded(remote, ongoing.user)
        if machine.state is State.OPEN:
            machine.send_auth(Auth(ReasonCode.SUCCESS, properties))
        else:
            principal = self._ingress.access.principal_named(ongoing.user)
            self._admit(ongoing.connect, principal, PROOF_REFUSED[Denial.WRONG.value], properties)

    def _verify_token(self, ongoing: TokenAuthentication, packet: Connect | Auth) -> None:
        """Verify the token in the packet, or request one by sending AUTH if the packet has none."""
        token = packet.properties.get(Property.AUTHENTICATION_DATA, b"")
        if not token:
            self.machine.send_auth(Auth(ReasonCode.CONTINUE_AUTHENTICATION, ongoing.properties))
            return
        credentials = self._ingress.logins.credentials(
            self.stream,
            ongoing.connect.user_name or "",
            token,
            client=ongoing.connect.client_id,
            backend=Tokens.kind,
            method=ongoing.method,
        )
        principal = self._ingress.access.verify_nowait(credentials)
        if principal is not None:
            self._handle_token_result(ongoing, principal)
            return

        def on_verified(found: Principal | Denial) -> None:
            connecting = self.machine.state is not State.OPEN
            self._handle_token_result(ongoing, found)
            if connecting and not self.is_closed:
                self.receive(b"", self._ingress.now())

        self._ingress.logins.verify(self.stream, credentials, on_verified, behind=self.machine.has_undecoded)

    def _handle_token_result(self, ongoing: TokenAuthentication, found: Principal | Denial) -> None:
        """Admit the client, renew its rights or refuse it, depending on the verification of its token.

        A connected client that presents another user's token is disconnected.
        """
        machine = self.machine
        before = self.principal
        claimed = ongoing.connect.user_name or ""
        if before is not None and isinstance(found, Principal) and found.name != before.name:
            found, claimed = Denial.WRONG, before.name
        if isinstance(found, Denial):
            self._refuse_authentication(claimed, found, "the token was rejected")
        elif machine.state is not State.OPEN:
            self._admit(
                ongoing.connect,
                found,
                PROOF_REFUSED[Denial.WRONG.value],
                ongoing.properties,
            )
        else:
            self.principal = found
            self._ingress.register_renewal(self, found)
            self._ingress.namespace.store_will(self.sender.client, self.will, self.sender, found)
            machine.send_auth(Auth(ReasonCode.SUCCESS, ongoing.properties))
            self.renew_rights()
            self.stream.mark_for_flush()

    def _refuse_authentication(
        self,
        user: str,
        why: Denial,
        error: str,
    ) -> None:
        """Refuse a client whose enhanced authentication failed; `error` is the text for the log.

        The refusal is a CONNACK, or a DISCONNECT if the client is already connected.
        """
        self._ingress.logins.log_denied(self.stream, user, why, self.sender.client)
        if self.machine.state is not State.OPEN:
            self._refuse_connect(PROOF_REFUSED[why.value], "")
            return
        reason = REAUTHENTICATION_REFUSED[why.value]
        self._ingress.stats.refused.add(reason.name.lower())
        self.machine.send_disconnect(reason)
        self.stream.end(f"authentication failed: {error}")

    def _verified(self, packet: Connect, found: Principal | Denial) -> None:
        """Admit or refuse the client by the result of its login, then process packets after CONNECT."""
        if isinstance(found, Denial):
            self._deny(packet, found)
            return
        self._admit(packet, found, LOGIN_REFUSED[Denial.WRONG.value])
        if not self.is_closed:
            self.receive(b"", self._ingress.now())

    def _admit(
        self,
        packet: Connect,
        principal: Principal | None,
        otherwise: ReasonCode,
        proof: Mapping[Property, Any] = NO_PROPERTIES,
        assigned: str = "",
    ) -> None:
        """Check the CONNECT of an authenticated client, open its session and send the CONNACK.

        If `principal` is None the client is refused with the reason code `otherwise`. `proof` has the CONNACK
        properties of an enhanced authentication. `assigned` is the client identifier that was assigned to a
        client without one before its checks were pending.
        """
        if principal is None:
            self._refuse(otherwise, "")
            return
        client_id = packet.client_id or assigned or self._ingress.new_client_id()
        rights = self._ingress.rights_of(principal, client_id)
        sender = Sender(self._ingress.name, client_id, principal.name, self.stream.remote)
        namespace, machine = self._ingress.namespace, self.machine
        expires, place = (
            expiry_secs(packet, self._ingress.expiry_secs_max(rights)),
            place_of(self.stream.remote),
        )
        coming = ConnectingClient(
            client_id,
            packet.clean_start,
            expires,
            place,
            packet.will,
            sender,
            not rights.unlimited,
            principal,
        )
        forbidden: dict[str, str] = {}
        try:
            refusal = self._refusal(packet, rights, sender)
            if refusal is not None:
                self._refuse(*refusal)
                return
            namespace.prepare_client(self, coming)
            if not (packet.clean_start or rights.unlimited):
                forbidden = self._forbidden(namespace.resumable(client_id), rights)
        except Pending as pending:
            again = partial(self._admit_later, packet, principal, otherwise, proof, client_id)
            self._ingress.suspend(self.stream, pending.awaited, again)
            return
        before = namespace.change_count
        self._ingress.take_over(client_id)  # ends a session that ends with its connection
        present = namespace.has_session(client_id) and not packet.clean_start
        expiry_max, offer = self._ingress.expiry_secs_max(rights), self._ingress.capabilities_for(rights)
        properties = connack_properties(
            packet, client_id, self._ingress.limits, self._ingress.options, offer, expiry_max
        )
        machine.send_connack(session_present=present, properties={**properties, **proof})
        if machine.state is not State.OPEN:  # the CONNACK exceeds its Maximum Packet Size
            self.stream.end("the client's Maximum Packet Size is too small")
            return
        if self.authentication is not None:  # for later AUTH packets
            assert machine.connect is not None
            self.authentication.connect = machine.connect
        self._ingress.stats.set_version(machine, packet.version.name.lower())
        self.principal, self.sender = principal, sender
        self.current_rights()
        self._ingress.admit(self, principal, rights, client_id)
        self.will = packet.will
        self.expiry_before = namespace.resumable_expiry_secs(client_id) if present else 0.0
        session, _ = namespace.open(
            client_id,
            clean=packet.clean_start,
            expiry_secs=expires,
            user=principal.name,
            place=place,
        )
        self._decisions = None
        try:
            self._ingress.end_subscriptions(session, forbidden, sender)
            namespace.store_will(client_id, packet.will, sender, principal)
            most = self._ingress.limits.inflight_max
            self.open(session, min(packet.properties.get(Property.RECEIVE_MAXIMUM, most), most))
        except Exception:
            self._abandon(session)
            raise
        self.wait_for_commit(before)

    def _abandon(self, session: Session) -> None:
        """Detach or end the session of a client that cannot be accepted after all; its will is dropped.

        A new session ends with the connection, because no CONNACK has announced it to the client. Another one
        has its earlier expiry again.
        """
        self.will = None
        session.expiry_secs = self.expiry_before or 0.0
        if session.outlet is not None:
            return  # the end of the connection does the rest
        namespace = self._ingress.namespace
        namespace.forget_will(session.client_id)
        if session.persistent:
            namespace.detach_session(session, self._ingress.now())
        else:
            namespace.discard(session)

    def _admit_later(
        self,
        packet: Connect,
        principal: Principal,
        otherwise: ReasonCode,
        proof: Mapping[Property, Any],
        client_id: str,
    ) -> None:
        """Admit a client when its pending checks are complete, then process packets after CONNECT.

        `otherwise` and `proof` are passed to `_admit`, and so is `client_id`, which may have been assigned.
        """
        if self.is_closed:
            return
        if self._ingress.access.is_removed(principal):
            self._refuse(otherwise, "the user was removed")
            return
        self._admit(packet, principal, otherwise, proof, client_id)
        if not self.is_closed and self.session is not None:
            self.receive(b"", self._ingress.now())
        self.stream.mark_for_flush()

    def _forbidden(self, subscriptions: Mapping[str, SubscriptionOptions], rights: Rights) -> dict[str, str]:
        """Return the topic filters of a session that are not allowed any more, with the rules that deny them.

        Raises Pending at the first filter whose decision is pending. Decisions are stored until the client is
        admitted, because a decision may expire from the cache before all of them are available.
        """
        generation = self._ingress.authorization.generation
        if self._decisions is None or self._decisions[0] != generation:
            self._decisions = generation, {}
        decisions = self._decisions[1]
        for topic_filter, options in subscriptions.items():
            if (topic_filter, options.qos) not in decisions:
                decisions[topic_filter, options.qos] = rights.mqtt_subscribe(topic_filter, options.qos)
        return {
            topic_filter: decision.rule
            for topic_filter, options in subscriptions.items()
            if not (decision := decisions[topic_filter, options.qos]).allowed
        }

    def _refusal(self, packet: Connect, rights: Rights, sender: Sender) -> tuple[ReasonCode, str] | None:
        """Return reason code and text if an authenticated client may not open its session, or else None.

        Raises Pending while a permission or the number of the user's sessions is pending.
        """
        namespace, user, remote = self._ingress.namespace, sender.user, sender.address
        client_id = packet.client_id
        existing = namespace.sessions.get(client_id)
        if why := namespace.unavailable:
            return CONNECT_REFUSED[Reason.TARGET_DOWN], why
        if identifier_refused(packet):
            return CLIENT_ID_REFUSED, "a client identifier is needed"
        if len(client_id.encode()) > (most := self._ingress.limits.client_id_bytes_max):
            return CLIENT_ID_REFUSED, f"more than limits.client_id_bytes_max ({most})"
        if not rights.unlimited and (refused := self._not_its_own(packet, rights, sender)) is not None:
            return refused
        is_replacing = namespace.replaces_connection(client_id, user)
        if not is_replacing and (limit := self._ingress.place_refusal(rights, user, remote)):
            return CONNECT_REFUSED[Reason.QUOTA], f"{limit} is reached"
        recorded = existing is not None and existing.is_durable and not packet.clean_start
        expires = expiry_secs(packet, self._ingress.expiry_secs_max(rights))
        if namespace.failing and not recorded and expires > 0:
            return CONNECT_REFUSED[Reason.STORE], "the gateway cannot store a session now; retry later"
        refused = None if packet.will is None else self._will_refusal(packet.will, rights, sender)
        if refused is None and not namespace.is_pending(client_id) and namespace.user_of(client_id) is None:
            if rights.sessions_max and namespace.sessions_of(user) >= rights.sessions_max:
                namespace.await_count(user, client_id)
                return CONNECT_REFUSED[Reason.QUOTA], "sessions_max of the user's roles is reached"
            if limit := namespace.make_room(user, place_of(remote), client_id):
                namespace.await_count(user, client_id)
                return CONNECT_REFUSED[Reason.QUOTA], f"limits.{limit} is reached"
        return refused

    def _not_its_own(self, packet: Connect, rights: Rights, sender: Sender) -> tuple[ReasonCode, str] | None:
        """Return reason code and text if the client may not use its identifier or session, or else None.

        Rules may bind identifiers to users. A session belongs to one user: if another user resumed it, that
        user would receive messages by subscriptions that were permitted to the first.
        """
        decision = rights.enters_mqtt()
        if not decision.allowed:
            self._ingress.record_denial(sender, "connect", MQTT.title, decision.rule)
            return CONNECT_REFUSED[Reason.NOT_AUTHORIZED], "no rule permits this client anything"
        if not packet.client_id:
            return None
        decision = rights.has_client_id(packet.client_id)
        if not decision.allowed:
            self._ingress.record_denial(sender, "client_id", packet.client_id, decision.rule)
            return CLIENT_ID_REFUSED, "the user may not use this client identifier"
        user = self._ingress.namespace.user_of(packet.client_id)
        if user is not None and user != sender.user:
            self._ingress.record_denial(
                sender, "session", packet.client_id, "the session belongs to another user"
            )
            return CONNECT_REFUSED[Reason.NOT_AUTHORIZED], "the session belongs to another user"
        return None

    def _will_refusal(self, will: Will, rights: Rights, sender: Sender) -> tuple[ReasonCode, str] | None:
        """Return reason code and text if a will is refused, or else None.

        The clauses are 5: 3.2.2, [MQTT-3.2.2-12] and [MQTT-3.2.2-13].
        """
        offer = self._ingress.capabilities_for_all
        if will.qos > offer.qos_max:
            return WILL_QOS_REFUSED, "the will's QoS exceeds qos_max"
        if will.retain and not offer.retain:
            return WILL_RETAIN_REFUSED, "retained messages are not supported by this listener"
        if will.properties.get(Property.PAYLOAD_FORMAT_INDICATOR) and not is_utf8(will.body):
            return CONNECT_REFUSED[
                Reason.MALFORMED
            ], "the will's payload is marked as UTF-8 but is not valid UTF-8"
        if len(will.body) > self._ingress.limits.message_bytes_max:
            return CONNECT_REFUSED[Reason.TOO_LARGE], "the will exceeds limits.message_bytes_max"
        if self._ingress.namespace.will_full(sender.user, sender.client, will):
            return CONNECT_REFUSED[Reason.QUOTA], "limits.definitions_bytes_max is reached"
        if (refusal := topic_refusal(will.topic, self._ingress.limits.topic_levels_max)) is not None:
            return CONNECT_REFUSED[refusal.reason], f"the will's topic: {refusal.text}"
        try:
            self._ingress.will_entry(will, rights, sender)
        except WillDenied as denied:
            return denied.reason, str(denied)
        return None

    def _deny(self, packet: Connect, why: Denial) -> None:
        """Refuse a client whose login failed or could not be verified; `why` is the kind of failure."""
        self._ingress.logins.log_denied(self.stream, packet.user_name or "", why, packet.client_id)
        self._refuse_connect(LOGIN_REFUSED[why.value], WHY_DENIED[why])

    def _refuse(self, reason: ReasonCode, text: str) -> None:
        """Refuse the client's CONNECT with this reason code and text, and log it, also in the audit log."""
        assert self.machine.connect is not None
        packet = self.machine.connect
        self._ingress.log_refused_connect(packet, self.stream.remote, reason, text)
        self._ingress.logins.audit_refusal(
            self.stream,
            packet.user_name or "",
            reason.name.lower(),
            packet.client_id,
            proved=packet.user_name == self.sender.user,
        )
        self._refuse_connect(reason, text)

    def refuse_unavailable(self, why: str) -> None:
        """Refuse the CONNECT because the server is unavailable; do nothing if the connection is closed.

        `why` is the reason for the log.
        """
        if not self.is_closed:
            self._refuse(CONNECT_REFUSED[Reason.TARGET_DOWN], why)

    def _refuse_connect(self, reason: ReasonCode, text: str) -> None:
        """Send a CONNACK with this reason code and text, and close the connection."""
        self._ingress.stats.refused.add(reason.name.lower())
        machine = self.machine
        properties = {Property.REASON_STRING: text} if text and machine.version == Version.V5 else {}
        machine.send_connack(reason=reason, properties=properties)
        self.stream.end(f"CONNECT refused: {reason.name.lower()}")
