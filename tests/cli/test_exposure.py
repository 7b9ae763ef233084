"""Settings that expose the gateway: `check` names each with what to write instead, and so does the start."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import orjson
import pytest
import structlog

from gateway.app.access import Identities
from gateway.app.exposure import log_exposures
from gateway.cli.exits import Exit
from gateway.settings import Settings
from tests.cli.conftest import Run
from tests.cli.test_check import ROUTE, configuration

MD5 = (
    "rabbitmq-md5$"
    + base64.b64encode(b"salt" + hashlib.md5(b"saltx", usedforsecurity=False).digest()).decode()
)
JWT = "authentication: [{{backend: jwt, keys_url: '{}'}}]\n"
ASKED = "authentication: [{{backend: http, user_url: '{}'}}]\n"
AUTHORIZER = "authorizer: {{vhost_url: '{0}/v', resource_url: '{0}/r', topic_url: '{0}/t'}}\n"
LINK = "links: {{erp: {{url: 'amqps://u:p@h', tls: {{verify: {}}}}}}}\n"
LISTENER = (
    "listeners: {{amqp091: {{protocol: amqp091}}, mqtt: {{protocol: mqtt, host: '{}', anonymous: {}}}}}\n"
)
PROXY = (
    "listeners: {{amqp091: {{protocol: amqp091}}, mqtt: {{protocol: mqtt, "
    "proxy_protocol: {}, proxy_protocol_from: ['127.0.0.1', '{}']}}}}\n"
)
USER = "users: {{ann: {{password_hash: '{}'}}}}\n"
SHA256 = "rabbitmq-sha256$" + base64.b64encode(b"salt" + hashlib.sha256(b"saltx").digest()).decode()

EXPOSED = [
    (JWT.format("http://keys.example/jwks"), "authentication[0].keys_url", "https://"),
    (ASKED.format("http://10.0.0.7:8000/user"), "authentication[0].user_url", "https://"),
    (AUTHORIZER.format("http://auth"), "authorizer.vhost_url", "https://"),
    (AUTHORIZER.format("http://auth"), "authorizer.topic_url", "https://"),
    (LINK.format("false"), "links.erp.tls.verify", "ca_file"),
    (LISTENER.format("::", "always"), "listeners.mqtt.anonymous", "loopback or never"),
    (LISTENER.format("10.1.1.1", "always"), "listeners.mqtt.anonymous", "loopback or never"),
    ("guest: always\n", "guest", "loopback or never"),
    (USER.format(MD5), "users.ann", "gateway passwd"),
    ("http: {host: 0.0.0.0}\n", "http.host", "http.tls"),
    ("http: {host: '::'}\n", "http.host", "http.tls"),
    ("roles: {op: {console: read}}\n", "http.host", "http.tls"),
    (
        PROXY.format("required", "10.0.0.0/8"),
        "listeners.mqtt.proxy_protocol_from[1]",
        "only the addresses of the load balancers",
    ),
    (
        PROXY.format("required", "0.0.0.0/0"),
        "listeners.mqtt.proxy_protocol_from[1]",
        "only the addresses of the load balancers",
    ),
    (
        PROXY.format("required", "fd00::/48"),
        "listeners.mqtt.proxy_protocol_from[1]",
        "only the addresses of the load balancers",
    ),
]
SOUND = [
    JWT.format("https://keys.example/jwks"),
    JWT.format("http://127.0.0.1:8000/jwks"),
    ASKED.format("http://localhost:8000/user"),
    ASKED.format("http://[::1]:8000/user"),
    AUTHORIZER.format("https://auth"),
    LINK.format("true"),
    LISTENER.format("127.0.0.1", "always"),
    LISTENER.format("::", "loopback"),
    LISTENER.format("::", "never"),
    "guest: loopback\n",
    USER.format(SHA256),
    "http: {host: 127.0.0.1}\nroles: {op: {console: read}}\n",
    "http: {enabled: false}\nroles: {op: {console: read}}\n",
    PROXY.format("required", "10.1.2.0/24"),
    PROXY.format("required", "fd00::/64"),
    PROXY.format("required", "127.0.0.0/8"),
    "",
]


def warned(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.endswith("(exposed)")]


@pytest.mark.parametrize("more, key, advice", EXPOSED)
def test_check_warns_and_says_what_to_write(
    tmp_path: Path, run: Run, more: str, key: str, advice: str
) -> None:
    ran = run("check", "-c", configuration(tmp_path, ROUTE, more))
    (line,) = [one for one in warned(ran.out) if f"warning: {key}: " in one]
    assert advice in line.partition(";")[2]
    assert "gateway.yaml:" in line or key == "http.host"
    assert ran.code == Exit.OK


@pytest.mark.parametrize("more", SOUND)
def test_check_does_not_warn_of_what_stays_here(tmp_path: Path, run: Run, more: str) -> None:
    assert warned(run("check", "-c", configuration(tmp_path, ROUTE, more)).out) == []


def test_imported_hashes_are_looked_at_too(tmp_path: Path, run: Run) -> None:
    exported = tmp_path / "definitions.json"
    user = {
        "name": "old",
        "tags": "",
        "password_hash": MD5.partition("$")[2],
        "hashing_algorithm": "rabbit_password_hashing_md5",
    }
    exported.write_bytes(
        orjson.dumps({"users": [user], "queues": [], "permissions": [], "vhosts": [{"name": "/"}]})
    )
    more = f"declare: {{definitions: '{exported}', users: true}}\n"
    (line,) = warned(run("check", "-c", configuration(tmp_path, ROUTE, more)).out)
    assert "users.old: the password hash is MD5" in line


def test_the_start_logs_each() -> None:
    settings = Settings.model_validate(
        {
            "listeners": {"mqtt": {"protocol": "mqtt", "anonymous": "always"}},
            "users": {"ann": {"password_hash": MD5}},
        }
    )
    with structlog.testing.capture_logs() as logged:
        log_exposures(settings, Identities(settings).hashes)
    assert [(line["key"], line["log_level"]) for line in logged] == [
        ("listeners.mqtt.anonymous", "warning"),
        ("users.ann", "warning"),
    ]
    assert all(line["advice"] for line in logged)
