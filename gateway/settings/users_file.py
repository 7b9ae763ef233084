"""Reader of the users file, which a running gateway reads again when it changes.

The file is a table of user names, with the same keys as `users` of the configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from gateway.documents import complaints, read, refuse_lost_end
from gateway.errors import ConfigurationError
from gateway.settings.limits import Section
from gateway.settings.tree import User, check_users


class _Whole(Section):
    """Pydantic model of a users file."""

    users: dict[str, User]


class UsersFile(NamedTuple):
    """Content of a users file: `users` by name, and the text of the file."""

    users: dict[str, User]
    text: str


def read_users(path: Path, before: str = "") -> UsersFile:
    """Read a users file.

    `before` is the text of the file when it was read last, or "" the first time. Raises ConfigurationError
    with one line for each fault (position, key and reason), and if the file seems to have lost its end since
    then.
    """
    document = read(path)
    refuse_lost_end(before, document.text, document.file, sections=False)
    stated = {} if document.content is None else document.content
    if not isinstance(stated, dict):
        raise ConfigurationError(
            "a users file must be a table of user names", file=document.file, line=1, column=1
        )
    try:
        whole = {"users": {str(name): given or {} for name, given in stated.items()}}
        found = _Whole.model_validate(whole).users
        check_users(found, elsewhere=True)
    except ValidationError as error:
        errors = []
        for complaint in complaints(error, _Whole):
            line, column = document.position(complaint.place[1:])
            # The faulty value of a hash may be a password: it is not shown.
            redacted = complaint._replace(place=complaint.place[1:], value=None).text
            errors.append(str(ConfigurationError(redacted, file=document.file, line=line, column=column)))
        raise ConfigurationError("\n".join(errors)) from error
    except ValueError as error:
        raise ConfigurationError(str(error), file=document.file) from error
    return UsersFile(found, document.text)
