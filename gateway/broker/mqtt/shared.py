"""Shared subscriptions: each message goes to one member of a group (5: 4.8.2; in 3.x by the same filters).

Members take turns. Whoever has room in its Receive Maximum comes before whoever has not, and whoever is
connected before a session whose client is away, which gets only what must be acknowledged. A group is one
sink, whoever its members are: that they come and go changes nothing for those who publish.

When a client is lost, what it has not acknowledged at QoS 1, and what it was not sent yet, goes to another
member that is connected; when its session ends, also to one that is away. What it was sent at QoS 2 is its
own: it completes the delivery when it returns, and nobody else may get it ([MQTT-4.8.2-4], [MQTT-4.8.2-5]).
What waits for it on disk alone stays there until it returns, or its session ends (ended_sessions.py). A
message leaves the disk only when the other member has it.
"""

from __future__ import annotations

from gateway.broker.matching_steps import SHARED_PREFIX
from gateway.broker.mqtt.session import Grant, Session, SubscriptionOptions, Told
from gateway.model.batch import SubBatch
from gateway.model.message import Message
from gateway.model.outcome import Outcome


def shared_pattern(topic_filter: str) -> list[str] | None:
    """The levels that the filter of a shared subscription matches; None: it is not shared."""
    return topic_filter.split("/")[2:] if topic_filter.startswith(SHARED_PREFIX) else None


class SharedGroup:
    """The members of one group with one filter. It is a sink."""

    __slots__ = ("_turn", "filter", "members")

    def __init__(self, topic_filter: str) -> None:
        self.filter = topic_filter
        self.members: dict[Session, Grant] = {}
        self._turn = 0

    def join(self, session: Session, options: SubscriptionOptions) -> None:
        """Add a member, or change its options."""
        self.members[session] = Grant(session, [options], shared=self.filter)

    def publish(self, part: SubBatch) -> None:
        """Divide the messages among the members; each settles its own."""
        here = [grant for session, grant in self.members.items() if session.outlet is not None]
        candidates = here or [grant for session, grant in self.members.items() if session.persistent]
        rooms = [grant.session.room for grant in candidates]
        pieces: dict[Grant, SubBatch] = {}
        nobody = SubBatch(part.batch, part.recipient)
        any_room = True
        for message, slot in zip(part.messages, part.slots, strict=True):
            at = self._next(rooms) if any_room else -1
            if at < 0:
                any_room = False
                at = self._turn % max(len(candidates), 1)
                self._turn = at + 1
            piece = nobody
            if candidates:
                grant = candidates[at]
                acknowledged = message.assurance and grant.qos
                rooms[at] -= 1 if acknowledged else 0
                if here or acknowledged:
                    piece = pieces.get(grant) or pieces.setdefault(
                        grant, SubBatch(part.batch, part.recipient)
                    )
                else:
                    grant.session.tally.offline += 1
            piece.messages.append(message)
            piece.slots.append(slot)
        for grant, piece in pieces.items():
            grant.session.take(piece, grant)
        if nobody.messages:
            nobody.accept()

    def _next(self, rooms: list[int]) -> int:
        """The position of whose turn it is, of those with room; -1: of none."""
        count = len(rooms)
        for step in range(count):
            at = (self._turn + step) % count
            if rooms[at] > 0:
                self._turn = at + 1
                return at
        return -1

    def offer(self, message: Message) -> None:
        """Have a member that is connected owe a message for which nobody waits."""
        self.pass_on(message, None, _nobody, away=False)

    def pass_on(self, message: Message, but: Session | None, told: Told, *, away: bool) -> bool:
        """Have another member owe a message, and `told` hear when it does. `away`: its client need not be
        connected. False: none can.
        """
        chosen = self.choose(but, away=away)
        if chosen is None:
            return False
        chosen.hand(message, self.members[chosen], told)
        return True

    def choose(self, but: Session | None = None, *, away: bool = False) -> Session | None:
        """Whose turn it is; `away`: its client need not be connected. None: nobody's."""
        able = [one for one in self.members if one is not but and not one.full and not one.failing]
        here = [one for one in able if one.outlet is not None]
        candidates = here or [one for one in able if away and one.persistent and self.members[one].qos]
        if not candidates:
            return None
        at = self._next([one.room for one in candidates])
        if at < 0:
            at = self._turn % len(candidates)
            self._turn = at + 1
        return candidates[at]


def _nobody(outcome: Outcome) -> None:
    """Ignore the outcome: no publisher waits for it."""
