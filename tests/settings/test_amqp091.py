"""Virtual hosts of AMQP 0-9-1 listeners, which are names and nothing more."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.errors import ConfigurationError
from gateway.settings import Settings, load_settings


def written(folder: Path, listeners: str) -> Settings:
    file = folder / "gateway.yaml"
    file.write_text("listeners:\n" + listeners)
    return load_settings(file, {})


ROWS = [
    ("  a: {protocol: amqp091}\n", ["/"]),
    ("  a: {protocol: amqp091, virtual_hosts: [b, /]}\n", ["b", "/"]),
    (
        "  a: {protocol: amqp091, virtual_hosts: [b]}\n"
        "  c: {protocol: amqp091, port: 1, virtual_hosts: [d, b]}\n",
        ["b", "d"],
    ),
    ("  m: {protocol: mqtt}\n", ["/"]),
]


@pytest.mark.parametrize("listeners, names", ROWS)
def test_the_hosts_of_all_listeners(tmp_path: Path, listeners: str, names: list[str]) -> None:
    assert written(tmp_path, listeners).amqp_hosts() == names


@pytest.mark.parametrize(
    "listeners, text",
    [
        ("  a: {protocol: amqp091, virtual_hosts: []}\n", "virtual_hosts"),
        ("  a: {protocol: amqp091, virtual_hosts: {/: {auto_create: false}}}\n", "have no options"),
        ("  a: {protocol: amqp091, virtual_hosts: [1]}\n", "virtual_hosts"),
        (
            "  m: {protocol: mqtt, virtual_hosts: [b]}\n",
            "listeners.m.virtual_hosts: for protocol amqp091 and amqpfast only",
        ),
    ],
)
def test_what_is_not_a_list_of_names_is_refused(tmp_path: Path, listeners: str, text: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        written(tmp_path, listeners)
    assert text in str(refused.value)
