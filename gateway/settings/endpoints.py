"""Common options of endpoints: listeners, where clients connect, and links to remote brokers.

`ListenerSettings` and `LinkSettings` are the base classes; each protocol extends them in a module of its own.
The module also parses broker URLs (`parse_url`), hides passwords in them (`masked_url`), reads secret files
and checks shared ports. It opens no connection.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from pydantic import (
    AfterValidator,
    Field,
    PlainSerializer,
    SecretStr,
    Strict,
    field_serializer,
    model_validator,
)

from gateway.documents import suggestion
from gateway.errors import MASK, ConfigurationError, without_users
from gateway.protocols import DIALECTS
from gateway.settings.front import FrontOptions, Origin
from gateway.settings.limits import Limits, Section

Admission = Literal["loopback", "always", "never"]
FilePath = Annotated[Path, Strict(False)]
Port = Annotated[int, Field(ge=0, le=65_535)]

SHARED: Final = "shared"
"""Protocol name of a listener that is one port for several other listeners."""
UNFIT_FOR_HOST: Final = re.compile(r"[\s\x00-\x1f\x7f\"<>\\^`{|},;?#/@]")
DROPPED: Final = "\t\r\n"  # Characters that the standard library removes from URLs.
SCHEMES: Final = {scheme.name: (one, scheme) for one in DIALECTS.values() for scheme in one.schemes}
WEBSOCKET_PORTS: Final = {"websocket": 80, "websocket+tls": 443}  # RFC 6455, 3
WEBSOCKET_PATH: Final = "/mqtt"
QUOTED: Final = "in a password write # as %23, ? as %3F, / as %2F, @ as %40, : as %3A and % as %25"


def secret_from(path: Path) -> str:
    """Read a file that contains a secret. Return its text without the line end.

    Raises ConfigurationError if the file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"{path}: secret cannot be read: {why}") from error


def _refuse_port(host: str) -> str:
    if re.fullmatch(r"([^:]*|\[.*\]):\d*", host):
        name, _, port = host.rpartition(":")
        raise ValueError(f"an address without a port: write host: {name or '::'} and port: {port or 0}")
    return host


Host = Annotated[str, AfterValidator(_refuse_port)]


class ListenerTls(Section):
    """TLS of a listener: certificate, and verification of client certificates.

    Files are PEM and are read again when they change.
    """

    cert_file: FilePath
    """Certificate with its chain, PEM."""
    key_file: FilePath
    """Private key of `cert_file`."""
    client_ca_file: FilePath | None = None
    """File of certificate authorities. Clients must present a certificate that one of them signed. Absent:
    clients are not asked for one."""
    crl_file: FilePath | None = None
    """With `client_ca_file`: certificate revocation lists of these authorities. A certificate that its
    authority's list revokes is refused; all certificates are refused while that list is missing or has
    expired."""
    client_certificate: Literal["required", "optional"] = "required"
    """With `client_ca_file`: `optional` lets clients without a certificate connect as well."""

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.client_certificate == "optional" and self.client_ca_file is None:
            raise ValueError("client_certificate needs client_ca_file")
        if self.crl_file is not None and self.client_ca_file is None:
            raise ValueError("crl_file needs client_ca_file")
        return self

    @property
    def client_certificate_policy(self) -> tuple[Path | None, Path | None, str]:
        """Values of the three options `client_ca_file`, `crl_file` and `client_certificate`."""
        return self.client_ca_file, self.crl_file, self.client_certificate


class LinkTls(Section):
    """TLS of a link. Files are PEM.

    TLS is used if the scheme of the link's URL ends in `s`, such as `mqtts`.
    """

    ca_file: FilePath | None = None
    """File of certificate authorities that the broker's certificate is checked against. Absent: those of the
    system."""
    cert_file: FilePath | None = None
    """Certificate of the gateway, for brokers that require one."""
    key_file: FilePath | None = None
    """Private key of `cert_file`."""
    verify: bool = True
    """True if the broker's certificate is verified. False accepts any certificate and is for a laboratory
    only."""

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("set both cert_file and key_file, or neither")
        return self


