"""Tests, a folder per room. The file keeps the name: some installed packages bring `tests` of their own."""
