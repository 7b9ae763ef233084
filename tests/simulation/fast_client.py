"""AMQP/Fast clients of a simulation: publishers that await replies, and consumers of queues and topics."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final

from gateway.egress.amqpfast.deliveries import Assembly
from gateway.egress.amqpfast.login import client_machine, open_for_sending, split_name
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.client import ClientConnection
from gateway.protocols.amqpfast.codec import Head, decode_message_list, encode_head_properties
from gateway.protocols.amqpfast.dialect import SERVICES
from gateway.protocols.amqpfast.events import (
    NO_HANDLE,
    ChannelClosed,
    Closed,
    CommandReceived,
    Event,
    Fragment,
    HandleClosed,
    Notifies,
    NotifyRow,
    Opened,
    Replies,
)
from gateway.protocols.amqpfast.sender import Producer
from gateway.protocols.amqpfast.spec import (
    DELIVERED,
    FRAME_MAX,
    FRAME_MAX_MIN,
    MESSAGE_BYTES_MAX,
    REDELIVERED,
    ReplyCode,
)
from gateway.protocols.amqpfast.states import State
from gateway.settings.endpoints import LinkUrl
from tests.simulation.ledger import Destination, Publication
from tests.simulation.network import HOST
from tests.simulation.simulated_client import ConfirmedClient, Site

JOBS: Final = "fast.jobs"
RESULTS: Final = "fast.done"
BROWSED: Final = "fast.q"
BROWSED_MAX: Final = 3
WORKS_AT: Final = 4  # messages of one transaction
ROLLED_BACK: Final = 0.2  # of the transactions
TARGET: Final = LinkUrl("amqpfast", False, HOST, 0, "/", "", "")


class FastClient(ConfirmedClient[Event]):
    """One connection with a channel to publish and one to consume.

    An address is a service and a name, as `queue jobs`. A topic is consumed by a durable subscription.
    """

    LISTENER: ClassVar[str] = "amqpfast"

    def __init__(
        self, site: Site, name: str, *, consumed: dict[str, Destination] | None = None, prefetch: int = 5
    ) -> None:
        """`consumed` has the destination of each consumed address."""
        super().__init__(site, name)
        self.subscribed: list[Destination] = []
        self._consumed = consumed or {}
        self._prefetch = prefetch
        self._unacknowledged: list[tuple[int, Destination, bytes]] = []
        self._producers: dict[str, tuple[Producer, bytes]] = {}
        self._consumers: dict[int, Destination] = {}
        self._awaited: dict[tuple[int, int], Destination] = {}  # replies to CONSUME, by handle and tag
        self._assembly = Assembly(MESSAGE_BYTES_MAX)
        self._machine = self._new_machine()
        self._channel = self._consuming = 0

    def _new_machine(self) -> ClientConnection:
        frame_max = self._site.random.choice((FRAME_MAX, FRAME_MAX_MIN))  # many bodies are longer
        return client_machine(TARGET, self.name, heartbeat=0, frame_max=frame_max)

    # What the simulation has it do.

    def connect(self) -> None:
        """Open a connection; an old one is given up."""
        self.give_up()
        self._connect()
        self._machine = self._new_machine()
        self._flush()
        self._site.trace(self.name, "connects")

    def _transport(self) -> ClientConnection:
        return self._machine

    def _say_goodbye(self) -> None:
        self._machine.close()

    def _forget(self) -> None:
        super()._forget()
        for _, destination, data in self._unacknowledged:
            self._site.ledger.owe(destination, data)
        self._unacknowledged.clear()
        self._producers.clear()
        self._consumers.clear()
        self._awaited.clear()
        self._assembly = Assembly(MESSAGE_BYTES_MAX)

    def _send(self, one: Publication) -> None:
        if one.address not in self._producers:
            service, name = one.address.split(" ")
            number, rest = open_for_sending(self._machine, self._channel, service, name)
            self._producers[one.address] = Producer(self._machine, number, confirm=True), rest
        producer, name_bytes = self._producers[one.address]
        head = encode_head_properties(Head(persistent=True, identifier=str(one.id)))
        (tag,) = producer.send_many([(name_bytes, head, one.body())])
        self.unconfirmed[tag] = one
        self._flush()

    # What happens to it.

    def acknowledge(self) -> None:
        """Acknowledge everything that was delivered: CHANNEL ACK is cumulative."""
        due, self._unacknowledged = self._unacknowledged, []
        if due:
            self._machine.ack(self._consuming, due[-1][0])

    def _take(self, event: Event) -> None:
        actions: dict[type, Callable[..., None]] = {
            Opened: self._opened,
            Replies: self._replied,
            Notifies: self._notified,
            Fragment: self._fragment,
            HandleClosed: self._closed,
            ChannelClosed: self._closed,
            Closed: self._closed,
        }
        action = actions.get(type(event))
        if action is not None:
            action(event)

    def _opened(self, event: Opened) -> None:
        if self._machine.state is not State.ACTIVE:  # a CLOSE came with it
            return
        self._open_channels()
        for address, destination in self._consumed.items():
            service, name = address.split(" ")
            begin, end = split_name(service, name)
            opening = m.HandleOpen(
                self._consuming, service_type=SERVICES[service], consumer=True, dest_name=begin
            )
            number = self._machine.open_handle(opening, confirm=False)
            tag = self._machine.new_tag(self._consuming)
            command = m.HandleConsume(number, tag, self._prefetch, dest_name=end)
            if service == "topic":
                command.identifier = f"{self.name} durable"
            self._machine.send(command)
            self._consumers[number] = destination
            self._awaited[number, tag] = destination
        self.is_open = True
        self._send_again()
        self._flush()

    def _open_channels(self) -> None:
        self._channel = self._machine.open_channel(confirm=False)
        self._consuming = self._machine.open_channel(confirm=False)

    def _replied(self, event: Replies) -> None:
        site = self._site
        for _, handle, tag, code, _ in event.rows:
            if (handle, tag) in self._awaited:
                destination = self._awaited.pop((handle, tag))
                site.trace(self.name, "consumes", destination.name, code)
                destination.exists |= code == ReplyCode.SUCCESS
            elif (one := self.unconfirmed.pop(tag, None)) is not None:
                site.trace(self.name, "reply", one.id, code)
                (site.ledger.accept if code == ReplyCode.SUCCESS else site.ledger.refuse)(one)

    def _notified(self, event: Notifies) -> None:
        for row in event.rows:
            self._receive(row)

    def _fragment(self, event: Fragment) -> None:
        joined = self._assembly.take(event)
        if joined is not None:
            assert joined.body is not None
            self._receive((joined.handle, joined.number, joined.bits, joined.head, joined.body, joined.name))

    def _receive(self, row: NotifyRow) -> None:
        handle, number, bits, _, given, _ = row
        assert bits & DELIVERED
        body, is_repeat = bytes(given), bits & REDELIVERED != 0
        self._site.trace(self.name, "gets", body[:12], is_repeat)
        destination = self._consumers[handle]
        self._site.ledger.receive(
            destination, body, self.name, qos=-1, is_repeat=is_repeat, now=self._site.now
        )
        self._unacknowledged.append((number, destination, body))

    def _closed(self, event: HandleClosed | ChannelClosed | Closed) -> None:
        """Begin with a new connection: which message was to blame is not known."""
        self._site.trace(self.name, "is refused:", event.reply_code, event.text)
        self._flush()
        self.give_up()

    def waits_for(self) -> str:
        """Return what is on its way, for reports."""
        return (
            f"open {self.is_open}, unconfirmed {len(self.unconfirmed) + len(self._again)}, "
            f"unacknowledged {len(self._unacknowledged)}, awaited {len(self._awaited)}"
        )

    @property
    def is_quiet(self) -> bool:
        """True if nothing of it is on its way."""
        waits = self.unconfirmed or self._again or self._unacknowledged or self._awaited
        return self.is_open and not waits


class FastWorker(FastClient):
    """Consumer of jobs. It sends results, and acknowledges their jobs, in transactions of one channel."""

    def __init__(self, site: Site, name: str, jobs: Destination, results: Destination) -> None:
        super().__init__(site, name, consumed={f"queue {JOBS}": jobs}, prefetch=2 * WORKS_AT)
        self.committed: set[int] = set()  # ids of jobs whose transaction was confirmed
        self._jobs = jobs
        self._results = results
        self._work: list[tuple[int, Publication]] = []
        self._committing: list[tuple[Publication, Publication]] = []  # jobs and results
        self._commit_tag = 0
        self._rollback_tag = 0  # until its reply, what arrives belongs to the transaction that has ended

    def _forget(self) -> None:
        super()._forget()
        self._work.clear()
        self._committing.clear()
        self._rollback_tag = 0

    def _open_channels(self) -> None:
        self._channel = self._consuming = self._machine.open_channel(transacted=True, confirm=False)
        number, self._rest = open_for_sending(self._machine, self._channel, "queue", RESULTS)
        self._producer = Producer(self._machine, number)

    def _receive(self, row: NotifyRow) -> None:
        _, number, bits, _, given, _ = row
        body, is_repeat, site = bytes(given), bits & REDELIVERED != 0, self._site
        site.trace(self.name, "gets", body[:12], is_repeat)
        job = site.ledger.receive(self._jobs, body, self.name, qos=-1, is_repeat=is_repeat, now=site.now)
        if job is None:
            return
        if job.id in self.committed and job.attempts == 1:
            site.ledger.faults.append(
                f"{self._jobs.name}: {site.ledger.name_of(job)} comes again after its transaction"
            )
        if not self._rollback_tag:
            self._work.append((number, job))

    def _work_on(self) -> None:
        is_due = len(self._work) >= (1 if self._site.is_ending else WORKS_AT)
        if is_due and not self._committing and self.is_open:
            self._commit()

    def _commit(self) -> None:
        site, machine = self._site, self._machine
        work, self._work = self._work, []
        for _, job in work:
            result = site.ledger.work_on(job, self.name, f"queue {RESULTS}", self._results, site.now)
            head = encode_head_properties(Head(persistent=True, identifier=str(result.id)))
            self._producer.send_many([(self._rest, head, result.body())])
            self._committing.append((job, result))
        machine.ack(self._channel, work[-1][0])
        if site.random.random() < ROLLED_BACK and not site.is_ending:
            self._rollback_tag = machine.new_tag(self._channel)
            machine.send(m.ChannelRollback(self._channel, self._rollback_tag))
            site.trace(self.name, "rolls back", [job.id for job, _ in self._committing])
            self._committing.clear()
            return
        self._commit_tag = machine.new_tag(self._channel)
        machine.send(m.ChannelCommit(self._channel, self._commit_tag))
        site.trace(self.name, "commits", [job.id for job, _ in self._committing])

    def _replied(self, event: Replies) -> None:
        super()._replied(event)
        if any(handle == NO_HANDLE and tag == self._rollback_tag for _, handle, tag, _, _ in event.rows):
            self._rollback_tag = 0
        if any(handle == NO_HANDLE and tag == self._commit_tag for _, handle, tag, _, _ in event.rows):
            self._site.trace(self.name, "has committed")
            for job, result in self._committing:
                self.committed.add(job.id)
                self._site.ledger.accept(result)
            self._committing.clear()

    @property
    def is_quiet(self) -> bool:
        """True if nothing of it is on its way."""
        return super().is_quiet and not (self._work or self._committing or self._rollback_tag)


class FastBrowser(FastClient):
    """Client that looks at the messages of a queue, which stay there."""

    def __init__(self, site: Site, name: str, queue: Destination) -> None:
        super().__init__(site, name)
        self.seen = 0  # messages
        self._queue = queue
        self._handle = 0
        self._is_asking = False
        self._browsed: set[int] = set()  # confirm-tags of BROWSE that have no reply

    def _forget(self) -> None:
        super()._forget()
        self._is_asking = False
        self._browsed.clear()

    def _open_channels(self) -> None:
        super()._open_channels()
        opening = m.HandleOpen(self._channel, service_type=SERVICES["queue"], browser=True, dest_name=BROWSED)
        self._handle = self._machine.open_handle(opening, confirm=False)

    def look(self) -> None:
        """Request the numbers of all messages."""
        if self.is_open and not self._is_asking and not self._browsed:
            self._is_asking = self._machine.send(m.HandleQuery(self._handle))
            self._flush()

    def _take(self, event: Event) -> None:
        if isinstance(event, CommandReceived) and isinstance(event.command, m.HandleIndex):
            self._is_asking = False
            numbers = [
                at
                for first, last in decode_message_list(event.command.message_list)
                for at in range(first, last + 1)
            ]
            self._site.trace(self.name, "sees", numbers)
            for number in self._site.random.sample(numbers, min(len(numbers), BROWSED_MAX)):
                tag = self._machine.new_tag(self._channel)
                self._machine.send(m.HandleBrowse(self._handle, tag, number))
                self._browsed.add(tag)
        else:
            super()._take(event)

    def _replied(self, event: Replies) -> None:
        for _, handle, tag, _, _ in event.rows:
            if handle == self._handle:
                self._browsed.discard(tag)

    def _receive(self, row: NotifyRow) -> None:
        _, _, bits, _, given, _ = row
        assert not bits & DELIVERED
        self._site.trace(self.name, "looks at", bytes(given)[:12])
        self._site.ledger.look(self._queue, bytes(given), (f"queue {BROWSED}", "f/a"))
        self.seen += 1

    @property
    def is_quiet(self) -> bool:
        """True if nothing of it is on its way."""
        return super().is_quiet and not (self._is_asking or self._browsed)
