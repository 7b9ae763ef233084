"""Files that somebody looks at while a test changes them."""

from __future__ import annotations

from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Whoever looks at `path` sees the old text or the new one, and never half of it, however long this
    process does not run meanwhile."""
    whole = path.with_name(f"{path.name}.new")
    whole.write_text(text)
    whole.rename(path)
