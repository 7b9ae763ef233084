"""Endpoints: listeners, where clients connect to us, and links, our connections to remote brokers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from pydantic import Field, SecretStr, Strict, field_serializer, model_validator

from gateway.documents import suggestion
from gateway.errors import MASK, ConfigurationError, without_users
from gateway.protocols import DIALECTS
from gateway.settings.front import FrontOptions, Origin
from gateway.settings.limits import Limits, Section

Admission = Literal["loopback", "always", "never"]
FilePath = Annotated[Path, Strict(False)]
Port = Annotated[int, Field(ge=0, le=65_535)]

SHARED: Final = "shared"
"""Instead of a protocol's name: one port for several other listeners."""
UNFIT_FOR_HOST: Final = re.compile(r"[\s\x00-\x1f\x7f\"<>\\^`{|},;?#/@]")
DROPPED: Final = "\t\r\n"  # characters that the standard library takes out of URLs
SCHEMES: Final = {scheme.name: (one, scheme) for one in DIALECTS.values() for scheme in one.schemes}
WEBSOCKET_PORTS: Final = {"websocket": 80, "websocket+tls": 443}  # RFC 6455, 3
WEBSOCKET_PATH: Final = "/mqtt"
QUOTED: Final = "in a password write # as %23, ? as %3F, / as %2F, @ as %40, : as %3A and % as %25"


def secret_from(path: Path) -> str:
    """The text of a secret's file without its line end; raises ConfigurationError."""
    try:
        return path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"{path}: this secret cannot be read: {why}") from error


class ListenerTls(Section):
    """TLS of a listener. Files are PEM and are read again when they change."""

    cert_file: FilePath
    """PEM: certificate with its chain."""
    key_file: FilePath
    """Private key of the certificate."""
    client_ca_file: FilePath | None = None
    """Clients must show a certificate that one of these authorities signed; absent: none is asked for."""
    crl_file: FilePath | None = None
    """With `client_ca_file`: certificate revocation lists of these authorities. A certificate that its
    authority's list revokes is refused; all are while that list is missing or has expired."""
    client_certificate: Literal["required", "optional"] = "required"
    """With `client_ca_file`: whether clients without a certificate may connect, too."""

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.client_certificate == "optional" and self.client_ca_file is None:
            raise ValueError("client_certificate needs client_ca_file")
        if self.crl_file is not None and self.client_ca_file is None:
            raise ValueError("crl_file needs client_ca_file")
        return self

    @property
    def asked(self) -> tuple[Path | None, Path | None, str]:
        """What is asked of clients."""
        return self.client_ca_file, self.crl_file, self.client_certificate


class LinkTls(Section):
    """TLS of a link; it takes part when the URL's scheme ends in `s`. Files are PEM."""

    ca_file: FilePath | None = None
    """Authorities that the broker's certificate is checked against; absent: those of the system."""
    cert_file: FilePath | None = None
    """Our own certificate, for brokers that ask for one."""
    key_file: FilePath | None = None
    """Private key of `cert_file`."""
    verify: bool = True
    """False takes any certificate: for a laboratory only."""

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file belong together")
        return self


