"""`workers`: what may stand beside it, and what each of them has of the configuration."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.app.mappings import MappingFiles
from gateway.cli.checks import run_checks
from gateway.errors import ConfigurationError, MappingError
from gateway.settings import Settings, load_settings
from gateway.settings.workers import settings_of_worker

ENGINE = (
    "broker: {engine: rabbitmq, urls: ['amqp://localhost'],"
    " postgresql: {url: 'postgresql://gateway@localhost/gateway'}}\nlisteners: {mqtt: {protocol: mqtt}}\n"
)


def read(folder: Path, text: str) -> Settings:
    file = folder / "gateway.yaml"
    file.write_text(text)
    return load_settings(file, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("workers: 2\n", "workers: 2 needs broker.engine: rabbitmq"),
        ("workers: 0\n", "workers"),
        ("workers: 65\n" + ENGINE, "workers"),
        (
            "workers: 2\nlinks: {far: {url: 'mqtt://far', client_id: we}}\n" + ENGINE,
            "links.far.client_id: must contain {replica} with several workers",
        ),
        (
            "workers: 2\nhttp: {health: {}}\n" + ENGINE,
            "http.health and the console of worker 1, behind http.port, both use port 8081",
        ),
        ("workers: 2\nhttp: {port: 65534}\n" + ENGINE, "too high, since 2 workers use the ports above it"),
        ("workers: 3\nhttp: {port: 1881}\n" + ENGINE, "listeners.mqtt and the console of worker 2"),
    ],
)
def test_what_cannot_be(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        read(tmp_path, text)
    assert said in str(raised.value)


ROUTE = {
    "name": "up",
    "from": {"endpoint": "mqtt", "topic": "a/#"},
    "to": {"endpoint": "far", "topic": "b"},
}
ONE_WAY = """
workers: 2
listeners: {mqtt: {protocol: mqtt, retain: false, qos_max: 1, anonymous: always}}
roles: {device: {mqtt: {publish: "#"}}}
default_roles: {anonymous: device}
links: {far: {url: "mqtt://far"}}
"""


@pytest.mark.parametrize(
    ("before", "instead", "said"),
    [
        ("", "", ""),
        ("retain: false, ", "", "listeners.mqtt.retain: workers do not share retained messages; set false"),
        ("qos_max: 1, ", "", "listeners.mqtt.qos_max: workers do not share QoS 2 state; set 1 or 0"),
        (
            'roles: {device: {mqtt: {publish: "#"}}}\ndefault_roles: {anonymous: device}\n',
            "",
            "roles: without roles",
        ),
        (
            'publish: "#"',
            'publish: "#", subscribe: "a"',
            "roles.device.mqtt.subscribe: permits clients to subscribe; remove it",
        ),
        (
            'publish: "#"',
            'as_virtual_host: "/"',
            "roles.device.mqtt.as_virtual_host: permits clients to subscribe; remove it",
        ),
        (
            "listeners: {",
            "listeners: {amqp: {protocol: amqp091}, ",
            "listeners.amqp: protocol amqp091 lets clients consume from queues",
        ),
        (
            "links:",
            "authorizer: {vhost_url: 'http://a/', resource_url: 'http://a/', topic_url: 'http://a/'}\nlinks:",
            "authorizer: may",
        ),
        (
            "links:",
            "authentication: [{backend: http, user_url: 'http://a/'}]\nlinks:",
            "authentication[0]: may",
        ),
        (
            "listeners: {mqtt: {protocol: mqtt, retain: false, qos_max: 1, anonymous: always}}\n",
            "",
            "listeners.mqtt.retain: workers do not share retained messages; set false",
        ),
    ],
)
def test_embedded_workers_are_for_publishing(tmp_path: Path, before: str, instead: str, said: str) -> None:
    assert before in ONE_WAY
    text = ONE_WAY.replace(before, instead) if before else ONE_WAY
    if not said:
        assert read(tmp_path, text).one_way
        return
    with pytest.raises(ConfigurationError) as raised:
        read(tmp_path, text)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, ""),
        (
            {"to": {"endpoint": "mqtt", "topic": "b"}, "from": {"endpoint": "far", "topic": "a"}},
            "delivers to 'mqtt'",
        ),
        ({"deduplicate": {"by": "message_id", "window": "1m"}}, "deduplicates"),
    ],
)
def test_embedded_workers_have_routes_to_links_alone(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    mapping = tmp_path / "mapping.yaml"
    mapping.write_text(yaml.safe_dump({"version": 1, "routes": [ROUTE | more]}))
    settings = read(tmp_path, f"mappings: ['{mapping}']\n{ONE_WAY}")
    texts = [one.text for one in run_checks(settings.file, connect=False).findings]
    assert any("Remove the route, or set workers: 1" in one for one in texts) == bool(said)
    with pytest.raises(MappingError, match=said) if said else nullcontext():
        MappingFiles(settings, b"").read()


def test_one_worker_needs_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, "workers: 1\nhttp: {health: {}}\n").workers == 1


def of_worker(folder: Path, number: int, **more: Any) -> Settings:
    lines = "".join(f"{key}: {value}\n" for key, value in more.items())
    settings = read(folder, f"workers: 2\nreplica: door\n{lines}{ENGINE}")
    return settings_of_worker(settings, number, {"mqtt": 4711}, 2_000_001)


def test_each_is_a_replica_on_folders_of_its_own(tmp_path: Path) -> None:
    second = of_worker(
        tmp_path,
        2,
        store="{path: s}",
        journal="{path: j}",
        audit="{path: logs/audit.log}",
        http="{tokens_path: t, port: 9000}",
    )
    assert second.replica == "door-2"
    assert second.listeners["mqtt"].port == 4711
    assert second.limits.memory_bytes_max == 1_000_000
    assert second.store.path == Path("s/worker-2")
    assert second.journal_path() == Path("j/worker-2")
    assert second.tokens_path() == Path("t/worker-2")
    assert second.audit.path == Path("logs/audit.worker-2.log")
    assert second.http.port == 9002


def test_what_is_not_said_follows_the_store(tmp_path: Path) -> None:
    first = of_worker(tmp_path, 1, http="{port: 0}")
    assert first.journal_path() == Path("data/worker-1/journal")
    assert first.tokens_path() == Path("data/worker-1/console")
    assert first.http.port == 0
    assert first.audit.path is None


def test_a_console_that_answers_to_nobody_stays_so(tmp_path: Path) -> None:
    """Health is the supervisor's to serve, and the console's port still wants a login for everything."""
    first = of_worker(tmp_path, 1, http="{health: {port: 9999}}")
    assert first.http.health is not None
    assert (first.http.health.host, first.http.health.port) == ("127.0.0.1", 0)


@pytest.mark.parametrize(
    ("far", "source", "refused"),
    [
        ("url: 'mqtt://far'", {"topic": "a/#"}, True),
        ("url: 'mqtt://far', share: group", {"topic": "a/#"}, False),
        ("url: 'mqtt://far', elected: true", {"topic": "a/#"}, False),
        ("url: 'amqp://far'", {"exchange": "amq.topic", "binding_key": "a.#"}, True),
        ("url: 'amqp://far', elected: true", {"exchange": "amq.topic", "binding_key": "a.#"}, False),
        ("url: 'amqp://far'", {"queue": "a"}, False),
    ],
)
def test_a_link_that_brings_everything_to_all_is_refused(
    tmp_path: Path, far: str, source: dict[str, str], refused: bool
) -> None:
    mapping = tmp_path / "mapping.yaml"
    route = {"name": "in", "from": {"endpoint": "far", **source}, "to": {"endpoint": "mqtt", "topic": "b"}}
    mapping.write_text(yaml.safe_dump({"version": 1, "routes": [route]}))
    settings = read(tmp_path, f"workers: 2\nmappings: ['{mapping}']\nlinks: {{far: {{{far}}}}}\n{ENGINE}")
    texts = [one.text for one in run_checks(settings.file, connect=False).findings]
    assert (
        any("each of the 2 workers would receive every message of link 'far'" in one for one in texts)
        == refused
    )
    with pytest.raises(MappingError, match="Set elected on the link") if refused else nullcontext():
        MappingFiles(settings, b"").read()
