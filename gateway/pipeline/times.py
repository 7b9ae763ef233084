"""Parsing of times in command-line options."""

from __future__ import annotations

from datetime import UTC, datetime

from gateway.errors import PipelineError


def moment(text: str) -> datetime:
    """Parse a time in ISO 8601. A time without a zone is UTC. Raises PipelineError for any other text."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise PipelineError(
            f"{text!r} is not a time; write 2026-05-01T06:00 or 2026-05-01T06:00:00.5Z"
        ) from error
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
