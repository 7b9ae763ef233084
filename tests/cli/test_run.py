"""`gateway run`: what it says when it has started."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from gateway.cli.run import spoken, welcome
from gateway.settings import Listener, ListenerTls
from tests.interop.gateway_fixture import running, settings_of

TLS: Final = ListenerTls(cert_file=Path("c.pem"), key_file=Path("k.pem"))
LISTENERS: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "mqtt": ({"protocol": "mqtt"}, "mqtt on 0.0.0.0:1883"),
    "secure": ({"protocol": "mqtt", "tls": TLS}, "mqtt with TLS on 0.0.0.0:8883"),
    "web": (
        {"protocol": "mqtt", "websocket_path": "/mqtt"},
        "mqtt over WebSocket at /mqtt on 0.0.0.0:8083",
    ),
    "webs": (
        {"protocol": "mqtt", "websocket_path": "/m", "tls": TLS},
        "mqtt over WebSocket at /m with TLS on 0.0.0.0:8084",
    ),
    "balanced": (
        {"protocol": "amqp091", "proxy_protocol": "required"},
        "amqp091 behind the PROXY protocol on 0.0.0.0:5672",
    ),
    "all": (
        {"protocol": "shared", "port": 443, "shares": ["mqtt", "secure"], "tls": TLS},
        "shared with and without TLS for mqtt, secure on 0.0.0.0:443",
    ),
}


@pytest.mark.parametrize("name", LISTENERS)
def test_the_welcome_says_what_a_listener_speaks(name: str) -> None:
    given, said = LISTENERS[name]
    listener = Listener(**given)
    assert f"{spoken(listener)} on {listener.host}:{listener.port}" == said


def test_the_welcome_proposes_only_plain_listeners() -> None:
    web = Listener(protocol="mqtt", host="127.0.0.1", port=0, websocket_path="/mqtt")
    plain = {name: Listener(protocol=name, host="127.0.0.1", port=0) for name in ("mqtt", "amqp091")}
    for listeners, proposed in (
        ({"web": web} | plain, True),
        ({"web": web, "amqp091": plain["amqp091"]}, False),
    ):
        with running(settings_of(listeners=listeners)) as started:
            said = welcome(started.gateway)
            assert ("Try it" in said) is proposed
            if proposed:
                assert f"mqtt://localhost:{started.mqtt} " in said
