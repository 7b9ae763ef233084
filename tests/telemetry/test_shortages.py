"""Metrics of what runs out unless somebody acts: certificates, disks, limits, queues without consumers."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pika
import pytest

from gateway.admin.process import Limit
from gateway.app.shortages import CertificateEnds, limit_ratios
from gateway.settings import Http, Limits, StoreSettings
from tests.configured import make_link
from tests.ingress.test_revocation import DAY, NOW, Authority
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Running]:
    _, certificate = Authority(tmp_path, "brokers").sign("client")
    tls = {"ca_file": tmp_path / "brokers.pem", "cert_file": certificate, "key_file": certificate}
    links = {
        "erp": make_link(url=f"amqps://{LOOPBACK}:1", required=True, tls=tls),
        "spare": make_link(url=f"amqp://{LOOPBACK}:1"),
    }
    settings = settings_of(
        http=Http(host=LOOPBACK, port=0),
        store=StoreSettings(path=tmp_path / "data"),
        limits=Limits(queues_max=4),
        links=links,
    )
    with running(settings) as started:
        yield started


def scraped(gateway: Running) -> dict[str, float]:
    text = httpx.get(f"http://{LOOPBACK}:{gateway.gateway.http_port}/metrics", trust_env=False).text
    return {name: float(value) for name, value in re.findall(r"^(gateway_\S+) (\S+)$", text, re.MULTILINE)}


def test_they_are_scraped(gateway: Running) -> None:
    with pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for name in ("waits", "read"):
            channel.queue_declare(name)
        channel.basic_consume("read", lambda *_: None)
        channel.basic_publish("", "waits", b"x")
        channel.basic_publish("", "read", b"x")
        found = scraped(gateway)
    assert found["gateway_queue_unconsumed_messages"] == 1.0
    assert found['gateway_limit_used_ratio{limit="queues_max"}'] == 0.5
    assert 0.0 < found['gateway_disk_free_bytes{of="store"}'] <= found['gateway_disk_bytes{of="store"}']
    assert 'gateway_disk_bytes{of="journal"}' not in found, "it is off"
    assert found['gateway_link_required{endpoint="erp",protocol="amqp091"}'] == 1.0
    assert found['gateway_link_required{endpoint="spare",protocol="amqp091"}'] == 0.0
    key = 'gateway_certificate_expiry_timestamp_seconds{key="links.erp.tls.cert_file"}'
    assert found[key] == pytest.approx((NOW + DAY).timestamp(), abs=1.0)


def test_a_changed_certificate_is_read_and_a_lost_one_left_out(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    _, file = authority.sign("a")
    link = make_link(url="amqps://h", tls={"cert_file": file, "key_file": file})
    certificates = CertificateEnds(settings_of(links={"erp": link}))
    (first,) = certificates.expiries().values()
    assert first > time.time()
    file.write_text("none")
    assert certificates.expiries() == {}
    file.unlink()
    assert certificates.expiries() == {}
    authority.sign("a")
    assert certificates.expiries() == {"links.erp.tls.cert_file": first}


def test_the_highest_use_of_a_limit_counts_and_no_limit_has_none() -> None:
    rows = [Limit("a", "x", 10, 1), Limit("a", "y", 10, 9), Limit("b", "", 0, 5), Limit("c", "", 4, 8)]
    assert limit_ratios(rows) == {"a": 0.9, "c": 2.0}
