"""Reference model of a simulation: what was published, what was promised, and what arrived.

A destination is whatever must have a message after its publisher got an acknowledgement: a queue, a
persistent session, a group of sessions with a shared subscription. A publication is wanted by the
destinations that certainly existed when it was sent. What an operator purges, or a session loses that ends,
is excused: it may arrive, and need not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

SHOWN_MAX: Final = 12
NEVER: Final = float("inf")
EARLY_SECS: Final = 0.01  # by which clocks of milliseconds may differ
LATE_SECS: Final = 2.0  # after which something that is due at a time should have happened


@dataclass(eq=False)
class Publication:
    """One message with its own body. `number` counts the messages of its publisher to its address."""

    id: int
    publisher: str
    address: str
    number: int
    qos: int
    wanted: tuple[Destination, ...]
    sent_at: float
    ttl_secs: float = NEVER
    is_accepted: bool = False
    is_refused: bool = False
    attempts: int = 1
    is_unsafe: bool = False
    """True if it may arrive twice: it was sent again without a session, or the gateway tries again itself."""
    padding: int = 0
    is_retained: bool = False
    is_clearing: bool = False
    """True if it has no body, and clears the retained message of its topic."""
    is_void: bool = False
    """True for a will whose client has come back in time: it must not arrive."""
    priority: int = 0
    delay_secs: float = 0.0

    def body(self) -> bytes:
        """Return the body, by which the message is known."""
        if self.is_clearing:
            return b""
        return b"%d:%s" % (self.id, b"x" * self.padding)


@dataclass(eq=False)
class Destination:
    """Receiver of messages. `exists` is False before it is acknowledged, and once its end is requested."""

    name: str
    is_once: bool = False
    """True if no message may arrive twice that was sent at QoS 2, or by a route that deduplicates."""
    is_ordered: bool = True
    is_session: bool = False
    is_copied: bool = False
    """True behind a link, which sends copies: a repeat is another message for who receives it, without a
    mark."""
    is_ordered_by_qos: bool = False
    """True if only messages of one QoS are in order (MQTT 5: 4.6)."""
    is_marked: bool = True
    """True if what arrives again must be marked as a repeat."""
    is_deduplicated: bool = False
    """True if only what is marked as a repeat may arrive again, also if it was sent again."""
    fallbacks: tuple[Destination, ...] = ()
    """Destinations of its dead letters, where its messages may arrive instead."""
    forbidden: tuple[str, ...] = ()
    """Beginnings of addresses whose messages its receiver has no right to see, or its senders to publish."""
    has_one_consumer: bool = False
    """True if messages are in order over all consumers, because one of them is active at a time."""
    exists: bool = False
    is_purged: bool = False
    """True while a client's purge may be on its way."""
    sent: list[Publication] = field(default_factory=list)
    received: Counter[int] = field(default_factory=Counter)
    excused: set[int] = field(default_factory=set)
    doubtful: set[int] = field(default_factory=set)
    """Ids of what may arrive twice although it `is_once`."""
    last: dict[tuple[str, str, str], int] = field(default_factory=dict)
    owed: dict[int, int] = field(default_factory=dict)
    """Messages that must arrive again, by id, with the number of arrivals until then."""

    @property
    def group(self) -> list[Destination]:
        """Return this destination and all where its messages may arrive instead."""
        return [self, *(each for one in self.fallbacks for each in one.group)]

    def arrivals(self, id: int) -> int:
        """Return how many times a message has arrived, here or where its dead letters go."""
        return sum(one.received[id] for one in self.group)


