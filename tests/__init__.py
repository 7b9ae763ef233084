"""Tests, a folder per room. This file keeps the name: installed packages bring a `tests` of their own."""
