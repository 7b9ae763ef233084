"""Welcome text of `gateway run` after the start: the addresses to connect to, and two commands to try first.

The commands follow the configuration, so that they can be copied unchanged, except for what only the user
knows: the password of a user, the authority of a certificate. No command is proposed that would be refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shlex import quote
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote as percent

from gateway.access.places import is_loopback
from gateway.app import Gateway
from gateway.cli.tables import table
from gateway.protocols import DIALECTS
from gateway.protocols.amqp091.dialect import AMQP091
from gateway.protocols.amqpfast.dialect import AMQPFAST
from gateway.protocols.mqtt.dialect import MQTT
from gateway.settings import (
    ListenerSettings,
    MqttListener,
    Settings,
    SharedListener,
    shipped_mappings,
    websocket_path,
)
from gateway.settings.tree import GUEST

if TYPE_CHECKING:
    from gateway.app.workers import Supervisor

EVERYWHERE: Final = frozenset(("0.0.0.0", "::", "", "localhost"))
SUBSCRIBERS: Final = (AMQP091, AMQPFAST, MQTT)
"""Protocols of the subscriber by preference; another one than MQTT shows that a message crosses."""
PUBLISH: Final = {
    MQTT.name: "--topic plant/line1/temperature",
    AMQP091.name: "--exchange amq.topic --routing-key plant.line1.temperature",
    AMQPFAST.name: "--destination plant.line1.temperature",
}
SUBSCRIBE: Final = {
    MQTT.name: "--topic 'plant/#'",
    AMQP091.name: "--exchange amq.topic --binding-key 'plant.#'",
    AMQPFAST.name: "--destination plant.",
}


class ListenerUrl(NamedTuple):
    """URL and options with which the commands `publish` and `subscribe` connect to a listener.

    `wants` has texts that tell the user how to replace the placeholders in URL and options.
    """

    listener: str
    protocol: str
    url: str
    options: str
    wants: tuple[str, ...]


def welcome(gateway: Gateway, *, with_link: bool = False) -> str:
    """Return the welcome text of a gateway.

    With `with_link` it contains a console URL that logs in once, which only the user who started the gateway
    may see.
    """
    places = {name: (listener.place, listener.port) for name, listener in gateway.listeners.items()}
    more = pages(gateway, with_link=with_link) if gateway.http_port else []
    return _welcome_text("The gateway is running.", gateway.settings, places, more)


def welcome_to_workers(supervisor: Supervisor) -> str:
    """Return the welcome text of a gateway with several workers, which share the listeners' ports."""
    settings, places = supervisor.settings, supervisor.places
    more: list[tuple[str, str]] = []
    if supervisor.http_port:
        http = settings.http
        scheme = "http" if (http.health or http).tls is None else "https"
        more.append(("metrics", f"{scheme}://localhost:{supervisor.http_port}/metrics"))
        more.append(("consoles", supervisor.consoles))
    return _welcome_text(f"The gateway is running, with {settings.workers} workers.", settings, places, more)


def _welcome_text(
    first: str,
    settings: Settings,
    places: Mapping[str, tuple[str, int]],
    more: Sequence[tuple[str, str]],
) -> str:
    """Return the welcome text: a first line, a table, and example commands.

    `first` is the first line, `places` has address and port of each listener, and `more` are additional rows
    of the table.
    """
    rows = [
        (name, f"{describe_protocol(settings.listeners[name])} on {place}")
        for name, (place, _) in places.items()
    ]
    rows += [(name, f"link to {', or '.join(link.addresses)}") for name, link in settings.links.items()]
    lines = [first, "", *(f"  {line}" for line in table([*rows, *more]))]
    ports = {name: port for name, (_, port) in places.items()}
    return "\n".join([*lines, *proposal(settings, ports), "", "Stop it with Ctrl-C."])


def pages(gateway: Gateway, *, with_link: bool) -> list[tuple[str, str]]:
    """Return the URLs of the console and of the metrics as rows of the table in the welcome text.

    With `with_link` the console's URL logs in once.
    """
    http = gateway.settings.http
    scheme = "http" if http.tls is None else "https"
    at = f"{scheme}://localhost:{gateway.http_port}/"
    found = [("page", f"{at}{gateway.console.link()}  (logs in once)" if with_link else at)]
    if http.health is None:
        found.append(("metrics", f"{at}metrics"))
    else:
        scheme = "http" if http.health.tls is None else "https"
        found.append(("metrics", f"{scheme}://localhost:{gateway.health_port}/metrics"))
    return found


