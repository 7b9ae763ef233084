"""Refused messages that are published again, and sessions that are resumed, while a decision is pending."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from gateway.broker.mqtt.session import SubscriptionOptions
from gateway.ingress.mqtt.admission import AdmittedMqttClient
from gateway.ingress.mqtt.connection import MqttConnection
from gateway.ingress.mqtt.ingress import MqttIngress
from gateway.model.pending import Pending

pytestmark = pytest.mark.interpreted  # their methods are called with doubles


class Decision:
    """A decision on publishing that is pending until `known`."""

    def __init__(self) -> None:
        self.known = False

    def require(self) -> None:
        if not self.known:
            raise Pending(trio.Event())


def test_they_are_published_in_order_behind_one_whose_decision_is_pending() -> None:
    decision, published = Decision(), list[str]()
    suspended: list[Callable[[], None]] = []

    def publish_again(receipt: str, rights: object) -> None:
        if receipt == "second":
            decision.require()
        published.append(receipt)

    class Connection:
        stream = None
        _ingress = SimpleNamespace(
            publish_again=publish_again, suspend=lambda stream, awaited, then: suspended.append(then)
        )
        _publish_again = MqttConnection._publish_again

        def current_rights(self) -> None:
            """No rights are examined."""

    connection: Any = Connection()
    connection._publish_again(["first", "second", "third"])
    assert published == ["first"]
    suspended.pop()()
    assert published == ["first"]
    decision.known = True
    suspended.pop()()
    assert (published, suspended) == (["first", "second", "third"], [])


def test_an_identifier_of_qos_2_is_noted_with_its_message() -> None:
    """Not before, or it would be recorded with another message of the wake-up."""
    decision, calls = Decision(), list[str]()
    entry = SimpleNamespace(address="address", plan=SimpleNamespace(branches=()))

    class Ingress:
        publish_again = MqttIngress.publish_again
        dispatcher = SimpleNamespace(publish=lambda *_: calls.append("published") or True)

        def permitted_entry(self, rights: object, address: object) -> object:
            decision.require()
            return entry

        def begun_batch(self) -> None:
            """There is no batch."""

    connection = SimpleNamespace(
        remaining_entry=lambda packet_id, entry: entry,
        note_local_delivery=lambda packet_id, entry: calls.append(f"noted {packet_id}"),
    )
    ingress: Any = Ingress()
    receipt = (connection, 7, 2, SimpleNamespace(), entry)
    with pytest.raises(Pending):
        ingress.publish_again(receipt, None)
    assert calls == []
    decision.known = True
    ingress.publish_again(receipt, None)
    assert calls == ["noted 7", "published"]


def test_a_resumed_session_is_judged_by_its_present_subscriptions() -> None:
    """They may change while a decision is pending; those on earlier ones are still stored."""
    guest: Any = SimpleNamespace(
        _decisions=None, _ingress=SimpleNamespace(authorization=SimpleNamespace(generation=1))
    )
    rights: Any = SimpleNamespace(
        mqtt_subscribe=lambda topic_filter, qos: SimpleNamespace(allowed=qos < 2, rule="qos_max")
    )

    def forbidden(**qos: int) -> dict[str, str]:
        options = {name: SubscriptionOptions(qos=one) for name, one in qos.items()}
        return AdmittedMqttClient._forbidden(guest, options, rights)

    assert forbidden(a=2, b=1) == {"a": "qos_max"}
    assert forbidden(a=1, b=2) == {"b": "qos_max"}
    assert forbidden(c=0) == {}
