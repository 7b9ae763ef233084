"""The site: `make docs`. The pages are plain Markdown; what only the generator wants to know is said here."""

from __future__ import annotations

import re
from posixpath import basename
from typing import Final

from sphinx.application import Sphinx

from gateway import __version__

LISTED: Final = re.compile(r"^(?:-|\d+\.) \[[^]]+\]\((?!https?:|\.\.)([^)#]+)\.md\)", re.MULTILINE)

project = "gateway"
version = release = __version__
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["generate.py"]
html_theme = "furo"
html_title = f"gateway {__version__}"
html_show_sphinx = False
html_show_copyright = False
highlight_language = "none"
myst_heading_anchors = 4


def navigation(_: Sphinx, page: str, text: list[str]) -> None:
    """What an index lists is below it, in that order."""
    listed = LISTED.findall(text[0]) if basename(page) == "index" else []
    if listed:
        text[0] += "\n".join(["", "```{toctree}", ":hidden:", "", *listed, "```", ""])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", navigation)
