"""Clients that several tests use: paho-mqtt with queues for callbacks, and scripts for Node."""

from __future__ import annotations

import queue
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any, Final, Self

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.reasoncodes import ReasonCode

from tests.conftest import missing
from tests.interop.gateway_fixture import LOOPBACK, Running
from tests.interop.pahos import leave
from tests.needs import needed

NODE: Final = Path(__file__).resolve().parents[2] / ".node"
PATIENCE_SECS: Final = 20.0
PAHO: Final = {"3.1": paho.MQTTv31, "3.1.1": paho.MQTTv311, "5.0": paho.MQTTv5}


class Paho:
    """paho-mqtt, with its callbacks turned into queues."""

    def __init__(
        self,
        gateway: Running,
        version: str,
        client_id: str = "",
        *,
        tls: ssl.SSLContext | None = None,
        **more: Any,
    ) -> None:
        five = version == "5.0"
        if not five:
            more.setdefault("clean_session", True)
        self.messages: queue.Queue[paho.MQTTMessage] = queue.Queue()
        self.events: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.client = paho.Client(
            CallbackAPIVersion.VERSION2, client_id or "paho", protocol=PAHO[version], **more
        )
        self.client.on_message = lambda client, data, message: self.messages.put(message)
        self.client.on_connect = lambda client, data, flags, reason, properties: self._note("connect", reason)
        self.client.on_subscribe = lambda client, data, mid, reasons, properties: self._note("sub", reasons)
        self.client.on_publish = lambda client, data, mid, reason, properties: self._note(
            f"pub {mid}", reason
        )
        self.client.on_disconnect = lambda client, data, flags, reason, properties: self._note("left", reason)
        if tls is not None:
            self.client.tls_set_context(tls)
        self.client.connect(LOOPBACK, gateway.mqtt, 60)
        self.client.loop_start()
        reason = self.wait("connect")
        assert reason.value == 0, reason

    def _note(self, what: str, reason: Any) -> None:
        self.events.put((what, reason))

    def wait(self, what: str) -> Any:
        while True:
            found, reason = self.events.get(timeout=PATIENCE_SECS)
            if found == what:
                return reason

    def subscribe(self, topic: str, qos: int) -> int:
        self.client.subscribe(topic, qos)
        (reason,) = self.wait("sub")
        assert isinstance(reason, ReasonCode)
        return reason.value

    def publish(self, topic: str, body: bytes, qos: int = 0, **more: Any) -> int:
        info = self.client.publish(topic, body, qos, **more)
        return int(self.wait(f"pub {info.mid}").value)

    def message(self) -> paho.MQTTMessage:
        return self.messages.get(timeout=PATIENCE_SECS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        leave(self.client)


@needed("Node")
def node(script: str, module: str, *arguments: str) -> str:
    """Run a script that needs a module of .node/; what it printed."""
    found = shutil.which("node")
    if found is None or not (NODE / "node_modules" / module).is_dir():
        missing(f"Node or its module {module} is not installed: run tests/interop/peers.sh")
    command = [str(found), "-e", script, *arguments]
    done = subprocess.run(command, cwd=NODE, timeout=60.0, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
