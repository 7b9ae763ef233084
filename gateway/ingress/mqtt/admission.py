"""What a CONNECT asks for, and what it is given: refusals, session expiry, properties of the CONNACK.

While the disk takes nothing, no session that would have to be recorded is begun; one that is on disk already
is resumed, for whoever reads makes room.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gateway.access.backends import Denial
from gateway.access.places import place_of
from gateway.access.principal import Principal
from gateway.access.questions import Undecided
from gateway.access.rights import Rights
from gateway.access.scram import METHOD, ScramError
from gateway.access.tokens import Tokens
from gateway.ingress.logins import Login
from gateway.ingress.mqtt.authentication import Authentication, TokenShown
from gateway.ingress.mqtt.publish_checks import Offer, topic_refusal
from gateway.ingress.mqtt.subscriptions import drop_forbidden
from gateway.model.message import Sender
from gateway.protocols.mqtt.connection import State
from gateway.protocols.mqtt.dialect import MQTT, topic_address
from gateway.protocols.mqtt.octets import is_utf8, violation
from gateway.protocols.mqtt.packets import Auth, Connect, Will
from gateway.protocols.mqtt.properties import NO_PROPERTIES
from gateway.protocols.mqtt.spec import Property, ReasonCode, Version
from gateway.protocols.mqtt.translate import REASON_CODES
from gateway.settings import Limits, MqttListener

if TYPE_CHECKING:
    from gateway.ingress.mqtt.connection import MqttConnection
    from gateway.ingress.mqtt.ingress import MqttIngress

NO_EXPIRY: Final = 0xFFFF_FFFF  # MQTT 5 §3.1.2.11.2: the session does not expire
KEEP_ALIVE_MOST: Final = 65_535
DENIALS: Final = {
    Denial.WRONG: (ReasonCode.BAD_USER_NAME_OR_PASSWORD, ""),
    Denial.EXPIRED: (ReasonCode.NOT_AUTHORIZED, "the token has expired"),
    Denial.UNAVAILABLE: (ReasonCode.SERVER_UNAVAILABLE, "nobody can say who this is now"),
    Denial.REFUSED: (ReasonCode.CONNECTION_RATE_EXCEEDED, "too many logins have failed"),
    Denial.BUSY: (ReasonCode.SERVER_BUSY, "too many logins wait"),
}


def identifier_refused(packet: Connect) -> bool:
    """Is the identifier missing? It may be absent in 5, and in 3.1.1 for a session that ends (§3.1.3.1)."""
    if packet.client_id or packet.version >= Version.V5:
        return False
    return packet.version < Version.V311 or not packet.clean_start


def expiry_secs_max(limits: Limits, rights: Rights) -> int:
    """How long a session may outlive its connection."""
    own = None if rights.unlimited else rights.mqtt.session_expiry_secs_max
    return limits.session_expiry_secs_max if own is None else min(own, limits.session_expiry_secs_max)


def expiry_secs(packet: Connect, most: int) -> float:
    """How long the session outlives its connection: 0, or at most `most`."""
    if packet.version < Version.V5:
        wanted = 0 if packet.clean_start else NO_EXPIRY
    else:
        wanted = packet.properties.get(Property.SESSION_EXPIRY_INTERVAL, 0)
    return float(min(wanted, most))


def connack_properties(
    packet: Connect, assigned: str, limits: Limits, options: MqttListener, offer: Offer, expiry_max: int
) -> dict[Property, Any]:
    """What the CONNACK of MQTT 5 says besides the limits that the machine announces itself (§3.2.2.3)."""
    if packet.version < Version.V5:
        return {}
    properties: dict[Property, Any] = {Property.SHARED_SUBSCRIPTION_AVAILABLE: 1}
    if offer.qos_max < 2:
        properties[Property.MAXIMUM_QOS] = offer.qos_max
    if not offer.retain:
        properties[Property.RETAIN_AVAILABLE] = 0
    if options.response_information and packet.properties.get(Property.REQUEST_RESPONSE_INFORMATION):
        told = options.response_information.replace("{client_id}", assigned)
        properties[Property.RESPONSE_INFORMATION] = told
    if not packet.client_id:
        properties[Property.ASSIGNED_CLIENT_IDENTIFIER] = assigned
    most = limits.keep_alive_secs_max
    if most < KEEP_ALIVE_MOST and not 0 < packet.keep_alive <= most:
        properties[Property.SERVER_KEEP_ALIVE] = most
    if packet.properties.get(Property.SESSION_EXPIRY_INTERVAL, 0) > expiry_max:
        properties[Property.SESSION_EXPIRY_INTERVAL] = expiry_max
    return properties


def connect(ingress: MqttIngress, connection: MqttConnection, packet: Connect) -> None:
    """Admit the client, refuse it, or have its password verified; the machine holds what follows."""
    remote = connection.stream.remote
    method = packet.properties.get(Property.AUTHENTICATION_METHOD)
    if method is not None:
        if connection.machine.state is State.CLOSED:
            return  # something else than AUTH came right behind, which is raised next
        access = ingress.access
        proves = access.proves and method == METHOD
        if not proves and not access.takes_tokens(method):
            offered = [METHOD, *access.methods] if access.proves else access.methods
            text = f"offered: {', '.join(offered)}" if offered else "no enhanced authentication is offered"
            refuse(ingress, connection, ReasonCode.BAD_AUTHENTICATION_METHOD, text)
            return
        connection.authentication = Authentication(access, packet) if proves else TokenShown(packet, method)
        authenticate(ingress, connection, packet)
        return
    access = ingress.access
    said = ingress.logins.credentials(
        connection.stream, packet.user_name or "", packet.password or b"", client=packet.client_id
    )
    anonymous = access.anonymous(remote, ingress.anonymous)
    if (not said.user and not access.recognizes(said)) or (
        said.user and anonymous is not None and access.ignores(said.user)
    ):
        _admit(ingress, connection, packet, anonymous, ReasonCode.NOT_AUTHORIZED)
        return
    principal = access.known(said)
    if principal is not None:
        _admit(ingress, connection, packet, principal, ReasonCode.SUCCESS)
    else:
        ingress.logins.verify(
            connection.stream,
            said,
            partial(_verified, ingress, connection, packet),
            behind=connection.machine.held,
        )


def authenticate(ingress: MqttIngress, connection: MqttConnection, packet: Connect | Auth) -> None:
    """The next step of an enhanced authentication, the first one or a later one; after failures of the same
    user or address it waits.
    """
    machine, stream = connection.machine, connection.stream
    if machine.state is State.CLOSED:
        return  # likewise, or it left
    if isinstance(stream.peer, Login):
        raise violation("AUTH goes on before the last one was answered")
    ongoing = connection.authentication
    assert ongoing is not None, "the machine lets no AUTH pass without a method in CONNECT"
    if isinstance(ongoing, TokenShown):
        _show(ingress, connection, ongoing, packet)
        return
    delay = ingress.access.failures.delay_secs(stream.remote, ongoing.claimed) if ongoing.claimed else 0.0
    if delay and machine.state is not State.OPEN:
        then = partial(_prove, ingress, connection, ongoing, packet)
        ingress.logins.later(stream, delay, then, behind=machine.held)
    else:
        _prove(ingress, connection, ongoing, packet)


def _prove(
    ingress: MqttIngress, connection: MqttConnection, ongoing: Authentication, packet: Connect | Auth
) -> None:
    machine, failures, remote = connection.machine, ingress.access.failures, connection.stream.remote
    refused = bool(ongoing.claimed) and failures.refuses(remote, ongoing.claimed)
    try:
        if refused:
            raise ScramError("too many logins have failed")
        properties = ongoing.answer(packet)
    except ScramError as error:
        if ongoing.claimed and not refused:
            failures.failed(remote, ongoing.claimed)
        why = Denial.REFUSED if refused else Denial.WRONG
        _unproved(ingress, connection, ongoing.claimed, why, str(error))
        return
    if not ongoing.done:
        machine.send_auth(Auth(ReasonCode.CONTINUE_AUTHENTICATION, properties))
        return
    failures.succeeded(remote, ongoing.user)
    if machine.state is State.OPEN:
        machine.send_auth(Auth(ReasonCode.SUCCESS, properties))
    else:
        principal = ingress.access.proved(ongoing.user)
        _admit(ingress, connection, ongoing.connect, principal, ReasonCode.NOT_AUTHORIZED, properties)


def _show(
    ingress: MqttIngress, connection: MqttConnection, ongoing: TokenShown, packet: Connect | Auth
) -> None:
    """A token is shown, or asked for where it has not come along."""
    token = packet.properties.get(Property.AUTHENTICATION_DATA, b"")
    if not token:
        connection.machine.send_auth(Auth(ReasonCode.CONTINUE_AUTHENTICATION, ongoing.properties))
        return
    said = ingress.logins.credentials(
        connection.stream,
        ongoing.connect.user_name or "",
        token,
        client=ongoing.connect.client_id,
        backend=Tokens.kind,
        method=ongoing.method,
    )
    principal = ingress.access.known(said)
    if principal is not None:
        _shown(ingress, connection, ongoing, principal)
        return

    def looked_at(found: Principal | Denial) -> None:
        connecting = connection.machine.state is not State.OPEN
        _shown(ingress, connection, ongoing, found)
        if connecting and not connection.gone:
            connection.receive(b"", ingress.now())

    ingress.logins.verify(connection.stream, said, looked_at, behind=connection.machine.held)


def _shown(
    ingress: MqttIngress, connection: MqttConnection, ongoing: TokenShown, found: Principal | Denial
) -> None:
    """The token has been looked at. Whoever is connected must still be the same user."""
    machine = connection.machine
    before = connection.principal
    claimed = ongoing.connect.user_name or ""
    if before is not None and isinstance(found, Principal) and found.name != before.name:
        found, claimed = Denial.WRONG, before.name
    if isinstance(found, Denial):
        _unproved(ingress, connection, claimed, found, "the token is not taken")
    elif machine.state is not State.OPEN:
        _admit(
            ingress,
            connection,
            ongoing.connect,
            found,
            ReasonCode.NOT_AUTHORIZED,
            ongoing.properties,
        )
    else:
        connection.principal = found
        ingress.renewed(connection, found)
        machine.send_auth(Auth(ReasonCode.SUCCESS, ongoing.properties))
        connection.renew_rights()
        connection.stream.mark()


def _unproved(
    ingress: MqttIngress,
    connection: MqttConnection,
    user: str,
    why: Denial,
    error: str,
) -> None:
    """Say no in the words of an authentication; one that was not looked at is told so."""
    reason = ReasonCode.NOT_AUTHORIZED if why is Denial.WRONG else DENIALS[why][0]
    ingress.logins.denied(connection.stream, user, why, connection.sender.client)
    if connection.machine.state is not State.OPEN:
        _turn_away(ingress, connection, reason, "")
        return
    ingress.stats.refused.add(reason.name.lower())
    connection.machine.send_disconnect(reason)
    connection.stream.end(f"authentication failed: {error}")


def _verified(
    ingress: MqttIngress, connection: MqttConnection, packet: Connect, found: Principal | Denial
) -> None:
    """The password has been looked at; go on with what came behind CONNECT."""
    if isinstance(found, Denial):
        deny(ingress, connection, packet, found)
        return
    _admit(ingress, connection, packet, found, ReasonCode.BAD_USER_NAME_OR_PASSWORD)
    if not connection.gone:
        connection.receive(b"", ingress.now())


def _admit(
    ingress: MqttIngress,
    connection: MqttConnection,
    packet: Connect,
    principal: Principal | None,
    otherwise: ReasonCode,
    proof: Mapping[Property, Any] = NO_PROPERTIES,
) -> None:
    """`otherwise`: why not, without a principal. `proof`: what the CONNACK says of an authentication."""
    if principal is None:
        refuse(ingress, connection, otherwise, "")
        return
    client_id = packet.client_id or ingress.new_client_id()
    rights = ingress.rights_of(principal, client_id)
    sender = Sender(ingress.name, client_id, principal.name, connection.stream.remote)
    try:
        refusal = _refusal(ingress, packet, rights, sender)
    except Undecided as question:
        again = partial(_admit_later, ingress, connection, packet, principal, otherwise, proof)
        ingress.decide(connection.stream, question, again)
        return
    if refusal is not None:
        refuse(ingress, connection, *refusal)
        return
    namespace, machine = ingress.namespace, connection.machine
    before = namespace.recorded
    ingress.take_over(client_id)  # a session that ends with its connection is not found any more
    present = client_id in namespace.sessions and not packet.clean_start
    expiry_max, offer = expiry_secs_max(ingress.limits, rights), ingress.offer_to(rights)
    properties = connack_properties(packet, client_id, ingress.limits, ingress.options, offer, expiry_max)
    machine.send_connack(session_present=present, properties={**properties, **proof})
    if machine.state is not State.OPEN:  # it takes no packet as large as our CONNACK
        connection.stream.end("the client's Maximum Packet Size is too small")
        return
    ingress.stats.spoke(machine, packet.version.name.lower())
    connection.principal, connection.sender = principal, sender
    connection.current_rights()
    ingress.admit(connection, principal, rights, client_id)
    connection.will = packet.will
    session, _ = namespace.open(
        client_id,
        clean=packet.clean_start,
        expiry_secs=expiry_secs(packet, expiry_max),
        user=principal.name,
        place=place_of(connection.stream.remote),
    )
    if present and not rights.unlimited:
        drop_forbidden(ingress, session, rights, sender, patient=True)
    namespace.keep_will(client_id, packet.will, connection.sender)
    most = ingress.limits.inflight_max
    connection.open(session, min(packet.properties.get(Property.RECEIVE_MAXIMUM, most), most))
    connection.wait_for_commit(before)


def _admit_later(
    ingress: MqttIngress,
    connection: MqttConnection,
    packet: Connect,
    principal: Principal,
    otherwise: ReasonCode,
    proof: Mapping[Property, Any],
) -> None:
    """It is known what the client may do; go on with what came behind CONNECT."""
    _admit(ingress, connection, packet, principal, otherwise, proof)
    if not connection.gone and connection.session is not None:
        connection.receive(b"", ingress.now())
    connection.stream.mark()


def _refusal(
    ingress: MqttIngress, packet: Connect, rights: Rights, sender: Sender
) -> tuple[ReasonCode, str] | None:
    """Why a client who may connect cannot have the session that it asks for."""
    namespace, user, remote = ingress.namespace, sender.user, sender.address
    known = namespace.sessions.get(packet.client_id)
    if identifier_refused(packet):
        return ReasonCode.CLIENT_IDENTIFIER_NOT_VALID, "a client identifier is needed"
    if not rights.unlimited and (refused := _not_its_own(ingress, packet, rights, sender)) is not None:
        return refused
    alone = known is None or known.outlet is None  # or it takes another one's place
    if alone and (limit := ingress.place_refusal(rights, user, remote)):
        return ReasonCode.QUOTA_EXCEEDED, f"{limit} is reached"
    recorded = known is not None and known.kept and not packet.clean_start
    expires = expiry_secs(packet, expiry_secs_max(ingress.limits, rights))
    if namespace.failing and not recorded and expires > 0:
        return ReasonCode.QUOTA_EXCEEDED, "the gateway cannot store a session now"
    refused = None if packet.will is None else _will_refusal(ingress, packet.will, rights, sender)
    if refused is None and known is None:
        if rights.sessions_max and namespace.sessions_of(user) >= rights.sessions_max:
            return ReasonCode.QUOTA_EXCEEDED, "sessions_max of the user's roles is reached"
        if limit := namespace.make_room(user, place_of(remote)):
            return ReasonCode.QUOTA_EXCEEDED, f"limits.{limit} is reached"
    return refused


def _not_its_own(
    ingress: MqttIngress, packet: Connect, rights: Rights, sender: Sender
) -> tuple[ReasonCode, str] | None:
    """Where there are rules, an identifier may be bound to others, and a session is its user's alone: who
    resumed it would have what was subscribed to by another's right."""
    decision = rights.enters_mqtt()
    if not decision.allowed:
        ingress.denied(sender, "connect", MQTT.title, decision.rule)
        return ReasonCode.NOT_AUTHORIZED, "no rule allows anything here"
    if not packet.client_id:
        return None
    decision = rights.has_client_id(packet.client_id)
    if not decision.allowed:
        ingress.denied(sender, "client_id", packet.client_id, decision.rule)
        return ReasonCode.CLIENT_IDENTIFIER_NOT_VALID, "the client identifier is not the user's"
    known = ingress.namespace.sessions.get(packet.client_id)
    if known is not None and known.user != sender.user:
        ingress.denied(sender, "session", packet.client_id, "the session is another user's")
        return ReasonCode.NOT_AUTHORIZED, "the session is another user's"
    return None


