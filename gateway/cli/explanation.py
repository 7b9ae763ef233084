"""Functions of `gateway explain`: which routes match an address, or a message as a client publishes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import typer

from gateway.cli.publish_subscribe import headers_of
from gateway.mapping import load
from gateway.mapping.explain import Explanation, explain
from gateway.mapping.router import Router
from gateway.model.delivery_mode import DURABLE_AT_QOS
from gateway.model.dialect import NameRefused
from gateway.model.message import Message, Sender
from gateway.model.properties import Properties, property_set
from gateway.protocols import DIALECT_OF_WORD, DIALECTS
from gateway.settings import Settings


class MessageOptions(NamedTuple):
    """Options of `gateway explain` that describe a message.

    A `body` of the form `@FILE` is read from a file. Each header is NAME=VALUE.
    """

    body: str
    headers: list[str]
    qos: int
    retain: bool
    content_type: str | None
    reply_to: str | None

    def data(self) -> bytes:
        """Return the body in bytes. Raises BadParameter if the file cannot be read."""
        if not self.body.startswith("@"):
            return self.body.encode()
        try:
            return Path(self.body[1:]).read_bytes()
        except OSError as error:
            raise typer.BadParameter(f"--body {self.body}: cannot be read: {error.strerror}") from error

    def properties(self) -> Properties:
        """Return the message's properties. Raises BadParameter for a header that is not NAME=VALUE."""
        headers = headers_of(self.headers)
        return Properties(content_type=self.content_type, reply_to=self.reply_to, headers=headers)


def explanation_of(
    settings: Settings,
    endpoint: str,
    address_options: Mapping[str, str | None],
    client: str,
    user: str,
    options: MessageOptions | None,
) -> Explanation:
    """Return what each route does with an address, or with a message if `options` describe one.

    `address_options` are the options of the address by name. Raises BadParameter for an unknown endpoint and
    an invalid address or message.
    """
    endpoints = settings.endpoints()
    protocol = endpoints.get(endpoint)
    if protocol is None:
        raise typer.BadParameter(f"unknown endpoint {endpoint!r}; known: {', '.join(endpoints)}")
    words = {word: text for word, text in address_options.items() if text is not None}
    other = {DIALECT_OF_WORD[word].name for word in words} - {protocol}
    if other:
        raise typer.BadParameter(
            f"endpoint {endpoint} uses {protocol}, but the address options are for {', '.join(sorted(other))}"
        )
    try:
        address, queue = DIALECTS[protocol].published(words)
    except NameRefused as error:
        raise typer.BadParameter(str(error)) from error
    router = Router(
        load(settings.mapping_files()),
        endpoints,
        domains=settings.listener_namespaces(),
        hops_max=settings.limits.hops_max,
    )
    sender = Sender(endpoint, client, user)
    message = None
    if options is not None:
        properties, durable = property_set(options.properties()), DURABLE_AT_QOS[options.qos]
        message = Message(
            address, options.data(), properties, options.qos, durable, options.retain, sender=sender
        )
    return explain(router, endpoint, address, address_options.get("queue") or queue, sender, message)
