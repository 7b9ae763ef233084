"""A trace that begins at one client and ends at others, of every protocol, and the collector that gets it:
OpenTelemetry's own messages over HTTP.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Final

import httpx
import paho.mqtt.client as paho
import pika
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from gateway.protocols.amqpfast.codec import decode_head_properties
from gateway.settings import Http
from gateway.settings.tracing import TracingSettings
from tests.ingress.amqpfast.client import TOPIC, Fast, head
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of

TRACE: Final = "0af7651916cd43dd8448eb211c80319c"
PARENT: Final = "b7ad6b7169203331"
SAMPLED: Final = f"00-{TRACE}-{PARENT}-01"
MAPPING: Final = """version: 1
routes:
  - {name: to_amqp, from: {endpoint: mqtt, topic: "m/#"}, to: {endpoint: amqp091, queue: crossed}}
  - {name: to_fast, from: {endpoint: amqp091, exchange: amq.topic, binding_key: "a.#"},
     to: {endpoint: amqpfast, service: topic, destination: "{routing_key...}"}}
  - {name: to_mqtt, from: {endpoint: amqpfast, service: topic, destination: "f.{rest...}"},
     to: {endpoint: mqtt, topic: "f/{rest...}"}}
"""


class Collector:
    """Takes spans over HTTP until it is closed; `answer` is the status that it says."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        self.answer = 200
        self.came = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with collector.came:
                    if collector.answer == 200:
                        collector.take(ExportTraceServiceRequest.FromString(body))
                    collector.came.notify_all()
                self.send_response(collector.answer)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nobody reads it."""

        self.server = HTTPServer((LOOPBACK, 0), Handler)
        self.url = f"http://{LOOPBACK}:{self.server.server_port}/v1/traces"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def take(self, asked: ExportTraceServiceRequest) -> None:
        for resource in asked.resource_spans:
            self.services |= {
                one.value.string_value
                for one in resource.resource.attributes
                if one.key in ("service.name", "service.instance.id")
            }
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def named(self, name: str) -> Span:
        """Waits for it: spans are sent when so many have gathered, or some seconds later."""
        with self.came:
            assert self.came.wait_for(lambda: any(span.name == name for span in self.spans), 20.0), name
            (found,) = [span for span in self.spans if span.name == name]
            return found

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("NO_PROXY", "*")
    made = Collector()
    yield made
    made.close()


@pytest.fixture
def gateway(collector: Collector, tmp_path: Path) -> Iterator[Running]:
    (tmp_path / "mapping.yaml").write_text(MAPPING)
    settings = settings_of(
        mappings=(str(tmp_path / "mapping.yaml"),),
        http=Http(host=LOOPBACK, port=0),
        tracing=TracingSettings(enabled=True, url=collector.url, share=0.0, service="plant"),
        replica="r1",
    )
    with running(settings) as started:
        yield started


def below(span: Span, parent: str) -> None:
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, parent)


def test_from_mqtt_to_amqp(gateway: Running, collector: Collector) -> None:
    with pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as connection:
        channel = connection.channel()
        channel.queue_declare("crossed")
        client = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
        client.connect(LOOPBACK, gateway.mqtt)
        client.loop_start()
        said = Properties(PacketTypes.PUBLISH)
        said.UserProperty = [("traceparent", SAMPLED), ("tracestate", "vendor=7"), ("line", "l1")]
        client.publish("m/x", b"21.5", qos=1, properties=said).wait_for_publish(10)
        client.publish("m/x", b"plain", qos=1).wait_for_publish(10)
        _, properties, body = channel.basic_get("crossed", auto_ack=True)
        _, plain, _ = channel.basic_get("crossed", auto_ack=True)
        client.disconnect()
        client.loop_stop()
    assert (body, properties.headers["line"]) == (b"21.5", "l1")
    assert "traceparent" not in plain.headers
    receive, deliver = collector.named("receive mqtt"), collector.named("deliver to_amqp")
    below(receive, PARENT)
    for name in ("route to_amqp", "deliver to_amqp", "settle mqtt"):
        below(collector.named(name), receive.span_id.hex())
    assert properties.headers["traceparent"] == f"00-{TRACE}-{deliver.span_id.hex()}-01"
    assert properties.headers["tracestate"] == "vendor=7"
    assert receive.start_time_unix_nano <= deliver.start_time_unix_nano <= deliver.end_time_unix_nano
    assert deliver.end_time_unix_nano <= receive.end_time_unix_nano
    assert collector.services == {"plant", "r1"}
    metrics(gateway, deliver)


def metrics(gateway: Running, deliver: Span) -> None:
    """Whoever asks for OpenMetrics gets an exemplar of the route; who does not gets none, and can read it."""
    with httpx.Client(base_url=f"http://{LOOPBACK}:{gateway.gateway.http_port}", trust_env=False) as client:
        told = client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
        classic = client.get("/metrics", headers={"Accept": "text/plain"})
    assert told.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert classic.headers["Content-Type"].startswith("text/plain")
    assert "trace_id" not in classic.text
    families = {family.name: family for family in text_string_to_metric_families(told.text)}
    found = [
        sample.exemplar.labels
        for sample in families["gateway_route_seconds"].samples
        if sample.exemplar is not None
    ]
    assert found == [{"trace_id": TRACE, "span_id": deliver.span_id.hex()}]
    assert 'gateway_traces_total{outcome="sampled"} 1.0' in classic.text
    assert 'gateway_trace_spans_total{outcome="failed"} 0.0' in classic.text


def test_from_amqp_to_amqpfast_and_from_there_to_mqtt(gateway: Running, collector: Collector) -> None:
    with Fast(gateway, "f").open() as fast:
        fast.consume(fast.handle("a.", TOPIC))
        with pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            said = pika.BasicProperties(headers={"traceparent": SAMPLED})
            channel.basic_publish("amq.topic", "a.x", b"1", said)
        (row,) = fast.rows(1)
        deliver = collector.named("deliver to_fast")
        carried = {name: value.value for name, value in decode_head_properties(row[3]).headers}
        assert carried["traceparent"] == f"00-{TRACE}-{deliver.span_id.hex()}-01"
        below(collector.named("receive amqp091"), PARENT)
        received: list[list[tuple[str, str]]] = []
        subscribed, came = threading.Event(), threading.Event()
        client = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
        client.on_subscribe = lambda *_: subscribed.set()
        client.on_message = lambda *given: (received.append(given[2].properties.UserProperty), came.set())
        client.connect(LOOPBACK, gateway.mqtt)
        client.loop_start()
        client.subscribe("f/#", 1)
        assert subscribed.wait(10)
        fast.put(fast.handle("f.y", TOPIC), b"2", head=head(headers={"traceparent": SAMPLED}))
        assert came.wait(10)
        client.disconnect()
        client.loop_stop()
    onward = collector.named("deliver to_mqtt")
    assert dict(received[0])["traceparent"] == f"00-{TRACE}-{onward.span_id.hex()}-01"


def test_a_collector_that_refuses_costs_spans_alone(gateway: Running, collector: Collector) -> None:
    collector.answer = 400
    client = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    client.connect(LOOPBACK, gateway.mqtt)
    client.loop_start()
    said = Properties(PacketTypes.PUBLISH)
    said.UserProperty = [("traceparent", SAMPLED)]
    published = client.publish("elsewhere", b"1", qos=1, properties=said)
    published.wait_for_publish(10)
    assert published.is_published()
    tracing = gateway.gateway.tracing
    assert tracing is not None
    gateway.until(lambda: tracing.spans() == {"exported": 0, "failed": 1})
    client.disconnect()
    client.loop_stop()
