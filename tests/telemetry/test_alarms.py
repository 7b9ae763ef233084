"""Alarms: what is wrong now, since when, and a section of the runbook for each."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gateway.telemetry.alarms import ACTS, LIMIT_USED_MAX, Alarms
from gateway.telemetry.metrics import Metrics, Sources

ROOT = Path(__file__).resolve().parents[2]
UTC = 1_800_000_000.0


class Scene:
    """A gateway's metrics, in which nothing is wrong."""

    def __init__(self) -> None:
        self.paused: dict[str, int] = {}
        self.paused_links: list[str] = []
        self.limits: dict[str, float] = {}
        self.certificates: dict[str, float] = {}
        self.disks: dict[str, tuple[int, int]] = {"store": (50, 100)}
        self.gauges = dict.fromkeys(
            ("dead_letters", "dead_letters_unwanted", "memory_blocked", "queue_unconsumed_messages"), 0.0
        )
        self.gauges["state_up"] = 1.0
        self.metrics = Metrics(
            "1",
            Sources(
                paused_routes=lambda: self.paused,
                paused_links=lambda: self.paused_links,
                limit_ratios=lambda: self.limits,
                certificates=lambda: self.certificates,
                disk_space=lambda: self.disks,
                gauges={f"gateway_{name}": lambda name=name: self.gauges[name] for name in self.gauges},
            ),
        )
        self.link = self.metrics.link("erp", "amqp091")
        self.link.up = True
        self.alarms = Alarms(self.metrics)

    def names(self, utc: float = UTC) -> list[str]:
        self.alarms.tick(utc)
        return [one.name for one in self.alarms.present()]


def test_where_nothing_is_wrong_there_is_none() -> None:
    scene = Scene()
    scene.limits["sessions_max"] = LIMIT_USED_MAX
    scene.certificates["http.tls.cert_file"] = UTC + 15 * 86_400
    scene.gauges["dead_letters"] = scene.gauges["dead_letters_unwanted"] = 5.0
    assert scene.names() == []


def test_an_alarm_knows_since_when_and_ends() -> None:
    scene = Scene()
    scene.link.up = False
    scene.link.required = True
    assert scene.names(UTC) == ["GatewayLinkDown"]
    scene.names(UTC + 60)
    (alarm,) = scene.alarms.present()
    assert (alarm.of, alarm.since, alarm.page) == ("erp", UTC, "docs/guides/runbook.md#gatewaylinkdown")
    scene.link.up = True
    assert scene.names(UTC + 120) == []
    scene.link.up = False
    scene.names(UTC + 180)
    assert scene.alarms.present()[0].since == UTC + 180, "it is another one"


@pytest.mark.parametrize("leads, paused, names", [(False, [], []), (None, ["erp"], ["GatewayPaused"])])
def test_a_link_that_has_a_reason_to_be_down(leads: bool | None, paused: list[str], names: list[str]) -> None:
    scene = Scene()
    scene.link.up, scene.link.is_elected, scene.paused_links = False, leads, paused
    assert scene.names() == names


def test_each_condition_has_its_alarm() -> None:
    scene = Scene()
    scene.link.up, scene.link.blocked, scene.link.filters_refused = False, True, 2
    scene.link.missing_objects["queue q"] = "not found"
    scene.paused["up"] = 3
    scene.limits["sessions_max"] = 0.95
    scene.certificates["a"], scene.certificates["b"] = UTC + 86_400, UTC - 1
    scene.disks["store"] = (5, 100)
    scene.gauges.update(dead_letters=2.0, memory_blocked=1.0, queue_unconsumed_messages=1_001.0, state_up=0.0)
    expected = set(ACTS) - {
        "GatewayLinkDown",  # of a required link
        "GatewayOutboxOld",
        "GatewayStoreUnhealthy",
        "GatewayJournalLosesRows",
    }
    assert set(scene.names()) == expected
    ends = {one.of: one.text for one in scene.alarms.present() if one.name == "GatewayCertificateExpires"}
    assert ends == {"a": "the certificate expires in 1.0 days", "b": "the certificate has expired"}


def test_each_has_a_section_of_the_runbook_and_an_alert() -> None:
    runbook = (ROOT / "docs/guides/runbook.md").read_text(encoding="utf-8")
    rules = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text(encoding="utf-8"))
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    assert set(ACTS) <= alerts
    assert all(f"\n## {name}\n" in runbook for name in ACTS)
