"""A fault thrown into each guard costs what the guard stands around, and is counted there. A client that has
nothing to do with it goes on through all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import trio
from pydantic import SecretStr

from gateway import clock
from gateway.app.mappings import MappingFiles
from gateway.broker.amqp091.virtual_host import VirtualHost
from gateway.broker.deduplication import Guard
from gateway.broker.journal import open_journal
from gateway.broker.priorities import PriorityQueue
from gateway.broker.queue import Queue
from gateway.errors import RemoteProtocolError
from gateway.ingress.amqp091.connection import AmqpConnection
from gateway.ingress.amqpfast import channel as fast_channel
from gateway.ingress.amqpfast.connection import FastConnection
from gateway.ingress.listener import Listener
from gateway.ingress.mqtt.connection import MqttConnection
from gateway.ingress.mqtt.ingress import MqttIngress
from gateway.mapping import parse
from gateway.mapping.router import Router
from gateway.mapping.routes import ResolvedRoute
from gateway.model.batch import Batch
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, INTERNAL
from gateway.model.properties import PropertySet, string
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.events import Confirms
from gateway.protocols.amqp091.sender import Deliverer
from gateway.protocols.amqpfast import commands as fm
from gateway.protocols.amqpfast.sender import Notifier
from gateway.protocols.mqtt.packets import Connect, Will
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode, Version
from gateway.settings import StoreSettings, User
from gateway.settings.journal import Journal
from gateway.store import messages as stored
from gateway.store.journal.writer import JournalWriter
from gateway.transport.tasks import AGAIN_SECS, Tasks, run_forever
from tests.containment.faults import POISON, UNFORESEEN, by_type, counting, faulty, poisoned
from tests.durable.scenes import DAY
from tests.ingress.amqp_client import Amqp
from tests.ingress.amqpfast.client import Fast
from tests.ingress.clients import Mqtt, Raw, connect
from tests.interop.gateway_fixture import Running
from tests.passwords import hashed

ODD: Final = KeyError("odd")


@pytest.fixture
def counted() -> Iterator[Counter[str]]:
    with counting() as found:
        yield found


@pytest.fixture
def gateway(counted: Counter[str]) -> Iterator[Running]:
    with faulty() as one:
        yield one


def raises(*_: Any, **__: Any) -> Any:
    raise ODD


def goes_on(client: Mqtt) -> None:
    """Publishing and hearing oneself, as before."""
    client.publish("me", b"still here", 1, 1)
    assert client.body() == b"still here"
    assert client.acked(PacketType.PUBACK)[0] == 1


@pytest.fixture
def bystander(gateway: Running) -> Iterator[Mqtt]:
    with connect(gateway, "bystander")[0] as client:
        client.subscribe("me")
        goes_on(client)
        yield client
        goes_on(client)


# connection


def client_of(gateway: Running, protocol: str) -> Raw:
    if protocol == "mqtt":
        return connect(gateway, "victim")[0]
    return Amqp(gateway).open() if protocol == "amqp091" else Fast(gateway).open()


CONNECTIONS: Final = {"mqtt": MqttConnection, "amqp091": AmqpConnection, "amqpfast": FastConnection}


def victims(kind: type[Any], name: str, error: Exception) -> Callable[..., Any]:
    """The method, but for connections that are not the bystander's."""
    real = getattr(kind, name)

    def method(self: Any, *others: Any) -> Any:
        if self.sender.client != "bystander":
            raise error
        return real(self, *others)

    return method


@pytest.mark.parametrize("error", UNFORESEEN, ids=by_type)
@pytest.mark.parametrize("what", ["receive", "data_to_send", "tick", "resume_writing", "connection_lost"])
@pytest.mark.parametrize("protocol", CONNECTIONS)
def test_a_fault_of_a_connection_costs_the_connection(
    monkeypatch: pytest.MonkeyPatch,
    gateway: Running,
    bystander: Mqtt,
    counted: Counter[str],
    protocol: str,
    what: str,
    error: Exception,
) -> None:
    kind = CONNECTIONS[protocol]
    with client_of(gateway, protocol) as victim:
        monkeypatch.setattr(kind, what, victims(kind, what, error))
        if what == "receive":
            victim.send(b"\0")
        elif what == "resume_writing":
            gateway.ask(lambda: starve(gateway, protocol))
        elif what == "data_to_send":
            gateway.ask(
                lambda: [
                    one.stream.mark_for_flush() for one in gateway.gateway.listeners[protocol].connections
                ]
            )
            gateway.ask(gateway.gateway.writes.flush)
        elif what == "connection_lost":
            victim.cut()
        if what != "connection_lost":
            victim.rest()
        gateway.until(lambda: counted["connection"] > 0)
        monkeypatch.undo()


