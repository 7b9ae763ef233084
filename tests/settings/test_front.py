"""The options about the way to a protocol: WebSocket, balancers, shared ports; each fault with its key."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gateway.errors import ConfigurationError
from gateway.settings import MqttListener, load_settings, masked_yaml

TLS = "{cert_file: c, key_file: k}"
MUTUAL = "{cert_file: c, key_file: k, client_ca_file: a}"


def written(folder: Path, *listeners: str) -> Path:
    path = folder / "gateway.yaml"
    path.write_text("listeners:\n" + "".join(f"  {one}\n" for one in listeners))
    return path


def test_everything_is_off_by_default() -> None:
    one = load_settings(None, {}).listeners["mqtt"]
    assert isinstance(one, MqttListener)
    assert (one.websocket_path, one.websocket_origins, one.proxy_protocol) == (None, None, "off")
    assert one.proxy_protocol_from == (), "nobody is believed"


def test_what_is_said_is_shown_and_can_be_read_again(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "ws: {protocol: mqtt, websocket_path: /mqtt, websocket_origins: ['https://a.example']}",
        "mqtt: {protocol: mqtt, proxy_protocol: off}",
        "amqp: {protocol: amqp091, proxy_protocol: required, proxy_protocol_from: [10.1.2.3, 'fd00::/8']}",
        "all: {protocol: shared, port: 7000, shares: [ws, mqtt, amqp]}",
    )
    settings = load_settings(path, {})
    assert settings.listeners["ws"].port == 8083
    assert settings.listeners["mqtt"].proxy_protocol == "off"
    assert settings.listeners["amqp"].proxy_protocol_from == ("10.1.2.3/32", "fd00::/8")
    assert settings.listeners["all"].shares == ("ws", "mqtt", "amqp")
    assert settings.endpoints() == {"ws": "mqtt", "mqtt": "mqtt", "amqp": "amqp091"}
    path.write_text(masked_yaml(settings))
    assert load_settings(path, {}) == settings
    assert yaml.safe_load(masked_yaml(settings))["listeners"]["mqtt"]["proxy_protocol"] == "off"


def test_a_variable_says_it_too() -> None:
    settings = load_settings(
        None,
        {
            "GATEWAY_LISTENERS__MQTT__PROXY_PROTOCOL": "off",
            "GATEWAY_LISTENERS__AMQP091__PROXY_PROTOCOL": "required",
            "GATEWAY_LISTENERS__AMQP091__PROXY_PROTOCOL_FROM": "[10.0.0.0/8]",
            "GATEWAY_LISTENERS__ALL__PROTOCOL": "shared",
            "GATEWAY_LISTENERS__ALL__PORT": "7000",
            "GATEWAY_LISTENERS__ALL__SHARES": "[mqtt, amqp091]",
        },
    )
    assert settings.listeners["mqtt"].proxy_protocol == "off"
    assert settings.listeners["amqp091"].proxy_protocol_from == ("10.0.0.0/8",)
    assert settings.listeners["all"].shares == ("mqtt", "amqp091")


FAULTS = {
    "path of another protocol": (
        ["a: {protocol: amqp091, websocket_path: /x}"],
        ":2:26: listeners.a.websocket_path: for protocol mqtt only",
    ),
    "path without a slash": (
        ["a: {protocol: mqtt, websocket_path: x}"],
        "listeners.a.websocket_path: string should",
    ),
    "origins without a path": (
        ["a: {protocol: mqtt, websocket_origins: []}"],
        "listeners.a: websocket_origins needs",
    ),
    "origin with a path": (
        ["a: {protocol: mqtt, websocket_path: /x, websocket_origins: ['https://a/b']}"],
        "listeners.a.websocket_origins[0]: write an origin as scheme and host",
    ),
    "origin without a scheme": (
        ["a: {protocol: mqtt, websocket_path: /x, websocket_origins: [a.example]}"],
        "listeners.a.websocket_origins[0]: write an origin as scheme and host",
    ),
    "another word": (
        ["a: {protocol: mqtt, proxy_protocol: optional}"],
        "listeners.a.proxy_protocol: input should be",
    ),
    "a bare on": (["a: {protocol: mqtt, proxy_protocol: on}"], "listeners.a.proxy_protocol: input should be"),
    "no network": (
        ["a: {protocol: mqtt, proxy_protocol_from: [10.0.0.0/33]}"],
        "listeners.a.proxy_protocol_from[0]: '10.0.0.0/33' does not appear",
    ),
    "a host in a network": (
        ["a: {protocol: mqtt, proxy_protocol_from: [10.0.0.1/8]}"],
        "10.0.0.1/8 has host bits set; write a network as 10.0.0.0/8",
    ),
    "shared without a port": (
        ["a: {protocol: mqtt}", "b: {protocol: shared, shares: [a]}"],
        "listeners.b: protocol shared has no standard port: set port",
    ),
    "shared without shares": (["b: {protocol: shared, port: 1}"], "listeners.b: needs 'shares'"),
    "shares without shared": (
        ["b: {protocol: mqtt, shares: [b]}"],
        "listeners.b.shares: for protocol shared only",
    ),
    "a misspelt listener": (
        ["mqtt: {protocol: mqtt}", "b: {protocol: shared, port: 1, shares: [mqt]}"],
        "listeners.b.shares: 'mqt' is not a listener; did you mean 'mqtt'?",
    ),
    "no such listener": (
        ["mqtt: {protocol: mqtt}", "b: {protocol: shared, port: 1, shares: [x]}"],
        "listeners.b.shares: 'x' is not a listener; known: mqtt",
    ),
    "itself": (
        ["mqtt: {protocol: mqtt}", "b: {protocol: shared, port: 1, shares: [b]}"],
        "listeners.b.shares: 'b' is itself a shared port; known: mqtt",
    ),
    "two of one protocol": (
        [
            "x: {protocol: mqtt}",
            "y: {protocol: mqtt, port: 2}",
            "b: {protocol: shared, port: 1, shares: [x, y]}",
        ],
        "listeners.b.shares: x and y both use mqtt; name one of them",
    ),
    "two at one path": (
        [
            "x: {protocol: mqtt, websocket_path: /m}",
            "y: {protocol: mqtt, websocket_path: /m, port: 2}",
            "b: {protocol: shared, port: 1, shares: [x, y]}",
        ],
        "listeners.b.shares: x and y both use WebSocket at /m",
    ),
    "TLS only, shared without": (
        [f"x: {{protocol: mqtt, tls: {TLS}}}", "b: {protocol: shared, port: 1, shares: [x]}"],
        "listeners.b.shares: x needs TLS; set listeners.b.tls",
    ),
    "client certificates, shared without": (
        [
            f"x: {{protocol: mqtt, tls: {MUTUAL}}}",
            f"b: {{protocol: shared, port: 1, shares: [x], tls: {TLS}}}",
        ],
        "listeners.b.shares: x needs TLS; set listeners.b.tls with the same client_ca_file",
    ),
}


@pytest.mark.parametrize("listeners, expected", FAULTS.values(), ids=FAULTS)
def test_a_fault_says_where_and_what_to_do(tmp_path: Path, listeners: list[str], expected: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(written(tmp_path, *listeners), {})
    assert expected in str(caught.value)


def test_websocket_beside_tcp_and_two_paths_can_share_a_port(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "tcp: {protocol: mqtt}",
        "one: {protocol: mqtt, websocket_path: /one}",
        "two: {protocol: mqtt, websocket_path: /two, port: 2}",
        f"tls: {{protocol: amqp091, tls: {MUTUAL}}}",
        f"all: {{protocol: shared, port: 1, shares: [tcp, one, two, tls], tls: {MUTUAL}}}",
    )
    assert len(load_settings(path, {}).listeners["all"].shares) == 4
