"""What `gateway run` says when it has started: where to connect, and two commands to try first.

The commands follow the configuration, so that they work as they stand, or name what only the user knows: the
password of a user, the authority behind a certificate. Nothing is proposed that would be refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from shlex import quote
from typing import Final, NamedTuple
from urllib.parse import quote as percent

from gateway.app import Gateway
from gateway.broker.access import GUEST
from gateway.broker.places import is_loopback
from gateway.settings import Listener, Settings

EVERYWHERE: Final = frozenset(("0.0.0.0", "::", "", "localhost"))
SCHEMES: Final = {"mqtt": "mqtt", "amqp091": "amqp", "amqpfast": "amqpfast"}
PUBLISHERS: Final = ("mqtt", "amqp091", "amqpfast")
SUBSCRIBERS: Final = ("amqp091", "amqpfast", "mqtt")
"""By preference: the shipped mapping shows best when a message crosses."""
PUBLISH: Final = {
    "mqtt": "--topic plant/line1/temperature",
    "amqp091": "--exchange amq.topic --routing-key plant.line1.temperature",
    "amqpfast": "--destination plant.line1.temperature",
}
SUBSCRIBE: Final = {
    "mqtt": "--topic 'plant/#'",
    "amqp091": "--exchange amq.topic --binding-key 'plant.#'",
    "amqpfast": "--destination plant.",
}


class Door(NamedTuple):
    """How the command line gets in at a listener. `wants`: what the user has to fill in."""

    listener: str
    protocol: str
    url: str
    options: str
    wants: tuple[str, ...]


def welcome(gateway: Gateway) -> str:
    """Where to connect, and what to try first."""
    settings = gateway.settings
    ports = {name: listener.port for name, listener in gateway.listeners.items()}
    lines = ["The gateway is running.", ""]
    width = max(map(len, (*ports, *settings.links, "page")))
    for name, listener in gateway.listeners.items():
        said = spoken(settings.listeners[name])
        lines.append(f"  {name:<{width}} {said} on {listener.place}")
    for name, link in settings.links.items():
        lines.append(f"  {name:<{width}} link to {', or '.join(link.addresses)}")
    if gateway.http_port:
        lines.append(f"  {'page':<{width}} http://localhost:{gateway.http_port}/  (metrics: /metrics)")
    return "\n".join([*lines, *proposal(settings, ports), "", "Ctrl-C stops it."])


def spoken(listener: Listener) -> str:
    """What a client has to speak there."""
    words: list[str] = [listener.protocol]
    if listener.websocket_path is not None:
        words.append(f"over WebSocket at {listener.websocket_path}")
    if listener.tls is not None:
        words.append("with and without TLS" if listener.protocol == "shared" else "with TLS")
    if listener.shares:
        words.append(f"for {', '.join(listener.shares)}")
    if listener.proxy_protocol == "required":
        words.append("behind the PROXY protocol")
    return " ".join(words)


def proposal(settings: Settings, ports: Mapping[str, int]) -> list[str]:
    """Two commands between which a message goes; none when nobody can get in with the command line."""
    found = [one for name in settings.listeners if (one := door(settings, name, ports[name])) is not None]
    doors: dict[str, Door] = {}
    for one in sorted(found, key=lambda one: len(one.wants)):  # the easiest of each protocol
        doors.setdefault(one.protocol, one)
    publisher = next((doors[name] for name in PUBLISHERS if name in doors), None)
    if publisher is None:
        return []
    meeting = [publisher, *doors.values()] if crosses(settings, publisher) else [publisher]
    subscribers = {one.protocol: one for one in meeting if one is publisher or crosses(settings, one)}
    subscriber = next(subscribers[name] for name in SUBSCRIBERS if name in subscribers)
    lines = [
        "",
        "Try it from two other terminals (the program stands in .venv/bin in a checkout):",
        f"  gateway subscribe {subscriber.url} {SUBSCRIBE[subscriber.protocol]}{subscriber.options}",
        f"  gateway publish {publisher.url} {PUBLISH[publisher.protocol]}{publisher.options} --message 21.5",
    ]
    wants = dict.fromkeys((*subscriber.wants, *publisher.wants))
    if wants:
        lines.append(f"with {'; '.join(wants)}.")
    return lines


def crosses(settings: Settings, one: Door) -> bool:
    """Whether the shipped mapping joins this listener to the others, which it knows by these names. What own
    mapping files do is not looked into; a protocol keeps what it is given in any case."""
    return not settings.mappings and one.listener == one.protocol


def door(settings: Settings, name: str, port: int) -> Door | None:
    """How to get in at a listener from this machine; None: not with the command line."""
    listener = settings.listeners[name]
    tls = listener.tls
    if (
        listener.protocol == "shared"
        or listener.proxy_protocol == "required"
        or (tls is not None and tls.client_ca_file is not None)
    ):
        return None
    host = "localhost" if listener.host in EVERYWHERE else listener.host
    user = credentials(settings, listener, host == "localhost" or is_loopback(host))
    if user is None:
        return None
    options, wants = "", []
    if user.endswith(":PASSWORD@"):
        wants.append("the PASSWORD of that user")
    if tls is not None:
        options = " --ca-file CA.pem"
        host = "HOST"
        wants.append(f"the HOST that {tls.cert_file} is for, and the CA.pem that has signed it")
    place = f"[{host}]" if ":" in host else host
    path = "/" if listener.protocol == "mqtt" else next(iter(listener.virtual_hosts))
    scheme = SCHEMES[listener.protocol] if listener.websocket_path is None else "ws"
    url = f"{scheme}{'s' if tls else ''}://{user}{place}:{port}{listener.websocket_path or ''}"
    if path != "/":
        url = f"{url}/{percent(path, safe='')}"
    return Door(name, listener.protocol, quote(url), options, tuple(wants))


def credentials(settings: Settings, listener: Listener, near: bool) -> str | None:
    """What stands before the host: nobody, guest, or a user, whoever gets in first; None: nobody does.
    `near`: clients of this machine come from a loopback address.
    """

    def admits(policy: str) -> bool:
        return policy == "always" or (policy == "loopback" and near)

    if listener.protocol == "mqtt" and admits(listener.anonymous):
        return ""
    if GUEST not in settings.users and admits(settings.guest):
        return f"{GUEST}:{GUEST}@"
    named = [name for name, user in settings.users.items() if user.password_hash or user.password_hash_file]
    return f"{percent(named[0], safe='')}:PASSWORD@" if named else None
