"""Mistakes in configuration and mapping files (mistakes.yaml), and what `gateway check` says to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from gateway.cli.checks import run_checks
from gateway.cli.findings import documents_of

BASE: Final = """\
listeners:
  mqtt: {protocol: mqtt, port: 1883}
  amqp: {protocol: amqp091, port: 5672}
links:
  erp: {url: 'amqp://erp.example'}
mappings: [map.yaml]
"""
UP: Final = """\
version: 1
routes:
  - name: up
    from: {endpoint: mqtt, topic: 'plant/{line}/t'}
    to: {endpoint: erp, exchange: plant, routing_key: '{line}'}
"""
SENTENCE_WORDS: Final = 2
ROWS: Final[dict[str, dict[str, Any]]] = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text())


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the files of a row stand in the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ROWS)
def test_the_message_says_what_to_write(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS[name]
    configuration, mapping = row.get("configuration", BASE), row.get("mapping", UP)
    Path("gateway.yaml").write_bytes(configuration.encode(row.get("encoding", "utf-8")))
    Path("map.yaml").write_bytes(mapping.encode(row.get("mapping_encoding", "utf-8")))
    for variable, value in row.get("variables", {}).items():
        monkeypatch.setenv(variable, value)
    found = [one.text for one in run_checks(Path("gateway.yaml"), connect=False).findings]
    assert any(row["says"] in one for one in found), found
    assert [one for one in found if len(one.split()) < SENTENCE_WORDS] == []


def test_the_files_without_a_mistake_have_no_finding_of_weight() -> None:
    Path("gateway.yaml").write_text(BASE)
    Path("map.yaml").write_text(UP)
    result = run_checks(Path("gateway.yaml"), connect=False)
    assert {one["code"] for one in documents_of(result.findings)} <= {"unnamed", "long_key"}
