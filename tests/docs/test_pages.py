"""The pages lead somewhere: links, commands and examples name what is there, for strangers try them all."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from gateway.cli import commands
from gateway.mapping import load
from gateway.mapping.cases import run_cases
from gateway.settings import load_settings
from tests.deploy.programs import tool
from tests.deploy.test_helm import configured, rendered
from tests.deploy.test_kubernetes import taken
from tests.docs.pages import DOCS, PAGES, ROOT, Page

README_LINES_MAX: Final = 250
PAGE_LINES_MAX: Final = 400
NAMED: Final = re.compile(r"`((?:\.ci|deploy|docs|gateway|mappings|tests)/[\w./-]+)`")
EXAMPLES: Final = [
    pytest.param(text, id=f"{page.name}: {text.strip().splitlines()[0]}")
    for page in PAGES.values()
    for kind, text in page.blocks
    if kind == "yaml"
]
RECORD: Final = re.compile(
    r"# (?P<title>\d{4}\. .+)\n\n"
    r"\*\*Status:\*\* (?:accepted|superseded by \[\d{4}\])[^*]*"
    r"\*\*Date:\*\* \d{1,2} [A-Z][a-z]+ \d{4}\..*\n\n"
    r"## Context\n(?s:.+)\n## Decision\n(?s:.+)\n## Consequences\n(?s:.+)"
)
RECORD_WORDS_MAX: Final = 400
OF_OTHERS: Final = re.compile(r"^(?:config|scrape_configs):", re.MULTILINE)
COMMAND: Final = re.compile(r"^(?:\$ )?(?:\.venv/bin/)?gateway +([a-z][a-z -]*[a-z])", re.MULTILINE)


def wrong(of: dict[str, list[str]]) -> dict[str, list[str]]:
    """Only the pages where something is."""
    return {name: found for name, found in of.items() if found}


def test_no_two_titles_of_a_page_have_one_anchor() -> None:
    assert not wrong({p.name: [a for a, n in Counter(p.anchors).items() if n > 1] for p in PAGES.values()})


def test_links_lead_to_titles_and_files() -> None:
    assert not wrong({p.name: [link for link in p.links if not leads(p, link)] for p in PAGES.values()})


def leads(page: Page, link: str) -> bool:
    """Whether there is such a page or file, and in a page such a title."""
    path, _, title = link.partition("#")
    target = (page.path.parent / path).resolve() if path else page.path
    if not title:
        return target.is_file()
    return target in PAGES and title in PAGES[target].anchors


def test_every_page_is_listed_by_the_index_of_its_folder() -> None:
    for folder in sorted({path.parent for path in PAGES if path.is_relative_to(DOCS)}):
        links = [(folder / link.partition("#")[0]).resolve() for link in PAGES[folder / "index.md"].links]
        below = [*folder.glob("*.md"), *folder.glob("*/index.md")]
        assert [path for path in below if path not in links and path != folder / "index.md"] == []


def test_decision_records_have_one_form_and_are_listed_by_their_titles() -> None:
    folder = DOCS / "developing" / "decisions"
    index = (folder / "index.md").read_text(encoding="utf-8")
    for path in folder.glob("[0-9]*.md"):
        text = path.read_text(encoding="utf-8")
        record = RECORD.fullmatch(text)
        assert record, path.name
        assert record["title"][:4] == path.name[:4]
        superseded = " (superseded)" if "**Status:** superseded" in text else ""
        assert f"- [{record['title']}]({path.name}){superseded}\n" in index
        words = [word for word in text.split() if re.search(r"\w", word)]
        assert len(words) <= RECORD_WORDS_MAX, path.name


def test_changes_are_named_as_towncrier_reads_them() -> None:
    """`+NAME.TYPE.md`, in one paragraph; a file of any other name would be left out of the changelog."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["towncrier"]
    types = "|".join(one["directory"] for one in settings["type"])
    changes = [path for path in (ROOT / settings["directory"]).iterdir() if path.name != ".gitkeep"]
    assert [path.name for path in changes if not re.fullmatch(rf"\+[\w-]+\.(?:{types})\.md", path.name)] == []
    assert [path.name for path in changes if "\n\n" in path.read_text(encoding="utf-8").strip()] == []
    changelog = (ROOT / settings["filename"]).read_text(encoding="utf-8")
    assert changelog.count(settings["start_string"]) == 1


