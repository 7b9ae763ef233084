"""A SUBSCRIBE or UNSUBSCRIBE with many filters takes several turns: others are served between them, and what
its client sent behind it waits. Each turn does the least here, one filter.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest

from gateway.broker.matching_steps import MEMBER_STEPS
from gateway.protocols.mqtt.packets import Suback, Subscription, Unsuback
from gateway.protocols.mqtt.properties import PropertyMap
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode, Version
from gateway.settings import Limits, StoreSettings
from gateway.transport import stream as streams
from gateway.transport.stream import Stream
from tests.ingress.clients import connect
from tests.interop.gateway_fixture import Running, running, settings_of

pytestmark = pytest.mark.interpreted  # it looks at turns, and makes each of them short

MANY: Final = 50
DEEP: Final = "/".join("a" * 190)


@pytest.fixture
def turns() -> Iterator[list[int]]:
    """How much was left, each time that something was."""
    left: list[int] = []
    postpone = Stream.postpone

    def noting(stream: Stream, events: list[Any]) -> None:
        left.append(len(events))
        postpone(stream, events)

    with patch.object(streams, "SLOW_WORK_SECS", 0.0), patch.object(Stream, "postpone", noting):
        yield left


@pytest.mark.parametrize("version", [Version.V5, Version.V311])
def test_each_filter_is_answered_and_what_follows_waits(
    turns: list[int], gateway: Running, version: Version
) -> None:
    with connect(gateway, version=version)[0] as client:
        filters = [f"{DEEP}/{at}" for at in range(MANY)]
        client.machine.subscribe(1, [Subscription(one, at % 3) for at, one in enumerate(filters)])
        client.machine.publish(filters[-1].encode(), b"behind", 1, packet_id=2)
        client.flush()
        assert client.next(Suback).reasons == tuple(at % 3 for at in range(MANY))
        assert client.body() == b"behind"
        assert len(turns) > MANY // 2
        turns.clear()
        client.machine.unsubscribe(3, ["none", *filters])
        client.machine.publish(filters[-1].encode(), b"nobody", 1, packet_id=4)
        client.flush()
        answer = client.next(Unsuback)
        if version is Version.V5:
            assert answer.reasons == (ReasonCode.NO_SUBSCRIPTION_EXISTED, *[ReasonCode.SUCCESS] * MANY)
        assert len(turns) > MANY // 2
        assert client.quiet()


def test_others_are_served_between_two_turns(turns: list[int], gateway: Running) -> None:
    with connect(gateway, "one")[0] as client, connect(gateway, "other")[0] as other:
        client.machine.subscribe(1, [Subscription(f"{DEEP}/{at}") for at in range(MANY)])
        client.flush()
        other.publish("x", b"x", 1, 1)
        assert other.acked(PacketType.PUBACK)[0] == 1
        assert len(client.next(Suback).reasons) == MANY


def test_retained_messages_come_behind_the_answer(turns: list[int], gateway: Running) -> None:
    with connect(gateway)[0] as client:
        client.publish("kept", b"kept", 1, 1, retain=True)
        client.acked(PacketType.PUBACK)
        client.machine.subscribe(1, [Subscription("kept"), *[Subscription(f"f/{at}") for at in range(MANY)]])
        client.flush()
        client.next(Suback)
        assert not client.heard
        assert client.body() == b"kept"


def test_a_durable_session_has_them_all_after_a_restart(turns: list[int], tmp_path: Path) -> None:
    """The last filter was there before: the answer waits for the records of the others all the same."""
    settings = settings_of(store=StoreSettings(path=tmp_path / "data"))
    kept: PropertyMap = {Property.SESSION_EXPIRY_INTERVAL: 600}
    filters = [f"f/{at}" for at in range(MANY)]
    with running(settings) as gateway, connect(gateway, "kept", clean=False, properties=kept)[0] as client:
        client.subscribe("f/0", 1)
        client.machine.subscribe(1, [Subscription(one, 1) for one in reversed(filters)])
        client.flush()
        client.next(Suback)
    with running(settings) as gateway:
        client, connack = connect(gateway, "kept", clean=False, properties=kept)
        with client:
            assert connack.session_present
            assert gateway.ask(lambda: gateway.gateway.mqtt.subscriptions) == MANY


def test_a_client_that_leaves_half_way_leaves_nothing_behind(turns: list[int], gateway: Running) -> None:
    with connect(gateway)[0] as client:
        client.machine.subscribe(1, [Subscription(f"f/{at}") for at in range(MANY)])
        client.machine.disconnect()
        client.flush()
        assert client.closed()
    with connect(gateway, "other")[0] as other:
        other.publish("f/1", b"x", 1, 1)
        assert other.acked(PacketType.PUBACK)[1] == ReasonCode.NO_MATCHING_SUBSCRIBERS


# Filters with many wildcards.


def test_filters_beyond_the_users_steps_are_refused(turns: list[int]) -> None:
    with running(settings_of(limits=Limits(matching_steps_per_user_max=1_000))) as gateway:
        with connect(gateway)[0] as client:
            assert client.subscribe("/".join("+" * 25), 1) == 1  # 24 x 25 steps
            assert client.subscribe("/".join("+" * 24), 1) == ReasonCode.QUOTA_EXCEEDED
            client.machine.subscribe(9, [Subscription(f"site/+/{at}/#", 1) for at in range(MANY)])
            client.flush()
            assert set(client.next(Suback).reasons) == {1}
        with connect(gateway, "again")[0] as client:  # its session is over, and the steps are free
            assert client.subscribe("/".join("+" * 24), 1) == 1


def test_members_of_shared_subscriptions_count_against_their_user(turns: list[int]) -> None:
    """A group asks each of its members for room at each message."""
    with running(settings_of(limits=Limits(matching_steps_per_user_max=1_000))) as gateway:
        with connect(gateway)[0] as client:
            client.machine.subscribe(1, [Subscription(f"$share/g{at}/#", 1) for at in range(2 * MANY)])
            client.flush()
            reasons = list(client.next(Suback).reasons)
            most = 1_000 // MEMBER_STEPS
            assert reasons == [1] * most + [ReasonCode.QUOTA_EXCEEDED] * (2 * MANY - most)
        with connect(gateway, "again")[0] as client:  # its session is over, and the steps are free
            assert client.subscribe("$share/g/#", 1) == 1