class Ledger:
    """All publications and destinations of a simulation. `faults` are broken promises, a line each."""

    def __init__(self, *, is_disk_sound: bool = True, is_clock_steady: bool = True) -> None:
        """`is_clock_steady` False: the wall clock is set at times. `is_disk_sound` False: the disk fails.

        Then a message may be refused without its publisher's knowledge, and the note that a session was
        connected may be lost, without which its messages are not marked as repeats.
        """
        self.is_clock_steady = is_clock_steady
        self._is_disk_sound = is_disk_sound
        self.publications: list[Publication] = []
        self.destinations: dict[str, Destination] = {}
        self.faults: list[str] = []
        self.results: dict[int, list[Publication]] = defaultdict(list)  # of jobs, by their ids
        self._numbers: Counter[tuple[str, str]] = Counter()

    def destination(
        self,
        name: str,
        *,
        is_once: bool = False,
        is_ordered: bool = True,
        is_copied: bool = False,
        is_marked: bool | None = None,
    ) -> Destination:
        """Return the destination of this name; a new one does not exist yet.

        `is_marked` is that of an ordered one unless it is given.
        """
        if name not in self.destinations:
            is_session = name.startswith(("session", "$share"))
            marked = is_ordered if is_marked is None else is_marked
            self.destinations[name] = Destination(
                name, is_once, is_ordered, is_session, is_copied, is_marked=marked
            )
        return self.destinations[name]

    def publish(
        self,
        publisher: str,
        address: str,
        qos: int,
        wanted: Iterable[Destination],
        now: float,
        *,
        ttl_secs: float = NEVER,
        padding: int = 0,
        **more: Any,
    ) -> Publication:
        """Note a message that is about to be sent. `more` are other fields of the publication."""
        self._numbers[publisher, address] += 1
        number = self._numbers[publisher, address]
        targets = tuple(one for one in wanted if one.exists)
        one = Publication(
            len(self.publications) + 1,
            publisher,
            address,
            number,
            qos,
            targets,
            now,
            ttl_secs,
            padding=padding,
            **more,
        )
        self.publications.append(one)
        for target in targets:
            target.sent.append(one)
            if target.is_purged:
                target.excused.add(one.id)
        return one

    def work_on(
        self, job: Publication, worker: str, address: str, results: Destination, now: float
    ) -> Publication:
        """Note that a worker publishes a result in the transaction that acknowledges a job."""
        result = self.publish(worker, address, 0, [results], now)
        self.results[job.id].append(result)
        return result

    def accept(self, one: Publication) -> None:
        """Note an acknowledgement."""
        one.is_accepted = True

    def refuse(self, one: Publication) -> None:
        """Note a refusal, after which the publisher does not try again."""
        one.is_refused = True

    def excuse(self, destination: Destination) -> None:
        """Note that what was sent to a destination until now may be gone."""
        for other in self.destinations.values():
            if destination in other.group:
                other.excused.update(one.id for one in other.sent)

    def owe(self, destination: Destination, body: bytes) -> None:
        """Note that a message that has arrived is not consumed, so that it must arrive again."""
        id = int(body.partition(b":")[0])
        destination.owed[id] = destination.arrivals(id)

    def end(self, destination: Destination) -> None:
        """Note that a destination ends now, or that it is not certain that it exists."""
        destination.exists = False
        self.excuse(destination)

    def receive(
        self, destination: Destination, body: bytes, by: str, *, qos: int, is_repeat: bool, now: float
    ) -> Publication | None:
        """Note that a message has arrived. `by` names the receiver among several of this destination."""
        id = int(body.partition(b":")[0])
        if not 0 < id <= len(self.publications):
            self.faults.append(f"{destination.name}: a message that nobody has published: {body[:20]!r}")
            return None
        one = self.publications[id - 1]
        if body != one.body():
            self.faults.append(f"{destination.name}: the body of {self.name_of(one)} has changed")
        if now + EARLY_SECS < one.sent_at + one.delay_secs and self.is_clock_steady:
            self.faults.append(
                f"{destination.name}: {self.name_of(one)} has arrived before its delay is over"
            )
        if one.address.startswith(destination.forbidden or ("\0",)):
            self.faults.append(f"{destination.name}: {self.name_of(one)} has arrived without a right")
        if one.is_void:
            self.faults.append(
                f"{destination.name}: {self.name_of(one)} is the will of a client that is back"
            )
        before = destination.received[id]
        destination.received[id] += 1
        if before:
            is_doubtful = one.is_unsafe or id in destination.doubtful
            is_single = destination.is_deduplicated and not is_repeat
            if is_single or (destination.is_once and qos == 2 and not is_doubtful):
                self.faults.append(f"{destination.name}: {self.name_of(one)} has arrived twice")
            elif not is_repeat and self._is_marked(destination, one):
                self.faults.append(
                    f"{destination.name}: {self.name_of(one)} has arrived twice and is not marked as a repeat"
                )
        elif destination.is_ordered and not is_repeat and not self._may_be_late(destination, one):
            line = one.qos if destination.is_ordered_by_qos else one.qos == 0  # which waits for no disk
            key = one.publisher, one.address, f"{by} {line} {one.priority}"
            last = destination.last.get(key, 0)
            if last > one.number:
                self.faults.append(
                    f"{destination.name}: {self.name_of(one)} has arrived after number {last} at {by}"
                )
            destination.last[key] = max(last, one.number)
        return one

    def look(self, destination: Destination, body: bytes, addresses: Iterable[str]) -> None:
        """Note that a client has seen what stays in its queue: it must have been sent to these addresses."""
        id = int(body.partition(b":")[0])
        one = self.publications[id - 1] if 0 < id <= len(self.publications) else None
        if one is None or one.body() != body or one.address not in addresses:
            self.faults.append(f"{destination.name}: a message was seen that nobody has sent: {body[:20]!r}")

    def _is_marked(self, destination: Destination, one: Publication) -> bool:
        """Return True if a repeat for this destination must say that it is one."""
        is_recorded = self._is_disk_sound or not destination.is_session
        is_single = one.attempts == 1 and not one.is_unsafe and not destination.is_copied
        return destination.is_marked and is_single and is_recorded

    def _may_be_late(self, destination: Destination, one: Publication) -> bool:
        """Return True if another attempt may arrive behind later messages, because the first may be gone."""
        may_expire = one.ttl_secs != NEVER
        is_gone = (
            may_expire
            or bool(destination.fallbacks)
            or one.id in destination.excused
            or not self._is_disk_sound
        )
        # A link sends a copy again, with a time of its own, and its target may have taken those behind it.
        is_late_copy = destination.is_copied and (may_expire or not self._is_disk_sound)
        return one.is_unsafe or is_late_copy or (one.attempts > 1 and is_gone)

    @staticmethod
    def name_of(one: Publication) -> str:
        """Return a name for reports."""
        return f"message {one.id} ({one.publisher} to {one.address}, number {one.number}, QoS {one.qos})"

    def missing(self, now: float) -> dict[Destination, list[Publication]]:
        """Return what was accepted, is not excused and has not arrived."""
        found: dict[Destination, list[Publication]] = defaultdict(list)
        for one in self.publications:
            if one.is_accepted and now - one.sent_at < one.ttl_secs:
                for target in one.wanted:
                    owed = target.owed.get(one.id, 0)
                    if target.arrivals(one.id) <= owed and one.id not in target.excused:
                        found[target].append(one)
        return found

    def check_missing(self, now: float, dead: set[int], dropped: int) -> None:
        """Note what is missing, is no dead letter, and is not among what full sessions have dropped."""
        for target, lacking in self.missing(now).items():
            lost = [one for one in lacking if one.id not in dead]
            if target.is_session and len(lost) <= dropped:
                dropped -= len(lost)
                continue
            for one in lost[:SHOWN_MAX]:
                again = " again, after it was not consumed" if one.id in target.owed else ""
                self.faults.append(f"{target.name}: {self.name_of(one)} was accepted and is missing{again}")

    def see_retained(self, destination: Destination, body: bytes) -> None:
        """Note that a retained message was sent to a new subscription: it may have arrived before."""
        destination.received[int(body.partition(b":")[0])] += 1

    def check_retained(self, view: Destination, address: str, asked_at: float) -> None:
        """Note if a new subscriber, who got what is in `view`, was not sent what was retained last."""
        of_topic = [one for one in self.publications if one.is_retained and one.address == address]
        last = max((one.id for one in of_topic if one.is_accepted), default=0)
        found = [one for one in of_topic if view.received[one.id]]
        for one in found:
            if self.is_clock_steady and one.sent_at + one.ttl_secs + LATE_SECS < asked_at:
                self.faults.append(f"{address}: message {one.id} has expired and is retained")
        if any(one.id >= last or one.attempts > 1 for one in found) or not last:
            return  # a repeat may have come after the last
        possible = [one for one in of_topic if one.id >= last or one.attempts > 1]
        if found or not any(one.is_clearing or one.ttl_secs != NEVER for one in possible):
            seen = max((one.id for one in found), default="nothing")
            self.faults.append(f"{address}: message {last} is not retained, but {seen}")

    def check_jobs(self, jobs: Destination, results: Destination, now: float) -> None:
        """Note jobs that are gone without a result: half of their transaction has taken effect."""
        for job in jobs.sent:
            tries = self.results[job.id]
            done = any(results.received[one.id] or one.id in results.excused for one in tries)
            is_due = job.is_accepted and job.id not in jobs.excused and now - job.sent_at < job.ttl_secs
            if is_due and not done:
                self.faults.append(f"{jobs.name}: {self.name_of(job)} is gone and has no result")
