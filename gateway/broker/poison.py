"""A message that cannot be said to a receiver, whatever it is that goes wrong.

Whoever delivers encodes a batch in one go. When that raises, it encodes one by one: the sound ones go out,
and each of the others has an outcome, becomes a dead letter, and is done with at this receiver, which would
only meet it again. What goes wrong behind the encoding is no message's fault and costs the connection.
"""

from __future__ import annotations

from typing import Any

from gateway.containment import contained
from gateway.errors import ProtocolError
from gateway.model.outcome import INTERNAL, Outcome, Reason, Verdict


def poisoned(error: Exception, **facts: Any) -> Outcome:
    """What becomes of the one message whose encoding raised `error`; `facts` are for the log."""
    if isinstance(error, ProtocolError):
        return Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error))
    contained("delivery", error, **facts)
    return INTERNAL
