"""The site is built without a warning, and its navigation leads to every page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.docs.pages import DOCS, PAGES, ROOT

SOUGHT: Final = {
    "backup": "guides/backup",
    "letter": "guides/dead-letters",
    "kubernet": "guides/kubernetes",
    "outbox": "guides/outboxes",
    "permiss": "guides/permissions",
    "replica": "guides/replicas",
    "systemd": "guides/systemd",
    "tls": "guides/users-and-tls",
}
"""Words as the search stems them, and the guide that it must find by its headings."""


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
    script = (tmp_path / "site" / "searchindex.js").read_text(encoding="utf-8")
    found = json.loads(script.removeprefix("Search.setIndex(").removesuffix(")"))
    for word, page in SOUGHT.items():
        places = found["titleterms"].get(word, [])
        pages = {found["docnames"][one] for one in ([places] if isinstance(places, int) else places)}
        assert page in pages, (word, pages)
