"""Checks of `gateway check`: files, folders, secrets, declarations, mappings, roles, and brokers."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from glob import has_magic
from pathlib import Path
from typing import Any, NamedTuple

from gateway.access.role_linter import lint_roles
from gateway.app.access import Identities, roles_of, with_imported_hosts
from gateway.app.exposure import exposures
from gateway.app.mappings import refused_routes
from gateway.broker.amqp091.declarations import gather, rehearse
from gateway.broker.amqp091.hosts import AmqpHosts
from gateway.broker.amqp091.unbound import unbound
from gateway.cli.findings import INVALID
from gateway.cli.options import settings_of
from gateway.cli.progress import progress_bar
from gateway.documents import Place, dotted
from gateway.errors import ConfigurationError, MappingError
from gateway.mapping import load
from gateway.mapping.linter import Finding, Severity, lint
from gateway.mapping.router import Router, compile_routes
from gateway.settings import FastListener, Settings, effective, masked_yaml
from gateway.store.folder import fault
from gateway.transport.certificates import load_pair, load_revocations


class CheckResult(NamedTuple):
    """Result of `gateway check`. `settings` is None if the configuration could not be read."""

    settings: Settings | None
    findings: list[Finding]

    @property
    def errors(self) -> int:
        """Number of errors among the findings."""
        return self._count(Severity.ERROR)

    @property
    def warnings(self) -> int:
        """Number of warnings among the findings."""
        return self._count(Severity.WARNING)

    def _count(self, severity: Severity) -> int:
        return sum(one.severity is severity for one in self.findings)

    def counts(self) -> dict[str, int]:
        """Return the numbers of listeners, links and mapping files, and of findings by severity."""
        settings = self.settings
        return {
            "listeners": 0 if settings is None else len(settings.listeners),
            "links": 0 if settings is None else len(settings.links),
            "mapping_files": 0 if settings is None else len(settings.mapping_files()),
            "errors": self.errors,
            "warnings": self.warnings,
            "notes": self._count(Severity.NOTE),
        }

    def summary(self) -> str:
        """Return as one line of text how many objects of each kind were checked."""
        counts = [
            f"{count} {name.replace('_', ' ').removesuffix('s' if count == 1 else '')}"
            for name, count in self.counts().items()
        ]
        return f"checked {', '.join(counts[:3])}: {', '.join(counts[3:])}"

    def configuration(self) -> dict[str, Any] | None:
        """Return the effective configuration, or None if it could not be read."""
        return None if self.settings is None else effective(self.settings)

    def configuration_text(self) -> str:
        """Return the effective configuration as YAML, or "" if it could not be read."""
        return "" if self.settings is None else masked_yaml(self.settings)


def run_checks(config: Path | None, *, connect: bool) -> CheckResult:
    """Read the configuration, run all checks, and return the findings, errors first.

    With `connect`, also try the brokers of links, if there is no error before.
    """
    try:
        settings = with_imported_hosts(settings_of(config))
    except ConfigurationError as error:
        return CheckResult(None, findings_of_error(error))
    rehearsed = rehearse_declarations(settings)
    findings = [
        *(find_unreadable_files(settings) or find_unusable_secrets(settings)),
        *find_exposures(settings),
        *find_unusable_certificates(settings),
        *find_missing_folders(settings),
        *find_unwritable_folders(settings),
        *find_unreachable_listeners(settings),
        *find_relative_paths(settings),
        *find_unmatched_patterns(settings),
        *find_empty_sections(settings),
        *rehearsed.findings,
        *find_mapping_faults(settings, rehearsed),
        *find_role_faults(settings),
    ]
    if connect and all(one.severity is not Severity.ERROR for one in findings):
        from gateway.cli.broker_trials import try_links

        router = Router(
            load(settings.mapping_files()), settings.endpoints(), domains=settings.listener_namespaces()
        )
        with progress_bar("logging in at the brokers of links"):
            findings += try_links(settings, router)
    order = list(Severity)
    placed = [one if one.file else one._replace(**_origin_of(settings, one.text)) for one in findings]
    return CheckResult(settings, sorted(placed, key=lambda one: order.index(one.severity)))


def _origin_of(settings: Settings, text: str) -> dict[str, Any]:
    """Return file, line and column of the configuration key with which the text of a finding begins."""
    return settings.origin_of_key(text.partition(": ")[0])._asdict()


def findings_of_error(error: ConfigurationError) -> list[Finding]:
    """Return a finding for each error in a configuration or mapping that cannot be used."""
    return [
        Finding(Severity.ERROR, INVALID, one.reason, one.file, one.line, one.column)
        for one in (error, *error.others)
    ]


def finding_at(settings: Settings, severity: Severity, code: str, place: Place, text: str) -> Finding:
    """Return a finding about the configuration key at `place`, with the position where the key is set."""
    return Finding(severity, code, text, *settings.origin_of(place))


def find_unreadable_files(settings: Settings) -> list[Finding]:
    """Report files that the configuration names and this process cannot read."""
    return [
        finding_at(
            settings, Severity.ERROR, "unreadable", place, f"{dotted(place)}: {path} cannot be read: {why}"
        )
        for place, path in settings.files()
        if (why := _obstacle(path))
    ]


def _obstacle(path: Path) -> str:
    """Return why this process cannot read a file, or "" if it can."""
    try:
        path.open("rb").close()
    except PermissionError:
        return f"permission denied for user id {os.geteuid()}"
    except FileNotFoundError:
        there = next(one for one in path.absolute().parents if one.exists())
        is_beside = there == path.absolute().parent
        return "no such file" if is_beside else f"no such folder in {there}"
    except IsADirectoryError:
        return "it is a folder, not a file"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def find_unusable_secrets(settings: Settings) -> list[Finding]:
    """Report secrets of users that are neither hashes nor keys, which `gateway run` would refuse."""
    try:
        Identities(settings)
    except ConfigurationError as error:
        return findings_of_error(error)
    return []


def find_exposures(settings: Settings) -> list[Finding]:
    """Report settings by which secrets or the gateway are exposed to the network."""
    try:
        hashes = Identities(settings).hashes
    except ConfigurationError:
        hashes = {}  # `find_unusable_secrets` reports the error
    return [
        finding_at(settings, Severity.WARNING, "exposed", one.place, str(one))
        for one in exposures(settings, hashes)
    ]


def find_unusable_certificates(settings: Settings) -> list[Finding]:
    """Report certificates that do not match their keys, and certificates and CRLs that cannot be loaded."""
    files = dict(settings.files())
    found = []
    for place, path in files.items():
        key = files.get((*place[:-1], "key_file"))
        if place[-1] != "cert_file" or key is None or not (path.is_file() and key.is_file()):
            continue
        try:
            load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), path, key)
        except OSError as error:
            text = f"{dotted(place)}: {error.strerror or error}"
            found.append(finding_at(settings, Severity.ERROR, "certificate", place, text))
    for place, path in files.items():
        if place[-1] == "crl_file" and path.is_file():
            try:
                load_revocations(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), path)
            except OSError as error:
                text = f"{dotted(place)}: {error.strerror or error}"
                found.append(finding_at(settings, Severity.ERROR, "certificate", place, text))
    return found


def find_missing_folders(settings: Settings) -> list[Finding]:
    """Report missing folders that AMQP/Fast listeners share with clients (`out_of_band`).

    Until such a folder exists, channels that name it are closed.
    """
    found = []
    for name, listener in settings.listeners.items():
        if not isinstance(listener, FastListener) or listener.out_of_band is None:
            continue
        if not (folder := listener.out_of_band.folder).is_dir():
            place = ("listeners", name, "out_of_band", "folder")
            text = (
                f"{dotted(place)}: no folder {folder}. Create it; until then, channels that name it"
                " are closed"
            )
            found.append(finding_at(settings, Severity.WARNING, "absent", place, text))
    return found


def find_unreachable_listeners(settings: Settings) -> list[Finding]:
    """Report listeners with the PROXY protocol but without trusted balancers.

    No client can connect to them.
    """
    return [
        finding_at(
            settings,
            Severity.WARNING,
            "unreachable",
            ("listeners", name, "proxy_protocol"),
            (
                f"listeners.{name}.proxy_protocol: no client can connect. Set proxy_protocol_from to"
                " the addresses of the load balancers"
            ),
        )
        for name, one in settings.listeners.items()
        if one.proxy_protocol != "off" and not one.proxy_protocol_from
    ]


def find_unwritable_folders(settings: Settings) -> list[Finding]:
    """Report folders of the store and the journal to which this process cannot write.

    This is a warning only, because `gateway run` may be meant for another user.
    """
    folders: list[tuple[Place, Path, bool]] = [
        (("store", "path"), settings.store.path, settings.store.enabled),
        (("journal", "path"), settings.journal_path(), settings.journal.enabled),
    ]
    return [
        finding_at(settings, Severity.WARNING, "unwritable", place, f"{dotted(place)}: {why}")
        for place, folder, used in folders
        if used and (why := fault(folder))
    ]


def find_relative_paths(settings: Settings) -> list[Finding]:
    """Report relative paths in a configuration file that is not in the working directory.

    They are relative to the working directory, but the author may have meant the file's folder.
    """
    here = Path.cwd()
    if settings.file is None or (beside := settings.file.resolve().parent) == here:
        return []
    return [
        finding_at(
            settings,
            Severity.WARNING,
            "relative",
            place,
            f"{dotted(place)}: {path} is relative to the working directory {here}, not to "
            f"{beside}, the folder of this file",
        )
        for place, path in _paths(settings)
        if settings.origin_of(place).file == str(settings.file) and not path.is_absolute()
    ]


def _paths(settings: Settings) -> Iterator[tuple[Place, Path]]:
    """Yield key and path of each file or folder that the configuration sets, other than by a default."""
    paths: list[tuple[Place, Path | None]] = [*settings.files()]
    paths += [(("store", "path"), settings.store.path), (("journal", "path"), settings.journal.path)]
    paths += [(("audit", "path"), settings.audit.path), (("http", "tokens_path"), settings.http.tokens_path)]
    for place, path in paths:
        if path is not None and settings.is_set(place):
            yield place, path


def find_unmatched_patterns(settings: Settings) -> list[Finding]:
    """Report glob patterns of mapping files that match no file."""
    return [
        finding_at(
            settings,
            Severity.WARNING,
            "empty",
            ("mappings", number),
            f"mappings[{number}]: no file matches {glob}",
        )
        for number, glob in enumerate(settings.mappings)
        if has_magic(glob) and not settings.expand_pattern(glob)
    ]


def find_empty_sections(settings: Settings) -> list[Finding]:
    """Report sections without content, for which the defaults apply.

    This is a warning if the default of the section is not empty.
    """
    found = []
    for name in settings.empty_sections():
        value = getattr(settings, name)
        nothing = "[]" if isinstance(value, tuple) else "{}"
        severity, text = Severity.NOTE, f"{name}: is empty, so its defaults apply; remove the key"
        if value and isinstance(value, tuple | dict):
            severity, text = Severity.WARNING, f"{text}, or write {name}: {nothing} for none"
        found.append(finding_at(settings, severity, "empty", (name,), text))
    return found


class Rehearsal(NamedTuple):
    """Result of trying the declarations of queues, exchanges and bindings in memory, without the store.

    `hosts` are the resulting virtual hosts, or None if the declarations have errors. `declaring` has the
    names of the virtual hosts that have at least one declaration.
    """

    findings: list[Finding]
    hosts: AmqpHosts | None
    declaring: set[str]


def rehearse_declarations(settings: Settings) -> Rehearsal:
    """Read the declarations of the configuration, and try them in memory."""
    declared, findings = gather(settings)
    hosts, remarks = rehearse(settings, declared)
    whole = all(one.severity is not Severity.ERROR for one in remarks)
    return Rehearsal([*findings, *remarks], hosts if whole else None, {one.host for one in declared})


def find_mapping_faults(settings: Settings, rehearsed: Rehearsal) -> list[Finding]:
    """Report faults and unwise rules in the mapping files, for the configured endpoints."""
    try:
        mappings = load(settings.mapping_files())
    except MappingError as error:
        return findings_of_error(error)
    routes = compile_routes(mappings, settings.endpoints(), settings.listener_namespaces()).routes
    refused = refused_routes(routes, settings)
    hosts = rehearsed.hosts
    return [
        *(finding for error in refused for finding in findings_of_error(error)),
        *lint(mappings, settings.endpoints(), settings.links, settings.listener_namespaces()),
        *(() if hosts is None else unbound(routes, settings, hosts, rehearsed.declaring)),
    ]


def find_role_faults(settings: Settings) -> list[Finding]:
    """Report unwise roles, and routes that are unwise because of roles."""
    try:
        routes = compile_routes(
            load(settings.mapping_files()), settings.endpoints(), settings.listener_namespaces()
        ).routes
        return lint_roles(settings, roles_of(settings), routes)
    except ConfigurationError:
        return []  # other checks report the error
