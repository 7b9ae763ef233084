"""Who a client is: the back ends that are asked, in their order."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, Strict, field_serializer, model_validator

from gateway.settings.endpoints import QUOTED, FilePath, masked_url, port_of
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


def _http_url(given: str) -> str:
    try:
        parts = urlsplit(given)
    except ValueError:  # whose text may hold a password
        raise ValueError(f"this is no URL; {QUOTED}") from None
    port_of(parts)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("an address begins with https:// or http:// and names a host")
    if parts.fragment:
        raise ValueError("an address has no fragment")
    return given


HttpUrl = Annotated[str, AfterValidator(_http_url)]


class UsersBackend(Section):
    """Those of `users`, and of a file of its own."""

    backend: Literal["users"]
    """Which kind of back end this is."""
    file: FilePath | None = None
    """A file with more of them, by name and with the same keys as `users`; read again when it changes."""


class CertificatesBackend(Section):
    """Clients that have shown a certificate: to a listener with `tls.client_ca_file`, or to a balancer that
    says so in its PROXY header. They say no password, and no name or that of the certificate.
    """

    backend: Literal["certificates"]
    """Which kind of back end this is."""
    name: Literal["common_name", "distinguished_name", "dns", "email", "uri", "ip"] = "common_name"
    """What of the certificate is the user name: a part of its subject, or the first alternative name of that
    kind. Of what a balancer announces: `common_name`, and the others if it sends the certificate itself."""
    known_only: bool = False
    """Whether the name must be one of the users, as it must be without this back end (AMQP's EXTERNAL)."""


class JwtBackend(Section):
    """Clients whose password is a JSON Web Token (MQTT, AMQP PLAIN, AMQP/Fast), or who show one in an AUTH of
    MQTT 5. Their user name is the token's, whatever they say besides.
    """

    backend: Literal["jwt"]
    """Which kind of back end this is."""
    keys_file: FilePath | None = None
    """The keys that sign tokens: a JWKS document, a public key or certificate in PEM, or for `HS…` the secret
    itself. Read again when it changes. One of `keys_file` and `keys_url` is given."""
    keys_url: HttpUrl | None = None
    """Where a JWKS document is found."""
    keys_ca_file: FilePath | None = None
    """Authorities that the certificate of `keys_url` is checked against; absent: those of the system."""
    keys_refresh_secs: float = Field(300.0, ge=1)
    """How often the keys are fetched again; also at once, but not more often than every ten seconds, when a
    token names one that is not known."""
    keys_kept_secs: float = Field(86_400.0, ge=0)
    """How long keys serve when they cannot be fetched again."""
    timeout_secs: float = Field(5.0, gt=0, le=60)
    """How long fetching them may take."""
    algorithms: Annotated[tuple[Algorithm, ...], Strict(False), Field(min_length=1)] = ("RS256", "ES256")
    """Signatures that are taken, by their names; `HS…` stand alone."""
    issuer: str | None = None
    """What `iss` has to be; absent: it is not looked at."""
    audience: str | None = None
    """What `aud` has to name; absent: it is not looked at."""
    leeway_secs: float = Field(10.0, ge=0, le=600)
    """By how much clocks may differ: `exp`, `nbf` and `iat`."""
    expiry_required: bool = True
    """Whether a token without `exp` is refused."""
    user_claim: str = Field("sub", min_length=1)
    """The claim that is the user name; claims within others with dots: `user.name`."""
    roles_claim: str | None = None
    """The claim with the names of roles: a list, or a text with blanks. `realm_access.roles`, for example."""
    scope_claim: str | None = "scope"
    """The claim with scopes, in RabbitMQ's words: `read:VHOST/NAME/KEY`."""
    scope_prefix: str = ""
    """What scopes that are meant for us begin with, as `rabbitmq.`; it is taken off, others are passed
    over."""
    fields: dict[str, str] = Field({}, max_length=32)
    """Claims that rules may use as `{NAME}`, by that name."""
    method: str = Field("OAUTH2-JWT", min_length=1)
    """MQTT 5: the Authentication Method whose Authentication Data is the token."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.keys_file is None) == (self.keys_url is None):
            raise ValueError("say one of keys_file and keys_url")
        symmetric = SYMMETRIC & set(self.algorithms)
        if symmetric and len(symmetric) < len(self.algorithms):
            raise ValueError("algorithms: a key is a secret (HS…) or public, and never both")
        if symmetric and self.keys_url is not None:
            raise ValueError("algorithms: a secret (HS…) is not fetched; say keys_file")
        return self

    @field_serializer("keys_url")
    def _hidden(self, url: str | None) -> str | None:
        return None if url is None else masked_url(url)


class HttpBackend(Section):
    """A server that says who is right, as RabbitMQ's `rabbitmq_auth_backend_http` asks it: it hears
    `username`, `password` and what is known besides, and answers `allow`, perhaps with roles, or `deny`.
    """

    backend: Literal["http"]
    """Which kind of back end this is."""
    user_url: HttpUrl
    """Where it is asked about a user."""
    method: Literal["get", "post"] = "post"
    """`get`: everything stands in the query, and so in logs of whatever lies between; RabbitMQ's default."""
    ca_file: FilePath | None = None
    """Authorities that its certificate is checked against; absent: those of the system."""
    timeout_secs: float = Field(5.0, gt=0, le=60)
    """How long an answer may take. Whoever has none is refused."""
    connections_max: int = Field(16, ge=1, le=1_024)
    """Questions at a time."""
    waiting_max: int = Field(1_000, ge=1)
    """Logins that wait for their turn; addresses take turns."""
    cache_secs: float = Field(60.0, ge=0, le=86_400)
    """How long an answer is remembered, `deny` for a tenth of it; 0: not at all."""
    cache_entries_max: int = Field(10_000, ge=1)
    """Answers that are remembered, of each kind."""

    @field_serializer("user_url")
    def _hidden(self, url: str) -> str:
        return masked_url(url)


Backend = Annotated[
    UsersBackend | CertificatesBackend | JwtBackend | HttpBackend, Field(discriminator="backend")
]
USERS_ALONE: Final = (UsersBackend(backend="users"),)


def check_backends(backends: tuple[Backend, ...]) -> None:
    """Raises ValueError when they cannot be asked side by side."""
    kinds = [one.backend for one in backends]
    for kind in ("users", "certificates"):
        if kinds.count(kind) > 1:
            raise ValueError(f"authentication: {kind} stands there twice")
