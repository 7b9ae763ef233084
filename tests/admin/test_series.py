"""Series of each queue and session: what they say, to whom, and how many there are at most."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import paho.mqtt.client as mqtt
import pika
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from gateway.admin import series
from gateway.settings import Http
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.operator import bearer

SECRET: Final = "scrape-me"
ODD: Final = 'odd "quoted"\\slash {é}'
Found = dict[tuple[str, str], float]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    token = tmp_path_factory.mktemp("series") / "token"
    token.write_text(SECRET)
    settings = settings_of(http=Http(host=LOOPBACK, port=0, scrape_token_file=token))
    with (
        running(settings) as started,
        pika.BlockingConnection(pika.URLParameters(started.idle_amqp_url)) as connection,
    ):
        channel = connection.channel()
        channel.confirm_delivery()
        for name in (ODD, "work.1", "work.2"):
            channel.queue_declare(name)
        for body in (b"1", b"2", b"3"):
            channel.basic_publish("", "work.1", body)
        channel.basic_get("work.1", auto_ack=True)
        channel.basic_get("work.1", auto_ack=False)
        client = mqtt.Client(CallbackAPIVersion.VERSION2, "press 7", protocol=mqtt.MQTTv5)
        client.connect(LOOPBACK, started.mqtt, properties=_lasting())
        client.loop_start()
        client.subscribe("orders/#", 1)
        sessions = started.gateway.mqtt.sessions
        started.until(lambda: "press 7" in sessions and len(sessions["press 7"].subscriptions) == 1)
        client.disconnect()
        client.loop_stop()
        channel.basic_publish("amq.topic", "orders.1", b"x")
        yield started


def _lasting() -> Properties:
    made = Properties(PacketTypes.CONNECT)
    made.SessionExpiryInterval = 600
    return made


def ask(gateway: Running, headers: dict[str, str] | None = None, **params: Any) -> httpx.Response:
    given = {"Authorization": f"Bearer {SECRET}"} if headers is None else headers
    at = f"http://{LOOPBACK}:{gateway.gateway.http_port}/metrics/detailed"
    return httpx.get(at, params=params, headers=given, trust_env=False)


def found(text: str) -> Found:
    return {
        (sample.name, sample.labels.get("queue") or sample.labels.get("client") or sample.labels["series"]): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_queues_are_told_of_by_their_names(gateway: Running) -> None:
    told = found(ask(gateway, series="queues").text)
    name = "gateway_detailed_queue"
    words = ("messages", "unacknowledged", "consumers", "in_total")
    assert [told[f"{name}_{word}", "work.1"] for word in words] == [1, 1, 0, 3]
    assert told[f"{name}_out_total", "work.1"] == 1
    assert told[f"{name}_messages", ODD] == 0
    assert told["gateway_detailed_left_out", "queues"] == 0
    assert not any("session" in metric for metric, _ in told)


def test_sessions_are_told_of_together_with_queues(gateway: Running) -> None:
    told = found(ask(gateway, series=["sessions", "queues"], client="press*", queue="work.2").text)
    assert told["gateway_detailed_session_subscriptions", "press 7"] == 1
    assert told["gateway_detailed_session_connected", "press 7"] == 0
    assert {name for metric, name in told if "queue_messages" in metric} == {"work.2"}
    assert found(ask(gateway, series="sessions", client="none*").text) == {
        ("gateway_detailed_left_out", "sessions"): 0
    }


def test_there_are_so_many_at_most(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "SERIES_MAX", 2)
    further: tuple[dict[str, Any], ...] = ({}, {"count": 100})
    for more in further:
        told = found(ask(gateway, series="queues", **more).text)
        assert {name for metric, name in told if "queue_messages" in metric} == {ODD, "work.1"}
        assert told["gateway_detailed_left_out", "queues"] == 1


def test_names_are_for_who_may_see_them(gateway: Running) -> None:
    assert ask(gateway, {}, series="queues").status_code == 401
    assert ask(gateway, {"Authorization": "Bearer other"}, series="queues").status_code == 401
    assert ask(gateway, bearer(gateway.gateway.http_port), series="queues").status_code == 200


def test_openmetrics_is_for_who_asks_for_it(gateway: Running) -> None:
    accepted = {"Authorization": f"Bearer {SECRET}", "Accept": "application/openmetrics-text; version=1.0.0"}
    told = ask(gateway, accepted, series="queues")
    assert told.headers["Content-Type"].startswith("application/openmetrics-text")
    names = {family.name for family in openmetrics_families(told.text)}
    assert "gateway_detailed_queue_in" in names


@pytest.mark.parametrize(
    "asked",
    [{}, {"series": "topics"}, {"series": "queues", "name": "x"}, {"series": "queues", "count": "many"}],
    ids=["nothing", "another kind", "another word", "no number"],
)
def test_what_cannot_be_told_is_said(gateway: Running, asked: dict[str, Any]) -> None:
    told = ask(gateway, **asked)
    assert told.status_code == 400
    assert told.headers["Content-Type"] == "application/problem+json"


def test_without_a_scrape_token_a_login_is_needed(tmp_path: Path) -> None:
    with running(settings_of(http=Http(host=LOOPBACK, port=0))) as gateway:
        assert ask(gateway, {}, series="queues").status_code == 401
        assert ask(gateway, bearer(gateway.gateway.http_port), series="queues").status_code == 200