def _will_refusal(
    ingress: MqttIngress, will: Will, rights: Rights, sender: Sender
) -> tuple[ReasonCode, str] | None:
    """Why a will cannot be taken (5: 3.2.2.2; [MQTT-3.2.2-12], [MQTT-3.2.2-13])."""
    offer = ingress.offer_to(rights)
    if will.qos > offer.qos_max:
        return ReasonCode.QOS_NOT_SUPPORTED, "the will's QoS is too high here"
    if will.retain and not offer.retain:
        return ReasonCode.RETAIN_NOT_SUPPORTED, "nothing is retained here"
    if will.properties.get(Property.PAYLOAD_FORMAT_INDICATOR) and not is_utf8(will.body):
        return ReasonCode.PAYLOAD_FORMAT_INVALID, "the will says that it is UTF-8, and is not"
    if len(will.body) > ingress.limits.message_bytes_max:
        return ReasonCode.PACKET_TOO_LARGE, "the will exceeds limits.message_bytes_max"
    if (refusal := topic_refusal(will.topic, ingress.limits.topic_levels_max)) is not None:
        return REASON_CODES[refusal.reason], f"the will's topic: {refusal.text}"
    if not rights.unlimited and not rights.mqtt.will:
        ingress.denied(sender, "will", will.topic, "mqtt.will: no will may be left")
        return ReasonCode.NOT_AUTHORIZED, "no will may be left"
    decision = ingress.may_publish(rights, topic_address(will.topic))
    if not decision.allowed:
        ingress.denied(sender, "will", will.topic, decision.rule)
        return ReasonCode.NOT_AUTHORIZED, "not allowed to publish to the will's topic"
    return None


