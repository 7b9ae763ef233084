"""Admission of AMQP 0-9-1 clients: authentication, choice of the virtual host, permission checks.

`AmqpAdmissionSource` is the listener's part and `HandshakingAmqpClient` the connection's. Both are shared by
listeners with an embedded broker and by listeners in front of a cluster. A client authenticates with a
password (PLAIN or AMQPLAIN), a token or a certificate (EXTERNAL), opens a virtual host, and may then be
checked against its rights, which are rechecked when the rules change. Channels and queues are not handled
here.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any, Final, NoReturn

import structlog
from mypy_extensions import mypyc_attr

from gateway.access.authorization import CurrentRights
from gateway.access.backends import Denial
from gateway.access.credentials import Credentials
from gateway.access.principal import Principal
from gateway.access.rights import DEFAULT_EXCHANGE, Rights
from gateway.access.tokens import Tokens
from gateway.broker.amqp091.refusals import access_refused
from gateway.broker.shares import argument_bytes
from gateway.errors import RemoteProtocolError
from gateway.ingress.amqp091.server_properties import server_properties
from gateway.ingress.client import NegotiatedValues
from gateway.ingress.clients import IngressClients
from gateway.ingress.handshake import HandshakingClient
from gateway.ingress.logins import certificate_of
from gateway.ingress.services import Services
from gateway.ingress.source import ListenerSource
from gateway.model.message import Sender
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import EXTERNAL
from gateway.protocols.amqp091.events import Authenticate, Open
from gateway.protocols.amqp091.server import ServerConnection
from gateway.protocols.amqp091.spec import ReplyCode
from gateway.protocols.amqp091.table import decode_fields, plain
from gateway.settings import AmqpListener
from gateway.transport.stream import Stream

log = structlog.get_logger(limited=True)

WHY: Final = {
    Denial.WRONG: "the name or password is wrong, or guest connected from another machine",
    Denial.EXPIRED: "the token has expired",
    Denial.UNAVAILABLE: "authentication is temporarily unavailable",
    Denial.REFUSED: "too many failed logins",
    Denial.BUSY: "too many logins are waiting",
}
"""Reasons in the log for a failed login."""
VERSION: Final = "0-9-1"


@mypyc_attr(allow_interpreted_subclasses=True)
class AmqpAdmissionSource(ListenerSource):
    """Interface of an AMQP 0-9-1 listener to the handshake of its clients.

    It has the SASL mechanisms, the server-properties and the names of the virtual hosts.
    """

    def __init__(self, name: str, services: Services, ingress_clients: IngressClients) -> None:
        super().__init__(name, services, ingress_clients)
        options = services.settings.listeners[name]
        assert isinstance(options, AmqpListener)
        tls = options.tls
        certificates = tls is not None and tls.client_ca_file is not None
        if options.proxy_protocol == "required" and self.access.reads_certificates:
            certificates = True  # the balancer forwards the client's certificate
        self.mechanisms = "PLAIN AMQPLAIN EXTERNAL" if certificates else "PLAIN AMQPLAIN"
        self.server_properties = server_properties(options.announce)
        self.host_names = options.virtual_hosts

    @staticmethod
    def credentials(mechanism: str, response: bytes) -> tuple[str, bytes] | None:
        """Return user and password of a SASL response (PLAIN or AMQPLAIN), or None if it is malformed."""
        if mechanism == "PLAIN":
            parts = response.split(b"\0")
            if len(parts) != 3:
                return None
            return parts[1].decode(errors="replace"), parts[2]
        try:
            table = plain(decode_fields(response))
        except RemoteProtocolError:
            return None
        login, password = table.get("LOGIN"), table.get("PASSWORD")
        if not isinstance(login, str) or not isinstance(password, str):
            return None
        return login, password.encode()

    def report_refused(self, remote: str, text: str) -> None:
        """Log that a client was refused before it entered a virtual host; `text` is the reason."""
        log.warning("client refused by AMQP listener", listener=self.name, remote=remote, error=text)

    def report_closed(self, remote: str, text: str, *, channel: bool) -> None:
        """Log that the gateway closed a client's channel (`channel` True) or connection, and why (`text`)."""
        if channel:
            log.warning(
                "client channel closed by AMQP listener", listener=self.name, remote=remote, error=text
            )
        else:
            log.warning(
                "client connection closed by AMQP listener", listener=self.name, remote=remote, error=text
            )


