"""What an AMQP 0-9-1 link declares, looks for, tries again, and gives up when the mapping changes."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from gateway.egress.amqp091.topology import own_queue
from gateway.mapping.router import Subscriptions, Targets
from gateway.model.outcome import ACCEPTED, Verdict
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.table import plain
from tests.egress.amqp091.remote import LinkRig, Settled

pytestmark = pytest.mark.interpreted  # the stream is one in memory

ALL = Targets(scopes=("telemetry", "amq.topic"), queues=("jobs",))
FROM_QUEUE = Subscriptions(queues=("commands",))
SINGLE = {"x-single-active-consumer": True}
BOUND = Subscriptions(bindings=(("events", "a.#"), ("events", "b.*")))


def declared(one: LinkRig) -> list[m.Method]:
    return [
        method
        for method in one.world.heard
        if isinstance(method, m.ExchangeDeclare | m.QueueDeclare) and not method.passive
    ]


async def test_the_handshake_says_who_and_what_we_are() -> None:
    one = LinkRig(heartbeat_secs=7)
    one.connect()
    said = plain(one.world.client_properties)
    assert said["connection_name"] == "gw-1"
    assert set(said["capabilities"]) >= {
        "publisher_confirms",
        "basic.nack",
        "consumer_cancel_notify",
        "connection.blocked",
    }
    assert one.world.response == b"\0erp\0secret"
    assert one.connection.machine.heartbeat == 7
    assert one.link.ups == 1
    assert one.stats.frames()["0-9-1", "in", "connection.open-ok"] == 1


async def test_what_is_missing_is_made_and_what_exists_is_left_alone() -> None:
    one = LinkRig()
    one.world.queues.add("jobs")
    one.route(FROM_QUEUE, ALL)
    one.connect()
    assert declared(one) == [
        m.ExchangeDeclare("telemetry", "topic", durable=True),
        m.QueueDeclare("commands", durable=True),
    ]
    assert one.remote.consumed == ["commands"]
    assert one.link.ups == 1
    assert len(one.remote.machine.channels) == 2  # to publish and to consume; the one for questions is closed


async def test_replicas_take_turns_by_arguments_of_queues_and_consumers() -> None:
    one = LinkRig(single_active_consumer=True, consumer_priority=-3)
    one.world.queues.add("there")
    one.route(Subscriptions(queues=("commands", "there"), bindings=(("events", "#"),)), ALL)
    one.connect()
    made = {method.queue: plain(method.arguments) for method in declared(one) if hasattr(method, "queue")}
    assert made == dict.fromkeys(("commands", "jobs", "gw-1.events"), SINGLE)
    consumed = [method for method in one.world.heard if isinstance(method, m.BasicConsume)]
    assert {method.queue for method in consumed} == {"commands", "there", "gw-1.events"}
    assert all(plain(method.arguments) == {"x-priority": -3} for method in consumed)


async def test_bindings_get_a_queue_of_the_links_own() -> None:
    one = LinkRig()
    one.route(BOUND)
    one.connect()
    name = own_queue("gw-1", "events")
    assert name == "gw-1.events"
    assert one.world.bindings == {(name, "events", "a.#"), (name, "events", "b.*")}
    assert one.world.exchanges["events"] == "topic"
    assert one.remote.consumed == [name]


def test_the_name_of_an_own_queue_fits_a_short_string() -> None:
    assert len(own_queue("g" * 200, "e" * 200)) <= 255
    assert own_queue("g" * 200, "e" * 200) != own_queue("g" * 200, "f" * 200)


async def test_check_only_looks() -> None:
    one = LinkRig(declare="check")
    one.route(FROM_QUEUE, ALL)
    one.connect()
    assert declared(one) == []
    assert one.link.ups == 1
    source = Settled()
    source.publish(one.session.publisher, "telemetry", [b"lost"])
    source.publish(one.session.publisher, "amq.topic", [b"kept"])
    assert source.outcomes[b"lost"].verdict is Verdict.REJECTED
    assert "no exchange 'telemetry'" in source.outcomes[b"lost"].text


async def test_none_trusts_and_still_survives_what_is_not_there() -> None:
    one = LinkRig(declare="none")
    one.world.exchanges["amq.topic"] = "topic"
    one.route(Subscriptions(queues=("commands", "more")), ALL)
    one.world.queues.add("more")
    one.connect()
    assert [
        method for method in one.world.heard if isinstance(method, m.ExchangeDeclare | m.QueueDeclare)
    ] == []
    assert one.remote.consumed == ["more"]
    source = Settled()
    source.publish(one.session.publisher, "amq.topic", [b"kept"])
    one.move()
    assert source.outcomes[b"kept"] is ACCEPTED


async def test_what_failed_is_tried_again_with_longer_and_longer_waits(
    autojump_clock: trio.testing.MockClock,
) -> None:
    one = LinkRig(declare="check", reconnect_max_secs=5.0)
    one.route(FROM_QUEUE)
    one.connect()
    asked = []
    for second in range(1, 21):
        await trio.sleep(1)
        before = len(one.world.heard)
        one.tick()
        if len(one.world.heard) > before:
            asked.append(second)
    assert asked == [1, 3, 7, 12, 17]
    one.world.queues.add("commands")
    await trio.sleep(5)
    one.tick()
    assert one.remote.consumed == ["commands"]


async def test_a_cancelled_consumer_comes_back(autojump_clock: trio.testing.MockClock) -> None:
    one = LinkRig()
    one.route(Subscriptions(queues=("one", "two")))
    one.connect()
    channel = next(number for number, (queue, _) in one.remote.consumers.items() if queue == "one")
    del one.remote.consumers[channel]
    one.world.queues.discard("one")
    one.remote.machine.send_method(channel, m.BasicCancel(f"tag{channel}", True))
    one.move()
    assert one.remote.consumed == ["two"]
    await trio.sleep(1.5)
    one.tick()
    assert one.remote.consumed == ["one", "two"]


async def test_a_new_connection_consumes_again() -> None:
    one = LinkRig()
    one.route(FROM_QUEUE, ALL)
    one.connect()
    one.lose()
    one.world.exchanges.clear()  # a broker that has lost everything
    one.world.queues.clear()
    one.connect()
    assert one.remote.consumed == ["commands"]
    assert "telemetry" in one.world.exchanges
    assert (one.link.ups, one.link.downs) == (2, ["broken"])


async def test_a_changed_mapping_is_put_in_force_while_connected() -> None:
    one = LinkRig()
    one.route(BOUND, ALL)
    one.connect()
    assert len(one.remote.consumers) == 1
    one.route(Subscriptions(queues=("commands",), bindings=(("events", "b.*"), ("events", "c"))), ALL)
    one.move()
    name = own_queue("gw-1", "events")
    assert {key for _, _, key in one.world.bindings} == {"b.*", "c"}
    assert one.remote.consumed == ["commands", name]
    one.route(FROM_QUEUE, Targets(scopes=("other",)))
    one.move()
    assert one.world.bindings == set()
    assert one.remote.consumed == ["commands"]
    assert "other" in one.world.exchanges
    assert len(one.remote.machine.channels) == 2
    one.route(FROM_QUEUE, Targets(scopes=("other",)))
    one.move()
    assert one.remote.consumed == ["commands"]


@pytest.mark.parametrize("needed_again", [False, True])
async def test_bindings_that_no_route_needs_go_although_the_connection_was_lost(needed_again: bool) -> None:
    """Nobody consumes the queue, which would grow at the broker."""
    one = LinkRig()
    one.route(BOUND)
    one.connect()
    assert {key for _, _, key in one.world.bindings} == {"a.#", "b.*"}
    one.route()
    one.lose()
    if needed_again:
        one.route(Subscriptions(bindings=(("events", "a.#"),)))
    one.connect()
    assert {key for _, _, key in one.world.bindings} == ({"a.#"} if needed_again else set())
    unbound = [method.routing_key for method in one.world.heard if isinstance(method, m.QueueUnbind)]
    assert unbound == (["b.*"] if needed_again else ["a.#", "b.*"])
    one.lose()
    one.connect()
    assert [method.routing_key for method in one.world.heard if isinstance(method, m.QueueUnbind)] == unbound


@pytest.mark.parametrize("gone", ["exchange", "queue", "both"])
async def test_bindings_that_no_route_needs_bring_no_deleted_object_back(gone: str) -> None:
    one = LinkRig()
    one.route(BOUND)
    one.connect()
    one.route()
    one.lose()
    if gone != "queue":
        del one.world.exchanges["events"]
    if gone != "exchange":
        one.world.queues.clear()
    exchanges, queues = dict(one.world.exchanges), set(one.world.queues)
    for _ in range(2):
        one.connect()
        assert (one.world.exchanges, one.world.queues) == (exchanges, queues)
        assert one.link.is_up
        one.lose()
    unbound = [method.routing_key for method in one.world.heard if isinstance(method, m.QueueUnbind)]
    assert unbound == ["a.#", "b.*"], "once, as the broker has replied"


async def test_publishing_waits_until_a_new_exchange_is_declared() -> None:
    one = LinkRig()
    one.connect()
    source = Settled()
    one.route(targets=Targets(scopes=("fresh",)))
    source.publish(one.session.publisher, "fresh", [b"body"])
    one.move()
    assert source.outcomes[b"body"] is ACCEPTED
    assert len([method for method in one.world.heard if isinstance(method, m.ConfirmSelect)]) == 1


async def test_a_refused_login_is_the_reason_that_the_link_gives() -> None:
    one = LinkRig()
    one.stream.owner = one.session.connect(one.stream, one.settings.target(), 0.0)  # type: ignore[arg-type]
    one.remote.machine.authenticated = lambda: one.remote.machine.close(403, "ACCESS_REFUSED - no")  # type: ignore[method-assign]
    one.move()
    assert one.link.downs == ["403 ACCESS_REFUSED - no"]
    assert one.link.ups == 0
    assert one.stats.protocol_errors.counts == {"access_refused": 1}


async def test_a_broker_that_does_not_answer_is_left(autojump_clock: trio.testing.MockClock) -> None:
    one = LinkRig(connect_timeout_secs=3.0)
    one.stream.owner = one.session.connect(one.stream, one.settings.target(), trio.current_time())  # type: ignore[arg-type]
    await trio.sleep(3.5)
    one.connection.tick(trio.current_time())
    assert one.link.downs == ["the handshake timed out"]


async def test_a_silent_broker_is_left_after_two_heartbeats(autojump_clock: trio.testing.MockClock) -> None:
    one = LinkRig(heartbeat_secs=10)
    one.connect()
    for _ in range(25):
        await trio.sleep(1)
        one.connection.tick(trio.current_time())
        if one.link.downs:
            break
        one.connection.data_to_send()
    assert one.link.downs == ["heartbeat timeout"]
    assert one.connection.machine.sent["heartbeat"] >= 2


async def test_shutting_down_says_goodbye() -> None:
    one = LinkRig()
    one.connect()
    one.connection.shut_down()
    one.remote.receive(one.stream.last)
    assert one.remote.machine.closed


# Surveys.


async def surveyed(one: LinkRig) -> None:
    """As much time as lies between two surveys, and that of another attempt."""
    await trio.sleep(31)
    one.tick()
    one.move()


async def test_bindings_of_an_exchange_that_was_made_anew_are_restored(
    autojump_clock: trio.testing.MockClock,
) -> None:
    one = LinkRig()
    one.route(BOUND)
    one.connect()
    bound = set(one.world.bindings)
    assert len(bound) == 2
    one.world.bindings.clear()  # the exchange was deleted and declared again, which nobody is told
    await surveyed(one)
    assert one.world.bindings == bound
    assert len(one.remote.consumers) == 1, "the consumer is the one that it was"


async def test_an_exchange_that_was_deleted_is_made_and_bound_again_and_that_is_told(
    autojump_clock: trio.testing.MockClock,
) -> None:
    one = LinkRig()
    one.route(BOUND, ALL)
    one.connect()
    bound = set(one.world.bindings)
    one.world.bindings.clear()
    one.world.exchanges.clear()
    with capture_logs() as logged:
        await surveyed(one)
    assert one.world.bindings == bound
    assert {"events", "telemetry"} <= set(one.world.exchanges)
    event = "broker object lost, declared again"
    told = [(line["kind"], line["name"]) for line in logged if line["event"] == event]
    assert sorted(told) == [("exchange", "events"), ("exchange", "telemetry")]
    assert one.stats.restored.counts == {"exchange": 2}
    assert one.stats.missing_objects == {}


async def test_what_may_only_be_looked_for_is_lacking_until_it_is_back(
    autojump_clock: trio.testing.MockClock,
) -> None:
    one = LinkRig(declare="check")
    one.world.exchanges["telemetry"] = "topic"
    one.world.queues |= {"commands", "jobs"}
    one.route(FROM_QUEUE, ALL)
    one.connect()
    assert one.stats.missing_objects == {}
    del one.world.exchanges["telemetry"]
    one.world.queues.discard("jobs")
    await surveyed(one)
    assert list(one.stats.missing_objects) == ["exchange 'telemetry'", "queue 'jobs'"]
    assert "no exchange 'telemetry'" in one.stats.missing_objects["exchange 'telemetry'"]
    one.world.exchanges["telemetry"] = "topic"
    one.world.queues.add("jobs")
    for _ in range(3):
        await surveyed(one)
    assert one.stats.missing_objects == {}
    assert one.stats.restored.counts == {"exchange": 1, "queue": 1}


async def test_a_consumer_that_went_without_a_word_is_back(autojump_clock: trio.testing.MockClock) -> None:
    one = LinkRig()
    one.route(FROM_QUEUE)
    one.connect()
    await surveyed(one)
    one.remote.consumers.clear()
    await surveyed(one)
    assert one.remote.consumed == ["commands"]
    assert one.stats.restored.counts == {"consumer": 1}


async def test_a_broker_that_counts_no_consumers_is_believed_to_have_ours(
    autojump_clock: trio.testing.MockClock,
) -> None:
    one = LinkRig()
    one.route(FROM_QUEUE)
    one.connect()
    consumers, one.remote.consumers = one.remote.consumers, {}
    for _ in range(3):
        await surveyed(one)
    assert (one.remote.consumers, len(consumers), one.stats.restored.counts) == ({}, 1, {})


@pytest.mark.parametrize("settings", [{"survey_secs": 0}, {"declare": "none"}])
async def test_a_survey_may_be_unwanted(
    autojump_clock: trio.testing.MockClock, settings: dict[str, Any]
) -> None:
    one = LinkRig(**settings)
    one.world.queues.add("commands")
    one.world.exchanges["telemetry"] = "topic"
    one.route(FROM_QUEUE, Targets(scopes=() if settings.get("declare") else ("telemetry",)))
    one.connect()
    before = len(one.world.heard)
    await surveyed(one)
    assert len(one.world.heard) == before
