"""What an import makes: a configuration, a mapping, and what could not be taken."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from gateway.mapping.linter import Finding, Severity

NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_.-]+")
NAME_MAX: Final = 64  # of a route


class _Plain(yaml.SafeDumper):
    """Writes what is there twice twice: anchors are for people who know YAML."""

    def ignore_aliases(self, _: Any) -> bool:
        return True


@dataclass
class Made:
    """`configuration` and `routes` as YAML has them. `folder`: where they will stand."""

    source: Path
    folder: Path
    configuration: dict[str, Any] = field(default_factory=dict)
    routes: list[dict[str, Any]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    alien: bool = False  # the file is none of its kind: nothing is to be made of it
    definitions: bytes = b""  # RabbitMQ's, without what cannot be taken; empty: the source says it all

    @property
    def whole(self) -> bool:
        """Whether the file could be read to its end."""
        return all(one.severity is not Severity.ERROR for one in self.findings)

    def told(
        self,
        severity: Severity,
        code: str,
        text: str,
        line: int = 0,
        file: Path | None = None,
        column: int = 0,
    ) -> None:
        """Note what could not be taken, or was taken otherwise."""
        self.findings.append(Finding(severity, code, text, str(file or self.source), line, column))

    def refused(self, text: str, *at: Any) -> None:
        """The file is none of its kind; `at`: line, file, column, as far as they are known."""
        self.alien = True
        self.told(Severity.ERROR, "alien", text, *at)

    def route(self, name: str, source: dict[str, Any], target: dict[str, Any]) -> None:
        """A route; its name is made one, and differs from the others'."""
        taken = {one["name"] for one in self.routes}
        base = name_of(name)
        name, number = base, 2
        while name in taken:
            name, number = f"{base[: NAME_MAX - 4]}-{number}", number + 1
        self.routes.append({"name": name, "from": source, "to": target})

    def texts(self) -> tuple[str, str]:
        """The configuration, and the mapping; "" for none."""
        if self.routes:
            self.configuration.setdefault("mappings", []).append(str(self.folder / "mapping.yaml"))
        head = f"# Made of {self.source} by `gateway import`.\n"
        mapping = {"version": 1, "routes": self.routes}
        return head + _yaml(self.configuration), head + _yaml(mapping) if self.routes else ""


def name_of(text: str) -> str:
    """A name for an endpoint or a route."""
    return (NOT_IN_NAMES.sub("-", text).strip("-.") or "unnamed")[:NAME_MAX]


def _yaml(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=120)
