"""Tracing in the configuration: what it needs, and what is said when that is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.errors import ConfigurationError
from gateway.settings import load_settings, masked_yaml, tracing


def test_without_its_packages_it_is_an_error_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("tracing:\n  enabled: true\n")
    assert load_settings(file, {}).tracing.enabled
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'gateway\[otel\]'"):
        load_settings(file, {})
    file.write_text("tracing:\n  share: 0.5\n")
    assert not load_settings(file, {}).tracing.enabled, "off, it needs nothing"


@pytest.mark.parametrize(
    "line", ["share: 1.5", "share: -1", "messages_per_second_max: 0", "url: collector:4318"]
)
def test_what_cannot_be_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(f"tracing:\n  {line}\n")
    with pytest.raises(ConfigurationError) as told:
        load_settings(file, {})
    assert told.value.line == 2


def test_the_password_of_the_collector_is_sent_there_and_masked_elsewhere() -> None:
    """The tracer is built from the model's values."""
    url = "https://ann:secret@collector:4318/v1/traces?key=secret"
    settings = load_settings(None, {"GATEWAY_TRACING__URL": url})
    assert settings.tracing.model_dump()["url"] == url
    assert "secret" not in masked_yaml(settings)
