"""Messages of an MQTT link that no route takes, and that have waited for memory."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import trio

from gateway import clock
from gateway.broker.memory import LOW_ON_MEMORY
from gateway.broker.routing import RoutingEntry, RoutingPlan
from gateway.egress.mqtt.receiver import DeliveringConnection, MqttLinkReceiver
from gateway.model.address import Address
from gateway.model.message import Message
from gateway.protocols.mqtt.dialect import topic_address
from gateway.protocols.mqtt.spec import Version


def without_routes(_name: str, _local: object, address: Address, _queue: str = "") -> RoutingEntry:
    return RoutingEntry(address, RoutingPlan(None, ()))


async def test_each_becomes_a_dead_letter_without_a_route() -> None:
    await trio.lowlevel.checkpoint()
    dispatcher: Any = MagicMock()
    dispatcher.memory.short, dispatcher.memory.is_scarce, dispatcher.generation = True, False, 0
    dispatcher.entry.side_effect = without_routes
    dispatcher.publish.return_value = False
    dispatcher.batch.return_value.receipts = []
    receiver = MqttLinkReceiver(
        "far", dispatcher, MagicMock(), MagicMock(), lambda: None, retry_secs_max=None
    )
    connection = DeliveringConnection(MagicMock(), MagicMock(), MagicMock())
    connection.machine.version = Version.V311
    receiver.attach(connection, present=True)
    for number in (1, 2, 3):
        message = Message(topic_address("a/b"), b"x", assurance=1)
        receiver.unsettled += 1
        receiver.settle([(connection, number, 1, message)], {0: LOW_ON_MEMORY}, clock.now())
    dispatcher.memory.short = False
    receiver.tick(clock.now())
    assert [call.args[1] for call in dispatcher.dead_letters.add.call_args_list] == [""] * 3