def test_no_page_is_long() -> None:
    assert PAGES[ROOT / "README.md"].lines <= README_LINES_MAX
    assert [page.name for page in PAGES.values() if page.lines > PAGE_LINES_MAX] == []


def test_each_row_of_a_table_has_a_line_of_its_own() -> None:
    """A table that was wrapped as a paragraph is shown as text."""
    wrapped = re.compile(r"^(?! *\|[-:| ]+$).*\|[-:]{3,}\|", re.MULTILINE)
    assert [page.name for page in PAGES.values() if wrapped.search(page.prose)] == []


def test_paths_and_targets_are_there() -> None:
    rules = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES.values():
        paths = [path for path in NAMED.findall(page.prose) if "NAME" not in path]
        assert [path for path in paths if not (ROOT / path).exists()] == [], page.name
        assert set(re.findall(r"(?:`|^\$ )make ([\w-]+)", page.text, re.MULTILINE)) <= rules, page.name


def test_the_readme_counts_as_the_conformance_tables_do() -> None:
    readme = PAGES[ROOT / "README.md"].text
    counts = {"amqp-0-9-1": r"(\d+) scripts", "mqtt-5.0": r"(\d+) (?:bind|statements of MQTT 5.0 that bind)"}
    for name, count in counts.items():
        table = PAGES[DOCS / "conformance" / f"{name}.md"].text
        assert re.findall(count, readme) == re.findall(count, table)[:1] != []


def test_commands_are_there() -> None:
    """As far as a line says them in small letters: `gateway journal tail`."""
    known = get_command(commands())
    assert isinstance(known, TyperGroup)
    for page in PAGES.values():
        typed = "".join(text for kind, text in page.blocks if kind in ("", "console"))
        said = [one.split() for one in COMMAND.findall(typed)]
        assert [words for words in said if not is_command(known, words)] == [], page.name


def is_command(group: TyperGroup, words: list[str]) -> bool:
    """Whether the first words name a command, or a group of them."""
    found = group.commands.get(words[0])
    return is_command(found, words[1:]) if isinstance(found, TyperGroup) and words[1:] else found is not None


@pytest.mark.parametrize("text", [one for one in EXAMPLES if not OF_OTHERS.search(one.values[0])])
def test_an_example_is_read_as_it_stands(text: str, tmp_path: Path) -> None:
    """A configuration or a mapping file, and not both in one; what tests there are in it pass."""
    file = tmp_path / "example.yaml"
    keys: dict[str, Any] = yaml.safe_load(text)
    if "routes" in keys:
        file.write_text(text if "version" in keys else f"version: 1\n{text}")
        mappings = load([file])
        assert [one for mapping in mappings for one in run_cases(mapping) if not one.passed] == []
    else:
        file.write_text(text)
        load_settings(file, {})


@pytest.mark.parametrize("text", [one for one in EXAMPLES if OF_OTHERS.search(one.values[0])])
def test_an_example_for_helm_or_prometheus_is_read_as_it_stands(text: str, tmp_path: Path) -> None:
    """Values of the chart, with a configuration inside, or a configuration of Prometheus."""
    keys: dict[str, Any] = yaml.safe_load(text)
    if "config" in keys:
        taken(configured(rendered(keys, tmp_path)), tmp_path)
    else:
        (tmp_path / "prometheus.yaml").write_text(text)
        tool("promtool", "check", "config", "--syntax-only", tmp_path / "prometheus.yaml")
