"""Declaration of the configured exchanges, queues and bindings when the gateway starts.

Either all of `declare` and of RabbitMQ exports is declared, or the gateway does not start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import structlog

from gateway.broker.amqp091.declarations import declare, gather, rehearse
from gateway.broker.amqp091.hosts import AmqpHosts
from gateway.errors import ConfigurationError
from gateway.mapping.linter import Finding, Severity
from gateway.settings import Settings

log = structlog.get_logger()


def declare_all(settings: Settings, hosts: AmqpHosts) -> None:
    """Declare the exchanges, queues and bindings of the configuration and of RabbitMQ exports in `hosts`.

    Logs how many objects were declared. Raises ConfigurationError with a line for each error; then the
    gateway must not start.
    """
    declared, findings = gather(settings)
    destinations = sum(
        len(one.destinations.queues) + len(one.destinations.topics)
        for one in settings.virtual_hosts().values()
    )
    if not (declared or findings or destinations):
        return
    _refuse(findings)
    findings += rehearse(settings, declared)[1]
    _refuse(findings)
    before = _count(hosts)
    _refuse(declare(hosts, declared))
    for finding in findings:
        if finding.severity is Severity.WARNING:
            log.warning("declaration questionable", file=finding.file, line=finding.line, reason=finding.text)
        else:
            log.info("declaration noted", file=finding.file, line=finding.line, note=finding.text)
    things = Counter(one.kind for one in declared)
    log.info(
        "configured exchanges and queues declared",
        **things,
        destinations=destinations,
        new_count=_count(hosts) - before,
    )


def _count(hosts: AmqpHosts) -> int:
    """Return the number of exchanges, queues and bindings in all virtual hosts."""
    return sum(len(host.exchanges) + len(host.queues) + host.bindings for host in hosts.values())


def _refuse(findings: Sequence[Finding]) -> None:
    """Raise ConfigurationError with a line for each finding that is an error; without errors do nothing."""
    faults = [finding for finding in findings if finding.severity is Severity.ERROR]
    if faults:
        places = [
            ConfigurationError(one.text, file=one.file, line=one.line, column=one.column) for one in faults
        ]
        raise ConfigurationError("\n".join(map(str, places)))
