"""Permission to publish: the addresses to which a sender may publish, directly and by return addresses.

Every message that enters the gateway gets its routing entry here: publishes of each protocol, those over
HTTP, repeats, wills, commits of transactions and redriven dead letters. Three things are decided together:
the right to the address itself, the right to the address behind it if it is a return address, and the roles
that routes require. Callers may store an entry until `Dispatcher.generation` changes. Messages of links, and
what an operator publishes, need no rights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NoReturn, Protocol

from gateway.access.rights import Decision, Rights
from gateway.broker.amqp091.checks import Checker
from gateway.broker.amqp091.refusals import access_refused
from gateway.broker.amqp091.virtual_host import VirtualHost
from gateway.broker.dispatcher import Dispatcher
from gateway.broker.routing import Namespace, RoutingEntry
from gateway.model.address import Address

Find = Callable[[Address], RoutingEntry]
RETURN_ADDRESS: Final = (
    "the address is a return address, but the dead letter is not a reply that was refused there"
)


class PublishRefused(Exception):
    """Error of a sender that may not publish to an address. Its text is the rule that forbids this."""


class PublishChecker(Checker, Protocol):
    """Publisher in one AMQP 0-9-1 virtual host: a client, or an operator over RabbitMQ's HTTP API."""

    @property
    def publish_rights(self) -> Rights | None:
        """Rights of the sender; None for an operator, who may publish everywhere."""

    def refuse_publish(self, resource: str, rule: str) -> NoReturn:
        """Log that `rule` denies writing to `resource`, and raise AmqpRefused (403)."""


def permitted_entry(
    dispatcher: Dispatcher, rights: Rights, address: Address, find: Find, host: str = "/"
) -> RoutingEntry:
    """Return the routing entry of a message, if a client of MQTT or AMQP/Fast may publish it.

    `find` returns the entry of an address without checking rights. `host` is the client's virtual host.
    Raises PublishRefused if the rights forbid the address, or Pending if the decision is not available yet.
    """
    decision = _behind(dispatcher, rights, address, host)
    if decision is None:
        decision = rights.publish(address, host)
    if not decision.allowed:
        raise PublishRefused(decision.rule)
    entry = find(address)
    _check_roles(entry, rights.roles)
    return entry


def amqp_entry(
    dispatcher: Dispatcher,
    publisher: PublishChecker,
    endpoint: str,
    host: VirtualHost,
    address: Address,
    copies: Sequence[str] = (),
    *,
    is_accepted: bool = False,
) -> RoutingEntry:
    """Return the routing entry of a message for an exchange, if the publisher may publish it.

    `copies` are the further routing keys in CC and BCC; they are checked, but not in the entry. `is_accepted`
    is True if a transaction has accepted the message, so that the exchange may have been deleted since.
    Raises AmqpRefused (403, or 404 for an exchange that does not exist) or Pending.
    """
    exchange = address.scope
    publisher.check("write", "exchange", exchange)
    if exchange and not is_accepted and host.exchange(exchange).internal:
        raise access_refused(f"cannot publish to internal exchange '{exchange}' in vhost '{host.name}'")
    for key in (address.name, *copies):
        publisher.check_key("write", exchange, key)
    entry_of = partial(dispatcher.entry, endpoint, host)
    rights = publisher.publish_rights
    if rights is None:
        return entry_of(address)
    decision = _behind(dispatcher, rights, address, host.name)
    if decision is not None and not decision.allowed:
        publisher.refuse_publish(f"return address '{address.name}'", decision.rule)
    entry = entry_of(address)
    try:
        _check_roles(entry, rights.roles)
    except PublishRefused as refused:
        publisher.refuse_publish(f"exchange '{exchange}' with routing key '{address.name}'", str(refused))
    return entry


def redriven_entry(
    dispatcher: Dispatcher, endpoint: str, local: Namespace | None, address: Address, *, is_reply: bool
) -> RoutingEntry:
    """Return the routing entry under which a dead letter is published again. Raises PublishRefused.

    The rights of its sender are unknown, and by the arguments of a queue users can create dead letters with
    addresses to which they may not publish. The entry therefore has no route that requires a role, and a
    return address is only allowed for a reply that was refused there (`is_reply`). `local` is the endpoint's
    namespace.
    """
    if not is_reply and endpoint not in dispatcher.links and dispatcher.router.is_return(address):
        raise PublishRefused(RETURN_ADDRESS)
    entry = dispatcher.entry(endpoint, local, address)
    _check_roles(entry, ())
    return entry


def _behind(dispatcher: Dispatcher, rights: Rights, address: Address, host: str) -> Decision | None:
    """Return the decision of `rights` on the address to which a return address leads.

    Return None if `address` is not a return address.
    """
    there = dispatcher.requester_of(address)
    if there is None:
        return None
    namespace = dispatcher.namespaces.get(there[0])
    return rights.publish(there[1], getattr(namespace, "name", host))


def _check_roles(entry: RoutingEntry, roles: Sequence[str]) -> None:
    """Raise PublishRefused if a route of the entry requires a role that is not in `roles`."""
    for branch in entry.plan.branches:
        role = branch.route.rule.role
        if role is not None and role not in roles:
            raise PublishRefused(f"route {branch.route.name!r} requires the role {role!r}")
