"""A dispatcher with one link and its outboxes, over one store that can be closed and opened again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gateway.broker.dead_letters import DeadLetters
from gateway.broker.dispatcher import Dispatcher, DispatcherServices
from gateway.broker.outbox.outbox import OutboxState, OutboxTarget
from gateway.broker.outbox.outboxes import Outboxes
from gateway.broker.shares import UserQuotas
from gateway.broker.storage import MemoryLimits
from gateway.mapping import parse
from gateway.mapping.router import Router
from gateway.model.batch import Batch, SubBatch
from gateway.model.message import NEVER, Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.times import Monotonic
from gateway.store.store import Store
from tests.broker.parts import Answers, mqtt
from tests.store.parts import Disk, Opened

DOWN = Outcome(Verdict.RELEASED, Reason.TARGET_DOWN)
REFUSED = Outcome(Verdict.REJECTED, Reason.TARGET_REFUSED, "no")
TOO_LARGE = Outcome(Verdict.REJECTED, Reason.TOO_LARGE)


def mapping(more: str = "", name: str = "out", settle: str = "stored", target: str = "erp") -> Router:
    text = f"""
version: 1
routes:
  - {{name: {name}, from: {{endpoint: mqtt, topic: "out/#"}}, to: {{endpoint: {target}, queue: q}},
     settle: {settle}{more}}}
"""
    return Router([parse(text, "t.yaml")], {"mqtt": "mqtt", "erp": "amqp091", "crm": "amqp091"})


class Link:
    """A remote broker that keeps the parts that it is sent, until it is told to settle them."""

    def __init__(self) -> None:
        self.up = True
        self.parts: list[SubBatch] = []
        self.at_once: Outcome | None = None

    def sinks(self, address: object) -> tuple[Link, ...]:
        return (self,)

    def choose(self, message: Message) -> tuple[Link, ...]:
        raise AssertionError("the address decides")

    @property
    def retained(self) -> None:
        """The remote broker's business."""

    def publish(self, part: SubBatch) -> None:
        self.parts.append(part)
        if self.at_once is not None:
            part.settle(self.at_once)

    @property
    def bodies(self) -> list[int]:
        return [int(message.body) for part in self.parts for message in part.messages]

    def settle(self, outcome: Outcome = ACCEPTED) -> None:
        parts, self.parts = self.parts, []
        for part in parts:
            part.settle(outcome)


class Devices:
    """A namespace in which nobody listens."""

    def sinks(self, address: object) -> tuple[Link, ...]:
        return ()

    def choose(self, message: Message) -> tuple[Link, ...]:
        raise AssertionError("the address decides")

    @property
    def retained(self) -> None:
        """Nothing is."""


class Bench:
    """A dispatcher with one link, over one store; `restart` is a crash after what was flushed."""

    def __init__(
        self,
        folder: Path,
        router: Router | None = None,
        quotas: UserQuotas | None = None,
        link: Any = None,
        **way: Any,
    ) -> None:
        """Open the store in `folder`. `link` is the link session; None for a Link."""
        self.folder = folder
        self.quotas = quotas
        self.disk = Disk()
        self.way = {"window": 100} | way
        self.link = link or Link()
        self.now = 1_000.0
        self.one: Opened
        self.open(router or mapping())

    def open(self, router: Router) -> None:
        self.one = Opened(self.folder, before=self._before, factory=self.disk.factory())
        self.dispatcher = Dispatcher(
            router,
            self.letters,
            DispatcherServices(
                links={"erp"},
                namespaces={"mqtt": Devices(), "erp": self.link},
                outbox=self.outboxes.of,
            ),
        )
        self.outboxes.add_target("erp", OutboxTarget(self.link, self._is_up, **self.way))
        self.outboxes.use(router.routes)

    def _is_up(self) -> bool:
        return self.link.up if isinstance(self.link, Link) else self.link.status.is_up

    def _before(self, store: Store) -> None:
        self.letters = DeadLetters(store=store)
        self.outboxes = Outboxes(
            store,
            self.letters,
            MemoryLimits(50, 1 << 20),
            quotas=self.quotas,
            jitter=lambda: 1.0,
            clock=lambda: self.now,
            utc=lambda: self.now,
        )

    def restart(self, router: Router | None = None) -> None:
        self.one.store.close()
        if isinstance(self.link, Link):
            self.link.parts.clear()
        self.open(router or self.dispatcher.router)

    def use(self, router: Router) -> None:
        self.dispatcher.use(router)
        self.outboxes.use(router.routes)

    def publish(
        self, *numbers: int, qos: int = 1, expires: float = NEVER, users: Sequence[str] = ("",)
    ) -> Answers:
        """One wake-up. The messages are of the `users` in turn."""
        source, batch = self.routed(*numbers, qos=qos, expires=expires, users=users)
        batch.send()
        return source

    def routed(
        self, *numbers: int, qos: int = 1, expires: float = NEVER, users: Sequence[str] = ("",)
    ) -> tuple[Answers, Batch]:
        """Messages that are routed and not yet sent, and their source."""
        source = Answers()
        batch = Batch(source, Monotonic(0.0))
        for at, number in enumerate(numbers):
            sender = Sender("mqtt", user=users[at % len(users)])
            message = mqtt("out/x", b"%d" % number, qos, expires=expires, sender=sender)
            entry = self.dispatcher.entry("mqtt", self.dispatcher.namespaces["mqtt"], message.address)
            assert self.dispatcher.publish(batch, entry, message, number)
        return source, batch

    def stored(self, *numbers: int, **more: Any) -> Answers:
        source = self.publish(*numbers, **more)
        self.commit()
        return source

    def commit(self) -> None:
        assert self.one.commit() is ACCEPTED

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.outboxes.tick()

    def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self.one.store.flush()
            calls = self.one.loop.calls
            self.one.loop.run_until(lambda calls=calls: self.one.loop.calls > calls)  # type: ignore[misc]

    def dead(self) -> list[tuple[int, str, str]]:
        """Body, route and reason of the dead letters, oldest first."""
        found: list[Any] = []
        self.letters.newest(999, found.append)
        self.one.loop.run_until(lambda: found)
        letters = reversed(found[0])
        return [(int(one.message.body), one.route, one.outcome.reason.value) for one in letters]

    @property
    def state(self) -> OutboxState:
        (state,) = self.outboxes.states()
        return state

    def counts(self) -> dict[str, int]:
        (route,) = self.dispatcher.router.routes
        words = ("matched", "delivered", "failed", "retried", "dropped", "in_flight")
        return {word: getattr(route, word) for word in words if getattr(route, word)}


def made(folder: Path, more: str = "", **way: Any) -> Bench:
    return Bench(folder, mapping(more), **way)
