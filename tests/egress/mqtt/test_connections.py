"""One connection for both directions, or one for each, when the broker reads no more of what is published."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from gateway.protocols.mqtt.spec import PacketType
from gateway.settings import Limits
from tests.configured import make_link
from tests.ingress.clients import Mqtt, connect
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.interop.servers import free_ports

WINDOW: Final = 2
MANY: Final = 10
ROUTES: Final = """
version: 1
routes:
  - name: up
    from: {endpoint: mqtt, topic: "up/{rest...}"}
    to: {endpoint: LINK, topic: "up/{rest...}"}
  - name: down
    from: {endpoint: LINK, topic: "down/{rest...}"}
    to: {endpoint: mqtt, topic: "down/{rest...}"}
"""


@contextmanager
def site(folder: Path, **more: Any) -> Iterator[tuple[Running, Running]]:
    """A gateway with a link to another, which waits for a third that is not there."""
    (nobody,) = free_ports(1)
    mappings = {name: folder / f"{name}.yaml" for name in ("far", "dead")}
    for name, mapping in mappings.items():
        mapping.write_text(ROUTES.replace("LINK", name))
    dead = settings_of(
        limits=Limits(inflight_max=WINDOW),
        links={"dead": make_link(url=f"mqtt://{LOOPBACK}:{nobody}")},
        mappings=(str(mappings["dead"]),),
        drain_timeout_secs=0.0,
    )
    with running(dead, unrepaired=True) as far:
        link = make_link(url=f"mqtt://{LOOPBACK}:{far.mqtt}", version="3.1.1", client_id="near", **more)
        near_settings = settings_of(
            links={"far": link}, mappings=(str(mappings["far"]),), drain_timeout_secs=0.0
        )
        with running(near_settings) as near:
            links = near.gateway.links
            near.until(lambda: all(link.is_up for link in links.values()))
            far.until(lambda: far.gateway.mqtt.subscriptions == 1)
            yield near, far


def stopped(near: Running, far: Running, device: Mqtt) -> None:
    """What is published over the link is read no further."""
    for number in range(1, MANY + 1):
        device.publish("up/a", b"%d" % number, 1, number)
    connections = far.gateway.listeners["mqtt"].connections
    far.until(lambda: any(one.unsettled >= WINDOW for one in connections))  # type: ignore[attr-defined]
    device.publish("up/a", b"waits", 1, MANY + 1)
    far.until(lambda: any(not one.stream.reading for one in connections))


@pytest.mark.parametrize("connections, arrive", [(1, WINDOW), (2, MANY)])
def test_one_direction_holds_the_other_unless_it_has_its_own(
    tmp_path: Path, connections: int, arrive: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.ingress.waiting_publishes.MESSAGES_MAX", 0)
    with (
        site(tmp_path, connections=connections) as (near, far),
        connect(near, "device")[0] as device,
        connect(near, "reader")[0] as reader,
        connect(far, "writer")[0] as writer,
    ):
        reader.subscribe("down/#", 0)
        stopped(near, far, device)
        for number in range(MANY):
            writer.publish("down/a", b"%d" % number, 1, 1)
            assert writer.acked(PacketType.PUBACK) == (1, 0)
        assert [reader.body() for _ in range(arrive)] == [b"%d" % number for number in range(arrive)]
        session = far.gateway.mqtt.sessions["near"]
        far.until(
            lambda: (len(session), len(session.in_flight)) == (MANY - arrive, (MANY - arrive) and WINDOW)
        )


def test_the_broker_knows_them_apart_and_so_do_the_figures(tmp_path: Path) -> None:
    with site(tmp_path, connections=2, required=True) as (near, far):
        assert far.ask(lambda: sorted(far.gateway.mqtt.sessions)) == ["near", "near-out"]
        sessions = far.gateway.mqtt.sessions
        assert far.ask(lambda: list(sessions["near"].subscriptions)) == ["down/#"]
        assert far.ask(lambda: list(sessions["near-out"].subscriptions)) == []
        assert sorted(near.gateway.metrics.links) == ["far", "far (in)"]
        near.until(lambda: not near.gateway.readiness.reasons())


@pytest.mark.parametrize("connections", [1, 2])
def test_what_a_paused_route_holds_delays_no_stop(tmp_path: Path, connections: int) -> None:
    with (
        site(tmp_path, connections=connections) as (near, far),
        connect(near, "reader")[0] as reader,
        connect(far, "writer")[0] as writer,
    ):
        reader.subscribe("down/#", 0)
        pauses = near.gateway.core.pauses
        near.ask(lambda: pauses.pause("route", "down"))
        writer.publish("down/a", b"waits", 1, 1)
        near.until(lambda: pauses.waiting_by_route() == {"down": 1})
        assert near.ask(near.gateway._are_links_idle)
        near.ask(lambda: pauses.resume("route", "down"))
        assert reader.body() == b"waits"


def test_routes_that_change_change_the_right_one(tmp_path: Path) -> None:
    with site(tmp_path, connections=2) as (near, far):
        mapping = tmp_path / "far.yaml"
        mapping.write_text(ROUTES.replace("LINK", "far").replace('"down/', '"other/'))
        near.await_(near.gateway.reload_mappings)
        sessions = far.gateway.mqtt.sessions
        far.until(lambda: list(sessions["near"].subscriptions) == ["other/#"])
        assert far.ask(lambda: list(sessions["near-out"].subscriptions)) == []
