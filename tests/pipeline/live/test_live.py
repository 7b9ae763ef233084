"""Live sources and the sink against gateways: nothing is lost, repeats are refused, secrets stay secret.

One gateway serves all tests here, with a route that deduplicates into a queue of its own.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pika
import pytest

pytest.importorskip("pyspark")

from pyspark import cloudpickle
from pyspark.errors import StreamingQueryException

from gateway.clients.amqp import AmqpClient
from gateway.clients.amqpfast import FastClient
from gateway.clients.mqtt import MqttClient
from gateway.clients.wire import Client, ConnectionOptions, ReceivedMessage
from gateway.errors import LinkError
from gateway.model.message import Message
from gateway.pipeline.live.receiver import BufferLimits, Receiver
from gateway.pipeline.live.source import LiveAmqpSource
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqpfast.dialect import fast_address
from gateway.protocols.mqtt.dialect import topic_address
from gateway.settings import parse_url
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import GatewayProcess
from tests.pipeline.streams import finished

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

PATIENCE_SECS: Final = 60.0
MAPPING: Final = """version: 1
routes:
  - name: once
    from: {endpoint: mqtt, topic: "in/{rest...}"}
    to: {endpoint: amqp091, queue: once}
    deduplicate: {by: message_id, window: 1h}
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("gateway")
    (folder / "mapping.yaml").write_text(MAPPING)
    (folder / "password").write_text("guest\n")
    with GatewayProcess(folder, mappings=[str(folder / "mapping.yaml")]) as started:
        yield started


SCHEMES: Final = {"mqtt": "mqtt", "amqp091": "amqp", "amqpfast": "amqpfast"}


def options(gateway: GatewayProcess, protocol: str, **more: str) -> dict[str, str]:
    url = f"{SCHEMES[protocol]}://guest@{LOOPBACK}:{gateway.port(protocol)}"
    return {"url": url, "passwordFile": str(gateway.folder / "password")} | more


def access(gateway: GatewayProcess, protocol: str) -> ConnectionOptions:
    target = parse_url(f"{SCHEMES[protocol]}://guest:guest@{LOOPBACK}:{gateway.port(protocol)}")
    return ConnectionOptions(target, PATIENCE_SECS)


def queued(gateway: GatewayProcess, queue: str) -> int:
    """Messages that wait in a queue for whoever comes first."""
    parameters = pika.ConnectionParameters(LOOPBACK, gateway.port("amqp091"))
    with pika.BlockingConnection(parameters) as connection:
        return int(connection.channel().queue_declare(queue, passive=True).method.message_count)


def drained(spark: SparkSession, format_: str, to: Path, given: dict[str, str]) -> StreamingQuery:
    """The source of `format_` into Parquet below `to`, until it is quiet."""
    rows = spark.readStream.format(format_).options(**given).load()
    writer = rows.writeStream.format("parquet").option("checkpointLocation", str(to / "checkpoint"))
    return finished(lambda: writer.trigger(availableNow=True).start(str(to / "rows")))


def bodies(spark: SparkSession, to: Path) -> list[bytes]:
    return sorted(bytes(row[0]) for row in spark.read.parquet(str(to / "rows")).select("body").collect())


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_SECS
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def sources(gateway: GatewayProcess, protocol: str) -> tuple[Client, Any, dict[str, str], str]:
    """A publisher, an address to publish to, the options of a source that receives it, and its format."""
    at = access(gateway, protocol)
    if protocol == "mqtt":
        own = {"topics": '["live/a","live/b,c/#"]', "clientId": "spark", "bufferMessages": "200"}
        return MqttClient(at), topic_address("live/b,c/d"), options(gateway, protocol, **own), "gateway_mqtt"
    if protocol == "amqp091":
        own = {"queues": "live", "exchange": "amq.topic", "bindingKeys": "live.#", "bufferMessages": "200"}
        given = options(gateway, protocol, **own)
        return AmqpClient(at), amqp_address("amq.topic", "live.x"), given, "gateway_amqp"
    own = {"destinations": "queue:live,queue:other", "bufferMessages": "200"}
    return (
        FastClient(at),
        fast_address("queue", "live"),
        options(gateway, protocol, **own),
        "gateway_amqpfast",
    )