def starve(gateway: Running, protocol: str) -> None:
    """As if deliveries had been withheld."""
    for one in gateway.gateway.listeners[protocol].connections:
        if one.sender.client != "bystander":
            one.stream.awaits_resume = True
            one.stream.mark_for_flush()


def failing_once(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method `real`, which raises ODD when it is called for the first time."""
    armed = [True]

    def once(self: Any, *others: Any) -> Any:
        if armed:
            armed.clear()
            raise ODD
        return real(self, *others)

    return once


@pytest.mark.parametrize("protocol", ["amqp091", "amqpfast"])
def test_a_fault_behind_the_encoding_costs_the_consumer_and_no_message(
    monkeypatch: pytest.MonkeyPatch, gateway: Running, bystander: Mqtt, counted: Counter[str], protocol: str
) -> None:
    kind, name = (Deliverer, "deliver_many") if protocol == "amqp091" else (Notifier, "notify_many")

    def consumer() -> Amqp | Fast:
        if protocol == "amqp091":
            client = Amqp(gateway).open()
            client.call(m.QueueDeclare("q"), m.QueueDeclareOk)
            client.call(m.BasicConsume("q"), m.BasicConsumeOk)
            return client
        fast = Fast(gateway).open()
        fast.consume(fast.handle("q"))
        return fast

    bodies = [b"%d" % number for number in range(20)]
    with consumer() as first:
        monkeypatch.setattr(kind, name, failing_once(getattr(kind, name)))
        if protocol == "amqp091":
            with Amqp(gateway).open() as publisher:
                publisher.publish("", "q", *bodies)
                publisher.call(m.QueueDeclare("q"), m.QueueDeclareOk)
        else:
            with Fast(gateway).open() as other:
                other.put(other.handle("q"), *bodies)
        first.rest()
        with consumer() as second:
            if isinstance(second, Amqp):
                found = [row[6] for row in second.delivered(len(bodies))]
            else:
                found = second.bodies(len(bodies))
            assert found == bodies
    assert counted == {"connection": 1}


def test_a_fault_behind_the_encoding_of_what_waited_for_a_reply_costs_no_message(
    monkeypatch: pytest.MonkeyPatch, gateway: Running, bystander: Mqtt, counted: Counter[str]
) -> None:
    bodies = [b"%d" % number for number in range(20)]
    with Fast(gateway).open() as first, Fast(gateway).open() as second:
        handle, other = first.handle("held"), second.handle("held")
        first.ask(fm.HandleFlow(handle, flow_pause=True))
        first.consume(handle)
        second.put(other, *bodies)
        monkeypatch.setattr(Notifier, "notify_many", failing_once(Notifier.notify_many))
        first.say(fm.HandleFlow(handle), fm.HandleFlow(handle, first.machine.new_tag(1)))
        first.rest()
        second.consume(other)
        assert second.bodies(len(bodies)) == bodies
    assert counted == {"connection": 1}


@pytest.mark.parametrize("waits", [True, False])
def test_a_fault_between_messages_that_are_encoded_one_by_one_requeues_each_once(
    monkeypatch: pytest.MonkeyPatch, gateway: Running, counted: Counter[str], waits: bool
) -> None:
    """The run has a message that cannot be encoded, and there is a fault behind the encoding of the third."""
    notify, encode = Notifier.notify_many, fast_channel.encode_properties
    calls: list[int] = []

    def notify_twice(self: Any, first: int, rows: Any) -> Any:
        calls.append(first)
        if len(calls) == 3:
            raise ODD
        return notify(self, first, rows)

    def encode_all_but_one(message: Message, offset: float) -> bytes:
        if message.body == b"9":
            raise ODD
        return encode(message, offset)

    bodies = [b"%d" % number for number in range(20)]
    with Fast(gateway).open() as first, Fast(gateway).open() as second:
        handle, other = first.handle("single"), second.handle("single")
        first.ask(fm.HandleFlow(handle, flow_pause=True))
        first.consume(handle)
        second.put(other, *bodies)
        with monkeypatch.context() as patch:
            patch.setattr(Notifier, "notify_many", notify_twice)
            patch.setattr(fast_channel, "encode_properties", encode_all_but_one)
            tagged = [fm.HandleFlow(handle, first.machine.new_tag(1))] if waits else []
            first.say(fm.HandleFlow(handle), *tagged)
            first.rest()
        second.consume(other)
        assert second.bodies(len(bodies)) == bodies
        assert second.quiet()
    assert counted == {"connection": 1}


# message


@pytest.mark.parametrize("error", UNFORESEEN, ids=by_type)
def test_a_fault_of_a_route_costs_the_message_on_that_route(
    monkeypatch: pytest.MonkeyPatch,
    gateway: Running,
    bystander: Mqtt,
    counted: Counter[str],
    error: Exception,
) -> None:
    def faulty_crossings(self: Router, *others: Any) -> list[ResolvedRoute]:
        found = list(real(self, *others))
        for one in list(found):
            if one.route.target_endpoint == "amqp091":
                cross = one.cross
                found[found.index(one)] = Odd(one, cross, error)
        return found

    real = Router.resolve
    monkeypatch.setattr(Router, "resolve", faulty_crossings)
    gateway.ask(gateway.gateway.dispatcher.invalidate)
    with Amqp(gateway).open() as program, connect(gateway, "other")[0] as other:
        program.call(m.QueueDeclare("q"), m.QueueDeclareOk)
        program.call(m.QueueBind("q", "amq.topic", "a.b"), m.QueueBindOk)
        program.call(m.BasicConsume("q", no_ack=True), m.BasicConsumeOk)
        other.subscribe("a/b")
        for packet_id, body in enumerate((b"1", POISON, b"2"), 1):
            other.machine.publish(b"a/b", body, 1, packet_id=packet_id)
        other.flush()
        assert [other.body() for _ in range(3)] == [b"1", POISON, b"2"]
        assert [row[6] for row in program.delivered(2)] == [b"1", b"2"]
        assert {other.acked(PacketType.PUBACK) for _ in range(3)} == {(1, 0), (3, 0), (2, 0x80)}
    assert counted == {"delivery": 1}


class Odd(ResolvedRoute):
    """A crossing that fails for one message."""

    def __init__(self, real: ResolvedRoute, cross: Callable[..., Any], error: Exception) -> None:
        super().__init__(real.route, real.target)
        self.cross = poisoned(cross, error)  # type: ignore[method-assign]


@pytest.mark.parametrize("what", ["sinks", "choose"])
def test_a_fault_of_a_namespace_costs_the_message(
    monkeypatch: pytest.MonkeyPatch, gateway: Running, bystander: Mqtt, counted: Counter[str], what: str
) -> None:
    with Amqp(gateway).open() as client:
        client.call(m.QueueDeclare("q"), m.QueueDeclareOk)
        if what == "sinks":
            monkeypatch.setattr(VirtualHost, "sinks", raises)
        else:
            monkeypatch.setattr(VirtualHost, "sinks", lambda self, address: None)
            monkeypatch.setattr(VirtualHost, "choose", poisoned_choose)
        gateway.ask(gateway.gateway.dispatcher.invalidate)
        client.call(m.ConfirmSelect(), m.ConfirmSelectOk)
        client.publish("", "q", POISON)
        gateway.until(lambda: counted["message"] == 1)
        monkeypatch.undo()
        gateway.ask(gateway.gateway.dispatcher.invalidate)
        client.publish("", "q", b"after")
        client.call(m.BasicConsume("q", no_ack=True), m.BasicConsumeOk)
        assert client.delivered(1)[0][6] == b"after"
    assert gateway.gateway.dead_letters.counted == {("", "internal"): 1}


def poisoned_choose(self: VirtualHost, message: Any) -> Any:
    raise ODD


# batch


def test_a_fault_of_a_sink_costs_its_part_of_the_batch(
    monkeypatch: pytest.MonkeyPatch, gateway: Running, bystander: Mqtt, counted: Counter[str]
) -> None:
    with Amqp(gateway).open() as client, connect(gateway, "other")[0] as other:
        client.call(m.QueueDeclare("q"), m.QueueDeclareOk)
        client.call(m.QueueBind("q", "amq.topic", "a.b"), m.QueueBindOk)
        other.subscribe("a/b")
        monkeypatch.setattr(Queue, "put", raises)
        other.publish("a/b", b"1", 1, 1)
        assert other.body() == b"1"
        assert other.acked(PacketType.PUBACK) == (1, ReasonCode.UNSPECIFIED_ERROR)
        monkeypatch.undo()
        other.publish("a/b", b"2", 1, 2)
        client.call(m.BasicConsume("q", no_ack=True), m.BasicConsumeOk)
        assert client.delivered(1)[0][6] == b"2"
    assert counted == {"batch": 1}


def test_a_fault_of_a_turn(
    monkeypatch: pytest.MonkeyPatch, gateway: Running, bystander: Mqtt, counted: Counter[str]
) -> None:
    monkeypatch.setattr(Batch, "send", raises)
    bystander.publish("me", b"lost")
    bystander.ping()
    monkeypatch.undo()
    assert counted == {"batch": 1}


# timer


def test_a_fault_of_a_tick(
    monkeypatch: pytest.MonkeyPatch, gateway: Running, bystander: Mqtt, counted: Counter[str]
) -> None:
    monkeypatch.setattr(MqttIngress, "tick", raises)
    gateway.until(lambda: counted["timer"] > 1)
    monkeypatch.undo()


def test_a_fault_of_the_backstop(
    monkeypatch: pytest.MonkeyPatch, gateway: Running, bystander: Mqtt, counted: Counter[str]
) -> None:
    monkeypatch.setattr(gateway.gateway.core.deduplication, "utc", raises)
    gateway.until(lambda: counted["timer"] > 0)


def test_a_fault_of_an_alarm(gateway: Running, bystander: Mqtt, counted: Counter[str]) -> None:
    rung: list[int] = []
    alarms = gateway.gateway.hosts.alarms

    def set_them() -> None:
        alarms.set(0.0, raises)
        alarms.set(0.0, lambda: rung.append(1))

    gateway.ask(set_them)
    gateway.until(lambda: bool(rung))
    assert counted["timer"] == 1


# reload


def test_a_fault_of_a_reload_leaves_the_old_mappings(
    monkeypatch: pytest.MonkeyPatch, gateway: Running, bystander: Mqtt, counted: Counter[str]
) -> None:
    before = gateway.gateway.dispatcher.router
    monkeypatch.setattr(MappingFiles, "load", raises)
    assert gateway.await_(gateway.gateway.reload_mappings) is False
    assert gateway.gateway.dispatcher.router is before
    monkeypatch.undo()
    assert gateway.await_(gateway.gateway.reload_mappings) is True
    assert counted == {"reload": 1}


# tasks


async def test_a_task_cannot_end_the_others(counted: Counter[str], autojump_clock: object) -> None:
    done: list[str] = []

    async def fails() -> None:
        await trio.sleep(1)
        raise ODD

    async def fails_in_a_nursery() -> None:
        async with trio.open_nursery() as inner:
            inner.start_soon(fails)
            inner.start_soon(fails)

    async def works() -> None:
        await trio.sleep(2)
        done.append("works")

    async with trio.open_nursery() as nursery:
        tasks = Tasks(nursery)
        for task in (fails, works, fails_in_a_nursery):
            tasks.start_soon(task)
    assert done == ["works"]
    assert counted == {"connection": 2}


async def test_what_has_to_run_runs_again(counted: Counter[str], autojump_clock: object) -> None:
    runs: list[float] = []

    async def task() -> None:
        runs.append(trio.current_time())
        if len(runs) < 3:
            raise ODD

    await run_forever("timer", task)
    assert [later - runs[0] for later in runs] == [0, AGAIN_SECS, 2 * AGAIN_SECS]
    assert counted == {"timer": 2}


def test_a_fault_of_a_login_costs_the_connection(
    monkeypatch: pytest.MonkeyPatch, counted: Counter[str]
) -> None:
    async def verify(*_: Any) -> Any:
        raise ODD

    users = {"ann": User(password_hash=SecretStr(hashed("right")))}
    with faulty(users=users) as gateway:
        monkeypatch.setattr(gateway.gateway.access, "verify", verify)
        with Mqtt(gateway.mqtt) as victim:
            victim.say(Connect("c", Version.V5, True, user_name="ann", password=b"right"))
            gateway.until(lambda: counted == {"connection": 1})
        monkeypatch.undo()
        with connect(gateway, "bystander", user=("ann", b"right"))[0] as client:
            client.subscribe("me")
            goes_on(client)


# store


@pytest.fixture
def storing(counted: Counter[str], tmp_path: Path) -> Iterator[Running]:
    with faulty(store=StoreSettings(path=tmp_path)) as one:
        yield one


def test_a_fault_behind_a_commit_costs_whoever_waited(storing: Running, counted: Counter[str]) -> None:
    store = storing.gateway.store
    assert store is not None
    told: list[object] = []

    def wait() -> None:
        assert store is not None
        store.after_commit(raises)
        store.after_commit(told.append)
        store.flush()

    storing.ask(wait)
    storing.until(lambda: bool(told))
    assert counted == {"store": 1}


def test_a_message_that_cannot_be_written_is_stored_without_its_properties(
    monkeypatch: pytest.MonkeyPatch, counted: Counter[str], tmp_path: Path
) -> None:
    def odd_set(one: Any) -> bytes:
        if b"odd" in one.raw:
            raise ODD
        return real(one)

    real = stored._set_bytes
    monkeypatch.setattr(stored, "_set_bytes", odd_set)
    settings = StoreSettings(path=tmp_path)
    properties = b"\x90\x00\x04text\x02"
    odd = b"\x90\x00\x03odd\x02"
    with faulty(store=settings) as gateway, Amqp(gateway).open() as client:
        client.call(m.QueueDeclare("q", durable=True), m.QueueDeclareOk)
        client.publish("", "q", b"1", b"2", properties=properties)
        client.publish("", "q", b"3", properties=odd)
        client.publish("", "q", b"4", properties=properties)
        client.call(m.QueueDeclare("q", durable=True), m.QueueDeclareOk)
    assert counted["store"] > 0
    with faulty(store=settings) as gateway, Amqp(gateway).open() as client:
        client.call(m.BasicConsume("q", no_ack=True), m.BasicConsumeOk)
        rows = client.delivered(4)
        assert [row[6] for row in rows] == [b"1", b"2", b"3", b"4"]
        assert [b"text" in row[5] for row in rows] == [True, True, False, True]


# startup


def test_what_cannot_be_made_again_is_set_aside(counted: Counter[str], tmp_path: Path) -> None:
    settings = StoreSettings(path=tmp_path)
    with faulty(store=settings) as gateway:
        with Amqp(gateway).open() as client:
            client.call(m.QueueDeclare("sound", durable=True), m.QueueDeclareOk)
        with connect(gateway, "r")[0] as device:
            device.publish("retained", b"kept", 1, 1, retain=True)
            device.acked(PacketType.PUBACK)

        def spoil() -> None:
            store = gateway.gateway.store
            assert store is not None
            for kind, key in (("queue", '["/", "odd"]'), ("exchange", '["/", 5]'), ("binding", '["/"]')):
                store.put(kind, key, b"not JSON")
            store.put("binding", '["/", "amq.topic", "queue", "sound", "k", "not headers"]', b"{}")
            store.put("session", b"odd", b"not JSON")
            store.put("session", b"older", b'{"unknown": 1}')
            store.put("subscription", b"odd", b"[]")
            store.put("will", b"odd", b"{}")
            store.put("fast queue", "not JSON", b"")
            store.flush()

        gateway.ask(spoil)
    with faulty(store=settings) as gateway, Amqp(gateway).open() as client:
        assert client.call(m.QueueDeclare("sound", durable=True), m.QueueDeclareOk).queue == "sound"
        with connect(gateway, "c")[0] as device:
            device.subscribe("retained")
            assert device.body() == b"kept"
        with connect(gateway, "odd", clean=False)[0] as back:
            back.ping()
    assert counted["startup"] >= 6


# What else is done for one message, in the midst of the business of others.


DEDUPLICATING: Final = """
version: 1
routes:
  - name: once
    from: {endpoint: mqtt, topic: a/b}
    to: {endpoint: amqp091, exchange: amq.topic, routing_key: a.b}
    deduplicate: {window: 60s}
    on_reject: dead_letter
"""


def test_a_fault_behind_a_guard_against_repeats(
    monkeypatch: pytest.MonkeyPatch, counted: Counter[str], tmp_path: Path
) -> None:
    mapping = tmp_path / "mapping.yaml"
    mapping.write_text(DEDUPLICATING)
    monkeypatch.setattr(Guard, "_forward", passing_on(Guard._forward))
    with faulty(mappings=[str(mapping)]) as gateway, Amqp(gateway).open() as program:
        program.call(m.QueueDeclare("q"), m.QueueDeclareOk)
        program.call(m.QueueBind("q", "amq.topic", "a.b"), m.QueueBindOk)
        program.call(m.BasicConsume("q", no_ack=True), m.BasicConsumeOk)
        with connect(gateway, "device")[0] as device:
            for packet_id, body in enumerate((b"1", POISON, b"2"), 1):
                device.machine.publish(b"a/b", body, 1, packet_id=packet_id)
            device.flush()
            assert {device.acked(PacketType.PUBACK) for _ in range(3)} == {(1, 0), (2, 0), (3, 0)}
        assert [row[6] for row in program.delivered(2)] == [b"1", b"2"]
        assert gateway.gateway.dead_letters.counted == {("once", "internal"): 1}
    assert counted == {"delivery": 1}


def passing_on(real: Callable[..., None]) -> Callable[..., None]:
    def pass_on(self: Guard, batch: Any, part: Any, at: int, id: str, message: Any) -> None:
        if message.body == POISON:
            raise ODD
        real(self, batch, part, at, id, message)

    return pass_on


def test_a_fault_of_a_letter_of_a_queue(
    monkeypatch: pytest.MonkeyPatch, gateway: Running, bystander: Mqtt, counted: Counter[str]
) -> None:
    """One of several messages that a purge of the expired sends to the dead letter exchange."""
    monkeypatch.setattr("gateway.broker.amqp091.dead_letter_routing._with_death", raises)
    with Amqp(gateway).open() as client:
        arguments = (("x-dead-letter-exchange", string("amq.topic")),)
        client.call(m.QueueDeclare("q", arguments=arguments), m.QueueDeclareOk)
        client.publish("", "q", b"1", b"2", b"3")
        client.call(m.BasicConsume("q"), m.BasicConsumeOk)
        rows = client.delivered(3)
        client.say(*[m.BasicReject(row[2], requeue=False) for row in rows])
        client.call(m.QueueDeclare("q", arguments=arguments), m.QueueDeclareOk)
        assert gateway.gateway.dead_letters.counted == {("", "internal"): 3}
    assert counted == {"delivery": 3}


def test_a_fault_of_a_copy_of_a_dead_letter(monkeypatch: pytest.MonkeyPatch, counted: Counter[str]) -> None:
    with faulty() as gateway:
        monkeypatch.setattr(gateway.gateway.dead_letters, "_forward", raises)
        with Amqp(gateway).open() as client:
            gateway.ask(lambda: gateway.gateway._dead_letter([], INTERNAL))
            client.call(m.QueueDeclare("q"), m.QueueDeclareOk)
        assert counted == {"message": 1}


def test_a_fault_of_the_journal_costs_no_settlement(
    monkeypatch: pytest.MonkeyPatch, counted: Counter[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(JournalWriter, "record", raises)
    settings = Journal(enabled=True, path=tmp_path)
    with faulty(journal=settings) as gateway, connect(gateway, "device")[0] as device:
        device.subscribe("me")
        goes_on(device)
    assert counted["journal"] > 0
    assert set(counted) == {"journal"}


def test_a_fault_of_the_journal_keeps_nothing_in_an_outbox(
    monkeypatch: pytest.MonkeyPatch, counted: Counter[str], tmp_path: Path
) -> None:
    text = "version: 1\nroutes: [{name: r, from: {endpoint: a, topic: '#'}, to: {endpoint: a, topic: b}}]"
    router = Router([parse(text, "t.yaml")], {"a": "mqtt"})
    journaling = open_journal(Journal(enabled=True), tmp_path, router)
    monkeypatch.setattr(journaling.writer, "record", raises)
    journaling.record_left(router.routes[0], [], ACCEPTED, clock.now())
    journaling.writer.close()
    assert counted == {"journal": 1}


def test_a_fault_of_a_will_is_not_that_of_others(
    monkeypatch: pytest.MonkeyPatch, gateway: Running, bystander: Mqtt, counted: Counter[str]
) -> None:
    real = MqttIngress.publish_will

    def publish_will(self: MqttIngress, will: Will, sender: Any, principal: Any) -> None:
        if will.body == POISON:
            raise ODD
        real(self, will, sender, principal)

    monkeypatch.setattr(MqttIngress, "publish_will", publish_will)
    bystander.subscribe("wills/#")
    later = {Property.WILL_DELAY_INTERVAL: 1}
    for body, delay in ((POISON, {}), (b"now", {}), (POISON + b"", later), (b"later", later)):
        will = Will(f"wills/{body.decode()}", body, properties=delay)
        name = f"{body.decode()} {len(delay)}"
        connect(gateway, name, will=will, clean=False, properties=DAY)[0].cut()
    assert {bystander.body(), bystander.body()} == {b"now", b"later"}
    assert set(counted) == {"connection", "message"}


def test_a_fault_of_a_client_that_is_taken_over(
    monkeypatch: pytest.MonkeyPatch, gateway: Running, bystander: Mqtt, counted: Counter[str]
) -> None:
    with connect(gateway, "same")[0] as first:
        monkeypatch.setattr(MqttConnection, "handle_takeover", raises)
        with connect(gateway, "same")[0] as second:
            first.rest()
            second.ping()
    assert counted == {"connection": 1}


@pytest.mark.parametrize("what", ["wake-up", "callback", "read"])
def test_a_fault_between_the_store_and_the_loop(
    storing: Running, monkeypatch: pytest.MonkeyPatch, counted: Counter[str], what: str
) -> None:
    store = storing.gateway.store
    assert store is not None
    if what == "wake-up":
        monkeypatch.setattr(storing.gateway.writes, "_wake_up_ends", [raises])
        storing.ask(storing.gateway.writes.flush)
        monkeypatch.undo()
    elif what == "callback":
        store._writer.call_soon(raises)
    else:
        storing.ask(lambda: (store._do(raises), store.flush()))
    storing.until(lambda: counted["store"] > 0)  # a timer may have ended a wake-up, too
    assert set(counted) == {"store"}
    with Amqp(storing).open() as client:
        client.call(m.QueueDeclare("q", durable=True), m.QueueDeclareOk)
        client.call(m.ConfirmSelect(), m.ConfirmSelectOk)
        client.publish("", "q", b"stored", properties=b"\x10\x00\x02")
        assert client.next(Confirms).confirms == [(1, 1, False, True)]


def test_a_fault_of_a_connection_that_is_not_one_yet(
    monkeypatch: pytest.MonkeyPatch, gateway: Running, bystander: Mqtt, counted: Counter[str]
) -> None:
    monkeypatch.setattr(Listener, "_add", raises)
    with Raw(gateway.mqtt) as victim:
        assert victim.rest() == b""
    monkeypatch.undo()
    with connect(gateway, "after")[0] as client:
        client.ping()
    assert counted == {"connection": 1}


def test_a_fault_of_a_wish_leaves_the_message_to_others(counted: Counter[str]) -> None:
    """A selector that fails takes nothing."""
    queue = PriorityQueue("q", lambda message: 0)
    taken: dict[str, list[bytes]] = {"picky": [], "other": []}

    class Consumer:
        def __init__(self, name: str) -> None:
            self.name = name

        def capacity(self) -> int:
            return 100

        def deliver(self, queue: Queue, position: int, messages: list[Message], redelivered: bool) -> None:
            taken[self.name] += [message.body for message in messages]
            queue.acknowledged(range(position, position + len(messages)))

        def handle_error(self, error: Exception) -> None:
            raise AssertionError(error)

        def cancelled(self, queue: Queue) -> None:
            raise AssertionError("nobody deletes it")

    queue.add(Consumer("picky"), raises)
    queue.put([Message(amqp_address("", "q"), b"1")])
    queue.dispatch()
    assert taken["picky"] == []
    queue.add(Consumer("other"))
    assert taken["other"] == [b"1"]
    assert set(counted) == {"delivery"}


@pytest.mark.parametrize("error", UNFORESEEN, ids=by_type)
def test_bytes_that_nobody_can_decode_are_malformed(counted: Counter[str], error: Exception) -> None:
    """Whoever asks what a message says of itself is prepared for that, and for nothing else."""

    def decode(raw: bytes) -> Any:
        raise error

    found = PropertySet("mqtt", b"odd", decode)
    for _ in range(2):
        with pytest.raises(RemoteProtocolError):
            found.properties  # noqa: B018
    assert counted == {"message": 2}
