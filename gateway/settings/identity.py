"""Section `authentication` of the configuration: the back ends that establish who a client is.

There are four: configured users, TLS certificates, JSON Web Tokens, and an HTTP server. They are tried in the
configured order, and the first that accepts a client decides. The module holds and checks the options only;
`gateway/access` authenticates.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, Strict, model_validator

from gateway.settings.endpoints import QUOTED, FilePath, MaskedUrl, port_of
from gateway.settings.limits import Section

SYMMETRIC: Final = frozenset(("HS256", "HS384", "HS512"))
Algorithm = Literal[
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
    "ES256",
    "ES384",
    "ES512",
    "EdDSA",
    "HS256",
    "HS384",
    "HS512",
]


def _http_url(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:  # The text of this error may contain a password.
        raise ValueError(f"not a URL; {QUOTED}") from None
    port_of(parts)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("the URL must begin with https:// or http:// and have a host")
    if parts.fragment:
        raise ValueError("the URL must not have a fragment")
    return url


HttpUrl = Annotated[MaskedUrl, AfterValidator(_http_url)]


class UsersBackend(Section):
    """Back end of users with passwords, in the section `users` and in a separate file."""

    backend: Literal["users"]
    """Kind of back end."""
    file: FilePath | None = None
    """File with further users by name, with the same keys as `users`. It is read again when it changes."""


class CertificatesBackend(Section):
    """Back end for clients that authenticate by a TLS certificate.

    Clients present their certificate to a listener with `tls.client_ca_file`, or to a load balancer that
    reports it in the PROXY header. These clients send no password, and no user name other than that of the
    certificate.
    """

    backend: Literal["certificates"]
    """Kind of back end."""
    name: Literal["common_name", "distinguished_name", "dns", "email", "uri", "ip"] = "common_name"
    """Field of the certificate that is the user name: a part of the subject, or the first alternative name of
    that kind. Of a certificate behind a load balancer: `common_name`, and the others if the load balancer
    sends the certificate itself."""
    known_only: bool = False
    """True if the name must be one of the users, as is the rule without this back end (AMQP's EXTERNAL)."""


class JwtBackend(Section):
    """Back end for clients that log in with a JSON Web Token.

    A client sends the token as its password (MQTT, AMQP PLAIN, AMQP/Fast), or in an AUTH packet of MQTT 5.
    The user name in the token replaces any other user name.
    """

    backend: Literal["jwt"]
    """Kind of back end."""
    keys_file: FilePath | None = None
    """Keys that sign tokens: a JWKS document, a public key or certificate in PEM, or for `HS…` the secret
    itself. Read again when the file changes. Exactly one of `keys_file` and `keys_url` is required."""
    keys_url: HttpUrl | None = None
    """URL of a JWKS document."""
    keys_ca_file: FilePath | None = None
    """File of certificate authorities that the certificate of `keys_url` is checked against. Absent: those of
    the system."""
    keys_refresh_secs: float = Field(300.0, ge=1)
    """Interval in seconds at which the keys are fetched; also at once when a token names an unknown key, but
    at most every ten seconds."""
    keys_kept_secs: float = Field(86_400.0, ge=0)
    """Time in seconds that keys stay in use while they cannot be fetched."""
    timeout_secs: float = Field(5.0, gt=0, le=60)
    """Longest time in seconds to fetch the keys."""
    algorithms: Annotated[tuple[Algorithm, ...], Strict(False), Field(min_length=1)] = ("RS256", "ES256")
    """Accepted signature algorithms. `HS…` cannot be combined with others."""
    issuer: str | None = None
    """Required value of the claim `iss`. Absent: not checked."""
    audience: str | None = None
    """Name that the claim `aud` must contain. Absent: not checked."""
    leeway_secs: float = Field(10.0, ge=0, le=600)
    """Tolerated difference of clocks in seconds for `exp`, `nbf` and `iat`."""
    expiry_required: bool = True
    """True if tokens without `exp` are refused."""
    user_claim: str = Field("sub", min_length=1)
    """Claim that is the user name; nested claims are written with dots: `user.name`."""
    roles_claim: str | None = None
    """Claim with the names of roles, a list or a text with spaces, for example `realm_access.roles`."""
    scope_claim: str | None = "scope"
    """Claim with scopes in RabbitMQ's notation: `read:VHOST/NAME/KEY`."""
    scope_prefix: str = ""
    """Prefix of scopes that are meant for the gateway, such as `rabbitmq.`. It is removed; scopes without it
    are ignored."""
    fields: dict[str, str] = Field({}, max_length=32)
    """Claims that rules may use as `{NAME}`, by that name."""
    method: str = Field("OAUTH2-JWT", min_length=1)
    """MQTT 5 Authentication Method whose Authentication Data is the token."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Check that the configured keys are of the kind that the algorithms need. Raises ValueError."""
        if (self.keys_file is None) == (self.keys_url is None):
            raise ValueError("set exactly one of keys_file and keys_url")
        symmetric = SYMMETRIC & set(self.algorithms)
        if symmetric and len(symmetric) < len(self.algorithms):
            raise ValueError("algorithms: HS… cannot be combined with others")
        if symmetric and self.keys_url is not None:
            raise ValueError(
                "algorithms: HS… needs keys_file, because a shared secret cannot be fetched from keys_url"
            )
        return self


class HttpBackend(Section):
    """Back end that queries an HTTP server by the protocol of RabbitMQ's `rabbitmq_auth_backend_http`.

    The server receives `username`, `password` and known properties of the client. It responds `allow`,
    possibly with roles, or `deny`.
    """

    backend: Literal["http"]
    """Kind of back end."""
    user_url: HttpUrl
    """URL for checks of a user."""
    method: Literal["get", "post"] = "post"
    """HTTP method. `get` puts everything into the query, and so into logs of proxies; it is RabbitMQ's
    default."""
    ca_file: FilePath | None = None
    """File of certificate authorities that the server's certificate is checked against. Absent: those of the
    system."""
    timeout_secs: float = Field(5.0, gt=0, le=60)
    """Longest time for a response in seconds. A client without a response is refused."""
    connections_max: int = Field(16, ge=1, le=1_024)
    """Concurrent requests to the server."""
    waiting_max: int = Field(1_000, ge=1)
    """Logins that wait for a free connection. They are served round robin by address."""
    cache_secs: float = Field(60.0, ge=0, le=86_400)
    """Time in seconds that a response is cached; `deny` is cached for 10 % of it. 0 disables the cache."""
    cache_entries_max: int = Field(10_000, ge=1)
    """Cached responses of each kind."""


Backend = Annotated[
    UsersBackend | CertificatesBackend | JwtBackend | HttpBackend, Field(discriminator="backend")
]
USERS_ALONE: Final = (UsersBackend(backend="users"),)


def check_backends(backends: tuple[Backend, ...]) -> None:
    """Check that the back ends can be used together.

    Raises ValueError if there are two back ends of kind `users`, or of kind `certificates`.
    """
    kinds = [one.backend for one in backends]
    for kind in ("users", "certificates"):
        if kinds.count(kind) > 1:
            raise ValueError(f"authentication: {kind} occurs twice")