class Listener(FrontOptions):
    """Where clients of one protocol connect to us: what is the same for all of them."""

    protocol: str = Field(json_schema_extra={"enum": [*DIALECTS, SHARED]})
    """What is spoken there; `shared` is one port for several other listeners, which `shares` names."""
    host: str = "::"
    """Address to bind; `::` is all of IPv4 and, where the machine has it, of IPv6; `0.0.0.0` IPv4 alone."""
    port: Port = Field(0, json_schema_extra={"default": None})
    """Absent: the protocol's own port; `shared` has none. 0: any free one."""
    tls: ListenerTls | None = None
    """Absent: no TLS."""
    limits: Limits | None = None
    """Overrides for connections of this listener; what the broker shares (queues, sessions) follows the top
    level."""

    @model_validator(mode="before")
    @classmethod
    def _own_port(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("port") is not None:
            return given
        way = "+".join(word for word in ("websocket", "tls") if given.get(_SAYS[word])) or "plain"
        dialect = DIALECTS.get(given.get("protocol", ""))
        port = None if dialect is None else dialect.port(way)
        return given if port is None else given | {"port": port}

    @field_serializer("limits")
    def _only_overrides(self, limits: Limits | None) -> dict[str, Any] | None:
        return None if limits is None else limits.model_dump(exclude_unset=True)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of its virtual hosts; routes join the first one."""
        return ("/",)


_SAYS: Final = {"websocket": "websocket_path", "tls": "tls"}


class AnonymousListener(Listener):
    """A listener of a protocol that lets clients have no name."""

    anonymous: Admission = "loopback"
    """Who may connect without a name and password. MQTT clients with an empty name have none; and without
    `users` any name but `guest` is taken for none."""


class WebListener(Listener):
    """A listener of a protocol that is also spoken over WebSocket."""

    websocket_path: str | None = Field(None, pattern=r"^/[!-~]*$")
    """WebSocket at this path, instead of TCP alone."""
    websocket_origins: Annotated[tuple[Origin, ...] | None, Strict(False)] = None
    """Web pages that may connect, by origin (`https://app.example.com`); absent: any, but a page of elsewhere
    that a browser on this machine has opened counts as a client from elsewhere, also for `anonymous` and
    `guest`. Clients that are no browsers send no origin and are not asked for one."""

    @model_validator(mode="after")
    def _origins_of_a_path(self) -> Self:
        if self.websocket_origins is not None and self.websocket_path is None:
            raise ValueError("websocket_origins needs websocket_path")
        return self


class SharedListener(Listener):
    """One port for several other listeners."""

    shares: Annotated[tuple[str, ...], Strict(False)] = Field(min_length=1)
    """The listeners whose clients may come to this port, too. The first octets tell them apart, so of each
    protocol there is one, and of WebSocket one for each path. With `tls`, clients may come with and without
    it."""

    @model_validator(mode="before")
    @classmethod
    def _says_a_port(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("port") is None:
            raise ValueError(f"protocol {SHARED} has no port of its own: say port")
        return given


def check_shares(listeners: Mapping[str, Listener]) -> None:
    """Raises ValueError with the key when what a shared port names cannot be told apart or guarded."""
    for name, port in listeners.items():
        taken: dict[str, str] = {}
        for other in port.shares if isinstance(port, SharedListener) else ():
            at = f"listeners.{name}.shares"
            one = listeners.get(other)
            if one is None or isinstance(one, SharedListener):
                raise ValueError(f"{at}: {_not_shareable(other, listeners)}")
            path = websocket_path(one)
            spoken = one.protocol if path is None else f"WebSocket at {path}"
            if (first := taken.setdefault(spoken, other)) != other:
                raise ValueError(f"{at}: {first} and {other} both speak {spoken}; name one of them")
            if one.tls is not None and (port.tls is None or port.tls.asked != one.tls.asked):
                raise ValueError(
                    f"{at}: {other} is for TLS only; give listeners.{name} a tls with the same client_ca_file"
                )


def websocket_path(listener: Listener) -> str | None:
    """Where it is spoken over WebSocket; None: it is not."""
    return listener.websocket_path if isinstance(listener, WebListener) else None


def _not_shareable(name: str, listeners: Mapping[str, Listener]) -> str:
    """Why `name` cannot be shared, with a suggestion."""
    known = [one for one, given in listeners.items() if not isinstance(given, SharedListener)]
    fault = "itself a shared port" if name in listeners else "no listener"
    return f"{name!r} is {fault}{suggestion(name, known)}"


class Target(NamedTuple):
    """What a link's URL says. `password` is "" when it says none; `virtual_host` is AMQP's.

    `websocket` is where MQTT over WebSocket is found: path and query; "": it is not spoken over that.
    """

    protocol: str
    tls: bool
    host: str
    port: int
    virtual_host: str
    username: str
    password: str
    websocket: str = ""


def parse_url(url: str) -> Target:
    """Take a broker's URL apart; raises ValueError with what to write instead."""
    try:
        parts = urlsplit(url)
    except ValueError:  # whose text may hold a password
        raise ValueError(f"this is no URL; {QUOTED}") from None
    if parts.scheme not in SCHEMES:
        raise ValueError(f"a broker's URL begins with one of {', '.join(f'{name}://' for name in SCHEMES)}")
    if not parts.hostname:
        raise ValueError(f"the URL names no host: {parts.scheme}://host:port")
    if UNFIT_FOR_HOST.search(unquote(parts.hostname)) or any(one in url for one in DROPPED):
        raise ValueError(f"the URL has a blank or another character that no host has; {QUOTED}")
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
        raise ValueError(f"the URL has a query, behind a ?: what it says are options of the link; {QUOTED}")
    elif path and not dialect.has_virtual_hosts:
        raise ValueError(
            f"the URL of an {dialect.title} broker has no path, unless it is of WebSocket: ws:// or wss://"
        )
    tls = scheme.transport.endswith("tls")
    return Target(dialect.name, tls, parts.hostname, port, path or "/", username, password, websocket)


def address_of(target: Target) -> str:
    """`host:port`, an IPv6 address in brackets."""
    host = f"[{target.host}]" if ":" in target.host else target.host
    return f"{host}:{target.port}"


def port_of(parts: SplitResult) -> int | None:
    """The port of a URL, or None. Raises ValueError, without the text that is no port: it may be part of a
    password."""
    try:
        return parts.port
    except ValueError:
        raise ValueError(f"the port of the URL is no number up to 65535; {QUOTED}") from None


def masked_url(url: str) -> str:
    """The URL with its password hidden, and its query, which may be a signature."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return without_users(url)
    netloc = parts.netloc
    if "@" not in netloc and "@" in url:  # a character of the password ended it
        return without_users(url)
    if parts.password is not None:
        user, _, place = netloc.rpartition("@")
        netloc = f"{user.partition(':')[0]}:{MASK}@{place}"
    query = parts.query and MASK
    return urlunsplit(SplitResult(parts.scheme, netloc, parts.path, query, parts.fragment))


class Outbox(Section):
    """How much may wait for a link in the outbox of each of its routes with `settle: stored`.

    A route may say otherwise by the same names.
    """

    messages_max: int = Field(1_000_000, ge=1)
    """Messages that wait; those that are on their way to the broker do not count."""
    bytes_max: int = Field(1024 * 1024 * 1024, ge=1)
    """What they weigh, in octets: bodies, properties, and 256 for each."""
    age_secs_max: float | None = Field(None, gt=0)
    """How long a message may wait; absent: for ever."""
    policy: Literal["reject", "drop_oldest", "dead_letter"] = "reject"
    """At a limit: refuse new messages, drop the oldest, or make them dead letters."""
    shared: bool = False
    """The outboxes are queues of the cluster, which any replica empties. Needs `engine: rabbitmq`; with it
    `age_secs_max` needs `policy: drop_oldest` or `dead_letter`."""

    @model_validator(mode="after")
    def _of_a_queue(self) -> Self:
        if self.shared and self.age_secs_max is not None and self.policy == "reject":
            raise ValueError(
                "age_secs_max of a shared outbox needs policy: drop_oldest or dead_letter, for a queue cannot"
                " refuse what is new because of what is old"
            )
        return self


class Remote(Section):
    """How one remote broker is reached, which may have several addresses, and how much may be on its way."""

    url: str | None = None
    """`amqps://user@host:port/virtual-host`, `mqtts://user@host:port`, `wss://user@host:port/path` or
    `amqpfasts://user@host:port/virtual-host`."""
    urls: Annotated[tuple[str, ...], Strict(False)] = ()
    """More of them, of the same protocol: nodes of one cluster, tried in turn when a connection fails."""
    username: str | None = None
    """Instead of the URL's; AMQP: `guest` when nobody is named."""
    password: SecretStr | None = None
    """Instead of the URL's, for a laboratory: secrets belong in files."""
    password_file: FilePath | None = None
    """Read at every connection, so that a rotated secret is taken."""
    tls: LinkTls = LinkTls()
    """How the broker is known, and we by it; TLS is on when the scheme ends in `s`."""
    prefetch: int = Field(1_000, ge=1, le=65_535)
    """Unsettled messages that the broker may send us."""
    in_flight_max: int = Field(10_000, ge=1)
    """Published and not yet confirmed; what comes beyond it waits here, within `limits`."""
    heartbeat_secs: int = Field(30, ge=0, le=65_535)
    """MQTT keep-alive or AMQP heartbeat; 0 is none, and a dead peer is then not noticed."""
    connect_timeout_secs: float = Field(10.0, gt=0)
    """To connect and greet."""
    reconnect_min_secs: float = Field(0.5, gt=0)
    """First wait after a failure; it doubles each time, with jitter."""
    reconnect_max_secs: float = Field(30.0, gt=0)
    """Longest wait between two attempts."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        targets = [parse_url(url) for url in self.all_urls]
        if not targets:
            raise ValueError("say url, or urls: where the broker is")
        if len({target.protocol for target in targets}) > 1:
            raise ValueError("the urls of a link are of one protocol")
        dialect = DIALECTS[targets[0].protocol]
        if not dialect.link:
            raise ValueError(f"the gateway has no links to {dialect.title} brokers, only listeners")
        if len({(target.host, target.port) for target in targets}) < len(targets):
            raise ValueError("the urls name the same host and port twice")
        stated = any(target.password for target in targets)
        if stated + (self.password is not None) + (self.password_file is not None) > 1:
            raise ValueError("say the password once: in the url, as password, or in password_file")
        if self.reconnect_min_secs > self.reconnect_max_secs:
            raise ValueError("reconnect_min_secs is greater than reconnect_max_secs")
        return self

    @field_serializer("url")
    def _hidden(self, url: str | None) -> str | None:
        return None if url is None else masked_url(url)

    @field_serializer("urls")
    def _all_hidden(self, urls: tuple[str, ...]) -> list[str]:
        return [masked_url(url) for url in urls]

    @property
    def all_urls(self) -> tuple[str, ...]:
        """`url` and `urls`, in the order in which they are tried."""
        return (*(() if self.url is None else (self.url,)), *self.urls)

    @property
    def protocol(self) -> str:
        return parse_url(self.all_urls[0]).protocol

    @property
    def addresses(self) -> tuple[str, ...]:
        """`host:port` of each URL."""
        return tuple(address_of(parse_url(url)) for url in self.all_urls)

    def target(self, at: int = 0) -> Target:
        """Where to connect and as whom, by the URL number `at`; reads `password_file`. Raises
        ConfigurationError."""
        target = parse_url(self.all_urls[at])
        password = target.password
        if self.password is not None:
            password = self.password.get_secret_value()
        elif self.password_file is not None:
            password = secret_from(self.password_file)
        return target._replace(username=self.username or target.username, password=password)


class Link(Remote):
    """Our client connection to one remote broker: what is the same for all protocols."""

    client_id: str = Field("gateway-{replica}", min_length=1)
    """MQTT client identifier, AMQP connection name or AMQP/Fast client-name; `{replica}` is this process' own
    name."""
    connections: Literal[1, 2] = 1
    """2: one to consume, and one to publish, with `-out` behind its `client_id`: a broker that takes no more
    of what is published, and stops reading, still hears what was consumed acknowledged."""
    elected: bool = False
    """Of all replicas one alone consumes over this link; another one does when that is gone. Each publishes
    over a connection of its own, as with `connections: 2`. Needs `engine: rabbitmq`, which elects."""
    elected_timeout_secs: float = Field(20.0, gt=0)
    """How long a replica that has been elected, and does not reach the broker, keeps the link before another
    one tries."""
    required: bool = False
    """Whether /readyz waits for this link."""
    outbox: Outbox = Outbox()
    """Of routes with `settle: stored`."""

    @property
    def proves_password(self) -> bool:
        """Whether the password is proved to the broker, and not said."""
        return False

    def divides(self, queue: str | None) -> bool:
        """Whether replicas that consume from `queue`, or, None, from anything else, get each message once
        among them."""
        return True
