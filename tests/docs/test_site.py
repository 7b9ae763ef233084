"""The site is built without a warning, and its navigation leads to every page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.docs.pages import DOCS, PAGES, ROOT


def test_the_site_is_built_as_make_docs_does(tmp_path: Path) -> None:
    """A lost anchor, a lost file or a page that no index lists is a warning, and an error here."""
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", tmp_path / "trees", DOCS]
    done = subprocess.run([*build, tmp_path / "site"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    written = [path for path in PAGES if path.is_relative_to(DOCS)]
    index = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    for path in written:
        address = path.relative_to(DOCS).with_suffix(".html")
        assert (tmp_path / "site" / address).is_file()
        assert f'href="{address}"' in index or address.name == "index.html", address
