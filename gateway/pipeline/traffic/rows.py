"""Conversion of a journal row to its message."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from gateway.errors import RemoteProtocolError
from gateway.model.address import Address
from gateway.model.message import NEVER, Message, Sender
from gateway.model.properties import NO_PROPERTIES, Properties, PropertySet
from gateway.protocols import DIALECTS
from gateway.store.journal.columns import NO_TRAFFIC
from gateway.store.properties import decode_properties

NOTHING: Final = "{}"
ASIDE: Final = f"reason_text rlike '{NO_TRAFFIC}'"
"""SQL condition for rows that are no traffic: messages that left an outbox, which have another row from when
they were accepted, and messages rejected before they had a target."""


def address_of(protocol: str, scope: str | None, name: str | None) -> Address:
    """Return the address that a journal row describes in its columns protocol, scope and name."""
    dialect = DIALECTS[protocol]
    return dialect.address(scope or dialect.scope_default, name or "")


def property_set_of(text: str | None) -> PropertySet:
    """Return the property set of a journal row; `text` is its properties as JSON text.

    Decoding the set raises RemoteProtocolError if the properties were not recorded.
    """
    if not text or text == NOTHING:
        return NO_PROPERTIES
    return PropertySet("journal", text.encode(), _decode)


def _decode(data: bytes) -> Properties:
    try:
        return decode_properties(data)
    except (ValueError, KeyError, TypeError) as error:
        raise RemoteProtocolError("the journal has not recorded these properties", reason=0) from error


def message_of(row: Mapping[str, Any]) -> Message:
    """Return the message of a journal row as it was received. For missing columns, defaults are used."""
    expires = row.get("expires")
    sender = Sender(row["source_endpoint"], row.get("client") or "", row.get("user") or "")
    return Message(
        address_of(row["source_protocol"], row.get("source_scope"), row.get("source_name")),
        row.get("body") or b"",
        property_set_of(row.get("properties")),
        row.get("assurance") or 0,
        bool(row.get("durable")),
        bool(row.get("retain")),
        expires.timestamp() if isinstance(expires, datetime) else NEVER,
        row.get("hops") or 0,
        sender,
    )
