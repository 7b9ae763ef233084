"""Walks: each delivers the retained messages in the database to one new subscription, page by page.

A page is queried when the one before has been passed to the session. So a client that reads nothing costs one
page, and nothing is polled: the reply makes the session request messages again.

A walk begins when its subscription is bound, and each message is in the database before it is published. So
no message is missing between the two, but a message may arrive both live (published) and retained, in either
order.

- A topic of which a retained message has arrived live since the subscription is skipped: the page has that
  message, an older one, or one that arrives live as well.
- MQTT allows a message twice at QoS 0 and 1. At QoS 2 a live message is dropped, by its number, if it was
  sent as retained. So is an older one of the same publisher, after which the client would miss the last; but
  only if the client had no other subscription for the topic since the walk began.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final

from gateway.broker.mqtt.retained import PIECE_MESSAGES_MAX
from gateway.broker.mqtt.session import Grant, Session
from gateway.broker.topics import topic_matches
from gateway.engine.envelope import Number
from gateway.engine.repeated_messages import RecentNumbers
from gateway.engine.retained import SharedRetained, decode_retained
from gateway.model.caches import make_room
from gateway.model.message import Message
from gateway.state.interface import MatchRetained, Retained

PAGE_BYTES: Final = 262_144  # of messages, after which a page ends
CHUNKS_MAX: Final = 4_096  # of message numbers, and
TOPICS_MAX: Final = 4_096  # topics that a session remembers of messages it was sent
COMPARED_MAX: Final = 32  # subscriptions of a session that are compared with a topic
LIVE_MAX: Final = 65_536  # topics of live messages that a walk remembers
ONCE: Final = 2  # value of `assurance`


class SentRetained:
    """Record of the retained messages that were sent to one client at QoS 2 after it had subscribed.

    A walk (`SharedWalk`) sends the retained messages for one new subscription. For each walk in progress the
    record also has the topics of messages with RETAIN that were published since the walk began.
    """

    def __init__(self) -> None:
        self.has_sent = False
        self._first: set[str] = set()  # filters of walks whose subscriptions were new
        self._live: dict[str, dict[str, None]] = {}  # topics by the filter of a walk in progress
        self._ended: set[str] = set()  # filters of subscriptions that ended while walks are in progress
        self._sent = RecentNumbers(CHUNKS_MAX)
        self._topics: dict[str, tuple[str, Number]] = {}  # publisher and number of what was sent last
        self._numbers: dict[Message, Number] = {}  # of messages that the session has not written yet

    def is_new(self, message: Message, number: Number | None, qos: int, *, lasting: bool = False) -> bool:
        """Return False if the client was sent a published message, or a later one of its topic, as retained.

        Only deliveries at QoS 2 are compared; `qos` is that of the delivery, `number` the message's number.
        With `lasting` True only later messages count: a session with a queue recognizes the message itself.
        The topic of a message with RETAIN is recorded.
        """
        if qos == ONCE and number is not None and self._was_sent(message, number, lasting):
            return False
        if message.retain:
            for topics in self._live.values():
                make_room(topics, LIVE_MAX)
                topics[message.address.name] = None
        return True

    def begin(self, topic_filter: str, *, is_first: bool) -> None:
        """Record that the sending of retained messages for a new subscription (a walk) begins.

        `is_first` is True if the client had no subscription to `topic_filter` before.
        """
        self._live[topic_filter] = {}
        if is_first and topic_filter not in self._ended:
            self._first.add(topic_filter)
        else:
            self._first.discard(topic_filter)

    def end(self, topic_filter: str) -> None:
        """Record that a subscription of the client has ended; published messages for it may still arrive."""
        if self._live and len(self._ended) <= COMPARED_MAX:
            self._ended.add(topic_filter)

    def is_alone(self, topic_filter: str, topic: str, session: Session) -> bool:
        """Return True if only the subscription to `topic_filter` has matched `topic` since it was new.

        Return False also if the client had subscribed to this filter before, or has too many subscriptions to
        compare. `session` is the client's session.
        """
        if topic_filter not in self._first or len(session.subscriptions) > COMPARED_MAX:
            return False
        filters, levels = self._ended.union(session.subscriptions), topic.split("/")
        if len(filters) > COMPARED_MAX:
            return False
        return sum(topic_matches(one.split("/"), levels) for one in filters) == 1

    def end_all_but(self, filters: Collection[str]) -> None:
        """Forget the subscriptions for which all retained messages were sent: those not in `filters`."""
        for topic_filter in [one for one in self._live if one not in filters]:
            del self._live[topic_filter]
            self._first.discard(topic_filter)
        if not self._live:
            self._ended.clear()

    def _was_sent(self, message: Message, number: Number, lasting: bool) -> bool:
        """Return True if a message, or a later one of its publisher and topic, was sent as retained.

        `number` is the message's number. With `lasting` True only a later message counts.
        """
        if not lasting and number in self._sent:
            return True
        if not message.retain:
            return False
        client, last = self._topics.get(message.address.name, ("", number))
        return last[0] == number[0] and number[1] < last[1] and client == message.sender.client

    def may_send(self, topic_filter: str, topic: str) -> bool:
        """Return False if a message to `topic` with RETAIN was published since the subscription was new.

        Then the retained message of the topic must not be sent for the subscription to `topic_filter`.
        """
        return topic not in self._live.get(topic_filter, ())

    def send(self, message: Message, number: Number, *, is_alone: bool) -> None:
        """Record that a retained message is about to be sent at QoS 2; `number` is the message's number.

        `is_alone` is the result of the method `is_alone` for the message's topic.
        """
        self.has_sent = True
        self._sent.add(number)
        if is_alone:
            make_room(self._topics, TOPICS_MAX)
            self._topics[message.address.name] = message.sender.client, number
        make_room(self._numbers, TOPICS_MAX)
        self._numbers[message] = number

    def number_of(self, message: Message) -> Number | None:
        """Return the number of a retained message that is being written to the client, and forget it.

        Return None if the message is not sent at QoS 2 as a retained message.
        """
        return self._numbers.pop(message, None)


class SharedWalk:
    """Sender of retained messages, read page by page from the database, for one new subscription.

    The interface is that of `RetainedWalk`, which reads the retained messages of one process. `done` is True
    at the end, and `waits` is True while a page is being read.
    """

    def __init__(
        self,
        retained: SharedRetained,
        topic_filter: str,
        grant: Grant,
        walked: SentRetained | None,
        is_wanted: Callable[[SharedWalk], bool],
        pull: Callable[[], None],
    ) -> None:
        """Create the sender of retained messages for a new subscription; it has not begun.

        `retained` reads the database. `grant` is the subscription. `pull` makes the session call `next`
        again. `is_wanted` returns False when the subscription has been replaced or has ended. `walked`
        records sent messages (None: no record).
        """
        self.grant = grant
        self.done = False
        self.waits = False
        self._retained = retained
        self._walked = walked
        self._is_wanted = is_wanted
        self._pull = pull
        self._page: list[Retained] = []
        self._is_last = False
        self._query = MatchRetained(topic_filter, limit=PIECE_MESSAGES_MAX, byte_count=PAGE_BYTES)
        self._then: Callable[[], None] | None = None  # waits for the first page

    def next(self, most: int = PIECE_MESSAGES_MAX) -> list[Message]:
        """Return the next retained messages, at most `most`.

        The list is empty when all messages were returned. It is also empty if a page must be read first; then
        the page is requested.
        """
        if self.done:
            return []
        if not self._page:
            self._read()
            return []
        some, self._page = self._page[:most], self._page[most:]
        self.done = self._is_last and not self._page
        return [message for one in some if (message := self._message(one)) is not None]

    def begin(self, then: Callable[[], None]) -> None:
        """Request the first page of retained messages from the database.

        `then` is called, without a result, when the page has arrived, and also if the database cannot be read
        now. Call `next` for the messages.
        """
        self._then = then
        self._read()
        self._release_when_away()

    def _release_when_away(self) -> None:
        """Call the callback of `begin` if the database has failed since, and check that again at each tick.

        A query that was submitted just before the database fails is only answered after its patience.
        """
        if self._then is None:
            return
        if self._retained.is_away:
            self._begun()
        else:
            self._retained.call_later(self._release_when_away)

    def _read(self) -> None:
        self.waits = True
        user = self.grant.session.user
        self._retained.match(self._query, user, self._is_current, self._store_page, self._begun)

    def _begun(self) -> None:
        """Call the callback of `begin`, if it has not been called."""
        then, self._then = self._then, None
        if then is not None:
            then()

    def _is_current(self) -> bool:
        return self._is_wanted(self)

    def _store_page(self, found: list[Retained] | None) -> None:
        """Store a page of retained messages and inform the session of it.

        `found` is None if the database rejects the filter.
        """
        self.waits = False
        self._page = found or []
        if not found:
            self.done = True
        else:
            self._is_last = self._query.is_last(found)
            self._query = replace(self._query, after=found[-1].topic)
        if self._then is not None:
            self._begun()
        elif self._is_wanted(self):
            self._pull()

    def _message(self, one: Retained) -> Message | None:
        """Decode a retained message and record that it is sent. Return None if it must not be sent."""
        walked = self._walked
        if walked is not None and not walked.may_send(self._query.topic_filter, one.topic):
            return None
        found = decode_retained(one)
        if found is None:
            return None
        message, number = found
        once = message.assurance == ONCE and self.grant.qos == ONCE
        if once and number is not None and walked is not None:
            is_alone = walked.is_alone(self._query.topic_filter, one.topic, self.grant.session)
            walked.send(message, number, is_alone=is_alone)
        return message
