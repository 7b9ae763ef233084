"""The tests of the embedded broker's MQTT listener, with the engine behind it.

Each has a namespace of its own. What the engine does otherwise, as `docs/guides/replicas.md` tells, stands in
EXCEPTIONS with its reason; everything else must pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any, Final

import pytest

from gateway.settings import Settings
from gateway.settings.engine import RabbitEngine
from tests.ingress import test_mqtt
from tests.ingress.mqtt import (
    test_bad_clients,
    test_nobody,
    test_offered,
    test_refused,
    test_scram,
    test_shared,
    test_statements,
    test_stopping,
    test_system,
    test_wills,
)
from tests.interop.gateway_fixture import Running, no_errors_logged, quickened, settings_of
from tests.interop.servers import RabbitMQ
from tests.interop.state_database import state_database

MODULES: Final = (
    test_mqtt,
    test_bad_clients,
    test_nobody,
    test_offered,
    test_refused,
    test_scram,
    test_shared,
    test_statements,
    test_stopping,
    test_system,
    test_wills,
)
AWAY: Final = "sessions whose clients are away are in the database, and not among those of a replica"
NOBODY: Final = "0x10 is not said: nobody knows who subscribes elsewhere"
SHARED: Final = "shared subscriptions are granted at QoS 1 at most"
LONG: Final = "the topic is longer than 255 bytes as a routing key"
EXCEPTIONS: Final = {
    "mqtt_a_session_is_resumed_with_what_was_in_flight": AWAY,
    "mqtt_a_session_that_was_not_to_stay_is_gone": AWAY,
    "mqtt_a_will_with_delay_is_not_published_for_a_client_that_returns": AWAY,
    "mqtt_what_a_client_asks_for_right_before_it_leaves_is_done": AWAY,
    "shared_members_may_be_away": AWAY,
    "mqtt_passwords_are_verified_and_what_follows_connect_waits": NOBODY,
    "refused_quality_2_counts_until_pubcomp": NOBODY,
    "scram_who_knows_the_password_is_let_in": NOBODY,
    "scram_a_connected_client_may_prove_it_again": NOBODY,
    "shared_each_message_goes_to_one_member[2-5]": SHARED,
    "shared_each_message_goes_to_one_member[2-4]": SHARED,
    "shared_each_message_goes_to_one_member[2-3]": SHARED,
    "shared_quality_2_is_completed_with_the_member_that_has_it": SHARED,
    "refused_200_levels_are_taken": LONG,
    "statements_topics_are_not_normalised[topic7]": LONG,
    "mqtt_what_is_owed_retained_waits_for_the_client_to_return": "it is not owed to a client that is lost",
    "mqtt_no_local_is_about_the_client_and_not_its_namesakes": "the gateways have no AMQP listener here",
    "mqtt_quality_2_is_taken_once_however_often_it_is_sent": "a repeat is noticed and counted where it ends",
    "mqtt_many_retained_messages_come_in_pieces_and_others_are_served_between": "what was published at QoS 0 "
    "a moment before comes live",
    "refused_a_session_whose_opening_has_failed_is_not_present": "it breaks methods of the embedded broker",
    "refused_a_pubrel_before_its_pubrec_frees_what_it_names": "until the cluster has confirmed it, it counts",
    "bad_clients_a_client_that_never_acknowledges_holds_its_publishers_for_a_while_only": "no publisher "
    "waits for a client of the cluster",
    "bad_clients_a_client_that_does_not_read_is_let_go_and_leaves_nothing": "no publisher waits for it",
    "bad_clients_ten_thousand_that_reconnect_at_once_are_all_served": "it counts the process's sockets",
    "wills_refused_wills_beyond_the_share_of_their_user_are_dead_letters": "its queue is embedded",
    "system_clients_may_not_publish_there": "by the time that the log has been read there are newer values",
    "statements_a_ping_is_answered_behind_what_came_before_it": "it does not wait for the cluster to confirm",
    "stopping_a_delay_ends_with_the_process_that_alone_knows_the_session": "another replica knows it, too",
}
PATIENCE_SECS: Final = 15.0
numbers = itertools.count()


def on_engine(settings: Settings, rabbitmq: RabbitMQ) -> Settings:
    """The same with its MQTT listeners alone, over the broker."""
    engine = RabbitEngine(
        engine="rabbitmq",
        urls=(rabbitmq.url,),
        namespace=f"as-embedded-{next(numbers)}",
        queue_type="classic",
        postgresql=state_database(),
    )
    mqtt = {name: one for name, one in settings.listeners.items() if one.protocol == "mqtt"}
    return settings.model_copy(update={"broker": engine, "listeners": mqtt})


@pytest.fixture(autouse=True)
def running(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, rabbitmq: RabbitMQ) -> Any:
    """What the tests start gateways with."""
    whole = request.node.name.removeprefix("test_")
    if (why := EXCEPTIONS.get(whole) or EXCEPTIONS.get(whole.partition("[")[0])) is not None:
        pytest.skip(why)

    @contextmanager
    def run(settings: Settings | None = None, *, but: str = "") -> Iterator[Running]:
        with no_errors_logged(but=but), quickened():
            one = Running(on_engine(settings or settings_of(), rabbitmq))
            one.start()
            try:
                one.until(lambda: not one.gateway.readiness.reasons(), PATIENCE_SECS)
                yield one
            finally:
                one.stop()

    for module in MODULES:
        if hasattr(module, "running"):
            monkeypatch.setattr(module, "running", run)
    return run


@pytest.fixture
def gateway(running: Any) -> Iterator[Running]:
    """A replica of a namespace of its own."""
    begun: AbstractContextManager[Running] = running()
    with begun as one:
        yield one


def _tests_of(module: ModuleType) -> Iterator[tuple[str, Any]]:
    room = module.__name__.rpartition("test_")[2]
    for name, found in vars(module).items():
        if name.startswith("test_") and callable(found):
            yield f"test_{room}_{name.removeprefix('test_')}", found


globals().update({name: found for module in MODULES for name, found in _tests_of(module)})
site = test_scram.site


def test_exceptions_are_tests() -> None:
    known = {name.removeprefix("test_") for module in MODULES for name, _ in _tests_of(module)}
    assert {name.partition("[")[0] for name in EXCEPTIONS} <= known