@pytest.mark.parametrize("protocol", ["mqtt", "amqp091", "amqpfast"])
def test_what_comes_while_the_query_is_stopped_comes_later(
    spark: SparkSession, gateway: GatewayProcess, tmp_path: Path, protocol: str
) -> None:
    """More than the window, in two lives of a query, until it is quiet; then all is acknowledged."""
    publisher, address, given, format_ = sources(gateway, protocol)
    given["quietSecs"] = "1"
    # The first life makes the subscription and finds nothing.
    drained(spark, format_, tmp_path, given)
    messages = [Message(address, b"%03d\xff" % number, assurance=1, durable=True) for number in range(450)]
    assert publisher.publish_many(messages) == {}
    publisher.close()
    drained(spark, format_, tmp_path, given)
    assert bodies(spark, tmp_path) == [message.body for message in messages]
    found = spark.read.parquet(str(tmp_path / "rows")).select("source_protocol", "source_name").distinct()
    name = {"mqtt": "live/b,c/d", "amqp091": "live.x", "amqpfast": "live"}[protocol]
    assert [tuple(row) for row in found.collect()] == [(protocol, name)]
    if protocol == "amqp091":
        assert queued(gateway, "live") == 0


def test_what_was_not_committed_comes_again(
    spark: SparkSession, gateway: GatewayProcess, tmp_path: Path
) -> None:
    """A batch that fails is not acknowledged, and a restarted query has every message of it."""
    peer = AmqpClient(access(gateway, "amqp091"))
    peer.declare("failing", "amq.topic", [])
    peer.publish_many([Message(amqp_address("", "failing"), b"%d" % n, assurance=1) for n in range(5)])
    peer.close()
    given = options(gateway, "amqp091", queues="failing")
    rows = spark.readStream.format("gateway_amqp").options(**given).load()
    broken = rows.selectExpr("if(length(body) > 0, raise_error('no'), '') as body")
    writer = broken.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "failed"))
    with pytest.raises(StreamingQueryException, match="USER_RAISED_EXCEPTION"):
        finished(lambda: writer.start(str(tmp_path / "nothing")))
    until(lambda: queued(gateway, "failing") == 5, "they do not come back")
    drained(spark, "gateway_amqp", tmp_path, given)
    assert bodies(spark, tmp_path) == [b"0", b"1", b"2", b"3", b"4"]
    assert spark.read.parquet(str(tmp_path / "rows")).where("not redelivered").count() == 0


def test_secrets_are_in_no_plan_and_no_progress(
    spark: SparkSession, gateway: GatewayProcess, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = options(gateway, "amqp091", queues="once2", exchange="amq.topic", quietSecs="0.1")
    del given["passwordFile"]
    query = drained(spark, "gateway_amqp", tmp_path, given | {"password": "guest"})
    query.explain(True)
    rows = spark.readStream.format("gateway_amqp").options(**given, password="hush-hush").load()
    rows.explain(True)
    said = capfd.readouterr().out + str(query.lastProgress) + str(query.recentProgress)
    assert "gateway_amqp" in said
    assert "hush-hush" not in said


# The sink.


def readings(spark: SparkSession, count: int, partitions: int = 2) -> DataFrame:
    return spark.range(0, count, 1, partitions).selectExpr(
        "concat('in/', id % 3) as topic", "cast(id as string) as body", "concat('r-', id) as message_id"
    )


def consumed(gateway: GatewayProcess, queue: str) -> list[bytes]:
    """Everything in a queue, taken."""
    count = queued(gateway, queue)
    peer = AmqpClient(access(gateway, "amqp091"))
    peer.consume(queue, None, "")
    found: list[ReceivedMessage] = []
    while len(found) < count:
        arrivals = peer.arrivals(PATIENCE_SECS)
        peer.acknowledge(arrivals)
        found += arrivals
    peer.close()
    return sorted(arrival.message.body for arrival in found)


def test_a_replayed_batch_leaves_no_duplicate(spark: SparkSession, gateway: GatewayProcess) -> None:
    """Written whole twice, and once more in part: the route has every id once."""
    peer = AmqpClient(access(gateway, "amqp091"))
    peer.declare("once", "amq.direct", [])
    peer.close()
    for count in (300, 300, 100):
        written = readings(spark, count).write.format("gateway_publish").mode("append")
        written.options(**options(gateway, "mqtt", inFlight="50")).save()
    assert consumed(gateway, "once") == sorted(b"%d" % number for number in range(300))


@pytest.mark.parametrize("protocol", ["amqp091", "amqpfast"])
def test_a_stream_is_published_with_ids_that_a_second_attempt_has_too(
    spark: SparkSession, gateway: GatewayProcess, tmp_path: Path, protocol: str
) -> None:
    """From one queue into another, by way of Spark; the ids name query, batch, partition and place."""
    at = access(gateway, protocol)
    words = {"queue": "sunk"} if protocol == "amqp091" else {"service": "queue", "destination": "sunk"}
    if protocol == "amqp091":
        amqp = AmqpClient(at)
        amqp.declare("sunk", "amq.topic", [])
        amqp.close()
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 20).load()
    writer = (
        rows.selectExpr("cast(value as string) as body")
        .writeStream.format("gateway_publish")
        .options(**options(gateway, protocol, **words))
        .option("checkpointLocation", str(tmp_path))
    )
    query = writer.start()

    def published() -> bool:
        nonlocal query
        if not query.isActive:
            query = writer.start()  # Spark was too impatient; see tests/pipeline/streams.py
        return bool(query.lastProgress) and query.lastProgress["batchId"] >= 1

    until(published, "nothing is written")
    name = query.id
    query.stop()
    consumer: Client
    if protocol == "amqp091":
        amqp = AmqpClient(at)
        amqp.consume("sunk", None, "")
        consumer = amqp
    else:
        fast = FastClient(at)
        fast.consume("queue", "sunk")
        consumer = fast
    found: list[ReceivedMessage] = []
    while len(found) < 40:
        found += consumer.arrivals(PATIENCE_SECS)
    consumer.close()
    ids = [str(arrival.message.properties.message_id) for arrival in found]
    assert len(set(ids)) == len(ids)
    assert {one.rpartition(":")[0].rpartition(":")[0] for one in ids[:40]} >= {f"{name}:0", f"{name}:1"}


