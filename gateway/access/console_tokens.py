"""Bearer tokens of the console: made with a name, listed by it, and revoked.

Only a digest of each is kept, in one file that nobody else may read. The first start makes one for the
administrator and writes that into a file beside it. And each start makes one for the command line, which
lasts as long as the process: it stands in a folder that only the same user of this machine can look into,
under the number of the port, where the command line finds it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import tempfile
import time
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import orjson
import structlog

from gateway.access.principal import Principal
from gateway.errors import ConfigurationError

TOKENS_MAX: Final = 1_000
NAME_MAX: Final = 100
TOKEN_OCTETS: Final = 32
PREFIX: Final = "gw_"  # so that people and scanners of repositories know one
FILE: Final = "tokens.json"
ADMINISTRATOR: Final = "administrator"
COMMAND_LINE: Final = "command line"

log = structlog.get_logger()


class TokenRefused(Exception):
    """There can be no such token; the text says why."""


class TokenInTheWay(TokenRefused):
    """What there is already is in the way: the name is taken, or there are too many."""


class Maker(NamedTuple):
    """The user who made a token, itself or by another token: the token ends with it. `stamp` is the user's at
    that time (`Access.stamp`), `roles` those that its back end gave it."""

    name: str
    backend: str
    roles: tuple[str, ...]
    stamp: str

    @property
    def principal(self) -> Principal:
        """The user, without what only its login said."""
        return Principal(self.name, roles=self.roles, backend=self.backend)


class Token(NamedTuple):
    """What is known of one. Times are seconds since 1970; `expires` None: never. `bodies`: it shows bodies of
    messages, as one that may `write` always does. `maker` None: an administrator made it."""

    name: str
    digest: str
    console: Literal["read", "write"]
    by: str
    made: float
    expires: float | None = None
    bodies: bool = False
    maker: Maker | None = None

    def shown(self) -> dict[str, Any]:
        """For people and programs."""
        row = self._asdict()
        del row["digest"]
        row["user"] = None if self.maker is None else self.maker.name
        del row["maker"]
        return row

    def kept(self) -> dict[str, Any]:
        """Return what the file has of it."""
        return self._asdict() | {"maker": None if self.maker is None else self.maker._asdict()}


class ConsoleTokens:
    """The tokens of a gateway. `folder` None: they are in memory only."""

    def __init__(self, folder: Path | None = None) -> None:
        """Raises ConfigurationError when the folder or the file in it cannot be used."""
        self._folder = folder
        self._tokens: dict[str, Token] = {}  # by digest
        self._temporary: dict[str, Token] = {}
        if folder is None:
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if (folder / FILE).exists():
                self._read(folder / FILE)
            else:
                text = self.make(ADMINISTRATOR, "write", by="the first start")
                written(folder / f"{ADMINISTRATOR}.token", text + "\n")
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigurationError(f"{folder}: the console's tokens cannot be used: {error}") from error

    def _read(self, path: Path) -> None:
        for given in orjson.loads(path.read_bytes())["tokens"][:TOKENS_MAX]:
            maker = given.get("maker")
            if maker is not None:
                given["maker"] = Maker(**maker | {"roles": tuple(maker["roles"])})
            token = Token(**given)
            self._tokens[token.digest] = token

    def _keep(self) -> None:
        if self._folder is not None:
            document = {"tokens": [token.kept() for token in self._tokens.values()]}
            written(self._folder / FILE, orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())

    def make(
        self,
        name: str,
        console: Literal["read", "write"],
        *,
        by: str,
        expires: float | None = None,
        bodies: bool = False,
        maker: Maker | None = None,
    ) -> str:
        """A new one; its text is said this once. Raises TokenRefused, and OSError when it cannot be kept."""
        if not 0 < len(name) <= NAME_MAX or not name.isprintable():
            raise TokenRefused(f"a token's name has 1 to {NAME_MAX} characters")
        now = time.time()
        self._tokens = {
            digest: one for digest, one in self._tokens.items() if one.expires is None or one.expires > now
        }
        if any(token.name == name for token in self._tokens.values()):
            raise TokenInTheWay(f"there is a token with the name {name!r}")
        if len(self._tokens) >= TOKENS_MAX:
            raise TokenInTheWay(f"there are {TOKENS_MAX} tokens")
        text, digest = _new()
        self._tokens[digest] = Token(name, digest, console, by, now, expires, bodies, maker)
        try:
            self._keep()
        except OSError:
            del self._tokens[digest]
            raise
        return text

    def make_temporary(self, name: str) -> str:
        """One that may do everything and lasts as long as the process."""
        text, digest = _new()
        self._temporary[digest] = Token(name, digest, "write", "this process", time.time())
        return text

    def revoke(self, name: str) -> bool:
        """It opens nothing any more; False: there is none of that name. Raises OSError."""
        before = self._tokens
        self._tokens = {digest: one for digest, one in before.items() if one.name != name}
        if len(self._tokens) == len(before):
            return False
        try:
            self._keep()
        except OSError:
            self._tokens = before
            raise
        return True

    def find(self, text: str) -> Token | None:
        """The token that this is the text of; None: none, or one that is over."""
        return self.by_digest(_digest(text))

    def holds(self, digest: str) -> bool:
        """Whether the token with this digest opens anything still."""
        token = self._tokens.get(digest) or self._temporary.get(digest)
        return token is not None and (token.expires is None or token.expires > time.time())

    def by_digest(self, digest: str) -> Token | None:
        """Return the token with this digest, or None if it opens nothing any more."""
        return (self._tokens.get(digest) or self._temporary.get(digest)) if self.holds(digest) else None

    def all(self) -> list[Token]:
        """Those that were made to stay."""
        return list(self._tokens.values())


def _new() -> tuple[str, str]:
    text = PREFIX + secrets.token_urlsafe(TOKEN_OCTETS)
    return text, _digest(text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def written(path: Path, text: str) -> None:
    """Write a file that only its owner may read; it is there whole, or as it was. Raises OSError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


# Where a process and the command line of the same user meet.


def meeting_places() -> list[Path]:
    """Folders of this user alone, the best one first; there may be none, where nothing can be written."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    found = [Path(given) / "gateway"] if given else []
    try:
        found.append(Path(tempfile.gettempdir()) / f"gateway-{os.geteuid()}")
    except FileNotFoundError as error:
        log.debug("there is no folder for temporary files", error=str(error))
    return found


def _is_ours(folder: Path) -> bool:
    """Whether nobody else can have put something there."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def leave_token(port: int, text: str) -> Path | None:
    """Put the command line's token where it looks; returns the file, None when there is no such place."""
    for folder in meeting_places():
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if _is_ours(folder):
                written(folder / f"{port}.token", text + "\n")
                return folder / f"{port}.token"
        except OSError as error:
            log.info("no place for the command line's token", folder=str(folder), error=str(error))
    return None


def left_tokens(port: int) -> list[Path]:
    """The files in which a process of this user may have left a token."""
    found = []
    for folder in meeting_places():
        try:
            if _is_ours(folder) and (folder / f"{port}.token").is_file():
                found.append(folder / f"{port}.token")
        except OSError:
            continue  # it is not there
    return found
