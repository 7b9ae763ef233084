"""Result of an import of another broker's configuration.

It has a configuration and a mapping of the gateway, and findings about what could not be imported.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from gateway.mapping.linter import Finding, Severity

NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_.-]+")
NAME_MAX: Final = 64  # characters of a route's name


class _Plain(yaml.SafeDumper):
    """YAML dumper that writes repeated values in full, without anchors and aliases."""

    def ignore_aliases(self, _: Any) -> bool:
        return True


@dataclass
class ImportResult:
    """Result of an import: configuration, routes and findings.

    `source` is the imported file, `folder` the folder for the resulting files. `configuration` and `routes`
    are Python values, to be written as YAML.
    """

    source: Path
    folder: Path
    configuration: dict[str, Any] = field(default_factory=dict)
    routes: list[dict[str, Any]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    alien: bool = False  # the file is not of the expected kind: nothing is written
    definitions: bytes = b""  # RabbitMQ's, without what cannot be imported; empty: use the source

    @property
    def is_complete(self) -> bool:
        """True if no finding is an error."""
        return all(one.severity is not Severity.ERROR for one in self.findings)

    def add_finding(
        self,
        severity: Severity,
        code: str,
        text: str,
        line: int = 0,
        file: Path | None = None,
        column: int = 0,
    ) -> None:
        """Add a finding about a setting that could not be imported, or was imported differently."""
        self.findings.append(Finding(severity, code, text, str(file or self.source), line, column))

    def leave_out(self, text: str, *at: Any) -> None:
        """Add a warning about a setting that was not imported.

        `at` are line, file and column of the setting, as far as they are known.
        """
        self.add_finding(Severity.WARNING, "untaken", text, *at)

    def refuse_file(self, text: str, *at: Any) -> None:
        """Mark the file as not of the expected kind, so that nothing is written, and add an error.

        `at` are line, file and column of the error, as far as they are known.
        """
        self.alien = True
        self.add_finding(Severity.ERROR, "alien", text, *at)

    def route(self, name: str, source: dict[str, Any], target: dict[str, Any]) -> None:
        """Add a route to the mapping.

        `name` is changed to a valid name that no other route has.
        """
        name = unused_name(name, {one["name"] for one in self.routes})
        self.routes.append({"name": name, "from": source, "to": target})

    def texts(self) -> tuple[str, str]:
        """Return the YAML texts of the configuration and of the mapping.

        The text of the mapping is "" if there are no routes.
        """
        if self.routes:
            self.configuration.setdefault("mappings", []).append(str(self.folder / "mapping.yaml"))
        head = f"# Converted from {self.source} by `gateway import`.\n"
        mapping = {"version": 1, "routes": self.routes}
        return head + _yaml(self.configuration), head + _yaml(mapping) if self.routes else ""


def name_of(text: str) -> str:
    """Return a valid name for an endpoint or a route, derived from `text`."""
    return (NOT_IN_NAMES.sub("-", text).strip("-.") or "unnamed")[:NAME_MAX]


def unused_name(text: str, names: Container[str]) -> str:
    """Return a valid name derived from `text` that is not among `names`, with a number if needed."""
    base = name_of(text)
    name, number = base, 2
    while name in names:
        name, number = f"{base[: NAME_MAX - 4]}-{number}", number + 1
    return name


def _yaml(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=120)
