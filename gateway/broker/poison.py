"""Outcome of a message that cannot be encoded for a receiver, whatever the error.

A delivery encodes a batch at once. If that raises, it encodes the messages one by one: those that can be
encoded are sent, and each of the others has an outcome, becomes a dead letter, and is settled at this
receiver, which could never get it. An error after the encoding is not a message's fault and closes the
connection.
"""

from __future__ import annotations

from typing import Any, Final

from gateway.containment import contained
from gateway.errors import ProtocolError
from gateway.model.outcome import INTERNAL, Outcome, Reason, Verdict

UNREADABLE: Final = Outcome(Verdict.REJECTED, Reason.STORE, "the body cannot be read from disk")


def outcome_of_error(error: Exception, **facts: Any) -> Outcome:
    """Return the outcome of a message whose encoding or routing raised `error`.

    Unexpected errors are logged, with `facts` as fields.
    """
    if isinstance(error, ProtocolError):
        return Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error))
    contained("delivery", error, **facts)
    return INTERNAL
