"""What a replica publishes for AMQP/Fast: messages as the store would write them, confirmed before they are
acknowledged."""

from __future__ import annotations

from typing import ClassVar, Final

from gateway.egress.amqp091.publisher import FRAME_TOO_SMALL, AmqpLinkPublisher
from gateway.egress.confirming import Positions
from gateway.model.batch import SubBatch
from gateway.model.message import Message
from gateway.model.outcome import Outcome, Reason, Verdict

NOT_TAKEN: Final = Outcome(Verdict.RELEASED, Reason.QUOTA, "a queue of the cluster is full")


class FastEnginePublisher(AmqpLinkPublisher):
    """The sink of messages whose address is one of the cluster and whose property octets are a content
    header. What is for a queue, and not for topics, comes back when that is not there."""

    _nacked: ClassVar[Outcome] = NOT_TAKEN

    def _send(self, part: SubBatch, positions: Positions, messages: list[Message]) -> Positions:
        assert self._publishers is not None
        rows = [(message.address.wire, message.property_set.raw, message.body) for message in messages]
        mandatory = not messages[0].address.scope  # one part is for one destination
        unsent = self._publishers[mandatory].publish_many(rows)
        if unsent:
            part.settle_at([positions[at] for at in unsent], FRAME_TOO_SMALL)
            positions = [at for row, at in enumerate(positions) if row not in unsent]
        self._sent(part, positions, sum([len(row[2]) for row in rows]), mandatory=mandatory)
        return ()
