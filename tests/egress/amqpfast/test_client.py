"""The client for programs, against a whole gateway in the same loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from gateway.app import Gateway
from gateway.egress.amqpfast.channel import ClientChannel
from gateway.egress.amqpfast.client import ConnectionLost, FastLinkClient, RefusedByServer, connect, head_of
from gateway.egress.amqpfast.handles import ConsumerHandle, FastDelivery
from gateway.errors import LocalProtocolError
from gateway.protocols.amqpfast.spec import Scope
from gateway.settings import Limits
from gateway.settings.amqpfast import FastVirtualHost, PeerService
from tests.configured import make_listener
from tests.interop.gateway_fixture import gateway_here, settings_of

PATIENCE_SECS = 20.0


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    with trio.fail_after(PATIENCE_SECS):
        async with gateway_here(settings_of(limits=Limits(message_bytes_max=64 * 1024 * 1024))) as one:
            yield one


def url(gateway: Gateway, path: str = "/") -> str:
    return f"amqpfast://guest:guest@127.0.0.1:{gateway.listeners['amqpfast'].port}{path}"


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[FastLinkClient]:
    async with connect(url(gateway), client_name="c1") as one:
        yield one


async def bodies(consumer: ConsumerHandle, count: int) -> list[bytes]:
    return [(await anext(consumer)).message.body for _ in range(count)]


async def test_a_message_goes_through_a_queue_with_what_it_says(client: FastLinkClient) -> None:
    channel = await client.channel()
    sender = await channel.sender("queue", "orders")
    head = head_of(persistent=True, priority=7, identifier="id", headers={"a": "b", "n": -3})
    await sender.send(b"one", head)
    async for delivery in await channel.consume("queue", "orders"):
        message = delivery.message
        assert (message.body, message.durable, message.address.name) == (b"one", True, "orders")
        said = message.properties
        assert (said.priority, said.message_id) == (7, "id")
        assert [(name, value.value) for name, value in said.headers] == [("a", "b"), ("n", -3)]
        await channel.ack(delivery)
        break


async def test_acknowledgements_are_cumulative_whatever_their_order(client: FastLinkClient) -> None:
    channel = await client.channel()
    sender = await channel.sender("queue", "q")
    await sender.send_many([b"%d" % number for number in range(6)])
    consumer = await channel.consume("queue", "q")
    came = [await anext(consumer) for _ in range(6)]
    for at in (2, 0, 1, 4):
        await channel.ack(came[at])
    await channel.aclose()
    other = await client.channel()
    back = await other.consume("queue", "q")
    found = [await anext(back) for _ in range(3)]
    assert [(one.message.body, one.redelivered) for one in found] == [
        (b"3", True),
        (b"4", True),
        (b"5", True),
    ]


async def test_many_at_once(client: FastLinkClient) -> None:
    channel = await client.channel()
    sender = await channel.sender("queue", "q")
    wanted = [b"%d" % number for number in range(5_000)]
    consumer = await channel.consume("queue", "q", prefetch=50)
    found = []

    async def consume() -> None:
        async for delivery in consumer:
            found.append(delivery.message.body)
            await channel.ack(delivery)
            if len(found) == len(wanted):
                await consumer.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(consume)
        await sender.send_many(wanted)
    assert found == wanted


async def test_prefixes_topics_and_durable_subscriptions(gateway: Gateway, client: FastLinkClient) -> None:
    async with connect(url(gateway), client_name="c2") as other:
        channel = await other.channel()
        await channel.consume("topic", "plant.", identifier="mine")
    channel = await client.channel()
    for name in ("plant.a", "plant.b", "elsewhere"):
        await (await channel.sender("topic", name)).send(name.encode())
    async with connect(url(gateway), client_name="c2") as other:
        consumer = await (await other.channel()).consume("topic", "plant.", identifier="mine")
        assert await bodies(consumer, 2) == [b"plant.a", b"plant.b"]


async def test_a_transaction(client: FastLinkClient) -> None:
    channel = await client.channel(transacted=True)
    sender = await channel.sender("queue", "q")
    await sender.send(b"never")
    await channel.rollback()
    await sender.send(b"one")
    other = await client.channel()
    consumer = await other.consume("queue", "q")
    with trio.move_on_after(0.05):
        await anext(consumer)
        pytest.fail("it was not committed yet")
    await channel.commit()
    assert await bodies(consumer, 1) == [b"one"]


async def browsed(channel: ClientChannel, name: str) -> list[FastDelivery]:
    return [delivery async for delivery in channel.browse("queue", name)]


async def test_browsing_takes_nothing(client: FastLinkClient) -> None:
    channel = await client.channel()
    sender = await channel.sender("queue", "q")
    await sender.send_many([b"1", b"2", b"3"])
    for _ in range(2):
        assert [one.message.body for one in await browsed(channel, "q")] == [b"1", b"2", b"3"]
    assert await bodies(await channel.consume("queue", "q"), 3) == [b"1", b"2", b"3"]


async def test_unget(client: FastLinkClient) -> None:
    channel = await client.channel()
    await (await channel.sender("queue", "q")).send(b"1")
    consumer = await channel.consume("queue", "q")
    first = await anext(consumer)
    await channel.unget(consumer, first)
    again = await anext(consumer)
    assert (again.message.body, again.redelivered, again.number) == (b"1", True, first.number + 1)


async def test_a_peer_answers_on_the_same_handle(client: FastLinkClient) -> None:
    channel = await client.channel()
    peer = await channel.sender("peer", "echo")
    await peer.send(b"hello")
    assert (await anext(peer)).message.body == b"hello"
    assert len(channel.unsettled) == 0


async def test_a_stream_through_a_peer(client: FastLinkClient) -> None:
    body = bytes(range(256)) * 16_000  # more than is held before the connection is not read any more
    async with await client.stream("echo") as stream, trio.open_nursery() as nursery:
        nursery.start_soon(stream.send_all, body)
        found = bytearray()
        while len(found) < len(body):
            found += await stream.receive_some(100_000)
        assert found == body
    with pytest.raises(trio.ClosedResourceError):
        await stream.receive_some()
    with pytest.raises(trio.ClosedResourceError):
        await stream.send_all(b"x")


async def test_a_stream_that_nobody_reads_does_not_keep_the_client(client: FastLinkClient) -> None:
    stream = await client.stream("echo")
    with trio.move_on_after(0.2):
        while True:
            await stream.send_all(bytes(100_000))


async def test_a_tunnel_ends_with_its_other_side(tmp_path: Path) -> None:
    async def answer(server: trio.SocketStream) -> None:
        async with server:
            await server.send_all(b"hello " + await server.receive_some())

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, answer, [listener])
        peer = PeerService(kind="tcp", host="127.0.0.1", port=listener.socket.getsockname()[1])
        fast = make_listener(
            protocol="amqpfast",
            host="127.0.0.1",
            port=0,
            virtual_hosts={"/": FastVirtualHost(peers={"far": peer})},
        )
        async with (
            gateway_here(settings_of(listeners={"amqpfast": fast})) as gateway,
            connect(url(gateway)) as client,
        ):
            stream = await client.stream("far")
            await stream.send_all(b"you")
            assert [await stream.receive_some(), await stream.receive_some()] == [b"hello you", b""]
            nobody = await client.stream("nobody")
            with pytest.raises(RefusedByServer, match="404"):
                await nobody.receive_some()
        nursery.cancel_scope.cancel()


async def test_answers_come_to_a_temporary_queue(gateway: Gateway, client: FastLinkClient) -> None:
    channel = await client.channel()
    inbox = await channel.temporary()
    async with connect(url(gateway)) as other:
        away = await other.channel()
        await (await away.sender("queue", inbox.name)).send(b"answer")
    delivery = await anext(inbox)
    assert (delivery.message.body, delivery.message.address.name) == (b"answer", inbox.name)
    await channel.ack(delivery)
    named = await channel.temporary("topic", "mine")
    assert named.name == "mine"
    await channel.aclose()
    async with connect(url(gateway)) as other:
        away = await other.channel()
        with pytest.raises(RefusedByServer, match="404"):
            await browsed(away, inbox.name)


async def test_a_paused_consumer_gets_nothing(client: FastLinkClient) -> None:
    channel = await client.channel()
    consumer = await channel.consume("queue", "q")
    await consumer.pause(True)
    await (await channel.sender("queue", "q")).send(b"1")
    assert consumer.pop_delivery() is None
    await consumer.pause(False)
    assert await bodies(consumer, 1) == [b"1"]


@pytest.mark.parametrize("restartable", [False, True])
async def test_large_bodies(client: FastLinkClient, tmp_path: Path, restartable: bool) -> None:
    body = bytes(range(256)) * 20_000  # 5 MB
    path = tmp_path / "large"
    path.write_bytes(body)
    channel = await client.channel(restartable=restartable)
    sender = await channel.sender("queue", "q")
    told: list[tuple[int, int]] = []
    await sender.upload(path, progress=lambda done, size: told.append((done, size)))
    assert told[-1] == (len(body), len(body))
    assert told == sorted(told)
    await sender.upload(body + b"!")
    reading = await client.channel()
    reading.memory_bytes_max = len(body)
    consumer = await reading.consume("queue", "q")
    first, second = await anext(consumer), await anext(consumer)
    assert first.message.body == body
    assert first.file is None
    assert second.message.body == b""
    assert second.file is not None
    with second.file as file:
        assert file.read() == body + b"!"


async def test_refusals_say_what_they_cost(gateway: Gateway, client: FastLinkClient) -> None:
    channel = await client.channel()
    with pytest.raises(RefusedByServer, match="no peer") as error:
        await (await channel.sender("peer", "nobody")).send(b"x")
    assert (error.value.code, error.value.scope) == (404, Scope.HANDLE)
    sender = await channel.sender("queue", "q")
    consumer = await channel.consume("queue", "q")
    with pytest.raises(RefusedByServer) as error:
        await channel.unget(consumer, FastDelivery(99, False, None))  # type: ignore[arg-type]
    assert error.value.code == 310
    with pytest.raises(RefusedByServer):
        await anext(consumer)
    await sender.send(b"still open")
    with pytest.raises(RefusedByServer) as error:
        await channel.commit()
    assert (error.value.code, error.value.scope) == (503, Scope.CHANNEL)
    with pytest.raises(RefusedByServer):
        await sender.send(b"closed")
    with pytest.raises(RefusedByServer):
        await channel.sender("queue", "q")
    assert (await client.channel()).number == channel.number + 1


@pytest.mark.parametrize(
    "path, name, user, code", [("nowhere", "x", "guest:guest", 402), ("/", "c1", "guest:guest", 320)]
)
async def test_who_is_not_let_in_is_told_why(
    gateway: Gateway, client: FastLinkClient, path: str, name: str, user: str, code: int
) -> None:
    with pytest.raises(RefusedByServer) as error:
        async with connect(url(gateway, f"/{path.lstrip('/')}"), client_name=name):
            pytest.fail("it was let in")
    assert (error.value.code, error.value.scope) == (code, Scope.CONNECTION)


@pytest.mark.parametrize("priority", [-1, 10, 255, 256])
def test_a_priority_is_0_to_9(priority: int) -> None:
    with pytest.raises(LocalProtocolError, match="priority: 0 to 9"):
        head_of(priority=priority)


async def test_a_lost_connection_is_told_to_all_who_wait(gateway: Gateway) -> None:
    async with connect(url(gateway)) as client:
        channel = await client.channel()
        consumer = await channel.consume("queue", "q")
        for connection in list(gateway.listeners["amqpfast"].connections):
            connection.stream.abort("the test wants it so")
        with pytest.raises(ConnectionLost):
            await anext(consumer)
        with pytest.raises(ConnectionLost):
            await client.channel()


async def test_nobody_there() -> None:
    with pytest.raises(ConnectionLost, match="refused|failed"):
        async with connect("amqpfast://127.0.0.1:1/"):
            pytest.fail("somebody is there")
    with pytest.raises(ValueError, match="amqpfast://"):
        async with connect("amqp://127.0.0.1:1/"):
            pytest.fail("another protocol")


async def test_small_frames(gateway: Gateway) -> None:
    async with connect(url(gateway), frame_max=1_024) as client:
        channel = await client.channel()
        sender = await channel.sender("queue", "q")
        heads = [head_of(headers={"x": at % 2}) for at in range(2)]
        for at in range(800):
            await sender.send(b"%d" % at, heads[at % 2])
        assert len(await browsed(channel, "q")) == 800
        found = [one async for one in channel.browse("queue", "q", selector="x = 1")]
        assert [one.message.body for one in found] == [b"%d" % at for at in range(1, 800, 2)]
        with pytest.raises(LocalProtocolError, match="frame-max"):
            await channel.consume("queue", "q", selector="x = 1" + " " * 1_024)
        await sender.send(b"the connection goes on")


async def test_what_was_browsed_is_never_acknowledged(gateway: Gateway, client: FastLinkClient) -> None:
    """3.5.11: its number is one of a list, and may be that of a delivery."""
    channel = await client.channel()
    sender = await channel.sender("queue", "q")
    await sender.send_many([b"1", b"2"])
    shown = await browsed(channel, "q")
    assert [one.awaits_ack for one in shown] == [False, False]
    consumer = await channel.consume("queue", "q")
    delivered = await anext(consumer), await anext(consumer)
    for one in shown:
        await channel.ack(one)
    await channel.aclose()
    again = await client.channel()
    assert await bodies(await again.consume("queue", "q"), 2) == [one.message.body for one in delivered]


@pytest.mark.parametrize("service", ["queue", "topic"])
async def test_large_bodies_are_delivered_on_a_restartable_channel(
    client: FastLinkClient, service: str
) -> None:
    """The gateway announces them there by PREPARE, and what is small it does not."""
    body = bytes(range(256)) * 12_288  # 3 MiB
    channel = await client.channel(restartable=True)
    channel.memory_bytes_max = len(body)
    consumer = await channel.consume(service, "q")
    sender = await (await client.channel()).sender(service, "q")
    head = head_of(persistent=True, headers={"a": "b"})
    sent = [body, b"small", body[1:], body + b"!"]
    for one in sent:
        await sender.upload(one, head)
    for one in sent:
        delivery = await anext(consumer)
        if delivery.file is None:
            assert delivery.message.body == one
        else:
            with delivery.file as file:
                assert file.read() == one
        assert [name for name, _ in delivery.message.properties.headers] == ["a"]
        await channel.ack(delivery)
    assert await browsed(channel, "q") == [] if service == "queue" else True


async def test_a_body_that_is_not_the_one_that_was_announced_closes_its_handle(
    client: FastLinkClient,
) -> None:
    channel = await client.channel(restartable=True)
    consumer = await channel.consume("queue", "q")
    channel.handle_prepare = lambda prepared: ClientChannel.handle_prepare(  # type: ignore[method-assign]
        channel, replace(prepared, content_hash=b"0" * 40)
    )
    sender = await (await client.channel()).sender("queue", "q")
    await sender.upload(b"x" * 3_000_000)
    with pytest.raises(RefusedByServer) as error:
        await anext(consumer)
    assert (error.value.code, error.value.scope) == (542, Scope.HANDLE)
    assert (await channel.consume("queue", "other")).number != consumer.number, "its channel goes on"
