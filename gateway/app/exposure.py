"""Detection of valid settings that expose secrets or the gateway to other machines in its network.

`gateway check` reports each as a warning with what to write instead, and the gateway logs each when it
starts. Traffic that stays on this machine (loopback) is not reported.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import structlog

from gateway.access.rabbit_passwords import PREFIX
from gateway.documents import Place, dotted
from gateway.settings import AnonymousListener, Settings
from gateway.settings.endpoints import LinkTls
from gateway.settings.engine import RabbitEngine
from gateway.settings.identity import HttpBackend, JwtBackend

log = structlog.get_logger()

# Shortest prefix of a network of load balancers that is not reported, by IP version: 256 IPv4 addresses, one
# IPv6 subnet.
BALANCER_PREFIXES: Final = {4: 24, 6: 64}
MD5: Final = f"{PREFIX}md5$"


class Exposure(NamedTuple):
    """Finding about a risky setting: its place in the configuration, the risk, and a safer value."""

    place: Place
    text: str
    advice: str

    def __str__(self) -> str:
        return f"{dotted(self.place)}: {self.text}; {self.advice}"


def exposures(settings: Settings, hashes: Mapping[str, str]) -> list[Exposure]:
    """Return a finding for each setting that exposes secrets or the gateway to the network.

    `hashes` are the password hashes of all users by name, including users of RabbitMQ exports.
    """
    return [
        *_urls(settings),
        *_unverified(settings),
        *_anonymous_exposures(settings),
        *_weak_hashes(settings, hashes),
        *_plain_http(settings),
        *_balancers(settings),
    ]


def log_exposures(settings: Settings, hashes: Mapping[str, str]) -> None:
    """Log a warning for each setting that exposes secrets or the gateway to the network.

    `hashes` are the password hashes of all users by name, including users of RabbitMQ exports.
    """
    for one in exposures(settings, hashes):
        log.warning("setting exposes the gateway", key=dotted(one.place), reason=one.text, advice=one.advice)


def _urls(settings: Settings) -> Iterator[Exposure]:
    """Yield a finding for each http:// URL of an authentication server or authorizer on another machine."""
    urls: list[tuple[Place, str, str | None]] = []
    for at, backend in enumerate(settings.authentication):
        if isinstance(backend, JwtBackend):
            text = "anyone on the network path can replace the keys that sign tokens"
            urls.append((("authentication", at, "keys_url"), text, backend.keys_url))
        elif isinstance(backend, HttpBackend):
            text = "passwords cross the network in plain text"
            urls.append((("authentication", at, "user_url"), text, backend.user_url))
    if (authorizer := settings.authorizer) is not None:
        text = "anyone on the network path can permit everything"
        for key in ("vhost_url", "resource_url", "topic_url"):
            urls.append((("authorizer", key), text, getattr(authorizer, key)))
    for place, text, url in urls:
        parts = urlsplit(url or "")
        if parts.scheme == "http" and not _is_local(parts.hostname or ""):
            yield Exposure(place, text, "use https://, or run that server on this machine")


def _unverified(settings: Settings) -> Iterator[Exposure]:
    """Yield a finding for each link, and for the engine, that accepts any TLS certificate of the broker."""
    remotes: list[tuple[Place, LinkTls]] = [
        (("links", name), link.tls) for name, link in settings.links.items()
    ]
    if isinstance(settings.broker, RabbitEngine):
        remotes.append((("broker",), settings.broker.tls))
    for place, tls in remotes:
        if not tls.verify:
            text = (
                "any certificate is accepted, so anyone on the network path can read passwords and messages"
            )
            advice = "remove verify, and set ca_file to the broker's certificate authority"
            yield Exposure((*place, "tls", "verify"), text, advice)


def _anonymous_exposures(settings: Settings) -> Iterator[Exposure]:
    """Yield a finding for each setting by which remote clients connect without a secret password."""
    for name, listener in settings.listeners.items():
        if (
            isinstance(listener, AnonymousListener)
            and listener.anonymous == "always"
            and not _is_local(listener.host)
        ):
            text = "every client that reaches the port can connect without a password"
            advice = "set loopback or never, and give clients users, tokens or certificates"
            yield Exposure(("listeners", name, "anonymous"), text, advice)
    if settings.guest == "always" and any(not _is_local(one.host) for one in settings.listeners.values()):
        text = "the password of guest is well known"
        yield Exposure(("guest",), text, "set loopback or never, and give each client its own user")


def _weak_hashes(settings: Settings, hashes: Mapping[str, str]) -> Iterator[Exposure]:
    for name, found in hashes.items():
        if found.startswith(MD5):
            text = "the password hash is MD5, so the password can be found in minutes"
            advice = "set password_hash to what `gateway passwd` prints"
            yield Exposure(("users", name), text, advice)


def _plain_http(settings: Settings) -> Iterator[Exposure]:
    """Yield a finding if passwords or tokens reach the HTTP interface over a network without TLS."""
    http = settings.http
    if not http.enabled or http.tls is not None or _is_local(http.host):
        return
    secrets = http.token_file is not None or http.scrape_token_file is not None
    secrets = secrets or any(role.console != "none" for role in settings.roles.values())
    if settings.is_set(("http", "host")) or secrets:
        text = "the console's passwords and tokens cross the network in plain text"
        advice = "set http.tls with cert_file and key_file, or host 127.0.0.1 behind a proxy with TLS"
        yield Exposure(("http", "host"), text, advice)


def _balancers(settings: Settings) -> Iterator[Exposure]:
    """Yield a finding for each network of load balancers that is so large that it contains other machines."""
    for name, listener in settings.listeners.items():
        if listener.proxy_protocol == "off":
            continue
        for at, written in enumerate(listener.proxy_protocol_from):
            network = ipaddress.ip_network(written)
            if network.is_loopback or network.prefixlen >= BALANCER_PREFIXES[network.version]:
                continue
            text = f"each machine in {network} can claim any client address and any verified certificate"
            advice = "name only the addresses of the load balancers"
            yield Exposure(("listeners", name, "proxy_protocol_from", at), text, advice)


def _is_local(host: str) -> bool:
    """Return True if `host`, a name or IP address, is this machine's loopback interface."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
