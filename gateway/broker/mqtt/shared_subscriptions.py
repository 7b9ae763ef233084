"""Shared subscriptions: each message goes to one member of a group (5: 4.8.2; in 3.x by the same filters).

Members get messages in turn. A member with credit in its Receive Maximum comes before one without, and a
connected member before a session whose client is disconnected. That gets only messages to be acknowledged,
and only if it has subscribed at QoS 1 or 2. A full member is left out while another has space. A group is one
sink, so changes of its members do not affect publishers.

When a client is lost, its messages that are not acknowledged at QoS 1, or not sent yet, go to another
connected member; when its session ends, also to a disconnected one. Messages that were sent at QoS 2 stay in
its session: the client completes the delivery when it reconnects, and no other client may get them
([MQTT-4.8.2-4], [MQTT-4.8.2-5]). Messages that are only on disk stay there until the client reconnects, or
its session ends (ended_sessions.py). A message is deleted from disk only when the other member has it.
"""

from __future__ import annotations

from gateway.broker.matching_steps import SHARED_PREFIX
from gateway.broker.mqtt.session import Grant, OutcomeCallback, Session, SubscriptionOptions
from gateway.model.batch import SubBatch
from gateway.model.message import Message
from gateway.model.outcome import Outcome


def shared_pattern(topic_filter: str) -> list[str] | None:
    """Return the topic levels in the filter of a shared subscription; None if the filter is not shared."""
    return topic_filter.split("/")[2:] if topic_filter.startswith(SHARED_PREFIX) else None


class SharedGroup:
    """Destination for one shared subscription: the group of sessions that have subscribed to its filter."""

    __slots__ = ("_turn", "filter", "members")

    def __init__(self, topic_filter: str) -> None:
        self.filter = topic_filter
        self.members: dict[Session, Grant] = {}
        self._turn = 0

    def join(self, session: Session, options: SubscriptionOptions) -> None:
        """Add a session to the group, or change its options."""
        self.members[session] = Grant(session, [options], shared=self.filter)

    def publish(self, sub_batch: SubBatch) -> None:
        """Distribute the messages of a sub-batch among the members, whose sessions settle them.

        Messages that no member can get are accepted and dropped.
        """
        here = [grant for session, grant in self.members.items() if session.outlet is not None]
        away = [] if here else [grant for session, grant in self.members.items() if session.persistent]
        candidates = here or [grant for grant in away if grant.qos] or away
        candidates = [grant for grant in candidates if not grant.session.full] or candidates
        rooms = [grant.session.send_capacity if here else grant.session.space for grant in candidates]
        pieces: dict[Grant, SubBatch] = {}
        nobody = SubBatch(sub_batch.batch, sub_batch.recipient)
        any_room = True
        for message, slot in zip(sub_batch.messages, sub_batch.slots, strict=True):
            at = self.next_index(rooms) if any_room else -1
            if at < 0:
                any_room = False
                at = self.take_turn(len(candidates))
            piece = nobody
            if candidates:
                grant = candidates[at]
                acknowledged = message.assurance and grant.qos
                rooms[at] -= 1 if acknowledged else 0
                if here or acknowledged:
                    piece = pieces.get(grant) or pieces.setdefault(
                        grant, SubBatch(sub_batch.batch, sub_batch.recipient)
                    )
                else:
                    grant.session.tally.offline += 1
            piece.messages.append(message)
            piece.slots.append(slot)
        for grant, piece in pieces.items():
            grant.session.take(piece, grant)
        if nobody.messages:
            nobody.accept()

    def take_turn(self, count: int) -> int:
        """Return the index of the next member in turn, below `count`, whether it has credit or not."""
        at = self._turn % max(count, 1)
        self._turn = at + 1
        return at

    def next_index(self, rooms: list[int]) -> int:
        """Return the index of the next member in turn that has credit; -1 if there is none.

        `rooms` has the credit of each member.
        """
        count = len(rooms)
        for step in range(count):
            at = (self._turn + step) % count
            if rooms[at] > 0:
                self._turn = at + 1
                return at
        return -1

    def offer(self, message: Message) -> None:
        """Queue a message for a connected member; no publisher waits for the outcome."""
        self.redeliver(message, None, _ignore_outcome, away=False)

    def redeliver(
        self, message: Message, but: Session | None, on_outcome: OutcomeCallback, *, away: bool
    ) -> bool:
        """Queue a message for the next member in turn, except the session `but`.

        Return False if no member can accept it. With `away`, disconnected members may get it if none is
        connected. `on_outcome` is called with the outcome.
        """
        return MemberTurns(self, but, away=away).redeliver(message, on_outcome)

    def choose(self) -> Session | None:
        """Return the next connected member in turn that can accept a message, or None."""
        return MemberTurns(self, None, away=False).choose()


class MemberTurns:
    """Members of a shared subscription that get the messages of a lost or ended session, in turn.

    The members are examined once for all messages, because there may be very many of both.
    """

    __slots__ = ("_candidates", "_group", "_has_room", "_here", "_rooms")

    def __init__(self, group: SharedGroup, but: Session | None, *, away: bool) -> None:
        """Find the members that can accept a message, except the session `but`.

        With `away`, disconnected members are used if none is connected.
        """
        able = [one for one in group.members if one is not but and not one.full and not one.failing]
        here = [one for one in able if one.outlet is not None]
        self._group = group
        self._here = bool(here)
        self._candidates = here or [one for one in able if away and one.persistent and group.members[one].qos]
        self._rooms = [one.send_capacity for one in self._candidates]
        self._has_room = True

    def redeliver(self, message: Message, on_outcome: OutcomeCallback) -> bool:
        """Queue a message for the next member in turn; `on_outcome` is called with the outcome.

        Return False if no member can accept it.
        """
        chosen = self.choose()
        if chosen is not None:
            chosen.queue_transferred(message, self._group.members[chosen], on_outcome)
        return chosen is not None

    def choose(self) -> Session | None:
        """Return the next member in turn that can still accept a message, or None."""
        while self._candidates:
            at = self._next_index()
            chosen = self._candidates[at]
            is_here = chosen in self._group.members and (chosen.outlet is not None or not self._here)
            if is_here and not chosen.full and not chosen.failing:
                self._rooms[at] -= 1
                return chosen
            del self._candidates[at], self._rooms[at]
        return None

    def _next_index(self) -> int:
        """Return the index of the next candidate: one with credit, or if there is none, any."""
        at = self._group.next_index(self._rooms) if self._has_room else -1
        self._has_room = at >= 0
        return self._group.take_turn(len(self._candidates)) if at < 0 else at


def _ignore_outcome(outcome: Outcome) -> None:
    """Ignore the outcome: no publisher waits for it."""