class ListenerSettings(FrontOptions):
    """Listener: a port where clients of one protocol connect.

    This base class has the options that all protocols have.
    """

    protocol: str = Field(json_schema_extra={"enum": [*DIALECTS, SHARED]})
    """Protocol of the clients; `shared` is one port for several other listeners, which `shares` names."""
    host: Host = "::"
    """Address to bind. `::` is all IPv4 addresses and, where the machine has it, all IPv6 addresses;
    `0.0.0.0` is IPv4 alone."""
    port: Port = Field(0, json_schema_extra={"default": None})
    """Port to bind. Absent: the protocol's standard port; `shared` has none. 0: any free port."""
    tls: ListenerTls | None = None
    """TLS of the listener. Absent: no TLS."""
    limits: Limits | None = None
    """Overrides of `limits` for connections of this listener. Limits of shared objects (queues, sessions)
    follow the top level."""

    @model_validator(mode="before")
    @classmethod
    def _own_port(cls, value: Any) -> Any:
        """Return the configuration of a listener, with the protocol's standard port if it sets no port.

        The standard port depends on TLS and WebSocket.
        """
        if not isinstance(value, dict) or value.get("port") is not None:
            return value
        way = "+".join(word for word in ("websocket", "tls") if value.get(_SAYS[word])) or "plain"
        dialect = DIALECTS.get(value.get("protocol", ""))
        port = None if dialect is None else dialect.port(way)
        return value if port is None else value | {"port": port}

    @field_serializer("limits")
    def _only_overrides(self, limits: Limits | None) -> dict[str, Any] | None:
        return None if limits is None else limits.model_dump(exclude_unset=True)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the listener's virtual hosts. Routes of mapping files apply only to the first one."""
        return ("/",)


_SAYS: Final = {"websocket": "websocket_path", "tls": "tls"}


class AnonymousListener(ListenerSettings):
    """Listener of a protocol that permits clients without a user name."""

    anonymous: Admission = "loopback"
    """Admission of clients without a name and password. MQTT clients with an empty user name count as such;
    and without `users` every name but `guest` does."""


class WebListener(ListenerSettings):
    """Listener of a protocol that also runs over WebSocket, with the options for it."""

    websocket_path: str | None = Field(None, pattern=r"^/[!-~]*$")
    """Path at which the listener accepts WebSocket connections, instead of plain TCP."""
    websocket_origins: Annotated[tuple[Origin, ...] | None, Strict(False)] = None
    """Origins of web pages that may connect (`https://app.example.com`). Absent: any, but for a page of
    another machine the client counts as remote, also for `anonymous` and `guest`, even when the browser runs
    on this machine. Clients other than browsers send no origin and are not checked."""

    @model_validator(mode="after")
    def _origins_of_a_path(self) -> Self:
        if self.websocket_origins is not None and self.websocket_path is None:
            raise ValueError("websocket_origins needs websocket_path")
        return self


