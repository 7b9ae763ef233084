"""Trials of the brokers of links before the gateway runs: the login, and the rights that routes need.

Nothing is declared, consumed or left behind. A protocol's dialect names its trials; if it names none, only
the login is tried, and a finding reports that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pkgutil import resolve_name

from gateway.cli.trials import Trial
from gateway.clients.wire import ConnectionOptions, connect
from gateway.errors import ConfigurationError, LinkError
from gateway.mapping.linter import Finding, Severity
from gateway.mapping.router import Router
from gateway.protocols import DIALECTS
from gateway.settings import LinkSettings, MqttLink, Settings


def try_links(settings: Settings, router: Router) -> Iterator[Finding]:
    """Try the broker of every link, and yield findings about it.

    Findings report failed connections, missing objects, refused rights, and rights that cannot be tested.
    """
    for name, link in settings.links.items():
        for severity, code, text in _try_link(link, name, router):
            yield Finding(severity, code, f"links.{name}: {text}", *settings.origin_of(("links", name)))


def _try_link(link: LinkSettings, name: str, router: Router) -> Iterator[tuple[Severity, str, str]]:
    """Try the broker of one link, and yield severity, code and text of each finding."""
    if why := _untried(link):
        yield Severity.NOTE, "untried", f"not tested: {why}"
        return
    let_in: ConnectionOptions | None = None
    for number, place in enumerate(link.addresses):
        try:
            access = _access(link, number)
            connect(access).close()
        except (LinkError, ConfigurationError) as error:
            yield Severity.ERROR, "unreached", f"{place}: {str(error).removeprefix(f'{place}: ')}"
            continue
        let_in = let_in or access
    dialect = DIALECTS[link.protocol]
    if let_in is not None and not dialect.trials:
        yield (
            Severity.NOTE,
            "untried",
            f"login succeeded; further rights cannot be tested with {dialect.title}",
        )
    for trial in () if let_in is None else _trials(link, name, router):
        assert let_in is not None
        try:
            client = connect(let_in)  # a new one for each trial: a refusal closes the channel
        except LinkError as error:
            yield Severity.ERROR, "unreached", f"{trial.action}: {error}"
            return
        try:
            trial.act(client)
            client.close()
        except LinkError as error:
            client.close_abruptly()
            yield trial.severity, "forbidden", f"{trial.action}: {error}"


def _untried(link: LinkSettings) -> str:
    """Return why the broker of a link cannot be tried, or "" if it can."""
    if not link.tls.verify:
        return "tls.verify is false"
    return "the link authenticates by SCRAM" if link.proves_password else ""


def _access(link: LinkSettings, number: int) -> ConnectionOptions:
    own = link.tls
    ca, cert, key = [None if one is None else str(one) for one in (own.ca_file, own.cert_file, own.key_file)]
    access = ConnectionOptions(link.target(number), link.connect_timeout_secs, ca, cert, key)
    if isinstance(link, MqttLink):
        return access._replace(version=link.version, byte_order=link.byte_order)
    return access


def _trials(link: LinkSettings, name: str, router: Router) -> Iterator[Trial]:
    made = DIALECTS[link.protocol].trials
    return resolve_name(made)(link, router.subscriptions(name), router.targets(name)) if made else iter(())
