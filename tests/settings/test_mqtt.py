"""The part of a listener that is MQTT's own, and users without a password."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from gateway.access.scram import make_keys
from gateway.app.access import Identities
from gateway.errors import ConfigurationError
from gateway.settings import Settings, User, load_settings

REFUSED = [
    ("listeners:\n  m: {protocol: mqtt, qos_max: 3}\n", "qos_max"),
    ("listeners:\n  m: {protocol: mqtt, response_information: 'a/#'}\n", "a topic without wildcards"),
    ("listeners:\n  m: {protocol: mqtt, sys_interval_secs: -1}\n", "sys_interval_secs"),
    ("listeners:\n  a: {protocol: amqp091, retain: false}\n", "listeners.a.retain: for protocol mqtt only"),
    (
        "listeners:\n  m: {protocol: mqtt, announce: gateway}\n",
        "m.announce: for protocol amqp091 only",
    ),
    ("listeners:\n  a: {protocol: amqp091, announce: activemq}\n", "announce"),
    ("users:\n  ann: {}\n", "set one of"),
    ("users:\n  ann: {scram: a, scram_file: b}\n", "set one of"),
]


@pytest.mark.parametrize("text, error", REFUSED)
def test_what_is_refused(tmp_path: Path, text: str, error: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=error):
        load_settings(file, {})


def test_keys_come_from_a_file(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{make_keys('x', b'salt')}\n")
    assert Identities(Settings(users={"ann": User(scram_file=keys)})).access.supports_scram


def test_keys_that_are_none_are_told_by_name() -> None:
    with pytest.raises(ConfigurationError, match="users.ann.scram"):
        Identities(Settings(users={"ann": User(scram=SecretStr("x"))}))
