"""Replicas of one namespace in threads of the test, and paho clients that connect to any of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import paho.mqtt.client as paho
import psycopg
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from psycopg import sql

from gateway.app.state import schema_of
from gateway.engine.session import EngineSession
from gateway.settings import Limits, StoreSettings
from gateway.settings.engine import RabbitEngine
from tests.configured import make_listener
from tests.interop.gateway_fixture import LOOPBACK, Running, no_errors_logged, quickened, settings_of
from tests.interop.pahos import leave
from tests.interop.state_database import with_state

PATIENCE_SECS: Final = 30.0
TAKEN_OVER: Final = 0x8E  # what a client is told whose session another connection has taken


class Replica(Running):
    """One gateway over the cluster at `url`, or at some of them; `more` are keys of `broker`."""

    def __init__(
        self,
        name: str,
        url: str | tuple[str, ...],
        namespace: str,
        folder: Path | None = None,
        limits: dict[str, Any] | None = None,
        *,
        settings: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """`settings`: other parts."""
        urls = (url,) if isinstance(url, str) else url
        listeners = {"mqtt": make_listener(protocol="mqtt", host=LOOPBACK, port=0)}
        given = with_state({"engine": "rabbitmq", "urls": urls, "namespace": namespace, **more})
        broker = RabbitEngine.model_validate(given)
        store = StoreSettings(enabled=False) if folder is None else StoreSettings(path=folder)
        bounded: dict[str, Any] = {} if limits is None else {"limits": Limits(**limits)}
        super().__init__(
            settings_of(
                listeners=listeners, broker=broker, replica=name, store=store, **bounded, **(settings or {})
            )
        )

    @property
    def engine(self) -> EngineSession:
        engine = self.gateway.engine
        assert engine is not None
        return engine

    def stored(self, table: str, client: str, columns: str = "client") -> list[tuple[Any, ...]]:
        """Rows that the database of all replicas has for a client."""
        given = self.gateway.settings.broker
        assert isinstance(given, RabbitEngine)
        with psycopg.connect(given.postgresql.url) as connection:
            schema, name = sql.Identifier(schema_of(given.namespace)), sql.Identifier(table)
            query = sql.SQL("SELECT {} FROM {}.{} WHERE client = %s").format(
                sql.SQL(columns),
                schema,
                name,  # a literal of each caller's
            )
            return connection.execute(query, [client]).fetchall()

    def until_ready(self) -> None:
        """Return when clients are let in."""
        self.until(lambda: not self.gateway.readiness.reasons(), PATIENCE_SECS)


@contextmanager
def replicas(*given: Replica, ready: bool = True, but: str = "") -> Iterator[None]:
    """All of them run; they are stopped and looked after when the block ends, and what they logged is
    printed. `but`: an error that is expected."""
    begun: list[Replica] = []
    with no_errors_logged(but=but) as lines, quickened():
        try:
            for one in given:
                one.start()
                begun.append(one)
            for one in given:
                if ready:
                    one.until_ready()
            yield
        finally:
            for one in begun:
                one.stop()
            print(*lines, sep="\n")


class Client:
    """A paho client in a thread of its own, and what it has heard."""

    def __init__(
        self,
        port: int,
        name: str,
        *,
        version: int = paho.MQTTv5,
        clean: bool | None = None,
        properties: Properties | None = None,
        will: str = "",
        will_properties: Properties | None = None,
        will_retain: bool = False,
        ack: bool = True,
        window: int = 20,
    ) -> None:
        """Not `ack`: what comes at QoS 1 and 2 is not acknowledged before `acknowledge` is called. `window`:
        so many that it has published may be unacknowledged."""
        self.messages: list[paho.MQTTMessage] = []
        self.answers: list[list[ReasonCode]] = []
        self.ended: list[ReasonCode] = []
        self.welcome: ReasonCode | None = None
        self.offered: Any = None
        self.present = False
        self._changed = threading.Condition()
        given: dict[str, Any] = (
            {} if version == paho.MQTTv5 else {"clean_session": True if clean is None else clean}
        )
        paho_client = paho.Client(CallbackAPIVersion.VERSION2, name, protocol=version, **given)
        paho_client.on_connect = self._on_connect
        paho_client.on_message = self._on_message
        paho_client.on_subscribe = self._on_subscribe
        paho_client.on_disconnect = self._on_disconnect
        if will:
            paho_client.will_set(will, b"gone", qos=1, retain=will_retain, properties=will_properties)
        paho_client.manual_ack_set(True)
        paho_client.max_inflight_messages_set(window)
        self._ack = ack
        self.paho = paho_client
        more: dict[str, Any] = {}
        if version == paho.MQTTv5 and clean is not None:
            more["clean_start"] = clean
        self._given = properties
        self._next = 0
        paho_client.connect(LOOPBACK, port, properties=properties, **more)
        paho_client.loop_start()
        self.until(lambda: self.welcome is not None)

    def _on_connect(self, _: Any, __: Any, flags: Any, reason: ReasonCode, properties: Any) -> None:
        self._note(welcome=reason, offered=properties, present=flags.session_present)

    def _on_message(self, client: paho.Client, __: Any, message: paho.MQTTMessage) -> None:
        # paho by itself acknowledges what the test has already heard of, and who left at once had not
        if self._ack:
            client.ack(message.mid, message.qos)
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()

    def _on_subscribe(self, _: Any, __: Any, ___: int, reasons: list[ReasonCode], ____: Any) -> None:
        with self._changed:
            self.answers.append(reasons)
            self._changed.notify_all()

    def _on_disconnect(self, _: Any, __: Any, ___: Any, reason: ReasonCode, ____: Any) -> None:
        with self._changed:
            if self._next:
                self.welcome = None
                self.paho.connect_async(LOOPBACK, self._next, clean_start=False, properties=self._given)
                self._next = 0
            elif reason.value == TAKEN_OVER:
                self.paho.disconnect()  # or a second later it takes the session back
            self.ended.append(reason)
            self._changed.notify_all()

    def _note(self, **found: Any) -> None:
        with self._changed:
            for name, value in found.items():
                setattr(self, name, value)
            self._changed.notify_all()

    def until(self, condition: Any) -> None:
        """Return when it holds."""
        deadline = time.monotonic() + PATIENCE_SECS
        with self._changed:
            assert self._changed.wait_for(condition, deadline - time.monotonic()), self.told

    @property
    def told(self) -> list[tuple[str, bytes]]:
        return [(message.topic, bytes(message.payload)) for message in self.messages]

    def has_more_than(self, count: int) -> bool:
        """So many messages have come, and more."""
        return len(self.messages) > count

    def subscribe(self, topic_filter: str, **options: Any) -> list[str]:
        """Returns the names of the answers."""
        count = len(self.answers)
        self.paho.subscribe(topic_filter, **options)
        self.until(lambda: len(self.answers) > count)
        return [str(reason) for reason in self.answers[-1]]

    def publish(self, topic: str, body: bytes, *, qos: int = 1, **more: Any) -> paho.MQTTMessageInfo:
        """Returns when it is acknowledged, if it is to be."""
        info = self.paho.publish(topic, body, qos=qos, **more)
        info.wait_for_publish(PATIENCE_SECS)
        assert info.is_published()
        return info

    def acknowledge(self) -> None:
        """What has come until now."""
        for message in self.messages:
            self.paho.ack(message.mid, message.qos)

    def goes_on(self, port: int) -> None:
        """When its connection ends the next one is to another replica, with all that this one has left. Said
        beforehand: where paho has to try twice it publishes anew what it has released already (QoS 2)."""
        self._next = port

    def leave(self) -> None:
        leave(self.paho)

    def vanish(self) -> None:
        """The connection is lost without a goodbye."""
        sock = self.paho.socket()
        assert sock is not None
        sock.shutdown(2)
        self.until(lambda: self.ended)
        leave(self.paho)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


def lasting(port: int, name: str, *, secs: int = 300, **more: Any) -> Client:
    """A client whose session outlives its connection; one that was there before is resumed."""
    if more.get("version", paho.MQTTv5) != paho.MQTTv5:
        return Client(port, name, clean=False, **more)
    said = Properties(PacketTypes.CONNECT)
    said.SessionExpiryInterval = secs
    if "receive_max" in more:
        said.ReceiveMaximum = more.pop("receive_max")
    return Client(port, name, clean=False, properties=said, **more)
