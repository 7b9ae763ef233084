"""The pages for people, as these tests read them."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"


def anchor(title: str) -> str:
    """What forges make of a title."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


class Page:
    """A page, taken apart into its code and its prose."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path.relative_to(ROOT))
        self.text = path.read_text(encoding="utf-8")
        self.blocks = re.findall(r"^```(\w*)\n(.*?)^```$", self.text, re.MULTILINE | re.DOTALL)
        self.prose = re.sub(r"^```.*?^```$", "", self.text, flags=re.MULTILINE | re.DOTALL)
        self.titles = re.findall(r"^#+ (.*)$", self.prose, re.MULTILINE)

    @cached_property
    def anchors(self) -> list[str]:
        """What a link may name behind its `#`."""
        return [anchor(title) for title in self.titles]

    @cached_property
    def links(self) -> list[str]:
        """Targets of links, those to other places left out."""
        found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", self.prose))
        return [target for target in found if not target.startswith(("http://", "https://"))]

    @property
    def lines(self) -> int:
        return self.text.count("\n")


PAGES: Final = {path: Page(path) for path in sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])}
