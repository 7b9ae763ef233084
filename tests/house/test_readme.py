"""The README leads somewhere: links, commands and examples name what is there, for strangers try them all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from gateway.mapping import load
from gateway.settings import load_settings

ROOT: Final = Path(__file__).resolve().parents[2]
TEXT: Final = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS: Final = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
PROSE: Final = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
TITLES: Final = re.findall(r"^(#+) (.*)$", PROSE, re.MULTILINE)
PATHS: Final = re.findall(r"`((?:\.ci|deploy|gateway|mappings|tests)/[\w./-]+)`", PROSE)
EXAMPLES: Final = [text for kind, text in BLOCKS if kind == "yaml"]


def anchor(title: str) -> str:
    """What GitHub makes of a title."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_no_two_titles_have_one_anchor() -> None:
    anchors = [anchor(title) for _, title in TITLES]
    assert sorted(set(anchors)) == sorted(anchors)


def test_links_lead_to_titles_and_files() -> None:
    anchors = {anchor(title) for _, title in TITLES}
    targets = [
        target for target in re.findall(r"\]\(([^)\s]+)\)", PROSE) if not target.startswith("https://")
    ]
    lost = [
        target
        for target in targets
        if (target[1:] not in anchors if target.startswith("#") else not (ROOT / target).exists())
    ]
    assert lost == []


def test_the_contents_name_every_chapter() -> None:
    contents = PROSE[PROSE.index("**Contents:**") :].split("\n\n", 1)[0]
    chapters = [title for level, title in TITLES if level == "##"]
    assert re.findall(r"\[([^]]+)\]", contents) == chapters


def test_paths_and_targets_are_there() -> None:
    assert [path for path in PATHS if not (ROOT / path).exists()] == []
    rules = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)", TEXT)) - rules == set()


@pytest.mark.parametrize("text", EXAMPLES, ids=lambda text: text.strip().splitlines()[0])
def test_an_example_is_read_as_it_stands(text: str, tmp_path: Path) -> None:
    """A configuration or a mapping file, and not both in one."""
    file = tmp_path / "example.yaml"
    keys: dict[str, Any] = yaml.safe_load(text)
    if "routes" in keys:
        file.write_text(text if "version" in keys else f"version: 1\n{text}")
        assert load([file])
    else:
        file.write_text(text)
        load_settings(file, {})
