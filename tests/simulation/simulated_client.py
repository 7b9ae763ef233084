"""What all clients of a simulation have in common: a wire, a client machine, and lost connections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

from gateway.errors import LocalProtocolError, RemoteProtocolError
from tests.simulation.ledger import NEVER, Destination, Ledger, Publication
from tests.simulation.network import Wire

UNCONFIRMED_MAX: Final = 12
PADDING_BYTES: Final = (0, 0, 10, 300, 3_000)

EventT = TypeVar("EventT")
EventT_co = TypeVar("EventT_co", covariant=True)


class Site(Protocol):
    """What clients use of a simulation."""

    ledger: Ledger
    random: Random

    @property
    def is_ending(self) -> bool: ...

    @property
    def now(self) -> float: ...

    def connect(self, listener: str) -> Wire: ...

    def trace(self, *words: object) -> None: ...


class Machine(Protocol[EventT_co]):
    """What a client uses of the machine of its protocol."""

    def receive_data(self, data: bytes, now: float) -> Iterable[EventT_co]: ...

    def data_to_send(self) -> bytes: ...


class SimulatedClient(Generic[EventT]):
    """A client of one protocol. Its connection may end in several ways; what is unfinished goes on later."""

    LISTENER: ClassVar[str]
    OPENING_SECS_MAX: ClassVar[float] = 12.0

    def __init__(self, site: Site, name: str) -> None:
        self.name = name
        self.is_open = False
        self.is_slow = False  # acknowledges late
        self.wire: Wire | None = None
        self._site = site
        self._asked_at = 0.0  # when the connection was begun

    # What each protocol does in its own way.

    def _transport(self) -> Machine[EventT]:
        """Return the machine of the connection."""
        raise NotImplementedError

    def _take(self, event: EventT) -> None:
        """Process an event of the machine."""
        raise NotImplementedError

    def _say_goodbye(self) -> None:
        """End the connection in the protocol's words."""
        raise NotImplementedError

    def acknowledge(self) -> None:
        """Send the acknowledgements that are due."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Forget what belongs to the connection that is given up."""

    def _note_vanished(self, how: str) -> None:
        """Note in the ledger what the end of the connection causes."""

    def _work_on(self) -> None:
        """Do what follows from the deliveries so far."""

    # What the simulation has it do.

    def _connect(self) -> None:
        """Take a new wire, and send what the machine begins with."""
        self.wire = self._site.connect(self.LISTENER)
        self._asked_at = self._site.now

    def give_up(self) -> None:
        """Forget the connection, which the gateway may believe in."""
        if self.wire is not None:
            self.wire.end()
        self.wire = None
        self.is_open = False
        self._forget()

    def vanish(self, how: str) -> None:
        """Lose the connection: "end", "reset", "half-open" or "disconnect"."""
        wire = self.wire
        if wire is None:
            return
        if how == "reset":
            wire.reset()
        elif how == "half-open":
            wire.is_half_open = True
            self.wire = None
        elif how == "disconnect" and self.is_open:
            self._say_goodbye()
            self._flush()
        self._site.trace(self.name, how)
        self._note_vanished(how)
        self.give_up()

    def _flush(self) -> None:
        data = self._transport().data_to_send()
        if data and self.wire is not None:
            self.wire.send(data)

    # What happens to it.

    def pump(self) -> None:
        """Read what has come, and answer some of it."""
        wire, site = self.wire, self._site
        if wire is None:
            return
        data = wire.receive()
        if data:
            try:
                for event in self._transport().receive_data(data, 0.0):
                    self._take(event)
                    if self.wire is None:
                        return
            except (RemoteProtocolError, LocalProtocolError) as error:
                site.ledger.faults.append(f"{self.name}: the gateway breaks the protocol: {error}")
                self.give_up()
                return
        if wire.has_ended or (not self.is_open and site.now - self._asked_at > self.OPENING_SECS_MAX):
            site.trace(self.name, "is lost")
            self.give_up()
            return
        if not (self.is_slow and site.random.random() < 0.9):
            self.acknowledge()
        self._work_on()
        self._flush()


class ConfirmedClient(SimulatedClient[EventT]):
    """Client of AMQP or AMQP/Fast that publishes again on its next connection what was not confirmed."""

    def __init__(self, site: Site, name: str) -> None:
        super().__init__(site, name)
        self.unconfirmed: dict[int, Publication] = {}
        self._again: list[Publication] = []  # published on an earlier connection, and not confirmed

    def _send(self, one: Publication) -> None:
        raise NotImplementedError

    def _forget(self) -> None:
        self._again = [*self._again, *self.unconfirmed.values()]
        self.unconfirmed.clear()

    def publish(self, address: str, wanted: Sequence[Destination], *, ttl_secs: int = 0, **more: Any) -> bool:
        """Publish a persistent message. Return False if too many are on their way.

        `more` are other fields of the publication.
        """
        site = self._site
        if not self.is_open or len(self.unconfirmed) + len(self._again) >= UNCONFIRMED_MAX:
            return False
        padding = site.random.choice(PADDING_BYTES)
        one = site.ledger.publish(
            self.name, address, -1, wanted, site.now, ttl_secs=ttl_secs or NEVER, padding=padding, **more
        )
        site.trace(self.name, "publishes", one.id, address)
        self._send(one)
        return True

    def _send_again(self) -> None:
        """Publish what an earlier connection has left unconfirmed."""
        again, self._again = self._again, []
        for one in again:
            one.attempts += 1
            self._send(one)
