"""The sink and the live sources against brokers that others wrote: RabbitMQ and Mosquitto."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pika
import pytest

pytest.importorskip("pyspark")

from tests.interop.servers import LOOPBACK, Mosquitto, RabbitMQ
from tests.pipeline.killing import killed
from tests.pipeline.live.test_live import bodies, drained

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COUNT = 300


def publish(spark: SparkSession, address: str, given: dict[str, str]) -> None:
    """COUNT numbered rows from two tasks; returns when the broker has confirmed them."""
    rows = spark.range(0, COUNT, 1, 2).selectExpr(address, "cast(id as string) as body")
    rows.write.format("gateway_publish").mode("append").options(**given).save()


def numbered() -> list[bytes]:
    return sorted(b"%d" % number for number in range(COUNT))


def test_rabbitmq(spark: SparkSession, rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("guest\n")
    url = f"amqp://guest@{LOOPBACK}:{rabbitmq.port}"
    given = {"url": url, "passwordFile": str(tmp_path / "password")}
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
        channel = connection.channel()
        channel.queue_declare("spark", durable=True)
        publish(spark, "'spark' as queue", given)
        assert channel.queue_declare("spark", passive=True).method.message_count == COUNT
        drained(spark, "gateway_amqp", tmp_path, given | {"queues": "spark", "bufferMessages": "100"})
        assert bodies(spark, tmp_path) == numbered()
        assert channel.queue_declare("spark", passive=True).method.message_count == 0
        channel.queue_delete("spark")


def test_a_killed_driver_has_acknowledged_nothing_that_it_did_not_commit(
    spark: SparkSession, rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    """SIGKILL in the middle: RabbitMQ gives the next query all that was on its way, and what is repeated had
    been with the first one."""
    (tmp_path / "password").write_text("guest\n")
    url, password = f"amqp://guest@{LOOPBACK}:{rabbitmq.port}", str(tmp_path / "password")
    given = {"url": url, "passwordFile": password}
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
        channel = connection.channel()
        channel.queue_declare("killed.driver", durable=True)
        publish(spark, "'killed.driver' as queue", given)
        folder = tmp_path / "out"
        program = (sys.executable, "-m", "tests.pipeline.live.kill_driver", url, password)
        killed((*program, "killed.driver", str(folder)), folder, least=3)  # the first may be of no rows
        before = bodies(spark, folder)
        assert 0 < len(before) == len(set(before)) < COUNT, "it was killed too late"
        drained(spark, "gateway_amqp", folder, given | {"queues": "killed.driver"})
        rows = spark.read.parquet(str(folder / "rows")).select("body", "redelivered").collect()
        assert sorted({bytes(body) for body, _ in rows}) == numbered()
        assert len(rows) - COUNT <= len(before)
        assert sum(again for _, again in rows) >= COUNT - len(before)
        assert channel.queue_declare("killed.driver", passive=True).method.message_count == 0
        channel.queue_delete("killed.driver")


def test_mosquitto(spark: SparkSession, mosquitto: Mosquitto, tmp_path: Path) -> None:
    """The session that the first query leaves behind keeps what is published until the second comes."""
    url = {"url": f"mqtt://{LOOPBACK}:{mosquitto.port}"}
    given = url | {"topics": "spark/+", "clientId": "spark-reader", "quietSecs": "1"}
    drained(spark, "gateway_mqtt", tmp_path, given)
    publish(spark, "concat('spark/', id % 3) as topic", url)
    drained(spark, "gateway_mqtt", tmp_path, given)
    assert bodies(spark, tmp_path) == numbered()
