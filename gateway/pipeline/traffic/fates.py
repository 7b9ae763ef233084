"""Result of a mapping for a message, in a form that can be compared.

A candidate mapping is built in the driver from its files and sent to tasks as text, since compiled routes are
not pickled.
"""

from __future__ import annotations

from collections.abc import Mapping as Map
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from gateway.mapping.cases import endpoints_of
from gateway.mapping.loader import Mapping, parse
from gateway.mapping.router import Router
from gateway.mapping.routes import ConditionalRoute, ResolvedRoute
from gateway.model.address import Address
from gateway.model.message import Message
from gateway.model.outcome import Outcome
from gateway.protocols import dialect_of
from gateway.store.journal.wires import words_of


class Fate(NamedTuple):
    """Result of one route for one message: the delivery, or the refusal.

    `address` is the target address as the journal writes it. It is None if the route refused the message;
    then `refused` is the reason.
    """

    route: str
    endpoint: str
    address: str | None
    assurance: int
    durable: bool
    retain: bool
    refused: str = ""

    @property
    def place(self) -> tuple[str, str | None]:
        """Endpoint and address to which the message is delivered; the address is None for a refusal."""
        return self.endpoint, self.address


Fates = tuple[Fate, ...]


def encode_fates(fates: Sequence[Fate]) -> str:
    """Encode routing results as JSON text; equal results give equal texts."""
    return orjson.dumps([list(fate) for fate in fates]).decode()


def decode_fates(text: str) -> Fates:
    """Decode the text that `encode_fates` returned."""
    return tuple(Fate(*one) for one in orjson.loads(text))


class CandidateMapping:
    """Compiled mapping files, in a form that can be sent to Spark tasks.

    `endpoints` maps each endpoint to its protocol.
    """

    def __init__(
        self,
        mappings: Sequence[Mapping],
        texts: Map[str, str],
        endpoints: Map[str, str],
        *,
        domains: Map[str, str] | None = None,
    ) -> None:
        """Compile the routes of `mappings`. Raises MappingError if they do not compile.

        `texts` has the text of each mapping file by its path, `endpoints` the protocol of each endpoint.
        `domains` maps listeners to their domains: clients of listeners in one domain reach each other.
        """
        self._texts = dict(texts)
        self._endpoints = endpoints_of(mappings) | dict(endpoints)
        self._domains = domains
        self._router: Router | None = Router(mappings, self._endpoints, domains=domains)
        self._queues = self._queues_of(self._router)
        # Properties of a message besides its address that decide its fate.
        self.per_sender = any(route.per_sender for route in self._router.routes)
        self.per_body = any(route.condition is not None for route in self._router.routes)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_router": None}

    @property
    def router(self) -> Router:
        """Compiled routes, built on first use in each process."""
        if self._router is None:
            mappings = [parse(text, file) for file, text in self._texts.items()]
            self._router = Router(mappings, self._endpoints, domains=self._domains)
        return self._router

    def resolve(self, endpoint: str, address: Address, route: str) -> tuple[ResolvedRoute, ...]:
        """Return the routes for messages that were published to an address at an endpoint.

        `route` is the recorded route. If it consumes from a queue, the message came from that queue, which
        the journal does not record otherwise. No routes are returned for a return address, because messages
        to it reach the requester with any mapping.
        """
        if dialect_of(address).return_part(address) is not None:
            return ()
        return self.router.resolve(endpoint, address, self._queues.get((endpoint, route), ""))

    def queue_of(self, endpoint: str, route: str) -> str:
        """Return the name of the queue that `route` consumes from at an endpoint.

        Return "" if the route does not consume from a queue, or does not exist.
        """
        return self._queues.get((endpoint, route), "")

    @staticmethod
    def _queues_of(router: Router) -> dict[tuple[str, str], str]:
        return {
            (route.source, route.name): route.pattern.queue
            for route in router.routes
            if route.pattern.queue is not None
        }


def decides_by_message(resolved_routes: Sequence[ResolvedRoute]) -> bool:
    """Return True if one of the routes has a condition on the message.

    Otherwise all messages to the same address have the same result.
    """
    return any(isinstance(resolved, ConditionalRoute) for resolved in resolved_routes)


def fates_of(resolved_routes: Sequence[ResolvedRoute], message: Message) -> Fates:
    """Return the result of each route for `message`, in the order of the routes.

    Routes whose condition the message does not satisfy are left out.
    """
    found = []
    for resolved in resolved_routes:
        made = resolved.cross(message)
        if made is None:
            continue
        route = resolved.route
        if isinstance(made, Outcome):
            found.append(Fate(route.name, route.target_endpoint, None, 0, False, False, made.reason.value))
            continue
        there = words_of(made.address)[0].decode()
        found.append(
            Fate(route.name, route.target_endpoint, there, made.assurance, made.durable, made.retain)
        )
    return tuple(found)


def show_fate(fate: Fate) -> str:
    """Return a routing result as text for people: the target and its guarantees, or the refusal."""
    if fate.address is None:
        return f"refused by {fate.route} ({fate.refused})"
    durable = "durable" if fate.durable else "transient"
    return f"{fate.endpoint} {fate.address} by {fate.route} (QoS {fate.assurance}, {durable})"
