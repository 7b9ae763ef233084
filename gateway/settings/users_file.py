"""A file with users, which a gateway reads again when it changes: names, with the same keys as `users`."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from gateway.documents import complaints, read
from gateway.errors import ConfigurationError
from gateway.settings.limits import Section
from gateway.settings.tree import User, check_users


class _Whole(Section):
    """What such a file says."""

    users: dict[str, User]


def read_users(path: Path) -> dict[str, User]:
    """The users of a file. Raises ConfigurationError with one line per fault: place, key and reason."""
    document = read(path)
    stated = {} if document.content is None else document.content
    if not isinstance(stated, dict):
        raise ConfigurationError("users are a table of names", file=document.file, line=1, column=1)
    try:
        whole = {"users": {str(name): given or {} for name, given in stated.items()}}
        found = _Whole.model_validate(whole).users
        check_users(found, elsewhere=True)
    except ValidationError as error:
        told = []
        for complaint in complaints(error, _Whole):
            line, column = document.position(complaint.place[1:])
            # What is wrong with a hash may be a password: it is not repeated.
            shown = complaint._replace(place=complaint.place[1:], given=None).text
            told.append(str(ConfigurationError(shown, file=document.file, line=line, column=column)))
        raise ConfigurationError("\n".join(told)) from error
    except ValueError as error:
        raise ConfigurationError(str(error), file=document.file) from error
    return found
