"""Columns of the journal, and the buffers of a block that each uses.

Several columns share buffers: the columns of a sender have the same indices; those of an address or of a
property set are different texts of the same encoded entries.
"""

from __future__ import annotations

from itertools import chain
from typing import Final

from gateway.store.journal.format import ABSENT, TEXT_OF, Column, ColumnKind


class BufferNumbers:
    """Numbers of a block's buffers by name; `names` are in the order in which `Encoder.encode` lists them."""

    def __init__(self, *names: str) -> None:
        self._numbers = {name: number for number, name in enumerate(names)}

    def coded(self, name: str, indices: str, entries: str) -> Column:
        """Return a column whose rows are indices into a dictionary of texts.

        `name` is the column's name. `indices` is the name of the buffer of indices, `entries` the beginning
        of the names of the dictionary's buffers.
        """
        numbers = self._numbers
        valid = numbers.get(f"{entries} valid", ABSENT)
        buffers = (numbers[indices], valid, numbers[f"{entries} offsets"], numbers[f"{entries} bytes"])
        return Column(name, ColumnKind.CODED, buffers)

    def wire(self, name: str, text: str, indices: str, entries: str) -> Column:
        """Return a column whose rows are indices into a dictionary of encoded addresses or properties.

        This is kind 9 in format.py. `text` names the text, such as `scope`, that the column shows of each.
        `indices` is the name of the buffer of indices, `entries` the beginning of the names of the
        dictionary's buffers.
        """
        numbers = self._numbers
        buffers = (numbers[indices], *[numbers[f"{entries} {part}"] for part in WIRE])
        return Column(name, ColumnKind.CODED, (*buffers, TEXT_OF[text]))

    def plain(self, name: str, kind: ColumnKind) -> Column:
        """Return a column of this kind with buffers of its own, whose names begin with the column's name."""
        numbers = self._numbers
        valid = numbers.get(f"{name} valid", ABSENT)
        if kind is ColumnKind.BINARY:
            return Column(name, kind, (valid, numbers[f"{name} offsets"], numbers[f"{name} bytes"]))
        return Column(name, kind, (valid, numbers[name]))


def _dictionary(name: str) -> tuple[str, ...]:
    return f"{name} offsets", f"{name} bytes"


WIRE: Final = ("forms", "offsets", "bytes")


SENDER: Final = ("source_endpoint", "client", "user", "remote_address")
WAS_STORED: Final = "stored"
WAS_DELIVERED: Final = "delivered"
WAS_BURIED: Final = "dead letter"
WAS_DROPPED: Final = "dropped"
"""Values of `reason_text` for an outbox.

The outbox accepted the message, or the message left it in one of three ways.

The last two are followed by ": " and the reason.
"""
LEFT_OUTBOX: Final = f"^({WAS_DELIVERED}$|({WAS_BURIED}|{WAS_DROPPED})(: |$))"
"""Regular expression for messages that left an outbox. They have another row, of when they were accepted."""
WAS_UNROUTED: Final = "unrouted"
"""Value of `reason_text` for a message that was rejected before it had a target.

A limit or a rule refused it, or it was returned to its sender. The text is followed by ": " and the reason.
"""
NO_TRAFFIC: Final = f"{LEFT_OUTBOX}|^{WAS_UNROUTED}(: |$)"
"""Regular expression for rows that a replay of the traffic skips.

Their messages have another row, or were never accepted.
"""

RECIPIENT: Final = ("source_protocol", "route", "mapping_version", "target_endpoint", "target_protocol")
OUTCOME: Final = ("outcome", "reason", "reason_text")
ADDRESS: Final = ("address", "scope", "name")
SET: Final = ("properties", "message_id", "correlation_id", "content_type")
FLAGS: Final = ("assurance", "durable", "retain", "hops")
DELIVERED: Final = ("assurance", "durable", "retain")
NAMES: Final = BufferNumbers(
    *("received", "settled", "recipient", "result", "slot", "sender", "source", "target", "set"),
    *FLAGS,
    *(f"delivered_{name}" for name in DELIVERED),
    *("expires valid", "expires", "body_size", "body valid", "body offsets", "body bytes"),
    *chain.from_iterable(_dictionary(name) for name in (*SENDER, *RECIPIENT, *OUTCOME)),
    *(f"{name} {part}" for name in ("source", "target", "set") for part in WIRE),
)
COLUMNS: Final = (
    NAMES.plain("received", ColumnKind.TIME),
    NAMES.plain("settled", ColumnKind.TIME),
    NAMES.plain("slot", ColumnKind.UINT32),
    *(NAMES.coded(name, "sender", name) for name in SENDER),
    *(NAMES.coded(name, "recipient", name) for name in RECIPIENT),
    *(NAMES.coded(name, "result", name) for name in OUTCOME),
    *(NAMES.wire(f"{side}_{name}", name, side, side) for side in ("source", "target") for name in ADDRESS),
    NAMES.plain("assurance", ColumnKind.UINT8),
    *(NAMES.plain(name, ColumnKind.BOOLEAN) for name in ("durable", "retain")),
    NAMES.plain("hops", ColumnKind.UINT8),
    NAMES.plain("delivered_assurance", ColumnKind.UINT8),
    *(NAMES.plain(f"delivered_{name}", ColumnKind.BOOLEAN) for name in ("durable", "retain")),
    NAMES.plain("expires", ColumnKind.TIME),
    NAMES.plain("body_size", ColumnKind.UINT32),
    *(NAMES.wire(name, name, "set", "set") for name in SET),
    NAMES.plain("body", ColumnKind.BINARY),
)