def describe_protocol(listener: ListenerSettings) -> str:
    """Return as text the protocol and the layers, such as TLS, that a client of the listener has to use."""
    words: list[str] = [listener.protocol]
    if (path := websocket_path(listener)) is not None:
        words.append(f"over WebSocket at {path}")
    if listener.tls is not None:
        words.append("with and without TLS" if isinstance(listener, SharedListener) else "with TLS")
    if isinstance(listener, SharedListener):
        words.append(f"for {', '.join(listener.shares)}")
    if listener.proxy_protocol == "required":
        words.append("behind the PROXY protocol")
    return " ".join(words)


def proposal(settings: Settings, ports: Mapping[str, int]) -> list[str]:
    """Return lines of text with a `gateway subscribe` and a `gateway publish` command to try.

    `ports` are the ports of the listeners by name. Return an empty list if the command line cannot connect to
    any listener.
    """
    found = [
        one for name in settings.listeners if (one := listener_url(settings, name, ports[name])) is not None
    ]
    urls: dict[str, ListenerUrl] = {}
    for one in sorted(found, key=lambda one: len(one.wants)):  # for each protocol the one with fewest values
        urls.setdefault(one.protocol, one)
    publisher = next((urls[name] for name in PUBLISH if name in urls), None)
    if publisher is None:
        return []
    subscribers = urls if connects_listeners(settings) else {publisher.protocol: publisher}
    subscriber = next(subscribers[one.name] for one in SUBSCRIBERS if one.name in subscribers)
    lines = [
        "",
        "Try it from two other terminals (in a checkout, the program is in .venv/bin):",
        f"  gateway subscribe {subscriber.url} {SUBSCRIBE[subscriber.protocol]}{subscriber.options}",
        f"  gateway publish {publisher.url} {PUBLISH[publisher.protocol]}{publisher.options} --message 21.5",
    ]
    wants = dict.fromkeys((*subscriber.wants, *publisher.wants))
    if wants:
        lines.append(f"with {'; '.join(wants)}.")
    return lines


def connects_listeners(settings: Settings) -> bool:
    """Return True if the shipped mapping is in use, by which messages pass between all listeners.

    Mapping files of the user are not examined: return False for them.
    """
    return settings.mapping_files() == [shipped_mappings() / "identity.yaml"]


def listener_url(settings: Settings, name: str, port: int) -> ListenerUrl | None:
    """Return URL and options to connect to a listener from this machine, or None if this is impossible."""
    listener = settings.listeners[name]
    tls = listener.tls
    if (
        isinstance(listener, SharedListener)
        or listener.proxy_protocol == "required"
        or (tls is not None and tls.client_ca_file is not None and tls.client_certificate == "required")
    ):
        return None
    host = "localhost" if listener.host in EVERYWHERE else listener.host
    user = credentials(settings, listener, host == "localhost" or is_loopback(host))
    if user is None:
        return None
    options, wants = "", []
    if user.endswith(":PASSWORD@"):
        wants.append("PASSWORD of that user")
    if tls is not None:
        options = " --ca-file CA.pem"
        host = "HOST"
        wants.append(
            f"HOST named in the certificate {tls.cert_file}, and CA.pem, the authority that signed it"
        )
    place = f"[{host}]" if ":" in host else host
    dialect = DIALECTS[listener.protocol]
    path = listener.hosts[0]
    web = websocket_path(listener)
    layers = {"websocket": web is not None, "tls": tls is not None}
    transport = "+".join(name for name, there in layers.items() if there) or "plain"
    scheme = next(one.name for one in dialect.schemes if one.transport == transport)
    url = f"{scheme}://{user}{place}:{port}{web or ''}"
    if path != "/":
        url = f"{url}/{percent(path, safe='')}"
    return ListenerUrl(name, listener.protocol, quote(url), options, tuple(wants))


def credentials(settings: Settings, listener: ListenerSettings, near: bool) -> str | None:
    """Return the user part of a URL, such as `guest:guest@`, with which a client can log in at the listener.

    Return "" if anonymous clients may log in. Otherwise prefer the user `guest` to a user with a password.
    Return None if no client can log in with a password. `near` is True if clients on this machine connect
    from a loopback address.
    """

    def is_permitted(policy: str) -> bool:
        return policy == "always" or (policy == "loopback" and near)

    if isinstance(listener, MqttListener) and is_permitted(listener.anonymous):
        return ""
    own = settings.users.get(GUEST)
    if (own is None or not own.has_credentials) and is_permitted(settings.guest):
        return f"{GUEST}:{GUEST}@"
    with_passwords = [
        name for name, user in settings.users.items() if user.password_hash or user.password_hash_file
    ]
    return f"{percent(with_passwords[0], safe='')}:PASSWORD@" if with_passwords else None
