"""Client-names that are in use at any replica (3.2.6): each is an exclusive queue, which the cluster takes
away with the connection of the replica that has the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from gateway import clock
from gateway.broker.amqpfast.hosts import ActiveClients, FastClient
from gateway.engine.amqpfast.session import FastEngineSession
from gateway.model.pending import Pending
from gateway.model.properties import Headers, string
from gateway.protocols.amqp091 import methods as m

LEAVING_SECS: Final = 2.0  # that a client's former connection has to be taken notice of
LOOK_SECS: Final = 0.2
UNUSED_SECS: Final = 5.0  # after which a name is free for which nobody was let in
ARGUMENTS: Final[Headers] = (("x-queue-type", string("classic")),)  # no other is exclusive


class Name:
    """A client-name that somebody here wants to have."""

    def __init__(self, engine: FastEngineSession, queue: str) -> None:
        self.ours: bool | None = None  # None: the cluster has not said
        self.client: FastClient | None = None  # who has it
        self.since = 0.0  # when it was ours
        self._declare = m.QueueDeclare(queue, exclusive=True, arguments=ARGUMENTS)
        self._engine = engine

    async def wait(self) -> None:
        """Have it, unless somebody else has."""
        deadline = clock.now() + LEAVING_SECS
        while True:
            code, _ = await self._engine.answer(self._declare)
            if not code or clock.now() >= deadline:
                break
            await trio.sleep(LOOK_SECS)
        self.since = clock.now()
        self.ours = not code

    def hold(self) -> None:
        """There is another connection to the cluster: it is had over that, or the client has to go."""
        self._engine.question(self._declare, self._held)

    def _held(self, code: int, text: str) -> None:
        if code and self.client is not None:
            self.client.taken_over()


class SharedClients(ActiveClients):
    """Those of all replicas, as far as this one has to know. `gone` hears of a client that has left."""

    def __init__(self, engine: FastEngineSession, gone: Callable[[str], None]) -> None:
        super().__init__()
        self._engine = engine
        self._gone = gone
        self._names: dict[str, Name] = {}

    def is_active(self, name: str) -> bool:
        """Whether somebody is called so, here or elsewhere."""
        if super().is_active(name):
            return True
        if name.startswith(" "):
            return False  # one that this replica has made
        found = self._names.get(name)
        if found is None:
            found = self._names[name] = Name(self._engine, self._engine.names.client(name))
        if found.ours is None:
            raise Pending(found)
        if not found.ours:
            del self._names[name]
        return not found.ours

    def enter(self, name: str, client: FastClient) -> None:
        """A client is active."""
        super().enter(name, client)
        if name in self._names:
            self._names[name].client = client

    def leave(self, name: str, client: FastClient) -> None:
        """It is not any more: somebody else may be called so, here or elsewhere."""
        if self._clients.get(name) is client:
            super().leave(name, client)
            self._gone(name)
            self._release(name)

    def hold(self) -> None:
        """There is another connection to the cluster."""
        for one in self._names.values():
            if one.client is not None:
                one.hold()

    def sweep(self, now: float) -> None:
        """Names of clients that have gone before they were let in are free."""
        for name, one in list(self._names.items()):
            if one.ours is not None and one.client is None and now - one.since > UNUSED_SECS:
                self._release(name)

    def _release(self, name: str) -> None:
        found = self._names.pop(name, None)
        if found is not None and found.ours:
            self._engine.ask(m.QueueDelete(self._engine.names.client(name)))
