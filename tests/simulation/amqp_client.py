"""AMQP 0-9-1 clients of a simulation: publishers with confirms, consumers, and workers with transactions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from gateway.egress.amqp091.session import client_properties
from gateway.model.properties import Value, ValueType
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.client import ClientConnection
from gateway.protocols.amqp091.codec import encode_response
from gateway.protocols.amqp091.events import (
    ChannelClosed,
    ChannelOpened,
    Closed,
    Confirms,
    Deliveries,
    Event,
    GetResponse,
    MethodReceived,
    Opened,
)
from gateway.protocols.amqp091.table import encode_table
from tests.simulation.ledger import NEVER, Destination, Publication
from tests.simulation.simulated_client import ConfirmedClient, Site

PUBLISHES: Final = 1  # channel with confirms
CONSUMES: Final = 2
COMMITS: Final = 3  # channel with transactions
WORKS_AT: Final = 4  # messages of one transaction


@dataclass
class Job:
    """A message that a worker has taken and not committed yet."""

    publication: Publication
    result: Publication


class AmqpClient(ConfirmedClient[Event]):
    """One connection with three channels. It consumes from `queues`, and works on `jobs` in transactions.

    An address is `exchange/key`.
    """

    LISTENER: ClassVar[str] = "amqp091"

    def __init__(
        self,
        site: Site,
        name: str,
        *,
        queues: Sequence[Destination] = (),
        jobs: Destination | None = None,
        results: Destination | None = None,
        prefetch: int = 5,
    ) -> None:
        super().__init__(site, name)
        self.queues = list(queues)
        self.consumes = True  # False: its queues have no consumer of it
        self.jobs = jobs
        self.committed: set[int] = set()  # ids of jobs whose transaction was confirmed
        self.awaited: deque[str] = deque()  # names of methods that the gateway owes, on the consuming channel
        self._results = results
        self._prefetch = prefetch
        self._machine = self._new_machine()
        self._tag = 0  # of the last publish
        self._unacknowledged: list[tuple[int, Destination, bytes]] = []
        self._work: list[tuple[int, Publication]] = []
        self._committing: list[Job] = []
        self._connections = 0
        self._purged: deque[Destination] = deque()  # of queue.purge that are not answered
        self._got: deque[Destination] = deque()  # queues of basic.get that are not answered

    def _new_machine(self) -> ClientConnection:
        return ClientConnection(
            mechanism="PLAIN",
            response=encode_response("PLAIN", "guest", "guest"),
            heartbeat=0,
            client_properties=client_properties("simulation"),
        )

    # What the simulation has it do.

    def connect(self) -> None:
        """Open a connection; an old one is given up."""
        self.give_up()
        self._connect()
        self._machine = self._new_machine()
        self._connections += 1
        self._flush()
        self._site.trace(self.name, "connects")

    def _transport(self) -> ClientConnection:
        return self._machine

    def _say_goodbye(self) -> None:
        self._machine.close()

    def _forget(self) -> None:
        super()._forget()
        for _, queue, body in self._unacknowledged:
            self._site.ledger.owe(queue, body)
        self._unacknowledged.clear()
        self._work.clear()
        self._committing.clear()
        self.awaited.clear()
        self._got.clear()
        self._purged.clear()  # and nobody knows if they still are

    def _send(self, one: Publication) -> None:
        self._tag += 1
        self.unconfirmed[self._tag] = one
        self._put(PUBLISHES, one)
        self._flush()

    def _put(self, channel: int, one: Publication) -> None:
        exchange, _, key = one.address.partition("/")
        self._machine.send_content(channel, m.BasicPublish(exchange, key), header_of(one), one.body())

    def get(self, queue: Destination) -> None:
        """Request one message."""
        if self._is_usable(CONSUMES):
            self._say(CONSUMES, m.BasicGet(queue.name), "basic.get-ok")
            self._got.append(queue)
            self._site.trace(self.name, "asks", queue.name)

    def purge(self, queue: Destination) -> None:
        """Purge a queue."""
        if self._is_usable(CONSUMES):
            self._site.ledger.excuse(queue)
            queue.is_purged = True
            self._purged.append(queue)
            self._say(CONSUMES, m.QueuePurge(queue.name), "queue.purge-ok")
            self._site.trace(self.name, "purges", queue.name)

    def commit(self) -> None:
        """Publish a result for each job that was taken, acknowledge these, and commit."""
        site, results = self._site, self._results
        if not self._work or self._committing or results is None or not self._is_usable(COMMITS):
            return
        work, self._work = self._work, []
        for tag, job in work:
            address = f"/{results.name}"
            result = site.ledger.work_on(job, self.name, address, results, site.now)
            self._put(COMMITS, result)
            self._machine.ack(COMMITS, tag)
            self._committing.append(Job(job, result))
        self._machine.send_method(COMMITS, m.TxCommit())
        self._flush()
        site.trace(self.name, "commits", [job.publication.id for job in self._committing])

    def _is_usable(self, channel: int) -> bool:
        return self.is_open and self._machine._usable(channel)

    def _say(self, channel: int, method: m.Method, awaited: str) -> None:
        self._machine.send_method(channel, method)
        self.awaited.append(awaited)
        self._flush()

    # What happens to it.

    def _work_on(self) -> None:
        if len(self._work) >= (1 if self._site.is_ending else WORKS_AT):
            self.commit()

    def acknowledge(self) -> None:
        """Acknowledge deliveries; requeue a few, and reject a few of queues with dead letters."""
        site, chance = self._site, self._site.random.random
        due, self._unacknowledged = self._unacknowledged, []
        for tag, queue, body in due:
            if chance() < 0.1 and not site.is_ending:
                site.ledger.owe(queue, body)
                self._machine.nack(CONSUMES, tag, requeue=not queue.fallbacks or chance() < 0.5)
            else:
                self._machine.ack(CONSUMES, tag)

    def _take(self, event: Event) -> None:
        actions: dict[type, Callable[..., None]] = {
            Opened: self._opened,
            ChannelOpened: self._channel_opened,
            Confirms: self._confirmed,
            Deliveries: self._delivered,
            GetResponse: self._got_one,
            MethodReceived: self._answered,
            ChannelClosed: self._channel_closed,
            Closed: self._closed,
        }
        action = actions.get(type(event))
        if action is not None:
            action(event)

    def _opened(self, event: Opened) -> None:
        if self._machine.ending:
            return
        for _ in (PUBLISHES, CONSUMES, COMMITS):
            self._machine.open_channel()
        self._flush()

    def _channel_opened(self, event: ChannelOpened) -> None:
        channel = event.channel
        if channel == PUBLISHES:
            self._machine.send_method(channel, m.ConfirmSelect())
            self._tag = 0
        elif channel == CONSUMES:
            self._machine.send_method(channel, m.BasicQos(0, self._prefetch))
            self._consume()
        else:
            self._machine.send_method(channel, m.TxSelect())
            if self.jobs is not None:
                self._machine.send_method(channel, m.BasicQos(0, 2 * WORKS_AT))
                self._machine.send_method(channel, m.BasicConsume(self.jobs.name, "jobs"))
            self.is_open = True
            self._send_again()
        self._flush()

    def _consume(self) -> None:
        if self.consumes:
            for at, queue in enumerate(self.queues):
                self._machine.send_method(CONSUMES, m.BasicConsume(queue.name, f"c{at} {queue.name}"))

    def start_consuming(self) -> None:
        """Consume from its queues, if it did not."""
        if not self.consumes:
            self.consumes = True
            if self.wire is not None and self._machine._usable(CONSUMES):
                self._consume()
                self._flush()

    def _confirmed(self, event: Confirms) -> None:
        site = self._site
        for _, tag, multiple, ok in event.confirms:
            tags = [one for one in self.unconfirmed if one <= tag] if multiple else [tag]
            for one in tags:
                publication = self.unconfirmed.pop(one, None)
                if publication is None:
                    continue
                site.trace(self.name, "confirm", publication.id, ok)
                (site.ledger.accept if ok else site.ledger.refuse)(publication)

    def _delivered(self, event: Deliveries) -> None:
        site = self._site
        for channel, consumer, tag, redelivered, _, _, body in event.contents:
            data = bytes(body)
            site.trace(self.name, "gets", data[:12], redelivered, str(consumer[4:], "ascii"))
            if channel == COMMITS:
                self._take_job(tag, data, redelivered)
            else:
                queue = self.queues[int(consumer[2:].split()[0])]
                by = "" if queue.has_one_consumer else f"{self.name} {self._connections}"
                site.ledger.receive(queue, data, by, qos=-1, is_repeat=redelivered, now=site.now)
                self._unacknowledged.append((tag, queue, data))

    def _take_job(self, tag: int, body: bytes, redelivered: bool) -> None:
        assert self.jobs is not None
        one = self._site.ledger.receive(
            self.jobs, body, self.name, qos=-1, is_repeat=redelivered, now=self._site.now
        )
        if one is None:
            return
        if one.id in self.committed and one.attempts == 1:
            self._site.ledger.faults.append(
                f"{self.jobs.name}: {self._site.ledger.name_of(one)} comes again after its transaction"
            )
        self._work.append((tag, one))

    def _got_one(self, event: GetResponse) -> None:
        queue = self._got.popleft()
        self.awaited.popleft()
        body = bytes(event.body)
        self._site.trace(self.name, "got", body[:12])
        is_repeat = bool(event.method.redelivered)
        self._site.ledger.receive(
            queue, body, f"{self.name} get", qos=-1, is_repeat=is_repeat, now=self._site.now
        )
        self._unacknowledged.append((event.method.delivery_tag, queue, body))

    def _answered(self, event: MethodReceived) -> None:
        method = event.method
        self._site.trace(self.name, "hears", method.name)
        if isinstance(method, m.BasicGetEmpty):
            self._got.popleft()
            self.awaited.popleft()
        elif isinstance(method, m.QueuePurgeOk):
            self.awaited.popleft()
            queue = self._purged.popleft()
            queue.is_purged = queue in self._purged
        elif isinstance(method, m.TxCommitOk):
            self._commit_done()

    def _commit_done(self) -> None:
        for job in self._committing:
            self.committed.add(job.publication.id)
            self._site.ledger.accept(job.result)
        self._committing.clear()

    def _channel_closed(self, event: ChannelClosed) -> None:
        self._site.trace(self.name, "channel closed", event.channel, event.reply_code, event.text[:60])
        self.give_up()

    def _closed(self, event: Closed) -> None:
        self._site.trace(self.name, "connection closed", event.reply_code, event.text[:60])
        self.give_up()

    def waits_for(self) -> str:
        """Return what is on its way, for reports."""
        return (
            f"open {self.is_open}, unconfirmed {len(self.unconfirmed) + len(self._again)}, "
            f"unacknowledged {len(self._unacknowledged)}, jobs {len(self._work) + len(self._committing)}, "
            f"awaited {list(self.awaited)}"
        )

    @property
    def is_quiet(self) -> bool:
        """True if nothing of it is on its way."""
        return self.is_open and not (
            self.unconfirmed
            or self._again
            or self._unacknowledged
            or self._work
            or self._committing
            or self.awaited
        )


def header_of(one: Publication) -> bytes:
    """Return the content header of a persistent message with its id as message id."""
    flags = 0x1000 | 0x0080
    headers = priority = expiration = b""
    if one.delay_secs:
        flags |= 0x2000
        headers = encode_table((("x-delay", Value(ValueType.INT32, int(one.delay_secs * 1_000))),))
    if one.priority:
        flags |= 0x0800
        priority = bytes((one.priority,))
    if one.ttl_secs != NEVER:
        flags |= 0x0100
        text = b"%d" % int(one.ttl_secs * 1_000)
        expiration = bytes((len(text),)) + text
    name = b"%d" % one.id
    given = headers + b"\x02" + priority + expiration
    return flags.to_bytes(2, "big") + given + bytes((len(name),)) + name