def test_what_is_refused_fails_the_query_or_is_counted(spark: SparkSession, gateway: GatewayProcess) -> None:
    rows = spark.sql("select 'nowhere' as queue, 'x' as body")
    given = options(gateway, "amqp091")
    with pytest.raises(Exception, match="1 messages were refused"):
        rows.write.format("gateway_publish").mode("append").options(**given).save()
    rows.write.format("gateway_publish").mode("append").options(**given, onReject="skip").save()
    with pytest.raises(Exception, match="did you mean 'queue'"):
        spark.sql("select 'a' as queu, 'x' as body").write.format("gateway_publish").mode("append").options(
            **given
        ).save()
    with pytest.raises(Exception, match="cannot be overwritten"):
        rows.write.format("gateway_publish").mode("overwrite").options(**given).save()


# The receiver, without Spark.


class Scripted:
    """A peer that gives what it is told to, and fails when it is told to."""

    def __init__(self, *turns: list[bytes] | None) -> None:
        self.turns = list(turns)
        self.acknowledged: list[int] = []
        self.rested = 0

    def publish_many(self, messages: Any, *, in_flight: int = 1) -> dict[int, Any]:
        raise AssertionError("it only consumes")

    def arrivals(self, seconds: float) -> list[ReceivedMessage]:
        if not self.turns:
            time.sleep(seconds)
            return []
        turn = self.turns.pop(0)
        if turn is None:
            raise LinkError("cut")
        return [ReceivedMessage(Message(topic_address("t"), body), int(body), False) for body in turn]

    def pause_reading(self, seconds: float) -> None:
        self.rested += 1
        time.sleep(seconds)

    def acknowledge(self, arrivals: Any) -> None:
        self.acknowledged += [arrival.token for arrival in arrivals]

    def close(self) -> None:
        pass

    def close_abruptly(self) -> None:
        pass


def receiving(*peers: Scripted, messages_max: int = 100, away: float = 60.0) -> Receiver:
    left = list(peers)

    def connect() -> Client:
        if not left:
            raise LinkError("nobody is there")
        return left.pop(0)

    return Receiver(connect, BufferLimits(messages_max, 1_000_000, away))


def held(receiver: Receiver, start: int, end: int) -> list[bytes]:
    return [row.message.body for row in receiver.rows(start, end)]


def test_only_what_is_committed_is_acknowledged() -> None:
    peer = Scripted([b"1", b"2"], [b"3"])
    receiver = receiving(peer)
    until(lambda: receiver.latest(0, None) == 3, "it does not come")
    assert peer.acknowledged == []
    receiver.commit(2)
    until(lambda: peer.acknowledged == [1, 2], "it is not acknowledged")
    assert held(receiver, 2, 3) == [b"3"]
    receiver.close()


