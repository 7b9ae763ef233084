"""The part of a listener that is AMQP/Fast's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gateway.errors import ConfigurationError
from gateway.settings import Settings, load_settings, masked_yaml


def written(folder: Path, listeners: str) -> Settings:
    file = folder / "gateway.yaml"
    file.write_text("listeners:\n" + listeners)
    return load_settings(file, {})


def test_the_default_creates_what_is_asked_for(tmp_path: Path) -> None:
    settings = written(tmp_path, "  f: {protocol: amqpfast}\n")
    (host,) = settings.virtual_hosts().values()
    assert host.creates_destinations
    assert list(host.peers) == ["echo"]
    assert settings.listeners["f"].compatibility == "rfc"


CREATES = [
    ("{}", True),
    ("{destinations: {queues: [a]}}", False),
    ("{destinations: {topics: [a.b]}}", False),
    ("{destinations: {queues: [a]}, auto_create: true}", True),
    ("{auto_create: false}", False),
]


@pytest.mark.parametrize("host, creates", CREATES)
def test_declared_destinations_are_all_there_are_unless_said(
    tmp_path: Path, host: str, creates: bool
) -> None:
    settings = written(tmp_path, f"  f: {{protocol: amqpfast, virtual_hosts: {{/: {host}}}}}\n")
    assert settings.virtual_hosts()["/"].creates_destinations is creates


REFUSED = [
    ("  m: {protocol: mqtt, compatibility: openamq-2005}\n", "m.compatibility: for protocol amqpfast only"),
    ("  f: {protocol: amqpfast, virtual_hosts: {}}\n", "virtual_hosts"),
    ("  f: {protocol: amqpfast, virtual_hosts: {/: {destinations: {queues: [a/b]}}}}\n", "queues"),
    ("  f: {protocol: amqpfast, virtual_hosts: {/: {peers: {p: {host: h}}}}}\n", "needs host and port"),
    (
        "  f: {protocol: amqpfast, virtual_hosts: {/: {peers: {p: {kind: echo, port: 3}}}}}\n",
        "needs host and port",
    ),
    ("  f: {protocol: amqpfast, compatibility: new}\n", "compatibility"),
    (
        "  f: {protocol: amqpfast}\n"
        "  g: {protocol: amqpfast, port: 1, virtual_hosts: {/: {auto_create: false}}}\n",
        "f and g configure virtual host '/' differently",
    ),
]


@pytest.mark.parametrize("listeners, text", REFUSED)
def test_what_is_refused(tmp_path: Path, listeners: str, text: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        written(tmp_path, listeners)
    assert text in str(refused.value)


def test_what_is_shown_can_be_read_again(tmp_path: Path) -> None:
    hosts = "{/: {destinations: {queues: [a]}, peers: {p: {host: h, port: 5}}}, b: {}}"
    settings = written(
        tmp_path, f"  m: {{protocol: mqtt}}\n  f: {{protocol: amqpfast, virtual_hosts: {hosts}}}\n"
    )
    shown = yaml.safe_load(masked_yaml(settings))
    file = tmp_path / "again.yaml"
    file.write_text(yaml.safe_dump({"listeners": shown["listeners"]}))
    assert load_settings(file, {}).listeners == settings.listeners
