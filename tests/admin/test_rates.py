"""Rates of what nobody reads unless somebody asks."""

from __future__ import annotations

import pytest

from gateway.admin import rates
from gateway.admin.rates import Meter


def test_a_rate_is_over_the_time_since_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    meter = Meter(lambda: now)
    assert meter.rate("a", 100) == 0.0
    now = 10.5
    assert meter.rate("a", 200) == 0.0, "too soon to say"
    now = 12.0
    assert meter.rate("a", 300) == 100.0
    now = 12.1
    assert meter.rate("a", 400) == 100.0, "what it was"
    now = 112.0
    assert meter.rate("a", 50) == 0.0, "it has begun anew"
    monkeypatch.setattr(rates, "METERED_MAX", 2)
    for key in ("b", "c"):
        meter.rate(key, 1)
    now = 120.0
    assert meter.rate("a", 1_000) == 0.0, "it was asked for longest ago, and is forgotten"
