"""Scenes with MQTT clients that a gateway is killed in, all of them in one gateway.

Starting a gateway takes a second. So each scene is a generator that does something, yields, and goes on when
the gateway has been killed and started again; the scenes share nothing but the moments of death.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from gateway.protocols.mqtt.packets import Connack, Connect, Will
from gateway.protocols.mqtt.properties import PropertyMap
from gateway.protocols.mqtt.spec import PacketType, Property, Version
from tests.ingress.clients import Mqtt
from tests.interop.gateway_process import GatewayProcess

PUBACK, PUBREC, PUBREL, PUBCOMP = (
    PacketType.PUBACK,
    PacketType.PUBREC,
    PacketType.PUBREL,
    PacketType.PUBCOMP,
)
TAKEN: Final = (0, 0x10)  # perhaps for nobody
DAY: Final[PropertyMap] = {Property.SESSION_EXPIRY_INTERVAL: 86_400}
V5, V311 = Version.V5, Version.V311
TICK_SECS: Final = 1.1  # what is due by the clock has been done then

Steps = Iterator[float]
"""Each value: kill the gateway, leave it dead for so many seconds at least, and start it again."""
SCENES: Final[dict[str, tuple[Callable[..., Steps], tuple[Any, ...]]]] = {}


class Scene:
    """One scene's clients and topics."""

    def __init__(self, gateway: GatewayProcess, name: str) -> None:
        self.gateway = gateway
        self.name = name
        self.topic = f"{name}/a"
        self.filter = f"{name}/#"
        self.started = 0.0  # the gateway, monotonic seconds
        self._clients: list[Mqtt] = []

    def ticked(self) -> None:
        """Wait until the gateway has done what was due when it started."""
        time.sleep(max(self.started + TICK_SECS - time.monotonic(), 0.0))

    def connect(
        self,
        who: str,
        *,
        version: Version = V5,
        properties: PropertyMap = DAY,
        clean: bool = False,
        will: Will | None = None,
    ) -> tuple[Mqtt, Connack]:
        """A client that is let in, of a session that stays unless the caller says otherwise."""
        client = Mqtt(self.gateway.ports["mqtt"])
        self._clients.append(client)
        given = properties if version is V5 else {}
        client.say(Connect(f"{self.name} {who}", version, clean, will=will, properties=given))
        return client, client.next(Connack)

    def resume(self, who: str = "reader", *, present: bool = True, version: Version = V5) -> Mqtt:
        client, connack = self.connect(who, version=version)
        assert (connack.reason, connack.session_present) == (0, present)
        return client

    def awaiting(self, qos: int, version: Version = V5) -> None:
        """A reader with a session subscribes to everything of this scene and goes."""
        reader = self.resume(present=False, version=version)
        assert reader.subscribe(self.filter, qos) == qos
        goodbye(reader)

    def publish(self, *bodies: bytes, qos: int = 1, topic: str = "", **more: Any) -> None:
        """Someone publishes, and waits until each is accepted."""
        writer, _ = self.connect("someone", clean=True, properties={})
        for packet_id, body in enumerate(bodies, 1):
            writer.publish(topic or self.topic, body, qos, packet_id if qos else 0, **more)
            if qos == 1:
                assert writer.acked(PUBACK)[1] in TAKEN
            elif qos == 2:
                assert writer.acked(PUBREC)[1] in TAKEN
                writer.ack(PUBREL, packet_id)
                writer.acked(PUBCOMP)
        writer.ping()
        goodbye(writer)

    def cut(self) -> None:
        for client in self._clients:
            client.cut()
        self._clients.clear()


def scene(*rows: tuple[Any, ...]) -> Callable[[Callable[..., Steps]], Callable[..., Steps]]:
    """Register a scene, once for each row of arguments."""

    def register(function: Callable[..., Steps]) -> Callable[..., Steps]:
        for row in rows or ((),):
            words = [function.__name__, *(str(getattr(one, "name", one)).lower() for one in row)]
            SCENES[" ".join(words)] = (function, row)
        return function

    return register


def play(gateway: GatewayProcess) -> dict[str, Exception | None]:
    """Play all scenes to their ends; what became of each."""
    found: dict[str, Exception | None] = {}
    scenes = {name: Scene(gateway, name) for name in SCENES}
    playing = {name: function(scenes[name], *row) for name, (function, row) in SCENES.items()}
    while playing:
        pause = 0.0
        for name, steps in playing.items():
            try:
                pause = max(pause, next(steps))
            except StopIteration:
                found[name] = None
            except Exception as error:
                found[name] = error
        playing = {name: steps for name, steps in playing.items() if name not in found}
        gateway.kill()
        for one in scenes.values():
            one.cut()
        time.sleep(pause)
        gateway.start()
        for one in scenes.values():
            one.started = time.monotonic()
    return found


def settled(client: Mqtt) -> None:
    """All that this client has done is on disk: its session says so of one more subscription."""
    client.subscribe(f"settled/{time.monotonic_ns()}", 1)


def goodbye(client: Mqtt) -> None:
    """DISCONNECT; the gateway closes when it has written that down."""
    client.machine.disconnect()
    client.flush()
    assert client.closed()


def taken(reader: Mqtt, count: int) -> list[bytes]:
    """The bodies of the next messages of QoS 1, each acknowledged."""
    found = []
    for _ in range(count):
        _, _, packet_id, _, body = reader.row()
        found.append(body)
        reader.ack(PUBACK, packet_id)
    return found


def taken_once(reader: Mqtt, count: int) -> list[bytes]:
    """The same of QoS 2, by all four packets."""
    rows = [reader.row() for _ in range(count)]
    for answer, expected in ((PUBREC, PUBREL), (PUBCOMP, None)):
        for _, _, packet_id, _, _ in rows:
            reader.ack(answer, packet_id)
        if expected is not None:
            assert [reader.acked(expected)[0] for _ in rows] == [row[2] for row in rows]
    return [row[4] for row in rows]


def numbers(start: int, stop: int) -> list[bytes]:
    return [b"%d" % number for number in range(start, stop)]
