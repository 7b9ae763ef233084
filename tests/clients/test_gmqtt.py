"""gmqtt, an asyncio client with an MQTT codec of its own, against the listener."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import gmqtt
import pytest

from tests.clients.peers import PATIENCE_SECS
from tests.interop.gateway_fixture import LOOPBACK, Running

COUNT: Final = 12
SAID: Final[dict[str, Any]] = {
    "content_type": "text/plain",
    "correlation_data": b"\x00\xff",
    "response_topic": "answers/here",
    "user_property": [("a", "1"), ("b", "2"), ("a", "3")],
}


class Client:
    """A gmqtt client whose messages wait in `heard`: topic, body, QoS, properties."""

    def __init__(self, gateway: Running, name: str, version: int, **options: Any) -> None:
        self.heard: asyncio.Queue[tuple[str, bytes, int, dict[str, Any]]] = asyncio.Queue()
        self.connects = asyncio.Semaphore(0)
        self.granted: asyncio.Queue[tuple[int, ...]] = asyncio.Queue()
        self.client = gmqtt.Client(name, **options)
        self.client.set_config({"reconnect_delay": 0, "reconnect_retries": -1})
        self.client.on_connect = lambda *_: self.connects.release()
        self.client.on_message = self._heard
        self.client.on_subscribe = lambda _, __, reasons, ___: self.granted.put_nowait(tuple(reasons))
        self._place = (LOOPBACK, gateway.mqtt)
        self._version = version

    async def connect(self) -> None:
        await self.client.connect(*self._place, version=self._version)
        await self.connects.acquire()

    async def subscribe(self, topic_filter: str, qos: int) -> int:
        self.client.subscribe(topic_filter, qos=qos)
        (reason,) = await self.granted.get()
        return reason

    def _heard(self, _: Any, topic: str, body: bytes, qos: int, properties: dict[str, Any]) -> int:
        self.heard.put_nowait((topic, body, qos, properties))
        return 0


def patiently(scene: Callable[[], Any]) -> Any:
    return asyncio.run(asyncio.wait_for(scene(), PATIENCE_SECS))


@pytest.mark.parametrize("version", [gmqtt.constants.MQTTv311, gmqtt.constants.MQTTv50])
def test_every_quality_of_service_and_every_property(gateway: Running, version: int) -> None:
    five = version == gmqtt.constants.MQTTv50

    async def scene() -> None:
        one = Client(gateway, "one", version)
        await one.connect()
        assert await one.subscribe("a/+", 2) == 2
        for number in range(COUNT):
            one.client.publish(f"a/{number}", str(number), qos=number % 3, **(SAID if five else {}))
        for number in range(COUNT):
            topic, body, qos, properties = await one.heard.get()
            assert (topic, body, qos) == (f"a/{number}", str(number).encode(), number % 3)
            if five:
                alone = {word: properties[word] for word in SAID}
                assert alone == {
                    word: said if word == "user_property" else [said] for word, said in SAID.items()
                }
        await one.client.disconnect()

    patiently(scene)


@pytest.mark.parametrize("version", [gmqtt.constants.MQTTv311, gmqtt.constants.MQTTv50])
def test_a_session_goes_on_after_the_connection_is_cut(gateway: Running, version: int) -> None:
    def cut() -> None:
        for connection in list(gateway.gateway.listeners["mqtt"].connections):
            connection.stream.abort("cut by the test")

    async def scene() -> None:
        lasting = {"session_expiry_interval": 600} if version == gmqtt.constants.MQTTv50 else {}
        one = Client(gateway, "one", version, clean_session=False, **lasting)
        await one.connect()
        assert await one.subscribe("a", 2) == 2
        gateway.ask(cut)
        await one.connects.acquire()
        one.client.publish("a", b"still subscribed", qos=2)
        assert (await one.heard.get())[1] == b"still subscribed"
        await one.client.disconnect()

    patiently(scene)
