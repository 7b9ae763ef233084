"""Alert rules and the dashboard: Prometheus takes them, and all that they ask for is measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.dashboard import FILE, written
from tests.deploy.programs import DEPLOY, tool

PROMETHEUS: Final = DEPLOY / "prometheus"
RULES: Final = yaml.safe_load((PROMETHEUS / "alerts.yaml").read_text())
ALERTS: Final = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"]}
DOCS: Final = DEPLOY.parent / "docs"
METRIC: Final = re.compile(r"\b(?:gateway|process)_\w+")
LABEL: Final = re.compile(r"(\w+)(?:=~|!~|!=|=)\"")
FOREIGN: Final = frozenset({"up", "process_cpu_seconds_total"})  # Prometheus' own and its client library's
ALWAYS: Final = frozenset({"instance", "job", "le"})


def documented() -> dict[str, set[str]]:
    """The labels of each metric, from the page that is generated out of the code."""
    page = (DOCS / "reference" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(\w+)`( \(histogram\))? \| ([\w, ]*) \|", page, re.MULTILINE)
    found = {}
    for name, histogram, labels in rows:
        for suffix in ("_bucket", "_sum", "_count") if histogram else ("",):
            found[name + suffix] = {label.strip() for label in labels.split(",")} | ALWAYS
    return found


def expressions() -> Iterator[tuple[str, str]]:
    for name, rule in ALERTS.items():
        yield name, rule["expr"]
    for panel in json.loads(FILE.read_text())["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


@pytest.mark.parametrize("asked", [pytest.param(expr, id=name) for name, expr in expressions()])
def test_what_is_asked_for_is_measured(asked: str) -> None:
    measured = documented()
    names = set(METRIC.findall(asked)) - FOREIGN
    assert names <= measured.keys()
    labels = {label for name in names for label in measured[name]} | ALWAYS
    grouped = {one.strip() for by in re.findall(r"by \(([^)]*)\)", asked) for one in by.split(",")}
    assert grouped | set(LABEL.findall(asked)) <= labels


def test_prometheus_takes_the_rules_and_each_is_raised_and_quiet_when_it_should() -> None:
    tool("promtool", "check", "rules", PROMETHEUS / "alerts.yaml")
    tool("promtool", "test", "rules", PROMETHEUS / "alerts.test.yaml")


def test_each_alert_is_tested_both_ways() -> None:
    tests = yaml.safe_load((PROMETHEUS / "alerts.test.yaml").read_text())["tests"]
    rows = {(row["alertname"], bool(row["exp_alerts"])) for test in tests for row in test["alert_rule_test"]}
    assert rows == {(name, raised) for name in ALERTS for raised in (True, False)}


def test_an_alert_that_is_not_raised_is_noticed(tmp_path: Path) -> None:
    """Each rule in turn never true: its test fails."""
    tests = (PROMETHEUS / "alerts.test.yaml").read_text()
    for name in ("GatewayLinkDown", "GatewayDrops"):
        rules = json.loads(json.dumps(RULES))
        for rule in rules["groups"][0]["rules"]:
            if rule["alert"] == name:
                rule["expr"] = f"({rule['expr']}) and vector(1) == 2"
        (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(rules))
        (tmp_path / "alerts.test.yaml").write_text(tests)
        assert name in tool("promtool", "test", "rules", tmp_path / "alerts.test.yaml", succeeds=False)


@pytest.mark.parametrize("name", ALERTS)
def test_the_runbook_has_a_section_for_each_alert(name: str) -> None:
    assert f"\n## {name}\n" in (DOCS / "guides" / "runbook.md").read_text()


def test_the_runbook_has_no_other_alert() -> None:
    text = (DOCS / "guides" / "runbook.md").read_text()
    assert re.findall(r"^## (Gateway\w+)$", text, re.MULTILINE) == list(ALERTS)


def test_the_dashboard_is_what_its_program_writes() -> None:
    assert FILE.read_text() == written(), "python -m deploy.grafana.dashboard"


def test_grafana_s_own_model_reads_the_dashboard() -> None:
    given: dict[str, Any] = json.loads(FILE.read_text())
    read = Dashboard.from_json(given)
    assert read.title == "Gateway"
    assert read.panels is not None
    assert len(read.panels) == len(given["panels"])
    ids = [panel["id"] for panel in given["panels"]]
    assert len(ids) == len(set(ids)), "Grafana draws one panel for each id"


def test_prometheus_takes_what_the_dashboard_asks(tmp_path: Path) -> None:
    variables = {"$__rate_interval": "5m", "$instance": ".*"}
    asked = []
    for number, (_, expression) in enumerate(expressions()):
        for name, value in variables.items():
            expression = expression.replace(name, value)
        asked.append({"record": f"gateway:asked:{number}", "expr": expression})
    (tmp_path / "asked.yaml").write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": asked}]}))
    tool("promtool", "check", "rules", tmp_path / "asked.yaml")
