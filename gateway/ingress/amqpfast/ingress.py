"""AMQP/Fast source of one listener: sent messages become batches, and outcomes become replies or closes.

A listener has one or more virtual hosts. Routes of the mapping files apply to the first of them, whose
endpoint name is the listener's; messages in the others take no route. The source also grants the shared
folders of out-of-band transfers. Commands are executed by the connections.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import structlog

from gateway.broker.amqpfast.virtual_host import FastHost, FastRefused
from gateway.broker.dispatcher import UNROUTED
from gateway.broker.routing import AnswerEntry, RoutingEntry
from gateway.containment import contained
from gateway.ingress.amqpfast.channel import FastHandle, FastListenerClient, FastSource, Receipt
from gateway.ingress.amqpfast.shared_folder import SharedFolder, name_in, negotiated_folder
from gateway.ingress.clients import IngressClients
from gateway.ingress.services import Services
from gateway.model.address import Address
from gateway.model.dialect import NameRefused
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.model.times import Monotonic
from gateway.protocols.amqpfast.dialect import AMQPFAST
from gateway.protocols.amqpfast.spec import ReplyCode
from gateway.settings import FastListener
from gateway.settings.amqpfast import PeerService

CHANNEL: Final = "channel"
HANDLE: Final = "handle"

log = structlog.get_logger(limited=True)


class FastIngress(FastSource):
    """AMQP/Fast side of one listener: collects what clients publish into batches, and reports outcomes."""

    def __init__(self, name: str, services: Services, ingress_clients: IngressClients) -> None:
        super().__init__(name, services, ingress_clients)
        options = services.settings.listeners[name]
        assert isinstance(options, FastListener)
        self.options = options
        self.anonymous = options.anonymous
        self.hosts = [services.fast_hosts[host] for host in options.virtual_hosts]
        self.peers: dict[str, dict[str, PeerService]] = {
            host: given.peers for host, given in options.virtual_hosts.items()
        }
        # Behaviour that OpenAMQ clients of 2005 expect and that deviates from the specification.
        self.slashes = self.replies_first = self.options.compatibility == "openamq-2005"
        self.commits_all = self.options.commit_confirms == "all"
        # A publisher with more than this unconfirmed is not read until half of them are.
        self.unsettled_max = self.limits.inflight_max * 10
        self.partials = services.fast_hosts.partials
        self.clients = services.fast_hosts.clients
        self.folders = services.fast_hosts.folders
        self._soon: list[Callable[[], None]] = []

    @property
    def namespace(self) -> FastHost:
        """Virtual host to which routes of this listener belong: the first of its virtual hosts."""
        return self.hosts[0]

    def requester(self, reply_to: str) -> Address | None:
        """Return the address of a REPLY_TO: the queue of this name if it exists, or else the topic.

        Return None if the name is invalid. REPLY_TO does not contain the service.
        """
        try:
            return AMQPFAST.address("queue" if reply_to in self.namespace.queues else "topic", reply_to)
        except NameRefused:
            return None

    # Interface to the listener.

    def end_turn(self) -> None:
        """Route the batch of published messages, then call the functions passed to `call_after_turn`."""
        super().end_turn()
        while self._soon:
            try:
                self._soon.pop()()
            except Exception as error:  # it concerns one channel
                contained("batch", error, listener=self.name)

    def tick(self, now: float) -> None:
        """Drop old partial transfers. `now` is in loop-clock seconds."""
        super().tick(now)
        self.partials.forget_old()

    # Interface to batches.

    def settle(
        self, receipts: list[Receipt], refused: dict[int, Outcome] | None, received: Monotonic
    ) -> None:
        """Report the outcome of each message to the handle or OutcomeJoin in its receipt.

        `refused` maps indexes in `receipts` to outcomes; None means that all were accepted. `received` is the
        loop-clock time of the batch, for the latency statistics.
        """
        if refused is None:
            self._accept(receipts)
        else:
            for at, receipt in enumerate(receipts):
                outcome = refused.get(at, ACCEPTED)
                if isinstance(receipt, FastHandle):
                    receipt.channel.connection.report_outcome(receipt, outcome)
                elif isinstance(receipt, tuple):
                    receipt[0].channel.connection.report_outcome(receipt, outcome)
                else:
                    receipt.add_outcome(outcome)
        self.stats.count_settled(len(receipts), refused, self.now() - received)

    def _accept(self, receipts: list[Receipt]) -> None:
        """Reply to accepted messages; consecutive messages of the same connection share one call."""
        rows: list[tuple[int, int]] = []
        last: FastListenerClient | None = None
        count = 0
        for receipt in receipts:
            if type(receipt) is tuple:
                handle, tag = receipt
                connection = handle.channel.connection
                if connection is not last:
                    if last is not None:
                        self._reply(last, rows, count)
                    last, rows, count = connection, [], 0
                count += 1
                if not handle.silent:
                    rows.append((handle.number, tag))
            elif not isinstance(receipt, FastHandle | tuple):
                receipt.add_outcome(ACCEPTED)
        if last is not None:
            self._reply(last, rows, count)

    @staticmethod
    def _reply(connection: FastListenerClient, rows: list[tuple[int, int]], count: int) -> None:
        connection.machine.reply_many(rows)
        connection.count_replied(count)
        connection.stream.mark_for_flush()

    # Interface to connections.

    @staticmethod
    def new_owner() -> str:
        """Return a name for a client without client-name. It begins with a blank, as no client's name can."""
        return f" {secrets.token_hex(8)}"

    def endpoint_of(self, host: FastHost) -> str:
        """Return the endpoint name by which routes select messages of a virtual host.

        Return "" for a virtual host whose messages no route selects.
        """
        return self.name if host is self.hosts[0] else ""

    def handle_unrouted(self, entry: RoutingEntry, message: Message) -> Outcome:
        """Count and record a message that no destination and no route matches. Return its outcome.

        A topic without subscribers is normal, so the message is accepted; a response without requester is
        refused.
        """
        if not isinstance(entry, AnswerEntry):
            self.record_unreceived(entry, message)
            return ACCEPTED
        self.answer_lost(entry, message)
        self.refuse(entry, message, UNROUTED)
        return UNROUTED

    def after_commit(self, then: Callable[[Outcome], None]) -> None:
        """Call `then` with the outcome when everything passed to the store so far is written to disk.

        Without a store it is called at once.
        """
        if self.store is None:
            then(ACCEPTED)
        else:
            self.store.after_commit(then)

    @property
    def has_store(self) -> bool:
        """True if there is a store, so that messages survive a restart."""
        return self.store is not None

    def find_folder(self, text: str) -> Path:
        """Return the path of the folder that a channel's out-of-band string names.

        Raises FastRefused 540 if the string is not accepted.
        """
        options = self.options.out_of_band
        path = None if options is None else negotiated_folder(text, options.folder)
        if path is None:
            text = f"out-of-band transfer by {text!r} is not available"
            raise FastRefused(ReplyCode.NOT_IMPLEMENTED, text)
        return path

    def folder_name(self, path: Path) -> str:
        """Return the name of a folder in the listener's shared folder; "" if it is that folder itself."""
        options = self.options.out_of_band
        return "" if options is None else name_in(path, options.folder)

    def share_folder(self, path: Path) -> SharedFolder:
        """Reserve the folder at `path` for one channel and return it.

        Raises FastRefused 506 if another channel uses the folder or it is unusable.
        """
        try:
            folder = SharedFolder(path)
        except OSError as error:
            text = f"{path} cannot be used: {error.strerror}"
            raise FastRefused(ReplyCode.INSUFFICIENT_RESOURCES, text) from None
        if folder.identity in self.folders:
            raise FastRefused(ReplyCode.INSUFFICIENT_RESOURCES, f"another channel uses {path}")
        self.folders.add(folder.identity)
        return folder

    def unshare(self, folder: SharedFolder) -> None:
        """Release the folder of a closed channel."""
        self.folders.discard(folder.identity)
        folder.close()

    def call_after_turn(self, then: Callable[[], None]) -> None:
        """Call `then` when the current pass of the event loop has been processed."""
        self._soon.append(then)

    def start(self, task: Callable[[], Awaitable[None]]) -> None:
        """Start a task in the background."""
        self.tasks.start_soon(task)

    def report_refused(self, remote: str, text: str) -> None:
        """Log that a client was refused before it entered a virtual host; `text` is the reason."""
        log.warning("client refused by AMQP/Fast listener", listener=self.name, remote=remote, error=text)

    def report_closed(self, remote: str, text: str, part: str) -> None:
        """Log that the gateway closed a client's `part` (connection, channel or handle) because of `text`."""
        name = self.name
        if part == HANDLE:
            log.warning(
                "client handle closed by AMQP/Fast listener", listener=name, remote=remote, error=text
            )
        elif part == CHANNEL:
            log.warning(
                "client channel closed by AMQP/Fast listener", listener=name, remote=remote, error=text
            )
        else:
            log.warning(
                "client connection closed by AMQP/Fast listener", listener=name, remote=remote, error=text
            )