def test_a_full_buffer_stops_reading() -> None:
    peer = Scripted([b"1", b"2"], [b"3"])
    receiver = receiving(peer, messages_max=2)
    until(lambda: peer.rested > 2, "it goes on reading")
    assert receiver.latest(0, None) == 2
    receiver.commit(1)
    until(lambda: receiver.latest(0, None) == 3, "it does not go on")
    receiver.close()


def test_a_new_connection_brings_again_what_was_not_planned() -> None:
    first, second = Scripted([b"1", b"2"], [b"3"]), Scripted([b"1", b"2", b"3"])
    receiver = receiving(first, second)
    until(lambda: len(held(receiver, 0, 9)) == 3, "it does not come")
    assert receiver.latest(0, 2) == 2
    first.turns.append(None)
    until(lambda: len(held(receiver, 0, 9)) == 5, "it does not come again")
    assert held(receiver, 0, 9) == [b"1", b"2", b"1", b"2", b"3"]
    receiver.commit(2)
    receiver.commit(receiver.latest(0, None))
    until(lambda: second.acknowledged == [1, 2, 3], "the new ones are not acknowledged")
    assert first.acknowledged == []
    receiver.close()


def test_a_broker_that_stays_away_fails_the_query() -> None:
    receiver = receiving(away=0.0)

    def failed() -> bool:
        try:
            receiver.latest(0, None)
        except LinkError:
            return True
        return False

    until(failed, "it does not say so")


def test_it_is_not_quiet_while_there_is_no_connection() -> None:
    """The broker comes when one would have stopped waiting, goes again, and comes back."""
    first, second = Scripted([b"1"]), Scripted([b"2"])
    peers = [first, second]
    may_connect = threading.Event()

    def connect() -> Client:
        if not may_connect.is_set():
            raise LinkError("nobody is there")
        may_connect.clear()
        return peers.pop(0)

    receiver = Receiver(connect, BufferLimits(100, 1_000_000, 60.0))
    for number in (1, 2):
        timer = threading.Timer(0.8, may_connect.set)
        timer.start()
        receiver.wait(number - 1, 0.2)
        assert receiver.latest(number - 1, None) == number, "it has waited for the connection"
        timer.join()
        if number == 1:
            first.turns.append(None)
            until(lambda: receiver._connected_at is None, "it is not cut")
    receiver.wait(2, 0.2)
    receiver.close()


def test_no_connection_at_all_is_a_failure_and_no_silence() -> None:
    receiver = receiving(away=0.5)
    with pytest.raises(LinkError, match="nobody is there"):
        receiver.wait(0, 0.1)


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("protocol", ["mqtt", "amqp091", "amqpfast"])
@pytest.mark.parametrize("fault", ["dead", "password"])
def test_a_query_that_never_connects_fails(
    spark: SparkSession, gateway: GatewayProcess, tmp_path: Path, protocol: str, fault: str
) -> None:
    """Though it is to take only what is there, and there is nothing."""
    publisher, _, given, format_ = sources(gateway, protocol)
    publisher.close()
    given |= {"quietSecs": "0.2", "awaySecs": "1", "timeoutSecs": "5"}
    if fault == "dead":
        with closing(socket.create_server((LOOPBACK, 0))) as server:
            given["url"] = f"{SCHEMES[protocol]}://guest@{LOOPBACK}:{server.getsockname()[1]}"
    else:
        del given["passwordFile"]
        given["password"] = "wrong"
    with pytest.raises(StreamingQueryException, match="LinkError"):
        drained(spark, format_, tmp_path, given)


def test_a_batch_without_rows_is_published_to_a_broker_that_is_there(
    spark: SparkSession, gateway: GatewayProcess
) -> None:
    rows = spark.createDataFrame([], "queue string, body string")
    given = options(gateway, "amqp091")
    rows.write.format("gateway_publish").mode("append").options(**given).save()
    del given["passwordFile"]
    with pytest.raises(Exception, match="LinkError"):
        rows.write.format("gateway_publish").mode("append").options(**given, password="wrong").save()


def test_a_reader_that_is_sent_to_workers_has_no_connection_and_no_secret(
    gateway: GatewayProcess,
) -> None:
    source = LiveAmqpSource(
        {"url": "amqp://h", "queues": "q", "passwordFile": str(gateway.folder / "password")}
    )
    reader = source.streamReader(source.schema())
    assert b"guest" not in cloudpickle.dumps(reader)
