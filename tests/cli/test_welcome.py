"""What `gateway run` says when it has started; what it proposes is tried."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from argon2 import PasswordHasher
from pydantic import SecretStr

from gateway.cli.welcome import describe_protocol, proposal, welcome
from gateway.settings import ListenerSettings, ListenerTls, Settings, User
from tests.cli.conftest import Run
from tests.configured import make_listener
from tests.interop.gateway_fixture import LOOPBACK, running, settings_of
from tests.transport.test_tls import self_signed

TLS: Final = ListenerTls(cert_file=Path("c.pem"), key_file=Path("k.pem"))
LISTENERS: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "mqtt": ({"protocol": "mqtt"}, "mqtt on [::]:1883"),
    "secure": ({"protocol": "mqtt", "tls": TLS}, "mqtt with TLS on [::]:8883"),
    "web": (
        {"protocol": "mqtt", "websocket_path": "/mqtt"},
        "mqtt over WebSocket at /mqtt on [::]:8083",
    ),
    "webs": (
        {"protocol": "mqtt", "websocket_path": "/m", "tls": TLS},
        "mqtt over WebSocket at /m with TLS on [::]:8084",
    ),
    "balanced": (
        {"protocol": "amqp091", "proxy_protocol": "required"},
        "amqp091 behind the PROXY protocol on [::]:5672",
    ),
    "all": (
        {"protocol": "shared", "port": 443, "shares": ["mqtt", "secure"], "tls": TLS},
        "shared with and without TLS for mqtt, secure on [::]:443",
    ),
}


@pytest.mark.parametrize("name", LISTENERS)
def test_the_welcome_says_what_a_listener_speaks(name: str) -> None:
    given, said = LISTENERS[name]
    listener = make_listener(**given)
    assert f"{describe_protocol(listener)} on [{listener.host}]:{listener.port}" == said


USERS: Final = {"users": {"ann": {"password_hash": PasswordHasher(1, 8, 1).hash("secret")}}}
MQTT: Final[dict[str, Any]] = {"mqtt": {"protocol": "mqtt"}}
AMQP: Final[dict[str, Any]] = {"amqp091": {"protocol": "amqp091"}}
FAST: Final[dict[str, Any]] = {"amqpfast": {"protocol": "amqpfast"}}
NEVER: Final[dict[str, Any]] = {"mqtt": {"protocol": "mqtt", "anonymous": "never"}}
SECURE: Final = {"mqtt": {"protocol": "mqtt", "tls": {"cert_file": "/c.pem", "key_file": "/k.pem"}}}
WEB: Final[dict[str, Any]] = {"web": {"protocol": "mqtt", "websocket_path": "/m"}}
PROPOSED: Final[list[tuple[dict[str, Any], dict[str, Any], str, str]]] = [
    # listeners, other settings, where to subscribe and where to publish ("": nothing is proposed)
    (MQTT | AMQP | FAST, {}, "amqp://guest:guest@localhost:5672", "mqtt://localhost:1883"),
    (MQTT | FAST, {}, "amqpfast://guest:guest@localhost:3018", "mqtt://localhost:1883"),
    (AMQP | FAST, {}, "amqp://guest:guest@localhost:5672", "amqp://guest:guest@localhost:5672"),
    (MQTT, {}, "mqtt://localhost:1883", "mqtt://localhost:1883"),
    (MQTT | AMQP, {"mappings": ["own.yaml"]}, "mqtt://localhost:1883", "mqtt://localhost:1883"),
    (
        {"devices": {"protocol": "mqtt"}} | AMQP,
        {},
        "amqp://guest:guest@localhost:5672",
        "mqtt://localhost:1883",
    ),
    (NEVER | AMQP, {}, "amqp://guest:guest@localhost:5672", "mqtt://guest:guest@localhost:1883"),
    (NEVER | AMQP, {"guest": "never"}, "", ""),
    (
        NEVER | AMQP,
        {"guest": "never"} | USERS,
        "amqp://ann:PASSWORD@localhost:5672",
        "mqtt://ann:PASSWORD@localhost:1883",
    ),
    (MQTT | AMQP, {"guest": "never"}, "mqtt://localhost:1883", "mqtt://localhost:1883"),
    ({"mqtt": {"protocol": "mqtt", "host": "192.0.2.1"}}, {}, "", ""),
    (
        {"mqtt": {"protocol": "mqtt", "host": "192.0.2.1", "anonymous": "always"}},
        {},
        "mqtt://192.0.2.1:1883",
        "mqtt://192.0.2.1:1883",
    ),
    (SECURE, {}, "mqtts://HOST:8883", "mqtts://HOST:8883"),
    (SECURE | {"plain": {"protocol": "mqtt"}}, {}, "mqtt://localhost:1883", "mqtt://localhost:1883"),
    (
        {"amqp091": {"protocol": "amqp091", "virtual_hosts": ["a/b"]}},
        {},
        "amqp://guest:guest@localhost:5672/a%2Fb",
        "amqp://guest:guest@localhost:5672/a%2Fb",
    ),
    (WEB, {}, "ws://localhost:8083/m", "ws://localhost:8083/m"),
    ({"mqtt": SECURE["mqtt"] | WEB["web"]}, {}, "wss://HOST:8084/m", "wss://HOST:8084/m"),
    ({"mqtt": {"protocol": "mqtt", "proxy_protocol": "required"}}, {}, "", ""),
]


@pytest.mark.parametrize("listeners, more, subscribe, publish", PROPOSED)
def test_the_proposal_follows_the_configuration(
    listeners: dict[str, Any], more: dict[str, Any], subscribe: str, publish: str
) -> None:
    settings = Settings.model_validate({"listeners": listeners} | more)
    said = "\n".join(proposal(settings, {name: one.port for name, one in settings.listeners.items()}))
    assert re.findall(r"gateway (?:subscribe|publish) (\S+)", said) == [subscribe, publish][: 2 * bool(said)]
    assert bool(said) is bool(publish)
    assert ("PASSWORD of that user" in said) is ("PASSWORD@" in publish)
    assert ("CA.pem, the authority that signed it" in said) is publish.startswith(("mqtts", "wss"))


@pytest.mark.parametrize("path", [None, "/mqtt"])
def test_what_is_proposed_works(run: Run, path: str | None) -> None:
    listeners: dict[str, ListenerSettings] = {
        "mqtt": make_listener(protocol="mqtt", host=LOOPBACK, port=0, websocket_path=path),
        "amqpfast": make_listener(protocol="amqpfast", host=LOOPBACK, port=0),
    }
    with running(settings_of(listeners=listeners)) as started:
        received, published = proposed(welcome(started.gateway))
        assert tried(run, received, published).endswith(" 21.5\n")


def test_what_is_proposed_works_with_tls_and_a_password(run: Run, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    listener = make_listener(
        protocol="amqp091", host=LOOPBACK, port=0, tls=ListenerTls(cert_file=certificate, key_file=key)
    )
    users = {"ann": User(password_hash=SecretStr(PasswordHasher(1, 8, 1).hash("secret")))}
    with running(settings_of(listeners={"amqp091": listener}, users=users, guest="never")) as started:
        said = welcome(started.gateway).replace("PASSWORD", "secret").replace("HOST", LOOPBACK)
        received, published = proposed(said.replace("CA.pem", str(certificate)))
        assert tried(run, received, published).endswith(" 21.5\n")


def proposed(said: str) -> tuple[list[str], list[str]]:
    """The arguments of the two commands."""
    lines = [line.strip() for line in said.splitlines()]
    found = [shlex.split(line)[1:] for line in lines if re.match("gateway (subscribe|publish) ", line)]
    return found[0], found[1]


def tried(run: Run, received: list[str], published: list[str]) -> str:
    """What the first command prints, while the second one is said again until it has something to print."""
    program = [sys.executable, "-c", "from gateway.cli import main; main()", *received]
    with subprocess.Popen(
        [*program, "--count", "1", "--seconds", "60"], stdout=subprocess.PIPE, text=True
    ) as subscriber:
        while subscriber.poll() is None:
            run(*published)
        assert subscriber.stdout is not None
        return subscriber.stdout.read()