def deny(ingress: MqttIngress, connection: MqttConnection, packet: Connect, why: Denial) -> None:
    """A login was wrong, or was not looked at."""
    ingress.logins.denied(connection.stream, packet.user_name or "", why, packet.client_id)
    reason, text = DENIALS[why]
    _turn_away(ingress, connection, reason, text)


def refuse(ingress: MqttIngress, connection: MqttConnection, reason: ReasonCode, text: str) -> None:
    """Say no to what a CONNECT asks for, and why."""
    assert connection.machine.connect is not None
    packet = connection.machine.connect
    ingress.tell_turned_away(packet, connection.stream.remote, reason, text)
    ingress.logins.turned_away(
        connection.stream, packet.user_name or "", reason.name.lower(), packet.client_id
    )
    _turn_away(ingress, connection, reason, text)


def _turn_away(ingress: MqttIngress, connection: MqttConnection, reason: ReasonCode, text: str) -> None:
    """Say no in a CONNACK, and close."""
    ingress.stats.refused.add(reason.name.lower())
    machine = connection.machine
    properties = {Property.REASON_STRING: text} if text and machine.version == Version.V5 else {}
    machine.send_connack(reason=reason, properties=properties)
    connection.stream.end(f"CONNECT refused: {reason.name.lower()}")