@mypyc_attr(allow_interpreted_subclasses=True)
class HandshakingAmqpClient(HandshakingClient[ServerConnection]):
    """AMQP 0-9-1 connection of a client during its handshake, and its permission checks afterwards."""

    def __init__(
        self, source: AmqpAdmissionSource, stream: Stream, machine: ServerConnection, now: float
    ) -> None:
        self.stream = stream
        self.machine = machine
        self.sender = Sender(source.name)
        self.principal: Principal | None = None
        self.hears_cancel = False
        self.host_name = source.host_names[0]  # until connection.open names another
        self._source = source
        self._hears_denial = False
        self._hears_blocked = False
        self._deadline = now + source.limits.connect_timeout_secs
        self._current_rights = CurrentRights(source.authorization)
        self.client_properties: dict[str, Any] = {}
        self.client_properties_bytes = 0
        self._ready = False

    @abstractmethod
    def _set_up_client(self) -> None:
        """Set up the admitted client and send connection.open-ok."""

    @abstractmethod
    def _close_with(self, code: int, text: str, class_id: int = 0, method_id: int = 0) -> None:
        """Close the connection with this reply code and text, and close its channels.

        `class_id` and `method_id` identify the method that caused the error; 0 means none.
        """

    @abstractmethod
    def _recheck(self) -> None:
        """Close the channels that use something that the rules now forbid.

        Raises Pending if a permission decision is pending.
        """

    @property
    def virtual_host(self) -> str:
        """Name of the client's virtual host; before connection.open, the listener's first."""
        return self.host_name

    def negotiated(self) -> NegotiatedValues:
        """Return the client properties and the negotiated frame-max, channel-max and heartbeat."""
        machine = self.machine
        return NegotiatedValues(
            self.client_properties, machine.frame_max, machine.channel_max, machine.heartbeat
        )

    # Permissions.

    @property
    def rights(self) -> Rights:
        """Rights of the client under the current rules."""
        return self._current_rights.of(self.principal)

    def check(self, permission: str, kind: str, name: str) -> None:
        """Check the permission `configure`, `write` or `read` on an exchange or queue.

        `kind` is "exchange" or "queue", `name` its name. Raises AmqpRefused 403 with RabbitMQ's text if the
        permission is not granted.
        """
        rights = self.rights
        if rights.unlimited:
            return
        name = name or DEFAULT_EXCHANGE
        decision = rights.amqp(self.host_name, permission, name, kind)
        if not decision.allowed:
            resource = f"{kind} '{name}' in vhost '{self.host_name}'"
            self._refuse_access(permission, resource, decision.rule)

    def check_topic(self, permission: str, exchange: str, key: str | None) -> None:
        """Check the permission `write` or `read` for a routing key of a topic exchange.

        `key` None stands for all routing keys. Raises AmqpRefused 403 if the permission is not granted.
        """
        rights = self.rights
        if rights.unlimited:
            return
        decision = rights.amqp_key(self.host_name, permission, exchange, key)
        if not decision.allowed:
            topic = "every topic" if key is None else f"topic '{key}'"
            resource = f"{topic} in exchange '{exchange}' in vhost '{self.host_name}'"
            self._refuse_access(permission, resource, decision.rule)

    def _refuse_access(self, permission: str, resource: str, rule: str) -> NoReturn:
        """Log that `rule` denies this permission on `resource`, and raise AmqpRefused 403."""
        self._source.record_denial(self.sender, permission, resource, rule)
        raise access_refused(f"access to {resource} refused for user '{self.sender.user}'")

    def rules_changed(self) -> None:
        """Recheck the client after a change of the access rules.

        Close the connection if the client may not enter its virtual host any more. Otherwise close the
        channels that use something that is now forbidden.
        """
        if not self._ready or self.machine.closed:
            return
        decision = self.rights.enters_amqp(self.host_name)
        if decision.allowed:
            self._recheck()
        else:
            self._source.record_denial(self.sender, "connect", f"vhost '{self.host_name}'", decision.rule)
            refusal = f"access to vhost '{self.host_name}' refused for user '{self.sender.user}'"
            text = f"ACCESS_REFUSED - {refusal}"
            self._report(ReplyCode.ACCESS_REFUSED, text)
            self._close_with(ReplyCode.ACCESS_REFUSED, text)
        self.stream.mark_for_flush()

    def _report(self, code: int, text: str, *, channel: bool = False) -> None:
        """Count and log an error that closes the connection, or only a channel (`channel` True).

        `code` is the reply code; 0 means that the client did not send an AMQP 0-9-1 header.
        """
        try:
            word = ReplyCode(code).name.lower()
        except ValueError:
            word = "other" if code else "protocol_header"
        self._source.stats.protocol_errors.add(word)
        if self._ready:
            self._source.report_closed(self.stream.remote, text, channel=channel)
        else:
            self._source.report_refused(self.stream.remote, text)

    def _in_time(self, now: float) -> bool:
        """Send and check heartbeats, and enforce the handshake timeout.

        Return False if the connection was aborted. `now` is in loop-clock seconds.
        """
        if not self._ready and now >= self._deadline:
            self._source.stats.protocol_errors.add("connect_timeout")
            self.stream.abort("the handshake timed out")
            return False
        self.machine.tick(now)
        if not self.stream.listening:
            self.machine.excuse(now)
        elif self.machine.timed_out(now):
            self._source.stats.protocol_errors.add("heartbeat_timeout")
            self.stream.abort("heartbeat timeout")
            return False
        return True

    # Authentication.

    def _authenticate(self, event: Authenticate) -> None:
        """Verify the client by its SASL response: certificate, password or token.

        The client is admitted or denied at once, or when the verification of a password or token is complete.
        """
        self.client_properties = plain(event.client_properties)
        self.client_properties_bytes = argument_bytes(event.client_properties)
        capabilities = self.client_properties.get("capabilities")
        if not isinstance(capabilities, dict):
            capabilities = {}
        self.hears_cancel = bool(capabilities.get("consumer_cancel_notify"))
        self._hears_denial = bool(capabilities.get("authentication_failure_close"))
        self._hears_blocked = bool(capabilities.get("connection.blocked"))
        logins = self._source.logins
        if event.mechanism == EXTERNAL:
            certificate = certificate_of(self.stream)
            credentials = Credentials("", b"", self.stream.remote, certificate)
            certified = self._source.access.certificate_principal(credentials)
            if certified is None:
                names = {} if certificate is None else certificate.names
                logins.audit_refusal(self.stream, names.get("common_name", ""), "certificate", proved=True)
                self._deny(event.mechanism, "no user has the name of the certificate")
            else:
                self._admit(certified)
            return
        pair = self._source.credentials(event.mechanism, event.response)
        if pair is None:
            logins.audit_refusal(self.stream, "", "malformed")
            self._deny(event.mechanism, f"{event.mechanism} response cannot be read")
            return
        credentials = logins.credentials(self.stream, *pair)
        principal = self._source.access.verify_nowait(credentials)
        if principal is not None:
            self._admit(principal)
        else:
            logins.verify(
                self.stream, credentials, partial(self._verified, event.mechanism, credentials.user)
            )

    def _verified(self, mechanism: str, user: str, found: Principal | Denial) -> None:
        """Admit or deny the client by its verification's result (`found`), then process further input."""
        if isinstance(found, Denial):
            self._source.logins.log_denied(self.stream, user, found)
            self._deny(mechanism, WHY[found])
        else:
            self._admit(found)
            self.receive(b"", self._source.now())

    def _update_secret(self, method: m.ConnectionUpdateSecret) -> None:
        """Process connection.update-secret: verify the client's new token.

        A password is not checked, as in RabbitMQ, because it does not expire.
        """
        principal = self.principal
        if principal is None or principal.backend != Tokens.kind:
            self.machine.send_method(0, m.ConnectionUpdateSecretOk())
            return
        logins = self._source.logins
        credentials = logins.credentials(self.stream, principal.name, method.new_secret, backend=Tokens.kind)
        found = self._source.access.verify_nowait(credentials)
        if found is not None:
            self._apply_new_secret(found)
        else:
            logins.verify(self.stream, credentials, self._apply_new_secret)

    def _apply_new_secret(self, found: Principal | Denial) -> None:
        """Use the identity of the verified token, or close the connection with 530 if it was refused."""
        before = self.principal
        assert before is not None, "update-secret is only valid on an open connection"
        if isinstance(found, Principal) and found.name == before.name:
            self.principal = found
            self._source.register_renewal(self, found)
            self.machine.send_method(0, m.ConnectionUpdateSecretOk())
            self._current_rights.forget()
            self._source.recheck(self)
        else:
            why = found if isinstance(found, Denial) else Denial.WRONG
            self._source.logins.log_denied(self.stream, before.name, why, self.sender.client)
            self._report(ReplyCode.NOT_ALLOWED, WHY[why])
            text = "NOT_ALLOWED - New secret was refused by one of the backends"
            self._close_with(ReplyCode.NOT_ALLOWED, text, 10, 70)
        self.stream.mark_for_flush()

    def _deny(self, mechanism: str, why: str) -> None:
        """Refuse the login by the SASL mechanism `mechanism`, and log the reason `why`.

        A client with the capability `authentication_failure_close` gets reply code 403. The stream of other
        clients is closed.
        """
        self._source.stats.refused.add("access_refused")
        self._source.report_refused(self.stream.remote, why)
        if not self._hears_denial:
            self.stream.end("login refused")
            return
        self.machine.close(
            ReplyCode.ACCESS_REFUSED,
            f"ACCESS_REFUSED - Login was refused using authentication mechanism {mechanism}."
            " For details see the broker logfile.",
        )
        self.stream.mark_for_flush()

    def _admit(self, principal: Principal) -> None:
        """Register the authenticated user and continue the handshake with connection.tune.

        The connection's name is cut to limits.client_id_bytes_max characters, because a copy is stored with
        each of the client's messages and does not count against any memory limit.
        """
        self.principal = principal
        self._source.logins.count_accepted()
        name = self.client_properties.get("connection_name", "")
        client = name[: self._source.limits.client_id_bytes_max] if isinstance(name, str) else ""
        self.sender = Sender(self._source.name, client, principal.name, self.stream.remote)
        self.machine.authenticated()
        self.stream.mark_for_flush()

    def _open(self, event: Open) -> None:
        """Process connection.open: check virtual host, permission to enter and connection limit.

        Close the connection with 530 if a check fails.
        """
        source, principal, host = self._source, self.principal, event.virtual_host
        assert principal is not None, "who opens has said who it is"
        if host not in source.host_names:
            source.logins.audit_refusal(
                self.stream, principal.name, "virtual_host", self.sender.client, proved=True
            )
            self.machine.close(ReplyCode.NOT_ALLOWED, f"NOT_ALLOWED - vhost {host} not found", 10, 40)
            return
        decision = self.rights.enters_amqp(host)
        if not decision.allowed:
            source.record_denial(self.sender, "connect", f"vhost '{host}'", decision.rule)
            text = f"NOT_ALLOWED - access to vhost '{host}' refused for user '{self.sender.user}'"
            self.machine.close(ReplyCode.NOT_ALLOWED, text, 10, 40)
            return
        if source.admit_client(self, principal, self.rights, self.sender.client, VERSION):
            text = f"NOT_ALLOWED - connection refused for user '{self.sender.user}': user connection limit"
            self.machine.close(ReplyCode.NOT_ALLOWED, f"{text} is reached", 10, 40)
            return
        self.host_name = host
        self._set_up_client()

    def _welcome(self) -> None:
        """Send connection.open-ok, and start heartbeats and statistics."""
        self._ready = True
        self.machine.opened()
        self._source.tick_faster(self, self.machine.heartbeat)
        self._source.stats.set_version(self.machine, VERSION)
