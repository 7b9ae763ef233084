"""Tests, a folder per room. The file keeps the name: some installed packages bring a `tests` of their own."""
