"""Conversion between MQTT's QoS and AMQP's delivery mode.

A message of the model has both `assurance` (the QoS) and `durable` (delivery mode 2, persistent). A protocol
that has only one of them derives the other from these tables. A route may change both for messages that cross
it (`delivery` and `to.qos`: `guarantee_of` in gateway/mapping/routes.py).
"""

from __future__ import annotations

from typing import Final

DURABLE_AT_QOS: Final = (False, True, True)
"""Durability of a message, by QoS: messages of QoS 1 and 2 survive a restart, those of QoS 0 need not."""

QOS_OF_DURABLE: Final = (0, 1)
"""QoS of a message, indexed by True if it is durable or its sender requests a confirm. Never 2, because AMQP
has no way to mark a second delivery as the same message.
"""
