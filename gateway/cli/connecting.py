"""What the brokers of links say, before anything runs: whether they let us in, and what we may not do there.

Nothing is declared, taken or left behind. MQTT's filters are subscribed to under a client id of our own, so
that a gateway that runs keeps its session. At an AMQP 0-9-1 broker the queues and exchanges that routes name
are looked for, and publishing is tried in a transaction that is rolled back; whether a queue may be consumed
cannot be tried without taking its messages, nor, at an AMQP/Fast server, anything but the login.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pkgutil import resolve_name
from typing import NamedTuple

from gateway.clients.amqp import AmqpClient
from gateway.clients.mqtt import MqttClient
from gateway.clients.wire import Access, Client
from gateway.errors import ConfigurationError, LinkError
from gateway.mapping.linter import Finding, Severity
from gateway.mapping.router import Router
from gateway.protocols import DIALECTS
from gateway.settings import AmqpLink, Link, MqttLink, Settings


class Trial(NamedTuple):
    """Something that routes ask of a broker, and how bad it is when it refuses."""

    what: str
    severity: Severity
    act: Callable[[Client], object]


def tried(settings: Settings, router: Router) -> Iterator[Finding]:
    """What is refused to each link, at each of its addresses."""
    for name, link in settings.links.items():
        for severity, code, text in _of(link, name, router):
            yield Finding(severity, code, f"links.{name}: {text}", *settings.origin_of(("links", name)))


def _of(link: Link, name: str, router: Router) -> Iterator[tuple[Severity, str, str]]:
    if why := _untried(link):
        yield Severity.NOTE, "untried", f"not tried, for {why}"
        return
    let_in: Access | None = None
    for number, place in enumerate(link.addresses):
        try:
            access = _access(link, number)
            _connected(access).close()
        except (LinkError, ConfigurationError) as error:
            yield Severity.ERROR, "unreached", f"{place}: {str(error).removeprefix(f'{place}: ')}"
            continue
        let_in = let_in or access
    for trial in () if let_in is None else _trials(link, name, router):
        assert let_in is not None
        try:
            peer = _connected(let_in)  # a channel that was refused something is closed
        except LinkError as error:
            yield Severity.ERROR, "unreached", f"{trial.what}: {error}"
            return
        try:
            trial.act(peer)
            peer.close()
        except LinkError as error:
            peer.cut()
            yield trial.severity, "forbidden", f"{trial.what}: {error}"


def _untried(link: Link) -> str:
    """Why a link cannot be tried from here; "": it can."""
    if not link.tls.verify:
        return "tls.verify is false"
    scram = isinstance(link, MqttLink) and link.authentication != "password"
    return "it proves its password by SCRAM" if scram else ""


def _access(link: Link, number: int) -> Access:
    own = link.tls
    files = [None if one is None else str(one) for one in (own.ca_file, own.cert_file, own.key_file)]
    return Access(link.target(number), link.connect_timeout_secs, *files)


def _connected(access: Access) -> Client:
    made: Client = resolve_name(DIALECTS[access.target.protocol].peer)(access)
    return made


def _trials(link: Link, name: str, router: Router) -> Iterator[Trial]:
    sources, targets = router.subscriptions(name), router.targets(name)
    if isinstance(link, MqttLink):
        for _, topic in sources.bindings:
            yield Trial(f"subscribe to {topic!r}", Severity.ERROR, _subscribe(topic, link.qos))
    elif isinstance(link, AmqpLink):
        missing = Severity.NOTE if link.declare == "create" else Severity.ERROR
        for queue in dict.fromkeys((*sources.queues, *targets.queues)):
            yield Trial(f"the queue {queue!r}", missing, _look(queue=queue))
        bound = [scope for scope, _ in sources.bindings]
        for exchange in dict.fromkeys((*bound, *targets.scopes)):
            if exchange:
                yield Trial(f"the exchange {exchange!r}", missing, _look(exchange=exchange))
        for exchange in targets.scopes:
            yield Trial(f"publish to the exchange {exchange!r}", Severity.ERROR, _publish(exchange))


def _subscribe(topic: str, qos: int) -> Callable[[Client], object]:
    def act(peer: Client) -> None:
        assert isinstance(peer, MqttClient)
        peer.subscribe(topic, qos)

    return act


def _look(queue: str = "", exchange: str = "") -> Callable[[Client], object]:
    def act(peer: Client) -> None:
        assert isinstance(peer, AmqpClient)
        peer.look_for(queue=queue, exchange=exchange)

    return act


def _publish(exchange: str) -> Callable[[Client], object]:
    def act(peer: Client) -> None:
        assert isinstance(peer, AmqpClient)
        try:
            peer.look_for(exchange=exchange)
        except LinkError:
            return  # that it is not there was said
        peer.try_publishing(exchange)

    return act
