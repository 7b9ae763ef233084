"""Options of the live formats, with checks; a misspelt name is refused with a suggestion.

Spark shows options in plans, event logs and error messages. So a URL must not contain a password: it is read
from a file where the connection is opened, or given as option `password`, which `spark.redaction.regex`
covers. No class here shows it in its repr.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from gateway.clients.wire import ConnectionOptions
from gateway.errors import PipelineError
from gateway.protocols import DIALECTS, OWN
from gateway.settings import parse_url

CONNECTION: Final = (
    *("url", "user", "password", "passwordFile", "caFile", "certFile", "keyFile", "timeoutSecs"),
)
"""Options of every format that connects to a broker."""

SPARKS: Final = frozenset(("path", "checkpointlocation", "queryname"))
"""Options that Spark itself adds."""


class QueryOptions:
    """Options of one query, whose names and values are checked; names are case-insensitive."""

    def __init__(self, format_: str, options: Mapping[str, str], known_names: Iterable[str]) -> None:
        """Accept the options that are in `known_names`. `format_` is the name of the format, for errors.

        Raises PipelineError for any other option, with a suggestion.
        """
        self.format = format_
        self._options = {name.lower(): value for name, value in options.items()}
        names = {name.lower(): name for name in known_names}
        for name in self._options:
            if name not in names and name not in SPARKS:
                near = get_close_matches(name, names, 1)
                hint = (
                    f"did you mean {names[near[0]]}?" if near else f"there are: {', '.join(names.values())}"
                )
                raise PipelineError(f"{format_} has no option {name}; {hint}")

    def __repr__(self) -> str:
        return f"Options({self.format})"

    def text(self, name: str, default: str | None = None) -> str | None:
        """Return the text of the option `name`, or `default` if the option is not given."""
        return self._options.get(name.lower(), default)

    def required_text(self, name: str, example: str) -> str:
        """Return the text of the required option `name`.

        Raises PipelineError, with `example` as a valid value, if the option is not given.
        """
        found = self.text(name)
        if not found:
            raise PipelineError(f"{self.format} needs option {name}, for example {example}")
        return found

    def listed(self, name: str) -> list[str]:
        """Return the texts in the option `name`: a JSON list, or texts with commas between them.

        Raises PipelineError for an invalid JSON list.
        """
        stated = (self.text(name) or "").strip()
        if not stated.startswith("["):
            return [one.strip() for one in stated.split(",") if one.strip()]
        try:
            found = json.loads(stated)
        except ValueError as error:
            raise PipelineError(f"option {name} begins like a JSON list but is invalid: {error}") from error
        if not all(isinstance(one, str) for one in found):
            raise PipelineError(f"option {name}: a list of texts, not {stated}")
        return list(found)

    def integer(self, name: str, default: int, *, least: int = 1, most: int = 1 << 31) -> int:
        """Return the value of the option `name` as an integer, or `default` if the option is not given.

        Raises PipelineError if the value is not an integer from `least` to `most`.
        """
        return int(self.number(name, default, least=least, most=most, description="a whole number", kind=int))

    def number(
        self,
        name: str,
        default: float,
        *,
        least: float = 0.0,
        most: float = 1e9,
        description: str = "a number",
        kind: type[float] | type[int] = float,
    ) -> float:
        """Return the value of the option `name` as a number, or `default` if the option is not given.

        `kind` is the type of the number, and `description` names it in errors. Raises PipelineError if the
        value is not such a number from `least` to `most`.
        """
        stated = self.text(name)
        if stated is None:
            return default
        try:
            found = kind(stated)
        except ValueError as error:
            raise PipelineError(f"option {name} is {description}, not {stated!r}") from error
        if not least <= found <= most:
            raise PipelineError(f"option {name} is {description} from {least} to {most}, not {stated}")
        return found

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        """Return the value of the option `name`, or `default` if the option is not given.

        Raises PipelineError if the value is not one of `choices`.
        """
        found = self.text(name, default) or default
        if found not in choices:
            raise PipelineError(f"option {name} is one of {', '.join(choices)}, not {found!r}")
        return found

    def access(self, protocol: str | None = None) -> ConnectionOptions:
        """Return address and credentials of the broker, as the options such as `url` define them.

        The password file is read. Raises PipelineError if the options are invalid, or if `url` is not a URL
        of `protocol` (None: any protocol).
        """
        url = self.required_text("url", f"{_scheme(protocol)}://broker.internal")
        try:
            target = parse_url(url)
        except ValueError as error:
            raise PipelineError(f"option url: {error}") from error
        if protocol is not None and target.protocol != protocol:
            raise PipelineError(f"{self.format} uses {protocol}, but url is for {target.protocol}")
        if target.password:
            raise PipelineError(
                "a password in option url would appear in plans and logs; use option passwordFile"
            )
        password = self.text("password") or ""
        file = self.text("passwordFile")
        if file is not None:
            try:
                password = Path(file).read_text(encoding="utf-8").rstrip("\r\n")
            except OSError as error:
                raise PipelineError(f"option passwordFile: {file}: {error.strerror}") from error
        user = self.text("user") or target.username
        return ConnectionOptions(
            target._replace(username=user, password=password),
            self.number("timeoutSecs", 30.0, least=0.1),
            self.text("caFile"),
            self.text("certFile"),
            self.text("keyFile"),
        )


def _scheme(protocol: str | None) -> str:
    """Return the URL scheme of a protocol over TLS, for an example in an error message."""
    dialect = OWN[0] if protocol is None else DIALECTS[protocol]
    return next(one.name for one in dialect.schemes if one.transport == "tls")
