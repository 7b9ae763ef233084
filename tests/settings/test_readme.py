"""Every option stands in the README, for that is where strangers look for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest
from pydantic import BaseModel

from gateway.mapping.schema import RouteRule
from gateway.settings import Limits, Link, Listener, Logins, Settings, Store
from gateway.settings.journal import Journal

README: Final = (Path(__file__).resolve().parents[2] / "README.md").read_text()
WORDS: Final = set(re.findall(r"[a-z0-9_]+", README))


@pytest.mark.parametrize("model", [Settings, Limits, Logins, Listener, Link, Store, Journal, RouteRule])
def test_every_option_is_explained(model: type[BaseModel]) -> None:
    names = {field.alias or name for name, field in model.model_fields.items()}
    assert names - WORDS == set()


def test_a_limit_has_its_default_beside_it() -> None:
    for name, field in Limits.model_fields.items():
        assert f"| `{name}` | {field.default} |" in README, name
