"""MQTT's QoS and AMQP's delivery mode: which one follows from the other.

A message of the model has both, `assurance` (the QoS) and `durable` (delivery mode 2, persistent). Who reads
one from a protocol that has only one of them takes the other from these tables. A route may change both for
what crosses it (`delivery` and `to.qos`: `guarantee_of` in gateway/mapping/routes.py).
"""

from __future__ import annotations

from typing import Final

DURABLE_AT_QOS: Final = (False, True, True)
"""By QoS: whether the message is durable. QoS 1 and 2 survive a restart, as QoS 0 need not."""

QOS_OF_DURABLE: Final = (0, 1)
"""By whether a message is durable, or its sender wants a confirm: its QoS. AMQP has no second delivery that
is told apart, so it is never 2."""