class SharedListener(ListenerSettings):
    """Port that several listeners share; the first bytes of a connection select the listener."""

    shares: Annotated[tuple[str, ...], Strict(False)] = Field(min_length=1)
    """Names of the listeners whose clients may also connect to this port. The first bytes of a connection
    select the listener, so each protocol may occur once, and WebSocket once for each path. With `tls`,
    clients may connect with and without TLS."""

    @model_validator(mode="before")
    @classmethod
    def _check_port(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("port") is None:
            raise ValueError(f"protocol {SHARED} has no standard port: set port")
        return value


def check_shares(listeners: Mapping[str, ListenerSettings]) -> None:
    """Check the shared ports in a configuration.

    Raises ValueError, which names the configuration key, if the first bytes of a connection do not select
    exactly one listener, or if clients could avoid the TLS that a listener requires at its own port.
    """
    for name, port in listeners.items():
        by_protocol: dict[str, str] = {}
        for other in port.shares if isinstance(port, SharedListener) else ():
            at = f"listeners.{name}.shares"
            one = listeners.get(other)
            if one is None or isinstance(one, SharedListener):
                raise ValueError(f"{at}: {_not_shareable(other, listeners)}")
            path = websocket_path(one)
            spoken = one.protocol if path is None else f"WebSocket at {path}"
            if (first := by_protocol.setdefault(spoken, other)) != other:
                raise ValueError(f"{at}: {first} and {other} both use {spoken}; name one of them")
            if one.tls is not None and (
                port.tls is None or port.tls.client_certificate_policy != one.tls.client_certificate_policy
            ):
                raise ValueError(
                    f"{at}: {other} needs TLS; set listeners.{name}.tls with the same client_ca_file"
                )


def websocket_path(listener: ListenerSettings) -> str | None:
    """Return the path at which a listener accepts WebSocket connections, or None without WebSocket."""
    return listener.websocket_path if isinstance(listener, WebListener) else None


def _not_shareable(name: str, listeners: Mapping[str, ListenerSettings]) -> str:
    """Return an error text that states why a listener of this name cannot be shared, and suggests another."""
    known = [one for one, given in listeners.items() if not isinstance(given, SharedListener)]
    fault = "itself a shared port" if name in listeners else "not a listener"
    return f"{name!r} is {fault}{suggestion(name, known)}"


class LinkUrl(NamedTuple):
    """Parsed URL of a broker.

    `username` and `password` are "" if the URL has none. `virtual_host` is an AMQP virtual host. `websocket`
    is the path and query of MQTT over WebSocket, and "" without WebSocket.
    """

    protocol: str
    tls: bool
    host: str
    port: int
    virtual_host: str
    username: str
    password: str
    websocket: str = ""


def parse_url(url: str) -> LinkUrl:
    """Parse the URL of a broker.

    Raises ValueError, which explains the correct notation, for an invalid URL.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # The text of this error may contain a password.
        raise ValueError(f"not a URL; {QUOTED}") from None
    if parts.scheme not in SCHEMES:
        raise ValueError(
            f"a broker's URL must begin with one of {', '.join(f'{name}://' for name in SCHEMES)}"
        )
    if not parts.hostname:
        raise ValueError(f"the URL has no host; write {parts.scheme}://host:port")
    if UNFIT_FOR_HOST.search(unquote(parts.hostname)) or any(one in url for one in DROPPED):
        raise ValueError(f"the host in the URL has a space or another invalid character; {QUOTED}")
    if parts.fragment or url.endswith("#"):
        raise ValueError(f"the URL has a #; {QUOTED}")
    dialect, scheme = SCHEMES[parts.scheme]
    username, password = unquote(parts.username or ""), unquote(parts.password or "")
    port = port_of(parts) or WEBSOCKET_PORTS.get(scheme.transport) or scheme.port
    path, websocket = unquote(parts.path[1:]), ""
    if scheme.transport in WEBSOCKET_PORTS:
        websocket = (parts.path or WEBSOCKET_PATH) + (f"?{parts.query}" if parts.query else "")
        path = ""
    elif parts.query:
        raise ValueError(f"the URL has a query after ?: set its values as options of the link; {QUOTED}")
    elif path and not dialect.has_virtual_hosts:
        raise ValueError(
            f"the URL of an {dialect.title} broker must not have a path, except with ws:// or wss://"
        )
    tls = scheme.transport.endswith("tls")
    return LinkUrl(dialect.name, tls, parts.hostname, port, path or "/", username, password, websocket)


def address_of(target: LinkUrl) -> str:
    """Return the address of a broker as `host:port`, with an IPv6 address in brackets."""
    host = f"[{target.host}]" if ":" in target.host else target.host
    return f"{host}:{target.port}"


def port_of(parts: SplitResult) -> int | None:
    """Return the port in a URL, or None if the URL has no port.

    Raises ValueError for an invalid port. The error does not quote the port, which may be part of a password.
    """
    try:
        return parts.port
    except ValueError:
        raise ValueError(f"the port in the URL must be a number up to 65535; {QUOTED}") from None


def masked_url(url: str) -> str:
    """Return a URL with its password and its query replaced by a mask.

    A query may contain a signature, which is a secret, too.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return without_users(url)
    netloc = parts.netloc
    if "@" not in netloc and "@" in url:  # A character of the password has ended the authority.
        return without_users(url)
    if parts.password is not None:
        user, _, place = netloc.rpartition("@")
        netloc = f"{user.partition(':')[0]}:{MASK}@{place}"
    query = parts.query and MASK
    return urlunsplit(SplitResult(parts.scheme, netloc, parts.path, query, parts.fragment))


MaskedUrl = Annotated[str, PlainSerializer(masked_url, when_used="json")]
"""URL whose password and query are masked in JSON, in which the configuration is shown."""


class OutboxSettings(Section):
    """Limits of the messages that wait for a link in one outbox.

    Each route to the link with `settle: stored` has an outbox of its own. A route can override these limits
    by options of the same names.
    """

    messages_max: int = Field(1_000_000, ge=1)
    """Messages that wait; messages on their way to the broker do not count."""
    bytes_max: int = Field(1024 * 1024 * 1024, ge=1)
    """Bytes of waiting messages: bodies, properties, and 256 bytes for each message."""
    age_secs_max: float | None = Field(None, gt=0)
    """Longest time in seconds that a message may wait. Absent: no limit."""
    policy: Literal["reject", "drop_oldest", "dead_letter"] = "reject"
    """Policy at a limit: `reject` refuses new messages, `drop_oldest` drops the oldest, `dead_letter` turns
    the oldest into dead letters."""
    shared: bool = False
    """True if the outboxes are queues of the cluster, which any replica drains. Needs `engine: rabbitmq`;
    `age_secs_max` then needs `policy: drop_oldest` or `dead_letter`."""

    @model_validator(mode="after")
    def _of_a_queue(self) -> Self:
        if self.shared and self.age_secs_max is not None and self.policy == "reject":
            raise ValueError(
                "age_secs_max of a shared outbox needs policy: drop_oldest or dead_letter, because a queue"
                " cannot refuse new messages when old ones expire"
            )
        return self


class Remote(Section):
    """Remote broker: its addresses, credentials, timeouts, and limits of messages in flight.

    This is the base class of links and of the RabbitMQ engine.
    """

    url: MaskedUrl | None = None
    """URL of the broker: `amqps://user@host:port/virtual-host`, `mqtts://user@host:port`,
    `wss://user@host:port/path` or `amqpfasts://user@host:port/virtual-host`."""
    urls: Annotated[tuple[MaskedUrl, ...], Strict(False)] = ()
    """Further URLs of the same protocol, for nodes of one cluster. They are tried in turn when a connection
    fails."""
    username: str | None = None
    """User name, instead of the URL's. AMQP uses `guest` if neither names a user."""
    password: SecretStr | None = None
    """Password, instead of the URL's. For a laboratory: secrets belong in files."""
    password_file: FilePath | None = None
    """File with the password, read at every connection, so that a rotated secret takes effect."""
    tls: LinkTls = LinkTls()
    """TLS options; TLS is in use when the scheme ends in `s`."""
    prefetch: int = Field(1_000, ge=1, le=65_535)
    """Unsettled messages that the broker may send to the gateway."""
    in_flight_max: int = Field(10_000, ge=1)
    """Published messages that the broker has not confirmed; further messages wait in the gateway, within
    `limits`."""
    heartbeat_secs: int = Field(30, ge=0, le=65_535)
    """MQTT keep-alive or AMQP heartbeat in seconds. 0 disables it; a dead peer is then not noticed."""
    connect_timeout_secs: float = Field(10.0, gt=0)
    """Longest time in seconds to connect and authenticate."""
    reconnect_min_secs: float = Field(0.5, gt=0)
    """First wait in seconds after a failure; it doubles with each failure, with jitter."""
    reconnect_max_secs: float = Field(30.0, gt=0)
    """Longest wait in seconds between two attempts."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Check that the URLs, the password and the reconnect times fit together. Raises ValueError."""
        targets = [parse_url(url) for url in self.all_urls]
        if not targets:
            raise ValueError("set url or urls, the address of the broker")
        if len({target.protocol for target in targets}) > 1:
            raise ValueError("all urls of a link must have the same protocol")
        dialect = DIALECTS[targets[0].protocol]
        if not dialect.link:
            raise ValueError(f"the gateway has no links to {dialect.title} brokers, only listeners")
        if len({(target.host, target.port) for target in targets}) < len(targets):
            raise ValueError("the urls name the same host and port twice")
        stated = any(target.password for target in targets)
        if stated + (self.password is not None) + (self.password_file is not None) > 1:
            raise ValueError("set the password once: in the url, as password, or in password_file")
        if self.reconnect_min_secs > self.reconnect_max_secs:
            raise ValueError("reconnect_min_secs must not be greater than reconnect_max_secs")
        return self

    @property
    def all_urls(self) -> tuple[str, ...]:
        """URLs of the broker in the order in which they are tried, `url` first."""
        return (*(() if self.url is None else (self.url,)), *self.urls)

    @property
    def protocol(self) -> str:
        """Name of the link's protocol, which is derived from the scheme of its first URL."""
        return parse_url(self.all_urls[0]).protocol

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the broker in the order of its URLs, each as `host:port`."""
        return tuple(address_of(parse_url(url)) for url in self.all_urls)

    def target(self, at: int = 0) -> LinkUrl:
        """Return address and credentials of the broker for one of its URLs, the one with the index `at`.

        The password is read from `password_file` if that is set. Raises ConfigurationError if it cannot be
        read.
        """
        target = parse_url(self.all_urls[at])
        password = target.password
        if self.password is not None:
            password = self.password.get_secret_value()
        elif self.password_file is not None:
            password = secret_from(self.password_file)
        return target._replace(username=self.username or target.username, password=password)


class LinkSettings(Remote):
    """Link: connection from the gateway, as a client, to one remote broker.

    This base class has the options that all protocols have.
    """

    client_id: str = Field("gateway-{replica}", min_length=1)
    """MQTT client identifier, AMQP connection name or AMQP/Fast client-name. `{replica}` is the name of this
    process."""
    connections: Literal[1, 2] = 1
    """Number of connections. With 2, one consumes and one publishes (with `-out` appended to its
    `client_id`): a broker that is overloaded and stops reading publishes still receives acknowledgements of
    consumed messages."""
    elected: bool = False
    """True if one replica alone consumes over this link; another one takes over when that replica stops.
    Every replica publishes over a connection of its own, as with `connections: 2`. Needs `engine: rabbitmq`,
    which elects the replica."""
    elected_timeout_secs: float = Field(20.0, gt=0)
    """Time in seconds that an elected replica which cannot reach the broker keeps the link before another
    replica tries."""
    required: bool = False
    """True if `/readyz` reports ready only while this link is connected."""
    retry_secs_max: float | None = Field(None, gt=0)
    """Longest time in seconds that a message from this broker waits, unacknowledged, while its target refuses
    it for now. Then it becomes a dead letter (reason `expired`) and is acknowledged. Absent: no limit."""
    outbox: OutboxSettings = OutboxSettings()
    """Bounds of the outboxes of routes with `settle: stored`."""

    @property
    def proves_password(self) -> bool:
        """True if the link proves that it knows the password without sending it (SCRAM)."""
        return False

    def divides(self, queue: str | None) -> bool:
        """Return True if each message reaches only one of the replicas that consume over this link.

        `queue` is the queue from which the replicas consume; None stands for another source, such as a topic.
        """
        return True
