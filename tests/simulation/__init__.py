"""Deterministic simulation of one gateway: docs/developing/simulation.md."""
