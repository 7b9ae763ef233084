"""The reference says what the code says: what is generated is not stale, what is written by hand is whole."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, cast

import pytest

from docs import generate
from gateway.admin.readiness import Readiness
from gateway.admin.server import AdminState, application
from gateway.containment import Where
from gateway.mapping.schema import RouteRule
from gateway.model.outcome import Reason
from gateway.settings import Limits, Settings
from gateway.store.journal.columns import COLUMNS
from gateway.telemetry.metrics import Metrics
from tests.docs.pages import DOCS, PAGES, ROOT
from tests.interop.gateway_process import GatewayProcess
from tests.operator import admitting

REFERENCE: Final = DOCS / "reference"


def text_of(name: str) -> str:
    return PAGES[REFERENCE / name].text


@pytest.mark.needs("time")
def test_nothing_is_stale() -> None:
    """Else: `make docs-reference`."""
    assert [str(page.relative_to(ROOT)) for page in generate.stale()] == []


@pytest.mark.needs("time")
def test_what_is_stale_is_named_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "by hand\n<!-- generated: settings StoreSettings -->\nstale\n<!-- end -->\nby hand, too\n"
    )
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    assert generate.main(["--check"]) == 1
    assert "stale" in page.read_text()
    assert generate.main([]) == 0
    assert capsys.readouterr().out == "page.md\npage.md\n"
    text = page.read_text()
    assert text.startswith("by hand\n<!-- generated: settings StoreSettings -->\n\n| key | type | default |")
    assert "| `path` | path | `data` | Folder of the database" in text
    assert text.endswith("|\n\n<!-- end -->\nby hand, too\n")
    assert "stale" not in text
    assert generate.main(["--check"]) == 0


def test_it_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "docs.generate", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_every_part_of_the_configuration_and_of_mapping_files_has_a_table() -> None:
    """A part that is nowhere would be explained nowhere."""
    text = "".join(page.text for path, page in PAGES.items() if path.parent == REFERENCE)
    parts = set(re.findall(r"<!-- generated: settings (\w+)(?: \w+)? -->", text))
    whole = {"Settings", "LinkSettings", "ListenerSettings", *Settings.model_json_schema()["$defs"]}
    assert parts == whole - {"UnknownLink", "UnknownListener"}  # which stand for a word that is none
    parts = set(re.findall(r"<!-- generated: mapping (\w+) -->", text))
    by_hand = {"Case", "PublishedMessage", "Expected", "ListenerGroup", "Truncate"}
    assert parts | by_hand >= set(RouteRule.model_json_schema(by_alias=True)["$defs"])


def test_every_option_says_what_it_means() -> None:
    for kind, by_hand in (("settings", ()), ("mapping", ("Case", "PublishedMessage", "Expected"))):
        for name, part in generate.definitions(kind).items():
            said = {key: generate.meaning_of(kind, given) for key, given in part["properties"].items()}
            assert name in by_hand or [key for key, text in said.items() if not text] == [], name


def test_a_limit_has_its_default_beside_it() -> None:
    text = text_of("limits.md")
    for name, field in Limits.model_fields.items():
        default = re.escape(str(field.default))
        assert re.search(rf"^\| `{name}` \| [^|]+ \| `{default}` \| \S", text, re.MULTILINE), name


def test_every_column_of_the_journal_has_its_kind() -> None:
    rows = re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", text_of("journal.md"), re.MULTILINE)
    for column in COLUMNS:
        kinds = [kind for names, kind in rows if f"`{column.name}`" in names]
        assert [column.kind.name.lower() in kind for kind in kinds] == [True], column.name


def test_every_request_is_named() -> None:
    """Those below /api/v1 are generated; a gateway has all of them, as tests of the interface see."""
    state = AdminState(Metrics("0"), Readiness(), admitting()[0], clock=lambda: 0.0)
    routes = cast("list[Any]", application(state).routes)
    served = {(min(one.methods - {"HEAD"}), one.path.partition("{")[0]) for one in routes}
    named = set(re.findall(r"`(GET|POST|OPTIONS) (/[\w/.-]*)", text_of("http.md")))
    assert served - named == {("GET", "/api/v1/status")}


def test_every_reason_and_every_guard_is_explained() -> None:
    named = set(re.findall(r"`(\w+)`", text_of("guarantees.md")))
    assert {one.value for one in Reason} - named <= {"none", "lost_property"}  # nobody is told these
    named = set(re.findall(r"`(\w+)`", text_of("metrics.md")))
    assert set(Where.__args__) <= named


def test_an_event_of_the_log_has_a_constant_text() -> None:
    found = list(generate.logged('TEXT = "a"\nlog.info(TEXT, n=1, **more)\nmapping.error(x)\n'))
    assert found == [generate.Logged("a", "info", ("n",), True)]
    with pytest.raises(ValueError, match="m.py:1: the text of an event is constant"):
        list(generate.logged('log.warning(f"{kind} is paused")', "m.py"))


def test_a_gateway_that_runs_says_only_what_is_listed(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path) as gateway:
        gateway.terminate()
        lines = [json.loads(line) for line in gateway.log.splitlines() if line.startswith("{")]
    listed = re.split(r"^### ", "\n".join(generate.log_events()), flags=re.MULTILINE)
    assert {line["event"] for line in lines} >= {"started", "stopping", "stopped"}
    for line in lines:
        assert line.keys() >= {"timestamp", "level", "event", "logger"}
        (events,) = [part for part in listed if part.startswith(f"{line['level']}\n")]
        assert f"\n| {line['event']} |" in events
    (started,) = [line for line in lines if line["event"] == "started"]
    assert started["listeners"].keys() == {"mqtt", "amqp091", "amqpfast"}
    assert started["logger"] == "gateway.app.gateway"
