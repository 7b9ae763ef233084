"""Declarations of the configuration and of RabbitMQ's exported files: read, checked, and carried out.

They are checked on empty virtual hosts without a store, which are created for that. What cannot be declared
there is invalid in itself, and `gateway check` finds it in the same way. What cannot be declared only at the
start differs from what the store has. Everything is declared as by a client: existing objects that agree with
their declaration are used unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Final, NamedTuple

from gateway.broker.amqp091.arguments import ALTERNATE, EXCHANGE_ARGUMENTS, QUEUE_ARGUMENTS
from gateway.broker.amqp091.exports import KINDS, ExportedObject, read_export
from gateway.broker.amqp091.hosts import AmqpHosts
from gateway.broker.amqp091.policies import Policy, merge_policies, read_policies
from gateway.broker.amqp091.refusals import NOT_FOUND, PRECONDITION_FAILED, AmqpRefused
from gateway.broker.amqp091.virtual_host import BUILT_IN, VirtualHost
from gateway.documents import suggestion
from gateway.errors import ConfigurationError
from gateway.mapping.linter import Finding, Severity
from gateway.protocols.amqp091.dialect import AMQP091
from gateway.settings import AmqpListener, DeclaredBinding, DeclaredExchange, DeclaredQueue, Origin, Settings
from gateway.settings.declare import headers

TOLD_MAX: Final = 20  # findings of one kind


class Declared(NamedTuple):
    """Declaration of a queue, exchange or binding, with its virtual host and its place in the file.

    `kind` is "queues", "exchanges" or "bindings".
    """

    kind: str
    thing: ExportedObject
    host: str
    place: str
    origin: Origin
    imported: bool = False

    def finding(self, severity: Severity, text: str) -> Finding:
        """Return a finding about the declaration."""
        file, line, column = self.origin
        return Finding(severity, "declared", f"{self.place}: {text}", file, line, column)


class GatheredDeclarations(NamedTuple):
    """All declarations, ordered so that each can be carried out, and the findings about them."""

    declared: list[Declared]
    findings: list[Finding]


def gather(settings: Settings) -> GatheredDeclarations:
    """Read the declarations of the settings and of the files that they name."""
    options = settings.declare
    hosts = settings.amqp_hosts()
    found: list[Declared] = []
    findings: list[Finding] = []
    for kind, _ in KINDS:
        several: Sequence[ExportedObject] = getattr(options, kind)
        for at, thing in enumerate(several):
            origin = settings.origin_of(("declare", kind, at))
            found.append(Declared(kind, thing, thing.vhost or hosts[0], f"declare.{kind}[{at}]", origin))
    for file in options.definitions:
        origin = Origin(str(file))
        try:
            export = read_export(file, hosts, others_take=_taken(settings))
        except ConfigurationError as error:
            findings.append(_error(error.reason, Origin(error.file, error.line, error.column)))
            continue
        findings += _first([_error(fault, origin) for fault in export.faults])
        if export.ignored_text:
            text = f"ignored, because the gateway does not support it: {export.ignored_text}"
            findings.append(Finding(Severity.NOTE, "declared", text, str(file), 0))
        found += [
            Declared(kind, thing, thing.vhost or hosts[0], f"{kind}[{at}]", origin, imported=True)
            for kind, at, thing in export.objects
        ]
    if options.has_declarations and not any(
        isinstance(one, AmqpListener) for one in settings.listeners.values()
    ):
        text = (
            f"declare: no listener uses {AMQP091.title}, so no client can reach the declared queues."
            " Add a listener, or remove declare"
        )
        findings.append(Finding(Severity.WARNING, "declared", text, "", 0))
    order = [kind for kind, _ in KINDS]
    found.sort(key=lambda one: order.index(one.kind))
    whole, lost = _with_both_ends(found)
    for name, count in lost.items():
        text = f"ignored: bindings whose exchange or queue is not in the export ({count})"
        findings.append(Finding(Severity.NOTE, "declared", text, name, 0))
    return GatheredDeclarations(whole, findings)


def _taken(settings: Settings) -> list[str]:
    """Return the lists of an exported file that other parts of the gateway read, such as users."""
    declared = settings.declare
    users = ["users", "permissions", "topic_permissions"] if declared.users else []
    return users + ["policies"] * declared.policies


def policies_of(settings: Settings) -> dict[str, list[Policy]]:
    """Return the policies of the exported files, by virtual host.

    Raises ConfigurationError.
    """
    declared = settings.declare
    return merge_policies([read_policies(file) for file in declared.definitions]) if declared.policies else {}


def _with_both_ends(declared: Sequence[Declared]) -> tuple[list[Declared], Counter[str]]:
    """Return the declarations without imported bindings whose queue or exchange is missing.

    The second result counts these by file. RabbitMQ exports the bindings of queues that are exclusive or not
    durable, but not the queues.
    """
    there = {
        (one.host, one.kind, one.thing.name) for one in declared if not isinstance(one.thing, DeclaredBinding)
    }
    there |= {(host, "exchanges", name) for host in {one.host for one in declared} for name in BUILT_IN}
    whole: list[Declared] = []
    lost: Counter[str] = Counter()
    for one in declared:
        if (
            one.imported
            and isinstance(one.thing, DeclaredBinding)
            and not _ends(one.host, one.thing) <= there
        ):
            lost[one.origin.file] += 1
        else:
            whole.append(one)
    return whole, lost


def _ends(host: str, binding: DeclaredBinding) -> set[tuple[str, str, str]]:
    """Return both ends of a binding as (virtual host, kind, name)."""
    to = f"{binding.destination_type}s"
    return {(host, "exchanges", binding.source), (host, to, binding.destination)}


def rehearse(settings: Settings, declared: Sequence[Declared]) -> tuple[AmqpHosts, list[Finding]]:
    """Carry out the declarations on new, empty virtual hosts.

    Return these hosts, and the errors or, if there are none, the warnings.
    """
    try:
        policies = policies_of(settings)
    except ConfigurationError as error:
        return AmqpHosts([], _ignore_routing_change, settings.limits, None, _ignore_dead_letters), [
            _error(error.reason, Origin(error.file, error.line, error.column))
        ]
    names = settings.amqp_hosts()
    hosts = AmqpHosts(
        names, _ignore_routing_change, settings.limits, None, _ignore_dead_letters, policies=policies
    )
    findings = declare(hosts, declared)
    if not findings:
        findings = _first([remark for one in declared for remark in _remarks(hosts[one.host], one)])
    return hosts, findings


def declare(hosts: AmqpHosts, declared: Sequence[Declared]) -> list[Finding]:
    """Carry out the declarations on virtual hosts. Return the errors, [] if there are none.

    Declarations of existing objects come first, then new queues and exchanges, then bindings. Stops after the
    first of these groups that has an error, so nothing is added if an existing object differs.
    """
    there = [one for one in declared if one.host in hosts and _exists(hosts[one.host], one.thing)]
    known_ids = set(map(id, there))
    new = [one for one in declared if id(one) not in known_ids and not isinstance(one.thing, DeclaredBinding)]
    bindings = [one for one in declared if isinstance(one.thing, DeclaredBinding)]
    for some in (there, new, bindings):
        if faults := [fault for one in some for fault in _declare_one(hosts, one)]:
            return _first(faults)
    for host in hosts.values():
        host.has_durable_changes = False  # no client waits for a response
    return []


def _first(findings: list[Finding]) -> list[Finding]:
    """Return the first findings and a note with the number of the others, of which there may be thousands."""
    if len(findings) <= TOLD_MAX:
        return findings
    severity = min((one.severity for one in findings), key=list(Severity).index)
    more = Finding(
        severity, "declared", f"declare: {len(findings) - TOLD_MAX} more findings of this kind", "", 0
    )
    return [*findings[:TOLD_MAX], more]


def _ignore_dead_letters(messages: object, outcome: object) -> None:
    """Ignore dead letters, because a rehearsal has none."""


def _ignore_routing_change() -> None:
    """Ignore changes of routing in virtual hosts without publishers."""


def _exists(host: VirtualHost, thing: ExportedObject) -> bool:
    if isinstance(thing, DeclaredBinding):
        return False
    return thing.name in (host.queues if isinstance(thing, DeclaredQueue) else host.exchanges)


def _declare_one(hosts: AmqpHosts, one: Declared) -> Iterator[Finding]:
    host = hosts.get(one.host)
    if host is None:
        text = f"vhost: no listener serves {one.host!r}{suggestion(one.host, list(hosts))}"
        yield one.finding(Severity.ERROR, text)
        return
    try:
        _apply(host, one.thing)
    except AmqpRefused as error:
        text = str(error)
        if isinstance(one.thing, DeclaredBinding):
            if error.code == NOT_FOUND:
                text += "; declare it in the configuration, too"
        elif error.code == PRECONDITION_FAILED and _exists(host, one.thing):
            text += (
                "; it exists with other properties, from an earlier start or another declaration."
                " Declare it with the same properties, or delete the existing one"
            )
        yield one.finding(Severity.ERROR, text)


def _apply(host: VirtualHost, thing: ExportedObject) -> None:
    """Carry out one declaration on a virtual host. Raises AmqpRefused."""
    arguments = headers(thing.arguments)
    if isinstance(thing, DeclaredExchange):
        host.declare_exchange(
            thing.name,
            thing.type,
            durable=thing.durable,
            auto_delete=thing.auto_delete,
            internal=thing.internal,
            arguments=arguments,
            user=None,
        )
    elif isinstance(thing, DeclaredQueue):
        host.declare_queue(
            thing.name,
            None,
            user=None,
            durable=thing.durable,
            exclusive=False,
            auto_delete=thing.auto_delete,
            arguments=arguments,
        )
    elif thing.destination_type == "queue":
        queue = host.queue(thing.destination, None)
        host.bind(thing.source, queue, thing.routing_key, arguments, user=None)
    else:
        exchange = host.bindable(thing.destination)
        host.bind(thing.source, exchange, thing.routing_key, arguments, user=None)


def _remarks(host: VirtualHost, one: Declared) -> Iterator[Finding]:
    """Yield warnings about a declaration that is valid but probably not intended."""
    thing = one.thing
    if isinstance(thing, DeclaredBinding):
        return
    known_names, way = list(QUEUE_ARGUMENTS), "x-dead-letter-exchange"
    if isinstance(thing, DeclaredExchange):
        known_names, way = list(EXCHANGE_ARGUMENTS), ALTERNATE
    severity = Severity.NOTE if one.imported else Severity.WARNING
    for name in thing.arguments:
        if name not in known_names:
            near = get_close_matches(name, known_names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            yield one.finding(severity, f"arguments.{name}: not supported, so it has no effect{hint}")
    leads = thing.arguments.get(way)
    if leads and leads not in host.exchanges:
        text = (
            f"it refers to exchange {leads!r}, which is not declared: messages for that exchange are"
            " lost until it is declared"
        )
        yield one.finding(severity, text)
    if thing.auto_delete:
        text = (
            f"auto_delete: {thing.name!r} is deleted when its last consumer or binding is removed,"
            " and is declared only at the next start"
        )
        yield one.finding(severity, text)


def _error(text: str, origin: Origin) -> Finding:
    return Finding(Severity.ERROR, "invalid", text, origin.file, origin.line, origin.column)
