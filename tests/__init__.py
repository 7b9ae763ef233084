"""Tests, a folder per room. This file keeps the name: some installed packages bring a `tests` too."""
